/* fabric_execute.c - memory access of an operation, once every rank has posted it.
 *
 * Pool form: a rank folds its own slice of all W buffers and stores the result into all of them, so
 * each rank reads n bytes and writes n, for every W. Several owners of one slice divide its fold,
 * and each stores into the results of all owners. Slot form: every rank folds the whole chunk,
 * which is in cache, into its private memory: more arithmetic, one wait less. Both fold in rank
 * order. */
#include <string.h>

#include "base/bytes.h"
#include "comm/fabric.h"

/* The part of an operation that this rank folds, in elements of the operation. */
typedef struct fold_range {
    size_t begin, end;
    size_t origin;   /* the first element of op.result */
    bool slots;      /* sources are the slots of `ticket`; else the arena's parts */
    bool pieces;     /* the destination is this rank's slot; else op.data */
    bool everywhere; /* store into every rank's part; else into this rank's only, or into
                        op.result */
} fold_range;

static void fold_run(sw_fabric *fabric, const sw_pending *pending, uint32_t ticket,
                     const fold_range *range, size_t begin, size_t numel, double scale)
{
    const sw_op *op = &pending->op;
    size_t element_bytes = sw_dtype_size_bytes(op->dtype);
    int sources = 0, destinations = 0;
    for (int r = 0; r < fabric->comm.world_size; ++r) {
        uint8_t *part =
            range->slots
                ? sw_fabric_slot(fabric, r, ticket) + (begin - pending->begin) * element_bytes
                : op->arena->base[r] + op->offset_bytes + begin * element_bytes;
        if (fabric->contributes[r])
            fabric->source[sources++] = part;
        if (!range->slots && !op->result && (range->everywhere || r == fabric->comm.rank))
            fabric->destination[destinations++] = part;
    }
    if (range->slots && range->pieces)
        fabric->destination[destinations++] = sw_fabric_slot(fabric, fabric->comm.rank, ticket) +
                                              (begin - pending->begin) * element_bytes;
    else if (range->slots)
        fabric->destination[destinations++] =
            (uint8_t *)op->data + (begin - pending->begin) * element_bytes;
    else if (op->result && !op->slices)
        fabric->destination[destinations++] =
            (uint8_t *)op->result + (begin - range->origin) * element_bytes;
    for (int r = 0; op->result && op->slices && r < fabric->comm.world_size; ++r)
        if (op->in_replica ? r == fabric->comm.rank
                           : op->slices->of_rank[r] == op->slices->of_rank[fabric->comm.rank])
            fabric->destination[destinations++] = op->results->base[r] + op->results_offset_bytes +
                                                  (begin - range->origin) * element_bytes;
    if (sources > 0)
        sw_kernels()->fold[op->dtype]((void *const *)fabric->destination, destinations,
                                      (const void *const *)fabric->source, sources, numel, scale,
                                      op->redop);
}

static void fold(sw_fabric *fabric, const sw_pending *pending, uint32_t ticket,
                 const fold_range *range)
{
    const sw_fold_plan *plan = pending->op.plan;
    double scale;
    size_t begin, numel;
    sw_op_resolve(&pending->op, fabric->comm.world_size, fabric->contributes, &scale);
    for (int r = 0; r < fabric->comm.world_size; ++r)
        fabric->contributes[r] &= sw_op_joins(&pending->op, r, fabric->comm.rank);
    bool accumulates =
        pending->op.result && plan && plan->accumulates && plan->accumulates(plan->context);
    for (size_t cursor = range->begin;
         sw_op_next_run(&pending->op, 0, cursor, range->end, &begin, &numel);
         cursor = begin + numel) {
        if (accumulates)
            plan->add_accumulated(plan->context, begin, numel,
                                  (const uint8_t *)pending->op.result +
                                      (begin - range->origin) *
                                          sw_dtype_size_bytes(pending->op.dtype));
        fold_run(fabric, pending, ticket, range, begin, numel, scale);
    }
}

/* Return true for ranks that read this rank's slice in their own part. */
static bool takes_slice(const sw_fabric *fabric, const sw_op *op, int rank)
{
    int own = fabric->comm.rank;
    bool apart =
        op->slices && op->slices->replica_of_rank[rank] != op->slices->replica_of_rank[own];
    return rank != own && !op->one_copy && !apart;
}

/* Each owner of a slice folds a piece of it. */
static void share_slice(const sw_fabric *fabric, const sw_op *op, fold_range *range)
{
    if (!op->slices || op->in_replica)
        return;
    size_t piece = sw_comm_slice_numel(range->end - range->begin, sw_dtype_size_bytes(op->dtype),
                                       fabric->comm.world_size / op->slices->count);
    size_t own = (size_t)op->slices->replica_of_rank[fabric->comm.rank];
    range->begin = sw_size_min(range->begin + own * piece, range->end);
    range->end = sw_size_min(range->begin + piece, range->end);
}

