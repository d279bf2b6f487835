/* optim_oracle.h - helpers of test_adam.c, test_sgd.c and test_norm.c: guarded arrays, random
 * values, and halves converted through double arithmetic, which shares no line with the kernels. */
#ifndef OPTIM_ORACLE_H
#define OPTIM_ORACLE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"

enum { GUARD_BYTES = 64, GUARD_VALUE = 0xa5, TABLES_MAX = 8 };

static long passed_count, failed_count;
static uint64_t random_state = 0x9e3779b97f4a7c15u;

static inline void expect(bool ok, const char *expectation)
{
    passed_count += ok;
    failed_count += !ok;
    if (!ok)
        fprintf(stderr, "failed: %s\n", expectation);
}

static inline uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545f4914f6cdd1du;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- halves ---- */

static inline float oracle_widen(sw_dtype dtype, uint16_t half)
{
    if (dtype == SW_DTYPE_BFLOAT16)
        return float_of((uint32_t)half * 65536u);
    int exponent = (half >> 10) & 31, mantissa = half & 1023;
    double value = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31)
        value = mantissa ? (double)NAN : (double)INFINITY;
    return (float)(half >> 15 ? -value : value);
}

static inline uint16_t oracle_narrow(sw_dtype dtype, float value)
{
    bool bfloat16 = dtype == SW_DTYPE_BFLOAT16;
    unsigned sign = signbit(value) ? 0x8000u : 0u;
    if (isnan(value))
        return bfloat16 ? 0x7fc0 : 0x7e00;
    if (bfloat16) {
        uint32_t bits = bits_of(value), kept = bits / 65536u, lost = bits % 65536u;
        return (uint16_t)(kept + (lost > 32768u || (lost == 32768u && kept % 2u == 1u)));
    }
    double magnitude = fabs((double)value);
    int exponent;
    if (magnitude >= 65520.0)
        return (uint16_t)(sign | 0x7c00u);
    frexp(magnitude, &exponent);
    exponent = magnitude == 0.0 || exponent < -13 ? -13 : exponent;
    return (uint16_t)(sign | ((unsigned)(exponent + 13) * 1024u +
                              (unsigned)rint(ldexp(magnitude, 11 - exponent))));
}

static inline float load(sw_dtype dtype, const unsigned char *data, size_t i)
{
    uint16_t half;
    float value;
    if (dtype == SW_DTYPE_FLOAT32) {
        memcpy(&value, data + i * sizeof value, sizeof value);
        return value;
    }
    memcpy(&half, data + i * sizeof half, sizeof half);
    return oracle_widen(dtype, half);
}

static inline void store(sw_dtype dtype, unsigned char *data, size_t i, float value)
{
    uint16_t half = dtype == SW_DTYPE_FLOAT32 ? 0 : oracle_narrow(dtype, value);
    if (dtype == SW_DTYPE_FLOAT32)
        memcpy(data + i * sizeof value, &value, sizeof value);
    else
        memcpy(data + i * sizeof half, &half, sizeof half);
}

/* Return the parameter, widened, if the master does not round to it: other code has written it. */
static inline float oracle_master(float master, sw_dtype dtype, const unsigned char *parameter,
                                  size_t i)
{
    unsigned char rounded[sizeof(float)];
    store(dtype, rounded, 0, master);
    size_t width = sw_dtype_size_bytes(dtype);
    bool agrees = memcmp(rounded, parameter + i * width, width) == 0;
    return agrees ? master : load(dtype, parameter, i);
}

/* ---- guarded arrays ---- */

typedef struct array {
    unsigned char *allocation; /* owned */
    unsigned char *data;       /* borrowed from allocation */
    size_t bytes, allocation_bytes;
    sw_dtype dtype;
    size_t numel;
} array;

static inline void array_init(array *a, sw_dtype dtype, size_t numel, size_t offset)
{
    size_t element = sw_dtype_size_bytes(dtype);
    *a = (array){.dtype = dtype, .numel = numel, .bytes = numel * element};
    a->allocation_bytes = (a->bytes + offset * element + 2 * GUARD_BYTES + 63) / 64 * 64;
    a->allocation = aligned_alloc(64, a->allocation_bytes);
    if (!a->allocation)
        abort();
    memset(a->allocation, GUARD_VALUE, a->allocation_bytes);
    a->data = a->allocation + GUARD_BYTES + offset * element;
}

static inline void array_fini(array *a)
{
    free(a->allocation);
}

static inline bool guards_intact(const array *a)
{
    for (unsigned char *p = a->allocation; p < a->allocation + a->allocation_bytes; ++p)
        if ((p < a->data || p >= a->data + a->bytes) && *p != GUARD_VALUE)
            return false;
    return true;
}

/* Compare bits, but any float32 NaN equals any other. */
static inline bool same_values(const array *a, const array *b)
{
    for (size_t i = 0; i < a->numel; ++i) {
        size_t element = sw_dtype_size_bytes(a->dtype);
        if (memcmp(a->data + i * element, b->data + i * element, element) != 0 &&
            !(a->dtype == SW_DTYPE_FLOAT32 && isnan(load(a->dtype, a->data, i)) &&
              isnan(load(b->dtype, b->data, i))))
            return false;
    }
    return true;
}

/* Return a value mostly in (-2, 2); if `wild`, sometimes any bits: subnormals, infinities, NaN. */
static inline float random_float(bool wild)
{
    uint64_t r = random_bits();
    if (wild && r % 8 == 0)
        return float_of((uint32_t)(r >> 32));
    return (float)(int32_t)(r >> 32) * 0x1p-30f * (r % 8 == 1 ? 0x1p-20f : 1.0f);
}

static inline void array_randomize(array *a, bool wild, bool positive)
{
    for (size_t i = 0; i < a->numel; ++i) {
        float value = random_float(wild);
        store(a->dtype, a->data, i, positive ? fabsf(value) : value);
    }
}

/* Round masters into their parameters; other code has written every fourth. */
static inline void array_round(array *parameters, const array *masters)
{
    for (size_t i = 0; i < masters->numel; ++i)
        if (i % 4)
            store(parameters->dtype, parameters->data, i, load(masters->dtype, masters->data, i));
}

static inline int finish(void)
{
    printf("%ld passed, %ld failed\n", passed_count, failed_count);
    return failed_count ? 1 : 0;
}

#endif
