/* unit.h - units: sets of parameters that are gathered together into whole ones, and released.
 *
 * Idea: a unit is a range of addresses that lasts as long as the units do. Gathering puts pages
 * behind it and copies every rank's slices there, straight out of the ranks' arena; releasing takes
 * the pages away. No message is sent: ranks update slices only between two barriers of their
 * optimizer's step, and gather only outside of them (the caller's part).
 *
 * What it leaves out: when to gather and release, which is the schedule's (Python's hooks), and
 * what a parameter is.
 *
 * Thread rule: one at a time.
 */
#ifndef SW_ZERO_UNIT_H
#define SW_ZERO_UNIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "zero/shard_state.h"

/* Records of what slices hold: blocks of 8-bit integers (kernels/compress_kernels.h). A cut between
 * slices, and a parameter's first byte, is the first of a block: so values do not depend on where
 * cuts are. */
enum {
    SW_UNIT_BLOCK_NUMEL = 32,
    SW_UNIT_BLOCK_BYTES = SW_UNIT_BLOCK_NUMEL * 4,
    SW_UNIT_RECORD_BYTES = 4 + SW_UNIT_BLOCK_NUMEL,
};

typedef struct sw_unit_run { /* bytes of a slice, and where they go */
    size_t target_bytes;     /* from the unit's first byte */
    size_t rank;             /* whose part of the arena */
    size_t source_bytes;     /* from that part's first byte */
    size_t size_bytes;
    bool coded; /* float32 whose records lie at source_bytes / SW_UNIT_BLOCK_BYTES of the codes */
} sw_unit_run;

typedef struct sw_unit_spec {
    const char *name; /* borrowed: copied */
    size_t size_bytes;
    const sw_unit_run *runs; /* borrowed: copied; in any order, disjoint in the unit */
    size_t run_count;
} sw_unit_spec;

typedef struct sw_units_stats {
    uint64_t gathers, releases, bytes; /* bytes: read from ranks' parts */
    uint64_t gather_ns;
    size_t most_bytes; /* of pages in use at once */
} sw_units_stats;

typedef struct sw_units sw_units;

/* What ranks have: one address a rank, each of so many bytes, borrowed: they outlive the units. */
typedef struct sw_unit_parts {
    uint8_t *const *slices;
    uint8_t *const *codes; /* NULL: none, and no run is coded */
    size_t world_size, slice_bytes, code_bytes;
} sw_unit_parts;

/* `warm_bytes`: pages that stay while no unit needs them. SW_E_INVALID for a run that leaves its
 * unit or part. Every unit is SHARDED and reads as NaN. */
SW_MUST_USE sw_status sw_units_create(const sw_unit_parts *parts, const sw_unit_spec *specs,
                                      size_t count, size_t warm_bytes, const char *label,
                                      sw_units **units, sw_error *err);
/* Takes the addresses away: nothing may point there any more. */
void sw_units_destroy(sw_units *units);

size_t sw_units_count(const sw_units *units);
sw_shard_state sw_unit_state(const sw_units *units, size_t unit);
uint8_t *sw_unit_address(const sw_units *units, size_t unit);
size_t sw_unit_size_bytes(const sw_units *units, size_t unit);
sw_units_stats sw_units_get_stats(const sw_units *units);

typedef enum sw_unit_source { SW_UNIT_SLICES, SW_UNIT_CODES } sw_unit_source;

/* SHARDED to UNSHARDED: its bytes are those that the slices have now, or, of coded runs from CODES,
 * what their records say. SW_E_STATE from elsewhere. Cost: the unit's bytes, read (coded ones: 9 /
 * 32 of them) and written once; one mapping. */
SW_MUST_USE sw_status sw_unit_gather(sw_units *units, size_t unit, sw_unit_source source,
                                     sw_error *err);
/* UNSHARDED to SHARDED. SW_E_STATE from elsewhere. */
SW_MUST_USE sw_status sw_unit_release(sw_units *units, size_t unit, sw_error *err);

/* Of a unit that is SHARDED: the first byte that somebody changed at its addresses since it was
 * released; SIZE_MAX: none, as far as the system tells. What was written is no
 * parameter's, and gone when the unit is gathered, or forgotten. */
size_t sw_unit_find_write(const sw_units *units, size_t unit);
SW_MUST_USE sw_status sw_unit_forget_writes(sw_units *units, size_t unit, sw_error *err);

#endif
