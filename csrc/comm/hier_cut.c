/* hier_cut.c - see the header. */
#include "comm/hier_cut.h"

#include "base/bytes.h"

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
