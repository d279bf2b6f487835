/* device_reducer_type.c - shardwright._engine.DeviceReducer: where gradients lie in a GPU's
 * buckets, and the events that turn a bucket into its mean. What a `.grad` is, and when a round
 * begins and ends, is Python's (device_rounds.py). */
#include <stdlib.h>
#include <string.h>

#include "python/device_object.h"
#include "reduce/device_reducer.h"

typedef struct device_reducer_object {
    PyObject_HEAD device_comm_object *comm; /* owned */
    sw_device_reducer *reducer;             /* owned */
    sw_layout layout;                       /* owned */
} device_reducer_object;

static bool check_made(device_reducer_object *self)
{
    if (self->reducer)
        return true;
    PyErr_SetString(sw_py_state_of((PyObject *)self)->error, "the reducer was not initialised");
    return false;
}

/* ---- life ---- */

static int create(device_reducer_object *self, const sw_py_rows *rows, size_t cap_bytes,
                  sw_device_reducer_config *config)
{
    sw_error err;
    sw_status status;
    if (!sw_py_device_enter(self->comm))
        return -1;
    config->comm = self->comm->comm;
    config->gradient_count = rows->count;
    status =
        sw_layout_init(&self->layout, rows->params, rows->count, config->comm->peers->world_size,
                       (sw_layout_caps){.bytes = cap_bytes}, &err);
    sw_device_bucket_spec *specs = calloc(self->layout.bucket_count + 1, sizeof *specs);
    for (size_t b = 0; specs && b < self->layout.bucket_count; ++b)
        specs[b] = (sw_device_bucket_spec){.numel = self->layout.bucket[b].numel,
                                           .dtype = self->layout.bucket[b].dtype};
    config->buckets = specs;
    config->bucket_count = self->layout.bucket_count;
    if (status == SW_OK && specs) {
        Py_BEGIN_ALLOW_THREADS
        status = sw_device_reducer_create(config, &self->reducer, &err);
        Py_END_ALLOW_THREADS
    }
    bool is_short = !specs;
    free(specs);
    PyObject *done = sw_py_device_finish(self->comm, status, &err);
    Py_XDECREF(done);
    if (done && is_short)
        PyErr_NoMemory();
    return done && !is_short ? 0 : -1;
}

static int reducer_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"comm",   "parameters", "bucket_cap_bytes", "reduce", "deterministic",
                            "sliced", "wire",       "slices",           "lent",   NULL};
    device_reducer_object *self = (device_reducer_object *)op;
    PyObject *comm, *parameters, *owners = Py_None;
    Py_ssize_t cap;
    const char *reduce = "mean";
    int deterministic = 0, sliced = 0, lent = 0;
    const char *wire = NULL;
    bool sums;
    sw_py_rows rows;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOn|$sppzOp:DeviceReducer", names, &comm,
                                     &parameters, &cap, &reduce, &deterministic, &sliced, &wire,
                                     &owners, &lent))
        return -1;
    if (self->comm || !PyObject_TypeCheck(comm, sw_py_state_of(op)->device_comm_type)) {
        PyErr_SetString(PyExc_TypeError, "DeviceReducer: comm must be a DeviceComm, and a "
                                         "DeviceReducer is initialised once");
        return -1;
    }
    if (cap <= 0) {
        PyErr_Format(PyExc_ValueError, "DeviceReducer: bucket_cap_bytes must be positive, got %zd",
                     cap);
        return -1;
    }
    if (sw_py_parse_reduce(reduce, &sums) < 0)
        return -1;
    Py_INCREF(comm);
    self->comm = (device_comm_object *)comm;
    sw_device_reducer_config config = {.op = sums ? SW_REDOP_SUM : SW_REDOP_MEAN,
                                       .deterministic = deterministic != 0,
                                       .sliced = sliced != 0,
                                       .is_lent = lent != 0,
                                       .wire = wire ? sw_dtype_from_name(wire) : SW_DTYPE_COUNT};
    sw_py_slices slices;
    const sw_peers *peers = self->comm->comm ? self->comm->comm->peers : NULL;
    if (sw_py_slices_init(&slices, owners, peers ? peers->world_size : 0) < 0)
        return -1;
    config.slices = sw_py_slices_get(&slices);
    int result = sw_py_rows_init(&rows, parameters);
    if (result == 0)
        result = create(self, &rows, (size_t)cap, &config);
    sw_py_rows_fini(&rows);
    sw_py_slices_fini(&slices);
    return result;
}

static void destroy(void *reducer)
{
    sw_device_reducer_destroy(reducer);
}

