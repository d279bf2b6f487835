/* reducer_type.c - shardwright._engine.Reducer: the object, its lifecycle and its methods, over a
 * HostComm or a DeviceComm (reducer_on_device.c). gradient_round.c has the rounds. */
#include <stdlib.h>
#include <string.h>

#include "python/codec_object.h"
#include "python/reducer_object.h"

/* ---- life ---- */

/* A row is what the engine lays out; the last argument is the group whose buckets it shares. */
#define PARAMETER "parameter name:s numel:n dtype:s requires_grad:p | group:n row_numel:n"

static bool fill_parameter(const sw_py_arg *a, void *row, void *Py_UNUSED(unused))
{
    sw_layout_param *out = row;
    *out = (sw_layout_param){.numel = a[1].size,
                             .dtype = sw_dtype_from_name(a[2].s),
                             .trainable = a[3].p,
                             .group = a[4].size,
                             .row_numel = a[5].size};
    return (a[1].n >= 0 && out->dtype != SW_DTYPE_COUNT) ||
           sw_py_refuse(PyExc_ValueError,
                        "parameter '%s': dtype %s with %zd elements is not one the engine moves; a "
                        "frozen one "
                        "may stay out: name it in ignored_params",
                        a[0].s, a[2].s, a[1].n);
}

static int create(reducer_object *self, const sw_py_table *params, const sw_py_table *names,
                  const sw_reducer_options *options)
{
    sw_error err;
    if (reducer_enter(self) < 0)
        return -1;
    sw_status status = SW_PY_WITHOUT_GIL(
        self->gpu ? sw_reducer_create_on_device(self->gpu->comm, params->rows, names->rows,
                                                params->count, options, &self->reducer, &err)
                  : sw_reducer_create(self->comm->comm, params->rows, names->rows, params->count,
                                      options, &self->reducer, &err));
    int failed = reducer_raise(self, status, &err);
    reducer_leave(self);
    if (failed || self->gpu)
        return failed ? -1 : sw_py_reducer_init_on_device(self);
    /* The Arena object takes ownership of the memory; the reducer still borrows it. */
    sw_gradient_memory *memory = (sw_gradient_memory *)(uintptr_t)sw_reducer_memory(self->reducer);
    self->memory = sw_py_arena_object_new(sw_py_state_of(self), self->comm, NULL, memory);
    return self->memory ? 0 : -1;
}

/* Binds a HostComm or a DeviceComm and returns its world size, which is 0 once it is closed;
 * create() then refuses it. Returns false with an exception. */
static bool bind_comm(reducer_object *self, PyObject *comm, int *world_size)
{
    const engine_state *state = sw_py_state_of(self);
    bool on_host = PyObject_TypeCheck(comm, state->comm_type);
    *world_size = 0;
    if (self->comm || self->gpu || !(on_host || PyObject_TypeCheck(comm, state->device_comm_type)))
        return sw_py_refuse(PyExc_TypeError, "Reducer: comm must be a HostComm or a DeviceComm, "
                                             "and a Reducer is initialised once");
    Py_INCREF(comm);
    if (on_host) {
        self->comm = (comm_object *)comm;
        sw_py_comm_acquire(self->comm);
        *world_size = self->comm->comm ? self->comm->comm->world_size : 0;
    } else {
        self->gpu = (device_comm_object *)comm;
        const sw_peers *peers = self->gpu->comm ? self->gpu->comm->peers : NULL;
        *world_size = peers ? peers->world_size : 0;
    }
    return true;
}

/* Checks another DeviceComm of the reducer's rank, or None. Returns false with an exception. */
static bool read_side(reducer_object *self, PyObject *value, sw_device_comm **side)
{
    *side = NULL;
    if (value == Py_None)
        return true;
    if (self->gpu && PyObject_TypeCheck(value, sw_py_state_of(self)->device_comm_type))
        *side = ((device_comm_object *)value)->comm;
    return *side || sw_py_refuse(PyExc_TypeError, "Reducer: row and column must be DeviceComms "
                                                  "beside the DeviceComm given, or None");
}

