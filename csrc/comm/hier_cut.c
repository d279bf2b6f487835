/* hier_cut.c - see the header. */
#include "comm/hier_cut.h"

#include "base/bytes.h"
#include "comm/comm.h"

void sw_cut_init(sw_cut *cut, const sw_host_map *map, size_t numel, size_t element_bytes,
                 size_t block_numel, bool by_rank)
{
    size_t most = 1;
    for (int h = 0; by_rank && h < map->host_count; ++h)
        most = sw_size_max(most, (size_t)sw_host_size(map, h));
    *cut = (sw_cut){.numel = numel, .block_numel = block_numel, .by_rank = by_rank};
    cut->slice =
        sw_comm_slice_numel(numel, element_bytes, by_rank ? map->world_size : map->host_count);
    cut->blocks_a_slice = (cut->slice + block_numel - 1) / block_numel;
    cut->block_count = most * cut->blocks_a_slice;
}

size_t sw_cut_block(const sw_cut *cut, const sw_host_map *map, int host, size_t block,
                    size_t *begin, int *owner)
{
    size_t member = cut->blocks_a_slice ? block / cut->blocks_a_slice : 0, index = (size_t)host;
    *begin = cut->numel;
    *owner = -1;
    if (member >= (cut->by_rank ? (size_t)sw_host_size(map, host) : 1))
        return 0;
    if (cut->by_rank) {
        *owner = sw_host_members(map, host)[member];
        index = (size_t)*owner;
    }
    size_t end = sw_size_min((index + 1) * cut->slice, cut->numel);
    size_t within = (block - member * cut->blocks_a_slice) * cut->block_numel;
    *begin = sw_size_min(index * cut->slice + within, end);
    return sw_size_min(cut->block_numel, end - *begin);
}
