/* test_device_training.c - training on simulated GPUs: the mean is the fold in rank order, for any
 * schedule.
 *
 * Laws, after 4 steps of Adam:
 *   - with `deterministic`, parameters equal those of a naive loop that folds with the host kernel,
 *     bit for bit on every rank; without it, all ranks are equal and near them;
 *   - parameters do not depend on the stage: the optimizer steps on all of them or on slices that
 *     are gathered; means are whole, or slices in a ring of two places. They begin as rank 0's;
 *   - every rank learns which gradients some rank used;
 *   - no schedule gives a race, a read of unwritten bytes, a leak or other values, by NCCL and
 *     by slots;
 *   - a step does not wait on the host, unless a gradient is unused on this rank;
 *   - each driver call that fails ends in a named error and leaves nothing;
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/device_norm.h"
#include "gpu_ranks.h"
#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"
#include "optim/norm.h"
#include "reduce/reducer.h"

enum {
    BUCKETS = 3,
    STEPS = 4,
    LONE_STEP = 3,
    NUMEL_MAX = 384,
    SEEDS = 5,
    FAILURE = 999,
    PARAMS = 7,
};
static const int64_t TIMEOUT_NS = 2000000000;
static const double MAX_NORM = 0.5;

static const sw_layout_param params[PARAMS] = {
    {60, SW_DTYPE_FLOAT32, true, 1, 0},   {100, SW_DTYPE_FLOAT32, true, 1, 0},
    {100, SW_DTYPE_BFLOAT16, true, 0, 0}, {60, SW_DTYPE_BFLOAT16, true, 0, 0},
    {100, SW_DTYPE_BFLOAT16, true, 0, 0}, {40, SW_DTYPE_FLOAT32, true, 0, 0},
    {20, SW_DTYPE_FLOAT32, true, 0, 0}};
static const char *const names[PARAMS] = {"p0", "p1", "p2", "p3", "p4", "p5", "p6"};
enum { CAP_BYTES = 4096 };
static sw_layout layout; /* of this run */

static size_t numel_of(size_t b)
{
    return layout.bucket[b].numel;
}

static sw_dtype dtype_of(size_t b)
{
    return layout.bucket[b].dtype;
}

typedef struct model { /* the training of one bucket */
    float *p, *m, *v;  /* device memory of the test, float32 */
    void *bucket;      /* its mean: whole, or at stage 2 this rank's slice */
    void *source;      /* the backward makes the gradient of it */
} model;

typedef struct training {
    int stage; /* 1: the optimizer steps on slices; 2: means are slices too */
    bool deterministic;
    bool narrowed; /* means travel as bfloat16 */
    int steps;
    long fail_nth;      /* the call of rank 0 that fails; 0: none */
    bool stop_in_step;  /* destroy while buckets are in flight */
    bool leave_at_once; /* destroy while the last step runs, without reading results */
    bool withdraws;     /* leave the averaging to a hook while it runs */
    float result[GPU_RANKS_MAX][BUCKETS][NUMEL_MAX]; /* parameters at the end */
    double norm[GPU_RANKS_MAX];                      /* norm of the last step */
    float clipped[GPU_RANKS_MAX][2]; /* the same of all ranks' slices, and the factor, on the GPU */
    bool joins;                      /* the last rank has run out of inputs in LONE_STEP */
    uint64_t host_waits;             /* in the steps in which rank 0 used every gradient */
    int wrong_use;                   /* use bytes that are not the union */
    bool failed[GPU_RANKS_MAX];
    char message[GPU_RANKS_MAX][SW_ERROR_MESSAGE_BYTES];
} training;

static float value_of(int rank, int step, size_t bucket, size_t i)
{
    uint32_t mixed =
        (uint32_t)(rank * 7919 + step * 104729) + (uint32_t)(bucket * 1299709 + i * 15485863);
    mixed ^= mixed >> 15;
    mixed *= 2246822519u;
    mixed ^= mixed >> 13;
    return (float)(int32_t)mixed * 0x1p-31f;
}

/* Padding is zero. */
static float gradient_of(int rank, int step, size_t b, size_t i)
{
    for (size_t p = 0; p < PARAMS; ++p)
        if (layout.place[p].bucket == b && i - layout.place[p].begin < layout.place[p].numel)
            return value_of(rank, step, b, i);
    return 0.0f;
}

