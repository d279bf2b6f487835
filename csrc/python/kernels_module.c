/* kernels_module.c - the module's functions: instruction sets, the fold itself for tests, limits,
 * self_test. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/save.h"
#include "kernels/crc32c.h"
#include "platform/limits.h"
#include "platform/memory.h"
#include "python/method.h"

enum { SELF_TEST_RANKS = 3, SELF_TEST_NUMEL = 70001, MAX_TABLES = 8 };

static PyObject *instruction_sets(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    const sw_kernel_table *tables[MAX_TABLES];
    size_t count = sw_kernels_available(tables, MAX_TABLES);
    return SW_PY_LIST(i, count, PyUnicode_FromString(tables[i]->name));
}

SW_PY_VALUE(instruction_set, PyObject, "instruction_set", true,
            PyUnicode_FromString(sw_kernels()->name))
SW_PY_METHOD(force_instruction_set, PyObject, "force_instruction_set name:z", true,
             sw_kernels_force(a[0].s, &err), sw_py_finish(self, status, &err))

static bool check_fold(size_t count)
{
    return (count >= 1 && count <= 64) ||
           sw_py_refuse(PyExc_ValueError, "fold: sources must be 1 to 64, got %zu", count);
}

static sw_status run_fold(const sw_py_arg *a, const sw_py_table *sources, sw_error *err)
{
    sw_dtype dtype = a[3].dtype;
    sw_redop op = (sw_redop)a[4].i;
    void *target = a[0].address;
    SW_TRY(sw_redop_check(op, dtype, err));
    sw_kernels()->fold[dtype](&target, 1, sources->rows, (int)sources->count, a[2].size,
                              1.0 / (double)sources->count, op);
    return SW_OK;
}

SW_PY_METHOD_ON_ROWS(fold, PyObject,
                     "fold destination:A sources:O numel:N dtype:T op:(sum|mean|min|max)", , 1,
                     "fold source:A", void *, sw_py_fill_address, check_fold(rows.count),
                     run_fold(a, &rows, &err), sw_py_finish(self, status, &err))

static PyObject *limit_value(uint64_t value)
{
    if (value == UINT64_MAX)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(value);
}

static PyObject *host_limits(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    sw_limits limits;
    sw_limits_read(&limits);
    return Py_BuildValue(
        "{s:N,s:N,s:K,s:N,s:N}", "memory_max_bytes", limit_value(limits.memory_max_bytes),
        "memory_current_bytes", limit_value(limits.memory_current_bytes), "memory_group",
        (unsigned long long)limits.memory_group, "fsize_bytes", limit_value(limits.file_size_bytes),
        "nofile", limit_value(limits.open_files));
}

typedef struct test_rank {
    sw_comm *comm; /* owned */
    pthread_t thread;
    float *data;
    sw_status status;
    sw_error err;
} test_rank;

static void *run_test_rank(void *argument)
{
    test_rank *self = argument;
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_SUM,
                .numel = SELF_TEST_NUMEL,
                .data = self->data,
                .label = "self test"};
    self->status = self->comm->ops->run(self->comm, &op, &self->err);
    return NULL;
}

/* Starts a thread for each rank. A rank whose thread cannot start aborts: the others do not wait.
 */
static int start_ranks(test_rank *ranks, sw_error *err)
{
    for (int r = 0; r < SELF_TEST_RANKS; ++r) {
        int cause = pthread_create(&ranks[r].thread, NULL, run_test_rank, &ranks[r]);
        if (cause == 0)
            continue;
        sw_error_set(err, SW_E_OS, cause, "self_test: thread %d of %d could not be started: %s", r,
                     SELF_TEST_RANKS, strerror(cause));
        ranks[r].comm->ops->abort(ranks[r].comm, err);
        return r;
    }
    return SELF_TEST_RANKS;
}

