/* device_norm.h - the exact norm of gradients on a GPU, read by the host or left on the GPU.
 *
 * Both functions add the squares of up to SW_NORM_PARTS_MAX ranges a launch into one sum of
 * integers, so the bits depend neither on the cut into ranges nor on their order. Adjacent ranges
 * count as one. The sum is carried before its digits could overflow. All launches are on the
 * communicator's stream, which orders accesses to the sum.
 *
 * Thread rule: one at a time per communicator. */
#pragma once

#include "comm/device_comm.h"

/* Return the exact sum of squares of the ranges, carried: the bits of the host's norm. Runs after
 * the work of `user`; the host waits, under the deadline. SW_E_INVALID for a dtype other than
 * float32, float64, float16 and bfloat16. */
SW_MUST_USE sw_status sw_device_comm_norm(sw_device_comm *comm, const sw_device_range *ranges,
                                          size_t count, sw_stream *user, sw_norm_sum *sum,
                                          sw_error *err);

typedef struct sw_device_clip {
    double max_norm;
    bool is_sliced;      /* ranks hold different elements: add the sums of all ranks */
    void *norm, *factor; /* float32 each, device memory: CLIP's (device_kernels.h) */
} sw_device_clip;

/* Compute the norm of the ranges and the factor that clips it, in the order of `user`: after its
 * work so far, and before its later work. The host does not wait. Collective with `is_sliced`:
 * every rank calls it, with the same max_norm. Errors as sw_device_comm_norm. */
SW_MUST_USE sw_status sw_device_comm_clip(sw_device_comm *comm, const sw_device_range *ranges,
                                          size_t count, const sw_device_clip *clip, sw_stream *user,
                                          sw_error *err);
