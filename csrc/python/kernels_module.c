/* kernels_module.c - the module's functions: instruction sets, the fold itself for tests, limits,
 * self_test. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/sample.h"
#include "kernels/crc32c.h"
#include "platform/limits.h"
#include "platform/memory.h"
#include "python/engine.h"

enum { SELF_TEST_RANKS = 3, SELF_TEST_NUMEL = 70001, MAX_TABLES = 8 };

static PyObject *instruction_sets(PyObject *module, PyObject *unused)
{
    const sw_kernel_table *tables[MAX_TABLES];
    size_t count = sw_kernels_available(tables, MAX_TABLES);
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (size_t i = 0; list && i < count; ++i) {
        PyObject *name = PyUnicode_FromString(tables[i]->name);
        if (!name || PyList_Append(list, name) < 0)
            ENGINE_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *instruction_set(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyUnicode_FromString(sw_kernels()->name);
}

static PyObject *force_instruction_set(PyObject *module, PyObject *args)
{
    const char *name;
    sw_error err;
    if (!PyArg_ParseTuple(args, "z:force_instruction_set", &name))
        return NULL;
    if (sw_kernels_force(name, &err) != SW_OK)
        return sw_py_raise(PyModule_GetState(module), &err, NULL);
    Py_RETURN_NONE;
}

static PyObject *fold(PyObject *module, PyObject *args)
{
    PyObject *destination, *sources;
    Py_ssize_t numel;
    const char *dtype_name, *op_name;
    const void *source[64];
    sw_error err;
    if (!PyArg_ParseTuple(args, "OOnss:fold", &destination, &sources, &numel, &dtype_name,
                          &op_name))
        return NULL;
    Py_ssize_t count = PySequence_Size(sources);
    sw_dtype dtype = sw_dtype_from_name(dtype_name);
    sw_redop op = 0;
    while (op < SW_REDOP_COUNT && strcmp(sw_redop_name(op), op_name) != 0)
        op++;
    if (count < 1 || count > 64 || numel < 0 || dtype == SW_DTYPE_COUNT || op == SW_REDOP_COUNT)
        return PyErr_Format(
            PyExc_ValueError,
            "fold: 1 to 64 sources, a dtype and an op of the engine; got %zd, %s, %s", count,
            dtype_name, op_name);
    if (sw_redop_check(op, dtype, &err) != SW_OK)
        return sw_py_raise(PyModule_GetState(module), &err, NULL);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PySequence_GetItem(sources, i);
        source[i] = item ? PyLong_AsVoidPtr(item) : NULL;
        Py_XDECREF(item);
    }
    void *target = PyLong_AsVoidPtr(destination);
    if (PyErr_Occurred())
        return NULL;
    sw_kernels()->fold[dtype](&target, 1, source, (int)count, (size_t)numel, 1.0 / (double)count,
                              op);
    Py_RETURN_NONE;
}

static PyObject *limit_value(uint64_t value)
{
    if (value == UINT64_MAX)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(value);
}

static PyObject *host_limits(PyObject *module, PyObject *unused)
{
    sw_limits limits;
    (void)module;
    (void)unused;
    sw_limits_read(&limits);
    return Py_BuildValue(
        "{s:N,s:N,s:N,s:N}", "memory_max_bytes", limit_value(limits.memory_max_bytes),
        "memory_current_bytes", limit_value(limits.memory_current_bytes), "fsize_bytes",
        limit_value(limits.file_size_bytes), "nofile", limit_value(limits.open_files));
}

typedef struct test_rank {
    sw_local_group *group;
    int rank;
    float *data;
    sw_status status;
    sw_error err;
} test_rank;

static void *run_test_rank(void *argument)
{
    test_rank *self = argument;
    sw_comm *comm = NULL;
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_SUM,
                .numel = SELF_TEST_NUMEL,
                .data = self->data,
                .label = "self test"};
    self->status = sw_local_comm_create(self->group, self->rank, &comm, &self->err);
    if (self->status == SW_OK)
        self->status = comm->ops->run(comm, &op, &self->err);
    if (comm)
        comm->ops->destroy(comm);
    return NULL;
}

/* Aborts for a rank whose thread could not start, so that the others do not wait for it. */
static void give_up(const test_rank *self, int cause, sw_error *err)
{
    sw_comm *comm;
    sw_error told;
    sw_error_set(err, SW_E_OS, cause, "self_test: thread %d of %d could not be started: %s",
                 self->rank, SELF_TEST_RANKS, strerror(cause));
    if (sw_local_comm_create(self->group, self->rank, &comm, &told) != SW_OK)
        return; /* the abort reaches the other ranks too */
    comm->ops->abort(comm, err);
    comm->ops->destroy(comm);
}

