/* gradient_place.c - copies this rank's contributions from `.grad` into buckets.
 *
 * The reducer below knows memory. This file guarantees that each bucket holds the `.grad` of each
 * of its parameters when it is sent: as the view, by one copy, or as zeros if there is none. On the
 * host a gradient is copied when it arrives. On a GPU the gradients of a bucket are copied
 * together, and stay alive until the copies are launched, or until their streams wait for them. */
#include "python/reducer_object.h"

static void *address_of(reducer_object *self, PyObject *tensor)
{
    tensor_view seen;
    if (!sw_py_tensor_view_get(self->exchange, tensor, &seen) &&
        !sw_py_tensor_address(tensor, &seen.data))
        PyErr_Clear();
    return seen.data;
}

/* Returns true if a view still uses our memory: `p.grad.data = x` replaces the memory of the same
 * object. */
static bool is_in_place(reducer_object *self, size_t index, PyObject *view)
{
    return sw_reducer_layout(self->reducer)->place[index].numel == 0 ||
           address_of(self, view) == sw_reducer_address(self->reducer, index);
}

/* An old gradient that the program kept (the view has references beside the list's and ours) keeps
 * its values: it moves to its own memory, and a new view is made. */
PyObject *sw_py_gradient_writable_view(reducer_object *self, size_t index)
{
    PyObject *view = sw_py_item(self->views, index);
    if (!view || (Py_REFCNT(view) == 2 && is_in_place(self, index, view)))
        return view;
    Py_DECREF(view);
    if (reducer_called(PyObject_CallFunction(self->renew, "n", (Py_ssize_t)index)) < 0)
        return NULL;
    view = sw_py_item(self->views, index);
    if (view && self->shapes && !sw_py_tensor_view_get(self->exchange, view, &self->shapes[index]))
        self->shapes[index].ndim = -1;
    return view;
}

bool sw_py_gradient_is_hooked_later(reducer_object *self, size_t index)
{
    PyObject *table = PyList_GetItem(self->hook_tables, (Py_ssize_t)index);
    return table && table != Py_None && PyDict_Size(table) > self->hook_counts[index];
}

int sw_py_gradient_restore(reducer_object *self)
{
    if (self->kept == 0)
        return 0;
    self->kept = 0;
    return reducer_called(sw_py_call(self, "_restore", NULL, NULL));
}

static int take_other(reducer_object *self, size_t index, PyObject *param, PyObject *grad)
{
    SW_PY_OWNED *view = sw_py_gradient_writable_view(self, index);
    if (!view)
        return -1;
    if (grad == Py_None)
        return sw_py_gradient_clear(self, index);
    self->copies++;
    int written = sw_py_gradient_write(self, index, view, grad, false);
    if (written == 1)
        written = reducer_called(PyObject_CallFunctionObjArgs(self->copy, view, grad, NULL));
    if (written == 0 && sw_reducer_is_used(self->reducer, index))
        written = PyObject_SetAttr(param, self->grad_name, view);
    return written;
}

int sw_py_gradient_place(reducer_object *self, size_t index)
{
    if (self->sliced)
        return sw_py_sliced_place(self, index);
    SW_PY_OWNED *param = sw_py_item(self->params, index);
    SW_PY_OWNED *grad = param ? PyObject_GetAttr(param, self->grad_name) : NULL;
    int is_view = grad ? reducer_is_view(self, index, grad) : -1;
    int failed = is_view < 0 ? -1 : 0;
    if (is_view == 0 || (is_view > 0 && !is_in_place(self, index, grad)))
        failed = take_other(self, index, param, grad);
    else if (is_view > 0 && !sw_reducer_is_used(self->reducer, index))
        failed = sw_py_gradient_keep(self, index); /* unchanged if no rank used it */
    if (!failed)
        sw_reducer_place(self->reducer, index, false);
    return failed;
}

static int place_bucket(reducer_object *self, size_t bucket)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    for (size_t i = 0; i < layout->bucket[bucket].count; ++i) {
        size_t index = layout->order[layout->bucket[bucket].first + i];
        if (!sw_reducer_is_placed(self->reducer, index) && sw_py_gradient_place(self, index) < 0)
            return -1;
    }
    return 0;
}

int sw_py_gradient_let_go(reducer_object *self)
{
    if (!self->held || sw_reducer_reads_gradients(self->reducer))
        return 0;
    return PyList_SetSlice(self->held, 0, PyList_Size(self->held), NULL);
}

int sw_py_gradient_take_means(reducer_object *self)
{
    size_t bucket;
    while (sw_reducer_next_mean(self->reducer, &bucket))
        if (reducer_called(PyObject_CallFunction(self->mean_callback, "n", (Py_ssize_t)bucket)) < 0)
            return -1;
    return 0;
}

int sw_py_gradient_fill_bucket(reducer_object *self, size_t bucket)
{
    if (REDUCER_WAIT(self, sw_reducer_reserve(self->reducer, bucket, &err)) < 0 ||
        sw_py_gradient_take_means(self) < 0 || sw_py_gradient_let_go(self) < 0 ||
        place_bucket(self, bucket) < 0 ||
        REDUCER_ENQUEUE(self, sw_reducer_seal(self->reducer, bucket, &err)) < 0)
        return -1;
    return sw_py_gradient_let_go(self);
}

int sw_py_gradient_trace(reducer_object *self, size_t bucket, const char *what)
{
    return self->tracer
               ? reducer_called(PyObject_CallFunction(self->tracer, "ns", (Py_ssize_t)bucket, what))
               : 0;
}

int sw_py_gradient_trace_end(reducer_object *self, size_t bucket, int failed)
{
    sw_py_pending pending = sw_py_set_aside();
    int untold = sw_py_gradient_trace(self, bucket, "end");
    sw_py_bring_back(&pending);
    return failed < 0 || untold < 0 ? -1 : 0;
}

/* Sends every complete bucket, each in a range of its own. */
static int send_traced(reducer_object *self)
{
    size_t bucket;
    while (self->tracer && sw_reducer_next_complete(self->reducer, &bucket))
        if (REDUCER_TRACED(self, bucket, "begin",
                           sw_reducer_send_complete(self->reducer, bucket, &err)) < 0)
            return -1;
    return 0;
}

int sw_py_gradient_advance(reducer_object *self)
{
    size_t bucket;
    for (;;) { /* only calls that may reduce or wait release the GIL */
        if (send_traced(self) < 0 ||
            REDUCER_WAIT(self, sw_reducer_advance(self->reducer, &err)) < 0 ||
            sw_py_gradient_take_means(self) < 0)
            return -1;
        if (!sw_reducer_is_waiting(self->reducer, &bucket))
            return 0;
        if (sw_py_gradient_fill_bucket(self, bucket) < 0)
            return -1;
    }
}

/* At each such gradient, frees slots that peers have finished with, since waiting gradients add
 * up. */
int sw_py_gradient_make_room(reducer_object *self, size_t index)
{
    bool held;
    do {
        if (sw_py_gradient_advance(self) < 0)
            return -1;
        if (sw_reducer_can_place(self->reducer, index))
            return 0;
        SW_PY_DO_WITHOUT_GIL(held = sw_reducer_hold_back(self->reducer, index));
    } while (held);
    return 0;
}
