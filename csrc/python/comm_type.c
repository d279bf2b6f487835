/* comm_type.c - shardwright._engine.HostComm: parses arguments, calls the engine, raises its
 * errors. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/text.h"
#include "comm/descriptor.h"
#include "comm/shm.h"
#include "python/method.h"

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
        PyObject *text = sw_py_text(message);
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

/* Lets __init__ run: first, after it failed, or once a closed communicator has no user left. */
static bool may_init(comm_object *self)
{
    if (self->comm || self->users > 0 || self->use.kind != SW_PY_FREE) {
        PyErr_SetString(PyExc_TypeError, "HostComm: already initialised");
        return false;
    }
    sw_py_comm_unlink(sw_py_state_of((PyObject *)self), self);
    self->use = (sw_py_use){.pid = getpid()};
    self->connected = self->closed = self->spans_hosts = false;
    self->address[0] = '\0';
    ENGINE_CLEAR(self->hosts);
    return true;
}

static int comm_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[6] = {[2] = {.d = 1800}, [3] = {.d = 30}, [4] = {.s = ""}, [5] = {.o = Py_None}};
    _Atomic int64_t warn_after_ns;
    sw_error err;
    sw_status status;
    if (!sw_py_read("HostComm rank:i world_size:i | $ timeout_s:d warn_after_s:d host:s log:O",
                    args, kwargs, a))
        return -1;
    if (!is_legal_period(a[2].d)) {
        PyErr_SetString(PyExc_ValueError, "HostComm: timeout_s must be in (0, 1e9] seconds");
        return -1;
    }
    if (!sw_py_read_warn_after(a[3].d, &warn_after_ns) || !may_init(self))
        return -1;
    self->rank = a[0].i;
    self->world_size = a[1].i;
    if (self->world_size == 1) {
        status = sw_local_group_create(1, &self->group, &err);
        if (status == SW_OK)
            status = sw_local_comm_create(self->group, self->rank, &self->comm, &err);
        if (status != SW_OK) {
            sw_local_group_destroy(self->group);
            self->group = NULL;
        }
        self->connected = status == SW_OK;
    } else {
        status = sw_shm_comm_create(self->rank, self->world_size, a[4].s, &self->comm,
                                    self->address, &err);
    }
    if (status != SW_OK) {
        sw_py_raise(sw_py_state_of(op), &err, NULL);
        return -1;
    }
    self->comm->timeout_ns = (int64_t)(a[2].d * 1e9);
    self->comm->warn_after_ns = warn_after_ns;
    self->comm->hooks =
        (sw_comm_hooks){.context = self, .interrupted = is_interrupted, .log = log_message};
    sw_py_comm_link(sw_py_state_of(op), self);
    sw_py_set_or_clear(&self->log, a[5].o);
    return 0;
}

