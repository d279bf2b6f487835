/* device_home.h - pinned host memory in which slices of parameters on a GPU are at home.
 *
 * The GPU reads and writes it at its address, so the memory serves wherever device memory does:
 * kernels, copies, and torch's tensors of the GPU. The host's step works on it in place
 * (device_offload.h).
 *
 * Thread rule: one at a time per communicator.
 */
#pragma once

#include "comm/device_comm.h"

typedef struct sw_device_home {
    sw_device_comm *comm; /* borrowed */
    sw_event *left;       /* owned */
    void *memory;         /* owned, zeroed */
} sw_device_home;

/* Allocate zeroed memory. `comm` outlives it. SW_E_MEMORY and SW_E_DEVICE name the size. The caller
 * calls fini in any case. */
SW_MUST_USE sw_status sw_device_home_init(sw_device_home *home, sw_device_comm *comm,
                                          size_t size_bytes, sw_error *err);

/* Wait under the deadline for the work that `user` has enqueued, and free the memory. Work of other
 * streams on it has ended, or `user` has waited for it. */
void sw_device_home_fini(sw_device_home *home, sw_stream *user);
