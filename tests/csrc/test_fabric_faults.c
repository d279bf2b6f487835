/* test_fabric_faults.c - what a rank is told when another leaves, fails, is late or disagrees; and
 * the counters: more operations than the ring has entries, tickets beyond 32 bits, slots used
 * again.
 *
 * Most tests drive three ranks from one thread, through posts and polls that do not wait, so the
 * order of events is the test's own. Where a rank has to wait, ranks are threads. W = 3: with two
 * ranks, "a peer" is always the same. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "comm/fabric.h"
#include "platform/clock.h"
#include "ranks.h"

enum {
    WORLD = 3,
    ARENA_BYTES = 512 * 128,
    PROMPT_MS = 10000 /* far below the deadline, far above a loaded machine's turn */
};

/* Three ranks of one thread, and an arena made by hand. */
typedef struct rig {
    sw_local_group *group;
    sw_comm *comm[WORLD];
    sw_arena arena;
    uint8_t *base[WORLD];
} rig;

static bool rig_init(rig *r)
{
    sw_error err = {.message = ""};
    memset(r, 0, sizeof *r);
    r->arena = (sw_arena){.size_bytes = ARENA_BYTES, .base = r->base, .world_size = WORLD};
    if (!check(sw_local_group_create(WORLD, &r->group, &err) == SW_OK, "%s", err.message))
        return false;
    for (int i = 0; i < WORLD; ++i) {
        r->base[i] = calloc(1, ARENA_BYTES);
        if (!check(r->base[i] && sw_local_comm_create(r->group, i, &r->comm[i], &err) == SW_OK,
                   "%s", err.message))
            return false;
        r->comm[i]->timeout_ns = INT64_C(30) * 1000000000;
    }
    return true;
}

static void rig_fini(rig *r)
{
    for (int i = 0; i < WORLD; ++i) {
        if (r->comm[i])
            r->comm[i]->ops->destroy(r->comm[i]);
        free(r->base[i]);
    }
    sw_local_group_destroy(r->group);
}

static sw_op sum_op(const sw_arena *arena)
{
    return (sw_op){.kind = SW_OP_ALL_REDUCE,
                   .dtype = SW_DTYPE_FLOAT32,
                   .redop = SW_REDOP_SUM,
                   .numel = 8,
                   .arena = arena,
                   .label = "the sum"};
}

static sw_op barrier_op(void)
{
    return (sw_op){.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8, .label = "the barrier"};
}

/* ---- disagreement ---- */

typedef struct difference {
    const char *field;
    sw_op common, odd;
    const char *common_text, *odd_text; /* what the sentence must say of each side */
} difference;

/* Rank `odd` comes with another operation: every rank gets one sentence, naming rank 0 and the
 * first that differs. */
static void check_disagreement(const difference *d, int odd)
{
    rig r;
    sw_error err[WORLD], again;
    char second[32];
    bool complete;
    if (!rig_init(&r))
        return;
    snprintf(second, sizeof second, "rank %d came with", odd == 0 ? 1 : odd);
    sw_status status[WORLD];
    for (int i = 0; i < WORLD; ++i) {
        uint32_t ticket;
        sw_op op = i == odd ? d->odd : d->common;
        if (op.arena)
            op.arena = &r.arena;
        status[i] = r.comm[i]->ops->post(r.comm[i], &op, &ticket, &err[i]);
        check(i == WORLD - 1 || status[i] == SW_OK, "%s: rank %d posts", d->field, i);
    }
    for (int i = 0; i < WORLD; ++i) {
        if (status[i] == SW_OK)
            status[i] = r.comm[i]->ops->poll(r.comm[i], 1, &complete, &err[i]);
        check(status[i] == SW_E_MISMATCH && strcmp(err[i].message, err[0].message) == 0 &&
                  err[i].detail == (odd == 0 ? 1 : odd),
              "%s of rank %d differs: rank %d got %s: %s", d->field, odd, i,
              sw_status_name(status[i]), err[i].message);
        check(r.comm[i]->ops->poll(r.comm[i], 1, &complete, &again) == SW_E_MISMATCH &&
                  strcmp(again.message, err[0].message) == 0,
              "%s: a later call on rank %d repeats the sentence", d->field, i);
    }
    const char *first = odd == 0 ? d->odd_text : d->common_text,
               *other = odd == 0 ? d->common_text : d->odd_text;
    const char *middle = strstr(err[0].message, second),
               *named = strstr(err[0].message, "rank 0 came with");
    check(named && middle && strstr(named, first) && strstr(named, first) < middle &&
              strstr(middle, other),
          "%s of rank %d differs: the sentence names both: %s", d->field, odd, err[0].message);
    for (int i = 0; i < WORLD; ++i)
        for (size_t k = 0; k < 64; ++k)
            check(r.base[i][k] == 0, "%s: nothing was folded", d->field);
    rig_fini(&r);
}

