/* reducer.c - see reducer.h and docs/design/reduce.md.
 *
 * Sliced (options.sliced, in a pool): only this rank's slices of the means are kept, apart from the
 * buckets, and the buckets share a ring: a bucket waits until all ranks are done with those of the
 * same round that lie where it does. A gradient that comes too early for its place stays where
 * autograd put it (ready, but not placed). A rank that did not clear its gradients contributes the
 * standing mean plus what is new: the owner of a slice adds its mean to that rank's contribution
 * before it folds (standing bits). */
#include "reduce/reducer.h"

#include <string.h>

#include "base/bytes.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "reduce/reducer_state.h"

enum {
    MARKS_PER_POLL = 8,
    ABANDONED_UNDER_WAY = 32, /* fewer than a communicator takes without waiting */
    ABANDON_POLL_NS = 1000000,
    HOLD_POLL_NS = 100000,
    DIGEST_PRIME = 0x01000193, /* FNV's */
};

const sw_layout *sw_reducer_layout(const sw_reducer *reducer)
{
    return &reducer->layout;
}

const sw_gradient_memory *sw_reducer_memory(const sw_reducer *reducer)
{
    return reducer->memory;
}

const sw_reducer_stats *sw_reducer_get_stats(const sw_reducer *reducer)
{
    return &reducer->stats;
}

sw_round_state sw_reducer_state(const sw_reducer *reducer)
{
    return reducer->state;
}

int64_t sw_reducer_task(const sw_reducer *reducer)
{
    return reducer->task;
}

const char *sw_reducer_name(const sw_reducer *reducer, size_t param)
{
    return reducer->names[param];
}

static size_t param_bytes(const sw_reducer *reducer, size_t param)
{
    const sw_layout_place *place = &reducer->layout.place[param];
    return place->numel * sw_dtype_size_bytes(reducer->layout.bucket[place->bucket].dtype);
}

static bucket *bucket_of(const sw_reducer *reducer, size_t param)
{
    return &reducer->buckets[reducer->layout.place[param].bucket];
}

uint8_t *sw_reducer_slot(const sw_reducer *reducer, size_t bucket_index)
{
    return reducer->memory->base + (reducer->ring
                                        ? reducer->buckets[bucket_index].op.offset_bytes
                                        : reducer->layout.bucket[bucket_index].offset_bytes);
}

uint8_t *sw_reducer_address(const sw_reducer *reducer, size_t param)
{
    const sw_layout_place *place = &reducer->layout.place[param];
    sw_dtype dtype = reducer->layout.bucket[place->bucket].dtype;
    return sw_reducer_slot(reducer, place->bucket) + place->begin * sw_dtype_size_bytes(dtype);
}

uint8_t *sw_reducer_result(const sw_reducer *reducer, size_t param, size_t *numel)
{
    const bucket *b = bucket_of(reducer, param);
    const sw_layout_place *place = &reducer->layout.place[param];
    size_t element_bytes = sw_dtype_size_bytes(b->op.dtype), begin, end;
    sw_bucket_own_slice(b, &begin, &end);
    size_t from = sw_size_max(begin, place->begin),
           to = sw_size_min(end, place->begin + place->numel);
    *numel = from < to ? to - from : 0;
    if (*numel == 0)
        from = begin;
    if (reducer->ring)
        return reducer->memory->results + b->result_offset_bytes + (from - begin) * element_bytes;
    return reducer->memory->base + reducer->layout.bucket[b->index].offset_bytes +
           from * element_bytes;
}

void sw_reducer_unfreeze(sw_reducer *reducer, size_t param)
{
    bucket_of(reducer, param)->takes_part = true;
    sw_bucket_name_unfrozen(bucket_of(reducer, param), reducer->label, param);
    reducer->unfrozen = true;
}

void sw_reducer_count_step(sw_reducer *reducer)
{
    reducer->step++;
    reducer->rounds = 0;
}

void sw_reducer_forget_steps(sw_reducer *reducer)
{
    reducer->step = 0;
    reducer->rounds = 0;
    reducer->stepped = reducer->noted = reducer->notes = 0;
}

