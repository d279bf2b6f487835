/* test_hier.c - communicators over hosts (hosts.h). Law of all_reduce: every rank ends with the
 * fold inside each host, then over hosts, bit for bit, with many operations in flight; where ranks
 * disagree on one, those before it are done. Law of broadcast: every rank has the root's bytes. Law
 * of a wire that breaks, or never answers: every rank gets an error, and all ends, also where the
 * waiting call is not told. Law of waiting: a rank that others ask whether it is still there does
 * not keep the questions. Packed blocks change no bit of this. test_hier_slices.c has slices. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "hosts.h"
#include "platform/clock.h"
#include "platform/thread.h"

enum { IN_FLIGHT = 12 /* more than carriers agree on at once */ };

static bool every_element; /* not one of a few, and the tail: the long form */

static void folds_over_hosts(rank_context *self)
{
    static const size_t sizes[IN_FLIGHT] = {32,     4096, 150016, 32, 700000, 65536,
                                            131072, 32,   32,     32, 200000, 4096};
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_arena *arenas[IN_FLIGHT] = {NULL};
    sw_op ops[IN_FLIGHT];
    uint32_t tickets[IN_FLIGHT];
    for (int i = 0; comm && i < IN_FLIGHT; ++i)
        check(comm->ops->arena_create(comm, sizes[i] * sizeof(float), "an arena", &arenas[i],
                                      &self->err) == SW_OK,
              "an arena: %s", self->err.message);
    for (int step = 0; comm && step < 3; ++step) {
        for (int i = 0; i < IN_FLIGHT; ++i) {
            float *data = (float *)(void *)arenas[i]->base[self->rank];
            for (size_t k = 0; k < sizes[i]; ++k)
                data[k] = ranks_value(self->rank, k, step + i);
            ops[i] = (sw_op){.kind = SW_OP_ALL_REDUCE,
                             .dtype = SW_DTYPE_FLOAT32,
                             .redop = SW_REDOP_MEAN,
                             .numel = sizes[i],
                             .arena = arenas[i],
                             .label = "a bucket"};
            check(comm->ops->post(comm, &ops[i], &tickets[i], &self->err) == SW_OK, "post: %s",
                  self->err.message);
        }
        for (int i = 0; i < IN_FLIGHT; ++i) {
            check(comm->ops->wait(comm, tickets[i], &self->err) == SW_OK, "wait: %s",
                  self->err.message);
            const float *data = (const float *)(void *)arenas[i]->base[self->rank];
            size_t wrong = 0;
            size_t first = every_element ? 0 : (size_t)step, stride = every_element ? 1 : 11;
            for (size_t k = first; k < sizes[i]; k += k + 64 < sizes[i] ? stride : 1)
                wrong += data[k] != hosts_mean(s, self->world_size, k, step + i);
            check(wrong == 0, "%zu of %zu elements are not the fold over hosts", wrong, sizes[i]);
        }
    }
    ranks_meet(self);
    for (int i = 0; comm && i < IN_FLIGHT; ++i)
        comm->ops->arena_destroy(comm, arenas[i]);
    ranks_meet(self);
    if (comm)
        comm->ops->destroy(comm);
}

/* Bytes of one rank to all, from wherever and to wherever they lie. */
static void broadcasts(rank_context *self)
{
    static const size_t sizes[] = {0, 1, 8192, 8193, 262145, 1000003, 9000001};
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    uint8_t *data = malloc(9000001);
    for (size_t i = 0; comm && i < sizeof sizes / sizeof *sizes; ++i)
        for (int root = 0; root < self->world_size; ++root) {
            size_t n = sizes[i], cut = n / (size_t)(self->rank + 2), wrong = 0;
            if (n > 262145 && root != 0 && root != self->world_size - 1 && !every_element)
                continue; /* a large one from each end is enough */
            const sw_range ranges[] = {{data, cut}, {NULL, 0}, {data + cut, n - cut}};
            for (size_t k = 0; k < n; ++k)
                data[k] = self->rank == root ? (uint8_t)(k * 31 + (size_t)root + i) : 0xee;
            check(sw_comm_broadcast(comm, ranges, 3, root, "bytes", &self->err) == SW_OK,
                  "a broadcast: %s", self->err.message);
            for (size_t k = 0; k < n; ++k)
                wrong += data[k] != (uint8_t)(k * 31 + (size_t)root + i);
            check(wrong == 0, "%zu bytes of %zu are not the root's", wrong, n);
        }
    ranks_meet(self);
    if (comm)
        comm->ops->destroy(comm);
    free(data);
}

