/* comm.c - arithmetic and names that all transports share. */
#include "comm/comm.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"
#include "comm/account.h"

enum { BOUNCE_BYTES = 128 * 1024 }; /* for ranges that share a message */

size_t sw_comm_slice_numel(size_t numel, size_t element_bytes, int world_size)
{
    size_t unit = SW_ALIGNMENT_BYTES / element_bytes;
    size_t share = numel / (size_t)world_size + (numel % (size_t)world_size != 0);
    return (share + unit - 1) / unit * unit;
}

/* Send ranges [from, to) as one message, through `bounce`. */
static sw_status broadcast_together(sw_comm *comm, sw_op *op, const sw_range *ranges, size_t from,
                                    size_t to, uint8_t *bounce, sw_error *err)
{
    size_t used = 0;
    for (size_t k = from; k < to; used += ranges[k++].size_bytes)
        if (comm->rank == op->root && ranges[k].size_bytes > 0)
            memcpy(bounce + used, ranges[k].address, ranges[k].size_bytes);
    op->data = bounce;
    op->numel = used;
    SW_TRY(comm->ops->run(comm, op, err));
    used = 0;
    for (size_t k = from; k < to; used += ranges[k++].size_bytes)
        if (comm->rank != op->root && ranges[k].size_bytes > 0)
            memcpy(ranges[k].address, bounce + used, ranges[k].size_bytes);
    return SW_OK;
}

static sw_status broadcast_packed(sw_comm *comm, sw_op *op, const sw_range *ranges, size_t count,
                                  uint8_t *bounce, sw_error *err)
{
    for (size_t i = 0, end; i < count; i = end) {
        size_t used = 0;
        for (end = i; end < count && ranges[end].size_bytes <= BOUNCE_BYTES - used; ++end)
            used += ranges[end].size_bytes;
        if (end > i + 1) {
            SW_TRY(broadcast_together(comm, op, ranges, i, end, bounce, err));
            continue;
        }
        end = i + 1;
        op->data = ranges[i].address;
        op->numel = ranges[i].size_bytes;
        SW_TRY(comm->ops->run(comm, op, err));
    }
    return SW_OK;
}

sw_status sw_comm_broadcast(sw_comm *comm, const sw_range *ranges, size_t count, int root,
                            const char *label, sw_error *err)
{
    sw_op op = {.kind = SW_OP_BROADCAST, .dtype = SW_DTYPE_UINT8, .root = root};
    if (comm->ops->broadcast)
        return comm->ops->broadcast(comm, ranges, count, root, label, err);
    sw_op_set_label(&op, label);
    uint8_t *bounce = malloc(BOUNCE_BYTES);
    if (!bounce)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "broadcast '%s': no memory", op.label);
    sw_status status = broadcast_packed(comm, &op, ranges, count, bounce, err);
    free(bounce);
    return status;
}

void sw_op_set_label(sw_op *op, const char *label)
{
    memcpy(op->label, label, (size_t)sw_text_fit(label, sizeof op->label - 1));
}

sw_status sw_comm_give_up(sw_comm *comm, sw_status status, sw_error *err, const char *format, ...)
{
    char why[384];
    sw_error reason;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    int name = sw_comm_name(comm, comm->rank);
    sw_error_set(&reason, status, name, "rank %d gave up: %s", name, why);
    comm->ops->abort(comm, &reason);
    if (err)
        *err = reason;
    return status;
}

sw_status sw_comm_arena_differs(const sw_comm *comm, const char *label, uint64_t first_bytes,
                                int rank, uint64_t size_bytes, sw_error *err)
{
    return sw_error_set(err, SW_E_MISMATCH, sw_comm_name(comm, rank),
                        "arena '%s': rank %d asks for %llu bytes, rank %d for %llu", label,
                        sw_comm_name(comm, 0), (unsigned long long)first_bytes,
                        sw_comm_name(comm, rank), (unsigned long long)size_bytes);
}

void sw_comm_count(sw_comm *comm, const sw_op *op)
{
    comm->stats.operations[op->kind]++;
    if (op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER)
        comm->stats.bytes_reduced += op->numel * sw_dtype_size_bytes(op->dtype);
    comm->serial =
        sw_account_begin((uint32_t)op->kind, op->label, comm->world_size,
                         op->numel * sw_dtype_size_bytes(op->dtype), op->step, op->round);
}

void sw_comm_slept(sw_comm *comm, int64_t begun_ns, int rank)
{
    int pid = rank >= 0 && comm->ops->pid ? comm->ops->pid(comm, rank) : 0;
    comm->stats.waits++;
    comm->stats.wait_ns += (uint64_t)sw_account_slept(begun_ns, sw_comm_name(comm, rank), pid);
}

const char *sw_op_kind_name(sw_op_kind kind)
{
    static const char *const names[SW_OP_KIND_COUNT] = {"barrier", "all_reduce", "reduce_scatter",
                                                        "all_gather", "broadcast"};
    return (unsigned)kind < SW_OP_KIND_COUNT ? names[kind] : "invalid";
}
