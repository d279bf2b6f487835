/* test_fold.c - compare every kernel table with a naive fold, bit for bit.
 *
 * The oracle folds one element at a time and converts halves through double arithmetic (ldexp,
 * rint), so it shares no line with fold_body.h. Each array lies between guard bytes, a few elements
 * from the start of its allocation. Tables that equal the oracle equal each other. A float32 or
 * float64 NaN may be any NaN; a half NaN must be the canonical one.
 *
 * Left out: speed, and bad arguments other than those sw_redop_check() refuses.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_references.h"
#include "kernels/kernels.h"

enum {
    SOURCE_COUNT_MAX = 7,
    ARRAY_COUNT_MAX = SOURCE_COUNT_MAX + 2, /* two destinations that are no sources */
    TABLE_COUNT_MAX = 8,
    GUARD_BYTES = 64,
    GUARD_VALUE = 0xa5,
};

typedef enum { ONE_APART, ALL_IN_PLACE, TWO_APART_ONE_IN_PLACE, PLACEMENT_COUNT } placement;

typedef struct array {
    unsigned char *allocation; /* owned */
    unsigned char *data;       /* borrowed from allocation */
    size_t data_bytes, allocation_bytes;
} array;

typedef struct fold_case {
    sw_dtype dtype;
    sw_redop op;
    int source_count;
    size_t numel;
    placement place;
    int misaligned;
    double scale;
} fold_case;

static long passed_count, failed_count;
static uint64_t random_state = 0x9e3779b97f4a7c15u;

static void expect(int ok, const char *expectation)
{
    passed_count += ok != 0;
    failed_count += ok == 0;
    if (!ok)
        fprintf(stderr, "failed: %s\n", expectation);
}

static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545f4914f6cdd1du;
}

/* ---- oracle: halves through double ---- */

static float oracle_widen_float16(uint16_t half)
{
    int exponent = (half >> 10) & 31, mantissa = half & 1023;
    double value = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    if (exponent == 31)
        value = mantissa ? (double)NAN : (double)INFINITY;
    return (float)(half >> 15 ? -value : value);
}

static uint16_t oracle_narrow_float16(float value)
{
    unsigned sign = signbit(value) ? 0x8000u : 0u;
    double magnitude = fabs((double)value), units;
    int exponent;
    if (isnan(value))
        return 0x7e00;
    if (magnitude >= 65520.0)
        return (uint16_t)(sign | 0x7c00u);
    frexp(magnitude, &exponent); /* magnitude = m * 2^exponent, m in [1/2, 1) */
    exponent = magnitude == 0.0 || exponent < -13 ? -13 : exponent;
    units = rint(ldexp(magnitude, 11 - exponent)); /* units of the last place kept; ties to even */
    return (uint16_t)(sign | ((unsigned)(exponent + 13) * 1024u + (unsigned)units));
}

