/* test_sim.c - each planted defect is reported under every policy, and the same program without the
 * defect is not. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_ranks.h"

static const int64_t TIMEOUT_NS =
    30000000000; /* the simulation detects a deadlock sooner */
enum { BYTES = 256, NUMEL = BYTES / 4 };

typedef enum defect {
    NONE = 0,
    NO_WAIT,       /* a copy reads what another stream writes */
    NO_HOST_WAIT,  /* the host reads pinned memory while a copy writes it */
    FREED_EARLY,   /* memory is freed while a stream still writes it */
    FREED,         /* memory is used after it was freed */
    NEVER_WRITTEN, /* bytes are read that were never written */
    OUT_OF_BOUNDS, /* a range exceeds its allocation */
    UNDECLARED,    /* a kernel writes more than its contract says */
    DEADLOCK,      /* a rank does not come to a collective */
    MISMATCH,      /* ranks issue different collectives */
    UNSETTLED,     /* a communicator is used before its last call is known to be done */
    DEFECT_COUNT,
} defect;

static const char *const report_of[DEFECT_COUNT] = {
    [NO_WAIT] = "race",
    [NO_HOST_WAIT] = "race",
    [FREED_EARLY] = "race",
    [FREED] = "use after free",
    [NEVER_WRITTEN] = "uninitialised read",
    [OUT_OF_BOUNDS] = "out of bounds",
    [UNDECLARED] = "undeclared write",
    [DEADLOCK] = "deadlock",
    [MISMATCH] = "mismatched collective",
    [UNSETTLED] = "unsettled communicator",
};

static atomic_int played; /* ranks that have finished the scene */
static bool stray; /* the kernel below writes one byte too many */
static bool is_lone_at_once;

static void stray_reference(const void *args)
{
    const sw_cast_args *a = args;
    memset(a->to, 9, a->numel + (stray ? 1 : 0));
}

static void stray_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_cast_args *a = args;
    report(context, a->to, (size_t)a->numel, SW_ACCESS_WRITE);
}

typedef struct scene {
    sw_stream *first, *second;
    sw_event *event, *end;
    void *memory, *other, *pinned;
} scene;

static sw_status set(gpu_rank *self, scene *s)
{
    const sw_device_ops *ops = self->device->ops;
    sw_error *err = &self->err;
    SW_TRY(ops->stream_create(self->device, false, &s->first, err));
    SW_TRY(ops->stream_create(self->device, false, &s->second, err));
    SW_TRY(ops->event_create(self->device, &s->event, err));
    SW_TRY(ops->event_create(self->device, &s->end, err));
    SW_TRY(ops->memory_alloc(self->device, BYTES, &s->memory, err));
    SW_TRY(ops->memory_alloc(self->device, BYTES, &s->other, err));
    SW_TRY(ops->pinned_alloc(self->device, BYTES, &s->pinned, err));
    if (*(defect *)self->context != NEVER_WRITTEN)
        SW_TRY(ops->fill_async(self->device, s->memory, 1, BYTES, s->first, err));
    return ops->event_record(self->device, s->event, s->first, err);
}

/* Make two calls on a communicator of this rank alone, with the required query between if `asks`.
 */
static sw_status use_twice(gpu_rank *self, scene *s, bool asks)
{
    const sw_nccl_table *call = &self->all->library.call;
    sw_nccl_config config = {.size = sizeof config,
                             .magic = SW_NCCL_CONFIG_MAGIC,
                             .version = SW_NCCL_CONFIG_VERSION};
    sw_nccl_id id = self->id;
    sw_nccl_comm comm = NULL;
    sw_nccl_result told = SW_NCCL_IN_PROGRESS, got[2];
    sw_device_visit visit;
    SW_TRY(self->device->ops->enter(self->device, &visit, &self->err));
    id.internal[sizeof id.internal - 1] = (char)(1 + self->rank);
    if (call->ncclCommInitRankConfig(&comm, 1, id, 0, &config) == SW_NCCL_IN_PROGRESS)
        (void)call->ncclCommGetAsyncError(comm, &told);
    for (int k = 0; k < 2; ++k) {
        got[k] = call->ncclAllReduce(s->other, s->other, NUMEL, SW_NCCL_FLOAT32, SW_NCCL_SUM, comm,
                                     (sw_cu_stream)(void *)s->second);
        if (asks)
            (void)call->ncclCommGetAsyncError(comm, &told);
    }
    (void)call->ncclCommAbort(comm);
    self->device->ops->leave(self->device, &visit);
    sw_nccl_result first = is_lone_at_once ? SW_NCCL_SUCCESS : SW_NCCL_IN_PROGRESS;
    check(told == SW_NCCL_SUCCESS && got[0] == first &&
              got[1] == (asks ? first : SW_NCCL_INVALID_ARGUMENT),
          "two calls returned %d and %d", got[0], got[1]);
    return SW_OK;
}

