/* fuzz.c - see the header. */
#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROOM = 2048 };

static const uint32_t edges[] = {0,          1,          2,          8,          9,
                                 0x7fffffff, 0x80000000, 0xffffffff, 0xfffffffe, 0x10000};

void fuzz_require(bool holds, const char *law)
{
    if (!holds) {
        fprintf(stderr, "broken: %s\n", law);
        abort();
    }
}

/* ---- edits ---- */

uint8_t fuzz_take(fuzz_script *script)
{
    if (script->left == 0)
        return 0;
    --script->left;
    return *script->at++;
}

/* One change at `at`: a byte, a bit, an integer, a run taken out or doubled. */
static size_t edit(uint8_t *bytes, size_t size, size_t room, size_t at, uint8_t kind, uint8_t value)
{
    size_t run = value;
    switch (kind % 5) {
    case 0:
        if (at < size)
            bytes[at] = value;
        return size;
    case 1:
        if (at < size)
            bytes[at] ^= (uint8_t)(1u << value % 8);
        return size;
    case 2:
        if (at + sizeof *edges <= size)
            memcpy(bytes + at, &edges[value % (sizeof edges / sizeof *edges)], sizeof *edges);
        return size;
    case 3:
        if (at + run > size)
            return at < size ? at : size;
        memmove(bytes + at, bytes + at + run, size - at - run);
        return size - run;
    default:
        if (at + run > size || size + run > room)
            return size;
        memmove(bytes + at + run, bytes + at, size - at);
        return size + run;
    }
}

size_t fuzz_edit(fuzz_script *script, int most, uint8_t *bytes, size_t size, size_t room)
{
    for (int i = 0; i < most && script->left >= 4; ++i) {
        size_t at = fuzz_take(script), high = fuzz_take(script);
        uint8_t kind = fuzz_take(script), value = fuzz_take(script);
        size = edit(bytes, size, room, (at + 256 * high) % (size + 1), kind, value);
    }
    return size;
}

/* ---- the driver ---- */

static unsigned drawn = 20;

static size_t chance(size_t limit)
{
    return (size_t)rand_r(&drawn) % limit;
}

static size_t put_in(uint8_t *bytes, size_t size, size_t room, const void *piece, size_t length)
{
    size_t at = chance(size + 1);
    if (size + length > room)
        return size;
    memmove(bytes + at + length, bytes + at, size - at);
    memcpy(bytes + at, piece, length);
    return size + length;
}

static size_t mutate(const fuzz_plan *plan, uint8_t *bytes, size_t size, size_t room)
{
    const char *piece = plan->piece_count ? plan->pieces[chance(plan->piece_count)] : "";
    uint8_t noise[8];
    for (size_t i = 0; i < sizeof noise; ++i)
        noise[i] = (uint8_t)rand_r(&drawn);
    switch (chance(4)) {
    case 0:
        return put_in(bytes, size, room, noise, 4 + chance(5));
    case 1:
        return put_in(bytes, size, room, piece, strlen(piece));
    default:
        return edit(bytes, size, room, chance(size + 1), noise[0], noise[1] % 32);
    }
}

int fuzz_main(int argc, char **argv, const fuzz_plan *plan)
{
    const char *is_long = getenv("SW_TEST_LONG");
    long rounds = argc > 1                       ? atol(argv[1])
                  : is_long && is_long[0] == '1' ? plan->thorough
                                                 : plan->quick;
    for (long round = 0; round < rounds; ++round) {
        const fuzz_seed *seed = &plan->seeds[chance(plan->seed_count)];
        uint8_t bytes[ROOM];
        size_t size = seed->size;
        memcpy(bytes, seed->text, size);
        for (size_t changes = chance(5); changes > 0; --changes)
            size = 1 + mutate(plan, bytes + 1, size - 1, sizeof bytes - 1);
        (void)plan->target(bytes, size);
    }
    return 0;
}
