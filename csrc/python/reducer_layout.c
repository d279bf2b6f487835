/* reducer_layout.c - the methods of shardwright._engine.Reducer that return where parameters and
 * buckets lie, and tensors over that memory. */
#include "python/reducer_object.h"

int sw_py_reducer_read_index(reducer_object *self, PyObject *value, size_t *index)
{
    if (reducer_check_made(self) < 0)
        return -1;
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    *index = PyLong_AsSize_t(value);
    if (PyErr_Occurred())
        return -1;
    if (*index >= count) {
        PyErr_Format(PyExc_IndexError, "parameter index must be in [0, %zu), got %zu", count,
                     *index);
        return -1;
    }
    return 0;
}

int sw_py_reducer_read_bucket(reducer_object *self, PyObject *value, size_t *index)
{
    if (reducer_check_made(self) < 0)
        return -1;
    size_t count = sw_reducer_layout(self->reducer)->bucket_count;
    *index = PyLong_AsSize_t(value);
    if (PyErr_Occurred())
        return -1;
    if (*index >= count) {
        PyErr_Format(PyExc_IndexError, "bucket index must be in [0, %zu), got %zu", count, *index);
        return -1;
    }
    return 0;
}

static int read_bucket(reducer_object *self, PyObject *value, const sw_layout_bucket **bucket)
{
    size_t index;
    if (sw_py_reducer_read_bucket(self, value, &index) < 0)
        return -1;
    *bucket = &sw_reducer_layout(self->reducer)->bucket[index];
    return 0;
}

/* Returns the borrowed owner of the memory of a bucket, or of this rank's slice of its mean, and
 * sets *ordinal to its GPU, or to -1 for the CPU. */
static PyObject *owner_of(reducer_object *self, size_t index, bool is_result, int *ordinal)
{
    *ordinal = -1;
    if (!self->gpu)
        return self->memory;
    size_t at = self->sliced && !is_result ? reducer_bucket_count(self) + PLACES : index;
    PyObject *owner = PyList_GetItem(self->memory, (Py_ssize_t)at);
    PyObject *first = owner && PyTuple_Check(owner) ? PyTuple_GetItem(owner, 0) : owner;
    PyObject *flag = first ? PyObject_GetAttrString(first, "is_cuda") : NULL;
    if (!flag) {
        PyErr_Clear();
        PyErr_Format(reducer_state_of(self)->error, "bucket %zu takes no part: it has no memory",
                     index);
        return NULL;
    }
    if (flag == Py_True)
        *ordinal = self->gpu->comm->device->ordinal;
    Py_DECREF(flag);
    return owner;
}

/* Makes a DLPack capsule over memory of bucket `index`, or of this rank's slice of its mean. */
static PyObject *capsule_over(reducer_object *self, size_t index, bool is_result, void *address,
                              PyObject *shape, PyObject *strides)
{
    int ordinal;
    PyObject *owner = shape ? owner_of(self, index, is_result, &ordinal) : NULL;
    return owner ? sw_py_dlpack_capsule_on(ordinal, owner, address,
                                           sw_reducer_layout(self->reducer)->bucket[index].dtype,
                                           shape, strides)
                 : NULL;
}

/* Makes a one-dimensional one. */
static PyObject *flat_capsule_over(reducer_object *self, size_t index, bool is_result,
                                   void *address, size_t numel)
{
    PyObject *shape = Py_BuildValue("(n)", (Py_ssize_t)numel);
    PyObject *made = capsule_over(self, index, is_result, address, shape, Py_None);
    Py_XDECREF(shape);
    return made;
}

PyObject *sw_py_reducer_gradient(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    PyObject *position, *shape, *strides = Py_None;
    size_t index;
    if (!PyArg_ParseTuple(args, "OO|O:gradient", &position, &shape, &strides) ||
        sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    return capsule_over(self, sw_reducer_layout(self->reducer)->place[index].bucket, false,
                        sw_reducer_address(self->reducer, index), shape, strides);
}

/* Returns this rank's slice of a parameter's mean, one-dimensional. */
PyObject *sw_py_reducer_result(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index, numel;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    uint8_t *address = sw_reducer_result(self->reducer, index, &numel);
    return flat_capsule_over(self, sw_reducer_layout(self->reducer)->place[index].bucket, true,
                             address, numel);
}

PyObject *sw_py_reducer_bucket(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_bucket(self, position, &index) < 0)
        return NULL;
    return flat_capsule_over(self, index, false, sw_reducer_slot(self->reducer, index),
                             sw_reducer_layout(self->reducer)->bucket[index].numel);
}

PyObject *sw_py_reducer_bucket_parameters(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    const sw_layout_bucket *bucket;
    if (read_bucket(self, position, &bucket) < 0)
        return NULL;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < bucket->count; ++i) {
        PyObject *item =
            PyLong_FromSize_t(sw_reducer_layout(self->reducer)->order[bucket->first + i]);
        if (!item || PyList_Append(list, item) < 0)
            ENGINE_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

PyObject *sw_py_reducer_bucket_dtype(PyObject *op, PyObject *position)
{
    const sw_layout_bucket *bucket;
    if (read_bucket((reducer_object *)op, position, &bucket) < 0)
        return NULL;
    return PyUnicode_FromString(sw_dtype_name(bucket->dtype));
}

/* Returns (bucket, begin, numel) of a parameter. */
PyObject *sw_py_reducer_place(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    const sw_layout_place *place = &sw_reducer_layout(self->reducer)->place[index];
    return Py_BuildValue("nnn", (Py_ssize_t)place->bucket, (Py_ssize_t)place->begin,
                         (Py_ssize_t)place->numel);
}

/* Returns (offset_bytes, numel, dtype, trainable) of a bucket. */
PyObject *sw_py_reducer_bucket_shape(PyObject *op, PyObject *position)
{
    const sw_layout_bucket *bucket;
    if (read_bucket((reducer_object *)op, position, &bucket) < 0)
        return NULL;
    return Py_BuildValue("nnsO", (Py_ssize_t)bucket->offset_bytes, (Py_ssize_t)bucket->numel,
                         sw_dtype_name(bucket->dtype), bucket->trainable ? Py_True : Py_False);
}
