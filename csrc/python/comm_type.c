/* comm_type.c - shardwright._engine.HostComm: parses arguments, calls the engine, raises its
 * errors. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/text.h"
#include "comm/descriptor.h"
#include "comm/shm.h"
#include "python/engine.h"

/* Reports signals, and a close() during connect(), which nothing else can stop. */
static bool is_interrupted(void *context)
{
    comm_object *self = context;
    PyGILState_STATE gil = PyGILState_Ensure();
    bool raised = PyErr_CheckSignals() != 0;
    if (!raised && self->closed && !self->connected) {
        PyErr_Format(sw_py_state_of((PyObject *)self)->error,
                     "the communicator of rank %d was closed while it joined its peers",
                     self->rank);
        raised = true;
    }
    PyGILState_Release(gil);
    return raised;
}

static void log_message(void *context, const char *message)
{
    comm_object *self = context;
    PyGILState_STATE gil = PyGILState_Ensure();
    if (self->log) {
        PyObject *text = PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace");
        PyObject *result = text ? PyObject_CallFunctionObjArgs(self->log, text, NULL) : NULL;
        if (!result)
            PyErr_WriteUnraisable(self->log);
        Py_XDECREF(result);
        Py_XDECREF(text);
    }
    PyGILState_Release(gil);
}

static bool is_legal_period(double seconds)
{
    return seconds > 0 && seconds <= 1e9;
}

static int comm_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank", "world_size", "timeout_s", "warn_after_s", "host", "log", NULL};
    comm_object *self = (comm_object *)op;
    int rank, world_size;
    double timeout_s = 1800, warn_after_s = 30;
    const char *host = "";
    PyObject *log = Py_None;
    sw_error err;
    sw_status status;
    if (self->comm) {
        PyErr_SetString(PyExc_TypeError, "HostComm: already initialised");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii|$ddsO:HostComm", names, &rank, &world_size,
                                     &timeout_s, &warn_after_s, &host, &log))
        return -1;
    if (!is_legal_period(timeout_s)) {
        PyErr_SetString(PyExc_ValueError, "HostComm: timeout_s must be in (0, 1e9] seconds");
        return -1;
    }
    self->owner_pid = getpid();
    self->rank = rank;
    self->world_size = world_size;
    if (world_size == 1) {
        status = sw_local_group_create(1, &self->group, &err);
        if (status == SW_OK)
            status = sw_local_comm_create(self->group, rank, &self->comm, &err);
        self->connected = status == SW_OK;
    } else {
        status = sw_shm_comm_create(rank, world_size, host, &self->comm, self->address, &err);
    }
    if (status != SW_OK) {
        sw_py_raise(sw_py_state_of(op), &err, NULL);
        return -1;
    }
    self->comm->timeout_ns = (int64_t)(timeout_s * 1e9);
    if (!sw_py_comm_set_warn_after(self, warn_after_s))
        return -1;
    self->comm->hooks =
        (sw_comm_hooks){.context = self, .interrupted = is_interrupted, .log = log_message};
    if (log != Py_None) {
        Py_INCREF(log);
        self->log = log;
    }
    sw_py_comm_link(sw_py_state_of(op), self);
    return 0;
}

/* Destroys the communicator once no thread is inside; a thread that waits inside is woken first. */
static void close_comm(comm_object *self)
{
    if (self->closed || (!self->comm && !self->in_use))
        return;
    self->closed = true;
    sw_py_comm_acquire(self);
    if (sw_py_comm_is_own(self) && self->connected) {
        sw_error reason;
        sw_error_set(&reason, SW_E_COMM, self->rank,
                     "rank %d closed the communicator while a thread of it was inside", self->rank);
        Py_BEGIN_ALLOW_THREADS
        if (self->in_use)
            sw_comm_request_end(self->comm, &reason);
        else
            self->comm->ops->leave(self->comm);
        Py_END_ALLOW_THREADS
    }
    sw_py_comm_release(self);
}

