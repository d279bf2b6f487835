/* test_norm.c - compare the exact sum of squares with big-integer arithmetic, digit for digit.
 *
 * The oracle squares integer mantissas and adds them to an array of 32-bit digits by schoolbook
 * carrying; it rounds by single bits. Every table, dtype, order, cut and merge must give the same
 * digits. Left out: speed.
 */
#include "optim_oracle.h"

#include "optim/norm.h"

enum { ARRAY_NUMEL_MAX = 5000 };

typedef struct big { /* digit k counts 2^(32 k + SW_NORM_LOWEST_EXPONENT) */
    uint32_t digit[SW_NORM_DIGIT_COUNT];
    int64_t infinite, nan;
} big;

static void big_add_digit(big *sum, int at, uint32_t value)
{
    uint64_t carry = value;
    for (; carry && at < SW_NORM_DIGIT_COUNT; ++at) {
        carry += sum->digit[at];
        sum->digit[at] = (uint32_t)carry;
        carry >>= 32;
    }
}

/* Add value * 2^exponent. */
static void big_add(big *sum, uint32_t value, int exponent)
{
    int position = exponent - SW_NORM_LOWEST_EXPONENT;
    uint64_t shifted = (uint64_t)value << (position % 32);
    big_add_digit(sum, position / 32, (uint32_t)shifted);
    big_add_digit(sum, position / 32 + 1, (uint32_t)(shifted >> 32));
}

static void big_add_square(big *sum, double x)
{
    int exponent;
    if (isnan(x) || isinf(x)) {
        sum->nan += isnan(x) != 0;
        sum->infinite += isinf(x) != 0;
        return;
    }
    uint64_t mantissa = (uint64_t)ldexp(fabs(frexp(x, &exponent)), 53);
    if (mantissa == 0)
        return;
    exponent -= 53;
    for (; mantissa % 2 == 0; mantissa /= 2)
        ++exponent;
    uint32_t part[2] = {(uint32_t)mantissa, (uint32_t)(mantissa >> 32)};
    for (int a = 0; a < 2; ++a)
        for (int b = 0; b < 2; ++b) {
            uint64_t product = (uint64_t)part[a] * part[b];
            big_add(sum, (uint32_t)product, 2 * exponent + 32 * (a + b));
            if (product >> 32)
                big_add(sum, (uint32_t)(product >> 32), 2 * exponent + 32 * (a + b) + 32);
        }
}

static int big_bit(const big *sum, int at)
{
    return at < 0 ? 0 : (int)(sum->digit[at / 32] >> (at % 32) & 1u);
}

/* Round to 53 bits, bit by bit, then take the root, with an even exponent taken out. */
static double big_root(const big *sum)
{
    int top = 32 * SW_NORM_DIGIT_COUNT - 1, exponent;
    double square = 0.0;
    bool rest = false;
    if (sum->nan || sum->infinite)
        return sum->nan ? (double)NAN : (double)INFINITY;
    while (top >= 0 && !big_bit(sum, top))
        --top;
    if (top < 0)
        return 0.0;
    for (int k = 0; k < 53; ++k)
        square = 2.0 * square + big_bit(sum, top - k);
    for (int at = top - 54; at >= 0; --at)
        rest = rest || big_bit(sum, at);
    if (big_bit(sum, top - 53) && (rest || fmod(square, 2.0) != 0.0))
        square += 1.0;
    exponent = top - 52 + SW_NORM_LOWEST_EXPONENT;
    if (exponent % 2 != 0) {
        square *= 2.0;
        exponent -= 1;
    }
    return ldexp(sqrt(square), exponent / 2);
}

static bool equals(const sw_norm_sum *sum, const big *expected)
{
    for (int k = 0; k < SW_NORM_DIGIT_COUNT; ++k)
        if (sum->digit[k] != (int64_t)expected->digit[k])
            return false;
    double value = sw_norm_value(sum), root = big_root(expected);
    return sum->infinite == expected->infinite && sum->nan == expected->nan &&
           sum->additions == 0 && (value == root || (isnan(value) && isnan(root)));
}

static double value_at(const array *a, size_t i)
{
    double wide;
    if (a->dtype != SW_DTYPE_FLOAT64)
        return (double)load(a->dtype, a->data, i);
    memcpy(&wide, a->data + i * sizeof wide, sizeof wide);
    return wide;
}

static sw_norm_array piece(const array *a, size_t start, size_t numel)
{
    return (sw_norm_array){a->data + start * sw_dtype_size_bytes(a->dtype), numel, a->dtype};
}

/* Sum the whole array; then parts of it in reverse order; then three ranks whose words are added.
 */
