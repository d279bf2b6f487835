/* device_rounds.c - the reducer's table for buckets on a GPU: see docs/design/reduce_machine.md.
 *
 * A complete bucket is written by one PACK launch for each 64 gradients, on the stream in use. If
 * the transport adds contributions, PACK divides them as it copies, and divides in place those
 * already in the bucket. That stream first waits for the streams on which the gradients were
 * written. Those then wait for it, since their allocators may reuse the gradients' memory. Sliced,
 * a bucket travels in one of two places, in turn, and this rank's slice of the mean stays.
 * device_reducer.h defines the events.
 *
 * On a GPU ranks do not wait for one another on the host. So each assumes that the others took the
 * same steps and have the same gradients on top of a standing mean. A tag records both; if tags
 * differ, all ranks raise before a later forward.
 */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/crc32c.h"
#include "reduce/device_reducer.h"
#include "reduce/reducer_state.h"

static const uint64_t TAG_NUMBERS = 0xffffffffu; /* low bits of the tag: steps and rounds; the rest
                                                  * is the digest */

typedef struct stream_set {
    sw_stream **stream; /* owned; the streams are borrowed for a round */
    size_t count, room;
} stream_set;

typedef struct device_bucket {
    void *data; /* borrowed; NULL: takes no part */
    stream_set producers;
} device_bucket;

typedef struct device_rounds {
    sw_reducer base;
    sw_device_comm *comm;      /* borrowed */
    sw_device_reducer *engine; /* owned: events, use bytes, means */
    sw_redop op;
    bool sliced;
    device_bucket *buckets;        /* owned */
    sw_stream *stream;             /* in use; borrowed for a call */
    stream_set arrived;            /* streams ordered after the optimizer in this round */
    sw_stream *consumer;           /* the optimizer's, borrowed until the next round */
    bool is_finished;              /* the consumer has not taken the means yet */
    sw_pack_args pack;             /* copies for the next launch; with `converts` they divide */
    void *place[SW_DEVICE_PLACES]; /* borrowed; sliced */
    size_t place_bytes[SW_DEVICE_PLACES], place_count, turn;
    size_t active;       /* ranks that contribute */
    uint8_t *bytes;      /* owned scratch, one a parameter */
    sw_device_run *runs; /* owned scratch, one a parameter */
} device_rounds;

static const sw_reducer_ops device_rounds_ops;

static device_rounds *device_of(sw_reducer *reducer)
{
    return (device_rounds *)(void *)reducer;
}

static const device_rounds *device_seen(const sw_reducer *reducer)
{
    return (const device_rounds *)(const void *)reducer;
}

/* ---- life ---- */

/* Create the engine; `config` lacks the buckets. */
static sw_status create_engine(const device_rounds *d, sw_device_reducer_config *config,
                               sw_device_reducer **engine, sw_error *err)
{
    const sw_layout *layout = &d->base.layout;
    sw_device_bucket_spec *specs = calloc(layout->bucket_count + 1, sizeof *specs);
    if (!specs)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu buckets", layout->bucket_count);
    for (size_t b = 0; b < layout->bucket_count; ++b)
        specs[b] = (sw_device_bucket_spec){.numel = layout->bucket[b].numel,
                                           .dtype = layout->bucket[b].dtype};
    config->comm = d->comm;
    config->op = d->op;
    config->buckets = specs;
    config->bucket_count = layout->bucket_count;
    config->gradient_count = layout->param_count;
    sw_status status = sw_device_reducer_create(config, engine, err);
    free(specs);
    return status;
}

static sw_status create_all(device_rounds *d, const sw_layout_param *params,
                            const char *const *names, size_t param_count,
                            const sw_reducer_options *options, sw_error *err)
{
    sw_device_reducer_config config = {.deterministic = options->deterministic,
                                       .sliced = options->sliced,
                                       .slices = options->sliced ? options->slices : NULL,
                                       .row = options->row,
                                       .column = options->column,
                                       .wire = options->is_narrow ? options->wire : SW_DTYPE_COUNT};
    SW_TRY(sw_reducer_init(&d->base, params, names, param_count, options, d->base.world_size, err));
    d->buckets = calloc(d->base.layout.bucket_count + 1, sizeof *d->buckets);
    d->bytes = calloc(param_count + 1, 1);
    d->runs = calloc(param_count + 1, sizeof *d->runs);
    if (!d->buckets || !d->bytes || !d->runs)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu parameters", param_count);
    return create_engine(d, &config, &d->engine, err);
}

