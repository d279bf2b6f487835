/* host_map.h - the map of ranks to hosts. Arithmetic only.
 *
 * Hosts are numbered by their lowest rank, the *carrier*, which alone exchanges bytes with other
 * hosts.
 *
 *   host_of = 0 0 1 1 1     2 hosts; host 0: ranks 0 and 1, carrier 0; host 1: 2, 3, 4, carrier 2
 *
 * Thread rule: any, once made. */
#ifndef SW_COMM_HOST_MAP_H
#define SW_COMM_HOST_MAP_H

#include "base/status.h"

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

#endif
