/* test_fabric_threads.c - a thread that closes, ends or forks beside another that is inside the
 * same communicator: hundreds of tries, ten thousand in the long form.
 *
 * Laws: the thread inside gets out with an error, and every later call gets one, whatever order the
 * two came in; the first reason stays, on this rank and its peers; a child that is forked meanwhile
 * is refused at once, and disturbs nobody. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "comm/shm.h"
#include "faults.h"
#include "platform/clock.h"
#include "ranks.h"

/* Prompt is far above a loaded machine's turn, and far below the deadline. */
enum { DEADLINE_S = 200, WORLD = 3, PROMPT_S = 30, AT_ONCE = 20 };

static int tries(void)
{
    return getenv("SW_TEST_LONG") ? 10000 : 200;
}

static double seconds_since(int64_t begun_ns)
{
    return (double)(sw_clock_now_ns() - begun_ns) * 1e-9;
}

static sw_status wait_at_barrier(sw_comm *comm, sw_error *err)
{
    sw_op op = {.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8, .label = "beside"};
    return comm->ops->run(comm, &op, err);
}

static void *wait_inside(void *argument)
{
    rank_context *self = argument;
    int64_t begun_ns = sw_clock_now_ns();
    sw_status status = wait_at_barrier(self->comm, &self->err);
    check(status == SW_E_STATE || status == SW_E_COMM, "the thread inside got %s: %s",
          sw_status_name(status), self->err.message);
    check(seconds_since(begun_ns) < PROMPT_S, "the thread inside waited %.1f s",
          seconds_since(begun_ns));
    return NULL;
}

/* From the start to deep in a wait. */
static void pause_for(int turn)
{
    for (volatile int i = 0; i < turn % 97 * 40; ++i)
        ;
    if (turn % 50 == 0)
        ranks_sleep_ms(25);
}

/* ---- leaving and ending ---- */

typedef enum beside { LEAVES = 0, ENDS, BOTH, BESIDE_COUNT } beside;

typedef struct closing {
    beside how;
    int turn;
} closing;

static void *end_beside(void *argument)
{
    rank_context *self = argument;
    const closing *given = self->shared;
    sw_error reason;
    sw_error_set(&reason, SW_E_COMM, 0, "a thread beside rank 0's");
    pause_for(given->turn);
    self->comm->timeout_ns = INT64_C(1000000000) * DEADLINE_S; /* as the thread inside reads them */
    self->comm->silent_ns = 0;
    self->comm->warn_after_ns = self->comm->timeout_ns;
    self->comm->ops->request_end(self->comm, &reason);
    return NULL;
}

/* Rank 0: one thread waits, another leaves, or ends it, or one each. The others do not come. */
static void close_beside_wait(rank_context *self)
{
    const closing *given = self->shared;
    sw_comm *comm = self->comm;
    pthread_t inside, ender;
    sw_error err;
    comm->timeout_ns = DEADLINE_S * INT64_C(1000000000);
    if (self->rank != 0) {
        ranks_meet(self);
        check(comm->ops->look(comm, true, &self->err) == SW_E_COMM && self->err.detail == 0,
              "rank %d sees: %s", self->rank, self->err.message);
        return;
    }
    if (pthread_create(&inside, NULL, wait_inside, self) != 0 ||
        (given->how != LEAVES && pthread_create(&ender, NULL, end_beside, self) != 0))
        exit(1);
    pause_for(given->turn);
    if (given->how != ENDS)
        comm->ops->leave(comm);
    pthread_join(inside, NULL);
    if (given->how != LEAVES)
        pthread_join(ender, NULL);
    sw_status status = wait_at_barrier(comm, &err);
    check(status != SW_OK && strcmp(err.message, self->err.message) == 0,
          "a later call got %s (%s), the one inside: %s", sw_status_name(status), err.message,
          self->err.message);
    check(!comm->ops->is_alive(comm), "it is taken to live");
    ranks_meet(self);
}

/* ---- joining ---- */

typedef char address_of[SW_SOCKET_NAME_BYTES];
static address_of addresses[AT_ONCE][WORLD];
static const uint8_t secret[SW_SHM_SECRET_BYTES] = "fifteen letters";

typedef struct joining { /* one of a rank's communicators */
    sw_comm *comm;
    int index;
    sw_error err;
} joining;

static void listen(rank_context *self, joining *one)
{
    if (!check(sw_shm_comm_create(self->rank, self->world_size, "here", &one->comm,
                                  addresses[one->index][self->rank], &one->err) == SW_OK,
               "%s", one->err.message))
        exit(1);
    one->comm->timeout_ns = DEADLINE_S * INT64_C(1000000000);
}

static sw_status join(joining *one)
{
    const char *all[WORLD];
    for (int r = 0; r < one->comm->world_size; ++r)
        all[r] = addresses[one->index][r];
    return sw_shm_comm_connect(one->comm, all, secret, &one->err);
}

static void *join_inside(void *argument)
{
    joining *one = argument;
    int64_t begun_ns = sw_clock_now_ns();
    int rank = one->comm->rank;
    sw_status status = join(one);
    /* A rank that calls after rank 0 has given up finds nobody there. */
    check(status == SW_E_COMM && one->err.detail == 0 &&
              (strstr(one->err.message, "a thread beside") ||
               (rank == 1 && strstr(one->err.message, "calling rank 0 failed"))),
          "rank %d, which joined, got %s: %s", rank, sw_status_name(status), one->err.message);
    check(seconds_since(begun_ns) < PROMPT_S, "it joined for %.1f s", seconds_since(begun_ns));
    return NULL;
}

