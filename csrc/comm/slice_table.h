/* slice_table.h - a look-up of slice owners: the slices that each host's ranks own, and those that
 * they represent. Arithmetic only.
 *
 * One of a slice's owners *represents* it when only one message is needed. Replicas take turns, so
 * that all hosts represent about the same number of slices.
 *
 *   4 ranks, 2 hosts, of_rank 0 1 0 1, replica 0 0 1 1
 *       host 0 owns slices 0 and 1 by ranks 0 and 1, host 1 both by ranks 2 and 3
 *       rank 0 represents slice 0, rank 3 slice 1
 *
 * Made once for each sw_slices; making it costs O(ranks), a look-up O(1) or O(log slices). Thread
 * rule: any, once made. */
#ifndef SW_COMM_SLICE_TABLE_H
#define SW_COMM_SLICE_TABLE_H

#include <stdbool.h>

#include "comm/comm.h"
#include "comm/host_map.h"

typedef struct sw_slice_table {
    sw_slices slices;     /* a copy */
    int *of_rank;         /* owned, as all memory here: the copy's of_rank, then replica_of_rank */
    int *representatives; /* ranks, host by host, in the order of slices */
    int *represented_of;  /* host_count + 1 begins of each host's ranks in `representatives` */
    int *owned;           /* slices, host by host, ascending, each once */
    int *owners;          /* the lowest rank of that host that owns it */
    int *owned_of;        /* host_count + 1 begins of each host's slices in `owned` */
    int most_represented; /* slices of the host that represents the most */
    bool is_covered;      /* every host has an owner of every slice */
} sw_slice_table;

/* SW_E_INVALID unless every replica owns every slice once. */
SW_MUST_USE sw_status sw_slice_table_init(sw_slice_table *table, const sw_host_map *map,
                                          const sw_slices *slices, sw_error *err);
void sw_slice_table_fini(sw_slice_table *table);

/* Return true if the table was made from `map` and `slices`. */
bool sw_slice_table_is_of(const sw_slice_table *table, const sw_host_map *map,
                          const sw_slices *slices);

/* Return the lowest rank of `host` that owns slice `index`; -1: none does. `table` NULL: rank r
 * owns slice r alone. */
int sw_slice_owner(const sw_slice_table *table, const sw_host_map *map, int host, int index);
/* Return the rank for the `number`-th slice that `host` represents; -1: there are fewer. */
int sw_slice_representative(const sw_slice_table *table, const sw_host_map *map, int host,
                            size_t number);

#endif
