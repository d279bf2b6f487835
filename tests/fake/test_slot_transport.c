/* test_slot_transport.c - ranks of one host exchange data through slots, in host memory or in the
 * GPUs' own, under any schedule.
 *
 * Laws: each operation gives the bits of a naive loop over all ranks' inputs, sums in rank order
 * included; for 0 bytes, odd sizes, and many slots' worth; alone and in groups. Nothing races
 * between ranks, though all use the same memory; nothing is left; no operation waits on the host or
 * allocates. If a rank does not come, gives up, or its driver fails, all ranks have one sentence
 * about it, and their streams still end.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_ranks.h"
#include "kernels/kernels.h"

enum { SLOT_BYTES = 4096, NUMEL_MAX = 2600, SEEDS = 2, FAILURE = 999, RUNS = 2 };
static const int64_t TIMEOUT_NS = 2000000000, SHORT_NS = 50000000;

typedef enum work {
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    GATHER_SLICES,
    EXCHANGE,
    EXCHANGE_TURNED,
    GATHER_AMONG,
    BROADCAST,
    WORKS
} work;

typedef struct scene {
    size_t numel; /* elements of a slice */
    sw_dtype dtype;
    sw_redop op;
    bool grouped;
    bool leaves;   /* destroy while everything is in flight */
    long fail_nth; /* the call of rank `failing` that fails */
    int failing;
    bool all_enqueued;                /* rank `failing` has enqueued everything */
    uint64_t host_waits, allocations; /* during the operations */
    unsigned char result[GPU_RANKS_MAX][WORKS][NUMEL_MAX * 8 * GPU_RANKS_MAX];
    char message[GPU_RANKS_MAX][SW_ERROR_MESSAGE_BYTES];
    sw_status status[GPU_RANKS_MAX];
} scene;

typedef struct place {
    void *data;          /* world_size slices of device memory: input and result */
    void *contributions; /* as many, for results that are not in place */
    void *pinned;
} place;

static size_t slice_bytes(const scene *s)
{
    return s->numel * sw_dtype_size_bytes(s->dtype);
}

/* Fill with small integers, which every dtype has; a float sum still depends on its order. */
static void fill(const scene *s, unsigned char *to, int rank, int number, int world_size)
{
    for (size_t i = 0; i < s->numel * (size_t)world_size; ++i) {
        uint32_t mixed = (uint32_t)(i * 2654435761u) + (uint32_t)(rank * 40503 + number * 9176);
        mixed ^= mixed >> 13;
        if (s->dtype == SW_DTYPE_FLOAT32)
            ((float *)(void *)to)[i] = (float)(int32_t)(mixed * 2246822519u) * 0x1p-25f;
        else if (s->dtype == SW_DTYPE_BFLOAT16)
            ((uint16_t *)(void *)to)[i] = (uint16_t)(0x3f00 + mixed % 0x200);
        else
            to[i] = (unsigned char)mixed;
    }
}

/* Return true if the result is in the other memory. */
static bool is_elsewhere(work w)
{
    return w == GATHER_SLICES || w == EXCHANGE || w == EXCHANGE_TURNED;
}

static int turned(int rank, int world_size)
{
    return (rank + 1) % world_size;
}

/* ---- the naive loop ---- */

static void fold(const scene *s, unsigned char *to, const unsigned char *inputs[], size_t offset,
                 size_t numel, int world_size)
{
    const void *source[GPU_RANKS_MAX];
    void *out = to;
    for (int r = 0; r < world_size; ++r)
        source[r] = inputs[r] + offset;
    sw_kernels()->fold[s->dtype](&out, 1, source, world_size, numel, 1.0 / world_size, s->op);
}

