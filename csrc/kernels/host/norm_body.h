/* norm_body.h - the exact sum of squares; compiled once per instruction set, included by optim_*.c.
 *
 * The square q of a float32 is exact in double. A lane `high` starts at 2^k, and high + q rounds q
 * to the quantum 2^(k-52). The rounding error, q - (new - old), is exact too and goes to the lane
 * `low`. While all squares of a block lie in a window of WINDOW binades both lanes stay exact:
 * `high` below 2^(k+1), `low` within 53 bits of its own quantum. Read as integers at these quanta,
 * blocks are collected in integer lanes, and those are added to the digits. The number and order of
 * lanes and blocks therefore never show in the result.
 *
 * Bounds: a lane takes 2^6 squares below 2^(2e+2), e the window's top exponent, so k = 2e + 8 and
 * |low| <= 2^6 * 2^(k-53). The least square is a multiple of 2^(2(e-22)-46), so low counts at most
 * 2^(2e-39 - 2e+90) = 2^51 of them.
 *
 * A block is read from memory once, so each block is first tried in the window of the block before.
 * A block that does not fit is done again, in the window of its largest element, or in several.
 *
 * A bfloat16 has 8 bits, and its square 16. If all elements lie in the upper NARROW_WINDOW binades
 * of the window, `high` alone is exact: the least square is a multiple of 2^(2(e-15)-14), which is
 * the quantum 2^(k-52) of `high`. Such a block needs one fused instruction an element instead of
 * four.
 *
 * The includer defines NORM_VECTOR_BYTES and, if the processor has them, KERNEL_FMA and KERNEL_F16C
 * with immintrin.h included. Left out: float64 at this speed; it goes element by element.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/half_body.h"
#include "kernels/host/stream_body.h"
#include "kernels/optim_kernels.h"
#include "platform/cpu.h"

enum {
    NORM_LANES = NORM_VECTOR_BYTES / 8,
    NORM_VECTORS = 4, /* independent chains of additions */
    NORM_STRIDE = NORM_LANES * NORM_VECTORS,
    NORM_BLOCK_NUMEL = NORM_STRIDE << 6,
    WINDOW = 23,
    NARROW_WINDOW = 16,         /* the same for a bfloat16 in the lane `high` alone */
    NORM_CARRY_AFTER = 1 << 29, /* additions; a digit holds four times this number */
};
static const uint32_t NORM_INFINITE = 0x7f800000u;

typedef float norm_floats __attribute__((vector_size(NORM_VECTOR_BYTES / 2)));
typedef double norm_doubles __attribute__((vector_size(NORM_VECTOR_BYTES)));
typedef uint32_t norm_words __attribute__((vector_size(NORM_VECTOR_BYTES)));
typedef uint64_t norm_integers __attribute__((vector_size(NORM_VECTOR_BYTES)));
typedef uint16_t norm_halves
    __attribute__((vector_size(NORM_VECTOR_BYTES))); /* the halves of one stride */
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
    return x * x + addend; /* the product is exact, so the bits equal a fused one's */
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

NORM_INLINE norm_words smaller(norm_words a, norm_words b)
{
#if NORM_VECTOR_BYTES == 64
    return (norm_words)_mm512_min_epu32((__m512i)a, (__m512i)b);
#elif NORM_VECTOR_BYTES == 32
    return (norm_words)_mm256_min_epu32((__m256i)a, (__m256i)b);
#else
    norm_words a_wins = (norm_words)(a < b);
    return (a & a_wins) | (b & ~a_wins);
#endif
}

/* Without optimization gcc's _mm512_range_ps is a macro that converts its mask. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"

/* Return the smaller magnitudes, without signs. A NaN may hide others: its block is refused. */
NORM_INLINE norm_words smaller_magnitude(norm_words least, norm_words bits)
{
#if NORM_VECTOR_BYTES == 64
    return (norm_words)_mm512_range_ps((__m512)least, (__m512)bits, 10); /* one instruction */
#else
    return smaller(least, bits & 0x7fffffffu);
#endif
}

#pragma GCC diagnostic pop

