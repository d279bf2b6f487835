/* nccl.h - collectives between GPUs: a communicator of our own in the NCCL that torch has loaded,
 * or one that is lent to us.
 *
 * Idea: NCCL's operations are enqueued on a stream and ordered by it, so this is not comm.h's table
 * (which is about memory that ranks share, tickets and who helps whom) but a thin layer that adds
 * what NCCL leaves open: creation that cannot hang (non-blocking, polled under a deadline), one
 * named error where a call fails, and an abort that lets every later call repeat it.
 *
 * Operations are in place, but for gather_slices. Memory and stream belong to the communicator's
 * device and must live until the stream has passed the operation.
 *
 * Thread rule: one at a time a communicator; every rank issues the same operations in one order.
 */
#ifndef SW_COMM_NCCL_H
#define SW_COMM_NCCL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/lookout.h"
#include "comm/nccl_abi.h"
#include "device/device.h"
#include "kernels/kernels.h"
#include "tensor/dtype.h"

typedef struct sw_nccl_library {
    sw_nccl_table call;
    int version;  /* 10000 * major + 100 * minor + patch */
    void *handle; /* owned */
} sw_nccl_library;

/* `library`: a path, or NULL for the libnccl.so.2 that the process has loaded already. A second
 * NCCL in one process would be another world of communicators, so none is searched for. One that
 * was opened by its path stays: the thread that waits for who has an id runs in it.
 * SW_E_UNSUPPORTED when it is not loaded, lacks a function, or is older than 2.14. */
SW_MUST_USE sw_status sw_nccl_library_init(sw_nccl_library *nccl, const char *library,
                                           sw_error *err);
void sw_nccl_library_fini(sw_nccl_library *nccl);

/* Rank 0 makes it and sends it to the others, by torch's store. */
SW_MUST_USE sw_status sw_nccl_id_create(const sw_nccl_library *nccl, sw_nccl_id *id, sw_error *err);

typedef struct sw_nccl sw_nccl;

/* Collective. `nccl`, `device` and `lookout` are borrowed and outlive it. Every wait of the
 * communicator ends after `timeout_ns`, or with what `lookout` sees; a failure is told to it.
 * SW_E_TIMEOUT when a rank did not come; SW_E_COMM when it has died; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_nccl_create(const sw_nccl_library *nccl, sw_device *device,
                                     const sw_nccl_id *id, int rank, int world_size,
                                     int64_t timeout_ns, sw_lookout *lookout, sw_nccl **comm,
                                     sw_error *err);

/* This rank alone: over a communicator of somebody else's, who keeps it alive and lets nothing run
 * beside our operations. We neither destroy nor abort it: after a failure its kernels wait until
 * its owner aborts it. `handle` is borrowed until destroy. SW_E_INVALID when it is of another rank,
 * world size or GPU; SW_E_TIMEOUT when it does not become ready. */
SW_MUST_USE sw_status sw_nccl_borrow(const sw_nccl_library *nccl, sw_device *device,
                                     sw_nccl_comm handle, int rank, int world_size,
                                     int64_t timeout_ns, sw_lookout *lookout, sw_nccl **comm,
                                     sw_error *err);
bool sw_nccl_is_borrowed(const sw_nccl *comm);

/* Lets what was enqueued run, unless the communicator has failed, or is borrowed. NULL is allowed.
 */
void sw_nccl_destroy(sw_nccl *comm);

int sw_nccl_rank(const sw_nccl *comm);
int sw_nccl_world_size(const sw_nccl *comm);

/* What nccl_register.c calls NCCL with; `handle` is NULL once the communicator has ended. */
typedef struct sw_nccl_view {
    const sw_nccl_library *library;
    sw_device *device;
    sw_nccl_comm handle;
    int64_t timeout_ns;
} sw_nccl_view;
sw_nccl_view sw_nccl_view_of(const sw_nccl *comm);

/* Operations between begin and end are one operation of the stream, all of one stream; groups may
 * lie one inside the other. Each begin that succeeded has its end, whatever failed in between: a
 * failure ends the communicator at the outermost. */
SW_MUST_USE sw_status sw_nccl_group_begin(sw_nccl *comm, sw_error *err);
SW_MUST_USE sw_status sw_nccl_group_end(sw_nccl *comm, sw_error *err);

