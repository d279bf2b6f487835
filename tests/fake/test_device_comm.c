/* test_device_comm.c - a rank sees that a peer does not come to a collective, though no thread
 * waits.
 *
 * Law: once a collective is marked, sw_device_comm_watch returns at once. It returns SW_OK until
 * the deadline and then, if a peer has not come to the collective, a named error. A call that NCCL
 * takes within 2 ms costs no sleep, whose end may be late.
 */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu_ranks.h"

enum { NUMEL = 32 };
static const int64_t TIMEOUT_NS = 1000000000, PATIENCE_NS = 10000000000;

static atomic_bool is_told; /* rank 0 has its error, or never will */

static _Thread_local long naps; /* of the engine and of this file; the fakes have their own */

int nanosleep(const struct timespec *time, struct timespec *rest)
{
    naps++;
    return clock_nanosleep(CLOCK_MONOTONIC, 0, time, rest) == 0 ? 0 : -1;
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static sw_status watch(gpu_rank *self, void *memory)
{
    const struct timespec nap = {.tv_nsec = 1000000};
    sw_device_comm *comm = self->all;
    int64_t start = now_ns();
    SW_TRY(self->device->ops->fill_async(self->device, memory, 0, NUMEL * sizeof(float),
                                         comm->stream, &self->err));
    SW_TRY(sw_peers_all_reduce(self->comm, memory, NUMEL, SW_DTYPE_FLOAT32, SW_REDOP_SUM,
                               comm->stream, &self->err));
    SW_TRY(sw_device_comm_mark(comm, &self->err));
    check(sw_device_comm_watch(comm, &self->err) == SW_OK, "an error before the deadline: %s",
          self->err.message);
    while (now_ns() - start < PATIENCE_NS) {
        SW_TRY(sw_device_comm_watch(comm, &self->err));
        nanosleep(&nap, NULL);
    }
    return SW_OK;
}

/* Rank 1 does not come but lives: its host looks at its GPU. */
static sw_status stay_away(gpu_rank *self)
{
    sw_event *event;
    sw_status status = self->device->ops->event_create(self->device, &event, &self->err);
    while (status == SW_OK && !atomic_load(&is_told)) {
        bool unused;
        status = self->device->ops->event_query(self->device, event, &unused, &self->err);
    }
    self->device->ops->event_destroy(self->device, event);
    return status;
}

static bool act(gpu_rank *self)
{
    void *memory = NULL;
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = self->device->ops->memory_alloc(self->device, NUMEL * sizeof(float), &memory,
                                                 &self->err);
    if (status == SW_OK && self->rank == 0) {
        status = watch(self, memory);
        check(status == SW_E_TIMEOUT && strstr(self->err.message, "a collective"),
              "the missing peer is not reported: %s", self->err.message);
        status = SW_OK;
    } else if (status == SW_OK) {
        status = stay_away(self);
    }
    atomic_store(&is_told, true);
    if (self->comm)
        sw_peers_abort(self->comm, &self->err);
    self->device->ops->memory_free(self->device, memory);
    gpu_rank_close(self);
    return status == SW_OK;
}

static void (*settle_after)(long ns);

/* Each of some calls settles after `ns`. Return the naps that they took. */
static long settle(gpu_rank *self, void *memory, long ns)
{
    long before = naps;
    settle_after(ns);
    for (int k = 0; k < 4; ++k)
        check(sw_peers_all_reduce(self->comm, memory, NUMEL, SW_DTYPE_FLOAT32, SW_REDOP_SUM,
                                  self->all->stream, &self->err) == SW_OK,
              "%s", self->err.message);
    settle_after(0);
    return naps - before;
}

static bool act_settling(gpu_rank *self)
{
    void *memory = NULL;
    sw_status status = gpu_rank_open(self, PATIENCE_NS);
    if (status == SW_OK)
        status = self->device->ops->memory_alloc(self->device, NUMEL * sizeof(float), &memory,
                                                 &self->err);
    if (status == SW_OK)
        status = self->device->ops->fill_async(self->device, memory, 0, NUMEL * sizeof(float),
                                               self->all->stream, &self->err);
    if (status == SW_OK) {
        long quick = settle(self, memory, 200000), slow = settle(self, memory, 20000000);
        check(quick == 0 && slow > 0, "calls of 0.2 ms took %ld naps, of 20 ms %ld", quick, slow);
    }
    sw_event *event = NULL;
    if (status == SW_OK && self->device->ops->event_create(self->device, &event, NULL) == SW_OK &&
        self->device->ops->event_record(self->device, event, self->all->stream, NULL) == SW_OK)
        (void)!sw_peers_await(self->comm, event, "the end", NULL);
    self->device->ops->event_destroy(self->device, event);
    self->device->ops->memory_free(self->device, memory);
    gpu_rank_close(self);
    return status == SW_OK;
}

int main(int argc, char **argv)
{
    void *symbol;
    setenv("NCCL_RUNTIME_CONNECT", "0", 1); /* the peer's absence is the GPU's to see, not NCCL's */
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int policy = SIM_EAGER; policy <= SIM_ON_DEMAND; ++policy) {
        atomic_store(&is_told, false);
        check(gpu_ranks_run(2, (sim_policy)policy, 1, act, NULL), "policy %d: failed", policy);
        check(*gpu_sim->leaks() == '\0', "policy %d left %s", policy, gpu_sim->leaks());
    }
    void *library = dlopen(argv[2], RTLD_NOW);
    symbol = library ? dlsym(library, "sim_nccl_settle_after") : NULL;
    if (check(symbol != NULL, "%s", dlerror())) {
        memcpy(&settle_after, &symbol, sizeof symbol);
        check(gpu_ranks_run(1, SIM_EAGER, 1, act_settling, NULL), "a call that settles late failed");
    }
    return check_result();
}
