/* fold_body.h - what a fold means, and the one table of it; compiled once per instruction set.
 *
 * Idea: a block of every source is folded into an array that stays in the L1 cache, scaled once,
 * rounded once, and only then stored, so a destination may be a source. float16 and bfloat16 widen
 * each block to float32 and use float32's operations. Loops are plain C wherever the compiler
 * vectorises them; the float16 conversion is the exception, and has F16C instructions where
 * FOLD_F16C is defined.
 *
 * The includer defines FOLD_TABLE, FOLD_TABLE_NAME and, where it holds, FOLD_F16C (with
 * immintrin.h already included). A half that is NaN is stored as the canonical quiet one, so that
 * the payload does not depend on the instruction set; the payload of a float32 or float64 NaN is
 * left to the processor.
 *
 * Left out: threads (callers split the range) and argument checks (sw_redop_check() came before).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/fold_tables.h"

/* Two float blocks, a block of halves and the sources' lines together fill half of a 32 KiB L1. */
enum { FOLD_BLOCK_BYTES = 4096, HALF_BLOCK_NUMEL = FOLD_BLOCK_BYTES / sizeof(float) };

#if defined(__clang__)
#define FOLD_LANES _Pragma("clang loop vectorize(assume_safety)")
#else
#define FOLD_LANES _Pragma("GCC ivdep")
#endif

#define FOLD_T float
#define FOLD_NAME(f) f##_float32
#define FOLD_ADD(a, b) ((a) + (b))
#define FOLD_FLOATING 1
#include "kernels/host/fold_type.h"

#define FOLD_T double
#define FOLD_NAME(f) f##_float64
#define FOLD_ADD(a, b) ((a) + (b))
#define FOLD_FLOATING 1
#include "kernels/host/fold_type.h"

/* Integers add as unsigned: signed overflow would be undefined, and the wrap is the contract. */
#define FOLD_T int8_t
#define FOLD_NAME(f) f##_int8
#define FOLD_ADD(a, b) ((int8_t)((unsigned)(a) + (unsigned)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

#define FOLD_T uint8_t
#define FOLD_NAME(f) f##_uint8
#define FOLD_ADD(a, b) ((uint8_t)((unsigned)(a) + (unsigned)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

#define FOLD_T int16_t
#define FOLD_NAME(f) f##_int16
#define FOLD_ADD(a, b) ((int16_t)((unsigned)(a) + (unsigned)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

#define FOLD_T int32_t
#define FOLD_NAME(f) f##_int32
#define FOLD_ADD(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

#define FOLD_T int64_t
#define FOLD_NAME(f) f##_int64
#define FOLD_ADD(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

static inline float float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_from_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bfloat16_widen(uint16_t half)
{
    return float_from_bits((uint32_t)half << 16);
}

/* Nearest, ties to even: adds half a unit of the last place kept, less one bit if that place is
 * even. */
