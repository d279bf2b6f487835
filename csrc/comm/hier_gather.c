/* hier_gather.c - all_gather on an arena over hosts: every rank's slice to the ranks elsewhere.
 *
 * Slices leave from where they lie and arrive in the carrier's blocks, out of which they are copied
 * to each rank of this host; or once, where the host has one copy. */
#include <string.h>

#include "comm/hier_carrier.h"

typedef struct gathering {
    const sw_hier_pending *pending;
    sw_cut cut; /* by rank */
    size_t element_bytes;
} gathering;

/* Of the part where `rank` has its slice, and gets the others'. */
static uint8_t *part_of(const sw_carrier *carrier, const gathering *work, int rank, size_t begin)
{
    const sw_hier_pending *pending = work->pending;
    int home = pending->op.one_copy ? carrier->hier->members[0] : rank;
    return pending->arena->base[home] + pending->at_bytes + begin * work->element_bytes;
}

/* `bytes` of the slice of `owner` to the parts of this host's ranks. */
static void copy_inside(const sw_carrier *carrier, const gathering *work, int owner, size_t begin,
                        const uint8_t *data, size_t bytes)
{
    const sw_hier *hier = carrier->hier;
    const sw_slices *slices = work->pending->op.slices;
    for (int l = 0; l < (work->pending->op.one_copy ? 1 : hier->local_count); ++l) {
        int rank = hier->members[l];
        uint8_t *to = part_of(carrier, work, rank, begin);
        if (to != data &&
            (!slices || slices->replica_of_rank[rank] == slices->replica_of_rank[owner]))
            memcpy(to, data, bytes);
    }
}

static sw_status begin_block(sw_carrier *carrier, const gathering *work, size_t block,
                             const char *what, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    sw_carrier_slot *at = &carrier->slots[block % SW_HIER_SLOTS];
    uint32_t number = carrier->blocks + (uint32_t)block;
    int owner;
    size_t begin, numel;
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        numel = sw_cut_block(&work->cut, &hier->map, g, block, &begin, &owner);
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_SLICE, number, at->arrived[g],
                              numel * work->element_bytes, &at->partial_in[g], err) != SW_OK)
            return sw_carrier_blame(carrier, what, err);
    }
    numel = sw_cut_block(&work->cut, &hier->map, hier->host, block, &begin, &owner);
    if (numel == 0)
        return SW_OK;
    const uint8_t *own = part_of(carrier, work, owner, begin);
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_SLICE, number, own,
                           numel * work->element_bytes, &at->partial_out[g], err) != SW_OK)
            return sw_carrier_blame(carrier, what, err);
    }
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    copy_inside(carrier, work, owner, begin, own, numel * work->element_bytes);
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

static sw_status store_block(sw_carrier *carrier, const gathering *work, size_t block,
                             const char *what, sw_error *err)
{
    sw_carrier_slot *at = &carrier->slots[block % SW_HIER_SLOTS];
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        int owner;
        size_t begin,
            numel = sw_cut_block(&work->cut, &carrier->hier->map, g, block, &begin, &owner);
        SW_TRY(sw_carrier_wait(carrier, &at->partial_in[g], what, err));
        if (numel > 0) {
            SW_TRY(sw_carrier_touch_begin(carrier, err));
            copy_inside(carrier, work, owner, begin, at->arrived[g], numel * work->element_bytes);
            sw_carrier_touch_end(carrier);
        }
        SW_TRY(sw_carrier_wait(carrier, &at->partial_out[g], what, err));
    }
    return SW_OK;
}

/* Every host has all slices: a replica lies on one. */
static sw_status gather_inside(sw_carrier *carrier, const gathering *work, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    const sw_op *op = &work->pending->op;
    if (op->one_copy)
        return SW_OK;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    size_t slice = sw_comm_slice_numel(op->numel, work->element_bytes, op->slices->count);
    for (int l = 0; l < hier->local_count; ++l) {
        int owner = hier->members[l];
        size_t begin = (size_t)op->slices->of_rank[owner] * slice;
        size_t numel = begin < op->numel ? op->numel - begin : 0;
        numel = numel < slice ? numel : slice;
        copy_inside(carrier, work, owner, begin, part_of(carrier, work, owner, begin),
                    numel * work->element_bytes);
    }
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

sw_status sw_carrier_gather(sw_carrier *carrier, const sw_hier_pending *pending, const char *what,
                            sw_error *err)
{
    const sw_op *op = &pending->op;
    gathering work = {.pending = pending, .element_bytes = sw_dtype_size_bytes(op->dtype)};
    if (op->slices)
        return gather_inside(carrier, &work, err);
    sw_cut_init(&work.cut, &carrier->hier->map, op->numel, work.element_bytes,
                SW_HIER_BLOCK_BYTES / work.element_bytes, true);
    size_t count = work.cut.block_count;
    for (size_t step = 0; step < count + SW_HIER_AHEAD; ++step) {
        if (step < count)
            SW_TRY(begin_block(carrier, &work, step, what, err));
        if (step >= SW_HIER_AHEAD)
            SW_TRY(store_block(carrier, &work, step - SW_HIER_AHEAD, what, err));
    }
    carrier->blocks += (uint32_t)count;
    return SW_OK;
}