/* Rank 2 does not come. Rank 0 waits for it until another thread ends it, rank 1 for rank 0. */
static void end_beside_join(rank_context *self)
{
    const closing *given = self->shared;
    pthread_t inside[AT_ONCE];
    joining all[AT_ONCE];
    for (int i = 0; i < AT_ONCE; ++i) {
        all[i] = (joining){.index = i};
        listen(self, &all[i]);
    }
    ranks_meet(self);
    for (int i = 0; i < AT_ONCE && self->rank < 2; ++i)
        if (pthread_create(&inside[i], NULL, join_inside, &all[i]) != 0)
            exit(1);
    for (int i = 0; i < AT_ONCE && self->rank == 0; ++i) {
        rank_context ender = {.comm = all[i].comm, .shared = given};
        end_beside(&ender);
    }
    for (int i = 0; i < AT_ONCE && self->rank < 2; ++i)
        pthread_join(inside[i], NULL);
    ranks_meet(self);
    for (int i = 0; i < AT_ONCE; ++i)
        all[i].comm->ops->destroy(all[i].comm);
}

/* ---- forking ---- */

static int call_in_child(sw_comm *comm)
{
    int64_t begun_ns = sw_clock_now_ns();
    sw_error err;
    if (comm->ops->forked(comm, &err) != SW_OK)
        return 2;
    if (comm->ops->is_alive(comm) || wait_at_barrier(comm, &err) != SW_E_STATE ||
        comm->ops->look(comm, true, &err) != SW_E_STATE)
        return 3;
    comm->ops->leave(comm);
    comm->ops->destroy(comm);
    return seconds_since(begun_ns) < PROMPT_S ? 0 : 4;
}

static void *wait_well(void *argument)
{
    rank_context *self = argument;
    check(wait_at_barrier(self->comm, &self->err) == SW_OK, "beside a fork: %s", self->err.message);
    return NULL;
}

static void fork_beside_wait(rank_context *self)
{
    const int turns = tries();
    joining one = {.index = 0};
    pthread_t inside;
    listen(self, &one);
    ranks_meet(self);
    if (!check(join(&one) == SW_OK, "%s", one.err.message))
        exit(1);
    self->comm = one.comm;
    for (int turn = 0; turn < turns; ++turn) {
        if (self->rank != 0) {
            if (turn % 2)
                ranks_meet(self); /* the thread inside waits until the child has ended */
            wait_well(self);
            if (turn % 2 == 0)
                ranks_meet(self);
            continue;
        }
        if (pthread_create(&inside, NULL, wait_well, self) != 0)
            exit(1);
        pause_for(turn);
        pid_t child = fork();
        if (child == 0)
            _exit(call_in_child(self->comm));
        int status = -1;
        check(child > 0 && waitpid(child, &status, 0) == child && status == 0,
              "the child of turn %d ended with %x", turn, status);
        ranks_meet(self);
        pthread_join(inside, NULL);
    }
}

/* Returns 0 if the child's writes are its own, after a first call that found no memory. */
static int own_in_child(sw_comm *comm, sw_arena *const *arenas)
{
    sw_error err;
    faults_arm(1);
    if (comm->ops->forked(comm, &err) != SW_E_MEMORY)
        return 2;
    faults_arm(0);
    if (comm->ops->forked(comm, &err) != SW_OK)
        return 3;
    for (int i = 0; i < 2; ++i)
        arenas[i]->base[0][0] = 7;
    return 0;
}

static void fork_without_memory(rank_context *self)
{
    joining one = {.index = 0};
    sw_arena *arenas[2] = {NULL, NULL};
    listen(self, &one);
    ranks_meet(self);
    if (!check(join(&one) == SW_OK, "%s", one.err.message))
        exit(1);
    for (int i = 0; i < 2; ++i)
        if (one.comm->ops->arena_create(one.comm, 4096, "forked", &arenas[i], &one.err) != SW_OK)
            exit(1);
    if (self->rank == 0) {
        int status = -1;
        pid_t child = fork();
        if (child == 0)
            _exit(own_in_child(one.comm, arenas));
        check(child > 0 && waitpid(child, &status, 0) == child && status == 0,
              "the child without memory ended with %x", status);
        check(arenas[0]->base[0][0] == 0 && arenas[1]->base[0][0] == 0, "a child's write is ours");
    }
    ranks_meet(self);
    for (int i = 0; i < 2; ++i)
        one.comm->ops->arena_destroy(one.comm, arenas[i]);
    one.comm->ops->destroy(one.comm);
}

int main(void)
{
    for (int turn = 0; turn < tries(); ++turn) {
        closing given = {.how = (beside)(turn % BESIDE_COUNT), .turn = turn};
        ranks_run_all(close_beside_wait, WORLD, &given);
    }
    for (int turn = 0; turn < tries(); turn += AT_ONCE) { /* each takes a tenth of a second */
        closing given = {.turn = turn};
        ranks_run_bare(end_beside_join, WORLD, &given);
    }
    ranks_run_bare(fork_beside_wait, 2, NULL);
    ranks_run_bare(fork_without_memory, 2, NULL);
    return check_result();
}