static inline uint16_t bfloat16_narrow(float value)
{
    uint32_t bits = bits_from_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* Moves the exponent from bias 15 to 127. A subnormal gets an implicit bit that it does not have
 * by the same move, and the subtraction of 2^-14 takes that away and normalises, exactly; no step
 * meets a subnormal float32, so a thread that flushes those to zero gets the same bits. */
static inline float float16_widen(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t moved = magnitude + (112u << 23);
    uint32_t subnormal =
        bits_from_float(float_from_bits(magnitude + (113u << 23)) - float_from_bits(113u << 23));
    uint32_t bits = magnitude >= (31u << 23) ? moved + (112u << 23) : moved;
    bits = magnitude < (1u << 23) ? subnormal : bits;
    return float_from_bits(bits | (uint32_t)(half & 0x8000u) << 16);
}

/* Nearest, ties to even. Below 2^-14 the addition of 0.5 puts the last place of a half subnormal
 * at the last place of the float, so the processor's own rounding does it; from there to 2^16 the
 * rounding is bfloat16's, 13 bits up, and carries into infinity from 65520 on. */
static inline uint16_t float16_narrow(float value)
{
    uint32_t bits = bits_from_float(value), magnitude = bits & 0x7fffffffu;
    uint32_t subnormal = bits_from_float(float_from_bits(magnitude) + 0.5f) - (126u << 23);
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= (143u << 23) ? 0x7c00u : half;
    half |= (bits >> 16) & 0x8000u;
    return (uint16_t)(magnitude > 0x7f800000u ? 0x7e00u : half);
}

static void widen_bfloat16(float *restrict out, const uint16_t *restrict in, size_t count)
{
    for (size_t i = 0; i < count; ++i)
        out[i] = bfloat16_widen(in[i]);
}

static void narrow_bfloat16(uint16_t *restrict out, const float *restrict in, size_t count)
{
    for (size_t i = 0; i < count; ++i)
        out[i] = bfloat16_narrow(in[i]);
}

static void widen_float16(float *restrict out, const uint16_t *restrict in, size_t count)
{
    size_t i = 0;
#if defined(FOLD_F16C)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < count; ++i)
        out[i] = float16_widen(in[i]);
}

static void narrow_float16(uint16_t *restrict out, const float *restrict in, size_t count)
{
    size_t i = 0;
#if defined(FOLD_F16C)
    const __m256 canonical = _mm256_set1_ps(float_from_bits(0x7fc00000u));
    for (; i + 8 <= count; i += 8) {
        __m256 wide = _mm256_loadu_ps(in + i);
        wide = _mm256_blendv_ps(wide, canonical, _mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
        _mm_storeu_si128((__m128i *)(out + i),
                         _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
#endif
    for (; i < count; ++i)
        out[i] = float16_narrow(in[i]);
}

typedef void widen_fn(float *restrict out, const uint16_t *restrict in, size_t count);
typedef void narrow_fn(uint16_t *restrict out, const float *restrict in, size_t count);

static void fold_half(void *const *destination, int destination_count, const void *const *source,
                      int source_count, size_t numel, double scale, sw_redop op, widen_fn *widen,
                      narrow_fn *narrow)
{
    float sum[HALF_BLOCK_NUMEL], wide[HALF_BLOCK_NUMEL];
    uint16_t rounded[HALF_BLOCK_NUMEL];
    for (size_t start = 0; start < numel; start += HALF_BLOCK_NUMEL) {
        size_t count = numel - start < HALF_BLOCK_NUMEL ? numel - start : HALF_BLOCK_NUMEL;
        widen(sum, (const uint16_t *)source[0] + start, count);
        for (int k = 1; k < source_count; ++k) {
            widen(wide, (const uint16_t *)source[k] + start, count);
            combine_float32(sum, sum, wide, count, op);
        }
        if (op == SW_REDOP_MEAN)
            scale_float32(sum, count, (float)scale);
        narrow(rounded, sum, count);
        for (int k = 0; k < destination_count; ++k)
            memcpy((uint16_t *)destination[k] + start, rounded, count * sizeof rounded[0]);
    }
}

static void fold_float16(void *const *destination, int destination_count, const void *const *source,
                         int source_count, size_t numel, double scale, sw_redop op)
{
    fold_half(destination, destination_count, source, source_count, numel, scale, op, widen_float16,
              narrow_float16);
}

static void fold_bfloat16(void *const *destination, int destination_count,
                          const void *const *source, int source_count, size_t numel, double scale,
                          sw_redop op)
{
    fold_half(destination, destination_count, source, source_count, numel, scale, op,
              widen_bfloat16, narrow_bfloat16);
}

static void fold_complex64(void *const *destination, int destination_count,
                           const void *const *source, int source_count, size_t numel, double scale,
                           sw_redop op)
{
    fold_float32(destination, destination_count, source, source_count, 2 * numel, scale, op);
}

static void fold_complex128(void *const *destination, int destination_count,
                            const void *const *source, int source_count, size_t numel, double scale,
                            sw_redop op)
{
    fold_float64(destination, destination_count, source, source_count, 2 * numel, scale, op);
}

const sw_kernel_table FOLD_TABLE = {
    .name = FOLD_TABLE_NAME,
    .fold = {[SW_DTYPE_FLOAT32] = fold_float32,
             [SW_DTYPE_FLOAT64] = fold_float64,
             [SW_DTYPE_FLOAT16] = fold_float16,
             [SW_DTYPE_BFLOAT16] = fold_bfloat16,
             [SW_DTYPE_INT8] = fold_int8,
             [SW_DTYPE_UINT8] = fold_uint8,
             [SW_DTYPE_INT16] = fold_int16,
             [SW_DTYPE_INT32] = fold_int32,
             [SW_DTYPE_INT64] = fold_int64,
             [SW_DTYPE_COMPLEX64] = fold_complex64,
             [SW_DTYPE_COMPLEX128] = fold_complex128},
};
