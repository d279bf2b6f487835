/* device_watch.h - a thread that watches a GPU's communicator and can end it while a call is
 * blocked.
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
#ifndef SW_COMM_DEVICE_WATCH_H
#define SW_COMM_DEVICE_WATCH_H

#include "comm/device_comm.h"

/* Start to watch a connected communicator; no effect if it is watched. SW_E_OS, SW_E_MEMORY. */
SW_MUST_USE sw_status sw_device_watch_start(sw_device_comm *comm, sw_error *err);

/* End the thread before the communicator is freed. If a driver call holds the thread for
 * `patience_ns`, leave it running and return false; the communicator must then never be freed. */
bool sw_device_watch_stop(sw_device_comm *comm, int64_t patience_ns);

#endif
