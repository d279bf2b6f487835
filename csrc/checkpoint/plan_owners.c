/* plan_owners.c - which rank writes a block.
 *
 * Where every rank holds everything, ranks take equal runs of blocks. Where tensors are spread over
 * ranks, a block belongs to the rank that holds most of it, so that only the blocks at cuts need
 * bytes from elsewhere; what is nobody's in particular evens out the shares. */
#include <inttypes.h>
#include <stdlib.h>

#include "checkpoint/plan.h"

enum { ABOUT_AS_MUCH_BYTES = SW_BLOCK_BYTES / 16 };

typedef struct place { /* of a source */
    const sw_plan_file *file;
    const sw_plan_piece *piece;
} place;

typedef struct overlap { /* of a holding with one block */
    uint64_t block;
    uint64_t begin, size_bytes; /* in the source */
} overlap;

/* Rank r writes the free (not pinned) blocks [free_begin(r), free_begin(r + 1)): rank 0, which has
 * the pinned ones too, up to an equal share; the others the rest in equal runs. */
static uint64_t free_begin(const sw_plan *plan, int rank, int world_size)
{
    uint64_t all = plan->block_count - plan->pinned_count, world = (uint64_t)world_size;
    uint64_t share = (plan->block_count + world - 1) / world;
    uint64_t first = share > plan->pinned_count ? share - plan->pinned_count : 0;
    if (first > all || world_size == 1)
        first = all;
    if (rank == 0)
        return 0;
    return world_size == 1 ? all : first + (all - first) * (uint64_t)(rank - 1) / (world - 1);
}

sw_status sw_plan_owned(const sw_plan *plan, int rank, int world_size, uint64_t **blocks,
                        size_t *count, sw_error *err)
{
    uint64_t begin = free_begin(plan, rank, world_size),
             end = free_begin(plan, rank + 1, world_size), at = 0;
    size_t owned = 0;
    uint64_t *made = malloc(((size_t)plan->block_count + 1) * sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the list of %" PRIu64 " blocks",
                plan->block_count);
    for (uint64_t block = 0; block < plan->block_count; ++block) {
        bool is_ours = plan->is_pinned[block] ? rank == 0 : at >= begin && at < end;
        if (plan->owners)
            is_ours = plan->owners[block] == rank;
        if (is_ours)
            made[owned++] = block;
        at += !plan->is_pinned[block];
    }
    *blocks = made;
    *count = owned;
    return SW_OK;
}

