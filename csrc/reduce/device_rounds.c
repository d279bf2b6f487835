/* device_rounds.c - the reducer's table for buckets on a GPU, ordered only by events: see
 * docs/design/reduce.md.
 *
 * Idea: three kinds of streams. The caller's streams in use write gradients; the communicator's
 * stream averages bucket after bucket; the consumer, the stream in use as the round ends, runs the
 * optimizer. The events and their purposes:
 *
 *   producer --met--> comm           a bucket is averaged after it was written, beside the backward
 *   comm --done[b]--> consumer       the optimizer reads bucket b after its mean
 *   consumer --consumed--> producer  the next round writes a bucket after the optimizer has read it
 *   comm --gathered--> host          which gradients some rank used; only a rank that left one
 *                                    unused in that round reads it
 *   comm --told--> host              whether ranks are at the same step; read when it has arrived
 *   comm --packed--> producer        (sliced) gradients' memory is reused after PACK has read it
 *
 * A borrowed communicator needs two more: producer --> comm as a round begins, and comm --> the
 * consumer, on which its owner uses it next.
 *
 * A complete bucket is written by one PACK launch for each 64 gradients, on the stream in use. If
 * the transport adds contributions, PACK divides them as it copies, and divides in place those
 * already in the bucket. That stream first waits for the streams on which the gradients were
 * written. Those then wait for it, since their allocators may reuse the gradients' memory.
 *
 * Sliced, all buckets travel in one place, and this rank's slice of the mean stays. PACK runs on
 * the communicator's stream, so it follows the mean that leaves the place, and no computing waits
 * for its copies. The gradients live until the next bucket is complete. Then their streams wait for
 * `packed`. Whole buckets have memory of their own, so many means may be under way. PACK behind
 * those would hold as many gradients.
 *
 * The last bucket waits for the end of the round, where it and the use bytes, one for each
 * parameter, form one group of the transport: one launch, and one wait until NCCL has accepted the
 * calls. Groups must be equal on all ranks, so buckets that happen to be complete at the same time
 * form none. Use bytes travel in a launch's arguments, so the GPU reads no host memory.
 *
 * On a GPU ranks do not wait for one another on the host. So each assumes that the others took the
 * same steps and have the same gradients on top of an accumulated mean. A tag records both; if tags
 * differ, all ranks raise before a later forward.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "reduce/device_mean.h"
#include "reduce/device_runs.h"
#include "reduce/reducer_state.h"
#include "reduce/round_tag.h"
#include "reduce/stream_set.h"

typedef struct device_bucket {
    void *data; /* borrowed: the bucket, or sliced this rank's slice of its mean; NULL: takes no
                   part */
    void *kept; /* owned: this rank's slice of its row's sum; NULL: none yet */
    sw_stream_set producers;
    sw_event *done; /* owned */
} device_bucket;

