/* hier_reduce.c - all_reduce and reduce_scatter over hosts, block by block. The blocks of a batch
 * of operations are one sequence, so that the wire does not idle between two operations.
 *
 * Partial sums of block t + ahead leave while those of block t arrive. In an all_reduce, results of
 * block t leave while those of t - ahead arrive, so both directions of the wire stay busy. A
 * reduce_scatter is cut by rank: partial sums go to the host of a slice's owner and are folded into
 * the owner's results. If slices have several owners (op.slices), it is an all_reduce whose results
 * only owners keep. That is cut by rank too if some host has no owner of some slice: then results
 * go only to hosts with one.
 *
 * Contributions that stand on the previous round's results (plan->accumulates) do not include them.
 * The owner's host sends those results one block ahead, and each carrier adds them to its ranks'
 * contributions. */
#include <string.h>

#include "base/bytes.h"
#include "comm/hier_block.h"
#include "comm/hier_carrier_state.h"
#include "platform/clock.h"

typedef enum results_kept {
    KEPT_BY_ALL = 0, /* all_reduce */
    KEPT_BY_OWNER,   /* the owner of the slice: one rank, on one host */
    KEPT_BY_OWNERS,  /* several, on one or more hosts */
} results_kept;

typedef struct reduction {
    const sw_hier_pending *pending;
    sw_cut cut;
    results_kept kept;
    sw_dtype partial_dtype;
    size_t element_bytes, partial_bytes;
    size_t owned; /* elements of an owner's slice */
    double scale;
    bool crosses;                /* some host has no owner of some slice */
    bool accumulates, exchanges; /* some contributions stand on the previous results; some of those
                                  * on other hosts */
    const bool *contributes, *host_contributes; /* borrowed: by rank, by host */
    const char *what;                           /* borrowed */
    uint32_t ticket;
    size_t block_count, blocks_through; /* 0: no rank contributes, or no element */
} reduction;

typedef struct batch_block {
    reduction *work;
    size_t block; /* block number within the operation */
    uint32_t number;
    sw_carrier_place *at; /* by host */
} batch_block;

/* Return true if `host`, besides the folding one, gets the result of the slice of `owner`. */
static bool gets_result(const sw_carrier *carrier, const reduction *work, int host, int owner)
{
    if (work->kept == KEPT_BY_OWNER || !work->crosses)
        return work->kept != KEPT_BY_OWNER;
    return owner >= 0 && sw_slice_owner(work->pending->table, &carrier->hier->map, host,
                                        sw_op_slice_of(&work->pending->op, owner)) >= 0;
}

static size_t block_of(const sw_carrier *carrier, const reduction *work, int host, size_t block,
                       size_t *begin)
{
    int owner;
    return sw_cut_block(&work->cut, &carrier->hier->map, host, block, begin, &owner);
}

static uint8_t *contribution(const sw_carrier *carrier, const reduction *work, int local,
                             size_t begin)
{
    return sw_carrier_contribution(carrier, work->pending, local, begin);
}

/* Return the address at which `rank` of this host, an owner, keeps the result of an element. */
static uint8_t *result_of(const reduction *work, int rank, size_t element)
{
    const sw_op *op = &work->pending->op;
    if (!op->results)
        return op->arena->base[rank] + op->offset_bytes + element * work->element_bytes;
    size_t first = (size_t)sw_op_slice_of(op, rank) * work->owned;
    return op->results->base[rank] + op->results_offset_bytes +
           (element - first) * work->element_bytes;
}

/* Return any rank of this host that owns slice `index`: all of them keep the same bits. */
static int owner_here(const sw_carrier *carrier, const reduction *work, size_t index)
{
    const sw_hier *hier = carrier->hier;
    return sw_slice_owner(work->pending->table, &hier->map, hier->host, (int)index);
}

static void add_accumulated(const reduction *work, size_t begin, size_t numel,
                            const void *accumulated)
{
    const sw_fold_plan *plan = work->pending->op.plan;
    plan->add_accumulated(plan->context, begin, numel, accumulated);
}

