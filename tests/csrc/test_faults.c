/* test_faults.c - every allocation fails in turn on one rank of three.
 *
 * A run makes a communicator, an arena and a reducer, and steps. The nth allocation of one rank
 * fails, for every n until a run ends without a failure. The laws of each run:
 *
 *   - nobody hangs: no rank waits to its deadline;
 *   - either the failure was absorbed and every rank succeeds, or every rank gets an error that
 * names the rank;
 *   - nothing leaks: memory (the address sanitizer's pass), mappings, descriptors; and a fresh
 * group works afterwards;
 *   - a round allocates nothing, so that no step can fail for want of memory.
 *
 * Ranks are threads, under the local transport and under shared memory (from the joined
 * communicator on; joining itself is told to the peers by whoever carries the addresses). */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "comm/shm.h"
#include "faults.h"
#include "ranks.h"
#include "reduce/reducer.h"

enum { WORLD = 3, ALLOCATIONS_MAX = 200, PARAMS = 4, STEPS = 3 };

typedef struct fault_case {
    const char *name;
    bool shm;
    sw_transport transport;
    int victim;
    long nth; /* 0: nothing fails */
} fault_case;

typedef struct outcome {
    sw_status status;
    sw_error err;
    long allocations;  /* of the victim */
    long in_rounds;    /* of any rank, between the first round and the last */
    sw_transport used; /* if it came so far */
} outcome;

static outcome outcomes[WORLD];
static char addresses[WORLD][SW_SOCKET_NAME_BYTES];
static const uint8_t secret[SW_SHM_SECRET_BYTES] = "fifteen letters";

static const sw_layout_param params[PARAMS] = {{70, SW_DTYPE_FLOAT32, true, 0, 0},
                                               {33, SW_DTYPE_FLOAT64, true, 0, 0},
                                               {5, SW_DTYPE_FLOAT32, false, 0, 0},
                                               {300, SW_DTYPE_FLOAT32, true, 0, 0}};
static const char *const names[PARAMS] = {"first", "second", "frozen", "fourth"};

static sw_status one_round(rank_context *self, sw_reducer *reducer, int step)
{
    sw_reducer_give_buckets(reducer, step == STEPS - 1 ? SW_BUCKETS_HOOKS : SW_BUCKETS_OURS);
    sw_reducer_count_step(reducer);
    SW_TRY(sw_reducer_open(reducer, step, true, &self->err));
    for (size_t p = PARAMS; p-- > 0;) {
        bool advance;
        if (!sw_reducer_takes_part(reducer, p))
            continue;
        memset(sw_reducer_address(reducer, p), 0,
               params[p].numel * sw_dtype_size_bytes(params[p].dtype));
        SW_TRY(sw_reducer_mark(reducer, p, step, &advance, &self->err));
        if (advance)
            SW_TRY(sw_reducer_advance(reducer, &self->err));
    }
    if (step == STEPS - 1)
        return sw_reducer_exchange_use(reducer, &self->err);
    return sw_reducer_finish(reducer, &self->err);
}

/* Everything after the communicator. The caller destroys *arena and *reducer when all ranks are
 * here. */
static sw_status work(rank_context *self, sw_arena **arena, sw_reducer **reducer)
{
    const fault_case *given = self->shared;
    sw_comm *comm = self->comm;
    outcome *mine = &outcomes[self->rank];
    sw_reducer_options options = {
        .bucket_cap_bytes = 256, .transport = given->transport, .label = "faults"};
    sw_op reduce = {
        .kind = SW_OP_ALL_REDUCE, .dtype = SW_DTYPE_FLOAT32, .redop = SW_REDOP_SUM, .numel = 8};
    SW_TRY(comm->ops->arena_create(comm, 4096, "an arena", arena, &self->err));
    reduce.arena = *arena;
    SW_TRY(comm->ops->run(comm, &reduce, &self->err));
    SW_TRY(sw_reducer_create(comm, params, names, PARAMS, &options, reducer, &self->err));
    mine->used = sw_reducer_memory(*reducer)->transport;
    long before = faults_count();
    sw_status status = SW_OK;
    for (int step = 0; step < STEPS && status == SW_OK; ++step)
        status = one_round(self, *reducer, step);
    mine->in_rounds = faults_count() - before;
    return status;
}

static sw_status join(rank_context *self)
{
    const char *all[WORLD];
    sw_status status = sw_shm_comm_create(self->rank, self->world_size, "here", &self->comm,
                                          addresses[self->rank], &self->err);
    if (!check(status == SW_OK, "%s", self->err.message))
        exit(1); /* the others would wait at the meeting */
    self->comm->timeout_ns = INT64_C(30) * 1000000000;
    ranks_meet(self);
    for (int r = 0; r < WORLD; ++r)
        all[r] = addresses[r];
    return sw_shm_comm_connect(self->comm, all, secret, &self->err);
}

static void run_rank(rank_context *self)
{
    const fault_case *given = self->shared;
    outcome *mine = &outcomes[self->rank];
    sw_arena *arena = NULL;
    sw_reducer *reducer = NULL;
    sw_status status = SW_OK;
    long nth = self->rank == given->victim ? given->nth : 0;
    if (given->shm) {
        status = join(self);
        faults_arm(nth);
    } else {
        faults_arm(nth);
        status = sw_local_comm_create(self->group, self->rank, &self->comm, &self->err);
        if (status == SW_OK)
            self->comm->timeout_ns = INT64_C(30) * 1000000000;
    }
    if (status == SW_OK)
        status = work(self, &arena, &reducer);
    mine->status = status;
    mine->err = self->err;
    mine->allocations = faults_count();
    faults_arm(0);
    ranks_meet(self);
    sw_reducer_destroy(reducer);
    if (self->comm)
        self->comm->ops->arena_destroy(self->comm, arena);
    ranks_meet(self);
}

