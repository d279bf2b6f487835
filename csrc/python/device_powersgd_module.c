/* device_powersgd_module.c - the module's functions for PowerSGD on GPUs
 * (compress/device_powersgd.h), and the arithmetic of its messages: folds and casts. Addresses are
 * integers. Each call enqueues work on the given stream and returns. */
#include <stdlib.h>

#include "compress/device_powersgd.h"
#include "kernels/kernels.h"
#include "python/device_object.h"

/* Enters the communicator and returns it; NULL with an exception. */
static device_comm_object *enter(PyObject *module, PyObject *comm)
{
    if (!PyObject_TypeCheck(comm, ((engine_state *)PyModule_GetState(module))->device_comm_type)) {
        PyErr_SetString(PyExc_TypeError, "comm must be a DeviceComm");
        return NULL;
    }
    device_comm_object *self = (device_comm_object *)comm;
    return sw_py_device_enter(self) ? self : NULL;
}

/* Launches one kernel. */
static PyObject *launch(PyObject *module, PyObject *comm, sw_kernel kernel, const void *args,
                        unsigned long long stream)
{
    sw_error err;
    sw_status status;
    device_comm_object *self = enter(module, comm);
    if (!self)
        return NULL;
    SW_PY_WITHOUT_GIL(
        status, sw_kernel_launch(&self->comm->kernels, kernel, args, sw_py_address(stream), &err));
    return sw_py_device_finish(self, status, &err);
}

/* ---- tables ---- */

static bool read_matrix(PyObject *row, void *out)
{
    unsigned long long gradient, memory, left, right, basis, to, copy, rows, cols, rank;
    const char *dtype;
    if (!PyArg_ParseTuple(row,
                          "KKKKKKKKKKs;a matrix is (gradient, memory, left, right, basis, out, "
                          "copy, rows, cols, rank, dtype)",
                          &gradient, &memory, &left, &right, &basis, &to, &copy, &rows, &cols,
                          &rank, &dtype))
        return false;
    *(sw_matrix_args *)out = (sw_matrix_args){.gradient = sw_py_address(gradient),
                                              .memory = sw_py_address(memory),
                                              .left = sw_py_address(left),
                                              .right = sw_py_address(right),
                                              .basis = sw_py_address(basis),
                                              .out = sw_py_address(to),
                                              .copy = sw_py_address(copy),
                                              .rows = rows,
                                              .cols = cols,
                                              .rank = rank,
                                              .memory_dtype = (int)sw_dtype_from_name(dtype)};
    return true;
}

static bool read_factor(PyObject *row, void *out)
{
    unsigned long long to, from, count, rank, seed;
    if (!PyArg_ParseTuple(row, "KKKKK;a factor is (to, from, count, rank, seed)", &to, &from,
                          &count, &rank, &seed))
        return false;
    *(sw_factor_args *)out = (sw_factor_args){.to = sw_py_address(to),
                                              .from = sw_py_address(from),
                                              .count = count,
                                              .rank = rank,
                                              .seed = seed};
    return true;
}

static PyObject *run(PyObject *module, PyObject *args, const char *format, sw_kernel pass)
{
    PyObject *comm, *list;
    unsigned long long verdict, stream;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, format, &comm, &PyList_Type, &list, &verdict, &stream))
        return NULL;
    sw_matrix_args *matrices = sw_py_device_table(list, read_matrix, sizeof *matrices);
    if (!matrices)
        return NULL;
    size_t count = (size_t)PyList_Size(list);
    PyObject *done = NULL;
    device_comm_object *self = enter(module, comm);
    if (self) {
        sw_device_passes passes = {.kernels = &self->comm->kernels,
                                   .stream = sw_py_address(stream),
                                   .verdict = sw_py_address(verdict)};
        SW_PY_WITHOUT_GIL(status, sw_device_powersgd_run(&passes, pass, matrices, count, &err));
        done = sw_py_device_finish(self, status, &err);
    }
    free(matrices);
    return done;
}

static PyObject *project(PyObject *module, PyObject *args)
{
    return run(module, args, "OO!KK:device_powersgd_project", SW_KERNEL_PROJECT);
}

static PyObject *absorb(PyObject *module, PyObject *args)
{
    return run(module, args, "OO!KK:device_powersgd_absorb", SW_KERNEL_ABSORB);
}

static PyObject *expand(PyObject *module, PyObject *args)
{
    return run(module, args, "OO!KK:device_powersgd_expand", SW_KERNEL_EXPAND);
}