static void test_disagreement(void)
{
    static const sw_arena some;
    const sw_op sum = sum_op(&some);
    difference all[10] = {
        {.field = "kind",
         .common_text = "all_reduce 'the sum'",
         .odd_text = "reduce_scatter 'the sum'"},
        {.field = "dtype", .common_text = "8 float32", .odd_text = "8 int32"},
        {.field = "operation", .common_text = "sum of 8", .odd_text = "max of 8"},
        {.field = "count", .common_text = "of 8 ", .odd_text = "of 7 "},
        {.field = "label", .common_text = "'the sum'", .odd_text = "'another'"},
        {.field = "round",
         .common_text = "backward 1 of step 7",
         .odd_text = "backward 2 of step 7"},
        {.field = "offset", .common_text = "at byte 0 of", .odd_text = "at byte 128 of"},
        {.field = "root", .common_text = "from rank 0", .odd_text = "from rank 2"},
        {.field = "step",
         .common_text = "backward 1 of step 7",
         .odd_text = "backward 1 of step 8"},
        {.field = "subject", .common_text = "of shared memory 3", .odd_text = "of shared memory 4"},
    };
    for (size_t i = 0; i < 10; ++i) {
        all[i].common = all[i].odd = sum;
        all[i].common.round = all[i].odd.round = 1;
        all[i].common.step = all[i].odd.step = 7;
        all[i].common.subject = all[i].odd.subject = 3;
    }
    all[0].odd.kind = SW_OP_REDUCE_SCATTER;
    all[1].odd.dtype = SW_DTYPE_INT32;
    all[2].odd.redop = SW_REDOP_MAX;
    all[3].odd.numel = 7;
    snprintf(all[4].odd.label, sizeof all[4].odd.label, "another");
    all[5].odd.round = 2;
    all[6].odd.offset_bytes = 128;
    all[7].common.kind = all[7].odd.kind = SW_OP_BROADCAST;
    all[7].odd.root = 2;
    all[8].odd.step = 8;
    all[9].odd.subject = 4;
    for (size_t i = 0; i < 10; ++i)
        for (int odd = 0; odd < WORLD; ++odd)
            check_disagreement(&all[i], odd);
}

/* Three ranks, three operations: the first that differs from rank 0 is named, by all. */
static void test_three_ways(void)
{
    rig r;
    sw_error err[WORLD] = {{.message = ""}};
    bool complete;
    if (!rig_init(&r))
        return;
    for (int i = 0; i < WORLD; ++i) {
        uint32_t ticket;
        sw_op op = sum_op(&r.arena);
        op.numel = (size_t)(8 - i);
        sw_status ignored = r.comm[i]->ops->post(r.comm[i], &op, &ticket, &err[i]);
        (void)ignored;
    }
    for (int i = 0; i < WORLD; ++i)
        check(r.comm[i]->ops->poll(r.comm[i], 1, &complete, &err[i]) == SW_E_MISMATCH &&
                  strstr(err[i].message, "rank 1 came with") && !strstr(err[i].message, "rank 2"),
              "rank %d: %s", i, err[i].message);
    rig_fini(&r);
}

