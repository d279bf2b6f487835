/* device_reducer.c - see device_reducer.h, whose table of events this file is. */
#include "reduce/device_reducer.h"

#include <stdlib.h>
#include <string.h>

/* A tag travels as its bytes and their complements, behind the use bytes: the greatest of each over
 * the ranks fit together if and only if all tags are equal. */
enum { TAG_BYTES = 2 * sizeof(uint64_t), TAG_GREATEST = 255 };

typedef enum phase {
    PHASE_IDLE = 0, /* released, or never begun */
    PHASE_OPEN,     /* begun: buckets are being posted */
    PHASE_FINISHED, /* the consumer reads */
} phase;

typedef struct device_bucket {
    void *data; /* borrowed; NULL: takes no part */
    size_t numel;
    sw_dtype dtype;
    sw_event *ready, *done; /* owned */
} device_bucket;

struct sw_device_reducer {
    sw_device_comm *comm; /* borrowed */
    sw_device *device;    /* the comm's */
    sw_redop op;
    bool sliced;
    int slice_count; /* of a bucket */
    int *piece;    /* owned, a number a rank: of the world_size pieces of a bucket, who folds it */
    int *owners;   /* owned: the ranks of this rank's slice, in the order of its pieces */
    sw_dtype wire; /* SW_DTYPE_COUNT: buckets travel as they are */
    void *compressed; /* owned device memory; only with `wire` */
    phase phase;
    size_t next;           /* bucket that is due */
    uint64_t steps;        /* begun */
    device_bucket *bucket; /* owned */
    size_t bucket_count;
    void *contributions;   /* owned device memory; only where the fold is ours, not NCCL's */
    size_t gradient_count; /* of use bytes */
    void *used;            /* owned device memory: use bytes */
    uint8_t *any;          /* owned, pinned: use bytes of all ranks, if `is_gathered` */
    uint8_t *own;          /* owned: this rank's use bytes, as finish() got them */
    bool is_gathered;      /* this step sends the use bytes of all ranks to the host */
    uint8_t *tags;         /* owned, pinned: of the step that `told` was recorded for */
    uint64_t tag;          /* this rank's of that step */
    bool is_told;          /* `told` was recorded, and not looked at */
    sw_event *consumed, *gathered, *told; /* owned */
    sw_event *left[SW_DEVICE_PLACES];     /* owned; only with `sliced` */
    size_t place;                         /* that is reserved, if `is_reserved` */
    bool is_reserved;
};

/* ---- life ---- */

static size_t bucket_bytes(const device_bucket *bucket)
{
    return bucket->numel * sw_dtype_size_bytes(bucket->dtype);
}

static sw_status check_config(const sw_device_reducer_config *config, sw_error *err)
{
    if (!config->comm->nccl)
        SW_FAIL(err, SW_E_STATE, "device reducer: the communicator is not connected");
    size_t world_size = (size_t)sw_nccl_world_size(config->comm->nccl);
    if (config->op != SW_REDOP_MEAN && config->op != SW_REDOP_SUM)
        SW_FAIL(err, SW_E_INVALID, "device reducer: op must be mean or sum, not %d",
                (int)config->op);
    if (config->wire != SW_DTYPE_COUNT &&
        ((config->wire != SW_DTYPE_FLOAT16 && config->wire != SW_DTYPE_BFLOAT16) ||
         config->sliced || config->op != SW_REDOP_MEAN))
        SW_FAIL(err, SW_E_INVALID,
                "device reducer: wire must be float16 or bfloat16, for a mean that is not sliced, "
                "not %s",
                sw_dtype_name(config->wire));
    for (size_t b = 0; b < config->bucket_count; ++b) {
        const sw_device_bucket_spec *spec = &config->buckets[b];
        if (spec->numel % world_size != 0)
            SW_FAIL(err, SW_E_INVALID,
                    "device reducer: numel of bucket %zu must be a multiple of world_size %zu, not "
                    "%zu",
                    b, world_size, spec->numel);
        if (spec->data)
            SW_TRY(sw_redop_check(config->op, spec->dtype, err));
    }
    return SW_OK;
}