/* The same from the results of this host's ranks that own the range. */
static void add_accumulated_here(const sw_carrier *carrier, const reduction *work, size_t begin,
                                 size_t numel)
{
    for (size_t at = begin, end; at < begin + numel; at = end) {
        size_t index = at / work->owned;
        end = sw_size_min((index + 1) * work->owned, begin + numel);
        int owner = owner_here(carrier, work, index);
        if (owner >= 0)
            add_accumulated(work, at, end - at, result_of(work, owner, at));
    }
}

/* Fold this host's partial sums of a range into `memory`, unless one contribution is the sum. */
static uint8_t *fold_host(const sw_carrier *carrier, const reduction *work, size_t begin,
                          size_t numel, uint8_t *memory)
{
    const sw_hier *hier = carrier->hier;
    int count = 0;
    for (int l = 0; l < hier->local_count; ++l)
        if (work->contributes[hier->members[l]])
            carrier->source[count++] = contribution(carrier, work, l, begin);
    if (count == 1 && hier->local_count == 1 && work->partial_dtype == work->pending->op.dtype)
        return contribution(carrier, work, 0, begin);
    sw_partial_fold(memory, carrier->source, count, numel, work->pending->op.dtype,
                    work->pending->op.redop);
    return memory;
}

static bool next_run(const reduction *work, size_t cursor, size_t end, size_t *begin, size_t *numel)
{
    return sw_op_next_run(&work->pending->op, work->pending->begin, cursor, end, begin, numel);
}

/* ---- blocks on the wire; of float32 in packets, if the sender announced it ---- */

static bool is_packed(const sw_carrier *carrier, int sender, sw_dtype dtype)
{
    return carrier->hosts[sender].packs && dtype == SW_DTYPE_FLOAT32;
}

/* Return the bytes of a block to send: the block, or its packet in `packet`. The caller may access
 * the operation's memory. */
static const uint8_t *wrap_block(sw_carrier *carrier, const uint8_t *data, size_t numel,
                                 sw_dtype dtype, uint8_t *packet, size_t *size_bytes)
{
    *size_bytes = numel * sw_dtype_size_bytes(dtype);
    if (numel == 0 || !is_packed(carrier, carrier->hier->host, dtype))
        return data;
    *size_bytes = sw_packet_fill(packet, data, numel);
    return packet;
}

/* Send `size_bytes` that represent `plain_bytes`. */
static sw_status send_block(sw_carrier *carrier, const batch_block *piece, int to,
                            sw_message message, const uint8_t *data, size_t size_bytes,
                            size_t plain_bytes, sw_transfer *transfer, sw_error *err)
{
    carrier->packing.batch.plain_bytes += plain_bytes;
    carrier->packing.batch.sent_bytes += size_bytes;
    return sw_carrier_send(carrier, to, message, piece->number, data, size_bytes, transfer, err);
}

static sw_status expect_block(sw_carrier *carrier, const batch_block *piece, int from,
                              sw_message message, size_t numel, sw_dtype dtype, uint8_t *memory,
                              sw_transfer *transfer, sw_error *err)
{
    size_t bytes = numel * sw_dtype_size_bytes(dtype);
    if (numel > 0 && is_packed(carrier, from, dtype))
        bytes = sw_packet_most_bytes(numel);
    return sw_carrier_receive(carrier, from, message, piece->number, memory, bytes, transfer, err);
}

/* Return the elements of a block received from a host: in place, or unpacked. */
static sw_status open_block(sw_carrier *carrier, int from, size_t numel, sw_dtype dtype,
                            uint8_t *memory, uint8_t **elements, sw_error *err)
{
    size_t bytes;
    *elements = memory;
    if (numel == 0 || !is_packed(carrier, from, dtype))
        return SW_OK;
    *elements = carrier->hosts[from].opened;
    if (sw_packet_open(*elements, memory, numel, &bytes, err) != SW_OK) {
        err->detail = sw_host_carrier(&carrier->hier->map, from);
        return sw_carrier_blame(carrier, carrier->what, err);
    }
    sw_bridge_count_less(&carrier->bridge, sw_packet_most_bytes(numel) - bytes);
    return SW_OK;
}

