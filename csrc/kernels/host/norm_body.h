/* norm_body.h - the exact sum of squares; compiled once per instruction set, included by optim_*.c.
 *
 * Idea: the square q of a float32 is exact in double. A lane `high` starts at 2^k, and high + q rounds q to the
 * quantum 2^(k-52); what the rounding left, q - (new - old), is exact too and goes to the lane `low`. While all
 * squares of a block lie in a window of WINDOW binades both lanes stay exact: `high` below 2^(k+1), `low`
 * within 53 bits of its own quantum. Read as integers at these quanta, the lanes are added to the digits. The
 * lanes' number and order therefore never show in the result.
 *
 *   A lane takes 2^6 squares below 2^(2e+2), e the window's top exponent: k = 2e + 8. |low| <= 2^6 * 2^(k-53);
 *   the least square is a multiple of 2^(2(e-22)-46), so low counts at most 2^(2e-39 - 2e+90) = 2^51 of them.
 *
 * The includer defines NORM_VECTOR_BYTES and, where it holds, KERNEL_FMA with immintrin.h included.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/half_body.h"
#include "kernels/optim_kernels.h"

enum {
    NORM_LANES = NORM_VECTOR_BYTES / 8,
    NORM_VECTORS = 4, /* two chains of latency hidden by four of them */
    NORM_STRIDE = NORM_LANES * NORM_VECTORS,
    NORM_BLOCK_NUMEL = NORM_STRIDE << 6,
    WINDOW = 23,
    NORM_CARRY_AFTER = 1 << 29, /* additions; a digit holds four times as many */
};
static const uint32_t NORM_INFINITE = 0x7f800000u;

typedef float norm_floats __attribute__((vector_size(NORM_VECTOR_BYTES / 2)));
typedef double norm_doubles __attribute__((vector_size(NORM_VECTOR_BYTES)));
typedef int32_t norm_words __attribute__((vector_size(NORM_VECTOR_BYTES / 2)));
typedef int64_t norm_integers __attribute__((vector_size(NORM_VECTOR_BYTES)));
__extension__ typedef __int128 norm_wide;

/* ---- digits ---- */

/* sum += value * 2^exponent. */
static void digits_add(sw_norm_sum *sum, norm_wide value, int exponent)
{
    unsigned position = (unsigned)(exponent - SW_NORM_LOWEST_EXPONENT), at = position / 32u;
    value *= (norm_wide)1 << (position % 32u);
    sum->digit[at] += (int64_t)(uint32_t)value;
    sum->digit[at + 1] += (int64_t)(uint32_t)(value >> 32);
    sum->digit[at + 2] += (int64_t)(value >> 64);
    if (++sum->additions >= NORM_CARRY_AFTER)
        sw_norm_sum_carry(sum);
}

/* ---- one window of one block ---- */

#define NORM_INLINE static inline __attribute__((always_inline))

NORM_INLINE norm_doubles square_plus(norm_doubles x, norm_doubles addend)
{
#if defined(KERNEL_FMA) && NORM_VECTOR_BYTES == 64
    return (norm_doubles)_mm512_fmadd_pd((__m512d)x, (__m512d)x, (__m512d)addend);
#elif defined(KERNEL_FMA) && NORM_VECTOR_BYTES == 32
    return (norm_doubles)_mm256_fmadd_pd((__m256d)x, (__m256d)x, (__m256d)addend);
#else
    return x * x + addend; /* the product is exact, so these are the same bits */
#endif
}

NORM_INLINE norm_doubles widen_floats(norm_floats x)
{
#if NORM_VECTOR_BYTES == 64
    return (norm_doubles)_mm512_cvtps_pd((__m256)x);
#elif NORM_VECTOR_BYTES == 32
    return (norm_doubles)_mm256_cvtps_pd((__m128)x);
#else
    return __builtin_convertvector(x, norm_doubles);
#endif
}

/* Of numbers from 0 to 2^31 - 1. */
NORM_INLINE norm_words larger(norm_words a, norm_words b)
{
#if NORM_VECTOR_BYTES == 64
    return (norm_words)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif NORM_VECTOR_BYTES == 32
    return (norm_words)_mm_max_epi32((__m128i)a, (__m128i)b);
#else
    norm_words a_wins = a > b;
    return (a & a_wins) | (b & ~a_wins);
#endif
}

