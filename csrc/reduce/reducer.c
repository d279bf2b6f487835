/* reducer.c - the round: one state machine over the table of reducer_state.h. See reducer.h and
 * docs/design/reduce.md.
 *
 * Sliced (options.sliced): only this rank's slices of the means are kept, outside the buckets.
 * Buckets share memory and wait for their turn. A gradient that arrives before its place is free
 * stays in autograd's memory (ready, but not placed). A rank that did not clear its gradients
 * contributes the accumulated mean plus its new gradients: the owner of a slice adds its mean to
 * that rank's contribution before the fold (accumulated). */
#include "reduce/reducer.h"

#include "base/bytes.h"
#include "reduce/reducer_state.h"

enum { MARKS_PER_POLL = 8, DIGEST_PRIME = 0x01000193 /* FNV's */ };

const sw_reducer_traits *sw_reducer_get_traits(const sw_reducer *reducer)
{
    return &reducer->ops->traits;
}

const sw_layout *sw_reducer_layout(const sw_reducer *reducer)
{
    return &reducer->layout;
}

const sw_reducer_stats *sw_reducer_get_stats(const sw_reducer *reducer)
{
    return &reducer->stats;
}

sw_round_state sw_reducer_state(const sw_reducer *reducer)
{
    return reducer->state;
}

size_t sw_reducer_planned_bytes(const sw_reducer *reducer)
{
    return reducer->ops->planned_bytes(reducer);
}

void sw_reducer_destroy(sw_reducer *reducer)
{
    if (reducer)
        reducer->ops->destroy(reducer);
}

/* ---- addresses ---- */

static sw_dtype dtype_of(const sw_reducer *reducer, size_t param)
{
    return reducer->layout.bucket[reducer->layout.place[param].bucket].dtype;
}

static size_t param_bytes(const sw_reducer *reducer, size_t param)
{
    return reducer->layout.place[param].numel * sw_dtype_size_bytes(dtype_of(reducer, param));
}

uint8_t *sw_reducer_slot(const sw_reducer *reducer, size_t bucket_index)
{
    return reducer->ops->address(reducer, bucket_index);
}

uint8_t *sw_reducer_address(const sw_reducer *reducer, size_t param)
{
    const sw_layout_place *place = &reducer->layout.place[param];
    return sw_reducer_slot(reducer, place->bucket) +
           place->begin * sw_dtype_size_bytes(dtype_of(reducer, param));
}

sw_bucket_pieces sw_bucket_pieces_of(const sw_reducer *reducer, size_t param)
{
    const sw_layout_pieces lie = sw_layout_pieces_of(&reducer->layout, param);
    sw_dtype dtype = dtype_of(reducer, param);
    return (sw_bucket_pieces){.data =
                                  sw_reducer_slot(reducer, reducer->layout.place[param].bucket) +
                                  lie.first * sw_dtype_size_bytes(dtype),
                              .numel = lie.numel,
                              .chunk = lie.chunk,
                              .pitch = lie.pitch,
                              .dtype = dtype};
}

uint8_t *sw_reducer_run(const sw_reducer *reducer, size_t param, size_t begin, size_t *numel)
{
    sw_layout_run run = sw_layout_bucket_run(&reducer->layout, param, begin);
    *numel = run.end - run.begin;
    return sw_reducer_slot(reducer, reducer->layout.place[param].bucket) +
           run.first * sw_dtype_size_bytes(dtype_of(reducer, param));
}

uint8_t *sw_reducer_result(const sw_reducer *reducer, size_t param, size_t *numel)
{
    sw_layout_run run = sw_layout_run_in(&reducer->layout, param, (size_t)reducer->own_slice,
                                         (size_t)reducer->slice_count);
    *numel = run.end - run.begin;
    return reducer->ops->result(reducer, reducer->layout.place[param].bucket) +
           run.first * sw_dtype_size_bytes(dtype_of(reducer, param));
}