static void check_array(const array *a, const char *subject)
{
    const sw_kernel_table *tables[TABLES_MAX];
    size_t count = sw_kernels_available(tables, TABLES_MAX), n = a->numel;
    big expected = {0};
    for (size_t i = 0; i < n; ++i)
        big_add_square(&expected, value_at(a, i));
    for (size_t t = 0; t < count; ++t) {
        sw_norm_sum whole, cut, rank[3];
        sw_norm_array all = piece(a, 0, n),
                      pieces[3] = {piece(a, n / 2, n - n / 2), piece(a, n / 7, n / 2 - n / 7),
                                   piece(a, 0, n / 7)};
        bool ok = sw_kernels_force(tables[t]->name, NULL) == SW_OK;
        sw_norm_init(&whole);
        sw_norm_init(&cut);
        ok = ok && sw_norm_add(&whole, &all, 1, NULL) == SW_OK &&
             sw_norm_add(&cut, pieces, 3, NULL) == SW_OK;
        for (int r = 0; r < 3; ++r) {
            sw_norm_init(&rank[r]);
            ok = ok && sw_norm_add(&rank[r], &pieces[r], 1, NULL) == SW_OK;
            sw_norm_close(&rank[r]);
        }
        sw_norm_merge(&rank[2], &rank[0]);
        sw_norm_merge(&rank[2], &rank[1]);
        sw_norm_close(&whole);
        sw_norm_close(&cut);
        ok = ok && equals(&whole, &expected) && memcmp(&whole, &cut, sizeof cut) == 0 &&
             memcmp(&whole, &rank[2], sizeof cut) == 0 && guards_intact(a);
        if (!ok)
            fprintf(stderr, "%s: table %s dtype %s numel %zu: %.17g, oracle %.17g\n", subject,
                    tables[t]->name, sw_dtype_name(a->dtype), n, sw_norm_value(&whole),
                    big_root(&expected));
        expect(ok, "the sum is exact for any cut");
    }
    expect(sw_kernels_force(NULL, NULL) == SW_OK, "the best table is restored");
}

static void store_value(array *a, size_t i, double value)
{
    if (a->dtype == SW_DTYPE_FLOAT64)
        memcpy(a->data + i * sizeof value, &value, sizeof value);
    else
        store(a->dtype, a->data, i, (float)value);
}

/* Return a value of a spread: 0 one binade, 1 around one, 2 any finite bits, 3 any bits, 4 mostly
 * zeros, 5 all the largest. */
static double spread_value(int spread, sw_dtype dtype)
{
    uint64_t r = random_bits();
    double unit = 1.0 + (double)(r >> 12) * 0x1p-52, any;
    memcpy(&any, &r, sizeof any);
    if (dtype != SW_DTYPE_FLOAT64)
        any = (double)float_of((uint32_t)(r >> 32));
    if (spread == 0)
        return unit;
    if (spread == 1)
        return (double)random_float(false);
    if (spread == 2)
        return isfinite(any) ? any : unit;
    if (spread == 3)
        return any;
    if (spread == 4)
        return r % 16 ? (r % 32 == 1 ? -0.0 : 0.0) : unit * 0x1p-30;
    return dtype == SW_DTYPE_FLOAT64 ? 1.7976931348623157e308 : 3.4028234663852886e38;
}

static void test_every_dtype_size_and_spread(void)
{
    static const sw_dtype dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16, SW_DTYPE_FLOAT16,
                                      SW_DTYPE_FLOAT64};
    static const size_t sizes[] = {0, 1, 2, 7, 31, 32, 33, 511, 2047, 2048, 2049, ARRAY_NUMEL_MAX};
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; ++d)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s)
            for (int spread = 0; spread < 6; ++spread) {
                array a;
                array_init(&a, dtypes[d], sizes[s], (size_t)spread % 3);
                for (size_t i = 0; i < a.numel; ++i)
                    store_value(&a, i, spread_value(spread, a.dtype));
                check_array(&a, "spread");
                array_fini(&a);
            }
}

/* Place two values `gap` binades apart at every exponent, to hit the edges of the window. The
 * larger is the largest of its binade, which fills a lane most; the last bit of the smaller is set,
 * which needs the finest quantum. */
static void check_window_edges(sw_dtype dtype, uint32_t last_bit)
{
    for (int gap = 0; gap <= 60; ++gap)
        for (int exponent = -149; exponent + gap <= 127; exponent += 23) {
            array a;
            array_init(&a, dtype, 3000, 1);
            for (size_t i = 0; i < a.numel; ++i) {
                float low = float_of(bits_of(ldexpf(1.0f, exponent)) | last_bit),
                      high = float_of(bits_of(ldexpf(2.0f, exponent + gap)) - last_bit);
                store(dtype, a.data, i, i % 64 == 63 ? low : high);
            }
            check_array(&a, "window edge");
            array_fini(&a);
        }
}

static void test_window_edges(void)
{
    check_window_edges(SW_DTYPE_FLOAT32, 1u);
    check_window_edges(SW_DTYPE_BFLOAT16, 1u << 16);
}

/* Neighbouring blocks of different magnitude force the window to move up and down. */
static void test_blocks_of_changing_magnitude(void)
{
    array a;
    array_init(&a, SW_DTYPE_FLOAT32, ARRAY_NUMEL_MAX * 4, 3);
    for (size_t i = 0; i < a.numel; ++i)
        store(SW_DTYPE_FLOAT32, a.data, i,
              ldexpf(random_float(false), (int)(i / 2048 * 37 % 120) - 60));
    check_array(&a, "changing magnitude");
    array_fini(&a);
}

