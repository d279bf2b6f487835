/* device_comm.h - a rank's state on its GPU: the device, its kernels, an own or borrowed
 * communicator, and the one stream on which all of its collectives run.
 *
 * Idea: all reducers of a GPU share one stream and one communicator, so that every rank issues its
 * collectives in one order. Communicators of the rows and columns of a mesh may share that stream.
 * Only events order a caller's stream and ours (sw_device_comm_follow). A function that makes the
 * host wait says so and obeys the deadline.
 *
 * Creation has two steps: the first may fail on one rank, the second is collective. Between them
 * the ranks agree on the outcome of the first over the process group, before any rank waits for
 * peers.
 *
 * Thread rule: one at a time per communicator; every rank issues the same operations in one order.
 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/nccl.h"
#include "comm/slot_transport.h"
#include "kernels/device_kernels.h"
#include "kernels/optim_kernels.h"

typedef struct sw_device_comm_config {
    const char *cuda_library; /* NULL: libcuda.so.1 */
    const char *nccl_library; /* NULL: the libnccl.so.2 that the process has loaded, if any */
    int ordinal;
    sw_image_places places;
    sw_device_room room;           /* frees device memory for allocations */
    struct sw_device_comm *beside; /* borrowed, outlives it: its stream is used, so operations of
                                      both have one order. NULL: a stream of its own */
    sw_comm *host; /* borrowed: the host communicator of these ranks, or of more; NULL: failures of
                    * peers are neither detected nor reported */
} sw_device_comm_config;

typedef struct sw_device_comm {
    sw_device *device;          /* owned, as all below */
    sw_kernel_set kernels;      /* ready once kernels.device is not NULL */
    sw_nccl_library library;    /* opened if library.handle is not NULL; else */
    sw_error nccl_missing;      /* the reason */
    sw_peers *peers;            /* NULL before connect */
    sw_stream *stream;          /* every collective runs on it */
    bool shares_stream;         /* it is borrowed */
    sw_event *met;              /* scratch of follow */
    sw_event *marked;           /* last event of mark */
    _Atomic int64_t marked_ns;  /* time of the last mark; 0: never marked, or seen complete */
    _Atomic int64_t entered_ns; /* time at which the program's thread entered, set by the bindings;
                                   0: it is not */
    struct sw_device_watch *watch; /* owned; NULL: no watch runs */
    int64_t timeout_ns;
    sw_watchdog watchdog;
    void *sum;           /* device memory: sw_norm_sum */
    sw_norm_sum *staged; /* pinned */
    size_t norm_room;    /* elements that the sum adds between two carries, below
                            2^31; tests lower it */
    bool is_abandoned;   /* an engine thread is inside a driver call that does not return: never
                            freed */
} sw_device_comm;

typedef struct sw_device_range { /* device memory of the caller */
    void *data;
    size_t numel;
    sw_dtype dtype;
} sw_device_range;

/* This rank only. SW_E_UNSUPPORTED names the missing part (driver, GPU, kernel image); SW_E_INVALID
 * an ordinal out of range. A missing NCCL is an error only in connect. */
SW_MUST_USE sw_status sw_device_comm_create(const sw_device_comm_config *config,
                                            sw_device_comm **comm, sw_error *err);

/* Collective, once, through NCCL; see sw_nccl_create. SW_E_UNSUPPORTED without NCCL. */
SW_MUST_USE sw_status sw_device_comm_connect(sw_device_comm *comm, const sw_nccl_id *id, int rank,
                                             int world_size, int64_t timeout_ns, sw_error *err);

/* This rank only, instead of connect: borrow a NCCL communicator (sw_nccl_borrow) until disconnect.
 * The owner's operations and ours keep one order if the owner enqueues on the streams that are
 * passed to calls here, and not inside a reducer's step, which ends with
 * sw_device_comm_give_back. */
SW_MUST_USE sw_status sw_device_comm_borrow(sw_device_comm *comm, sw_nccl_comm handle, int rank,
                                            int world_size, int64_t timeout_ns, sw_error *err);

/* A rank without peers, instead of connect: no NCCL is needed; see peers.h. */
SW_MUST_USE sw_status sw_device_comm_connect_alone(sw_device_comm *comm, int64_t timeout_ns,
                                                   sw_error *err);

/* Collective, through slots; see sw_slot_transport_create. */
SW_MUST_USE sw_status sw_device_comm_connect_slots(sw_device_comm *comm, const sw_slot_parts *parts,
                                                   int rank, int world_size, int64_t timeout_ns,
                                                   sw_error *err);

