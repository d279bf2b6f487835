/* device_reducer.c - see device_reducer.h, whose table of events it implements. */
#include "reduce/device_reducer.h"

#include <stdlib.h>
#include <string.h>

/* A tag's bytes and their complements travel after the use bytes: the maxima over the ranks are
 * complementary if and only if all tags are equal. */
enum { TAG_BYTES = 2 * sizeof(uint64_t), TAG_GREATEST = 255 };

typedef enum phase {
    PHASE_IDLE = 0, /* released, or no step yet */
    PHASE_OPEN,     /* begun: buckets are being posted */
    PHASE_FINISHED, /* the consumer reads means */
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
    sw_device_mean mean;
    bool sliced;
    phase phase;
    size_t next;          /* the next bucket to post */
    sw_device_range held; /* the last bucket, borrowed until finish enqueues it; data NULL: none */
    size_t held_index;
    sw_device_run *standing; /* owned, room for each gradient: runs of the held bucket */
    size_t standing_count;
    uint64_t steps;        /* begun */
    device_bucket *bucket; /* owned */
    size_t bucket_count;
    size_t gradient_count; /* number of use bytes */
    void *used;            /* owned device memory: use bytes */
    uint8_t *any;          /* owned, pinned: use bytes of all ranks, if `is_gathered` */
    uint8_t *own;          /* owned: this rank's use bytes, from finish() */
    bool is_gathered;      /* this step sends the use bytes of all ranks to the host */
    uint8_t *tags;         /* owned, pinned: tags of the step for which `told` was recorded */
    uint64_t tag;          /* this rank's tag of that step */
    bool is_told;          /* `told` was recorded and not read yet */
    sw_event *consumed, *gathered, *told; /* owned */
    sw_event *left[SW_DEVICE_PLACES];     /* owned; only with `sliced` */
    size_t place;                         /* the reserved place if `is_reserved` */
    bool is_reserved;
};

/* ---- life ---- */

static size_t bucket_bytes(const device_bucket *bucket)
{
    return bucket->numel * sw_dtype_size_bytes(bucket->dtype);
}

static sw_status check_config(const sw_device_reducer_config *config, sw_error *err)
{
    if (!config->comm->peers)
        SW_FAIL(err, SW_E_STATE, "device reducer: the communicator is not connected");
    size_t world_size = (size_t)config->comm->peers->world_size;
    if (config->op != SW_REDOP_MEAN && config->op != SW_REDOP_SUM)
        SW_FAIL(err, SW_E_INVALID, "device reducer: op must be mean or sum, not %d",
                (int)config->op);
    if (config->wire != SW_DTYPE_COUNT &&
        ((config->wire != SW_DTYPE_FLOAT16 && config->wire != SW_DTYPE_BFLOAT16) ||
         config->op != SW_REDOP_MEAN))
        SW_FAIL(err, SW_E_INVALID,
                "device reducer: wire must be float16 or bfloat16, for a mean, not %s",
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
    bool folds = config->deterministic || (config->sliced && config->op == SW_REDOP_SUM);
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
    sw_device_mean_config mean = {.comm = r->comm,
                                  .op = config->op,
                                  .wire = config->wire,
                                  .folds = folds,
                                  .slices = config->slices,
                                  .row = config->row,
                                  .column = config->column,
                                  .numel = most,
                                  .bytes = largest};
    return sw_device_mean_init(&r->mean, &mean, err);
}

static sw_status create_all(sw_device_reducer *r, const sw_device_reducer_config *config,
                            sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    void *pinned;
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
    r->standing = calloc(r->gradient_count + 1, sizeof *r->standing);
    if (!r->own || !r->standing)
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
                                .sliced = config->sliced,
                                .gradient_count = config->gradient_count};
    sw_status status = create_all(made, config, err);
    if (status != SW_OK) {
        sw_device_reducer_destroy(made);
        return status;
    }
    *reducer = made;
    return SW_OK;
}

