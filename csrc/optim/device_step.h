/* device_step.h - a step of Adam or SGD on a GPU, many runs a launch.
 *
 * Runs of one step count share their scalars, so up to SW_RUNS_MAX of them go in one launch, slices
 * of an arena and separate tensors alike. The bits are the host's (device_kernels.h).
 *
 * `clip`: a float32 in device memory by which every gradient is multiplied first, in its dtype; the
 * product is written back. NULL: gradients stay. The bits are those of a pass of its own before.
 *
 * Thread rule: any, as long as two threads do not share a run. Nothing is kept.
 */
#pragma once

#include "base/status.h"
#include "kernels/device_kernels.h"
#include "optim/optim.h"

/* Enqueue the step on device memory, in the order of `stream`, and do not wait. Errors are those of
 * sw_adam_step and sw_sgd_step. The kernel set's device may be the host. */
SW_MUST_USE sw_status sw_device_adam_step(const sw_kernel_set *kernels,
                                          const sw_adam_options *options, const sw_optim_run *runs,
                                          size_t count, const void *clip, sw_stream *stream,
                                          sw_error *err);
SW_MUST_USE sw_status sw_device_sgd_step(const sw_kernel_set *kernels,
                                         const sw_sgd_options *options, const sw_optim_run *runs,
                                         size_t count, const void *clip, sw_stream *stream,
                                         sw_error *err);