/* In step 1 every rank uses all gradients. Else rank r leaves a few out, and one is used by none.
 */
static bool is_used(int rank, int step, size_t p)
{
    return step == 1 || ((p + (size_t)(rank + step)) % 4 != 0 && p != (size_t)step + 2);
}

/* A joined rank shadows the step and contributes nothing; means divide by the other ranks. */
static bool has_joined(const training *run, int rank, int world_size, int step)
{
    return run->joins && step == LONE_STEP && rank == world_size - 1;
}

/* At stage 2, step 2 adds to the accumulated mean of step 1 in some parameters, two of them side by
 * side. */
static bool stands(const training *run, int step, size_t p)
{
    return run->stage == 2 && step == 2 && (p == 1 || p == 3 || p == 4);
}

static sw_adam_args adam_of(float *p, float *m, float *v, const void *g, size_t numel,
                            sw_dtype dtype, int step)
{
    double first = 1 - pow(0.9, step + 1), second = 1 - pow(0.999, step + 1);
    return (sw_adam_args){.run = {{.p = p,
                                   .m = m,
                                   .v = v,
                                   .g = g,
                                   .numel = numel,
                                   .p_dtype = (int)SW_DTYPE_FLOAT32,
                                   .state_dtype = (int)SW_DTYPE_FLOAT32,
                                   .g_dtype = (int)dtype,
                                   .copy_dtype = (int)SW_DTYPE_FLOAT32}},
                          .run_count = 1,
                          .factor = 1.0f,
                          .decay = 0.999f,
                          .lerp = 0.1f,
                          .beta2 = 0.999f,
                          .square = 0.001f,
                          .correction = (float)sqrt(second),
                          .eps = 1e-8f,
                          .negative_step = (float)(-0.01 / first)};
}

/* ---- the naive loop ---- */

static void narrow(void *to, const float *from, size_t numel, sw_dtype dtype)
{
    sw_cast_args cast = {.to = to,
                         .from = from,
                         .numel = numel,
                         .scale = 1.0f,
                         .to_dtype = (int)dtype,
                         .from_dtype = (int)SW_DTYPE_FLOAT32};
    sw_kernel_references()[SW_KERNEL_CAST].reference(&cast);
}

/* Add the accumulated mean to the gradients that stand, as autograd would. */
static void add_accumulated(const training *run, void *gradient, const void *mean, int step,
                            size_t b)
{
    for (size_t p = 0; p < PARAMS; ++p) {
        if (layout.place[p].bucket != b || !stands(run, step, p))
            continue;
        size_t offset = layout.place[p].begin * sw_dtype_size_bytes(dtype_of(b));
        void *to = (char *)gradient + offset;
        const void *source[] = {(const char *)mean + offset, to};
        sw_kernels()->fold[dtype_of(b)](&to, 1, source, 2, params[p].numel, 1, SW_REDOP_SUM);
    }
}

static double oracle(const training *run, int world_size, int steps,
                     float result[BUCKETS][NUMEL_MAX])
{
    double norm = 0;
    static float mean[BUCKETS][NUMEL_MAX];
    static float m[BUCKETS][NUMEL_MAX], v[BUCKETS][NUMEL_MAX];
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    for (size_t b = 0; b < BUCKETS; ++b)
        for (size_t i = 0; i < numel_of(b); ++i)
            result[b][i] = value_of(99, 0, b, i);
    for (int step = 0; step < steps; ++step) {
        sw_norm_sum sum;
        sw_norm_init(&sum);
        for (size_t b = 0; b < BUCKETS; ++b) {
            float wide[NUMEL_MAX], gradient[GPU_RANKS_MAX][NUMEL_MAX];
            const void *source[GPU_RANKS_MAX];
            void *to = mean[b];
            int active = 0;
            for (int r = 0; r < world_size && !has_joined(run, r, world_size, step); ++r) {
                for (size_t i = 0; i < numel_of(b); ++i)
                    wide[i] = gradient_of(r, step, b, i);
                narrow(gradient[r], wide, numel_of(b), dtype_of(b));
                add_accumulated(run, gradient[r], mean[b], step, b);
                source[active++] = gradient[r];
            }
            sw_kernels()->fold[dtype_of(b)](&to, 1, source, active, numel_of(b), 1.0 / active,
                                            SW_REDOP_MEAN);
            sw_norm_array array = {.data = mean[b], .numel = numel_of(b), .dtype = dtype_of(b)};
            check(sw_norm_add(&sum, &array, 1, NULL) == SW_OK, "norm");
            sw_adam_args adam =
                adam_of(result[b], m[b], v[b], mean[b], numel_of(b), dtype_of(b), step);
            sw_kernel_references()[SW_KERNEL_ADAM].reference(&adam);
        }
        sw_norm_close(&sum);
        norm = sw_norm_value(&sum);
    }
    return norm;
}

