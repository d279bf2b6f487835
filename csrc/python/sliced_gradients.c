/* sliced_gradients.c - rounds in which only this rank's slices of the means are kept (zero >= 2).
 *
 * `.grad` is then None, a tensor of autograd's own, or the parameter's ShardedGradient, which has
 * no memory but may hold a pending tensor: what backwards have added since the last round. A
 * contribution is taken out of `.grad` into the bucket's slot as soon as the slot is free, and at
 * the latest when the bucket is sent; the ShardedGradient is put back when the round ends. A
 * gradient taken out of a ShardedGradient that was not cleared is marked as standing: the owners of
 * slices add the old mean to it. */
#include <string.h>

#include "kernels/kernels.h"
#include "python/reducer_object.h"

static sw_dtype dtype_of(const reducer_object *self, size_t index)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    return layout->bucket[layout->place[index].bucket].dtype;
}

/* memory = gradient, or memory += gradient. */
static int write_gradient(reducer_object *self, size_t index, PyObject *param, PyObject *grad,
                          bool add)
{
    tensor_view seen, shape;
    sw_dtype dtype = dtype_of(self, index);
    size_t numel = sw_reducer_layout(self->reducer)->place[index].numel;
    void *memory = sw_reducer_address(self->reducer, index);
    bool known =
        self->shapes || (self->exchange && sw_py_tensor_view_get(self->exchange, param, &shape));
    if (known && sw_py_tensor_view_get(self->exchange, grad, &seen) &&
        sw_py_gradient_has_layout(&seen, self->shapes ? &self->shapes[index] : &shape)) {
        const void *sources[] = {memory, seen.data};
        if (add)
            sw_kernels()->fold[dtype](&memory, 1, sources, 2, numel, 1, SW_REDOP_SUM);
        else
            sw_copy_streaming(memory, seen.data, numel * sw_dtype_size_bytes(dtype));
        return 0;
    }
    self->copies++;
    PyObject *position = PyLong_FromSize_t(index);
    PyObject *result = position ? PyObject_CallFunctionObjArgs(self->copy, position, grad,
                                                               add ? Py_True : Py_False, NULL)
                                : NULL;
    Py_XDECREF(position);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* What changes nothing when a mean is added to it: -0.0, since -0.0 + x is x for every x, and 0.0 +
 * -0.0 is not. */
static void write_nothing(reducer_object *self, size_t index)
{
    sw_dtype dtype = dtype_of(self, index);
    size_t bytes =
        sw_reducer_layout(self->reducer)->place[index].numel * sw_dtype_size_bytes(dtype);
    size_t real_bytes = sw_dtype_size_bytes(dtype);
    uint8_t *memory = sw_reducer_address(self->reducer, index);
    if (dtype == SW_DTYPE_COMPLEX64 || dtype == SW_DTYPE_COMPLEX128)
        real_bytes /= 2;
    if (bytes)
        memset(memory, 0, bytes);
    for (size_t i = real_bytes - 1; i < bytes; i += real_bytes)
        memory[i] = 0x80;
}

static int place_source(reducer_object *self, size_t index, PyObject *param, PyObject *source,
                        bool add, bool standing)
{
    if (source != Py_None)
        return write_gradient(self, index, param, source, add);
    size_t bytes = sw_reducer_layout(self->reducer)->place[index].numel *
                   sw_dtype_size_bytes(dtype_of(self, index));
    if (!add && standing)
        write_nothing(self, index);
    else if (!add && bytes)
        memset(sw_reducer_address(self->reducer, index), 0, bytes);
    return 0;
}

static int flag_of(PyObject *view, const char *name)
{
    PyObject *value = PyObject_GetAttrString(view, name);
    int flag = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return flag;
}

/* Takes this rank's contribution out of `.grad`. The parameter's memory can be written. */
static int place(reducer_object *self, size_t index)
{
    bool pool = sw_reducer_memory(self->reducer)->transport == SW_TRANSPORT_POOL;
    PyObject *param = PyList_GetItem(self->params, (Py_ssize_t)index);
    PyObject *view = PyList_GetItem(self->views, (Py_ssize_t)index);
    PyObject *grad = param && view ? PyObject_GetAttr(param, self->grad_name) : NULL;
    if (!grad)
        return -1;
    bool ours = grad == view;
    int cleared = ours ? flag_of(view, "_cleared") : 1;
    bool standing = cleared == 0;
    PyObject *source = cleared < 0 ? NULL : ours ? PyObject_GetAttrString(view, "_pending") : grad;
    if (!ours)
        Py_XINCREF(source);
    /* A second gradient of one backward adds to the first; private buckets hold the standing mean
     * themselves. */
    bool add = sw_reducer_is_placed(self->reducer, index) || (standing && !pool);
    int failed = !source || place_source(self, index, param, source, add, standing && pool) < 0;
    bool used = sw_reducer_state(self->reducer) == SW_ROUND_CLOSED /* a hook's turn */
                    ? sw_reducer_used_by_any(self->reducer, index)
                    : sw_reducer_is_used(self->reducer, index);
    if (!failed && ours && source != Py_None)
        failed = PyObject_SetAttrString(view, "_pending", Py_None) < 0;
    else if (!failed && !ours && grad != Py_None && used)
        failed = PyObject_SetAttr(param, self->grad_name, Py_None) < 0;
    if (!failed)
        sw_reducer_place(self->reducer, index, standing && pool);
    Py_XDECREF(source);
    Py_DECREF(grad);
    return failed ? -1 : 0;
}

static int place_bucket(reducer_object *self, size_t bucket)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    for (size_t i = 0; i < layout->bucket[bucket].count; ++i) {
        size_t index = layout->order[layout->bucket[bucket].first + i];
        if (!sw_reducer_is_placed(self->reducer, index) && place(self, index) < 0)
            return -1;
    }
    return 0;
}