/* Compute the result of rank `rank`; `to` has the bytes from before. */
static void expect_work(const scene *s, work w, int rank, int world_size,
                        const unsigned char *inputs[], unsigned char *to)
{
    size_t bytes = slice_bytes(s), own = (size_t)rank * bytes;
    switch (w) {
    case ALL_REDUCE:
        fold(s, to, inputs, 0, s->numel * (size_t)world_size, world_size);
        break;
    case REDUCE_SCATTER:
        fold(s, to + own, inputs, own, s->numel, world_size);
        break;
    case ALL_GATHER:
    case GATHER_SLICES:
        for (int r = 0; r < world_size; ++r)
            memcpy(to + (size_t)r * bytes, inputs[r] + (w == ALL_GATHER ? (size_t)r * bytes : 0),
                   bytes);
        break;
    case EXCHANGE:
    case EXCHANGE_TURNED:
        for (int r = 0; r < world_size; ++r) {
            int slice = w == EXCHANGE ? rank : turned(rank, world_size);
            if (r != rank)
                memcpy(to + (size_t)r * bytes, inputs[r] + (size_t)slice * bytes, bytes);
        }
        break;
    case GATHER_AMONG: /* all ranks, the last first */
        for (int k = 0; k < world_size; ++k)
            memcpy(to + (size_t)k * bytes, inputs[world_size - 1 - k] + (size_t)k * bytes, bytes);
        break;
    default:
        memcpy(to, inputs[world_size - 1], bytes * (size_t)world_size);
    }
}

/* ---- the same through slots ---- */

static sw_status enqueue(gpu_rank *self, const scene *s, work w, const place *at)
{
    sw_stream *stream = self->all->stream;
    sw_peers *peers = self->comm;
    int world_size = self->world_size, order[GPU_RANKS_MAX], slices[GPU_RANKS_MAX];
    for (int r = 0; r < world_size; ++r) {
        order[r] = world_size - 1 - r;
        slices[r] = turned(r, world_size);
    }
    switch (w) {
    case ALL_REDUCE:
        return sw_peers_all_reduce(peers, at->data, s->numel * (size_t)world_size, s->dtype, s->op,
                                   stream, &self->err);
    case REDUCE_SCATTER:
        return sw_peers_reduce_scatter(peers, at->data,
                                       (char *)at->data + (size_t)self->rank * slice_bytes(s),
                                       s->numel, s->dtype, s->op, stream, &self->err);
    case ALL_GATHER:
        return sw_peers_all_gather(peers, at->data, s->numel, s->dtype, stream, &self->err);
    case GATHER_SLICES:
        return sw_peers_gather_slices(peers, at->data, at->contributions, slice_bytes(s), stream,
                                      &self->err);
    case EXCHANGE:
    case EXCHANGE_TURNED:
        return sw_peers_exchange_slices(peers, at->data, at->contributions, s->numel, s->dtype,
                                        w == EXCHANGE ? NULL : slices, stream, &self->err);
    case GATHER_AMONG:
        return sw_peers_gather_among(peers, at->data, slice_bytes(s), order, world_size, stream,
                                     &self->err);
    default:
        return sw_peers_broadcast(peers, at->data, s->numel * (size_t)world_size, s->dtype,
                                  world_size - 1, stream, &self->err);
    }
}

static sw_status allocate(gpu_rank *self, const scene *s, place *at)
{
    sw_device *device = self->device;
    size_t bytes = slice_bytes(s) * (size_t)self->world_size;
    SW_TRY(device->ops->memory_alloc(device, bytes, &at->data, &self->err));
    SW_TRY(device->ops->memory_alloc(device, bytes, &at->contributions, &self->err));
    return device->ops->pinned_alloc(device, bytes, &at->pinned, &self->err);
}

static sw_status upload(gpu_rank *self, const scene *s, const place *at, int number)
{
    sw_device *device = self->device;
    size_t bytes = slice_bytes(s) * (size_t)self->world_size;
    fill(s, at->pinned, self->rank, number, self->world_size);
    gpu_sim->host_access(at->pinned, bytes, SW_ACCESS_WRITE, "the test's upload");
    SW_TRY(device->ops->fill_async(device, at->contributions, 0, bytes, self->all->stream,
                                   &self->err));
    return device->ops->copy_async(device, at->data, at->pinned, bytes, self->all->stream,
                                   &self->err);
}

static sw_status download(gpu_rank *self, const scene *s, work w, const place *at)
{
    sw_device *device = self->device;
    return device->ops->copy_async(
        device, at->pinned, is_elsewhere(w) ? at->contributions : at->data,
        slice_bytes(s) * (size_t)self->world_size, self->all->stream, &self->err);
}

