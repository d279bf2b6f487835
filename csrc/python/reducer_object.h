/* reducer_object.h - the Reducer object, shared by its type (reducer_type.c, reducer_on_device.c),
 * its rounds (gradient_round.c), and the files that move a contribution from `.grad`
 * (gradient_place.c; sliced_gradients.c where this rank keeps slices) into its bucket
 * (gradient_write.c).
 *
 * On a GPU the object belongs to a Python subclass, which allocates and registers memory.
 * Operations of torch that are not part of a step are its methods, named where they are called.
 *
 * Thread rule: with the GIL held. */
#pragma once

#include "python/device_object.h"
#include "python/method.h"

enum { REDUCER_REFERENCES = 18 };

typedef struct reducer_object {
    PyObject_HEAD comm_object *comm; /* owned; NULL on a GPU */
    device_comm_object *gpu;         /* owned; NULL on the host */
    sw_reducer *reducer;             /* owned */
    PyObject *memory;   /* owned: the Arena that owns the reducer's memory. On a GPU a list of
                           tensors, one per bucket (sliced: its slice of the mean; None if it takes no
                           part), followed by a tuple of the places */
    reducer_link *link; /* reference-counted, shared with the hooks */
    union {
        struct { /* owned, or NULL. The first eight: attach()'s callables and lists */
            PyObject *copy, *open, *renew, *task_id;
            PyObject *layouts; /* list of tensors with the layouts of gradients, where parameters
                                  may differ; or None */
            PyObject *unlike, *describe; /* or None: called if ranks noted different steps, and on a
                                            GPU to describe this rank's */
            PyObject *stream;            /* torch's current stream; None on the host */
            PyObject *params, *views;  /* lists; NULL before attach. The caller shares the views */
            PyObject *hook_tables;     /* list: torch's table of hooks of each parameter, or None */
            PyObject *order;           /* returns a digest that ranks must agree on */
            PyObject *announcer;       /* gets the accumulated means as a round opens */
            PyObject *bucket_callback; /* averages a bucket in place of the engine */
            PyObject *mean_callback;   /* takes a bucket's mean, whose memory is then free */
            PyObject *allocate; /* on a GPU: gets bytes, and returns torch's tensor of as many */
            PyObject *home;     /* the same for slices of means at home in host memory; or None */
            PyObject *tracer;   /* in a round that a profiler records, called with a bucket and
                                   "begin" or "wait", and with "end" behind it */
        };
        PyObject *references[REDUCER_REFERENCES];
    };
    size_t slice_count; /* on a GPU: slices of a mean; 1 unless it is sliced */
    size_t place_bytes; /* of the place there */
    bool compresses;    /* sw_reducer_compress() averages each bucket, in a hook's place */
    PyObject *held;     /* owned list: on a GPU, gradients that copies read or will read */
    bool sliced;        /* a view is a ShardedGradient, without memory; sliced_gradients.c takes the
                           gradients */
    PyObject *grad_name;     /* owned: "grad" */
    const void *exchange;    /* torch's table, or NULL */
    tensor_view *shapes;     /* owned: layout of each view, to compare a gradient's with */
    Py_ssize_t *hook_counts; /* owned: each parameter's number of hooks when ours was the last */
    size_t kept;             /* number of parameters whose unaveraged gradient the subclass keeps */
    unsigned long long copies;
    int64_t announced_task; /* the graph task whose end calls close(), or NO_TASK */
    bool announced_sync;
    bool pending_forward;
    bool send_is_due; /* a gradient completed a bucket, which the next one sends */
} reducer_object;

enum { NO_TASK = -2 };
/* On a GPU, the entries of `memory` after those of the buckets. */
enum { PLACE, ROW, COLUMN, EXTRAS };

/* Returns 0, or -1 with the exception of `err`. */
static inline int reducer_raise(reducer_object *self, sw_status status, const sw_error *err)
{
    if (status == SW_OK)
        return 0;
    if (self->gpu)
        sw_py_device_raise(self->gpu, err);
    else
        sw_py_raise(self, err, self->comm);
    return -1;
}