static void comm_dealloc(PyObject *op)
{
    comm_object *self = (comm_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    sw_py_comm_unlink(sw_py_state_of(op), self);
    close_comm(self);
    Py_CLEAR(self->log);
    Py_CLEAR(self->hosts);
    PyObject_GC_Del(op);
    Py_DECREF(type);
}

static int comm_traverse(PyObject *op, visitproc visit, void *arg)
{
    comm_object *self = (comm_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->log);
    Py_VISIT(self->hosts);
    return 0;
}

static int comm_clear(PyObject *op)
{
    Py_CLEAR(((comm_object *)op)->log);
    return 0;
}

static PyObject *comm_close(PyObject *op, PyObject *unused)
{
    (void)unused;
    close_comm((comm_object *)op);
    Py_RETURN_NONE;
}

static PyObject *comm_arena(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nbytes", "label", "of_hosts", NULL};
    comm_object *self = (comm_object *)op;
    Py_ssize_t size;
    const char *label = "arena";
    int of_hosts = 0;
    sw_arena *arena = NULL;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|s$p:arena", names, &size, &label, &of_hosts))
        return NULL;
    if (size <= 0)
        return PyErr_Format(PyExc_ValueError, "arena '%s': nbytes must be positive, got %zd", label,
                            size);
    if (!sw_py_comm_enter(self))
        return NULL;
    if (!of_hosts && self->spans_hosts && sw_hier_comm_map(self->comm)->host_count > 1) {
        sw_py_comm_leave(self);
        return PyErr_Format(PyExc_NotImplementedError,
                            "arena '%s': memory that all ranks map needs one host, and these ranks "
                            "are on %d",
                            label, sw_hier_comm_map(self->comm)->host_count);
    }
    Py_BEGIN_ALLOW_THREADS
    status = self->comm->ops->arena_create(self->comm, (size_t)size, label, &arena, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_comm_finish(self, status, &err);
    PyObject *made = sw_py_arena_object_new(sw_py_state_of(op), self, arena, NULL);
    if (!made)
        self->comm->ops->arena_destroy(self->comm, arena);
    /* Last, since the arena keeps a closed communicator alive. */
    sw_py_comm_leave(self);
    return made;
}

static void set_label(sw_op *op, const char *label)
{
    memcpy(op->label, label, (size_t)sw_text_fit(label, sizeof op->label - 1));
}

static bool parse_redop(const char *name, sw_redop *op)
{
    for (int i = 0; i < SW_REDOP_COUNT; ++i)
        if (strcmp(sw_redop_name((sw_redop)i), name) == 0) {
            *op = (sw_redop)i;
            return true;
        }
    PyErr_Format(PyExc_ValueError, "op must be 'sum', 'mean', 'min' or 'max', got '%s'", name);
    return false;
}

static PyObject *comm_all_reduce(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"address", "numel", "dtype", "op", "label", "arena", NULL};
    comm_object *self = (comm_object *)op;
    PyObject *address, *arena = Py_None;
    Py_ssize_t numel;
    const char *dtype, *redop = "sum", *label = "all_reduce";
    sw_op operation = {.kind = SW_OP_ALL_REDUCE};
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ons|ssO:all_reduce", names, &address, &numel,
                                     &dtype, &redop, &label, &arena))
        return NULL;
    uint8_t *data = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred() || !parse_redop(redop, &operation.redop))
        return NULL;
    set_label(&operation, label);
    operation.dtype = sw_dtype_from_name(dtype);
    if (operation.dtype == SW_DTYPE_COUNT || numel < 0)
        return PyErr_Format(PyExc_ValueError,
                            "all_reduce '%s': dtype '%s' or numel %zd is not legal", label, dtype,
                            numel);
    operation.numel = (size_t)numel;
    operation.data = data;
    if (arena != Py_None) {
        if (Py_TYPE(arena) != sw_py_state_of(op)->arena_type ||
            ((arena_object *)arena)->owner != self || !((arena_object *)arena)->arena)
            return PyErr_Format(PyExc_TypeError,
                                "all_reduce '%s': arena is not one of this communicator", label);
        operation.arena = ((arena_object *)arena)->arena;
        operation.offset_bytes = (size_t)(data - operation.arena->base[self->comm->rank]);
    }
    if (!sw_py_comm_enter(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = self->comm->ops->run(self->comm, &operation, &err);
    Py_END_ALLOW_THREADS
    return sw_py_comm_finish(self, status, &err);
}

/* Issues one all_gather per (offset_bytes, nbytes) of `ranges` and waits for the last. Every range
 * is checked before the first is issued: otherwise a running operation would still read borrowed
 * memory after a later range was refused. Returns -1 with an exception for an invalid range. */
static int gather_ranges(comm_object *self, sw_op *operation, PyObject *ranges, sw_status *status,
                         sw_error *err)
{
    Py_ssize_t count = PyList_Size(ranges), offset, nbytes;
    uint32_t ticket = 0;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!PyArg_ParseTuple(PyList_GetItem(ranges, i), "nn;a range is (offset_bytes, nbytes)",
                              &offset, &nbytes))
            return -1;
        if (offset < 0 || nbytes < 0) {
            PyErr_Format(PyExc_ValueError, "all_gather '%s': range %zd must not be negative",
                         operation->label, i);
            return -1;
        }
        operation->offset_bytes = (size_t)offset;
        operation->numel = (size_t)nbytes;
        *status = sw_op_check(operation, self->comm->world_size, err);
        if (*status != SW_OK)
            return 0;
    }
    for (Py_ssize_t i = 0; i < count && *status == SW_OK; ++i) {
        if (!PyArg_ParseTuple(PyList_GetItem(ranges, i), "nn", &offset, &nbytes))
            return -1;
        operation->offset_bytes = (size_t)offset;
        operation->numel = (size_t)nbytes;
        Py_BEGIN_ALLOW_THREADS
        *status = self->comm->ops->post(self->comm, operation, &ticket, err);
        Py_END_ALLOW_THREADS
    }
    if (*status == SW_OK && count > 0) {
        Py_BEGIN_ALLOW_THREADS
        *status = self->comm->ops->wait(self->comm, ticket, err);
        Py_END_ALLOW_THREADS
    }
    return 0;
}

