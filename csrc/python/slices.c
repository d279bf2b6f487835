/* slices.c - parses the owners of slices: None, or (of_rank, replica_of_rank), two sequences of
 * world_size numbers. */
#include <stdlib.h>

#include "python/engine.h"

static int read_numbers(PyObject *sequence, int world_size, int *numbers, int *highest)
{
    PyObject *list = PySequence_List(sequence);
    int failed = !list || PyList_Size(list) != world_size;
    *highest = 0;
    for (int r = 0; !failed && r < world_size; ++r) {
        long number = PyLong_AsLong(PyList_GetItem(list, r));
        failed = PyErr_Occurred() || number < 0 || number >= world_size;
        numbers[r] = (int)number;
        *highest = numbers[r] > *highest ? numbers[r] : *highest;
    }
    Py_XDECREF(list);
    return failed ? -1 : 0;
}

/* Returns whether every replica has every slice exactly once; -1 with an exception. */
static int is_complete(const int *slice_of, const int *replica_of, int world_size, int count,
                       int replicas)
{
    bool *seen = calloc((size_t)world_size, sizeof *seen);
    int unique = (long)count * replicas == world_size;
    if (!seen) {
        PyErr_NoMemory();
        return -1;
    }
    for (int r = 0; r < world_size && unique; ++r) {
        bool *place = &seen[replica_of[r] * count + slice_of[r]];
        unique = !*place;
        *place = true;
    }
    free(seen);
    return unique;
}

int sw_py_slices_init(sw_py_slices *slices, PyObject *given, int world_size)
{
    PyObject *slice_of, *replica_of;
    int count, replicas;
    *slices = (sw_py_slices){.numbers = NULL};
    if (given == Py_None)
        return 0;
    slices->numbers = calloc(2 * (size_t)world_size, sizeof *slices->numbers);
    if (!slices->numbers) {
        PyErr_NoMemory();
        return -1;
    }
    int *second = slices->numbers + world_size;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OO", &slice_of, &replica_of) ||
        read_numbers(slice_of, world_size, slices->numbers, &count) < 0 ||
        read_numbers(replica_of, world_size, second, &replicas) < 0 ||
        is_complete(slices->numbers, second, world_size, count + 1, replicas + 1) != 1) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError,
                         "slices must be (of_rank, replica_of_rank), %d numbers each, and every "
                         "replica must have every slice once",
                         world_size);
        sw_py_slices_fini(slices);
        return -1;
    }
    slices->slices =
        (sw_slices){.count = count + 1, .of_rank = slices->numbers, .replica_of_rank = second};
    return 0;
}

void sw_py_slices_fini(sw_py_slices *slices)
{
    free(slices->numbers);
    slices->numbers = NULL;
}

const sw_slices *sw_py_slices_get(const sw_py_slices *slices)
{
    return slices->numbers ? &slices->slices : NULL;
}