/* More elements than lanes collect before a flush, and than one chunk of float64; full lanes. */
static void test_large_arrays(void)
{
    static const sw_dtype dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT64};
    for (int k = 0; k < 4; ++k) {
        array a;
        array_init(&a, dtypes[k % 2], (1 << 20) + 2053, 1);
        for (size_t i = 0; i < a.numel; ++i)
            store_value(&a, i, k < 2 ? spread_value(1, a.dtype) : 2.0 - 0x1p-23);
        check_array(&a, "large");
        array_fini(&a);
    }
}

static void test_known_values(void)
{
    float three_four[2] = {3.0f, -4.0f}, huge[4] = {3e38f, 3e38f, 3e38f, 3e38f},
          no_number[2] = {INFINITY, 1.0f};
    /* The square of the first plus half a unit of its last place is a tie; the third element breaks
     * it. */
    float tie[3] = {0x1.8p28f, 4.0f, 0x1p-60f};
    double tiny[1] = {4.9406564584124654e-324}, most[1] = {1.7976931348623157e308};
    sw_norm_sum sum;
    struct {
        sw_norm_array array;
        double norm;
    } known[] = {{{three_four, 2, SW_DTYPE_FLOAT32}, 5.0},
                 {{huge, 4, SW_DTYPE_FLOAT32}, 2.0 * (double)3e38f},
                 {{tiny, 1, SW_DTYPE_FLOAT64}, tiny[0]},
                 {{most, 1, SW_DTYPE_FLOAT64}, most[0]},
                 {{NULL, 0, SW_DTYPE_FLOAT32}, 0.0},
                 {{tie, 2, SW_DTYPE_FLOAT32}, 0x1.8p28},
                 {{tie, 3, SW_DTYPE_FLOAT32}, 0x1.8p28 + 0x1p-24},
                 {{no_number, 2, SW_DTYPE_FLOAT32}, (double)INFINITY}};
    for (size_t k = 0; k < sizeof known / sizeof known[0]; ++k) {
        sw_norm_init(&sum);
        expect(sw_norm_add(&sum, &known[k].array, 1, NULL) == SW_OK &&
                   sw_norm_value(&sum) == known[k].norm,
               "a norm equals the value computed by hand");
    }
    no_number[1] = NAN;
    expect(sw_norm_add(&sum, &known[7].array, 1, NULL) == SW_OK && isnan(sw_norm_value(&sum)),
           "NaN wins over infinity");
}

/* Add sums as arrays of words, as an all-reduce does. */
static void test_words(void)
{
    sw_norm_sum a, b, both;
    int64_t words[2][SW_NORM_WORD_COUNT];
    float x[100];
    for (int i = 0; i < 100; ++i)
        x[i] = random_float(false);
    sw_norm_array parts[2] = {{x, 60, SW_DTYPE_FLOAT32}, {x + 60, 40, SW_DTYPE_FLOAT32}};
    sw_norm_init(&a);
    sw_norm_init(&b);
    sw_norm_init(&both);
    expect(sw_norm_add(&a, &parts[0], 1, NULL) == SW_OK &&
               sw_norm_add(&b, &parts[1], 1, NULL) == SW_OK &&
               sw_norm_add(&both, parts, 2, NULL) == SW_OK,
           "squares are added");
    sw_norm_close(&a);
    sw_norm_close(&b);
    memcpy(words[0], &a, sizeof a);
    memcpy(words[1], &b, sizeof b);
    for (int k = 0; k < (int)SW_NORM_WORD_COUNT; ++k)
        words[0][k] += words[1][k];
    memcpy(&a, words[0], sizeof a);
    expect(sw_norm_value(&a) == sw_norm_value(&both),
           "sums may be added word by word before a carry");
    sw_norm_close(&a);
    sw_norm_close(&both);
    expect(memcmp(&a, &both, sizeof a) == 0, "equal closed sums have equal bytes");
}

static void test_errors(void)
{
    float x[1] = {1.0f};
    sw_norm_array arrays[2] = {{x, 1, SW_DTYPE_FLOAT32}, {x, 1, SW_DTYPE_INT32}};
    sw_norm_sum sum;
    sw_error err = {0};
    sw_norm_init(&sum);
    expect(sw_norm_add(&sum, arrays, 2, &err) == SW_E_INVALID && strstr(err.message, "array 1") &&
               strstr(err.message, "int32") && sw_norm_value(&sum) == 0.0,
           "a dtype without a norm is refused before anything is added");
    arrays[1] = (sw_norm_array){NULL, 3, SW_DTYPE_FLOAT32};
    expect(sw_norm_add(&sum, arrays, 2, &err) == SW_E_INVALID && strstr(err.message, "3 elements"),
           "missing data is refused");
}

int main(void)
{
    test_known_values();
    test_every_dtype_size_and_spread();
    test_window_edges();
    test_blocks_of_changing_magnitude();
    test_large_arrays();
    test_words();
    test_errors();
    return finish();
}
