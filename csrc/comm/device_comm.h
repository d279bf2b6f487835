/* device_comm.h - what one rank has on its GPU: the device, its kernels, a communicator of its own
 * (or one that is lent) and the one stream on which all of its collectives run.
 *
 * Idea: all reducers of a GPU share one stream and one communicator, so that every rank issues its
 * collectives in one order. A caller's stream and ours meet by events alone
 * (sw_device_comm_follow). What waits on the host says so, and does it under the deadline.
 *
 * Two steps, because the first can fail on one rank alone and the second is collective: the ranks
 * tell each other how the first ended (over the process group), before any of them waits for peers.
 *
 * Thread rule: one at a time a communicator; every rank issues the same operations in one order.
 */
#ifndef SW_COMM_DEVICE_COMM_H
#define SW_COMM_DEVICE_COMM_H

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
    sw_device_room room; /* of the device */
    sw_comm *host; /* borrowed: the communicator of these ranks' hosts, or of more ranks; NULL:
                      nobody is asked about peers, or told of failures */
} sw_device_comm_config;

typedef struct sw_device_comm {
    sw_device *device;          /* owned, as all below */
    sw_kernel_set kernels;      /* ready once kernels.device is not NULL */
    sw_nccl_library library;    /* opened once library.handle is not NULL; else */
    sw_error nccl_missing;      /* says why not */
    sw_peers *peers;            /* NULL before connect */
    sw_stream *stream;          /* every collective runs on it */
    sw_event *met;              /* of follow */
    sw_event *marked;           /* of mark */
    _Atomic int64_t marked_ns;  /* when mark was called last; 0: never, or it was seen done */
    _Atomic int64_t entered_ns; /* since when the program's thread is inside, the bindings' to set;
                                   0: it is not */
    struct sw_device_watch *watch; /* owned; NULL: nothing watches (device_watch.h) */
    int64_t timeout_ns;
    sw_lookout lookout;
    void *sum;                        /* device memory: sw_norm_sum */
    sw_norm_sum *staged;              /* pinned */
    size_t norm_room;                 /* elements that the sum takes between two carries, below
                                         2^31; tests lower it */
    struct sw_device_region *regions; /* not owned: device_region.h's list */
    bool is_abandoned; /* a thread of ours is inside a driver call that does not return: never freed
                        */
} sw_device_comm;

typedef struct sw_device_range { /* device memory of the caller's */
    void *data;
    size_t numel;
    sw_dtype dtype;
} sw_device_range;

/* This rank alone. SW_E_UNSUPPORTED names what is missing (driver, GPU, image of the kernels);
 * SW_E_INVALID an ordinal out of range. NCCL may be missing: connect says so. */
SW_MUST_USE sw_status sw_device_comm_create(const sw_device_comm_config *config,
                                            sw_device_comm **comm, sw_error *err);

/* Collective, once, through NCCL; see sw_nccl_create. SW_E_UNSUPPORTED where there is none. */
SW_MUST_USE sw_status sw_device_comm_connect(sw_device_comm *comm, const sw_nccl_id *id, int rank,
                                             int world_size, int64_t timeout_ns, sw_error *err);

/* This rank alone, in place of connect: over a communicator of NCCL's that is lent
 * (sw_nccl_borrow), until disconnect. Its owner's operations and ours are one order if he enqueues
 * his on the streams that calls here are given, outside of a reducer's step:
 * sw_device_comm_give_back says where it ends. */
SW_MUST_USE sw_status sw_device_comm_borrow(sw_device_comm *comm, sw_nccl_comm handle, int rank,
                                            int world_size, int64_t timeout_ns, sw_error *err);

/* The same through slots; see sw_slot_transport_create. */
SW_MUST_USE sw_status sw_device_comm_connect_slots(sw_device_comm *comm, const sw_slot_parts *parts,
                                                   int rank, int world_size, int64_t timeout_ns,
                                                   sw_error *err);

/* Ends the communicator once what was enqueued has run, under the deadline (at once if it has
 * failed); what was made with it can only be destroyed then. The thread that watches ends first:
 * where a call of the driver's keeps it beyond the deadline, everything is left as it is. */
void sw_device_comm_disconnect(sw_device_comm *comm);

/* Collectives that were enqueued run, unless the communicator has failed. NULL is allowed. Reducers
 * go before it. */
void sw_device_comm_destroy(sw_device_comm *comm);

/* What `later` does from now on comes after all that `earlier` has been given so far. */
SW_MUST_USE sw_status sw_device_comm_follow(sw_device_comm *comm, sw_stream *later,
                                            sw_stream *earlier, sw_error *err);

/* With a borrowed communicator: what we are given from now on comes after all that `user` was
 * given, its owner's operations among it; and what `user` will be given comes after ours. With our
 * own: nothing, since its operations are all on our stream. */
SW_MUST_USE sw_status sw_device_comm_take_over(sw_device_comm *comm, sw_stream *user,
                                               sw_error *err);
SW_MUST_USE sw_status sw_device_comm_give_back(sw_device_comm *comm, sw_stream *user,
                                               sw_error *err);

/* Bytes of the ranges of `root` to all, in the order of `user`: after what it was given, and before
 * what it will be. */
SW_MUST_USE sw_status sw_device_comm_broadcast(sw_device_comm *comm, const sw_device_range *ranges,
                                               size_t count, int root, sw_stream *user,
                                               sw_error *err);

/* Slice r of each range, whose numel is a multiple of the world size, becomes rank r's, in the
 * order of `user`: parameters, after the optimizer has stepped on this rank's slices of them.
 * SW_E_INVALID names the range that does not divide. */
SW_MUST_USE sw_status sw_device_comm_all_gather(sw_device_comm *comm, const sw_device_range *ranges,
                                                size_t count, sw_stream *user, sw_error *err);

/* Of a range cut into world_size slices: place r of `received`, which has as many elements
 * elsewhere, becomes rank r's copy of this rank's slice, but the own one, which stays where it is.
 * In the order of `user`. SW_E_INVALID for a numel that does not divide. */
SW_MUST_USE sw_status sw_device_comm_exchange(sw_device_comm *comm, const sw_device_range *range,
                                              void *received, sw_stream *user, sw_error *err);

/* Until `event` is done, before what is behind it goes: under the deadline, and for as long as it
 * may be done at all. Peers that have died, and whoever asks for the end, end the communicator,
 * which lets its kernels go. */
void sw_device_comm_await(sw_device_comm *comm, sw_event *event, const char *what);

/* What our stream was given so far must be done within the deadline from now: for watch. */
SW_MUST_USE sw_status sw_device_comm_mark(sw_device_comm *comm, sw_error *err);

/* Does not wait: whether a rank has failed, or what was marked is late. Either ends the
 * communicator, which lets its kernels go, and with them whoever waits for the GPU. */
SW_MUST_USE sw_status sw_device_comm_watch(sw_device_comm *comm, sw_error *err);

#endif
