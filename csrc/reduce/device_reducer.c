/* device_reducer.c - see device_reducer.h, whose table of events this file is. */
#include "reduce/device_reducer.h"

#include <stdlib.h>

enum { SLOT_COUNT = 2 };

typedef enum phase {
    PHASE_IDLE = 0, /* released, or never begun */
    PHASE_OPEN,     /* begun: buckets are being posted */
    PHASE_FINISHED, /* the consumer reads */
} phase;

typedef struct device_bucket {
    void *data; /* owned device memory */
    size_t numel;
    sw_dtype dtype;
    sw_event *ready, *done; /* owned */
} device_bucket;

typedef struct staged_sum {
    sw_norm_sum *pinned; /* owned */
    sw_event *copied;    /* owned */
    bool carried;
} staged_sum;

struct sw_device_reducer {
    sw_device *device;
    const sw_kernel_set *kernels;
    sw_nccl *comm;
    bool deterministic;
    int64_t timeout_ns;
    phase phase;
    size_t next;           /* bucket that is due */
    uint64_t steps;        /* finished */
    device_bucket *bucket; /* owned */
    size_t bucket_count;
    void *contributions; /* owned device memory; only with deterministic */
    void *sum;           /* owned device memory: sw_norm_sum of this step */
    staged_sum slot[SLOT_COUNT];
    sw_stream *comm_stream, *copy_stream; /* owned */
    sw_event *consumed, *summed;          /* owned */
};

/* ---- life ---- */

static size_t bucket_bytes(const device_bucket *bucket)
{
    return bucket->numel * sw_dtype_size_bytes(bucket->dtype);
}

static sw_status check_config(const sw_device_reducer_config *config, sw_error *err)
{
    size_t world_size = (size_t)sw_nccl_world_size(config->comm);
    for (size_t b = 0; b < config->bucket_count; ++b) {
        const sw_device_bucket_spec *spec = &config->buckets[b];
        if (spec->numel % world_size != 0)
            SW_FAIL(err, SW_E_INVALID,
                    "device reducer: numel of bucket %zu must be a multiple of world_size %zu, not "
                    "%zu",
                    b, world_size, spec->numel);
        SW_TRY(sw_redop_check(SW_REDOP_MEAN, spec->dtype, err));
        if (spec->dtype == SW_DTYPE_COMPLEX64 || spec->dtype == SW_DTYPE_COMPLEX128)
            SW_FAIL(err, SW_E_UNSUPPORTED,
                    "device reducer: dtype of bucket %zu is %s, which has no "
                    "sum of squares here yet",
                    b, sw_dtype_name(spec->dtype));
    }
    return SW_OK;
}

static sw_status create_buckets(sw_device_reducer *r, const sw_device_reducer_config *config,
                                sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    size_t largest = 0;
    for (size_t b = 0; b < r->bucket_count; ++b) {
        device_bucket *bucket = &r->bucket[b];
        bucket->numel = config->buckets[b].numel;
        bucket->dtype = config->buckets[b].dtype;
        size_t bytes = bucket_bytes(bucket);
        largest = bytes > largest ? bytes : largest;
        SW_TRY(ops->memory_alloc(r->device, bytes, &bucket->data, err));
        SW_TRY(ops->event_create(r->device, &bucket->ready, err));
        SW_TRY(ops->event_create(r->device, &bucket->done, err));
        SW_TRY(ops->fill_async(r->device, bucket->data, 0, bytes, r->comm_stream, err));
    }
    if (r->deterministic)
        SW_TRY(ops->memory_alloc(r->device, largest, &r->contributions, err));
    return SW_OK;
}

static sw_status create_sums(sw_device_reducer *r, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    SW_TRY(ops->memory_alloc(r->device, sizeof(sw_norm_sum), &r->sum, err));
    for (int s = 0; s < SLOT_COUNT; ++s) {
        void *pinned;
        SW_TRY(ops->pinned_alloc(r->device, sizeof(sw_norm_sum), &pinned, err));
        r->slot[s].pinned = pinned;
        SW_TRY(ops->event_create(r->device, &r->slot[s].copied, err));
    }
    return ops->event_create(r->device, &r->summed, err);
}

