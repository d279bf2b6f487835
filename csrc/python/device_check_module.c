/* device_check_module.c - the module's functions that compare GPU kernels with their references. */
#include <string.h>

#include "kernels/kernel_cases.h"
#include "kernels/kernel_check.h"
#include "python/device_call.h"

static const int64_t TIMEOUT_NS = INT64_C(30) * 1000000000;
static const char NAME_PREFIX[] = "sw_"; /* the prefix of a kernel's name in the image */

static const char *kernel_name(int kernel)
{
    return sw_kernel_contracts()[kernel].name + strlen(NAME_PREFIX);
}

static PyObject *device_kernel_cases(PyObject *module, PyObject *unused)
{
    PyObject *found = PyDict_New();
    (void)module;
    (void)unused;
    for (int k = 0; found && k < SW_KERNEL_COUNT; ++k)
        sw_py_put(&found, kernel_name(k), PyLong_FromSize_t(sw_kernel_case_count((sw_kernel)k)));
    return found;
}

static bool find_kernel(const char *name, sw_kernel *kernel)
{
    for (int k = 0; k < SW_KERNEL_COUNT; ++k)
        if (strcmp(kernel_name(k), name) == 0) {
            *kernel = (sw_kernel)k;
            return true;
        }
    PyErr_Format(PyExc_ValueError, "device_kernel_check: no kernel '%s' exists", name);
    return false;
}

static PyObject *result_of(const sw_kernel_check_result *result)
{
    size_t told = result->differences < SW_KERNEL_CHECK_SENTENCES ? result->differences
                                                                  : SW_KERNEL_CHECK_SENTENCES;
    PyObject *sentences = PyList_New(0);
    for (size_t i = 0; sentences && i < told; ++i)
        sw_py_append(&sentences, sw_py_text(result->sentence[i]));
    return sentences ? Py_BuildValue("{s:n,s:n,s:n,s:N}", "cases", (Py_ssize_t)result->cases,
                                     "launches", (Py_ssize_t)result->launches, "differences",
                                     (Py_ssize_t)result->differences, "sentences", sentences)
                     : NULL;
}

static PyObject *device_kernel_check(PyObject *module, PyObject *args, PyObject *kwargs)
{
    sw_py_arg a[5] = {[3] = {.n = 1}};
    sw_kernel_check_config config = {.timeout_ns = TIMEOUT_NS};
    sw_kernel_check_result result;
    sw_error err;
    sw_status status;
    engine_state *state = PyModule_GetState(module);
    if (!sw_py_read("device_kernel_check comm:O kernel:s | first:n step:n strict:p", args, kwargs,
                    a) ||
        !find_kernel(a[1].s, &config.kernel))
        return NULL;
    if (a[2].n < 0 || a[3].n < 1)
        return PyErr_Format(PyExc_ValueError,
                            "device_kernel_check: first must be at least 0 and step at least 1, "
                            "not %zd and %zd",
                            a[2].n, a[3].n);
    config.first = a[2].size;
    config.step = a[3].size;
    config.strict = a[4].p;
    device_comm_object *gpu = sw_py_device_comm_of(state, a[0].o);
    if (!gpu || !sw_py_device_lend_kernels(gpu))
        return NULL;
    SW_PY_WITHOUT_GIL(
        status, sw_kernel_check(&gpu->comm->kernels, &config, gpu->comm->stream, &result, &err));
    return status == SW_OK ? result_of(&result) : sw_py_raise(state, &err, NULL);
}

PyMethodDef sw_py_device_check_functions[] = {
    {"device_kernel_cases", device_kernel_cases, METH_NOARGS,
     "device_kernel_cases()\n--\n\nThe number of cases of each kernel, by its name."},
    {"device_kernel_check", SW_PY_NAMED(device_kernel_check),
     "device_kernel_check(comm, kernel, first=0, step=1, strict=False)\n--\n\n"
     "Compare a kernel with its reference on the GPU, case by case."},
    {NULL, NULL, 0, NULL},
};
