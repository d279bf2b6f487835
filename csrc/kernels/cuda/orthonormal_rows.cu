/* orthonormal_rows.cu - ORTHONORMALIZE and FINITE: host/lowrank_body.h's Gram-Schmidt, one block of
 * threads a factor.
 *
 * Rows follow one another, and so do the sums of a row. The elements of a row are parallel, and so
 * are the products of a sum, which 16 lanes then add in the host's order. Every value that decides
 * a branch is the same in all threads of a block.
 */

enum { SW_PRODUCTS = 1024 };

/* Add halves of the lanes: 8, 4, 2, 1. */
SW_INLINE float sw_lanes_sum(float *lane)
{
    for (unsigned half = SW_LANES / 2; half > 0; half /= 2)
        for (unsigned i = 0; i < half; ++i)
            lane[i] = lane[i] + lane[i + half];
    return lane[0];
}

/* The shared memory of a block for one factor. */
struct sw_row_work {
    float product[SW_PRODUCTS], lane[SW_LANES], sum;
    unsigned most;
};

SW_INLINE float sw_row_dot(sw_row_work &work, const float *a, const float *b, sw_u64 stride)
{
    for (unsigned t = threadIdx.x; t < SW_LANES; t += blockDim.x)
        work.lane[t] = 0.0f;
    for (sw_u64 begin = 0; begin < stride; begin += SW_PRODUCTS) {
        const unsigned count = (unsigned)sw_low(stride - begin, SW_PRODUCTS);
        for (unsigned t = threadIdx.x; t < count; t += blockDim.x)
            work.product[t] = a[begin + t] * b[begin + t];
        __syncthreads();
        for (unsigned t = threadIdx.x; t < SW_LANES; t += blockDim.x) {
            float sum = work.lane[t];
            for (unsigned i = t; i < count; i += SW_LANES)
                sum = sum + work.product[i];
            work.lane[t] = sum;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0)
        work.sum = sw_lanes_sum(work.lane);
    __syncthreads();
    const float sum = work.sum;
    __syncthreads();
    return sum;
}

SW_INLINE void sw_row_sub(float *a, const float *b, float factor, sw_u64 stride)
{
    for (sw_u64 j = threadIdx.x; j < stride; j += blockDim.x)
        a[j] = a[j] - factor * b[j];
    __syncthreads();
}

SW_INLINE void sw_row_scale(float *a, float factor, sw_u64 stride)
{
    for (sw_u64 j = threadIdx.x; j < stride; j += blockDim.x)
        a[j] = a[j] * factor;
    __syncthreads();
}

/* Return the bits of the greatest magnitude. */
SW_INLINE unsigned sw_row_most(sw_row_work &work, const float *a, sw_u64 stride)
{
    if (threadIdx.x == 0)
        work.most = 0;
    __syncthreads();
    unsigned own = 0;
    for (sw_u64 j = threadIdx.x; j < stride; j += blockDim.x) {
        const unsigned magnitude = __float_as_uint(a[j]) & 0x7fffffffu;
        own = magnitude > own ? magnitude : own;
    }
    atomicMax(&work.most, own);
    __syncthreads();
    const unsigned most = work.most;
    __syncthreads();
    return most;
}

SW_INLINE bool sw_row_normalize_range(sw_row_work &work, float *a, sw_u64 stride)
{
    unsigned most = sw_row_most(work, a, stride);
    if (most == 0 || most >= 0x7f800000u)
        return false;
    for (; most >> 23 < 64; most = sw_row_most(work, a, stride))
        sw_row_scale(a, __uint_as_float(191u << 23), stride); /* 2^64 */
    for (; most >> 23 > 190; most = sw_row_most(work, a, stride))
        sw_row_scale(a, __uint_as_float(63u << 23), stride); /* 2^-64 */
    sw_row_scale(a, __uint_as_float((254u - (most >> 23)) << 23), stride);
    return true;
}

SW_INLINE float sw_random_at(sw_u64 seed, sw_u64 place)
{
    sw_u64 z = seed + (place + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (float)(int)(unsigned)((z ^ (z >> 31)) >> 32) * __uint_as_float(96u << 23); /* 2^-31 */
}

SW_INLINE void sw_row_reseed(float *a, sw_u64 count, sw_u64 stride, sw_u64 seed, sw_u64 k,
                             sw_u64 attempt)
{
    const sw_u64 random_attempts = 4;
    for (sw_u64 j = threadIdx.x; j < stride; j += blockDim.x) {
        float value = 0.0f;
        if (attempt < random_attempts)
            value = j < count ? sw_random_at(seed + k * 4 + attempt, j) : 0.0f;
        else if (j == (attempt - random_attempts) % count)
            value = 1.0f;
        a[j] = value;
    }
    __syncthreads();
}

SW_INLINE bool sw_row_orthogonalize(sw_row_work &work, float *factor, sw_u64 k, sw_u64 stride)
{
    float *row = factor + k * stride;
    float before = __fsqrt_rn(sw_row_dot(work, row, row, stride));
    const float first = before;
    for (int sweep = 0; sweep < 5; ++sweep) {
        for (sw_u64 l = 0; l < k; ++l)
            sw_row_sub(row, factor + l * stride, sw_row_dot(work, row, factor + l * stride, stride),
                       stride);
        const float after = __fsqrt_rn(sw_row_dot(work, row, row, stride));
        if (!(after > 4e-6f * first))
            return false;
        if (sweep >= 1 && after > 0.7f * before)
            break;
        before = after;
    }
    sw_row_scale(row, __fdiv_rn(1.0f, __fsqrt_rn(sw_row_dot(work, row, row, stride))), stride);
    return true;
}

SW_INLINE void sw_factor_orthonormalize(sw_row_work &work, const sw_factor_args &f)
{
    const sw_u64 stride = sw_factor_stride(f.count);
    float *factor = (float *)f.to;
    for (sw_u64 i = threadIdx.x; f.to != f.from && i < f.rank * stride; i += blockDim.x)
        factor[i] = ((const float *)f.from)[i];
    __syncthreads();
    for (sw_u64 k = 0; k < f.rank; ++k) {
        float *row = factor + k * stride;
        bool done = sw_row_normalize_range(work, row, stride) &&
                    sw_row_orthogonalize(work, factor, k, stride);
        for (sw_u64 attempt = 0; !done; ++attempt) {
            sw_row_reseed(row, f.count, stride, f.seed, k, attempt);
            done = sw_row_orthogonalize(work, factor, k, stride);
        }
    }
}

SW_KERNEL sw_orthonormalize(const sw_orthonormalize_args a)
{
    __shared__ sw_row_work work;
    if (sw_verdict_of(a.verdict) != 0)
        return;
    for (unsigned f = blockIdx.x; f < (unsigned)a.factor_count; f += gridDim.x)
        sw_factor_orthonormalize(work, a.factor[f]);
}

/* Several threads may find one; all write the same value. */
SW_KERNEL sw_finite(const sw_finite_args a)
{
    int *verdict = (int *)a.verdict;
    SW_EACH(i, a.numel)
    if ((__float_as_uint(((const float *)a.values)[i]) & 0x7fffffffu) >= 0x7f800000u &&
        *verdict == 0)
        *verdict = a.refusal;
}
