/* hier_post.c - describing operations to this host's ranks. The carrier executes them
 * (hier_carrier.c). */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/account.h"
#include "comm/hier_state.h"
#include "platform/futex.h"

/* ---- posting ---- */

/* Find or create the table of op->slices, and point op->slices into it: the carrier reads both even
 * after the caller has given up. */
static sw_status find_table(sw_hier *hier, sw_hier_pending *pending, sw_error *err)
{
    sw_op *op = &pending->op;
    if (!op->slices)
        return SW_OK;
    sw_hier_table *found = hier->tables;
    while (found && !sw_slice_table_is_of(&found->table, &hier->map, op->slices))
        found = found->next;
    if (!found) {
        found = calloc(1, sizeof *found);
        sw_status status =
            found ? sw_slice_table_init(&found->table, &hier->map, op->slices, err)
                  : sw_error_set(err, SW_E_MEMORY, -1, "no memory for the table of slice owners");
        if (status != SW_OK) {
            free(found);
            return sw_comm_give_up(&hier->comm, status, err, "%s", err ? err->message : "slices");
        }
        found->next = hier->tables;
        hier->tables = found;
    }
    pending->table = &found->table;
    op->slices = &found->table.slices;
    return SW_OK;
}

/* Fill the entry of the next operation, which holds a reference to its codec. */
static void fill(sw_hier_pending *entry, const sw_hier_pending *pending)
{
    sw_codec *before = entry->op.codec;
    if (pending->op.codec)
        pending->op.codec->ops->acquire(pending->op.codec);
    *entry = *pending;
    if (before)
        before->ops->release(before);
}

void sw_hier_drop_codecs(sw_hier *hier)
{
    const sw_hier_pending none = {.at_bytes = 0};
    for (size_t i = 0; i < SW_HIER_RING; ++i)
        fill(&hier->pending[i], &none);
}

static sw_status issue(sw_hier *hier, const sw_hier_pending *pending,
                       const sw_descriptor *descriptor, uint32_t *ticket, sw_error *err)
{
    sw_page *own = sw_hier_page(hier, hier->local_rank);
    uint32_t next = hier->posted + 1;
    SW_TRY(sw_hier_check_alive(hier, err));
    SW_TRY(sw_hier_await(hier, next - SW_HIER_RING, err)); /* its entry is free */
    fill(&hier->pending[next % SW_HIER_RING], pending);
    hier->pending[next % SW_HIER_RING].serial = hier->comm.serial;
    sw_account_post(hier->comm.serial);
    SW_TRY(find_table(hier, &hier->pending[next % SW_HIER_RING], err));
    own->ring[next % SW_HIER_RING] = *descriptor;
    hier->posted = next;
    atomic_store(&own->posted, next);
    sw_futex_wake_all(&own->posted);
    *ticket = next;
    return SW_OK;
}

static sw_status check_supported(const sw_hier *hier, const sw_op *op, sw_error *err)
{
    SW_TRY(sw_op_check(op, hier->comm.world_size, err));
    if (op->kind == SW_OP_REDUCE_SCATTER && (!op->arena || (op->result && !op->results)))
        SW_FAIL(err, SW_E_UNSUPPORTED, "%s '%s' over hosts needs buffer and results in an arena",
                sw_op_kind_name(op->kind), op->label);
    return SW_OK;
}

sw_status sw_hier_post(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_descriptor descriptor;
    SW_TRY(check_supported(hier, op, err));
    SW_TRY(sw_op_check_post(op, comm->world_size, err));
    sw_hier_pending pending = {
        .op = *op, .arena = (sw_arena *)(uintptr_t)op->arena, .at_bytes = op->offset_bytes};
    sw_descriptor_fill(&descriptor, op, SW_FORM_POOL);
    sw_comm_count(&hier->comm, op);
    return issue(hier, &pending, &descriptor, ticket, err);
}

sw_status sw_hier_begin_stream(sw_hier *hier, const sw_op *op, uint32_t *ticket, sw_error *err)
{
    sw_hier_pending pending = {.op = *op};
    sw_descriptor descriptor;
    SW_TRY(sw_op_check(op, hier->comm.world_size, err));
    sw_descriptor_fill(&descriptor, op, SW_FORM_SLOT);
    sw_comm_count(&hier->comm, op);
    return issue(hier, &pending, &descriptor, ticket, err);
}

/* Bytes of private memory in one chunk. */
static size_t chunk_bytes(const sw_hier *hier, sw_op_kind kind)
{
    return kind == SW_OP_ALL_GATHER ? hier->mirror_chunk_bytes : SW_HIER_CHUNK_BYTES;
}

