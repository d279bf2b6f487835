/* gradient_round.c - the begin and end of rounds: maps autograd's graph tasks to moves of the
 * reducer's state machine, on host and GPU alike. */
#include <string.h>

#include "python/reducer_object.h"

/* Peers usually end their backward within a step's time. */
static const int64_t abandon_budget_ns = INT64_C(10000000000);

static PyObject *none_or_null(int failed)
{
    if (failed < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int current_task(reducer_object *self, int64_t *task)
{
    SW_PY_OWNED *result = PyObject_CallFunctionObjArgs(self->task_id, NULL);
    *task = result ? PyLong_AsLongLong(result) : -1;
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- failures on a GPU ---- */

/* Returns err's message, and this rank's step if ranks noted different ones. What fails here must
 * not keep the reason from the peers, so the exception of describe() is only reported. */
static PyObject *reason_of(reducer_object *self, const sw_error *err)
{
    PyObject *reason = sw_py_text(err->message);
    if (!reason || !sw_reducer_take_unlike_steps(self->reducer) || self->describe == Py_None)
        return reason;
    SW_PY_OWNED *said = PyObject_CallFunctionObjArgs(self->describe, NULL);
    PyObject *longer = said ? PyUnicode_Concat(reason, said) : NULL;
    if (!longer) {
        PyErr_WriteUnraisable(self->describe);
        return reason;
    }
    Py_DECREF(reason);
    return longer;
}

/* Peers wait for this rank on their GPUs, where enqueued work cannot be cancelled: the subclass
 * aborts the communicators with one message for all ranks and raises it. */
static int end_communicators(reducer_object *self, const sw_error *err)
{
    SW_PY_OWNED *reason = reason_of(self, err);
    if (!reason) { /* no memory for the text: peers hear of the end without it */
        PyErr_Clear();
        reason = PyUnicode_FromString("");
    }
    SW_PY_OWNED *result = reason ? sw_py_call(self, "_end", reason, NULL) : NULL;
    if (result) /* it should have raised */
        sw_py_raise(self, err, NULL);
    return -1;
}

/* Checks whether ranks differed in an earlier round. */
static int check_tags(reducer_object *self)
{
    sw_error err;
    if (!self->gpu)
        return 0;
    if (sw_py_reducer_use_stream(self) < 0 || reducer_enter(self) < 0)
        return -1;
    sw_status status = SW_PY_WITHOUT_GIL(sw_reducer_check(self->reducer, &err));
    int failed = status == SW_E_MISMATCH ? 0 : reducer_raise(self, status, &err);
    reducer_leave(self);
    return status == SW_E_MISMATCH ? end_communicators(self, &err) : failed;
}

/* ---- a round begins ---- */

/* On a GPU, orders later writes on torch's current stream after the optimizer. */
static int arrive(reducer_object *self)
{
    if (!self->gpu)
        return 0;
    if (sw_py_reducer_use_stream(self) < 0)
        return -1;
    return REDUCER_INSIDE(self, REDUCER_WAIT(self, sw_reducer_arrive(self->reducer, &err)));
}

/* Arranges that close() runs at the end of graph task `task`. Nothing is sent yet: a backward that
 * reaches no parameter (torch.autograd.grad, a separate loss) is not a round. */
static int announce(reducer_object *self, int64_t task)
{
    SW_PY_OWNED *result = PyObject_CallFunctionObjArgs(self->open, NULL);
    int synchronised = result ? PyObject_IsTrue(result) : -1;
    if (synchronised < 0)
        return -1;
    self->announced_task = task;
    self->announced_sync = synchronised;
    return arrive(self);
}

/* Opens a round at the first gradient of the announced graph task, or of one nested in it. */
static int open_round(reducer_object *self, int64_t task)
{
    if (self->announced_task == NO_TASK && announce(self, task) < 0)
        return -1;
    if (self->announced_sync)
        self->pending_forward = false;
    self->send_is_due = false;
    if (REDUCER_DO(self, sw_reducer_open(self->reducer, self->announced_task, self->announced_sync,
                                         &err)) < 0)
        return -1;
    return self->announcer && self->announced_sync ? sw_py_sliced_announce(self) : 0;
}

/* ---- communication hooks ---- */

static bool bucket_takes_part(reducer_object *self, size_t bucket)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    return sw_reducer_takes_part(self->reducer, layout->order[layout->bucket[bucket].first]);
}

/* Calls the hook with a bucket, or compresses it. */
static int run_callback(reducer_object *self, size_t bucket)
{
    size_t after = bucket + 1, count = sw_reducer_layout(self->reducer)->bucket_count;
    if (self->compresses)
        return REDUCER_INSIDE(self,
                              REDUCER_TRACED(self, bucket, "begin",
                                             sw_reducer_compress(self->reducer, bucket, &err)));
    while (after < count && !bucket_takes_part(self, after))
        ++after;
    return reducer_called(PyObject_CallFunction(self->bucket_callback, "nO", (Py_ssize_t)bucket,
                                                after == count ? Py_True : Py_False));
}

/* Returns true if buckets are averaged one by one once the use bits are known. */
static bool averages_at_end(const reducer_object *self)
{
    return self->bucket_callback || self->compresses;
}

static int clear_bucket(reducer_object *self, size_t bucket)
{
    if (REDUCER_ENQUEUE(self, sw_reducer_reserve(self->reducer, bucket, &err)) < 0)
        return -1;
    return REDUCER_ENQUEUE(self, sw_reducer_clear_bucket(self->reducer, bucket, &err));
}

/* Sliced buckets of a hook share memory, so each is filled when its turn comes, with zeros on a
 * rank that contributes nothing. */
static int fill_for_hook(reducer_object *self, size_t bucket, bool contributes)
{
    if (contributes && !self->sliced)
        return 0;
    return REDUCER_INSIDE(self, contributes ? sw_py_gradient_fill_bucket(self, bucket)
                                            : clear_bucket(self, bucket));
}

/* Averages each participating bucket, in order. */
static int run_callbacks(reducer_object *self, bool contributes)
{
    size_t count = sw_reducer_layout(self->reducer)->bucket_count;
    for (size_t b = 0; b < count; ++b)
        if (bucket_takes_part(self, b) &&
            (fill_for_hook(self, b, contributes) < 0 || run_callback(self, b) < 0))
            return -1;
    return 0;
}

/* ---- gradients arrive ---- */

/* Marks the gradient as written on torch's current stream. */
static int produce(reducer_object *self, size_t index)
{
    return sw_py_reducer_use_stream(self) < 0
               ? -1
               : REDUCER_ENQUEUE(self, sw_reducer_produce(self->reducer, index, &err));
}

/* Sends the buckets that earlier gradients completed. A mean overwrites the memory of `.grad`,
 * which hooks of other code on the same gradient read after ours: so it begins at the next
 * gradient. */
static int send_due(reducer_object *self)
{
    if (!self->send_is_due)
        return 0;
    self->send_is_due = false;
    return sw_py_gradient_advance(self);
}

/* Takes the gradient of a parameter. The communicator is entered. */
static int take(reducer_object *self, size_t index, int64_t task, PyObject *param)
{
    bool due = false, early = false;
    if ((self->gpu && produce(self, index) < 0) || send_due(self) < 0)
        return -1;
    if (sw_py_gradient_is_hooked_later(self, index) && sw_reducer_pin(self->reducer, index))
        return 0;
    PyObject *grad = PyObject_GetAttr(param, self->grad_name);
    Py_XDECREF(grad); /* `param` keeps it */
    if (!grad || grad == Py_None)
        return grad ? 0 : -1;
    if (REDUCER_DO(self, sw_reducer_mark_ready(self->reducer, index, task, &due, &err)) < 0)
        return -1;
    if (!sw_reducer_get_traits(self->reducer)->places_late) {
        early = !sw_reducer_can_place(self->reducer, index);
        if (early && sw_py_gradient_make_room(self, index) < 0)
            return -1;
        if (sw_reducer_can_place(self->reducer, index) &&
            !(early && sw_reducer_is_placed(self->reducer, index)) &&
            sw_py_gradient_place(self, index) < 0)
            return -1;
    }
    /* An early gradient may complete a bucket that has since become the next one. */
    self->send_is_due = due || early;
    return 0;
}

int sw_py_reducer_take_gradient(reducer_object *self, size_t index, PyObject *param)
{
    int64_t task;
    bool advance;
    if (reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return -1;
    if (sw_reducer_state(self->reducer) == SW_ROUND_CLOSED && open_round(self, task) < 0)
        return -1;
    if (sw_reducer_state(self->reducer) == SW_ROUND_LOCAL)
        return REDUCER_DO(self, sw_reducer_mark_ready(self->reducer, index, task, &advance, &err));
    return REDUCER_INSIDE(self, take(self, index, task, param)); /* not in a forked child */
}

/* A part of the backward is over: a parameter of it that has no gradient gets none. Its bucket must
 * not wait for the end of the backward, since others' GPUs wait for the mean, and gathers behind.
 * Nor does a complete bucket wait for the next gradient: so means and gathers, which travel over
 * two communicators, have one order on all ranks. */
PyObject *sw_py_reducer_pass_over(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[2] = {{0}};
    int64_t task;
    bool waited = false;
    if (!sw_py_read("pass_over indices:O | expected:p", args, NULL, a) ||
        reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (sw_reducer_state(self->reducer) == SW_ROUND_CLOSED || task != self->announced_task)
        Py_RETURN_FALSE;
    SW_PY_OWNED *list = PySequence_List(a[0].o);
    for (Py_ssize_t i = 0; list && i < PyList_Size(list); ++i) {
        size_t index = PyLong_AsSize_t(PyList_GetItem(list, i));
        if (PyErr_Occurred() || !sw_py_reducer_has_index(self, (Py_ssize_t)index))
            return NULL;
        waited |= sw_reducer_pass(self->reducer, index, a[1].p);
    }
    self->send_is_due |= waited;
    if (!list || (self->send_is_due &&
                  (sw_py_reducer_use_stream(self) < 0 || REDUCER_INSIDE(self, send_due(self)) < 0)))
        return NULL;
    Py_RETURN_TRUE;
}

/* ---- a round ends ---- */

/* Ends a round: the view becomes `.grad` of every parameter that some rank used. */
static int publish(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    if (self->sliced && sw_py_sliced_publish(self) < 0)
        return -1;
    for (size_t i = 0; i < count && !self->sliced; ++i) {
        if (sw_reducer_is_ready(self->reducer, i) || !sw_reducer_used_by_any(self->reducer, i))
            continue;
        SW_PY_OWNED *param = sw_py_item(self->params, i), *view = sw_py_item(self->views, i);
        if (!param || !view || PyObject_SetAttr(param, self->grad_name, view) < 0)
            return -1;
    }
    return sw_py_gradient_restore(self);
}

/* Ends a round: raises on all ranks if optimizers stepped with different hyperparameters; tells all
 * ranks if they ran different numbers of forwards. */
static int compare_ranks(reducer_object *self)
{
    const sw_forward_counts *counts = sw_reducer_forward_counts(self->reducer);
    uint32_t step, rounds;
    if (self->gpu || self->unlike == Py_None)
        return 0;
    if (sw_reducer_take_unlike_steps(self->reducer))
        return reducer_called(PyObject_CallFunctionObjArgs(self->unlike, NULL));
    if (counts->most == counts->fewest)
        return 0;
    sw_reducer_position(self->reducer, &step, &rounds);
    return reducer_called(PyObject_CallFunction(self->unlike, "iIiIII", counts->most_rank,
                                                counts->most, counts->fewest_rank, counts->fewest,
                                                rounds, step + 1));
}

/* Notes the digest that ranks must agree on besides their steps. */
static int note_order(reducer_object *self)
{
    if (!self->order)
        return 0;
    SW_PY_OWNED *digest = PyObject_CallFunctionObjArgs(self->order, NULL);
    unsigned long long value = digest ? PyLong_AsUnsignedLongLong(digest) : 0;
    if (PyErr_Occurred())
        return -1;
    sw_reducer_set_digest(self->reducer, (uint32_t)value);
    return 0;
}

/* Ends a round in which ranks also compare the order of their units. */
static int end_in_order(reducer_object *self, sw_status (*end)(sw_reducer *, sw_error *))
{
    return note_order(self) < 0 ? -1 : REDUCER_WAIT(self, end(self->reducer, &err));
}

/* Exchanges only the use bits, since a user's hook averages the buckets. */
static int exchange_use(reducer_object *self)
{
    return end_in_order(self, sw_reducer_exchange_use);
}

/* Prepares for the hook: places every gradient in its bucket, or tells ranks which means stand. */
static int prepare_for_hook(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->bucket_count;
    if (self->sliced)
        return sw_py_sliced_declare_accumulated(self);
    for (size_t b = 0; b < count; ++b)
        if (bucket_takes_part(self, b) && sw_py_gradient_fill_bucket(self, b) < 0)
            return -1;
    return 0;
}

/* A user's hook owns the buckets. The use bits are exchanged first; then the hook is called with
 * each bucket, and may use the communicator itself. */
static int finish_with_callback(reducer_object *self)
{
    if (reducer_enter(self) < 0)
        return -1;
    int failed = send_due(self) < 0 ? -1 : prepare_for_hook(self);
    int differ = failed ? 0 : exchange_use(self);
    reducer_leave(self);
    return failed < 0 || differ < 0 ? -1 : run_callbacks(self, true);
}

/* Sends all buckets that have not been sent. */
static int send_rest(reducer_object *self)
{
    size_t bucket;
    while (sw_reducer_next_unsent(self->reducer, &bucket))
        if (sw_py_gradient_fill_bucket(self, bucket) < 0 ||
            REDUCER_TRACED(self, bucket, "begin", sw_reducer_send(self->reducer, bucket, &err)) < 0)
            return -1;
    return 0;
}

/* In a round that a profiler records: waits for each bucket in a range of its own. */
static int wait_traced(reducer_object *self)
{
    for (size_t b = 0; self->tracer && b < reducer_bucket_count(self); ++b)
        if (bucket_takes_part(self, b) &&
            REDUCER_TRACED(self, b, "wait", sw_reducer_await(self->reducer, b, &err)) < 0)
            return -1;
    return 0;
}

static int finish_sent(reducer_object *self)
{
    return end_in_order(self, sw_reducer_finish) < 0 ? -1 : sw_py_gradient_let_go(self);
}

/* Waits for each bucket in turn, so that it is taken while peers complete the next ones. */
static int take_rest(reducer_object *self)
{
    for (size_t b = 0; self->mean_callback && b < reducer_bucket_count(self); ++b)
        if (bucket_takes_part(self, b) &&
            (REDUCER_WAIT(self, sw_reducer_await(self->reducer, b, &err)) < 0 ||
             sw_py_gradient_advance(self) < 0))
            return -1;
    return 0;
}

static int finish_buckets(reducer_object *self)
{
    return send_rest(self) < 0 || wait_traced(self) < 0 || take_rest(self) < 0 ? -1
                                                                               : finish_sent(self);
}

static int finish_round(reducer_object *self)
{
    if (sw_reducer_state(self->reducer) == SW_ROUND_LOCAL)
        return REDUCER_DO(self, sw_reducer_finish(self->reducer, &err));
    if (sw_py_reducer_use_stream(self) < 0)
        return -1;
    int failed = averages_at_end(self) ? finish_with_callback(self)
                                       : REDUCER_INSIDE(self, finish_buckets(self));
    return failed < 0 || publish(self) < 0 ? -1 : compare_ranks(self);
}

/* Peers may have taken means of this round, and no rank can undo that. */
static bool is_half_taken(const reducer_object *self)
{
    return sw_reducer_is_half_taken(self->reducer) &&
           self->comm->comm->ops->is_alive(self->comm->comm);
}

static int end_half_taken(reducer_object *self)
{
    sw_error err;
    sw_status status = sw_comm_give_up(
        self->comm->comm, SW_E_COMM, &err,
        "a backward failed on rank %d after buckets had left: with step_in_backward=True some "
        "parameters have made this step and others have not, so begin again from a checkpoint",
        self->comm->rank);
    return reducer_raise(self, status, &err);
}

static int abandon(reducer_object *self)
{
    if (is_half_taken(self))
        return end_half_taken(self);
    bool can_abandon = sw_reducer_get_traits(self->reducer)->can_abandon;
    if (sw_reducer_state(self->reducer) != SW_ROUND_OPEN)
        return REDUCER_DO(self, sw_reducer_abandon(self->reducer, &err));
    if (can_abandon && reducer_enter(self) < 0)
        return -1;
    sw_error err;
    sw_status status = SW_PY_WITHOUT_GIL(sw_reducer_abandon(self->reducer, &err));
    if (!can_abandon)
        return end_communicators(self, &err);
    reducer_leave(self);
    return reducer_raise(self, status, &err);
}

/* ---- methods ---- */

PyObject *sw_py_reducer_forward(PyObject *op, PyObject *synchronised)
{
    reducer_object *self = (reducer_object *)op;
    int64_t task;
    int sync = PyObject_IsTrue(synchronised);
    if (sync < 0 || reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (task >= 0)
        Py_RETURN_NONE; /* a recomputation inside a backward is not a forward */
    if (check_tags(self) < 0)
        return NULL;
    self->announced_task = NO_TASK;
    if (sw_reducer_state(self->reducer) != SW_ROUND_CLOSED && abandon(self) < 0)
        return NULL;
    sw_account_enter(SW_PHASE_FORWARD);
    if (sync) {
        self->pending_forward = true;
        sw_reducer_count_forward(self->reducer);
    }
    Py_RETURN_NONE;
}

PyObject *sw_py_reducer_open_round(PyObject *op, PyObject *Py_UNUSED(unused))
{
    reducer_object *self = (reducer_object *)op;
    int64_t task;
    if (reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (self->announced_task == task)
        Py_RETURN_NONE;
    if (sw_reducer_state(self->reducer) != SW_ROUND_CLOSED && abandon(self) < 0)
        return NULL;
    sw_account_enter(SW_PHASE_BACKWARD);
    return none_or_null(announce(self, task));
}

PyObject *sw_py_reducer_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    reducer_object *self = (reducer_object *)op;
    if (reducer_check_ready(self) < 0)
        return NULL;
    self->announced_task = NO_TASK;
    if (sw_reducer_state(self->reducer) == SW_ROUND_CLOSED)
        Py_RETURN_NONE; /* the backward reached no parameter */
    int failed = finish_round(self);
    sw_account_enter(SW_PHASE_OPTIMIZER);
    return none_or_null(failed);
}

/* A backward ended without its callback, by an exception. Completes the round with peers now if
 * that is quick; else the caller's next forward does. */
PyObject *sw_py_reducer_fail(PyObject *op, PyObject *Py_UNUSED(unused))
{
    reducer_object *self = (reducer_object *)op;
    if (reducer_check_ready(self) < 0)
        return NULL;
    self->announced_task = NO_TASK; /* even if no gradient had arrived yet */
    if (is_half_taken(self))
        return none_or_null(end_half_taken(self));
    if (!sw_reducer_get_traits(self->reducer)->can_abandon)
        return none_or_null(abandon(self));
    if (sw_reducer_state(self->reducer) != SW_ROUND_OPEN)
        Py_RETURN_NONE;
    return none_or_null(REDUCER_INSIDE(
        self, REDUCER_WAIT(self, sw_reducer_try_abandon(self->reducer, abandon_budget_ns, &err))));
}

/* Runs a whole round with the gradients as they are. */
static int run_whole_round(reducer_object *self)
{
    if (arrive(self) < 0 || REDUCER_DO(self, sw_reducer_open(self->reducer, -1, true, &err)) < 0 ||
        (self->announcer && sw_py_sliced_announce(self) < 0))
        return -1;
    return finish_round(self);
}

PyObject *sw_py_reducer_close_pending(PyObject *op, PyObject *Py_UNUSED(unused))
{
    reducer_object *self = (reducer_object *)op;
    int64_t task;
    if (reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (task >= 0)
        return PyErr_Format(
            sw_py_state_of(self)->error,
            "optimizer.step() was called inside a backward, before its gradients were "
            "averaged: call it after backward() has returned");
    /* an exception left the backward open, and the caller still steps */
    self->announced_task = NO_TASK;
    if (sw_reducer_state(self->reducer) != SW_ROUND_CLOSED && abandon(self) < 0)
        return NULL;
    if (!self->pending_forward)
        Py_RETURN_NONE;
    self->pending_forward = false;
    return none_or_null(run_whole_round(self));
}

/* Returns 1 if `.grad` appears to hold a gradient that no round has averaged: a tensor, but not an
 * accumulated mean of which this rank has only a slice. Returns 0 if not, -1 with an exception. */
static int holds_contribution(reducer_object *self, size_t index)
{
    SW_PY_OWNED *param = sw_py_item(self->params, index);
    SW_PY_OWNED *grad = param ? PyObject_GetAttr(param, self->grad_name) : NULL;
    if (!grad || grad == Py_None || !self->sliced)
        return !grad ? -1 : grad != Py_None;
    int is_view = reducer_is_view(self, index, grad);
    if (is_view != 1)
        return is_view < 0 ? -1 : 1;
    SW_PY_OWNED *pending = PyObject_GetAttrString(grad, "_pending");
    return !pending ? -1 : pending != Py_None;
}

/* Runs a round without a backward: `.grad` holds the contributions. */
PyObject *sw_py_reducer_average(PyObject *op, PyObject *Py_UNUSED(unused))
{
    reducer_object *self = (reducer_object *)op;
    int64_t task;
    bool advance;
    if (reducer_check_ready(self) < 0 || current_task(self, &task) < 0)
        return NULL;
    if (task >= 0 || sw_reducer_state(self->reducer) != SW_ROUND_CLOSED)
        return PyErr_Format(sw_py_state_of(self)->error,
                            "an explicit call averages gradients only outside of a backward");
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    for (size_t i = 0; i < count; ++i) {
        int holds = sw_reducer_takes_part(self->reducer, i) ? holds_contribution(self, i) : 0;
        if (holds < 0 || (holds && REDUCER_DO(self, sw_reducer_mark_ready(self->reducer, i, task,
                                                                          &advance, &err)) < 0))
            return NULL;
    }
    self->pending_forward = false;
    return none_or_null(run_whole_round(self));
}

/* ---- ranks that ran out of inputs ---- */

/* On a GPU the rank contributes the neutral element of the sum, and each bucket is sent as usual.
 */
static int shadow_buckets(reducer_object *self)
{
    size_t bucket;
    while (sw_reducer_next_unsent(self->reducer, &bucket))
        if (REDUCER_ENQUEUE(self, sw_reducer_reserve(self->reducer, bucket, &err)) < 0 ||
            REDUCER_ENQUEUE(self, sw_reducer_lend_place(self->reducer, &err)) < 0 ||
            reducer_called(sw_py_call_at(self, "_blank_bucket", bucket)) < 0 ||
            REDUCER_ENQUEUE(self, sw_reducer_send(self->reducer, bucket, &err)) < 0)
            return -1;
    return finish_sent(self);
}

/* Takes the accumulated means that training ranks announced, one byte per parameter. A mean stays
 * if no rank uses its parameter. */
static int follow_accumulated(reducer_object *self, PyObject *accumulated)
{
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    PyObject *list = accumulated ? PySequence_List(accumulated) : PyList_New(0);
    for (size_t i = 0; list && i < count && i < (size_t)PyList_Size(list); ++i) {
        SW_PY_OWNED *item = sw_py_item(list, i);
        int flag = item ? PyObject_IsTrue(item) : -1;
        if (flag > 0)
            sw_reducer_accumulate(self->reducer, i);
        if (flag < 0 || (flag && sw_py_gradient_keep(self, i) < 0))
            ENGINE_CLEAR(list);
    }
    Py_XDECREF(list);
    return list ? 0 : -1;
}

/* Means overwrite gradients, so gradients that the program kept move to other memory. */
static int renew_views(reducer_object *self)
{
    size_t count = sw_reducer_layout(self->reducer)->param_count;
    for (size_t i = 0; i < count && !self->sliced; ++i) {
        if (!sw_reducer_takes_part(self->reducer, i))
            continue;
        SW_PY_OWNED *param = sw_py_item(self->params, i);
        PyObject *grad = param ? PyObject_GetAttr(param, self->grad_name) : NULL;
        int is_view = grad ? reducer_is_view(self, i, grad) : -1;
        Py_XDECREF(grad); /* before the check for other references to the view */
        SW_PY_OWNED *made = is_view == 0 ? sw_py_gradient_writable_view(self, i) : NULL;
        if (is_view < 0 || (is_view == 0 && !made))
            return -1;
    }
    return 0;
}

static int shadow_on_device(reducer_object *self, PyObject *accumulated)
{
    if (arrive(self) < 0 || renew_views(self) < 0 || reducer_enter(self) < 0)
        return -1;
    int failed = REDUCER_DO(self, sw_reducer_open_shadow(self->reducer, &err)) < 0 ||
                 follow_accumulated(self, accumulated) < 0;
    if (!failed)
        failed = (self->bucket_callback ? exchange_use(self) : shadow_buckets(self)) < 0;
    reducer_leave(self);
    if (!failed && self->bucket_callback)
        failed = run_callbacks(self, false) < 0;
    return failed || sw_py_gradient_restore(self) < 0 ? -1 : 0;
}

static int shadow_on_host(reducer_object *self)
{
    sw_error err;
    if (reducer_enter(self) < 0)
        return -1;
    sw_status status = SW_PY_WITHOUT_GIL(sw_reducer_shadow(self->reducer, &err));
    reducer_leave(self);
    if (reducer_raise(self, status, &err) < 0 ||
        (averages_at_end(self) && run_callbacks(self, false) < 0))
        return -1;
    return compare_ranks(self);
}

PyObject *sw_py_reducer_shadow(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[1] = {{.o = NULL}};
    if (!sw_py_read("shadow | accumulated:O", args, NULL, a) || reducer_check_ready(self) < 0)
        return NULL;
    self->pending_forward = false;
    return none_or_null(self->gpu ? shadow_on_device(self, a[0].o) : shadow_on_host(self));
}