static PyObject *comm_all_gather(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"arena", "ranges", "label", "one_copy", "slices", NULL};
    comm_object *self = (comm_object *)op;
    PyObject *arena, *sequence, *owners = Py_None;
    sw_py_slices slices;
    const char *label = "all_gather";
    sw_op operation = {.kind = SW_OP_ALL_GATHER, .dtype = SW_DTYPE_UINT8};
    sw_error err;
    sw_status status = SW_OK;
    int one_copy = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|s$pO:all_gather", names,
                                     sw_py_state_of(op)->arena_type, &arena, &sequence, &label,
                                     &one_copy, &owners))
        return NULL;
    set_label(&operation, label);
    operation.one_copy = one_copy != 0;
    if (((arena_object *)arena)->owner != self || !((arena_object *)arena)->arena)
        return PyErr_Format(PyExc_TypeError,
                            "all_gather '%s': arena is not one of this communicator", label);
    operation.arena = ((arena_object *)arena)->arena;
    PyObject *ranges = PySequence_List(sequence);
    if (!ranges || sw_py_slices_init(&slices, owners, operation.arena->world_size) < 0) {
        Py_XDECREF(ranges);
        return NULL;
    }
    operation.slices = sw_py_slices_get(&slices);
    if (!sw_py_comm_enter(self)) {
        Py_DECREF(ranges);
        sw_py_slices_fini(&slices);
        return NULL;
    }
    int parsed = gather_ranges(self, &operation, ranges, &status, &err);
    Py_DECREF(ranges);
    sw_py_slices_fini(&slices);
    if (parsed < 0) {
        sw_py_comm_leave(self);
        return NULL;
    }
    return sw_py_comm_finish(self, status, &err);
}

