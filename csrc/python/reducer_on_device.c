/* reducer_on_device.c - the parts of a Reducer that only a GPU needs: torch's memory for its
 * buckets, torch's current stream, and which ranks still train. */
#include "python/reducer_object.h"

static bool check_gpu(reducer_object *self)
{
    return reducer_check_made(self) == 0 &&
           (self->gpu ||
            sw_py_refuse(sw_py_state_of(self)->error, "only a reducer on a GPU has this method"));
}

int sw_py_reducer_use_stream(reducer_object *self)
{
    if (!self->gpu || !self->stream) /* nothing is enqueued before attach() */
        return 0;
    SW_PY_OWNED *value = PyObject_CallFunctionObjArgs(self->stream, NULL);
    sw_stream *stream = value ? PyLong_AsVoidPtr(value) : NULL;
    if (PyErr_Occurred())
        return -1;
    sw_reducer_use_stream(self->reducer, stream);
    return 0;
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

/* Leaves the communicator, and keeps the owner of what the reducer now uses at place `at` of
 * `memory`. */
static PyObject *finish_keeping(reducer_object *self, size_t at, PyObject *owner, sw_status status,
                                const sw_error *err)
{
    PyObject *done = sw_py_device_finish(self->gpu, status, err);
    if (!done)
        return NULL;
    Py_INCREF(owner);
    if (PyList_SetItem(self->memory, (Py_ssize_t)at, owner) < 0)
        ENGINE_CLEAR(done);
    return done;
}

PyObject *sw_py_reducer_adopt(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[2];
    void *data;
    sw_error err;
    if (!check_gpu(self) || !sw_py_read("adopt bucket:n tensor:O", args, NULL, a) ||
        !sw_py_reducer_has_bucket(self, a[0].n) || !sw_py_tensor_address(a[1].o, &data) ||
        reducer_enter(self) < 0)
        return NULL;
    sw_status status = sw_reducer_adopt(self->reducer, a[0].size, data, &err);
    return finish_keeping(self, a[0].size, a[1].o, status, &err);
}

typedef struct places_given { /* at most two, owned by their tuple */
    PyObject *tuple;
    void *addresses[2];
    size_t sizes_bytes[2], count;
} places_given;

static bool read_places(PyObject *tuple, places_given *out)
{
    *out = (places_given){.tuple = tuple, .count = (size_t)PyTuple_Size(tuple)};
    if (out->count > 2)
        return sw_py_refuse(PyExc_ValueError, "at most two tensors");
    for (size_t i = 0; i < out->count; ++i) {
        PyObject *tensor = PyTuple_GetItem(tuple, (Py_ssize_t)i);
        SW_PY_OWNED *size = PyObject_GetAttrString(tensor, "nbytes");
        out->sizes_bytes[i] = size ? PyLong_AsSize_t(size) : 0;
        if (PyErr_Occurred() || !sw_py_tensor_address(tensor, &out->addresses[i]))
            return false;
    }
    return true;
}

SW_PY_SHARED_METHOD(
    sw_py_reducer_set_places, reducer_object, "set_places tensors:U", places_given places,
    check_gpu(self) && read_places(a[0].o, &places) && sw_py_reducer_use_stream(self) == 0 &&
        reducer_enter(self) == 0,
    sw_reducer_set_places(self->reducer, places.addresses, places.sizes_bytes, places.count, &err),
    finish_keeping(self, reducer_bucket_count(self) + PLACES, places.tuple, status, &err))
SW_PY_SHARED_METHOD(sw_py_reducer_withdraw, reducer_object, "withdraw", ,
                    check_gpu(self) && reducer_enter(self) == 0,
                    sw_reducer_withdraw(self->reducer, &err),
                    sw_py_device_finish(self->gpu, status, &err))

PyObject *sw_py_reducer_set_active(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[1];
    sw_error err;
    if (!check_gpu(self) || !sw_py_read("set_active trains:B", args, NULL, a))
        return NULL;
    int world_size = self->gpu->comm->peers ? self->gpu->comm->peers->world_size : 0;
    if (PyBytes_Size(a[0].o) != world_size)
        return PyErr_Format(PyExc_ValueError, "set_active: trains must be %d bytes, one a rank",
                            world_size);
    if (reducer_enter(self) < 0)
        return NULL;
    sw_status status =
        sw_reducer_set_active(self->reducer, (const uint8_t *)PyBytes_AsString(a[0].o), &err);
    return sw_py_device_finish(self->gpu, status, &err);
}

#define SETTER(name, slot)                                                              \
    SW_PY_SHARED_VALUE(sw_py_reducer_##name, reducer_object, #name " callable:O", true, \
                       (sw_py_set_or_clear(&self->slot, a[0].o), sw_py_none()))

SETTER(set_order, order)
SETTER(set_announcer, announcer)
