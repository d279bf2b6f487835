/* test_device_region.c - the life of memory registered with NCCL, and the simulation's reports of
 * each wrong use of it.
 *
 * Laws: a region is deregistered before its communicator ends, and freed after its last use, in
 * either order of destruction. If deregistering fails it is not freed. Memory that cannot be
 * registered is a sentence with the reason, and leaves nothing. A report comes if one rank passes
 * registered memory and another does not, if both pass it at other offsets, or if memory is freed
 * that peers still reach.
 */
#include <stdlib.h>
#include <string.h>

#include "comm/device_region.h"
#include "comm/nccl_register.h"
#include "gpu_ranks.h"

enum { NUMEL = 64, BYTES = 4 * NUMEL, REGION_BYTES = 4 * BYTES, FAILURE = 999 };
static const int64_t TIMEOUT_NS = 2000000000;

typedef enum scene {
    ALIKE,
    OUTLIVES,
    DROPPED,
    ONE_IS_PLAIN,
    OFFSETS_DIFFER,
    RECEIVER_IS_PLAIN,
    FREED,
    LEFT,
    IN_USE,
    SCENES
} scene;

static const char *const expected[SCENES] = {
    [ONE_IS_PLAIN] = "mixed registration",
    [OFFSETS_DIFFER] = "mixed registration",
    [RECEIVER_IS_PLAIN] = "mixed registration",
    [FREED] = "registered memory freed",
    [LEFT] = "left registered",
    [IN_USE] = "deregistered in use",
};

typedef struct life {
    gpu_rank *self;
    scene scene;
    sw_stream *user;
    sw_device_region *region;
    void *plain, *other;        /* device memory; `other` from ncclMemAlloc */
    sw_registration registered; /* of `other` */
} life;

static bool gpu_has_windows(const gpu_rank *self)
{
    return sw_nccl_has_windows(&self->all->library);
}

static sw_status all_reduce(life *l, void *memory)
{
    return sw_peers_all_reduce(l->self->comm, memory, NUMEL, SW_DTYPE_FLOAT32, SW_REDOP_SUM,
                               l->self->all->stream, &l->self->err);
}

static sw_status exchange(life *l, const void *from, void *to)
{
    return sw_peers_exchange_slices(l->self->comm, from, to, NUMEL / 2, SW_DTYPE_FLOAT32, NULL,
                                    l->self->all->stream, &l->self->err);
}

static sw_status use(life *l)
{
    char *memory = sw_device_region_memory(l->region);
    bool is_second = l->self->rank == 1;
    switch (l->scene) {
    case ONE_IS_PLAIN:
        return all_reduce(l, is_second ? l->plain : memory);
    case OFFSETS_DIFFER:
        return all_reduce(l, is_second ? memory + BYTES : memory);
    case RECEIVER_IS_PLAIN:
        return exchange(l, memory, l->plain);
    default:
        SW_TRY(all_reduce(l, memory));
        SW_TRY(exchange(l, memory, memory + BYTES));
        return all_reduce(l, l->plain);
    }
}

/* Register memory without a region. */
static sw_status register_other(life *l)
{
    sw_device_comm *c = l->self->all;
    sw_error *err = &l->self->err;
    SW_TRY(sw_nccl_memory_alloc(&c->library, c->device, BYTES, &l->other, err));
    SW_TRY(sw_peers_memory_register(c->peers, l->other, BYTES, false, &l->registered, err));
    SW_TRY(c->device->ops->fill_async(c->device, l->other, 0, BYTES, c->stream, err));
    if (l->scene == IN_USE) {
        SW_TRY(all_reduce(l, l->other));
        SW_TRY(sw_peers_memory_deregister(c->peers, &l->registered, err));
    }
    return SW_OK;
}