static double power_of_two(int exponent)
{
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int64_t horizontal_sum(norm_integers lanes)
{
    int64_t total = 0;
    for (int i = 0; i < NORM_LANES; ++i)
        total += lanes[i];
    return total;
}

typedef struct bit_range { /* of the bits without sign: largest, and least of those that are not zero */
    uint32_t most, least;
} bit_range;

static int field_of(uint32_t bits)
{
    return bits < (1u << 23) ? 1 : (int)(bits >> 23);
}

/* The window of exponent fields (top - WINDOW, top]; subnormals count as field 1. */
static uint32_t window_floor(int top)
{
    return top <= WINDOW ? 0u : (uint32_t)(top - WINDOW + 1) << 23;
}

static bool in_window(bit_range range, int top)
{
    return range.most < (uint32_t)(top + 1) << 23 && (range.most == 0 || range.least >= window_floor(top));
}

/* `inverse` has the largest of 2^31 - bits, where zero bits count as 2^31: 0. */
static bit_range range_of_lanes(norm_words most, norm_words inverse)
{
    bit_range range = {0, 0};
    uint32_t closest = 0;
    for (int i = 0; i < NORM_LANES; ++i) {
        range.most = (uint32_t)most[i] > range.most ? (uint32_t)most[i] : range.most;
        closest = (uint32_t)inverse[i] > closest ? (uint32_t)inverse[i] : closest;
    }
    range.least = (0u - closest) & 0x7fffffffu;
    return range;
}

/* Adds the squares of `count` elements, a multiple of NORM_STRIDE and at most a block, if they are zero or lie in
 * the window of `top`, and returns their range; else only returns it. */
static bit_range add_window(sw_norm_sum *sum, const float *x, size_t count, int top)
{
    int start_exponent = 2 * (top - 127) + 8, low_exponent = 2 * (top - 127 - (WINDOW - 1) - 23);
    norm_doubles start = power_of_two(start_exponent) - (norm_doubles){0};
    norm_doubles magic = 1.5 * power_of_two(low_exponent + 52) - (norm_doubles){0};
    norm_doubles high[NORM_VECTORS] = {start, start, start, start}, low[NORM_VECTORS] = {{0}, {0}, {0}, {0}};
    norm_words most = {0}, inverse = {0};
    for (size_t i = 0; i < count; i += NORM_STRIDE) {
#pragma GCC unroll 4
        for (int j = 0; j < NORM_VECTORS; ++j) {
            norm_floats narrow;
            memcpy(&narrow, x + i + (size_t)j * NORM_LANES, sizeof narrow);
            norm_words bits = (norm_words)narrow & 0x7fffffff;
            most = larger(most, bits);
            inverse = larger(inverse, -bits & 0x7fffffff);
            norm_doubles wide = widen_floats(narrow);
            norm_doubles next = square_plus(wide, high[j]);
            low[j] += square_plus(wide, high[j] - next);
            high[j] = next;
        }
    }
    bit_range range = range_of_lanes(most, inverse);
    if (!in_window(range, top) || range.most == 0)
        return range;
    norm_integers high_units = {0}, low_units = {0};
#pragma GCC unroll 4
    for (int j = 0; j < NORM_VECTORS; ++j) {
        high_units += (norm_integers)high[j] - (norm_integers)start;
        low_units += (norm_integers)(low[j] + magic) - (norm_integers)magic;
    }
    digits_add(sum, horizontal_sum(high_units), start_exponent - 52);
    digits_add(sum, horizontal_sum(low_units), low_exponent);
    return range;
}

/* ---- blocks ---- */

/* The elements with low <= bits < high; zeros for the rest. */
static void select_range(float *out, const float *x, size_t count, uint32_t low, uint32_t high)
{
    for (size_t i = 0; i < count; ++i) {
        uint32_t magnitude = bits_from_float(x[i]) & 0x7fffffffu;
        out[i] = float_from_bits(((magnitude >= low) & (magnitude < high)) ? magnitude : 0u);
    }
}

static void count_infinite(sw_norm_sum *sum, const float *x, size_t count)
{
    for (size_t i = 0; i < count; ++i) {
        uint32_t magnitude = bits_from_float(x[i]) & 0x7fffffffu;
        sum->infinite += magnitude == NORM_INFINITE;
        sum->nan += magnitude > NORM_INFINITE;
    }
}

static uint32_t most_of(const float *x, size_t count)
{
    uint32_t most = 0;
    for (size_t i = 0; i < count; ++i)
        most = bits_from_float(x[i]) > most ? bits_from_float(x[i]) : most;
    return most;
}

/* A block whose exponents need several windows, or with elements that are no numbers. */
static void add_wide_block(sw_norm_sum *sum, const float *x, size_t count)
{
    float rest[NORM_BLOCK_NUMEL], part[NORM_BLOCK_NUMEL];
    count_infinite(sum, x, count);
    select_range(rest, x, count, 0u, NORM_INFINITE);
    for (uint32_t most = most_of(rest, count); most != 0; most = most_of(rest, count)) {
        int top = field_of(most);
        select_range(part, rest, count, window_floor(top), NORM_INFINITE);
        (void)add_window(sum, part, count, top);
        select_range(rest, rest, count, 0u, window_floor(top));
    }
}

/* Neighbouring blocks have similar ranges: each is first tried in the window that the last one had. Returns the
 * window for the next. */
static int add_block(sw_norm_sum *sum, const float *x, size_t count, int top)
{
    bit_range range = add_window(sum, x, count, top);
    if (in_window(range, top))
        return top;
    if (range.most >= NORM_INFINITE) {
        add_wide_block(sum, x, count);
        return top;
    }
    top = field_of(range.most);
    if (!in_window(range, top)) {
        add_wide_block(sum, x, count);
        return top;
    }
    /* One binade of room above, so that a little larger maximum does not end the next try. */
    if (top < 254 && in_window(range, top + 1))
        ++top;
    (void)add_window(sum, x, count, top);
    return top;
}

/* ---- float64: element by element, on integers ---- */

static void add_float64(sw_norm_sum *sum, const double *x, size_t count)
{
    __extension__ typedef unsigned __int128 square;
    for (size_t i = 0; i < count; ++i) {
        uint64_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        uint64_t field = (bits >> 52) & 0x7ffu, mantissa = bits & ((UINT64_C(1) << 52) - 1u);
        if (field == 0x7ffu) {
            sum->infinite += mantissa == 0;
            sum->nan += mantissa != 0;
            continue;
        }
        if (field != 0)
            mantissa |= UINT64_C(1) << 52;
        if (mantissa == 0)
            continue;
        int exponent = 2 * ((field != 0 ? (int)field : 1) - 1075);
        square exact = (square)mantissa * mantissa;
        digits_add(sum, (norm_wide)(uint64_t)exact, exponent);
        digits_add(sum, (norm_wide)(uint64_t)(exact >> 64), exponent + 64);
    }
}

/* ---- the kernel ---- */

static void norm_add(sw_norm_sum *sum, const void *data, size_t numel, sw_dtype dtype)
{
    float wide[NORM_BLOCK_NUMEL];
    int top = 127;
    if (dtype == SW_DTYPE_FLOAT64) {
        add_float64(sum, data, numel);
        return;
    }
    for (size_t start = 0; start < numel; start += NORM_BLOCK_NUMEL) {
        size_t count = numel - start < NORM_BLOCK_NUMEL ? numel - start : NORM_BLOCK_NUMEL;
        size_t padded = (count + NORM_STRIDE - 1) / NORM_STRIDE * NORM_STRIDE;
        const float *block = dtype == SW_DTYPE_FLOAT32 ? (const float *)data + start : wide;
        if (dtype == SW_DTYPE_BFLOAT16)
            widen_bfloat16(wide, (const uint16_t *)data + start, count);
        else if (dtype == SW_DTYPE_FLOAT16)
            widen_float16(wide, (const uint16_t *)data + start, count);
        else if (padded != count)
            memcpy(wide, block, count * sizeof *wide);
        if (padded != count) {
            memset(wide + count, 0, (padded - count) * sizeof *wide);
            block = wide;
        }
        top = add_block(sum, block, padded, top);
    }
}