/* The wire breaks, or the root leaves, in the middle of one: an error everywhere, soon. */
static void broadcasts_break(rank_context *self)
{
    enum { BYTES = 20000000 };
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    uint8_t *data = calloc(BYTES, 1);
    const sw_range range = {data, BYTES};
    int root = self->world_size - 1;
    sw_status status = SW_OK;
    if (s->box.wire.breaks_after == 0 && self->rank == root)
        comm->ops->leave(comm);
    else
        status = sw_comm_broadcast(comm, &range, 1, root, "bytes", &self->err);
    check(self->rank == root || status == SW_E_COMM, "an error: %d %s", (int)status,
          status ? self->err.message : "");
    ranks_meet(self);
    comm->ops->destroy(comm);
    ranks_meet(self);
    free(data);
}

static void meets_a_bad_wire(rank_context *self)
{
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    float *data = calloc(100000, sizeof *data);
    int64_t begun_ns = sw_clock_now_ns();
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_SUM,
                .numel = 100000,
                .data = data,
                .label = "private"};
    sw_status status = SW_OK;
    for (int i = 0; comm && i < 50 && status == SW_OK; ++i)
        status = comm->ops->run(comm, &op, &self->err);
    check(status == SW_E_COMM || status == SW_E_TIMEOUT, "a bad wire is an error: %d", (int)status);
    check(comm->ops->run(comm, &op, &self->err) == status, "and stays one");
    check(!s->box.wire.in_part ||
              (status == SW_E_COMM && sw_clock_now_ns() - begun_ns < s->timeout_ns / 2),
          "who waits for the rest of a message learns that nobody sends it");
    ranks_meet(self);
    comm->ops->destroy(comm);
    ranks_meet(self);
    free(data);
}

/* Others ask whether it is still there, again and again, and nothing of that piles up. */
static void one_takes_its_time(rank_context *self)
{
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    float data[32] = {0};
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_SUM,
                .numel = 32,
                .data = data,
                .label = "private"};
    int64_t begun_ns = sw_clock_now_ns();
    for (int step = 0; step < 4; ++step) {
        if (step < 2 && self->rank == self->world_size - 1)
            do
                sw_thread_sleep_ns(900 * 1000 * 1000);
            while (!s->box.probed && sw_clock_now_ns() - begun_ns < s->timeout_ns / 2);
        check(comm->ops->run(comm, &op, &self->err) == SW_OK, "it is waited for: %s",
              self->err.message);
    }
    ranks_meet(self);
    int probes = 0;
    pthread_mutex_lock(&s->box.lock);
    for (int i = 0; i < HOSTS_BOX; ++i)
        probes +=
            s->box.messages[i].data && hosts_message_is(SW_MESSAGE_PROBE, s->box.messages[i].tag);
    pthread_mutex_unlock(&s->box.lock);
    check(probes == 0, "%d probes were not taken in", probes);
    check(s->box.probed, "and there were some");
    ranks_meet(self);
    comm->ops->destroy(comm);
}

/* A frame tells of a probe whose send has not returned. */
static void is_probed_slowly(rank_context *self)
{
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_op op = {.kind = SW_OP_BARRIER, .label = "a barrier"};
    int64_t begun_ns = sw_clock_now_ns();
    for (int step = 0; step < 4; ++step) {
        if (step == 1 && self->rank == self->world_size - 1)
            do
                sw_thread_sleep_ns(350 * 1000 * 1000);
            while (!s->box.probed && sw_clock_now_ns() - begun_ns < s->timeout_ns / 2);
        check(comm->ops->run(comm, &op, &self->err) == SW_OK, "step %d: %s", step,
              self->err.message);
    }
    ranks_meet(self);
    check(s->box.probed, "it was probed");
    comm->ops->destroy(comm);
}