/* ---- the same on simulated GPUs ---- */

typedef struct loop {
    gpu_rank *self;
    training *run;
    sw_reducer *reducer;
    sw_stream *backward, *optimizer;
    sw_event *loaded, *ended;
    model part[BUCKETS];
    void *place; /* device memory of the largest bucket */
    float *pinned[BUCKETS];
} loop;

enum { PIECE_BYTES = sizeof(float[NUMEL_MAX]) }; /* the largest bucket, widened */

static size_t slice_of(const loop *l, size_t b)
{
    return numel_of(b) / (size_t)l->self->world_size;
}

static sw_status upload(loop *l, float *to, const float *from, size_t numel, size_t slot)
{
    sw_device *device = l->self->device;
    memcpy(l->pinned[slot], from, numel * sizeof *from);
    gpu_sim->host_access(l->pinned[slot], numel * sizeof *from, SW_ACCESS_WRITE,
                         "the test's upload");
    return device->ops->copy_async(device, to, l->pinned[slot], numel * sizeof *from, l->backward,
                                   &l->self->err);
}

static sw_status prepare(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    sw_device_range parameters[BUCKETS];
    SW_TRY(device->ops->stream_create(device, false, &l->backward, err));
    SW_TRY(device->ops->stream_create(device, false, &l->optimizer, err));
    SW_TRY(device->ops->event_create(device, &l->loaded, err));
    SW_TRY(device->ops->event_create(device, &l->ended, err));
    SW_TRY(device->ops->memory_alloc(device, PIECE_BYTES, &l->place, err));
    for (size_t b = 0; b < BUCKETS; ++b) {
        size_t bytes = numel_of(b) * sizeof(float);
        float start[NUMEL_MAX];
        void *memory;
        SW_TRY(device->ops->pinned_alloc(device, bytes, &memory, err));
        l->pinned[b] = memory;
        float **device_memory[] = {&l->part[b].p, &l->part[b].m, &l->part[b].v,
                                   (float **)&l->part[b].source, (float **)&l->part[b].bucket};
        for (int k = 0; k < 5; ++k) {
            SW_TRY(device->ops->memory_alloc(device, bytes, &memory, err));
            *device_memory[k] = memory;
        }
        for (size_t i = 0; i < numel_of(b); ++i)
            start[i] = value_of(99 + l->self->rank, 0, b, i);
        SW_TRY(upload(l, l->part[b].p, start, numel_of(b), b));
        SW_TRY(device->ops->fill_async(device, l->part[b].m, 0, bytes, l->backward, err));
        SW_TRY(device->ops->fill_async(device, l->part[b].v, 0, bytes, l->backward, err));
        SW_TRY(device->ops->fill_async(device, l->part[b].bucket, 0, bytes, l->backward, err));
        parameters[b] = (sw_device_range){l->part[b].p, numel_of(b), SW_DTYPE_FLOAT32};
    }
    SW_TRY(sw_device_comm_broadcast(l->self->all, parameters, BUCKETS, 0, l->backward, err));
    for (size_t b = 0; b < BUCKETS; ++b) /* the received parameters are ordered on its stream */
        SW_TRY(device->ops->copy_async(device, l->part[b].source, l->part[b].p,
                                       numel_of(b) * sizeof(float), l->backward, err));
    SW_TRY(device->ops->event_record(device, l->loaded, l->backward, err));
    SW_TRY(device->ops->stream_wait(device, l->optimizer, l->loaded, err));
    return device->ops->event_wait(device, l->loaded, TIMEOUT_NS, "the test's upload", err);
}