static sw_status run_works(gpu_rank *self, scene *s, place at[WORKS], sw_event *done, bool is_last)
{
    sw_device *device = self->device;
    sw_status status = SW_OK;
    for (int w = 0; w < WORKS; ++w)
        SW_TRY(upload(self, s, &at[w], w));
    uint64_t waits = device->stats.host_waits, allocations = device->stats.allocations;
    if (s->grouped)
        SW_TRY(sw_peers_group_begin(self->comm, &self->err));
    for (int w = 0; w < WORKS && status == SW_OK; ++w)
        status = enqueue(self, s, (work)w, &at[w]);
    if (s->grouped && status == SW_OK)
        status = sw_peers_group_end(self->comm, &self->err);
    SW_TRY(status);
    s->all_enqueued |= is_last && self->rank == s->failing;
    s->host_waits += device->stats.host_waits - waits;
    s->allocations += device->stats.allocations - allocations;
    if (s->leaves)
        return SW_OK;
    for (int w = 0; w < WORKS; ++w)
        SW_TRY(download(self, s, (work)w, &at[w]));
    SW_TRY(device->ops->event_record(device, done, self->all->stream, &self->err));
    SW_TRY(sw_peers_wait(self->comm, done, "the test's works", &self->err));
    for (int w = 0; w < WORKS; ++w) {
        size_t bytes = slice_bytes(s) * (size_t)self->world_size;
        gpu_sim->host_access(at[w].pinned, bytes, SW_ACCESS_READ, "the test's results");
        memcpy(s->result[self->rank][w], at[w].pinned, bytes);
    }
    return SW_OK;
}

/* Destroy the communicator first: it lets its stream end in any case. */
static void tear_down(gpu_rank *self, place at[WORKS], sw_event *done)
{
    sw_device *device = self->device;
    if (!device)
        return;
    sw_device_comm_disconnect(self->all);
    if (done && self->all->stream &&
        device->ops->event_record(device, done, self->all->stream, NULL) == SW_OK)
        (void)!device->ops->event_wait(device, done, TIMEOUT_NS, "the end of the stream", NULL);
    for (int w = 0; w < WORKS; ++w) {
        device->ops->memory_free(device, at[w].data);
        device->ops->memory_free(device, at[w].contributions);
        device->ops->pinned_free(device, at[w].pinned);
    }
    device->ops->event_destroy(device, done);
}

static bool work_rank(gpu_rank *self)
{
    scene *s = self->context;
    place at[WORKS] = {{0}};
    sw_event *done = NULL;
    if (self->rank == s->failing)
        self->sim->fail_call(self->rank, s->fail_nth, FAILURE);
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = self->device->ops->event_create(self->device, &done, &self->err);
    for (int w = 0; w < WORKS && status == SW_OK; ++w)
        status = allocate(self, s, &at[w]);
    for (int run = s->leaves ? RUNS - 1 : 0; run < RUNS && status == SW_OK; ++run)
        status = run_works(self, s, at, done, run + 1 == RUNS);
    if (status != SW_OK && self->comm) /* as the engine's callers do, so that peers see the error */
        sw_peers_abort(self->comm, &self->err);
    s->status[self->rank] = status;
    snprintf(s->message[self->rank], sizeof s->message[0], "%s", self->err.message);
    self->sim->fail_call(self->rank, 0, 0);
    tear_down(self, at, done);
    gpu_rank_close(self);
    return status == SW_OK;
}

