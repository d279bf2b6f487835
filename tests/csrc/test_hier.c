/* test_hier.c - hosts with ranks as threads, and a wire that is a box of messages. Law of
 * all_reduce: every rank ends with the fold inside each host, then over hosts, bit for bit, with
 * many operations in flight; where ranks disagree on one, those before it are done. Law of
 * broadcast: every rank has the root's bytes. Law of
 * reduce_scatter: owners of a slice have the same bits of it, and with contributions that stand on
 * the results before, those of sums rounded before the fold. Law of all_gather: every part has
 * every owner's slice. Law of a wire that breaks, or never answers: every rank gets an error, and
 * all ends, also where the waiting call is not told. Law of waiting: whoever is asked whether it is
 * still there does not keep the questions. Packed blocks change no bit of this. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "comm/hier.h"
#include "comm/local.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "ranks.h"

enum { BOX = 4096, IN_FLIGHT = 12 /* more than carriers agree on at once */ };

typedef struct message {
    int from, to;
    uint32_t tag;
    void *data; /* owned; NULL: none */
    size_t size_bytes;
} message;

typedef struct pending_work {
    struct pending_work *next; /* all of them, to be freed at the end: some are never waited for */
    int from, to;
    uint32_t tag;
    void *data; /* NULL: a send, complete at once */
    size_t size_bytes;
    bool has_come; /* without being waited for */
} pending_work;

typedef struct box {
    pending_work *works; /* owned */
    bool closed[RANKS_MAX], released[RANKS_MAX];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    message messages[BOX];
    int sent;
    int breaks_after; /* messages; 0: never */
    bool in_part;     /* and who waits then is not told, as of a message that has come in part */
    bool is_open;     /* all have joined */
    bool broken, silent, packs, probed;
} box;

typedef struct wire_end { /* one a rank */
    box *box;
    int rank;
} wire_end;

static bool is_of(sw_message what, uint32_t tag)
{
    return tag >> 28 == (uint32_t)what;
}

static bool is_looked_at(uint32_t tag)
{
    return is_of(SW_MESSAGE_LAST, tag) || is_of(SW_MESSAGE_PROBE, tag);
}

/* A last word or a probe arrives without anybody's waiting for it, while others look at its place;
 * so does nothing for who has closed. Under the lock. */
static void deliver(box *b, message *m)
{
    for (pending_work *w = b->works; w && m->data && is_looked_at(m->tag); w = w->next) {
        if (!w->data || w->from != m->from || w->to != m->to || w->tag != m->tag ||
            b->closed[m->to])
            continue;
        _Atomic uint32_t *to = w->data;
        for (size_t i = 0; i < m->size_bytes / sizeof(uint32_t); ++i)
            atomic_store_explicit(&to[i], ((const uint32_t *)m->data)[i], memory_order_relaxed);
        free(m->data);
        m->data = NULL;
        w->has_come = true;
    }
}

/* Under the lock. */
static pending_work *new_work(box *b)
{
    pending_work *made = calloc(1, sizeof *made);
    made->next = b->works;
    b->works = made;
    return made;
}

static sw_status box_send(void *context, int rank, uint32_t tag, const void *data, size_t bytes,
                          void **work, sw_error *err)
{
    wire_end *end = context;
    box *b = end->box;
    sw_status status = SW_OK;
    pthread_mutex_lock(&b->lock);
    b->broken |= b->is_open && b->breaks_after && ++b->sent > b->breaks_after;
    if (b->broken) {
        status = sw_error_set(err, SW_E_COMM, -1, "the wire broke");
    } else {
        int i = 0;
        while (i < BOX && b->messages[i].data)
            ++i;
        check(i < BOX, "the box is full");
        b->messages[i] = (message){
            .from = end->rank, .to = rank, .tag = tag, .data = malloc(bytes), .size_bytes = bytes};
        memcpy(b->messages[i].data, data, bytes);
        b->probed |= is_of(SW_MESSAGE_PROBE, tag);
        deliver(b, &b->messages[i]);
        *work = new_work(b);
    }
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
    return status;
}