sw_status sw_reducer_write(sw_reducer *reducer, size_t param, const void *from, bool add,
                           sw_error *err)
{
    const sw_bucket_pieces to = sw_bucket_pieces_of(reducer, param);
    reducer->params[param].written = 1;
    return reducer->ops->write(reducer, &to, from, add, err);
}

sw_status sw_reducer_clear(sw_reducer *reducer, size_t param, sw_error *err)
{
    const sw_bucket_pieces to = sw_bucket_pieces_of(reducer, param);
    reducer->params[param].written = 1;
    return reducer->ops->clear(reducer, &to, err);
}

sw_status sw_reducer_clear_bucket(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    const sw_layout_bucket *shape = &reducer->layout.bucket[bucket_index];
    const sw_bucket_pieces to = {.data = sw_reducer_slot(reducer, bucket_index),
                                 .numel = shape->numel,
                                 .chunk = sw_size_max(shape->numel, 1),
                                 .dtype = shape->dtype};
    return reducer->ops->clear(reducer, &to, err);
}

static sw_status seal(sw_reducer *reducer, bucket *b, sw_error *err)
{
    if (b->sealed || !reducer->ops->seal)
        return SW_OK;
    SW_TRY(reducer->ops->seal(reducer, b, err));
    b->sealed = true;
    return SW_OK;
}

sw_status sw_reducer_seal(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    return seal(reducer, &reducer->buckets[bucket_index], err);
}

/* ---- settings, queries, counts ---- */

void sw_reducer_unfreeze(sw_reducer *reducer, size_t param)
{
    bucket *b = sw_bucket_of(reducer, param);
    b->takes_part = true;
    sw_bucket_name_unfrozen(reducer, b, param);
    if (reducer->ops->unfreeze)
        reducer->ops->unfreeze(reducer, param);
}

void sw_reducer_count_step(sw_reducer *reducer)
{
    reducer->step++;
    reducer->rounds = 0;
    if (reducer->ops->count_step)
        reducer->ops->count_step(reducer);
}

void sw_reducer_forget_steps(sw_reducer *reducer)
{
    reducer->step = 0;
    reducer->rounds = reducer->forwards = 0;
    reducer->stepped = reducer->noted = reducer->notes = reducer->history = 0;
}

void sw_reducer_note_step(sw_reducer *reducer, uint32_t digest)
{
    bool again = reducer->takes_means && reducer->notes; /* a backward before led to no round */
    /* several optimizers may step in any order between two rounds */
    reducer->noted = again ? digest : reducer->noted + digest;
    reducer->notes += !again;
}

/* Mix the steps noted since the last round into the digest. */
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

void sw_reducer_count_forward(sw_reducer *reducer)
{
    reducer->forwards++;
}

const sw_forward_counts *sw_reducer_forward_counts(const sw_reducer *reducer)
{
    return &reducer->forward_counts;
}

void sw_reducer_position(const sw_reducer *reducer, uint32_t *step, uint32_t *rounds)
{
    *step = reducer->step;
    *rounds = reducer->rounds;
}

void sw_reducer_set_digest(sw_reducer *reducer, uint32_t digest)
{
    reducer->digest = digest;
}

void sw_reducer_divide_by_active(sw_reducer *reducer, bool active_only)
{
    reducer->divide_by_active = active_only;
}

void sw_reducer_send_first(sw_reducer *reducer, bool sends)
{
    reducer->sends_first = sends;
}

size_t sw_reducer_divisor(const sw_reducer *reducer)
{
    size_t active = reducer->divide_by_active ? reducer->ops->active_ranks(reducer) : 0;
    return active > 0 ? active : (size_t)reducer->world_size;
}

size_t sw_reducer_accumulated_ranks(const sw_reducer *reducer, size_t param)
{
    return reducer->ops->accumulated_ranks(reducer, param);
}

void sw_reducer_give_buckets(sw_reducer *reducer, sw_bucket_owner owner)
{
    reducer->owner = owner;
}

bool sw_reducer_is_ready(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].ready;
}

bool sw_reducer_is_placed(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].placed;
}

bool sw_reducer_takes_part(const sw_reducer *reducer, size_t param)
{
    return sw_bucket_of(reducer, param)->takes_part;
}

