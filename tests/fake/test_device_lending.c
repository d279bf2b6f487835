/* test_device_lending.c - a reducer over a borrowed communicator.
 *
 * Laws: the engine's operations and the owner's have one order; all of the engine's have run when
 * the communicator goes back; none of them ends it, and nothing is registered with it. Each driver
 * call that fails ends in a named error and leaves nothing.
 */
#include <stdio.h>
#include <string.h>

#include "gpu_ranks.h"
#include "reduce/reducer.h"

enum { LENT_STEPS = 8, LENT_NUMEL = 3, GRADIENTS = 7, SEEDS = 5, FAILURE = 999 };
static const int64_t TIMEOUT_NS = 2000000000;

typedef struct lending {
    long fail_nth;
    float received[GPU_RANKS_MAX][LENT_NUMEL];
    char message[SW_ERROR_MESSAGE_BYTES];
} lending;

typedef struct lender { /* torch's role on a rank */
    gpu_rank *self;
    sw_nccl_comm handle;
    sw_stream *user;
    sw_event *read;
    sw_reducer *reducer;
    void *own, *ours; /* device memory of its collectives, and of the engine's */
    void *pinned;
} lender;

static sw_status lend(lender *l)
{
    const sw_nccl_table *call = &l->self->all->library.call;
    sw_device *device = l->self->device;
    sw_nccl_config config = {.size = sizeof config,
                             .magic = SW_NCCL_CONFIG_MAGIC,
                             .version = SW_NCCL_CONFIG_VERSION,
                             .blocking = 1}; /* as torch's is */
    sw_device_visit visit;
    if (!l->self->all->library.handle)
        SW_FAIL(&l->self->err, SW_E_DEVICE, "the test's NCCL: %s",
                l->self->all->nccl_missing.message);
    SW_TRY(device->ops->enter(device, &visit, &l->self->err));
    sw_nccl_result begun = call->ncclCommInitRankConfig(&l->handle, l->self->world_size,
                                                        l->self->id, l->self->rank, &config);
    device->ops->leave(device, &visit);
    if (begun != SW_NCCL_SUCCESS)
        SW_FAIL(&l->self->err, SW_E_DEVICE, "the test's own communicator: %d", begun);
    return SW_OK;
}

/* Run a collective of the owner's. */
static sw_status use_own(lender *l)
{
    sw_nccl_result result = l->self->all->library.call.ncclAllReduce(
        l->own, l->own, LENT_NUMEL, SW_NCCL_FLOAT32, SW_NCCL_MAX, l->handle,
        (sw_cu_stream)(void *)l->user);
    if (result != SW_NCCL_SUCCESS)
        SW_FAIL(&l->self->err, SW_E_DEVICE, "the test's own all_reduce: %d", result);
    return SW_OK;
}

/* Exchange use bytes alone, since no other event orders an operation without buckets. */
static sw_status step_on_lent(lender *l, int step)
{
    sw_error *err = &l->self->err;
    SW_TRY(use_own(l));
    SW_TRY(sw_reducer_arrive(l->reducer, err));
    SW_TRY(sw_reducer_open(l->reducer, step, true, err));
    SW_TRY(sw_reducer_finish(l->reducer, err));
    SW_TRY(use_own(l));
    sw_reducer_count_step(l->reducer);
    return SW_OK;
}

static sw_status borrow(lender *l)
{
    sw_device_comm *all = l->self->all;
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    size_t bytes = LENT_NUMEL * sizeof(float);
    const sw_reducer_options options = {.bucket_cap_bytes = 1, .label = "m"};
    sw_layout_param params[GRADIENTS]; /* no bucket takes part: none is adopted */
    const char *names[GRADIENTS];
    for (int i = 0; i < GRADIENTS; ++i) {
        params[i] = (sw_layout_param){.numel = 1, .dtype = SW_DTYPE_FLOAT32, .trainable = true};
        names[i] = "p";
    }
    SW_TRY(device->ops->stream_create(device, false, &l->user, err));
    SW_TRY(device->ops->event_create(device, &l->read, err));
    SW_TRY(device->ops->memory_alloc(device, bytes, &l->own, err));
    SW_TRY(device->ops->memory_alloc(device, bytes, &l->ours, err));
    SW_TRY(device->ops->pinned_alloc(device, bytes, &l->pinned, err));
    SW_TRY(device->ops->fill_async(device, l->own, 0, bytes, l->user, err));
    SW_TRY(device->ops->fill_async(device, l->ours, (unsigned char)l->self->rank, bytes, l->user,
                                   err));
    SW_TRY(
        sw_device_comm_borrow(all, l->handle, l->self->rank, l->self->world_size, TIMEOUT_NS, err));
    SW_TRY(sw_reducer_create_on_device(all, params, names, GRADIENTS, &options, &l->reducer, err));
    sw_reducer_use_stream(l->reducer, l->user);
    for (int step = 0; step < LENT_STEPS; ++step)
        SW_TRY(step_on_lent(l, step));
    return SW_OK;
}

