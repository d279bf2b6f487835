/* fabric_issue.c - issues operations: as descriptors, or as chunks of private memory in slots. */
#include <string.h>

#include "base/bytes.h"
#include "comm/account.h"
#include "comm/fabric.h"

/* If ranks fold pieces of a chunk, each reads 2 chunks instead of W. Above this saving that pays
 * for the additional wait. */
static const size_t pieces_save_bytes = 256 * 1024;

/* Wait for space in the ring and the slots, copy private data in, publish. */
static sw_status issue(sw_fabric *fabric, const sw_pending *pending, uint32_t *ticket,
                       sw_error *err)
{
    sw_control *own = &fabric->control[fabric->comm.rank];
    uint32_t next = fabric->posted + 1;
    SW_TRY(sw_ending_read(&fabric->ending, err));
    uint32_t form = pending->descriptor.form;
    bool fills = form == SW_FORM_SLOT || form == SW_FORM_PIECE;
    /* A peer may still read the ring entry and the slot of an older operation, and a slot of pieces
     * even during the next ticket. */
    uint32_t depth = fills ? SW_FABRIC_SLOTS - 1 : SW_FABRIC_RING;
    SW_TRY(sw_fabric_wait_done(fabric, next - depth, err));
    sw_pending *kept = &fabric->pending[next % SW_FABRIC_RING];
    *kept = *pending;
    kept->serial = fabric->comm.serial;
    sw_account_post(kept->serial);
    if (fills && pending->count && pending->op.data) {
        size_t bytes = pending->count * sw_dtype_size_bytes(pending->op.dtype);
        if (pending->op.kind != SW_OP_BROADCAST || pending->op.root == fabric->comm.rank)
            memcpy(sw_fabric_slot(fabric, fabric->comm.rank, next), pending->op.data, bytes);
        fabric->comm.stats.bytes_staged += bytes;
    }
    *sw_fabric_descriptor(fabric, fabric->comm.rank, next) = pending->descriptor;
    fabric->posted = next;
    sw_control_publish(&own->posted, next, own);
    *ticket = next;
    return SW_OK;
}

static void fill_pending(sw_pending *pending, const sw_op *op, uint32_t form)
{
    memset(pending, 0, sizeof *pending);
    pending->op = *op;
    sw_descriptor_fill(&pending->descriptor, op, form);
}

sw_status sw_fabric_post(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_pending pending;
    SW_TRY(sw_op_check_post(op, fabric->comm.world_size, err));
    fill_pending(&pending, op, SW_FORM_POOL);
    sw_comm_count(comm, op);
    SW_TRY(issue(fabric, &pending, ticket, err));
    return sw_fabric_progress(fabric, err);
}

/* Run one chunk after the other through the slots, at most SW_FABRIC_SLOTS of them in flight.
 * `gathered`: an all_gather's destination. */
static sw_status run_through_slots(sw_fabric *fabric, const sw_op *op, void *gathered,
                                   sw_error *err)
{
    size_t element_bytes = sw_dtype_size_bytes(op->dtype);
    size_t chunk = SW_FABRIC_SLOT_BYTES / element_bytes;
    size_t begin = 0;
    uint32_t ticket;
    do {
        sw_pending pending;
        size_t count = sw_size_min(chunk, op->numel - begin);
        bool in_pieces =
            op->kind == SW_OP_ALL_REDUCE && fabric->comm.world_size > 2 &&
            (size_t)(fabric->comm.world_size - 2) * count * element_bytes >= pieces_save_bytes;
        fill_pending(&pending, op, in_pieces ? SW_FORM_PIECE : SW_FORM_SLOT);
        pending.begin = begin;
        pending.count = count;
        pending.descriptor.chunk = begin / chunk;
        pending.gathered = gathered;
        if (op->data)
            pending.op.data = (uint8_t *)op->data + begin * element_bytes;
        SW_TRY(issue(fabric, &pending, &ticket, err));
        if (in_pieces) {
            pending.descriptor.form = SW_FORM_COLLECT;
            SW_TRY(issue(fabric, &pending, &ticket, err));
        }
        SW_TRY(sw_fabric_progress(fabric, err));
        begin += count;
    } while (begin < op->numel);
    return sw_fabric_wait(&fabric->comm, ticket, err);
}

sw_status sw_fabric_run(sw_comm *comm, const sw_op *op, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    uint32_t ticket;
    if (op->arena) {
        SW_TRY(sw_fabric_post(comm, op, &ticket, err));
        return sw_fabric_wait(comm, ticket, err);
    }
    SW_TRY(sw_op_check(op, fabric->comm.world_size, err));
    if (op->kind == SW_OP_REDUCE_SCATTER || op->kind == SW_OP_ALL_GATHER)
        SW_FAIL(err, SW_E_UNSUPPORTED, "%s '%s' needs a buffer in an arena",
                sw_op_kind_name(op->kind), op->label);
    sw_comm_count(comm, op);
    return run_through_slots(fabric, op, NULL, err);
}

sw_status sw_fabric_gather(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                           const char *label, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_op op = sw_op_gather(mine, size_bytes, label);
    SW_TRY(sw_op_check(&op, fabric->comm.world_size, err));
    sw_comm_count(comm, &op);
    return run_through_slots(fabric, &op, all, err);
}
