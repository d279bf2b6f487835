/* reducer_on_device.c - the parts of a Reducer that only a GPU needs: torch's memory for its
 * buckets, torch's current stream, and which ranks still train. */
#include <string.h>

#include "python/reducer_object.h"

static int check_gpu(reducer_object *self)
{
    if (reducer_check_made(self) < 0)
        return -1;
    if (self->gpu)
        return 0;
    PyErr_SetString(reducer_state_of(self)->error, "only a reducer on a GPU has this method");
    return -1;
}

int sw_py_reducer_use_stream(reducer_object *self)
{
    sw_stream *stream;
    if (!self->gpu || !self->stream) /* nothing is enqueued before attach() */
        return 0;
    PyObject *value = PyObject_CallFunctionObjArgs(self->stream, NULL);
    bool read = value && sw_py_device_stream(value, &stream);
    Py_XDECREF(value);
    if (read)
        sw_reducer_use_stream(self->reducer, stream);
    return read ? 0 : -1;
}

/* Fills `memory` after the reducer is created. */
int sw_py_reducer_init_on_device(reducer_object *self)
{
    self->memory = PyList_New(0);
    self->held = PyList_New(0);
    for (size_t i = 0; self->memory && i < reducer_bucket_count(self) + EXTRAS; ++i)
        if (PyList_Append(self->memory, Py_None) < 0)
            return -1;
    return self->memory && self->held ? 0 : -1;
}

static bool address_of(PyObject *tensor, void **address)
{
    PyObject *value = sw_py_call(tensor, "data_ptr", NULL, NULL);
    *address = value ? PyLong_AsVoidPtr(value) : NULL;
    Py_XDECREF(value);
    return !PyErr_Occurred();
}

static int keep_memory(reducer_object *self, size_t at, PyObject *owner)
{
    Py_INCREF(owner);
    return PyList_SetItem(self->memory, (Py_ssize_t)at, owner);
}

static PyObject *finish_call(reducer_object *self, sw_status status, const sw_error *err)
{
    return sw_py_device_finish(self->gpu, status, err);
}

PyObject *sw_py_reducer_adopt(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    PyObject *position, *tensor;
    void *data;
    size_t index;
    sw_error err;
    if (check_gpu(self) < 0 || !PyArg_ParseTuple(args, "OO:adopt", &position, &tensor) ||
        sw_py_reducer_read_bucket(self, position, &index) < 0 || !address_of(tensor, &data) ||
        reducer_enter(self) < 0)
        return NULL;
    PyObject *done = finish_call(self, sw_reducer_adopt(self->reducer, index, data, &err), &err);
    if (done && keep_memory(self, index, tensor) < 0)
        ENGINE_CLEAR(done);
    return done;
}

/* Reads addresses and sizes from a tuple of at most two tensors. */
static bool read_tensors(PyObject *tuple, void *addresses[2], size_t sizes_bytes[2], size_t *count)
{
    *count = (size_t)PyTuple_Size(tuple);
    if (*count > 2) {
        PyErr_SetString(PyExc_ValueError, "at most two tensors");
        return false;
    }
    for (size_t i = 0; i < *count; ++i) {
        PyObject *tensor = PyTuple_GetItem(tuple, (Py_ssize_t)i);
        PyObject *size = PyObject_GetAttrString(tensor, "nbytes");
        sizes_bytes[i] = size ? PyLong_AsSize_t(size) : 0;
        Py_XDECREF(size);
        if (PyErr_Occurred() || !address_of(tensor, &addresses[i]))
            return false;
    }
    return true;
}

PyObject *sw_py_reducer_set_places(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    PyObject *tuple;
    void *addresses[2] = {NULL, NULL};
    size_t sizes_bytes[2], count;
    sw_error err;
    sw_status status;
    if (check_gpu(self) < 0 || !PyArg_ParseTuple(args, "O!:set_places", &PyTuple_Type, &tuple) ||
        !read_tensors(tuple, addresses, sizes_bytes, &count) ||
        sw_py_reducer_use_stream(self) < 0 || reducer_enter(self) < 0)
        return NULL;
    REDUCER_BEGIN_ENQUEUE(self)
    status = sw_reducer_set_places(self->reducer, addresses, sizes_bytes, count, &err);
    REDUCER_END_ENQUEUE
    PyObject *done = finish_call(self, status, &err);
    if (done && keep_memory(self, reducer_bucket_count(self) + PLACES, tuple) < 0)
        ENGINE_CLEAR(done);
    return done;
}

PyObject *sw_py_reducer_lend(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    PyObject *tuple;
    void *addresses[2] = {NULL, NULL};
    size_t sizes_bytes[2], count;
    sw_error err;
    if (check_gpu(self) < 0 || !PyArg_ParseTuple(args, "O!:lend", &PyTuple_Type, &tuple) ||
        !read_tensors(tuple, addresses, sizes_bytes, &count) || reducer_enter(self) < 0)
        return NULL;
    sw_status status = sw_reducer_lend(self->reducer, addresses[0], addresses[1], &err);
    PyObject *done = finish_call(self, status, &err);
    if (done && keep_memory(self, reducer_bucket_count(self) + LENT, tuple) < 0)
        ENGINE_CLEAR(done);
    return done;
}

PyObject *sw_py_reducer_withdraw(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    sw_error err;
    sw_status status;
    (void)unused;
    if (check_gpu(self) < 0 || reducer_enter(self) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_withdraw(self->reducer, &err);
    Py_END_ALLOW_THREADS
    return finish_call(self, status, &err);
}

PyObject *sw_py_reducer_set_active(PyObject *op, PyObject *trains)
{
    reducer_object *self = (reducer_object *)op;
    sw_error err;
    if (check_gpu(self) < 0)
        return NULL;
    int world_size = self->gpu->comm->peers ? self->gpu->comm->peers->world_size : 0;
    if (!PyBytes_Check(trains) || PyBytes_Size(trains) != world_size) {
        PyErr_Format(PyExc_ValueError, "set_active: trains must be %d bytes, one a rank",
                     world_size);
        return NULL;
    }
    if (reducer_enter(self) < 0)
        return NULL;
    sw_status status =
        sw_reducer_set_active(self->reducer, (const uint8_t *)PyBytes_AsString(trains), &err);
    return finish_call(self, status, &err);
}

static PyObject *set_callable(PyObject **slot, PyObject *callable)
{
    ENGINE_CLEAR(*slot);
    if (callable != Py_None) {
        Py_INCREF(callable);
        *slot = callable;
    }
    Py_RETURN_NONE;
}

PyObject *sw_py_reducer_set_order(PyObject *op, PyObject *callable)
{
    return set_callable(&((reducer_object *)op)->order, callable);
}

PyObject *sw_py_reducer_set_announcer(PyObject *op, PyObject *callable)
{
    return set_callable(&((reducer_object *)op)->announcer, callable);
}