/* End the communicator once enqueued operations have run, under the deadline (at once if it has
 * failed). Afterwards its users can only be destroyed. The watch thread ends first; if a driver
 * call holds it beyond the deadline, no memory is freed. */
void sw_device_comm_disconnect(sw_device_comm *comm);

/* Destroy after enqueued collectives have run, unless the communicator has failed. NULL is allowed.
 * Destroy reducers first. */
void sw_device_comm_destroy(sw_device_comm *comm);

/* Order later work on `later` after all work enqueued on `earlier` so far. */
SW_MUST_USE sw_status sw_device_comm_follow(sw_device_comm *comm, sw_stream *later,
                                            sw_stream *earlier, sw_error *err);

/* With a borrowed communicator: order our next work after all work of `user`, which includes the
 * owner's operations, and later work of `user` after ours. No effect with our own, whose operations
 * are all on our stream. */
SW_MUST_USE sw_status sw_device_comm_take_over(sw_device_comm *comm, sw_stream *user,
                                               sw_error *err);
SW_MUST_USE sw_status sw_device_comm_give_back(sw_device_comm *comm, sw_stream *user,
                                               sw_error *err);

/* Call `enqueue`, which enqueues operations on our stream, in the order of `user`: after its work
 * so far and before its later work. */
SW_MUST_USE sw_status sw_device_comm_between(sw_device_comm *comm, sw_stream *user,
                                             sw_status (*enqueue)(void *context, sw_error *err),
                                             void *context, sw_error *err);

/* Broadcast the ranges of `root` to all ranks, in the order of `user`: after its work so far and
 * before its later work. */
SW_MUST_USE sw_status sw_device_comm_broadcast(sw_device_comm *comm, const sw_device_range *ranges,
                                               size_t count, int root, sw_stream *user,
                                               sw_error *err);

/* Set slice r of each range to rank r's values, in the order of `user`: for parameters, after the
 * optimizer has stepped on this rank's slices. The numel of a range is a multiple of the world
 * size; SW_E_INVALID names the range that does not divide. */
SW_MUST_USE sw_status sw_device_comm_all_gather(sw_device_comm *comm, const sw_device_range *ranges,
                                                size_t count, sw_stream *user, sw_error *err);

/* Exchange a range of world_size slices: place r of `received`, separate memory of the same size,
 * becomes rank r's copy of this rank's slice. This rank's own copy stays in the range. In the order
 * of `user`. SW_E_INVALID for a numel that does not divide. */
SW_MUST_USE sw_status sw_device_comm_exchange(sw_device_comm *comm, const sw_device_range *range,
                                              void *received, sw_stream *user, sw_error *err);

/* Wait for `event`, before the memory that it protects is freed: under the deadline, as long as the
 * event can still complete. A dead peer or a request to end ends the communicator, which makes its
 * kernels return. */
void sw_device_comm_await(sw_device_comm *comm, sw_event *event, const char *what);

/* Tell the watch that our stream must complete its work so far within the deadline from now. */
SW_MUST_USE sw_status sw_device_comm_mark(sw_device_comm *comm, sw_error *err);

/* Check, without waiting, for a failed rank or a late mark. Either ends the communicator, which
 * makes its kernels return, and so the threads that wait for the GPU. */
SW_MUST_USE sw_status sw_device_comm_watch(sw_device_comm *comm, sw_error *err);

/* ---- the watch thread ---- */

/* A thread that watches the communicator and can end it while a call is blocked.
 *
 * A host that is ahead of its GPU fills the driver's queue of launches and then blocks in the next
 * launch. If a peer has died, the queue never empties: its head is a collective that waits for that
 * peer. So the watch has its own thread and takes neither the GIL nor a lock that the blocked
 * thread may hold. It makes no driver call while that thread may be blocked in one. Ten times a
 * second it checks for dead ranks, a failure of the transport, and a late mark
 * (sw_device_comm_mark). Each of them ends the transport (sw_peers_request_end), which makes its
 * kernels return, and then the blocked thread.
 *
 * Left out: the owner ends a borrowed NCCL communicator (python/shardwright/backend/lender.py).
 *
 * Thread rule: start and stop by the thread that uses the communicator. */

/* Start to watch a connected communicator; no effect if it is watched. SW_E_OS, SW_E_MEMORY. */
SW_MUST_USE sw_status sw_device_watch_start(sw_device_comm *comm, sw_error *err);

/* End the thread before the communicator is freed. If a driver call holds the thread for
 * `patience_ns`, leave it running and return false; the communicator must then never be freed. */
bool sw_device_watch_stop(sw_device_comm *comm, int64_t patience_ns);