static float oracle_widen_bfloat16(uint16_t half)
{
    uint32_t bits = (uint32_t)half * 65536u;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t oracle_narrow_bfloat16(float value)
{
    uint32_t bits;
    unsigned kept, lost;
    if (isnan(value))
        return 0x7fc0;
    memcpy(&bits, &value, sizeof bits);
    kept = bits / 65536u;
    lost = bits % 65536u;
    if (lost > 32768u || (lost == 32768u && kept % 2u == 1u))
        ++kept; /* a carry into the exponent, or into infinity, is right */
    return (uint16_t)kept;
}

/* ---- oracle: one element of each class of type ---- */

static float load_float(sw_dtype dtype, const unsigned char *at)
{
    uint16_t half;
    float value;
    if (dtype == SW_DTYPE_FLOAT32) {
        memcpy(&value, at, sizeof value);
        return value;
    }
    memcpy(&half, at, sizeof half);
    return dtype == SW_DTYPE_FLOAT16 ? oracle_widen_float16(half) : oracle_widen_bfloat16(half);
}

static void store_float(sw_dtype dtype, unsigned char *at, float value)
{
    uint16_t half =
        dtype == SW_DTYPE_FLOAT16 ? oracle_narrow_float16(value) : oracle_narrow_bfloat16(value);
    if (dtype == SW_DTYPE_FLOAT32)
        memcpy(at, &value, sizeof value);
    else
        memcpy(at, &half, sizeof half);
}

static void oracle_float(const fold_case *c, sw_dtype dtype, const array *source, size_t at,
                         unsigned char *out)
{
    float result = load_float(dtype, source[0].data + at);
    for (int k = 1; k < c->source_count; ++k) {
        float next = load_float(dtype, source[k].data + at);
        if (c->op == SW_REDOP_SUM || c->op == SW_REDOP_MEAN)
            result = result + next;
        else if (isnan(result) || isnan(next))
            result = NAN;
        else if (c->op == SW_REDOP_MIN ? next < result : next > result)
            result = next;
    }
    store_float(dtype, out, c->op == SW_REDOP_MEAN ? result * (float)c->scale : result);
}

static void oracle_double(const fold_case *c, const array *source, size_t at, unsigned char *out)
{
    double result, next;
    memcpy(&result, source[0].data + at, sizeof result);
    for (int k = 1; k < c->source_count; ++k) {
        memcpy(&next, source[k].data + at, sizeof next);
        if (c->op == SW_REDOP_SUM || c->op == SW_REDOP_MEAN)
            result = result + next;
        else if (isnan(result) || isnan(next))
            result = (double)NAN;
        else if (c->op == SW_REDOP_MIN ? next < result : next > result)
            result = next;
    }
    result = c->op == SW_REDOP_MEAN ? result * c->scale : result;
    memcpy(out, &result, sizeof result);
}

/* Load little-endian bytes of any width, sign-extended if the type is signed. */
static uint64_t load_integer(sw_dtype dtype, const unsigned char *at)
{
    size_t bytes = sw_dtype_size_bytes(dtype);
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i)
        value |= (uint64_t)at[i] << (8 * i);
    if (dtype != SW_DTYPE_UINT8 && bytes < 8 && (value >> (8 * bytes - 1)))
        value |= ~(uint64_t)0 << (8 * bytes);
    return value;
}

/* Flipping the top bit maps signed order to unsigned order. */
static int integer_less(uint64_t a, uint64_t b)
{
    const uint64_t top = UINT64_C(1) << 63;
    return (a ^ top) < (b ^ top);
}

static void oracle_integer(const fold_case *c, const array *source, size_t at, unsigned char *out)
{
    uint64_t result = load_integer(c->dtype, source[0].data + at);
    for (int k = 1; k < c->source_count; ++k) {
        uint64_t next = load_integer(c->dtype, source[k].data + at);
        if (c->op == SW_REDOP_SUM)
            result += next;
        else if (c->op == SW_REDOP_MIN ? integer_less(next, result) : integer_less(result, next))
            result = next;
    }
    for (size_t i = 0; i < sw_dtype_size_bytes(c->dtype); ++i)
        out[i] = (unsigned char)(result >> (8 * i));
}

/* Return the type of the arithmetic: complex is two reals. */
static sw_dtype real_dtype(sw_dtype dtype)
{
    if (dtype == SW_DTYPE_COMPLEX64)
        return SW_DTYPE_FLOAT32;
    return dtype == SW_DTYPE_COMPLEX128 ? SW_DTYPE_FLOAT64 : dtype;
}

static void oracle_fold(const fold_case *c, const array *source, unsigned char *out)
{
    sw_dtype real = real_dtype(c->dtype);
    size_t step = sw_dtype_size_bytes(real), bytes = c->numel * sw_dtype_size_bytes(c->dtype);
    for (size_t at = 0; at < bytes; at += step) {
        if (real == SW_DTYPE_FLOAT64)
            oracle_double(c, source, at, out + at);
        else if (real == SW_DTYPE_FLOAT32 || real == SW_DTYPE_FLOAT16 || real == SW_DTYPE_BFLOAT16)
            oracle_float(c, real, source, at, out + at);
        else
            oracle_integer(c, source, at, out + at);
    }
}

/* ---- data ---- */

static uint16_t random_half(sw_dtype dtype)
{
    static const uint16_t float16_special[] = {0x0000, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0x7d01,
                                               0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x4c00};
    static const uint16_t bfloat16_special[] = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0x7f81,
                                                0x0001, 0x807f, 0x0080, 0x7f7f, 0xff7f, 0x7b00};
    uint64_t r = random_bits();
    int is_float16 = dtype == SW_DTYPE_FLOAT16;
    if (r % 8 == 0)
        return is_float16 ? float16_special[(r >> 8) % 12] : bfloat16_special[(r >> 8) % 12];
    if (r % 8 < 5) /* near one, so that sums are finite and rounding has ties */
        return (uint16_t)((is_float16 ? 0x3c00u : 0x3f80u) + ((r >> 8) & 0x3ffu));
    return (uint16_t)(r >> 8);
}