void sw_reducer_note_step(sw_reducer *reducer, uint32_t digest)
{
    reducer->noted += digest; /* several optimizers may step in any order between two rounds */
    reducer->notes++;
}

/* What was noted since the last round counts from now on. */
static void count_noted(sw_reducer *reducer)
{
    if (reducer->notes)
        reducer->stepped = (reducer->stepped ^ reducer->noted) * DIGEST_PRIME + reducer->notes;
    reducer->noted = reducer->notes = 0;
}

bool sw_reducer_take_unlike_steps(sw_reducer *reducer)
{
    bool unlike = reducer->stepped_unlike;
    reducer->stepped_unlike = false;
    if (unlike)
        reducer->stepped = 0;
    return unlike;
}

void sw_reducer_divide_by_active(sw_reducer *reducer, bool active_only)
{
    reducer->divide_by_active = active_only;
}

bool sw_reducer_is_placed(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].placed;
}

bool sw_reducer_takes_part(const sw_reducer *reducer, size_t param)
{
    return bucket_of(reducer, param)->takes_part;
}

void sw_reducer_give_buckets(sw_reducer *reducer, sw_bucket_owner owner)
{
    reducer->owner = owner;
}

bool sw_reducer_is_sent(const sw_reducer *reducer, size_t param)
{
    return reducer->state == SW_ROUND_OPEN && bucket_of(reducer, param)->state != BUCKET_FILLING;
}

bool sw_reducer_is_used(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].used;
}

bool sw_reducer_used_by_any(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].used_by_any;
}

uint64_t sw_reducer_averaged_in(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].averaged_in;
}

sw_status sw_reducer_open(sw_reducer *reducer, int64_t task, bool synchronised, sw_error *err)
{
    if (reducer->state != SW_ROUND_CLOSED)
        SW_FAIL(err, SW_E_STATE, "a round was opened while another is open");
    reducer->state = synchronised ? SW_ROUND_OPEN : SW_ROUND_LOCAL;
    reducer->task = task;
    for (size_t i = 0; i < reducer->layout.param_count; ++i)
        reducer->params[i].ready = reducer->params[i].placed = reducer->params[i].standing = 0;
    if (!synchronised)
        return SW_OK;
    if (reducer->ring && reducer->unfrozen) {
        reducer->ring_bytes = sw_reducer_lay_ring(reducer, false);
        reducer->unfrozen = false;
    }
    count_noted(reducer);
    reducer->parity ^= 1;
    reducer->rounds++;
    reducer->unplaced_bytes = 0;
    reducer->stats.unplaced_bytes_peak = 0;
    reducer->opened_ns = sw_clock_now_ns();
    reducer->held_ns = 0;
    reducer->next_bucket = 0;
    reducer->met = false;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        b->state = BUCKET_FILLING;
        b->pending = reducer->layout.bucket[i].count;
        b->unplaced = 0;
        b->crosses = false;
    }
    while (reducer->next_bucket < reducer->layout.bucket_count &&
           !reducer->buckets[reducer->next_bucket].takes_part)
        reducer->next_bucket++;
    return SW_OK;
}

/* Waits until all ranks are done with the bucket that has the slot of `b` before it. */
static sw_status reserve(bucket *b, sw_error *err)
{
    if (!b->before || b->before->state == BUCKET_DONE)
        return SW_OK;
    SW_TRY(b->reducer->comm->ops->wait(b->reducer->comm, b->before->ticket, err));
    b->before->state = BUCKET_DONE;
    return SW_OK;
}

static sw_status post_bucket(bucket *b, sw_error *err)
{
    sw_reducer *reducer = b->reducer;
    SW_TRY(reserve(b, err));
    sw_bucket_write_tail(b);
    b->state = BUCKET_POSTED;
    b->op.step = reducer->step + 1;
    b->op.round = reducer->contributes ? reducer->rounds : 0; /* who joined counts no steps */
    b->op.beside = reducer->memory->tails;
    b->op.beside_offset_bytes = reducer->parity * reducer->tail_stride_bytes + b->tail_offset_bytes;
    b->op.beside_bytes = b->tail_bytes;
    reducer->stats.buckets_sent++;
    reducer->stats.bytes += b->op.numel * sw_dtype_size_bytes(b->op.dtype);
    if (b->op.arena)
        return reducer->comm->ops->post(reducer->comm, &b->op, &b->ticket, err);
    return reducer->comm->ops->run(reducer->comm, &b->op, err);
}

