/* host_map.c - see the header. */
#include "comm/host_map.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"

/* ---- ranks and hosts ---- */

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

/* ---- owners of slices ---- */

bool sw_slices_place(const sw_slices *slices, int world_size, int *rank_of)
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
    } else if (!sw_slices_place(slices, map->world_size, rank_of)) {
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

/* ---- blocks ---- */

/* Return the most slices of any host. */
static size_t most_of(const sw_host_map *map, const sw_slice_table *table)
{
    int most = table ? table->most_represented : 0;
    for (int h = 0; !table && h < map->host_count; ++h)
        most = sw_host_size(map, h) > most ? sw_host_size(map, h) : most;
    return (size_t)most;
}

void sw_cut_init(sw_cut *cut, const sw_host_map *map, size_t numel, size_t element_bytes,
                 size_t block_numel, bool by_rank, const sw_slice_table *table)
{
    *cut = (sw_cut){.numel = numel, .block_numel = block_numel, .by_rank = by_rank, .table = table};
    int count = !by_rank ? map->host_count : table ? table->slices.count : map->world_size;
    cut->slice = sw_comm_slice_numel(numel, element_bytes, count);
    cut->blocks_a_slice = (cut->slice + block_numel - 1) / block_numel;
    cut->block_count = (by_rank ? most_of(map, table) : 1) * cut->blocks_a_slice;
}

size_t sw_cut_block(const sw_cut *cut, const sw_host_map *map, int host, size_t block,
                    size_t *begin, int *owner)
{
    size_t member = cut->blocks_a_slice ? block / cut->blocks_a_slice : 0, index = (size_t)host;
    *begin = cut->numel;
    *owner = -1;
    if (cut->by_rank) {
        *owner = sw_slice_representative(cut->table, map, host, member);
        if (*owner < 0)
            return 0;
        index = (size_t)(cut->table ? cut->table->slices.of_rank[*owner] : *owner);
    } else if (member >= 1) {
        return 0;
    }
    size_t end = sw_size_min((index + 1) * cut->slice, cut->numel);
    size_t within = (block - member * cut->blocks_a_slice) * cut->block_numel;
    *begin = sw_size_min(index * cut->slice + within, end);
    return sw_size_min(cut->block_numel, end - *begin);
}

/* ---- the order of messages ---- */

static int order(const void *a, const void *b)
{
    int one = *(const int *)a, two = *(const int *)b;
    return (one > two) - (one < two);
}

static void list_peers(sw_dissemination *made)
{
    int count = 0, kept = 0;
    for (int i = 0; i < made->hop_count; ++i) {
        made->peers[count++] = made->hops[i].to;
        made->peers[count++] = made->hops[i].from;
    }
    qsort(made->peers, (size_t)count, sizeof *made->peers, order);
    for (int i = 0; i < count; ++i)
        if (kept == 0 || made->peers[kept - 1] != made->peers[i])
            made->peers[kept++] = made->peers[i];
    made->peer_count = kept;
}

sw_status sw_dissemination_init(sw_dissemination *made, int host, int host_count, int radix,
                                sw_error *err)
{
    *made = (sw_dissemination){.host = host, .host_count = host_count};
    int most = 0;
    for (long step = 1; step < host_count; step *= radix)
        most += radix - 1;
    made->hops = calloc((size_t)most + 1, sizeof *made->hops);
    made->peers = calloc(2 * (size_t)most + 1, sizeof *made->peers);
    if (!made->hops || !made->peers) {
        sw_dissemination_fini(made);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the messages of %d hosts", host_count);
    }
    for (long step = 1; step < host_count; step *= radix, ++made->rounds)
        for (long far = step; far < step * radix && far < host_count; far += step) {
            long left = host_count - far;
            made->hops[made->hop_count++] =
                (sw_hop){.round = made->rounds,
                         .to = (int)((host + host_count - far) % host_count),
                         .from = (int)((host + far) % host_count),
                         .count = (int)(step < left ? step : left)};
        }
    list_peers(made);
    return SW_OK;
}

void sw_dissemination_fini(sw_dissemination *made)
{
    free(made->hops);
    free(made->peers);
    made->hops = NULL;
    made->peers = NULL;
}