static sw_status prepare(life *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    SW_TRY(device->ops->stream_create(device, false, &l->user, err));
    SW_TRY(device->ops->memory_alloc(device, BYTES, &l->plain, err));
    SW_TRY(sw_device_region_create(l->self->all, REGION_BYTES, l->user, &l->region, err));
    SW_TRY(sw_device_region_register(l->region, gpu_has_windows(l->self), err));
    check(sw_device_region_is_window(l->region) == gpu_has_windows(l->self),
          "a window is not what NCCL offers");
    check(sw_device_region_is_registered(l->region), "a new region is not registered");
    SW_TRY(device->ops->fill_async(device, l->plain, 0, BYTES, l->self->all->stream, err));
    return device->ops->fill_async(device, sw_device_region_memory(l->region), 0, REGION_BYTES,
                                   l->self->all->stream, err);
}

/* Read the region last on the caller's stream. */
static sw_status read_on_user(life *l)
{
    sw_device *device = l->self->device;
    SW_TRY(sw_device_comm_follow(l->self->all, l->user, l->self->all->stream, &l->self->err));
    return device->ops->copy_async(device, l->plain, sw_device_region_memory(l->region), BYTES,
                                   l->user, &l->self->err);
}

static void end(life *l)
{
    sw_device_comm *c = l->self->all;
    if (l->scene == FREED)
        sw_nccl_memory_free(&c->library, c->device, l->other);
    if (l->scene == OUTLIVES) {
        sw_device_comm_disconnect(c);
        check(!sw_device_region_is_registered(l->region),
              "a region is registered without a communicator");
    }
    if (l->scene == DROPPED) {
        sw_device_region_drop(l->region);
        sw_device_regions_collect(c);
    } else {
        sw_device_region_destroy(l->region);
    }
    sw_device_comm_disconnect(c);
    if (l->other && l->scene != FREED)
        sw_nccl_memory_free(&c->library, c->device, l->other);
    c->device->ops->memory_free(c->device, l->plain);
    c->device->ops->stream_destroy(c->device, l->user);
}

static bool live(gpu_rank *self)
{
    life l = {.self = self, .scene = *(scene *)self->context};
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = prepare(&l);
    if (status == SW_OK && l.scene >= FREED)
        status = register_other(&l);
    if (status == SW_OK)
        status = use(&l);
    if (status == SW_OK)
        status = read_on_user(&l);
    if (self->all)
        end(&l);
    gpu_rank_close(self);
    return check(status == SW_OK, "scene %d: %s", (int)l.scene, self->err.message);
}

/* ---- an end that fails ---- */

/* Memory that may still be reached is not freed: it stays allocated. */
static bool fail_at_the_end(gpu_rank *self)
{
    life l = {.self = self, .scene = ALIKE};
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = prepare(&l);
    if (status == SW_OK)
        status = use(&l);
    if (status == SW_OK)
        status = read_on_user(&l);
    if (!check(status == SW_OK, "a failing end: %s", self->err.message))
        return false;
    self->sim->fail_call(self->rank, *(long *)self->context, FAILURE);
    sw_device_region_destroy(l.region);
    self->sim->fail_call(self->rank, 0, 0);
    l.region = NULL;
    (void)!self->device->ops->event_record(self->device, self->all->met, l.user, NULL);
    (void)!self->device->ops->event_wait(self->device, self->all->met, TIMEOUT_NS, "the test",
                                         NULL);
    end(&l);
    gpu_rank_close(self);
    return true;
}

static void check_failing_ends(void)
{
    const char *text;
    bool has_stayed = false;
    for (long nth = 1; nth < 100; ++nth) {
        gpu_ranks_run(1, SIM_LATE, 1, fail_at_the_end, &nth);
        const char *name = gpu_sim->failed_call();
        if (!*name)
            break;
        bool stuck = strcmp(name, "ncclCommDeregister") == 0;
        has_stayed |= stuck && strncmp(gpu_sim->leaks(), "1 allocations", 13) == 0;
        int count = gpu_sim->reports(&text, false);
        check(count == 0 || (stuck && strstr(text, "left registered")), "call %ld, %s: %s", nth,
              name, text);
    }
    check(has_stayed, "memory that could not be deregistered was freed");
}

