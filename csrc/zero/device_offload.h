/* device_offload.h - a step on the host for parameters on a GPU: optimizer state never leaves the
 * host's memory.
 *
 * Idea: gradients come down, and new parameters go up, in batches through three slots of pinned
 * memory, each direction on a stream of its own: while batch b is stepped on by the host's threads,
 * b + 1 comes down and b - 1 goes up. An element's new value does not depend on where a run is cut
 * (docs/design/optim.md), so the bits are those of a step on the whole. A batch is as many pieces
 * as a slot holds; a piece is what one thread takes at a time.
 *
 *   user --> down              gradients are complete before they come down
 *   up --sent[slot]--> down    a slot is filled again after what lay there has gone up
 *   down --fetched[slot]--> host    what is stepped on has come: the one wait of the host, once a
 *                              batch, under the communicator's deadline
 *   up --> user                what reads parameters next, a gathering of slices or a forward,
 *                              comes after the new ones
 *
 * What goes up was written by the host after it had waited, so `up` needs no event of `down`.
 *
 * Thread rule: one at a time a communicator, as everything on it.
 */
#ifndef SW_ZERO_DEVICE_OFFLOAD_H
#define SW_ZERO_DEVICE_OFFLOAD_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/device_comm.h"
#include "kernels/optim_kernels.h"

enum {
    SW_DEVICE_OFFLOAD_SLOTS = 3,
    SW_DEVICE_OFFLOAD_LEAST_SLOT_BYTES = 256, /* 32 elements, of a gradient and of a parameter */
};

typedef struct sw_device_offload sw_device_offload;

typedef struct sw_device_offload_stats {
    uint64_t batches, bytes_down, bytes_up;
} sw_device_offload_stats;

/* What steps on runs that are in host memory: sw_adam_step or sw_sgd_step behind their options.
 * Called by several threads at once, of disjoint runs. */
typedef sw_status sw_device_offload_fn(const void *options, const sw_optim_run *runs, size_t count,
                                       sw_error *err);

/* `comm` is borrowed and outlives it; connected. `slot_bytes`: of each slot, pinned, a multiple of
 * SW_DEVICE_OFFLOAD_LEAST_SLOT_BYTES; half of it for gradients. `thread_count`: that step, the
 * caller's among them, 1 or more. SW_E_INVALID, SW_E_STATE, SW_E_MEMORY, SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_offload_create(sw_device_comm *comm, size_t slot_bytes,
                                               int thread_count, sw_device_offload **offload,
                                               sw_error *err);

/* Waits under the deadline for what is still on its way. NULL is allowed. */
void sw_device_offload_destroy(sw_device_offload *offload);

/* Steps on every run. Of a run, g is on the GPU, and so is copy; where there is no copy, p is,
 * which then comes down and goes up again. All else is the host's memory. In the order of `user`:
 * after what it was given, before what it will be. The caller has checked options and runs. Helpers
 * live as long as the call.
 *
 * Cost: of each element g down, copy up (or p down and up); a host wait a batch; no allocation that
 * the device knows of. Neighbours of one batch, in the GPU's memory, are one copy.
 *
 * Errors: the communicator's, SW_E_DEVICE, SW_E_OS (no thread left), SW_E_MEMORY. If a part of the
 * state had changed by then, each later step is SW_E_STATE with the first error's sentence. */
SW_MUST_USE sw_status sw_device_offload_step(sw_device_offload *offload, sw_device_offload_fn *step,
                                             const void *options, const sw_optim_run *runs,
                                             size_t count, sw_stream *user, sw_error *err);

size_t sw_device_offload_pinned_bytes(const sw_device_offload *offload);
int sw_device_offload_thread_count(const sw_device_offload *offload);
sw_device_offload_stats sw_device_offload_get_stats(const sw_device_offload *offload);

#endif
