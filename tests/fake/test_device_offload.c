/* test_device_offload.c - steps on the host for parameters on simulated GPUs.
 *
 * Laws: after 3 steps, parameters, their copies, masters and moments have the bits of a step on
 * whole arrays in memory, for any schedule, slot size and number of threads. Arrays at home in pinned
 * memory are worked on in place, and no byte of them is copied. No schedule gives a
 * race, a read of unwritten bytes, or a leak. A step waits on the host once a batch and allocates
 * nothing. Destroying lets pending copies end first, also after a step that failed; the next step
 * then reports the failure. Each driver call that fails ends in a named error and leaves nothing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_ranks.h"
#include "optim/optim.h"
#include "zero/device_offload.h"

enum { RUNS = 7, STEPS = 3, SEEDS = 3, FAILURE = 999, NEVER = 1000, ARENA = 24 << 10 };
static const int64_t TIMEOUT_NS = 2000000000;

/* Runs with a copy are bfloat16 with a float32 master on the host; the others are float32. Arrays
 * without a gap between them are one copy. */
static const struct {
    size_t numel;
    bool has_copy, adjoins, value_is_home, gradient_is_home;
} shape[RUNS] = {{64, false, false, false, false}, {700, false, true, true, false},
                 {5, true, false, false, false},   {0, true, false, true, false},
                 {1300, true, false, true, true},  {33, true, true, false, false},
                 {129, false, false, false, true}};

typedef struct training {
    size_t slot_bytes;
    int threads;
    long fail_nth;  /* the call of rank 0 that fails; 0: none */
    int fail_piece; /* the piece that the host's step refuses; NEVER: none */
    bool leave_at_once;
    bool failed[GPU_RANKS_MAX];
    char message[GPU_RANKS_MAX][SW_ERROR_MESSAGE_BYTES];
    int wrong; /* bytes */
} training;

typedef struct loop {
    gpu_rank *self;
    training *run;
    sw_device_offload *offload;
    sw_stream *user;
    sw_event *looked;
    unsigned char *gradients, *values;     /* device memory */
    unsigned char *given, *seen;           /* pinned */
    unsigned char *home_g, *home_values;   /* pinned, in place of device memory */
    unsigned char *oracle_g, *oracle_copy; /* the expected contents of the device */
    size_t gradient_at[RUNS], value_at[RUNS];
    float *p[RUNS], *m[RUNS], *v[RUNS];    /* host memory; p: masters alone */
    float *op[RUNS], *om[RUNS], *ov[RUNS]; /* the oracle's */
} loop;

typedef struct options {
    sw_adam_options adam;
    training *run;
    int pieces; /* pieces begun; counted with one thread */
} options;

static size_t element_bytes(int run)
{
    return shape[run].has_copy ? 2 : 4;
}

static float value_of(size_t seed)
{
    return (float)((seed * 2654435761u >> 7) % 2000) / 1000.0f - 1.0f;
}

static void put(unsigned char *to, int run, float value)
{
    uint32_t bits;
    uint16_t half;
    memcpy(&bits, &value, sizeof bits);
    half = (uint16_t)(bits >> 16);
    if (shape[run].has_copy)
        memcpy(to, &half, sizeof half);
    else
        memcpy(to, &value, sizeof value);
}

