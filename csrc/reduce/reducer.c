/* reducer.c - see reducer.h and docs/design/reduce.md.
 *
 * A bucket's *tail* is what a rank says beside the data: whether it contributes, whether it abandoned the
 * round, and one use bit a parameter. Tails are doubled by the round's parity: a rank may post the next
 * round while a peer still reads this one's, but not the one after, because that needs the peer's done. */
#include "reduce/reducer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"
#include "platform/memory.h"

enum { MARKS_PER_POLL = 8 };

typedef struct tail {
    uint32_t contributes, abandoned;
    uint32_t bits[]; /* of the bucket's parameters, in memory order */
} tail;

typedef enum bucket_state { BUCKET_FILLING = 0, BUCKET_POSTED } bucket_state;

typedef struct bucket {
    struct sw_reducer *reducer; /* borrowed: the plan's context */
    size_t index;
    size_t tail_offset_bytes, tail_bytes; /* in the tails arena, of the even parity */
    size_t pending;                       /* parameters not placed yet in this round */
    uint32_t *any;                        /* owned: use bits of all ranks together */
    sw_fold_plan plan;
    sw_op op;
    uint32_t ticket;
    bucket_state state;
    bool takes_part; /* trainable, or unfrozen since */
    bool pinned;     /* never posted before the end of the backward */
    bool all_used;
} bucket;

typedef struct param_state { /* since when: the last synchronisation, but `placed`: this round */
    uint8_t used, placed, used_by_any;
} param_state;

struct sw_reducer {
    sw_comm *comm; /* borrowed */
    sw_layout layout;
    sw_gradient_memory *memory; /* owned until taken */
    bucket *buckets;            /* owned */
    param_state *params;        /* owned */
    bool *contributors;         /* owned scratch, world_size */
    char **names;               /* owned */
    size_t tail_stride_bytes;   /* from the even parity's tails to the odd one's */
    size_t next_bucket;         /* the lowest that is not posted */
    sw_round_state state;
    int64_t task;
    uint32_t step, rounds; /* steps counted, and rounds opened since the last one */
    uint32_t parity;
    uint32_t marks; /* gradients taken, to poll now and then */
    bool contributes, abandoned, divide_by_active, defer_all;
    sw_reducer_stats stats;
};

static tail *tail_of(const bucket *b, int rank)
{
    const sw_reducer *reducer = b->reducer;
    return (tail *)(void *)(reducer->memory->tails->base[rank] + reducer->parity * reducer->tail_stride_bytes +
                            b->tail_offset_bytes);
}

static size_t words_of(size_t bits)
{
    return (bits + 31) / 32;
}

static bool bit_is_set(const uint32_t *bits, size_t i)
{
    return bits[i / 32] >> (i % 32) & 1;
}

/* Reads every rank's tail of this round: who contributes, and which parameters anybody used. */
static void read_tails(bucket *b, bool *contributes, int *abandoned_by)
{
    const sw_reducer *reducer = b->reducer;
    size_t count = reducer->layout.bucket[b->index].count;
    *abandoned_by = -1;
    memset(b->any, 0, words_of(count) * sizeof *b->any);
    for (int r = 0; r < reducer->comm->world_size; ++r) {
        const tail *t = tail_of(b, r);
        contributes[r] = t->contributes != 0;
        if (t->abandoned && *abandoned_by < 0)
            *abandoned_by = r;
        for (size_t w = 0; w < words_of(count); ++w)
            b->any[w] |= t->bits[w];
    }
    b->all_used = true;
    for (size_t i = 0; i < count && b->all_used; ++i)
        b->all_used = bit_is_set(b->any, i);
}

static void plan_resolve(void *context, bool *contributes, double *scale)
{
    bucket *b = context;
    int world_size = b->reducer->comm->world_size, abandoned_by, active = 0;
    read_tails(b, contributes, &abandoned_by);
    for (int r = 0; r < world_size; ++r) {
        if (abandoned_by >= 0)
            contributes[r] = false;
        active += contributes[r];
    }
    *scale = 1.0 / (b->reducer->divide_by_active && active > 0 ? active : world_size);
}