static sw_status create_buckets(sw_device_reducer *r, const sw_device_reducer_config *config,
                                sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    bool is_compressed = config->wire != SW_DTYPE_COUNT;
    bool is_shared = r->slice_count < sw_nccl_world_size(r->comm->nccl);
    bool is_ours = config->deterministic || is_compressed || is_shared ||
                   (config->sliced && config->op == SW_REDOP_SUM);
    size_t largest = 0, most = 0;
    for (size_t b = 0; b < r->bucket_count; ++b) {
        device_bucket *bucket = &r->bucket[b];
        bucket->data = config->buckets[b].data;
        bucket->numel = config->buckets[b].numel;
        bucket->dtype = config->buckets[b].dtype;
        size_t bytes = bucket_bytes(bucket);
        largest = bytes > largest ? bytes : largest;
        most = bucket->numel > most ? bucket->numel : most;
        SW_TRY(ops->event_create(r->device, &bucket->ready, err));
        SW_TRY(ops->event_create(r->device, &bucket->done, err));
    }
    for (int p = 0; r->sliced && p < SW_DEVICE_PLACES; ++p)
        SW_TRY(ops->event_create(r->device, &r->left[p], err));
    if (is_compressed)
        SW_TRY(
            ops->memory_alloc(r->device, most * sw_dtype_size_bytes(r->wire), &r->compressed, err));
    return is_ours ? ops->memory_alloc(r->device, largest, &r->contributions, err) : SW_OK;
}

/* Slice s of a bucket is pieces s * replicas and those behind it, one for each of its owners. */
static sw_status create_pieces(sw_device_reducer *r, const sw_slices *slices, sw_error *err)
{
    int world_size = sw_nccl_world_size(r->comm->nccl), rank = sw_nccl_rank(r->comm->nccl);
    r->slice_count = slices ? slices->count : world_size;
    int replicas = world_size / r->slice_count;
    r->piece = calloc((size_t)world_size, sizeof *r->piece);
    r->owners = calloc((size_t)replicas, sizeof *r->owners);
    if (!r->piece || !r->owners)
        SW_FAIL(err, SW_E_MEMORY, "device reducer: no memory for %d ranks", world_size);
    for (int k = 0; k < world_size; ++k)
        r->piece[k] = slices ? slices->of_rank[k] * replicas + slices->replica_of_rank[k] : k;
    for (int k = 0; k < world_size; ++k)
        if (r->piece[k] / replicas == r->piece[rank] / replicas)
            r->owners[r->piece[k] % replicas] = k;
    return SW_OK;
}

static sw_status create_all(sw_device_reducer *r, const sw_device_reducer_config *config,
                            sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    void *pinned;
    SW_TRY(create_pieces(r, config->slices, err));
    r->bucket = calloc(config->bucket_count ? config->bucket_count : 1, sizeof *r->bucket);
    if (!r->bucket)
        SW_FAIL(err, SW_E_MEMORY, "device reducer: no memory for %zu buckets",
                config->bucket_count);
    r->bucket_count = config->bucket_count;
    SW_TRY(ops->event_create(r->device, &r->consumed, err));
    SW_TRY(ops->event_create(r->device, &r->gathered, err));
    SW_TRY(ops->event_create(r->device, &r->told, err));
    SW_TRY(create_buckets(r, config, err));
    SW_TRY(ops->memory_alloc(r->device, r->gradient_count + TAG_BYTES, &r->used, err));
    SW_TRY(ops->pinned_alloc(r->device, TAG_BYTES, &pinned, err));
    r->tags = pinned;
    SW_TRY(ops->pinned_alloc(r->device, r->gradient_count, &pinned, err));
    r->any = pinned;
    r->own = calloc(r->gradient_count + 1, 1);
    if (!r->own)
        SW_FAIL(err, SW_E_MEMORY, "device reducer: no memory for %zu use bytes", r->gradient_count);
    return SW_OK;
}