/* Whether the reducer copies gradients into the bucket; else the backward writes it in place. */
static bool packs(const loop *l, size_t b)
{
    return l->run->stage < 2 && dtype_of(b) == SW_DTYPE_FLOAT32;
}

/* Make the gradient on its stream from a float32 source of this step, as a backward does. */
static sw_status produce(loop *l, void *to, size_t b, int step)
{
    float wide[NUMEL_MAX];
    for (size_t i = 0; i < numel_of(b); ++i)
        wide[i] = has_joined(l->run, l->self->rank, l->self->world_size, step)
                      ? -0.0f
                      : gradient_of(l->self->rank, step, b, i);
    SW_TRY(upload(l, l->part[b].source, wide, numel_of(b), b));
    if (packs(l, b))
        return SW_OK;
    sw_cast_args cast = {.to = to,
                         .from = l->part[b].source,
                         .numel = numel_of(b),
                         .scale = 1.0f,
                         .to_dtype = (int)dtype_of(b),
                         .from_dtype = (int)SW_DTYPE_FLOAT32};
    return sw_kernel_launch(&l->self->kernels, SW_KERNEL_CAST, &cast, l->backward, &l->self->err);
}

/* Check which gradients some rank used. */
static void read_use(loop *l, int step)
{
    for (size_t p = 0; p < PARAMS; ++p) {
        bool expected = false;
        for (int r = 0; r < l->self->world_size; ++r)
            expected |= !has_joined(l->run, r, l->self->world_size, step) && is_used(r, step, p);
        l->run->wrong_use += sw_reducer_used_by_any(l->reducer, p) != expected;
    }
}

/* Run the backward of one bucket. */
static sw_status send_bucket(loop *l, size_t b, int step)
{
    const float *source = l->part[b].source;
    sw_error *err = &l->self->err;
    SW_TRY(sw_reducer_reserve(l->reducer, b, err));
    SW_TRY(sw_reducer_lend_place(l->reducer, err));
    SW_TRY(produce(l, sw_reducer_slot(l->reducer, b), b, step));
    for (size_t k = 0; k < layout.bucket[b].count; ++k) {
        size_t p = layout.order[layout.bucket[b].first + k];
        if (packs(l, b))
            SW_TRY(sw_reducer_write(l->reducer, p, source + layout.place[p].begin, false, err));
        sw_reducer_place(l->reducer, p, stands(l->run, step, p));
    }
    return sw_reducer_send(l->reducer, b, err);
}

/* Run the optimizer on bucket b, or on this rank's slice of it. */
static sw_status update(loop *l, size_t b, int step)
{
    const model *part = &l->part[b];
    size_t numel = l->run->stage ? slice_of(l, b) : numel_of(b);
    size_t begin = l->run->stage ? (size_t)l->self->rank * numel : 0;
    size_t mean_begin = l->run->stage == 2 ? 0 : begin * sw_dtype_size_bytes(dtype_of(b));
    sw_adam_args adam = adam_of(part->p + begin, part->m + begin, part->v + begin,
                                (char *)part->bucket + mean_begin, numel, dtype_of(b), step);
    return sw_kernel_launch(&l->self->kernels, SW_KERNEL_ADAM, &adam, l->optimizer, &l->self->err);
}

static sw_status gather(loop *l)
{
    sw_device_range parameters[BUCKETS];
    for (size_t b = 0; b < BUCKETS; ++b)
        parameters[b] = (sw_device_range){l->part[b].p, numel_of(b), SW_DTYPE_FLOAT32};
    return sw_device_comm_all_gather(l->self->all, parameters, BUCKETS, l->optimizer,
                                     &l->self->err);
}