static inline size_t reducer_bucket_count(const reducer_object *self)
{
    return sw_reducer_layout(self->reducer)->bucket_count;
}

static inline int reducer_check_made(reducer_object *self)
{
    bool is_made = self->reducer ||
                   sw_py_refuse(sw_py_state_of(self)->error, "the reducer was not initialised");
    return is_made ? 0 : -1;
}

/* On a GPU once no other thread is inside, whose call may be half way through a round. */
static inline int reducer_check_ready(reducer_object *self)
{
    if (self->gpu && !sw_py_device_wait_for_others(self->gpu))
        return -1;
    bool is_ready = (self->reducer && self->params) ||
                    sw_py_refuse(sw_py_state_of(self)->error,
                                 "the reducer has no tensors: call attach() first");
    return is_ready ? 0 : -1;
}

/* Enters the communicator until reducer_leave(). Returns -1 with an exception. */
static inline int reducer_enter(reducer_object *self)
{
    bool entered = self->gpu ? sw_py_device_enter(self->gpu) : sw_py_comm_enter(self->comm);
    return entered ? 0 : -1;
}

static inline void reducer_leave(reducer_object *self)
{
    if (self->gpu)
        sw_py_device_leave(self->gpu);
    else
        sw_py_comm_leave(self->comm);
}

static inline int reducer_left(reducer_object *self, int result)
{
    reducer_leave(self);
    return result;
}

/* An expression that is -1 with an exception, inside the communicator. */
#define REDUCER_INSIDE(self, expression) \
    (reducer_enter(self) < 0 ? -1 : reducer_left(self, expression))

/* What a call of the engine gives: 0, or -1 with an exception. It may use `err`. The second form is
 * for calls that reduce or wait, the third for those that may enqueue on a GPU: a host that is
 * ahead of its GPU blocks there, so the GIL is released. On the host such a call is short and keeps
 * it. The communicator is entered. */
#define REDUCER_DO(self, expression)           \
    __extension__({                            \
        sw_error err;                          \
        reducer_raise(self, expression, &err); \
    })
#define REDUCER_WAIT(self, expression) REDUCER_DO(self, SW_PY_WITHOUT_GIL(expression))
#define REDUCER_ENQUEUE(self, expression) \
    ((self)->gpu ? REDUCER_WAIT(self, expression) : REDUCER_DO(self, expression))

/* Returns 1 if `grad` is the parameter's view, 0 if not, -1 with an exception: others share the
 * list of views. */
static inline int reducer_is_view(const reducer_object *self, size_t index, const PyObject *grad)
{
    const PyObject *view = PyList_GetItem(self->views, (Py_ssize_t)index);
    return view ? view == grad : -1;
}

