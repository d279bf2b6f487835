/* test_unit.c - the laws of csrc/zero.
 *
 *   U1  a state has the moves of its table and no others; a refused move changes nothing and names
 *       both states
 *   U2  a gathered unit has the current bytes of every rank's slices, in any ring
 *   U3  a released unit reads 0xff everywhere, at the same addresses
 *   U4  pages in use are those of the unsharded units, in chunks, and the lowest are reused first
 *   U5  a run that exceeds its unit, its part or the ranks is refused
 *   U6  every allocation and mapping may fail: an error, and nothing is kept
 *   U7  a write to a released unit is found, byte by byte, and reaches no parameter
 *   U8  a coded run has the values of its records or of the slices, as asked
 */
#include "zero/unit.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "faults.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"
#include "zero/page_ring.h"

enum { RANKS = 3, PART_BYTES = 3 << 20, UNITS = 4 };

static uint8_t *parts[RANKS];
static const sw_unit_parts whole = {
    .slices = parts, .world_size = RANKS, .slice_bytes = PART_BYTES};

static uint8_t byte_of(size_t rank, size_t at, unsigned round)
{
    return (uint8_t)(rank * 71 + at * 13 + at / 4096 + round);
}

static void fill_parts(unsigned round)
{
    for (size_t r = 0; r < RANKS; ++r)
        for (size_t i = 0; i < PART_BYTES; ++i)
            parts[r][i] = byte_of(r, i, round);
}

/* Unit sizes: none, less than a page, several chunks, exactly one. Each rank has a third of each,
 * in turn. */
static const size_t sizes[UNITS] = {0, 999, 5u << 20, 2u << 20};
static sw_unit_run runs[UNITS][RANKS];
static sw_unit_spec specs[UNITS];

static void plan(void)
{
    static const char *const names[UNITS] = {"none", "small", "large", "chunk"};
    for (size_t u = 0; u < UNITS; ++u) {
        size_t begin = 0;
        for (size_t r = 0; r < RANKS; ++r) {
            size_t end = r + 1 == RANKS ? sizes[u] : sizes[u] / RANKS * (r + 1);
            runs[u][r] = (sw_unit_run){begin, r, 77 * u, end - begin, false};
            begin = end;
        }
        specs[u] = (sw_unit_spec){names[u], sizes[u], runs[u], sizes[u] ? RANKS : 0};
    }
}

static size_t wrong_bytes(const sw_units *units, size_t u, unsigned round)
{
    const uint8_t *bytes = sw_unit_address(units, u);
    size_t wrong = 0;
    for (size_t r = 0; r < specs[u].run_count; ++r)
        for (size_t i = 0; i < runs[u][r].size_bytes; ++i)
            wrong += bytes[runs[u][r].target_bytes + i] !=
                     byte_of(r, runs[u][r].source_bytes + i, round);
    return wrong;
}

static size_t bytes_not_blank(const sw_units *units, size_t u)
{
    const uint8_t *bytes = sw_unit_address(units, u);
    size_t wrong = 0;
    for (size_t i = 0; i < sizes[u]; ++i)
        wrong += bytes[i] != 0xff;
    return wrong;
}

static void check_moves(void)
{
    static const int to[SW_SHARD_STATE_COUNT][SW_SHARD_EVENT_COUNT] = {
        /*                gather              complete            fail             release */
        [SW_SHARD_SHARDED] = {SW_SHARD_GATHERING, -1, -1, -1},
        [SW_SHARD_GATHERING] = {-1, SW_SHARD_UNSHARDED, SW_SHARD_SHARDED, -1},
        [SW_SHARD_UNSHARDED] = {-1, -1, -1, SW_SHARD_SHARDED},
    };
    sw_error err;
    for (int from = 0; from < SW_SHARD_STATE_COUNT; ++from)
        for (int event = 0; event < SW_SHARD_EVENT_COUNT; ++event) {
            sw_shard_state state = (sw_shard_state)from;
            sw_status status = sw_shard_move(&state, (sw_shard_event)event, "u", &err);
            bool legal = to[from][event] >= 0;
            check(status == (legal ? SW_OK : SW_E_STATE) &&
                      (int)state == (legal ? to[from][event] : from),
                  "move %d from state %d gave %s, state %d", event, from, sw_status_name(status),
                  (int)state);
            if (!legal)
                check(strstr(err.message, sw_shard_state_name((sw_shard_state)from)) &&
                          strstr(err.message, "'u'"),
                      "the sentence names unit and state: %s", err.message);
        }
    sw_shard_state state = SW_SHARD_SHARDED;
    check(sw_shard_move(&state, SW_SHARD_EVENT_COUNT, "u", &err) == SW_E_INVALID,
          "an unknown move is refused");
}

