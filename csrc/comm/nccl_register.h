/* nccl_register.h - registration of memory that NCCL reads and writes in place, without copies.
 *
 * Idea: registering is local to this rank's communicator. NCCL maps the memory for peers, or builds
 * a multicast over it, at the first operation there, with all ranks. So it is valid only if every
 * rank passes registered memory to the same operations, at the same offset: the caller makes the
 * ranks agree (backend/registration.py). The memory is ncclMemAlloc's, since only that can be
 * mapped in each of these ways. A failure here ends no communicator, unless a call exceeds the
 * deadline: its caller continues without registration.
 *
 * A window (2.27) is registered memory in which every rank's copy lies at the same offset, so that
 * NCCL may store into peers' copies directly. Making one is a collective: if it fails on this rank,
 * the others wait, so that failure ends the communicator. Its kernels add in an order of their own:
 * use it where nothing is added. NCCL decides alike on all ranks if it has windows; if not, the
 * memory is registered plainly.
 *
 * Thread rule: one at a time a communicator; not inside a group. */
#ifndef SW_COMM_NCCL_REGISTER_H
#define SW_COMM_NCCL_REGISTER_H

#include "comm/nccl_library.h"
#include "comm/peers.h"

/* Allocate device memory by NCCL; contents undefined. SW_E_UNSUPPORTED names an NCCL older than
 * 2.19; SW_E_DEVICE also if there is no memory. */
SW_MUST_USE sw_status sw_nccl_memory_alloc(const sw_nccl_library *nccl, sw_device *device,
                                           size_t size_bytes, void **memory, sw_error *err);
/* Free it. The host has waited for its last use, and it is not registered. */
void sw_nccl_memory_free(const sw_nccl_library *nccl, sw_device *device, void *memory);

bool sw_nccl_has_windows(const sw_nccl_library *nccl);

/* Functions of sw_peers_ops. SW_E_UNSUPPORTED when NCCL declines, as with NCCL_LOCAL_REGISTER=0,
 * and for a borrowed communicator; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_nccl_register(sw_peers *peers, void *memory, size_t size_bytes,
                                       bool as_window, sw_registration *made, sw_error *err);
/* The host has waited for the last operation on it. On failure NCCL may still use the memory, which
 * must then stay. */
SW_MUST_USE sw_status sw_nccl_deregister(sw_peers *peers, const sw_registration *made,
                                         sw_error *err);

#endif