static sw_status open_round(loop *l, int step)
{
    uint8_t trains[GPU_RANKS_MAX];
    sw_error *err = &l->self->err;
    bool due;
    sw_reducer_use_stream(l->reducer, l->backward);
    for (int r = 0; r < l->self->world_size; ++r)
        trains[r] = !has_joined(l->run, r, l->self->world_size, step);
    if (l->run->joins)
        SW_TRY(sw_reducer_set_active(l->reducer, trains, err));
    SW_TRY(sw_reducer_check(l->reducer, err));
    SW_TRY(sw_reducer_arrive(l->reducer, err));
    if (has_joined(l->run, l->self->rank, l->self->world_size, step))
        return sw_reducer_open_shadow(l->reducer, err);
    SW_TRY(sw_reducer_open(l->reducer, step, true, err));
    for (size_t p = 0; p < PARAMS; ++p)
        if (is_used(l->self->rank, step, p))
            SW_TRY(sw_reducer_mark_ready(l->reducer, p, step, &due, err));
    return SW_OK;
}

static sw_status train_step(loop *l, int step)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    SW_TRY(open_round(l, step));
    if (step > 0) /* the test's own wait: the last step has read the pinned sources */
        SW_TRY(device->ops->event_wait(device, l->loaded, TIMEOUT_NS, "the test's sources", err));
    for (size_t b = 0; b < BUCKETS; ++b) {
        SW_TRY(send_bucket(l, b, step));
        if (l->run->stop_in_step && step + 1 == l->run->steps && b == 1)
            return SW_OK;
    }
    SW_TRY(device->ops->event_record(device, l->loaded, l->backward, err));
    sw_reducer_use_stream(l->reducer, l->optimizer);
    sw_device_stats before = device->stats;
    SW_TRY(sw_reducer_finish(l->reducer, err));
    if (!l->self->part) /* slots launch and copy themselves; finish copies use bytes and tags */
        check(device->stats.launches - before.launches <= (l->self->world_size > 1 ? 4 : 0) &&
                  device->stats.copies - before.copies <= 2,
              "finish took more than a launch, those of the last slice, and two copies");
    read_use(l, step);
    SW_TRY(
        sw_reducer_check(l->reducer, err)); /* on the first step perhaps before any tag is there */
    for (size_t b = 0; b < BUCKETS; ++b)
        SW_TRY(update(l, b, step));
    sw_reducer_count_step(l->reducer);
    return l->run->stage ? gather(l) : SW_OK;
}

/* The norm and the factor as CLIP leaves them, in memory that the training needs no longer. */
static sw_status read_clip(loop *l, const sw_device_range *gradients)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    const sw_device_clip clip = {.max_norm = MAX_NORM,
                                 .is_sliced = l->run->stage == 2,
                                 .norm = l->part[0].m,
                                 .factor = l->part[0].m + 1};
    const uint64_t launches = device->stats.launches;
    l->self->all->norm_room = 5; /* the sum is carried every five elements */
    SW_TRY(sw_device_comm_clip(l->self->all, gradients, BUCKETS, &clip, l->optimizer, err));
    check(device->stats.launches - launches > 2 * numel_of(0) / 5 / (size_t)l->self->world_size,
          "the sum was not carried on its way");
    SW_TRY(device->ops->copy_async(device, l->pinned[0], l->part[0].m, 2 * sizeof(float),
                                   l->optimizer, err));
    SW_TRY(device->ops->event_record(device, l->ended, l->optimizer, err));
    SW_TRY(sw_peers_wait(l->self->comm, l->ended, "the test's factor", err));
    gpu_sim->host_access(l->pinned[0], 2 * sizeof(float), SW_ACCESS_READ, "the test's factor");
    memcpy(l->run->clipped[l->self->rank], l->pinned[0], 2 * sizeof(float));
    return SW_OK;
}

/* The program writes to a gradient on its own stream before it asks for the norm: times one. */
static sw_status touch(loop *l, const sw_device_range *gradient)
{
    sw_cast_args cast = {.to = gradient->data,
                         .from = gradient->data,
                         .numel = gradient->numel,
                         .scale = 1.0f,
                         .to_dtype = (int)gradient->dtype,
                         .from_dtype = (int)gradient->dtype};
    return sw_kernel_launch(&l->self->kernels, SW_KERNEL_CAST, &cast, l->optimizer, &l->self->err);
}