static PyObject *orthonormalize(PyObject *module, PyObject *args)
{
    PyObject *comm, *list;
    unsigned long long verdict, stream;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "OO!KK:device_powersgd_orthonormalize", &comm, &PyList_Type, &list,
                          &verdict, &stream))
        return NULL;
    sw_factor_args *factors = sw_py_device_table(list, read_factor, sizeof *factors);
    if (!factors)
        return NULL;
    size_t count = (size_t)PyList_Size(list);
    PyObject *done = NULL;
    device_comm_object *self = enter(module, comm);
    if (self) {
        sw_device_passes passes = {.kernels = &self->comm->kernels,
                                   .stream = sw_py_address(stream),
                                   .verdict = sw_py_address(verdict)};
        SW_PY_WITHOUT_GIL(status, sw_device_powersgd_orthonormalize(&passes, factors, count, &err));
        done = sw_py_device_finish(self, status, &err);
    }
    free(factors);
    return done;
}

/* ---- messages ---- */

static PyObject *is_finite(PyObject *module, PyObject *args)
{
    PyObject *comm;
    unsigned long long verdict, values, numel, stream;
    int refusal;
    if (!PyArg_ParseTuple(args, "OKKKiK:device_finite", &comm, &verdict, &values, &numel, &refusal,
                          &stream))
        return NULL;
    sw_finite_args finite = {.verdict = sw_py_address(verdict),
                             .values = sw_py_address(values),
                             .numel = numel,
                             .refusal = refusal};
    return launch(module, comm, SW_KERNEL_FINITE, &finite, stream);
}

static PyObject *device_fold(PyObject *module, PyObject *args)
{
    PyObject *comm;
    unsigned long long to, own, rest, numel, stride, stream;
    int own_index, count;
    const char *dtype;
    int is_mean;
    if (!PyArg_ParseTuple(args, "OKKKKKiispK:device_fold", &comm, &to, &own, &rest, &numel, &stride,
                          &own_index, &count, &dtype, &is_mean, &stream))
        return NULL;
    sw_fold_args fold = {.to = sw_py_address(to),
                         .own = sw_py_address(own),
                         .rest = sw_py_address(rest),
                         .numel = numel,
                         .stride_bytes = stride,
                         .scale = is_mean ? 1.0 / count : 1.0,
                         .dtype = (int)sw_dtype_from_name(dtype),
                         .op = (int)(is_mean ? SW_REDOP_MEAN : SW_REDOP_SUM),
                         .own_index = own_index,
                         .source_count = count};
    return launch(module, comm, SW_KERNEL_FOLD, &fold, stream);
}

static PyObject *device_cast(PyObject *module, PyObject *args)
{
    PyObject *comm;
    unsigned long long to, from, numel, stream;
    const char *to_dtype, *from_dtype;
    double scale;
    if (!PyArg_ParseTuple(args, "OKsKsKdK:device_cast", &comm, &to, &to_dtype, &from, &from_dtype,
                          &numel, &scale, &stream))
        return NULL;
    sw_cast_args cast = {.to = sw_py_address(to),
                         .from = sw_py_address(from),
                         .numel = numel,
                         .scale = (float)scale,
                         .to_dtype = (int)sw_dtype_from_name(to_dtype),
                         .from_dtype = (int)sw_dtype_from_name(from_dtype)};
    return launch(module, comm, SW_KERNEL_CAST, &cast, stream);
}

static PyMethodDef functions[] = {
    {"device_powersgd_project", project, METH_VARARGS,
     "device_powersgd_project($module, comm, matrices, verdict, stream, /)\n--\n\n"
     "Project all matrices like powersgd_project."},
    {"device_powersgd_absorb", absorb, METH_VARARGS,
     "device_powersgd_absorb($module, comm, matrices, verdict, stream, /)\n--\n\n"
     "Compute Q = vᵀ P and keep v, unless the verdict refuses."},
    {"device_powersgd_expand", expand, METH_VARARGS,
     "device_powersgd_expand($module, comm, matrices, verdict, stream, /)\n--\n\n"
     "Compute gradients from P and Q, or NaN."},
    {"device_powersgd_orthonormalize", orthonormalize, METH_VARARGS,
     "device_powersgd_orthonormalize($module, comm, factors, verdict, stream, /)\n--\n\n"
     "Make rows orthonormal."},
    {"device_finite", is_finite, METH_VARARGS,
     "device_finite($module, comm, verdict, values, numel, refusal, stream, /)\n--\n\n"
     "Set the verdict to `refusal` if it is 0 and a value is not finite."},
    {"device_fold", device_fold, METH_VARARGS,
     "device_fold($module, comm, to, own, rest, numel, stride_bytes, own_index, count, dtype, "
     "is_mean, stream, /)\n--\n\nFold contributions in rank order."},
    {"device_cast", device_cast, METH_VARARGS,
     "device_cast($module, comm, to, to_dtype, from, from_dtype, numel, scale, stream, /)\n--\n\n"
     "Scale and round."},
    {NULL, NULL, 0, NULL},
};

int sw_py_device_powersgd_functions_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
