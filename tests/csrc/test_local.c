/* test_local.c - the protocol with ranks as threads: laws that hold whatever the timing, and a
 * subject for the thread sanitizer. Law of all_reduce: every rank ends with the fold in rank order,
 * bit for bit. Law of a disagreement: every rank gets the same sentence. Law of a round: parameters
 * that nobody used keep their bits. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/local.h"
#include "reduce/reducer.h"

enum { MAX_WORLD = 5, ROUNDS = 6 };

typedef struct rank_state {
    sw_local_group *group;
    int rank, world_size;
    size_t numel;
    const char *failure; /* NULL: passed */
    sw_error err;
} rank_state;

typedef const char *rank_body(rank_state *self, sw_comm *comm);

typedef struct thread_start {
    rank_state *state;
    rank_body *body;
} thread_start;

static int passed, failed;

static float value_of(int rank, size_t i, int step)
{
    return (float)((i * 2654435761u + (unsigned)rank * 40503u + (unsigned)step * 977u) % 20011u) /
               7.0f -
           1000.0f;
}

static float mean_of(int world_size, size_t i, int step)
{
    float sum = value_of(0, i, step);
    for (int r = 1; r < world_size; ++r)
        sum += value_of(r, i, step);
    return sum * (float)(1.0 / world_size);
}

static const char *slots_fold_in_rank_order(rank_state *self, sw_comm *comm)
{
    float *data = malloc((self->numel + 1) * sizeof *data);
    const char *failure = data ? NULL : "no memory";
    for (int step = 0; step < ROUNDS && !failure; ++step) {
        sw_op op = {.kind = SW_OP_ALL_REDUCE,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_MEAN,
                    .numel = self->numel,
                    .data = data,
                    .label = "slots"};
        for (size_t i = 0; i < self->numel; ++i)
            data[i] = value_of(self->rank, i, step);
        if (comm->ops->run(comm, &op, &self->err) != SW_OK)
            failure = self->err.message;
        for (size_t i = 0; i < self->numel && !failure; ++i)
            if (data[i] != mean_of(self->world_size, i, step))
                failure = "an element differs from the fold in rank order";
    }
    free(data);
    return failure;
}

static const char *arenas_fold_in_place(rank_state *self, sw_comm *comm)
{
    sw_arena *arena = NULL;
    const char *failure = NULL;
    if (comm->ops->arena_create(comm, self->numel * sizeof(float) + 128, "pool", &arena,
                                &self->err) != SW_OK)
        return self->err.message;
    float *data = (float *)(void *)arena->base[self->rank];
    for (int step = 0; step < ROUNDS && !failure; ++step) {
        uint32_t ticket;
        bool complete;
        sw_op op = {.kind = SW_OP_ALL_REDUCE,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_MEAN,
                    .numel = self->numel,
                    .arena = arena,
                    .label = "pool"};
        for (size_t i = 0; i < self->numel; ++i)
            data[i] = value_of(self->rank, i, step);
        if (comm->ops->post(comm, &op, &ticket, &self->err) != SW_OK ||
            comm->ops->poll(comm, ticket, &complete, &self->err) != SW_OK ||
            comm->ops->wait(comm, ticket, &self->err) != SW_OK)
            failure = self->err.message;
        for (size_t i = 0; i < self->numel && !failure; ++i)
            if (data[i] != mean_of(self->world_size, i, step))
                failure = "an element differs from the fold in rank order";
    }
    comm->ops->arena_destroy(comm, arena);
    return failure;
}

static const char *disagreement_is_one_sentence(rank_state *self, sw_comm *comm)
{
    float data[8] = {0};
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_SUM,
                .numel = self->rank == self->world_size - 1 ? 7 : 8,
                .data = data,
                .label = "uneven"};
    sw_status status = comm->ops->run(comm, &op, &self->err);
    if (self->world_size == 1)
        return status == SW_OK ? NULL : "a world of one disagreed with itself";
    if (status != SW_E_MISMATCH || !strstr(self->err.message, "rank 0") ||
        !strstr(self->err.message, "sum of 7 float32"))
        return "the disagreement was not named";
    sw_error again;
    if (comm->ops->run(comm, &op, &again) != SW_E_MISMATCH ||
        strcmp(again.message, self->err.message) != 0)
        return "a later call did not repeat the sentence";
    return NULL;
}

/* Three parameters: 0 used by all, 1 by rank 0 alone, 2 by nobody. */
static const char *check_round(rank_state *self, sw_reducer *reducer, const size_t *numel, int step)
{
    for (size_t p = 0; p < 3; ++p) {
        const float *gradient = (const float *)(const void *)sw_reducer_address(reducer, p);
        for (size_t i = 0; i < numel[p]; ++i) {
            float expected =
                p == 2 ? value_of(self->rank, i, 99) : mean_of(self->world_size, i, step);
            if (p == 1) { /* one contribution, the others are zero */
                expected = value_of(0, i, step);
                for (int r = 1; r < self->world_size; ++r)
                    expected += 0.0f;
                expected *= (float)(1.0 / self->world_size);
            }
            if (gradient[i] != expected)
                return p == 2 ? "a parameter that nobody used changed"
                              : "a mean differs from the fold";
        }
        if (sw_reducer_used_by_any(reducer, p) != (p < 2))
            return "use bits are wrong";
    }
    return NULL;
}

