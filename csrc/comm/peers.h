/* peers.h - the transport between a rank's GPU and its peers, as one table of functions.
 *
 * Idea: a stream orders a GPU's operations with its peers. So this is not comm.h's table, which has
 * shared memory, tickets and progress. Two transports exist: NCCL (nccl.h), and slots in memory
 * that the ranks of one host share (slot_transport.h). Callers do not distinguish them.
 *
 * Operations are in place, except gather_slices and reduce_scatter. Memory and stream belong to the
 * transport's device and must live until the stream has run the operation. A failure ends the
 * transport and the host communicator (sw_watchdog); every later call repeats it.
 *
 * Thread rule: one at a time per transport, and per watchdog. Other threads may call has_failed,
 * request_end, watch and explain_late at the same time. Every rank issues the same operations, of
 * the same sizes, in one order. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "comm/account.h"
#include "comm/ending.h"
#include "comm/wait.h"
#include "device/device.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

/* ---- the watchdog ---- */

/* How a transport sees failures through the ranks' host communicator: a GPU that waits for a peer
 * does not notice its death, and a host that waits for a peer's host does not notice a GPU's
 * failure. The host communicator knows the state of each rank and reaches every rank that waits in
 * it. So a waiting transport queries it regularly. A failing transport notifies it before it ends
 * anything: NCCL's abort may wait until other ranks abort too, and until the kernels of the
 * process's other communicators return.
 *
 * Left out: the thread that releases a wait inside torch
 * (python/shardwright/backend/device_link.py).
 *
 * NULL is allowed for a watchdog everywhere: every call returns at once. The
 * host communicator may be in use by another thread. */

typedef struct sw_watchdog {
    sw_comm *host;      /* borrowed; NULL: every call returns at once */
    bool minds_leaving; /* true while peers connect: a peer that leaves will not come */
    int64_t looked_ns;
    const char *what; /* borrowed during a check: what the wait is for */
    sw_wait wait;     /* the wait of the last check */
} sw_watchdog;

/* Call in every turn of a wait for `what` that began at `begun_ns`. Checks twenty times a second,
 * never in a shorter wait (it takes the GIL for the program's signals), and logs a long wait.
 * SW_OK: wait on. SW_E_COMM, or the reason of the host communicator's end: stop waiting.
 * SW_E_INTERRUPTED: a signal interrupted the program; *reason is the message for its peers. */
SW_MUST_USE sw_status sw_watchdog_look(sw_watchdog *watchdog, int64_t begun_ns, const char *what,
                                       sw_error *reason);

/* Report a failed transport to every rank of this host and end the host communicator. Takes no
 * GIL. */
void sw_watchdog_report(const sw_watchdog *watchdog, const sw_error *reason);
/* Then report it to the other hosts. A second call has no effect. */
void sw_watchdog_report_to_hosts(const sw_watchdog *watchdog);

/* Replace `reason`, a failure that a peer seems to have caused, by the reason that the peer has
 * published or soon publishes. */
void sw_watchdog_find_cause(const sw_watchdog *watchdog, sw_error *reason);

/* ---- the table ---- */

typedef struct sw_peers sw_peers;