/* ---- leaving and aborting, in an order of the test's own ---- */

/* All three post, rank 1 last, which folds its part; then it ends, by abort or by leaving. Rank 0's
 * wait must still succeed although rank 2 has not folded yet; the next call gets what rank 1 said.
 */
typedef struct ending {
    rig *r;
    bool by_abort;
} ending;

static void end_of_rank_1(rank_context *self)
{
    const ending *given = self->shared;
    rig *r = given->r;
    sw_comm *comm = r->comm[self->rank];
    sw_op op = sum_op(&r->arena);
    sw_error reason, err = {.message = ""};
    uint32_t ticket;
    bool complete;
    for (int turn = 0; turn < WORLD; ++turn) {
        static const int order[WORLD] = {2, 0, 1};
        if (order[turn] == self->rank)
            check(comm->ops->post(comm, &op, &ticket, &err) == SW_OK, "rank %d posts: %s",
                  self->rank, err.message);
        ranks_meet(self);
    }
    if (self->rank == 1) {
        sw_error_set(&reason, SW_E_COMM, 1, "rank 1 had enough");
        if (given->by_abort)
            comm->ops->abort(comm, &reason);
        else
            comm->ops->leave(comm);
    }
    ranks_meet(self);
    if (self->rank == 2) {
        ranks_sleep_ms(120); /* rank 0 sleeps, wakes and looks at its peers several times */
        check(comm->ops->poll(comm, 1, &complete, &err) == SW_OK, "rank 2 folds its part: %s",
              err.message);
    }
    if (self->rank == 0)
        check(comm->ops->wait(comm, 1, &err) == SW_OK,
              "an end after its part is not of this call: %s", err.message);
    ranks_meet(self);
    if (self->rank == 1)
        return;
    op = barrier_op();
    check(comm->ops->run(comm, &op, &err) == SW_E_COMM && err.detail == 1,
          "the next call on rank %d: %s", self->rank, err.message);
    check(strstr(err.message, given->by_abort ? "rank 1 had enough" : "rank 1 (pid") != NULL,
          "rank %d: %s", self->rank, err.message);
    check(given->by_abort ||
              strstr(err.message, "left the group before its part of barrier 'the barrier'"),
          "rank %d: %s", self->rank, err.message);
}

static void test_end_after_the_part(bool by_abort)
{
    rig r;
    ending given = {.r = &r, .by_abort = by_abort};
    if (!rig_init(&r))
        return;
    ranks_run_bare(end_of_rank_1, WORLD, &given);
    rig_fini(&r);
}

/* The same for a rank that has posted but not folded: its part will never come, and the call must
 * say so. */
static void test_end_before_the_fold(bool by_abort)
{
    rig r;
    sw_error reason, err = {.message = ""};
    uint32_t ticket;
    if (!rig_init(&r))
        return;
    sw_op op = sum_op(&r.arena);
    for (int i = 1; i <= WORLD; ++i) /* rank 0 last */
        check(r.comm[i % WORLD]->ops->post(r.comm[i % WORLD], &op, &ticket, &err) == SW_OK, "%s",
              err.message);
    sw_error_set(&reason, SW_E_COMM, 1, "rank 1 had enough");
    if (by_abort)
        r.comm[1]->ops->abort(r.comm[1], &reason);
    else
        r.comm[1]->ops->leave(r.comm[1]);
    check(!r.comm[0]->ops->is_alive(r.comm[0]), "it can be seen that a peer is gone");
    check(r.comm[0]->ops->wait(r.comm[0], ticket, &err) == SW_E_COMM && err.detail == 1,
          "a fold that never comes: %s", err.message);
    check(strstr(err.message,
                 by_abort ? "rank 1 had enough"
                          : "left the group before its part of all_reduce 'the sum'") != NULL,
          "%s", err.message);
    rig_fini(&r);
}