/* Destroys the communicator once no thread is inside; a thread that waits inside is woken first. */
static void close_comm(comm_object *self)
{
    if (self->closed || (!self->comm && self->use.kind == SW_PY_FREE))
        return;
    self->closed = true;
    sw_py_comm_acquire(self);
    if (sw_py_use_is_own(&self->use) && self->connected) {
        sw_error reason;
        sw_error_set(&reason, SW_E_COMM, self->rank,
                     "rank %d closed the communicator while a thread of it was inside", self->rank);
        Py_BEGIN_ALLOW_THREADS
        if (self->use.kind != SW_PY_FREE)
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
    PyObject *kind, *value, *trace;
    PyObject_GC_UnTrack(op);
    sw_py_comm_unlink(sw_py_state_of(op), self);
    PyErr_Fetch(&kind, &value, &trace);
    close_comm(self);
    if (PyErr_Occurred()) /* a signal handler raised while this thread waited */
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(kind, value, trace);
    ENGINE_CLEAR(self->log);
    ENGINE_CLEAR(self->hosts);
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
    comm_object *self = (comm_object *)op;
    sw_py_arg a[3] = {[1] = {.s = "arena"}};
    sw_arena *arena = NULL;
    sw_error err;
    sw_status status;
    if (!sw_py_read("arena nbytes:n | label:s $ of_hosts:p", args, kwargs, a))
        return NULL;
    if (a[0].n <= 0)
        return PyErr_Format(PyExc_ValueError, "arena '%s': nbytes must be positive, got %zd",
                            a[1].s, a[0].n);
    if (!sw_py_comm_enter(self))
        return NULL;
    if (!a[2].p && self->spans_hosts && sw_hier_comm_map(self->comm)->host_count > 1) {
        status = sw_error_set(&err, SW_E_UNSUPPORTED, -1,
                              "arena '%.200s': memory that all ranks map needs one host, and these "
                              "ranks are on %d",
                              a[1].s, sw_hier_comm_map(self->comm)->host_count);
        return sw_py_comm_finish(self, status, &err);
    }
    SW_PY_WITHOUT_GIL(status,
                      self->comm->ops->arena_create(self->comm, a[0].size, a[1].s, &arena, &err));
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

/* Returns the memory of an Arena of this communicator, or NULL with an exception. */
static sw_arena *own_arena(comm_object *self, PyObject *arena, const char *operation,
                           const char *label)
{
    const arena_object *memory = (arena_object *)arena;
    if (Py_TYPE(arena) == sw_py_state_of((PyObject *)self)->arena_type && memory->owner == self &&
        memory->arena)
        return memory->arena;
    PyErr_Format(PyExc_TypeError, "%s '%s': arena is not one of this communicator", operation,
                 label);
    return NULL;
}

static PyObject *comm_all_reduce(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[6] = {[3] = {.s = "sum"}, [4] = {.s = "all_reduce"}, [5] = {.o = Py_None}};
    sw_op operation = {.kind = SW_OP_ALL_REDUCE};
    sw_error err;
    sw_status status;
    if (!sw_py_read("all_reduce address:A numel:n dtype:s | op:s label:s arena:O", args, kwargs,
                    a) ||
        !parse_redop(a[3].s, &operation.redop))
        return NULL;
    set_label(&operation, a[4].s);
    operation.dtype = sw_dtype_from_name(a[2].s);
    if (operation.dtype == SW_DTYPE_COUNT || a[1].n < 0)
        return PyErr_Format(PyExc_ValueError,
                            "all_reduce '%s': dtype '%s' or numel %zd is not legal", a[4].s, a[2].s,
                            a[1].n);
    operation.numel = a[1].size;
    operation.data = a[0].address;
    if (a[5].o != Py_None) {
        operation.arena = own_arena(self, a[5].o, "all_reduce", a[4].s);
        if (!operation.arena)
            return NULL;
        operation.offset_bytes =
            (size_t)((uint8_t *)a[0].address - operation.arena->base[self->comm->rank]);
    }
    if (!sw_py_comm_enter(self))
        return NULL;
    SW_PY_WITHOUT_GIL(status, self->comm->ops->run(self->comm, &operation, &err));
    return sw_py_comm_finish(self, status, &err);
}

typedef struct byte_range {
    size_t offset_bytes, size_bytes;
} byte_range;

SW_PY_ROW(fill_byte_range, byte_range, a[0].size, a[1].size)

/* Issues one all_gather per range and waits for the last. Every range is checked before the
 * first is issued: otherwise a running operation would still read borrowed memory after a later
 * range was refused. */
static sw_status gather_ranges(sw_comm *comm, sw_op *operation, const sw_py_table *ranges,
                               sw_error *err)
{
    const byte_range *range = ranges->rows;
    uint32_t ticket = 0;
    for (size_t pass = 0; pass < 2; ++pass)
        for (size_t i = 0; i < ranges->count; ++i) {
            operation->offset_bytes = range[i].offset_bytes;
            operation->numel = range[i].size_bytes;
            SW_TRY(pass == 0 ? sw_op_check(operation, comm->world_size, err)
                             : comm->ops->post(comm, operation, &ticket, err));
        }
    return ranges->count > 0 ? comm->ops->wait(comm, ticket, err) : SW_OK;
}

static PyObject *comm_all_gather(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[5] = {[2] = {.s = "all_gather"}, [4] = {.o = Py_None}};
    sw_py_slices slices = {.numbers = NULL};
    sw_py_table ranges = {0};
    sw_op operation = {.kind = SW_OP_ALL_GATHER, .dtype = SW_DTYPE_UINT8};
    sw_error err;
    sw_status status;
    PyObject *done = NULL;
    if (!sw_py_read("all_gather arena:O ranges:O | label:s $ one_copy:p slices:O", args, kwargs, a))
        return NULL;
    set_label(&operation, a[2].s);
    operation.one_copy = a[3].p;
    operation.arena = own_arena(self, a[0].o, "all_gather", a[2].s);
    if (operation.arena &&
        sw_py_table_init(&ranges, a[1].o, "all_gather offset_bytes:N nbytes:N", sizeof(byte_range),
                         fill_byte_range, NULL) &&
        sw_py_slices_init(&slices, a[4].o, operation.arena->world_size) == 0 &&
        sw_py_comm_enter(self)) {
        operation.slices = sw_py_slices_get(&slices);
        SW_PY_WITHOUT_GIL(status, gather_ranges(self->comm, &operation, &ranges, &err));
        done = sw_py_comm_finish(self, status, &err);
    }
    sw_py_table_fini(&ranges);
    sw_py_slices_fini(&slices);
    return done;
}

static sw_status run_barrier(sw_comm *comm, const char *label, sw_error *err)
{
    sw_op operation = {.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8};
    set_label(&operation, label);
    return comm->ops->run(comm, &operation, err);
}

SW_PY_METHOD_WITH(comm_barrier, comm_object, "barrier | label:s", a[0].s = "barrier",
                  sw_py_comm_enter(self), run_barrier(self->comm, a[0].s, &err),
                  sw_py_comm_finish(self, status, &err))

SW_PY_ROW(fill_range, sw_range, .address = a[0].address, .size_bytes = a[1].size)

SW_PY_METHOD_ON_ROWS(comm_broadcast, comm_object, "broadcast ranges:O root:i | label:s",
                     a[2].s = "broadcast", 0, "broadcast address:A nbytes:N", sw_range, fill_range,
                     sw_py_comm_enter(self),
                     sw_comm_broadcast(self->comm, rows.rows, rows.count, a[1].i, a[2].s, &err),
                     sw_py_comm_finish(self, status, &err))

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
    sw_py_arg a[2] = {[1] = {.s = "all_gather"}};
    gathered out = {.longest = 0};
    sw_error err;
    sw_status status;
    if (!sw_py_read("all_gather_bytes data:B | label:s", args, NULL, a) || !sw_py_comm_enter(self))
        return NULL;
    int world_size = self->comm->world_size;
    const char *data = PyBytes_AsString(a[0].o);
    size_t size = (size_t)PyBytes_Size(a[0].o);
    SW_PY_WITHOUT_GIL(status, gather_bytes(self->comm, data, size, a[1].s, &out, &err));
    PyObject *done = sw_py_comm_finish(self, status, &err);
    PyObject *result = done ? PyList_New(0) : NULL;
    for (int r = 0; result && r < world_size; ++r)
        sw_py_append(&result, PyBytes_FromStringAndSize((const char *)gathered_data(&out, r),
                                                        (Py_ssize_t)out.envelopes[r].length));
    Py_XDECREF(done);
    free(out.envelopes);
    free(out.padded);
    free(out.all);
    return result;
}

static PyObject *comm_abort(PyObject *op, PyObject *args)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[1];
    sw_error reason;
    if (!sw_py_read("abort reason:s", args, NULL, a))
        return NULL;
    bool is_beside = self->use.kind != SW_PY_FREE && self->connected && !self->closed &&
                     sw_py_use_is_own(&self->use);
    if (!is_beside && !sw_py_comm_enter(self))
        return NULL;
    sw_error_set(&reason, SW_E_COMM, self->rank, "rank %d aborted the communicator: %.400s",
                 self->rank, a[0].s);
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
    static const sw_py_count counts[] = {
        SW_PY_COUNT_AS(sw_comm_stats, operations[SW_OP_ALL_REDUCE], "all_reduce"),
        SW_PY_COUNT_AS(sw_comm_stats, operations[SW_OP_BROADCAST], "broadcast"),
        SW_PY_COUNT_AS(sw_comm_stats, operations[SW_OP_ALL_GATHER], "all_gather"),
        SW_PY_COUNT_AS(sw_comm_stats, operations[SW_OP_BARRIER], "barrier"),
        SW_PY_COUNT(sw_comm_stats, bytes_reduced),
        SW_PY_COUNT(sw_comm_stats, bytes_staged),
        SW_PY_COUNT(sw_comm_stats, waits),
        SW_PY_COUNT(sw_comm_stats, wait_ns),
        SW_PY_COUNT(sw_comm_stats, wire_bytes_sent),
        SW_PY_COUNT(sw_comm_stats, wire_bytes_received),
    };
    comm_object *self = (comm_object *)op;
    (void)unused;
    if (!is_there(self))
        return NULL;
    sw_py_comm_acquire(self); /* a destructor that runs meanwhile may close it */
    PyObject *made = sw_py_counts(&self->comm->stats, counts, sizeof counts / sizeof *counts);
    sw_py_comm_release(self);
    return made;
}