/* Posts, in index order, what is complete; staged buckets wait for the end, where blocking costs
 * nothing. */
static sw_status post_ready(sw_reducer *reducer, sw_error *err)
{
    for (; reducer->next_bucket < reducer->layout.bucket_count; ++reducer->next_bucket) {
        bucket *b = &reducer->buckets[reducer->next_bucket];
        if (!b->takes_part)
            continue;
        if (b->pending > 0 || b->unplaced > 0 || b->pinned || !b->op.arena ||
            reducer->stats.rounds == 0 || reducer->owner != SW_BUCKETS_OURS)
            return SW_OK;
        reducer->stats.buckets_early++;
        SW_TRY(post_bucket(b, err));
    }
    return SW_OK;
}

sw_status sw_reducer_mark_ready(sw_reducer *reducer, size_t param, int64_t task, bool *advance,
                                sw_error *err)
{
    bucket *b = bucket_of(reducer, param);
    param_state *state = &reducer->params[param];
    state->used = 1;
    *advance = false;
    if (reducer->state != SW_ROUND_OPEN)
        return SW_OK;
    if (b->state != BUCKET_FILLING) {
        b->pinned = true;
        SW_FAIL(err, SW_E_STATE,
                "parameter '%s' got a second gradient in one backward after %s was sent; from the "
                "next backward on "
                "this bucket waits for the end of the backward: clear the gradients and run the "
                "step again",
                reducer->names[param], b->op.label);
    }
    if (state->ready || task != reducer->task)
        b->pinned = true;
    if (!state->ready) {
        b->pending -= b->pending > 0;
        b->unplaced++;
        reducer->unplaced_bytes += param_bytes(reducer, param);
        if (reducer->unplaced_bytes > reducer->stats.unplaced_bytes_peak)
            reducer->stats.unplaced_bytes_peak = reducer->unplaced_bytes;
    }
    state->ready = 1;
    /* While buckets are under way, every few gradients is often enough to look after them. */
    bool under_way = reducer->next_bucket > 0 && ++reducer->marks % MARKS_PER_POLL == 0;
    *advance = (b->pending == 0 && b->index == reducer->next_bucket) || under_way;
    return SW_OK;
}

void sw_reducer_place(sw_reducer *reducer, size_t param, bool standing)
{
    param_state *state = &reducer->params[param];
    if (state->ready && !state->placed) {
        bucket_of(reducer, param)->unplaced--;
        reducer->unplaced_bytes -= param_bytes(reducer, param);
    }
    state->placed = 1;
    state->standing |= standing;
}

sw_status sw_reducer_mark(sw_reducer *reducer, size_t param, int64_t task, bool *advance,
                          sw_error *err)
{
    SW_TRY(sw_reducer_mark_ready(reducer, param, task, advance, err));
    if (reducer->state == SW_ROUND_OPEN)
        sw_reducer_place(reducer, param, false);
    return SW_OK;
}

bool sw_reducer_can_place(const sw_reducer *reducer, size_t param)
{
    const bucket *b = bucket_of(reducer, param);
    return !b->before || b->before->state == BUCKET_DONE;
}

bool sw_reducer_hold_back(sw_reducer *reducer, size_t param)
{
    const bucket *b = bucket_of(reducer, param);
    int64_t from_ns = sw_clock_now_ns();
    if (!b->before || b->before->state != BUCKET_POSTED ||
        reducer->unplaced_bytes <= reducer->cap_bytes ||
        2 * reducer->held_ns > from_ns - reducer->opened_ns)
        return false;
    sw_thread_sleep_ns(HOLD_POLL_NS);
    reducer->held_ns += sw_clock_now_ns() - from_ns;
    return true;
}

