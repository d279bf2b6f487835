/* comm_type.c - shardwright._engine.HostComm: parses arguments, calls the engine, raises its
 * errors. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "comm/descriptor.h"
#include "comm/shm.h"
#include "comm/wait.h"
#include "python/method.h"

/* Reports signals, and a close() during connect(), which nothing else can stop. Python sees signals
 * in its main thread alone; `interrupted` knows of them in others. */
static bool is_interrupted(void *context)
{
    comm_object *self = context;
    SW_PY_GIL(gil);
    if (PyErr_CheckSignals() != 0)
        return true;
    SW_PY_OWNED *result =
        self->interrupted ? PyObject_CallFunctionObjArgs(self->interrupted, NULL) : sw_py_none();
    if (!result)
        return true;
    return self->closed && !self->connected &&
           !sw_py_refuse(sw_py_state_of(self)->error,
                         "the communicator of rank %d was closed while it joined its peers",
                         self->rank);
}

static void log_message(void *context, const char *message)
{
    comm_object *self = context;
    SW_PY_GIL(gil);
    if (!self->log)
        return;
    SW_PY_OWNED *text = sw_py_text(message);
    SW_PY_OWNED *result = text ? PyObject_CallFunctionObjArgs(self->log, text, NULL) : NULL;
    if (!result)
        PyErr_WriteUnraisable(self->log);
}

/* The periods that are properties, in seconds. */
typedef struct period {
    const char *name;
    size_t place; /* of its nanoseconds, an _Atomic int64_t of sw_comm */
    bool may_be_0;
} period;

enum { TIMEOUT, SILENT, WARN_AFTER };
static const period periods[] = {{"timeout_s", offsetof(sw_comm, timeout_ns), false},
                                 {"silent_s", offsetof(sw_comm, silent_ns), true},
                                 {"warn_after_s", offsetof(sw_comm, warn_after_ns), true}};

/* From a nanosecond on, since 0 stands for none. */
static bool check_period(const period *of, double seconds)
{
    return ((seconds * 1e9 >= 1 || (of->may_be_0 && seconds == 0)) && seconds <= 1e9) ||
           sw_py_refuse(PyExc_ValueError, "HostComm: %s must be in %s 1e9] seconds", of->name,
                        of->may_be_0 ? "[0," : "(0,");
}

static _Atomic int64_t *place_of(const sw_comm *comm, const period *of)
{
    return (_Atomic int64_t *)((uintptr_t)comm + of->place);
}

static PyObject *get_period(PyObject *op, void *of)
{
    const sw_comm *comm = ((comm_object *)op)->comm;
    return PyFloat_FromDouble(comm ? (double)*place_of(comm, of) * 1e-9 : 0);
}

static int set_period(PyObject *op, PyObject *value, void *of)
{
    const period *wanted = of;
    bool is_given =
        value || sw_py_refuse(PyExc_TypeError, "HostComm: cannot delete %s", wanted->name);
    double seconds = is_given ? PyFloat_AsDouble(value) : 0; /* runs code, which may close */
    if (PyErr_Occurred() || !check_period(wanted, seconds))
        return -1;
    const sw_comm *comm = ((comm_object *)op)->comm;
    if (comm)
        *place_of(comm, wanted) = (int64_t)(seconds * 1e9);
    else
        PyErr_Format(PyExc_ValueError, "HostComm: %s cannot be set: the communicator is not open",
                     wanted->name);
    return comm ? 0 : -1;
}

/* Lets __init__ run: first, after it failed, or once a closed communicator has no user left. */
static bool may_init(comm_object *self)
{
    if (self->comm || self->users > 0 || self->use.kind != SW_PY_FREE)
        return sw_py_refuse(PyExc_TypeError, "HostComm: already initialised");
    sw_py_comm_unlink(sw_py_state_of(self), self);
    self->use = (sw_py_use){.pid = getpid()};
    self->connected = self->closed = self->spans_hosts = false;
    self->address[0] = '\0';
    ENGINE_CLEAR(self->hosts);
    return true;
}