static bool reduce_and_compare(test_rank *ranks, float *data, sw_error *err)
{
    for (int i = 0; i < SELF_TEST_RANKS * SELF_TEST_NUMEL; ++i)
        data[i] = (float)(i % SELF_TEST_NUMEL % 1000 + i / SELF_TEST_NUMEL);
    int started = start_ranks(ranks, err);
    bool right = started == SELF_TEST_RANKS;
    for (int r = 0; r < started; ++r) {
        pthread_join(ranks[r].thread, NULL);
        if (right && ranks[r].status != SW_OK)
            *err = ranks[r].err;
        right &= ranks[r].status == SW_OK;
    }
    for (int i = 0; right && i < SELF_TEST_RANKS * SELF_TEST_NUMEL; ++i)
        right = data[i] == (float)(3 * (i % SELF_TEST_NUMEL % 1000) + 3);
    return right;
}

static bool self_test_once(float *data, sw_error *err)
{
    test_rank ranks[SELF_TEST_RANKS] = {0};
    sw_local_group *group = NULL;
    bool right = sw_local_group_create(SELF_TEST_RANKS, &group, err) == SW_OK;
    for (int r = 0; right && r < SELF_TEST_RANKS; ++r) {
        ranks[r].data = data + (size_t)r * SELF_TEST_NUMEL;
        right = sw_local_comm_create(group, r, &ranks[r].comm, err) == SW_OK;
    }
    right = right && reduce_and_compare(ranks, data, err);
    for (int r = 0; r < SELF_TEST_RANKS && ranks[r].comm; ++r)
        ranks[r].comm->ops->destroy(ranks[r].comm);
    sw_local_group_destroy(group);
    return right;
}

static PyObject *self_test(PyObject *module, PyObject *Py_UNUSED(unused))
{
    sw_error err = {.message = "self_test: an all_reduce of 3 threads gave a wrong sum"};
    bool right = false;
    float *data = calloc((size_t)SELF_TEST_RANKS * SELF_TEST_NUMEL, sizeof *data);
    if (!data)
        return PyErr_NoMemory();
    SW_PY_DO_WITHOUT_GIL(right = self_test_once(data, &err));
    free(data);
    return right ? sw_py_none() : PyErr_Format(sw_py_state_of(module)->error, "%s", err.message);
}

SW_PY_VALUE(crc32c, PyObject, "crc32c address:A nbytes:N", true,
            PyLong_FromUnsignedLong(sw_crc32c(0, a[0].address, a[1].size)))

SW_PY_VALUE(sample_crc32c, PyObject, "sample_crc32c address:A nbytes:N stride:n",
            a[2].n >= 1 ||
                sw_py_refuse(PyExc_ValueError, "sample_crc32c: stride must be at least 1, got %zd",
                             a[2].n),
            PyLong_FromUnsignedLong(sw_sample_crc32c(a[0].address, a[1].size, a[2].size)))
SW_PY_VALUE(prefer_huge_pages, PyObject, "prefer_huge_pages address:A nbytes:N", true,
            (sw_memory_prefer_huge(a[0].address, a[1].size), sw_py_none()))

PyMethodDef sw_py_kernel_functions[] = {
    SW_PY_FUNCTION_AS(instruction_sets, METH_NOARGS, "/",
                      "Return the kernel tables that run here, best last."),
    SW_PY_FUNCTION(instruction_set, "/", "Return the kernel table in use."),
    SW_PY_FUNCTION(force_instruction_set, "name, /", "Use another kernel table, for debugging."),
    SW_PY_FUNCTION(fold, "destination, sources, numel, dtype, op, /",
                   "Run the fold kernel on addresses of numel elements: destination = op over "
                   "sources in order."),
    SW_PY_FUNCTION(crc32c, "address, nbytes, /", "Return the checksum that checkpoints use."),
    SW_PY_FUNCTION(sample_crc32c, "address, nbytes, stride, /",
                   "Return the checksum of sampled cache lines of some memory."),
    SW_PY_FUNCTION(prefer_huge_pages, "address, nbytes, /",
                   "Request huge pages for untouched memory; a hint."),
    SW_PY_FUNCTION_AS(host_limits, METH_NOARGS, "/", "Return the limits of this process."),
    SW_PY_FUNCTION_AS(self_test, METH_NOARGS, "/",
                      "Run an all_reduce of threads; raise Error if its result is wrong."),
    {NULL, NULL, 0, NULL},
};