static bool plan_next_run(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel)
{
    const bucket *b = context;
    const sw_layout *layout = &b->reducer->layout;
    const sw_layout_bucket *shape = &layout->bucket[b->index];
    *begin = cursor;
    *numel = end - cursor;
    if (b->all_used)
        return true;
    size_t run_end = 0;
    bool found = false;
    for (size_t i = 0; i < shape->count; ++i) {
        const sw_layout_place *place = &layout->place[layout->order[shape->first + i]];
        size_t place_end = place->begin + place->numel;
        if (place_end <= cursor || place->numel == 0)
            continue;
        if (place->begin >= end)
            break;
        if (!bit_is_set(b->any, i)) {
            if (found)
                break;
            continue;
        }
        if (!found)
            *begin = sw_size_max(cursor, place->begin);
        found = true;
        run_end = sw_size_min(end, place_end);
    }
    *numel = found ? run_end - *begin : 0;
    return found;
}

/* "bucket 0 of Mlp, 0.bias to 4.weight" */
static void name_bucket(bucket *b, const char *label)
{
    const sw_reducer *reducer = b->reducer;
    const sw_layout_bucket *shape = &reducer->layout.bucket[b->index];
    const char *first = reducer->names[reducer->layout.order[shape->first]];
    const char *last = reducer->names[reducer->layout.order[shape->first + shape->count - 1]];
    snprintf(b->op.label, sizeof b->op.label, "bucket %zu of %.*s, %.*s to %.*s", b->index, sw_text_fit(label, 16), label,
             sw_text_fit(first, 24), first, sw_text_fit(last, 24), last);
}

static sw_status init_buckets(sw_reducer *reducer, const sw_reducer_options *options, sw_error *err)
{
    const char *label = options->label;
    sw_redop redop = options->sums ? SW_REDOP_SUM : SW_REDOP_MEAN;
    const sw_layout *layout = &reducer->layout;
    size_t offset = 0;
    for (size_t i = 0; i < layout->bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        const sw_layout_bucket *shape = &layout->bucket[i];
        b->reducer = reducer;
        b->index = i;
        b->tail_offset_bytes = offset;
        b->tail_bytes = sizeof(tail) + words_of(shape->count) * sizeof(uint32_t);
        offset += (b->tail_bytes + SW_ALIGNMENT_BYTES - 1) / SW_ALIGNMENT_BYTES * SW_ALIGNMENT_BYTES;
        b->any = calloc(words_of(shape->count) + 1, sizeof *b->any);
        if (!b->any)
            SW_FAIL(err, SW_E_MEMORY, "reducer of '%s': no memory for use bits", label);
        b->takes_part = shape->trainable;
        b->plan = (sw_fold_plan){.context = b, .resolve = plan_resolve, .next_run = plan_next_run};
        b->op = (sw_op){.kind = SW_OP_ALL_REDUCE,
                        .dtype = shape->dtype,
                        .redop = redop,
                        .numel = shape->numel,
                        .offset_bytes = shape->offset_bytes,
                        .plan = &b->plan};
        name_bucket(b, label);
        if (shape->trainable)
            SW_TRY(sw_redop_check(redop, shape->dtype, err));
    }
    reducer->tail_stride_bytes = offset;
    return SW_OK;
}

static void bind_memory(sw_reducer *reducer)
{
    size_t begin = 0, end = 0; /* bytes to populate: neighbouring buckets that take part, as one range */
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        b->op.subject = reducer->memory->tails->serial;
        if (reducer->memory->transport == SW_TRANSPORT_POOL)
            b->op.arena = reducer->memory->arena;
        else
            b->op.data = reducer->memory->base + b->op.offset_bytes;
        if (!b->takes_part)
            continue;
        if (b->op.offset_bytes != end) {
            sw_memory_populate(reducer->memory->base + begin, end - begin);
            begin = b->op.offset_bytes;
        }
        end = b->op.offset_bytes + b->op.numel * sw_dtype_size_bytes(b->op.dtype);
    }
    sw_memory_populate(reducer->memory->base + begin, end - begin);
}