static sw_status read_back(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    sw_norm_sum sum;
    sw_device_range gradients[BUCKETS];
    for (size_t b = 0; b < BUCKETS; ++b)
        SW_TRY(device->ops->copy_async(device, l->pinned[b], l->part[b].p,
                                       numel_of(b) * sizeof(float), l->optimizer, err));
    SW_TRY(device->ops->event_record(device, l->ended, l->optimizer, err));
    SW_TRY(
        sw_peers_wait(l->self->comm, l->ended, "the test's results", err)); /* sees failed peers */
    for (size_t b = 0; b < BUCKETS; ++b) {
        gpu_sim->host_access(l->pinned[b], numel_of(b) * sizeof(float), SW_ACCESS_READ,
                             "the test's results");
        memcpy(l->run->result[l->self->rank][b], l->pinned[b], numel_of(b) * sizeof(float));
    }
    for (size_t b = 0; b < BUCKETS; ++b)
        gradients[b] = (sw_device_range){
            l->part[b].bucket, l->run->stage == 2 ? slice_of(l, b) : numel_of(b), dtype_of(b)};
    SW_TRY(touch(l, &gradients[0]));
    SW_TRY(sw_device_comm_norm(l->self->all, gradients, BUCKETS, l->optimizer, &sum, err));
    gpu_sim->host_access(l->self->all->staged, sizeof sum, SW_ACCESS_READ, "the test's norm");
    l->run->norm[l->self->rank] = sw_norm_value(&sum);
    return read_clip(l, gradients);
}

static sw_status train(loop *l)
{
    sw_error *err = &l->self->err;
    const sw_reducer_options options = {.bucket_cap_bytes = CAP_BYTES,
                                        .label = "m",
                                        .deterministic = l->run->deterministic,
                                        .sliced = l->run->stage == 2,
                                        .is_narrow = l->run->narrowed,
                                        .wire = SW_DTYPE_BFLOAT16};
    SW_TRY(prepare(l));
    SW_TRY(sw_reducer_create_on_device(l->self->all, params, names, PARAMS, &options, &l->reducer,
                                       err));
    sw_reducer_divide_by_active(l->reducer, true);
    sw_reducer_use_stream(l->reducer, l->backward);
    for (size_t b = 0; b < BUCKETS; ++b)
        SW_TRY(sw_reducer_adopt(l->reducer, b, l->part[b].bucket, err));
    if (l->run->stage == 2)
        SW_TRY(sw_reducer_set_place(l->reducer, l->place, err));
    for (int step = 0; step < l->run->steps; ++step) {
        uint64_t waits = l->self->device->stats.host_waits;
        uint64_t allocations = l->self->device->stats.allocations;
        SW_TRY(train_step(l, step));
        if (l->self->rank == 0 && (step == 1 || l->self->world_size == 1))
            l->run->host_waits += l->self->device->stats.host_waits - waits - (step > 0);
        check(l->self->device->stats.allocations == allocations, "step %d allocated", step);
    }
    if (l->run->withdraws)
        SW_TRY(sw_reducer_withdraw(l->reducer, err));
    return l->run->stop_in_step || l->run->leave_at_once ? SW_OK : read_back(l);
}

/* The reducer must end by itself; then the test's own streams end. */
static void tear_down(loop *l)
{
    sw_device *device = l->self->device;
    if (l->run->stop_in_step && l->ended) { /* the test's own work on the buckets */
        (void)!device->ops->event_record(device, l->ended, l->backward, NULL);
        (void)!device->ops->event_wait(device, l->ended, TIMEOUT_NS, "the test's backward", NULL);
    }
    sw_reducer_destroy(l->reducer);
    if (l->ended && l->optimizer) {
        (void)!device->ops->event_record(device, l->ended, l->optimizer, NULL);
        (void)!device->ops->event_wait(device, l->ended, TIMEOUT_NS, "the test's optimizer", NULL);
        (void)!device->ops->event_record(device, l->ended, l->backward, NULL);
        (void)!device->ops->event_wait(device, l->ended, TIMEOUT_NS, "the test's backward", NULL);
    }
    device->ops->memory_free(device, l->place);
    for (size_t b = 0; b < BUCKETS; ++b) {
        void *memory[] = {l->part[b].m, l->part[b].v, l->part[b].source};
        device->ops->memory_free(device, l->part[b].p);
        device->ops->memory_free(device, l->part[b].bucket);
        for (int k = 0; k < 3; ++k)
            device->ops->memory_free(device, memory[k]);
        device->ops->pinned_free(device, l->pinned[b]);
    }
    device->ops->event_destroy(device, l->loaded);
    device->ops->event_destroy(device, l->ended);
    device->ops->stream_destroy(device, l->backward);
    device->ops->stream_destroy(device, l->optimizer);
}