/* ---- aborts while peers sleep ---- */

static void abort_while_peers_wait(rank_context *self)
{
    sw_comm *comm = self->comm;
    sw_op op = barrier_op();
    sw_error reason;
    int64_t begun_ns = sw_clock_now_ns();
    if (self->rank == 1) {
        ranks_sleep_ms(60);
        sw_error_set(&reason, SW_E_STATE, 7, "the sentence of rank 1");
        comm->ops->abort(comm, &reason);
        check(comm->ops->run(comm, &op, &self->err) == SW_E_STATE,
              "the one that aborted is told, too");
    } else {
        check(comm->ops->run(comm, &op, &self->err) == SW_E_STATE && self->err.detail == 7,
              "rank %d: %s", self->rank, self->err.message);
    }
    check(strcmp(self->err.message, "the sentence of rank 1") == 0, "rank %d: %s", self->rank,
          self->err.message);
    check(sw_clock_now_ns() - begun_ns < PROMPT_MS * INT64_C(1000000),
          "rank %d waited to its deadline", self->rank);
    check(comm->ops->run(comm, &op, &self->err) == SW_E_STATE, "and again");
}

static void *end_beside(void *argument)
{
    sw_comm *comm = argument;
    sw_error reason;
    ranks_sleep_ms(60);
    sw_error_set(&reason, SW_E_COMM, 1, "a thread beside rank 1's");
    comm->ops->request_end(comm, &reason);
    sw_error_set(&reason, SW_E_COMM, 2, "the first reason stays");
    comm->ops->request_end(comm, &reason);
    return NULL;
}

/* By a thread that is not the one inside: all are let go, rank 1's own call among them. */
static void end_requested_while_all_wait(rank_context *self)
{
    sw_comm *comm = self->comm;
    sw_op op = barrier_op();
    pthread_t thread;
    int64_t begun_ns = sw_clock_now_ns();
    check(comm->ops->look(comm, true, &self->err) == SW_OK, "all live: %s", self->err.message);
    ranks_meet(self);
    if (self->rank == 1 &&
        !check(pthread_create(&thread, NULL, end_beside, comm) == 0, "no thread"))
        return;
    if (self->rank == 0) { /* for whom the others wait: it asks */
        while (comm->ops->look(comm, true, &self->err) == SW_OK &&
               sw_clock_now_ns() - begun_ns < PROMPT_MS * INT64_C(1000000))
            ranks_sleep_ms(1);
    } else {
        check(comm->ops->run(comm, &op, &self->err) == SW_E_COMM, "rank %d went on", self->rank);
    }
    if (self->rank == 1)
        pthread_join(thread, NULL);
    check(strcmp(self->err.message, "a thread beside rank 1's") == 0 && self->err.detail == 1,
          "rank %d: %s", self->rank, self->err.message);
    check(!comm->ops->is_alive(comm), "rank %d takes it to live", self->rank);
    ranks_meet(self); /* rank 0's part would complete what the others are in */
    check(self->rank == 0 ||
              (comm->ops->run(comm, &op, &self->err) == SW_E_COMM && self->err.detail == 1),
          "and again: %s", self->err.message);
    check(sw_clock_now_ns() - begun_ns < PROMPT_MS * INT64_C(1000000),
          "rank %d waited to its deadline", self->rank);
}

/* Whoever leaves is no failure to who does not mind. */
static void look_at_who_leaves(rank_context *self)
{
    sw_comm *comm = self->comm;
    if (self->rank == 2)
        comm->ops->leave(comm);
    ranks_meet(self);
    check(comm->ops->look(comm, false, &self->err) == SW_OK, "rank %d: %s", self->rank,
          self->err.message);
    check(self->rank == 2 || (comm->ops->look(comm, true, &self->err) == SW_E_COMM &&
                              self->err.detail == 2 && strstr(self->err.message, "left the group")),
          "rank %d: %s", self->rank, self->err.message);
    ranks_meet(self);
}