static float random_float(void)
{
    static const float special[] = {
        0.0f,          -0.0f,          INFINITY, -INFINITY,       NAN,     1e-45f, -1e-39f,
        3.4028235e38f, -3.4028235e38f, 1.0f,     1.17549435e-38f, 0x1p-24f};
    uint64_t r = random_bits();
    uint32_t bits = (uint32_t)(r >> 16);
    float value;
    if (r % 8 == 0)
        return special[(r >> 8) % (sizeof special / sizeof special[0])];
    if (r % 8 < 5)
        return (float)(int32_t)bits * 0x1p-30f;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double random_double(void)
{
    uint64_t r = random_bits(), bits = random_bits();
    double value;
    if (r % 8 == 0)
        return (double)random_float();
    if (r % 8 < 5)
        return (double)(int64_t)bits * 0x1p-62;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void random_element(sw_dtype real, unsigned char *at)
{
    uint64_t bits = random_bits();
    float single = random_float();
    double wide = random_double();
    uint16_t half = random_half(real);
    if (real == SW_DTYPE_FLOAT32)
        memcpy(at, &single, sizeof single);
    else if (real == SW_DTYPE_FLOAT64)
        memcpy(at, &wide, sizeof wide);
    else if (real == SW_DTYPE_FLOAT16 || real == SW_DTYPE_BFLOAT16)
        memcpy(at, &half, sizeof half);
    else
        memcpy(at, &bits, sw_dtype_size_bytes(real));
}

static void array_init(array *a, size_t data_bytes, size_t offset_bytes)
{
    a->data_bytes = data_bytes;
    a->allocation_bytes = data_bytes + offset_bytes + 2 * GUARD_BYTES;
    a->allocation = malloc(a->allocation_bytes);
    if (!a->allocation)
        abort();
    memset(a->allocation, GUARD_VALUE, a->allocation_bytes);
    a->data = a->allocation + GUARD_BYTES + offset_bytes;
}

static void array_fini(array *a)
{
    free(a->allocation);
}

static void array_randomize(array *a, sw_dtype dtype)
{
    sw_dtype real = real_dtype(dtype);
    for (size_t at = 0; at < a->data_bytes; at += sw_dtype_size_bytes(real))
        random_element(real, a->data + at);
}

static int guards_intact(const array *a)
{
    for (unsigned char *p = a->allocation; p < a->allocation + a->allocation_bytes; ++p)
        if ((p < a->data || p >= a->data + a->data_bytes) && *p != GUARD_VALUE)
            return 0;
    return 1;
}

/* ---- comparison ---- */

static int is_nan_at(sw_dtype real, const unsigned char *at)
{
    float single;
    double wide;
    if (real == SW_DTYPE_FLOAT32) {
        memcpy(&single, at, sizeof single);
        return isnan(single);
    }
    if (real != SW_DTYPE_FLOAT64)
        return 0;
    memcpy(&wide, at, sizeof wide);
    return isnan(wide);
}

static int same_values(sw_dtype dtype, const unsigned char *a, const unsigned char *b, size_t bytes)
{
    sw_dtype real = real_dtype(dtype);
    size_t step = sw_dtype_size_bytes(real);
    if (memcmp(a, b, bytes) == 0)
        return 1;
    for (size_t at = 0; at < bytes; at += step)
        if (memcmp(a + at, b + at, step) != 0 &&
            !(is_nan_at(real, a + at) && is_nan_at(real, b + at)))
            return 0;
    return 1;
}

/* ---- one case on every table ---- */

static void print_case(const fold_case *c, const char *table, const char *wrong)
{
    fprintf(stderr, "failed: %s: table %s dtype %s op %s ", wrong, table, sw_dtype_name(c->dtype),
            sw_redop_name(c->op));
    fprintf(stderr, "sources %d numel %zu placement %d misaligned %d\n", c->source_count, c->numel,
            (int)c->place, c->misaligned);
}

/* Fill `destination` with indices into the arrays. Indices from source_count on are destinations
 * that are no sources. */
static int choose_destinations(const fold_case *c, int *destination)
{
    int n = c->source_count;
    if (c->place == ONE_APART) {
        destination[0] = n;
        return 1;
    }
    if (c->place == TWO_APART_ONE_IN_PLACE) {
        destination[0] = n;
        destination[1] = n - 1;
        destination[2] = n + 1;
        return 3;
    }
    for (int k = 0; k < n; ++k)
        destination[k] = k;
    return n;
}

static int is_destination(int k, const int *destination, int count)
{
    for (int j = 0; j < count; ++j)
        if (destination[j] == k)
            return 1;
    return 0;
}

static const char *run_on_table(const fold_case *c, const sw_kernel_table *table,
                                const array *original, const unsigned char *expected)
{
    array work[ARRAY_COUNT_MAX];
    void *to[ARRAY_COUNT_MAX];
    const void *from[SOURCE_COUNT_MAX];
    int index[ARRAY_COUNT_MAX], count = choose_destinations(c, index);
    const char *wrong = NULL;
    size_t element = sw_dtype_size_bytes(c->dtype), bytes = c->numel * element;
    for (int k = 0; k < c->source_count + 2; ++k) {
        array_init(&work[k], bytes, c->misaligned ? (size_t)(2 * k + 1) % 8 * element : 0);
        if (k < c->source_count)
            memcpy(work[k].data, original[k].data, bytes);
    }
    for (int k = 0; k < c->source_count; ++k)
        from[k] = work[k].data;
    for (int k = 0; k < count; ++k)
        to[k] = work[index[k]].data;
    table->fold[c->dtype](to, count, from, c->source_count, c->numel, c->scale, c->op);
    for (int k = 0; k < c->source_count + 2; ++k) {
        int written = is_destination(k, index, count);
        if (!guards_intact(&work[k]))
            wrong = "a guard byte was written";
        if (written && !same_values(c->dtype, work[k].data, expected, bytes))
            wrong = "a destination differs from the oracle";
        if (!written && k < c->source_count && memcmp(work[k].data, original[k].data, bytes) != 0)
            wrong = "a source that is not a destination was written";
        array_fini(&work[k]);
    }
    return wrong;
}

static void check_on_all_tables(const fold_case *c, const array *source)
{
    const sw_kernel_table *tables[TABLE_COUNT_MAX];
    size_t count = sw_kernels_available(tables, TABLE_COUNT_MAX);
    size_t bytes = c->numel * sw_dtype_size_bytes(c->dtype);
    unsigned char *expected = malloc(bytes + 1);
    if (!expected)
        abort();
    oracle_fold(c, source, expected);
    for (size_t t = 0; t < count; ++t) {
        const char *wrong = "sw_kernels_force did not put the table in force";
        if (sw_kernels_force(tables[t]->name, NULL) == SW_OK && sw_kernels() == tables[t])
            wrong = run_on_table(c, sw_kernels(), source, expected);
        if (wrong)
            print_case(c, tables[t]->name, wrong);
        passed_count += !wrong;
        failed_count += wrong != NULL;
    }
    free(expected);
}

static void check_random_case(const fold_case *c)
{
    array source[SOURCE_COUNT_MAX];
    for (int k = 0; k < c->source_count; ++k) {
        array_init(&source[k], c->numel * sw_dtype_size_bytes(c->dtype), 0);
        array_randomize(&source[k], c->dtype);
    }
    check_on_all_tables(c, source);
    for (int k = 0; k < c->source_count; ++k)
        array_fini(&source[k]);
}

static void test_sizes_placements_and_alignments(sw_dtype dtype, sw_redop op)
{
    static const size_t sizes[] = {0, 1, 7, 31, 32, 33, 1000, 4097};
    static const int source_counts[] = {1, 2, 3, 5, 7};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s)
        for (size_t n = 0; n < sizeof source_counts / sizeof source_counts[0]; ++n)
            for (int variant = 0; variant < 2 * PLACEMENT_COUNT; ++variant) {
                fold_case c = {dtype,
                               op,
                               source_counts[n],
                               sizes[s],
                               (placement)(variant / 2),
                               variant % 2,
                               1.0 / source_counts[n]};
                check_random_case(&c);
            }
}

static void test_every_dtype_and_op(void)
{
    for (int dtype = 0; dtype < SW_DTYPE_COUNT; ++dtype)
        for (int op = 0; op < SW_REDOP_COUNT; ++op)
            if (sw_redop_check((sw_redop)op, (sw_dtype)dtype, NULL) == SW_OK)
                test_sizes_placements_and_alignments((sw_dtype)dtype, (sw_redop)op);
}

/* ---- halves, exhaustively ---- */

/* One source: widen and narrow each pattern. Two sources, h and h + 1 with scale 1/2: each midpoint
 * of neighbours, which is every tie, subnormals and the step to infinity included. A scale just off
 * 1/2 gives the two sides of each tie. */
static void test_every_half(sw_dtype dtype)
{
    static const double scales[] = {0.5, 0.5 + 0x1p-24, 0.5 - 0x1p-25, 1.0, 0x1p-10, 3.0};
    fold_case c = {dtype, SW_REDOP_SUM, 1, 65536, ONE_APART, 0, 1.0};
    array source[2];
    for (unsigned k = 0; k < 2; ++k) {
        array_init(&source[k], 65536 * sizeof(uint16_t), 0);
        for (unsigned h = 0; h < 65536; ++h) {
            uint16_t half = (uint16_t)(h + k);
            memcpy(source[k].data + h * sizeof half, &half, sizeof half);
        }
    }
    for (int op = 0; op < SW_REDOP_COUNT; ++op)
        for (size_t s = 0; s < sizeof scales / sizeof scales[0]; ++s)
            for (c.source_count = 1; c.source_count <= 2; ++c.source_count) {
                c.op = (sw_redop)op;
                c.scale = scales[s];
                check_on_all_tables(&c, source);
            }
    array_fini(&source[0]);
    array_fini(&source[1]);
}

/* Check values computed by hand, since the oracle may be wrong as well. */
static void test_known_halves(void)
{
    static const struct {
        sw_dtype dtype;
        uint16_t a, b, sum;
    } known[] = {
        {SW_DTYPE_FLOAT16, 0x3c00, 0x3c00, 0x4000},  /* 1 + 1 */
        {SW_DTYPE_FLOAT16, 0x3c00, 0x1000, 0x3c00},  /* 1 + 2^-11: tie, down to even */
        {SW_DTYPE_FLOAT16, 0x3c01, 0x1000, 0x3c02},  /* tie, up to even */
        {SW_DTYPE_FLOAT16, 0x7bff, 0x4b80, 0x7bff},  /* 65504 + 15 */
        {SW_DTYPE_FLOAT16, 0x7bff, 0x4c00, 0x7c00},  /* 65504 + 16: overflow */
        {SW_DTYPE_FLOAT16, 0x03ff, 0x0001, 0x0400},  /* subnormal to normal */
        {SW_DTYPE_FLOAT16, 0x8000, 0x8000, 0x8000},  /* -0 + -0 */
        {SW_DTYPE_FLOAT16, 0x7c00, 0xfc00, 0x7e00},  /* inf - inf */
        {SW_DTYPE_BFLOAT16, 0x3f80, 0x3b80, 0x3f80}, /* 1 + 2^-8: tie, down to even */
        {SW_DTYPE_BFLOAT16, 0x3f81, 0x3b80, 0x3f82}, /* tie, up to even */
        {SW_DTYPE_BFLOAT16, 0x7f7f, 0x7b00, 0x7f80}, /* largest + half its last place: overflow */
        {SW_DTYPE_BFLOAT16, 0x0001, 0x0001, 0x0002}, /* subnormals */
        {SW_DTYPE_BFLOAT16, 0xff80, 0x7f80, 0x7fc0}, /* -inf + inf */
    };
    const sw_kernel_table *tables[TABLE_COUNT_MAX];
    size_t count = sw_kernels_available(tables, TABLE_COUNT_MAX);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; ++i)
        for (size_t t = 0; t < count; ++t) {
            uint16_t a[16], b[16], sum[16]; /* 16: the vector path, not its tail */
            void *to[] = {sum};
            const void *from[] = {a, b};
            for (int j = 0; j < 16; ++j) {
                a[j] = known[i].a;
                b[j] = known[i].b;
            }
            tables[t]->fold[known[i].dtype](to, 1, from, 2, 16, 1.0, SW_REDOP_SUM);
            expect(sum[0] == known[i].sum && sum[15] == known[i].sum,
                   "a sum of halves equals the value computed by hand");
        }
}