static void check_units(size_t warm_bytes)
{
    sw_units *units = NULL;
    sw_error err = {.message = ""};
    fill_parts(0);
    if (!check(sw_units_create(&whole, specs, UNITS, warm_bytes, "test", &units, &err) == SW_OK,
               "units are created: %s", err.message))
        return;
    check(sw_units_count(units) == UNITS, "all units are counted");
    for (unsigned round = 0; round < 3; ++round) {
        fill_parts(round);
        for (size_t i = 0; i < UNITS; ++i) {
            size_t u = (i + round) % UNITS;
            const uint8_t *address = sw_unit_address(units, u);
            check(bytes_not_blank(units, u) == 0, "unit %zu is blank", u);
            check(sw_unit_release(units, u, &err) == SW_E_STATE, "a sharded unit is not released");
            check(sw_unit_gather(units, u, SW_UNIT_SLICES, &err) == SW_OK, "unit %zu: %s", u,
                  err.message);
            check(sw_unit_gather(units, u, SW_UNIT_SLICES, &err) == SW_E_STATE,
                  "an unsharded unit is not gathered again");
            check(sw_unit_state(units, u) == SW_SHARD_UNSHARDED, "the unit is unsharded");
            check(wrong_bytes(units, u, round) == 0, "unit %zu has the slices' bytes", u);
            if (round < 2) {
                check(sw_unit_release(units, u, &err) == SW_OK, "release: %s", err.message);
                check(bytes_not_blank(units, u) == 0, "unit %zu is blank again", u);
            }
            check(sw_unit_address(units, u) == address, "addresses stay");
        }
    }
    for (size_t u = 0; u < UNITS; ++u)
        check(wrong_bytes(units, u, 2) == 0, "all are unsharded at once, unit %zu too", u);
    sw_units_stats stats = sw_units_get_stats(units);
    check(stats.gathers == 3 * UNITS && stats.releases == 2 * UNITS, "moves are counted");
    check(stats.most_bytes == (1 + 3 + 1) * (size_t)SW_PAGE_RING_CHUNK_BYTES, "%zu bytes in use",
          stats.most_bytes);
    sw_units_destroy(units);
}

static void check_writes(void)
{
    sw_units *units = NULL;
    sw_error err = {.message = ""};
    const size_t large = 2, at = (3u << 20) + 4321;
    if (!check(sw_units_create(&whole, specs, UNITS, 0, "test", &units, &err) == SW_OK,
               "units are created: %s", err.message))
        return;
    for (size_t u = 0; u < UNITS; ++u)
        check(sw_unit_find_write(units, u) == SIZE_MAX, "no write to unit %zu is found", u);
    uint8_t *bytes = sw_unit_address(units, large);
    check(bytes_not_blank(units, large) == 0 && sw_unit_find_write(units, large) == SIZE_MAX,
          "a read is no write");
    bytes[at] = 0xff;
    check(sw_unit_find_write(units, large) == SIZE_MAX, "a write that changes nothing is no write");
    bytes[at] = 1;
    bytes[at + 5000] = 1;
    check(sw_unit_find_write(units, large) == at, "the write is found at %zu",
          sw_unit_find_write(units, large));
    check(bytes_not_blank(units, 3) == 0, "the write does not show in other units");
    check(sw_unit_forget_writes(units, large, &err) == SW_OK && bytes_not_blank(units, large) == 0,
          "the write is forgotten");
    bytes[0] = 7;
    check(sw_unit_gather(units, large, SW_UNIT_SLICES, &err) == SW_OK &&
              wrong_bytes(units, large, 9) == 0,
          "a write does not outlast a gather");
    check(sw_unit_find_write(units, large) == SIZE_MAX, "an unsharded unit may be written");
    sw_units_destroy(units);
}

static void check_refusals(void)
{
    static const sw_unit_run wrong[] = {
        {0, RANKS, 0, 1, false},    {1, 0, 0, 1000, false},     {0, 0, PART_BYTES, 1, false},
        {SIZE_MAX, 0, 0, 2, false}, {0, 0, SIZE_MAX, 2, false}, {0, 0, 0, 128, true},
    };
    sw_error err;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
        sw_unit_spec spec = {"bad", 1000, &wrong[i], 1};
        sw_units *units = NULL;
        check(sw_units_create(&whole, &spec, 1, 0, "test", &units, &err) == SW_E_INVALID &&
                  !units && strstr(err.message, "'bad'"),
              "run %zu is refused: %s", i, err.message);
    }
}

