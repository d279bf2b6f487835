/* slices.c - parses the owners of slices: None, or (of_rank, replica_of_rank), two sequences of
 * world_size numbers. */
#include <stdlib.h>

#include "python/engine.h"

/* Reads world_size numbers in [0, world_size). Returns false, perhaps without an exception. */
static bool read_numbers(PyObject *sequence, int world_size, int *numbers, int *highest)
{
    SW_PY_TABLE table = {0};
    bool fits =
        sw_py_table_init(&table, sequence, "slices of_rank:i", sizeof(int), sw_py_fill_int, NULL) &&
        table.count == (size_t)world_size;
    *highest = 0;
    for (int r = 0; fits && r < world_size; ++r) {
        numbers[r] = ((const int *)table.rows)[r];
        fits = numbers[r] >= 0 && numbers[r] < world_size;
        *highest = numbers[r] > *highest ? numbers[r] : *highest;
    }
    return fits;
}

/* Returns true if every replica has every slice exactly once; false, perhaps with an exception. */
static bool is_complete(const sw_slices *slices, int world_size)
{
    int *rank_of = calloc((size_t)world_size, sizeof *rank_of);
    bool is_whole = rank_of && sw_slices_place(slices, world_size, rank_of);
    if (!rank_of)
        PyErr_NoMemory();
    free(rank_of);
    return is_whole;
}

int sw_py_slices_init(sw_py_slices *slices, PyObject *given, int world_size)
{
    sw_py_arg a[2];
    int last, last_replica;
    *slices = (sw_py_slices){.numbers = NULL};
    if (given == Py_None)
        return 0;
    slices->numbers = calloc(2 * (size_t)world_size, sizeof *slices->numbers);
    if (!slices->numbers) {
        PyErr_NoMemory();
        return -1;
    }
    int *second = slices->numbers + world_size;
    if (PyTuple_Check(given) && sw_py_read("slices of_rank:O replica_of_rank:O", given, NULL, a) &&
        read_numbers(a[0].o, world_size, slices->numbers, &last) &&
        read_numbers(a[1].o, world_size, second, &last_replica)) {
        slices->slices =
            (sw_slices){.count = last + 1, .of_rank = slices->numbers, .replica_of_rank = second};
        if (is_complete(&slices->slices, world_size))
            slices->given = &slices->slices;
    }
    if (slices->given)
        return 0;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError,
                     "slices must be (of_rank, replica_of_rank), %d numbers each, and every "
                     "replica must have every slice once",
                     world_size);
    return -1;
}

void sw_py_slices_fini(sw_py_slices *slices)
{
    free(slices->numbers);
    slices->numbers = NULL;
}
