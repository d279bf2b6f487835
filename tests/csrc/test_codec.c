/* test_codec.c - halves and block-scaled integers: compare every table with a naive codec, bit for
 * bit; bounds, values that are not finite, guards, odd tails, errors.
 *
 * Bounds: in a block of greatest magnitude a, an element is off by at most a/254 (8 bits) or a/14
 * (4 bits), plus 2^-22 of a for the three float32 roundings. */
#include "optim_oracle.h"

#include "compress/codec.h"

enum { NUMELS = 9 };
static const size_t numels[NUMELS] = {0, 1, 31, 32, 33, 255, 256, 257, 1000};

static void naive_record(unsigned char *record, const float *value, size_t block, int bits)
{
    float most = 0.0f, levels = bits == 8 ? 127.0f : 7.0f;
    bool finite = true;
    for (size_t i = 0; i < block; ++i) {
        finite = finite && isfinite(value[i]);
        most = fabsf(value[i]) > most ? fabsf(value[i]) : most;
    }
    float scale = finite ? most / levels : float_of(0x7fc00000u);
    bool zero = !finite || most < 0x1p-120f;
    if (finite && zero)
        scale = 0.0f;
    memcpy(record, &scale, sizeof scale);
    memset(record + 4, 0, block * (size_t)bits / 8);
    for (size_t i = 0; i < block && !zero; ++i) {
        float inverse = levels / most, scaled = value[i] * inverse;
        int code = (int)rintf(scaled);
        if (bits == 8)
            record[4 + i] = (unsigned char)code;
        else
            record[4 + i / 2] |= (unsigned char)((code & 15) << (i % 2 ? 4 : 0));
    }
}

static void check_quantize(const sw_block_codec *codec, size_t numel, size_t offset, bool wild)
{
    size_t count = (numel + codec->block - 1) / codec->block;
    size_t record = sw_block_codec_record_bytes(codec);
    array source, error, out, records, before;
    array_init(&source, SW_DTYPE_FLOAT32, numel, offset);
    array_init(&error, SW_DTYPE_FLOAT32, numel, offset);
    array_init(&before, SW_DTYPE_FLOAT32, numel, 0);
    array_init(&out, SW_DTYPE_FLOAT32, numel, 3);
    array_init(&records, SW_DTYPE_UINT8, count * record, offset);
    array_randomize(&source, wild, false);
    array_randomize(&error, false, false);
    memcpy(before.data, error.data, error.bytes);
    float *e = (float *)(void *)error.data, *s = (float *)(void *)source.data;
    float *o = (float *)(void *)out.data, *b = (float *)(void *)before.data;
    sw_block_encode(codec, records.data, s, e, numel);
    unsigned char *expected = malloc(record);
    float *value = calloc(codec->block, sizeof *value);
    for (size_t r = 0; r < count; ++r) {
        for (size_t i = 0; i < codec->block; ++i) {
            size_t at = r * codec->block + i;
            value[i] = at < numel ? s[at] + e[at] : 0.0f;
        }
        naive_record(expected, value, codec->block, codec->bits);
        expect(memcmp(expected, records.data + r * record, record) == 0,
               "the record equals the naive one");
    }
    free(expected);
    free(value);
    expect(guards_intact(&records) && guards_intact(&source) && guards_intact(&error),
           "guards are intact after encode");
    if (sw_block_is_finite(codec, records.data, count)) {
        memcpy(o, s, source.bytes);
        sw_block_decode(codec, o, records.data, e, records.data, numel);
        for (size_t i = 0; i < numel; ++i) { /* decoded + residual must equal source + error */
            float whole = s[i] + b[i];
            expect(e[i] == whole - o[i], "the residual is exact");
        }
        expect(guards_intact(&out) && guards_intact(&error), "guards are intact after decode");
    } else {
        expect(wild, "only wild input is not finite");
    }
    array_fini(&source);
    array_fini(&error);
    array_fini(&before);
    array_fini(&out);
    array_fini(&records);
}

static void check_bound(const sw_block_codec *codec)
{
    enum { NUMEL = 4096 };
    static float source[NUMEL], out[NUMEL];
    static unsigned char records[NUMEL * 2];
    float levels = codec->bits == 8 ? 127.0f : 7.0f;
    for (int i = 0; i < NUMEL; ++i)
        source[i] = random_float(false) * (i < NUMEL / 2 ? 1.0f : 0x1p-90f);
    sw_block_encode(codec, records, source, NULL, NUMEL);
    sw_block_decode(codec, out, records, NULL, NULL, NUMEL);
    for (size_t start = 0; start < NUMEL; start += codec->block) {
        float most = 0.0f;
        for (size_t i = start; i < start + codec->block; ++i)
            most = fabsf(source[i]) > most ? fabsf(source[i]) : most;
        for (size_t i = start; i < start + codec->block; ++i)
            expect(fabsf(out[i] - source[i]) <= most * (0.5f / levels + 0x1p-22f), "error bound");
    }
}

/* Check the owner's fold of three encodings: the quantized mean of the decoded values, and its
 * residual. */