/* Sends what can be sent without waiting. */
static int advance(reducer_object *self)
{
    sw_error err;
    sw_status status;
    size_t bucket;
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        status = sw_reducer_advance(self->reducer, &err);
        Py_END_ALLOW_THREADS
        if (reducer_raise(self, status, &err) < 0)
            return -1;
        if (!sw_reducer_is_waiting(self->reducer, &bucket))
            return 0;
        if (place_bucket(self, bucket) < 0)
            return -1;
    }
}

/* A gradient has come before its slot was free. What others are done with is looked after at each
 * such gradient, since those that wait for their place add up. */
static int make_room(reducer_object *self, size_t index)
{
    bool held;
    do {
        if (advance(self) < 0)
            return -1;
        if (sw_reducer_can_place(self->reducer, index))
            return 0;
        Py_BEGIN_ALLOW_THREADS
        held = sw_reducer_hold_back(self->reducer, index);
        Py_END_ALLOW_THREADS
    } while (held);
    return 0;
}

int sw_py_sliced_take(reducer_object *self, size_t index, int64_t task, PyObject *param)
{
    bool ahead = false, came_early;
    sw_error err;
    if (sw_py_gradient_is_hooked_later(self, index) && sw_reducer_pin(self->reducer, index))
        return 0;
    PyObject *grad = PyObject_GetAttr(param, self->grad_name);
    if (!grad)
        return -1;
    bool none = grad == Py_None;
    Py_DECREF(grad);
    if (none)
        return 0;
    if (reducer_raise(self, sw_reducer_mark_ready(self->reducer, index, task, &ahead, &err), &err) <
        0)
        return -1;
    came_early = !sw_reducer_can_place(self->reducer, index);
    if (came_early && make_room(self, index) < 0)
        return -1;
    if (sw_reducer_can_place(self->reducer, index) &&
        !(came_early && sw_reducer_is_placed(self->reducer, index)) && place(self, index) < 0)
        return -1;
    /* One that came early may complete a bucket that has become the next meanwhile. */
    return ahead || came_early ? advance(self) : 0;
}

/* After a round: every parameter that some rank used has its ShardedGradient. One that was not
 * `.grad` meanwhile (zero_grad, which makes that None) may hold what backwards added before. */
static int put_back(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    for (size_t i = 0; i < count; ++i) {
        PyObject *param = PyList_GetItem(self->params, (Py_ssize_t)i),
                 *view = PyList_GetItem(self->views, (Py_ssize_t)i);
        if (sw_reducer_used_by_any(self->reducer, i) &&
            (PyObject_SetAttrString(view, "_cleared", Py_False) < 0 ||
             PyObject_SetAttrString(view, "_pending", Py_None) < 0 ||
             PyObject_SetAttr(param, self->grad_name, view) < 0))
            return -1;
    }
    return 0;
}

/* Says which contributions are on top of the standing mean, before they are placed. */
static int declare_standing(reducer_object *self)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    if (sw_reducer_memory(self->reducer)->transport != SW_TRANSPORT_POOL)
        return 0;
    for (size_t i = 0; i < layout->param_count; ++i) {
        if (sw_reducer_is_placed(self->reducer, i))
            continue;
        PyObject *param = PyList_GetItem(self->params, (Py_ssize_t)i),
                 *view = PyList_GetItem(self->views, (Py_ssize_t)i);
        PyObject *grad = param && view ? PyObject_GetAttr(param, self->grad_name) : NULL;
        int cleared = !grad ? -1 : grad == view ? flag_of(view, "_cleared") : 1;
        Py_XDECREF(grad);
        if (cleared < 0)
            return -1;
        if (cleared == 0)
            sw_reducer_stand(self->reducer, i);
    }
    return 0;
}

int sw_py_sliced_exchange_use(reducer_object *self)
{
    sw_error err;
    sw_status status;
    if (declare_standing(self) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_exchange_use(self->reducer, &err);
    Py_END_ALLOW_THREADS
    return reducer_raise(self, status, &err);
}

int sw_py_sliced_fill(reducer_object *self, size_t bucket)
{
    return place_bucket(self, bucket);
}

int sw_py_sliced_publish(reducer_object *self)
{
    return put_back(self);
}

int sw_py_sliced_finish(reducer_object *self)
{
    sw_error err;
    sw_status status;
    size_t bucket;
    while (sw_reducer_next_unsent(self->reducer, &bucket)) {
        Py_BEGIN_ALLOW_THREADS
        status = sw_reducer_reserve(self->reducer, bucket, &err);
        Py_END_ALLOW_THREADS
        if (reducer_raise(self, status, &err) < 0 || place_bucket(self, bucket) < 0)
            return -1;
        Py_BEGIN_ALLOW_THREADS
        status = sw_reducer_send(self->reducer, bucket, &err);
        Py_END_ALLOW_THREADS
        if (reducer_raise(self, status, &err) < 0)
            return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_finish(self->reducer, &err);
    Py_END_ALLOW_THREADS
    if (reducer_raise(self, status, &err) < 0)
        return -1;
    return put_back(self);
}