static sw_status create_all(sw_device_reducer *r, const sw_device_reducer_config *config,
                            sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    r->bucket = calloc(config->bucket_count ? config->bucket_count : 1, sizeof *r->bucket);
    if (!r->bucket)
        SW_FAIL(err, SW_E_MEMORY, "device reducer: no memory for %zu buckets",
                config->bucket_count);
    r->bucket_count = config->bucket_count;
    SW_TRY(ops->stream_create(r->device, true, &r->comm_stream, err));
    SW_TRY(ops->stream_create(r->device, false, &r->copy_stream, err));
    SW_TRY(ops->event_create(r->device, &r->consumed, err));
    SW_TRY(create_buckets(r, config, err));
    SW_TRY(create_sums(r, err));
    /* The first producer waits for the zeros as it later waits for the optimizer. */
    return ops->event_record(r->device, r->consumed, r->comm_stream, err);
}

sw_status sw_device_reducer_create(const sw_device_reducer_config *config,
                                   sw_device_reducer **reducer, sw_error *err)
{
    SW_TRY(check_config(config, err));
    sw_device_reducer *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "device reducer: no memory for %zu bytes", sizeof *made);
    *made = (sw_device_reducer){.device = config->device,
                                .kernels = config->kernels,
                                .comm = config->comm,
                                .deterministic = config->deterministic,
                                .timeout_ns = config->timeout_ns};
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
    if (!r->summed)
        return;
    if (r->consumed)
        (void)ops->event_wait(r->device, r->consumed, r->timeout_ns, "the optimizer", NULL);
    if (ops->event_record(r->device, r->summed, r->comm_stream, NULL) == SW_OK)
        (void)ops->event_wait(r->device, r->summed, r->timeout_ns, "the comm stream", NULL);
    if (ops->event_record(r->device, r->summed, r->copy_stream, NULL) == SW_OK)
        (void)ops->event_wait(r->device, r->summed, r->timeout_ns, "the copy stream", NULL);
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
        ops->memory_free(r->device, r->bucket[b].data);
    }
    for (int s = 0; s < SLOT_COUNT; ++s) {
        ops->event_destroy(r->device, r->slot[s].copied);
        ops->pinned_free(r->device, r->slot[s].pinned);
    }
    ops->memory_free(r->device, r->contributions);
    ops->memory_free(r->device, r->sum);
    ops->event_destroy(r->device, r->consumed);
    ops->event_destroy(r->device, r->summed);
    ops->stream_destroy(r->device, r->comm_stream);
    ops->stream_destroy(r->device, r->copy_stream);
    free(r->bucket);
    free(r);
}

void *sw_device_reducer_bucket(const sw_device_reducer *r, size_t index)
{
    return r->bucket[index].data;
}

/* ---- a step ---- */

static staged_sum *slot_of(sw_device_reducer *r, uint64_t step)
{
    return &r->slot[step % SLOT_COUNT];
}

/* Once a step, before its first bucket: the sum is zero again. */
static sw_status open_step(sw_device_reducer *r, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    if (r->steps > 0) /* the sum of the step before has left */
        SW_TRY(ops->stream_wait(r->device, r->comm_stream, slot_of(r, r->steps - 1)->copied, err));
    SW_TRY(ops->fill_async(r->device, r->sum, 0, sizeof(sw_norm_sum), r->comm_stream, err));
    r->phase = PHASE_OPEN;
    r->next = 0;
    return SW_OK;
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
    return r->phase == PHASE_OPEN ? SW_OK : open_step(r, err);
}

/* The fold in rank order, on the comm stream: exchange slices, fold the own one, gather. */
static sw_status reduce_in_rank_order(sw_device_reducer *r, const device_bucket *bucket,
                                      sw_error *err)
{
    int rank = sw_nccl_rank(r->comm), world_size = sw_nccl_world_size(r->comm);
    size_t slice_numel = bucket->numel / (size_t)world_size;
    size_t slice_bytes = slice_numel * sw_dtype_size_bytes(bucket->dtype);
    char *own = (char *)bucket->data + (size_t)rank * slice_bytes;
    sw_fold_args fold = {.to = own,
                         .own = own,
                         .rest = r->contributions,
                         .numel = slice_numel,
                         .stride_bytes = slice_bytes,
                         .scale = 1.0 / world_size,
                         .dtype = (int)bucket->dtype,
                         .op = (int)SW_REDOP_MEAN,
                         .own_index = rank,
                         .source_count = world_size};
    SW_TRY(sw_nccl_exchange_slices(r->comm, bucket->data, r->contributions, slice_numel,
                                   bucket->dtype, r->comm_stream, err));
    SW_TRY(sw_kernel_launch(r->kernels, SW_KERNEL_FOLD, &fold, r->comm_stream, err));
    return sw_nccl_all_gather(r->comm, bucket->data, slice_numel, bucket->dtype, r->comm_stream,
                              err);
}