/* Everybody's error names the rank that does not come, however many hosts lie between. */
static void one_never_comes(rank_context *self)
{
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_op op = {.kind = SW_OP_BARRIER, .label = "a barrier"};
    int late = self->world_size / 2;
    check(comm->ops->run(comm, &op, &self->err) == SW_OK, "all are there: %s", self->err.message);
    comm->timeout_ns = INT64_C(1200) * 1000000;
    if (self->rank == late) {
        sw_thread_sleep_ns(2000 * 1000 * 1000);
    } else {
        check(comm->ops->run(comm, &op, &self->err) == SW_E_TIMEOUT, "it is waited for");
        check(self->err.detail == late, "rank %d blames rank %d: %s", self->rank, self->err.detail,
              self->err.message);
    }
    ranks_meet(self);
    comm->ops->destroy(comm);
}

/* What was complete before a rank left is complete for those that look after it only then. */
static void looks_late(rank_context *self)
{
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_arena *arena = NULL;
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_SUM,
                .numel = 32,
                .label = "the last"};
    uint32_t ticket;
    check(comm->ops->arena_create(comm, 32 * sizeof(float), "an arena", &arena, &self->err) ==
              SW_OK,
          "an arena: %s", self->err.message);
    op.arena = arena;
    ((float *)(void *)arena->base[self->rank])[0] = 1;
    check(comm->ops->post(comm, &op, &ticket, &self->err) == SW_OK, "post");
    bool leaves = self->rank == 1;
    if (leaves) {
        check(comm->ops->wait(comm, ticket, &self->err) == SW_OK, "wait: %s", self->err.message);
        comm->ops->leave(comm);
    }
    ranks_meet(self);
    sw_thread_sleep_ns(100 * 1000 * 1000); /* the carrier of its host sees that it left, and ends */
    if (!leaves) {
        check(comm->ops->wait(comm, ticket, &self->err) == SW_OK, "it was complete: %s",
              self->err.message);
        check(((float *)(void *)arena->base[self->rank])[0] == (float)self->world_size, "the sum");
        check(comm->ops->run(comm, &op, &self->err) == SW_E_COMM, "the next is an error");
        check(self->err.detail == 1, "that names rank 1, not %d", self->err.detail);
        check(strstr(self->err.message, "''") == NULL,
              "an operation that no rank has come to has no name yet: %s", self->err.message);
    }
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
    ranks_meet(self);
    comm->ops->destroy(comm);
}

/* Of operations that carriers agree on together, those before the one that ranks disagree on. */
static void disagrees_in_a_batch(rank_context *self)
{
    enum { OPERATIONS = 5, ODD = 3 };
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_arena *arenas[OPERATIONS] = {NULL};
    uint32_t tickets[OPERATIONS];
    for (int i = 0; i < OPERATIONS; ++i)
        check(comm->ops->arena_create(comm, 100000 * sizeof(float), "an arena", &arenas[i],
                                      &self->err) == SW_OK,
              "an arena: %s", self->err.message);
    for (int i = 0; i < OPERATIONS; ++i) {
        bool odd = i == ODD && self->rank == self->world_size - 1;
        sw_op op = {.kind = SW_OP_ALL_REDUCE,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_SUM,
                    .numel = odd ? 64 : 100000,
                    .arena = arenas[i],
                    .label = "a bucket"};
        ((float *)(void *)arenas[i]->base[self->rank])[99999] = (float)(i + 1);
        check(comm->ops->post(comm, &op, &tickets[i], &self->err) == SW_OK, "post: %s",
              self->err.message);
    }
    for (int i = 0; i < ODD; ++i) {
        check(comm->ops->wait(comm, tickets[i], &self->err) == SW_OK, "operation %d: %s", i,
              self->err.message);
        check(((float *)(void *)arenas[i]->base[self->rank])[99999] ==
                  (float)((i + 1) * self->world_size),
              "the sum of operation %d", i);
    }
    check(comm->ops->wait(comm, tickets[ODD], &self->err) == SW_E_MISMATCH, "they disagree");
    check(strstr(self->err.message, "of 64 float32") != NULL, "and it says so: %s",
          self->err.message);
    ranks_meet(self);
    for (int i = 0; i < OPERATIONS; ++i)
        comm->ops->arena_destroy(comm, arenas[i]);
    ranks_meet(self);
    comm->ops->destroy(comm);
}