/* Send results on which other hosts' contributions stand, and receive theirs. */
static sw_status begin_accumulated(sw_carrier *carrier, const batch_block *piece, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    const reduction *work = piece->work;
    sw_carrier_place *at = piece->at;
    int owner;
    size_t begin,
        own = sw_cut_block(&work->cut, &hier->map, hier->host, piece->block, &begin, &owner);
    SW_FOR_OTHER_HOSTS(carrier, g) {
        size_t unused, theirs = block_of(carrier, work, g, piece->block, &unused);
        SW_TRY(sw_carrier_receive(carrier, g, SW_MESSAGE_ACCUMULATED, piece->number, at[g].partial,
                                  theirs * work->element_bytes, &at[g].accumulated_in, err));
    }
    if (own == 0)
        return SW_OK;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    const uint8_t *results = result_of(work, owner, begin);
    sw_carrier_touch_end(carrier);
    SW_FOR_OTHER_HOSTS(carrier, g)
        SW_TRY(sw_carrier_send(carrier, g, SW_MESSAGE_ACCUMULATED, piece->number, results,
                               own * work->element_bytes, &at[g].accumulated_out, err));
    return SW_OK;
}

/* Send this host's partial sums of the block that host `to` folds. */
static sw_status send_partial(sw_carrier *carrier, const batch_block *piece, int to, sw_error *err)
{
    const reduction *work = piece->work;
    sw_carrier_place *at = piece->at;
    size_t begin, numel = block_of(carrier, work, to, piece->block, &begin);
    if (work->exchanges)
        SW_TRY(sw_carrier_wait(carrier, &at[to].accumulated_in, err));
    if (!work->host_contributes[carrier->hier->host] || numel == 0)
        return SW_OK;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    if (work->exchanges)
        add_accumulated(work, begin, numel, at[to].partial);
    else if (work->accumulates)
        add_accumulated_here(carrier, work, begin, numel);
    size_t bytes;
    const uint8_t *partial = fold_host(carrier, work, begin, numel, at[to].partial);
    partial = wrap_block(carrier, partial, numel, work->partial_dtype, at[to].packet, &bytes);
    sw_carrier_touch_end(carrier);
    return send_block(carrier, piece, to, SW_MESSAGE_PARTIAL, partial, bytes,
                      numel * work->partial_bytes, &at[to].partial_out, err);
}

static sw_status begin_block(sw_carrier *carrier, const batch_block *piece, sw_error *err)
{
    const reduction *work = piece->work;
    sw_carrier_place *at = piece->at;
    size_t begin, own = block_of(carrier, work, carrier->hier->host, piece->block, &begin);
    SW_FOR_OTHER_HOSTS(carrier, g)
        if (work->host_contributes[g])
            SW_TRY(expect_block(carrier, piece, g, SW_MESSAGE_PARTIAL, own, work->partial_dtype,
                                at[g].arrived, &at[g].partial_in, err));
    SW_FOR_OTHER_HOSTS(carrier, g)
        SW_TRY(send_partial(carrier, piece, g, err));
    return SW_OK;
}

/* Set carrier->destination for an element's result. If every host has owners, they get it at the
 * end from the lowest rank's part. */
static int set_destinations(const sw_carrier *carrier, const reduction *work, int owner,
                            size_t element)
{
    int count = work->kept == KEPT_BY_ALL ? carrier->hier->local_count : 1;
    for (int l = 0; l < count; ++l)
        carrier->destination[l] = contribution(carrier, work, l, element);
    if (work->kept == KEPT_BY_OWNER)
        carrier->destination[0] = result_of(work, owner, element);
    return count;
}