static PyObject *comm_barrier(PyObject *op, PyObject *args)
{
    comm_object *self = (comm_object *)op;
    const char *label = "barrier";
    sw_op operation = {.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8};
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "|s:barrier", &label) || !sw_py_comm_enter(self))
        return NULL;
    set_label(&operation, label);
    Py_BEGIN_ALLOW_THREADS
    status = self->comm->ops->run(self->comm, &operation, &err);
    Py_END_ALLOW_THREADS
    return sw_py_comm_finish(self, status, &err);
}

static sw_range *parse_ranges(PyObject *list, size_t *count)
{
    Py_ssize_t size = PySequence_Size(list);
    sw_range *ranges = size >= 0 ? calloc((size_t)size + 1, sizeof *ranges) : NULL;
    for (Py_ssize_t i = 0; ranges && i < size; ++i) {
        PyObject *item = PySequence_GetItem(list, i);
        PyObject *address;
        Py_ssize_t bytes;
        if (!item || !PyTuple_Check(item) ||
            !PyArg_ParseTuple(item, "On;a range is (address, nbytes)", &address, &bytes) ||
            bytes < 0) {
            Py_XDECREF(item);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "broadcast: a range is (address, nbytes >= 0)");
            free(ranges);
            return NULL;
        }
        ranges[i] = (sw_range){.address = PyLong_AsVoidPtr(address), .size_bytes = (size_t)bytes};
        Py_DECREF(item);
    }
    *count = (size_t)size;
    return ranges;
}

static PyObject *comm_broadcast(PyObject *op, PyObject *args)
{
    comm_object *self = (comm_object *)op;
    PyObject *list;
    const char *label = "broadcast";
    size_t count;
    int root;
    sw_error err;
    sw_status status = SW_OK;
    if (!PyArg_ParseTuple(args, "Oi|s:broadcast", &list, &root, &label))
        return NULL;
    sw_range *ranges = parse_ranges(list, &count);
    if (!ranges || PyErr_Occurred() || !sw_py_comm_enter(self)) {
        free(ranges);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    status = sw_comm_broadcast(self->comm, ranges, count, root, label, &err);
    Py_END_ALLOW_THREADS
    free(ranges);
    return sw_py_comm_finish(self, status, &err);
}

/* The first message carries the length and as much data as fits, so short data needs no second. */
enum { INLINE_BYTES = 1016 };

typedef struct envelope {
    uint64_t length;
    uint8_t bytes[INLINE_BYTES];
} envelope;

typedef struct gathered {
    envelope *envelopes;   /* owned, world_size */
    uint8_t *padded, *all; /* owned; used if some rank's data exceeds an envelope */
    size_t longest;
} gathered;

static const uint8_t *gathered_data(const gathered *g, int rank)
{
    return g->all ? g->all + (size_t)rank * g->longest : g->envelopes[rank].bytes;
}

static sw_status gather_bytes(sw_comm *comm, const char *data, size_t size, const char *label,
                              gathered *out, sw_error *err)
{
    size_t world_size = (size_t)comm->world_size;
    envelope mine = {.length = size};
    memcpy(mine.bytes, data, sw_size_min(size, INLINE_BYTES));
    out->envelopes = calloc(world_size, sizeof *out->envelopes);
    if (!out->envelopes)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "all_gather '%s': no memory", label);
    SW_TRY(comm->ops->gather(comm, &mine, sizeof mine, out->envelopes, label, err));
    for (size_t r = 0; r < world_size; ++r)
        out->longest = sw_size_max(out->longest, (size_t)out->envelopes[r].length);
    if (out->longest <= INLINE_BYTES)
        return SW_OK;
    out->padded = calloc(1, out->longest);
    out->all = malloc(out->longest * world_size);
    if (!out->padded || !out->all)
        return sw_comm_give_up(comm, SW_E_MEMORY, err,
                               "all_gather '%s': no memory for %zu bytes a rank", label,
                               out->longest);
    memcpy(out->padded, data, size);
    return comm->ops->gather(comm, out->padded, out->longest, out->all, label, err);
}