typedef struct sw_peers_ops {
    /* Operations between begin and end form one operation of one stream. Each successful begin
     * needs its end, even after a failure in between. */
    sw_status (*group_begin)(sw_peers *peers, sw_error *err);
    sw_status (*group_end)(sw_peers *peers, sw_error *err);
    /* Reduce data[0 .. numel) over the ranks, in the transport's own order: SUM, MEAN, MIN, MAX. */
    sw_status (*all_reduce)(sw_peers *peers, void *data, size_t numel, sw_dtype dtype, sw_redop op,
                            sw_stream *stream, sw_error *err);
    /* Slice r of `data` is data[r * slice_numel ...). `to`, this rank's slice or other memory,
     * becomes the reduction of all ranks' copies of this rank's slice; the rest of `data` keeps its
     * values. */
    sw_status (*reduce_scatter)(sw_peers *peers, const void *data, void *to, size_t slice_numel,
                                sw_dtype dtype, sw_redop op, sw_stream *stream, sw_error *err);
    /* Place r of `data` (world_size * slice_bytes) becomes rank r's `slice`, which may be its place
     * already. */
    sw_status (*gather_slices)(sw_peers *peers, const void *slice, void *data, size_t slice_bytes,
                               sw_stream *stream, sw_error *err);
    /* Place r of `contributions` (world_size * slice_bytes) becomes rank r's copy of this
     * rank's slice. This rank's place is not written, since its copy is in `data`. Rank r's slice
     * is number slice_of_rank[r] of `data`; NULL: number r. This is the first half of the
     * deterministic reduction; FOLD (device_kernels.h) is the second. */
    sw_status (*exchange_slices)(sw_peers *peers, const void *data, void *contributions,
                                 size_t slice_bytes, const int *slice_of_rank, sw_stream *stream,
                                 sw_error *err);
    /* Place k of `data` (count * slice_bytes) becomes place k of rank ranks[k]. `ranks` contains
     * this rank; all of them pass the same list, and every rank of the transport passes a list of
     * the same length. */
    sw_status (*gather_among)(sw_peers *peers, void *data, size_t slice_bytes, const int *ranks,
                              int count, sw_stream *stream, sw_error *err);
    /* Send bytes to a rank, receive them from one, inside a group that has the other half; those
     * between two ranks arrive in the order of the sends. NULL: the transport stays in one host. */
    sw_status (*send)(sw_peers *peers, const void *data, size_t size_bytes, int rank,
                      sw_stream *stream, sw_error *err);
    sw_status (*receive)(sw_peers *peers, void *data, size_t size_bytes, int rank,
                         sw_stream *stream, sw_error *err);
    sw_status (*broadcast)(sw_peers *peers, void *data, size_t size_bytes, int root,
                           sw_stream *stream, sw_error *err);
    /* Return the transport's failure, if any, without waiting. */
    sw_status (*check)(sw_peers *peers, sw_error *err);
    /* Called after a failure, once the ranks' hosts are notified, and after each later failure:
     * release the waits on this GPU and set has_failed. */
    void (*end)(sw_peers *peers, const sw_error *reason);
    /* From any thread, without waiting for another thread's call: SW_OK, or the reason why the
     * transport has failed. */
    sw_status (*look)(sw_peers *peers, sw_error *reason);
    /* From any thread: sw_peers_report, then release the waits on this GPU. A call in progress
     * inside the transport's library ends at its next check. Makes no blocking driver call. May be
     * repeated. */
    void (*end_beside)(sw_peers *peers, const sw_error *reason);
    /* Destroy after enqueued operations have run, unless the transport has failed. */
    void (*destroy)(sw_peers *peers);
} sw_peers_ops;

struct sw_peers {
    const sw_peers_ops *ops;
    const char
        *name; /* "nccl", "one rank"; slots: "shm" in the host's memory, "ipc" in the GPUs' */
    const char *title; /* its name in messages */
    sw_link link;      /* that its bytes are counted for */
    int rank, world_size;
    bool is_borrowed;    /* its owner ends it and runs its own operations in it: only NCCL */
    bool rounds_divisor; /* MEAN multiplies by 1 / world_size rounded to the dtype: NCCL */
    sw_device *device;   /* borrowed, like the watchdog */
    int64_t timeout_ns;
    sw_watchdog *watchdog;
    sw_ending ending;        /* requested by any thread; */
    _Atomic bool is_failing; /* some thread has handled it */
    _Atomic bool has_failed; /* and ended the transport */
};

static inline sw_status sw_peers_group_begin(sw_peers *t, sw_error *err)
{
    return t->ops->group_begin(t, err);
}

static inline sw_status sw_peers_group_end(sw_peers *t, sw_error *err)
{
    return t->ops->group_end(t, err);
}

static inline sw_status sw_peers_all_reduce(sw_peers *t, void *data, size_t numel, sw_dtype dtype,
                                            sw_redop op, sw_stream *stream, sw_error *err)
{
    sw_account_moved(t->link, numel * sw_dtype_size_bytes(dtype));
    return t->ops->all_reduce(t, data, numel, dtype, op, stream, err);
}

static inline sw_status sw_peers_reduce_scatter(sw_peers *t, const void *data, void *to,
                                                size_t slice_numel, sw_dtype dtype, sw_redop op,
                                                sw_stream *stream, sw_error *err)
{
    sw_account_moved(t->link, slice_numel * (size_t)t->world_size * sw_dtype_size_bytes(dtype));
    return t->ops->reduce_scatter(t, data, to, slice_numel, dtype, op, stream, err);
}

static inline sw_status sw_peers_gather_slices(sw_peers *t, const void *slice, void *data,
                                               size_t slice_bytes, sw_stream *stream, sw_error *err)
{
    sw_account_moved(t->link, slice_bytes * (size_t)t->world_size);
    return t->ops->gather_slices(t, slice, data, slice_bytes, stream, err);
}

/* The same of slices that are in their places. */
static inline sw_status sw_peers_all_gather(sw_peers *t, void *data, size_t slice_numel,
                                            sw_dtype dtype, sw_stream *stream, sw_error *err)
{
    size_t slice_bytes = slice_numel * sw_dtype_size_bytes(dtype);
    return sw_peers_gather_slices(t, (char *)data + (size_t)t->rank * slice_bytes, data,
                                  slice_bytes, stream, err);
}

static inline sw_status sw_peers_exchange_slices(sw_peers *t, const void *data, void *contributions,
                                                 size_t slice_numel, sw_dtype dtype,
                                                 const int *slice_of_rank, sw_stream *stream,
                                                 sw_error *err)
{
    size_t slice_bytes = slice_numel * sw_dtype_size_bytes(dtype);
    sw_account_moved(t->link, slice_bytes * (size_t)t->world_size);
    return t->ops->exchange_slices(t, data, contributions, slice_bytes, slice_of_rank, stream, err);
}

