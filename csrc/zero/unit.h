/* unit.h - units: sets of parameters that are gathered and released together.
 *
 * A unit is a range of addresses that lasts as long as the units do. A gather maps pages there and
 * copies every rank's slices into them, directly from the ranks' arena. A release removes the
 * pages. No message is sent: the caller ensures that ranks update slices only between the two
 * barriers of a step and gather only outside them.
 *
 * Left out: the schedule of gathers and releases (Python's hooks), and the meaning of a parameter.
 *
 * Thread rule: one at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "zero/shard_state.h"

/* Records of slices: blocks of 8-bit integers (kernels/compress_kernels.h). Every slice and every
 * parameter begins at a block, so values do not depend on where slices are cut. */
enum {
    SW_UNIT_BLOCK_NUMEL = 32,
    SW_UNIT_BLOCK_BYTES = SW_UNIT_BLOCK_NUMEL * 4,
    SW_UNIT_RECORD_BYTES = 4 + SW_UNIT_BLOCK_NUMEL,
};

typedef struct sw_unit_run { /* bytes of a slice, and their target in the unit */
    size_t target_bytes;     /* offset from the unit's first byte */
    size_t rank;             /* the rank whose part of the arena has them */
    size_t source_bytes;     /* offset from that part's first byte */
    size_t size_bytes;
    bool coded; /* float32 with records at source_bytes / SW_UNIT_BLOCK_BYTES of the codes */
} sw_unit_run;

typedef struct sw_unit_spec {
    const char *name; /* borrowed: copied */
    size_t size_bytes;
    const sw_unit_run *runs; /* borrowed: copied; in any order, disjoint in the unit */
    size_t run_count;
} sw_unit_spec;

typedef struct sw_units_stats {
    uint64_t gathers, releases, bytes; /* bytes: read from the ranks' parts */
    uint64_t gather_ns;
    size_t most_bytes; /* maximum bytes of pages in use at once */
} sw_units_stats;

typedef struct sw_units sw_units;

/* The ranks' memory: one address a rank, with the same size for all ranks. It outlives the units.
 */
typedef struct sw_unit_parts {
    uint8_t *const *slices;
    uint8_t *const *codes; /* NULL: no run is coded */
    size_t world_size, slice_bytes, code_bytes;
    const struct sw_file_memory *file, *code_file; /* their homes on a disk; NULL: memory */
} sw_unit_parts;

/* Create the units, all SHARDED and reading as NaN. `warm_bytes` of pages stay allocated while no
 * unit needs them. SW_E_INVALID for a run that exceeds its unit or part. */
SW_MUST_USE sw_status sw_units_create(const sw_unit_parts *parts, const sw_unit_spec *specs,
                                      size_t count, size_t warm_bytes, const char *label,
                                      sw_units **units, sw_error *err);
/* Unmap the addresses and destroy. No pointer to them may be left. */
void sw_units_destroy(sw_units *units);

size_t sw_units_count(const sw_units *units);
sw_shard_state sw_unit_state(const sw_units *units, size_t unit);
uint8_t *sw_unit_address(const sw_units *units, size_t unit);
sw_units_stats sw_units_get_stats(const sw_units *units);

typedef enum sw_unit_source { SW_UNIT_SLICES, SW_UNIT_CODES } sw_unit_source;

/* SHARDED to UNSHARDED: copy the current bytes of the slices, or, with CODES, decode the records of
 * coded runs. SW_E_STATE from another state; SW_E_OS: a file could not be read, and the unit is
 * SHARDED. Cost: the unit's bytes, read (coded runs: 9 / 32 of them) and written once; one mapping.
 * From a file: a call a run, and the unit that came next the last time is read ahead. */
SW_MUST_USE sw_status sw_unit_gather(sw_units *units, size_t unit, sw_unit_source source,
                                     sw_error *err);
/* UNSHARDED to SHARDED. SW_E_STATE from another state. */
SW_MUST_USE sw_status sw_unit_release(sw_units *units, size_t unit, sw_error *err);

/* Return the first byte of a SHARDED unit that was written since its release; SIZE_MAX if none, as
 * far as the kernel tells. Such a write changes no parameter; the next gather, or forgetting the
 * writes, discards it. */
size_t sw_unit_find_write(const sw_units *units, size_t unit);
SW_MUST_USE sw_status sw_unit_forget_writes(sw_units *units, size_t unit, sw_error *err);

/* A step ends: gathers are expected in the order of this one. */
void sw_units_end_step(sw_units *units);