static sw_status play(gpu_rank *self, scene *s)
{
    const sw_device_ops *ops = self->device->ops;
    sw_error *err = &self->err;
    defect planted = *(defect *)self->context;
    size_t size = planted == OUT_OF_BOUNDS ? BYTES + 8 : BYTES;
    if (planted == FREED)
        ops->memory_free(self->device, s->other);
    if (planted != NO_WAIT)
        SW_TRY(ops->stream_wait(self->device, s->second, s->event, err));
    SW_TRY(ops->copy_async(self->device, s->other, s->memory, size, s->second, err));
    SW_TRY(ops->copy_async(self->device, s->pinned, s->other, BYTES, s->second, err));
    SW_TRY(ops->event_record(self->device, s->end, s->second, err));
    /* elsewhere, where it happens at once; the wait above stays one for the first stream */
    SW_TRY(ops->event_record(self->device, s->event, self->all->stream, err));
    SW_TRY(ops->event_wait(self->device, s->event, TIMEOUT_NS, "a later record", err));
    if (planted != NO_HOST_WAIT)
        SW_TRY(ops->event_wait(self->device, s->end, TIMEOUT_NS, "the scene", err));
    self->sim->host_access(s->pinned, BYTES, SW_ACCESS_READ, "the scene");
    check(planted != NONE || *(const char *)s->pinned == 1, "a wait ended with a later record");
    sw_cast_args args = {.to = s->other, .numel = BYTES / 2};
    SW_TRY(sw_kernel_launch(&self->kernels, SW_KERNEL_CAST, &args, s->second, err));
    SW_TRY(use_twice(self, s, planted != UNSETTLED));
    if (planted == DEADLOCK && self->rank == 1)
        return SW_OK;
    size_t numel = planted == MISMATCH && self->rank == 1 ? NUMEL / 2 : NUMEL;
    SW_TRY(sw_peers_all_reduce(self->comm, s->memory, numel, SW_DTYPE_FLOAT32, SW_REDOP_SUM,
                               s->second, err));
    SW_TRY(ops->event_record(self->device, s->end, s->second, err));
    return sw_peers_wait(self->comm, s->end, "the collective", err);
}

/* Wait for the other ranks: a rank that left at once would be seen to have left. */
static void await_others(gpu_rank *self, const scene *s)
{
    bool unused;
    while (atomic_load(&played) < self->world_size - 1)
        if (self->device->ops->event_query(self->device, s->event, &unused, NULL) != SW_OK)
            return;
}

static bool act(gpu_rank *self)
{
    scene s = {0};
    defect planted = *(defect *)self->context;
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = set(self, &s);
    if (status == SW_OK)
        status = play(self, &s);
    if (planted == DEADLOCK && self->rank == 1)
        await_others(self, &s);
    atomic_fetch_add(&played, 1);
    const sw_device_ops *ops = self->device->ops;
    if (planted != FREED_EARLY && ops->event_record(self->device, s.end, s.second, NULL) == SW_OK)
        (void)!ops->event_wait(self->device, s.end, TIMEOUT_NS, "the end", NULL);
    if (planted == FREED_EARLY)
        (void)!ops->fill_async(self->device, s.memory, 2, BYTES, s.second, NULL);
    ops->memory_free(self->device, s.memory);
    if (planted != FREED)
        ops->memory_free(self->device, s.other);
    ops->pinned_free(self->device, s.pinned);
    ops->event_destroy(self->device, s.event);
    ops->event_destroy(self->device, s.end);
    ops->stream_destroy(self->device, s.first);
    ops->stream_destroy(self->device, s.second);
    gpu_rank_close(self);
    return status == SW_OK;
}

/* ---- what a driver or NCCL may do in the worst case ---- */

typedef struct strict_scene {
    const char *word; /* of SIM_STRICT */
    bool is_planted;
} strict_scene;

/* A second communicator of the rank on the same GPU. */
static sw_status open_second(gpu_rank *self, gpu_rank *second)
{
    *second = *self;
    second->id.internal[sizeof second->id.internal - 2] = 's';
    return gpu_rank_open(second, TIMEOUT_NS);
}

static sw_status reduce(gpu_rank *self, void *memory, sw_event *end)
{
    SW_TRY(sw_peers_all_reduce(self->comm, memory, NUMEL, SW_DTYPE_FLOAT32, SW_REDOP_SUM,
                               self->all->stream, &self->err));
    return self->device->ops->event_record(self->device, end, self->all->stream, &self->err);
}