/* Keeps the row and column alive as long as the reducer. */
static int keep_sides(reducer_object *self, PyObject *row, PyObject *column)
{
    Py_ssize_t first = (Py_ssize_t)reducer_bucket_count(self);
    Py_INCREF(row);
    if (PyList_SetItem(self->memory, first + ROW, row) < 0)
        return -1;
    Py_INCREF(column);
    return PyList_SetItem(self->memory, first + COLUMN, column);
}

static bool check_caps(Py_ssize_t cap, Py_ssize_t first_cap)
{
    if (cap <= 0)
        return sw_py_refuse(PyExc_ValueError, "Reducer: bucket_cap_bytes must be positive, got %zd",
                            cap);
    return first_cap >= 0 ||
           sw_py_refuse(PyExc_ValueError, "Reducer: first_cap_bytes must not be negative, got %zd",
                        first_cap);
}

/* Makes what the hooks reach the reducer by, and the name that is looked up on each parameter. */
static bool make_link(reducer_object *self)
{
    self->announced_task = NO_TASK;
    self->grad_name = PyUnicode_InternFromString("grad");
    self->link = calloc(1, sizeof *self->link);
    if (!self->link)
        return PyErr_NoMemory() != NULL;
    *self->link = (reducer_link){.reducer = self, .references = 1};
    return self->grad_name != NULL;
}

static int reducer_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[16] = {[2] = {.n = 25 * 1024 * 1024}, [6] = {.o = Py_None},  [7] = {.s = "model"},
                       [11] = {.o = Py_None},         [12] = {.o = Py_None}, [14] = {.o = Py_None}};
    SW_PY_SLICES slices = {.numbers = NULL};
    SW_PY_TABLE params = {0}, names = {0};
    sw_reducer_options options = {.label = "model"};
    int world_size;
    if (!sw_py_read(
            "Reducer comm:O parameters:O | $ bucket_cap_bytes:n transport:(auto|pool|staged) "
            "reduce:(mean|sum) sliced:p slices:O label:s first_cap_bytes:n deterministic:p wire:z "
            "row:O column:O allocate:O home:O takes_means:p",
            args, kwargs, a) ||
        !check_caps(a[2].n, a[8].n) || !bind_comm(self, a[0].o, &world_size) ||
        !read_side(self, a[11].o, &options.row) || !read_side(self, a[12].o, &options.column) ||
        !make_link(self) || sw_py_slices_init(&slices, a[6].o, world_size) < 0 ||
        !sw_py_table_init(&params, a[1].o, PARAMETER, sizeof(sw_layout_param), fill_parameter,
                          NULL) ||
        !sw_py_table_init(&names, params.items, PARAMETER, sizeof(const char *), sw_py_fill_text,
                          NULL))
        return -1;
    options.transport = (sw_transport)a[3].i;
    options.sums = a[4].i == 1;
    self->sliced = options.sliced = a[5].p;
    options.takes_means = a[15].p;
    options.slices = slices.given;
    options.label = a[7].s;
    options.bucket_cap_bytes = a[2].size;
    options.first_cap_bytes = a[8].size;
    options.deterministic = a[9].p;
    options.is_narrow = a[10].s != NULL;
    options.wire = a[10].s ? sw_dtype_from_name(a[10].s) : SW_DTYPE_COUNT;
    if (create(self, &params, &names, &options) < 0)
        return -1;
    if (!self->gpu || keep_sides(self, a[11].o, a[12].o) < 0)
        return self->gpu ? -1 : 0;
    self->slice_count = !self->sliced  ? 1
                        : slices.given ? (size_t)slices.given->count
                                       : (size_t)world_size;
    sw_py_set(&self->allocate, a[13].o);
    sw_py_set(&self->home, a[14].o);
    return self->allocate ? sw_py_reducer_allocate(self) : 0;
}