bool sw_reducer_is_sent(const sw_reducer *reducer, size_t param)
{
    return reducer->state == SW_ROUND_OPEN && sw_bucket_of(reducer, param)->state != BUCKET_FILLING;
}

bool sw_reducer_is_used(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].used;
}

bool sw_reducer_used_by_any(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].used_by_any;
}

bool sw_reducer_last_round_failed(const sw_reducer *reducer)
{
    return reducer->last_round_failed;
}

uint64_t sw_reducer_averaged_in(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].averaged_in;
}

bool sw_reducer_is_compressing(const sw_reducer *reducer)
{
    bool found = false;
    for (size_t i = 0;
         reducer->compressor && reducer->state == SW_ROUND_OPEN && i < reducer->layout.bucket_count;
         ++i)
        found |= reducer->buckets[i].state != BUCKET_FILLING;
    return found;
}

/* ---- begin of a round ---- */

/* Return the first bucket at or after `from` that takes part, or bucket_count. */
static size_t next_due(const sw_reducer *reducer, size_t from)
{
    while (from < reducer->layout.bucket_count && !reducer->buckets[from].takes_part)
        ++from;
    return from;
}

sw_status sw_reducer_open(sw_reducer *reducer, int64_t task, bool synchronised, sw_error *err)
{
    if (reducer->state != SW_ROUND_CLOSED)
        SW_FAIL(err, SW_E_STATE, "a round was opened while another is open");
    reducer->state = synchronised ? SW_ROUND_OPEN : SW_ROUND_LOCAL;
    reducer->task = task;
    for (size_t i = 0; i < reducer->layout.param_count; ++i)
        reducer->params[i].ready = reducer->params[i].placed = reducer->params[i].accumulated =
            reducer->params[i].written = reducer->params[i].passed = reducer->params[i].expected =
                0;
    reducer->stays_in_rows = synchronised && reducer->next_stays_in_rows;
    reducer->next_stays_in_rows = false;
    if (!synchronised)
        return SW_OK;
    for (size_t i = 0; reducer->last_round_failed && i < reducer->layout.param_count; ++i)
        reducer->params[i].kept = 0;
    count_noted(reducer);
    reducer->rounds++;
    reducer->round_forwards = reducer->forwards;
    reducer->forwards = 0;
    reducer->unplaced_bytes = 0;
    reducer->stats.unplaced_bytes_peak = 0;
    reducer->last_round_failed = true; /* until it has closed */
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        b->state = BUCKET_FILLING;
        b->pending = reducer->layout.bucket[i].count;
        b->unplaced = 0;
        b->reserved = b->sealed = false;
    }
    reducer->next_bucket = reducer->next_mean = next_due(reducer, 0);
    if (reducer->ops->open)
        reducer->ops->open(reducer);
    return SW_OK;
}

sw_status sw_reducer_keep_in_rows(sw_reducer *reducer, bool keeps, bool *kept, sw_error *err)
{
    *kept = keeps && reducer->owner == SW_BUCKETS_OURS && reducer->ops->keep != NULL;
    reducer->next_stays_in_rows = false;
    if (*kept)
        SW_TRY(reducer->ops->keep(reducer, kept, err));
    reducer->next_stays_in_rows = *kept;
    return SW_OK;
}

bool sw_reducer_stays_in_rows(const sw_reducer *reducer)
{
    return reducer->stays_in_rows;
}

sw_status sw_reducer_open_shadow(sw_reducer *reducer, sw_error *err)
{
    SW_TRY(sw_reducer_open(reducer, -1, true, err));
    reducer->contributes = false;
    return SW_OK;
}

/* ---- gradients arrive ---- */

/* Note that a parameter waits to be placed, and no longer for its gradient. */
static void await_placing(bucket *b, const param_state *state)
{
    if (state->passed)
        return;
    b->pending -= b->pending > 0;
    b->unplaced++;
}