static void execute_pool(sw_fabric *fabric, const sw_pending *pending, uint32_t ticket)
{
    const sw_op *op = &pending->op;
    size_t element_bytes = sw_dtype_size_bytes(op->dtype);
    bool whole = op->kind == SW_OP_ALL_REDUCE; /* all ranks divide the work, whichever rank owns a
                                                  slice */
    int count = whole ? fabric->comm.world_size : sw_op_slice_count(op, fabric->comm.world_size);
    int index = whole ? fabric->comm.rank : sw_op_slice_of(op, fabric->comm.rank);
    size_t slice = sw_comm_slice_numel(op->numel, element_bytes, count);
    fold_range range = {.begin = sw_size_min((size_t)index * slice, op->numel),
                        .everywhere = whole};
    range.end = sw_size_min(range.begin + slice, op->numel);
    range.origin = range.begin;
    if (op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER) {
        if (op->kind == SW_OP_REDUCE_SCATTER)
            share_slice(fabric, op, &range);
        fold(fabric, pending, ticket, &range);
    } else if (op->kind == SW_OP_ALL_GATHER) {
        size_t offset = op->offset_bytes + range.begin * element_bytes;
        for (int r = 0; r < fabric->comm.world_size; ++r)
            if (takes_slice(fabric, op, r))
                sw_copy_streaming(op->arena->base[r] + offset,
                                  op->arena->base[fabric->comm.rank] + offset,
                                  (range.end - range.begin) * element_bytes);
    }
}

/* The piece of a chunk that `rank` folds, if each rank folds one. */
static fold_range piece_of(const sw_fabric *fabric, const sw_pending *pending, int rank)
{
    size_t piece = sw_comm_slice_numel(pending->count, sw_dtype_size_bytes(pending->op.dtype),
                                       fabric->comm.world_size);
    size_t begin = sw_size_min((size_t)rank * piece, pending->count);
    return (fold_range){.begin = pending->begin + begin,
                        .end = pending->begin + sw_size_min(begin + piece, pending->count),
                        .slots = true,
                        .pieces = true};
}

/* Copy the previous ticket's results, in the runs of its fold, from the ranks' slots. */
static void collect(sw_fabric *fabric, const sw_pending *pending, uint32_t ticket)
{
    const sw_op *op = &pending->op;
    size_t element_bytes = sw_dtype_size_bytes(op->dtype), begin, numel;
    for (int r = 0; r < fabric->comm.world_size; ++r) {
        const uint8_t *slot = sw_fabric_slot(fabric, r, ticket - 1);
        fold_range piece = piece_of(fabric, pending, r);
        for (size_t cursor = piece.begin; sw_op_next_run(op, 0, cursor, piece.end, &begin, &numel);
             cursor = begin + numel) {
            size_t at = (begin - pending->begin) * element_bytes;
            memcpy((uint8_t *)op->data + at, slot + at, numel * element_bytes);
        }
    }
}

static void execute_slot(sw_fabric *fabric, const sw_pending *pending, uint32_t ticket)
{
    const sw_op *op = &pending->op;
    size_t bytes = pending->count * sw_dtype_size_bytes(op->dtype);
    if (pending->descriptor.form == SW_FORM_PIECE) {
        fold_range piece = piece_of(fabric, pending, fabric->comm.rank);
        fold(fabric, pending, ticket, &piece);
    } else if (pending->descriptor.form == SW_FORM_COLLECT) {
        collect(fabric, pending, ticket);
    } else if (op->kind ==
               SW_OP_ALL_REDUCE) { /* even for 0 elements, since the plan may need to be resolved */
        fold_range range = {
            .begin = pending->begin, .end = pending->begin + pending->count, .slots = true};
        fold(fabric, pending, ticket, &range);
    } else if (bytes == 0) {
        return;
    } else if (op->kind == SW_OP_BROADCAST && op->root != fabric->comm.rank) {
        memcpy(op->data, sw_fabric_slot(fabric, op->root, ticket), bytes);
    } else if (op->kind == SW_OP_ALL_GATHER) {
        for (int r = 0; r < fabric->comm.world_size; ++r)
            memcpy((uint8_t *)pending->gathered + (size_t)r * op->numel + pending->begin,
                   sw_fabric_slot(fabric, r, ticket), bytes);
    }
}

void sw_fabric_execute(sw_fabric *fabric, const sw_pending *pending, uint32_t ticket)
{
    if (pending->op.arena)
        execute_pool(fabric, pending, ticket);
    else
        execute_slot(fabric, pending, ticket);
}
