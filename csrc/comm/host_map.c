/* host_map.c - see the header. */
#include "comm/host_map.h"

#include <stdlib.h>
#include <string.h>

sw_status sw_host_map_init(sw_host_map *map, const int *host_of, int world_size, sw_error *err)
{
    size_t count = (size_t)world_size;
    *map = (sw_host_map){.world_size = world_size};
    for (int r = 0; r < world_size; ++r) {
        if (host_of[r] < 0 || host_of[r] > map->host_count)
            SW_FAIL(err, SW_E_INVALID,
                    "hosts must be numbered by their lowest rank: rank %d is on host %d, expected "
                    "one of 0 to %d",
                    r, host_of[r], map->host_count);
        map->host_count += host_of[r] == map->host_count;
    }
    map->host_of = calloc(count, sizeof *map->host_of);
    map->first = calloc((size_t)map->host_count + 1, sizeof *map->first);
    map->member = calloc(count, sizeof *map->member);
    if (!map->host_of || !map->first || !map->member) {
        sw_host_map_fini(map);
        SW_FAIL(err, SW_E_MEMORY, "no memory for a map of %d ranks", world_size);
    }
    memcpy(map->host_of, host_of, count * sizeof *host_of);
    for (int r = 0; r < world_size; ++r)
        map->first[host_of[r] + 1]++;
    for (int h = 0; h < map->host_count; ++h)
        map->first[h + 1] += map->first[h];
    for (int r = world_size - 1; r >= 0;
         --r) /* backwards, so that first[h + 1] is the end of host h */
        map->member[--map->first[host_of[r] + 1]] = r;
    for (int h = 0; h < map->host_count; ++h) /* it has become the start of host h */
        map->first[h] = map->first[h + 1];
    map->first[map->host_count] = world_size;
    return SW_OK;
}

void sw_host_map_fini(sw_host_map *map)
{
    free(map->host_of);
    free(map->first);
    free(map->member);
    map->host_of = map->first = map->member = NULL;
}