static PyObject *comm_all_gather_bytes(PyObject *op, PyObject *args)
{
    comm_object *self = (comm_object *)op;
    const char *data, *label = "all_gather";
    Py_ssize_t size;
    gathered out = {.longest = 0};
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "y#|s:all_gather_bytes", &data, &size, &label) ||
        !sw_py_comm_enter(self))
        return NULL;
    int world_size = self->comm->world_size;
    Py_BEGIN_ALLOW_THREADS
    status = gather_bytes(self->comm, data, (size_t)size, label, &out, &err);
    Py_END_ALLOW_THREADS
    PyObject *result = sw_py_comm_finish(self, status, &err);
    if (result) {
        Py_DECREF(result);
        result = PyList_New(0);
        for (int r = 0; result && r < world_size; ++r) {
            PyObject *item = PyBytes_FromStringAndSize((const char *)gathered_data(&out, r),
                                                       (Py_ssize_t)out.envelopes[r].length);
            if (!item || PyList_Append(result, item) < 0)
                Py_CLEAR(result);
            Py_XDECREF(item);
        }
    }
    free(out.envelopes);
    free(out.padded);
    free(out.all);
    return result;
}

static PyObject *comm_abort(PyObject *op, PyObject *args)
{
    comm_object *self = (comm_object *)op;
    const char *text;
    sw_error reason;
    if (!PyArg_ParseTuple(args, "s:abort", &text))
        return NULL;
    bool is_beside = self->in_use && self->connected && !self->closed && sw_py_comm_is_own(self);
    if (!is_beside && !sw_py_comm_enter(self))
        return NULL;
    sw_error_set(&reason, SW_E_COMM, self->rank, "rank %d aborted the communicator: %.400s",
                 self->rank, text);
    if (is_beside) { /* the thread inside is woken and may close the communicator */
        sw_py_comm_acquire(self);
        sw_comm_request_end(self->comm, &reason);
        sw_py_comm_release(self);
        Py_RETURN_NONE;
    }
    self->comm->ops->abort(self->comm, &reason);
    sw_py_comm_leave(self);
    Py_RETURN_NONE;
}

static bool is_there(comm_object *self)
{
    if (!self->comm)
        PyErr_SetString(sw_py_state_of((PyObject *)self)->error,
                        self->closed ? "the communicator was closed"
                                     : "the communicator is joining its peers");
    return self->comm != NULL;
}

static PyObject *comm_stats(PyObject *op, PyObject *unused)
{
    comm_object *self = (comm_object *)op;
    (void)unused;
    if (!is_there(self))
        return NULL;
    const sw_comm_stats *stats = &self->comm->stats;
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "all_reduce",
                         (unsigned long long)stats->operations[SW_OP_ALL_REDUCE], "broadcast",
                         (unsigned long long)stats->operations[SW_OP_BROADCAST], "all_gather",
                         (unsigned long long)stats->operations[SW_OP_ALL_GATHER], "barrier",
                         (unsigned long long)stats->operations[SW_OP_BARRIER], "bytes_reduced",
                         (unsigned long long)stats->bytes_reduced, "bytes_staged",
                         (unsigned long long)stats->bytes_staged, "waits",
                         (unsigned long long)stats->waits, "wait_ns",
                         (unsigned long long)stats->wait_ns, "wire_bytes_sent",
                         (unsigned long long)stats->wire_bytes_sent, "wire_bytes_received",
                         (unsigned long long)stats->wire_bytes_received);
}

static PyObject *comm_describe(PyObject *op, PyObject *unused)
{
    comm_object *self = (comm_object *)op;
    (void)unused;
    if (!is_there(self))
        return NULL;
    PyObject *peers = PyList_New(0);
    for (int r = 0; peers && self->connected && r < self->comm->world_size; ++r) {
        char text[SW_COMM_PEER_BYTES];
        self->comm->ops->peer(self->comm, r, text);
        PyObject *item = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
        if (!item || PyList_Append(peers, item) < 0)
            Py_CLEAR(peers);
        Py_XDECREF(item);
    }
    if (!peers)
        return NULL;
    const sw_comm *inside = self->spans_hosts ? sw_hier_comm_inside(self->comm) : self->comm;
    const char *watch = self->group ? "none" : sw_shm_comm_watch(inside);
    const char *transport = self->group ? "local" : self->spans_hosts ? "hier" : "shm";
    return Py_BuildValue("{s:i,s:i,s:s,s:s,s:N,s:d}", "rank", self->rank, "world_size",
                         self->world_size, "transport", transport, "watch", watch, "peers", peers,
                         "timeout_s", (double)self->comm->timeout_ns * 1e-9);
}