static sw_status box_receive(void *context, int rank, uint32_t tag, void *data, size_t bytes,
                             void **work, sw_error *err)
{
    wire_end *end = context;
    (void)err; /* nothing moves before it is waited for */
    pthread_mutex_lock(&end->box->lock);
    pending_work *made = new_work(end->box);
    made->from = rank;
    made->to = end->rank;
    made->tag = tag;
    made->data = data;
    made->size_bytes = bytes;
    for (int i = 0; i < BOX && is_looked_at(tag); ++i)
        if (end->box->messages[i].data)
            deliver(end->box, &end->box->messages[i]);
    pthread_mutex_unlock(&end->box->lock);
    *work = made;
    return SW_OK;
}

static bool take(box *b, const pending_work *work)
{
    for (int i = 0; i < BOX; ++i) {
        message *m = &b->messages[i];
        if (!m->data || m->from != work->from || m->to != work->to || m->tag != work->tag)
            continue;
        check(m->size_bytes <= work->size_bytes, "a message has room");
        check(m->size_bytes == work->size_bytes || b->packs || is_of(SW_MESSAGE_FRAME, m->tag),
              "unless it is packed or a frame, just this room");
        memcpy(work->data, m->data, m->size_bytes);
        free(m->data);
        m->data = NULL;
        return true;
    }
    return false;
}

static sw_status box_wait(void *context, void *argument, sw_error *err)
{
    const wire_end *end = context;
    box *b = end->box;
    pending_work *work = argument;
    sw_status status = SW_OK;
    pthread_mutex_lock(&b->lock);
    while (work->data && !work->has_come && status == SW_OK &&
           ((b->silent && b->is_open) || !take(b, work))) {
        if (b->closed[end->rank] || (b->broken && !b->in_part))
            status = sw_error_set(err, SW_E_COMM, -1, "the wire broke");
        else
            pthread_cond_wait(&b->changed, &b->lock);
    }
    pthread_mutex_unlock(&b->lock);
    return status;
}

/* What is sent to it afterwards stays in the box. */
static bool box_close(void *context, bool gently)
{
    wire_end *end = context;
    (void)gently;
    pthread_mutex_lock(&end->box->lock);
    check(!end->box->closed[end->rank], "a wire is closed once");
    end->box->closed[end->rank] = true;
    pthread_cond_broadcast(&end->box->changed);
    pthread_mutex_unlock(&end->box->lock);
    return true;
}

static void box_drop(void *context, void *work)
{
    const wire_end *end = context;
    check(end->box->closed[end->rank] && work, "works are dropped after the wire is closed");
}

static void box_release(void *context)
{
    wire_end *end = context;
    check(!end->box->released[end->rank], "a wire is released once");
    end->box->released[end->rank] = true;
}

typedef struct scene {
    const int *host_of;
    int host_count;
    sw_local_group *hosts[RANKS_MAX];
    box box;
    const sw_slices *slices; /* NULL: one a rank */
    int64_t timeout_ns;
} scene;

static int radix; /* of the scenes that follow; 0: the usual one, so a single round */

static int size_of_host(const scene *s, int host, int world_size)
{
    int count = 0;
    for (int r = 0; r < world_size; ++r)
        count += s->host_of[r] == host;
    return count;
}

static sw_comm *join(rank_context *self, scene *s, wire_end *end, sw_wire *wire)
{
    int host = s->host_of[self->rank], local = 0;
    const sw_identity own = {.pid = 4711 + self->rank, .host = "a host"};
    sw_comm *inside, *comm = NULL;
    for (int r = 0; r < self->rank; ++r)
        local += s->host_of[r] == host;
    *end = (wire_end){.box = &s->box, .rank = self->rank};
    *wire = (sw_wire){.context = end,
                      .send = box_send,
                      .receive = box_receive,
                      .wait = box_wait,
                      .close = box_close,
                      .drop = box_drop,
                      .release = box_release,
                      .slow_bytes_per_s = s->box.packs ? UINT64_MAX : 0,
                      .radix = radix};
    if (!check(sw_local_comm_create(s->hosts[host], local, &inside, &self->err) == SW_OK, "inside"))
        return NULL;
    inside->timeout_ns = INT64_C(30000) * 1000000;
    check(sw_hier_comm_create(inside, self->rank, self->world_size, s->host_of, &own,
                              s->host_count > 1 ? wire : NULL, &comm, &self->err) == SW_OK,
          "a communicator over hosts: %s", self->err.message);
    if (comm)
        comm->timeout_ns = s->timeout_ns;
    ranks_meet(self);
    pthread_mutex_lock(&s->box.lock); /* from here on it may break, or be silent */
    s->box.sent = s->box.is_open ? s->box.sent : 0;
    s->box.is_open = true;
    pthread_mutex_unlock(&s->box.lock);
    ranks_meet(self);
    return comm;
}