/* Two float32 runs, the second with a short last block, and one run that is copied. */
static void check_codes(void)
{
    enum { NUMEL = 4096, CODE_BYTES = NUMEL / SW_UNIT_BLOCK_NUMEL * SW_UNIT_RECORD_BYTES };
    static const sw_unit_run coded[] = {
        {0, 1, 256, 1280, true}, {1280, 2, 128, 500, true}, {1792, 0, 64, 100, false}};
    static float expected[NUMEL];
    uint8_t *codes[RANKS];
    sw_error err = {.message = ""};
    sw_units *units = NULL;
    const sw_compress_kernels *kernels = sw_kernels()->compress;
    for (size_t r = 0; r < RANKS; ++r) {
        float *slice = (float *)(void *)parts[r];
        for (size_t i = 0; i < NUMEL; ++i)
            slice[i] = (float)((i * 37 + r * 11) % 101) - 50.0f;
        codes[r] = malloc(CODE_BYTES);
        kernels->block_quantize(codes[r], slice, NULL, NUMEL, SW_UNIT_BLOCK_NUMEL, 8);
    }
    const sw_unit_parts both = {.slices = parts,
                                .codes = codes,
                                .world_size = RANKS,
                                .slice_bytes = PART_BYTES,
                                .code_bytes = CODE_BYTES};
    const sw_unit_spec spec = {"coded", 2048, coded, 3};
    check(sw_units_create(&both, &spec, 1, 0, "test", &units, &err) == SW_OK, "%s", err.message);
    const uint8_t *bytes = sw_unit_address(units, 0);
    for (int source = SW_UNIT_SLICES; source <= SW_UNIT_CODES; ++source) {
        check(sw_unit_gather(units, 0, (sw_unit_source)source, &err) == SW_OK, "%s", err.message);
        for (size_t i = 0; i < 3; ++i) {
            const sw_unit_run *run = &coded[i];
            const void *wanted = parts[run->rank] + run->source_bytes;
            if (run->coded && source == SW_UNIT_CODES) {
                kernels->block_dequantize(expected, codes[run->rank], NUMEL, SW_UNIT_BLOCK_NUMEL, 8,
                                          false);
                wanted = (const uint8_t *)(void *)expected + run->source_bytes;
                check(memcmp(wanted, parts[run->rank] + run->source_bytes, run->size_bytes) != 0,
                      "rounded");
            }
            check(memcmp(bytes + run->target_bytes, wanted, run->size_bytes) == 0,
                  "run %zu has its values", i);
        }
        check(sw_unit_release(units, 0, &err) == SW_OK, "%s", err.message);
    }
    check(sw_units_get_stats(units).bytes == (1280 + 500 + 100) + (10 + 4) * 36 + 100,
          "the bytes read are counted");
    sw_units_destroy(units);
    static const sw_unit_run wrong[] = {
        {0, 0, 64, 128, true}, {0, 0, 0, 126, true}, {0, 0, NUMEL * 4, 4, true}};
    for (size_t i = 0; i < 3; ++i) {
        const sw_unit_spec bad = {"bad", 1000, &wrong[i], 1};
        check(sw_units_create(&both, &bad, 1, 0, "test", &units, &err) == SW_E_INVALID &&
                  strstr(err.message, "a coded run"),
              "coded run %zu is refused: %s", i, err.message);
    }
    for (size_t r = 0; r < RANKS; ++r)
        free(codes[r]);
}

static void check_faults(void)
{
    sw_error err;
    long before = faults_mapped();
    for (long nth = 1;; ++nth) {
        sw_units *units = NULL;
        faults_arm(nth);
        sw_status status = sw_units_create(&whole, specs, UNITS, 4u << 20, "test", &units, &err);
        for (size_t u = 0; status == SW_OK && u < UNITS; ++u) {
            status = sw_unit_gather(units, u, SW_UNIT_SLICES, &err);
            if (status == SW_OK)
                status = sw_unit_release(units, u, &err);
            else
                check(sw_unit_state(units, u) == SW_SHARD_SHARDED,
                      "a failed gather leaves nothing");
        }
        bool over = faults_count() < nth;
        faults_arm(0);
        check(status == SW_OK || status == SW_E_MEMORY, "allocation %ld: %s", nth,
              sw_status_name(status));
        for (size_t u = 0; units && u < UNITS; ++u)
            if (sw_unit_state(units, u) == SW_SHARD_SHARDED) {
                check(sw_unit_gather(units, u, SW_UNIT_SLICES, &err) == SW_OK &&
                          wrong_bytes(units, u, 9) == 0,
                      "the next gather succeeds");
            }
        sw_units_destroy(units);
        check(faults_mapped() == before, "nothing stays mapped after failure %ld", nth);
        if (over) {
            check(status == SW_OK, "without a failed allocation all succeeds: %s", err.message);
            break;
        }
    }
}

int main(void)
{
    for (size_t r = 0; r < RANKS; ++r)
        parts[r] = malloc(PART_BYTES);
    plan();
    check_moves();
    check_units(0);
    check_units(1u << 20);
    check_units(100u << 20);
    check_refusals();
    fill_parts(9);
    check_writes();
    check_faults();
    check_codes();
    for (size_t r = 0; r < RANKS; ++r)
        free(parts[r]);
    return check_result();
}