/* In a forked child everything stays: its calls would fail, the memory is the parent's. */
static void reducer_dealloc(PyObject *op)
{
    device_reducer_object *self = (device_reducer_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->reducer && sw_py_device_is_own(self->comm))
        sw_py_device_destroy(self->comm, destroy, self->reducer);
    sw_layout_fini(&self->layout);
    Py_XDECREF(self->comm);
    PyObject_Free(op);
    Py_DECREF(type);
}

/* ---- where things lie ---- */

static const sw_layout_bucket *read_bucket(device_reducer_object *self, PyObject *value)
{
    size_t index = PyLong_AsSize_t(value);
    if (PyErr_Occurred() || !check_made(self))
        return NULL;
    if (index < self->layout.bucket_count)
        return &self->layout.bucket[index];
    PyErr_Format(PyExc_IndexError, "bucket index must be in [0, %zu), got %zu",
                 self->layout.bucket_count, index);
    return NULL;
}

static PyObject *reducer_bucket_shape(PyObject *op, PyObject *position)
{
    const sw_layout_bucket *bucket = read_bucket((device_reducer_object *)op, position);
    if (!bucket)
        return NULL;
    return Py_BuildValue("nnsO", (Py_ssize_t)bucket->offset_bytes, (Py_ssize_t)bucket->numel,
                         sw_dtype_name(bucket->dtype), bucket->trainable ? Py_True : Py_False);
}

