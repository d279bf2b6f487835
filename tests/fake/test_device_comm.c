/* test_device_comm.c - a rank sees that a peer does not come to a collective, though no thread
 * waits.
 *
 * Law: once a collective is marked, sw_device_comm_watch returns at once. It returns SW_OK until
 * the deadline and then, if a peer has not come to the collective, a named error.
 */
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "gpu_ranks.h"

enum { NUMEL = 32 };
static const int64_t TIMEOUT_NS = 1000000000, PATIENCE_NS = 10000000000;

static atomic_bool is_told; /* rank 0 has its error, or never will */

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

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int policy = SIM_EAGER; policy <= SIM_ON_DEMAND; ++policy) {
        atomic_store(&is_told, false);
        check(gpu_ranks_run(2, (sim_policy)policy, 1, act, NULL), "policy %d: failed", policy);
        check(*gpu_sim->leaks() == '\0', "policy %d left %s", policy, gpu_sim->leaks());
    }
    return check_result();
}