static int reducer_traverse(PyObject *op, visitproc visit, void *arg)
{
    reducer_object *self = (reducer_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->comm);
    Py_VISIT(self->held);
    Py_VISIT(self->gpu);
    for (size_t i = 0; i < REDUCER_REFERENCES; ++i)
        Py_VISIT(self->references[i]);
    return 0;
}

static int reducer_clear(PyObject *op)
{
    reducer_object *self = (reducer_object *)op;
    if (self->link) /* first: clearing runs destructors, which may call a hook */
        self->link->reducer = NULL;
    for (size_t i = 0; i < REDUCER_REFERENCES; ++i)
        ENGINE_CLEAR(self->references[i]);
    return 0;
}

SW_PY_DESTROY(destroy, sw_reducer_destroy)

static void destroy_reducer(reducer_object *self)
{
    if (!self->gpu) {
        if (self->reducer && self->memory)
            (void)sw_reducer_take_memory(self->reducer);
        sw_reducer_destroy(self->reducer);
    } else if (self->reducer && sw_py_use_is_own(&self->gpu->use)) {
        /* A forked child frees nothing: its driver calls would fail, and the memory belongs to the
         * parent. */
        sw_py_device_destroy(self->gpu, destroy, NULL, self->reducer);
    }
}

static void reducer_dealloc(PyObject *op)
{
    reducer_object *self = (reducer_object *)op;
    PyObject_GC_UnTrack(op);
    SW_PY_ASIDE(pending); /* a signal handler may raise as a closed communicator is destroyed */
    reducer_clear(op);
    if (self->link)
        sw_py_reducer_link_release(self->link);
    destroy_reducer(self);
    free(self->shapes);
    free(self->hook_counts);
    Py_XDECREF(self->memory);
    Py_XDECREF(self->held);
    Py_XDECREF(self->grad_name);
    Py_XDECREF(self->gpu);
    if (self->comm) {
        sw_py_comm_release(self->comm);
        Py_DECREF(self->comm);
    }
    sw_py_free(op);
}

/* ---- methods ---- */

/* Reads the layout of a parameter's gradient. An unknown layout is stored as one that equals no
 * other, so that such gradients always go through copy(). */
static void read_shape(const reducer_object *self, PyObject *models, tensor_view *shapes,
                       Py_ssize_t index)
{
    SW_PY_OWNED *model = sw_py_item(models, (size_t)index); /* others may have shortened the list */
    if (!model)
        PyErr_Clear();
    if (!model || model == Py_None || !sw_py_tensor_view_get(self->exchange, model, &shapes[index]))
        shapes[index] = (tensor_view){.ndim = -1};
}

static PyObject *shape_models(const reducer_object *self)
{
    return self->sliced ? self->layouts : self->views;
}

/* What attach() makes of its arguments, before it changes the object. */
typedef struct attachment {
    PyObject *params, *hook_tables; /* owned */
    const void *exchange;
    tensor_view *shapes;     /* owned; NULL where torch shows no layouts */
    Py_ssize_t *hook_counts; /* owned */
} attachment;

static bool make_attachment(attachment *made, const reducer_object *self, PyObject *params,
                            PyObject *views, PyObject *layouts)
{
    Py_ssize_t count = (Py_ssize_t)sw_reducer_layout(self->reducer)->param_count;
    made->params = PySequence_List(params);
    if (!made->params)
        return false;
    if (PyList_Size(made->params) != count || PyList_Size(views) != count ||
        (layouts != Py_None && (!PyList_Check(layouts) || PyList_Size(layouts) != count)))
        return sw_py_refuse(PyExc_ValueError,
                            "attach: parameters and views must have %zd entries each", count);
    SW_PY_OWNED *first = count ? sw_py_item(made->params, 0) : NULL;
    made->exchange = first ? sw_py_tensor_exchange_table(first) : NULL;
    made->hook_tables = SW_PY_LIST(i, count, sw_py_none());
    made->hook_counts = calloc((size_t)count + 1, sizeof *made->hook_counts);
    if (made->exchange && (!self->sliced || layouts != Py_None))
        made->shapes = calloc((size_t)count, sizeof *made->shapes);
    if (!made->hook_counts) /* without shapes every gradient goes through copy() */
        PyErr_NoMemory();
    return made->hook_tables && made->hook_counts;
}