/* Address of this rank's chunk. */
static uint8_t *own_chunk(const sw_hier *hier, const sw_hier_pending *pending)
{
    return pending->arena ? pending->arena->base[hier->comm.rank] + pending->at_bytes
                          : sw_hier_mirrored(hier, pending, hier->comm.rank);
}

/* Run one chunk of private memory. Chunks use the two halves of the shared memory in turn: a late
 * rank may still read the previous chunk's half, but no rank is two chunks behind. *pending: the
 * chunk's operation afterwards. */
static sw_status run_chunk(sw_hier *hier, const sw_op *op, size_t begin, size_t count,
                           sw_hier_pending *pending, sw_error *err)
{
    size_t element_bytes = sw_dtype_size_bytes(op->dtype), bytes = count * element_bytes;
    bool gathers = op->kind == SW_OP_ALL_GATHER;
    sw_descriptor descriptor;
    uint32_t ticket;
    *pending = (sw_hier_pending){.op = *op, .begin = begin};
    pending->op.numel = count;
    pending->at_bytes = (hier->chunks++ & 1) * chunk_bytes(hier, op->kind) *
                        (gathers ? (size_t)hier->comm.world_size : 1);
    if (!gathers && op->kind != SW_OP_BARRIER)
        pending->arena = hier->bounce;
    if (bytes)
        memcpy(own_chunk(hier, pending), (const uint8_t *)op->data + begin * element_bytes, bytes);
    sw_descriptor_fill(&descriptor, op, SW_FORM_SLOT);
    descriptor.chunk = begin * element_bytes / chunk_bytes(hier, op->kind);
    hier->comm.stats.bytes_staged += bytes;
    SW_TRY(issue(hier, pending, &descriptor, &ticket, err));
    return sw_hier_await(hier, ticket, err);
}

sw_status sw_hier_run_small(sw_hier *hier, const sw_op *op, sw_error *err)
{
    sw_hier_pending pending;
    SW_TRY(check_supported(hier, op, err));
    sw_comm_count(&hier->comm, op);
    SW_TRY(run_chunk(hier, op, 0, op->numel, &pending, err));
    memcpy(op->data, own_chunk(hier, &pending), op->numel * sw_dtype_size_bytes(op->dtype));
    return SW_OK;
}

sw_status sw_hier_run(sw_comm *comm, const sw_op *op, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_hier_pending pending;
    uint32_t ticket;
    if (op->arena) {
        SW_TRY(sw_hier_post(comm, op, &ticket, err));
        return sw_hier_await(hier, ticket, err);
    }
    if (op->kind == SW_OP_BROADCAST) {
        const sw_range whole = {.address = op->data,
                                .size_bytes = op->numel * sw_dtype_size_bytes(op->dtype)};
        return sw_comm_broadcast(comm, &whole, 1, op->root, op->label, err);
    }
    SW_TRY(check_supported(hier, op, err));
    sw_comm_count(&hier->comm, op);
    size_t element_bytes = sw_dtype_size_bytes(op->dtype), begin = 0;
    if (op->kind == SW_OP_BARRIER || op->numel == 0)
        return run_chunk(hier, op, 0, 0, &pending, err);
    for (size_t count; begin < op->numel; begin += count) {
        count = sw_size_min(chunk_bytes(hier, op->kind) / element_bytes, op->numel - begin);
        SW_TRY(run_chunk(hier, op, begin, count, &pending, err));
        if (op->kind == SW_OP_ALL_REDUCE)
            memcpy((uint8_t *)op->data + begin * element_bytes, own_chunk(hier, &pending),
                   count * element_bytes);
    }
    return SW_OK;
}

sw_status sw_hier_gather(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                         const char *label, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_hier_pending pending;
    size_t begin = 0, count;
    sw_op op = sw_op_gather(mine, size_bytes, label);
    SW_TRY(sw_op_check(&op, comm->world_size, err));
    sw_comm_count(comm, &op);
    do {
        count = sw_size_min(chunk_bytes(hier, op.kind), size_bytes - begin);
        SW_TRY(run_chunk(hier, &op, begin, count, &pending, err));
        for (int r = 0; r < comm->world_size; ++r)
            memcpy((uint8_t *)all + (size_t)r * size_bytes + begin,
                   sw_hier_mirrored(hier, &pending, r), count);
        begin += count;
    } while (begin < size_bytes);
    return SW_OK;
}