/* data[0 .. numel) becomes the reduction over the ranks, in NCCL's own order: SUM, MEAN, MIN, MAX.
 */
SW_MUST_USE sw_status sw_nccl_all_reduce(sw_nccl *comm, void *data, size_t numel, sw_dtype dtype,
                                         sw_redop op, sw_stream *stream, sw_error *err);

/* Slice r of `data` is data[r * slice_numel ...). Reduce: the own slice becomes the reduction over
 * the ranks' own copies of it, the others are left as they are. Gather: slice r becomes rank r's.
 */
SW_MUST_USE sw_status sw_nccl_reduce_scatter(sw_nccl *comm, void *data, size_t slice_numel,
                                             sw_dtype dtype, sw_redop op, sw_stream *stream,
                                             sw_error *err);
SW_MUST_USE sw_status sw_nccl_all_gather(sw_nccl *comm, void *data, size_t slice_numel,
                                         sw_dtype dtype, sw_stream *stream, sw_error *err);

/* The same out of memory that is not part of `data`, and in bytes: place r of `data` (world_size *
 * slice_bytes) becomes rank r's `slice`. */
SW_MUST_USE sw_status sw_nccl_gather_slices(sw_nccl *comm, const void *slice, void *data,
                                            size_t slice_bytes, sw_stream *stream, sw_error *err);

/* Place r of `contributions` (world_size * slice_numel elements) becomes rank r's copy of this
 * rank's slice; the own place is left as it is, since the own copy is in `data`. Rank r's slice is
 * number slice_of_rank[r] of `data`; NULL: number r. The first half of the deterministic reduction:
 * FOLD (device_kernels.h) is the second. */
SW_MUST_USE sw_status sw_nccl_exchange_slices(sw_nccl *comm, const void *data, void *contributions,
                                              size_t slice_numel, sw_dtype dtype,
                                              const int *slice_of_rank, sw_stream *stream,
                                              sw_error *err);

/* Place k of `data` (count * slice_bytes) becomes what ranks[k] has in that place of its own; this
 * rank is one of them, and each of them names the same. */
SW_MUST_USE sw_status sw_nccl_gather_among(sw_nccl *comm, void *data, size_t slice_bytes,
                                           const int *ranks, int count, sw_stream *stream,
                                           sw_error *err);

SW_MUST_USE sw_status sw_nccl_broadcast(sw_nccl *comm, void *data, size_t numel, sw_dtype dtype,
                                        int root, sw_stream *stream, sw_error *err);

/* Waits for `event` while watching for a failure of the communicator; SW_E_TIMEOUT names `what`,
 * SW_E_COMM a rank's failure; SW_E_INTERRUPTED is the program's. Each ends the communicator. */
SW_MUST_USE sw_status sw_nccl_wait(sw_nccl *comm, sw_event *event, const char *what, sw_error *err);

/* The caller has seen that `what` is late: ends the communicator. Always SW_E_TIMEOUT, or the
 * failure that came before. */
SW_MUST_USE sw_status sw_nccl_give_up(sw_nccl *comm, const char *what, sw_error *err);

/* Whether it has ended with a failure, its abort perhaps still under way. Any thread. */
bool sw_nccl_has_failed(const sw_nccl *comm);

/* Ends the communicator for a reason of the caller's, which later calls repeat. */
void sw_nccl_abort(sw_nccl *comm, const sw_error *reason);

/* From any thread, beside a call of another's. Ends the communicator for this reason at once,
 * unless that thread is inside NCCL or has a group open: then it ends it where it looks next, in a
 * wait at once. */
void sw_nccl_request_end(sw_nccl *comm, const sw_error *reason);

/* From any thread, without waiting for another one: SW_OK, or why the communicator has failed.
 * Ends it as sw_nccl_request_end. */
SW_MUST_USE sw_status sw_nccl_watch(sw_nccl *comm, sw_error *err);

/* Write the sentence of sw_nccl_give_up to *reason. Any thread. */
void sw_nccl_explain_late(const sw_nccl *comm, const char *what, sw_error *reason);

/* Whether it has failed, without waiting. */
SW_MUST_USE sw_status sw_nccl_check(sw_nccl *comm, sw_error *err);

#endif