/* Drops a call's result. Returns 0, or -1 if the call raised. */
static inline int reducer_called(PyObject *result)
{
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* reducer_layout.c. Return false with an exception. */
bool sw_py_reducer_has_index(reducer_object *self, Py_ssize_t index);

/* Methods of the type: reducer_layout.c, reducer_on_device.c, gradient_round.c. */
typedef PyObject *sw_py_method(PyObject *op, PyObject *args);
sw_py_method sw_py_reducer_gradient, sw_py_reducer_result, sw_py_reducer_bucket,
    sw_py_reducer_bucket_parameters, sw_py_reducer_bucket_dtype, sw_py_reducer_place,
    sw_py_reducer_bucket_shape, sw_py_reducer_run, sw_py_reducer_run_in_slice;
sw_py_method sw_py_reducer_set_active, sw_py_reducer_set_order, sw_py_reducer_set_announcer;
sw_py_method sw_py_reducer_forward, sw_py_reducer_open_round, sw_py_reducer_close,
    sw_py_reducer_fail, sw_py_reducer_close_pending, sw_py_reducer_average, sw_py_reducer_shadow,
    sw_py_reducer_pass_over;

/* reducer_on_device.c. Returns -1 or NULL with an exception. */
int sw_py_reducer_init_on_device(reducer_object *self);
/* Allocates the memory of the trainable buckets, and the places. */
int sw_py_reducer_allocate(reducer_object *self);
/* Does so for the bucket of a parameter that begins to train, and has its gradients renewed. No-op
 * if it has memory, and on the host. */
int sw_py_reducer_unfreeze_on_device(reducer_object *self, size_t index);
/* Lets a hook average from now on: buckets follow one another on torch's stream. */
int sw_py_reducer_withdraw(reducer_object *self);
int sw_py_reducer_make_place(reducer_object *self);
/* Orders the next operations on torch's current stream. No-op on the host. */
int sw_py_reducer_use_stream(reducer_object *self);

/* gradient_write.c. The communicator is entered. Writes the elements of `grad`, whose layout is
 * that of `like`, as the contribution, or adds them to it. Returns 1 if the bytes cannot be copied
 * as they are, -1 with an exception. */
int sw_py_gradient_write(reducer_object *self, size_t index, PyObject *like, PyObject *grad,
                         bool add);
/* The same for a dense gradient that is not lazy. Returns -1 with an exception. */
int sw_py_gradient_write_plain(reducer_object *self, size_t index, PyObject *grad, bool add);
/* Sets the contribution of a parameter to zeros. */
int sw_py_gradient_clear(reducer_object *self, size_t index);
/* Lets the subclass save what the mean may overwrite of a parameter that this rank has not used. */
int sw_py_gradient_keep(reducer_object *self, size_t index);

/* gradient_place.c. The communicator is entered. Moves this rank's contribution from `.grad` into
 * its bucket. Returns -1 with an exception. */
int sw_py_gradient_place(reducer_object *self, size_t index);
/* Reserves a bucket and moves all contributions to it that are not placed yet. */
int sw_py_gradient_fill_bucket(reducer_object *self, size_t bucket);
/* Drops the gradients that no copy reads any longer. */
int sw_py_gradient_let_go(reducer_object *self);
/* Calls mean_callback with each mean that is complete and was not taken. */
int sw_py_gradient_take_means(reducer_object *self);
/* Sends every bucket that can be sent without a wait. */
int sw_py_gradient_advance(reducer_object *self);
/* Tells the tracer what begins with a bucket, "begin" or "wait". No-op without a tracer. */
int sw_py_gradient_trace(reducer_object *self, size_t bucket, const char *what);
/* Tells it that this ended, also if it failed, whose exception is kept. */
int sw_py_gradient_trace_end(reducer_object *self, size_t bucket, int failed);
#define REDUCER_TRACED(self, bucket, what, expression) \
    (sw_py_gradient_trace(self, bucket, what) < 0      \
         ? -1                                          \
         : sw_py_gradient_trace_end(self, bucket, REDUCER_WAIT(self, expression)))
/* Returns the view, a new reference, of a parameter that will be overwritten while `.grad` is
 * another tensor. */
PyObject *sw_py_gradient_writable_view(reducer_object *self, size_t index);
/* Returns true if a hook was registered after ours on a parameter's gradient. */
bool sw_py_gradient_is_hooked_later(reducer_object *self, size_t index);
/* Lets the subclass restore the gradients of parameters that no rank has used. */
int sw_py_gradient_restore(reducer_object *self);
/* A sliced gradient arrived before its slot was free: frees the slot if that is quick. */
int sw_py_gradient_make_room(reducer_object *self, size_t index);

/* sliced_gradients.c. Returns -1 with an exception. */
int sw_py_sliced_place(reducer_object *self, size_t index);
/* Declares which contributions add to the accumulated mean, before they are placed. */
int sw_py_sliced_declare_accumulated(reducer_object *self);
/* Announces the same to joined ranks as a round opens. */
int sw_py_sliced_announce(reducer_object *self);
/* Ends a round: every parameter that some rank used gets its ShardedGradient. */
int sw_py_sliced_publish(reducer_object *self);