typedef struct device_rounds {
    sw_reducer base;
    sw_device_comm *comm; /* borrowed */
    sw_device *device;    /* the comm's */
    sw_device_mean mean;
    bool sliced, is_withdrawn; /* a hook computes the means */
    bool is_begun;             /* a stream has arrived in this round */
    bool is_finished;          /* the consumer has not taken the means yet */
    device_bucket *buckets;    /* owned */
    sw_stream *stream;         /* in use; borrowed for a call */
    sw_stream_set arrived;     /* streams ordered after the optimizer in this round */
    sw_stream *consumer;       /* the optimizer's, borrowed until the next round */
    sw_pack_args pack;         /* without segments; with `converts` copies divide */
    sw_pack_segment *segments; /* owned: copies of the bucket that is filled, at most its params */
    size_t segment_count;
    sw_stream_set *packing;      /* the producers whose gradients PACK reads; NULL: none wait */
    void *place;                 /* borrowed; sliced */
    bucket *held;                /* the last bucket until the round ends, or NULL */
    size_t active;               /* ranks that contribute */
    sw_device_run *runs;         /* owned: accumulated runs of the last posted bucket */
    sw_device_accumulated under; /* of the last posted bucket */
    void *used;                  /* owned device memory: use bytes, then the tag */
    uint8_t *own;                /* owned: this rank's use bytes */
    uint8_t *any;                /* owned, pinned: those of all ranks */
    uint8_t *tags; /* owned, pinned: tags of the round for which `told` was recorded */
    uint64_t tag;  /* this rank's tag of that round */
    bool is_told;  /* `told` was recorded and not read yet */
    sw_event *consumed, *gathered, *told, *packed; /* owned */
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

static sw_status create_mean(device_rounds *d, const sw_reducer_options *options, sw_error *err)
{
    sw_device_mean_config config = {.comm = d->comm,
                                    .op = options->sums ? SW_REDOP_SUM : SW_REDOP_MEAN,
                                    .wire = options->is_narrow ? options->wire : SW_DTYPE_COUNT,
                                    .folds = options->deterministic ||
                                             (options->sliced && options->sums),
                                    .slices = options->sliced ? options->slices : NULL,
                                    .is_sliced = options->sliced,
                                    .hosts = sw_device_hosts_map(d->comm),
                                    .row = options->row,
                                    .column = options->column};
    if (options->is_narrow &&
        ((options->wire != SW_DTYPE_FLOAT16 && options->wire != SW_DTYPE_BFLOAT16) ||
         options->sums))
        SW_FAIL(err, SW_E_INVALID, "reducer: wire must be float16 or bfloat16, for a mean, not %s",
                sw_dtype_name(options->wire));
    for (size_t b = 0; b < d->base.layout.bucket_count; ++b) {
        size_t numel = d->base.layout.bucket[b].numel;
        if (numel % (size_t)d->base.world_size != 0)
            SW_FAIL(err, SW_E_INVALID,
                    "reducer: numel of bucket %zu must be a multiple of world_size %d, not %zu", b,
                    d->base.world_size, numel);
        config.bytes = sw_size_max(config.bytes, sw_bucket_bytes(&d->base, b));
        config.numel = sw_size_max(config.numel, numel);
    }
    return sw_device_mean_init(&d->mean, &config, err);
}

static sw_status create_events(device_rounds *d, sw_error *err)
{
    const sw_device_ops *ops = d->device->ops;
    SW_TRY(ops->event_create(d->device, &d->consumed, err));
    SW_TRY(ops->event_create(d->device, &d->gathered, err));
    SW_TRY(ops->event_create(d->device, &d->told, err));
    for (size_t b = 0; b < d->base.layout.bucket_count; ++b)
        SW_TRY(ops->event_create(d->device, &d->buckets[b].done, err));
    return ops->event_create(d->device, &d->packed, err);
}

static sw_status create_all(device_rounds *d, const sw_layout_param *params,
                            const char *const *names, size_t param_count,
                            const sw_reducer_options *options, sw_error *err)
{
    const sw_device_ops *ops = d->device->ops;
    void *pinned;
    int slices = options->slices ? options->slices->count : d->base.world_size;
    SW_TRY(sw_reducer_init(&d->base, params, names, param_count, options, slices,
                           d->base.world_size / slices, err));
    d->buckets = calloc(d->base.layout.bucket_count + 1, sizeof *d->buckets);
    d->own = calloc(param_count + 1, 1);
    d->runs = calloc((param_count + 1) * (size_t)d->base.world_size + 1, sizeof *d->runs);
    d->segments = calloc(param_count + 1, sizeof *d->segments);
    if (!d->buckets || !d->own || !d->runs || !d->segments)
        SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu parameters", param_count);
    SW_TRY(create_events(d, err));
    SW_TRY(create_mean(d, options, err));
    SW_TRY(ops->memory_alloc(d->device, param_count + SW_TAG_BYTES, &d->used, err));
    SW_TRY(ops->pinned_alloc(d->device, SW_TAG_BYTES, &pinned, err));
    d->tags = pinned;
    SW_TRY(ops->pinned_alloc(d->device, param_count, &pinned, err));
    d->any = pinned;
    return SW_OK;
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
    made->device = comm->device;
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

/* Wait until our stream has done all that was enqueued: it writes to what is freed next. */
static sw_status drain(device_rounds *d, sw_error *err)
{
    SW_TRY(d->device->ops->event_record(d->device, d->gathered, d->comm->stream, err));
    sw_device_comm_await(d->comm, d->gathered, "the comm stream");
    return SW_OK;
}

static void device_destroy(sw_reducer *reducer)
{
    device_rounds *d = device_of(reducer);
    const sw_device_ops *ops = d->device->ops;
    if (d->gathered)
        (void)!drain(d, NULL);
    for (size_t b = 0; d->buckets && b < reducer->layout.bucket_count; ++b) {
        free(d->buckets[b].producers.stream);
        ops->event_destroy(d->device, d->buckets[b].done);
        ops->memory_free(d->device, d->buckets[b].kept);
    }
    sw_device_mean_fini(&d->mean);
    ops->memory_free(d->device, d->used);
    ops->pinned_free(d->device, d->any);
    ops->pinned_free(d->device, d->tags);
    ops->event_destroy(d->device, d->packed);
    ops->event_destroy(d->device, d->told);
    ops->event_destroy(d->device, d->consumed);
    ops->event_destroy(d->device, d->gathered);
    free(d->buckets);
    free(d->arrived.stream);
    free(d->own);
    free(d->runs);
    free(d->segments);
    sw_reducer_fini(reducer);
    free(d);
}

/* ---- memory ---- */

/* Return the first bucket at or after `from` that takes part. */
static size_t next_due(const device_rounds *d, size_t from)
{
    while (from < d->base.layout.bucket_count && !d->buckets[from].data)
        ++from;
    return from;
}

sw_status sw_reducer_adopt(sw_reducer *reducer, size_t index, void *data, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    bool is_open = reducer->state == SW_ROUND_OPEN;
    bool is_posting = is_open && reducer->next_bucket != next_due(d, 0);
    if (!d->is_withdrawn) {
        if (is_posting || d->buckets[index].data)
            SW_FAIL(err, SW_E_STATE, "reducer: bucket %zu of %zu cannot be adopted %s", index,
                    reducer->layout.bucket_count,
                    is_posting ? "once a round has posted one" : "again");
        SW_TRY(sw_redop_check(d->mean.op, reducer->layout.bucket[index].dtype, err));
    }
    d->buckets[index].data = data;
    reducer->buckets[index].takes_part = true;
    if (is_open && !is_posting)
        reducer->next_bucket = next_due(d, 0);
    return SW_OK;
}

sw_status sw_reducer_set_place(sw_reducer *reducer, void *place, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (reducer->state != SW_ROUND_CLOSED)
        SW_FAIL(err, SW_E_STATE, "reducer: buckets get a place between two rounds, not in one");
    if (d->place) /* its owner may reuse it, in the order of its own stream */
        SW_TRY(sw_device_comm_follow(d->comm, d->stream, d->comm->stream, err));
    d->place = place;
    return SW_OK;
}

/* Release the previous round's means: the optimizer has enqueued all reads of them. */
static sw_status release(device_rounds *d, sw_error *err)
{
    if (!d->is_finished)
        return SW_OK;
    SW_TRY(sw_device_refuse_capture(d->device, d->consumer, "a backward", err));
    SW_TRY(d->device->ops->event_record(d->device, d->consumed, d->consumer, err));
    d->is_finished = false;
    return SW_OK;
}

sw_status sw_reducer_withdraw(sw_reducer *reducer, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    SW_TRY(release(d, err));
    SW_TRY(drain(d, err));
    sw_device_mean_fini(&d->mean);
    d->mean = (sw_device_mean){.comm = NULL};
    d->is_withdrawn = true;
    d->is_begun = false;
    return SW_OK;
}

static uint8_t *device_address(const sw_reducer *reducer, size_t bucket_index)
{
    const device_rounds *d = device_seen(reducer);
    return d->sliced ? d->place : d->buckets[bucket_index].data;
}

static uint8_t *device_result(const sw_reducer *reducer, size_t bucket_index)
{
    const device_rounds *d = device_seen(reducer);
    size_t slice_bytes = sw_bucket_bytes(reducer, bucket_index) / (size_t)reducer->slice_count;
    return (uint8_t *)d->buckets[bucket_index].data +
           (d->sliced ? 0 : (size_t)reducer->own_slice * slice_bytes);
}

/* Return true if PACK runs on the communicator's stream. A user's hook reads on the stream in use.
 */
static bool packs_behind_means(const device_rounds *d)
{
    return d->sliced && d->base.owner == SW_BUCKETS_OURS;
}

static sw_status launch_pack(device_rounds *d, sw_stream *stream, sw_error *err)
{
    for (size_t first = 0; first < d->segment_count; first += SW_PACK_SEGMENT_MAX) {
        d->pack.segment_count = (int)sw_size_min(d->segment_count - first, SW_PACK_SEGMENT_MAX);
        memcpy(d->pack.segment, d->segments + first,
               (size_t)d->pack.segment_count * sizeof *d->segments);
        SW_TRY(sw_kernel_launch(&d->comm->kernels, SW_KERNEL_PACK, &d->pack, stream, err));
    }
    d->segment_count = 0;
    return SW_OK;
}

/* Add one segment: the elements at `from`, which may be `to` itself; NULL: zeros. */
static sw_status add_copy(device_rounds *d, const sw_bucket_pieces *to, const void *from,
                          sw_error *err)
{
    size_t element_bytes = sw_dtype_size_bytes(to->dtype), pieces = sw_pieces_count(to);
    sw_pack_segment made = {.to = to->data, .from = from, .size_bytes = to->numel * element_bytes};
    if (pieces > 1) {
        made.piece_count = pieces;
        made.piece_bytes = to->chunk * element_bytes;
        made.to_pitch = to->pitch * element_bytes;
        made.from_pitch = from == to->data ? made.to_pitch : made.piece_bytes;
    }
    if (d->segment_count == d->base.layout.param_count)
        SW_FAIL(err, SW_E_STATE, "reducer: a gradient is placed twice in one round");
    d->segments[d->segment_count++] = made;
    return SW_OK;
}

static sw_status device_write(sw_reducer *reducer, const sw_bucket_pieces *to, const void *from,
                              bool add, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (add)
        SW_FAIL(err, SW_E_STATE, "reducer: a gradient is placed twice in one round");
    return to->numel > 0 ? add_copy(d, to, from, err) : SW_OK;
}

static sw_status device_clear(sw_reducer *reducer, const sw_bucket_pieces *to, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (packs_behind_means(d) || to->numel > to->chunk) /* else each piece would need a fill */
        return to->numel > 0 ? add_copy(d, to, NULL, err) : SW_OK;
    size_t bytes = to->numel * sw_dtype_size_bytes(to->dtype);
    return to->numel > 0 ? d->device->ops->fill_async(d->device, to->data, 0, bytes, d->stream, err)
                         : SW_OK;
}

/* ---- streams ---- */

void sw_reducer_use_stream(sw_reducer *reducer, sw_stream *stream)
{
    device_of(reducer)->stream = stream;
}

/* Order later writes on the stream in use after the optimizer that reads the same memory. */
static sw_status arrive(device_rounds *d, sw_error *err)
{
    bool is_new;
    SW_TRY(sw_stream_set_add(&d->arrived, d->stream, &is_new, err));
    if (!is_new)
        return SW_OK;
    SW_TRY(release(d, err));
    SW_TRY(sw_device_refuse_capture(d->device, d->stream, "a backward", err));
    SW_TRY(d->device->ops->stream_wait(d->device, d->stream, d->consumed, err));
    if (d->is_begun)
        return SW_OK;
    SW_TRY(sw_device_comm_take_over(d->comm, d->stream, err));
    d->is_begun = true;
    d->held = NULL;
    return SW_OK;
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
    return sw_stream_set_add(&d->buckets[reducer->layout.place[param].bucket].producers, d->stream,
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
    d->segment_count = 0;
    d->packing = NULL;
    for (size_t b = 0; b < reducer->layout.bucket_count; ++b)
        d->buckets[b].producers.count = 0;
}

static sw_status device_keep(sw_reducer *reducer, bool *can, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    *can = d->sliced && !d->is_withdrawn && sw_device_mean_goes_by_rows(&d->mean);
    for (size_t b = 0; *can && b < reducer->layout.bucket_count; ++b) {
        size_t bytes = sw_bucket_bytes(reducer, b) / (size_t)reducer->slice_count;
        sw_error cause;
        if (d->buckets[b].data && !d->buckets[b].kept && bytes > 0 &&
            d->device->ops->memory_alloc(d->device, bytes, &d->buckets[b].kept, &cause) != SW_OK)
            SW_FAIL(err, cause.status, "no memory for a row's sum of %s: %s",
                    reducer->buckets[b].label, cause.message);
    }
    return SW_OK;
}

/* Copies into the bucket divide if its mean needs that. */
static void set_scale(device_rounds *d, const bucket *b)
{
    int dtype = (int)d->base.layout.bucket[b->index].dtype;
    d->pack.scale = d->base.owner == SW_BUCKETS_OURS
                        ? sw_device_mean_prescale(&d->mean, (sw_dtype)dtype)
                        : 1.0f;
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
        const sw_bucket_pieces at = sw_bucket_pieces_of(&d->base, param);
        if (!d->base.params[param].written && at.numel > 0)
            SW_TRY(add_copy(d, &at, at.data, err));
    }
    return SW_OK;
}

/* Let the streams that wrote gradients wait until PACK has read them. */
static sw_status await_pack(device_rounds *d, sw_error *err)
{
    const sw_stream_set *producers = d->packing;
    d->packing = NULL;
    for (size_t i = 0; producers && i < producers->count; ++i)
        SW_TRY(d->device->ops->stream_wait(d->device, producers->stream[i], d->packed, err));
    return SW_OK;
}

static sw_status device_reserve(sw_reducer *reducer, bucket *b, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    sw_stream_set *producers = &d->buckets[b->index].producers;
    bool is_new;
    set_scale(d, b);
    SW_TRY(await_pack(d, err));
    for (size_t i = 0; i < producers->count; ++i)
        if (producers->stream[i] != d->stream)
            SW_TRY(sw_device_comm_follow(d->comm, d->stream, producers->stream[i], err));
    if (!d->sliced)
        return SW_OK;
    if (!d->place)
        SW_FAIL(err, SW_E_STATE, "reducer: sliced buckets need a place, got none");
    return sw_stream_set_add(producers, d->stream, &is_new, err);
}

sw_status sw_reducer_lend_place(sw_reducer *reducer, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (!packs_behind_means(d))
        return SW_OK;
    return sw_device_comm_follow(d->comm, d->stream, d->comm->stream, err);
}

bool sw_reducer_reads_gradients(const sw_reducer *reducer)
{
    return reducer->ops == &device_rounds_ops && device_seen(reducer)->packing;
}

/* Copy the gradients behind the mean that leaves the place. */
static sw_status pack_behind_means(device_rounds *d, const bucket *b, sw_error *err)
{
    SW_TRY(sw_device_comm_follow(d->comm, d->comm->stream, d->stream, err));
    SW_TRY(launch_pack(d, d->comm->stream, err));
    SW_TRY(d->device->ops->event_record(d->device, d->packed, d->comm->stream, err));
    d->packing = &d->buckets[b->index].producers;
    return SW_OK;
}

static sw_status device_seal(sw_reducer *reducer, bucket *b, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    const sw_stream_set *producers = &d->buckets[b->index].producers;
    if (d->pack.converts)
        SW_TRY(divide_in_place(d, b, err));
    if (packs_behind_means(d))
        return pack_behind_means(d, b, err);
    SW_TRY(launch_pack(d, d->stream, err));
    for (size_t i = 0; i < producers->count; ++i)
        if (producers->stream[i] != d->stream)
            SW_TRY(sw_device_comm_follow(d->comm, producers->stream[i], d->stream, err));
    return SW_OK;
}

static sw_device_range whole_of(const device_rounds *d, const bucket *b)
{
    const sw_layout_bucket *shape = sw_bucket_shape(&d->base, b);
    return (sw_device_range){.data = d->sliced ? d->place : d->buckets[b->index].data,
                             .numel = shape->numel,
                             .dtype = shape->dtype};
}

/* Add what this rank's row has kept to its contribution. */
static sw_status add_kept(device_rounds *d, const bucket *b, sw_error *err)
{
    const device_bucket *own = &d->buckets[b->index];
    const sw_device_range whole = whole_of(d, b);
    size_t count =
        own->kept ? sw_device_runs_find(&d->base, b, &d->mean, &whole, true, d->runs) : 0;
    for (size_t i = 0; i < count; ++i)
        SW_TRY(sw_device_mean_add_kept(&d->mean, &whole, own->kept, d->runs[i], err));
    return SW_OK;
}

/* Enqueue the first half of a bucket's mean, which may be one call of a group. */
static sw_status start_mean(device_rounds *d, const bucket *b, sw_error *err)
{
    const sw_device_range whole = whole_of(d, b);
    if (d->base.stays_in_rows)
        return d->buckets[b->index].kept
                   ? sw_device_mean_of_row(&d->mean, &whole, d->buckets[b->index].kept, err)
                   : SW_OK;
    return d->sliced
               ? sw_device_mean_collect(&d->mean, &whole, d->buckets[b->index].data, &d->under, err)
               : sw_device_mean_whole(&d->mean, &whole, err);
}

/* Enqueue the second half and the events after it. */
static sw_status end_mean(device_rounds *d, const bucket *b, sw_error *err)
{
    const sw_device_range whole = whole_of(d, b);
    device_bucket *own = &d->buckets[b->index];
    if (d->sliced && !d->base.stays_in_rows)
        SW_TRY(sw_device_mean_complete(&d->mean, &whole, own->data, &d->under, err));
    return d->device->ops->event_record(d->device, own->done, d->comm->stream, err);
}

static sw_status device_post(sw_reducer *reducer, bucket *b, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    if (!d->sliced)
        SW_TRY(sw_device_comm_follow(d->comm, d->comm->stream, d->stream, err));
    SW_TRY(add_kept(d, b, err));
    const sw_device_range whole = whole_of(d, b);
    if (d->sliced)
        d->under = (sw_device_accumulated){
            .is_there = sw_device_runs_are_there(reducer, b),
            .runs = d->runs,
            .count = sw_device_runs_find(reducer, b, &d->mean, &whole, false, d->runs)};
    if (next_due(d, b->index + 1) == reducer->layout.bucket_count &&
        sw_device_mean_is_one_call(&d->mean, sw_bucket_shape(reducer, b)->dtype)) {
        d->held = b;
        return SW_OK;
    }
    SW_TRY(start_mean(d, b, err));
    return end_mean(d, b, err);
}

/* Byte i of a rank's message: it used gradient i. Its tag follows, each byte with its complement. A
 * rank that does not contribute has no tag and sends bytes below any other's. */
static unsigned char told_byte(const device_rounds *d, uint64_t tag, size_t i)
{
    size_t param_count = d->base.layout.param_count, k = i - param_count;
    if (i < param_count)
        return d->own[i];
    if (!d->base.contributes)
        return 0;
    return sw_round_tag_byte(tag, k);
}

/* Write the rank's use bytes and tag as arguments of a launch, so that no host memory must outlive
 * the call. Up to about 4,000 gradients need one launch. */
static sw_status write_use(device_rounds *d, uint64_t tag, sw_error *err)
{
    const size_t count = d->base.layout.param_count + SW_TAG_BYTES;
    for (size_t start = 0; start < count; start += SW_PUT_BYTES_MAX) {
        size_t taken = sw_size_min(count - start, SW_PUT_BYTES_MAX);
        sw_put_args put = {.to = (char *)d->used + start, .size_bytes = (int)taken};
        for (size_t i = 0; i < taken; ++i)
            put.byte[i] = told_byte(d, tag, start + i);
        SW_TRY(sw_kernel_launch(&d->comm->kernels, SW_KERNEL_PUT, &put, d->comm->stream, err));
    }
    return SW_OK;
}

static sw_status enqueue_use(device_rounds *d, sw_error *err)
{
    return sw_peers_all_reduce(d->comm->peers, d->used, d->base.layout.param_count + SW_TAG_BYTES,
                               SW_DTYPE_UINT8, SW_REDOP_MAX, d->comm->stream, err);
}

/* Enqueue the use bytes, in one group with the mean of the held bucket. */
static sw_status exchange_use(device_rounds *d, sw_error *err)
{
    const bucket *held = d->held;
    if (!held)
        return enqueue_use(d, err);
    SW_TRY(sw_peers_group_begin(d->comm->peers, err));
    sw_status status = start_mean(d, held, err);
    if (status == SW_OK)
        status = enqueue_use(d, err);
    /* Close the group even after an error; the thread's next group must be separate. */
    sw_status ended = sw_peers_group_end(d->comm->peers, status == SW_OK ? err : NULL);
    SW_TRY(status != SW_OK ? status : ended);
    d->held = NULL;
    return end_mean(d, held, err);
}

/* Send the tags of all ranks to the host, unless those of an earlier round are still in flight. */
static sw_status send_tags(device_rounds *d, uint64_t tag, sw_error *err)
{
    const sw_device_ops *ops = d->device->ops;
    if (d->is_told || !d->base.contributes)
        return SW_OK;
    SW_TRY(ops->copy_async(d->device, d->tags, (char *)d->used + d->base.layout.param_count,
                           SW_TAG_BYTES, d->comm->stream, err));
    SW_TRY(ops->event_record(d->device, d->told, d->comm->stream, err));
    d->is_told = true;
    d->tag = tag;
    return SW_OK;
}

/* Enqueue the exchange of use bytes and tags. Alone, or if this rank used all, the host needs no
 * other rank's: *any is its own bytes then. */
static sw_status exchange(device_rounds *d, const uint8_t **any, sw_error *err)
{
    const sw_device_ops *ops = d->device->ops;
    sw_stream *stream = d->comm->stream;
    const size_t param_count = d->base.layout.param_count;
    const uint64_t tag = sw_round_tag_next(&d->base, d->sliced);
    *any = d->own;
    if (d->base.world_size > 1) {
        SW_TRY(write_use(d, tag, err));
        SW_TRY(exchange_use(d, err));
        SW_TRY(send_tags(d, tag, err));
        if (memchr(d->own, 0, param_count)) {
            *any = d->any;
            SW_TRY(ops->copy_async(d->device, d->any, d->used, param_count, stream, err));
            SW_TRY(ops->event_record(d->device, d->gathered, stream, err));
        }
    }
    return sw_device_comm_mark(d->comm, err);
}

static sw_status device_finish(sw_reducer *reducer, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    const uint8_t *any;
    for (size_t i = 0; i < reducer->layout.param_count;
         ++i) /* use bits of frozen parameters are not read */
        d->own[i] = reducer->contributes && (reducer->params[i].used || reducer->params[i].kept ||
                                             !sw_reducer_takes_part(reducer, i));
    SW_TRY(exchange(d, &any, err));
    SW_TRY(await_pack(d, err));
    for (size_t b = 0; !d->is_withdrawn && b < reducer->layout.bucket_count; ++b)
        if (d->buckets[b].data)
            SW_TRY(d->device->ops->stream_wait(d->device, d->stream, d->buckets[b].done, err));
    SW_TRY(sw_device_comm_give_back(d->comm, d->stream, err));
    d->is_begun = false;
    d->is_finished = true;
    d->consumer = d->stream;
    if (any == d->any)
        SW_TRY(sw_peers_wait(d->comm->peers, d->gathered, "the exchange of use bytes", err));
    for (size_t i = 0; i < reducer->layout.param_count; ++i)
        reducer->params[i].used_by_any = sw_reducer_takes_part(reducer, i) && any[i];
    return SW_OK;
}

sw_status sw_reducer_check(sw_reducer *reducer, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    char what[64];
    bool is_there = false;
    snprintf(what, sizeof what, "a forward of %s", reducer->label);
    SW_TRY(sw_device_refuse_capture(d->device, d->stream, what, err));
    if (d->is_told)
        SW_TRY(d->device->ops->event_query(d->device, d->told, &is_there, err));
    if (!is_there)
        return SW_OK;
    d->is_told = false;
    return sw_round_tag_compare(reducer, d->tags, d->tag, d->sliced, err);
}

/* ---- ranks that ran out ---- */

sw_status sw_reducer_set_active(sw_reducer *reducer, const uint8_t *trains, sw_error *err)
{
    device_rounds *d = device_of(reducer);
    size_t active = 0;
    for (int k = 0; k < reducer->world_size; ++k)
        active += trains[k] != 0;
    if (active == 0)
        SW_FAIL(err, SW_E_INVALID, "reducer: at least one of %d ranks must train",
                reducer->world_size);
    if (d->sliced && !d->is_withdrawn)
        SW_TRY(sw_device_mean_leave_out(&d->mean, trains, err));
    d->mean.divisor = reducer->divide_by_active ? (int)active : reducer->world_size;
    d->active = active;
    return SW_OK;
}

static size_t device_active_ranks(const sw_reducer *reducer)
{
    return device_seen(reducer)->active;
}

static size_t device_accumulated_ranks(const sw_reducer *reducer, size_t param)
{
    return reducer->params[param].accumulated ? device_seen(reducer)->active : 0;
}

/* Return the bytes of buckets that take part or will; sliced, of this rank's slices and the place.
 */
static size_t device_planned_bytes(const sw_reducer *reducer)
{
    const device_rounds *d = device_seen(reducer);
    size_t total = 0, largest = 0;
    for (size_t b = 0; b < reducer->layout.bucket_count; ++b) {
        size_t bytes = sw_bucket_bytes(reducer, b);
        if (!reducer->buckets[b].takes_part && !reducer->layout.bucket[b].trainable)
            continue;
        total += bytes;
        largest = sw_size_max(largest, bytes);
    }
    return d->sliced ? total / (size_t)reducer->slice_count + largest : total;
}

static const sw_reducer_ops device_rounds_ops = {
    .traits = {.on_device = true, .places_late = true, .averages_unused = true},
    .open = device_open,
    .reserve = device_reserve,
    .address = device_address,
    .result = device_result,
    .write = device_write,
    .clear = device_clear,
    .seal = device_seal,
    .post = device_post,
    .finish = device_finish,
    .meet = device_finish,
    .active_ranks = device_active_ranks,
    .accumulated_ranks = device_accumulated_ranks,
    .keep = device_keep,
    .count_step = device_count_step,
    .planned_bytes = device_planned_bytes,
    .destroy = device_destroy,
};