static sw_status copy_names(sw_reducer *reducer, const char *const *names, size_t count, sw_error *err)
{
    for (size_t i = 0; i < count; ++i) {
        size_t length = strlen(names[i]) + 1;
        reducer->names[i] = malloc(length);
        if (!reducer->names[i])
            SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu names", count);
        memcpy(reducer->names[i], names[i], length);
    }
    return SW_OK;
}

/* All that needs no peer. */
static sw_status prepare(sw_reducer *reducer, const sw_layout_param *params, const char *const *names,
                         size_t param_count, const sw_reducer_options *options, sw_error *err)
{
    SW_TRY(sw_layout_init(&reducer->layout, params, param_count, reducer->comm->world_size, options->bucket_cap_bytes,
                          err));
    reducer->buckets = calloc(reducer->layout.bucket_count + 1, sizeof *reducer->buckets);
    reducer->params = calloc(param_count + 1, sizeof *reducer->params);
    reducer->names = calloc(param_count + 1, sizeof *reducer->names);
    reducer->contributors = calloc((size_t)reducer->comm->world_size, sizeof *reducer->contributors);
    if (!reducer->buckets || !reducer->params || !reducer->names || !reducer->contributors)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu parameters", param_count);
    SW_TRY(copy_names(reducer, names, param_count, err));
    return init_buckets(reducer, options, err);
}

sw_status sw_reducer_create(sw_comm *comm, const sw_layout_param *params, const char *const *names, size_t param_count,
                            const sw_reducer_options *options, sw_reducer **reducer, sw_error *err)
{
    sw_error cause;
    sw_reducer *made = calloc(1, sizeof *made);
    if (!made)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory for a reducer");
    made->comm = comm;
    made->contributes = true;
    sw_status status = prepare(made, params, names, param_count, options, &cause);
    if (status == SW_E_MEMORY) { /* here alone: the peers go on to the gradients' memory. An illegal table is everybody's */
        sw_comm_give_up(comm, status, err, "%s", cause.message);
        goto destroy;
    }
    if (status != SW_OK) {
        if (err)
            *err = cause;
        goto destroy;
    }
    SW_TRY_GOTO(status,
                sw_gradient_memory_create(comm, made->layout.size_bytes, 2 * made->tail_stride_bytes, options->transport,
                                          options->label, &made->memory, err),
                destroy);
    bind_memory(made);
    *reducer = made;
    return SW_OK;
destroy:
    sw_reducer_destroy(made);
    return status;
}

sw_gradient_memory *sw_reducer_take_memory(sw_reducer *reducer)
{
    sw_gradient_memory *memory = reducer->memory;
    reducer->memory = NULL;
    return memory;
}

/* Peers fold with what was posted, and wait for this rank's part of it: its memory must not go in silence. */
static void give_up_posted(sw_reducer *reducer)
{
    for (size_t i = 0; reducer->state == SW_ROUND_OPEN && i < reducer->layout.bucket_count; ++i) {
        const bucket *b = &reducer->buckets[i];
        if (b->state != BUCKET_POSTED || !b->op.arena)
            continue;
        (void)sw_comm_give_up(reducer->comm, SW_E_COMM, NULL, "%s was dropped in the middle of a backward", b->op.label);
        return;
    }
}

void sw_reducer_destroy(sw_reducer *reducer)
{
    if (!reducer)
        return;
    give_up_posted(reducer);
    sw_gradient_memory_destroy(reducer->memory);
    for (size_t i = 0; reducer->buckets && i < reducer->layout.bucket_count; ++i)
        free(reducer->buckets[i].any);
    for (size_t i = 0; reducer->names && i < reducer->layout.param_count; ++i)
        free(reducer->names[i]);
    free(reducer->buckets);
    free(reducer->params);
    free(reducer->names);
    free(reducer->contributors);
    sw_layout_fini(&reducer->layout);
    free(reducer);
}

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

static bucket *bucket_of(const sw_reducer *reducer, size_t param)
{
    return &reducer->buckets[reducer->layout.place[param].bucket];
}

uint8_t *sw_reducer_address(const sw_reducer *reducer, size_t param)
{
    const sw_layout_bucket *shape = &reducer->layout.bucket[reducer->layout.place[param].bucket];
    return reducer->memory->base + shape->offset_bytes +
           reducer->layout.place[param].begin * sw_dtype_size_bytes(shape->dtype);
}

