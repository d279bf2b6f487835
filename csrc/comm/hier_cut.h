/* hier_cut.h - the cut of a buffer into blocks, the pieces that a host folds or sends at a time.
 * Arithmetic only.
 *
 * By host: host h has slice h of host_count equal slices. By rank: a host has its ranks' slices of
 * world_size equal ones, in rank order; no block crosses from one slice to the next.
 *
 *     2 + 1 ranks, slices of 3 blocks     by host: h0 0 1 2 | h1 3 4 5
 *                                         by rank: h0 0 1 2 (rank 0), 3 4 5 (rank 1) | h1 0 1 2
 *
 * By rank, if slices have several owners: a host has the slices that it represents (slice_table.h).
 *
 * Thread rule: any. */
#ifndef SW_COMM_HIER_CUT_H
#define SW_COMM_HIER_CUT_H

#include <stdbool.h>
#include <stddef.h>

#include "comm/comm.h"
#include "comm/host_map.h"
#include "comm/slice_table.h"

typedef struct sw_cut {
    size_t numel, slice; /* elements in total, and in a slice */
    size_t block_numel;  /* elements of a block, except the last of a slice */
    size_t blocks_a_slice;
    size_t block_count; /* the most blocks of any host; other hosts have empty ones at the end */
    bool by_rank;
    const sw_slice_table *table; /* borrowed; by rank only. NULL: one a rank */
} sw_cut;

void sw_cut_init(sw_cut *cut, const sw_host_map *map, size_t numel, size_t element_bytes,
                 size_t block_numel, bool by_rank, const sw_slice_table *table);

/* Return the number of elements of block `block` of `host`, 0 for none, and its first element.
 * *owner: by rank, the rank that owns the slice; else -1. */
size_t sw_cut_block(const sw_cut *cut, const sw_host_map *map, int host, size_t block,
                    size_t *begin, int *owner);

#endif