/* Nothing fails here; each old object is dropped once it is replaced. */
static void take_attachment(reducer_object *self, attachment *made, const sw_py_arg *a)
{
    tensor_view *shapes = self->shapes;
    Py_ssize_t *hook_counts = self->hook_counts;
    self->exchange = made->exchange;
    self->shapes = made->shapes;
    self->hook_counts = made->hook_counts;
    made->shapes = shapes;
    made->hook_counts = hook_counts;
    sw_py_set(&self->hook_tables, made->hook_tables);
    sw_py_set(&self->views, a[1].o);
    for (int i = 0; i < 8; ++i)
        sw_py_set(&self->references[i], a[i + 2].o);
    sw_py_set(&self->params, made->params);
    for (Py_ssize_t i = 0; self->shapes && i < PyList_Size(self->params); ++i)
        read_shape(self, shape_models(self), self->shapes, i);
}

static PyObject *reducer_attach(PyObject *op, PyObject *args, PyObject *kwargs)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[10];
    attachment made = {.params = NULL};
    for (int i = 7; i < 10; ++i)
        a[i].o = Py_None;
    if (reducer_check_made(self) < 0 ||
        !sw_py_read("attach parameters:O views:L $ copy:O open:O renew:O task_id:O layouts:O | "
                    "unlike:O describe:O stream:O",
                    args, kwargs, a))
        return NULL;
    bool is_made = make_attachment(&made, self, a[0].o, a[1].o, a[6].o);
    if (is_made)
        take_attachment(self, &made, a);
    Py_XDECREF(made.params);
    Py_XDECREF(made.hook_tables);
    free(made.shapes);
    free(made.hook_counts);
    return is_made ? sw_py_none() : NULL;
}

/* `table` is torch's dictionary of the gradient hooks of a parameter; ours is the last. */
static PyObject *reducer_watch_hooks(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    sw_py_arg a[2];
    if (reducer_check_ready(self) < 0 ||
        !sw_py_read("watch_hooks index:n table:D", args, NULL, a) ||
        !sw_py_reducer_has_index(self, a[0].n))
        return NULL;
    Py_INCREF(a[1].o);
    if (PyList_SetItem(self->hook_tables, a[0].n, a[1].o) < 0)
        return NULL;
    self->hook_counts[a[0].n] = PyDict_Size(a[1].o);
    Py_RETURN_NONE;
}

/* Methods that only look something up: of a parameter, or of the reducer. */
#define OF_PARAMETER(name, value)                                 \
    SW_PY_VALUE(reducer_##name, reducer_object, #name " index:n", \
                sw_py_reducer_has_index(self, a[0].n), value)

OF_PARAMETER(hook, sw_py_hook_object_new(sw_py_state_of(self), self->link, a[0].size))
OF_PARAMETER(has_memory,
             PyBool_FromLong(!self->gpu || sw_reducer_takes_part(self->reducer, a[0].size)))
OF_PARAMETER(used_by_any, PyBool_FromLong(sw_reducer_used_by_any(self->reducer, a[0].size)))
OF_PARAMETER(accumulated_ranks,
             PyLong_FromSize_t(sw_reducer_accumulated_ranks(self->reducer, a[0].size)))
OF_PARAMETER(is_used, PyBool_FromLong(sw_reducer_is_used(self->reducer, a[0].size)))
OF_PARAMETER(averaged_in,
             PyLong_FromUnsignedLongLong(sw_reducer_averaged_in(self->reducer, a[0].size)))

#define OF_REDUCER(name, signature, check, value)                \
    SW_PY_VALUE(reducer_##name, reducer_object, #name signature, \
                reducer_check_made(self) == 0 && (check), value)