bool sw_reducer_is_waiting(const sw_reducer *reducer, size_t *bucket_index)
{
    if (reducer->next_bucket >= reducer->layout.bucket_count)
        return false;
    const bucket *b = &reducer->buckets[reducer->next_bucket];
    *bucket_index = b->index;
    return b->pending == 0 && b->unplaced > 0 && (!b->before || b->before->state == BUCKET_DONE);
}

bool sw_reducer_next_unsent(const sw_reducer *reducer, size_t *bucket_index)
{
    for (*bucket_index = reducer->next_bucket; *bucket_index < reducer->layout.bucket_count;
         ++*bucket_index)
        if (reducer->buckets[*bucket_index].takes_part)
            return true;
    return false;
}

sw_status sw_reducer_reserve(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    return reserve(&reducer->buckets[bucket_index], err);
}

sw_status sw_reducer_send(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    reducer->next_bucket = bucket_index + 1;
    return post_bucket(&reducer->buckets[bucket_index], err);
}

bool sw_reducer_pin(sw_reducer *reducer, size_t param)
{
    bucket *b = bucket_of(reducer, param);
    if (reducer->state == SW_ROUND_OPEN && b->state != BUCKET_FILLING)
        return false;
    b->pinned = true;
    reducer->params[param].used = 1;
    return true;
}

/* Helps on what is under way, and sees which buckets are done: their slots are free. */
static sw_status look_after(sw_reducer *reducer, sw_error *err)
{
    for (size_t i = 0; i < reducer->next_bucket; ++i) {
        bucket *b = &reducer->buckets[i];
        bool complete = false;
        if (b->state != BUCKET_POSTED)
            continue;
        SW_TRY(reducer->comm->ops->poll(reducer->comm, b->ticket, &complete, err));
        if (!complete)
            return SW_OK;
        b->state = BUCKET_DONE;
    }
    return SW_OK;
}

sw_status sw_reducer_advance(sw_reducer *reducer, sw_error *err)
{
    SW_TRY(post_ready(reducer, err));
    if (reducer->next_bucket == 0 || reducer->memory->transport != SW_TRANSPORT_POOL)
        return SW_OK;
    return look_after(reducer, err);
}

static sw_status post_rest(sw_reducer *reducer, sw_error *err)
{
    for (; reducer->next_bucket < reducer->layout.bucket_count; ++reducer->next_bucket) {
        bucket *b = &reducer->buckets[reducer->next_bucket];
        if (b->takes_part)
            SW_TRY(post_bucket(b, err));
    }
    return SW_OK;
}

static sw_status wait_all(sw_reducer *reducer, sw_error *err)
{
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        if (b->takes_part && b->op.arena)
            SW_TRY(reducer->comm->ops->wait(reducer->comm, b->ticket, err));
    }
    return SW_OK;
}

/* The rank that abandoned this round in some bucket, or -1. */
static int abandoned_by(sw_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        for (int r = 0; r < reducer->comm->world_size; ++r)
            if (reducer->buckets[i].takes_part &&
                sw_bucket_tail(&reducer->buckets[i], r)->abandoned)
                return r;
    return -1;
}

/* Whether contributing ranks have noted different steps: the first bucket's tails say so. */
static bool stepped_unlike(const sw_reducer *reducer)
{
    const bucket *b = reducer->buckets;
    const tail *first = NULL;
    size_t i = 0;
    while (i < reducer->layout.bucket_count && !b[i].takes_part)
        ++i;
    for (int r = 0; i < reducer->layout.bucket_count && r < reducer->comm->world_size; ++r) {
        const tail *t = sw_bucket_tail(&b[i], r);
        if (!t->contributes)
            continue;
        if (first && first->stepped != t->stepped)
            return true;
        first = t;
    }
    return false;
}

