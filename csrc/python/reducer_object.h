/* reducer_object.h - the Reducer object, shared by its type (reducer_type.c) and its rounds
 * (gradient_round.c).
 *
 * Thread rule: with the GIL held.
 */
#ifndef SW_PYTHON_REDUCER_OBJECT_H
#define SW_PYTHON_REDUCER_OBJECT_H

#include "python/engine.h"

typedef struct reducer_object {
    PyObject_HEAD comm_object *comm; /* owned */
    sw_reducer *reducer;             /* owned */
    PyObject *memory;                /* owned: Arena, which owns the reducer's memory */
    reducer_link *link;              /* counted, shared with the hooks */
    PyObject *params,
        *views; /* owned lists; NULL before attach. The list of views is the caller's own */
    PyObject *hook_tables; /* owned list: where torch keeps the hooks of each parameter, or None */
    PyObject *layouts; /* owned list of tensors laid out as gradients are, where parameters are not
                          always; or None */
    PyObject *copy, *open, *renew, *task_id; /* owned callables or NULL */
    PyObject *unlike;          /* owned callable or NULL: ranks have noted different steps */
    PyObject *bucket_callback; /* owned, or NULL: what averages a bucket, in place of the engine */
    PyObject *bucket_wait;     /* owned, or NULL: waits for what bucket_callback has begun. With it
                                  buckets are given as soon as they are complete */
    bool sliced; /* a view is a ShardedGradient, without memory; sliced_gradients.c takes the
                    gradients */
    PyObject *grad_name;     /* owned: "grad" */
    const void *exchange;    /* torch's table, or NULL */
    tensor_view *shapes;     /* owned: layout of each view, to compare a gradient's with */
    Py_ssize_t *hook_counts; /* owned: hooks of each parameter when ours was the last */
    unsigned long long copies;
    int64_t announced_task; /* graph task whose end will call close(); NO_TASK: none */
    bool announced_sync;
    bool pending_forward;
} reducer_object;

enum { NO_TASK = -2 };

static inline engine_state *reducer_state_of(reducer_object *self)
{
    return sw_py_state_of((PyObject *)self);
}

/* 0, or -1 with the exception of `err`. */
static inline int reducer_raise(reducer_object *self, sw_status status, const sw_error *err)
{
    if (status == SW_OK)
        return 0;
    sw_py_raise(reducer_state_of(self), err, self->comm);
    return -1;
}

static inline int reducer_check_made(reducer_object *self)
{
    if (self->reducer)
        return 0;
    PyErr_SetString(reducer_state_of(self)->error, "the reducer was not initialised");
    return -1;
}

static inline int reducer_check_ready(reducer_object *self)
{
    if (self->reducer && self->params)
        return 0;
    PyErr_SetString(reducer_state_of(self)->error,
                    "the reducer has no tensors: call attach() first");
    return -1;
}

/* sliced_gradients.c: -1 with an exception. */
int sw_py_sliced_take(reducer_object *self, size_t index, int64_t task, PyObject *param);
int sw_py_sliced_finish(reducer_object *self);
/* The same for a user's hook, which takes one bucket after the other: use and standing bits; the
 * contributions to one bucket; `.grad`. */
int sw_py_sliced_exchange_use(reducer_object *self);
int sw_py_sliced_fill(reducer_object *self, size_t bucket);
int sw_py_sliced_publish(reducer_object *self);

/* gradient_round.c: whether somebody else has hooked a parameter's gradient after us; whether
 * `grad` lies in memory just as `shape`, so that its bytes can be copied as they are. */
bool sw_py_gradient_is_hooked_later(reducer_object *self, size_t index);
bool sw_py_gradient_has_layout(const tensor_view *grad, const tensor_view *shape);

/* gradient_round.c: methods. */
PyObject *sw_py_round_forward(PyObject *op, PyObject *synchronised);
PyObject *sw_py_round_announce(PyObject *op, PyObject *unused);
PyObject *sw_py_round_close(PyObject *op, PyObject *unused);
PyObject *sw_py_round_fail(PyObject *op, PyObject *unused);
PyObject *sw_py_round_close_pending(PyObject *op, PyObject *unused);
PyObject *sw_py_round_average(PyObject *op, PyObject *unused);
PyObject *sw_py_round_shadow(PyObject *op, PyObject *unused);

#endif