sw_status sw_device_reducer_create(const sw_device_reducer_config *config,
                                   sw_device_reducer **reducer, sw_error *err)
{
    SW_TRY(check_config(config, err));
    sw_device_reducer *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "device reducer: no memory for %zu bytes", sizeof *made);
    *made = (sw_device_reducer){.comm = config->comm,
                                .device = config->comm->device,
                                .op = config->op,
                                .sliced = config->sliced,
                                .wire = config->wire,
                                .gradient_count = config->gradient_count};
    sw_status status = create_all(made, config, err);
    if (status != SW_OK) {
        sw_device_reducer_destroy(made);
        return status;
    }
    *reducer = made;
    return SW_OK;
}

/* Everything that reads or writes our memory is behind one of these streams' ends. What fails here
 * failed before, and was reported then. */
static void wait_for_all(sw_device_reducer *r)
{
    const sw_device_ops *ops = r->device->ops;
    int64_t timeout_ns = r->comm->timeout_ns;
    if (!r->gathered)
        return;
    if (r->consumed)
        (void)ops->event_wait(r->device, r->consumed, timeout_ns, "the optimizer", NULL);
    if (ops->event_record(r->device, r->gathered, r->comm->stream, NULL) == SW_OK)
        (void)ops->event_wait(r->device, r->gathered, timeout_ns, "the comm stream", NULL);
}

void sw_device_reducer_destroy(sw_device_reducer *r)
{
    if (!r)
        return;
    const sw_device_ops *ops = r->device->ops;
    wait_for_all(r);
    for (size_t b = 0; b < r->bucket_count; ++b) {
        ops->event_destroy(r->device, r->bucket[b].ready);
        ops->event_destroy(r->device, r->bucket[b].done);
    }
    ops->memory_free(r->device, r->contributions);
    ops->memory_free(r->device, r->compressed);
    ops->memory_free(r->device, r->used);
    ops->pinned_free(r->device, r->any);
    ops->pinned_free(r->device, r->tags);
    for (int p = 0; p < SW_DEVICE_PLACES; ++p)
        ops->event_destroy(r->device, r->left[p]);
    ops->event_destroy(r->device, r->told);
    ops->event_destroy(r->device, r->consumed);
    ops->event_destroy(r->device, r->gathered);
    free(r->own);
    free(r->piece);
    free(r->owners);
    free(r->bucket);
    free(r);
}

sw_status sw_device_reducer_adopt(sw_device_reducer *r, size_t index, void *data, sw_error *err)
{
    if (r->phase == PHASE_OPEN || index >= r->bucket_count || r->bucket[index].data)
        SW_FAIL(err, SW_E_STATE, "device reducer: bucket %zu of %zu cannot be adopted %s", index,
                r->bucket_count, r->phase == PHASE_OPEN ? "inside a step" : "again");
    SW_TRY(sw_redop_check(r->op, r->bucket[index].dtype, err));
    r->bucket[index].data = data;
    return SW_OK;
}

bool sw_device_reducer_takes_part(const sw_device_reducer *r, size_t index)
{
    return index < r->bucket_count && r->bucket[index].data;
}

/* ---- a step ---- */

/* The first bucket at or after `from` that takes part. */
static size_t next_due(const sw_device_reducer *r, size_t from)
{
    while (from < r->bucket_count && !r->bucket[from].data)
        ++from;
    return from;
}

sw_status sw_device_reducer_begin(sw_device_reducer *r, sw_stream *producer, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    bool capturing;
    if (r->phase == PHASE_FINISHED)
        SW_FAIL(err, SW_E_STATE,
                "device reducer: begin of step %llu before release of the step before",
                (unsigned long long)r->steps);
    SW_TRY(ops->stream_is_capturing(r->device, producer, &capturing, err));
    if (capturing)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "device reducer: the stream is being captured into a CUDA graph, which is not "
                "supported; run the step outside of the capture");
    /* The optimizer of the step before has read the buckets that are written now. */
    SW_TRY(ops->stream_wait(r->device, producer, r->consumed, err));
    if (r->phase == PHASE_OPEN)
        return SW_OK;
    r->phase = PHASE_OPEN;
    r->next = next_due(r, 0);
    r->steps++;
    return SW_OK;
}