sw_status sw_reducer_create_on_device(sw_device_comm *comm, const sw_layout_param *params,
                                      const char *const *names, size_t param_count,
                                      const sw_reducer_options *options, sw_reducer **reducer,
                                      sw_error *err)
{
    if (!comm->peers)
        SW_FAIL(err, SW_E_STATE, "reducer: the communicator is not connected");
    device_rounds *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu bytes", sizeof *made);
    made->base = (sw_reducer){.ops = &device_rounds_ops,
                              .rank = comm->peers->rank,
                              .world_size = comm->peers->world_size};
    made->comm = comm;
    made->op = options->sums ? SW_REDOP_SUM : SW_REDOP_MEAN;
    made->sliced = options->sliced;
    made->active = (size_t)comm->peers->world_size;
    sw_status status = create_all(made, params, names, param_count, options, err);
    if (status != SW_OK) {
        device_rounds_ops.destroy(&made->base);
        return status;
    }
    *reducer = &made->base;
    return SW_OK;
}

static void device_destroy(sw_reducer *reducer)
{
    device_rounds *d = device_of(reducer);
    sw_device_reducer_destroy(d->engine);
    for (size_t b = 0; d->buckets && b < reducer->layout.bucket_count; ++b)
        free(d->buckets[b].producers.stream);
    free(d->buckets);
    free(d->arrived.stream);
    free(d->bytes);
    free(d->runs);
    sw_reducer_fini(reducer);
    free(d);
}

/* ---- memory ---- */

sw_status sw_reducer_adopt(sw_reducer *reducer, size_t index, void *data, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (reducer->owner == SW_BUCKETS_OURS)
        SW_TRY(sw_device_reducer_adopt(d->engine, index, data, err));
    d->buckets[index].data = data;
    reducer->buckets[index].takes_part = true;
    return SW_OK;
}

sw_status sw_reducer_set_places(sw_reducer *reducer, void *const *places, const size_t *sizes_bytes,
                                size_t count, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (count > SW_DEVICE_PLACES || reducer->state != SW_ROUND_CLOSED)
        SW_FAIL(err, SW_E_STATE,
                "reducer: between two rounds buckets get at most %d places, not %zu",
                SW_DEVICE_PLACES, count);
    if (d->place_count > 0) /* its owner may reuse it, in the order of its own stream */
        SW_TRY(sw_device_comm_follow(d->comm, d->stream, d->comm->stream, err));
    for (size_t p = 0; p < count; ++p) {
        d->place[p] = places[p];
        d->place_bytes[p] = sizes_bytes[p];
    }
    d->place_count = count;
    d->turn = 0;
    return SW_OK;
}

/* Release the previous round's means: the optimizer has enqueued all reads of them. */
static sw_status release(device_rounds *d, sw_error *err)
{
    if (!d->is_finished)
        return SW_OK;
    SW_TRY(sw_device_reducer_release(d->engine, d->consumer, err));
    d->is_finished = false;
    return SW_OK;
}

sw_status sw_reducer_withdraw(sw_reducer *reducer, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    sw_device_reducer_config config = {.wire = SW_DTYPE_COUNT};
    sw_device_reducer *rest = NULL;
    SW_TRY(release(d, err));
    SW_TRY(create_engine(d, &config, &rest, err));
    sw_device_reducer_destroy(d->engine);
    d->engine = rest;
    return SW_OK;
}

static uint8_t *device_address(const sw_reducer *reducer, size_t bucket_index)
{
    const device_rounds *d = device_seen(reducer);
    return d->sliced ? d->place[d->turn] : d->buckets[bucket_index].data;
}

static uint8_t *device_result(const sw_reducer *reducer, size_t bucket_index)
{
    const device_rounds *d = device_seen(reducer);
    size_t slice_bytes = sw_bucket_bytes(reducer, bucket_index) / (size_t)reducer->slice_count;
    return (uint8_t *)d->buckets[bucket_index].data +
           (d->sliced ? 0 : (size_t)reducer->own_slice * slice_bytes);
}

