/* host_map.h - which ranks, slices and blocks are on which host, and the order of messages between
 * hosts. Arithmetic only.
 *
 * Hosts are numbered by their lowest rank, the *carrier*, which alone exchanges bytes with other
 * hosts.
 *
 *   host_of = 0 0 1 1 1     2 hosts; host 0: ranks 0 and 1, carrier 0; host 1: 2, 3, 4, carrier 2
 *
 * Thread rule: any, once made. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "comm/comm.h"

/* ---- ranks and hosts ---- */

typedef struct sw_host_map {
    int world_size, host_count;
    int *host_of; /* owned; world_size */
    int *first;   /* owned; host_count + 1: index of each host's first rank in `member` */
    int *member;  /* owned; world_size ranks, host by host, ascending inside */
} sw_host_map;

/* SW_E_INVALID unless hosts are numbered by their lowest rank. */
SW_MUST_USE sw_status sw_host_map_init(sw_host_map *map, const int *host_of, int world_size,
                                       sw_error *err);
void sw_host_map_fini(sw_host_map *map);

static inline int sw_host_size(const sw_host_map *map, int host)
{
    return map->first[host + 1] - map->first[host];
}

static inline const int *sw_host_members(const sw_host_map *map, int host)
{
    return map->member + map->first[host];
}

static inline int sw_host_carrier(const sw_host_map *map, int host)
{
    return map->member[map->first[host]];
}

/* ---- owners of slices ---- */

/* A look-up of slice owners: the slices that each host's ranks own, and those that they represent.
 *
 * One of a slice's owners *represents* it when only one message is needed. Replicas take turns, so
 * that all hosts represent about the same number of slices.
 *
 *   4 ranks, 2 hosts, of_rank 0 1 0 1, replica 0 0 1 1
 *       host 0 owns slices 0 and 1 by ranks 0 and 1, host 1 both by ranks 2 and 3
 *       rank 0 represents slice 0, rank 3 slice 1
 *
 * Made once for each sw_slices; making it costs O(ranks), a look-up O(1) or O(log slices). */

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

/* Fill in rank_of[replica * count + slice]; false unless every replica owns every slice once. */
bool sw_slices_place(const sw_slices *slices, int world_size, int *rank_of);

/* SW_E_INVALID unless it does. */
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

/* ---- blocks ---- */

/* The cut of a buffer into blocks, the pieces that a host folds or sends at a time.
 *
 * By host: host h has slice h of host_count equal slices. By rank: a host has its ranks' slices of
 * world_size equal ones, in rank order; no block crosses from one slice to the next.
 *
 *     2 + 1 ranks, slices of 3 blocks     by host: h0 0 1 2 | h1 3 4 5
 *                                         by rank: h0 0 1 2 (rank 0), 3 4 5 (rank 1) | h1 0 1 2
 *
 * By rank, if slices have several owners: a host has the slices that it represents. */

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

/* ---- the order of messages ---- */

/* The order of messages in an all-gather between hosts.
 *
 * In round k a host sends all data that it has to the hosts j * radix^k before it, and receives
 * from those j * radix^k after it, j = 1 to radix - 1, all modulo the number of hosts. Before round
 * k it has the data of radix^k hosts, itself first. After ceil(log_radix hosts) rounds it has the
 * data of all, each received once. (Hensgen, Finkel and Manber, 1988; as an all-gather Bruck et
 * al., 1997.)
 *
 *   20 hosts, radix 8, host 18     round 0: from 19, 0, 1, ... 5, each about itself
 *                                  round 1: from 6 about 6 to 13, from 14 about 14 to 17 */

enum { SW_DISSEMINATION_RADIX = 8 };

typedef struct sw_hop {
    int round;
    int to;    /* the receiver of the data of this host and the count - 1 hosts after it */
    int from;  /* the sender of its own data and that of the hosts after it */
    int count; /* hosts in the message, sender first, modulo the number of hosts */
} sw_hop;

typedef struct sw_dissemination {
    int host, host_count, rounds;
    int hop_count; /* at most (radix - 1) * rounds; in the order of rounds */
    sw_hop *hops;  /* owned */
    int peer_count;
    int *peers; /* owned: every host of some hop, ascending */
} sw_dissemination;

/* `radix` >= 2. SW_E_MEMORY is the only failure. */
SW_MUST_USE sw_status sw_dissemination_init(sw_dissemination *made, int host, int host_count,
                                            int radix, sw_error *err);
void sw_dissemination_fini(sw_dissemination *made);
