/* device_powersgd.h - powersgd.h's passes on a device, over all matrices of a bucket: each function
 * enqueued on a stream, none waited for.
 *
 * Idea: one launch a pass and SW_MATRICES_MAX matrices. The host stops after an average that is not
 * finite; here nobody waits to look, so a verdict in device memory (0, SW_REFUSED or
 * SW_REFUSED_LATE) says it to the passes that come after. The bits are powersgd.h's.
 *
 * Memory is the device's and must live until the stream has passed the call. Which fields of a
 * matrix a pass reads and writes: device_kernels.h.
 *
 * Thread rule: any.
 */
#ifndef SW_COMPRESS_DEVICE_POWERSGD_H
#define SW_COMPRESS_DEVICE_POWERSGD_H

#include "base/status.h"
#include "kernels/device_kernels.h"

typedef struct sw_device_passes {
    const sw_kernel_set *kernels; /* borrowed */
    sw_stream *stream;
    const void *verdict; /* int32 of device memory; NULL stands for 0 */
} sw_device_passes;

/* `pass`: SW_KERNEL_PROJECT, SW_KERNEL_ABSORB or SW_KERNEL_EXPAND. SW_E_INVALID names the rank or
 * dtype that no matrix has. */
SW_MUST_USE sw_status sw_device_powersgd_run(const sw_device_passes *passes, sw_kernel pass,
                                             const sw_matrix_args *matrices, size_t count,
                                             sw_error *err);

/* Rows made orthonormal, unless *verdict. */
SW_MUST_USE sw_status sw_device_powersgd_orthonormalize(const sw_device_passes *passes,
                                                        const sw_factor_args *factors, size_t count,
                                                        sw_error *err);

#endif