static sw_status launch_pack(device_rounds *d, sw_error *err)
{
    if (d->pack.segment_count == 0)
        return SW_OK;
    SW_TRY(sw_kernel_launch(&d->comm->kernels, SW_KERNEL_PACK, &d->pack, d->stream, err));
    d->pack.segment_count = 0;
    return SW_OK;
}

static sw_status add_copy(device_rounds *d, void *to, const void *from, size_t size_bytes,
                          sw_error *err)
{
    d->pack.segment[d->pack.segment_count++] =
        (sw_pack_segment){.to = to, .from = from, .size_bytes = size_bytes};
    return d->pack.segment_count == SW_PACK_SEGMENT_MAX ? launch_pack(d, err) : SW_OK;
}

static sw_status device_write(sw_reducer *reducer, void *to, const void *from, size_t numel,
                              sw_dtype dtype, bool add, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (add)
        SW_FAIL(err, SW_E_STATE, "reducer: a gradient is placed twice in one round");
    return add_copy(d, to, from, numel * sw_dtype_size_bytes(dtype), err);
}

static sw_status device_clear(sw_reducer *reducer, void *to, size_t size_bytes, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    return d->comm->device->ops->fill_async(d->comm->device, to, 0, size_bytes, d->stream, err);
}

/* ---- streams ---- */

void sw_reducer_use_stream(sw_reducer *reducer, sw_stream *stream)
{
    device_of(reducer)->stream = stream;
}

static sw_status add_stream(stream_set *set, sw_stream *stream, bool *is_new, sw_error *err)
{
    *is_new = false;
    for (size_t i = 0; i < set->count; ++i)
        if (set->stream[i] == stream)
            return SW_OK;
    if (set->count == set->room) {
        sw_stream **grown = realloc(set->stream, (set->room + 4) * sizeof *grown);
        if (!grown)
            SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu streams", set->room + 4);
        set->stream = grown;
        set->room += 4;
    }
    set->stream[set->count++] = stream;
    *is_new = true;
    return SW_OK;
}

/* Order later writes on the stream in use after the optimizer that reads the same memory. */
static sw_status arrive(device_rounds *d, sw_error *err)
{
    bool is_new;
    SW_TRY(add_stream(&d->arrived, d->stream, &is_new, err));
    if (!is_new)
        return SW_OK;
    SW_TRY(release(d, err));
    return sw_device_reducer_begin(d->engine, d->stream, err);
}

sw_status sw_reducer_arrive(sw_reducer *reducer, sw_error *err)
{
    device_of(reducer)->arrived.count = 0;
    return arrive(device_of(reducer), err);
}

sw_status sw_reducer_produce(sw_reducer *reducer, size_t param, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    bool is_new;
    SW_TRY(arrive(d, err));
    return add_stream(&d->buckets[reducer->layout.place[param].bucket].producers, d->stream,
                      &is_new, err);
}

static void device_count_step(sw_reducer *reducer)
{
    device_of(reducer)->consumer = device_of(reducer)->stream;
}

/* ---- a round ---- */

static void device_open(sw_reducer *reducer)
{
    device_rounds *d = device_of(reducer);
    d->pack.segment_count = 0;
    for (size_t b = 0; b < reducer->layout.bucket_count; ++b)
        d->buckets[b].producers.count = 0;
}

static bool device_has_room(const sw_reducer *reducer, const bucket *b)
{
    (void)reducer;
    (void)b;
    return true; /* the stream waits, the host does not */
}

/* Copies into the bucket divide if its mean needs that. */
static void set_scale(device_rounds *d, const bucket *b)
{
    int dtype = (int)d->base.layout.bucket[b->index].dtype;
    d->pack.scale =
        d->base.owner == SW_BUCKETS_OURS ? sw_device_reducer_prescale(d->engine, b->index) : 1.0f;
    d->pack.converts = d->pack.scale != 1.0f;
    d->pack.to_dtype = d->pack.from_dtype = dtype;
}

/* Divide the contributions without a copy of ours: autograd added them in place, or torch has
 * copied them. */
static sw_status divide_in_place(device_rounds *d, const bucket *b, sw_error *err)
{
    const sw_layout *layout = &d->base.layout;
    const sw_layout_bucket *shape = &layout->bucket[b->index];
    for (size_t k = 0; k < shape->count; ++k) {
        size_t param = layout->order[shape->first + k];
        size_t size_bytes = layout->place[param].numel * sw_dtype_size_bytes(shape->dtype);
        void *at = sw_reducer_address(&d->base, param);
        if (size_bytes > 0 && !d->base.params[param].written)
            SW_TRY(add_copy(d, at, at, size_bytes, err));
    }
    return SW_OK;
}