/* Spreads the buckets' use bits to the parameters, and ends the round. */
static void collect(sw_reducer *reducer)
{
    bool folded = abandoned_by(reducer) < 0;
    reducer->stats.rounds++;
    reducer->stepped_unlike = stepped_unlike(reducer);
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        const bucket *b = &reducer->buckets[i];
        const sw_layout_bucket *shape = &reducer->layout.bucket[i];
        for (size_t k = 0; k < shape->count; ++k) {
            param_state *state = &reducer->params[reducer->layout.order[shape->first + k]];
            state->used_by_any = b->takes_part && sw_bit_is_set(b->any, k);
            if (state->used_by_any && folded)
                state->averaged_in = reducer->stats.rounds;
            if (b->takes_part && folded) /* an abandoned round averages nothing */
                state->used = 0;
        }
    }
    reducer->state = SW_ROUND_CLOSED;
}

static sw_status check_abandoned(sw_reducer *reducer, sw_error *err)
{
    int rank = abandoned_by(reducer);
    if (rank >= 0 && !reducer->abandoned) {
        char peer[SW_COMM_PEER_BYTES];
        reducer->comm->ops->peer(reducer->comm, rank, peer);
        return sw_error_set(err, SW_E_MISMATCH, rank,
                            "%s left a backward unfinished (an exception was raised in it there), "
                            "while rank %d finished it; "
                            "the gradients of this round must not be used",
                            peer, reducer->comm->rank);
    }
    return SW_OK;
}

static sw_status complete_round(sw_reducer *reducer, sw_error *err)
{
    SW_TRY(post_rest(reducer, err));
    SW_TRY(wait_all(reducer, err));
    collect(reducer);
    return check_abandoned(reducer, err);
}

sw_status sw_reducer_finish(sw_reducer *reducer, sw_error *err)
{
    if (reducer->state == SW_ROUND_LOCAL) {
        reducer->state = SW_ROUND_CLOSED;
        reducer->stats.local_rounds++;
        return SW_OK;
    }
    if (reducer->state != SW_ROUND_OPEN)
        SW_FAIL(err, SW_E_STATE, "a round was closed that is not open");
    return complete_round(reducer, err);
}

sw_status sw_reducer_abandon(sw_reducer *reducer, sw_error *err)
{
    if (reducer->state != SW_ROUND_OPEN) {
        reducer->state = SW_ROUND_CLOSED;
        return SW_OK;
    }
    reducer->abandoned = true;
    /* Where a user's hook owns the buckets, peers wait at the exchange of use bits, not at the
     * buckets. */
    sw_status status = reducer->owner != SW_BUCKETS_OURS ? sw_reducer_exchange_use(reducer, err)
                                                         : complete_round(reducer, err);
    reducer->abandoned = false;
    reducer->state = SW_ROUND_CLOSED;
    reducer->stats.abandoned++;
    return status;
}