static PyObject *reducer_bucket_parameters(PyObject *op, PyObject *position)
{
    device_reducer_object *self = (device_reducer_object *)op;
    const sw_layout_bucket *bucket = read_bucket(self, position);
    PyObject *list = bucket ? PyList_New(0) : NULL;
    for (size_t i = 0; list && i < bucket->count; ++i) {
        PyObject *item = PyLong_FromSize_t(self->layout.order[bucket->first + i]);
        if (!item || PyList_Append(list, item) < 0)
            ENGINE_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *reducer_place(PyObject *op, PyObject *position)
{
    device_reducer_object *self = (device_reducer_object *)op;
    size_t index = PyLong_AsSize_t(position);
    if (PyErr_Occurred() || !check_made(self))
        return NULL;
    if (index >= self->layout.param_count) {
        PyErr_Format(PyExc_IndexError, "parameter index must be in [0, %zu), got %zu",
                     self->layout.param_count, index);
        return NULL;
    }
    const sw_layout_place *place = &self->layout.place[index];
    return Py_BuildValue("nnn", (Py_ssize_t)place->bucket, (Py_ssize_t)place->begin,
                         (Py_ssize_t)place->numel);
}

static PyObject *reducer_adopt(PyObject *op, PyObject *args)
{
    device_reducer_object *self = (device_reducer_object *)op;
    Py_ssize_t index;
    PyObject *address;
    sw_error err;
    if (!PyArg_ParseTuple(args, "nO:adopt", &index, &address) || !check_made(self))
        return NULL;
    void *data = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred() || !sw_py_device_enter(self->comm))
        return NULL;
    sw_status status = sw_device_reducer_adopt(self->reducer, (size_t)index, data, &err);
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *reducer_lend(PyObject *op, PyObject *args)
{
    device_reducer_object *self = (device_reducer_object *)op;
    unsigned long long contributions, compressed;
    sw_error err;
    if (!PyArg_ParseTuple(args, "KK:lend", &contributions, &compressed) || !check_made(self) ||
        !sw_py_device_enter(self->comm))
        return NULL;
    sw_status status = sw_device_reducer_lend(self->reducer, sw_py_address(contributions),
                                              sw_py_address(compressed), &err);
    return sw_py_device_finish(self->comm, status, &err);
}

/* ---- a step ---- */

/* A call that takes nothing but a stream. */
typedef sw_status stream_call(sw_device_reducer *reducer, sw_stream *stream, sw_error *err);

static PyObject *call_on_stream(PyObject *op, PyObject *stream_value, stream_call *call)
{
    device_reducer_object *self = (device_reducer_object *)op;
    sw_stream *stream;
    sw_error err;
    if (!check_made(self) || !sw_py_device_stream(stream_value, &stream) ||
        !sw_py_device_enter(self->comm))
        return NULL;
    return sw_py_device_finish(self->comm, call(self->reducer, stream, &err), &err);
}

static PyObject *reducer_begin(PyObject *op, PyObject *stream)
{
    return call_on_stream(op, stream, sw_device_reducer_begin);
}

static PyObject *reducer_release(PyObject *op, PyObject *stream)
{
    return call_on_stream(op, stream, sw_device_reducer_release);
}

/* Every bucket that takes part. */
static sw_status take_all(sw_device_reducer *reducer, sw_stream *stream, sw_error *err)
{
    for (size_t b = 0; b < sw_device_reducer_bucket_count(reducer); ++b)
        if (sw_device_reducer_takes_part(reducer, b))
            SW_TRY(sw_device_reducer_take(reducer, b, stream, err));
    return SW_OK;
}

static PyObject *reducer_take(PyObject *op, PyObject *stream)
{
    return call_on_stream(op, stream, take_all);
}

static PyObject *reducer_divide_by(PyObject *op, PyObject *value)
{
    device_reducer_object *self = (device_reducer_object *)op;
    sw_error err;
    int count = (int)PyLong_AsLong(value);
    if (PyErr_Occurred() || !check_made(self) || !sw_py_device_enter(self->comm))
        return NULL;
    return sw_py_device_finish(self->comm, sw_device_reducer_divide_by(self->reducer, count, &err),
                               &err);
}

static PyObject *reducer_leave_out(PyObject *op, PyObject *trains)
{
    device_reducer_object *self = (device_reducer_object *)op;
    sw_error err;
    if (!check_made(self) || !sw_py_device_enter(self->comm))
        return NULL;
    int world_size = self->comm->comm->peers->world_size;
    if (!PyBytes_Check(trains) || PyBytes_Size(trains) != world_size) {
        sw_py_device_leave(self->comm);
        PyErr_Format(PyExc_ValueError, "leave_out: trains must be %d bytes, one a rank",
                     world_size);
        return NULL;
    }
    sw_status status =
        sw_device_reducer_leave_out(self->reducer, (const uint8_t *)PyBytes_AsString(trains), &err);
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *reducer_post(PyObject *op, PyObject *args)
{
    device_reducer_object *self = (device_reducer_object *)op;
    Py_ssize_t index;
    PyObject *stream_value;
    sw_stream *stream;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "nO:post", &index, &stream_value) || !check_made(self) ||
        !sw_py_device_stream(stream_value, &stream) || !sw_py_device_enter(self->comm))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_reducer_post(self->reducer, (size_t)index, stream, &err);
    Py_END_ALLOW_THREADS
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *reducer_reserve(PyObject *op, PyObject *args)
{
    device_reducer_object *self = (device_reducer_object *)op;
    Py_ssize_t place;
    PyObject *stream_value;
    sw_stream *stream;
    sw_error err;
    if (!PyArg_ParseTuple(args, "nO:reserve", &place, &stream_value) || !check_made(self) ||
        !sw_py_device_stream(stream_value, &stream) || !sw_py_device_enter(self->comm))
        return NULL;
    return sw_py_device_finish(
        self->comm, sw_device_reducer_reserve(self->reducer, (size_t)place, stream, &err), &err);
}

/* A list of (begin, end); NULL with an exception. */
static sw_device_run *read_runs(PyObject *list, size_t *count)
{
    *count = (size_t)PyList_Size(list);
    sw_device_run *runs = calloc(*count + 1, sizeof *runs);
    if (!runs) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < *count; ++i) {
        PyObject *item = PyList_GetItem(list, (Py_ssize_t)i);
        Py_ssize_t begin, end;
        if (!item || !PyTuple_Check(item) ||
            !PyArg_ParseTuple(item, "nn;a run is (begin, end)", &begin, &end)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a run is a tuple (begin, end)");
            free(runs);
            return NULL;
        }
        runs[i] = (sw_device_run){.begin = (size_t)begin, .end = (size_t)end};
    }
    return runs;
}

static PyObject *reducer_post_slice(PyObject *op, PyObject *args)
{
    device_reducer_object *self = (device_reducer_object *)op;
    Py_ssize_t index;
    PyObject *address, *list, *stream_value;
    size_t count;
    sw_stream *stream;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "nOO!O:post_slice", &index, &address, &PyList_Type, &list,
                          &stream_value) ||
        !check_made(self) || !sw_py_device_stream(stream_value, &stream))
        return NULL;
    void *data = PyLong_AsVoidPtr(address);
    sw_device_run *standing = PyErr_Occurred() ? NULL : read_runs(list, &count);
    if (!standing)
        return NULL;
    if (!sw_py_device_enter(self->comm)) {
        free(standing);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_reducer_post_slice(self->reducer, (size_t)index, data, standing, count,
                                          stream, &err);
    Py_END_ALLOW_THREADS
    free(standing);
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *reducer_finish(PyObject *op, PyObject *args)
{
    device_reducer_object *self = (device_reducer_object *)op;
    PyObject *used, *value;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "OO:finish", &used, &value) || !check_made(self))
        return NULL;
    const uint64_t tag = value == Py_None ? 0 : (uint64_t)PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred())
        return NULL;
    if (!PyByteArray_Check(used) || (size_t)PyByteArray_Size(used) != self->layout.param_count) {
        PyErr_Format(PyExc_ValueError, "finish: used must be a bytearray of %zu",
                     self->layout.param_count);
        return NULL;
    }
    if (!sw_py_device_enter(self->comm))
        return NULL;
    Py_INCREF(used);
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_reducer_finish(self->reducer, (const uint8_t *)PyByteArray_AsString(used),
                                      value == Py_None ? NULL : &tag, &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(used);
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *reducer_check(PyObject *op, PyObject *unused)
{
    device_reducer_object *self = (device_reducer_object *)op;
    uint64_t tag = 0, unlike = 0;
    sw_error err;
    (void)unused;
    if (!check_made(self) || !sw_py_device_enter(self->comm))
        return NULL;
    sw_status status = sw_device_reducer_check(self->reducer, &tag, &unlike, &err);
    bool differs = status == SW_E_MISMATCH;
    PyObject *done = sw_py_device_finish(self->comm, differs ? SW_OK : status, &err);
    if (!done || !differs)
        return done;
    Py_DECREF(done);
    return Py_BuildValue("KK", (unsigned long long)tag, (unsigned long long)unlike);
}

static PyObject *reducer_used_by_any(PyObject *op, PyObject *unused)
{
    device_reducer_object *self = (device_reducer_object *)op;
    const uint8_t *any = NULL;
    sw_error err;
    sw_status status;
    (void)unused;
    if (!check_made(self) || !sw_py_device_enter(self->comm))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_reducer_used_by_any(self->reducer, &any, &err);
    Py_END_ALLOW_THREADS
    PyObject *done = sw_py_device_finish(self->comm, status, &err);
    Py_XDECREF(done);
    return done ? PyBytes_FromStringAndSize((const char *)any, (Py_ssize_t)self->layout.param_count)
                : NULL;
}

static PyObject *reducer_get_count(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((device_reducer_object *)op)->layout.bucket_count);
}

