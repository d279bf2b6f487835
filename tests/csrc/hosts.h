/* hosts.h - hosts with ranks as threads, and a wire between them that is a box of messages.
 *
 * Thread rule: hosts_run owner only; the others by each rank of the run.
 */
#ifndef SW_TEST_HOSTS_H
#define SW_TEST_HOSTS_H

#include <pthread.h>

#include "comm/hier.h"
#include "comm/local.h"
#include "ranks.h"

enum { HOSTS_BOX = 4096 };

typedef struct hosts_wire {
    int breaks_after; /* messages; 0: never */
    bool in_part; /* a rank that waits then is not told, as of a message that has come in part */
    bool silent;  /* no message arrives, once all have joined */
    bool packs;   /* blocks are packets */
    bool lingers; /* the send of a probe returns long after the probe has arrived */
    int radix;    /* of dissemination; 0: the usual one, so a single round */
} hosts_wire;

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
    int waiting[RANKS_MAX]; /* calls inside box_wait */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    message messages[HOSTS_BOX];
    int sent;
    hosts_wire wire;
    bool is_open; /* all have joined */
    bool broken;
    _Atomic bool probed; /* read by the ranks */
} box;

typedef struct wire_end { /* one a rank */
    box *box;
    int rank;
    pthread_t carrier; /* of a rank that receives: its carrier's thread */
    _Atomic bool has_carrier;
} wire_end;

typedef struct scene {
    const int *host_of;
    int host_count;
    sw_local_group *hosts[RANKS_MAX];
    box box;
    const sw_slices *slices; /* NULL: one a rank */
    int64_t timeout_ns;
} scene;

/* Run `body` as ranks on the hosts `host_of`. Its context's `shared` is the scene. `slices`: NULL,
 * or what sw_op.slices gets. */
void hosts_run(rank_body *body, const int *host_of, int world_size, const sw_slices *slices,
               hosts_wire wire);

static inline scene *hosts_scene(const rank_context *self)
{
    return (scene *)(uintptr_t)self->shared;
}

/* Return this rank's communicator over hosts; NULL after a failed check. `end` and `wire` live as
 * long as it does. Every rank calls it. */
sw_comm *hosts_join(rank_context *self, scene *s, wire_end *end, sw_wire *wire);

/* Return the mean of the ranks' values (ranks.h), folded inside each host and then over hosts. */
float hosts_mean(const scene *s, int world_size, size_t i, int step);

static inline bool hosts_message_is(sw_message what, uint32_t tag)
{
    return tag >> 28 == (uint32_t)what;
}

#endif
