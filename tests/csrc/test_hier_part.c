/* test_hier_part.c - the laws of descriptor.h, over ranks that come with one of a few descriptions:
 *
 *   P1  merged in any order, in any tree, and any of them several times, the part of a set of ranks
 *       is the one that a scan finds: the lowest rank, and the lowest that contradicts it
 *   P2  the sentence is the same, and there is none where all agree
 *   P3  written and read back a part is the same; no beginning of it is taken for one
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "comm/descriptor.h"

enum { RANKS = 9, SETS = 3000 };

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static unsigned random_below(unsigned limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)((random_state * 0x2545f4914f6cdd1du >> 32) % limit);
}

typedef struct rank_came {
    sw_descriptor descriptor;
    uint32_t said_bytes;
} rank_came;

static void draw(rank_came came[RANKS], unsigned kinds)
{
    for (int r = 0; r < RANKS; ++r) {
        sw_op op = {.kind = SW_OP_ALL_REDUCE, .label = "a bucket"};
        op.numel = 64 + (random_below(4) == 0 ? random_below(kinds) : 0);
        op.round = random_below(3) ? 1 + (random_below(6) == 0 ? random_below(kinds) : 0) : 0;
        op.step = op.round ? 7 : 0;
        sw_descriptor_fill(&came[r].descriptor, &op, false);
        came[r].said_bytes = 8 + (random_below(12) == 0 ? 8 * random_below(kinds) : 0);
    }
}

/* The ranks that a scan finds; -1: none. */
typedef struct found {
    int lowest, odd, counting, odd_counting;
} found;

static bool differ(const rank_came *a, const rank_came *b)
{
    return a->said_bytes != b->said_bytes || a->descriptor.numel != b->descriptor.numel;
}

static found scan(const rank_came came[RANKS], unsigned set)
{
    found f = {-1, -1, -1, -1};
    for (int r = 0; r < RANKS; ++r) {
        if (!(set >> r & 1u))
            continue;
        if (f.lowest < 0)
            f.lowest = r;
        else if (f.odd < 0 && differ(&came[f.lowest], &came[r]))
            f.odd = r;
        if (came[r].descriptor.round == 0)
            continue;
        if (f.counting < 0)
            f.counting = r;
        else if (f.odd_counting < 0 &&
                 came[f.counting].descriptor.round != came[r].descriptor.round)
            f.odd_counting = r;
    }
    return f;
}

/* Of `set`, split at random, some ranks into both halves. */
static void merge(const rank_came came[RANKS], unsigned set, sw_part *part)
{
    if ((set & (set - 1)) == 0) {
        int rank = 0;
        while (!(set >> rank & 1u))
            ++rank;
        sw_part_begin(part, rank, &came[rank].descriptor, came[rank].said_bytes);
        return;
    }
    sw_part other;
    unsigned half;
    do
        half = random_below(1u << RANKS) & set;
    while (half == 0 || half == set);
    unsigned twice = (set & ~half) | (random_below(1u << RANKS) & set);
    merge(came, half, part);
    merge(came, twice == set ? set & ~half : twice, &other);
    sw_part_merge(part, &other);
}

static void check_part(const rank_came came[RANKS], unsigned set)
{
    sw_part part, again;
    sw_error one, two;
    found f = scan(came, set);
    merge(came, set, &part);
    check(part.lowest.rank == f.lowest && part.odd.rank == f.odd &&
              part.counting.rank == f.counting && part.odd_counting.rank == f.odd_counting,
          "merged: %d %d %d %d, by a scan: %d %d %d %d", part.lowest.rank, part.odd.rank,
          part.counting.rank, part.odd_counting.rank, f.lowest, f.odd, f.counting, f.odd_counting);
    merge(came, set, &again);
    sw_status status = sw_part_check(&part, 3, &one);
    check(status == sw_part_check(&again, 3, &two), "the same verdict");
    check((status == SW_OK) == (f.odd < 0 && f.odd_counting < 0), "which is right");
    check(status == SW_OK || strcmp(one.message, two.message) == 0, "the same sentence");
    uint8_t bytes[SW_PART_MOST_BYTES];
    size_t used, size = sw_part_write(&part, bytes);
    sw_part read;
    check(sw_part_read(&read, bytes, sizeof bytes, &used) && used == size, "read back");
    check(sw_part_check(&read, 3, &two) == status &&
              (status == SW_OK || strcmp(one.message, two.message) == 0),
          "and the same");
    for (size_t cut = 0; cut < size; ++cut)
        check(!sw_part_read(&read, bytes, cut, &used), "%zu of %zu bytes are no part", cut, size);
}

int main(void)
{
    rank_came came[RANKS];
    for (int i = 0; i < SETS; ++i) {
        draw(came, 1 + (unsigned)i % 3);
        check_part(came, 1 + random_below((1u << RANKS) - 1));
    }
    return check_result();
}
