/* block_codec.cu - QUANTIZE, DEQUANTIZE, RESIDUAL, VERDICT, OWE: host/block_body.h's records, one block of
 * threads a record where it is made.
 */

SW_INLINE float sw_value(const sw_quantize_args &a, sw_u64 i)
{
    if (i >= a.numel)
        return 0.0f;
    float value = ((const float *)a.source)[i];
    return a.error ? value + ((const float *)a.error)[i] : value;
}

SW_INLINE unsigned sw_code(float value, float inverse)
{
    const float rounder = 12582912.0f; /* 1.5 * 2^23: the sum rounds to nearest even */
    return (unsigned)(int)((value * inverse + rounder) - rounder);
}

SW_INLINE sw_u64 sw_record_bytes(sw_u64 block, int bits)
{
    return 4 + block * (sw_u64)bits / 8;
}

SW_KERNEL sw_quantize(const sw_quantize_args a)
{
    __shared__ unsigned most;
    const sw_u64 records = (a.numel + a.block - 1) / a.block;
    const float levels = a.bits == 8 ? 127.0f : 7.0f;
    const unsigned per_word = 32u / (unsigned)a.bits, mask = a.bits == 8 ? 255u : 15u;
    for (sw_u64 r = blockIdx.x; r < records; r += gridDim.x) {
        const sw_u64 start = r * a.block;
        unsigned *record =
            (unsigned *)((unsigned char *)a.records + r * sw_record_bytes(a.block, a.bits));
        __syncthreads();
        if (threadIdx.x == 0)
            most = 0;
        __syncthreads();
        unsigned own = 0;
        for (sw_u64 i = threadIdx.x; i < a.block; i += blockDim.x) {
            unsigned magnitude = __float_as_uint(sw_value(a, start + i)) & 0x7fffffffu;
            own = magnitude > own ? magnitude : own;
        }
        atomicMax(&most, own);
        __syncthreads();
        const unsigned bits = most;
        const float greatest = __uint_as_float(bits);
        const bool finite = bits < 0x7f800000u, empty = !finite || bits < (7u << 23); /* 2^-120 */
        const float inverse = empty ? 0.0f : __fdiv_rn(levels, greatest);
        if (threadIdx.x == 0)
            record[0] = empty ? (finite ? 0u : 0x7fc00000u)
                              : __float_as_uint(__fdiv_rn(greatest, levels));
        for (sw_u64 w = threadIdx.x; w < a.block / per_word; w += blockDim.x) {
            unsigned word = 0;
            for (unsigned k = 0; !empty && k < per_word; ++k)
                word |= (sw_code(sw_value(a, start + w * per_word + k), inverse) & mask)
                        << (k * (unsigned)a.bits);
            record[1 + w] = word;
        }
    }
}

/* Element i as the records have it. */
SW_INLINE float sw_decoded(const void *records, sw_u64 i, sw_u64 block, int bits)
{
    const sw_u64 r = i / block, at = i % block;
    const unsigned char *record = (const unsigned char *)records + r * sw_record_bytes(block, bits);
    const float scale = __uint_as_float(*(const unsigned *)record);
    int code;
    if (bits == 8)
        code = (signed char)record[4 + at];
    else
        code = (int)(((record[4 + at / 2] >> (at % 2 ? 4 : 0)) & 15u) ^ 8u) - 8;
    return scale * (float)code;
}

SW_KERNEL sw_dequantize(const sw_dequantize_args a)
{
    float *out = (float *)a.out;
    SW_EACH(i, a.numel)
    {
        float value = sw_decoded(a.records, i, a.block, a.bits);
        out[i] = a.add ? out[i] + value : value;
    }
}

SW_KERNEL sw_residual(const sw_residual_args a)
{
    float *error = (float *)a.error;
    if (a.verdict && *(const int *)a.verdict != 0)
        return;
    SW_EACH(i, a.numel)
    error[i] = (((const float *)a.source)[i] + error[i]) -
               sw_decoded(a.records, i, a.block, a.bits);
}

/* Whoever finds one writes the same. */
SW_KERNEL sw_verdict(const sw_verdict_args a)
{
    const sw_u64 bytes = sw_record_bytes(a.block, a.bits);
    SW_EACH(r, a.count)
    {
        const unsigned scale = *(const unsigned *)((const unsigned char *)a.records + r * bytes);
        if ((scale & 0x7fffffffu) > 0x7f800000u)
            *(int *)a.verdict = 1;
    }
}

SW_KERNEL sw_owe(const sw_owe_args a)
{
    float *error = (float *)a.error;
    if (*(const int *)a.verdict != 0)
        return;
    SW_EACH(i, a.numel)
    error[i] = error[i] + ((const float *)a.rest)[i] * a.scale;
}
