/* gradient_round.c - what a `.grad` is, and when a round begins and ends.
 *
 * The reducer below knows memory; this file keeps the promise that, whenever a bucket is sent, the
 * `.grad` of each of its parameters lies in it: as the view, by one copy, or as zeros when there is
 * none. */
#include <string.h>

#include "python/reducer_object.h"

/* Peers come to the end of their backward within a step, as a rule. */
static const int64_t abandon_budget_ns = INT64_C(10000000000);

/* Whether `grad` lies in memory just as its view does, so that its bytes can be copied as they are.
 * Lazily negated and conjugated tensors look the same from here: the first are views of complex
 * ones, so they have strides of their own unless they have one element; the second are complex. */
bool sw_py_gradient_has_layout(const tensor_view *grad, const tensor_view *shape)
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

static int copy_gradient(reducer_object *self, size_t index, PyObject *view, PyObject *grad)
{
    tensor_view seen;
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    self->copies++;
    if (self->exchange && self->shapes && sw_py_tensor_view_get(self->exchange, grad, &seen) &&
        sw_py_gradient_has_layout(&seen, &self->shapes[index])) {
        size_t bytes = layout->place[index].numel *
                       sw_dtype_size_bytes(layout->bucket[layout->place[index].bucket].dtype);
        if (bytes)
            sw_copy_streaming(sw_reducer_address(self->reducer, index), seen.data, bytes);
        return 0;
    }
    PyObject *result = PyObject_CallFunctionObjArgs(self->copy, view, grad, NULL);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static void *address_of(reducer_object *self, PyObject *tensor)
{
    tensor_view seen;
    if (sw_py_tensor_view_get(self->exchange, tensor, &seen))
        return seen.data;
    PyObject *method = PyObject_GetAttrString(tensor, "data_ptr");
    PyObject *number = method ? PyObject_CallNoArgs(method) : NULL;
    void *address = number ? PyLong_AsVoidPtr(number) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(method);
    PyErr_Clear();
    return address;
}

/* Whether a view lies in our memory still: `p.grad.data = x` gives the same object other memory. */
static bool is_in_place(reducer_object *self, size_t index, PyObject *view)
{
    return sw_reducer_layout(self->reducer)->place[index].numel == 0 ||
           address_of(self, view) == sw_reducer_address(self->reducer, index);
}

/* The view of a parameter, about to be overwritten while `.grad` is something else. Where somebody
 * kept the old gradient (the view is in other hands), it keeps its values: it moves to memory of
 * its own, and a new view is made. Borrowed. */
static PyObject *writable_view(reducer_object *self, size_t index)
{
    PyObject *view = PyList_GetItem(self->views, (Py_ssize_t)index);
    if (!view || (Py_REFCNT(view) == 1 && is_in_place(self, index, view)))
        return view;
    PyObject *position = PyLong_FromSize_t(index);
    PyObject *result = position ? PyObject_CallFunctionObjArgs(self->renew, position, NULL) : NULL;
    Py_XDECREF(position);
    Py_XDECREF(result);
    if (!result)
        return NULL;
    view = PyList_GetItem(self->views, (Py_ssize_t)index);
    if (self->shapes && !sw_py_tensor_view_get(self->exchange, view, &self->shapes[index]))
        self->shapes[index].ndim = -1;
    return view;
}

/* Whether somebody else has hooked a parameter's gradient after us: its hook runs after ours, and
 * may change it. */
bool sw_py_gradient_is_hooked_later(reducer_object *self, size_t index)
{
    PyObject *table = PyList_GetItem(self->hook_tables, (Py_ssize_t)index);
    return table && table != Py_None && PyDict_Size(table) > self->hook_counts[index];
}

static int current_task(reducer_object *self, int64_t *task)
{
    PyObject *result = PyObject_CallFunctionObjArgs(self->task_id, NULL);
    *task = result ? PyLong_AsLongLong(result) : -1;
    Py_XDECREF(result);
    return PyErr_Occurred() ? -1 : 0;
}

/* Arranges that close() runs at the end of graph task `task`. Nothing is sent yet: a backward that
 * reaches no parameter (torch.autograd.grad, a loss apart) is not a round. */
static int announce(reducer_object *self, int64_t task)
{
    PyObject *result = PyObject_CallFunctionObjArgs(self->open, NULL);
    int synchronised = result ? PyObject_IsTrue(result) : -1;
    Py_XDECREF(result);
    if (synchronised < 0)
        return -1;
    self->announced_task = task;
    self->announced_sync = synchronised;
    return 0;
}

/* At the first gradient: in the announced graph task, or in one nested in it. */
static int open_round(reducer_object *self, int64_t task)
{
    sw_error err;
    if (self->announced_task == NO_TASK && announce(self, task) < 0)
        return -1;
    if (self->announced_sync)
        self->pending_forward = false;
    return reducer_raise(
        self, sw_reducer_open(self->reducer, self->announced_task, self->announced_sync, &err),
        &err);
}

static bool bucket_takes_part(reducer_object *self, size_t bucket)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    return sw_reducer_takes_part(self->reducer, layout->order[layout->bucket[bucket].first]);
}

