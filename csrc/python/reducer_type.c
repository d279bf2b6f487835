/* reducer_type.c - shardwright._engine.Reducer: the object, its lifecycle and its methods, over a
 * HostComm or a DeviceComm (reducer_on_device.c). gradient_round.c has the rounds. */
#include <stdlib.h>
#include <string.h>

#include "python/reducer_object.h"

/* Lifecycle
 * ------------------------------------------------------------------------------------------ */

static int parse_transport(const char *name, sw_transport *transport)
{
    for (int t = SW_TRANSPORT_AUTO; t <= SW_TRANSPORT_STAGED; ++t)
        if (strcmp(sw_transport_name((sw_transport)t), name) == 0) {
            *transport = (sw_transport)t;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "transport must be 'auto', 'pool' or 'staged', got '%s'", name);
    return -1;
}

static int create_on_host(reducer_object *self, sw_py_rows *s, const sw_reducer_options *options)
{
    sw_error err;
    sw_status status;
    if (reducer_enter(self) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_create(self->comm->comm, s->params, s->names, s->count, options,
                               &self->reducer, &err);
    Py_END_ALLOW_THREADS
    reducer_leave(self);
    if (reducer_raise(self, status, &err) < 0)
        return -1;
    /* The Arena object takes ownership of the memory; the reducer still borrows it. */
    sw_gradient_memory *memory = (sw_gradient_memory *)(uintptr_t)sw_reducer_memory(self->reducer);
    self->memory = sw_py_arena_object_new(reducer_state_of(self), self->comm, NULL, memory);
    return self->memory ? 0 : -1;
}

static int create_on_gpu(reducer_object *self, sw_py_rows *s, const sw_reducer_options *options)
{
    sw_error err;
    sw_status status;
    if (reducer_enter(self) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    status = sw_reducer_create_on_device(self->gpu->comm, s->params, s->names, s->count, options,
                                         &self->reducer, &err);
    Py_END_ALLOW_THREADS
    PyObject *done = sw_py_device_finish(self->gpu, status, &err);
    Py_XDECREF(done);
    return done ? sw_py_reducer_init_on_device(self) : -1;
}

/* Binds a HostComm or a DeviceComm and returns its world size, which is 0 once it is closed;
 * create() then refuses it. */
static int bind_comm(reducer_object *self, PyObject *comm, int *world_size)
{
    const engine_state *state = reducer_state_of(self);
    bool on_host = PyObject_TypeCheck(comm, state->comm_type);
    *world_size = 0;
    if (self->comm || self->gpu ||
        !(on_host || PyObject_TypeCheck(comm, state->device_comm_type))) {
        PyErr_SetString(PyExc_TypeError, "Reducer: comm must be a HostComm or a DeviceComm, and a "
                                         "Reducer is initialised once");
        return -1;
    }
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
    return 0;
}

/* Checks another DeviceComm of the reducer's rank, or None. Returns false with an exception. */
static bool read_side(reducer_object *self, PyObject *value, sw_device_comm **side)
{
    *side = NULL;
    if (value == Py_None)
        return true;
    if (!self->gpu || !PyObject_TypeCheck(value, reducer_state_of(self)->device_comm_type)) {
        PyErr_SetString(PyExc_TypeError, "Reducer: row and column must be DeviceComms beside the "
                                         "DeviceComm given, or None");
        return false;
    }
    *side = ((device_comm_object *)value)->comm;
    return true;
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

static int check_caps(Py_ssize_t cap, Py_ssize_t first_cap)
{
    if (cap <= 0)
        PyErr_Format(PyExc_ValueError, "Reducer: bucket_cap_bytes must be positive, got %zd", cap);
    else if (first_cap < 0)
        PyErr_Format(PyExc_ValueError, "Reducer: first_cap_bytes must not be negative, got %zd",
                     first_cap);
    return cap <= 0 || first_cap < 0 ? -1 : 0;
}

static int reducer_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "comm",  "parameters",      "bucket_cap_bytes", "transport", "reduce", "sliced", "slices",
        "label", "first_cap_bytes", "deterministic",    "wire",      "lent",   "row",    "column",
        NULL};
    reducer_object *self = (reducer_object *)op;
    PyObject *comm, *parameters, *owners = Py_None, *row = Py_None, *column = Py_None;
    sw_py_slices slices;
    Py_ssize_t cap = 25 * 1024 * 1024, first_cap = 0;
    const char *transport = "auto", *reduce = "mean", *wire = NULL;
    int sliced = 0, deterministic = 0, lent = 0, world_size;
    sw_reducer_options options = {.label = "model"};
    sw_py_rows s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|$nsspOsnpzpOO:Reducer", names, &comm,
                                     &parameters, &cap, &transport, &reduce, &sliced, &owners,
                                     &options.label, &first_cap, &deterministic, &wire, &lent, &row,
                                     &column) ||
        check_caps(cap, first_cap) < 0 || parse_transport(transport, &options.transport) < 0 ||
        sw_py_parse_reduce(reduce, &options.sums) < 0 || bind_comm(self, comm, &world_size) < 0 ||
        !read_side(self, row, &options.row) || !read_side(self, column, &options.column))
        return -1;
    self->announced_task = NO_TASK;
    self->sliced = sliced != 0;
    options.bucket_cap_bytes = (size_t)cap;
    options.first_cap_bytes = (size_t)first_cap;
    options.sliced = self->sliced;
    options.deterministic = deterministic != 0;
    options.is_lent = lent != 0;
    options.is_narrow = wire != NULL;
    options.wire = wire ? sw_dtype_from_name(wire) : SW_DTYPE_COUNT;
    self->grad_name = PyUnicode_InternFromString("grad");
    self->link = calloc(1, sizeof *self->link);
    if (!self->grad_name || !self->link)
        return -1;
    *self->link = (reducer_link){.reducer = self, .references = 1};
    if (sw_py_slices_init(&slices, owners, world_size) < 0)
        return -1;
    options.slices = sw_py_slices_get(&slices);
    int result = sw_py_rows_init(&s, parameters);
    if (result == 0)
        result = self->gpu ? create_on_gpu(self, &s, &options) : create_on_host(self, &s, &options);
    sw_py_rows_fini(&s);
    sw_py_slices_fini(&slices);
    return result == 0 && self->gpu ? keep_sides(self, row, column) : result;
}

