/* ranks.h - ranks as threads of a local group, and values whose fold is known.
 *
 * Threads share the arenas themselves, so every rank calls ranks_meet() before one destroys them.
 * It needs no communicator, and a rank that failed calls it as well. Thread rule: each function
 * says.
 */
#ifndef SW_TEST_RANKS_H
#define SW_TEST_RANKS_H

#include <pthread.h>
#include <stddef.h>

#include "comm/local.h"

enum { RANKS_MAX = 7 };

typedef struct rank_context {
    sw_local_group *group; /* borrowed */
    sw_comm *comm;         /* borrowed; NULL in ranks_run_bare */
    pthread_barrier_t *meeting;
    int rank, world_size;
    const void *shared; /* borrowed: the argument of ranks_run_all or ranks_run_bare */
    sw_error err;
} rank_context;

typedef void rank_body(rank_context *self);

/* Run `body` on `world_size` threads to their end, each with a communicator of a new group. Owner
 * only. */
void ranks_run_all(rank_body *body, int world_size, const void *shared);
/* Run `body` without communicators: it creates its own. */
void ranks_run_bare(rank_body *body, int world_size, const void *shared);

/* Wait for all ranks of the run. Every rank calls it. */
void ranks_meet(rank_context *self);

void ranks_sleep_ms(int milliseconds);

/* Return a float32 with many significant bits that depends on all three. Any thread. */
static inline float ranks_value(int rank, size_t i, int step)
{
    return (float)((i * 2654435761u + (unsigned)rank * 40503u + (unsigned)step * 977u) % 20011u) /
               7.0f -
           1000.0f;
}

#endif