static PyObject *comm_get(PyObject *op, void *which)
{
    comm_object *self = (comm_object *)op;
    if ((intptr_t)which == 2)
        return PyUnicode_FromString(self->address);
    if (self->closed && !self->comm)
        return PyLong_FromLong(-1);
    return PyLong_FromLong((intptr_t)which == 0 ? self->rank : self->world_size);
}

static PyObject *comm_get_alive(PyObject *op, void *unused)
{
    comm_object *self = (comm_object *)op;
    (void)unused;
    return PyBool_FromLong(self->comm && !self->closed && self->connected &&
                           (sw_py_comm_is_own(self) || self->group) &&
                           self->comm->ops->is_alive(self->comm));
}

static PyObject *comm_get_end_reason(PyObject *op, void *unused)
{
    comm_object *self = (comm_object *)op;
    sw_error err;
    (void)unused;
    if (!sw_py_comm_is_own(
            self)) /* a forked child takes no lock that a parent's thread may have held */
        return PyUnicode_FromString("this process was forked from the one that joined");
    if (!self->comm || self->closed || !self->connected ||
        self->comm->ops->look(self->comm, true, &err) == SW_OK)
        Py_RETURN_NONE;
    return PyUnicode_DecodeUTF8(err.message, (Py_ssize_t)strlen(err.message), "replace");
}

static PyObject *comm_get_silent(PyObject *op, void *unused)
{
    const comm_object *self = (comm_object *)op;
    (void)unused;
    return PyFloat_FromDouble(self->comm ? (double)self->comm->silent_ns * 1e-9 : 0);
}

static int comm_set_silent(PyObject *op, PyObject *value, void *unused)
{
    comm_object *self = (comm_object *)op;
    double seconds = value ? PyFloat_AsDouble(value) : 0;
    (void)unused;
    if (PyErr_Occurred())
        return -1;
    if ((seconds != 0 && !is_legal_period(seconds)) || !self->comm) {
        PyErr_SetString(PyExc_ValueError,
                        "HostComm: silent_s must be in [0, 1e9] seconds, of an open communicator");
        return -1;
    }
    self->comm->silent_ns = (int64_t)(seconds * 1e9);
    return 0;
}

static PyObject *comm_get_timeout(PyObject *op, void *unused)
{
    const comm_object *self = (comm_object *)op;
    (void)unused;
    return PyFloat_FromDouble(self->comm ? (double)self->comm->timeout_ns * 1e-9 : 0);
}

static int comm_set_timeout(PyObject *op, PyObject *value, void *unused)
{
    comm_object *self = (comm_object *)op;
    double seconds = value ? PyFloat_AsDouble(value) : 0;
    (void)unused;
    if (PyErr_Occurred())
        return -1;
    if (!is_legal_period(seconds) || !self->comm) {
        PyErr_SetString(PyExc_ValueError,
                        "HostComm: timeout_s must be in (0, 1e9] seconds, of an open communicator");
        return -1;
    }
    self->comm->timeout_ns = (int64_t)(seconds * 1e9);
    return 0;
}

static PyObject *comm_get_hosts(PyObject *op, void *unused)
{
    const comm_object *self = (comm_object *)op;
    (void)unused;
    return self->hosts ? PyList_GetSlice(self->hosts, 0, PyList_Size(self->hosts)) : PyList_New(0);
}