static PyMethodDef reducer_methods[] = {
    {"bucket_shape", reducer_bucket_shape, METH_O,
     "bucket_shape(bucket)\n--\n\n(offset_bytes, numel, dtype, trainable)."},
    {"bucket_parameters", reducer_bucket_parameters, METH_O,
     "bucket_parameters(bucket)\n--\n\nIndices, in memory order."},
    {"place", reducer_place, METH_O,
     "place(index)\n--\n\n(bucket, begin, numel) of a parameter, in elements."},
    {"adopt", reducer_adopt, METH_VARARGS,
     "adopt(bucket, address)\n--\n\nIts memory; it takes part from the next step on."},
    {"lend", reducer_lend, METH_VARARGS,
     "lend(contributions, compressed)\n--\n\nMemory in place of the engine's own."},
    {"divide_by", reducer_divide_by, METH_O,
     "divide_by(count)\n--\n\nMeans divide by so many ranks."},
    {"leave_out", reducer_leave_out, METH_O,
     "leave_out(trains)\n--\n\nOf slices: whether a rank contributes, a byte a rank."},
    {"begin", reducer_begin, METH_O, "begin(stream)\n--\n\nGradients will be written on it."},
    {"post", reducer_post, METH_VARARGS, "post(bucket, stream)\n--\n\nIt is complete on it."},
    {"reserve", reducer_reserve, METH_VARARGS,
     "reserve(place, stream)\n--\n\nIt may be written on the stream for the bucket that is due."},
    {"post_slice", reducer_post_slice, METH_VARARGS,
     "post_slice(bucket, address, standing, stream)\n--\n\nIt is complete there; of a slice the "
     "runs (begin, end) that are on top of the mean."},
    {"finish", reducer_finish, METH_VARARGS,
     "finish(used, tag)\n--\n\nAll are posted; a byte a parameter."},
    {"check", reducer_check, METH_NOARGS,
     "check()\n--\n\n(this rank's tag, where they differ) if ranks finished a step with different "
     "ones, else None."},
    {"take", reducer_take, METH_O, "take(stream)\n--\n\nIt sees all means from now on."},
    {"used_by_any", reducer_used_by_any, METH_NOARGS,
     "used_by_any()\n--\n\nA byte a parameter; waits if this rank left one unused."},
    {"release", reducer_release, METH_O,
     "release(stream)\n--\n\nIt has been given all that reads the means."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reducer_properties[] = {
    {"bucket_count", reducer_get_count, NULL, "buckets, frozen ones included", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot reducer_slots[] = {
    {Py_tp_init, reducer_init},
    {Py_tp_dealloc, reducer_dealloc},
    {Py_tp_methods, reducer_methods},
    {Py_tp_getset, reducer_properties},
    {Py_tp_doc, "Buckets of gradients on a GPU and their mean, ordered by events."},
    {0, NULL},
};

PyType_Spec sw_py_device_reducer_type_spec = {
    .name = "shardwright._engine.DeviceReducer",
    .basicsize = sizeof(device_reducer_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = reducer_slots,
};
