/* gradient_write.c - writes one parameter's contribution into its bucket: the elements of a
 * gradient, zeros, or, if this rank has not used the parameter, what the subclass kept. */
#include "python/reducer_object.h"

/* Returns true if `grad` has the layout of its view, so that its bytes can be copied as they are.
 * Lazily negated and conjugated tensors are excluded without checking their flags: the former are
 * views of complex tensors and so have other strides unless they have one element; the latter are
 * complex. */
static bool has_layout(const tensor_view *grad, const tensor_view *shape)
{
    int64_t numel = 1;
    for (int d = 0; d < grad->ndim; ++d)
        numel *= grad->shape[d];
    if (numel <= 1 || grad->code == TENSOR_CODE_COMPLEX)
        return false;
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

/* On a GPU torch's copy would be another launch, so the subclass looks for an address to copy from.
 */
static int locate_slowly(reducer_object *self, PyObject *like, PyObject *grad, void **from)
{
    *from = NULL;
    if (!self->gpu)
        return 0;
    SW_PY_OWNED *address = sw_py_call(self, "_locate", like, grad);
    *from = address ? PyLong_AsVoidPtr(address) : NULL;
    return PyErr_Occurred() ? -1 : 0;
}

int sw_py_gradient_write(reducer_object *self, size_t index, PyObject *like, PyObject *grad,
                         bool add)
{
    tensor_view seen, shape;
    void *from = NULL;
    bool known =
        self->shapes || (self->exchange && sw_py_tensor_view_get(self->exchange, like, &shape));
    if (known && sw_py_tensor_view_get(self->exchange, grad, &seen) &&
        has_layout(&seen, self->shapes ? &self->shapes[index] : &shape))
        from = seen.data;
    else if (!add && locate_slowly(self, like, grad, &from) < 0)
        return -1;
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
