/* host_rounds.c - the reducer's table for buckets that the ranks of a host map: see
 * host_rounds_state.h.
 *
 * In a pool all ranks fold every bucket in place. Staged, a bucket is private and travels through
 * the communicator, which blocks, so it is sent at the end of the backward. Sliced, in a pool,
 * buckets share a ring: a bucket waits until all ranks are done with the round's earlier buckets at
 * its place. */
#include "reduce/host_rounds_state.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "kernels/kernels.h"
#include "platform/clock.h"
#include "platform/memory.h"
#include "platform/thread.h"

enum {
    ABANDONED_UNDER_WAY = 32, /* fewer operations than a communicator accepts without waiting */
    ABANDON_POLL_NS = 1000000,
    HOLD_POLL_NS = 100000,
    STALLED_NS = 250000000, /* a peer that is only slow completes a bucket in less */
};

static host_rounds *host_of(sw_reducer *reducer)
{
    return (host_rounds *)(void *)reducer;
}

static const host_rounds *host_seen(const sw_reducer *reducer)
{
    return (const host_rounds *)(const void *)reducer;
}

const sw_gradient_memory *sw_reducer_memory(const sw_reducer *reducer)
{
    return reducer->ops == &sw_host_rounds_ops ? host_seen(reducer)->memory : NULL;
}

sw_gradient_memory *sw_reducer_take_memory(sw_reducer *reducer)
{
    sw_gradient_memory *memory = NULL;
    if (reducer->ops == &sw_host_rounds_ops) {
        memory = host_of(reducer)->memory;
        host_of(reducer)->memory = NULL;
    }
    return memory;
}

/* ---- where things lie ---- */

static uint8_t *host_address(const sw_reducer *reducer, size_t bucket_index)
{
    const host_rounds *host = host_seen(reducer);
    return host->memory->base + (host->ring ? host->buckets[bucket_index].op.offset_bytes
                                            : reducer->layout.bucket[bucket_index].offset_bytes);
}

static uint8_t *host_result(const sw_reducer *reducer, size_t bucket_index)
{
    const host_rounds *host = host_seen(reducer);
    size_t slice_bytes = sw_bucket_bytes(reducer, bucket_index) / (size_t)reducer->slice_count;
    if (sw_host_rounds_is_in_place(host))
        return host_address(reducer, bucket_index);
    return host->ring ? host->memory->results + host->buckets[bucket_index].result_offset_bytes
                      : host->memory->base + reducer->layout.bucket[bucket_index].offset_bytes +
                            (size_t)reducer->own_slice * slice_bytes;
}

static sw_status host_write(sw_reducer *reducer, const sw_bucket_pieces *to, const void *from,
                            bool add, sw_error *err)
{
    (void)reducer;
    (void)err;
    for (size_t k = 0; k < sw_pieces_count(to); ++k) {
        const sw_bucket_pieces piece = sw_pieces_at(to, k);
        size_t element_bytes = sw_dtype_size_bytes(to->dtype);
        void *data = piece.data;
        const void *sources[] = {data, (const uint8_t *)from + k * to->chunk * element_bytes};
        if (add)
            sw_kernels()->fold[to->dtype](&data, 1, sources, 2, piece.numel, 1, SW_REDOP_SUM);
        else
            sw_copy_streaming(data, sources[1], piece.numel * element_bytes);
    }
    return SW_OK;
}

static sw_status host_clear(sw_reducer *reducer, const sw_bucket_pieces *to, sw_error *err)
{
    (void)reducer;
    (void)err;
    for (size_t k = 0; k < sw_pieces_count(to); ++k) {
        const sw_bucket_pieces piece = sw_pieces_at(to, k);
        memset(piece.data, 0, piece.numel * sw_dtype_size_bytes(piece.dtype));
    }
    return SW_OK;
}

/* ---- a round ---- */