/* ---- deadlines ---- */

typedef struct logged {
    int count;
    char message[SW_ERROR_MESSAGE_BYTES];
} logged;

static void log_message(void *context, const char *message)
{
    logged *log = context;
    log->count++;
    snprintf(log->message, sizeof log->message, "%s", message);
}

static atomic_bool rank_1_waits;

static bool say_it_waits(void *context)
{
    (void)context;
    rank_1_waits = true;
    return false;
}

static void deadline(rank_context *self)
{
    sw_comm *comm = self->comm;
    sw_op op = barrier_op();
    logged log = {.message = ""};
    if (self->rank == 0) {
        comm->timeout_ns = 200 * 1000000;
        comm->warn_after_ns = 30 * 1000000;
        comm->hooks = (sw_comm_hooks){.context = &log, .log = log_message};
        while (!rank_1_waits) /* however late a busy machine runs it, rank 0 does not wait for it */
            ranks_sleep_ms(1);
    }
    if (self->rank == 1)
        comm->hooks = (sw_comm_hooks){.interrupted = say_it_waits};
    if (self->rank == 2) {
        ranks_meet(self);
        check(comm->ops->run(comm, &op, &self->err) == SW_OK,
              "every part is there when the last comes: %s", self->err.message);
        check(comm->ops->run(comm, &op, &self->err) == SW_E_TIMEOUT &&
                  strstr(self->err.message, "rank 2 (pid"),
              "the late rank is told by its next call: %s", self->err.message);
        return;
    }
    check(comm->ops->run(comm, &op, &self->err) == SW_E_TIMEOUT && self->err.detail == 2,
          "rank %d: %s", self->rank, self->err.message);
    check(strstr(self->err.message, "barrier 'the barrier'") &&
              strstr(self->err.message, "timeout_s=0.2") &&
              strstr(self->err.message, "rank 2 (pid") && !strstr(self->err.message, "rank 0 (pid"),
          "rank %d: the deadline names operation, limit and rank: %s", self->rank,
          self->err.message);
    if (self->rank == 0) {
        check(log.count >= 1 && log.count <= 3, "warned %d times: at 30, 60 and 120 ms", log.count);
        check(strstr(log.message, "rank 2 (pid") && strstr(log.message, "barrier 'the barrier'"),
              "%s", log.message);
    }
    ranks_meet(self);
}

/* The full ring: operation 129 waits for the first, and with nobody there the deadline says for
 * whom. */
static void test_full_ring(void)
{
    rig r;
    sw_error err = {.message = ""};
    uint32_t ticket = 0;
    if (!rig_init(&r))
        return;
    sw_op op = sum_op(&r.arena);
    r.comm[1]->timeout_ns = 40 * 1000000;
    for (int i = 0; i < SW_FABRIC_RING; ++i)
        check(r.comm[1]->ops->post(r.comm[1], &op, &ticket, &err) == SW_OK, "operation %d: %s", i,
              err.message);
    check(ticket == SW_FABRIC_RING, "tickets count from 1");
    check(r.comm[1]->ops->post(r.comm[1], &op, &ticket, &err) == SW_E_TIMEOUT && err.detail == 0,
          "one more than the ring holds: %s", err.message);
    check(strstr(err.message, "rank 0 (pid") && strstr(err.message, "rank 2 (pid") &&
              !strstr(err.message, "rank 1 (pid"),
          "all who are missing are named: %s", err.message);
    rig_fini(&r);
}

/* ---- interruption ---- */

static bool is_interrupted(void *context)
{
    (void)context;
    return true;
}

/* The memory that an interrupted call borrowed is the caller's again: nothing may touch it later,
 * even when the peers come after all. */