#if defined(KERNEL_F16C)
#define NORM_LOADS_HALVES 1
#else
#define NORM_LOADS_HALVES 0 /* halves are widened into a block first */
#endif

/* Return the bits of elements i to i + 2 * NORM_LANES of an array of float32 or float16, as floats.
 */
NORM_INLINE norm_words load_words(const void *x, size_t i, sw_dtype dtype)
{
#if NORM_VECTOR_BYTES == 64
    if (dtype == SW_DTYPE_FLOAT16)
        return (norm_words)_mm512_cvtph_ps(
            _mm256_loadu_si256((const __m256i *)((const uint16_t *)x + i)));
#elif NORM_VECTOR_BYTES == 32
    if (dtype == SW_DTYPE_FLOAT16)
        return (norm_words)_mm256_cvtph_ps(
            _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i)));
#else
    (void)dtype;
#endif
    norm_words loaded;
    memcpy(&loaded, (const float *)x + i, sizeof loaded);
    return loaded;
}

/* Return the two halves of `words`. Of float32 they are loaded once more: a load is cheaper than
 * the instruction that moves the upper half down. */
NORM_INLINE void split_words(norm_floats to[2], norm_words words, const void *x, size_t i,
                             sw_dtype dtype)
{
    if (dtype == SW_DTYPE_FLOAT32) {
        memcpy(&to[0], (const float *)x + i, sizeof to[0]);
        memcpy(&to[1], (const float *)x + i + NORM_LANES, sizeof to[1]);
    } else {
        memcpy(to, &words, sizeof words);
    }
}

/* Widen one stride of bfloat16, even indices first: the order does not matter to a sum. */
NORM_INLINE void spread_halves(norm_floats to[NORM_VECTORS], norm_halves halves)
{
#if NORM_VECTOR_BYTES == 64
    __m512i even = _mm512_slli_epi32((__m512i)halves, 16);
    __m512i odd = _mm512_and_si512((__m512i)halves, _mm512_set1_epi32(-65536));
    to[0] = (norm_floats)_mm512_castsi512_si256(even);
    to[1] = (norm_floats)_mm512_extracti64x4_epi64(even, 1);
    to[2] = (norm_floats)_mm512_castsi512_si256(odd);
    to[3] = (norm_floats)_mm512_extracti64x4_epi64(odd, 1);
#elif NORM_VECTOR_BYTES == 32
    __m256i even = _mm256_slli_epi32((__m256i)halves, 16);
    __m256i odd = _mm256_and_si256((__m256i)halves, _mm256_set1_epi32(-65536));
    to[0] = (norm_floats)_mm256_castsi256_si128(even);
    to[1] = (norm_floats)_mm256_extracti128_si256(even, 1);
    to[2] = (norm_floats)_mm256_castsi256_si128(odd);
    to[3] = (norm_floats)_mm256_extracti128_si256(odd, 1);
#else
    (void)to;
    (void)halves;
#endif
}