static sw_status prepare(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    void *memory[6];
    size_t at = 0;
    SW_TRY(device->ops->stream_create(device, false, &l->user, err));
    SW_TRY(device->ops->event_create(device, &l->looked, err));
    SW_TRY(device->ops->memory_alloc(device, ARENA, &memory[0], err));
    l->gradients = memory[0];
    SW_TRY(device->ops->memory_alloc(device, ARENA, &memory[1], err));
    l->values = memory[1];
    SW_TRY(device->ops->pinned_alloc(device, ARENA, &memory[2], err));
    l->given = memory[2];
    SW_TRY(device->ops->pinned_alloc(device, ARENA, &memory[3], err));
    l->seen = memory[3];
    SW_TRY(device->ops->pinned_alloc(device, ARENA, &memory[4], err));
    l->home_g = memory[4];
    SW_TRY(device->ops->pinned_alloc(device, ARENA, &memory[5], err));
    l->home_values = memory[5];
    l->oracle_g = calloc(2, ARENA);
    l->oracle_copy = l->oracle_g + ARENA;
    memset(l->given, 0, ARENA);
    gpu_sim->host_access(l->given, ARENA, SW_ACCESS_WRITE, "the test's zeros");
    for (int i = 0; i < RUNS; ++i) {
        at = shape[i].adjoins ? at : (at + 256) / 128 * 128;
        l->gradient_at[i] = l->value_at[i] = at;
        at += shape[i].numel * element_bytes(i);
        float **arrays[] = {&l->p[i], &l->m[i], &l->v[i], &l->op[i], &l->om[i], &l->ov[i]};
        for (size_t k = 0; k < sizeof arrays / sizeof *arrays; ++k)
            *arrays[k] = calloc(shape[i].numel + 1, sizeof(float));
        for (size_t e = 0; e < shape[i].numel; ++e) {
            l->p[i][e] = l->op[i][e] = value_of(e * 31 + (size_t)i);
            put(l->oracle_copy + l->value_at[i] + e * element_bytes(i), i, l->p[i][e]);
        }
    }
    check(at <= ARENA, "the arena is too small: %zu bytes", at);
    memcpy(l->given, l->oracle_copy, ARENA);
    SW_TRY(device->ops->copy_async(device, l->values, l->given, ARENA, l->user, err));
    SW_TRY(device->ops->copy_async(device, l->home_values, l->given, ARENA, l->user, err));
    SW_TRY(device->ops->event_record(device, l->looked, l->user, err));
    return device->ops->event_wait(device, l->looked, TIMEOUT_NS, "the test's values", err);
}

/* Write the gradients of this step on the user's stream, as a backward does. */
static sw_status make_gradients(loop *l, int step)
{
    sw_device *device = l->self->device;
    for (int i = 0; i < RUNS; ++i)
        for (size_t e = 0; e < shape[i].numel; ++e)
            put(l->oracle_g + l->gradient_at[i] + e * element_bytes(i), i,
                value_of(e * 17 + (size_t)(i * 5 + step * 3)));
    memcpy(l->given, l->oracle_g, ARENA);
    gpu_sim->host_access(l->given, ARENA, SW_ACCESS_WRITE, "the test's gradients");
    SW_TRY(device->ops->copy_async(device, l->gradients, l->given, ARENA, l->user, &l->self->err));
    return device->ops->copy_async(device, l->home_g, l->given, ARENA, l->user, &l->self->err);
}

/* Run the host's step, and note its accesses of pinned memory. */
static sw_status step_seen(const void *given, const sw_optim_run *runs, size_t count, sw_error *err)
{
    options *o = (options *)(uintptr_t)given;
    for (size_t i = 0; i < count; ++i) {
        const sw_optim_run *r = &runs[i];
        gpu_sim->host_access(r->g, r->numel * sw_dtype_size_bytes(r->g_dtype), SW_ACCESS_READ,
                             "the host's step: gradients");
        gpu_sim->host_access(r->copy ? r->copy : r->p,
                             r->numel * (r->copy ? sw_dtype_size_bytes(r->copy_dtype) : 4),
                             SW_ACCESS_READ | SW_ACCESS_WRITE,
                             "the host's step: parameters");
    }
    if (o->run->threads == 1 && o->pieces++ == o->run->fail_piece)
        SW_FAIL(err, SW_E_INVALID, "the test refuses piece %d", o->run->fail_piece);
    return sw_adam_step(&o->adam, runs, count, err);
}

static void runs_of(const loop *l, int step, bool oracle, sw_optim_run *runs)
{
    for (int i = 0; i < RUNS; ++i) {
        unsigned char *values = shape[i].value_is_home ? l->home_values : l->values;
        unsigned char *gradients = shape[i].gradient_is_home ? l->home_g : l->gradients;
        unsigned char *value = (oracle ? l->oracle_copy : values) + l->value_at[i];
        sw_dtype dtype = shape[i].has_copy ? SW_DTYPE_BFLOAT16 : SW_DTYPE_FLOAT32;
        runs[i] = (sw_optim_run){.p = oracle ? l->op[i] : l->p[i],
                                 .m = oracle ? l->om[i] : l->m[i],
                                 .v = oracle ? l->ov[i] : l->v[i],
                                 .g = (oracle ? l->oracle_g : gradients) + l->gradient_at[i],
                                 .numel = shape[i].numel,
                                 .step = step + 1,
                                 .p_dtype = SW_DTYPE_FLOAT32,
                                 .state_dtype = SW_DTYPE_FLOAT32,
                                 .g_dtype = dtype};
        if (shape[i].has_copy) {
            runs[i].copy = value;
            runs[i].copy_dtype = dtype;
        } else {
            runs[i].p = value;
        }
    }
}