/* Wait until the streams that access our memory are done. An error here was already reported. */
static void wait_for_all(sw_device_reducer *r)
{
    const sw_device_ops *ops = r->device->ops;
    if (!r->gathered)
        return;
    if (r->consumed)
        sw_device_comm_await(r->comm, r->consumed, "the optimizer");
    if (ops->event_record(r->device, r->gathered, r->comm->stream, NULL) == SW_OK)
        sw_device_comm_await(r->comm, r->gathered, "the comm stream");
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
    sw_device_mean_fini(&r->mean);
    ops->memory_free(r->device, r->used);
    ops->pinned_free(r->device, r->any);
    ops->pinned_free(r->device, r->tags);
    for (int p = 0; p < SW_DEVICE_PLACES; ++p)
        ops->event_destroy(r->device, r->left[p]);
    ops->event_destroy(r->device, r->told);
    ops->event_destroy(r->device, r->consumed);
    ops->event_destroy(r->device, r->gathered);
    free(r->own);
    free(r->standing);
    free(r->bucket);
    free(r);
}

/* Return the first bucket at or after `from` that takes part. */
static size_t next_due(const sw_device_reducer *r, size_t from)
{
    while (from < r->bucket_count && !r->bucket[from].data)
        ++from;
    return from;
}

sw_status sw_device_reducer_adopt(sw_device_reducer *r, size_t index, void *data, sw_error *err)
{
    bool is_posting = r->phase == PHASE_OPEN && r->next != next_due(r, 0);
    if (is_posting || index >= r->bucket_count || r->bucket[index].data)
        SW_FAIL(err, SW_E_STATE, "device reducer: bucket %zu of %zu cannot be adopted %s", index,
                r->bucket_count, is_posting ? "once a step has posted one" : "again");
    SW_TRY(sw_redop_check(r->mean.op, r->bucket[index].dtype, err));
    r->bucket[index].data = data;
    if (r->phase == PHASE_OPEN) /* a local backward began the step */
        r->next = next_due(r, 0);
    return SW_OK;
}

sw_status sw_device_reducer_divide_by(sw_device_reducer *r, int count, sw_error *err)
{
    int world_size = r->comm->peers->world_size;
    if (count < 1 || count > world_size)
        SW_FAIL(err, SW_E_INVALID, "device reducer: means divide by a count in [1, %d], not %d",
                world_size, count);
    r->mean.divisor = count;
    return SW_OK;
}

sw_status sw_device_reducer_leave_out(sw_device_reducer *r, const uint8_t *trains, sw_error *err)
{
    return r->sliced ? sw_device_mean_leave_out(&r->mean, trains, err) : SW_OK;
}

bool sw_device_reducer_takes_part(const sw_device_reducer *r, size_t index)
{
    return index < r->bucket_count && r->bucket[index].data;
}

float sw_device_reducer_prescale(const sw_device_reducer *r, size_t index)
{
    return sw_device_mean_prescale(&r->mean, r->bucket[index].dtype);
}

/* ---- a step ---- */

sw_status sw_device_reducer_begin(sw_device_reducer *r, sw_stream *producer, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    if (r->phase == PHASE_FINISHED)
        SW_FAIL(err, SW_E_STATE,
                "device reducer: begin of step %llu before release of the step before",
                (unsigned long long)r->steps);
    SW_TRY(sw_device_refuse_capture(r->device, producer, "a backward", err));
    /* Order writes to buckets after the previous step's optimizer has read them. */
    SW_TRY(ops->stream_wait(r->device, producer, r->consumed, err));
    if (r->phase == PHASE_OPEN)
        return SW_OK;
    SW_TRY(sw_device_comm_take_over(r->comm, producer, err));
    r->phase = PHASE_OPEN;
    r->held.data = NULL;
    r->next = next_due(r, 0);
    r->steps++;
    return SW_OK;
}

