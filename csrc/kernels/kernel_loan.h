/* kernel_loan.h - the kernels of an open GPU, and the parts of the engine with which the extension
 * _engine_check compares them (csrc_check/). Both extensions are built together, so the bytes of
 * this struct pass between them.
 *
 * Thread rule: any. */
#pragma once

#include "kernels/device_kernels.h"
#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"

typedef struct sw_kernel_loan {
    const sw_kernel_set *set; /* borrowed from a DeviceComm, and its stream; NULL: none was given */
    sw_stream *stream;
    const sw_kernel_contract *(*contracts)(void);
    const sw_kernel_table *(*kernels)(void);
    sw_status (*redop_check)(sw_redop op, sw_dtype dtype, sw_error *err);
    void (*norm_sum_carry)(sw_norm_sum *sum);
    double (*norm_value)(const sw_norm_sum *sum);
} sw_kernel_loan;