static int differing(const void *a, const void *b, size_t bytes)
{
    int count = 0;
    for (size_t i = 0; i < bytes; ++i)
        count += ((const unsigned char *)a)[i] != ((const unsigned char *)b)[i];
    return count;
}

/* Read the new parameters, as a forward does. */
static sw_status look(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    SW_TRY(device->ops->copy_async(device, l->seen, l->values, ARENA, l->user, err));
    for (int i = 0; i < RUNS; ++i)
        if (shape[i].value_is_home && shape[i].numel)
            SW_TRY(device->ops->copy_async(device, l->seen + l->value_at[i],
                                           l->home_values + l->value_at[i],
                                           shape[i].numel * element_bytes(i), l->user, err));
    SW_TRY(device->ops->event_record(device, l->looked, l->user, err));
    SW_TRY(device->ops->event_wait(device, l->looked, TIMEOUT_NS, "the test's look", err));
    gpu_sim->host_access(l->seen, ARENA, SW_ACCESS_READ, "the test's look");
    l->run->wrong += differing(l->seen, l->oracle_copy, ARENA);
    for (int i = 0; i < RUNS; ++i) {
        size_t bytes = shape[i].numel * sizeof(float);
        l->run->wrong += differing(l->m[i], l->om[i], bytes) + differing(l->v[i], l->ov[i], bytes);
        if (shape[i].has_copy)
            l->run->wrong += differing(l->p[i], l->op[i], bytes);
    }
    return SW_OK;
}

static sw_status train_step(loop *l, int step)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    sw_optim_run runs[RUNS], oracle[RUNS];
    options given = {.adam = {.lr = 1e-2,
                              .beta1 = 0.9,
                              .beta2 = 0.99,
                              .eps = 1e-8,
                              .weight_decay = 0.1,
                              .grad_scale = 0.5},
                     .run = l->run};
    SW_TRY(make_gradients(l, step));
    uint64_t waits = device->stats.host_waits, allocations = device->stats.allocations;
    const sw_device_offload_stats before = sw_device_offload_get_stats(l->offload);
    uint64_t down = 0, up = 0;
    runs_of(l, step, false, runs);
    runs_of(l, step, true, oracle);
    SW_TRY(sw_device_offload_step(l->offload, step_seen, &given, runs, RUNS, l->user, err));
    const sw_device_offload_stats after = sw_device_offload_get_stats(l->offload);
    uint64_t batches = after.batches - before.batches;
    for (int i = 0; i < RUNS; ++i) {
        up += shape[i].value_is_home ? 0 : shape[i].numel * element_bytes(i);
        down += shape[i].gradient_is_home ? 0 : shape[i].numel * element_bytes(i);
    }
    check(after.bytes_up - before.bytes_up == up && after.bytes_down - before.bytes_down == up + down,
          "%d bytes went up and %d down", (int)(after.bytes_up - before.bytes_up),
          (int)(after.bytes_down - before.bytes_down));
    check(device->stats.host_waits - waits == batches && batches > 0,
          "%d waits of the host for %d batches", (int)(device->stats.host_waits - waits),
          (int)batches);
    check(device->stats.allocations == allocations, "a step allocates");
    sw_error refused;
    check(sw_adam_step(&given.adam, oracle, RUNS, &refused) == SW_OK, "the oracle: %s",
          refused.message);
    return l->run->leave_at_once && step + 1 == STEPS ? SW_OK : look(l);
}

