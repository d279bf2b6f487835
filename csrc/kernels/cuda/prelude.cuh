/* prelude.cuh - what the device kernels share: loops, dtypes, halves by integer arithmetic.
 *
 * Idea: the text is compiled without headers and without contraction (--fmad=false), with IEEE
 * division and square root and with subnormals, so each operation rounds as the host's does; the
 * halves use the host's own integer formulas (host/half_body.h). A multiply-add that is meant is
 * written __fmaf_rn.
 */
#define SW_KERNEL extern "C" __global__ void
/* With so few registers that a multiprocessor has `blocks` blocks of 256 threads at once: as many
 * as its contract's grid has for each, so that none comes behind the others. */
#define SW_KERNEL_OF(blocks) extern "C" __global__ void __launch_bounds__(256, blocks)
#define SW_INLINE static __device__ __forceinline__
#define SW_METHOD __device__ __forceinline__
#define SW_RARELY static __device__ __noinline__ /* what would only make a loop longer */

/* Each element of [0, numel) meets one thread of the grid. */
#define SW_EACH(i, numel)                                                                \
    for (sw_u64 i = (sw_u64)blockIdx.x * blockDim.x + threadIdx.x,                       \
                step_ = (sw_u64)gridDim.x * blockDim.x, end_ = (numel);                  \
         i < end_; i += step_)

SW_INLINE sw_u64 sw_parts(sw_u64 count, sw_u64 each)
{
    return (count + each - 1) / each;
}

SW_INLINE sw_u64 sw_low(sw_u64 a, sw_u64 b)
{
    return a < b ? a : b;
}

SW_INLINE float sw_bfloat16_widen(unsigned short half)
{
    return __uint_as_float((unsigned)half << 16);
}

SW_INLINE unsigned short sw_bfloat16_narrow(float value)
{
    unsigned bits = __float_as_uint(value);
    unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (unsigned short)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

SW_INLINE float sw_float16_widen(unsigned short half)
{
    unsigned magnitude = (unsigned)(half & 0x7fffu) << 13;
    unsigned moved = magnitude + (112u << 23);
    unsigned subnormal = __float_as_uint(__uint_as_float(magnitude + (113u << 23)) -
                                         __uint_as_float(113u << 23));
    unsigned bits = magnitude >= (31u << 23) ? moved + (112u << 23) : moved;
    bits = magnitude < (1u << 23) ? subnormal : bits;
    return __uint_as_float(bits | (unsigned)(half & 0x8000u) << 16);
}

SW_INLINE unsigned short sw_float16_narrow(float value)
{
    unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    unsigned subnormal = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - (126u << 23);
    unsigned normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    unsigned half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= (143u << 23) ? 0x7c00u : half;
    half |= (bits >> 16) & 0x8000u;
    return (unsigned short)(magnitude > 0x7f800000u ? 0x7e00u : half);
}

/* Element i of an array of float32, float16 or bfloat16. */
SW_INLINE float sw_load(const void *array, sw_u64 i, int dtype)
{
    if (dtype == SW_ARG_FLOAT32)
        return ((const float *)array)[i];
    unsigned short half = ((const unsigned short *)array)[i];
    return dtype == SW_ARG_BFLOAT16 ? sw_bfloat16_widen(half) : sw_float16_widen(half);
}

SW_INLINE void sw_store(void *array, sw_u64 i, int dtype, float value)
{
    if (dtype == SW_ARG_FLOAT32)
        ((float *)array)[i] = value;
    else
        ((unsigned short *)array)[i] =
            dtype == SW_ARG_BFLOAT16 ? sw_bfloat16_narrow(value) : sw_float16_narrow(value);
}

/* ---- 16 bytes at once ---- */

struct __align__(16) sw_lane16 {
    unsigned word[4];
};

/* Elements in front of the first boundary of `width` bytes (a power of two) in an array; at most
 * `numel`. */
SW_INLINE sw_u64 sw_head(const void *array, unsigned width, unsigned element_bytes, sw_u64 numel)
{
    return sw_low((unsigned)(-(sw_u64)array & (width - 1)) / element_bytes, numel);
}

/* ---- warps ---- */

/* The calling thread's warp: whole, but for the last one of a block that is no multiple of 32. */
SW_INLINE unsigned sw_warp_count()
{
    return (unsigned)sw_low(blockDim.x - (threadIdx.x & ~31u), 32);
}

SW_INLINE unsigned sw_warp_mask(unsigned count)
{
    return 0xffffffffu >> (32 - count);
}

/* Lane 0 gets the sum of all lanes. */
SW_INLINE sw_u64 sw_warp_sum(sw_u64 value)
{
    const unsigned count = sw_warp_count(), lane = threadIdx.x & 31u;
    for (unsigned step = 16; step > 0; step /= 2) {
        const sw_u64 other = __shfl_down_sync(sw_warp_mask(count), value, step);
        value += lane + step < count ? other : 0;
    }
    return value;
}

/* All lanes get the greatest. */
SW_INLINE unsigned sw_warp_most(unsigned value)
{
    const unsigned count = sw_warp_count(), lane = threadIdx.x & 31u;
    for (unsigned step = 16; step > 0; step /= 2) {
        const unsigned other = __shfl_down_sync(sw_warp_mask(count), value, step);
        value = lane + step < count && other > value ? other : value;
    }
    return __shfl_sync(sw_warp_mask(count), value, 0);
}