/* ---- the table's own functions ---- */

static void test_force(void)
{
    const sw_kernel_table *tables[TABLE_COUNT_MAX], *one = NULL;
    size_t count = sw_kernels_available(tables, TABLE_COUNT_MAX);
    sw_error error = {0};
    expect(sw_kernels() == tables[count - 1], "the best table is in force at first");
    expect(sw_kernels_available(NULL, 0) == count, "the count is given without an array");
    expect(sw_kernels_available(&one, 1) == count && one == tables[0], "capacity bounds the array");
    expect(sw_kernels_force("mmx", &error) == SW_E_INVALID && strstr(error.message, "baseline") &&
               strstr(error.message, "mmx"),
           "an unknown name is refused, with the legal ones");
    expect(sw_kernels() == tables[count - 1], "a refused name changes nothing");
    expect(sw_kernels_force("baseline", NULL) == SW_OK && sw_kernels() == tables[0],
           "baseline can be forced");
    expect(sw_kernels_force(NULL, NULL) == SW_OK && sw_kernels() == tables[count - 1],
           "NULL restores the best table");
    for (size_t t = 0; t < count; ++t)
        for (int dtype = 0; dtype < SW_DTYPE_COUNT; ++dtype)
            expect((tables[t]->fold[dtype] == NULL) == (dtype >= SW_DTYPE_BOOL),
                   "every dtype but bool and those of 8-bit floats has a fold");
}

