/* device_powersgd.c - launch the PowerSGD kernels in groups of matrices; see device_powersgd.h. */
#include "compress/device_powersgd.h"

#include <string.h>

sw_status sw_device_powersgd_run(const sw_device_passes *passes, sw_kernel pass,
                                 const sw_matrix_args *matrices, size_t count, sw_error *err)
{
    for (size_t begin = 0; begin < count; begin += SW_MATRICES_MAX) {
        size_t left = count - begin, few = left < SW_MATRICES_MAX ? left : SW_MATRICES_MAX;
        sw_matrices_args args = {.verdict = passes->verdict, .matrix_count = (int)few};
        memcpy(args.matrix, matrices + begin, few * sizeof *matrices);
        SW_TRY(sw_kernel_launch(passes->kernels, pass, &args, passes->stream, err));
    }
    return SW_OK;
}

sw_status sw_device_powersgd_orthonormalize(const sw_device_passes *passes,
                                            const sw_factor_args *factors, size_t count,
                                            sw_error *err)
{
    for (size_t begin = 0; begin < count; begin += SW_FACTORS_MAX) {
        size_t left = count - begin, few = left < SW_FACTORS_MAX ? left : SW_FACTORS_MAX;
        sw_orthonormalize_args args = {.verdict = passes->verdict, .factor_count = (int)few};
        memcpy(args.factor, factors + begin, few * sizeof *factors);
        SW_TRY(sw_kernel_launch(passes->kernels, SW_KERNEL_ORTHONORMALIZE, &args, passes->stream,
                                err));
    }
    return SW_OK;
}