static sw_status find_places(const sw_plan *plan, place **places, sw_error *err)
{
    place *made = calloc(plan->source_count + 1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the places of %zu tensors", plan->source_count);
    for (size_t f = 0; f < plan->file_count; ++f)
        for (size_t p = 0; p < plan->files[f].piece_count; ++p) {
            const sw_plan_piece *piece = &plan->pieces[plan->files[f].first_piece + p];
            made[piece->source] = (place){&plan->files[f], piece};
        }
    *places = made;
    return SW_OK;
}

static sw_status check_holdings(const sw_plan *plan, const place *places,
                                const sw_plan_holding *holdings, size_t count, int world_size,
                                sw_error *err)
{
    for (size_t i = 0; i < count; ++i) {
        const sw_plan_holding *h = &holdings[i];
        uint64_t end;
        if (h->source >= plan->source_count || h->rank < 0 || h->rank >= world_size ||
            __builtin_add_overflow(h->begin, h->size_bytes, &end) ||
            end > places[h->source].piece->size_bytes)
            SW_FAIL(err, SW_E_INVALID,
                    "assign: holding %zu, bytes [%" PRIu64 ", +%" PRIu64
                    ") of source %zu at rank %d, is not inside the plan",
                    i, h->begin, h->size_bytes, h->source, h->rank);
    }
    return SW_OK;
}

/* The overlap of a holding with the block in which its byte `at` lies; *at moves behind it. */
static bool next_overlap(const place *places, const sw_plan_holding *h, uint64_t *at,
                         overlap *found)
{
    const place *where = &places[h->source];
    if (*at >= h->size_bytes)
        return false;
    uint64_t in_file = where->piece->begin + h->begin + *at;
    uint64_t left = h->size_bytes - *at, room = SW_BLOCK_BYTES - in_file % SW_BLOCK_BYTES;
    found->block = where->file->first_block + in_file / SW_BLOCK_BYTES;
    found->begin = h->begin + *at;
    found->size_bytes = left < room ? left : room;
    *at += found->size_bytes;
    return true;
}

/* The rank that holds most of each block; of those that hold about as much, the one with the fewest
 * blocks so far, since cuts may fall alike in all tensors. -1 where no holding is. */
static void choose_holders(const sw_plan *plan, const uint32_t *bytes, int world_size,
                           uint64_t *loads, int *owners)
{
    for (uint64_t block = 0; block < plan->block_count; ++block) {
        const uint32_t *of_block = bytes + block * (uint64_t)world_size;
        uint32_t most = 0;
        for (int rank = 0; rank < world_size; ++rank)
            most = of_block[rank] > most ? of_block[rank] : most;
        owners[block] = plan->is_pinned[block] ? 0 : -1;
        for (int rank = 0; rank < world_size && most > 0 && !plan->is_pinned[block]; ++rank)
            if (of_block[rank] > 0 && of_block[rank] + ABOUT_AS_MUCH_BYTES >= most &&
                (owners[block] < 0 || loads[rank] < loads[owners[block]]))
                owners[block] = rank;
        if (owners[block] >= 0)
            loads[owners[block]]++;
    }
}

/* Blocks of nobody, in runs, to ranks that have less than an equal share. */
static void even_out(const sw_plan *plan, uint64_t *loads, int world_size, int *owners)
{
    uint64_t share = (plan->block_count + (uint64_t)world_size - 1) / (uint64_t)world_size;
    int rank = 0;
    for (uint64_t block = 0; block < plan->block_count; ++block) {
        if (owners[block] >= 0)
            continue;
        while (loads[rank] >= share && rank < world_size - 1)
            rank++;
        owners[block] = rank;
        loads[rank]++;
    }
}

static sw_status choose_owners(sw_plan *plan, const place *places, const sw_plan_holding *holdings,
                               size_t count, int world_size, sw_error *err)
{
    size_t cells = (size_t)plan->block_count * (size_t)world_size;
    uint32_t *bytes = calloc(cells + 1, sizeof *bytes);
    uint64_t *loads = calloc((size_t)world_size, sizeof *loads);
    int *owners = calloc((size_t)plan->block_count + 1, sizeof *owners);
    if (!bytes || !loads || !owners) {
        free(bytes);
        free(loads);
        free(owners);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the owners of %" PRIu64 " blocks",
                plan->block_count);
    }
    for (size_t i = 0; i < count; ++i) {
        overlap part;
        for (uint64_t at = 0; next_overlap(places, &holdings[i], &at, &part);)
            bytes[part.block * (uint64_t)world_size + (uint64_t)holdings[i].rank] +=
                (uint32_t)part.size_bytes;
    }
    choose_holders(plan, bytes, world_size, loads, owners);
    even_out(plan, loads, world_size, owners);
    free(bytes);
    free(loads);
    free(plan->owners);
    plan->owners = owners;
    return SW_OK;
}

static bool continues(const sw_plan_transfer *last, const sw_plan_transfer *next)
{
    return last->source == next->source && last->begin + last->size_bytes == next->begin &&
           last->holder == next->holder && last->owner == next->owner;
}

static sw_status list_transfers(const sw_plan *plan, const place *places,
                                const sw_plan_holding *holdings, size_t count,
                                sw_plan_transfer **transfers, size_t *transfer_count, sw_error *err)
{
    sw_plan_transfer *made = NULL;
    size_t used = 0, capacity = 0;
    for (size_t i = 0; i < count; ++i) {
        overlap part;
        for (uint64_t at = 0; next_overlap(places, &holdings[i], &at, &part);) {
            sw_plan_transfer next = {holdings[i].source, part.begin, part.size_bytes,
                                     holdings[i].rank, plan->owners[part.block]};
            if (next.owner == next.holder)
                continue;
            if (used > 0 && continues(&made[used - 1], &next)) {
                made[used - 1].size_bytes += next.size_bytes;
                continue;
            }
            if (used == capacity) {
                capacity = capacity ? 2 * capacity : 64;
                sw_plan_transfer *grown = realloc(made, capacity * sizeof *made);
                if (!grown) {
                    free(made);
                    SW_FAIL(err, SW_E_MEMORY, "no memory for a list of %zu transfers", capacity);
                }
                made = grown;
            }
            made[used++] = next;
        }
    }
    *transfers = made;
    *transfer_count = used;
    return SW_OK;
}

sw_status sw_plan_assign(sw_plan *plan, const sw_plan_holding *holdings, size_t count,
                         int world_size, sw_plan_transfer **transfers, size_t *transfer_count,
                         sw_error *err)
{
    place *places = NULL;
    sw_status status;
    SW_TRY(find_places(plan, &places, err));
    SW_TRY_GOTO(status, check_holdings(plan, places, holdings, count, world_size, err),
                free_places);
    SW_TRY_GOTO(status, choose_owners(plan, places, holdings, count, world_size, err), free_places);
    status = list_transfers(plan, places, holdings, count, transfers, transfer_count, err);
free_places:
    free(places);
    return status;
}
