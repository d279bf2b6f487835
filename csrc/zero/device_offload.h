/* device_offload.h - an optimizer step on the host for parameters on a GPU. Optimizer state never
 * leaves host memory.
 *
 * Gradients are copied down to the host and new parameters up to the GPU, in batches through three
 * slots of pinned memory, each direction on its own stream. While the host's threads step on batch
 * b, batch b + 1 is copied down and b - 1 up. An element's new value does not depend on where a run
 * is cut (docs/design/optim.md), so the bits are those of one uncut step. A batch has as many
 * pieces as a slot holds; one thread works on one piece at a time.
 *
 *   user --> down                 gradients are complete before they come down
 *   up --sent[slot]--> down       a slot is refilled after its contents were copied up
 *   down --fetched[slot]--> host  the batch has arrived before it is stepped on: the only wait of
 *                                 the host, once a batch, under the communicator's deadline
 *   up --> user                   a gather or a forward reads parameters after they were copied up
 *
 * The host writes new parameters after it has waited, so `up` needs no event of `down`.
 *
 * Arrays at home in pinned memory (device_home.h) are not copied: the host reads gradients and
 * writes parameters in place, once the first batch has arrived.
 *
 * Thread rule: one at a time per communicator, as everything on it.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/device_comm.h"
#include "kernels/optim_kernels.h"

enum {
    SW_DEVICE_OFFLOAD_SLOTS = 3,
    SW_DEVICE_OFFLOAD_LEAST_SLOT_BYTES = 256, /* 32 elements of a gradient and of a parameter */
};

typedef struct sw_device_offload sw_device_offload;

typedef struct sw_device_offload_stats {
    uint64_t batches, bytes_down, bytes_up;
} sw_device_offload_stats;

/* Step on runs in host memory: sw_adam_step or sw_sgd_step with their options. Several threads call
 * it at once, with disjoint runs. */
typedef sw_status sw_device_offload_fn(const void *options, const sw_optim_run *runs, size_t count,
                                       sw_error *err);

/* Create the slots and streams. `comm` is connected, borrowed and outlives the object. `slot_bytes`
 * is the size of each pinned slot, a multiple of SW_DEVICE_OFFLOAD_LEAST_SLOT_BYTES; half of it is
 * for gradients. `thread_count` >= 1 threads step, the caller among them. SW_E_INVALID, SW_E_STATE,
 * SW_E_MEMORY, SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_offload_create(sw_device_comm *comm, size_t slot_bytes,
                                               int thread_count, sw_device_offload **offload,
                                               sw_error *err);

/* Wait under the deadline for pending copies and destroy. NULL is allowed. */
void sw_device_offload_destroy(sw_device_offload *offload);

/* Step on every run. A run's g and copy are on the GPU, or at home; without a copy, g and p. All
 * other arrays are in host memory. The step is ordered on `user`: after the work enqueued so far,
 * before later work. The caller has checked options and runs. Helper threads live as long as the
 * call.
 *
 * Cost: g down, copy or p down and up for each element that is not at home; one host wait for each
 * batch; no device allocation. One copy moves arrays of a batch that are contiguous in GPU memory.
 *
 * Errors: the communicator's, SW_E_DEVICE, SW_E_OS (no thread can be created), SW_E_MEMORY. If
 * state had already changed, each later step fails with SW_E_STATE and the first error's
 * message. */
SW_MUST_USE sw_status sw_device_offload_step(sw_device_offload *offload, sw_device_offload_fn *step,
                                             const void *options, const sw_optim_run *runs,
                                             size_t count, sw_stream *user, sw_error *err);

size_t sw_device_offload_pinned_bytes(const sw_device_offload *offload);
int sw_device_offload_thread_count(const sw_device_offload *offload);
sw_device_offload_stats sw_device_offload_get_stats(const sw_device_offload *offload);