static void test_interruption(void)
{
    rig r;
    sw_error err = {.message = ""};
    bool complete;
    float *data = calloc(8, sizeof *data);
    float others[8] = {1};
    if (!rig_init(&r) || !data)
        return;
    sw_op op = sum_op(NULL);
    op.data = data;
    r.comm[0]->hooks.interrupted = is_interrupted;
    check(r.comm[0]->ops->run(r.comm[0], &op, &err) == SW_E_INTERRUPTED, "interrupted: %s",
          err.message);
    free(data);
    op.data = others;
    check(r.comm[1]->ops->run(r.comm[1], &op, &err) == SW_E_COMM && err.detail == 0 &&
              strstr(err.message, "rank 0 was interrupted while it waited in all_reduce 'the sum'"),
          "a peer that waits: %s", err.message);
    check(r.comm[2]->ops->run(r.comm[2], &op, &err) == SW_OK && others[0] == 2,
          "the last finds every part: %s", err.message);
    check(r.comm[0]->ops->poll(r.comm[0], 1, &complete, &err) == SW_E_COMM,
          "the communicator has ended: %s", err.message);
    rig_fini(&r);
}

/* Three ranks in a barrier on private memory, where a post is a rank's whole part: rank 0 posts and
 * is interrupted, rank 2 posts at once after it. Rank 1, asleep until then, has every part. Should
 * it wake between the two it gets the interruption instead, so one success of many is asked for. */
typedef struct late_post {
    rig rig;
    int successes;
} late_post;

static void post_after_an_end(rank_context *self)
{
    late_post *shared = (late_post *)(uintptr_t)self->shared;
    sw_op op = barrier_op();
    sw_comm **comm = shared->rig.comm;
    if (self->rank == 1) {
        sw_status status = comm[1]->ops->run(comm[1], &op, &self->err);
        shared->successes += status == SW_OK;
        check(status == SW_OK || status == SW_E_COMM, "rank 1: %s", self->err.message);
    } else if (self->rank == 0) {
        ranks_sleep_ms(10); /* rank 1 is in its wait */
        comm[0]->hooks.interrupted = is_interrupted;
        check(comm[0]->ops->run(comm[0], &op, &self->err) == SW_E_INTERRUPTED, "rank 0: %s",
              self->err.message);
        check(comm[2]->ops->run(comm[2], &op, &self->err) == SW_OK, "rank 2: %s",
              self->err.message);
    }
}

static void test_post_after_an_end(void)
{
    late_post shared = {.successes = 0};
    for (int attempt = 0; attempt < 500 && shared.successes == 0; ++attempt) {
        if (!rig_init(&shared.rig))
            return;
        ranks_run_bare(post_after_an_end, 2, &shared);
        rig_fini(&shared.rig);
    }
    check(shared.successes > 0,
          "a peer that ends after its post does not fail a call whose parts are all there");
}

/* ---- arguments ---- */

static void test_arguments(void)
{
    rig r;
    float data[8];
    uint32_t ticket;
    sw_error err = {.message = ""};
    if (!rig_init(&r))
        return;
    const sw_op good = sum_op(&r.arena);
    sw_op bad[8];
    for (size_t i = 0; i < 8; ++i)
        bad[i] = good;
    bad[0].kind = SW_OP_KIND_COUNT;
    bad[1].dtype = SW_DTYPE_COUNT;
    bad[2].numel = SIZE_MAX / 2;
    bad[3].numel = ARENA_BYTES / 4 + 1;
    bad[4].offset_bytes = ARENA_BYTES - 31;
    bad[5].offset_bytes = SIZE_MAX - 15;
    bad[6].kind = SW_OP_BROADCAST;
    bad[6].root = WORLD;
    bad[7].dtype = SW_DTYPE_BOOL;
    for (size_t i = 0; i < 8; ++i)
        check(r.comm[0]->ops->post(r.comm[0], &bad[i], &ticket, &err) == SW_E_INVALID,
              "argument %zu is refused", i);
    sw_op private_op = good;
    private_op.arena = NULL;
    private_op.data = data;
    check(r.comm[0]->ops->post(r.comm[0], &private_op, &ticket, &err) == SW_E_STATE,
          "post takes no private memory");
    private_op.kind = SW_OP_REDUCE_SCATTER;
    check(r.comm[0]->ops->run(r.comm[0], &private_op, &err) == SW_E_UNSUPPORTED,
          "reduce_scatter needs an arena");
    check(r.comm[0]->ops->post(r.comm[0], &good, &ticket, &err) == SW_OK && ticket == 1,
          "a refused operation is not counted and ends nothing: %s", err.message);
    rig_fini(&r);
}