static float mean_over_hosts(const scene *s, int world_size, size_t i, int step)
{
    float total = 0;
    for (int h = 0; h < s->host_count; ++h) {
        float sum = 0;
        bool first = true;
        for (int r = 0; r < world_size; ++r) {
            if (s->host_of[r] != h)
                continue;
            sum = first ? ranks_value(r, i, step) : sum + ranks_value(r, i, step);
            first = false;
        }
        total = h == 0 ? sum : total + sum;
    }
    return total * (float)(1.0 / world_size);
}

static bool every_element; /* in each step, not in one of three: the long form */

static void folds_over_hosts(rank_context *self)
{
    static const size_t sizes[IN_FLIGHT] = {32,     4096, 150016, 32, 700000, 65536,
                                            131072, 32,   32,     32, 200000, 4096};
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
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
            size_t first = every_element ? 0 : (size_t)step, stride = every_element ? 1 : 3;
            for (size_t k = first; k < sizes[i]; k += stride)
                wrong += data[k] != mean_over_hosts(s, self->world_size, k, step + i);
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

/* Slices
 * ------------------------------------------------------------------------------------------ */

typedef struct standing_plan { /* every contribution lacks the results of the round before */
    const sw_arena *arena;
    int world_size;
    bool stands;
} standing_plan;

static void all_contribute(void *context, bool *contributes, double *scale)
{
    const standing_plan *plan = context;
    for (int r = 0; r < plan->world_size; ++r)
        contributes[r] = true;
    *scale = 1.0 / plan->world_size;
}

/* All but elements 64 to 95, which nobody uses. */
static bool next_used(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel)
{
    (void)context;
    *begin = cursor >= 64 && cursor < 96 ? 96 : cursor;
    *numel = *begin < 64 && end > 64 ? 64 - *begin : end - *begin;
    return *begin < end;
}

static bool says_stands(void *context)
{
    return ((const standing_plan *)context)->stands;
}

static void add_standing(void *context, size_t begin, size_t numel, const void *standing)
{
    const standing_plan *plan = context;
    for (int r = 0; r < plan->world_size; ++r) {
        float *part = (float *)(void *)plan->arena->base[r];
        for (size_t i = 0; part && i < numel; ++i)
            part[begin + i] = ((const float *)standing)[i] + part[begin + i];
    }
}

/* The mean of contributions on top of `before`. */
static float mean_on_top(const scene *s, int world_size, size_t i, int step, float before)
{
    float total = 0;
    for (int h = 0; h < s->host_count; ++h) {
        float sum = 0;
        bool first = true;
        for (int r = 0; r < world_size; ++r) {
            if (s->host_of[r] != h)
                continue;
            float mine = before + ranks_value(r, i, step);
            sum = first ? mine : sum + mine;
            first = false;
        }
        total = h == 0 ? sum : total + sum;
    }
    return total * (float)(1.0 / world_size);
}

static bool reduces_slices(rank_context *self, scene *s, sw_comm *comm, size_t numel)
{
    static const float unused = 7;
    int world_size = self->world_size, count = s->slices ? s->slices->count : world_size;
    size_t slice = sw_comm_slice_numel(numel, sizeof(float), count), wrong = 0;
    size_t first = (size_t)(s->slices ? s->slices->of_rank[self->rank] : self->rank) * slice;
    sw_arena *arena = NULL, *results = NULL;
    standing_plan context = {.world_size = world_size};
    sw_fold_plan plan = {.context = &context,
                         .resolve = all_contribute,
                         .next_run = next_used,
                         .stands = says_stands,
                         .add_standing = add_standing};
    if (comm->ops->arena_create(comm, numel * sizeof(float), "parts", &arena, &self->err) !=
            SW_OK ||
        comm->ops->arena_create(comm, slice * sizeof(float) + 128, "results", &results,
                                &self->err) != SW_OK)
        return check(false, "arenas: %s", self->err.message);
    context.arena = arena;
    float *expected = malloc(slice * sizeof *expected);
    if (!check(expected != NULL, "memory"))
        return false;
    float *result = (float *)(void *)(results->base[self->rank] + 128);
    for (size_t k = 0; k < slice; ++k)
        result[k] = unused;
    for (int step = 0; step < 3; ++step) {
        float *data = (float *)(void *)arena->base[self->rank];
        for (size_t k = 0; k < numel; ++k)
            data[k] = ranks_value(self->rank, k, step);
        context.stands = step > 0;
        sw_op op = {.kind = SW_OP_REDUCE_SCATTER,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_MEAN,
                    .numel = numel,
                    .arena = arena,
                    .slices = s->slices,
                    .result = result,
                    .results = results,
                    .results_offset_bytes = 128,
                    .plan = &plan,
                    .label = "a sliced bucket"};
        check(comm->ops->run(comm, &op, &self->err) == SW_OK, "run: %s", self->err.message);
        for (size_t k = first; k < first + slice && k < numel; ++k) {
            float *mean = &expected[k - first];
            *mean = step == 0 ? mean_over_hosts(s, world_size, k, 0)
                              : mean_on_top(s, world_size, k, step, *mean);
            wrong += result[k - first] != (k >= 64 && k < 96 ? unused : *mean);
        }
    }
    free(expected);
    check(wrong == 0, "%zu results of %zu are wrong", wrong, numel);
    ranks_meet(self);
    comm->ops->arena_destroy(comm, results);
    comm->ops->arena_destroy(comm, arena);
    return wrong == 0;
}

/* Where the slices of a rank lie. */
static int home_of(const scene *s, int rank, bool one_copy)
{
    for (int r = 0; one_copy && r < rank; ++r)
        if (s->host_of[r] == s->host_of[rank] &&
            (!s->slices || s->slices->replica_of_rank[r] == s->slices->replica_of_rank[rank]))
            return r;
    return rank;
}

static bool gathers_slices(rank_context *self, scene *s, sw_comm *comm, size_t numel, bool one_copy)
{
    int count = s->slices ? s->slices->count : self->world_size;
    int index = s->slices ? s->slices->of_rank[self->rank] : self->rank;
    size_t slice = sw_comm_slice_numel(numel, 1, count), wrong = 0;
    sw_arena *arena = NULL;
    if (comm->ops->arena_create(comm, numel, "updates", &arena, &self->err) != SW_OK)
        return check(false, "an arena: %s", self->err.message);
    uint8_t *part = arena->base[home_of(s, self->rank, one_copy)];
    for (int step = 0; step < 3; ++step) {
        for (size_t k = (size_t)index * slice; k < (size_t)(index + 1) * slice && k < numel; ++k)
            part[k] = (uint8_t)(k * 7 + (size_t)index + (size_t)step);
        sw_op op = {.kind = SW_OP_ALL_GATHER,
                    .dtype = SW_DTYPE_UINT8,
                    .numel = numel,
                    .arena = arena,
                    .slices = s->slices,
                    .one_copy = one_copy,
                    .label = "updated slices"};
        check(comm->ops->run(comm, &op, &self->err) == SW_OK, "run: %s", self->err.message);
        for (size_t owner = 0; owner < (size_t)count; ++owner)
            for (size_t k = owner * slice; k < (owner + 1) * slice && k < numel; ++k)
                wrong += part[k] != (uint8_t)(k * 7 + owner + (size_t)step);
        ranks_meet(self); /* nobody updates what others still look at */
    }
    check(wrong == 0, "%zu bytes of %zu are not their owners'", wrong, numel);
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
    return wrong == 0;
}

static void slices_over_hosts(rank_context *self)
{
    static const size_t sizes[] = {32, 4096, 150016, 700000};
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
    for (size_t i = 0; comm && i < sizeof sizes / sizeof *sizes; ++i) {
        reduces_slices(self, s, comm, sizes[i]);
        gathers_slices(self, s, comm, 4 * sizes[i], false);
        gathers_slices(self, s, comm, 4 * sizes[i], true);
    }
    ranks_meet(self);
    if (comm)
        comm->ops->destroy(comm);
}

/* Bytes of one rank to all, from wherever and to wherever they lie. */
static void broadcasts(rank_context *self)
{
    static const size_t sizes[] = {0, 1, 8192, 8193, 262145, 1000003, 9000001};
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
    uint8_t *data = malloc(9000001);
    for (size_t i = 0; comm && i < sizeof sizes / sizeof *sizes; ++i)
        for (int root = 0; root < self->world_size; ++root) {
            size_t n = sizes[i], cut = n / (size_t)(self->rank + 2), wrong = 0;
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
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
    uint8_t *data = calloc(BYTES, 1);
    const sw_range range = {data, BYTES};
    int root = self->world_size - 1;
    sw_status status = SW_OK;
    if (s->box.breaks_after == 0 && self->rank == root)
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

/* A wire that breaks, or never answers, while slices travel. */
static void slices_meet_a_bad_wire(rank_context *self)
{
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
    sw_arena *arena = NULL;
    sw_status status = comm->ops->arena_create(comm, 1 << 22, "updates", &arena, &self->err);
    for (int i = 0; i < 50 && status == SW_OK; ++i) {
        sw_op op = {.kind = i % 2 ? SW_OP_ALL_GATHER : SW_OP_REDUCE_SCATTER,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_SUM,
                    .numel = 1 << 20,
                    .arena = arena,
                    .one_copy = i % 4 == 1,
                    .label = "slices"};
        status = comm->ops->run(comm, &op, &self->err);
    }
    check(status == SW_E_COMM || status == SW_E_TIMEOUT, "a bad wire is an error: %d", (int)status);
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
    comm->ops->destroy(comm);
    ranks_meet(self);
}

static void meets_a_bad_wire(rank_context *self)
{
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
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
    check(!s->box.in_part || (status == SW_E_COMM && sw_clock_now_ns() - begun_ns < 5000000000),
          "who waits for the rest of a message learns that nobody sends it");
    ranks_meet(self);
    comm->ops->destroy(comm);
    ranks_meet(self);
    free(data);
}

/* Others ask whether it is still there, again and again, and nothing of that piles up. */
static void one_takes_its_time(rank_context *self)
{
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
    float data[32] = {0};
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_SUM,
                .numel = 32,
                .data = data,
                .label = "private"};
    for (int step = 0; step < 4; ++step) {
        if (step < 2 && self->rank == self->world_size - 1)
            sw_thread_sleep_ns(900 * 1000 * 1000);
        check(comm->ops->run(comm, &op, &self->err) == SW_OK, "it is waited for: %s",
              self->err.message);
    }
    ranks_meet(self);
    int probes = 0;
    pthread_mutex_lock(&s->box.lock);
    for (int i = 0; i < BOX; ++i)
        probes += s->box.messages[i].data && is_of(SW_MESSAGE_PROBE, s->box.messages[i].tag);
    pthread_mutex_unlock(&s->box.lock);
    check(probes == 0, "%d probes were not taken in", probes);
    check(s->box.probed, "and there were some");
    ranks_meet(self);
    comm->ops->destroy(comm);
}

/* Everybody's error names the rank that does not come, however many hosts lie between. */
static void one_never_comes(rank_context *self)
{
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
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
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
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
    scene *s = (scene *)(uintptr_t)self->shared;
    wire_end end;
    sw_wire wire;
    sw_comm *comm = join(self, s, &end, &wire);
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

/* Of the scenes that follow: blocks are packets; who waits is not told that the wire broke. */
static bool packs, in_part;

static void run_sliced(rank_body *body, const int *host_of, int world_size, const sw_slices *slices,
                       int breaks_after, bool silent)
{
    scene s = {
        .host_of = host_of,
        .slices = slices,
        .timeout_ns = (silent ? INT64_C(300) : INT64_C(30000)) * 1000000,
        .box = {
            .breaks_after = breaks_after, .in_part = in_part, .silent = silent, .packs = packs}};
    sw_error err;
    pthread_mutex_init(&s.box.lock, NULL);
    pthread_cond_init(&s.box.changed, NULL);
    for (int r = 0; r < world_size; ++r)
        s.host_count = host_of[r] >= s.host_count ? host_of[r] + 1 : s.host_count;
    for (int h = 0; h < s.host_count; ++h)
        check(sw_local_group_create(size_of_host(&s, h, world_size), &s.hosts[h], &err) == SW_OK,
              "a host");
    ranks_run_bare(body, world_size, &s);
    for (int h = 0; h < s.host_count; ++h)
        sw_local_group_destroy(s.hosts[h]);
    for (int i = 0; i < BOX; ++i)
        free(s.box.messages[i].data);
    for (int r = 0; r < world_size && s.host_count > 1; ++r)
        check(s.box.released[r], "the wire of rank %d was released", r);
    while (s.box.works) {
        pending_work *next = s.box.works->next;
        free(s.box.works);
        s.box.works = next;
    }
    pthread_cond_destroy(&s.box.changed);
    pthread_mutex_destroy(&s.box.lock);
}

static void run(rank_body *body, const int *host_of, int world_size, int breaks_after, bool silent)
{
    run_sliced(body, host_of, world_size, NULL, breaks_after, silent);
}

int main(void)
{
    static const int columns[] = {0, 1, 0, 1}, rows[] = {0, 0, 1, 1}, all_one[] = {0, 0, 0, 0};
    const sw_slices mesh = {.count = 2, .of_rank = columns, .replica_of_rank = rows};
    /* rows 0 3 and 2 1: each on two hosts, which have an owner of every slice all the same */
    static const int turned[] = {0, 1, 1, 0}, turned_columns[] = {0, 1, 0, 1};
    const sw_slices crossing = {.count = 2, .of_rank = turned_columns, .replica_of_rank = turned};
    /* rows 0 1 2 and 3 4 5: over hosts that lack slices */
    static const int threes[] = {0, 1, 2, 0, 1, 2}, two_rows[] = {0, 0, 0, 1, 1, 1};
    const sw_slices wide = {.count = 3, .of_rank = threes, .replica_of_rank = two_rows};
    static const int alternating[] = {0, 1, 0, 1}, pairs[] = {0, 0, 1, 1, 2, 2},
                     lopsided[] = {0, 0, 0, 0, 1, 2};
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
    run(slices_over_hosts, even, 4, 0, false);
    run(slices_over_hosts, uneven, 5, 0, false);
    run(slices_over_hosts, apart, 3, 0, false);
    run(slices_over_hosts, crosswise, 3, 0, false);
    run(slices_over_hosts, one, 3, 0, false);
    run_sliced(slices_over_hosts, even, 4, &mesh, 0, false);
    run_sliced(slices_over_hosts, all_one, 4, &mesh, 0, false);
    run_sliced(slices_over_hosts, even, 4, &crossing, 0, false);
    run_sliced(slices_over_hosts, alternating, 4, &mesh, 0, false);
    run_sliced(slices_over_hosts, pairs, 6, &wide, 0, false);
    run_sliced(slices_over_hosts, lopsided, 6, &wide, 0, false);
    packs = true;
    run_sliced(slices_over_hosts, pairs, 6, &wide, 0, false);
    run(folds_over_hosts, uneven, 5, 0, false);
    run(folds_over_hosts, apart, 3, 0, false);
    run(slices_over_hosts, uneven, 5, 0, false);
    run(slices_over_hosts, apart, 3, 0, false);
    run_sliced(slices_over_hosts, even, 4, &mesh, 0, false);
    packs = false;
    for (int after = 8; after < 90; after += 5)
        run(slices_meet_a_bad_wire, uneven, 5, after, false);
    run(slices_meet_a_bad_wire, crosswise, 3, 0, true);
    for (int after = 1; after < 40; after += 3)
        run(meets_a_bad_wire, uneven, 5, after, false);
    run(meets_a_bad_wire, even, 4, 0, true);
    run(one_takes_its_time, apart, 3, 0, false);
    run(broadcasts, even, 4, 0, false);
    run(broadcasts, uneven, 5, 0, false);
    run(broadcasts, crosswise, 3, 0, false);
    run(broadcasts, one, 3, 0, false);
    run(broadcasts, chain, 7, 0, false);
    for (int after = 4; after < 100; after += 9)
        run(broadcasts_break, spread, 7, after, false);
    run(broadcasts_break, spread, 7, 0, false);
    run(one_never_comes, chain, 7, 0, false);
    radix = 2; /* several rounds */
    run(folds_over_hosts, apart, 3, 0, false);
    run(folds_over_hosts, spread, 7, 0, false);
    run(disagrees_in_a_batch, spread, 7, 0, false);
    run(looks_late, spread, 7, 0, false);
    run(slices_over_hosts, chain, 7, 0, false);
    run(one_takes_its_time, chain, 7, 0, false);
    run(one_never_comes, chain, 7, 0, false);
    run(one_never_comes, spread, 7, 0, false);
    for (int after = 1; after < 140; after += every_element ? 2 : 9)
        run(meets_a_bad_wire, spread, 7, after, false);
    radix = 3;
    run(folds_over_hosts, chain, 7, 0, false);
    run(one_never_comes, chain, 7, 0, false);
    radix = 0;
    in_part = true;
    for (int after = 10; after < 40; after += 13)
        run(meets_a_bad_wire, uneven, 5, after, false);
    return check_result();
}
