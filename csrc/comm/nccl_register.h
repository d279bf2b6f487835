/* nccl_register.h - memory that NCCL reads and writes where it lies, without copies of its own.
 *
 * Idea: registering is this rank's own note in its communicator; what NCCL makes of it, peers that
 * map the memory or a multicast over it, it makes at the first operation there, with all ranks. So
 * it is right only if every rank passes registered memory to the same operations, at the same
 * distance from its beginning: who asks for it has the ranks agree (backend/registration.py). The
 * memory is ncclMemAlloc's, since only that can be mapped in each of the ways. A failure here ends
 * no communicator, unless a call does not come to its end within the deadline: its caller goes on
 * without.
 *
 * Left out: windows (ncclCommWindowRegister, 2.27). Making one is a collective on which this rank's
 * failure leaves the others waiting, and what they add is a kernel of another order of sums.
 *
 * Thread rule: one at a time a communicator; not inside a group.
 */
#ifndef SW_COMM_NCCL_REGISTER_H
#define SW_COMM_NCCL_REGISTER_H

#include "comm/nccl_library.h"
#include "comm/peers.h"

/* Device memory by NCCL; contents undefined. SW_E_UNSUPPORTED names an NCCL older than 2.19;
 * SW_E_DEVICE, for which there is no memory, too. */
SW_MUST_USE sw_status sw_nccl_memory_alloc(const sw_nccl_library *nccl, sw_device *device,
                                           size_t size_bytes, void **memory, sw_error *err);
/* The host has waited for its last use, and it is not registered. */
void sw_nccl_memory_free(const sw_nccl_library *nccl, sw_device *device, void *memory);

/* Members of sw_peers_ops. *registered is what deregister takes. SW_E_UNSUPPORTED when NCCL
 * declines, as it does where NCCL_LOCAL_REGISTER=0, and of a borrowed communicator; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_nccl_register(sw_peers *peers, void *memory, size_t size_bytes,
                                       void **registered, sw_error *err);
/* The host has waited for the last operation on it. On failure NCCL may still reach the memory,
 * which then has to stay. */
SW_MUST_USE sw_status sw_nccl_deregister(sw_peers *peers, void *registered, sw_error *err);

#endif