static size_t slice_numel(const sw_device_reducer *r, const device_bucket *bucket)
{
    return bucket->numel / (size_t)r->slice_count;
}

/* What a rank folds: a slice, or a part of one that has several owners. */
static size_t piece_numel(const sw_device_reducer *r, const device_bucket *bucket)
{
    return bucket->numel / (size_t)sw_nccl_world_size(r->comm->nccl);
}

/* What turns this rank's piece of the bucket in `data` into the mean in `to`: out of the pieces
 * that were exchanged, or, where NCCL has reduced them, out of that one. */
static sw_fold_args fold_of(const sw_device_reducer *r, const device_bucket *bucket, sw_redop op,
                            void *data, void *to)
{
    int rank = sw_nccl_rank(r->comm->nccl), world_size = sw_nccl_world_size(r->comm->nccl);
    size_t piece_bytes = piece_numel(r, bucket) * sw_dtype_size_bytes(bucket->dtype);
    bool is_ours = r->contributions;
    return (sw_fold_args){.to = to,
                          .own = (char *)data + (size_t)r->piece[rank] * piece_bytes,
                          .rest = r->contributions,
                          .numel = piece_numel(r, bucket),
                          .stride_bytes = piece_bytes,
                          .scale = 1.0 / world_size,
                          .dtype = (int)bucket->dtype,
                          .op = is_ours ? (int)op : (int)SW_REDOP_SUM,
                          .own_index = is_ours ? rank : 0,
                          .source_count = is_ours ? world_size : 1};
}

/* The fold in rank order, on the comm stream: exchange slices, fold the own one, gather. */
static sw_status reduce_in_rank_order(sw_device_reducer *r, const device_bucket *bucket,
                                      sw_redop op, sw_error *err)
{
    sw_nccl *nccl = r->comm->nccl;
    sw_stream *stream = r->comm->stream;
    size_t numel = slice_numel(r, bucket);
    char *own = (char *)bucket->data +
                (size_t)sw_nccl_rank(nccl) * numel * sw_dtype_size_bytes(bucket->dtype);
    sw_fold_args fold = fold_of(r, bucket, op, bucket->data, own);
    SW_TRY(sw_nccl_exchange_slices(nccl, bucket->data, r->contributions, numel, bucket->dtype, NULL,
                                   stream, err));
    SW_TRY(sw_kernel_launch(&r->comm->kernels, SW_KERNEL_FOLD, &fold, stream, err));
    return sw_nccl_all_gather(nccl, bucket->data, numel, bucket->dtype, stream, err);
}