static void host_unfreeze(sw_reducer *reducer, size_t param)
{
    host_rounds *host = host_of(reducer);
    const bucket *b = sw_bucket_of(reducer, param);
    memcpy(host->buckets[b->index].op.label, b->label, sizeof b->label);
    host->unfrozen = true;
}

static void host_open(sw_reducer *reducer)
{
    host_rounds *host = host_of(reducer);
    if (host->ring && host->unfrozen) {
        host->ring_bytes = sw_host_rounds_lay_ring(host, false);
        sw_memory_populate(host->memory->base, host->ring_bytes);
        host->unfrozen = false;
    }
    host->parity ^= 1;
    host->opened_ns = sw_clock_now_ns();
    host->held_ns = 0;
}

static bool host_has_room(const sw_reducer *reducer, const bucket *b)
{
    const host_bucket *before = host_seen(reducer)->buckets[b->index].before;
    return !before ||
           (before->common->state == BUCKET_DONE && (!reducer->takes_means || reducer->abandoned ||
                                                     before->common->index < reducer->next_mean));
}

/* Wait until all ranks are done with the previous bucket in the slot of `b`. A hook's buckets
 * follow one another. */
static sw_status host_reserve(sw_reducer *reducer, bucket *b, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    host_bucket *before = host->buckets[b->index].before;
    if (reducer->owner != SW_BUCKETS_OURS || host_has_room(reducer, b))
        return SW_OK;
    SW_TRY(host->comm->ops->wait(host->comm, before->ticket, err));
    before->common->state = BUCKET_DONE;
    return reducer->takes_means ? reducer->ops->poll(reducer, err) : SW_OK; /* the ones before it */
}

static bool host_hold_back(sw_reducer *reducer, const bucket *b)
{
    host_rounds *host = host_of(reducer);
    const host_bucket *before = host->buckets[b->index].before;
    int64_t from_ns = sw_clock_now_ns();
    bool held_enough = reducer->takes_means ? host->held_ns > STALLED_NS
                                            : 2 * host->held_ns > from_ns - host->opened_ns;
    if (!before || before->common->state != BUCKET_POSTED ||
        reducer->unplaced_bytes <= host->cap_bytes || held_enough)
        return false;
    sw_thread_sleep_ns(HOLD_POLL_NS);
    host->held_ns += reducer->takes_means ? HOLD_POLL_NS : sw_clock_now_ns() - from_ns;
    return true;
}

static sw_status host_keep(sw_reducer *reducer, bool *can, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    *can = host->ring && host->rows_on_hosts;
    return !*can || host->kept
               ? SW_OK
               : host->comm->ops->arena_create(host->comm, host->memory->result_bytes,
                                               "sums that stay in rows", &host->kept, err);
}

/* Return where the row's sum of a bucket's own slice lies. */
static uint8_t *kept_of(const host_rounds *host, const host_bucket *b)
{
    return host->kept->base[host->comm->rank] + b->result_offset_bytes;
}

/* Add what this rank's row has kept to its contribution. */
static void add_kept(host_rounds *host, const host_bucket *b)
{
    const sw_reducer *base = &host->base;
    const sw_layout_bucket *shape = sw_bucket_shape(base, b->common);
    size_t element_bytes = sw_dtype_size_bytes(shape->dtype);
    uint8_t *own =
        host_address(base, b->common->index) +
        (size_t)base->own_slice * (shape->numel / (size_t)base->slice_count) * element_bytes;
    size_t next = 0, begin, end;
    while (base->contributes && sw_bucket_next_run(base, b->common, (size_t)base->own_slice, true,
                                                   &next, &begin, &end)) {
        void *to = own + begin * element_bytes;
        const void *sources[] = {to, kept_of(host, b) + begin * element_bytes};
        sw_kernels()->fold[shape->dtype](&to, 1, sources, 2, end - begin, 1, SW_REDOP_SUM);
    }
}