sw_status sw_reducer_mark_ready(sw_reducer *reducer, size_t param, int64_t task, bool *advance,
                                sw_error *err)
{
    bucket *b = sw_bucket_of(reducer, param);
    param_state *state = &reducer->params[param];
    state->used = 1;
    *advance = false;
    if (reducer->state != SW_ROUND_OPEN)
        return SW_OK;
    if (b->state != BUCKET_FILLING) {
        b->pinned = true;
        SW_FAIL(err, SW_E_STATE,
                "parameter '%s' got a%s gradient in a backward after %s was sent, so the graph "
                "differs from that of earlier backwards; %s",
                reducer->names[param], state->ready ? " second" : "", b->label,
                reducer->ops->traits.can_abandon
                    ? "from the next backward on this bucket waits for the end of the backward: "
                      "clear the gradients and run the step again"
                    : "wrap again, on every rank");
    }
    if (state->ready || state->passed || state->expected || task != reducer->task)
        b->pinned = true; /* other hooks may still change it, or it comes late */
    if (!state->ready) {
        await_placing(b, state);
        reducer->unplaced_bytes += param_bytes(reducer, param);
        if (reducer->unplaced_bytes > reducer->stats.unplaced_bytes_peak)
            reducer->stats.unplaced_bytes_peak = reducer->unplaced_bytes;
    }
    state->ready = 1;
    /* While buckets are in flight, polling every few gradients is enough. */
    bool under_way =
        reducer->ops->poll && reducer->next_bucket > 0 && ++reducer->marks % MARKS_PER_POLL == 0;
    *advance = (b->pending == 0 && b->index == reducer->next_bucket) || under_way;
    return SW_OK;
}

bool sw_reducer_pass(sw_reducer *reducer, size_t param, bool expected)
{
    bucket *b = sw_bucket_of(reducer, param);
    param_state *state = &reducer->params[param];
    if (reducer->state != SW_ROUND_OPEN || b->state != BUCKET_FILLING || state->ready ||
        state->passed)
        return false;
    state->expected = expected;
    if (expected)
        return false;
    await_placing(b, state);
    state->passed = 1;
    return true;
}

void sw_reducer_place(sw_reducer *reducer, size_t param, bool accumulated)
{
    param_state *state = &reducer->params[param];
    if ((state->ready || state->passed) && !state->placed)
        sw_bucket_of(reducer, param)->unplaced--;
    if (state->ready && !state->placed)
        reducer->unplaced_bytes -= param_bytes(reducer, param);
    state->placed = 1;
    state->accumulated |= accumulated && !reducer->stays_in_rows;
}

sw_status sw_reducer_mark(sw_reducer *reducer, size_t param, int64_t task, bool *advance,
                          sw_error *err)
{
    SW_TRY(sw_reducer_mark_ready(reducer, param, task, advance, err));
    if (reducer->state == SW_ROUND_OPEN)
        sw_reducer_place(reducer, param, false);
    return SW_OK;
}

void sw_reducer_accumulate(sw_reducer *reducer, size_t param)
{
    reducer->params[param].accumulated = 1;
}

bool sw_reducer_pin(sw_reducer *reducer, size_t param)
{
    bucket *b = sw_bucket_of(reducer, param);
    if (reducer->state == SW_ROUND_OPEN && b->state != BUCKET_FILLING)
        return false;
    b->pinned = true;
    reducer->params[param].used = 1;
    return true;
}

bool sw_reducer_can_place(const sw_reducer *reducer, size_t param)
{
    return !reducer->ops->traits.places_late &&
           reducer->ops->has_room(reducer, sw_bucket_of(reducer, param));
}

bool sw_reducer_hold_back(sw_reducer *reducer, size_t param)
{
    return reducer->ops->hold_back &&
           reducer->ops->hold_back(reducer, sw_bucket_of(reducer, param));
}

/* ---- buckets leave ---- */

/* Return true if the next bucket may be sent before the end of the backward, once it is placed.
 * None is in the first round, which shows the parameters that get their gradient twice, unless
 * the caller has said otherwise. */
