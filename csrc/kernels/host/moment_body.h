/* moment_body.h - random rounding, and moments as records of 32 elements; compiled once per
 * instruction set.
 *
 * A record is 32 codes and an exponent, that of its greatest element below 2^127. A code is a small
 * float: 4 bits of mantissa below an exponent, whose 0 means the subnormal ones; a first moment has
 * a sign on top. All products are by powers of two, hence exact: only the random bits round.
 * docs/design/optim.md has the reasons.
 *
 * The includer defines OPTIM_INLINE and OPTIM_LANES.
 */
#include <stdint.h>

#include "kernels/host/half_body.h"
#include "kernels/optim_kernels.h"

/* ---- random rounding ---- */

OPTIM_INLINE uint64_t mixed(uint64_t bits) /* splitmix64's last steps */
{
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

/* An element's number, modulo 2^32, times this odd number: neighbours lie far apart. */
#define PLACE_STEP 0x9e3779b9u

/* Return 16 random bits from an element's place in the sequence. The second key comes between the
 * steps, since a first one alone would permute the same bits at each step. */
OPTIM_INLINE uint32_t random_bits(uint32_t place, uint32_t key)
{
    uint32_t bits = place ^ (place >> 15);
    return ((bits + key) * 0x846ca68bu) >> 16;
}

/* ---- records ---- */

typedef struct moment_form { /* compile-time constants of one loop */
    uint32_t least;          /* the biased exponent of the least normal code, 127 for [1, 2) */
    uint32_t top;            /* the code of what is 2^127 or more, or not finite: NaN */
    bool is_signed;
} moment_form;

#define FORM_M ((moment_form){.least = 122, .top = 127, .is_signed = true})
#define FORM_V ((moment_form){.least = 114, .top = 255, .is_signed = false})

enum {
    CODE_DROPS = 23 - 4,
    CODE_NORMAL = 1 << 23,
    EXPONENT_MIN = 1,
    LARGEST = 0x7effffff, /* the bits below 2^127 */
};

OPTIM_INLINE uint32_t moment_code(float value, float factor, uint32_t random,
                                  const moment_form form)
{
    const uint32_t lowest = form.least << 23;
    uint32_t bits = bits_from_float(value), magnitude = bits & 0x7fffffffu;
    float part = float_from_bits(magnitude) * factor, base = float_from_bits(lowest);
    uint32_t subnormal = bits_from_float(part + base) - lowest;
    uint32_t normal = bits_from_float(part) - lowest + CODE_NORMAL;
    uint32_t code = ((part < base ? subnormal : normal) + (random << 3)) >> CODE_DROPS;
    uint32_t least = form.is_signed ? 0u : magnitude != 0; /* v stays above 0, its root divides */
    code = code < least ? least : code;
    code = magnitude > LARGEST ? form.top : code;
    return form.is_signed ? code | (bits >> 31) << 7 : code;
}

OPTIM_INLINE float moment_value(uint32_t code, float factor, const moment_form form)
{
    const uint32_t lowest = form.least << 23;
    uint32_t magnitude = form.is_signed ? code & 0x7fu : code;
    uint32_t bits = (magnitude << CODE_DROPS) + lowest;
    float subnormal = float_from_bits(bits) - float_from_bits(lowest);
    float normal = float_from_bits(bits - CODE_NORMAL);
    uint32_t part = bits_from_float((magnitude < 16u ? subnormal : normal) * factor);
    part = magnitude == form.top ? 0x7fc00000u : part;
    return float_from_bits(form.is_signed ? part | (code >> 7) << 31 : part);
}

OPTIM_INLINE void record_decode(float *to, const uint8_t *record, size_t count,
                                const moment_form form)
{
    float factor = float_from_bits((uint32_t)record[SW_MOMENT_BLOCK_NUMEL] << 23);
    OPTIM_LANES
    for (size_t i = 0; i < count; ++i)
        to[i] = moment_value(record[i], factor, form);
}

OPTIM_INLINE void record_encode(uint8_t *record, const float *from, size_t count, uint32_t place,
                                uint32_t key, const moment_form form)
{
    int32_t most = 0; /* signed: SSE2 has no other comparison */
    OPTIM_LANES
    for (size_t i = 0; i < count; ++i) {
        int32_t magnitude = (int32_t)(bits_from_float(from[i]) & 0x7fffffffu);
        int32_t held = magnitude > LARGEST ? 0 : magnitude;
        most = held > most ? held : most;
    }
    uint32_t exponent = (uint32_t)(most - (most != 0)) >> 23;
    exponent = exponent < EXPONENT_MIN ? EXPONENT_MIN : exponent;
    float factor = float_from_bits((254u - exponent) << 23);
    OPTIM_LANES
    for (size_t i = 0; i < count; ++i)
        record[i] = (uint8_t)moment_code(from[i], factor,
                                         random_bits(place + (uint32_t)i * PLACE_STEP, key), form);
    for (size_t i = count; i < SW_MOMENT_BLOCK_NUMEL; ++i)
        record[i] = 0;
    record[SW_MOMENT_BLOCK_NUMEL] = (uint8_t)exponent;
}

/* Widen the records of `count` elements. */
static void moment_decode(float *to, const uint8_t *records, size_t count, const moment_form form)
{
    size_t at = 0;
    for (; at + SW_MOMENT_BLOCK_NUMEL <= count; at += SW_MOMENT_BLOCK_NUMEL)
        record_decode(to + at, records + sw_optim_bytes(at, SW_DTYPE_UINT8), SW_MOMENT_BLOCK_NUMEL,
                      form);
    if (at < count)
        record_decode(to + at, records + sw_optim_bytes(at, SW_DTYPE_UINT8), count - at, form);
}

/* Round `count` elements into records, at random from `place` and `key` of the first one. */
static void moment_encode(uint8_t *records, const float *from, size_t count, uint32_t place,
                          uint32_t key, const moment_form form)
{
    size_t at = 0;
    for (; at + SW_MOMENT_BLOCK_NUMEL <= count; at += SW_MOMENT_BLOCK_NUMEL)
        record_encode(records + sw_optim_bytes(at, SW_DTYPE_UINT8), from + at,
                      SW_MOMENT_BLOCK_NUMEL, place + (uint32_t)at * PLACE_STEP, key, form);
    if (at < count)
        record_encode(records + sw_optim_bytes(at, SW_DTYPE_UINT8), from + at, count - at,
                      place + (uint32_t)at * PLACE_STEP, key, form);
}