static void check_fold(const sw_block_codec *codec, bool poisoned)
{
    enum { WIRES = 3, NUMEL = 4096 };
    static float source[WIRES][NUMEL], decoded[WIRES][NUMEL], mean[NUMEL], out[NUMEL], rest[NUMEL];
    static unsigned char wire[WIRES][NUMEL * 2], folded[NUMEL * 2], expected[NUMEL * 2];
    const unsigned char *wires[WIRES] = {wire[0], wire[1], wire[2]};
    size_t count = NUMEL / codec->block, record = sw_block_codec_record_bytes(codec);
    for (int w = 0; w < WIRES; ++w) {
        for (int i = 0; i < NUMEL; ++i)
            source[w][i] = random_float(false);
        if (poisoned && w == 1)
            source[w][5] = INFINITY;
        sw_block_encode(codec, wire[w], source[w], NULL, NUMEL);
        sw_block_decode(codec, decoded[w], wire[w], NULL, NULL, NUMEL);
    }
    for (int i = 0; i < NUMEL; ++i) {
        float sum = decoded[0][i] + decoded[1][i];
        sum = sum + decoded[2][i];
        mean[i] = sum * (1.0f / 3.0f);
    }
    for (size_t r = 0; r < count; ++r)
        naive_record(expected + r * record, mean + r * codec->block, codec->block, codec->bits);
    sw_block_fold(codec, folded, wires, WIRES, count, 1.0f / 3.0f, rest);
    expect(memcmp(expected, folded, count * record) == 0, "the fold is the quantized mean");
    expect(sw_block_is_finite(codec, folded, count) == !poisoned, "the verdict is right");
    sw_block_decode(codec, out, folded, NULL, NULL, NUMEL);
    for (size_t i = 0; i < NUMEL; ++i) {
        bool lost = poisoned && i < codec->block;
        expect(lost ? isnan(out[i]) && rest[i] == 0.0f : rest[i] == mean[i] - out[i],
               "the residual of the fold is exact");
    }
}

static void check_halves(sw_dtype dtype, size_t numel, size_t offset)
{
    array source, wire, out;
    array_init(&source, SW_DTYPE_FLOAT32, numel, offset);
    array_init(&out, SW_DTYPE_FLOAT32, numel, offset);
    array_init(&wire, dtype, numel, offset);
    array_randomize(&source, true, false);
    float scale = 1.0f / 3.0f;
    expect(sw_half_encode(dtype, wire.data, (float *)(void *)source.data, numel, scale, NULL) ==
               SW_OK,
           "encode");
    expect(sw_half_decode(dtype, (float *)(void *)out.data, wire.data, numel, NULL) == SW_OK,
           "decode");
    for (size_t i = 0; i < numel; ++i) {
        float scaled = load(SW_DTYPE_FLOAT32, source.data, i) * scale;
        uint16_t half;
        memcpy(&half, wire.data + i * 2, sizeof half);
        expect(half == oracle_narrow(dtype, scaled), "a half is scaled and rounded once");
        float back = load(SW_DTYPE_FLOAT32, out.data, i), wide = oracle_widen(dtype, half);
        expect(bits_of(back) == bits_of(wide) || (isnan(back) && isnan(wide)),
               "a half is widened exactly");
    }
    expect(guards_intact(&wire) && guards_intact(&source) && guards_intact(&out), "guards");
    array_fini(&source);
    array_fini(&wire);
    array_fini(&out);
}

static void check_errors(void)
{
    sw_error err;
    const sw_block_codec bad[] = {{0, 8}, {16, 8}, {48, 8}, {8192, 8}, {256, 5}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        expect(sw_block_codec_check(&bad[i], &err) == SW_E_INVALID, "an invalid codec is refused");
        expect(strstr(err.message, i < 4 ? "[32, 4096]" : "8 or 4") != NULL,
               "the message has the legal range");
    }
    expect(sw_half_encode(SW_DTYPE_FLOAT32, NULL, NULL, 0, 1.0f, &err) == SW_E_INVALID &&
               strstr(err.message, "not float32") != NULL,
           "a half of another dtype is refused");
}

int main(void)
{
    const sw_kernel_table *tables[TABLES_MAX];
    size_t table_count = sw_kernels_available(tables, TABLES_MAX);
    const sw_block_codec codecs[] = {{256, 8}, {32, 8}, {64, 4}, {4096, 4}};
    for (size_t t = 0; t < table_count; ++t) {
        expect(sw_kernels_force(tables[t]->name, NULL) == SW_OK, "force");
        for (size_t c = 0; c < sizeof codecs / sizeof *codecs; ++c) {
            expect(sw_block_codec_check(&codecs[c], NULL) == SW_OK, "a valid codec is accepted");
            for (size_t n = 0; n < NUMELS; ++n)
                for (int wild = 0; wild < 2; ++wild)
                    check_quantize(&codecs[c], numels[n], n % 4, wild);
            check_bound(&codecs[c]);
            check_fold(&codecs[c], false);
            check_fold(&codecs[c], true);
        }
        for (size_t n = 0; n < NUMELS; ++n) {
            check_halves(SW_DTYPE_FLOAT16, numels[n], n % 4);
            check_halves(SW_DTYPE_BFLOAT16, numels[n], n % 4);
        }
        check_halves(SW_DTYPE_FLOAT16, (1u << 19) + 4097, 0); /* bypasses the caches */
        check_halves(SW_DTYPE_BFLOAT16, (1u << 19) + 4097, 0);
    }
    check_errors();
    return finish();
}
