/* kernel_check.h - compare a device's kernels with their references, case by case.
 *
 * Each case of kernel_cases.h is made in host memory and copied to the device, with guard bytes
 * around its arrays. The kernel runs on it with the grids of a whole card, of one multiprocessor
 * and of one warp. The arena that comes back must equal the one that the reference made, bit for
 * bit but for NaN (sw_kernel_case_settle).
 *
 * `strict` is for compute-sanitizer: device memory is new for each case, and only the ranges that
 * the contract declares are copied there, so that a read of any other byte is one of uninitialised
 * memory. Guard bytes are then not compared.
 *
 * Thread rule: one at a time per stream.
 */
#pragma once

#include "kernels/device_kernels.h"

enum { SW_KERNEL_CHECK_SENTENCES = 4 };

typedef struct sw_kernel_check_config {
    sw_kernel kernel;
    size_t first, step; /* cases first, first + step, ...; step at least 1 */
    bool strict;
    int64_t timeout_ns; /* deadline of each wait for the device */
} sw_kernel_check_config;

typedef struct sw_kernel_check_result {
    size_t cases, launches, differences;
    char sentence[SW_KERNEL_CHECK_SENTENCES][SW_ERROR_MESSAGE_BYTES]; /* first differences */
} sw_kernel_check_result;

/* Run the cases on `stream` of the set's device, and wait for them. A difference is not an
 * error; a failed call of the device is. */
SW_MUST_USE sw_status sw_kernel_check(const sw_kernel_set *set,
                                      const sw_kernel_check_config *config, sw_stream *stream,
                                      sw_kernel_check_result *result, sw_error *err);
