/* half_body.h - convert float16 and bfloat16 to float32 and back; compiled once per instruction
 * set.
 *
 * Integer arithmetic that the compiler vectorises, or F16C instructions if the includer defines
 * KERNEL_F16C and has included immintrin.h; the bits are the same. A NaN is stored as the canonical
 * quiet one, so that the payload does not depend on the instruction set.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

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

/* Round to nearest, ties to even: add half a unit of the last place kept, less one bit if that
 * place is even. */
static inline uint16_t bfloat16_narrow(float value)
{
    uint32_t bits = bits_from_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* Round up with the probability of the part dropped: `random` is uniform in [0, 2^16). */
static inline uint16_t bfloat16_narrow_randomly(float value, uint32_t random)
{
    uint32_t bits = value != value ? 0x7fc00000u : bits_from_float(value);
    return (uint16_t)((bits + random) >> 16);
}

/* Move the exponent from bias 15 to 127. The move gives a subnormal an implicit bit that it does
 * not have; subtracting 2^-14 takes that bit away and normalises, exactly. No step produces a
 * subnormal float32, so a thread that flushes subnormals to zero gets the same bits. */
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

/* Round to nearest, ties to even. Below 2^-14, adding 0.5 aligns the last place of a half subnormal
 * with the last place of the float, so the processor's rounding applies. From there to 2^16 the
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

static inline void widen_bfloat16(float *restrict out, const uint16_t *restrict in, size_t count)
{
    for (size_t i = 0; i < count; ++i)
        out[i] = bfloat16_widen(in[i]);
}

static inline void narrow_bfloat16(uint16_t *restrict out, const float *restrict in, size_t count)
{
    for (size_t i = 0; i < count; ++i)
        out[i] = bfloat16_narrow(in[i]);
}

static inline void widen_float16(float *restrict out, const uint16_t *restrict in, size_t count)
{
    size_t i = 0;
#if defined(KERNEL_F16C)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < count; ++i)
        out[i] = float16_widen(in[i]);
}

#if defined(KERNEL_F16C)
static inline __m128i narrow_eight(__m256 wide)
{
    const __m256 canonical = _mm256_set1_ps(float_from_bits(0x7fc00000u));
    wide = _mm256_blendv_ps(wide, canonical, _mm256_cmp_ps(wide, wide, _CMP_UNORD_Q));
    return _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#endif

static inline void narrow_float16(uint16_t *restrict out, const float *restrict in, size_t count)
{
    size_t i = 0;
#if defined(KERNEL_F16C)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), narrow_eight(_mm256_loadu_ps(in + i)));
#endif
    for (; i < count; ++i)
        out[i] = float16_narrow(in[i]);
}