static bool train_rank(gpu_rank *self)
{
    training *run = self->context;
    loop l = {.self = self, .run = run};
    bool is_alone = self->world_size == 1;
    if (self->rank == 0 && is_alone)
        self->sim->fail_call(0, run->fail_nth, FAILURE);
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (self->rank == 0 && !is_alone) /* before, hosts exchange errors by themselves */
        self->sim->fail_call(0, run->fail_nth, FAILURE);
    if (status == SW_OK)
        status = train(&l);
    self->sim->fail_call(self->rank, 0, 0); /* the teardown cannot report a failure */
    if (status != SW_OK && !is_alone && self->comm)
        sw_peers_abort(self->comm, &self->err);
    if (self->device)
        tear_down(&l);
    run->failed[self->rank] = status != SW_OK;
    snprintf(run->message[self->rank], sizeof run->message[0], "%s", self->err.message);
    gpu_rank_close(self);
    return status == SW_OK;
}

static bool run_ranks(int world_size, sim_policy policy, uint64_t seed, training *run)
{
    const sw_layout_caps caps = {.bytes = CAP_BYTES};
    sw_layout_fini(&layout);
    check(sw_layout_init(&layout, params, PARAMS, world_size, caps, NULL) == SW_OK &&
              layout.bucket_count == BUCKETS,
          "the layout");
    return gpu_ranks_run(world_size, policy, seed, train_rank, run);
}

typedef enum way { NCCLS_MEAN, DETERMINISTIC, NARROWED, WAYS } way;
static const char *const way_names[WAYS] = {"NCCL's mean", "deterministic", "narrowed"};

static void check_training(int world_size, int stage, way how, sim_policy policy, uint64_t seed)
{
    bool deterministic = how == DETERMINISTIC;
    bool joins = stage == 0 && world_size > 1 && seed % 2 == 0;
    static training run;
    static float expected[BUCKETS][NUMEL_MAX];
    char label[96];
    snprintf(label, sizeof label, "W = %d, stage %d, %s, policy %d, seed %d", world_size, stage,
             way_names[how], (int)policy, (int)seed);
    run = (training){.stage = stage,
                     .deterministic = deterministic,
                     .narrowed = how == NARROWED,
                     .steps = STEPS,
                     .joins = joins};
    check(run_ranks(world_size, policy, seed, &run), "%s: %s", label, run.message[0]);
    double norm = oracle(&run, world_size, STEPS, expected);
    double off = 0;
    for (int r = 0; r < world_size; ++r)
        for (size_t b = 0; b < BUCKETS; ++b) {
            const float *got = run.result[r][b];
            check(memcmp(got, run.result[0][b], numel_of(b) * sizeof(float)) == 0,
                  "%s: rank %d differs from rank 0 in bucket %zu", label, r, b);
            check(!deterministic || memcmp(got, expected[b], numel_of(b) * sizeof(float)) == 0,
                  "%s: bucket %zu is not the oracle's", label, b);
            for (size_t i = 0; i < numel_of(b); ++i)
                off = fmax(off, fabs((double)got[i] - (double)expected[b][i]));
        }
    /* Adam moves by at most the learning rate a step, so even a gradient of the other sign stays
     * within this bound. */
    check(off <= (deterministic ? 0 : 2 * 0.01 * STEPS), "%s: off by %g", label, off);
    if (stage < 2 || world_size == 1) /* else the norm covers this rank's slices alone */
        check(deterministic ? run.norm[0] == norm : fabs(run.norm[0] - norm) <= 1e-2 * norm,
              "%s: norm %.17g, not %.17g", label, run.norm[0], norm);
    for (int r = 0; r < world_size; ++r) {
        double own = stage < 2 || world_size == 1 ? run.norm[r] : norm;
        const float *found = run.clipped[r];
        check(deterministic ? found[0] == (float)own : fabs(found[0] - own) <= 1e-2 * own,
              "%s: rank %d clips by the norm %.9g, not %.17g", label, r, (double)found[0], own);
        check(fabs(found[1] - fmin(1.0, MAX_NORM / (found[0] + 1e-6))) <= 1e-6,
              "%s: rank %d clips by the factor %.9g", label, r, (double)found[1]);
    }
    check(run.host_waits == 0, "%s: %d host waits in the steps", label, (int)run.host_waits);
    check(run.wrong_use == 0, "%s: %d wrong use bytes", label, run.wrong_use);
    gpu_expect_clean(label);
}