/* Use two communicators at once; planted: in another order on rank 1. */
static sw_status play_order(gpu_rank *self, void *memory[2], sw_event *end[2])
{
    const strict_scene *strict = self->context;
    gpu_rank second, *rank[2] = {self, &second};
    int first = strict->is_planted && self->rank == 1;
    SW_TRY(open_second(self, &second));
    sw_status status = reduce(rank[first], memory[first], end[first]);
    if (status == SW_OK)
        status = reduce(rank[!first], memory[!first], end[!first]);
    for (int k = 0; k < 2 && status == SW_OK; ++k)
        status = sw_peers_wait(rank[k]->comm, end[k], "a collective", &self->err);
    gpu_rank_close(&second);
    return status;
}

/* Allocate while a collective waits for another rank; planted: that rank's host waits for this one. */
static sw_status play_allocation(gpu_rank *self, void *memory[2], sw_event *end[2])
{
    const strict_scene *strict = self->context;
    void *more = NULL;
    bool unused;
    while (strict->is_planted && self->rank > 0 && atomic_load(&played) == 0)
        SW_TRY(self->device->ops->event_query(self->device, end[1], &unused, &self->err));
    SW_TRY(reduce(self, memory[0], end[0]));
    SW_TRY(self->device->ops->memory_alloc(self->device, BYTES, &more, &self->err));
    atomic_store(&played, 1);
    SW_TRY(sw_peers_wait(self->comm, end[0], "a collective", &self->err));
    self->device->ops->memory_free(self->device, more);
    return SW_OK;
}

static bool act_strictly(gpu_rank *self)
{
    const strict_scene *strict = self->context;
    void *memory[2] = {NULL};
    sw_event *end[2] = {NULL};
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    for (int k = 0; k < 2 && status == SW_OK; ++k) {
        const sw_device_ops *ops = self->device->ops;
        status = ops->memory_alloc(self->device, BYTES, &memory[k], &self->err);
        if (status == SW_OK)
            status = ops->event_create(self->device, &end[k], &self->err);
        if (status == SW_OK)
            status = ops->fill_async(self->device, memory[k], 1, BYTES, self->all->stream, &self->err);
        if (status == SW_OK)
            status = ops->event_record(self->device, end[k], self->all->stream, &self->err);
        if (status == SW_OK)
            status = ops->event_wait(self->device, end[k], TIMEOUT_NS, "a fill", &self->err);
    }
    if (status == SW_OK)
        status = strcmp(strict->word, "order") == 0 ? play_order(self, memory, end)
                                                     : play_allocation(self, memory, end);
    for (int k = 0; self->device && k < 2; ++k) {
        self->device->ops->memory_free(self->device, memory[k]);
        self->device->ops->event_destroy(self->device, end[k]);
    }
    gpu_rank_close(self);
    return status == SW_OK;
}

static void check_strictly(void)
{
    static const char *const words[] = {"order", "device"};
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (int k = 0; k < 8; ++k) { /* as it is said, or not; planted or not */
            strict_scene strict = {.word = words[k % 2], .is_planted = k & 2};
            bool is_strict = k & 4;
            setenv("SIM_STRICT", is_strict ? strict.word : "", 1);
            atomic_store(&played, 0);
            bool ok = gpu_ranks_run(3, (sim_policy)policy, 7, act_strictly, &strict);
            if (is_strict && strict.is_planted) {
                gpu_expect_report("deadlock", false);
            } else {
                check(ok, "policy %d, %s: the scene failed", policy, strict.word);
                gpu_expect_clean(strict.word);
            }
        }
    unsetenv("SIM_STRICT");
}

int main(int argc, char **argv)
{
    static sw_kernel_reference references[SW_KERNEL_COUNT];
    setenv("NCCL_RUNTIME_CONNECT", "0", 1); /* a planted deadlock is the GPU's */
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    memcpy(references, sw_kernel_references(), sizeof references);
    references[SW_KERNEL_CAST].reference = stray_reference;
    references[SW_KERNEL_CAST].accesses = stray_accesses;
    gpu_sim->use_kernels(references, SW_KERNEL_COUNT);
    check_strictly();
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (defect planted = NONE; planted < DEFECT_COUNT; ++planted) {
            stray = planted == UNDECLARED;
            is_lone_at_once = policy % 2 && planted != UNSETTLED;
            setenv("SIM_STRICT", is_lone_at_once ? "lone" : "", 1);
            atomic_store(&played, 0);
            bool ok = gpu_ranks_run(3, (sim_policy)policy, 7, act, &planted);
            if (planted == NONE) {
                check(ok, "policy %d: the scene failed", policy);
                gpu_expect_clean("no defect");
            } else {
                gpu_expect_report(report_of[planted], planted == NO_WAIT && policy == 0);
                check(ok != (planted == DEADLOCK || planted == MISMATCH),
                      "policy %d, defect %d: the engine saw %s", policy, (int)planted,
                      ok ? "nothing" : "an error");
            }
        }
    return check_result();
}