static bool is_narrow(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT32 || dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

/* Divided and rounded, summed in rank order, widened: all on the comm stream. */
static sw_status reduce_compressed(sw_device_reducer *r, const device_bucket *bucket, sw_error *err)
{
    const sw_kernel_set *kernels = &r->comm->kernels;
    device_bucket wire = {.data = r->compressed, .numel = bucket->numel, .dtype = r->wire};
    sw_cast_args narrow = {.to = wire.data,
                           .from = bucket->data,
                           .numel = bucket->numel,
                           .scale = (float)(1.0 / sw_nccl_world_size(r->comm->nccl)),
                           .to_dtype = (int)wire.dtype,
                           .from_dtype = (int)bucket->dtype};
    sw_cast_args widen = {.to = bucket->data,
                          .from = wire.data,
                          .numel = bucket->numel,
                          .scale = 1.0f,
                          .to_dtype = (int)bucket->dtype,
                          .from_dtype = (int)wire.dtype};
    SW_TRY(sw_kernel_launch(kernels, SW_KERNEL_CAST, &narrow, r->comm->stream, err));
    SW_TRY(reduce_in_rank_order(r, &wire, SW_REDOP_SUM, err));
    return sw_kernel_launch(kernels, SW_KERNEL_CAST, &widen, r->comm->stream, err);
}

/* `fold` of [begin, end) alone. */
static sw_status fold_run(sw_device_reducer *r, sw_fold_args fold, size_t begin, size_t end,
                          bool is_standing, sw_error *err)
{
    size_t offset = begin * sw_dtype_size_bytes((sw_dtype)fold.dtype);
    if (begin >= end)
        return SW_OK;
    fold.to = (char *)fold.to + offset;
    fold.own = (const char *)fold.own + offset;
    fold.rest = fold.rest ? (const char *)fold.rest + offset : NULL;
    fold.numel = end - begin;
    fold.addend = is_standing ? fold.to : NULL;
    return sw_kernel_launch(&r->comm->kernels, SW_KERNEL_FOLD, &fold, r->comm->stream, err);
}

/* Of [begin, begin + numel), where `at` lies; its ends otherwise. From `begin`. */
static size_t place_within(size_t at, size_t begin, size_t numel)
{
    return at < begin ? 0 : at - begin < numel ? at - begin : numel;
}

static sw_status reduce_to_slice(sw_device_reducer *r, const device_bucket *bucket, void *data,
                                 const sw_device_run *standing, size_t standing_count,
                                 sw_error *err)
{
    sw_nccl *nccl = r->comm->nccl;
    sw_stream *stream = r->comm->stream;
    int owner_count = sw_nccl_world_size(nccl) / r->slice_count;
    size_t numel = piece_numel(r, bucket), element_bytes = sw_dtype_size_bytes(bucket->dtype);
    size_t first = (size_t)(r->piece[sw_nccl_rank(nccl)] % owner_count) * numel, at = 0;
    char *to = (char *)bucket->data + first * element_bytes;
    sw_fold_args fold = fold_of(r, bucket, r->op, data, to);
    if (r->contributions)
        SW_TRY(sw_nccl_exchange_slices(nccl, data, r->contributions, numel, bucket->dtype, r->piece,
                                       stream, err));
    else
        SW_TRY(sw_nccl_reduce_scatter(nccl, data, numel, bucket->dtype, r->op, stream, err));
    for (size_t i = 0; i < standing_count; ++i) {
        size_t begin = place_within(standing[i].begin, first, numel);
        size_t end = place_within(standing[i].end, first, numel);
        SW_TRY(fold_run(r, fold, at, begin, false, err));
        SW_TRY(fold_run(r, fold, begin, end, true, err));
        at = end;
    }
    SW_TRY(fold_run(r, fold, at, numel, false, err));
    return sw_nccl_gather_among(nccl, bucket->data, numel * element_bytes, r->owners, owner_count,
                                stream, err);
}

static sw_status check_due(const sw_device_reducer *r, size_t index, bool is_slice, sw_error *err)
{
    if (r->phase != PHASE_OPEN || index != r->next || index >= r->bucket_count)
        SW_FAIL(err, SW_E_STATE,
                "device reducer: post of bucket %zu, but %s; buckets go in order, 0 to %zu", index,
                r->phase != PHASE_OPEN ? "no step was begun" : "another is due",
                r->bucket_count ? r->bucket_count - 1 : 0);
    if (r->sliced != is_slice || r->is_reserved != is_slice)
        SW_FAIL(err, SW_E_STATE, "device reducer: post of bucket %zu, but %s", index,
                r->sliced ? "buckets are sliced: reserve a place, and post the slice"
                          : "buckets are not sliced");
    return SW_OK;
}

/* The comm stream comes to the bucket after what `producer` was given. */
static sw_status meet(sw_device_reducer *r, const device_bucket *bucket, sw_stream *producer,
                      sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    SW_TRY(ops->event_record(r->device, bucket->ready, producer, err));
    return ops->stream_wait(r->device, r->comm->stream, bucket->ready, err);
}

sw_status sw_device_reducer_post(sw_device_reducer *r, size_t index, sw_stream *producer,
                                 sw_error *err)
{
    SW_TRY(check_due(r, index, false, err));
    device_bucket *bucket = &r->bucket[index];
    SW_TRY(meet(r, bucket, producer, err));
    if (r->wire != SW_DTYPE_COUNT && is_narrow(bucket->dtype))
        SW_TRY(reduce_compressed(r, bucket, err));
    else if (r->contributions)
        SW_TRY(reduce_in_rank_order(r, bucket, r->op, err));
    else
        SW_TRY(sw_nccl_all_reduce(r->comm->nccl, bucket->data, bucket->numel, bucket->dtype, r->op,
                                  r->comm->stream, err));
    SW_TRY(r->device->ops->event_record(r->device, bucket->done, r->comm->stream, err));
    r->next = next_due(r, index + 1);
    return SW_OK;
}

sw_status sw_device_reducer_reserve(sw_device_reducer *r, size_t place, sw_stream *producer,
                                    sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    if (place >= SW_DEVICE_PLACES)
        SW_FAIL(err, SW_E_INVALID, "device reducer: place must be in [0, %d), not %zu",
                SW_DEVICE_PLACES, place);
    if (!r->sliced || r->is_reserved || r->phase != PHASE_OPEN || r->next >= r->bucket_count)
        SW_FAIL(err, SW_E_STATE, "device reducer: a place was reserved %s",
                !r->sliced ? "where buckets are not sliced"
                           : (r->is_reserved ? "twice" : "when no bucket is due"));
    /* The bucket that lay there has been averaged. */
    SW_TRY(ops->stream_wait(r->device, producer, r->left[place], err));
    r->is_reserved = true;
    r->place = place;
    return SW_OK;
}

sw_status sw_device_reducer_post_slice(sw_device_reducer *r, size_t index, void *data,
                                       const sw_device_run *standing, size_t standing_count,
                                       sw_stream *producer, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    SW_TRY(check_due(r, index, true, err));
    device_bucket *bucket = &r->bucket[index];
    for (size_t i = 0, least = 0; i < standing_count; least = standing[i++].end)
        if (standing[i].begin < least || standing[i].end < standing[i].begin ||
            standing[i].end > slice_numel(r, bucket))
            SW_FAIL(err, SW_E_INVALID,
                    "device reducer: standing run %zu of bucket %zu, [%zu, %zu), must be behind "
                    "the one before, in a slice of %zu elements",
                    i, index, standing[i].begin, standing[i].end, slice_numel(r, bucket));
    SW_TRY(meet(r, bucket, producer, err));
    SW_TRY(reduce_to_slice(r, bucket, data, standing, standing_count, err));
    SW_TRY(ops->event_record(r->device, bucket->done, r->comm->stream, err));
    SW_TRY(ops->event_record(r->device, r->left[r->place], r->comm->stream, err));
    r->is_reserved = false;
    r->next = next_due(r, index + 1);
    return SW_OK;
}

sw_status sw_device_reducer_take(sw_device_reducer *r, size_t index, sw_stream *consumer,
                                 sw_error *err)
{
    if (r->phase == PHASE_IDLE || index >= r->next || !r->bucket[index].data)
        SW_FAIL(err, SW_E_STATE,
                "device reducer: take of bucket %zu, which was not posted in this "
                "step",
                index);
    return r->device->ops->stream_wait(r->device, consumer, r->bucket[index].done, err);
}

/* The first gradient at or after `from` of which used[i] is not 0 is `value`. */
static size_t find_use(const sw_device_reducer *r, const uint8_t *used, size_t from, bool value)
{
    while (from < r->gradient_count && (used[from] != 0) != value)
        ++from;
    return from;
}

/* The rank's use bytes and tag, by fills: no host memory has to outlive the call. */
static sw_status write_use(sw_device_reducer *r, const uint8_t *used, uint64_t tag, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    sw_stream *stream = r->comm->stream;
    SW_TRY(ops->fill_async(r->device, r->used, 1, r->gradient_count, stream, err));
    for (size_t i = find_use(r, used, 0, false); i < r->gradient_count;) {
        size_t end = find_use(r, used, i, true);
        SW_TRY(ops->fill_async(r->device, (char *)r->used + i, 0, end - i, stream, err));
        i = find_use(r, used, end, false);
    }
    for (size_t k = 0; k < TAG_BYTES; ++k) {
        unsigned char part = (unsigned char)(tag >> 8 * (k / 2));
        SW_TRY(ops->fill_async(r->device, (char *)r->used + r->gradient_count + k,
                               k % 2 ? (unsigned char)(TAG_GREATEST - part) : part, 1, stream,
                               err));
    }
    return SW_OK;
}

/* The tags of all ranks go to the host, unless those of an earlier step are still on their way. */
static sw_status send_tags(sw_device_reducer *r, uint64_t tag, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    if (r->is_told)
        return SW_OK;
    SW_TRY(ops->copy_async(r->device, r->tags, (char *)r->used + r->gradient_count, TAG_BYTES,
                           r->comm->stream, err));
    SW_TRY(ops->event_record(r->device, r->told, r->comm->stream, err));
    r->is_told = true;
    r->tag = tag;
    return SW_OK;
}

sw_status sw_device_reducer_check(sw_device_reducer *r, uint64_t *tag, uint64_t *unlike,
                                  sw_error *err)
{
    bool is_there = false;
    uint64_t differ = 0;
    if (!r->is_told)
        return SW_OK;
    SW_TRY(r->device->ops->event_query(r->device, r->told, &is_there, err));
    if (!is_there)
        return SW_OK;
    r->is_told = false;
    for (size_t k = 0; k < TAG_BYTES; k += 2)
        if (r->tags[k] + r->tags[k + 1] != TAG_GREATEST)
            differ |= (uint64_t)TAG_GREATEST << 8 * (k / 2);
    if (!differ)
        return SW_OK;
    *tag = r->tag;
    *unlike = differ;
    SW_FAIL(err, SW_E_MISMATCH,
            "device reducer: ranks finished a step with different tags, this "
            "one with %#llx",
            (unsigned long long)r->tag);
}

sw_status sw_device_reducer_finish(sw_device_reducer *r, const uint8_t *used, uint64_t tag,
                                   sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    sw_stream *stream = r->comm->stream;
    if (r->phase != PHASE_OPEN || r->next != r->bucket_count)
        SW_FAIL(err, SW_E_STATE, "device reducer: finish, but bucket %zu of %zu is due", r->next,
                r->bucket_count);
    bool is_alone = sw_nccl_world_size(r->comm->nccl) == 1;
    r->is_gathered = !is_alone && find_use(r, used, 0, false) < r->gradient_count;
    memcpy(r->own, used, r->gradient_count);
    if (!is_alone) {
        SW_TRY(write_use(r, used, tag, err));
        SW_TRY(sw_nccl_all_reduce(r->comm->nccl, r->used, r->gradient_count + TAG_BYTES,
                                  SW_DTYPE_UINT8, SW_REDOP_MAX, stream, err));
        SW_TRY(send_tags(r, tag, err));
    }
    if (r->is_gathered) {
        SW_TRY(ops->copy_async(r->device, r->any, r->used, r->gradient_count, stream, err));
        SW_TRY(ops->event_record(r->device, r->gathered, stream, err));
    }
    SW_TRY(sw_device_comm_mark(r->comm, err));
    r->phase = PHASE_FINISHED;
    return SW_OK;
}

sw_status sw_device_reducer_used_by_any(sw_device_reducer *r, const uint8_t **any, sw_error *err)
{
    if (r->phase == PHASE_OPEN || r->steps == 0)
        SW_FAIL(err, SW_E_STATE, "device reducer: use bytes of a step that was not finished");
    if (r->is_gathered)
        SW_TRY(sw_nccl_wait(r->comm->nccl, r->gathered, "the exchange of use bytes", err));
    *any = r->is_gathered ? r->any : r->own; /* what this rank used, some rank used */
    return SW_OK;
}

sw_status sw_device_reducer_release(sw_device_reducer *r, sw_stream *consumer, sw_error *err)
{
    if (r->phase != PHASE_FINISHED)
        SW_FAIL(err, SW_E_STATE, "device reducer: release of a step that was not finished");
    SW_TRY(r->device->ops->event_record(r->device, r->consumed, consumer, err));
    r->phase = PHASE_IDLE;
    return SW_OK;
}