void sw_reducer_unfreeze(sw_reducer *reducer, size_t param)
{
    bucket_of(reducer, param)->takes_part = true;
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

void sw_reducer_defer_all(sw_reducer *reducer, bool defer)
{
    reducer->defer_all = defer;
}

bool sw_reducer_is_sent(const sw_reducer *reducer, size_t param)
{
    return reducer->state == SW_ROUND_OPEN && bucket_of(reducer, param)->state == BUCKET_POSTED;
}

bool sw_reducer_used_by_any(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].used_by_any;
}

sw_status sw_reducer_open(sw_reducer *reducer, int64_t task, bool synchronised, sw_error *err)
{
    if (reducer->state != SW_ROUND_CLOSED)
        SW_FAIL(err, SW_E_STATE, "a round was opened while another is open");
    reducer->state = synchronised ? SW_ROUND_OPEN : SW_ROUND_LOCAL;
    reducer->task = task;
    for (size_t i = 0; i < reducer->layout.param_count; ++i)
        reducer->params[i].placed = 0;
    if (!synchronised)
        return SW_OK;
    reducer->parity ^= 1;
    reducer->rounds++;
    reducer->next_bucket = 0;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        b->state = BUCKET_FILLING;
        b->pending = reducer->layout.bucket[i].count;
    }
    while (reducer->next_bucket < reducer->layout.bucket_count && !reducer->buckets[reducer->next_bucket].takes_part)
        reducer->next_bucket++;
    return SW_OK;
}

static void write_tail(bucket *b)
{
    sw_reducer *reducer = b->reducer;
    const sw_layout_bucket *shape = &reducer->layout.bucket[b->index];
    tail *t = tail_of(b, reducer->comm->rank);
    memset(t, 0, b->tail_bytes);
    t->contributes = reducer->contributes;
    t->abandoned = reducer->abandoned;
    for (size_t i = 0; reducer->contributes && i < shape->count; ++i)
        if (reducer->params[reducer->layout.order[shape->first + i]].used)
            t->bits[i / 32] |= UINT32_C(1) << (i % 32);
}

static sw_status post_bucket(bucket *b, sw_error *err)
{
    sw_reducer *reducer = b->reducer;
    write_tail(b);
    b->state = BUCKET_POSTED;
    b->op.step = reducer->step + 1;
    b->op.round = reducer->contributes ? reducer->rounds : 0; /* who joined counts no steps */
    reducer->stats.buckets_sent++;
    reducer->stats.bytes += b->op.numel * sw_dtype_size_bytes(b->op.dtype);
    if (b->op.arena)
        return reducer->comm->ops->post(reducer->comm, &b->op, &b->ticket, err);
    return reducer->comm->ops->run(reducer->comm, &b->op, err);
}

/* Posts, in index order, what is complete; staged buckets wait for the end, where blocking costs nothing. */
static sw_status post_ready(sw_reducer *reducer, sw_error *err)
{
    for (; reducer->next_bucket < reducer->layout.bucket_count; ++reducer->next_bucket) {
        bucket *b = &reducer->buckets[reducer->next_bucket];
        if (!b->takes_part)
            continue;
        if (b->pending > 0 || b->pinned || !b->op.arena || reducer->stats.rounds == 0 || reducer->defer_all)
            return SW_OK;
        reducer->stats.buckets_early++;
        SW_TRY(post_bucket(b, err));
    }
    return SW_OK;
}

sw_status sw_reducer_mark(sw_reducer *reducer, size_t param, int64_t task, bool *advance, sw_error *err)
{
    bucket *b = bucket_of(reducer, param);
    param_state *state = &reducer->params[param];
    state->used = 1;
    *advance = false;
    if (reducer->state != SW_ROUND_OPEN)
        return SW_OK;
    if (b->state == BUCKET_POSTED) {
        b->pinned = true;
        SW_FAIL(err, SW_E_STATE,
                "parameter '%s' got a second gradient in one backward after %s was sent; from the next backward on "
                "this bucket waits for the end of the backward: clear the gradients and run the step again",
                reducer->names[param], b->op.label);
    }
    if (state->placed || task != reducer->task)
        b->pinned = true;
    if (!state->placed && b->pending > 0)
        b->pending--;
    state->placed = 1;
    /* While buckets are under way, every few gradients is often enough to look after them. */
    bool under_way = reducer->next_bucket > 0 && ++reducer->marks % MARKS_PER_POLL == 0;
    *advance = (b->pending == 0 && b->index == reducer->next_bucket) || under_way;
    return SW_OK;
}

