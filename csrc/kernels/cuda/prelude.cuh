/* prelude.cuh - definitions that the device kernels share: loops, dtypes, halves by integers.
 *
 * The text is compiled without headers and without contraction (--fmad=false), with IEEE division
 * and square root and with subnormals, so each operation rounds as on the host. Halves are narrowed
 * by the host's integer formulas (host/half_body.h). An intended multiply-add is written __fmaf_rn.
 */
#define SW_KERNEL extern "C" __global__ void
/* Limit registers so that a multiprocessor runs `blocks` blocks of 256 threads at once: as many as
 * the contract's grid has for each, so that no block starts after the others. */
#define SW_KERNEL_OF(blocks) extern "C" __global__ void __launch_bounds__(256, blocks)
#define SW_INLINE static __device__ __forceinline__
#define SW_METHOD __device__ __forceinline__
#define SW_RARELY static __device__ __noinline__ /* rare code, kept out of loops */

/* Give each element of [0, numel) to one thread of the grid. */
#define SW_EACH(i, numel)                                               \
    for (sw_u64 i = (sw_u64)blockIdx.x * blockDim.x + threadIdx.x,      \
                step_ = (sw_u64)gridDim.x * blockDim.x, end_ = (numel); \
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

/* The bits, moved to float32's position, are the value times 2^-112, subnormals too. Infinities and
 * NaN become 2^16 and more. */
SW_INLINE float sw_float16_widen(unsigned short half)
{
    const unsigned moved = (unsigned)((int)((unsigned)half << 16) >> 3) & 0x8fffe000u;
    const float value = __uint_as_float(moved) * __uint_as_float(239u << 23);
    return fabsf(value) < 65536.0f ? value : __uint_as_float(moved | 0x7f800000u);
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

/* Return element i of an array of float32, float16 or bfloat16. */
SW_INLINE float sw_load(const void *array, sw_u64 i, int dtype)
{
    if (dtype == SW_ARG_FLOAT32)
        return ((const float *)array)[i];
    unsigned short half = ((const unsigned short *)array)[i];
    return dtype == SW_ARG_BFLOAT16 ? sw_bfloat16_widen(half) : sw_float16_widen(half);
}

/* ---- tiles ---- */

/* Return the part of tile `at`, searching from part i on, whose first tile is `first`; `count`
 * beyond the last tile. */
template <class ARGS, sw_u64 TILES(const ARGS &, int)>
SW_INLINE int sw_part_of(const ARGS &a, int count, int i, sw_u64 &first, sw_u64 at)
{
    for (sw_u64 tiles; i < count && at - first >= (tiles = TILES(a, i)); ++i)
        first += tiles;
    return i;
}

/* ---- several elements at once ---- */

struct __align__(16) sw_lane16 {
    unsigned word[4];
};
struct __align__(8) sw_lane8 {
    unsigned word[2];
};

/* Store 16 bytes to GPU memory at once. The compiler often splits a plain assignment into four
 * stores; it never splits a load. */
SW_INLINE void sw_put16(void *to, const sw_lane16 &value)
{
#ifdef __CUDACC__
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
#else
    *(sw_lane16 *)to = value;
#endif
}

SW_INLINE void sw_put8(void *to, const sw_lane8 &value)
{
#ifdef __CUDACC__
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(value.word[0]), "r"(value.word[1])
                 : "memory");
#else
    *(sw_lane8 *)to = value;
#endif
}

/* Return the elements before the first boundary of `width` bytes (a power of two) in an array, at
 * most `numel`. */
SW_INLINE sw_u64 sw_head(const void *array, unsigned width, unsigned element_bytes, sw_u64 numel)
{
    return sw_low((unsigned)(-(sw_u64)array & (width - 1)) / element_bytes, numel);
}

SW_INLINE unsigned sw_small_bytes(int dtype)
{
    return dtype == SW_ARG_FLOAT32 ? 4 : 2;
}

/* Four elements of a thread. WIDE: contiguous and one access, with the array on a boundary of four
 * elements and `first` a multiple of 4. Else `step` apart and below `end`. Loads keep the raw bits
 * until they are widened, so that no load waits for another. */
template <bool WIDE> struct sw_four {
    sw_u64 first, step, end;

    SW_METHOD sw_lane16 load(const void *array, int dtype) const
    {
        sw_lane16 raw = {};
        if constexpr (WIDE) {
            if (dtype == SW_ARG_FLOAT32)
                return *(const sw_lane16 *)((const float *)array + first);
            const sw_lane8 halves = *(const sw_lane8 *)((const unsigned short *)array + first);
            raw.word[0] = halves.word[0];
            raw.word[1] = halves.word[1];
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const sw_u64 i = first + k * step;
                if (i < end)
                    raw.word[k] = dtype == SW_ARG_FLOAT32 ? ((const unsigned *)array)[i]
                                                          : ((const unsigned short *)array)[i];
            }
        }
        return raw;
    }

    /* Return the bits of element k of what load() returned. */
    SW_METHOD unsigned bits(const sw_lane16 &raw, int k, int dtype) const
    {
        if (dtype == SW_ARG_FLOAT32 || !WIDE)
            return raw.word[k];
        return (unsigned short)(raw.word[k / 2] >> 16 * (k % 2));
    }

    SW_METHOD void widen(float *x, const sw_lane16 &raw, int dtype) const
    {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (dtype == SW_ARG_FLOAT32) {
                x[k] = __uint_as_float(raw.word[k]);
                continue;
            }
            const unsigned short half = (unsigned short)bits(raw, k, dtype);
            x[k] = dtype == SW_ARG_BFLOAT16 ? sw_bfloat16_widen(half) : sw_float16_widen(half);
        }
    }

    /* Return the bits of x in this dtype, one element a word. */
    SW_METHOD static sw_lane16 narrow(const float *x, int dtype)
    {
        sw_lane16 narrow;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            narrow.word[k] = dtype == SW_ARG_FLOAT32    ? __float_as_uint(x[k])
                             : dtype == SW_ARG_BFLOAT16 ? sw_bfloat16_narrow(x[k])
                                                        : sw_float16_narrow(x[k]);
        return narrow;
    }

    SW_METHOD void store(void *array, const float *x, int dtype) const
    {
        const sw_lane16 bits = narrow(x, dtype);
        if constexpr (WIDE) {
            const sw_lane8 halves = {
                {bits.word[0] | bits.word[1] << 16, bits.word[2] | bits.word[3] << 16}};
            if (dtype == SW_ARG_FLOAT32)
                sw_put16((float *)array + first, bits);
            else
                sw_put8((unsigned short *)array + first, halves);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const sw_u64 i = first + k * step;
                if (i < end && dtype == SW_ARG_FLOAT32)
                    ((unsigned *)array)[i] = bits.word[k];
                else if (i < end)
                    ((unsigned short *)array)[i] = (unsigned short)bits.word[k];
            }
        }
    }
};