OF_REDUCER(count_step, "", sw_py_reducer_use_stream(self) == 0,
           (sw_account_stepping(), sw_reducer_count_step(self->reducer), sw_py_none()))
OF_REDUCER(drop_pending, "", true, (self->pending_forward = false, sw_py_none()))
OF_REDUCER(note_step, " digest:K", true,
           (sw_reducer_note_step(self->reducer, (uint32_t)a[0].word), sw_py_none()))
OF_REDUCER(forget_steps, "", true, (sw_reducer_forget_steps(self->reducer), sw_py_none()))
OF_REDUCER(set_divide_by, " active_only:p", true,
           (sw_reducer_divide_by_active(self->reducer, a[0].p), sw_py_none()))
OF_REDUCER(send_first, " sends:p", true,
           (sw_reducer_send_first(self->reducer, a[0].p), sw_py_none()))
OF_REDUCER(divisor, "", true, PyLong_FromSize_t(sw_reducer_divisor(self->reducer)))

SW_PY_VALUE(reducer_set_tracer, reducer_object, "set_tracer tracer:O", true,
            (sw_py_set_or_clear(&self->tracer, a[0].o), sw_py_none()))

static PyObject *set_callback(reducer_object *self, PyObject *callback)
{
    if (sw_py_reducer_withdraw(self) < 0)
        return NULL;
    sw_reducer_give_buckets(self->reducer,
                            callback == Py_None ? SW_BUCKETS_OURS : SW_BUCKETS_HOOKS);
    sw_py_set_or_clear(&self->bucket_callback, callback);
    return sw_py_none();
}

OF_REDUCER(set_bucket_callback, " callback:O", true, set_callback(self, a[0].o))
OF_REDUCER(set_mean_callback, " callback:O", true,
           (sw_py_set_or_clear(&self->mean_callback, a[0].o), sw_py_none()))

static int set_codec(reducer_object *self, PyObject *codec)
{
    bool at_end = false;
    codec_object *given = (codec_object *)codec;
    if (!PyObject_TypeCheck(codec, sw_py_state_of(self)->codec_type) || !given->compressor)
        return sw_py_refuse(PyExc_TypeError, "set_codec: codec must be a Codec, got %R",
                            (PyObject *)Py_TYPE(codec)) -
               1;
    if (REDUCER_INSIDE(
            self, REDUCER_WAIT(self, sw_reducer_set_compressor(self->reducer, given->compressor,
                                                               &at_end, &err))) < 0)
        return -1;
    self->compresses = at_end;
    sw_reducer_give_buckets(self->reducer, at_end ? SW_BUCKETS_HOOKS : SW_BUCKETS_OURS);
    return 0;
}

OF_REDUCER(set_codec, " codec:O", true, set_codec(self, a[0].o) < 0 ? NULL : sw_py_none())

static PyObject *keep_in_rows(reducer_object *self, bool keeps)
{
    bool kept = false;
    if (REDUCER_INSIDE(self, REDUCER_WAIT(self, sw_reducer_keep_in_rows(self->reducer, keeps, &kept,
                                                                        &err))) < 0)
        return NULL;
    return PyBool_FromLong(kept);
}

OF_REDUCER(keep_in_rows, " keeps:p", true, keep_in_rows(self, a[0].p))

/* Returns the indices of parameters whose `.grad` is a tensor other than our view. */
static PyObject *reducer_foreign(PyObject *op, PyObject *Py_UNUSED(unused))
{
    reducer_object *self = (reducer_object *)op;
    PyObject *found = reducer_check_ready(self) < 0 ? NULL : PyList_New(0);
    size_t count = found ? sw_reducer_layout(self->reducer)->param_count : 0;
    for (size_t i = 0; found && i < count; ++i) {
        SW_PY_OWNED *param = sw_py_item(self->params, i), *view = sw_py_item(self->views, i);
        SW_PY_OWNED *grad = param && view ? PyObject_GetAttr(param, self->grad_name) : NULL;
        if (!grad)
            ENGINE_CLEAR(found);
        else if (grad != Py_None && grad != view)
            sw_py_append(&found, PyLong_FromSize_t(i));
    }
    return found;
}

