/* device_region.h - memory of a GPU that its peers may reach where it lies: NCCL's, registered with
 * the communicator.
 *
 * Idea: two lives end in any order. The registration is the communicator's, and ends before it; the
 * memory is its tensors', and is freed behind the last of them. So the communicator has a list of
 * its regions, and a region outlives its registration. Neither ends before the communicator's
 * stream has passed what was enqueued; the memory, too, not before what the caller's stream was
 * given. What cannot be waited for (a capture, a failure) leaves the memory allocated.
 *
 * Thread rule: as the communicator; drop alone may be called beside another thread's call.
 */
#ifndef SW_COMM_DEVICE_REGION_H
#define SW_COMM_DEVICE_REGION_H

#include "comm/device_comm.h"

typedef struct sw_device_region sw_device_region;

/* This rank alone; whole pages, of a connected communicator, which outlives it; see peers.h for
 * what all ranks have to agree on before they use it. Contents are undefined. `user`: on which the
 * caller's last use will have come, when it is destroyed. SW_E_UNSUPPORTED: the transport, or its
 * NCCL, registers nothing; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_region_create(sw_device_comm *comm, size_t size_bytes,
                                              sw_stream *user, sw_device_region **region,
                                              sw_error *err);

void *sw_device_region_memory(const sw_device_region *region);
/* False once it was deregistered, or its communicator has ended. */
bool sw_device_region_is_registered(const sw_device_region *region);

/* The memory stays, and is like any other. Waits for the communicator's stream. */
SW_MUST_USE sw_status sw_device_region_deregister(sw_device_region *region, sw_error *err);

/* Waits for both streams under the deadline. NULL is allowed. */
void sw_device_region_destroy(sw_device_region *region);

/* In place of destroy where another thread is inside the communicator: the next that collects does
 * it. */
void sw_device_region_drop(sw_device_region *region);

/* Destroys what was dropped. */
void sw_device_regions_collect(sw_device_comm *comm);

/* The communicator is about to end: no region is registered any more. */
void sw_device_regions_leave(sw_device_comm *comm);

#endif