static bool may_leave(const sw_reducer *reducer, const bucket *b)
{
    bool seen = reducer->sends_first || reducer->stats.rounds + reducer->stats.row_rounds > 0;
    return seen && b->pending == 0 && !b->pinned && reducer->owner == SW_BUCKETS_OURS &&
           (!reducer->ops->leaves_early || reducer->ops->leaves_early(reducer));
}

bool sw_reducer_is_waiting(const sw_reducer *reducer, size_t *bucket_index)
{
    if (reducer->next_bucket >= reducer->layout.bucket_count)
        return false;
    const bucket *b = &reducer->buckets[reducer->next_bucket];
    *bucket_index = b->index;
    return b->unplaced > 0 && may_leave(reducer, b) &&
           (!reducer->ops->has_room || reducer->ops->has_room(reducer, b));
}

bool sw_reducer_next_unsent(const sw_reducer *reducer, size_t *bucket_index)
{
    *bucket_index = next_due(reducer, reducer->next_bucket);
    return *bucket_index < reducer->layout.bucket_count;
}

static sw_status reserve(sw_reducer *reducer, bucket *b, sw_error *err)
{
    if (b->reserved)
        return SW_OK;
    SW_TRY(reducer->ops->reserve(reducer, b, err));
    b->reserved = true;
    return SW_OK;
}

sw_status sw_reducer_reserve(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    return reserve(reducer, &reducer->buckets[bucket_index], err);
}

sw_status sw_reducer_send(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    bucket *b = &reducer->buckets[bucket_index];
    reducer->next_bucket = next_due(reducer, bucket_index + 1);
    SW_TRY(reserve(reducer, b, err));
    SW_TRY(seal(reducer, b, err));
    b->state = BUCKET_POSTED;
    reducer->stats.buckets_sent++;
    reducer->stats.bytes += sw_bucket_bytes(reducer, bucket_index);
    if (reducer->stays_in_rows)
        reducer->stats.row_bytes += sw_bucket_bytes(reducer, bucket_index);
    return reducer->ops->post(reducer, b, err);
}

bool sw_reducer_next_complete(const sw_reducer *reducer, size_t *bucket_index)
{
    *bucket_index = reducer->next_bucket;
    if (reducer->next_bucket >= reducer->layout.bucket_count)
        return false;
    const bucket *b = &reducer->buckets[reducer->next_bucket];
    return b->unplaced == 0 && may_leave(reducer, b);
}

sw_status sw_reducer_send_complete(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    reducer->stats.buckets_early++;
    return sw_reducer_send(reducer, bucket_index, err);
}

sw_status sw_reducer_await(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    const bucket *b = &reducer->buckets[bucket_index];
    if (b->state != BUCKET_POSTED || !reducer->ops->await)
        return SW_OK;
    return reducer->ops->await(reducer, b, err);
}

/* Post complete buckets in index order. */
static sw_status post_ready(sw_reducer *reducer, sw_error *err)
{
    size_t next;
    while (sw_reducer_next_complete(reducer, &next))
        SW_TRY(sw_reducer_send_complete(reducer, next, err));
    return SW_OK;
}

sw_status sw_reducer_advance(sw_reducer *reducer, sw_error *err)
{
    SW_TRY(post_ready(reducer, err));
    return reducer->next_bucket > 0 && reducer->ops->poll ? reducer->ops->poll(reducer, err)
                                                          : SW_OK;
}

bool sw_reducer_next_mean(sw_reducer *reducer, size_t *bucket_index)
{
    const bucket *b;
    do {
        *bucket_index = reducer->next_mean;
        if (!reducer->takes_means || *bucket_index >= reducer->layout.bucket_count ||
            reducer->buckets[*bucket_index].state != BUCKET_DONE)
            return false;
        b = &reducer->buckets[*bucket_index];
        reducer->next_mean = next_due(reducer, *bucket_index + 1);
    } while (!reducer->ops->take(reducer, b));
    return true;
}

bool sw_reducer_is_half_taken(const sw_reducer *reducer)
{
    return reducer->takes_means && reducer->state == SW_ROUND_OPEN &&
           reducer->next_bucket > next_due(reducer, 0);
}

