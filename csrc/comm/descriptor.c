/* descriptor.c - see the header. */
#include "comm/descriptor.h"

#include <stdio.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"

/* ---- one rank's ---- */

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

/* ---- those of any number of ranks ---- */

static bool contradicts(const sw_part_side *first, const sw_part_side *other)
{
    return first->payload_bytes != other->payload_bytes ||
           sw_descriptor_contradicted(&first->descriptor, NULL, &other->descriptor) != NULL;
}

static bool counts_otherwise(const sw_part_side *first, const sw_part_side *other)
{
    return first->descriptor.step != other->descriptor.step ||
           first->descriptor.round != other->descriptor.round;
}

static const sw_part_side *lower(const sw_part_side *a, const sw_part_side *b)
{
    return b->rank < 0 || (a->rank >= 0 && a->rank <= b->rank) ? a : b;
}

/* Sides that agree are equal, so a third side that contradicts the lower one contradicts both. */
static void merge_pair(sw_part_side *first, sw_part_side *odd, const sw_part_side *other_first,
                       const sw_part_side *other_odd,
                       bool (*differ)(const sw_part_side *, const sw_part_side *))
{
    if (other_first->rank < 0)
        return;
    bool is_lower = first->rank >= 0 && first->rank <= other_first->rank;
    const sw_part_side *low = is_lower ? first : other_first,
                       *high = is_lower ? other_first : first;
    const sw_part_side *low_odd = is_lower ? odd : other_odd,
                       *high_odd = is_lower ? other_odd : odd;
    if (high->rank >= 0 && differ(low, high))
        high_odd = high;
    const sw_part_side made_first = *low, made_odd = *lower(low_odd, high_odd);
    *first = made_first;
    *odd = made_odd;
}

void sw_part_begin(sw_part *part, int rank, const sw_descriptor *descriptor, uint32_t payload_bytes)
{
    const sw_part_side none = {.rank = -1};
    *part = (sw_part){.odd = none, .counting = none, .odd_counting = none};
    part->lowest =
        (sw_part_side){.rank = rank, .payload_bytes = payload_bytes, .descriptor = *descriptor};
    if (descriptor->round != 0)
        part->counting = part->lowest;
}

void sw_part_merge(sw_part *into, const sw_part *other)
{
    merge_pair(&into->lowest, &into->odd, &other->lowest, &other->odd, contradicts);
    merge_pair(&into->counting, &into->odd_counting, &other->counting, &other->odd_counting,
               counts_otherwise);
}

sw_status sw_part_check(const sw_part *part, uint32_t ticket, sw_error *err)
{
    const sw_part_side *first = &part->lowest, *odd = lower(&part->odd, &part->odd_counting);
    if (odd->rank < 0)
        return SW_OK;
    if (odd == &part->odd_counting)
        first = &part->counting;
    else if (!sw_descriptor_contradicted(&first->descriptor, NULL, &odd->descriptor))
        return sw_error_set(
            err, SW_E_MISMATCH, odd->rank,
            "rank %d sends %u bytes beside %s '%.*s', but rank %d sends %u", odd->rank,
            odd->payload_bytes, sw_op_kind_name((sw_op_kind)odd->descriptor.kind),
            SW_COMM_LABEL_BYTES - 1, odd->descriptor.label, first->rank, first->payload_bytes);
    return sw_descriptor_disagree(ticket, first->rank, &first->descriptor, odd->rank,
                                  &odd->descriptor, err);
}

/* Encoding: a word with a bit for each side that exists, then these sides. */

enum {
    SIDES = 4,
    COUNTING = 2,
    IS_LOWEST = 1u << SIDES /* the lowest rank that counts rounds is the
                             * lowest of all */
};

static const sw_part_side *side_of(const sw_part *part, int index)
{
    const sw_part_side *side[SIDES] = {&part->lowest, &part->odd, &part->counting,
                                       &part->odd_counting};
    return side[index];
}

size_t sw_part_write(const sw_part *part, uint8_t *bytes)
{
    uint32_t there = 0;
    size_t used = sizeof there;
    if (part->counting.rank >= 0 && part->counting.rank == part->lowest.rank)
        there |= IS_LOWEST;
    for (int i = 0; i < SIDES; ++i) {
        const sw_part_side *side = side_of(part, i);
        if (side->rank < 0 || (i == COUNTING && there & IS_LOWEST))
            continue;
        there |= 1u << i;
        memcpy(bytes + used, side, sizeof *side);
        used += sizeof *side;
    }
    memcpy(bytes, &there, sizeof there);
    return used;
}

bool sw_part_read(sw_part *part, const uint8_t *bytes, size_t size_bytes, size_t *used)
{
    uint32_t there;
    *used = sizeof there;
    if (size_bytes < sizeof there)
        return false;
    memcpy(&there, bytes, sizeof there);
    for (int i = 0; i < SIDES; ++i) {
        sw_part_side *side = (sw_part_side *)(uintptr_t)side_of(part, i);
        side->rank = -1;
        if (!(there & 1u << i))
            continue;
        if (size_bytes - *used < sizeof *side)
            return false;
        memcpy(side, bytes + *used, sizeof *side);
        *used += sizeof *side;
        side->descriptor.label[SW_COMM_LABEL_BYTES - 1] = '\0';
        if (side->rank < 0)
            return false;
    }
    if (there & IS_LOWEST)
        part->counting = part->lowest;
    return part->lowest.rank >= 0;
}

/* ---- collectives that are one call ---- */

sw_status sw_comm_barrier(sw_comm *comm, const char *label, sw_error *err)
{
    sw_op op = {.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8};
    sw_op_set_label(&op, label);
    return comm->ops->run(comm, &op, err);
}

sw_status sw_comm_all_gather(sw_comm *comm, sw_op *op, const sw_span *ranges, size_t count,
                             sw_error *err)
{
    uint32_t ticket = 0;
    op->kind = SW_OP_ALL_GATHER;
    op->dtype = SW_DTYPE_UINT8;
    for (size_t pass = 0; pass < 2; ++pass)
        for (size_t i = 0; i < count; ++i) {
            op->offset_bytes = ranges[i].offset_bytes;
            op->numel = ranges[i].size_bytes;
            SW_TRY(pass == 0 ? sw_op_check(op, comm->world_size, err)
                             : comm->ops->post(comm, op, &ticket, err));
        }
    return count > 0 ? comm->ops->wait(comm, ticket, err) : SW_OK;
}
