/* device_table.c - converts lists of tuples to the tables of grouped launches. */
#include <stdlib.h>

#include "python/device_object.h"

void *sw_py_device_table(PyObject *list, sw_py_row_fn *read, size_t row_bytes)
{
    Py_ssize_t count = PyList_Size(list);
    char *table = calloc((size_t)count + 1, row_bytes);
    if (!table)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *row = PyList_GetItem(list, i);
        if (!PyTuple_Check(row) || !read(row, table + (size_t)i * row_bytes)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a row of the table must be a tuple");
            free(table);
            return NULL;
        }
    }
    return table;
}