static void test_redop(void)
{
    sw_error error = {0};
    expect(strcmp(sw_redop_name(SW_REDOP_MEAN), "mean") == 0, "the name of mean");
    expect(sw_redop_name((sw_redop)99) != NULL, "a name out of range is not NULL");
    expect(sw_redop_check(SW_REDOP_SUM, SW_DTYPE_INT8, NULL) == SW_OK, "sum of int8");
    expect(sw_redop_check(SW_REDOP_MEAN, SW_DTYPE_COMPLEX64, NULL) == SW_OK, "mean of complex64");
    expect(sw_redop_check(SW_REDOP_MEAN, SW_DTYPE_INT32, &error) == SW_E_INVALID &&
               strstr(error.message, "mean") && strstr(error.message, "int32"),
           "mean of int32 is refused by name");
    expect(sw_redop_check(SW_REDOP_MAX, SW_DTYPE_COMPLEX128, NULL) == SW_E_INVALID,
           "max of complex128 is refused");
    expect(sw_redop_check(SW_REDOP_SUM, SW_DTYPE_BOOL, NULL) == SW_E_INVALID, "bool is refused");
    expect(sw_redop_check(SW_REDOP_SUM, SW_DTYPE_FLOAT8_E5M2, NULL) == SW_E_INVALID,
           "8-bit floats are refused");
    expect(sw_redop_check(SW_REDOP_SUM, SW_DTYPE_COUNT, NULL) == SW_E_INVALID,
           "dtype out of range");
    expect(sw_redop_check((sw_redop)-1, SW_DTYPE_FLOAT32, NULL) == SW_E_INVALID, "op out of range");
}

