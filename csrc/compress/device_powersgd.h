/* device_powersgd.h - the passes of powersgd.h on a device, for all matrices of a bucket. Each
 * function enqueues on a stream and does not wait.
 *
 * Each pass launches one kernel for SW_MATRICES_MAX matrices. The host form stops after an average
 * that is not finite. Here the host does not wait for the average: a verdict in device memory (0,
 * SW_REFUSED or SW_REFUSED_LATE) tells the following passes. The results are bitwise those of
 * powersgd.h.
 *
 * Memory is device memory and must live until the stream has passed the call. device_kernels.h says
 * which fields of a matrix a pass reads and writes.
 *
 * Thread rule: any.
 */
#pragma once

#include "base/status.h"
#include "kernels/device_kernels.h"

typedef struct sw_device_passes {
    const sw_kernel_set *kernels; /* borrowed */
    sw_stream *stream;
    const void *verdict; /* int32 in device memory; NULL means 0 */
} sw_device_passes;

/* Run `pass`: SW_KERNEL_PROJECT, SW_KERNEL_ABSORB or SW_KERNEL_EXPAND. SW_E_INVALID names a rank or
 * dtype out of range. */
SW_MUST_USE sw_status sw_device_powersgd_run(const sw_device_passes *passes, sw_kernel pass,
                                             const sw_matrix_args *matrices, size_t count,
                                             sw_error *err);

/* Make the rows of each factor orthonormal, if *verdict is 0. */
SW_MUST_USE sw_status sw_device_powersgd_orthonormalize(const sw_device_passes *passes,
                                                        const sw_factor_args *factors, size_t count,
                                                        sw_error *err);
