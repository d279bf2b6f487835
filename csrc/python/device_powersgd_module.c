/* device_powersgd_module.c - the module's functions for PowerSGD on GPUs
 * (compress/device_powersgd.h), and the arithmetic of its messages: folds and casts. Addresses are
 * integers. Each call enqueues work on the given stream and returns. */
#include "compress/device_powersgd.h"
#include "kernels/kernels.h"
#include "python/device_call.h"

#define MATRIX \
    "matrix gradient:A memory:A left:A right:A basis:A out:A copy:A rows:K cols:K rank:K dtype:s"

SW_PY_ROW(fill_matrix, sw_matrix_args, .gradient = a[0].address, .memory = a[1].address,
          .left = a[2].address, .right = a[3].address, .basis = a[4].address, .out = a[5].address,
          .copy = a[6].address, .rows = a[7].word, .cols = a[8].word, .rank = a[9].word,
          .memory_dtype = (int)sw_dtype_from_name(a[10].s))

SW_PY_ROW(fill_factor, sw_factor_args, .to = a[0].address, .from = a[1].address, .count = a[2].word,
          .rank = a[3].word, .seed = a[4].word)

#define PASSES \
    &(sw_device_passes){.kernels = &comm->kernels, .verdict = a[2].address, .stream = a[3].address}

#define PASS(name, kernel)                                                                        \
    SW_PY_ON_ROWS(name, #name " comm:O matrices:L verdict:A stream:A", 1, MATRIX, sw_matrix_args, \
                  fill_matrix,                                                                    \
                  sw_device_powersgd_run(PASSES, kernel, rows.rows, rows.count, &err))

PASS(device_powersgd_project, SW_KERNEL_PROJECT)
PASS(device_powersgd_absorb, SW_KERNEL_ABSORB)
PASS(device_powersgd_expand, SW_KERNEL_EXPAND)

SW_PY_ON_ROWS(device_powersgd_orthonormalize,
              "device_powersgd_orthonormalize comm:O factors:L verdict:A stream:A", 1,
              "factor to:A from:A count:K rank:K seed:K", sw_factor_args, fill_factor,
              sw_device_powersgd_orthonormalize(PASSES, rows.rows, rows.count, &err))

SW_PY_ON_DEVICE(device_finite, "device_finite comm:O verdict:A values:A numel:K refusal:i stream:A",
                sw_kernel_launch(&comm->kernels, SW_KERNEL_FINITE,
                                 &(sw_finite_args){.verdict = a[1].address,
                                                   .values = a[2].address,
                                                   .numel = a[3].word,
                                                   .refusal = a[4].i},
                                 a[5].address, &err))
SW_PY_ON_DEVICE(device_fold,
                "device_fold comm:O to:A own:A rest:A numel:K stride_bytes:K own_index:i count:i "
                "dtype:s is_mean:p stream:A",
                sw_kernel_launch(&comm->kernels, SW_KERNEL_FOLD,
                                 &(sw_fold_args){.to = a[1].address,
                                                 .own = a[2].address,
                                                 .rest = a[3].address,
                                                 .numel = a[4].word,
                                                 .stride_bytes = a[5].word,
                                                 .scale = a[9].p ? 1.0 / a[7].i : 1.0,
                                                 .dtype = (int)sw_dtype_from_name(a[8].s),
                                                 .op = (int)(a[9].p ? SW_REDOP_MEAN : SW_REDOP_SUM),
                                                 .own_index = a[6].i,
                                                 .source_count = a[7].i},
                                 a[10].address, &err))
SW_PY_ON_DEVICE(device_cast,
                "device_cast comm:O to:A to_dtype:s from:A from_dtype:s numel:K scale:d stream:A",
                sw_kernel_launch(&comm->kernels, SW_KERNEL_CAST,
                                 &(sw_cast_args){.to = a[1].address,
                                                 .from = a[3].address,
                                                 .numel = a[5].word,
                                                 .scale = (float)a[6].d,
                                                 .to_dtype = (int)sw_dtype_from_name(a[2].s),
                                                 .from_dtype = (int)sw_dtype_from_name(a[4].s)},
                                 a[7].address, &err))

PyMethodDef sw_py_device_powersgd_functions[] = {
    SW_PY_FUNCTION(device_powersgd_project, "comm, matrices, verdict, stream, /",
                   "Project all matrices like powersgd_project."),
    SW_PY_FUNCTION(device_powersgd_absorb, "comm, matrices, verdict, stream, /",
                   "Compute Q = vᵀ P and keep v, unless the verdict refuses."),
    SW_PY_FUNCTION(device_powersgd_expand, "comm, matrices, verdict, stream, /",
                   "Compute gradients from P and Q, or NaN."),
    SW_PY_FUNCTION(
        device_powersgd_orthonormalize, "comm, factors, verdict, stream, /",
        "Make rows of (to, from, count, rank, seed) orthonormal, unless the verdict is not 0."),
    SW_PY_FUNCTION(device_finite, "comm, verdict, values, numel, refusal, stream, /",
                   "Set the verdict to `refusal` if it is 0 and a value is not finite."),
    SW_PY_FUNCTION(
        device_fold,
        "comm, to, own, rest, numel, stride_bytes, own_index, count, dtype, is_mean, stream, /",
        "Fold contributions in rank order: number k is at rest + k * stride_bytes, own_index at "
        "own."),
    SW_PY_FUNCTION(device_cast, "comm, to, to_dtype, from, from_dtype, numel, scale, stream, /",
                   "Scale and round."),
    {NULL, NULL, 0, NULL},
};
