/* comm.c - arithmetic and names that all transports share. */
#include "comm/comm.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"
#include "comm/account.h"
#include "platform/limits.h"

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
    return sw_error_pass(err, &reason);
}

void sw_comm_count(sw_comm *comm, const sw_op *op)
{
    comm->stats.operations[op->kind]++;
    if (op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER)
        comm->stats.bytes_reduced += op->numel * sw_dtype_size_bytes(op->dtype);
    comm->account.number++;
    comm->serial =
        sw_account_begin(&comm->account, (uint32_t)op->kind, op->label,
                         op->numel * sw_dtype_size_bytes(op->dtype), op->step, op->round);
}

void sw_comm_slept(sw_comm *comm, int64_t begun_ns, int rank)
{
    comm->stats.waits++;
    comm->stats.wait_ns +=
        (uint64_t)sw_account_slept(begun_ns, sw_comm_name(comm, rank), comm->account.group);
}

const char *sw_op_kind_name(sw_op_kind kind)
{
    static const char *const names[SW_OP_KIND_COUNT] = {"barrier", "all_reduce", "reduce_scatter",
                                                        "all_gather", "broadcast"};
    return (unsigned)kind < SW_OP_KIND_COUNT ? names[kind] : "invalid";
}

/* ---- agreement ---- */

typedef struct verdict {
    uint64_t size_bytes;
    sw_memory_need need;
    uint32_t failed;
    int32_t code; /* errno; 0: another failure */
    char message[208];
} verdict;

_Static_assert(sizeof(verdict) == 256, "one chunk even when hosts gather it from 16,384 ranks");

static sw_status compare(const sw_comm *comm, const char *noun, const char *label,
                         const verdict *all, sw_error *err)
{
    for (int r = 1; r < comm->world_size; ++r)
        if (all[r].size_bytes != all[0].size_bytes)
            return sw_error_set(err, SW_E_MISMATCH, sw_comm_name(comm, r),
                                "arena '%s': rank %d asks for %llu bytes, rank %d for %llu", label,
                                sw_comm_name(comm, 0), (unsigned long long)all[0].size_bytes,
                                sw_comm_name(comm, r), (unsigned long long)all[r].size_bytes);
    for (int r = 0; r < comm->world_size; ++r) {
        int name = sw_comm_name(comm, r);
        if (all[r].failed && noun)
            return sw_error_set(err, SW_E_MEMORY, name, "%s '%s' is not possible on rank %d: %s",
                                noun, label, name, all[r].message);
        if (all[r].failed)
            return sw_error_set(err, all[r].code ? SW_E_OS : SW_E_MEMORY,
                                all[r].code ? all[r].code : name, "%s", all[r].message);
    }
    return sw_limits_check_needs(&all[0].need, sizeof *all, comm->world_size, label, err);
}

sw_status sw_agree(sw_comm *comm, const char *noun, const char *label, size_t size_bytes,
                   sw_status local, const sw_error *cause, sw_error *err)
{
    verdict mine = {.size_bytes = size_bytes, .failed = local != SW_OK};
    verdict *all = calloc((size_t)comm->world_size, sizeof *all);
    if (!all)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory to agree on %s '%s'",
                               noun ? noun : "arena", label);
    if (noun)
        sw_limits_read_need(size_bytes, sw_comm_name(comm, comm->rank), &mine.need);
    if (local != SW_OK)
        snprintf(mine.message, sizeof mine.message, "%.207s", cause->message);
    if (local == SW_E_OS && !noun)
        mine.code = (int32_t)cause->detail;
    sw_status status = comm->ops->gather(comm, &mine, sizeof mine, all, label, err);
    if (status == SW_OK)
        status = compare(comm, noun, label, all, err);
    free(all);
    return status;
}