static int reducer_traverse(PyObject *op, visitproc visit, void *arg)
{
    reducer_object *self = (reducer_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->comm);
    Py_VISIT(self->params);
    Py_VISIT(self->views);
    Py_VISIT(self->hook_tables);
    Py_VISIT(self->renew);
    Py_VISIT(self->copy);
    Py_VISIT(self->open);
    Py_VISIT(self->task_id);
    Py_VISIT(self->layouts);
    Py_VISIT(self->unlike);
    Py_VISIT(self->describe);
    Py_VISIT(self->bucket_callback);
    Py_VISIT(self->bucket_wait);
    Py_VISIT(self->tracer);
    Py_VISIT(self->stream);
    Py_VISIT(self->order);
    Py_VISIT(self->announcer);
    Py_VISIT(self->held);
    Py_VISIT(self->gpu);
    return 0;
}

static void clear_tensors(reducer_object *self)
{
    ENGINE_CLEAR(self->params);
    ENGINE_CLEAR(self->views);
    ENGINE_CLEAR(self->hook_tables);
    ENGINE_CLEAR(self->renew);
    ENGINE_CLEAR(self->copy);
    ENGINE_CLEAR(self->open);
    ENGINE_CLEAR(self->task_id);
    ENGINE_CLEAR(self->layouts);
    ENGINE_CLEAR(self->unlike);
    ENGINE_CLEAR(self->describe);
    ENGINE_CLEAR(self->stream);
}

static int reducer_clear(PyObject *op)
{
    reducer_object *self = (reducer_object *)op;
    if (self->link) /* first: clearing runs destructors, which may call a hook */
        self->link->reducer = NULL;
    clear_tensors(self);
    ENGINE_CLEAR(self->bucket_callback);
    ENGINE_CLEAR(self->bucket_wait);
    ENGINE_CLEAR(self->tracer);
    ENGINE_CLEAR(self->order);
    ENGINE_CLEAR(self->announcer);
    return 0;
}