static inline sw_status sw_peers_gather_among(sw_peers *t, void *data, size_t slice_bytes,
                                              const int *ranks, int count, sw_stream *stream,
                                              sw_error *err)
{
    sw_account_moved(t->link, slice_bytes * (size_t)count);
    return t->ops->gather_among(t, data, slice_bytes, ranks, count, stream, err);
}

static inline sw_status sw_peers_send(sw_peers *t, const void *data, size_t size_bytes, int rank,
                                      sw_stream *stream, sw_error *err)
{
    sw_account_moved(t->link, size_bytes);
    return t->ops->send(t, data, size_bytes, rank, stream, err);
}

static inline sw_status sw_peers_receive(sw_peers *t, void *data, size_t size_bytes, int rank,
                                         sw_stream *stream, sw_error *err)
{
    return t->ops->receive(t, data, size_bytes, rank, stream, err);
}

static inline sw_status sw_peers_broadcast(sw_peers *t, void *data, size_t numel, sw_dtype dtype,
                                           int root, sw_stream *stream, sw_error *err)
{
    size_t size_bytes = numel * sw_dtype_size_bytes(dtype);
    sw_account_moved(t->link, size_bytes);
    return t->ops->broadcast(t, data, size_bytes, root, stream, err);
}

static inline sw_status sw_peers_check(sw_peers *t, sw_error *err)
{
    return t->ops->check(t, err);
}

/* Any thread. */
static inline bool sw_peers_has_failed(const sw_peers *t)
{
    return atomic_load(&t->has_failed);
}

/* NULL is allowed. */
static inline void sw_peers_destroy(sw_peers *t)
{
    if (t)
        t->ops->destroy(t);
}

/* ---- peers.c: failures and waits, common to all transports ---- */

/* Report the transport's first reason to every rank of this host (only the first caller does) and
 * return that reason. Call sw_watchdog_report_to_hosts() afterwards, since it waits for the GIL. */
sw_status sw_peers_report(sw_peers *peers, const sw_error *reason, sw_error *first);
/* Report `reason` to every rank and end the transport. Returns its first reason, as later calls
 * do. */
sw_status sw_peers_fail(sw_peers *peers, const sw_error *reason, sw_error *err);
/* The same for a driver call for `what` that failed with *cause. */
sw_status sw_peers_fail_driver(sw_peers *peers, const char *what, const sw_error *cause,
                               sw_error *err);
/* Fail because `what` is late. SW_E_TIMEOUT, or an earlier failure. */
sw_status sw_peers_give_up(sw_peers *peers, const char *what, sw_error *err);
/* End the transport for the caller's reason. */
void sw_peers_abort(sw_peers *peers, const sw_error *reason);
/* From any thread, even during another thread's call: end the transport for the caller's reason. A
 * wait ends at once, a call inside NCCL at its next check. */
void sw_peers_request_end(sw_peers *peers, const sw_error *reason);
/* From any thread, without waiting for another: SW_OK, or the reason why the transport has failed;
 * it has then ended as by request_end. The watch calls this repeatedly. */
SW_MUST_USE sw_status sw_peers_watch(sw_peers *peers, sw_error *err);
/* Write the message of sw_peers_give_up. Any thread. */
void sw_peers_explain_late(const sw_peers *peers, const char *what, sw_error *reason);
/* Execute the request of another thread (sw_peers_request_end). */
SW_MUST_USE sw_status sw_peers_check_request(sw_peers *peers, sw_error *err);

/* One turn of a wait for `what` that began at `begun_ns`: check the deadline and the ranks' hosts,
 * then sleep. SW_E_TIMEOUT names `what`, SW_E_COMM a rank's failure; SW_E_INTERRUPTED: a signal of
 * the program. Each ends the transport. */
SW_MUST_USE sw_status sw_peers_turn(sw_peers *peers, int64_t begun_ns, const char *what,
                                    sw_error *err);
/* Wait for `event` in such turns, and check for a failure of the transport. */
SW_MUST_USE sw_status sw_peers_await(sw_peers *peers, sw_event *event, const char *what,
                                     sw_error *err);
/* The same, counted as a wait of the host. */
SW_MUST_USE sw_status sw_peers_wait(sw_peers *peers, sw_event *event, const char *what,
                                    sw_error *err);

/* ---- a rank without peers: no library, no memory, no launch ---- */

/* What one rank reduces, gathers or broadcasts is there already, so each operation is a copy
 * where its result has another place, and else nothing. NCCL would make a communicator, some
 * hundred MB of a GPU's memory, to do the same. `device` and `watchdog` are borrowed. SW_E_MEMORY.
 */
SW_MUST_USE sw_status sw_lone_rank_create(sw_device *device, int64_t timeout_ns,
                                          sw_watchdog *watchdog, sw_peers **peers, sw_error *err);
