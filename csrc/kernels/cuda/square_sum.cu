/* square_sum.cu - NORM: the exact sum of squares, as digits of 32 bits.
 *
 * Idea: a square is an integer of at most 106 bits times a power of two; shifted to a digit's
 * boundary it adds at most 5 digits. Integer additions commute, so neither the grid nor the order
 * of the atomics can be seen in the sum. A block of threads adds in shared memory first.
 */

SW_INLINE void sw_add_digits(sw_u64 *digit, sw_u64 high, sw_u64 low, int offset)
{
    int at = offset >> 5, shift = offset & 31;
    sw_u64 top = shift ? high >> (64 - shift) : 0;
    high = shift ? high << shift | low >> (64 - shift) : high;
    low <<= shift;
    const sw_u64 part[5] = {low & 0xffffffffu, low >> 32, high & 0xffffffffu, high >> 32, top};
    for (int k = 0; k < 5; ++k)
        if (part[k])
            atomicAdd(&digit[at + k], part[k]);
}

/* Adds mantissa^2 * 2^(2 exponent). */
SW_INLINE void sw_add_square(sw_u64 *digit, sw_u64 mantissa, int exponent)
{
    sw_add_digits(digit, __umul64hi(mantissa, mantissa), mantissa * mantissa,
                  2 * exponent - SW_ARG_LOWEST_EXPONENT);
}

SW_INLINE void sw_add_float(sw_u64 *sum, float x)
{
    unsigned bits = __float_as_uint(x), exponent = (bits >> 23) & 255u, mantissa = bits & 0x7fffffu;
    if (exponent == 255u)
        atomicAdd(&sum[SW_ARG_DIGIT_COUNT + (mantissa ? 1 : 0)], 1ull);
    else if (exponent | mantissa)
        sw_add_square(sum, exponent ? mantissa | 0x800000u : mantissa,
                      (int)(exponent ? exponent : 1u) - 150);
}

SW_INLINE void sw_add_double(sw_u64 *sum, double x)
{
    sw_u64 bits = (sw_u64)__double_as_longlong(x), mantissa = bits & 0xfffffffffffffull;
    int exponent = (int)(bits >> 52) & 2047;
    if (exponent == 2047)
        atomicAdd(&sum[SW_ARG_DIGIT_COUNT + (mantissa ? 1 : 0)], 1ull);
    else if (exponent || mantissa)
        sw_add_square(sum, exponent ? mantissa | 0x10000000000000ull : mantissa,
                      (exponent ? exponent : 1) - 1075);
}

SW_KERNEL sw_norm(const sw_norm_args a)
{
    enum { WORDS = SW_ARG_DIGIT_COUNT + 2 }; /* digits, infinite, nan */
    __shared__ sw_u64 mine[WORDS];
    sw_u64 *sum = (sw_u64 *)a.sum;
    for (unsigned w = threadIdx.x; w < WORDS; w += blockDim.x)
        mine[w] = 0;
    __syncthreads();
    SW_EACH(i, a.numel)
    {
        if (a.dtype == SW_ARG_FLOAT64)
            sw_add_double(mine, ((const double *)a.data)[i]);
        else
            sw_add_float(mine, sw_load(a.data, i, a.dtype));
    }
    __syncthreads();
    for (unsigned w = threadIdx.x; w < WORDS; w += blockDim.x)
        if (mine[w])
            atomicAdd(&sum[w], mine[w]);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        atomicAdd(&sum[WORDS], a.numel); /* additions: the bound of what a digit holds */
}