static void destroy(void *reducer)
{
    sw_reducer_destroy(reducer);
}

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
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
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
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

/* Methods
 * -----------------------------------------------------------------------------------------------
 */

/* Stores a new reference to `value` in *slot. */
static void keep(PyObject **slot, PyObject *value)
{
    Py_INCREF(value);
    *slot = value;
}

/* Reads the layout of a parameter's gradient. An unknown layout is stored as one that equals no
 * other, so that such gradients always go through copy(). */
static void read_shape(reducer_object *self, Py_ssize_t index)
{
    PyObject *models = self->sliced ? self->layouts : self->views;
    PyObject *model = PyList_GetItem(models, index);
    if (model == Py_None || !sw_py_tensor_view_get(self->exchange, model, &self->shapes[index]))
        self->shapes[index] = (tensor_view){.ndim = -1};
}

static int attach_shapes(reducer_object *self, Py_ssize_t count)
{
    free(self->shapes);
    free(self->hook_counts);
    bool known = !self->sliced || self->layouts != Py_None;
    self->exchange = count ? sw_py_tensor_exchange_table(PyList_GetItem(self->params, 0)) : NULL;
    self->shapes = self->exchange && known ? calloc((size_t)count, sizeof *self->shapes) : NULL;
    self->hook_counts = calloc((size_t)count + 1, sizeof *self->hook_counts);
    self->hook_tables = PyList_New(count);
    if (!self->hook_counts || !self->hook_tables) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_INCREF(Py_None);
        PyList_SetItem(self->hook_tables, i, Py_None);
        if (self->shapes)
            read_shape(self, i);
    }
    return 0;
}

