/* peers.h - how a rank's GPU reaches its peers: one table, whatever carries the bytes.
 *
 * Idea: what a GPU asks of its peers is enqueued on a stream and ordered by it, so this is not
 * comm.h's table (which is about memory that ranks share, tickets and who helps whom). Two forms:
 * NCCL (nccl.h), and slots in memory that the ranks of one host share (slot_transport.h). Callers
 * do not know which they have.
 *
 * Operations are in place, but for gather_slices. Memory and stream belong to the transport's
 * device and must live until the stream has passed the operation. A failure ends the transport,
 * and the host's communicator with it (lookout.h); every later call repeats it.
 *
 * Thread rule: one at a time a transport, but for has_failed, request_end, watch and explain_late,
 * which any thread calls, beside the one that uses it; every rank issues the same operations, of
 * the same sizes, in one order.
 */
#ifndef SW_COMM_PEERS_H
#define SW_COMM_PEERS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "comm/ending.h"
#include "comm/lookout.h"
#include "device/device.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

typedef struct sw_peers sw_peers;

typedef struct sw_peers_ops {
    /* Operations between begin and end are one operation of the stream, all of one stream. Each
     * begin that succeeded has its end, whatever failed in between. */
    sw_status (*group_begin)(sw_peers *peers, sw_error *err);
    sw_status (*group_end)(sw_peers *peers, sw_error *err);
    /* data[0 .. numel) becomes the reduction over the ranks, in the transport's own order: SUM,
     * MEAN, MIN, MAX. */
    sw_status (*all_reduce)(sw_peers *peers, void *data, size_t numel, sw_dtype dtype, sw_redop op,
                            sw_stream *stream, sw_error *err);
    /* Slice r of `data` is data[r * slice_numel ...). Reduce: the own slice becomes the reduction
     * over the ranks' own copies of it, the others are left as they are. Gather: slice r becomes
     * rank r's. */
    sw_status (*reduce_scatter)(sw_peers *peers, void *data, size_t slice_numel, sw_dtype dtype,
                                sw_redop op, sw_stream *stream, sw_error *err);
    sw_status (*all_gather)(sw_peers *peers, void *data, size_t slice_numel, sw_dtype dtype,
                            sw_stream *stream, sw_error *err);
    /* The same out of memory that is not part of `data`, and in bytes: place r of `data`
     * (world_size * slice_bytes) becomes rank r's `slice`. */
    sw_status (*gather_slices)(sw_peers *peers, const void *slice, void *data, size_t slice_bytes,
                               sw_stream *stream, sw_error *err);
    /* Place r of `contributions` (world_size * slice_numel elements) becomes rank r's copy of this
     * rank's slice; the own place is left as it is, since the own copy is in `data`. Rank r's slice
     * is number slice_of_rank[r] of `data`; NULL: number r. The first half of the deterministic
     * reduction: FOLD (device_kernels.h) is the second. */
    sw_status (*exchange_slices)(sw_peers *peers, const void *data, void *contributions,
                                 size_t slice_numel, sw_dtype dtype, const int *slice_of_rank,
                                 sw_stream *stream, sw_error *err);
    /* Place k of `data` (count * slice_bytes) becomes what ranks[k] has in that place of its own;
     * this rank is one of them, each of them names the same, and every rank of the transport names
     * as many. */
    sw_status (*gather_among)(sw_peers *peers, void *data, size_t slice_bytes, const int *ranks,
                              int count, sw_stream *stream, sw_error *err);
    sw_status (*broadcast)(sw_peers *peers, void *data, size_t numel, sw_dtype dtype, int root,
                           sw_stream *stream, sw_error *err);
    /* This rank alone: operations may from now on read and write `memory` where it lies, without
     * copies of the transport's own. It is sw_nccl_memory_alloc's, and all ranks pass it to the
     * same operations at the same distance from its beginning, or none does. SW_E_UNSUPPORTED where
     * the transport has nothing of the kind. A failure leaves the transport as it was. */
    sw_status (*memory_register)(sw_peers *peers, void *memory, size_t size_bytes,
                                 void **registered, sw_error *err);
    /* The host has waited for the last operation on it. On failure the memory stays in use. */
    sw_status (*memory_deregister)(sw_peers *peers, void *registered, sw_error *err);
    /* Whether it has failed, without waiting. */
    sw_status (*check)(sw_peers *peers, sw_error *err);
    /* It has failed, and its ranks' hosts have been told: lets go what waits on this GPU, and sets
     * has_failed; again after each later failure. */
    void (*end)(sw_peers *peers, const sw_error *reason);
    /* From any thread, beside a call of another's, which this one may not wait for: SW_OK, or why
     * the transport has failed. */
    sw_status (*look)(sw_peers *peers, sw_error *reason);
    /* The same: sw_peers_tell, and what waits on this GPU is let go, unless that call is one of the
     * transport's library: then it ends where that one looks next. Makes no call of the driver's
     * that may block. May be repeated. */
    void (*end_beside)(sw_peers *peers, const sw_error *reason);
    /* Lets what was enqueued run, unless the transport has failed. */
    void (*destroy)(sw_peers *peers);
} sw_peers_ops;

