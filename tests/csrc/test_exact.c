/* test_exact.c - exact records. Laws, for each instruction set:
 *   - any bits of any size come back after unpack;
 *   - every set writes the same record;
 *   - pack writes nothing beyond `capacity`, unpack reads nothing beyond the record;
 *   - a truncated record is refused or gives other elements, without memory errors.
 * Values like gradients take 0.88 of their bytes. Also hier_pack: packets, and when they pay. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "comm/hier_block.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

enum { TABLES_MAX = 8, NUMEL_MAX = 5000, GUARD = 0xa5 };

static uint64_t random_state = 88172645463325252u;

static uint32_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 20);
}

typedef enum kind { LIKE_GRADIENTS = 0, ANY_BITS, ZEROS, SPARSE, SPECIAL, KINDS } kind;

static uint32_t draw(kind of, size_t i)
{
    static const uint32_t special[] = {0x00000000, 0x80000000, 0x00000001, 0x807fffff,
                                       0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001,
                                       0xffffffff, 0x3f800000, 0x00800000, 0x7f7fffff};
    float sum = 0;
    uint32_t bits;
    if (of == ANY_BITS)
        return random_bits();
    if (of == SPECIAL)
        return special[random_bits() % (sizeof special / sizeof *special)];
    if (of == ZEROS || (of == SPARSE && random_bits() % 4 > 0))
        return 0;
    for (int k = 0; k < 12; ++k)
        sum += (float)(random_bits() & 0xffff) / 65536;
    sum = (sum - 6) * 1e-4f * (float)(1 + i / 1000);
    memcpy(&bits, &sum, sizeof bits);
    return bits;
}

static void check_round_trip(const sw_compress_kernels *kernels, const char *name, kind of,
                             const uint32_t *source, size_t numel, const unsigned char *expected,
                             size_t expected_bytes)
{
    size_t capacity = numel * 4 + 400;
    unsigned char *record = malloc(capacity + 16);
    uint32_t *out = malloc(numel * 4 + 16);
    memset(record, GUARD, capacity + 16);
    memset(out, GUARD, numel * 4 + 16);
    size_t bytes =
        kernels->exact_pack(record, capacity, (const float *)(const void *)source, numel);
    check(bytes == expected_bytes && memcmp(record, expected, bytes) == 0,
          "%s: all sets write the same record of kind %d, %zu elements", name, (int)of, numel);
    if (bytes > 0) {
        check(record[bytes] == GUARD, "%s: no byte is written beyond the record", name);
        unsigned char *exact = malloc(bytes); /* exact size: a sanitizer sees a read beyond it */
        memcpy(exact, record, bytes);
        check(kernels->exact_unpack((float *)(void *)out, exact, bytes, numel) &&
                  memcmp(out, source, numel * 4) == 0 && ((unsigned char *)out)[numel * 4] == GUARD,
              "%s: kind %d, %zu elements come back", name, (int)of, numel);
        check(kernels->exact_pack(record, bytes - 1, (const float *)(const void *)source, numel) ==
                  0,
              "%s: a capacity of one byte less is refused", name);
        check(!kernels->exact_unpack((float *)(void *)out, exact, bytes - 1, numel),
              "%s: a record of one byte less is refused", name);
        free(exact);
    }
    free(record);
    free(out);
}

static void test_round_trips(void)
{
    static const size_t sizes[] = {1, 2, 31, 63, 64, 65, 127, 128, 1000, 4096, NUMEL_MAX};
    const sw_kernel_table *tables[TABLES_MAX];
    size_t count = sw_kernels_available(tables, TABLES_MAX);
    uint32_t *source = malloc(NUMEL_MAX * 4);
    unsigned char *record = malloc(NUMEL_MAX * 4 + 400);
    for (int of = 0; of < KINDS; ++of)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) {
            size_t numel = sizes[s];
            for (size_t i = 0; i < numel; ++i)
                source[i] = draw((kind)of, i);
            size_t bytes = tables[0]->compress->exact_pack(
                record, numel * 4 + 400, (const float *)(const void *)source, numel);
            for (size_t t = 0; t < count; ++t)
                check_round_trip(tables[t]->compress, tables[t]->name, (kind)of, source, numel,
                                 record, bytes);
            if (of == LIKE_GRADIENTS && numel == 4096)
                check((double)bytes < 0.885 * 4 * (double)numel, "gradients: %zu bytes", bytes);
        }
    free(source);
    free(record);
}

