/* ranks.c - run ranks as threads; see ranks.h. */
#include "ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"

typedef struct thread_start {
    rank_context context;
    rank_body *body;
    bool bare;
} thread_start;

static const int64_t timeout_ns = INT64_C(30) * 1000000000;

static void *run_rank(void *argument)
{
    thread_start *start = argument;
    rank_context *self = &start->context;
    if (!start->bare &&
        !check(sw_local_comm_create(self->group, self->rank, &self->comm, &self->err) == SW_OK,
               "a communicator: %s", self->err.message)) {
        exit(1); /* the other ranks would wait at the barrier */
    }
    if (self->comm)
        self->comm->timeout_ns = timeout_ns;
    start->body(self);
    ranks_meet(self);
    if (self->comm)
        self->comm->ops->destroy(self->comm);
    return NULL;
}

static void run(rank_body *body, int world_size, const void *shared, bool bare)
{
    pthread_t threads[RANKS_MAX];
    thread_start starts[RANKS_MAX];
    pthread_barrier_t meeting;
    sw_local_group *group = NULL;
    sw_error err;
    if (!check(sw_local_group_create(world_size, &group, &err) == SW_OK, "a group: %s",
               err.message))
        return;
    pthread_barrier_init(&meeting, NULL, (unsigned)world_size);
    for (int r = 0; r < world_size; ++r) {
        starts[r] = (thread_start){.body = body, .bare = bare};
        starts[r].context = (rank_context){.group = group,
                                           .meeting = &meeting,
                                           .rank = r,
                                           .world_size = world_size,
                                           .shared = shared};
        if (pthread_create(&threads[r], NULL, run_rank, &starts[r]) != 0) {
            fprintf(stderr, "no thread could be created\n");
            exit(1);
        }
    }
    for (int r = 0; r < world_size; ++r)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&meeting);
    sw_local_group_destroy(group);
}

void ranks_run_all(rank_body *body, int world_size, const void *shared)
{
    run(body, world_size, shared, false);
}

void ranks_run_bare(rank_body *body, int world_size, const void *shared)
{
    run(body, world_size, shared, true);
}

void ranks_meet(rank_context *self)
{
    pthread_barrier_wait(self->meeting);
}

void ranks_sleep_ms(int milliseconds)
{
    struct timespec pause = {.tv_sec = milliseconds / 1000,
                             .tv_nsec = (long)(milliseconds % 1000) * 1000000};
    nanosleep(&pause, NULL);
}