/* Fold partial sums, in host order, into the result in the memory of this host's ranks. */
static void finish_own(sw_carrier *carrier, const reduction *work, const sw_carrier_place *at,
                       int owner, size_t begin, size_t numel)
{
    const sw_hier *hier = carrier->hier;
    const sw_op *op = &work->pending->op;
    size_t run, run_numel;
    if (work->accumulates)
        add_accumulated_here(carrier, work, begin, numel);
    if (work->host_contributes[hier->host])
        carrier->hosts[hier->host].elements =
            fold_host(carrier, work, begin, numel, at[hier->host].partial);
    for (size_t cursor = begin; next_run(work, cursor, begin + numel, &run, &run_numel);
         cursor = run + run_numel) {
        int count = 0;
        for (int g = 0; g < hier->map.host_count; ++g)
            if (work->host_contributes[g])
                carrier->source[count++] =
                    carrier->hosts[g].elements + (run - begin) * work->partial_bytes;
        int destinations = set_destinations(carrier, work, owner, run);
        sw_partial_finish(carrier->destination, destinations, carrier->source, count, run_numel,
                          op->dtype, work->scale, op->redop);
    }
}

/* Receive the result into the buffer of the partial sum that was sent. */
static sw_status expect_result(sw_carrier *carrier, const batch_block *piece, int from,
                               sw_error *err)
{
    const reduction *work = piece->work;
    const sw_hier *hier = carrier->hier;
    int owner;
    size_t unused,
        numel = sw_cut_block(&work->cut, &hier->map, from, piece->block, &unused, &owner);
    if (!gets_result(carrier, work, hier->host, owner))
        return SW_OK;
    return expect_block(carrier, piece, from, SW_MESSAGE_RESULT, numel, work->pending->op.dtype,
                        piece->at[from].partial, &piece->at[from].result_in, err);
}

static sw_status fold_block(sw_carrier *carrier, const batch_block *piece, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    const reduction *work = piece->work;
    sw_carrier_place *at = piece->at;
    int owner;
    size_t begin,
        numel = sw_cut_block(&work->cut, &hier->map, hier->host, piece->block, &begin, &owner);
    SW_FOR_OTHER_HOSTS(carrier, g) {
        SW_TRY(sw_carrier_wait(carrier, &at[g].partial_out, err));
        SW_TRY(expect_result(carrier, piece, g, err));
    }
    SW_FOR_OTHER_HOSTS(carrier, g) {
        SW_TRY(sw_carrier_wait(carrier, &at[g].partial_in, err));
        SW_TRY(sw_carrier_wait(carrier, &at[g].accumulated_out, err));
        if (work->host_contributes[g])
            SW_TRY(open_block(carrier, g, numel, work->partial_dtype, at[g].arrived,
                              &carrier->hosts[g].elements, err));
    }
    if (numel == 0)
        return SW_OK;
    size_t bytes = 0;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    finish_own(carrier, work, at, owner, begin, numel);
    const uint8_t *result = contribution(carrier, work, 0, begin);
    if (work->kept != KEPT_BY_OWNER)
        result = wrap_block(carrier, result, numel, work->pending->op.dtype, at[hier->host].packet,
                            &bytes);
    sw_carrier_touch_end(carrier);
    if (work->kept == KEPT_BY_OWNER)
        return SW_OK;
    /* Elements that no rank used have no result; the other hosts do not copy them. */
    SW_FOR_OTHER_HOSTS(carrier, g)
        if (gets_result(carrier, work, g, owner))
            SW_TRY(send_block(carrier, piece, g, SW_MESSAGE_RESULT, result, bytes,
                              numel * work->element_bytes, &at[g].result_out, err));
    return SW_OK;
}

/* Store other hosts' results of a block; none arrive if only owners keep them. */
static sw_status store_block(sw_carrier *carrier, const batch_block *piece, sw_error *err)
{
    const reduction *work = piece->work;
    sw_carrier_place *at = piece->at;
    size_t begin, run, run_numel;
    if (work->kept == KEPT_BY_OWNER)
        return SW_OK;
    SW_FOR_OTHER_HOSTS(carrier, g) {
        int owner;
        size_t numel =
            sw_cut_block(&work->cut, &carrier->hier->map, g, piece->block, &begin, &owner);
        uint8_t *result;
        SW_TRY(sw_carrier_wait(carrier, &at[g].result_out, err));
        if (!gets_result(carrier, work, carrier->hier->host, owner))
            continue;
        SW_TRY(sw_carrier_wait(carrier, &at[g].result_in, err));
        SW_TRY(open_block(carrier, g, numel, work->pending->op.dtype, at[g].partial, &result, err));
        SW_TRY(sw_carrier_touch_begin(carrier, err));
        for (size_t cursor = begin; next_run(work, cursor, begin + numel, &run, &run_numel);
             cursor = run + run_numel) {
            int count = set_destinations(carrier, work, -1, run);
            for (int d = 0; d < count; ++d)
                memcpy(carrier->destination[d], result + (run - begin) * work->element_bytes,
                       run_numel * work->element_bytes);
        }
        sw_carrier_touch_end(carrier);
    }
    return SW_OK;
}