static sw_status device_reserve(sw_reducer *reducer, bucket *b, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    const stream_set *producers = &d->buckets[b->index].producers;
    set_scale(d, b);
    for (size_t i = 0; i < producers->count; ++i)
        if (producers->stream[i] != d->stream)
            SW_TRY(sw_device_comm_follow(d->comm, d->stream, producers->stream[i], err));
    if (!d->sliced)
        return SW_OK;
    if (d->place_count == 0)
        SW_FAIL(err, SW_E_STATE, "reducer: sliced buckets need at least one place, got none");
    d->turn = (d->turn + 1) % d->place_count;
    if (d->place_bytes[d->turn] < sw_bucket_bytes(reducer, b->index))
        d->turn = 0;
    return reducer->owner == SW_BUCKETS_OURS
               ? sw_device_reducer_reserve(d->engine, d->turn, d->stream, err)
               : SW_OK;
}

static sw_status device_seal(sw_reducer *reducer, bucket *b, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    const stream_set *producers = &d->buckets[b->index].producers;
    if (d->pack.converts)
        SW_TRY(divide_in_place(d, b, err));
    SW_TRY(launch_pack(d, err));
    for (size_t i = 0; i < producers->count; ++i)
        if (producers->stream[i] != d->stream)
            SW_TRY(sw_device_comm_follow(d->comm, producers->stream[i], d->stream, err));
    return SW_OK;
}

/* Find the runs of this rank's slice under contributions; padding between two such parameters is
 * included. */
static size_t standing_runs(const device_rounds *d, const bucket *b)
{
    const sw_layout *layout = &d->base.layout;
    const sw_layout_bucket *shape = &layout->bucket[b->index];
    size_t count = 0, before = 0;
    for (size_t k = 0; k < shape->count; ++k) {
        size_t param = layout->order[shape->first + k], begin, end;
        sw_reducer_own_run(&d->base, param, &begin, &end);
        if (!d->base.params[param].standing || begin == end)
            continue;
        if (count > 0 && before + 1 == k)
            d->runs[count - 1].end = end;
        else
            d->runs[count++] = (sw_device_run){.begin = begin, .end = end};
        before = k;
    }
    return count;
}

static sw_status device_post(sw_reducer *reducer, bucket *b, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (!d->sliced)
        return sw_device_reducer_post(d->engine, b->index, d->stream, err);
    return sw_device_reducer_post_slice(d->engine, b->index, d->place[d->turn], d->runs,
                                        standing_runs(d, b), d->stream, err);
}

static bool device_leaves_early(const sw_reducer *reducer)
{
    (void)reducer;
    return true;
}

/* Return the tag of a round, which must be equal on all ranks. It also covers earlier rounds, since
 * a host that is ahead of its GPU does not send every tag. */
static uint64_t next_tag(device_rounds *d)
{
    sw_reducer *base = &d->base;
    if (d->sliced)
        base->history = sw_crc32c(base->history, &base->digest, sizeof base->digest);
    for (size_t i = 0; d->sliced && i < base->layout.param_count; ++i)
        base->history = sw_crc32c(base->history, &base->params[i].standing, 1);
    uint32_t digest = d->sliced ? base->history : base->stepped;
    return (uint64_t)digest << 32 | (base->step & 0xffffu) << 16 | (base->rounds & 0xffffu);
}

static sw_status device_finish(sw_reducer *reducer, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    const uint64_t tag = next_tag(d);
    const uint8_t *any;
    for (size_t i = 0; i < reducer->layout.param_count;
         ++i) /* use bits of frozen parameters are not read */
        d->bytes[i] =
            reducer->contributes && (reducer->params[i].used || !sw_reducer_takes_part(reducer, i));
    SW_TRY(sw_device_reducer_finish(d->engine, d->bytes, reducer->contributes ? &tag : NULL, err));
    for (size_t b = 0; b < reducer->layout.bucket_count; ++b)
        if (sw_device_reducer_takes_part(d->engine, b))
            SW_TRY(sw_device_reducer_take(d->engine, b, d->stream, err));
    SW_TRY(sw_device_comm_give_back(d->comm, d->stream, err));
    d->is_finished = true;
    d->consumer = d->stream;
    SW_TRY(sw_device_reducer_used_by_any(d->engine, &any, err));
    for (size_t i = 0; i < reducer->layout.param_count; ++i)
        reducer->params[i].used_by_any = sw_reducer_takes_part(reducer, i) && any[i];
    return SW_OK;
}