/* A group on GPUs may have any number of ranks: contributions of 1 each, the own one elsewhere, on
 * an addend of 2 and without. */
static void test_many_sources(int source_count)
{
    const sw_kernel_contract *fold = &sw_kernel_contracts()[SW_KERNEL_FOLD];
    enum { NUMEL = 3 };
    float own[NUMEL] = {1, 1, 1}, addend[NUMEL] = {2, 2, 2}, to[NUMEL];
    float *rest = calloc((size_t)source_count, sizeof own);
    sw_error err;
    sw_fold_args args = {.to = to,
                         .own = own,
                         .rest = rest,
                         .numel = NUMEL,
                         .stride_bytes = sizeof own,
                         .scale = 1,
                         .dtype = SW_DTYPE_FLOAT32,
                         .op = SW_REDOP_SUM,
                         .own_index = source_count / 2,
                         .source_count = source_count};
    for (int k = 0; k < source_count * NUMEL; ++k)
        rest[k] = 1;
    for (int with = 0; with < 2; ++with) {
        args.addend = with ? addend : NULL;
        bool right = fold->check(&args, &err) == SW_OK;
        if (right)
            sw_kernel_references()[SW_KERNEL_FOLD].reference(&args);
        for (int i = 0; i < NUMEL; ++i)
            right = right && to[i] == (float)(source_count * (with ? 3 : 1));
        passed_count += right;
        failed_count += !right;
        if (!right)
            fprintf(stderr, "a fold of %d contributions on a GPU is wrong\n", source_count);
    }
    free(rest);
}

int main(void)
{
    test_many_sources(1);
    test_many_sources(1025);
    test_many_sources(16384);
    test_force();
    test_redop();
    test_known_halves();
    test_every_half(SW_DTYPE_FLOAT16);
    test_every_half(SW_DTYPE_BFLOAT16);
    test_every_dtype_and_op();
    printf("%ld passed, %ld failed\n", passed_count, failed_count);
    return failed_count ? 1 : 0;
}