static void check_works(int world_size, size_t numel, sw_dtype dtype, sw_redop op, bool grouped,
                        sim_policy policy, uint64_t seed)
{
    static scene s;
    static unsigned char input[GPU_RANKS_MAX][sizeof s.result[0][0]],
        expected[sizeof s.result[0][0]];
    const unsigned char *inputs[GPU_RANKS_MAX];
    char label[128];
    snprintf(label, sizeof label, "W = %d, %zu x %s, op %d, %s, policy %d, seed %d, slots %d",
             world_size, numel, sw_dtype_name(dtype), (int)op, grouped ? "grouped" : "alone",
             (int)policy, (int)seed, (int)gpu_ranks_slots.place);
    s.numel = numel, s.dtype = dtype, s.op = op, s.grouped = grouped;
    s.fail_nth = 0, s.host_waits = s.allocations = 0;
    check(gpu_ranks_run(world_size, policy, seed, work_rank, &s), "%s: %s", label, s.message[0]);
    for (int w = 0; w < WORKS; ++w) {
        for (int r = 0; r < world_size; ++r) {
            fill(&s, input[r], r, w, world_size);
            inputs[r] = input[r];
        }
        for (int r = 0; r < world_size; ++r) {
            size_t bytes = slice_bytes(&s) * (size_t)world_size;
            if (is_elsewhere((work)w))
                memset(expected, 0, bytes);
            else
                memcpy(expected, input[r], bytes);
            expect_work(&s, (work)w, r, world_size, inputs, expected);
            check(memcmp(expected, s.result[r][w], bytes) == 0, "%s: rank %d, work %d", label, r,
                  w);
        }
    }
    check(s.host_waits == 0, "%s: %d host waits", label, (int)s.host_waits);
    check(s.allocations == 0, "%s: %d allocations", label, (int)s.allocations);
    gpu_expect_clean(label);
}

static void check_leaving(sim_policy policy)
{
    static scene s;
    s = (scene){.numel = 500, .op = SW_REDOP_SUM, .leaves = true, .grouped = policy % 2};
    check(gpu_ranks_run(3, policy, 1, work_rank, &s), "left at once: %s", s.message[0]);
    gpu_expect_clean("left at once");
}

/* ---- failures ---- */

static bool fail_alone(long nth, void *context)
{
    scene *s = context;
    s->fail_nth = nth;
    s->failing = 0;
    return gpu_ranks_run(1, SIM_EAGER, 1, work_rank, s);
}

/* Let rank 1's nth call fail: every rank has an error, with rank 1's sentence if it could send it.
 */
static void check_failing_peer(sim_policy policy)
{
    static scene s;
    long failed = 0;
    for (long nth = 1; nth < 4000; nth += 13) {
        s.numel = 700, s.dtype = SW_DTYPE_FLOAT32, s.op = SW_REDOP_SUM, s.grouped = nth % 2;
        s.fail_nth = nth, s.failing = 1, s.all_enqueued = false;
        bool ok = gpu_ranks_run(3, policy, 1, work_rank, &s);
        const char *name = gpu_sim->failed_call();
        if (!*name) {
            check(ok, "a run without a failing call failed: %s", s.message[0]);
            break;
        }
        failed++;
        for (int r = 0; r < 3; ++r)
            check((s.all_enqueued && r != 1) || (s.status[r] != SW_OK && strlen(s.message[r]) > 10),
                  "policy %d: call %ld, %s, failed, but not on rank %d: %s", (int)policy, nth, name,
                  r, s.message[r]);
        check(*gpu_sim->leaks() == '\0', "call %ld, %s (%s) left %s", nth, name, s.message[0],
              gpu_sim->leaks());
    }
    check(failed > 20, "only %ld calls failed", failed);
}

typedef struct lateness {
    bool connected[GPU_RANKS_MAX];
    bool at_creation, gives_up; /* rank 1 does not come, or comes and leaves with a reason */
    char message[GPU_RANKS_MAX][SW_ERROR_MESSAGE_BYTES];
    sw_status status[GPU_RANKS_MAX], later[GPU_RANKS_MAX];
} lateness;

static sw_status wait_in_vain(gpu_rank *self, lateness *late, void *data, sw_event *event)
{
    sw_device *device = self->device;
    sw_error reason;
    SW_TRY(device->ops->fill_async(device, data, 0, 64, self->all->stream, &self->err));
    if (self->rank == 1) {
        sw_error_set(&reason, SW_E_COMM, 1, "rank 1 leaves: out of inputs");
        if (late->gives_up)
            sw_peers_abort(self->comm, &reason);
        return sw_peers_check(self->comm, &self->err);
    }
    SW_TRY(sw_peers_all_reduce(self->comm, data, 16, SW_DTYPE_FLOAT32, SW_REDOP_SUM,
                               self->all->stream, &self->err));
    SW_TRY(device->ops->event_record(device, event, self->all->stream, &self->err));
    return sw_peers_wait(self->comm, event, "the test's all_reduce", &self->err);
}