/* ---- a round ends ---- */

static void close_round(sw_reducer *reducer)
{
    bool folded = !reducer->ops->was_abandoned || !reducer->ops->was_abandoned(reducer);
    reducer->stats.rounds += !reducer->stays_in_rows;
    reducer->stats.row_rounds += reducer->stays_in_rows;
    reducer->last_round_failed = !folded;
    for (size_t i = 0; i < reducer->layout.param_count; ++i) {
        param_state *state = &reducer->params[i];
        state->kept = reducer->stays_in_rows && state->used_by_any;
        if (state->used_by_any && folded && !reducer->stays_in_rows)
            state->averaged_in = reducer->stats.rounds;
        if (sw_reducer_takes_part(reducer, i) && folded) /* an abandoned round averages nothing */
            state->used = 0;
    }
    if (reducer->compressor && folded && reducer->owner == SW_BUCKETS_OURS &&
        !reducer->stays_in_rows)
        sw_compressor_count_round(reducer->compressor);
    reducer->state = SW_ROUND_CLOSED;
    reducer->contributes = true;
}

static sw_status judge(sw_reducer *reducer, sw_error *err)
{
    return reducer->ops->judge ? reducer->ops->judge(reducer, err) : SW_OK;
}

static sw_status complete_round(sw_reducer *reducer, sw_error *err)
{
    size_t next;
    while (sw_reducer_next_unsent(reducer, &next))
        SW_TRY(sw_reducer_send(reducer, next, err));
    SW_TRY(reducer->ops->finish(reducer, err));
    close_round(reducer);
    return judge(reducer, err);
}

sw_status sw_reducer_finish(sw_reducer *reducer, sw_error *err)
{
    if (reducer->state == SW_ROUND_LOCAL) {
        reducer->state = SW_ROUND_CLOSED;
        reducer->stats.local_rounds++;
        return SW_OK;
    }
    if (reducer->state != SW_ROUND_OPEN)
        SW_FAIL(err, SW_E_STATE, "a round was closed but none is open");
    return complete_round(reducer, err);
}

sw_status sw_reducer_exchange_use(sw_reducer *reducer, sw_error *err)
{
    SW_TRY(reducer->ops->meet(reducer, err));
    close_round(reducer);
    return judge(reducer, err);
}

/* Peers wait at the exchange of use bits if a user's hook owns the buckets, else at a bucket. */
static sw_status complete_as_owned(sw_reducer *reducer, sw_error *err)
{
    return reducer->owner != SW_BUCKETS_OURS ? sw_reducer_exchange_use(reducer, err)
                                             : complete_round(reducer, err);
}

sw_status sw_reducer_abandon(sw_reducer *reducer, sw_error *err)
{
    bool was_open = reducer->state == SW_ROUND_OPEN;
    sw_status status = SW_OK;
    if (was_open && reducer->ops->traits.can_abandon) {
        reducer->abandoned = true;
        status = complete_as_owned(reducer, err);
        reducer->abandoned = false;
    } else if (was_open) {
        status = sw_error_set(err, SW_E_COMM, reducer->rank,
                              "a backward of %s failed on rank %d in the middle of a round: on "
                              "GPUs that ends the communicator; wrap again, on every rank",
                              reducer->label, reducer->rank);
    }
    reducer->state = SW_ROUND_CLOSED;
    reducer->stats.abandoned += was_open;
    return status;
}

sw_status sw_reducer_try_abandon(sw_reducer *reducer, int64_t budget_ns, sw_error *err)
{
    if (reducer->state != SW_ROUND_OPEN)
        return SW_OK;
    return reducer->ops->try_abandon ? reducer->ops->try_abandon(reducer, budget_ns, err)
                                     : sw_reducer_abandon(reducer, err);
}

sw_status sw_reducer_shadow(sw_reducer *reducer, sw_error *err)
{
    SW_TRY(sw_reducer_open_shadow(reducer, err));
    sw_status status = complete_as_owned(reducer, err);
    reducer->contributes = true;
    reducer->state = SW_ROUND_CLOSED;
    return status;
}
