/* slice_table.c - see the header. */
#include "comm/slice_table.h"

#include <stdlib.h>
#include <string.h>

/* Fill in the rank of each (replica, slice); return false if one has none. */
static bool place_ranks(int *rank_of, int world_size, const sw_slices *slices)
{
    for (int r = 0; r < world_size; ++r)
        rank_of[r] = -1;
    if (slices->count < 1 || world_size % slices->count != 0)
        return false;
    for (int r = 0; r < world_size; ++r) {
        int replica = slices->replica_of_rank[r], index = slices->of_rank[r];
        if (replica < 0 || replica >= world_size / slices->count || index < 0 ||
            index >= slices->count || rank_of[replica * slices->count + index] >= 0)
            return false;
        rank_of[replica * slices->count + index] = r;
    }
    return true;
}

/* Return the rank that represents slice `index`. */
static int representative_of(const sw_slice_table *table, const sw_host_map *map,
                             const int *rank_of, int index)
{
    int count = table->slices.count;
    return rank_of[index % (map->world_size / count) * count + index];
}

static void list_representatives(sw_slice_table *table, const sw_host_map *map, const int *rank_of)
{
    int *end = table->represented_of + 1; /* end of each host's list so far */
    for (int index = 0; index < table->slices.count; ++index)
        end[map->host_of[representative_of(table, map, rank_of, index)]]++;
    for (int h = 0, at = 0; h < map->host_count; ++h) {
        int represented = end[h];
        table->most_represented =
            represented > table->most_represented ? represented : table->most_represented;
        end[h] = at;
        at += represented;
    }
    for (int index = 0; index < table->slices.count; ++index) {
        int rank = representative_of(table, map, rank_of, index);
        table->representatives[end[map->host_of[rank]]++] = rank;
    }
}

static int by_slice(const void *a, const void *b)
{
    const int *one = a, *two = b;
    int order = (one[0] > two[0]) - (one[0] < two[0]);
    return order ? order : (one[1] > two[1]) - (one[1] < two[1]);
}

/* `pairs`: scratch, two a rank. */
static void list_owned(sw_slice_table *table, const sw_host_map *map, int *pairs)
{
    int at = 0;
    table->is_covered = true;
    for (int h = 0; h < map->host_count; ++h) {
        const int *members = sw_host_members(map, h);
        int size = sw_host_size(map, h), begin = at;
        for (int l = 0; l < size; ++l) {
            pairs[2 * l] = table->of_rank[members[l]];
            pairs[2 * l + 1] = members[l];
        }
        qsort(pairs, (size_t)size, 2 * sizeof *pairs, by_slice);
        for (int l = 0; l < size; ++l) {
            if (l > 0 && pairs[2 * l] == pairs[2 * l - 2])
                continue;
            table->owned[at] = pairs[2 * l];
            table->owners[at++] = pairs[2 * l + 1];
        }
        table->owned_of[h + 1] = at;
        table->is_covered &= at - begin == table->slices.count;
    }
}

sw_status sw_slice_table_init(sw_slice_table *table, const sw_host_map *map,
                              const sw_slices *slices, sw_error *err)
{
    size_t ranks = (size_t)map->world_size, hosts = (size_t)map->host_count;
    sw_status status = SW_OK;
    *table = (sw_slice_table){.slices = *slices};
    int *rank_of = calloc(3 * ranks, sizeof *rank_of);
    table->of_rank = calloc(5 * ranks, sizeof *table->of_rank);
    table->represented_of = calloc(2 * (hosts + 1), sizeof *table->represented_of);
    if (!rank_of || !table->of_rank || !table->represented_of) {
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory for the table of slice owners");
    } else if (!place_ranks(rank_of, map->world_size, slices)) {
        status =
            sw_error_set(err, SW_E_INVALID, -1,
                         "slices: every replica must own each of %d slices once", slices->count);
    } else {
        memcpy(table->of_rank, slices->of_rank, ranks * sizeof *table->of_rank);
        memcpy(table->of_rank + ranks, slices->replica_of_rank, ranks * sizeof *table->of_rank);
        table->slices.of_rank = table->of_rank;
        table->slices.replica_of_rank = table->of_rank + ranks;
        table->representatives = table->of_rank + 2 * ranks;
        table->owned = table->of_rank + 3 * ranks;
        table->owners = table->of_rank + 4 * ranks;
        table->owned_of = table->represented_of + hosts + 1;
        list_representatives(table, map, rank_of);
        list_owned(table, map, rank_of + ranks);
    }
    free(rank_of);
    if (status != SW_OK)
        sw_slice_table_fini(table);
    return status;
}

void sw_slice_table_fini(sw_slice_table *table)
{
    free(table->of_rank);
    free(table->represented_of);
    *table = (sw_slice_table){.most_represented = 0};
}

bool sw_slice_table_is_of(const sw_slice_table *table, const sw_host_map *map,
                          const sw_slices *slices)
{
    size_t bytes = (size_t)map->world_size * sizeof *slices->of_rank;
    return table->slices.count == slices->count &&
           memcmp(table->slices.of_rank, slices->of_rank, bytes) == 0 &&
           memcmp(table->slices.replica_of_rank, slices->replica_of_rank, bytes) == 0;
}

int sw_slice_owner(const sw_slice_table *table, const sw_host_map *map, int host, int index)
{
    if (!table)
        return map->host_of[index] == host ? index : -1;
    int low = table->owned_of[host], high = table->owned_of[host + 1];
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (table->owned[middle] < index)
            low = middle + 1;
        else
            high = middle;
    }
    return low < table->owned_of[host + 1] && table->owned[low] == index ? table->owners[low] : -1;
}

int sw_slice_representative(const sw_slice_table *table, const sw_host_map *map, int host,
                            size_t number)
{
    if (!table)
        return number < (size_t)sw_host_size(map, host) ? sw_host_members(map, host)[number] : -1;
    size_t begin = (size_t)table->represented_of[host],
           end = (size_t)table->represented_of[host + 1];
    return number < end - begin ? table->representatives[begin + number] : -1;
}