/* Gives a bucket to the hook. */
static int run_callback(reducer_object *self, size_t bucket, bool is_early)
{
    size_t after = bucket + 1, count = sw_reducer_layout(self->reducer)->bucket_count;
    while (after < count && !bucket_takes_part(self, after))
        ++after;
    PyObject *result =
        PyObject_CallFunction(self->bucket_callback, "nOO", (Py_ssize_t)bucket,
                              after == count ? Py_True : Py_False, is_early ? Py_True : Py_False);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Complete buckets, while the backward goes on. */
static int hand_over(reducer_object *self)
{
    size_t bucket;
    while (sw_reducer_hand_over(self->reducer, &bucket))
        if (run_callback(self, bucket, true) < 0)
            return -1;
    return 0;
}

int sw_py_reducer_take_gradient(reducer_object *self, size_t index, PyObject *param)
{
    int64_t task;
    bool advance = false;
    sw_error err;
    sw_status status = SW_OK;
    if (reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return -1;
    if (sw_reducer_state(self->reducer) == SW_ROUND_CLOSED && open_round(self, task) < 0)
        return -1;
    if (sw_reducer_state(self->reducer) == SW_ROUND_LOCAL)
        return reducer_raise(self, sw_reducer_mark(self->reducer, index, task, &advance, &err),
                             &err);
    if (!sw_py_comm_enter(self->comm)) /* a forked child ends here */
        return -1;
    if (self->sliced) {
        int result = sw_py_sliced_take(self, index, task, param);
        sw_py_comm_leave(self->comm);
        return result;
    }
    if (sw_py_gradient_is_hooked_later(self, index) && sw_reducer_pin(self->reducer, index)) {
        sw_py_comm_leave(self->comm);
        return 0;
    }
    PyObject *grad = PyObject_GetAttr(param, self->grad_name);
    PyObject *view = PyList_GetItem(self->views, (Py_ssize_t)index);
    int failed = !grad || !view;
    bool ours = !failed && grad == view && is_in_place(self, index, view);
    if (!failed && grad != Py_None && !sw_reducer_is_sent(self->reducer, index) && !ours) {
        view = writable_view(self, index);
        failed = !view || copy_gradient(self, index, view, grad) < 0 ||
                 PyObject_SetAttr(param, self->grad_name, view) < 0;
    }
    if (!failed && grad != Py_None)
        failed = reducer_raise(self, sw_reducer_mark(self->reducer, index, task, &advance, &err),
                               &err) < 0;
    if (!failed && advance && self->bucket_wait) {
        failed = hand_over(self) < 0;
    } else if (!failed && advance) { /* only what may fold or wait gives the GIL away */
        Py_BEGIN_ALLOW_THREADS
        status = sw_reducer_advance(self->reducer, &err);
        Py_END_ALLOW_THREADS
        failed = reducer_raise(self, status, &err) < 0;
    }
    Py_XDECREF(grad);
    sw_py_comm_leave(self->comm);
    return failed ? -1 : 0;
}

/* Puts into place what no hook put there in this round. */
static int fill(reducer_object *self)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    for (size_t i = 0; i < layout->param_count; ++i) {
        if (sw_reducer_is_placed(self->reducer, i) || !sw_reducer_takes_part(self->reducer, i) ||
            sw_reducer_is_sent(self->reducer, i))
            continue;
        PyObject *grad =
            PyObject_GetAttr(PyList_GetItem(self->params, (Py_ssize_t)i), self->grad_name);
        PyObject *view = PyList_GetItem(self->views, (Py_ssize_t)i);
        bool ours = grad && view && grad == view && is_in_place(self, i, view);
        if (grad && !ours)
            view = writable_view(self, i);
        int failed = !grad || !view;
        if (!failed && grad == Py_None) {
            size_t bytes = layout->place[i].numel *
                           sw_dtype_size_bytes(layout->bucket[layout->place[i].bucket].dtype);
            if (bytes)
                memset(sw_reducer_address(self->reducer, i), 0, bytes);
        } else if (!failed && !ours) {
            failed = copy_gradient(self, i, view, grad) < 0;
        }
        Py_XDECREF(grad);
        if (failed)
            return -1;
    }
    return 0;
}

/* After a round: the view becomes `.grad` of every parameter that some rank used. */
static int publish(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    for (size_t i = 0; i < count; ++i) {
        if (sw_reducer_is_placed(self->reducer, i) || !sw_reducer_used_by_any(self->reducer, i))
            continue;
        PyObject *param = PyList_GetItem(self->params, (Py_ssize_t)i);
        if (PyObject_SetAttr(param, self->grad_name, PyList_GetItem(self->views, (Py_ssize_t)i)) <
            0)
            return -1;
    }
    return 0;
}

/* After a round: ranks whose optimizers stepped with different hyperparameters say so, all of them.
 */
static int compare_steps(reducer_object *self)
{
    if (!sw_reducer_take_unlike_steps(self->reducer) || !self->unlike)
        return 0;
    PyObject *result = PyObject_CallFunctionObjArgs(self->unlike, NULL);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Waits for what the hook has begun. An exception that is set already stays the one. */
static int wait_for_callbacks(reducer_object *self)
{
    PyObject *type, *value, *trace;
    if (!self->bucket_wait)
        return 0;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *result = PyObject_CallFunctionObjArgs(self->bucket_wait, NULL);
    Py_XDECREF(result);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    return result && !type ? 0 : -1;
}

/* A user's hook reduces each bucket that takes part, in order. */
static int run_callbacks(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->bucket_count;
    int failed = 0;
    for (size_t b = 0; b < count && !failed; ++b) {
        if (!bucket_takes_part(self, b) || sw_reducer_is_handed_over(self->reducer, b))
            continue;
        failed =
            (self->sliced && sw_py_sliced_fill(self, b) < 0) || run_callback(self, b, false) < 0;
    }
    return wait_for_callbacks(self) < 0 || failed ? -1 : 0;
}

/* A round was abandoned by some rank. What one rank handed over before that waits for every other
 * rank's part: all reduce it, and nothing else. */
static int run_crossed(reducer_object *self, bool contributes)
{
    size_t count = sw_reducer_layout(self->reducer)->bucket_count;
    int failed = 0;
    if (!self->bucket_wait || !sw_reducer_has_met(self->reducer))
        return 0;
    for (size_t b = 0; b < count && !failed; ++b) {
        if (!sw_reducer_is_handed_over_by_any(self->reducer, b) ||
            sw_reducer_is_handed_over(self->reducer, b))
            continue;
        if (!contributes)
            sw_reducer_clear_bucket(self->reducer, b);
        failed = run_callback(self, b, true) < 0;
    }
    return wait_for_callbacks(self) < 0 || failed ? -1 : 0;
}

/* A user's hook owns the buckets: the use bits are exchanged first, then it is called for each, and
 * may use the communicator itself. */
static int finish_with_callback(reducer_object *self)
{
    sw_error err;
    sw_status status;
    if (!sw_py_comm_enter(self->comm))
        return -1;
    if (self->sliced) {
        int failed = sw_py_sliced_exchange_use(self);
        sw_py_comm_leave(self->comm);
        return failed || run_callbacks(self) < 0 ? -1 : sw_py_sliced_publish(self);
    }
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_exchange_use(self->reducer, &err);
    Py_END_ALLOW_THREADS
    sw_py_comm_leave(self->comm);
    if (status == SW_OK)
        return run_callbacks(self);
    /* the same sentence as if nothing had been handed over, once that is where it belongs */
    return run_crossed(self, true) < 0 ? -1 : reducer_raise(self, status, &err);
}

static int finish_round(reducer_object *self)
{
    sw_error err;
    sw_status status;
    if (sw_reducer_state(self->reducer) == SW_ROUND_LOCAL)
        return reducer_raise(self, sw_reducer_finish(self->reducer, &err), &err);
    if (self->sliced && self->bucket_callback)
        return finish_with_callback(self);
    if (!sw_py_comm_enter(self->comm))
        return -1;
    if (self->sliced) {
        int result = sw_py_sliced_finish(self);
        sw_py_comm_leave(self->comm);
        return result;
    }
    int failed = fill(self) < 0;
    if (!failed && !self->bucket_callback) {
        Py_BEGIN_ALLOW_THREADS
        status = sw_reducer_finish(self->reducer, &err);
        Py_END_ALLOW_THREADS
        failed = reducer_raise(self, status, &err) < 0;
    }
    sw_py_comm_leave(self->comm);
    if (!failed && self->bucket_callback)
        failed = finish_with_callback(self) < 0;
    return failed || publish(self) < 0 ? -1 : compare_steps(self);
}

static int abandon(reducer_object *self)
{
    sw_error err;
    sw_status status;
    if (sw_reducer_state(self->reducer) != SW_ROUND_OPEN)
        return reducer_raise(self, sw_reducer_abandon(self->reducer, &err), &err);
    if (!sw_py_comm_enter(self->comm))
        return -1;
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_abandon(self->reducer, &err);
    Py_END_ALLOW_THREADS
    sw_py_comm_leave(self->comm);
    return run_crossed(self, false) < 0 ? -1 : reducer_raise(self, status, &err);
}

/* With a user's hook: as the others, but over zeros. */
static int shadow_callbacks(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->bucket_count;
    for (size_t b = 0; b < count; ++b)
        if (bucket_takes_part(self, b))
            sw_reducer_clear_bucket(self->reducer, b);
    return run_callbacks(self);
}

static PyObject *none_or_null(int failed)
{
    if (failed < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *sw_py_round_forward(PyObject *op, PyObject *synchronised)
{
    reducer_object *self = (reducer_object *)op;
    int64_t task;
    int sync = PyObject_IsTrue(synchronised);
    if (sync < 0 || reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (task >= 0)
        Py_RETURN_NONE; /* recomputed inside a backward: not a forward of its own */
    self->announced_task = NO_TASK;
    if (sw_reducer_state(self->reducer) != SW_ROUND_CLOSED && abandon(self) < 0)
        return NULL;
    if (sync)
        self->pending_forward = true;
    Py_RETURN_NONE;
}

PyObject *sw_py_round_announce(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    int64_t task;
    (void)unused;
    if (reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (self->announced_task == task)
        Py_RETURN_NONE;
    if (sw_reducer_state(self->reducer) != SW_ROUND_CLOSED && abandon(self) < 0)
        return NULL;
    return none_or_null(announce(self, task));
}

PyObject *sw_py_round_close(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    (void)unused;
    if (reducer_check_ready(self) < 0)
        return NULL;
    self->announced_task = NO_TASK;
    if (sw_reducer_state(self->reducer) == SW_ROUND_CLOSED)
        Py_RETURN_NONE; /* the backward reached no parameter */
    return none_or_null(finish_round(self));
}

/* A backward ended without its callback: an exception is on its way to the caller. Peers are told
 * now, as long as that takes no time to speak of; the caller's next forward does the rest. */
PyObject *sw_py_round_fail(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    sw_error err;
    sw_status status;
    (void)unused;
    if (reducer_check_ready(self) < 0)
        return NULL;
    if (sw_reducer_state(self->reducer) != SW_ROUND_OPEN)
        Py_RETURN_NONE;
    if (!sw_py_comm_enter(self->comm))
        return NULL;
    self->announced_task = NO_TASK;
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_try_abandon(self->reducer, abandon_budget_ns, &err);
    Py_END_ALLOW_THREADS
    sw_py_comm_leave(self->comm);
    return none_or_null(reducer_raise(self, status, &err));
}

PyObject *sw_py_round_close_pending(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    sw_error err;
    int64_t task;
    (void)unused;
    if (reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (task >= 0) {
        PyErr_SetString(reducer_state_of(self)->error,
                        "optimizer.step() was called inside a backward, before its gradients were "
                        "averaged: call it after backward() has returned");
        return NULL;
    }
    if (sw_reducer_state(self->reducer) != SW_ROUND_CLOSED && self->announced_task != NO_TASK) {
        /* an exception left the backward open, and the caller steps all the same */
        self->announced_task = NO_TASK;
        if (abandon(self) < 0)
            return NULL;
    }
    if (!self->pending_forward || sw_reducer_state(self->reducer) != SW_ROUND_CLOSED)
        Py_RETURN_NONE;
    self->pending_forward = false;
    if (reducer_raise(self, sw_reducer_open(self->reducer, -1, true, &err), &err) < 0)
        return NULL;
    return none_or_null(finish_round(self));
}

/* Whether `.grad` holds what no round has averaged, as far as can be seen: a tensor, but not a
 * standing mean of which this rank has a slice alone. 1, 0, or -1 with an exception. */
static int holds_contribution(reducer_object *self, size_t index)
{
    PyObject *param = PyList_GetItem(self->params, (Py_ssize_t)index);
    PyObject *view = PyList_GetItem(self->views, (Py_ssize_t)index);
    PyObject *grad = param && view ? PyObject_GetAttr(param, self->grad_name) : NULL;
    int result = !grad ? -1 : grad != Py_None;
    if (result > 0 && self->sliced && grad == view) {
        PyObject *pending = PyObject_GetAttrString(view, "_pending");
        result = !pending ? -1 : pending != Py_None;
        Py_XDECREF(pending);
    }
    Py_XDECREF(grad);
    return result;
}

/* A round that no backward announced: what stands in `.grad` are the contributions. */
PyObject *sw_py_round_average(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    sw_error err;
    int64_t task;
    bool advance;
    (void)unused;
    if (reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (task >= 0 || sw_reducer_state(self->reducer) != SW_ROUND_CLOSED) {
        PyErr_SetString(reducer_state_of(self)->error,
                        "gradients are averaged by an explicit call outside of a backward only");
        return NULL;
    }
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    for (size_t i = 0; i < count; ++i) {
        int holds = sw_reducer_takes_part(self->reducer, i) ? holds_contribution(self, i) : 0;
        if (holds < 0)
            return NULL;
        if (holds &&
            reducer_raise(self, sw_reducer_mark_ready(self->reducer, i, task, &advance, &err),
                          &err) < 0)
            return NULL;
    }
    self->pending_forward = false;
    if (reducer_raise(self, sw_reducer_open(self->reducer, -1, true, &err), &err) < 0)
        return NULL;
    return none_or_null(finish_round(self));
}

PyObject *sw_py_round_shadow(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    sw_error err;
    sw_status status;
    (void)unused;
    if (reducer_check_ready(self) < 0 || !sw_py_comm_enter(self->comm))
        return NULL;
    self->pending_forward = false;
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_shadow(self->reducer, &err);
    Py_END_ALLOW_THREADS
    sw_py_comm_leave(self->comm);
    if (status != SW_OK && run_crossed(self, false) < 0)
        return NULL;
    if (reducer_raise(self, status, &err) < 0)
        return NULL;
    return none_or_null(self->bucket_callback && shadow_callbacks(self) < 0 ? -1
                                                                            : compare_steps(self));
}