static void check_outcomes(const fault_case *given)
{
    char named[16];
    int failed = 0;
    snprintf(named, sizeof named, "rank %d", given->victim);
    for (int r = 0; r < WORLD; ++r) {
        const outcome *o = &outcomes[r];
        const char *message = o->status == SW_OK ? "" : o->err.message;
        failed += o->status != SW_OK;
        check(o->status != SW_E_TIMEOUT,
              "%s, allocation %ld of rank %d: rank %d waited to its deadline: %s", given->name,
              given->nth, given->victim, r, message);
        check(o->status == SW_OK || o->status == SW_E_MEMORY,
              "%s, allocation %ld of rank %d: rank %d got %s: %s", given->name, given->nth,
              given->victim, r, sw_status_name(o->status), message);
        check(o->status == SW_OK || strstr(message, named),
              "%s, allocation %ld: rank %d is not told who: %s", given->name, given->nth, r,
              message);
        check(o->in_rounds == 0, "%s: rounds allocated %ld times on rank %d", given->name,
              o->in_rounds, r);
        check(o->used == outcomes[0].used, "%s, allocation %ld: rank %d has other memory",
              given->name, given->nth, r);
    }
    check(failed == 0 || failed == WORLD, "%s, allocation %ld of rank %d: %d ranks of %d failed",
          given->name, given->nth, given->victim, failed, WORLD);
}

static long count_open_descriptors(void)
{
    long count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count;
}

static void run_once(const fault_case *given)
{
    memset(outcomes, 0, sizeof outcomes);
    long open_before = count_open_descriptors();
    ranks_run_bare(run_rank, WORLD, given);
    check_outcomes(given);
    check(faults_mapped() == 0, "%s, allocation %ld of rank %d: %ld pages are left", given->name,
          given->nth, given->victim, faults_mapped());
    check(count_open_descriptors() == open_before,
          "%s, allocation %ld of rank %d: descriptors are left", given->name, given->nth,
          given->victim);
}

static void run_case(fault_case given, long fewest)
{
    given.nth = 0;
    run_once(&given);
    long count = outcomes[given.victim].allocations, absorbed = 0;
    check(outcomes[0].status == SW_OK, "%s: without a fault: %s", given.name,
          outcomes[0].err.message);
    check(count >= fewest && count < ALLOCATIONS_MAX, "%s: %ld allocations were counted",
          given.name, count);
    for (given.nth = 1; given.nth <= count && given.nth < ALLOCATIONS_MAX; ++given.nth) {
        run_once(&given);
        absorbed += outcomes[given.victim].status == SW_OK;
        if (outcomes[given.victim].status == SW_OK && outcomes[0].used != SW_TRANSPORT_STAGED)
            check(false, "%s: allocation %ld failed unnoticed", given.name, given.nth);
    }
    /* The pool's own pages (and, for shared memory, any rank's mapping of them) have staged memory
     * to fall back on. */
    check((absorbed > 0) == (given.transport == SW_TRANSPORT_AUTO),
          "%s: %ld failures were absorbed", given.name, absorbed);
    given.nth = 0;
    run_once(&given);
    check(outcomes[0].status == SW_OK, "%s: a fresh group: %s", given.name,
          outcomes[0].err.message);
}

static void test_group(void)
{
    sw_error err = {.message = ""};
    for (long nth = 1; nth <= 2; ++nth) {
        sw_local_group *group = NULL;
        faults_arm(nth);
        sw_status status = sw_local_group_create(WORLD, &group, &err);
        check(status == SW_E_MEMORY && !group, "a group whose allocation %ld fails", nth);
        if (status == SW_OK)
            sw_local_group_destroy(group);
    }
    faults_arm(0);
}

/* Creating fails before there are peers: nothing may stay open or mapped. */
static void test_shm_create(void)
{
    sw_error err = {.message = ""};
    sw_comm *comm = NULL;
    char address[SW_SOCKET_NAME_BYTES];
    faults_arm(0);
    if (!check(sw_shm_comm_create(0, WORLD, "here", &comm, address, &err) == SW_OK, "%s",
               err.message))
        return;
    long count = faults_count();
    comm->ops->destroy(comm);
    for (long nth = 1; nth <= count && nth < ALLOCATIONS_MAX; ++nth) {
        comm = NULL;
        faults_arm(nth);
        sw_status status = sw_shm_comm_create(0, WORLD, "here", &comm, address, &err);
        check(status == SW_E_MEMORY && !comm, "a host communicator whose allocation %ld fails",
              nth);
        if (status == SW_OK)
            comm->ops->destroy(comm);
    }
    faults_arm(0);
    check(faults_mapped() == 0, "host communicators that could not be made left %ld pages",
          faults_mapped());
}

int main(void)
{
    static const sw_transport transports[] = {SW_TRANSPORT_POOL, SW_TRANSPORT_STAGED,
                                              SW_TRANSPORT_AUTO};
    static const char *const local_names[] = {"local pool", "local staged", "local auto"};
    static const char *const shm_names[] = {"shm pool", "shm staged", "shm auto"};
    test_group();
    test_shm_create();
    for (int victim = 0; victim < WORLD; ++victim)
        for (int t = 0; t < 3; ++t) {
            run_case(
                (fault_case){.name = local_names[t], .transport = transports[t], .victim = victim},
                15);
            run_case((fault_case){.name = shm_names[t],
                                  .shm = true,
                                  .transport = transports[t],
                                  .victim = victim},
                     15);
        }
    return check_result();
}
