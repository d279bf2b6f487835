/* hier_cut.c - see the header. */
#include "comm/hier_cut.h"

#include "base/bytes.h"

bool sw_cut_host_owns(const sw_host_map *map, const sw_slices *slices, int host, int index)
{
    const int *members = sw_host_members(map, host);
    for (int l = 0; l < sw_host_size(map, host); ++l)
        if ((slices ? slices->of_rank[members[l]] : members[l]) == index)
            return true;
    return false;
}

bool sw_cut_is_covered(const sw_host_map *map, const sw_slices *slices)
{
    for (int h = 0; h < map->host_count; ++h)
        for (int index = 0; index < slices->count; ++index)
            if (!sw_cut_host_owns(map, slices, h, index))
                return false;
    return true;
}

/* The owner of slice `index` that speaks for all of them. */
static int speaker_of(const sw_host_map *map, const sw_slices *slices, int index)
{
    int replica = index % (map->world_size / slices->count), rank = 0;
    while (slices->of_rank[rank] != index || slices->replica_of_rank[rank] != replica)
        ++rank;
    return rank;
}

/* The speaker of the `number`-th slice that `host` speaks for; -1: there are fewer. */
static int speaker_here(const sw_cut *cut, const sw_host_map *map, int host, size_t number)
{
    if (!cut->slices)
        return number < (size_t)sw_host_size(map, host) ? sw_host_members(map, host)[number] : -1;
    for (int index = 0; index < cut->slices->count; ++index) {
        int rank = speaker_of(map, cut->slices, index);
        if (map->host_of[rank] == host && number-- == 0)
            return rank;
    }
    return -1;
}

void sw_cut_init(sw_cut *cut, const sw_host_map *map, size_t numel, size_t element_bytes,
                 size_t block_numel, bool by_rank, const sw_slices *slices)
{
    *cut =
        (sw_cut){.numel = numel, .block_numel = block_numel, .by_rank = by_rank, .slices = slices};
    size_t most = 1;
    for (int h = 0; by_rank && h < map->host_count; ++h)
        while (speaker_here(cut, map, h, most) >= 0)
            ++most;
    int count = !by_rank ? map->host_count : slices ? slices->count : map->world_size;
    cut->slice = sw_comm_slice_numel(numel, element_bytes, count);
    cut->blocks_a_slice = (cut->slice + block_numel - 1) / block_numel;
    cut->block_count = most * cut->blocks_a_slice;
}

size_t sw_cut_block(const sw_cut *cut, const sw_host_map *map, int host, size_t block,
                    size_t *begin, int *owner)
{
    size_t member = cut->blocks_a_slice ? block / cut->blocks_a_slice : 0, index = (size_t)host;
    *begin = cut->numel;
    *owner = -1;
    if (cut->by_rank) {
        *owner = speaker_here(cut, map, host, member);
        if (*owner < 0)
            return 0;
        index = (size_t)(cut->slices ? cut->slices->of_rank[*owner] : *owner);
    } else if (member >= 1) {
        return 0;
    }
    size_t end = sw_size_min((index + 1) * cut->slice, cut->numel);
    size_t within = (block - member * cut->blocks_a_slice) * cut->block_numel;
    *begin = sw_size_min(index * cut->slice + within, end);
    return sw_size_min(cut->block_numel, end - *begin);
}
