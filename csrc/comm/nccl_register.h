/* nccl_register.h - registration of memory that NCCL reads and writes in place, without copies.
 *
 * Idea: registration is local to this rank's communicator. At the first operation on the memory,
 * NCCL maps it for peers or builds a multicast over it, with all ranks. So every rank must pass
 * registered memory to the same operations, at the same offset: the caller makes the ranks agree
 * (backend/registration.py). The memory is ncclMemAlloc's, since only that can be mapped in all
 * these ways. After a failure the caller continues without registration; only a call beyond the
 * deadline ends the communicator.
 *
 * A window (2.27) is registered memory in which every rank's copy lies at the same offset, so that
 * NCCL may store into peers' copies directly. Making a window is collective: peers would wait after
 * a failure of this rank, so that failure ends the communicator. Window kernels add in another
 * order, so use windows only for copies. Either all ranks' NCCL supports windows, or the memory is
 * registered plainly.
 *
 * Thread rule: one at a time per communicator; not inside a group. */
#ifndef SW_COMM_NCCL_REGISTER_H
#define SW_COMM_NCCL_REGISTER_H

#include "comm/nccl_library.h"
#include "comm/peers.h"

/* Allocate device memory by NCCL; contents undefined. SW_E_UNSUPPORTED names an NCCL older than
 * 2.19; SW_E_DEVICE also if memory is short. */
SW_MUST_USE sw_status sw_nccl_memory_alloc(const sw_nccl_library *nccl, sw_device *device,
                                           size_t size_bytes, void **memory, sw_error *err);
/* Free it. The host must have waited for its last use, and it must not be registered. */
void sw_nccl_memory_free(const sw_nccl_library *nccl, sw_device *device, void *memory);

bool sw_nccl_has_windows(const sw_nccl_library *nccl);

/* Functions of sw_peers_ops. SW_E_UNSUPPORTED when NCCL declines, as with NCCL_LOCAL_REGISTER=0,
 * and for a borrowed communicator; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_nccl_register(sw_peers *peers, void *memory, size_t size_bytes,
                                       bool as_window, sw_registration *made, sw_error *err);
/* Deregister after the host has waited for the last operation on it. On failure NCCL may still use
 * the memory, which must then stay. */
SW_MUST_USE sw_status sw_nccl_deregister(sw_peers *peers, const sw_registration *made,
                                         sw_error *err);

#endif