static PyObject *build_peers(const sw_comm *comm)
{
    PyObject *peers = PyList_New(0);
    for (int r = 0; peers && r < comm->world_size; ++r) {
        char text[SW_COMM_PEER_BYTES];
        comm->ops->peer((sw_comm *)(uintptr_t)comm, r, text);
        sw_py_append(&peers, sw_py_text(text));
    }
    return peers;
}

static PyObject *comm_describe(PyObject *op, PyObject *unused)
{
    comm_object *self = (comm_object *)op;
    (void)unused;
    if (!is_there(self))
        return NULL;
    const sw_comm *inside = self->spans_hosts ? sw_hier_comm_inside(self->comm) : self->comm;
    const char *watch = self->group ? "none" : sw_shm_comm_watch(inside);
    const char *transport = self->group ? "local" : self->spans_hosts ? "hier" : "shm";
    double timeout_s = (double)self->comm->timeout_ns * 1e-9;
    sw_py_comm_acquire(self);
    PyObject *peers = self->connected ? build_peers(self->comm) : PyList_New(0);
    sw_py_comm_release(self);
    return peers ? Py_BuildValue("{s:i,s:i,s:s,s:s,s:N,s:d}", "rank", self->rank, "world_size",
                                 self->world_size, "transport", transport, "watch", watch, "peers",
                                 peers, "timeout_s", timeout_s)
                 : NULL;
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

SW_PY_GETTER(comm_get_alive, comm_object,
             PyBool_FromLong(self->comm && !self->closed && self->connected &&
                             (sw_py_use_is_own(&self->use) || self->group) &&
                             self->comm->ops->is_alive(self->comm)))

static PyObject *comm_get_end_reason(PyObject *op, void *unused)
{
    comm_object *self = (comm_object *)op;
    sw_error err;
    (void)unused;
    if (!sw_py_use_is_own(
            &self->use)) /* a forked child takes no lock that a parent's thread may have held */
        return PyUnicode_FromString("this process was forked from the one that joined");
    if (!self->comm || self->closed || !self->connected ||
        self->comm->ops->look(self->comm, true, &err) == SW_OK)
        Py_RETURN_NONE;
    return sw_py_text(err.message);
}

SW_PY_GETTER(comm_get_silent, comm_object,
             PyFloat_FromDouble(self->comm ? (double)self->comm->silent_ns * 1e-9 : 0))
SW_PY_GETTER(comm_get_timeout, comm_object,
             PyFloat_FromDouble(self->comm ? (double)self->comm->timeout_ns * 1e-9 : 0))
SW_PY_GETTER(comm_get_hosts, comm_object,
             self->hosts ? PyList_GetSlice(self->hosts, 0, PyList_Size(self->hosts))
                         : PyList_New(0))

/* Sets silent_s, which may be 0, or timeout_s. */
static int set_period(PyObject *op, PyObject *value, bool is_silent)
{
    sw_comm *comm = ((comm_object *)op)->comm;
    double seconds = value ? PyFloat_AsDouble(value) : 0;
    if (PyErr_Occurred())
        return -1;
    if ((!is_legal_period(seconds) && !(is_silent && seconds == 0)) || !comm) {
        PyErr_Format(PyExc_ValueError, "HostComm: %s 1e9] seconds, of an open communicator",
                     is_silent ? "silent_s must be in [0," : "timeout_s must be in (0,");
        return -1;
    }
    *(is_silent ? &comm->silent_ns : &comm->timeout_ns) = (int64_t)(seconds * 1e9);
    return 0;
}

static int comm_set_silent(PyObject *op, PyObject *value, void *unused)
{
    (void)unused;
    return set_period(op, value, true);
}

static int comm_set_timeout(PyObject *op, PyObject *value, void *unused)
{
    (void)unused;
    return set_period(op, value, false);
}

static PyMethodDef comm_methods[] = {
    {"peer", sw_py_comm_peer, METH_VARARGS,
     "peer($self, rank, /)\n--\n\n"
     "Return a rank, its process and host, and what the process does, for messages."},
    {"connect", SW_PY_NAMED(sw_py_comm_connect),
     "connect($self, addresses, secret, hosts, *, members=None)\n--\n\n"
     "Join the ranks of this host."},
    {"extend", SW_PY_NAMED(sw_py_comm_extend),
     "extend($self, host_of, host, *, wire=None)\n--\n\nJoin the ranks of other hosts."},
    {"arena", SW_PY_NAMED(comm_arena),
     "arena($self, nbytes, label='arena', *, of_hosts=False)\n--\n\nCreate an arena. Collective."},
    {"all_reduce", SW_PY_NAMED(comm_all_reduce),
     "all_reduce($self, address, numel, dtype, op='sum', label='all_reduce', arena=None)\n--\n\n"
     "Reduce in place."},
    {"broadcast", comm_broadcast, METH_VARARGS,
     "broadcast($self, ranges, root, label='broadcast', /)\n--\n\nBroadcast bytes."},
    {"all_gather_bytes", comm_all_gather_bytes, METH_VARARGS,
     "all_gather_bytes($self, data, label='all_gather', /)\n--\n\nReturn every rank's data."},
    {"all_gather", SW_PY_NAMED(comm_all_gather),
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

SW_PY_TYPE(sw_py_comm_type_spec, "HostComm", comm_object, Py_TPFLAGS_HAVE_GC, comm_slots)
