/* test_device_mean.c - the transport's own mean of halves has no bias.
 *
 * Law: take the mean over three ranks of positive float16 and bfloat16 numbers, and sum it over all
 * elements. The sum is within 5e-4 of that of real numbers, whole and as a slice, through NCCL and
 * through slots. An element is rounded at most four times to nearest, each time by at most 2^-9 of
 * it; errors of either sign cancel over 3072 elements. A factor of 1 / 3 that is itself rounded to
 * bfloat16 would move every element by 2^-9 the same way. NCCL is asked for sums alone, of
 * contributions that came multiplied.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_ranks.h"
#include "reduce/device_mean.h"

enum { WORLD = 3, NUMEL = 3072 };
static const int64_t TIMEOUT_NS = 2000000000;
static const double BOUND = 5e-4;

typedef struct averaging {
    sw_dtype dtype;
    bool is_slice;
    double total[WORLD]; /* sum of the means that rank r got */
} averaging;

/* Return a value of rank `rank` in [1, 2). */
static float value_of(int rank, int i)
{
    return 1.0f + (float)((rank * 977 + i * 389) % 128) / 128.0f;
}

static void convert(void *to, sw_dtype to_dtype, const void *from, sw_dtype from_dtype, int numel,
                    float scale)
{
    sw_cast_args cast = {.to = to,
                         .from = from,
                         .numel = (sw_u64)numel,
                         .scale = scale,
                         .to_dtype = (int)to_dtype,
                         .from_dtype = (int)from_dtype};
    sw_kernel_contracts()[SW_KERNEL_CAST].reference(&cast);
}

typedef struct buffers {
    void *bucket, *slice, *pinned;
    sw_event *done;
    sw_device_mean mean;
} buffers;

static sw_status average(gpu_rank *self, buffers *held)
{
    averaging *run = self->context;
    const sw_device_ops *ops = self->device->ops;
    sw_error *err = &self->err;
    size_t bytes = NUMEL * sw_dtype_size_bytes(run->dtype);
    int numel = run->is_slice ? NUMEL / WORLD : NUMEL;
    float wide[NUMEL];
    SW_TRY(ops->memory_alloc(self->device, bytes, &held->bucket, err));
    SW_TRY(ops->memory_alloc(self->device, bytes, &held->slice, err));
    SW_TRY(ops->pinned_alloc(self->device, bytes, &held->pinned, err));
    SW_TRY(ops->event_create(self->device, &held->done, err));
    sw_device_mean_config config = {.comm = self->all,
                                    .op = SW_REDOP_MEAN,
                                    .wire = SW_DTYPE_COUNT,
                                    .numel = NUMEL,
                                    .bytes = bytes};
    SW_TRY(sw_device_mean_init(&held->mean, &config, err));
    float scale = sw_device_mean_prescale(&held->mean, run->dtype);
    check(self->comm->rounds_divisor == (scale != 1.0f), "contributions are multiplied by %g",
          (double)scale);
    for (int i = 0; i < NUMEL; ++i)
        wide[i] = value_of(self->rank, i);
    convert(held->pinned, run->dtype, wide, SW_DTYPE_FLOAT32, NUMEL, scale);
    self->sim->host_access(held->pinned, bytes, SW_ACCESS_WRITE, "the test's gradients");
    sw_device_range bucket = {held->bucket, NUMEL, run->dtype};
    sw_stream *stream = self->all->stream;
    SW_TRY(ops->copy_async(self->device, held->bucket, held->pinned, bytes, stream, err));
    if (run->is_slice) {
        SW_TRY(sw_device_mean_collect(&held->mean, &bucket, held->slice, false, err));
        SW_TRY(sw_device_mean_complete(&held->mean, &bucket, held->slice, NULL, 0, err));
    } else {
        SW_TRY(sw_device_mean_whole(&held->mean, &bucket, err));
    }
    SW_TRY(ops->copy_async(self->device, held->pinned, run->is_slice ? held->slice : held->bucket,
                           (size_t)numel * sw_dtype_size_bytes(run->dtype), stream, err));
    SW_TRY(ops->event_record(self->device, held->done, stream, err));
    SW_TRY(sw_peers_wait(self->comm, held->done, "the test's mean", err));
    self->sim->host_access(held->pinned, bytes, SW_ACCESS_READ, "the test's mean");
    convert(wide, SW_DTYPE_FLOAT32, held->pinned, run->dtype, numel, 1.0f);
    for (int i = 0; i < numel; ++i)
        run->total[self->rank] += wide[i];
    return SW_OK;
}

static bool average_rank(gpu_rank *self)
{
    buffers held = {0};
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = average(self, &held);
    if (self->device) {
        sw_device_mean_fini(&held.mean);
        self->device->ops->memory_free(self->device, held.bucket);
        self->device->ops->memory_free(self->device, held.slice);
        self->device->ops->pinned_free(self->device, held.pinned);
        self->device->ops->event_destroy(self->device, held.done);
    }
    gpu_rank_close(self);
    return check(status == SW_OK, "rank %d: %s", self->rank, self->err.message);
}

static void check_mean(sw_dtype dtype, bool is_slice)
{
    averaging run = {.dtype = dtype, .is_slice = is_slice};
    double expected = 0, got = 0;
    gpu_ranks_run(WORLD, SIM_ON_DEMAND, 1, average_rank, &run);
    for (int r = 0; r < WORLD; ++r) {
        for (int i = 0; i < NUMEL; ++i)
            expected += (double)value_of(r, i) / WORLD;
        got += run.total[r] / (is_slice ? 1 : WORLD);
    }
    check(fabs(got - expected) <= BOUND * expected, "%s, %s: the means add up to %.9g, not %.9g",
          sw_dtype_name(dtype), is_slice ? "a slice" : "whole", got, expected);
    gpu_expect_clean("the mean of halves");
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int through_slots = 0; through_slots < 2; ++through_slots) {
        for (int is_slice = 0; is_slice < 2; ++is_slice) {
            check_mean(SW_DTYPE_FLOAT32, is_slice);
            check_mean(SW_DTYPE_FLOAT16, is_slice);
            check_mean(SW_DTYPE_BFLOAT16, is_slice);
        }
        gpu_ranks_slots = (gpu_slots){4096, SW_SLOTS_ON_HOST};
    }
    return check_result();
}
