/* device_powersgd_module.c - the module's functions for PowerSGD on GPUs
 * (compress/device_powersgd.h), and the arithmetic of its messages: folds and casts. Addresses are
 * integers. Each call enqueues work on the given stream and returns. */
#include "compress/device_powersgd.h"
#include "kernels/kernels.h"
#include "python/device_call.h"

/* ---- passes: comm, matrices or factors, verdict, stream ---- */

#define MATRIX \
    "matrix gradient:A memory:A left:A right:A basis:A out:A copy:A rows:K cols:K rank:K dtype:s"

SW_PY_ROW(fill_matrix, sw_matrix_args, .gradient = a[0].address, .memory = a[1].address,
          .left = a[2].address, .right = a[3].address, .basis = a[4].address, .out = a[5].address,
          .copy = a[6].address, .rows = a[7].word, .cols = a[8].word, .rank = a[9].word,
          .memory_dtype = (int)sw_dtype_from_name(a[10].s))

SW_PY_ROW(fill_factor, sw_factor_args, .to = a[0].address, .from = a[1].address, .count = a[2].word,
          .rank = a[3].word, .seed = a[4].word)

static sw_device_passes passes_of(sw_device_comm *comm, const sw_py_arg *a)
{
    return (sw_device_passes){
        .kernels = &comm->kernels, .verdict = a[2].address, .stream = a[3].address};
}

#define PASS(name, kernel)                                                                         \
    static sw_status name##_run(sw_device_comm *comm, const sw_py_arg *a, const sw_py_table *rows, \
                                sw_error *err)                                                     \
    {                                                                                              \
        const sw_device_passes passes = passes_of(comm, a);                                        \
        return sw_device_powersgd_run(&passes, kernel, rows->rows, rows->count, err);              \
    }                                                                                              \
    SW_PY_ON_ROWS(name, "device_powersgd_" #name " comm:O matrices:L verdict:A stream:A",          \
                  name##_run, 1, MATRIX, sw_matrix_args, fill_matrix)

PASS(device_powersgd_project, SW_KERNEL_PROJECT)
PASS(device_powersgd_absorb, SW_KERNEL_ABSORB)
PASS(device_powersgd_expand, SW_KERNEL_EXPAND)

static sw_status orthonormalize_run(sw_device_comm *comm, const sw_py_arg *a,
                                    const sw_py_table *rows, sw_error *err)
{
    const sw_device_passes passes = passes_of(comm, a);
    return sw_device_powersgd_orthonormalize(&passes, rows->rows, rows->count, err);
}

SW_PY_ON_ROWS(device_powersgd_orthonormalize,
              "device_powersgd_orthonormalize comm:O factors:L verdict:A stream:A",
              orthonormalize_run, 1, "factor to:A from:A count:K rank:K seed:K", sw_factor_args,
              fill_factor)

/* ---- messages ---- */

static sw_status finite_run(sw_device_comm *comm, const sw_py_arg *a,
                            const sw_py_table *Py_UNUSED(unused), sw_error *err)
{
    const sw_finite_args finite = {
        .verdict = a[1].address, .values = a[2].address, .numel = a[3].word, .refusal = a[4].i};
    return sw_kernel_launch(&comm->kernels, SW_KERNEL_FINITE, &finite, a[5].address, err);
}

static sw_status fold_run(sw_device_comm *comm, const sw_py_arg *a,
                          const sw_py_table *Py_UNUSED(unused), sw_error *err)
{
    const sw_fold_args fold = {.to = a[1].address,
                               .own = a[2].address,
                               .rest = a[3].address,
                               .numel = a[4].word,
                               .stride_bytes = a[5].word,
                               .scale = a[9].p ? 1.0 / a[7].i : 1.0,
                               .dtype = (int)sw_dtype_from_name(a[8].s),
                               .op = (int)(a[9].p ? SW_REDOP_MEAN : SW_REDOP_SUM),
                               .own_index = a[6].i,
                               .source_count = a[7].i};
    return sw_kernel_launch(&comm->kernels, SW_KERNEL_FOLD, &fold, a[10].address, err);
}

static sw_status cast_run(sw_device_comm *comm, const sw_py_arg *a,
                          const sw_py_table *Py_UNUSED(unused), sw_error *err)
{
    const sw_cast_args cast = {.to = a[1].address,
                               .from = a[3].address,
                               .numel = a[5].word,
                               .scale = (float)a[6].d,
                               .to_dtype = (int)sw_dtype_from_name(a[2].s),
                               .from_dtype = (int)sw_dtype_from_name(a[4].s)};
    return sw_kernel_launch(&comm->kernels, SW_KERNEL_CAST, &cast, a[7].address, err);
}

SW_PY_ON_DEVICE(device_finite, "device_finite comm:O verdict:A values:A numel:K refusal:i stream:A",
                finite_run)
SW_PY_ON_DEVICE(device_fold,
                "device_fold comm:O to:A own:A rest:A numel:K stride_bytes:K own_index:i count:i "
                "dtype:s is_mean:p stream:A",
                fold_run)
SW_PY_ON_DEVICE(device_cast,
                "device_cast comm:O to:A to_dtype:s from:A from_dtype:s numel:K scale:d stream:A",
                cast_run)

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