static bool late_rank(gpu_rank *self)
{
    lateness *late = self->context;
    sw_event *event = NULL;
    void *data = NULL;
    if (late->at_creation && self->rank == 1)
        return true;
    sw_status status = gpu_rank_open(self, SHORT_NS);
    if (status == SW_OK)
        status = self->device->ops->event_create(self->device, &event, &self->err);
    if (status == SW_OK)
        status = self->device->ops->memory_alloc(self->device, 64, &data, &self->err);
    if (status == SW_OK)
        status = wait_in_vain(self, late, data, event);
    late->status[self->rank] = status;
    snprintf(late->message[self->rank], sizeof late->message[0], "%s", self->err.message);
    late->connected[self->rank] = self->comm != NULL;
    if (self->comm)
        late->later[self->rank] = sw_peers_all_gather(self->comm, data, 0, SW_DTYPE_FLOAT32,
                                                      self->all->stream, &self->err);
    sw_device_comm_disconnect(self->all);
    if (data) {
        (void)!self->device->ops->event_record(self->device, event, self->all->stream, NULL);
        (void)!self->device->ops->event_wait(self->device, event, TIMEOUT_NS, "the end", NULL);
    }
    self->device->ops->memory_free(self->device, data);
    self->device->ops->event_destroy(self->device, event);
    gpu_rank_close(self);
    return true;
}

static void check_lateness(bool at_creation, bool gives_up, sim_policy policy)
{
    static lateness late;
    const char *says = gives_up      ? "rank 1 leaves: out of inputs"
                       : at_creation ? "creation of the communicator was not done within 0.05 s"
                                     : "the test's all_reduce was not done within 0.05 s";
    late = (lateness){.at_creation = at_creation, .gives_up = gives_up};
    gpu_ranks_run(3, policy, 1, late_rank, &late);
    for (int r = 0; r < 3; ++r) {
        if (r == 1 && !gives_up) /* it has not come, or has left without an error */
            continue;
        check(late.status[r] == (gives_up ? SW_E_COMM : SW_E_TIMEOUT), "late, rank %d: status %d",
              r, (int)late.status[r]);
        check(strstr(late.message[r], says) != NULL, "late, rank %d: %s", r, late.message[r]);
        check(!at_creation || !late.connected[r], "rank %d is connected without rank 1", r);
        check(!late.connected[r] || late.later[r] == late.status[r], "late, rank %d: later %d", r,
              (int)late.later[r]);
    }
    gpu_expect_clean("a rank that is late");
}

/* Rank 2 names another size. Ranks that wait for the result fail, and so does a rank that goes on.
 */
static bool mismatched_rank(gpu_rank *self)
{
    lateness *late = self->context;
    sw_event *event = NULL;
    void *data = NULL;
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = self->device->ops->event_create(self->device, &event, &self->err);
    if (status == SW_OK)
        status = self->device->ops->memory_alloc(self->device, 256, &data, &self->err);
    if (status == SW_OK)
        status = self->device->ops->fill_async(self->device, data, 0, 256, self->all->stream,
                                               &self->err);
    if (status == SW_OK)
        status = sw_peers_broadcast(self->comm, data, self->rank == 2 ? 17 : 16, SW_DTYPE_FLOAT32,
                                    0, self->all->stream, &self->err);
    if (status == SW_OK)
        status =
            self->device->ops->event_record(self->device, event, self->all->stream, &self->err);
    if (status == SW_OK)
        status = sw_peers_wait(self->comm, event, "the broadcast", &self->err);
    late->status[self->rank] = status;
    snprintf(late->message[self->rank], sizeof late->message[0], "%s", self->err.message);
    sw_device_comm_disconnect(self->all);
    if (self->device)
        self->device->ops->memory_free(self->device, data);
    if (self->device)
        self->device->ops->event_destroy(self->device, event);
    gpu_rank_close(self);
    return true;
}

static void check_mismatch(sim_policy policy)
{
    static lateness late;
    const char *text;
    gpu_ranks_run(3, policy, 1, mismatched_rank, &late);
    for (int r = 0; r < 3; ++r)
        check(late.status[r] == SW_E_MISMATCH &&
                  strstr(late.message[r], " and 2 of 3 issue different"),
              "mismatch, rank %d: %s", r, late.message[r]);
    check(gpu_sim->reports(&text, false) == 0 && *gpu_sim->leaks() == '\0', "mismatch: %s%s", text,
          gpu_sim->leaks());
}

