/* device_region.h - GPU memory of NCCL's, registered with the communicator so that peers use it in
 * place.
 *
 * Idea: two lifetimes end in any order. The registration ends before the communicator; the memory
 * is freed after its last tensor. So the communicator has a list of its regions, and a region
 * outlives its registration. Neither ends before the communicator's stream has run its enqueued
 * work; the memory also waits for the caller's stream. If a wait is impossible (a capture, a
 * failure), the memory stays allocated.
 *
 * Thread rule: as the communicator; only drop may be called during another thread's call. */
#ifndef SW_COMM_DEVICE_REGION_H
#define SW_COMM_DEVICE_REGION_H

#include "comm/device_comm.h"

typedef struct sw_device_region sw_device_region;

/* This rank only. Allocate whole pages for a connected communicator, which outlives them; nothing
 * is registered yet. Contents are undefined. `user`: the stream of the caller's last use before
 * destroy. SW_E_UNSUPPORTED: the transport, or its NCCL, cannot register; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_region_create(sw_device_comm *comm, size_t size_bytes,
                                              sw_stream *user, sw_device_region **region,
                                              sw_error *err);

/* Register it once. peers.h lists what ranks must agree on before they use it, and which failures
 * end the communicator. SW_E_STATE if it is registered. */
SW_MUST_USE sw_status sw_device_region_register(sw_device_region *region, bool as_window,
                                                sw_error *err);

void *sw_device_region_memory(const sw_device_region *region);
/* False once it was deregistered or its communicator has ended. */
bool sw_device_region_is_registered(const sw_device_region *region);
bool sw_device_region_is_window(const sw_device_region *region);

/* Deregister it; the memory stays. Waits for the communicator's stream. */
SW_MUST_USE sw_status sw_device_region_deregister(sw_device_region *region, sw_error *err);

/* Wait for both streams under the deadline. NULL is allowed. */
void sw_device_region_destroy(sw_device_region *region);

/* Mark it for destruction while another thread is inside the communicator; the next collect
 * destroys it. */
void sw_device_region_drop(sw_device_region *region);

/* Destroy the dropped regions. */
void sw_device_regions_collect(sw_device_comm *comm);

/* Deregister all regions: the communicator is about to end. */
void sw_device_regions_leave(sw_device_comm *comm);

#endif