static PyObject *unfreeze(reducer_object *self, size_t index)
{
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    const sw_layout_bucket *bucket = &layout->bucket[layout->place[index].bucket];
    if (sw_py_reducer_unfreeze_on_device(self, index) < 0)
        return NULL;
    sw_reducer_unfreeze(self->reducer, index);
    for (size_t k = 0; self->shapes && k < bucket->count; ++k) /* the views may be new */
        read_shape(self, shape_models(self), self->shapes,
                   (Py_ssize_t)layout->order[bucket->first + k]);
    Py_RETURN_NONE;
}

OF_PARAMETER(mark_unfrozen, unfreeze(self, a[0].size))

static PyObject *reducer_stats(PyObject *op, PyObject *Py_UNUSED(unused))
{
    static const sw_py_count counts[] = {SW_PY_COUNT(sw_reducer_stats, rounds),
                                         SW_PY_COUNT(sw_reducer_stats, local_rounds),
                                         SW_PY_COUNT(sw_reducer_stats, abandoned),
                                         SW_PY_COUNT(sw_reducer_stats, buckets_sent),
                                         SW_PY_COUNT(sw_reducer_stats, buckets_early),
                                         SW_PY_COUNT(sw_reducer_stats, bytes),
                                         SW_PY_COUNT(sw_reducer_stats, row_rounds),
                                         SW_PY_COUNT(sw_reducer_stats, row_bytes),
                                         SW_PY_COUNT(sw_reducer_stats, unplaced_bytes_peak)};
    reducer_object *self = (reducer_object *)op;
    if (reducer_check_made(self) < 0)
        return NULL;
    PyObject *made =
        sw_py_counts(sw_reducer_get_stats(self->reducer), counts, sizeof counts / sizeof *counts);
    if (made)
        sw_py_put(&made, "copies", PyLong_FromUnsignedLongLong(self->copies));
    if (made && self->gpu) { /* the driver's counts since the GPU was opened, for all reducers */
        SW_PY_OWNED *driver = sw_py_call(self->gpu, "stats", NULL, NULL);
        if (!driver || PyDict_Update(made, driver) < 0)
            ENGINE_CLEAR(made);
    }
    return made;
}