/* Return the operation of a bucket in this round. */
static sw_op op_of(const host_rounds *host, const host_bucket *b)
{
    sw_op op = b->op;
    if (!host->base.stays_in_rows)
        return op;
    op.in_replica = true;
    op.redop = SW_REDOP_SUM;
    op.codec = NULL;
    op.result = kept_of(host, b);
    op.results = host->kept;
    return op;
}

static sw_status host_post(sw_reducer *reducer, bucket *common, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    host_bucket *b = &host->buckets[common->index];
    if (host->kept)
        add_kept(host, b);
    sw_bucket_write_trailer(b);
    b->op.step = reducer->step + 1;
    b->op.round = reducer->contributes ? reducer->rounds : 0; /* a joined rank counts no steps */
    b->op.beside = host->memory->trailers;
    b->op.beside_offset_bytes = host->parity * host->trailer_stride_bytes + b->trailer_offset_bytes;
    b->op.beside_bytes = b->trailer_bytes;
    const sw_op op = op_of(host, b);
    if (b->op.arena)
        return host->comm->ops->post(host->comm, &op, &b->ticket, err);
    if (host->bounce)
        return sw_host_rounds_bounce(host, b, err);
    return host->comm->ops->run(host->comm, &b->op, err);
}

static bool host_leaves_early(const sw_reducer *reducer)
{
    return host_seen(reducer)->memory->transport == SW_TRANSPORT_POOL;
}

/* Advance posted operations and mark finished buckets, whose slots are then free. */
static sw_status host_poll(sw_reducer *reducer, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    if (host->memory->transport != SW_TRANSPORT_POOL)
        return SW_OK;
    for (size_t i = 0; i < reducer->next_bucket; ++i) {
        bool complete = false;
        if (reducer->buckets[i].state != BUCKET_POSTED)
            continue;
        SW_TRY(host->comm->ops->poll(host->comm, host->buckets[i].ticket, &complete, err));
        if (!complete)
            return SW_OK;
        reducer->buckets[i].state = BUCKET_DONE;
        host->held_ns = reducer->takes_means ? 0 : host->held_ns; /* since the last progress */
    }
    return SW_OK;
}

/* ---- its end ---- */

/* Compare the steps and forwards of contributing ranks, by the first bucket's trailers. */
static void compare_ranks(host_rounds *host)
{
    sw_forward_counts *counts = &host->base.forward_counts;
    const trailer *first = NULL;
    size_t i = 0;
    host->base.stepped_unlike = false;
    while (i < host->base.layout.bucket_count && !host->base.buckets[i].takes_part)
        ++i;
    for (int r = 0; i < host->base.layout.bucket_count && r < host->comm->world_size; ++r) {
        const trailer *t = sw_bucket_trailer(&host->buckets[i], r);
        if (!t->contributes)
            continue;
        int name = sw_comm_name(host->comm, r);
        if (!first)
            *counts = (sw_forward_counts){name, name, t->forwards, t->forwards};
        if (t->forwards > counts->most)
            counts->most = t->forwards, counts->most_rank = name;
        if (t->forwards < counts->fewest)
            counts->fewest = t->forwards, counts->fewest_rank = name;
        host->base.stepped_unlike |= first && first->stepped != t->stepped;
        first = t;
    }
}

/* Spread a bucket's use bits to its parameters. */
static void collect_bucket(host_rounds *host, size_t i)
{
    sw_reducer *base = &host->base;
    const sw_layout_bucket *shape = &base->layout.bucket[i];
    for (size_t k = 0; k < shape->count; ++k)
        base->params[base->layout.order[shape->first + k]].used_by_any =
            base->buckets[i].takes_part && sw_bit_is_set(host->buckets[i].any, k);
}

static void collect(host_rounds *host)
{
    compare_ranks(host);
    for (size_t i = 0; i < host->base.layout.bucket_count; ++i)
        collect_bucket(host, i);
}

