/* reducer_on_device.c - the parts of a Reducer that only a GPU needs: torch's memory for its
 * buckets, torch's current stream, and which ranks still train. */
#include <string.h>

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

/* Allocates memory by a callable and appends its tensor to *owners. Returns false with an
 * exception. */
static bool allocate(PyObject *callable, size_t bytes, PyObject **owners, void **data)
{
    SW_PY_OWNED *size = PyLong_FromSize_t(bytes);
    SW_PY_OWNED *made = size ? PyObject_CallFunctionObjArgs(callable, size, NULL) : NULL;
    if (!made || !sw_py_tensor_address(made, data))
        return false;
    sw_py_append(owners, Py_NewRef(made));
    return *owners != NULL;
}

static size_t bucket_bytes(const reducer_object *self, size_t bucket)
{
    const sw_layout_bucket *found = &sw_reducer_layout(self->reducer)->bucket[bucket];
    return found->numel * sw_dtype_size_bytes(found->dtype);
}

static bool has_memory(const reducer_object *self, size_t bucket)
{
    return PyList_GetItem(self->memory, (Py_ssize_t)bucket) != Py_None;
}

/* A bucket without elements has an address too. */
static bool adopt(reducer_object *self, size_t bucket)
{
    sw_dtype dtype = sw_reducer_layout(self->reducer)->bucket[bucket].dtype;
    size_t bytes = bucket_bytes(self, bucket) / self->slice_count;
    void *data;
    sw_error err;
    PyObject *callable = self->home == Py_None ? self->allocate : self->home;
    SW_PY_OWNED *owners = PyList_New(0);
    if (!owners ||
        !allocate(callable, bytes ? bytes : sw_dtype_size_bytes(dtype), &owners, &data) ||
        reducer_enter(self) < 0)
        return false;
    sw_status status = sw_reducer_adopt(self->reducer, bucket, data, &err);
    SW_PY_OWNED *done = finish_keeping(self, bucket, PyList_GetItem(owners, 0), status, &err);
    return done != NULL;
}

/* Makes the place of the size of the largest bucket. */
int sw_py_reducer_make_place(reducer_object *self)
{
    size_t largest = 0;
    void *address;
    sw_error err;
    if (!self->allocate || !self->sliced)
        return 0;
    for (size_t b = 0; b < reducer_bucket_count(self); ++b)
        if (has_memory(self, b) && bucket_bytes(self, b) > largest)
            largest = bucket_bytes(self, b);
    if (largest == self->place_bytes)
        return 0;
    SW_PY_OWNED *owners = PyList_New(0);
    if (!owners || !allocate(self->allocate, largest, &owners, &address) ||
        sw_py_reducer_use_stream(self) < 0 || reducer_enter(self) < 0)
        return -1;
    sw_status status = sw_reducer_set_place(self->reducer, address, &err);
    SW_PY_OWNED *done = finish_keeping(self, reducer_bucket_count(self) + PLACE,
                                       PyList_GetItem(owners, 0), status, &err);
    if (done)
        self->place_bytes = largest;
    return done ? 0 : -1;
}

int sw_py_reducer_allocate(reducer_object *self)
{
    for (size_t b = 0; b < reducer_bucket_count(self); ++b)
        if (sw_reducer_layout(self->reducer)->bucket[b].trainable && !adopt(self, b))
            return -1;
    return sw_py_reducer_make_place(self);
}

int sw_py_reducer_unfreeze_on_device(reducer_object *self, size_t index)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    size_t bucket = layout->place[index].bucket;
    const sw_layout_bucket *joins = &layout->bucket[bucket];
    if (!self->allocate || has_memory(self, bucket))
        return 0;
    if (!adopt(self, bucket) || sw_py_reducer_make_place(self) < 0)
        return -1;
    for (size_t i = 0; self->renew && i < joins->count; ++i) {
        SW_PY_OWNED *member = PyLong_FromSize_t(layout->order[joins->first + i]);
        if (!member || reducer_called(PyObject_CallFunctionObjArgs(self->renew, member, NULL)) < 0)
            return -1;
    }
    return 0;
}

int sw_py_reducer_withdraw(reducer_object *self)
{
    if (!self->gpu)
        return 0;
    return REDUCER_INSIDE(self, REDUCER_WAIT(self, sw_reducer_withdraw(self->reducer, &err)));
}

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