/* Makes the communicator: of one rank, or of ranks that connect() joins. */
static sw_status make(comm_object *self, const char *host, sw_error *err)
{
    if (self->world_size != 1)
        return sw_shm_comm_create(self->rank, self->world_size, host, &self->comm, self->address,
                                  err);
    SW_TRY(sw_local_group_create(1, &self->group, err));
    sw_status status = sw_local_comm_create(self->group, self->rank, &self->comm, err);
    self->connected = status == SW_OK;
    if (status != SW_OK) {
        sw_local_group_destroy(self->group);
        self->group = NULL;
    }
    return status;
}

static int comm_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[7] = {[2] = {.d = 1800},
                      [3] = {.d = 30},
                      [4] = {.s = ""},
                      [5] = {.o = Py_None},
                      [6] = {.o = Py_None}};
    sw_error err;
    if (!sw_py_read("HostComm rank:i world_size:i | $ timeout_s:d warn_after_s:d host:s log:O "
                    "interrupted:O",
                    args, kwargs, a) ||
        !check_period(&periods[TIMEOUT], a[2].d) || !check_period(&periods[WARN_AFTER], a[3].d) ||
        !may_init(self))
        return -1;
    self->rank = a[0].i;
    self->world_size = a[1].i;
    if (make(self, a[4].s, &err) != SW_OK) {
        sw_py_raise(op, &err, NULL);
        return -1;
    }
    self->comm->timeout_ns = (int64_t)(a[2].d * 1e9);
    self->comm->warn_after_ns = (int64_t)(a[3].d * 1e9);
    self->comm->hooks =
        (sw_comm_hooks){.context = self, .interrupted = is_interrupted, .log = log_message};
    sw_py_comm_link(sw_py_state_of(op), self);
    sw_py_set_or_clear(&self->log, a[5].o);
    sw_py_set_or_clear(&self->interrupted, a[6].o);
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
    PyObject_GC_UnTrack(op);
    sw_py_comm_unlink(sw_py_state_of(op), self);
    SW_PY_ASIDE(pending); /* a signal handler may raise while this thread waits */
    close_comm(self);
    ENGINE_CLEAR(self->log);
    ENGINE_CLEAR(self->interrupted);
    ENGINE_CLEAR(self->hosts);
    sw_py_free(op);
}

static int comm_traverse(PyObject *op, visitproc visit, void *arg)
{
    comm_object *self = (comm_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->log);
    Py_VISIT(self->interrupted);
    Py_VISIT(self->hosts);
    return 0;
}

static int comm_clear(PyObject *op)
{
    Py_CLEAR(((comm_object *)op)->log);
    Py_CLEAR(((comm_object *)op)->interrupted);
    return 0;
}

static PyObject *comm_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    close_comm((comm_object *)op);
    Py_RETURN_NONE;
}

/* Checks that all ranks can map one memory, which `of_hosts` does not need. */
static sw_status check_hosts(const comm_object *self, const char *label, sw_error *err)
{
    int count = self->spans_hosts ? sw_hier_comm_map(self->comm)->host_count : 1;
    if (count > 1)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "arena '%.200s': memory that all ranks map needs one host, and these ranks are on "
                "%d",
                label, count);
    return SW_OK;
}