/* Give the communicator back; its owner ends it at once, so our last operation must have run. */
static sw_status give_back(lender *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    size_t bytes = LENT_NUMEL * sizeof(float);
    sw_device_range range = {.data = l->ours, .numel = LENT_NUMEL, .dtype = SW_DTYPE_FLOAT32};
    lending *run = l->self->context;
    sw_reducer_destroy(l->reducer);
    l->reducer = NULL;
    SW_TRY(
        sw_device_comm_broadcast(l->self->all, &range, 1, l->self->world_size - 1, l->user, err));
    sw_device_comm_disconnect(l->self->all);
    sw_nccl_result result = l->self->all->library.call.ncclCommDestroy(l->handle);
    if (result != SW_NCCL_SUCCESS)
        SW_FAIL(err, SW_E_DEVICE, "the test's end of its communicator: %d", result);
    l->handle = NULL;
    SW_TRY(device->ops->copy_async(device, l->pinned, l->ours, bytes, l->user, err));
    SW_TRY(device->ops->event_record(device, l->read, l->user, err));
    SW_TRY(device->ops->event_wait(device, l->read, TIMEOUT_NS, "the test's results", err));
    memcpy(run->received[l->self->rank], l->pinned, bytes);
    return SW_OK;
}

static void end_lending(lender *l)
{
    sw_device *device = l->self->device;
    sw_reducer_destroy(l->reducer);
    sw_device_comm_disconnect(l->self->all);
    if (l->user && l->read && device->ops->event_record(device, l->read, l->user, NULL) == SW_OK)
        (void)!device->ops->event_wait(device, l->read, TIMEOUT_NS, "the test's stream", NULL);
    if (l->handle) /* it has not been ended yet */
        check(l->self->all->library.call.ncclCommDestroy(l->handle) == SW_NCCL_SUCCESS, "its end");
    device->ops->memory_free(device, l->own);
    device->ops->memory_free(device, l->ours);
    device->ops->pinned_free(device, l->pinned);
    device->ops->event_destroy(device, l->read);
    device->ops->stream_destroy(device, l->user);
}

static bool lend_rank(gpu_rank *self)
{
    lending *run = self->context;
    lender l = {.self = self};
    if (self->rank == 0)
        self->sim->fail_call(0, run->fail_nth, FAILURE);
    sw_status status = gpu_rank_create(self);
    if (status == SW_OK)
        status = lend(&l);
    if (status == SW_OK)
        status = borrow(&l);
    self->sim->fail_call(self->rank, 0, 0); /* the teardown cannot report a failure */
    if (status == SW_OK)
        status = give_back(&l);
    if (self->all)
        end_lending(&l);
    if (self->rank == 0)
        snprintf(run->message, sizeof run->message, "%s", self->err.message);
    gpu_rank_close(self);
    return status == SW_OK;
}

static void check_lending(int world_size, sim_policy policy, uint64_t seed)
{
    static lending run;
    float expected[LENT_NUMEL];
    memset(expected, world_size - 1, sizeof expected);
    run = (lending){0};
    check(gpu_ranks_run(world_size, policy, seed, lend_rank, &run), "lent: %s", run.message);
    for (int r = 0; r < world_size; ++r)
        check(memcmp(run.received[r], expected, sizeof expected) == 0,
              "lent: the last operation did not run on rank %d", r);
    gpu_expect_clean("lent");
}

static bool fail_lent_at(long nth, void *context)
{
    lending *run = context;
    *run = (lending){.fail_nth = nth};
    return gpu_ranks_run(1, SIM_EAGER, 1, lend_rank, run);
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (uint64_t seed = 1; seed <= SEEDS; ++seed)
            check_lending(3, (sim_policy)policy, seed);
    static lending lent;
    gpu_check_failing_calls(fail_lent_at, &lent, lent.message);
    return check_result();
}