static sw_status host_await(sw_reducer *reducer, const bucket *b, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    if (!host->buckets[b->index].op.arena) /* posting it has already waited */
        return SW_OK;
    return host->comm->ops->wait(host->comm, host->buckets[b->index].ticket, err);
}

static sw_status host_finish(sw_reducer *reducer, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            SW_TRY(host_await(reducer, &reducer->buckets[i], err));
    collect(host);
    return SW_OK;
}

static sw_status host_meet(sw_reducer *reducer, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    sw_op barrier = {.kind = SW_OP_BARRIER,
                     .dtype = SW_DTYPE_UINT8,
                     .subject = host->memory->trailers->serial,
                     .step = reducer->step + 1,
                     .round = reducer->contributes ? reducer->rounds : 0,
                     .beside = host->memory->trailers,
                     .beside_offset_bytes = host->parity * host->trailer_stride_bytes,
                     .beside_bytes = host->trailer_stride_bytes,
                     .label = "use bits before a communication hook"};
    int by;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            sw_bucket_write_trailer(&host->buckets[i]);
    SW_TRY(host->comm->ops->run(host->comm, &barrier, err));
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            sw_bucket_read_trailers(&host->buckets[i], host->contributors, &by);
    collect(host);
    return SW_OK;
}

/* Return the rank that abandoned this round in some bucket, or -1. */
static int abandoned_by(const host_rounds *host)
{
    for (size_t i = 0; i < host->base.layout.bucket_count; ++i)
        for (int r = 0; r < host->comm->world_size; ++r)
            if (host->base.buckets[i].takes_part &&
                sw_bucket_trailer(&host->buckets[i], r)->abandoned)
                return r;
    return -1;
}

static bool host_take(sw_reducer *reducer, const bucket *b)
{
    host_rounds *host = host_of(reducer);
    bool abandoned = false;
    compare_ranks(host); /* by the first bucket's trailers, which are complete before it is */
    collect_bucket(host, b->index);
    for (int r = 0; r < host->comm->world_size; ++r)
        abandoned |= sw_bucket_trailer(&host->buckets[b->index], r)->abandoned;
    return !abandoned && !reducer->stepped_unlike;
}

static bool host_was_abandoned(const sw_reducer *reducer)
{
    return abandoned_by(host_seen(reducer)) >= 0;
}

static sw_status host_judge(sw_reducer *reducer, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    int rank = reducer->abandoned ? -1 : abandoned_by(host);
    char peer[SW_COMM_PEER_BYTES];
    if (rank < 0)
        return SW_OK;
    host->comm->ops->peer(host->comm, rank, peer);
    return sw_error_set(err, SW_E_MISMATCH, rank,
                        "%s left a backward unfinished (an exception was raised in it there), "
                        "while rank %d finished it; "
                        "the gradients of this round must not be used",
                        peer, host->comm->rank);
}

/* Post the buckets that can be posted without waiting for a peer. */
static sw_status post_without_waiting(host_rounds *host, sw_error *err)
{
    sw_reducer *base = &host->base;
    size_t under_way = 0, next;
    for (size_t i = 0; i < base->next_bucket; ++i)
        under_way += base->buckets[i].state == BUCKET_POSTED;
    while (sw_reducer_next_unsent(base, &next)) {
        if (under_way >= ABANDONED_UNDER_WAY || !host_has_room(base, &base->buckets[next]))
            return SW_OK;
        SW_TRY(sw_reducer_send(base, next, err));
        under_way++;
    }
    return SW_OK;
}

static bool all_done(const sw_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part && reducer->buckets[i].state != BUCKET_DONE)
            return false;
    return true;
}

static sw_status host_try_abandon(sw_reducer *reducer, int64_t budget_ns, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    int64_t deadline_ns = sw_clock_now_ns() + budget_ns;
    if (reducer->owner != SW_BUCKETS_OURS || host->memory->transport != SW_TRANSPORT_POOL)
        return SW_OK;
    reducer->abandoned = true;
    for (;;) {
        SW_TRY(post_without_waiting(host, err));
        SW_TRY(host_poll(reducer, err));
        if (all_done(reducer))
            return sw_reducer_abandon(reducer, err);
        if (sw_clock_now_ns() > deadline_ns || !host->comm->ops->is_alive(host->comm))
            return SW_OK;
        sw_thread_sleep_ns(ABANDON_POLL_NS);
    }
}