NORM_INLINE norm_halves smaller_halves(norm_halves a, norm_halves b)
{
#if NORM_VECTOR_BYTES == 64
    return (norm_halves)_mm512_min_epu16((__m512i)a, (__m512i)b);
#elif NORM_VECTOR_BYTES == 32
    return (norm_halves)_mm256_min_epu16((__m256i)a, (__m256i)b);
#else
    norm_halves a_wins = (norm_halves)(a < b);
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

static int field_of(uint32_t bits)
{
    return bits < (1u << 23) ? 1 : (int)(bits >> 23);
}

/* Return the floor of the window of exponent fields (top - width, top]; subnormals count as
 * field 1.
 */
static uint32_t floor_of(int top, int width)
{
    return top <= width ? 0u : (uint32_t)(top - width + 1) << 23;
}

static uint32_t window_floor(int top)
{
    return floor_of(top, WINDOW);
}

/* Check that every lane is below 2^(k+1). Squares only add up, so a lane that is below at the end
 * always was; an infinity or NaN never is. `units` are the lanes' bits beyond those of 2^k. */
NORM_INLINE bool is_below_limit(norm_integers units)
{
#if NORM_VECTOR_BYTES == 64
    return _mm512_test_epi64_mask((__m512i)units, _mm512_set1_epi64(~((1LL << 52) - 1))) == 0;
#elif NORM_VECTOR_BYTES == 32
    return _mm256_testz_si256((__m256i)units, _mm256_set1_epi64x(~((1LL << 52) - 1)));
#else
    uint64_t any = 0;
    for (int i = 0; i < NORM_LANES; ++i)
        any |= units[i];
    return any >> 52 == 0;
#endif
}

/* Check that no element of `least` is below `limit`. */
NORM_INLINE bool is_at_least(norm_words least, uint32_t limit)
{
    norm_words limits = limit - (norm_words){0}, below = limits - smaller(least, limits);
#if NORM_VECTOR_BYTES == 64
    return _mm512_test_epi64_mask((__m512i)below, (__m512i)below) == 0;
#elif NORM_VECTOR_BYTES == 32
    return _mm256_testz_si256((__m256i)below, (__m256i)below);
#else
    uint32_t any = 0;
    for (int i = 0; i < NORM_VECTOR_BYTES / 4; ++i)
        any |= below[i];
    return any == 0;
#endif
}

/* The same for bfloat16's 16 bits. */
NORM_INLINE bool are_halves_at_least(norm_halves least, uint16_t limit)
{
    norm_halves limits = limit - (norm_halves){0}, below = limits - smaller_halves(least, limits);
#if NORM_VECTOR_BYTES == 64
    return _mm512_test_epi64_mask((__m512i)below, (__m512i)below) == 0;
#elif NORM_VECTOR_BYTES == 32
    return _mm256_testz_si256((__m256i)below, (__m256i)below);
#else
    uint16_t any = 0;
    for (int i = 0; i < NORM_VECTOR_BYTES / 2; ++i)
        any |= below[i];
    return any == 0;
#endif
}

/* Check that each element is zero or not below `floor`: 2 * bits - 1 makes zero the largest. */
NORM_INLINE bool is_above_floor(const void *x, size_t count, sw_dtype dtype, uint32_t floor)
{
    norm_words least = ~(norm_words){0};
    for (size_t i = 0; i < count; i += 2 * NORM_LANES) {
        norm_words bits = load_words(x, i, dtype);
        least = smaller(least, bits + bits - 1u);
    }
    return floor == 0 || is_at_least(least, 2u * floor - 1u);
}

/* Return the least of 2 * bits - 1 of a block of bfloat16 in each lane. */
NORM_INLINE norm_halves least_of_halves(const uint16_t *x, size_t count)
{
    norm_halves least = ~(norm_halves){0}, halves;
    for (size_t i = 0; i < count; i += NORM_STRIDE) {
        memcpy(&halves, x + i, sizeof halves);
        least = smaller_halves(least, halves + halves - (uint16_t)1);
    }
    return least;
}

NORM_INLINE bool are_halves_above_floor(norm_halves least, uint32_t floor)
{
    return floor == 0 || are_halves_at_least(least, (uint16_t)(2u * (floor >> 16) - 1u));
}

typedef struct norm_lanes { /* whole blocks of one window, as integers of its two quanta */
    norm_integers high, low;
    int top;
    unsigned blocks;
} norm_lanes;

enum { NORM_LANE_BLOCKS = 256 }; /* a block adds less than 2^54 to a lane */

static int start_exponent(int top)
{
    return 2 * (top - 127) + 8;
}

static int low_exponent(int top)
{
    return 2 * (top - 127 - (WINDOW - 1) - 23);
}

static void lanes_flush(norm_lanes *lanes, sw_norm_sum *sum)
{
    if (lanes->blocks == 0)
        return;
    norm_wide high = 0, low = 0;
    for (int i = 0; i < NORM_LANES; ++i) {
        high += (int64_t)lanes->high[i]; /* negative lanes wrapped around zero */
        low += (int64_t)lanes->low[i];
    }
    digits_add(sum, high, start_exponent(lanes->top) - 52);
    digits_add(sum, low, low_exponent(lanes->top));
    lanes->high = lanes->low = (norm_integers){0};
    lanes->blocks = 0;
}

/* Flush the lanes and start another window. */
static void lanes_move(norm_lanes *lanes, sw_norm_sum *sum, int top)
{
    lanes_flush(lanes, sum);
    lanes->top = top;
}

/* Add a block to the lanes; return false if `high` exceeded its limit. */
NORM_INLINE bool lanes_take(norm_lanes *lanes, sw_norm_sum *sum, const norm_doubles *high,
                            const norm_doubles *low)
{
    norm_doubles start = power_of_two(start_exponent(lanes->top)) - (norm_doubles){0};
    norm_doubles magic = 1.5 * power_of_two(low_exponent(lanes->top) + 52) - (norm_doubles){0};
    norm_integers high_units = {0}, low_units = {0}, any = {0};
#pragma GCC unroll 4
    for (int j = 0; j < NORM_VECTORS; ++j) {
        norm_integers units = (norm_integers)high[j] - (norm_integers)start;
        any |= units;
        high_units += units;
        if (low)
            low_units += (norm_integers)(low[j] + magic) - (norm_integers)magic;
    }
    if (!is_below_limit(any))
        return false;
    lanes->high += high_units;
    lanes->low += low_units;
    if (++lanes->blocks == NORM_LANE_BLOCKS)
        lanes_flush(lanes, sum);
    return true;
}

/* Add the squares of `count` elements, a multiple of NORM_STRIDE and at most a block, and return
 * true if all lie in the lanes' window or are zero. Else add nothing and return false. The caller
 * has checked bfloat16 against the floor; a block of the others with zeros is looked at twice. */
NORM_INLINE bool add_window_of(norm_lanes *lanes, sw_norm_sum *sum, const void *x,
                               const sw_dtype dtype, size_t count)
{
    norm_doubles start = power_of_two(start_exponent(lanes->top)) - (norm_doubles){0};
    norm_doubles high[NORM_VECTORS] = {start, start, start, start},
                 low[NORM_VECTORS] = {{0}, {0}, {0}, {0}};
    const size_t stride_bytes = NORM_STRIDE * (dtype == SW_DTYPE_FLOAT32 ? 4u : 2u);
    const uint32_t floor = window_floor(lanes->top);
    const bool prefetches = sw_prefetches();
    norm_words least = ~(norm_words){0};
    for (size_t i = 0; i < count; i += NORM_STRIDE) {
        const char *at = (const char *)x + i / NORM_STRIDE * stride_bytes;
        norm_floats narrow[NORM_VECTORS];
        norm_halves halves;
        if (prefetches)
            stream_ask(at, stride_bytes);
        if (dtype == SW_DTYPE_BFLOAT16) {
            memcpy(&halves, at, sizeof halves);
            spread_halves(narrow, halves);
        } else {
#pragma GCC unroll 2
            for (int j = 0; j < NORM_VECTORS; j += 2) {
                norm_words bits = load_words(at, (size_t)j * NORM_LANES, dtype);
                least = smaller_magnitude(least, bits);
                split_words(narrow + j, bits, at, (size_t)j * NORM_LANES, dtype);
            }
        }
#pragma GCC unroll 4
        for (int j = 0; j < NORM_VECTORS; ++j) {
            norm_doubles wide = widen_floats(narrow[j]);
            norm_doubles next = square_plus(wide, high[j]);
            low[j] += square_plus(wide, high[j] - next);
            high[j] = next;
        }
    }
    if (dtype != SW_DTYPE_BFLOAT16 && !is_at_least(least, floor) &&
        !is_above_floor(x, count, dtype, floor))
        return false;
    return lanes_take(lanes, sum, high, low);
}

/* The same for bfloat16 in the narrow window, which the caller has checked. It checks each block
 * before this loop, which therefore asks for the block after it. */
NORM_INLINE bool add_narrow_window(norm_lanes *lanes, sw_norm_sum *sum, const uint16_t *x,
                                   size_t count)
{
    norm_doubles start = power_of_two(start_exponent(lanes->top)) - (norm_doubles){0};
    norm_doubles high[NORM_VECTORS] = {start, start, start, start};
    for (size_t i = 0; i < count; i += NORM_STRIDE) {
        norm_floats narrow[NORM_VECTORS];
        norm_halves halves;
        __builtin_prefetch(x + i + NORM_BLOCK_NUMEL);
        memcpy(&halves, x + i, sizeof halves);
        spread_halves(narrow, halves);
#pragma GCC unroll 4
        for (int j = 0; j < NORM_VECTORS; ++j)
            high[j] = square_plus(widen_floats(narrow[j]), high[j]);
    }
    return lanes_take(lanes, sum, high, NULL);
}

static bool add_window(norm_lanes *lanes, sw_norm_sum *sum, const float *x, size_t count)
{
    return add_window_of(lanes, sum, x, SW_DTYPE_FLOAT32, count);
}

/* The same for a block of halves without widening, if the instructions exist. */
static bool add_half_window(norm_lanes *lanes, sw_norm_sum *sum, const uint16_t *x, sw_dtype dtype,
                            size_t count)
{
    if (!NORM_LOADS_HALVES)
        return false;
    if (dtype != SW_DTYPE_BFLOAT16)
        return add_window_of(lanes, sum, x, SW_DTYPE_FLOAT16, count);
    norm_halves least = least_of_halves(x, count);
    if (are_halves_above_floor(least, floor_of(lanes->top, NARROW_WINDOW)))
        return add_narrow_window(lanes, sum, x, count);
    return are_halves_above_floor(least, window_floor(lanes->top)) &&
           add_window_of(lanes, sum, x, SW_DTYPE_BFLOAT16, count);
}

/* ---- blocks ---- */

/* Copy the elements with low <= bits < high; zeros for the rest. */
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

/* Add a block whose exponents need several windows, or that has infinities or NaN. */
static void add_wide_block(norm_lanes *lanes, sw_norm_sum *sum, const float *x, size_t count)
{
    float rest[NORM_BLOCK_NUMEL], part[NORM_BLOCK_NUMEL];
    count_infinite(sum, x, count);
    select_range(rest, x, count, 0u, NORM_INFINITE);
    for (uint32_t most = most_of(rest, count); most != 0; most = most_of(rest, count)) {
        lanes_move(lanes, sum, field_of(most));
        select_range(part, rest, count, window_floor(lanes->top), NORM_INFINITE);
        if (!add_window(lanes, sum, part, count))
            return; /* unreachable: no element is left outside the window */
        select_range(rest, rest, count, 0u, window_floor(lanes->top));
    }
}

/* Neighbouring blocks have similar ranges. Try the window of the last block first, then that of the
 * largest element here, one binade higher so that a slightly larger element still fits next time.
 */
static void add_block(norm_lanes *lanes, sw_norm_sum *sum, const float *x, size_t count)
{
    float positive[NORM_BLOCK_NUMEL];
    if (add_window(lanes, sum, x, count))
        return;
    select_range(positive, x, count, 0u, NORM_INFINITE);
    int top = field_of(most_of(positive, count));
    lanes_move(lanes, sum, top < 254 ? top + 1 : top);
    if (add_window(lanes, sum, x, count))
        return;
    add_wide_block(lanes, sum, x, count);
    lanes_move(lanes, sum, top);
}

/* ---- float64: element by element, on integers ---- */

__extension__ typedef unsigned __int128 norm_square;

enum {
    FLOAT64_FIELDS = 2048,
    /* Elements that share the buckets: 2^20 squares below 2^106 fit 128 bits. Emptying the buckets
     * pays only for more elements than there are buckets. */
    FLOAT64_CHUNK = 1 << 20,
};

/* Return the mantissa. *field is the exponent field, 1 for zero and subnormals. */
static uint64_t float64_mantissa(double x, uint64_t *field)
{
    uint64_t bits, mantissa;
    memcpy(&bits, &x, sizeof bits);
    mantissa = bits & ((UINT64_C(1) << 52) - 1u);
    *field = (bits >> 52) & 0x7ffu;
    if (*field != 0)
        return mantissa | UINT64_C(1) << 52;
    *field = 1;
    return mantissa;
}

static void add_float64_square(sw_norm_sum *sum, norm_square square, uint64_t field)
{
    int exponent = 2 * ((int)field - 1075);
    if (square == 0)
        return;
    digits_add(sum, (norm_wide)(uint64_t)square, exponent);
    digits_add(sum, (norm_wide)(uint64_t)(square >> 64), exponent + 64);
}

/* Collect squares by exponent first, since adding to the digits costs several times as much. The
 * last bucket is that of infinities and NaN, which are counted instead. */
static void add_float64_chunk(sw_norm_sum *sum, const double *x, size_t count)
{
    norm_square bucket[FLOAT64_FIELDS] = {0};
    for (size_t i = 0; i < count; ++i) {
        uint64_t field, mantissa = float64_mantissa(x[i], &field);
        if (field == FLOAT64_FIELDS - 1) {
            sum->infinite += x[i] == x[i];
            sum->nan += x[i] != x[i];
        } else {
            bucket[field] += (norm_square)mantissa * mantissa;
        }
    }
    for (uint64_t field = 1; field + 1 < FLOAT64_FIELDS; ++field)
        add_float64_square(sum, bucket[field], field);
}

static void add_float64(sw_norm_sum *sum, const double *x, size_t count)
{
    while (count >= FLOAT64_FIELDS) {
        size_t chunk = count < FLOAT64_CHUNK ? count : FLOAT64_CHUNK;
        add_float64_chunk(sum, x, chunk);
        x += chunk;
        count -= chunk;
    }
    for (size_t i = 0; i < count; ++i) {
        uint64_t field, mantissa = float64_mantissa(x[i], &field);
        sum->infinite += field == FLOAT64_FIELDS - 1 && x[i] == x[i];
        sum->nan += x[i] != x[i];
        if (field != FLOAT64_FIELDS - 1)
            add_float64_square(sum, (norm_square)mantissa * mantissa, field);
    }
}

/* ---- the kernel ---- */

/* Add a block through a copy: halves, or a count that is not a multiple of a stride. */
static void add_copied_block(norm_lanes *lanes, sw_norm_sum *sum, const void *x, sw_dtype dtype,
                             size_t count)
{
    float wide[NORM_BLOCK_NUMEL];
    size_t padded = (count + NORM_STRIDE - 1) / NORM_STRIDE * NORM_STRIDE;
    if (dtype == SW_DTYPE_BFLOAT16)
        widen_bfloat16(wide, x, count);
    else if (dtype == SW_DTYPE_FLOAT16)
        widen_float16(wide, x, count);
    else
        memcpy(wide, x, count * sizeof *wide);
    memset(wide + count, 0, (padded - count) * sizeof *wide);
    add_block(lanes, sum, wide, padded);
}

static void norm_add(sw_norm_sum *sum, const void *data, size_t numel, sw_dtype dtype)
{
    norm_lanes lanes = {.top = 127}; /* the first window lies around one */
    if (dtype == SW_DTYPE_FLOAT64) {
        add_float64(sum, data, numel);
        return;
    }
    for (size_t start = 0; start < numel; start += NORM_BLOCK_NUMEL) {
        size_t count = numel - start < NORM_BLOCK_NUMEL ? numel - start : NORM_BLOCK_NUMEL;
        const float *floats = (const float *)data + start;
        const uint16_t *halves = (const uint16_t *)data + start;
        bool whole = count % NORM_STRIDE == 0;
        if (dtype == SW_DTYPE_FLOAT32 && whole)
            add_block(&lanes, sum, floats, count);
        else if (dtype == SW_DTYPE_FLOAT32)
            add_copied_block(&lanes, sum, floats, dtype, count);
        else if (!whole || !add_half_window(&lanes, sum, halves, dtype, count))
            add_copied_block(&lanes, sum, halves, dtype, count);
    }
    lanes_flush(&lanes, sum);
}