static sw_status train(loop *l)
{
    sw_error refused;
    check(sw_device_offload_create(l->self->all, 100, 1, &l->offload, &refused) == SW_E_INVALID &&
              strstr(refused.message, "positive multiple of 256, not 100"),
          "slots of 100 bytes: %s", refused.message);
    SW_TRY(prepare(l));
    SW_TRY(sw_device_offload_create(l->self->all, l->run->slot_bytes, l->run->threads, &l->offload,
                                    &l->self->err));
    for (int step = 0; step < STEPS; ++step) {
        sw_status status = train_step(l, step);
        if (status != SW_OK && l->run->fail_piece != NEVER)
            check(sw_device_offload_step(l->offload, step_seen, NULL, NULL, 0, l->user, &refused) ==
                          SW_E_STATE &&
                      strstr(refused.message, "while changing it: the test refuses piece"),
                  "a step after one that broke off: %s", refused.message);
        SW_TRY(status);
    }
    return SW_OK;
}

static void tear_down(loop *l)
{
    sw_device *device = l->self->device;
    sw_device_offload_destroy(l->offload);
    if (l->run->failed[l->self->rank] && l->looked && l->user) {
        (void)!device->ops->event_record(device, l->looked, l->user, NULL);
        (void)!device->ops->event_wait(device, l->looked, TIMEOUT_NS, "the test's end", NULL);
    }
    device->ops->memory_free(device, l->values);
    device->ops->memory_free(device, l->gradients);
    device->ops->pinned_free(device, l->seen);
    device->ops->pinned_free(device, l->given);
    device->ops->pinned_free(device, l->home_g);
    device->ops->pinned_free(device, l->home_values);
    device->ops->event_destroy(device, l->looked);
    device->ops->stream_destroy(device, l->user);
    free(l->oracle_g);
    for (int i = 0; i < RUNS; ++i) {
        float *arrays[] = {l->p[i], l->m[i], l->v[i], l->op[i], l->om[i], l->ov[i]};
        for (size_t k = 0; k < sizeof arrays / sizeof *arrays; ++k)
            free(arrays[k]);
    }
}

static bool train_rank(gpu_rank *self)
{
    training *run = self->context;
    loop l = {.self = self, .run = run};
    if (self->rank == 0)
        self->sim->fail_call(0, run->fail_nth, FAILURE);
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = train(&l);
    self->sim->fail_call(self->rank, 0, 0);
    run->failed[self->rank] = status != SW_OK;
    if (self->device)
        tear_down(&l);
    snprintf(run->message[self->rank], sizeof run->message[0], "%s", self->err.message);
    gpu_rank_close(self);
    return status == SW_OK;
}

static void check_training(training given, int world_size, sim_policy policy, uint64_t seed)
{
    static training run;
    char label[128];
    snprintf(label, sizeof label, "W = %d, policy %d, seed %d, slot %zu, %d threads%s", world_size,
             (int)policy, (int)seed, given.slot_bytes, given.threads,
             given.leave_at_once ? ", left at once" : "");
    run = given;
    bool done = gpu_ranks_run(world_size, policy, seed, train_rank, &run);
    if (given.fail_piece == NEVER) {
        check(done, "%s: %s", label, run.message[0]);
        check(run.wrong == 0, "%s: %d wrong bytes", label, run.wrong);
    } else {
        check(!done && strstr(run.message[0], "the test refuses piece"), "%s: %s", label,
              run.message[0]);
    }
    gpu_expect_clean(label);
}

static bool fail_at(long nth, void *context)
{
    training *run = context;
    *run = (training){.fail_nth = nth, .slot_bytes = 4096, .threads = 1, .fail_piece = NEVER};
    return gpu_ranks_run(1, SIM_EAGER, 1, train_rank, run);
}

int main(int argc, char **argv)
{
    static training run;
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (uint64_t seed = 1; seed <= SEEDS; ++seed) {
            training plain = {.slot_bytes = seed == 3 ? 65536 : 2048,
                              .threads = 1,
                              .fail_piece = NEVER,
                              .leave_at_once = seed == 2};
            check_training(plain, 2, (sim_policy)policy, seed);
            training threaded = plain;
            threaded.threads = 3;
            check_training(threaded, 1, (sim_policy)policy, seed);
            training broken = plain;
            broken.fail_piece = (int)seed - 1;
            check_training(broken, 1, (sim_policy)policy, seed);
        }
    gpu_check_failing_calls(fail_at, &run, run.message[0]);
    return check_result();
}