static PyObject *comm_arena(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[3] = {[1] = {.s = "arena"}};
    sw_arena *arena = NULL;
    sw_error err;
    if (!sw_py_read("arena nbytes:n | label:s $ of_hosts:p", args, kwargs, a))
        return NULL;
    if (a[0].n <= 0)
        return PyErr_Format(PyExc_ValueError, "arena '%s': nbytes must be positive, got %zd",
                            a[1].s, a[0].n);
    if (!sw_py_comm_enter(self))
        return NULL;
    sw_status status = a[2].p ? SW_OK : check_hosts(self, a[1].s, &err);
    if (status == SW_OK)
        status = SW_PY_WITHOUT_GIL(
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

/* Returns the memory of an Arena of this communicator, or NULL with an exception. */
static sw_arena *own_arena(comm_object *self, PyObject *arena, const char *operation,
                           const char *label)
{
    sw_arena *memory = sw_py_arena_of(self, arena);
    if (memory && ((arena_object *)arena)->owner == self)
        return memory;
    PyErr_Format(PyExc_TypeError, "%s '%s': arena is not one of this communicator", operation,
                 label);
    return NULL;
}

static PyObject *comm_all_reduce(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[6] = {[3] = {.i = SW_REDOP_SUM}, [4] = {.s = "all_reduce"}, [5] = {.o = Py_None}};
    sw_error err;
    if (!sw_py_read("all_reduce address:A numel:N dtype:T | op:(sum|mean|min|max) label:s arena:O",
                    args, kwargs, a))
        return NULL;
    sw_op operation = {.kind = SW_OP_ALL_REDUCE,
                       .redop = (sw_redop)a[3].i,
                       .dtype = a[2].dtype,
                       .numel = a[1].size,
                       .data = a[0].address};
    sw_op_set_label(&operation, a[4].s);
    if (a[5].o != Py_None) {
        operation.arena = own_arena(self, a[5].o, "all_reduce", a[4].s);
        if (!operation.arena)
            return NULL;
        operation.offset_bytes =
            (size_t)((uint8_t *)a[0].address - operation.arena->base[self->comm->rank]);
    }
    if (!sw_py_comm_enter(self))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(self->comm->ops->run(self->comm, &operation, &err));
    return sw_py_comm_finish(self, status, &err);
}

SW_PY_ROW(fill_span, sw_span, a[0].size, a[1].size)

static PyObject *comm_all_gather(PyObject *op, PyObject *args, PyObject *kwargs)
{
    comm_object *self = (comm_object *)op;
    sw_py_arg a[5] = {[2] = {.s = "all_gather"}, [4] = {.o = Py_None}};
    SW_PY_SLICES slices = {.numbers = NULL};
    SW_PY_TABLE ranges = {0};
    sw_op operation = {.kind = SW_OP_ALL_GATHER};
    sw_error err;
    if (!sw_py_read("all_gather arena:O ranges:O | label:s $ one_copy:p slices:O", args, kwargs, a))
        return NULL;
    sw_op_set_label(&operation, a[2].s);
    operation.one_copy = a[3].p;
    operation.arena = own_arena(self, a[0].o, "all_gather", a[2].s);
    if (!operation.arena ||
        !sw_py_table_init(&ranges, a[1].o, "all_gather offset_bytes:N nbytes:N", sizeof(sw_span),
                          fill_span, NULL) ||
        sw_py_slices_init(&slices, a[4].o, operation.arena->world_size) < 0 ||
        !sw_py_comm_enter(self))
        return NULL;
    operation.slices = slices.given;
    sw_status status = SW_PY_WITHOUT_GIL(
        sw_comm_all_gather(self->comm, &operation, ranges.rows, ranges.count, &err));
    return sw_py_comm_finish(self, status, &err);
}

SW_PY_METHOD_WITH(comm_barrier, comm_object, "barrier | label:s", a[0].s = "barrier",
                  sw_py_comm_enter(self), sw_comm_barrier(self->comm, a[0].s, &err),
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

static PyObject *gathered_data(const gathered *g, size_t rank)
{
    const uint8_t *data = g->all ? g->all + rank * g->longest : g->envelopes[rank].bytes;
    return PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)g->envelopes[rank].length);
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
    if (!sw_py_read("all_gather_bytes data:B | label:s", args, NULL, a) || !sw_py_comm_enter(self))
        return NULL;
    int world_size = self->comm->world_size;
    const char *data = PyBytes_AsString(a[0].o);
    size_t size = (size_t)PyBytes_Size(a[0].o);
    sw_status status = SW_PY_WITHOUT_GIL(gather_bytes(self->comm, data, size, a[1].s, &out, &err));
    SW_PY_OWNED *done = sw_py_comm_finish(self, status, &err);
    PyObject *result = done ? SW_PY_LIST(r, world_size, gathered_data(&out, r)) : NULL;
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
    if (!is_beside) {
        self->comm->ops->abort(self->comm, &reason);
        return sw_py_comm_finish(self, SW_OK, NULL);
    }
    sw_py_comm_acquire(self); /* the thread inside is woken and may close the communicator */
    sw_comm_request_end(self->comm, &reason);
    sw_py_comm_release(self);
    Py_RETURN_NONE;
}

static bool is_there(comm_object *self)
{
    return self->comm || sw_py_refuse(sw_py_state_of(self)->error, "%s",
                                      self->closed ? "the communicator was closed"
                                                   : "the communicator is joining its peers");
}

static PyObject *comm_stats(PyObject *op, PyObject *Py_UNUSED(unused))
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
    if (!is_there(self))
        return NULL;
    sw_py_comm_acquire(self); /* a destructor that runs meanwhile may close it */
    PyObject *made = sw_py_counts(&self->comm->stats, counts, sizeof counts / sizeof *counts);
    sw_py_comm_release(self);
    return made;
}