static void be_late(int signal)
{
    (void)signal;
    sw_thread_sleep_ns(INT64_C(4000) * 1000 * 1000);
}

/* The carrier's thread is late, but not inside the wire: the communicator's end waits for it, so
 * that it reads no memory that is freed. (The run checks that the wire was released.) */
static void a_late_thread_is_awaited(rank_context *self)
{
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, hosts_scene(self), &end, &wire);
    if (!comm)
        return;
    signal(SIGUSR1, be_late);
    do
        sw_thread_sleep_ns(50 * 1000 * 1000); /* it waits for posts */
    while (!end.has_carrier);
    check(pthread_kill(end.carrier, SIGUSR1) == 0, "the carrier has a thread");
    comm->ops->destroy(comm);
}

static hosts_wire usual; /* of the runs that follow */

static void run(rank_body *body, const int *host_of, int world_size, int breaks_after, bool silent)
{
    hosts_wire wire = usual;
    wire.breaks_after = breaks_after;
    wire.silent = silent;
    hosts_run(body, host_of, world_size, NULL, wire);
}

int main(void)
{
    static const int spread[] = {0, 1, 2, 0, 3, 4, 4}, chain[] = {0, 1, 2, 3, 4, 5, 6};
    static const int even[] = {0, 0, 1, 1}, uneven[] = {0, 0, 0, 1, 1}, apart[] = {0, 1, 2},
                     crosswise[] = {0, 1, 0}, one[] = {0, 0, 0};
    every_element = getenv("SW_TEST_LONG") != NULL;
    run(folds_over_hosts, even, 4, 0, false);
    run(folds_over_hosts, uneven, 5, 0, false);
    run(folds_over_hosts, apart, 3, 0, false);
    run(folds_over_hosts, crosswise, 3, 0, false);
    run(folds_over_hosts, one, 3, 0, false);
    run(disagrees_in_a_batch, even, 4, 0, false);
    run(disagrees_in_a_batch, uneven, 5, 0, false);
    run(disagrees_in_a_batch, one, 3, 0, false);
    run(looks_late, even, 4, 0, false);
    run(looks_late, one, 3, 0, false);
    usual.packs = true;
    run(folds_over_hosts, uneven, 5, 0, false);
    run(folds_over_hosts, apart, 3, 0, false);
    usual.packs = false;
    for (int after = 1; after < 40; after += 3)
        run(meets_a_bad_wire, uneven, 5, after, false);
    run(meets_a_bad_wire, even, 4, 0, true);
    run(one_takes_its_time, apart, 3, 0, false);
    run(a_late_thread_is_awaited, apart, 3, 0, false);
    usual.lingers = true;
    run(is_probed_slowly, apart, 3, 0, false);
    usual.lingers = false;
    run(broadcasts, even, 4, 0, false);
    run(broadcasts, uneven, 5, 0, false);
    run(broadcasts, crosswise, 3, 0, false);
    run(broadcasts, one, 3, 0, false);
    run(broadcasts, chain, 7, 0, false);
    for (int after = 4; after < 76; after += 9) /* fewer messages than pieces: no host is done */
        run(broadcasts_break, spread, 7, after, false);
    run(broadcasts_break, spread, 7, 0, false);
    run(one_never_comes, chain, 7, 0, false);
    usual.radix = 2; /* several rounds */
    run(folds_over_hosts, apart, 3, 0, false);
    run(folds_over_hosts, spread, 7, 0, false);
    run(disagrees_in_a_batch, spread, 7, 0, false);
    run(looks_late, spread, 7, 0, false);
    run(one_takes_its_time, chain, 7, 0, false);
    run(one_never_comes, chain, 7, 0, false);
    run(one_never_comes, spread, 7, 0, false);
    for (int after = 1; after < 140; after += every_element ? 2 : 9)
        run(meets_a_bad_wire, spread, 7, after, false);
    usual.radix = 3;
    run(folds_over_hosts, chain, 7, 0, false);
    run(one_never_comes, chain, 7, 0, false);
    usual.radix = 0;
    usual.in_part = true;
    for (int after = 10; after < 40; after += 13)
        run(meets_a_bad_wire, uneven, 5, after, false);
    return check_result();
}
