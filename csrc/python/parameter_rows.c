/* parameter_rows.c - the rows that a reducer is made from: (name, numel, dtype, requires_grad) per
 * parameter, with an optional fifth, the group whose buckets it shares. */
#include <stdlib.h>
#include <string.h>

#include "python/engine.h"

void sw_py_rows_fini(sw_py_rows *s)
{
    free(s->params);
    free(s->names);
    Py_XDECREF(s->list);
}

int sw_py_rows_init(sw_py_rows *s, PyObject *sequence)
{
    *s = (sw_py_rows){.list = PySequence_List(sequence)};
    if (!s->list)
        return -1;
    s->count = (size_t)PyList_Size(s->list);
    s->params = calloc(s->count + 1, sizeof *s->params);
    s->names = calloc(s->count + 1, sizeof *s->names);
    if (!s->params || !s->names) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < s->count; ++i) {
        Py_ssize_t numel;
        const char *dtype;
        int trainable;
        Py_ssize_t group = 0;
        PyObject *item = PyList_GetItem(s->list, (Py_ssize_t)i);
        if (!PyTuple_Check(item) ||
            !PyArg_ParseTuple(item, "snsp|n;a parameter is (name, numel, dtype, requires_grad)",
                              &s->names[i], &numel, &dtype, &trainable, &group)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError,
                                "a parameter is a tuple (name, numel, dtype, requires_grad)");
            return -1;
        }
        s->params[i] = (sw_layout_param){.numel = (size_t)numel,
                                         .dtype = sw_dtype_from_name(dtype),
                                         .trainable = trainable,
                                         .group = (size_t)group};
        if (numel < 0 || s->params[i].dtype == SW_DTYPE_COUNT) {
            PyErr_Format(
                PyExc_ValueError,
                "parameter '%s': dtype %s with %zd elements is not one the engine moves; a "
                "frozen one may stay out: name it in ignored_params",
                s->names[i], dtype, numel);
            return -1;
        }
    }
    return 0;
}

int sw_py_parse_reduce(const char *name, bool *sums)
{
    *sums = strcmp(name, "sum") == 0;
    if (*sums || strcmp(name, "mean") == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "reduce must be 'mean' or 'sum', got '%s'", name);
    return -1;
}
