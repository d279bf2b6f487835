/* nccl.h - collectives between GPUs: a communicator of our own in the NCCL that torch has loaded,
 * or a borrowed one.
 *
 * Thread rule: as peers.h; the library: any. */
#pragma once

#include "base/status.h"
#include "comm/nccl_abi.h"
#include "comm/peers.h"

/* ---- the library ---- */

typedef struct sw_nccl_library {
    sw_nccl_table call;
    int version;  /* 10000 * major + 100 * minor + patch */
    void *handle; /* owned */
} sw_nccl_library;

/* `library`: a path, or NULL for the libnccl.so.2 that the process has loaded already. No second
 * NCCL is searched for, since its communicators would be separate from torch's. A library opened by
 * its path stays loaded: the thread that waits for the ranks of an id runs in it. SW_E_UNSUPPORTED
 * if it is not loaded, lacks a function, or is older than 2.14. */
SW_MUST_USE sw_status sw_nccl_library_init(sw_nccl_library *nccl, const char *library,
                                           sw_error *err);
void sw_nccl_library_fini(sw_nccl_library *nccl);

/* ---- communicators ---- */

/* A thin layer below the table of peers.h. Creation cannot hang (non-blocking, polled under a
 * deadline), a failed call gives one named error, and every later call repeats it after the abort.
 * Groups may be nested; a failure in one ends the communicator at the end of the outermost. */

/* Rank 0 creates it and sends it to the others, by torch's store. */
SW_MUST_USE sw_status sw_nccl_id_create(const sw_nccl_library *nccl, sw_nccl_id *id, sw_error *err);

/* Collective. `nccl`, `device` and `watchdog` are borrowed and outlive it. Every wait of the
 * communicator ends after `timeout_ns`, or with an error from `watchdog`; failures are reported to
 * it. SW_E_TIMEOUT when a rank did not come; SW_E_COMM when it has died; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_nccl_create(const sw_nccl_library *nccl, sw_device *device,
                                     const sw_nccl_id *id, int rank, int world_size,
                                     int64_t timeout_ns, sw_watchdog *watchdog, sw_peers **peers,
                                     sw_error *err);

/* This rank only: use a communicator whose owner keeps it alive and runs no operations at the same
 * time as ours. We neither destroy nor abort it: after a failure its kernels wait until its owner
 * aborts it. `handle` is borrowed until destroy. SW_E_INVALID if its rank, world size or GPU
 * differ; SW_E_TIMEOUT if it does not become ready. */
SW_MUST_USE sw_status sw_nccl_borrow(const sw_nccl_library *nccl, sw_device *device,
                                     sw_nccl_comm handle, int rank, int world_size,
                                     int64_t timeout_ns, sw_watchdog *watchdog, sw_peers **peers,
                                     sw_error *err);