/* Posts the buckets that can be posted without waiting for a peer. */
static sw_status post_without_waiting(sw_reducer *reducer, sw_error *err)
{
    size_t under_way = 0;
    for (size_t i = 0; i < reducer->next_bucket; ++i)
        under_way += reducer->buckets[i].state == BUCKET_POSTED;
    for (; reducer->next_bucket < reducer->layout.bucket_count; ++reducer->next_bucket) {
        bucket *b = &reducer->buckets[reducer->next_bucket];
        if (!b->takes_part)
            continue;
        if (under_way >= ABANDONED_UNDER_WAY || (b->before && b->before->state != BUCKET_DONE))
            return SW_OK;
        SW_TRY(post_bucket(b, err));
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

sw_status sw_reducer_try_abandon(sw_reducer *reducer, int64_t budget_ns, sw_error *err)
{
    int64_t deadline_ns = sw_clock_now_ns() + budget_ns;
    if (reducer->state != SW_ROUND_OPEN || reducer->owner != SW_BUCKETS_OURS ||
        reducer->memory->transport != SW_TRANSPORT_POOL)
        return SW_OK;
    reducer->abandoned = true;
    for (;;) {
        SW_TRY(post_without_waiting(reducer, err));
        SW_TRY(look_after(reducer, err));
        if (all_done(reducer))
            return sw_reducer_abandon(reducer, err);
        if (sw_clock_now_ns() > deadline_ns || !reducer->comm->ops->is_alive(reducer->comm))
            return SW_OK;
        sw_thread_sleep_ns(ABANDON_POLL_NS);
    }
}

sw_status sw_reducer_shadow(sw_reducer *reducer, sw_error *err)
{
    SW_TRY(sw_reducer_open(reducer, -1, true, err));
    reducer->contributes = false;
    sw_status status = reducer->owner != SW_BUCKETS_OURS ? sw_reducer_exchange_use(reducer, err)
                                                         : complete_round(reducer, err);
    reducer->contributes = true;
    reducer->state = SW_ROUND_CLOSED;
    return status;
}

bool sw_reducer_hand_over(sw_reducer *reducer, size_t *bucket_index)
{
    for (; reducer->next_bucket < reducer->layout.bucket_count; ++reducer->next_bucket) {
        bucket *b = &reducer->buckets[reducer->next_bucket];
        if (!b->takes_part)
            continue;
        if (reducer->owner != SW_BUCKETS_HOOKS_EARLY || reducer->state != SW_ROUND_OPEN ||
            reducer->stats.rounds == 0 || b->pending > 0 || b->unplaced > 0 || b->pinned)
            return false;
        b->state = BUCKET_HANDED_OVER;
        reducer->stats.buckets_early++;
        *bucket_index = reducer->next_bucket++;
        return true;
    }
    return false;
}

size_t sw_reducer_divisor(const sw_reducer *reducer)
{
    size_t active = 0, world_size = (size_t)reducer->comm->world_size;
    for (size_t r = 0; reducer->divide_by_active && r < world_size; ++r)
        active += reducer->contributors[r];
    return active > 0 ? active : world_size;
}

bool sw_reducer_has_met(const sw_reducer *reducer)
{
    return reducer->met;
}

bool sw_reducer_is_handed_over(const sw_reducer *reducer, size_t bucket_index)
{
    return reducer->buckets[bucket_index].state == BUCKET_HANDED_OVER;
}

bool sw_reducer_is_handed_over_by_any(const sw_reducer *reducer, size_t bucket_index)
{
    return reducer->buckets[bucket_index].crosses;
}

void sw_reducer_clear_bucket(sw_reducer *reducer, size_t bucket_index)
{
    memset(sw_reducer_slot(reducer, bucket_index), 0,
           sw_bucket_bytes(&reducer->buckets[bucket_index]));
}

void sw_reducer_stand(sw_reducer *reducer, size_t param)
{
    reducer->params[param].standing = 1;
}

size_t sw_reducer_standing_ranks(const sw_reducer *reducer, size_t param)
{
    const bucket *b = bucket_of(reducer, param);
    const sw_layout_bucket *shape = &reducer->layout.bucket[b->index];
    size_t k = 0, found = 0;
    while (reducer->layout.order[shape->first + k] != param)
        ++k;
    for (int r = 0; r < reducer->comm->world_size; ++r)
        found += sw_bit_is_set(sw_bucket_tail(b, r)->bits + sw_words_of(shape->count), k);
    return found;
}

sw_status sw_reducer_exchange_use(sw_reducer *reducer, sw_error *err)
{
    sw_op barrier = {.kind = SW_OP_BARRIER,
                     .dtype = SW_DTYPE_UINT8,
                     .subject = reducer->memory->tails->serial,
                     .step = reducer->step + 1,
                     .round = reducer->contributes ? reducer->rounds : 0,
                     .beside = reducer->memory->tails,
                     .beside_offset_bytes = reducer->parity * reducer->tail_stride_bytes,
                     .beside_bytes = reducer->tail_stride_bytes,
                     .label = "use bits before a communication hook"};
    int by;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            sw_bucket_write_tail(&reducer->buckets[i]);
    SW_TRY(reducer->comm->ops->run(reducer->comm, &barrier, err));
    reducer->met = true;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            sw_bucket_read_tails(&reducer->buckets[i], reducer->contributors, &by);
    collect(reducer);
    return check_abandoned(reducer, err);
}
