/* descriptor.c - see the header. */
#include "comm/descriptor.h"

#include <stdio.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"

void sw_descriptor_fill(sw_descriptor *d, const sw_op *op, uint32_t form)
{
    memset(d, 0, sizeof *d);
    d->kind = (uint32_t)op->kind;
    d->dtype = (uint32_t)op->dtype;
    d->redop = (uint32_t)op->redop;
    d->form = form;
    d->root = op->kind == SW_OP_REDUCE_SCATTER ? op->in_replica : op->root;
    d->subject = op->subject == 0 && op->arena ? op->arena->serial : op->subject;
    d->step = op->step;
    d->round = op->round;
    d->numel = op->numel;
    d->offset_bytes = form == SW_FORM_POOL ? op->offset_bytes : 0;
    memcpy(d->label, op->label, (size_t)sw_text_fit(op->label, SW_COMM_LABEL_BYTES - 1));
}

void sw_descriptor_name(const sw_descriptor *d, char *text, size_t capacity)
{
    snprintf(text, capacity, "%s '%.*s'", sw_op_kind_name((sw_op_kind)d->kind),
             SW_COMM_LABEL_BYTES - 1, d->label);
}

/* "all_reduce 'bucket 0 of Mlp', mean of 640 float32, backward 1 of step 3". */
static void describe(const sw_descriptor *d, char *text, size_t capacity)
{
    char detail[96] = "", name[128];
    if (d->kind == SW_OP_ALL_REDUCE || d->kind == SW_OP_REDUCE_SCATTER)
        snprintf(detail, sizeof detail, ", %s of %llu %s%s", sw_redop_name((sw_redop)d->redop),
                 (unsigned long long)d->numel, sw_dtype_name((sw_dtype)d->dtype),
                 d->root ? " in each row" : "");
    else if (d->kind == SW_OP_BROADCAST)
        snprintf(detail, sizeof detail, ", %llu bytes from rank %d", (unsigned long long)d->numel,
                 (int)d->root);
    else if (d->kind == SW_OP_ALL_GATHER)
        snprintf(detail, sizeof detail, ", %llu bytes", (unsigned long long)d->numel);
    char place[64] = "", round[64] = "";
    if (d->form == SW_FORM_POOL && d->kind != SW_OP_BARRIER)
        snprintf(place, sizeof place, ", at byte %llu of shared memory %u",
                 (unsigned long long)d->offset_bytes, d->subject);
    else if (d->chunk)
        snprintf(place, sizeof place, ", chunk %llu", (unsigned long long)d->chunk);
    if (d->round)
        snprintf(round, sizeof round, ", backward %u of step %u", d->round, d->step);
    sw_descriptor_name(d, name, sizeof name);
    snprintf(text, capacity, "%s%s%s%s", name, detail, place, round);
}

const sw_descriptor *sw_descriptor_contradicted(const sw_descriptor *lowest,
                                                const sw_descriptor *counting,
                                                const sw_descriptor *other)
{
    if (memcmp(lowest, other, offsetof(sw_descriptor, step)) != 0)
        return lowest;
    if (counting && other->round != 0 &&
        (counting->step != other->step || counting->round != other->round))
        return counting;
    return NULL;
}

sw_status sw_descriptor_disagree(uint32_t ticket, int first_rank, const sw_descriptor *first,
                                 int other_rank, const sw_descriptor *other, sw_error *err)
{
    char one[224], two[224];
    describe(first, one, sizeof one);
    describe(other, two, sizeof two);
    bool are_apart = first->round != other->round || first->step != other->step;
    return sw_error_set(
        err, SW_E_MISMATCH, other_rank,
        "ranks disagree on collective %u: rank %d came with %s; rank %d came with %s%s", ticket,
        first_rank, one, other_rank, two,
        are_apart ? ": call backward() and optimizer.step() on every rank or on none, by a flag "
                    "that is all-reduced"
                  : "");
}

sw_status sw_op_check(const sw_op *op, int world_size, sw_error *err)
{
    size_t bytes;
    size_t element_bytes = sw_dtype_size_bytes(op->dtype);
    if ((unsigned)op->kind >= SW_OP_KIND_COUNT || element_bytes == 0)
        SW_FAIL(err, SW_E_INVALID, "collective '%s': kind %d or dtype %d is out of range",
                op->label, (int)op->kind, (int)op->dtype);
    if (!sw_size_multiply(op->numel, element_bytes, &bytes))
        SW_FAIL(err, SW_E_INVALID, "collective '%s': %zu elements overflow the address space",
                op->label, op->numel);
    if (op->kind == SW_OP_BROADCAST && (op->root < 0 || op->root >= world_size))
        SW_FAIL(err, SW_E_INVALID, "broadcast '%s': root must be in [0, %d), got %d", op->label,
                world_size, op->root);
    if (op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER)
        SW_TRY(sw_redop_check(op->redop, op->dtype, err));
    if (op->kind == SW_OP_REDUCE_SCATTER && op->slices && !op->results)
        SW_FAIL(err, SW_E_INVALID,
                "reduce_scatter '%s': owners of one slice need results in an arena", op->label);
    if (op->in_replica && (op->kind != SW_OP_REDUCE_SCATTER || !op->slices || !op->arena))
        SW_FAIL(err, SW_E_INVALID,
                "%s '%s' cannot stay in replicas: that is a reduce_scatter of "
                "slices with several owners",
                sw_op_kind_name(op->kind), op->label);
    if (op->arena && (op->offset_bytes > op->arena->size_bytes ||
                      bytes > op->arena->size_bytes - op->offset_bytes))
        SW_FAIL(err, SW_E_INVALID, "%s '%s': [%zu, +%zu) bytes exceed the arena of %zu",
                sw_op_kind_name(op->kind), op->label, op->offset_bytes, bytes,
                op->arena->size_bytes);
    return SW_OK;
}

sw_status sw_op_check_post(const sw_op *op, int world_size, sw_error *err)
{
    SW_TRY(sw_op_check(op, world_size, err));
    if (!op->arena)
        SW_FAIL(err, SW_E_STATE, "%s '%s' was posted on private memory, which only run() accepts",
                sw_op_kind_name(op->kind), op->label);
    return SW_OK;
}

sw_op sw_op_gather(const void *mine, size_t size_bytes, const char *label)
{
    sw_op op = {.kind = SW_OP_ALL_GATHER,
                .dtype = SW_DTYPE_UINT8,
                .numel = size_bytes,
                .data = (void *)(uintptr_t)mine};
    snprintf(op.label, sizeof op.label, "%s", label);
    return op;
}