bool sw_reducer_pin(sw_reducer *reducer, size_t param)
{
    bucket *b = bucket_of(reducer, param);
    if (reducer->state == SW_ROUND_OPEN && b->state == BUCKET_POSTED)
        return false;
    b->pinned = true;
    reducer->params[param].used = 1;
    return true;
}

sw_status sw_reducer_advance(sw_reducer *reducer, sw_error *err)
{
    bool complete;
    SW_TRY(post_ready(reducer, err));
    if (reducer->next_bucket == 0 || reducer->memory->transport != SW_TRANSPORT_POOL)
        return SW_OK;
    return reducer->comm->ops->poll(reducer->comm, 0, &complete, err);
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

/* Spreads the buckets' use bits to the parameters, and ends the round. */
static void collect(sw_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        const bucket *b = &reducer->buckets[i];
        const sw_layout_bucket *shape = &reducer->layout.bucket[i];
        for (size_t k = 0; k < shape->count; ++k) {
            param_state *state = &reducer->params[reducer->layout.order[shape->first + k]];
            state->used_by_any = b->takes_part && bit_is_set(b->any, k);
            if (b->takes_part)
                state->used = 0;
        }
    }
    reducer->state = SW_ROUND_CLOSED;
    reducer->stats.rounds++;
}

/* The rank that abandoned this round in some bucket, or -1. */
static int abandoned_by(sw_reducer *reducer)
{
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        for (int r = 0; r < reducer->comm->world_size; ++r)
            if (reducer->buckets[i].takes_part && tail_of(&reducer->buckets[i], r)->abandoned)
                return r;
    return -1;
}

static sw_status check_abandoned(sw_reducer *reducer, sw_error *err)
{
    int rank = abandoned_by(reducer);
    if (rank >= 0 && !reducer->abandoned) {
        char peer[SW_COMM_PEER_BYTES];
        reducer->comm->ops->peer(reducer->comm, rank, peer);
        return sw_error_set(err, SW_E_MISMATCH, rank,
                            "%s left a backward unfinished (an exception was raised in it there), while rank %d finished it; "
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
    /* Where a user's hook owns the buckets, peers wait at the exchange of use bits, not at the buckets. */
    sw_status status = reducer->defer_all ? sw_reducer_exchange_use(reducer, err) : complete_round(reducer, err);
    reducer->abandoned = false;
    reducer->state = SW_ROUND_CLOSED;
    reducer->stats.abandoned++;
    return status;
}

sw_status sw_reducer_shadow(sw_reducer *reducer, sw_error *err)
{
    SW_TRY(sw_reducer_open(reducer, -1, true, err));
    reducer->contributes = false;
    sw_status status = reducer->defer_all ? sw_reducer_exchange_use(reducer, err) : complete_round(reducer, err);
    reducer->contributes = true;
    reducer->state = SW_ROUND_CLOSED;
    return status;
}

sw_status sw_reducer_exchange_use(sw_reducer *reducer, sw_error *err)
{
    sw_op barrier = {.kind = SW_OP_BARRIER,
                     .dtype = SW_DTYPE_UINT8,
                     .subject = reducer->memory->tails->serial,
                     .step = reducer->step + 1,
                     .round = reducer->contributes ? reducer->rounds : 0,
                     .label = "use bits before a communication hook"};
    int by;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            write_tail(&reducer->buckets[i]);
    SW_TRY(reducer->comm->ops->run(reducer->comm, &barrier, err));
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        if (reducer->buckets[i].takes_part)
            read_tails(&reducer->buckets[i], reducer->contributors, &by);
    collect(reducer);
    return check_abandoned(reducer, err);
}