typedef enum early_end { IN_STEP, AT_ONCE, WITHDRAWN, EARLY_ENDS } early_end;

/* Destroy in the middle of a step, and while the last step runs. */
static void check_early_end(int world_size, int stage, sim_policy policy, early_end end)
{
    static training run;
    run = (training){.stage = stage,
                     .deterministic = true,
                     .steps = 2,
                     .stop_in_step = end == IN_STEP,
                     .leave_at_once = end != IN_STEP,
                     .withdraws = end == WITHDRAWN};
    check(run_ranks(world_size, policy, 1, &run), "stop: %s", run.message[0]);
    gpu_expect_clean(end == IN_STEP ? "destroyed inside a step" : "destroyed at once");
}

typedef struct failing_case {
    training run;
    int stage;
    way how;
} failing_case;

static bool fail_among(int world_size, long nth, failing_case *tried)
{
    tried->run = (training){.stage = tried->stage,
                            .deterministic = tried->how == DETERMINISTIC,
                            .narrowed = tried->how == NARROWED,
                            .steps = 2,
                            .fail_nth = nth};
    return run_ranks(world_size, SIM_EAGER, 1, &tried->run);
}

static bool fail_at(long nth, void *context)
{
    return fail_among(1, nth, context);
}

static bool fail_first_of_three(long nth, void *context)
{
    return fail_among(3, nth, context);
}

static void check_failing_rank(int stage, way how)
{
    static failing_case tried;
    tried = (failing_case){.stage = stage, .how = how};
    gpu_check_failing_rank(fail_first_of_three, &tried, tried.run.message, tried.run.failed,
                           getenv("SW_TEST_LONG") ? 1 : 61);
}

static void check_failing_calls(int stage, way how)
{
    static failing_case tried;
    tried = (failing_case){.stage = stage, .how = how};
    gpu_check_failing_calls(fail_at, &tried, tried.run.message[0]);
}

static void check_trainings(int world_size, uint64_t seeds)
{
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (uint64_t seed = 1; seed <= seeds; ++seed)
            for (int stage = 0; stage <= 2; ++stage) {
                check_training(world_size, stage, DETERMINISTIC, (sim_policy)policy, seed);
                check_training(world_size, stage, NCCLS_MEAN, (sim_policy)policy, seed);
                if (seed == 1)
                    check_training(world_size, stage, NARROWED, (sim_policy)policy, seed);
            }
}

static void check_early_ends(void)
{
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (early_end end = IN_STEP; end < EARLY_ENDS; ++end)
            for (int stage = 0; stage <= 2; stage += 2)
                check_early_end(3, stage, (sim_policy)policy, end);
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    check_trainings(1, SEEDS);
    check_trainings(3, SEEDS);
    check_early_ends();
    for (int stage = 0; stage <= 2; ++stage)
        check_failing_calls(stage, stage != 1 ? DETERMINISTIC : NCCLS_MEAN);
    check_failing_calls(2, NCCLS_MEAN);
    check_failing_calls(2, NARROWED);
    for (int stage = 0; stage <= 2; ++stage)
        check_failing_rank(stage, stage == 1 ? DETERMINISTIC : NCCLS_MEAN);
    for (int where = SW_SLOTS_ON_HOST; where <= SW_SLOTS_ON_DEVICE; ++where) {
        gpu_ranks_slots = (gpu_slots){4096, (sw_slot_place)where};
        check_trainings(3, 2);
        check_early_ends();
        check_failing_calls(2, NARROWED);
    }
    return check_result();
}