static sw_status add_to_sum(sw_device_reducer *r, const device_bucket *bucket, sw_error *err)
{
    sw_norm_args norm = {
        .sum = r->sum, .data = bucket->data, .numel = bucket->numel, .dtype = (int)bucket->dtype};
    return sw_kernel_launch(r->kernels, SW_KERNEL_NORM, &norm, r->comm_stream, err);
}

sw_status sw_device_reducer_post(sw_device_reducer *r, size_t index, sw_stream *producer,
                                 sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    if (r->phase != PHASE_OPEN || index != r->next || index >= r->bucket_count)
        SW_FAIL(err, SW_E_STATE,
                "device reducer: post of bucket %zu, but %s; buckets go in order, 0 to %zu", index,
                r->phase != PHASE_OPEN ? "no step was begun" : "another is due",
                r->bucket_count ? r->bucket_count - 1 : 0);
    device_bucket *bucket = &r->bucket[index];
    SW_TRY(ops->event_record(r->device, bucket->ready, producer, err));
    SW_TRY(ops->stream_wait(r->device, r->comm_stream, bucket->ready, err));
    if (r->deterministic)
        SW_TRY(reduce_in_rank_order(r, bucket, err));
    else
        SW_TRY(sw_nccl_all_reduce(r->comm, bucket->data, bucket->numel, bucket->dtype,
                                  SW_REDOP_MEAN, r->comm_stream, err));
    SW_TRY(add_to_sum(r, bucket, err));
    SW_TRY(ops->event_record(r->device, bucket->done, r->comm_stream, err));
    r->next++;
    return SW_OK;
}

/* The sum goes to the host beside the optimizer. */
static sw_status stage_sum(sw_device_reducer *r, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    staged_sum *slot = slot_of(r, r->steps);
    SW_TRY(ops->event_record(r->device, r->summed, r->comm_stream, err));
    SW_TRY(ops->stream_wait(r->device, r->copy_stream, r->summed, err));
    SW_TRY(
        ops->copy_async(r->device, slot->pinned, r->sum, sizeof(sw_norm_sum), r->copy_stream, err));
    slot->carried = false;
    return ops->event_record(r->device, slot->copied, r->copy_stream, err);
}

sw_status sw_device_reducer_take(sw_device_reducer *r, size_t index, sw_stream *consumer,
                                 sw_error *err)
{
    if (r->phase == PHASE_IDLE || index >= r->next)
        SW_FAIL(err, SW_E_STATE, "device reducer: take of bucket %zu, but %zu are posted", index,
                r->phase == PHASE_IDLE ? (size_t)0 : r->next);
    return r->device->ops->stream_wait(r->device, consumer, r->bucket[index].done, err);
}

sw_status sw_device_reducer_finish(sw_device_reducer *r, sw_error *err)
{
    if (r->phase != PHASE_OPEN || r->next != r->bucket_count)
        SW_FAIL(err, SW_E_STATE, "device reducer: finish, but bucket %zu of %zu is due", r->next,
                r->bucket_count);
    SW_TRY(stage_sum(r, err));
    r->phase = PHASE_FINISHED;
    r->steps++;
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

sw_status sw_device_reducer_norm(sw_device_reducer *r, bool now, const sw_norm_sum **sum,
                                 sw_error *err)
{
    uint64_t back = now ? 1 : 2;
    if (r->steps < back)
        SW_FAIL(err, SW_E_STATE, "device reducer: norm of a step that has not been: %llu finished",
                (unsigned long long)r->steps);
    staged_sum *slot = slot_of(r, r->steps - back);
    SW_TRY(sw_nccl_wait(r->comm, slot->copied, "the sum of squares", err));
    if (!slot->carried)
        sw_norm_sum_carry(slot->pinned);
    slot->carried = true;
    *sum = slot->pinned;
    return SW_OK;
}