static size_t slice_numel(const sw_device_reducer *r, const device_bucket *bucket)
{
    return bucket->numel / (size_t)r->mean.slice_count;
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

/* Order the comm stream's work on the bucket after the work of `producer`. */
static sw_status meet(sw_device_reducer *r, const device_bucket *bucket, sw_stream *producer,
                      sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    SW_TRY(ops->event_record(r->device, bucket->ready, producer, err));
    return ops->stream_wait(r->device, r->comm->stream, bucket->ready, err);
}

/* Enqueue the first half of a bucket's mean, which may be one call of a group. */
static sw_status start_mean(sw_device_reducer *r, size_t index, const sw_device_range *whole,
                            size_t standing_count, sw_error *err)
{
    return r->sliced ? sw_device_mean_collect(&r->mean, whole, r->bucket[index].data,
                                              standing_count > 0, err)
                     : sw_device_mean_whole(&r->mean, whole, err);
}

/* Enqueue the second half and the events after it. */
static sw_status end_mean(sw_device_reducer *r, size_t index, const sw_device_range *whole,
                          const sw_device_run *standing, size_t standing_count, sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    device_bucket *bucket = &r->bucket[index];
    if (r->sliced)
        SW_TRY(
            sw_device_mean_complete(&r->mean, whole, bucket->data, standing, standing_count, err));
    SW_TRY(ops->event_record(r->device, bucket->done, r->comm->stream, err));
    return r->sliced ? ops->event_record(r->device, r->left[r->place], r->comm->stream, err)
                     : SW_OK;
}

/* Enqueue the mean; leave the last one to finish(). */
static sw_status average(sw_device_reducer *r, size_t index, const sw_device_range *whole,
                         const sw_device_run *standing, size_t standing_count, sw_error *err)
{
    r->next = next_due(r, index + 1);
    if (r->next == r->bucket_count && sw_device_mean_is_one_call(&r->mean, whole->dtype)) {
        r->held = *whole;
        r->held_index = index;
        r->standing_count = standing_count;
        if (standing_count > 0)
            memcpy(r->standing, standing, standing_count * sizeof *standing);
        return SW_OK;
    }
    SW_TRY(start_mean(r, index, whole, standing_count, err));
    return end_mean(r, index, whole, standing, standing_count, err);
}

sw_status sw_device_reducer_post(sw_device_reducer *r, size_t index, sw_stream *producer,
                                 sw_error *err)
{
    SW_TRY(check_due(r, index, false, err));
    device_bucket *bucket = &r->bucket[index];
    sw_device_range whole = {.data = bucket->data, .numel = bucket->numel, .dtype = bucket->dtype};
    SW_TRY(meet(r, bucket, producer, err));
    return average(r, index, &whole, NULL, 0, err);
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
    /* Wait until the place's previous bucket has been averaged. */
    SW_TRY(ops->stream_wait(r->device, producer, r->left[place], err));
    r->is_reserved = true;
    r->place = place;
    return SW_OK;
}

sw_status sw_device_reducer_post_slice(sw_device_reducer *r, size_t index, void *data,
                                       const sw_device_run *standing, size_t standing_count,
                                       sw_stream *producer, sw_error *err)
{
    SW_TRY(check_due(r, index, true, err));
    const device_bucket *bucket = &r->bucket[index];
    sw_device_range whole = {.data = data, .numel = bucket->numel, .dtype = bucket->dtype};
    if (standing_count > r->gradient_count)
        SW_FAIL(err, SW_E_INVALID,
                "device reducer: bucket %zu has at most one standing run for each gradient, %zu, "
                "not %zu",
                index, r->gradient_count, standing_count);
    for (size_t i = 0, least = 0; i < standing_count; least = standing[i++].end)
        if (standing[i].begin < least || standing[i].end < standing[i].begin ||
            standing[i].end > slice_numel(r, bucket))
            SW_FAIL(err, SW_E_INVALID,
                    "device reducer: standing run %zu of bucket %zu, [%zu, %zu), must come after "
                    "the previous one, in a slice of %zu elements",
                    i, index, standing[i].begin, standing[i].end, slice_numel(r, bucket));
    SW_TRY(meet(r, bucket, producer, err));
    r->is_reserved = false;
    return average(r, index, &whole, standing, standing_count, err);
}

sw_status sw_device_reducer_take(sw_device_reducer *r, size_t index, sw_stream *consumer,
                                 sw_error *err)
{
    bool is_held = r->held.data && index == r->held_index;
    if (r->phase == PHASE_IDLE || index >= r->next || !r->bucket[index].data || is_held)
        SW_FAIL(err, SW_E_STATE, "device reducer: take of bucket %zu, which was not %s", index,
                is_held ? "finished: call finish to get the last one" : "posted in this step");
    return r->device->ops->stream_wait(r->device, consumer, r->bucket[index].done, err);
}

/* Byte i of a rank's message: it used gradient i. Its tag follows, each byte with its complement. A
 * rank without a tag sends bytes below any other's. */
static unsigned char told_byte(const sw_device_reducer *r, const uint8_t *used, const uint64_t *tag,
                               size_t i)
{
    if (i < r->gradient_count)
        return used[i] != 0;
    size_t k = i - r->gradient_count;
    if (!tag)
        return 0;
    unsigned part = (unsigned)(*tag >> 8 * (k / 2)) & 0xffu;
    return (unsigned char)(k % 2 ? TAG_GREATEST - part : part);
}

/* Write the rank's use bytes and tag as arguments of a launch, so that no host memory must outlive
 * the call. Up to about 4,000 gradients need one launch. */
static sw_status write_use(sw_device_reducer *r, const uint8_t *used, const uint64_t *tag,
                           sw_error *err)
{
    const size_t count = r->gradient_count + TAG_BYTES;
    for (size_t start = 0; start < count; start += SW_PUT_BYTES_MAX) {
        size_t left = count - start, taken = left < SW_PUT_BYTES_MAX ? left : SW_PUT_BYTES_MAX;
        sw_put_args put = {.to = (char *)r->used + start, .size_bytes = (int)taken};
        for (size_t i = 0; i < taken; ++i)
            put.byte[i] = told_byte(r, used, tag, start + i);
        SW_TRY(sw_kernel_launch(&r->comm->kernels, SW_KERNEL_PUT, &put, r->comm->stream, err));
    }
    return SW_OK;
}

/* Send the tags of all ranks to the host, unless those of an earlier step are still in flight. */
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

static sw_status enqueue_use(sw_device_reducer *r, sw_error *err)
{
    return sw_peers_all_reduce(r->comm->peers, r->used, r->gradient_count + TAG_BYTES,
                               SW_DTYPE_UINT8, SW_REDOP_MAX, r->comm->stream, err);
}

/* Enqueue the use bytes, in one group with the mean of the held bucket. */
static sw_status exchange_use(sw_device_reducer *r, sw_error *err)
{
    if (!r->held.data)
        return enqueue_use(r, err);
    SW_TRY(sw_peers_group_begin(r->comm->peers, err));
    sw_status status = start_mean(r, r->held_index, &r->held, r->standing_count, err);
    if (status == SW_OK)
        status = enqueue_use(r, err);
    /* Close the group even after an error; the thread's next group must be separate. */
    sw_status ended = sw_peers_group_end(r->comm->peers, status == SW_OK ? err : NULL);
    SW_TRY(status != SW_OK ? status : ended);
    SW_TRY(end_mean(r, r->held_index, &r->held, r->standing, r->standing_count, err));
    r->held.data = NULL;
    return SW_OK;
}

sw_status sw_device_reducer_finish(sw_device_reducer *r, const uint8_t *used, const uint64_t *tag,
                                   sw_error *err)
{
    const sw_device_ops *ops = r->device->ops;
    sw_stream *stream = r->comm->stream;
    if (r->phase != PHASE_OPEN || r->next != r->bucket_count)
        SW_FAIL(err, SW_E_STATE, "device reducer: finish, but bucket %zu of %zu is due", r->next,
                r->bucket_count);
    bool is_alone = r->comm->peers->world_size == 1;
    r->is_gathered = !is_alone && memchr(used, 0, r->gradient_count) != NULL;
    memcpy(r->own, used, r->gradient_count);
    if (!is_alone) {
        SW_TRY(write_use(r, used, tag, err));
        SW_TRY(exchange_use(r, err));
        if (tag)
            SW_TRY(send_tags(r, *tag, err));
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
        SW_TRY(sw_peers_wait(r->comm->peers, r->gathered, "the exchange of use bytes", err));
    *any = r->is_gathered ? r->any : r->own; /* it used all, or is the only rank */
    return SW_OK;
}

sw_status sw_device_reducer_release(sw_device_reducer *r, sw_stream *consumer, sw_error *err)
{
    if (r->phase != PHASE_FINISHED)
        SW_FAIL(err, SW_E_STATE, "device reducer: release of a step that was not finished");
    SW_TRY(sw_device_refuse_capture(r->device, consumer, "a backward", err));
    SW_TRY(r->device->ops->event_record(r->device, r->consumed, consumer, err));
    r->phase = PHASE_IDLE;
    return SW_OK;
}