sw_status sw_reducer_check(sw_reducer *reducer, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    char what[64];
    uint64_t tag = 0, unlike = 0;
    snprintf(what, sizeof what, "a forward of %s", reducer->label);
    SW_TRY(sw_device_refuse_capture(d->comm->device, d->stream, what, err));
    sw_status status = sw_device_reducer_check(d->engine, &tag, &unlike, err);
    if (status != SW_E_MISMATCH)
        return status;
    unsigned step = (unsigned)(tag >> 16) & 0xffffu, round = (unsigned)tag & 0xffffu;
    if (unlike & TAG_NUMBERS)
        SW_FAIL(err, SW_E_MISMATCH,
                "ranks ran different numbers of backwards or optimizer steps of %s: their "
                "gradients were averaged while rank %d was in backward %u after step %u, and "
                "others were not; the average, and what was stepped on since, is wrong: begin "
                "again from a checkpoint, with the same number on every rank",
                reducer->label, reducer->rank, round, step);
    reducer->stepped_unlike = !d->sliced;
    if (reducer->stepped_unlike)
        SW_FAIL(err, SW_E_MISMATCH,
                "ranks disagree about the optimizer of %s: before backward %u after step %u they "
                "have stepped with different hyperparameters, so that their parameters differ: "
                "begin again from a checkpoint, with the same on every rank",
                reducer->label, round, step);
    SW_FAIL(err, SW_E_MISMATCH,
            "ranks cleared different gradients of %s (zero_grad, or .grad = None, on some ranks "
            "only), or at zero=3 ran different units or the same in another order: on GPUs all do "
            "the same; the average of backward %u after step %u, and what was stepped on since, is "
            "wrong: begin again from a checkpoint",
            reducer->label, round, step);
}

/* ---- ranks that ran out ---- */

sw_status sw_reducer_set_active(sw_reducer *reducer, const uint8_t *trains, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    size_t active = 0;
    for (int k = 0; k < reducer->world_size; ++k)
        active += trains[k] != 0;
    SW_TRY(sw_device_reducer_leave_out(d->engine, trains, err));
    SW_TRY(sw_device_reducer_divide_by(
        d->engine, (int)(reducer->divide_by_active ? active : (size_t)reducer->world_size), err));
    d->active = active;
    return SW_OK;
}

static size_t device_active_ranks(const sw_reducer *reducer)
{
    return device_seen(reducer)->active;
}

static size_t device_standing_ranks(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].standing ? device_seen(reducer)->active : 0;
}

/* Return the bytes of buckets that take part or will; sliced, of this rank's slices and the
 * places. */
static size_t device_planned_bytes(const sw_reducer *reducer)
{
    const device_rounds *d = device_seen(reducer);
    size_t total = 0, first = 0, second = 0;
    for (size_t b = 0; b < reducer->layout.bucket_count; ++b) {
        size_t bytes = sw_bucket_bytes(reducer, b);
        if (!reducer->buckets[b].takes_part && !reducer->layout.bucket[b].trainable)
            continue;
        total += bytes;
        second = bytes > first ? first : bytes > second ? bytes : second;
        first = bytes > first ? bytes : first;
    }
    if (!d->sliced)
        return total;
    return total / (size_t)reducer->slice_count + first +
           (reducer->owner == SW_BUCKETS_OURS ? second : 0);
}

static const sw_reducer_ops device_rounds_ops = {
    .traits = {.on_device = true, .places_late = true, .averages_unused = true},
    .open = device_open,
    .has_room = device_has_room,
    .reserve = device_reserve,
    .address = device_address,
    .result = device_result,
    .write = device_write,
    .clear = device_clear,
    .seal = device_seal,
    .post = device_post,
    .leaves_early = device_leaves_early,
    .finish = device_finish,
    .meet = device_finish,
    .active_ranks = device_active_ranks,
    .standing_ranks = device_standing_ranks,
    .count_step = device_count_step,
    .planned_bytes = device_planned_bytes,
    .destroy = device_destroy,
};