/* Properties, which are None before __init__. On a GPU the subclass has the first two. */
#define PROPERTY(name, value) \
    SW_PY_GETTER(reducer_get_##name, reducer_object, self->reducer ? (value) : sw_py_none())

PROPERTY(transport,
         PyUnicode_FromString(self->gpu
                                  ? ""
                                  : sw_transport_name(sw_reducer_memory(self->reducer)->transport)))
PROPERTY(transport_reason,
         PyUnicode_FromString(self->gpu ? "" : sw_reducer_memory(self->reducer)->why))
PROPERTY(bucket_count, PyLong_FromSize_t(reducer_bucket_count(self)))
PROPERTY(planned_bytes, PyLong_FromSize_t(sw_reducer_planned_bytes(self->reducer)))
PROPERTY(is_open, PyBool_FromLong(sw_reducer_state(self->reducer) != SW_ROUND_CLOSED))
PROPERTY(is_compressing, PyBool_FromLong(sw_reducer_is_compressing(self->reducer)))
PROPERTY(last_round_failed, PyBool_FromLong(sw_reducer_last_round_failed(self->reducer)))
PROPERTY(stays_in_rows, PyBool_FromLong(sw_reducer_stays_in_rows(self->reducer)))
PROPERTY(rounds, PyLong_FromUnsignedLongLong(sw_reducer_get_stats(self->reducer)->rounds))
PROPERTY(pending_forward, PyBool_FromLong(self->pending_forward))

static PyMethodDef reducer_methods[] = {
    SW_PY_ARGS(sw_py_reducer, gradient, "index, shape, strides=None, /",
               "Return a DLPack capsule over a parameter's gradient."),
    SW_PY_ARGS(sw_py_reducer, result, "index, /",
               "Return a DLPack capsule over this rank's slice of a mean."),
    SW_PY_ARGS(sw_py_reducer, bucket, "bucket, /", "Return a DLPack capsule over a whole bucket."),
    SW_PY_ARGS(sw_py_reducer, bucket_parameters, "bucket, /",
               "Return the bucket's parameters, in memory order."),
    SW_PY_ARGS(sw_py_reducer, bucket_dtype, "bucket, /", "Return the bucket's element type."),
    SW_PY_ARGS(sw_py_reducer, place, "index, /", "Return (bucket, begin, numel), in elements."),
    SW_PY_ARGS(sw_py_reducer, run, "index, slice, count, /",
               "Return [begin, end) of a parameter in one slice of `count`, in memory order."),
    SW_PY_ARGS(sw_py_reducer, run_in_slice, "index, slice, count, /",
               "Return (bucket, first element in the slice of it, number) of the same."),
    SW_PY_ARGS(sw_py_reducer, bucket_shape, "bucket, /",
               "Return (offset_bytes, numel, dtype, trainable)."),
    SW_PY_KEYS(
        reducer, attach,
        "parameters, views, *, copy, open, renew, task_id, layouts, unlike=None, describe=None, "
        "stream=None",
        "Bind tensors. views[i]: over gradient(i), or None; renew(i) replaces one that others "
        "hold. copy(view, grad) writes any layout. open() runs at a round's first gradient and "
        "returns if the backward synchronises. unlike() raises if ranks noted other steps."),
    SW_PY_ARGS(reducer, watch_hooks, "index, table, /", "Detect hooks registered after ours."),
    SW_PY_ARGS(reducer, hook, "index, /", "Return the post-accumulate-grad hook of a parameter."),
    SW_PY_ENTRY(sw_py_reducer_forward, METH_O, "forward", "$self, synchronised, /",
                "Count a forward with gradients."),
    SW_PY_NONE(sw_py_reducer, open_round, "Announce a round, which the first gradient opens."),
    SW_PY_ARGS(sw_py_reducer, pass_over, "indices, expected=False, /",
               "Send the buckets that waited for gradients of these parameters alone, since the "
               "backward of their modules is over; `expected`: note which gradients come after "
               "that. Return False if no round is open."),
    SW_PY_NONE(sw_py_reducer, close, "End the round."),
    SW_PY_NONE(sw_py_reducer, fail, "Tell the peers that the backward of an open round failed."),
    SW_PY_NONE(sw_py_reducer, close_pending, "Run a whole round if a forward has none."),
    SW_PY_ARGS(reducer, drop_pending, "/", "Forget a forward that no backward has followed."),
    SW_PY_ARGS(sw_py_reducer, shadow, "accumulated=(), /",
               "Run a round without a contribution. `accumulated`, on a GPU: one byte for each "
               "parameter, 1 if the other ranks contribute on top of the accumulated mean."),
    SW_PY_ARGS(reducer, has_memory, "index, /", "Return True if the gradient has memory."),
    SW_PY_NONE(sw_py_reducer, average, "Run a whole round over the current .grad."),
    SW_PY_ARGS(reducer, count_step, "/", "Count a step of the optimizer; ranks compare the count."),
    SW_PY_ARGS(reducer, note_step, "digest, /", "Note a step, to compare in the next round."),
    SW_PY_ARGS(reducer, forget_steps, "/", "Count from 0 again."),
    SW_PY_ARGS(reducer, set_divide_by, "active_only, /", "Set the mean's divisor."),
    SW_PY_ARGS(reducer, send_first, "sends, /",
               "Let buckets of the first round, too, leave before the end of the backward."),
    SW_PY_ARGS(reducer, set_bucket_callback, "callback, /",
               "Set a communication hook, or None: callback(bucket, is_last) averages a bucket."),
    SW_PY_ARGS(
        reducer, set_mean_callback, "callback, /",
        "With takes_means: call callback(bucket) with each mean once it is complete, which then "
        "gives up its memory."),
    SW_PY_ARGS(reducer, set_codec, "codec, /",
               "Let means travel through a Codec, whose entries are the parameters. Collective."),
    SW_PY_ARGS(reducer, keep_in_rows, "keeps, /",
               "Let the next round's sums stay in rows. Return whether they will. Collective."),
    SW_PY_ARGS(reducer, set_tracer, "tracer, /",
               "Set a callable that is called around each bucket's post and wait, or None."),
    SW_PY_ARGS(reducer, used_by_any, "index, /", "Return True if some rank used the parameter."),
    SW_PY_ARGS(reducer, divisor, "/", "Return how many ranks are in a hook's last mean."),
    SW_PY_ARGS(reducer, accumulated_ranks, "index, /",
               "Return the number of ranks that contribute on top of the accumulated mean."),
    SW_PY_ARGS(reducer, is_used, "index, /", "Return True if used here since the last round."),
    SW_PY_ARGS(reducer, averaged_in, "index, /",
               "Return the last round, from 1, in which some rank used the parameter."),
    SW_PY_NONE(reducer, foreign, "Return the indices of parameters whose .grad is not our view."),
    SW_PY_ARGS(reducer, mark_unfrozen, "index, /", "Let the parameter's bucket take part."),
    SW_PY_NONE(reducer, stats, "Return counts since creation; the driver's are the process's."),
    SW_PY_ARGS(sw_py_reducer, set_active, "trains, /",
               "Set the ranks that train, one byte for each rank, on a GPU."),
    SW_PY_ARGS(sw_py_reducer, set_order, "order, /",
               "Set a callable that returns a digest to compare in each round, or None; on a GPU."),
    SW_PY_ARGS(sw_py_reducer, set_announcer, "announce, /",
               "Set a callable that is called as a round opens, or None; on a GPU."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reducer_properties[] = {
    {"transport", reducer_get_transport, NULL, "'pool' or 'staged'", NULL},
    {"transport_reason", reducer_get_transport_reason, NULL, "why", NULL},
    {"bucket_count", reducer_get_bucket_count, NULL, "number of buckets, frozen ones included",
     NULL},
    {"planned_bytes", reducer_get_planned_bytes, NULL, "bytes of gradient memory on each rank",
     NULL},
    {"is_open", reducer_get_is_open, NULL, "True if a round is open", NULL},
    {"is_compressing", reducer_get_is_compressing, NULL,
     "True if buckets of an open round are on their way through a Codec", NULL},
    {"last_round_failed", reducer_get_last_round_failed, NULL,
     "True if the last round averaged nothing", NULL},
    {"stays_in_rows", reducer_get_stays_in_rows, NULL,
     "True if the sums of the round opened last stay in rows", NULL},
    {"rounds", reducer_get_rounds, NULL, "number of rounds that averaged", NULL},
    {"pending_forward", reducer_get_pending_forward, NULL,
     "True if a synchronised forward has no round yet", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(
    sw_py_reducer_type_spec, "Reducer", reducer_object, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    "Buckets of gradients and their mean, round by round. parameters: [(name, numel, dtype, "
    "requires_grad[, group[, row_numel]])] in registration order; groups share no bucket; "
    "row_numel > 0 cuts by rows of so many elements. slices: the slice and the replica of each "
    "rank. allocate(nbytes) returns zeroed memory of a GPU, home(nbytes) that of slices; the "
    "subclass has _keep, "
    "_restore, _blank, _blank_bucket and _end.",
    {Py_tp_init, reducer_init}, {Py_tp_dealloc, reducer_dealloc},
    {Py_tp_traverse, reducer_traverse}, {Py_tp_clear, reducer_clear},
    {Py_tp_methods, reducer_methods}, {Py_tp_getset, reducer_properties})