static bool self_test_once(test_rank *ranks, float *data, sw_error *err)
{
    pthread_t threads[SELF_TEST_RANKS];
    int started = 0, cause = 0;
    bool right = true;
    for (int r = 0; r < SELF_TEST_RANKS; ++r) {
        ranks[r].rank = r;
        ranks[r].data = data + (size_t)r * SELF_TEST_NUMEL;
        for (int i = 0; i < SELF_TEST_NUMEL; ++i)
            ranks[r].data[i] = (float)(i % 1000 + r);
    }
    for (; started < SELF_TEST_RANKS && cause == 0; started += cause == 0)
        cause = pthread_create(&threads[started], NULL, run_test_rank, &ranks[started]);
    if (cause != 0)
        give_up(&ranks[started], cause, err);
    for (int r = 0; r < started; ++r) {
        pthread_join(threads[r], NULL);
        if (cause == 0 && ranks[r].status != SW_OK)
            *err = ranks[r].err;
        right &= ranks[r].status == SW_OK;
    }
    for (int i = 0; right && i < SELF_TEST_RANKS * SELF_TEST_NUMEL; ++i)
        right = data[i] == (float)(3 * (i % SELF_TEST_NUMEL % 1000) + 3);
    return right && cause == 0;
}

static PyObject *self_test(PyObject *module, PyObject *unused)
{
    engine_state *state = PyModule_GetState(module);
    test_rank ranks[SELF_TEST_RANKS] = {0};
    sw_local_group *group = NULL;
    sw_error err = {.message = "self_test: an all_reduce of 3 threads gave a wrong sum"};
    bool right = false;
    (void)unused;
    float *data = calloc((size_t)SELF_TEST_RANKS * SELF_TEST_NUMEL, sizeof *data);
    if (!data)
        return PyErr_NoMemory();
    if (sw_local_group_create(SELF_TEST_RANKS, &group, &err) == SW_OK) {
        for (int r = 0; r < SELF_TEST_RANKS; ++r)
            ranks[r].group = group;
        Py_BEGIN_ALLOW_THREADS
        right = self_test_once(ranks, data, &err);
        Py_END_ALLOW_THREADS
        sw_local_group_destroy(group);
    }
    free(data);
    if (!right) {
        PyErr_SetString(state->error, err.message);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *crc32c(PyObject *module, PyObject *args)
{
    unsigned long long address;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kn:crc32c", &address, &size))
        return NULL;
    if (size < 0)
        return PyErr_Format(PyExc_ValueError, "crc32c: nbytes must be at least 0, got %zd", size);
    return PyLong_FromUnsignedLong(sw_crc32c(0, (const void *)(uintptr_t)address, (size_t)size));
}

static PyObject *sample_crc32c(PyObject *module, PyObject *args)
{
    unsigned long long address;
    Py_ssize_t size, stride;
    (void)module;
    if (!PyArg_ParseTuple(args, "Knn:sample_crc32c", &address, &size, &stride))
        return NULL;
    if (size < 0 || stride < 1)
        return PyErr_Format(PyExc_ValueError,
                            "sample_crc32c: nbytes must be at least 0 and stride at least 1, got "
                            "%zd and %zd",
                            size, stride);
    return PyLong_FromUnsignedLong(
        sw_sample_crc32c((const void *)(uintptr_t)address, (size_t)size, (size_t)stride));
}

static PyObject *prefer_huge_pages(PyObject *module, PyObject *args)
{
    unsigned long long address, size_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "KK:prefer_huge_pages", &address, &size_bytes))
        return NULL;
    sw_memory_prefer_huge((uint8_t *)(uintptr_t)address, (size_t)size_bytes);
    Py_RETURN_NONE;
}

PyMethodDef sw_py_kernel_functions[] = {
    {"instruction_sets", instruction_sets, METH_NOARGS,
     "instruction_sets($module, /)\n--\n\nReturn the kernel tables that run here, best last."},
    {"instruction_set", instruction_set, METH_NOARGS,
     "instruction_set($module, /)\n--\n\nReturn the kernel table in use."},
    {"force_instruction_set", force_instruction_set, METH_VARARGS,
     "force_instruction_set($module, name, /)\n--\n\nUse another kernel table, for debugging."},
    {"fold", fold, METH_VARARGS,
     "fold($module, destination, sources, numel, dtype, op, /)\n--\n\n"
     "Run the fold kernel on addresses."},
    {"crc32c", crc32c, METH_VARARGS,
     "crc32c($module, address, nbytes, /)\n--\n\nReturn the checksum that checkpoints use."},
    {"sample_crc32c", sample_crc32c, METH_VARARGS,
     "sample_crc32c($module, address, nbytes, stride, /)\n--\n\n"
     "Return the checksum of sampled cache lines of some memory."},
    {"prefer_huge_pages", prefer_huge_pages, METH_VARARGS,
     "prefer_huge_pages($module, address, nbytes, /)\n--\n\n"
     "Request huge pages for untouched memory; a hint."},
    {"host_limits", host_limits, METH_NOARGS,
     "host_limits($module, /)\n--\n\nReturn the limits of this process."},
    {"self_test", self_test, METH_NOARGS,
     "self_test($module, /)\n--\n\n"
     "Run an all_reduce of threads; raise Error if its result is wrong."},
    {NULL, NULL, 0, NULL},
};