static PyObject *build_peer(sw_comm *comm, size_t rank)
{
    char text[SW_COMM_PEER_BYTES];
    comm->ops->peer(comm, (int)rank, text);
    return sw_py_text(text);
}

static PyObject *comm_describe(PyObject *op, PyObject *Py_UNUSED(unused))
{
    comm_object *self = (comm_object *)op;
    if (!is_there(self))
        return NULL;
    const sw_comm *inside = self->spans_hosts ? sw_hier_comm_inside(self->comm) : self->comm;
    const char *watch = self->group ? "none" : sw_shm_comm_watch(inside);
    const char *transport = self->group ? "local" : self->spans_hosts ? "hier" : "shm";
    double timeout_s = (double)self->comm->timeout_ns * 1e-9;
    sw_py_comm_acquire(self);
    PyObject *peers =
        SW_PY_LIST(r, self->connected ? self->world_size : 0, build_peer(self->comm, r));
    sw_py_comm_release(self);
    return peers ? Py_BuildValue("{s:i,s:i,s:s,s:s,s:N,s:d}", "rank", self->rank, "world_size",
                                 self->world_size, "transport", transport, "watch", watch, "peers",
                                 peers, "timeout_s", timeout_s)
                 : NULL;
}

SW_PY_GETTER(comm_get_rank, comm_object,
             PyLong_FromLong(self->closed && !self->comm ? -1 : self->rank))
SW_PY_GETTER(comm_get_world_size, comm_object,
             PyLong_FromLong(self->closed && !self->comm ? -1 : self->world_size))
SW_PY_GETTER(comm_get_address, comm_object, PyUnicode_FromString(self->address))

/* Joined and open, in the process that joined: a forked child takes no lock that a thread of its
 * parent may have held. */
static bool is_joined(const comm_object *self)
{
    return sw_py_use_is_own(&self->use) && self->comm && !self->closed && self->connected;
}

SW_PY_GETTER(comm_get_alive, comm_object,
             PyBool_FromLong(self->comm && !self->closed && self->connected &&
                             (sw_py_use_is_own(&self->use) || self->group) &&
                             self->comm->ops->is_alive(self->comm)))

static PyObject *comm_get_end_reason(PyObject *op, void *Py_UNUSED(unused))
{
    comm_object *self = (comm_object *)op;
    sw_error err;
    if (!sw_py_use_is_own(&self->use))
        return PyUnicode_FromString("this process was forked from the one that joined");
    if (!is_joined(self) || self->comm->ops->look(self->comm, true, &err) == SW_OK)
        Py_RETURN_NONE;
    return sw_py_text(err.message);
}

static PyObject *comm_get_dead(PyObject *op, void *Py_UNUSED(unused))
{
    const comm_object *self = (comm_object *)op;
    int rank = is_joined(self) && self->comm->ops->dead ? self->comm->ops->dead(self->comm) : -1;
    return rank < 0 ? sw_py_none() : PyLong_FromLong(rank);
}

static PyObject *comm_peer(PyObject *op, PyObject *args)
{
    const comm_object *self = (comm_object *)op;
    sw_wait_text text = {.rank = -1};
    sw_py_arg a[1];
    if (!sw_py_read("peer rank:i", args, NULL, a))
        return NULL;
    if (a[0].i < 0 || a[0].i >= self->world_size)
        return PyErr_Format(PyExc_ValueError, "peer: rank must be in [0, %d), got %d",
                            self->world_size, a[0].i);
    if (!is_joined(self))
        return PyUnicode_FromFormat("rank %d", a[0].i);
    (void)sw_wait_add_missing(&text, self->comm, a[0].i);
    return sw_py_text(text.missing);
}