/* Fold the contributions of a replica on this host into the result of `rank`, one of it. The other
 * hosts have no part in it. */
static void fold_replica(sw_carrier *carrier, const reduction *work, int rank, size_t run,
                         size_t numel)
{
    const sw_hier *hier = carrier->hier;
    const sw_op *op = &work->pending->op;
    int count = 0;
    void *result = result_of(work, rank, run);
    for (int k = 0; k < hier->local_count; ++k)
        if (work->contributes[hier->members[k]] && sw_op_joins(op, hier->members[k], rank))
            carrier->source[count++] = contribution(carrier, work, k, run);
    if (count > 0)
        sw_kernels()->fold[op->dtype](&result, 1, (const void *const *)carrier->source, count,
                                      numel, work->scale, op->redop);
}

/* Give every owner its results: of its replica, or those in the lowest rank's part, which has all
 * of them. */
static sw_status keep_owned(sw_carrier *carrier, const reduction *work, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    size_t run, numel;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    for (int l = 0; l < hier->local_count; ++l) {
        int rank = hier->members[l];
        size_t begin = (size_t)sw_op_slice_of(&work->pending->op, rank) * work->owned;
        size_t end = sw_size_min(begin + work->owned, work->cut.numel);
        for (size_t cursor = begin; next_run(work, cursor, end, &run, &numel); cursor = run + numel)
            if (work->pending->op.in_replica)
                fold_replica(carrier, work, rank, run, numel);
            else
                memmove(result_of(work, rank, run), contribution(carrier, work, 0, run),
                        numel * work->element_bytes);
    }
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

/* Find the contributing ranks and the factor, equal on all hosts. No blocks if there is nothing to
 * fold. */
static sw_status resolve(sw_carrier *carrier, reduction *work, bool *contributes,
                         bool *host_contributes, sw_error *err)
{
    const sw_host_map *map = &carrier->hier->map;
    const sw_fold_plan *plan = work->pending->op.plan;
    size_t begin, numel;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    sw_op_resolve(&work->pending->op, map->world_size, contributes, &work->scale);
    work->owned = sw_comm_slice_numel(work->cut.numel, work->element_bytes,
                                      sw_op_slice_count(&work->pending->op, map->world_size));
    work->accumulates = plan && plan->accumulates && plan->accumulates(plan->context);
    bool any = next_run(work, 0, work->pending->op.numel, &begin, &numel), has_contributor = false;
    sw_carrier_touch_end(carrier);
    memset(host_contributes, 0, (size_t)map->host_count * sizeof(bool));
    for (int r = 0; r < map->world_size; ++r) {
        host_contributes[map->host_of[r]] |= contributes[r];
        has_contributor |= contributes[r];
    }
    work->contributes = contributes;
    work->host_contributes = host_contributes;
    work->exchanges = work->accumulates && (work->kept == KEPT_BY_OWNER || work->crosses);
    work->block_count =
        any && has_contributor && !work->pending->op.in_replica ? work->cut.block_count : 0;
    return SW_OK;
}

static reduction reduction_of(const sw_carrier *carrier, const sw_hier_pending *pending)
{
    const sw_op *op = &pending->op;
    const sw_host_map *map = &carrier->hier->map;
    reduction work = {.pending = pending,
                      .partial_dtype = sw_partial_dtype(op->dtype),
                      .element_bytes = sw_dtype_size_bytes(op->dtype)};
    work.partial_bytes = sw_dtype_size_bytes(work.partial_dtype);
    work.owned =
        sw_comm_slice_numel(op->numel, work.element_bytes, sw_op_slice_count(op, map->world_size));
    if (op->kind == SW_OP_REDUCE_SCATTER)
        work.kept = op->slices ? KEPT_BY_OWNERS : KEPT_BY_OWNER;
    work.crosses = work.kept == KEPT_BY_OWNERS && !pending->table->is_covered;
    bool by_rank = work.kept == KEPT_BY_OWNER || work.crosses;
    sw_cut_init(&work.cut, map, op->numel, work.element_bytes,
                carrier->block_bytes / work.partial_bytes, by_rank,
                by_rank ? pending->table : NULL);
    return work;
}

/* Return block `index` of the batch, whose blocks are counted over its operations in order; the
 * wire works for its operation. */
static batch_block block_at(sw_carrier *carrier, reduction *work, size_t index)
{
    batch_block found = {.number = carrier->blocks + (uint32_t)index,
                         .at = sw_carrier_places(carrier, index)};
    while (index >= work->block_count)
        index -= work++->block_count;
    found.work = work;
    found.block = index;
    carrier->what = work->what;
    return found;
}

/* Complete finished operations in order. */
static sw_status complete(sw_carrier *carrier, reduction *batch, uint32_t count, uint32_t *through,
                          sw_error *err)
{
    for (; *through < count; ++*through) {
        reduction *work = &batch[*through];
        if (work->blocks_through < work->block_count)
            return SW_OK;
        if (work->pending->op.in_replica || (work->block_count > 0 && work->kept == KEPT_BY_OWNERS))
            SW_TRY(keep_owned(carrier, work, err));
        sw_carrier_complete(carrier, work->ticket);
    }
    return SW_OK;
}

sw_status sw_carrier_reduce(sw_carrier *carrier, uint32_t ticket, uint32_t count, sw_error *err)
{
    const sw_host_map *map = &carrier->hier->map;
    reduction batch[SW_HIER_BATCH];
    size_t blocks = 0, stood = 0;
    uint32_t through = 0;
    int64_t begun_ns = sw_clock_now_ns();
    for (uint32_t i = 0; i < count; ++i) {
        batch[i] = reduction_of(carrier, sw_carrier_pending(carrier, ticket + i));
        batch[i].ticket = ticket + i;
        batch[i].what = sw_carrier_what(carrier, carrier->turn, i);
        SW_TRY(resolve(carrier, &batch[i], carrier->contributes + i * (size_t)map->world_size,
                       carrier->host_contributes + i * (size_t)map->host_count, err));
        blocks += batch[i].block_count;
    }
    for (size_t step = 0; step < blocks + 2 * carrier->ahead; ++step) {
        for (; stood < blocks && stood <= step + 1; ++stood) { /* one block ahead of its use */
            batch_block piece = block_at(carrier, batch, stood);
            if (piece.work->exchanges)
                SW_TRY(begin_accumulated(carrier, &piece, err));
        }
        if (step < blocks) {
            batch_block piece = block_at(carrier, batch, step);
            SW_TRY(begin_block(carrier, &piece, err));
        }
        if (step >= carrier->ahead && step - carrier->ahead < blocks) {
            batch_block piece = block_at(carrier, batch, step - carrier->ahead);
            SW_TRY(fold_block(carrier, &piece, err));
        }
        if (step >= 2 * carrier->ahead && blocks > 0) {
            batch_block piece = block_at(carrier, batch, step - 2 * carrier->ahead);
            SW_TRY(store_block(carrier, &piece, err));
            piece.work->blocks_through++;
        }
        SW_TRY(complete(carrier, batch, count, &through, err));
        if (step >= blocks)
            SW_TRY(sw_carrier_offer_early(carrier, ticket + count, err));
    }
    carrier->blocks += (uint32_t)blocks;
    sw_packing_learn(&carrier->packing, carrier->hosts[carrier->hier->host].packs,
                     carrier->slow_bytes_per_s, sw_clock_now_ns() - begun_ns);
    return complete(carrier, batch, count, &through, err);
}