static void test_packets(void)
{
    enum { NUMEL = 1000 };
    uint32_t source[NUMEL], out[NUMEL];
    uint8_t packet[SW_PACKET_HEAD_BYTES + 4 * NUMEL];
    sw_error err;
    for (int of = 0; of < KINDS; ++of) {
        size_t opened = 0;
        for (size_t i = 0; i < NUMEL; ++i)
            source[i] = draw((kind)of, i);
        size_t bytes = sw_packet_fill(packet, source, NUMEL);
        check(bytes <= sw_packet_most_bytes(NUMEL), "a packet keeps its bound");
        check((bytes == sw_packet_most_bytes(NUMEL)) == (of == ANY_BITS),
              "only noise is sent plain: kind %d, %zu bytes", of, bytes);
        check(sw_packet_open(out, packet, NUMEL, &opened, &err) == SW_OK && opened == bytes &&
                  memcmp(out, source, sizeof out) == 0,
              "a packet of kind %d gives its elements", of);
    }
    for (uint64_t claimed = 1; claimed < UINT64_C(1) << 40; claimed = claimed * 3 + 1) {
        size_t opened;
        memcpy(packet, &claimed, sizeof claimed);
        sw_status status = sw_packet_open(out, packet, NUMEL, &opened, &err);
        check(status == SW_E_COMM || claimed <= sizeof packet, "a wrong length is refused");
    }
}

static bool learns_of(sw_packing *packing, uint64_t plain, double mb_per_s, double share)
{
    packing->batch.plain_bytes = plain;
    packing->batch.sent_bytes = (uint64_t)((double)plain * (packing->on ? share : 1));
    sw_packing_learn(packing, packing->on, 300000000, (int64_t)((double)plain / mb_per_s * 1e3));
    return packing->on;
}

static bool learns(sw_packing *packing, double mb_per_s, double share)
{
    return learns_of(packing, 32 << 20, mb_per_s, share);
}

/* A model of 3 MB has two or three batches a step, each too short to decide alone. */
static void test_learning_from_short_batches(void)
{
    sw_packing packing = {.on = false};
    check(!learns_of(&packing, 1 << 20, 119, 0.88) && !learns_of(&packing, 2 << 20, 119, 0.88) &&
              learns_of(&packing, 1 << 20, 119, 0.88),
          "4 MiB of batches on a slow wire decide together");
    check(learns_of(&packing, 3 << 20, 900, 0.88) && !learns_of(&packing, 1 << 20, 900, 0.88),
          "and so do they on a fast wire");
    check(!learns_of(&packing, 3 << 20, 900, 0.88) && !learns_of(&packing, 1 << 20, 119, 0.88),
          "the sum of their times decides");
    packing = (sw_packing){.on = true, .seen_packed = true};
    packing.batch = (sw_packing_span){.plain_bytes = 3 << 20, .sent_bytes = 3 << 20};
    sw_packing_learn(&packing, false, 300000000, 20000000);
    check(packing.seen.plain_bytes == 3 << 20 && !packing.seen_packed && packing.on,
          "bytes sent before the decision do not count as packed");
    check(learns_of(&packing, 3 << 20, 119, 0.88) && packing.seen.plain_bytes == 3 << 20,
          "plain and packed batches are not mixed");
    packing = (sw_packing){.on = false};
    for (int i = 0; i < 100; ++i)
        check(!learns_of(&packing, 500 << 10, 10, 0.88), "short batches measure latency, not rate");
}

static void test_learning(void)
{
    sw_packing packing = {.on = false};
    check(!learns(&packing, 900, 0.88), "a fast wire gets plain blocks");
    check(learns(&packing, 119, 0.88) && learns(&packing, 135, 0.88), "a slow wire gets packets");
    check(learns(&packing, 340, 0.88), "packets stay if the wire is fast only with them");
    check(!learns(&packing, 900, 0.88), "packets stop on a fast wire");
    packing = (sw_packing){.batch = {.plain_bytes = 1000, .sent_bytes = 1000}};
    sw_packing_learn(&packing, false, 300000000, 1000000000);
    check(!packing.on && packing.batch.plain_bytes == 0, "few bytes decide nothing");
    check(learns(&packing, 119, 1.0) && !learns(&packing, 119, 1.0),
          "packets that save nothing stop");
    int tries = 0;
    while (tries < 1000 && !learns(&packing, 119, 1.0))
        ++tries;
    check(tries > 10 && tries < 100, "and are tried again later, not after %d batches", tries);
    sw_packing_learn(&packing, false, 0, 1);
    check(!packing.on, "a limit of 0 never packs");
    sw_packing_learn(&packing, true, UINT64_MAX, 1);
    check(packing.on, "the greatest limit always packs");
}

int main(void)
{
    test_round_trips();
    test_packets();
    test_learning();
    test_learning_from_short_batches();
    return check_result();
}