/* ---- a window that one rank cannot make ---- */

/* The peer that waits for it is released when this rank ends the communicator: at its deadline
 * without hosts. */
static bool fail_in_window(gpu_rank *self)
{
    sw_device_region *region = NULL;
    sw_status status = gpu_rank_open(self, TIMEOUT_NS / 4);
    if (status == SW_OK)
        status = sw_device_region_create(self->all, REGION_BYTES, self->all->stream, &region,
                                         &self->err);
    if (!check(status == SW_OK, "a window: %s", self->err.message))
        return false;
    if (self->rank == 1) /* the first call asks for the state of the communicator */
        self->sim->fail_call(self->rank, self->sim->calls(self->rank) * 0 + 2, FAILURE);
    status = sw_device_region_register(region, true, &self->err);
    if (self->rank == 1)
        check(strcmp(self->sim->failed_call(), "ncclCommWindowRegister") == 0, "%s failed",
              self->sim->failed_call());
    check(status == (self->rank == 1 ? SW_E_DEVICE : SW_E_TIMEOUT), "rank %d: %s", self->rank,
          self->err.message);
    check(sw_peers_has_failed(self->comm), "rank %d: the transport lives on", self->rank);
    sw_device_region_destroy(region);
    gpu_rank_close(self);
    return true;
}

static void check_window_that_fails(void)
{
    gpu_ranks_run(2, SIM_EAGER, 1, fail_in_window, NULL);
    gpu_expect_clean("a window that fails");
}

/* ---- memory that cannot be registered ---- */

typedef struct refusal {
    const char *variable, *value, *sentence;
} refusal;

static bool refuse(gpu_rank *self)
{
    const refusal *r = self->context;
    sw_device_region *region;
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = sw_device_region_create(self->all, REGION_BYTES, self->all->stream, &region,
                                         &self->err);
    if (status == SW_OK) {
        status = sw_device_region_register(region, gpu_has_windows(self), &self->err);
        sw_device_region_destroy(region);
    }
    check(status == SW_E_UNSUPPORTED && strstr(self->err.message, r->sentence), "%s: %s",
          r->sentence, self->err.message);
    check(self->comm && !sw_peers_has_failed(self->comm), "%s: the transport ended", r->sentence);
    gpu_rank_close(self);
    return true;
}

static void check_refusal(refusal r)
{
    if (r.variable)
        setenv(r.variable, r.value, 1);
    gpu_ranks_run(2, SIM_EAGER, 1, refuse, &r);
    gpu_expect_clean(r.sentence);
    if (r.variable)
        unsetenv(r.variable);
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (scene s = ALIKE; s < SCENES; ++s) {
            gpu_ranks_run(2, (sim_policy)policy, 1, live, &s);
            if (expected[s])
                gpu_expect_report(expected[s], false);
            else
                gpu_expect_clean("a region");
        }
    check_failing_ends();
    setenv("SIM_NCCL_VERSION", "22703", 1);
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy) {
        scene alike = ALIKE;
        gpu_ranks_run(2, (sim_policy)policy, 1, live, &alike);
        gpu_expect_clean("a window");
    }
    check_refusal((refusal){"NCCL_LOCAL_REGISTER", "0", "declined to register 4096 bytes"});
    check_window_that_fails();
    unsetenv("SIM_NCCL_VERSION");
    check_refusal((refusal){"SIM_NCCL_VERSION", "21803", "2.19 or newer, not 2.18.3"});
    check_refusal((refusal){"NCCL_LOCAL_REGISTER", "0", "declined to register 4096 bytes"});
    gpu_ranks_slots = (gpu_slots){4096, SW_SLOTS_ON_HOST};
    check_refusal((refusal){NULL, NULL, "slots (shm): 1024 bytes cannot be registered"});
    return check_result();
}
