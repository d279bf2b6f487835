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

static bool has_bucket(reducer_object *self, Py_ssize_t bucket)
{
    return reducer_check_made(self) == 0 && is_within("bucket", bucket, reducer_bucket_count(self));
}

/* Returns the owner, a new reference, of the memory of a bucket, or of this rank's slice of its
 * mean, and sets *ordinal to its GPU, or to -1 for the CPU. */
static PyObject *owner_of(reducer_object *self, size_t index, bool is_result, int *ordinal)
{
    *ordinal = -1;
    if (!self->gpu)
        return Py_NewRef(self->memory);
    size_t at = self->sliced && !is_result ? reducer_bucket_count(self) + PLACE : index;
    PyObject *owner = sw_py_item(self->memory, at);
    SW_PY_OWNED *flag = owner ? PyObject_GetAttrString(owner, "is_cuda") : NULL;
    if (!flag) {
        Py_XDECREF(owner);
        PyErr_Clear();
        return PyErr_Format(sw_py_state_of(self)->error,
                            "bucket %zu takes no part: it has no memory", index);
    }
    if (flag == Py_True)
        *ordinal = self->gpu->comm->device->ordinal;
    return owner;
}

/* Makes a DLPack capsule over `numel` elements in the memory of bucket `index`, or of this rank's
 * slice of its mean. */
static PyObject *capsule_over(reducer_object *self, size_t index, bool is_result, void *address,
                              size_t numel, PyObject *shape, PyObject *strides)
{
    int ordinal;
    sw_py_layout layout;
    sw_dtype dtype = sw_reducer_layout(self->reducer)->bucket[index].dtype;
    if (!shape || !sw_py_layout_init(&layout, dtype, shape, strides, "gradient"))
        return NULL;
    if (layout.bytes > numel * sw_dtype_size_bytes(dtype))
        return PyErr_Format(PyExc_ValueError, "gradient: %zu bytes leave memory of %zu elements",
                            layout.bytes, numel);
    SW_PY_OWNED *owner = owner_of(self, index, is_result, &ordinal);
    return owner ? sw_py_dlpack_capsule_on(ordinal, owner, address, &layout) : NULL;
}

/* The same for a parameter's contribution, which by rows is no one range. */
static PyObject *gradient_of(reducer_object *self, size_t index, PyObject *shape, PyObject *strides)
{
    const sw_layout_place *place = &sw_reducer_layout(self->reducer)->place[index];
    if (place->chunk > 0)
        return PyErr_Format(PyExc_ValueError,
                            "gradient: parameter %zu is cut by rows, so its contribution is no one "
                            "range of memory",
                            index);
    return capsule_over(self, place->bucket, false, sw_reducer_address(self->reducer, index),
                        place->numel, shape, strides);
}

/* Makes a one-dimensional one. */
static PyObject *flat_capsule_over(reducer_object *self, size_t index, bool is_result,
                                   void *address, size_t numel)
{
    SW_PY_OWNED *shape = Py_BuildValue("(n)", (Py_ssize_t)numel);
    return capsule_over(self, index, is_result, address, numel, shape, Py_None);
}

/* Returns this rank's slice of a parameter's mean, one-dimensional. */
static PyObject *slice_of(reducer_object *self, size_t index, size_t bucket)
{
    size_t numel;
    uint8_t *address = sw_reducer_result(self->reducer, index, &numel);
    return flat_capsule_over(self, bucket, true, address, numel);
}

static PyObject *parameters_of(const reducer_object *self, const sw_layout_bucket *bucket)
{
    const size_t *order = sw_reducer_layout(self->reducer)->order + bucket->first;
    return SW_PY_LIST(i, bucket->count, PyLong_FromSize_t(order[i]));
}

/* A method of one parameter, whose place is PLACE, or of one BUCKET. */
#define PLACE (&sw_reducer_layout(self->reducer)->place[a[0].n])
#define BUCKET (&sw_reducer_layout(self->reducer)->bucket[a[0].n])
#define OF_PARAMETER(name, rest, value)                                             \
    SW_PY_SHARED_VALUE(sw_py_reducer_##name, reducer_object, #name " index:n" rest, \
                       sw_py_reducer_has_index(self, a[0].n), value)
#define OF_BUCKET(name, value)                                                  \
    SW_PY_SHARED_VALUE(sw_py_reducer_##name, reducer_object, #name " bucket:n", \
                       has_bucket(self, a[0].n), value)

OF_PARAMETER(gradient, " shape:O | strides:O",
             gradient_of(self, a[0].size, a[1].o, a[2].o ? a[2].o : Py_None))
OF_PARAMETER(result, "", slice_of(self, a[0].size, PLACE->bucket))
/* Returns (bucket, begin, numel) of a parameter. */
OF_PARAMETER(place, "",
             Py_BuildValue("nnn", (Py_ssize_t)PLACE->bucket, (Py_ssize_t)PLACE->begin,
                           (Py_ssize_t)PLACE->numel))
/* The rule of csrc/tensor/layout.h for `slice` of `count`. */
#define RUN sw_layout_run_in(sw_reducer_layout(self->reducer), a[0].size, a[1].size, a[2].size)
#define OF_RUN(name, value)                                                                       \
    SW_PY_SHARED_VALUE(sw_py_reducer_##name, reducer_object, #name " index:n slice:n count:n",    \
                       sw_py_reducer_has_index(self, a[0].n) && is_slice(self, PLACE->bucket, a), \
                       value)

static bool is_slice(reducer_object *self, size_t bucket, const sw_py_arg *a)
{
    size_t numel = sw_reducer_layout(self->reducer)->bucket[bucket].numel;
    return (a[2].n > 0 && numel % a[2].size == 0 && a[1].n >= 0 && a[1].n < a[2].n) ||
           sw_py_refuse(PyExc_IndexError,
                        "slice must be in [0, count), and count divide the %zu elements of the "
                        "bucket, got %zd of %zd",
                        numel, a[1].n, a[2].n);
}

static PyObject *numbers_of(sw_layout_run run)
{
    return Py_BuildValue("nn", (Py_ssize_t)run.begin, (Py_ssize_t)run.end);
}

static PyObject *numbers_in_slice(size_t bucket, sw_layout_run run)
{
    return Py_BuildValue("nnn", (Py_ssize_t)bucket, (Py_ssize_t)run.first,
                         (Py_ssize_t)(run.end - run.begin));
}

OF_RUN(run, numbers_of(RUN))
OF_RUN(run_in_slice, numbers_in_slice(PLACE->bucket, RUN))
OF_BUCKET(bucket, flat_capsule_over(self, a[0].size, false,
                                    sw_reducer_slot(self->reducer, a[0].size), BUCKET->numel))
OF_BUCKET(bucket_parameters, parameters_of(self, BUCKET))
OF_BUCKET(bucket_dtype, PyUnicode_FromString(sw_dtype_name(BUCKET->dtype)))
/* Returns (offset_bytes, numel, dtype, trainable). */
OF_BUCKET(bucket_shape,
          Py_BuildValue("nnsO", (Py_ssize_t)BUCKET->offset_bytes, (Py_ssize_t)BUCKET->numel,
                        sw_dtype_name(BUCKET->dtype), BUCKET->trainable ? Py_True : Py_False))