/* Report if four elements of an array can be one access; NULL counts as no array. */
SW_INLINE bool sw_is_wide(const void *array, int dtype)
{
    return ((sw_u64)array & (4 * sw_small_bytes(dtype) - 1)) == 0;
}

/* ---- warps ---- */

/* The calling thread's warp: 32 lanes, or fewer in the last warp of a block. */
SW_INLINE unsigned sw_warp_count()
{
    return (unsigned)sw_low(blockDim.x - (threadIdx.x & ~31u), 32);
}

SW_INLINE unsigned sw_warp_mask(unsigned count)
{
    return 0xffffffffu >> (32 - count);
}

/* Return the sum of all lanes to lane 0. */
SW_INLINE sw_u64 sw_warp_sum(sw_u64 value)
{
    const unsigned count = sw_warp_count(), lane = threadIdx.x & 31u;
    for (unsigned step = 16; step > 0; step /= 2) {
        const sw_u64 other = __shfl_down_sync(sw_warp_mask(count), value, step);
        value += lane + step < count ? other : 0;
    }
    return value;
}

/* Return the greatest value to all lanes. */
SW_INLINE unsigned sw_warp_most(unsigned value)
{
    const unsigned count = sw_warp_count(), lane = threadIdx.x & 31u;
    for (unsigned step = 16; step > 0; step /= 2) {
        const unsigned other = __shfl_down_sync(sw_warp_mask(count), value, step);
        value = lane + step < count && other > value ? other : value;
    }
    return __shfl_sync(sw_warp_mask(count), value, 0);
}