/* ---- counters ---- */

/* Before the first operation: every rank's counters, as if `start` operations had been done. */
static void set_counters(sw_comm *comm, uint32_t start)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    fabric->posted = fabric->done = start;
    atomic_store(&fabric->control[comm->rank].posted, start);
    atomic_store(&fabric->control[comm->rank].done, start);
}

enum { IN_FLIGHT = 300, NUMEL = 40 };

/* More posts in flight than the ring holds, each on a part of its own; one rank begins late,
 * another is slow. */
static void ring_wraps(rank_context *self)
{
    const uint32_t *start = self->shared;
    sw_comm *comm = self->comm;
    sw_arena *arena = NULL;
    uint32_t first = 0, ticket = 0;
    const size_t stride = 256;
    set_counters(comm, *start);
    ranks_meet(self);
    if (!check(comm->ops->arena_create(comm, IN_FLIGHT * stride, "ring", &arena, &self->err) ==
                   SW_OK,
               "%s", self->err.message))
        exit(1);
    for (size_t k = 0; k < IN_FLIGHT; ++k)
        for (size_t i = 0; i < NUMEL; ++i)
            ((float *)(void *)(arena->base[self->rank] + k * stride))[i] =
                ranks_value(self->rank, i, (int)k);
    if (self->rank == 2)
        ranks_sleep_ms(30);
    for (size_t k = 0; k < IN_FLIGHT; ++k) {
        sw_op op = {.kind = SW_OP_ALL_REDUCE,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_SUM,
                    .numel = NUMEL,
                    .arena = arena,
                    .offset_bytes = k * stride,
                    .label = "ring"};
        if (self->rank == 1 && k % 100 == 99)
            ranks_sleep_ms(10);
        if (!check(comm->ops->post(comm, &op, &ticket, &self->err) == SW_OK, "post %zu: %s", k,
                   self->err.message))
            break;
        if (k == 0)
            first = ticket;
        check(ticket == first + (uint32_t)k, "tickets are given in order, over the wrap");
    }
    check(comm->ops->wait(comm, ticket, &self->err) == SW_OK, "the last: %s", self->err.message);
    check(comm->ops->wait(comm, first, &self->err) == SW_OK, "the first, long done: %s",
          self->err.message);
    for (size_t k = 0; k < IN_FLIGHT; ++k)
        for (size_t i = 0; i < NUMEL; ++i) {
            float expected =
                (ranks_value(0, i, (int)k) + ranks_value(1, i, (int)k)) + ranks_value(2, i, (int)k);
            check(((float *)(void *)(arena->base[self->rank] + k * stride))[i] == expected,
                  "operation %zu, element %zu", k, i);
        }
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
}

enum { SLOT_FLOATS = SW_FABRIC_SLOT_BYTES / 4, CHUNKS = 11 };

/* Three private operations, each of more chunks than there are slots, with a slow rank that changes
 * from one to the next: a slot may be filled again only when every rank has read it. */