/* ---- choices ---- */

static bool refused_rank(gpu_rank *self)
{
    scene *s = self->context;
    s->status[self->rank] = gpu_rank_open(self, TIMEOUT_NS);
    snprintf(s->message[self->rank], sizeof s->message[0], "%s", self->err.message);
    gpu_rank_close(self);
    return s->status[self->rank] == SW_OK;
}

static void check_choices(void)
{
    static scene s;
    setenv("SIM_NO_IPC", "1", 1);
    gpu_ranks_slots.place = SW_SLOTS_ON_DEVICE;
    check(!gpu_ranks_run(3, SIM_RANDOM, 1, refused_rank, &s),
          "slots on the device were not refused");
    for (int r = 0; r < 3; ++r) {
        check(s.status[r] == SW_E_UNSUPPORTED, "refused, rank %d: status %d", r, (int)s.status[r]);
        check(strstr(s.message[r], "rank 0 of 3 cannot place them in its GPU's memory: cuIpcGetMem"),
              "refused, rank %d: %s", r, s.message[r]);
    }
    gpu_expect_clean("slots on the device refused");
    gpu_ranks_slots.place = SW_SLOTS_ANYWHERE;
    check_works(3, 300, SW_DTYPE_FLOAT32, SW_REDOP_SUM, false, SIM_RANDOM, 1);
    unsetenv("SIM_NO_IPC");
    setenv("SIM_NO_IPC_OPEN", "1", 1); /* the other ranks have opened their handles by then */
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        check_works(3, 300, SW_DTYPE_FLOAT32, SW_REDOP_SUM, false, (sim_policy)policy, 1);
    unsetenv("SIM_NO_IPC_OPEN");
    gpu_ranks_slots.slot_bytes = 1000;
    check(!gpu_ranks_run(1, SIM_EAGER, 1, refused_rank, &s) &&
              strstr(s.message[0], "slot_bytes must be a multiple of 4096"),
          "%s", s.message[0]);
    gpu_ranks_slots.slot_bytes = SLOT_BYTES;
}

static void check_place(sw_slot_place where)
{
    static const struct {
        size_t numel;
        sw_dtype dtype;
        sw_redop op;
    } cases[] = {
        {0, SW_DTYPE_FLOAT32, SW_REDOP_SUM},      {1, SW_DTYPE_FLOAT32, SW_REDOP_MEAN},
        {37, SW_DTYPE_UINT8, SW_REDOP_MAX},       {700, SW_DTYPE_FLOAT32, SW_REDOP_SUM},
        {1031, SW_DTYPE_BFLOAT16, SW_REDOP_MEAN}, {NUMEL_MAX - 3, SW_DTYPE_FLOAT32, SW_REDOP_MEAN}};
    gpu_ranks_slots.place = where;
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (uint64_t seed = 1; seed <= SEEDS; ++seed)
            for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
                int world_size = 1 + (int)((seed + i) % 3);
                check_works(world_size, cases[i].numel, cases[i].dtype, cases[i].op, seed % 2,
                            (sim_policy)policy, seed);
            }
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy) {
        check_lateness(true, false, (sim_policy)policy);
        check_lateness(false, false, (sim_policy)policy);
        check_lateness(false, true, (sim_policy)policy);
        check_mismatch((sim_policy)policy);
        check_leaving((sim_policy)policy);
        if (policy == SIM_RANDOM || policy == SIM_ON_DEMAND)
            check_failing_peer((sim_policy)policy);
    }
    static scene alone;
    alone.numel = 40, alone.dtype = SW_DTYPE_FLOAT32, alone.op = SW_REDOP_SUM;
    gpu_check_failing_calls(fail_alone, &alone, alone.message[0]);
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    gpu_ranks_slots.slot_bytes = SLOT_BYTES;
    check_place(SW_SLOTS_ON_HOST);
    check_place(SW_SLOTS_ON_DEVICE);
    check_choices();
    return check_result();
}