static PyMethodDef comm_methods[] = {
    {"peer", sw_py_comm_peer, METH_VARARGS,
     "peer($self, rank, /)\n--\n\n"
     "Return a rank, its process and host, and what the process does, for messages."},
    {"connect", (PyCFunction)(void (*)(void))sw_py_comm_connect, METH_VARARGS | METH_KEYWORDS,
     "connect($self, addresses, secret, hosts, *, members=None)\n--\n\n"
     "Join the ranks of this host."},
    {"extend", (PyCFunction)(void (*)(void))sw_py_comm_extend, METH_VARARGS | METH_KEYWORDS,
     "extend($self, host_of, host, *, wire=None)\n--\n\nJoin the ranks of other hosts."},
    {"arena", (PyCFunction)(void (*)(void))comm_arena, METH_VARARGS | METH_KEYWORDS,
     "arena($self, nbytes, label='arena', *, of_hosts=False)\n--\n\nCreate an arena. Collective."},
    {"all_reduce", (PyCFunction)(void (*)(void))comm_all_reduce, METH_VARARGS | METH_KEYWORDS,
     "all_reduce($self, address, numel, dtype, op='sum', label='all_reduce', arena=None)\n--\n\n"
     "Reduce in place."},
    {"broadcast", comm_broadcast, METH_VARARGS,
     "broadcast($self, ranges, root, label='broadcast', /)\n--\n\nBroadcast bytes."},
    {"all_gather_bytes", comm_all_gather_bytes, METH_VARARGS,
     "all_gather_bytes($self, data, label='all_gather', /)\n--\n\nReturn every rank's data."},
    {"all_gather", (PyCFunction)(void (*)(void))comm_all_gather, METH_VARARGS | METH_KEYWORDS,
     "all_gather($self, arena, ranges, label='all_gather', *, one_copy=False, slices=None)\n--\n\n"
     "Send every rank's slice of each range to all ranks."},
    {"barrier", comm_barrier, METH_VARARGS,
     "barrier($self, label='barrier', /)\n--\n\nWait for every rank."},
    {"abort", comm_abort, METH_VARARGS,
     "abort($self, reason, /)\n--\n\nEnd the communicator on every rank. Any thread."},
    {"stats", comm_stats, METH_NOARGS, "stats($self, /)\n--\n\nReturn counts since creation."},
    {"describe", comm_describe, METH_NOARGS,
     "describe($self, /)\n--\n\nReturn the facts and choices of this communicator."},
    {"close", comm_close, METH_NOARGS, "close($self, /)\n--\n\nLeave the group."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef comm_properties[] = {
    {"rank", comm_get, NULL, "this rank, in the group", (void *)0},
    {"world_size", comm_get, NULL, "ranks in the group", (void *)1},
    {"silent_s", comm_get_silent, comm_set_silent,
     "seconds for which a peer may be stopped before a wait for it ends; 0: until the deadline",
     NULL},
    {"timeout_s", comm_get_timeout, comm_set_timeout, "deadline of each wait, seconds", NULL},
    {"warn_after_s", sw_py_comm_get_waits, sw_py_comm_set_waits,
     "seconds after which a wait is logged, then again whenever it has doubled; 0: never", NULL},
    {"dead_rank", sw_py_comm_get_dead, NULL,
     "a rank of this host whose process has ended; None if none is known", NULL},
    {"is_alive", comm_get_alive, NULL, "True if no rank has met an error or left", NULL},
    {"end_reason", comm_get_end_reason, NULL, "the reason why it is not alive; None if it is",
     NULL},
    {"address", comm_get, NULL, "the abstract socket that peers connect to", (void *)2},
    {"hosts", comm_get_hosts, NULL, "the host name of each rank, once joined", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot comm_slots[] = {
    {Py_tp_init, comm_init},
    {Py_tp_dealloc, comm_dealloc},
    {Py_tp_traverse, comm_traverse},
    {Py_tp_clear, comm_clear},
    {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_properties},
    {Py_tp_doc, "The ranks of one host, joined through shared memory. One issuing thread a rank."},
    {0, NULL},
};

PyType_Spec sw_py_comm_type_spec = {
    .name = "shardwright._engine.HostComm",
    .basicsize = sizeof(comm_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = comm_slots,
};