struct sw_peers {
    const sw_peers_ops *ops;
    const char *name;  /* "nccl"; slots: "shm" in memory of the host, "ipc" in that of the GPUs */
    const char *title; /* as messages call it */
    int rank, world_size;
    bool is_borrowed;    /* its owner ends it, and has operations of its own in it: NCCL's alone */
    bool rounds_divisor; /* a MEAN multiplies by 1 / world_size as rounded to the dtype: NCCL's */
    sw_device *device;   /* borrowed, as the lookout */
    int64_t timeout_ns;
    sw_lookout *lookout;
    sw_ending ending;        /* by any thread; */
    _Atomic bool is_failing; /* some thread has acted on it, */
    _Atomic bool has_failed; /* and has ended it */
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
    return t->ops->all_reduce(t, data, numel, dtype, op, stream, err);
}

static inline sw_status sw_peers_reduce_scatter(sw_peers *t, void *data, size_t slice_numel,
                                                sw_dtype dtype, sw_redop op, sw_stream *stream,
                                                sw_error *err)
{
    return t->ops->reduce_scatter(t, data, slice_numel, dtype, op, stream, err);
}

static inline sw_status sw_peers_all_gather(sw_peers *t, void *data, size_t slice_numel,
                                            sw_dtype dtype, sw_stream *stream, sw_error *err)
{
    return t->ops->all_gather(t, data, slice_numel, dtype, stream, err);
}

static inline sw_status sw_peers_gather_slices(sw_peers *t, const void *slice, void *data,
                                               size_t slice_bytes, sw_stream *stream, sw_error *err)
{
    return t->ops->gather_slices(t, slice, data, slice_bytes, stream, err);
}

static inline sw_status sw_peers_exchange_slices(sw_peers *t, const void *data, void *contributions,
                                                 size_t slice_numel, sw_dtype dtype,
                                                 const int *slice_of_rank, sw_stream *stream,
                                                 sw_error *err)
{
    return t->ops->exchange_slices(t, data, contributions, slice_numel, dtype, slice_of_rank,
                                   stream, err);
}

static inline sw_status sw_peers_gather_among(sw_peers *t, void *data, size_t slice_bytes,
                                              const int *ranks, int count, sw_stream *stream,
                                              sw_error *err)
{
    return t->ops->gather_among(t, data, slice_bytes, ranks, count, stream, err);
}

static inline sw_status sw_peers_broadcast(sw_peers *t, void *data, size_t numel, sw_dtype dtype,
                                           int root, sw_stream *stream, sw_error *err)
{
    return t->ops->broadcast(t, data, numel, dtype, root, stream, err);
}

static inline sw_status sw_peers_memory_register(sw_peers *t, void *memory, size_t size_bytes,
                                                 void **registered, sw_error *err)
{
    return t->ops->memory_register(t, memory, size_bytes, registered, err);
}

static inline sw_status sw_peers_memory_deregister(sw_peers *t, void *registered, sw_error *err)
{
    return t->ops->memory_deregister(t, registered, err);
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

/* peers.c: failing and waiting, the same whatever carries the bytes
 * ------------------------------------------------------------------------------------------ */

/* Every rank of this host hears the transport's first reason, from the first thread that comes
 * here. Returns that reason. sw_lookout_tell_hosts() is next, behind what must not wait for the
 * GIL. */
sw_status sw_peers_tell(sw_peers *peers, const sw_error *reason, sw_error *first);
/* Every rank is told, then the transport ends: its first reason, which later calls repeat. */
sw_status sw_peers_fail(sw_peers *peers, const sw_error *reason, sw_error *err);
/* The same where a call of the driver's, for `what`, has failed with *cause. */
sw_status sw_peers_fail_driver(sw_peers *peers, const char *what, const sw_error *cause,
                               sw_error *err);
/* The caller has seen that `what` is late. SW_E_TIMEOUT, or the failure that came before. */
sw_status sw_peers_give_up(sw_peers *peers, const char *what, sw_error *err);
/* Ends the transport for a reason of the caller's. */
void sw_peers_abort(sw_peers *peers, const sw_error *reason);
/* From any thread, beside a call of another's: ends the transport for a reason of the caller's, at
 * once, unless that call is inside NCCL: then where it looks next, in a wait at once. */
void sw_peers_request_end(sw_peers *peers, const sw_error *reason);
/* From any thread, without waiting for another one: SW_OK, or why the transport has failed, in
 * which case it has ended as by request_end. Called again and again for as long as it lives. */
SW_MUST_USE sw_status sw_peers_watch(sw_peers *peers, sw_error *err);
/* Write what sw_peers_give_up would say. Any thread. */
void sw_peers_explain_late(const sw_peers *peers, const char *what, sw_error *reason);
/* Acts on what another thread has asked for (sw_peers_request_end). */
SW_MUST_USE sw_status sw_peers_check_request(sw_peers *peers, sw_error *err);

/* One turn of a wait for `what` that began at `begun_ns`: the deadline, what the ranks' hosts know,
 * a rest. SW_E_TIMEOUT names `what`, SW_E_COMM a rank's failure; SW_E_INTERRUPTED is the program's.
 * Each ends the transport. */
SW_MUST_USE sw_status sw_peers_turn(sw_peers *peers, int64_t begun_ns, const char *what,
                                    sw_error *err);
/* Waits for `event` in such turns, while watching for a failure of the transport. */
SW_MUST_USE sw_status sw_peers_await(sw_peers *peers, sw_event *event, const char *what,
                                     sw_error *err);
/* The same, counted as a wait of the host's. */
SW_MUST_USE sw_status sw_peers_wait(sw_peers *peers, sw_event *event, const char *what,
                                    sw_error *err);

#endif
