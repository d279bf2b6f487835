/* reducer_layout.c - the methods of shardwright._engine.Reducer that return where parameters and
 * buckets lie, and tensors over that memory. */
#include "python/reducer_object.h"

static bool is_within(const char *what, Py_ssize_t index, size_t count)
{
    return (index >= 0 && (size_t)index < count) ||
           sw_py_refuse(PyExc_IndexError, "%s index must be in [0, %zu), got %zd", what, count,
                        index);
}

bool sw_py_reducer_has_index(reducer_object *self, Py_ssize_t index)
{
    return reducer_check_made(self) == 0 &&
           is_within("parameter", index, sw_reducer_layout(self->reducer)->param_count);
}

bool sw_py_reducer_has_bucket(reducer_object *self, Py_ssize_t bucket)
{
    return reducer_check_made(self) == 0 && is_within("bucket", bucket, reducer_bucket_count(self));
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
        return PyErr_Format(sw_py_state_of(self)->error,
                            "bucket %zu takes no part: it has no memory", index);
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
    sw_py_arg a[3] = {[2] = {.o = Py_None}};
    if (!sw_py_read("gradient index:n shape:O | strides:O", args, NULL, a) ||
        !sw_py_reducer_has_index(self, a[0].n))
        return NULL;
    return capsule_over(self, sw_reducer_layout(self->reducer)->place[a[0].n].bucket, false,
                        sw_reducer_address(self->reducer, a[0].size), a[1].o, a[2].o);
}

/* Returns this rank's slice of a parameter's mean, one-dimensional. */
PyObject *sw_py_reducer_result(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[1];
    size_t numel;
    if (!sw_py_read("result index:n", args, NULL, a) || !sw_py_reducer_has_index(self, a[0].n))
        return NULL;
    uint8_t *address = sw_reducer_result(self->reducer, a[0].size, &numel);
    return flat_capsule_over(self, sw_reducer_layout(self->reducer)->place[a[0].n].bucket, true,
                             address, numel);
}

#define OF_BUCKET(name, value)                                                              \
    PyObject *sw_py_reducer_##name(PyObject *op, PyObject *args)                            \
    {                                                                                       \
        reducer_object *self = (reducer_object *)op;                                        \
        sw_py_arg a[1];                                                                     \
        if (!sw_py_read(#name " bucket:n", args, NULL, a) ||                                \
            !sw_py_reducer_has_bucket(self, a[0].n))                                        \
            return NULL;                                                                    \
        const sw_layout_bucket *bucket = &sw_reducer_layout(self->reducer)->bucket[a[0].n]; \
        return value;                                                                       \
    }

static PyObject *parameters_of(const reducer_object *self, const sw_layout_bucket *bucket)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < bucket->count; ++i)
        sw_py_append(&list,
                     PyLong_FromSize_t(sw_reducer_layout(self->reducer)->order[bucket->first + i]));
    return list;
}

OF_BUCKET(bucket, flat_capsule_over(self, a[0].size, false,
                                    sw_reducer_slot(self->reducer, a[0].size), bucket->numel))
OF_BUCKET(bucket_parameters, parameters_of(self, bucket))
OF_BUCKET(bucket_dtype, PyUnicode_FromString(sw_dtype_name(bucket->dtype)))
/* Returns (offset_bytes, numel, dtype, trainable). */
OF_BUCKET(bucket_shape,
          Py_BuildValue("nnsO", (Py_ssize_t)bucket->offset_bytes, (Py_ssize_t)bucket->numel,
                        sw_dtype_name(bucket->dtype), bucket->trainable ? Py_True : Py_False))

/* Returns (bucket, begin, numel) of a parameter. */
PyObject *sw_py_reducer_place(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[1];
    if (!sw_py_read("place index:n", args, NULL, a) || !sw_py_reducer_has_index(self, a[0].n))
        return NULL;
    const sw_layout_place *place = &sw_reducer_layout(self->reducer)->place[a[0].n];
    return Py_BuildValue("nnn", (Py_ssize_t)place->bucket, (Py_ssize_t)place->begin,
                         (Py_ssize_t)place->numel);
}
