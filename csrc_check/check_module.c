/* check_module.c - shardwright._engine_check: compares the GPU kernels of the engine with their
 * references. The tools import it; training does not. CPython's limited API of 3.10 only. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "kernel_cases.h"
#include "kernel_check.h"
#include "kernels/kernel_loan.h"

/* PyModuleDef_Slot stores functions in void pointers: CPython's idiom, which ISO C lacks. */
#pragma GCC diagnostic ignored "-Wpedantic"

static const int64_t TIMEOUT_NS = INT64_C(30) * 1000000000;
static const char NAME_PREFIX[] = "sw_"; /* the prefix of a kernel's name in the image */

static sw_kernel_loan
    engine; /* without a GPU: functions of the engine, the same for every module */

const sw_kernel_contract *sw_kernel_contracts(void)
{
    return engine.contracts();
}

const sw_kernel_table *sw_kernels(void)
{
    return engine.kernels();
}

sw_status sw_redop_check(sw_redop op, sw_dtype dtype, sw_error *err)
{
    return engine.redop_check(op, dtype, err);
}

void sw_norm_sum_carry(sw_norm_sum *sum)
{
    engine.norm_sum_carry(sum);
}

double sw_norm_value(const sw_norm_sum *sum)
{
    return engine.norm_value(sum);
}

/* Fills in *loan for a DeviceComm or None. Returns -1 with an exception. */
static int borrow(PyObject *comm, sw_kernel_loan *loan)
{
    char *bytes;
    Py_ssize_t size_bytes;
    PyObject *module = PyImport_ImportModule("shardwright._engine");
    PyObject *method = module ? PyObject_GetAttrString(module, "kernel_loan") : NULL;
    PyObject *given = method ? PyObject_CallFunctionObjArgs(method, comm, NULL) : NULL;
    int failed = !given || PyBytes_AsStringAndSize(given, &bytes, &size_bytes) < 0 ? -1 : 0;
    if (!failed && size_bytes != sizeof *loan) {
        PyErr_SetString(PyExc_ImportError, "_engine_check and _engine are of different builds");
        failed = -1;
    }
    if (!failed)
        memcpy(loan, bytes, sizeof *loan);
    Py_XDECREF(given);
    Py_XDECREF(method);
    Py_XDECREF(module);
    return failed;
}

static PyObject *raise(const sw_error *err)
{
    PyObject *module = PyImport_ImportModule("shardwright._engine");
    PyObject *type = module ? PyObject_GetAttrString(module, "Error") : NULL;
    if (err->status == SW_E_MEMORY || err->status == SW_E_INVALID) {
        Py_XDECREF(type);
        type = err->status == SW_E_MEMORY ? PyExc_MemoryError : PyExc_ValueError;
        Py_INCREF(type);
    }
    if (type)
        PyErr_Format(type, "%s", err->message);
    Py_XDECREF(type);
    Py_XDECREF(module);
    return NULL;
}

static const char *kernel_name(int kernel)
{
    return sw_kernel_contracts()[kernel].name + strlen(NAME_PREFIX);
}

static PyObject *device_kernel_cases(PyObject *module, PyObject *unused)
{
    PyObject *found = PyDict_New();
    int failed = !found;
    (void)module;
    (void)unused;
    for (int k = 0; !failed && k < SW_KERNEL_COUNT; ++k) {
        PyObject *count = PyLong_FromSize_t(sw_kernel_case_count((sw_kernel)k));
        failed = !count || PyDict_SetItemString(found, kernel_name(k), count) < 0;
        Py_XDECREF(count);
    }
    if (failed)
        Py_XDECREF(found);
    return failed ? NULL : found;
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
    PyObject *sentences = PyList_New(0);
    int failed = !sentences;
    for (size_t i = 0; !failed && i < SW_KERNEL_CHECK_SENTENCES && i < result->differences; ++i) {
        PyObject *text = PyUnicode_DecodeUTF8(
            result->sentence[i], (Py_ssize_t)strlen(result->sentence[i]), "backslashreplace");
        failed = !text || PyList_Append(sentences, text) < 0;
        Py_XDECREF(text);
    }
    if (failed) {
        Py_XDECREF(sentences);
        return NULL;
    }
    return Py_BuildValue("{s:n,s:n,s:n,s:N}", "cases", (Py_ssize_t)result->cases, "launches",
                         (Py_ssize_t)result->launches, "differences",
                         (Py_ssize_t)result->differences, "sentences", sentences);
}

static PyObject *device_kernel_check(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"comm", "kernel", "first", "step", "strict", NULL};
    PyObject *comm;
    const char *kernel;
    Py_ssize_t first = 0, step = 1;
    int strict = 0;
    sw_kernel_check_config config = {.timeout_ns = TIMEOUT_NS};
    sw_kernel_check_result result;
    sw_kernel_loan loan;
    sw_error err;
    sw_status status;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Os|nnp:device_kernel_check", names, &comm,
                                     &kernel, &first, &step, &strict) ||
        !find_kernel(kernel, &config.kernel))
        return NULL;
    if (first < 0 || step < 1)
        return PyErr_Format(PyExc_ValueError,
                            "device_kernel_check: first must be at least 0 and step at least 1, "
                            "not %zd and %zd",
                            first, step);
    config.first = (size_t)first;
    config.step = (size_t)step;
    config.strict = strict != 0;
    if (borrow(comm, &loan) < 0)
        return NULL;
    if (!loan.set)
        return PyErr_Format(PyExc_TypeError, "comm must be a DeviceComm, got None");
    Py_BEGIN_ALLOW_THREADS
    status = sw_kernel_check(loan.set, &config, loan.stream, &result, &err);
    Py_END_ALLOW_THREADS
    return status == SW_OK ? result_of(&result) : raise(&err);
}

static PyMethodDef functions[] = {
    {"device_kernel_cases", device_kernel_cases, METH_NOARGS,
     "device_kernel_cases($module, /)\n--\n\nReturn the number of cases of each kernel, by its "
     "name."},
    {"device_kernel_check", (PyCFunction)(void (*)(void))device_kernel_check,
     METH_VARARGS | METH_KEYWORDS,
     "device_kernel_check($module, comm, kernel, first=0, step=1, strict=False)\n--\n\n"
     "Compare a kernel with its reference on the GPU, case by case."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    (void)module;
    return borrow(Py_None, &engine);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_engine_check",
    .m_doc = "The comparison of the engine's GPU kernels with their references.",
    .m_methods = functions,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__engine_check(void)
{
    return PyModuleDef_Init(&module_definition);
}