static PyObject *reducer_attach(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"parameters", "views",  "copy",     "open",   "renew", "task_id",
                            "layouts",    "unlike", "describe", "stream", NULL};
    reducer_object *self = (reducer_object *)op;
    PyObject *params, *views, *copy = Py_None, *open = Py_None, *renew = Py_None,
                              *task_id = Py_None, *layouts = Py_None, *unlike = Py_None,
                              *describe = Py_None, *stream = Py_None;
    if (reducer_check_made(self) < 0 ||
        !PyArg_ParseTupleAndKeywords(args, kwargs, "OO!|$OOOOOOOO:attach", names, &params,
                                     &PyList_Type, &views, &copy, &open, &renew, &task_id, &layouts,
                                     &unlike, &describe, &stream))
        return NULL;
    PyObject *param_list = PySequence_List(params);
    Py_ssize_t count = (Py_ssize_t)sw_reducer_layout(self->reducer)->param_count;
    bool fits = layouts == Py_None || (PyList_Check(layouts) && PyList_Size(layouts) == count);
    if (!param_list || PyList_Size(param_list) != count || PyList_Size(views) != count || !fits) {
        Py_XDECREF(param_list);
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError,
                         "attach: parameters and views must have %zd entries each", count);
        return NULL;
    }
    clear_tensors(self);
    self->params = param_list;
    keep(&self->views, views);
    keep(&self->copy, copy);
    keep(&self->open, open);
    keep(&self->renew, renew);
    keep(&self->task_id, task_id);
    keep(&self->layouts, layouts);
    keep(&self->unlike, unlike);
    keep(&self->describe, describe);
    keep(&self->stream, stream);
    if (attach_shapes(self, count) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* `table` is torch's dictionary of the gradient hooks of a parameter; ours is the last. */
static PyObject *reducer_watch_hooks(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    PyObject *position, *table;
    size_t index;
    if (reducer_check_ready(self) < 0 ||
        !PyArg_ParseTuple(args, "OO!:watch_hooks", &position, &PyDict_Type, &table) ||
        sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    Py_INCREF(table);
    if (PyList_SetItem(self->hook_tables, (Py_ssize_t)index, table) < 0)
        return NULL;
    self->hook_counts[index] = PyDict_Size(table);
    Py_RETURN_NONE;
}

static PyObject *reducer_hook(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    return sw_py_hook_object_new(reducer_state_of(self), self->link, index);
}

static PyObject *reducer_count_step(PyObject *op, PyObject *unused)
{
    (void)unused;
    if (reducer_check_made((reducer_object *)op) < 0 ||
        sw_py_reducer_use_stream((reducer_object *)op) < 0)
        return NULL;
    sw_reducer_count_step(((reducer_object *)op)->reducer);
    Py_RETURN_NONE;
}

static PyObject *reducer_note_step(PyObject *op, PyObject *digest)
{
    unsigned long value = PyLong_AsUnsignedLong(digest);
    if (PyErr_Occurred() || reducer_check_made((reducer_object *)op) < 0)
        return NULL;
    sw_reducer_note_step(((reducer_object *)op)->reducer, (uint32_t)value);
    Py_RETURN_NONE;
}

static PyObject *reducer_forget_steps(PyObject *op, PyObject *unused)
{
    (void)unused;
    if (reducer_check_made((reducer_object *)op) < 0)
        return NULL;
    sw_reducer_forget_steps(((reducer_object *)op)->reducer);
    Py_RETURN_NONE;
}

static PyObject *reducer_has_memory(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    return PyBool_FromLong(!self->gpu || sw_reducer_takes_part(self->reducer, index));
}

static PyObject *reducer_set_divide_by(PyObject *op, PyObject *active_only)
{
    int flag = PyObject_IsTrue(active_only);
    if (flag < 0 || reducer_check_made((reducer_object *)op) < 0)
        return NULL;
    sw_reducer_divide_by_active(((reducer_object *)op)->reducer, flag);
    Py_RETURN_NONE;
}

static PyObject *reducer_set_tracer(PyObject *op, PyObject *tracer)
{
    reducer_object *self = (reducer_object *)op;
    ENGINE_CLEAR(self->tracer);
    if (tracer != Py_None) {
        Py_INCREF(tracer);
        self->tracer = tracer;
    }
    Py_RETURN_NONE;
}

static PyObject *reducer_set_bucket_callback(PyObject *op, PyObject *args)
{
    reducer_object *self = (reducer_object *)op;
    PyObject *callback, *wait = Py_None;
    if (reducer_check_made(self) < 0 ||
        !PyArg_ParseTuple(args, "O|O:set_bucket_callback", &callback, &wait))
        return NULL;
    if (wait != Py_None && self->sliced) {
        PyErr_SetString(reducer_state_of(self)->error,
                        "sliced buckets leave at the end of a backward");
        return NULL;
    }
    ENGINE_CLEAR(self->bucket_callback);
    ENGINE_CLEAR(self->bucket_wait);
    if (callback != Py_None) {
        Py_INCREF(callback);
        self->bucket_callback = callback;
        if (wait != Py_None) {
            Py_INCREF(wait);
            self->bucket_wait = wait;
        }
    }
    sw_reducer_give_buckets(self->reducer, !self->bucket_callback ? SW_BUCKETS_OURS
                                           : self->bucket_wait    ? SW_BUCKETS_HOOKS_EARLY
                                                                  : SW_BUCKETS_HOOKS);
    Py_RETURN_NONE;
}

static PyObject *reducer_used_by_any(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    return PyBool_FromLong(sw_reducer_used_by_any(self->reducer, index));
}

static PyObject *reducer_divisor(PyObject *op, PyObject *unused)
{
    (void)unused;
    if (reducer_check_made((reducer_object *)op) < 0)
        return NULL;
    return PyLong_FromSize_t(sw_reducer_divisor(((reducer_object *)op)->reducer));
}

static PyObject *reducer_standing_ranks(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    return PyLong_FromSize_t(sw_reducer_standing_ranks(self->reducer, index));
}

static PyObject *reducer_is_used(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    return PyBool_FromLong(sw_reducer_is_used(self->reducer, index));
}

static PyObject *reducer_averaged_in(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(sw_reducer_averaged_in(self->reducer, index));
}

/* Returns the indices of parameters whose `.grad` is a tensor other than our view. */
static PyObject *reducer_foreign(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    (void)unused;
    PyObject *found = reducer_check_ready(self) < 0 ? NULL : PyList_New(0);
    size_t count = found ? sw_reducer_layout(self->reducer)->param_count : 0;
    for (size_t i = 0; found && i < count; ++i) {
        PyObject *grad =
            PyObject_GetAttr(PyList_GetItem(self->params, (Py_ssize_t)i), self->grad_name);
        bool ours = grad == Py_None || (grad && grad == PyList_GetItem(self->views, (Py_ssize_t)i));
        PyObject *item = grad && !ours ? PyLong_FromSize_t(i) : NULL;
        if (!grad || (!ours && (!item || PyList_Append(found, item) < 0)))
            ENGINE_CLEAR(found);
        Py_XDECREF(item);
        Py_XDECREF(grad);
    }
    return found;
}

static PyObject *reducer_mark_unfrozen(PyObject *op, PyObject *position)
{
    reducer_object *self = (reducer_object *)op;
    size_t index;
    if (sw_py_reducer_read_index(self, position, &index) < 0)
        return NULL;
    sw_reducer_unfreeze(self->reducer, index);
    const sw_layout *layout = sw_reducer_layout(self->reducer);
    const sw_layout_bucket *bucket = &layout->bucket[layout->place[index].bucket];
    for (size_t k = 0; self->shapes && k < bucket->count; ++k) /* the views may be new */
        read_shape(self, (Py_ssize_t)layout->order[bucket->first + k]);
    Py_RETURN_NONE;
}

/* Adds the driver's counts since the GPU was opened, for all reducers on it. */
static int add_driver_counts(reducer_object *self, PyObject *counts)
{
    PyObject *driver = sw_py_call((PyObject *)self->gpu, "stats", NULL, NULL);
    int failed = driver ? PyDict_Update(counts, driver) : -1;
    Py_XDECREF(driver);
    return failed;
}

static PyObject *reducer_stats(PyObject *op, PyObject *unused)
{
    reducer_object *self = (reducer_object *)op;
    (void)unused;
    if (reducer_check_made(self) < 0)
        return NULL;
    const sw_reducer_stats *stats = sw_reducer_get_stats(self->reducer);
    PyObject *counts = Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "rounds", (unsigned long long)stats->rounds,
        "local_rounds", (unsigned long long)stats->local_rounds, "abandoned",
        (unsigned long long)stats->abandoned, "buckets_sent",
        (unsigned long long)stats->buckets_sent, "buckets_early",
        (unsigned long long)stats->buckets_early, "copies", self->copies, "bytes",
        (unsigned long long)stats->bytes, "unplaced_bytes_peak",
        (unsigned long long)stats->unplaced_bytes_peak);
    if (counts && self->gpu && add_driver_counts(self, counts) < 0)
        ENGINE_CLEAR(counts);
    return counts;
}

enum { GET_TRANSPORT, GET_REASON, GET_BUCKETS, GET_BYTES, GET_OPEN, GET_FAILED, GET_PENDING };

static PyObject *reducer_get(PyObject *op, void *which)
{
    reducer_object *self = (reducer_object *)op;
    if (!self->reducer)
        Py_RETURN_NONE;
    switch ((intptr_t)which) {
    case GET_TRANSPORT: /* on a GPU the subclass has both properties */
        return PyUnicode_FromString(
            self->gpu ? "" : sw_transport_name(sw_reducer_memory(self->reducer)->transport));
    case GET_REASON:
        return PyUnicode_FromString(self->gpu ? "" : sw_reducer_memory(self->reducer)->why);
    case GET_BUCKETS:
        return PyLong_FromSize_t(sw_reducer_layout(self->reducer)->bucket_count);
    case GET_BYTES:
        return PyLong_FromSize_t(sw_reducer_planned_bytes(self->reducer));
    case GET_OPEN:
        return PyBool_FromLong(sw_reducer_state(self->reducer) != SW_ROUND_CLOSED);
    case GET_FAILED:
        return PyBool_FromLong(sw_reducer_last_round_failed(self->reducer));
    default:
        return PyBool_FromLong(self->pending_forward);
    }
}

static PyMethodDef reducer_methods[] = {
    {"gradient", sw_py_reducer_gradient, METH_VARARGS,
     "gradient($self, index, shape, strides=None, /)\n--\n\n"
     "Return a DLPack capsule over a parameter's gradient."},
    {"result", sw_py_reducer_result, METH_O,
     "result($self, index, /)\n--\n\nReturn a DLPack capsule over this rank's slice of a mean."},
    {"bucket", sw_py_reducer_bucket, METH_O,
     "bucket($self, bucket, /)\n--\n\nReturn a DLPack capsule over a whole bucket."},
    {"bucket_parameters", sw_py_reducer_bucket_parameters, METH_O,
     "bucket_parameters($self, bucket, /)\n--\n\nReturn the bucket's parameters, in memory order."},
    {"bucket_dtype", sw_py_reducer_bucket_dtype, METH_O,
     "bucket_dtype($self, bucket, /)\n--\n\nReturn the bucket's element type."},
    {"place", sw_py_reducer_place, METH_O,
     "place($self, index, /)\n--\n\nReturn (bucket, begin, numel) of a parameter, in elements."},
    {"bucket_shape", sw_py_reducer_bucket_shape, METH_O,
     "bucket_shape($self, bucket, /)\n--\n\nReturn (offset_bytes, numel, dtype, trainable)."},
    {"attach", (PyCFunction)(void (*)(void))reducer_attach, METH_VARARGS | METH_KEYWORDS,
     "attach($self, parameters, views, *, copy, open, renew, task_id, layouts, unlike=None, "
     "describe=None, stream=None)\n--\n\nBind tensors."},
    {"watch_hooks", reducer_watch_hooks, METH_VARARGS,
     "watch_hooks($self, index, table, /)\n--\n\nDetect hooks that are registered after ours."},
    {"hook", reducer_hook, METH_O,
     "hook($self, index, /)\n--\n\nReturn the post-accumulate-grad hook of a parameter."},
    {"forward", sw_py_round_forward, METH_O,
     "forward($self, synchronised, /)\n--\n\nCount a forward with gradients."},
    {"open_round", sw_py_round_announce, METH_NOARGS,
     "open_round($self, /)\n--\n\nAnnounce a round, which the first gradient opens."},
    {"close", sw_py_round_close, METH_NOARGS, "close($self, /)\n--\n\nEnd the round."},
    {"fail", sw_py_round_fail, METH_NOARGS,
     "fail($self, /)\n--\n\nTell the peers that the backward of an open round failed."},
    {"close_pending", sw_py_round_close_pending, METH_NOARGS,
     "close_pending($self, /)\n--\n\nRun a whole round if a forward has none."},
    {"shadow", sw_py_round_shadow, METH_VARARGS,
     "shadow($self, standing=(), /)\n--\n\n"
     "Run a round without a contribution. `standing`, on a GPU: one byte for each parameter, 1 if "
     "the other ranks contribute on top of the standing mean."},
    {"has_memory", reducer_has_memory, METH_O,
     "has_memory($self, index, /)\n--\n\nReturn True if the parameter's gradient has memory."},
    {"average", sw_py_round_average, METH_NOARGS,
     "average($self, /)\n--\n\nRun a whole round over the current .grad."},
    {"count_step", reducer_count_step, METH_NOARGS,
     "count_step($self, /)\n--\n\nCount a step of the optimizer; ranks compare the count."},
    {"note_step", reducer_note_step, METH_O,
     "note_step($self, digest, /)\n--\n\nNote a step, which ranks compare in the next round."},
    {"forget_steps", reducer_forget_steps, METH_NOARGS,
     "forget_steps($self, /)\n--\n\nCount from 0 again."},
    {"set_divide_by", reducer_set_divide_by, METH_O,
     "set_divide_by($self, active_only, /)\n--\n\nSet the mean's divisor."},
    {"set_bucket_callback", reducer_set_bucket_callback, METH_VARARGS,
     "set_bucket_callback($self, callback, wait=None, /)\n--\n\n"
     "Set a communication hook, or None: callback(bucket, is_last, is_early) averages a bucket. "
     "With `wait` the callback may only start that, and is called early if possible."},
    {"set_tracer", reducer_set_tracer, METH_O,
     "set_tracer($self, tracer, /)\n--\n\n"
     "Set a callable that is called around each bucket's post and wait, or None."},
    {"used_by_any", reducer_used_by_any, METH_O,
     "used_by_any($self, index, /)\n--\n\nReturn True if some rank used the parameter."},
    {"divisor", reducer_divisor, METH_NOARGS,
     "divisor($self, /)\n--\n\n"
     "Return the number of ranks over which a hook's mean of the last round is taken."},
    {"standing_ranks", reducer_standing_ranks, METH_O,
     "standing_ranks($self, index, /)\n--\n\n"
     "Return the number of ranks that contribute on top of the standing mean."},
    {"is_used", reducer_is_used, METH_O,
     "is_used($self, index, /)\n--\n\n"
     "Return True if this rank used the parameter since the last round."},
    {"averaged_in", reducer_averaged_in, METH_O,
     "averaged_in($self, index, /)\n--\n\n"
     "Return the last round, from 1, in which some rank used the parameter."},
    {"foreign", reducer_foreign, METH_NOARGS,
     "foreign($self, /)\n--\n\nReturn the indices of parameters whose .grad is not our view."},
    {"mark_unfrozen", reducer_mark_unfrozen, METH_O,
     "mark_unfrozen($self, index, /)\n--\n\nLet the parameter's bucket take part."},
    {"stats", reducer_stats, METH_NOARGS,
     "stats($self, /)\n--\n\nReturn counts since creation; the driver's are the process's."},
    {"adopt", sw_py_reducer_adopt, METH_VARARGS,
     "adopt($self, bucket, tensor, /)\n--\n\n"
     "Set a bucket's memory from the next round on, on a GPU."},
    {"set_places", sw_py_reducer_set_places, METH_VARARGS,
     "set_places($self, tensors, /)\n--\n\n"
     "Set the memory that buckets use in turn, the largest first; on a GPU, sliced."},
    {"lend", sw_py_reducer_lend, METH_VARARGS,
     "lend($self, tensors, /)\n--\n\n"
     "Lend memory for peers' contributions and for encoded buckets, on a GPU."},
    {"withdraw", sw_py_reducer_withdraw, METH_NOARGS,
     "withdraw($self, /)\n--\n\nStop averaging buckets in the engine, on a GPU."},
    {"set_active", sw_py_reducer_set_active, METH_O,
     "set_active($self, trains, /)\n--\n\n"
     "Set the ranks that train, one byte for each rank, on a GPU."},
    {"set_order", sw_py_reducer_set_order, METH_O,
     "set_order($self, order, /)\n--\n\n"
     "Set a callable that returns a digest to compare in each round, or None; on a GPU."},
    {"set_announcer", sw_py_reducer_set_announcer, METH_O,
     "set_announcer($self, announce, /)\n--\n\n"
     "Set a callable that is called as a round opens, or None; on a GPU."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reducer_properties[] = {
    {"transport", reducer_get, NULL, "'pool' or 'staged'", (void *)GET_TRANSPORT},
    {"transport_reason", reducer_get, NULL, "why", (void *)GET_REASON},
    {"bucket_count", reducer_get, NULL, "number of buckets, frozen ones included",
     (void *)GET_BUCKETS},
    {"planned_bytes", reducer_get, NULL, "bytes of gradient memory on each rank",
     (void *)GET_BYTES},
    {"is_open", reducer_get, NULL, "True if a round is open", (void *)GET_OPEN},
    {"last_round_failed", reducer_get, NULL, "True if the last round averaged nothing",
     (void *)GET_FAILED},
    {"pending_forward", reducer_get, NULL, "True if a synchronised forward has no round yet",
     (void *)GET_PENDING},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot reducer_slots[] = {
    {Py_tp_init, reducer_init},
    {Py_tp_dealloc, reducer_dealloc},
    {Py_tp_traverse, reducer_traverse},
    {Py_tp_clear, reducer_clear},
    {Py_tp_methods, reducer_methods},
    {Py_tp_getset, reducer_properties},
    {Py_tp_doc, "Buckets of gradients and their mean, round by round."},
    {0, NULL},
};

PyType_Spec sw_py_reducer_type_spec = {
    .name = "shardwright._engine.Reducer",
    .basicsize = sizeof(reducer_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = reducer_slots,
};
