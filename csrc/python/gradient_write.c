/* gradient_write.c - writes one parameter's contribution into its bucket: the elements of a
 * gradient, zeros, or, if this rank has not used the parameter, what the subclass kept. */
#include "python/reducer_object.h"

/* Returns true if `grad` may be lazily negated or conjugated: the former is a view of a complex
 * tensor and so has other strides than its view unless it has one element; the latter is complex.
 */
static bool may_be_lazy(const tensor_view *grad)
{
    int64_t numel = 1;
    for (int d = 0; d < grad->ndim; ++d)
        numel *= grad->shape[d];
    return numel <= 1 || grad->code == TENSOR_CODE_COMPLEX;
}

/* Returns true if `grad` has the layout of its view, so that its bytes can be copied as they are,
 * unless it is lazy. */
static bool has_layout(const tensor_view *grad, const tensor_view *shape)
{
    if (grad->code != shape->code || grad->bits != shape->bits || grad->ndim != shape->ndim ||
        grad->device_type != shape->device_type)
        return false;
    for (int d = 0; d < grad->ndim; ++d) {
        if (grad->shape[d] != shape->shape[d])
            return false;
        if (grad->shape[d] > 1 && grad->strides && shape->strides &&
            grad->strides[d] != shape->strides[d])
            return false;
    }
    return grad->strides && shape->strides;
}

/* Returns 1 if a tensor is lazily negated or conjugated, -1 with an exception. */
static int is_lazy(PyObject *grad)
{
    SW_PY_OWNED *conj = sw_py_call(grad, "is_conj", NULL, NULL);
    SW_PY_OWNED *neg = conj ? sw_py_call(grad, "is_neg", NULL, NULL) : NULL;
    return neg ? conj == Py_True || neg == Py_True : -1;
}

/* Sets *from to the bytes of a gradient that lies as `like` does, for a torch that shows no views:
 * its copy would be another launch. Returns -1 with an exception. */
static int locate_slowly(const reducer_object *self, PyObject *like, PyObject *grad, void **from)
{
    tensor_reading seen, shape;
    if (self->exchange || !self->gpu)
        return 0;
    if (!sw_py_tensor_read(NULL, grad, "gradient", 0, true, &seen) ||
        !sw_py_tensor_read(NULL, like, "gradient", 0, true, &shape)) {
        PyErr_Clear(); /* torch's own copy takes what is not plain */
        return 0;
    }
    bool is_alike = seen.dtype == shape.dtype && sw_py_tensor_same_shape(&seen, &shape);
    int lazy = is_alike ? is_lazy(grad) : 1;
    *from = lazy == 0 ? seen.data : NULL;
    return lazy < 0 ? -1 : 0;
}

int sw_py_gradient_write_plain(reducer_object *self, size_t index, PyObject *grad, bool add)
{
    tensor_reading seen;
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    const sw_layout_place *place = &layout->place[index];
    if (!sw_py_tensor_read(NULL, grad, "gradient", 0, true, &seen))
        return -1;
    if (seen.numel != place->numel || seen.dtype != layout->bucket[place->bucket].dtype ||
        !sw_py_tensor_is_dense(&seen)) {
        sw_py_refuse(PyExc_ValueError,
                     "gradient: parameter %zu needs %zu elements of %s, dense, got %zu of %s",
                     index, place->numel, sw_dtype_name(layout->bucket[place->bucket].dtype),
                     seen.numel, sw_dtype_name(seen.dtype));
        return -1;
    }
    if (self->held && PyList_Append(self->held, grad) < 0)
        return -1;
    return REDUCER_ENQUEUE(self, sw_reducer_write(self->reducer, index, seen.data, add, &err));
}

int sw_py_gradient_write(reducer_object *self, size_t index, PyObject *like, PyObject *grad,
                         bool add)
{
    tensor_view seen, shape;
    void *from = NULL;
    bool known =
        self->shapes || (self->exchange && sw_py_tensor_view_get(self->exchange, like, &shape));
    if (known && sw_py_tensor_view_get(self->exchange, grad, &seen) &&
        has_layout(&seen, self->shapes ? &self->shapes[index] : &shape)) {
        /* On a GPU torch's copy would be another launch, so the flags are worth a look. */
        int lazy = !may_be_lazy(&seen) ? 0 : self->gpu && !add ? is_lazy(grad) : 1;
        if (lazy < 0)
            return -1;
        from = lazy ? NULL : seen.data;
    } else if (!add && locate_slowly(self, like, grad, &from) < 0) {
        return -1;
    }
    if (!from)
        return 1;
    if (self->held && PyList_Append(self->held, grad) < 0)
        return -1;
    return REDUCER_ENQUEUE(self, sw_reducer_write(self->reducer, index, from, add, &err));
}

int sw_py_gradient_clear(reducer_object *self, size_t index)
{
    return REDUCER_ENQUEUE(self, sw_reducer_clear(self->reducer, index, &err));
}

int sw_py_gradient_keep(reducer_object *self, size_t index)
{
    if (!sw_reducer_get_traits(self->reducer)->averages_unused)
        return 0;
    self->kept++;
    return reducer_called(sw_py_call_at(self, "_keep", index));
}