/* ---- queries ---- */

static size_t host_active_ranks(const sw_reducer *reducer)
{
    size_t active = 0;
    for (int r = 0; r < reducer->world_size; ++r)
        active += host_seen(reducer)->contributors[r];
    return active;
}

static size_t host_accumulated_ranks(const sw_reducer *reducer, size_t param)
{
    const host_bucket *b = &host_seen(reducer)->buckets[reducer->layout.place[param].bucket];
    const sw_layout_bucket *shape = sw_bucket_shape(reducer, b->common);
    size_t k = 0;
    while (reducer->layout.order[shape->first + k] != param)
        ++k;
    return sw_bucket_accumulated_ranks(b, k);
}

static size_t host_planned_bytes(const sw_reducer *reducer)
{
    const host_rounds *host = host_seen(reducer);
    size_t results = 0;
    if (!host->ring)
        return reducer->layout.trainable_bytes;
    if (reducer->takes_means)
        return host->ring_bytes + (sw_host_rounds_is_in_place(host)
                                       ? 0
                                       : host->ring_bytes / (size_t)reducer->slice_count);
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            results += sw_bucket_bytes(reducer, i) / (size_t)reducer->slice_count;
    return host->ring_bytes + results;
}

/* Abort: peers fold posted data and wait for this rank's part of the round, so its memory must not
 * be freed silently. */
static void give_up_posted(host_rounds *host)
{
    const bucket *unfinished = NULL;
    bool sent = false;
    for (size_t i = 0; host->base.state == SW_ROUND_OPEN && i < host->base.layout.bucket_count;
         ++i) {
        const bucket *b = &host->base.buckets[i];
        if (!b->takes_part || !host->buckets[i].op.arena)
            continue;
        sent |= b->state != BUCKET_FILLING;
        if (b->state != BUCKET_DONE && !unfinished)
            unfinished = b;
    }
    if (sent && unfinished)
        (void)sw_comm_give_up(host->comm, SW_E_COMM, NULL,
                              "%s was dropped in the middle of a backward", unfinished->label);
}

static void host_destroy(sw_reducer *reducer)
{
    host_rounds *host = host_of(reducer);
    give_up_posted(host);
    sw_host_rounds_drop_compressor(host);
    if (host->kept)
        host->comm->ops->arena_destroy(host->comm, host->kept);
    sw_gradient_memory_destroy(host->memory);
    for (size_t i = 0; host->buckets && i < reducer->layout.bucket_count; ++i)
        free(host->buckets[i].any), free(host->buckets[i].coded_at);
    free(host->buckets);
    free(host->contributors);
    free(host->owners);
    sw_reducer_fini(reducer);
    free(host);
}

const sw_reducer_ops sw_host_rounds_ops = {
    .traits = {.can_abandon = true},
    .open = host_open,
    .has_room = host_has_room,
    .reserve = host_reserve,
    .address = host_address,
    .result = host_result,
    .write = host_write,
    .clear = host_clear,
    .post = host_post,
    .leaves_early = host_leaves_early,
    .poll = host_poll,
    .await = host_await,
    .finish = host_finish,
    .meet = host_meet,
    .was_abandoned = host_was_abandoned,
    .judge = host_judge,
    .try_abandon = host_try_abandon,
    .hold_back = host_hold_back,
    .take = host_take,
    .active_ranks = host_active_ranks,
    .accumulated_ranks = host_accumulated_ranks,
    .keep = host_keep,
    .unfreeze = host_unfreeze,
    .planned_bytes = host_planned_bytes,
    .destroy = host_destroy,
};
