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
 * Thread rule: one at a time a transport, but for has_failed, request_end, watch and explain_late;
 * every rank issues the same operations, of the same sizes, in one order.
 */
#ifndef SW_COMM_PEERS_H
#define SW_COMM_PEERS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "comm/nccl.h"
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
    /* Waits for `event` while watching for a failure of the transport; SW_E_TIMEOUT names `what`,
     * SW_E_COMM a rank's failure; SW_E_INTERRUPTED is the program's. Each ends the transport. */
    sw_status (*wait)(sw_peers *peers, sw_event *event, const char *what, sw_error *err);
    /* Whether it has failed, without waiting. */
    sw_status (*check)(sw_peers *peers, sw_error *err);
    /* The caller has seen that `what` is late: ends the transport. Always SW_E_TIMEOUT, or the
     * failure that came before. */
    sw_status (*give_up)(sw_peers *peers, const char *what, sw_error *err);
    /* Any thread. */
    bool (*has_failed)(const sw_peers *peers);
    /* Ends the transport for a reason of the caller's, which later calls repeat. */
    void (*abort)(sw_peers *peers, const sw_error *reason);
    /* The same from any thread, beside a call of another's. It ends at once, and lets what waits on
     * the GPU go, unless that call is one of the transport's library: then it ends where that one
     * looks next. Makes no call of the driver's that may block. May be repeated. */
    void (*request_end)(sw_peers *peers, const sw_error *reason);
    /* From any thread, without waiting for another one: SW_OK, or why the transport has failed, in
     * which case it has ended as by request_end. Called again and again for as long as it lives. */
    sw_status (*watch)(sw_peers *peers, sw_error *err);
    /* Any thread: writes what give_up would say. */
    void (*explain_late)(const sw_peers *peers, const char *what, sw_error *reason);
    /* Lets what was enqueued run, unless the transport has failed. */
    void (*destroy)(sw_peers *peers);
} sw_peers_ops;

struct sw_peers {
    const sw_peers_ops *ops;
    const char *name; /* "nccl"; slots: "shm" in memory of the host, "ipc" in that of the GPUs */
    int rank, world_size;
    bool is_borrowed;    /* its owner ends it, and has operations of his own in it: NCCL's alone */
    bool rounds_divisor; /* a MEAN multiplies by 1 / world_size as rounded to the dtype: NCCL's */
};

/* sw_nccl_create as a transport. */
SW_MUST_USE sw_status sw_nccl_peers_create(const sw_nccl_library *nccl, sw_device *device,
                                           const sw_nccl_id *id, int rank, int world_size,
                                           int64_t timeout_ns, sw_lookout *lookout,
                                           sw_peers **peers, sw_error *err);

/* The same of sw_nccl_borrow. */
SW_MUST_USE sw_status sw_nccl_peers_borrow(const sw_nccl_library *nccl, sw_device *device,
                                           sw_nccl_comm handle, int rank, int world_size,
                                           int64_t timeout_ns, sw_lookout *lookout,
                                           sw_peers **peers, sw_error *err);

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

static inline sw_status sw_peers_wait(sw_peers *t, sw_event *event, const char *what, sw_error *err)
{
    return t->ops->wait(t, event, what, err);
}

static inline sw_status sw_peers_check(sw_peers *t, sw_error *err)
{
    return t->ops->check(t, err);
}

static inline sw_status sw_peers_give_up(sw_peers *t, const char *what, sw_error *err)
{
    return t->ops->give_up(t, what, err);
}

static inline bool sw_peers_has_failed(const sw_peers *t)
{
    return t->ops->has_failed(t);
}

static inline void sw_peers_abort(sw_peers *t, const sw_error *reason)
{
    t->ops->abort(t, reason);
}

static inline void sw_peers_request_end(sw_peers *t, const sw_error *reason)
{
    t->ops->request_end(t, reason);
}

static inline sw_status sw_peers_watch(sw_peers *t, sw_error *err)
{
    return t->ops->watch(t, err);
}

static inline void sw_peers_explain_late(const sw_peers *t, const char *what, sw_error *reason)
{
    t->ops->explain_late(t, what, reason);
}

/* NULL is allowed. */
static inline void sw_peers_destroy(sw_peers *t)
{
    if (t)
        t->ops->destroy(t);
}

#endif