SW_PY_GETTER(comm_get_hosts, comm_object,
             self->hosts ? PyList_GetSlice(self->hosts, 0, PyList_Size(self->hosts))
                         : PyList_New(0))

static PyObject *note_account(const comm_object *self, int group, bool shares_memory)
{
    if (self->comm)
        self->comm->account = (sw_account_use){
            .group = group, .link = shares_memory ? SW_LINK_SHARED_MEMORY : SW_LINK_NONE};
    return sw_py_none();
}

SW_PY_VALUE(comm_account, comm_object, "account group:i shares_memory:p", true,
            note_account(self, a[0].i, a[1].p))

static PyMethodDef comm_methods[] = {
    SW_PY_ARGS(comm, peer, "rank, /",
               "Return a rank, its process and host, and what that does, for messages."),
    SW_PY_KEYS(sw_py_comm, connect, "addresses, secret, hosts, *, members=None",
               "Join the ranks of this host."),
    SW_PY_KEYS(sw_py_comm, extend, "host_of, host, *, wire=None", "Join the ranks of other hosts."),
    SW_PY_ARGS(comm, account, "group, shares_memory, /",
               "Note the number of its group in the account, and whether ranks share memory."),
    SW_PY_KEYS(comm, arena, "nbytes, label='arena', *, of_hosts=False",
               "Create an arena. Collective."),
    SW_PY_KEYS(comm, all_reduce, "address, numel, dtype, op='sum', label='all_reduce', arena=None",
               "Reduce in place."),
    SW_PY_ARGS(comm, broadcast, "ranges, root, label='broadcast', /", "Broadcast bytes."),
    SW_PY_ARGS(comm, all_gather_bytes, "data, label='all_gather', /", "Return every rank's data."),
    SW_PY_KEYS(comm, all_gather,
               "arena, ranges, label='all_gather', *, one_copy=False, slices=None",
               "Send every rank's slice of each range to all ranks."),
    SW_PY_ARGS(comm, barrier, "label='barrier', /", "Wait for every rank."),
    SW_PY_ARGS(comm, abort, "reason, /", "End the communicator on every rank. Any thread."),
    SW_PY_NONE(comm, stats, "Return counts since creation."),
    SW_PY_NONE(comm, describe, "Return the facts and choices of this communicator."),
    SW_PY_NONE(comm, close, "Leave the group."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef comm_properties[] = {
    {"rank", comm_get_rank, NULL, "this rank, in the group", NULL},
    {"world_size", comm_get_world_size, NULL, "ranks in the group", NULL},
    {"silent_s", get_period, set_period,
     "seconds for which a peer may be stopped before a wait for it ends; 0: until the deadline",
     (void *)(uintptr_t)&periods[SILENT]},
    {"timeout_s", get_period, set_period, "deadline of each wait, seconds",
     (void *)(uintptr_t)&periods[TIMEOUT]},
    {"warn_after_s", get_period, set_period,
     "seconds after which a wait is logged, then again whenever it has doubled; 0: never",
     (void *)(uintptr_t)&periods[WARN_AFTER]},
    {"dead_rank", comm_get_dead, NULL,
     "a rank of this host whose process has ended; None if none is known", NULL},
    {"is_alive", comm_get_alive, NULL, "True if no rank has met an error or left", NULL},
    {"end_reason", comm_get_end_reason, NULL, "the reason why it is not alive; None if it is",
     NULL},
    {"address", comm_get_address, NULL, "the abstract socket that peers connect to", NULL},
    {"hosts", comm_get_hosts, NULL, "the host name of each rank, once joined", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_comm_type_spec, "HostComm", comm_object, Py_TPFLAGS_HAVE_GC,
           "The ranks of one host, joined through shared memory. One issuing thread a rank.",
           {Py_tp_init, comm_init}, {Py_tp_dealloc, comm_dealloc}, {Py_tp_traverse, comm_traverse},
           {Py_tp_clear, comm_clear}, {Py_tp_methods, comm_methods},
           {Py_tp_getset, comm_properties})
