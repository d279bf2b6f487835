/* hier_gather.c - all_gather on an arena over hosts: every rank's slice to the ranks elsewhere.
 *
 * Slices are sent from the arena and arrive in the carrier's blocks. The carrier copies them to
 * each rank of this host, or once if the host (or a replica on it) has one copy. A slice is not
 * sent to a host that also has an owner of it. */
#include <string.h>

#include "comm/hier_carrier_state.h"

typedef struct gathering {
    const sw_hier_pending *pending;
    sw_cut cut; /* by rank */
    size_t element_bytes;
} gathering;

static int slice_of(const gathering *work, int rank)
{
    return sw_op_slice_of(&work->pending->op, rank);
}

/* Return true if two ranks of this host keep parameters in one part. */
static bool shares_part(const gathering *work, int a, int b)
{
    const sw_slices *slices = work->pending->op.slices;
    return a == b || (work->pending->op.one_copy &&
                      (!slices || slices->replica_of_rank[a] == slices->replica_of_rank[b]));
}

/* Return the lowest rank of this host that shares a part with `rank`; it owns the part. */
static int home_of(const sw_carrier *carrier, const gathering *work, int rank)
{
    int local = 0;
    while (!shares_part(work, carrier->hier->members[local], rank))
        ++local;
    return carrier->hier->members[local];
}

/* Return the part of `rank`, with its slice and those that it receives. */
static uint8_t *part_of(const sw_carrier *carrier, const gathering *work, int rank, size_t begin)
{
    const sw_hier_pending *pending = work->pending;
    return pending->arena->base[home_of(carrier, work, rank)] + pending->at_bytes +
           begin * work->element_bytes;
}

/* Return true if some rank has updated slice `index` in the part of `rank`. */
static bool has_updated(const sw_carrier *carrier, const gathering *work, int rank, int index)
{
    const sw_hier *hier = carrier->hier;
    for (int l = 0; l < hier->local_count; ++l)
        if (slice_of(work, hier->members[l]) == index && shares_part(work, hier->members[l], rank))
            return true;
    return false;
}

/* Return a rank of `host` that owns slice `index`; -1: none. Owners have the same bits. */
static int owner_at(const sw_carrier *carrier, const gathering *work, int host, int index)
{
    return sw_slice_owner(work->pending->table, &carrier->hier->map, host, index);
}

/* Copy `bytes` of slice `index` to the parts of this host's ranks that lack them. */
static void copy_inside(const sw_carrier *carrier, const gathering *work, int index, size_t begin,
                        const uint8_t *data, size_t bytes)
{
    const sw_hier *hier = carrier->hier;
    bool is_here = owner_at(carrier, work, hier->host, index) >= 0;
    for (int l = 0; l < hier->local_count; ++l) {
        int rank = hier->members[l];
        if (home_of(carrier, work, rank) == rank &&
            !(is_here && has_updated(carrier, work, rank, index)))
            memcpy(part_of(carrier, work, rank, begin), data, bytes);
    }
}

static sw_status begin_block(sw_carrier *carrier, const gathering *work, size_t block,
                             const char *what, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    sw_carrier_slot *at = &carrier->slots[block % carrier->slot_count];
    uint32_t number = carrier->blocks + (uint32_t)block;
    int owner;
    size_t begin, numel;
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        numel = sw_cut_block(&work->cut, &hier->map, g, block, &begin, &owner);
        if (numel > 0 && owner_at(carrier, work, hier->host, slice_of(work, owner)) >= 0)
            continue;
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_SLICE, number, at->arrived[g],
                              numel * work->element_bytes, &at->partial_in[g], err) != SW_OK)
            return sw_carrier_blame(carrier, what, err);
    }
    numel = sw_cut_block(&work->cut, &hier->map, hier->host, block, &begin, &owner);
    if (numel == 0)
        return SW_OK;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    const uint8_t *own = part_of(carrier, work, owner, begin);
    sw_carrier_touch_end(carrier);
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (owner_at(carrier, work, g, slice_of(work, owner)) >= 0)
            continue;
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_SLICE, number, own,
                           numel * work->element_bytes, &at->partial_out[g], err) != SW_OK)
            return sw_carrier_blame(carrier, what, err);
    }
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    copy_inside(carrier, work, slice_of(work, owner), begin, own, numel * work->element_bytes);
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

static sw_status store_block(sw_carrier *carrier, const gathering *work, size_t block,
                             const char *what, sw_error *err)
{
    sw_carrier_slot *at = &carrier->slots[block % carrier->slot_count];
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        int owner;
        size_t begin,
            numel = sw_cut_block(&work->cut, &carrier->hier->map, g, block, &begin, &owner);
        SW_TRY(sw_carrier_wait(carrier, &at->partial_in[g], what, err));
        if (numel > 0) {
            int index = slice_of(work, owner);
            SW_TRY(sw_carrier_touch_begin(carrier, err));
            int here = owner_at(carrier, work, carrier->hier->host, index);
            copy_inside(carrier, work, index, begin,
                        here >= 0 ? part_of(carrier, work, here, begin) : at->arrived[g],
                        numel * work->element_bytes);
            sw_carrier_touch_end(carrier);
        }
        SW_TRY(sw_carrier_wait(carrier, &at->partial_out[g], what, err));
    }
    return SW_OK;
}

sw_status sw_carrier_gather(sw_carrier *carrier, const sw_hier_pending *pending, const char *what,
                            sw_error *err)
{
    const sw_op *op = &pending->op;
    gathering work = {.pending = pending, .element_bytes = sw_dtype_size_bytes(op->dtype)};
    sw_cut_init(&work.cut, &carrier->hier->map, op->numel, work.element_bytes,
                carrier->block_bytes / work.element_bytes, true, pending->table);
    size_t count = work.cut.block_count;
    for (size_t step = 0; step < count + carrier->ahead; ++step) {
        if (step < count)
            SW_TRY(begin_block(carrier, &work, step, what, err));
        if (step >= carrier->ahead)
            SW_TRY(store_block(carrier, &work, step - carrier->ahead, what, err));
    }
    carrier->blocks += (uint32_t)count;
    return SW_OK;
}