static void slots_are_used_again(rank_context *self)
{
    const uint32_t *start = self->shared;
    sw_comm *comm = self->comm;
    const size_t numel = (size_t)SLOT_FLOATS * CHUNKS - 5, bytes = numel * sizeof(float);
    float *data = malloc(bytes), *all = malloc(bytes * WORLD);
    if (!data || !all)
        exit(1);
    set_counters(comm, *start);
    ranks_meet(self);
    for (int step = 0; step < 4; ++step) {
        sw_op op = {.kind = step % 2 ? SW_OP_BROADCAST : SW_OP_ALL_REDUCE,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_SUM,
                    .root = 2,
                    .numel = numel,
                    .data = data,
                    .label = "slots"};
        for (size_t i = 0; i < numel; ++i)
            data[i] = ranks_value(self->rank, i, step);
        if (self->rank == step % WORLD)
            ranks_sleep_ms(5);
        check(comm->ops->run(comm, &op, &self->err) == SW_OK, "%s", self->err.message);
        size_t wrong = 0;
        for (size_t i = 0; i < numel; ++i) {
            float sum =
                (ranks_value(0, i, step) + ranks_value(1, i, step)) + ranks_value(2, i, step);
            wrong += data[i] != (step % 2 ? ranks_value(2, i, step) : sum);
        }
        check(wrong == 0, "step %d: %zu elements are wrong", step, wrong);
        check(comm->ops->gather(comm, data, bytes, all, "slots", &self->err) == SW_OK, "%s",
              self->err.message);
        for (int r = 0; r < WORLD; ++r)
            check(memcmp((uint8_t *)all + (size_t)r * bytes, data, bytes) == 0,
                  "step %d: what was gathered of rank %d", step, r);
    }
    free(data);
    free(all);
}

/* ---- an arena that one rank could not bring to its end ---- */

static sw_comm_ops failing;
static const sw_comm_ops *given;

static sw_status gather_then_fail(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                                  const char *label, sw_error *err)
{
    SW_TRY(given->gather(comm, mine, size_bytes, all, label, err));
    SW_FAIL(err, SW_E_TIMEOUT, "late, after the others had all");
}

/* The others know rank 1's part, and may look at it for as long as they like. */
static void part_of_a_failed_gather(rank_context *self)
{
    sw_comm *comm = self->comm;
    sw_arena *arena = NULL;
    if (self->rank == 1) {
        given = comm->ops;
        failing = *given;
        failing.gather = gather_then_fail;
        comm->ops = &failing;
    }
    sw_status status = comm->ops->arena_create(comm, ARENA_BYTES, "shown", &arena, &self->err);
    check(status == (self->rank == 1 ? SW_E_TIMEOUT : SW_OK) &&
              (arena != NULL) == (status == SW_OK),
          "rank %d got %s", self->rank, sw_status_name(status));
    ranks_meet(self);
    if (arena)
        arena->base[1][self->rank] = 7;
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
}

int main(void)
{
    static const uint32_t starts[] = {0, UINT32_MAX - 150, UINT32_MAX - 3, UINT32_MAX / 2 - 10};
    test_arguments();
    test_disagreement();
    test_three_ways();
    for (int by_abort = 0; by_abort < 2; ++by_abort) {
        test_end_after_the_part(by_abort);
        test_end_before_the_fold(by_abort);
    }
    ranks_run_all(abort_while_peers_wait, WORLD, NULL);
    ranks_run_all(end_requested_while_all_wait, WORLD, NULL);
    ranks_run_all(look_at_who_leaves, WORLD, NULL);
    ranks_run_all(deadline, WORLD, NULL);
    ranks_run_all(part_of_a_failed_gather, WORLD, NULL);
    test_full_ring();
    test_interruption();
    test_post_after_an_end();
    for (size_t s = 0; s < sizeof starts / sizeof starts[0]; ++s) {
        ranks_run_all(ring_wraps, WORLD, &starts[s]);
        ranks_run_all(slots_are_used_again, WORLD, &starts[s]);
    }
    return check_result();
}