static const char *one_round(rank_state *self, sw_reducer *reducer, const size_t *numel, int step)
{
    bool advance;
    sw_reducer_count_step(reducer);
    if (sw_reducer_open(reducer, step, true, &self->err) != SW_OK)
        return self->err.message;
    for (size_t p = 3; p-- > 0;) {
        float *gradient = (float *)(void *)sw_reducer_address(reducer, p);
        bool uses = p == 0 || (p == 1 && self->rank == 0);
        for (size_t i = 0; i < numel[p]; ++i)
            gradient[i] = p == 2 ? value_of(self->rank, i, 99)
                          : uses ? value_of(self->rank, i, step)
                                 : 0.0f;
        if (uses && (sw_reducer_mark(reducer, p, step, &advance, &self->err) != SW_OK ||
                     (advance && sw_reducer_advance(reducer, &self->err) != SW_OK)))
            return self->err.message;
    }
    if (sw_reducer_finish(reducer, &self->err) != SW_OK)
        return self->err.message;
    return check_round(self, reducer, numel, step);
}

/* Nobody unmaps its part while a peer may still read it: threads, unlike processes, share the
 * mapping itself. */
static void meet(sw_comm *comm)
{
    sw_op barrier = {.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8, .label = "end"};
    sw_error ignored;
    (void)!comm->ops->run(comm, &barrier, &ignored);
}

static const char *rounds_of(rank_state *self, sw_comm *comm, sw_transport transport)
{
    static const char *const names[3] = {"first", "second", "third"};
    size_t numel[3] = {self->numel + 1, 33, 5};
    sw_layout_param params[3];
    sw_reducer *reducer = NULL;
    sw_reducer_options options = {
        .bucket_cap_bytes = 256, .transport = transport, .label = "threads"};
    for (size_t p = 0; p < 3; ++p)
        params[p] =
            (sw_layout_param){.numel = numel[p], .dtype = SW_DTYPE_FLOAT32, .trainable = true};
    if (sw_reducer_create(comm, params, names, 3, &options, &reducer, &self->err) != SW_OK)
        return self->err.message;
    const char *failure = NULL;
    for (int step = 0; step < ROUNDS && !failure; ++step)
        failure = one_round(self, reducer, numel, step);
    meet(comm);
    sw_reducer_destroy(reducer);
    return failure;
}

static const char *rounds_in_a_pool(rank_state *self, sw_comm *comm)
{
    return rounds_of(self, comm, SW_TRANSPORT_POOL);
}

static const char *rounds_staged(rank_state *self, sw_comm *comm)
{
    return rounds_of(self, comm, SW_TRANSPORT_STAGED);
}

static void *run_rank(void *argument)
{
    thread_start *start = argument;
    rank_state *self = start->state;
    sw_comm *comm = NULL;
    if (sw_local_comm_create(self->group, self->rank, &comm, &self->err) != SW_OK) {
        self->failure = self->err.message;
        return NULL;
    }
    comm->timeout_ns = INT64_C(60) * 1000000000;
    self->failure = start->body(self, comm);
    meet(comm);
    comm->ops->destroy(comm);
    return NULL;
}

static void run_all(const char *name, rank_body *body, int world_size, size_t numel)
{
    pthread_t threads[MAX_WORLD];
    rank_state states[MAX_WORLD] = {0};
    thread_start starts[MAX_WORLD];
    sw_local_group *group;
    sw_error err;
    if (sw_local_group_create(world_size, &group, &err) != SW_OK) {
        fprintf(stderr, "%s: %s\n", name, err.message);
        failed++;
        return;
    }
    for (int r = 0; r < world_size; ++r) {
        states[r] =
            (rank_state){.group = group, .rank = r, .world_size = world_size, .numel = numel};
        starts[r] = (thread_start){.state = &states[r], .body = body};
        if (pthread_create(&threads[r], NULL, run_rank, &starts[r]) != 0) {
            fprintf(stderr, "%s: no thread\n", name);
            exit(1);
        }
    }
    for (int r = 0; r < world_size; ++r) {
        pthread_join(threads[r], NULL);
        if (states[r].failure) {
            fprintf(stderr, "%s, W=%d, n=%zu, rank %d: %s\n", name, world_size, numel, r,
                    states[r].failure);
            failed++;
        } else {
            passed++;
        }
    }
    sw_local_group_destroy(group);
}

int main(void)
{
    static const int worlds[] = {1, 2, 3, 5};
    static const size_t sizes[] = {0, 1, 31, 32 * 1024 - 1, 32 * 1024 + 1, 150001};
    for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; ++w) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s) {
            run_all("slots fold in rank order", slots_fold_in_rank_order, worlds[w], sizes[s]);
            run_all("arenas fold in place", arenas_fold_in_place, worlds[w], sizes[s]);
            run_all("rounds in a pool", rounds_in_a_pool, worlds[w], sizes[s]);
            run_all("rounds staged", rounds_staged, worlds[w], sizes[s]);
        }
        run_all("a disagreement is one sentence", disagreement_is_one_sentence, worlds[w], 8);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
