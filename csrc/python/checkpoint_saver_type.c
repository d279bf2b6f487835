/* checkpoint_saver_type.c - shardwright._engine.CheckpointSaver: parses arguments, calls the saver,
 * raises its errors. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint/save.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "python/device_stage_object.h"

typedef struct saver_object {
    PyObject_HEAD sw_channel channel;
    sw_saver *saver;        /* owned; NULL once closed */
    PyObject *arena;        /* owned; the channel's pages; NULL at world size 1 */
    PyObject *shared, *own; /* owned; plans of the current save */
    long owner_pid;
    bool in_use;     /* a thread is inside a call that excludes others */
    bool keeps_only; /* several ranks without shared pages: only keep() works */
} saver_object;

typedef struct request_memory { /* borrowed by a request; Python objects own the strings */
    sw_save_source *shared, *own;
    bool *is_eager;
    const char **stale, **retired;
} request_memory;

static void request_memory_fini(request_memory *memory)
{
    free(memory->shared);
    free(memory->own);
    free(memory->is_eager);
    free((void *)memory->stale);
    free((void *)memory->retired);
}

static bool is_usable(saver_object *self)
{
    const char *why = NULL;
    if (getpid() != self->owner_pid)
        why =
            "this process was forked from the one that made the Checkpointer; only that one saves";
    else if (!self->saver)
        why = "the Checkpointer was closed";
    if (why)
        PyErr_SetString(sw_py_state_of((PyObject *)self)->checkpoint_error, why);
    return !why;
}

static bool is_free(saver_object *self)
{
    if (self->in_use)
        PyErr_SetString(sw_py_state_of((PyObject *)self)->checkpoint_error,
                        "another thread is inside the Checkpointer: one call at a time");
    return !self->in_use;
}

enum { NAP_NS = 1000 * 1000 };

/* Waits until the other thread's call has ended, for at most about `naps` sleeps. Releases the GIL,
 * which that call needs to end. */
static void wait_until_free(const saver_object *self, int naps)
{
    for (; self->in_use && naps > 0; --naps) {
        Py_BEGIN_ALLOW_THREADS
        sw_thread_sleep_ns(NAP_NS);
        Py_END_ALLOW_THREADS
    }
}

/* Begins any call but progress and cancel. The caller calls leave() if it returns true. */
static bool enter(saver_object *self)
{
    if (!is_usable(self) || !is_free(self))
        return false;
    self->in_use = true;
    return true;
}

static void leave(saver_object *self)
{
    self->in_use = false;
}

/* Reads each rank's host. Returns NULL with an exception. */
static int *read_hosts(PyObject *list, int world_size)
{
    if (!PyList_Check(list) || PyList_Size(list) != world_size) {
        PyErr_Format(PyExc_ValueError, "CheckpointSaver: hosts must be a list of %d", world_size);
        return NULL;
    }
    int *hosts = calloc((size_t)world_size, sizeof *hosts);
    if (!hosts)
        PyErr_NoMemory();
    for (int r = 0; hosts && r < world_size; ++r) {
        long host = PyLong_AsLong(PyList_GetItem(list, r));
        if (host < 0 || host >= world_size) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError,
                             "CheckpointSaver: a host must be in [0, %d), got %ld", world_size,
                             host);
            free(hosts);
            return NULL;
        }
        hosts[r] = (int)host;
    }
    return hosts;
}

/* Finds the control pages of the ranks of this host. Returns NULL with an exception. */
static uint8_t **read_pages(engine_state *state, PyObject *arena, int rank, int world_size)
{
    const arena_object *memory = (arena_object *)arena;
    if (Py_TYPE(arena) == state->arena_type && memory->arena &&
        memory->arena->world_size == world_size && memory->owner->comm->rank == rank &&
        memory->arena->size_bytes >= SW_CHANNEL_PAGE_BYTES)
        return memory->arena->base;
    PyErr_Format(PyExc_TypeError,
                 "CheckpointSaver: pages must be an Arena of these ranks with at least %d bytes",
                 SW_CHANNEL_PAGE_BYTES);
    return NULL;
}

static int saver_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank",    "world_size", "pages",   "hosts",     "path",
                            "threads", "direct",     "idle_io", "bandwidth", NULL};
    saver_object *self = (saver_object *)op;
    engine_state *state = sw_py_state_of(op);
    PyObject *arena = Py_None, *host_list = Py_None;
    int rank, world_size, threads = 2, direct = 1, idle_io = 0;
    unsigned long long bandwidth = 0;
    uint8_t **pages = NULL;
    int *hosts = NULL;
    const char *path = NULL;
    sw_error err = {0};
    if (self->saver) {
        PyErr_SetString(PyExc_TypeError, "CheckpointSaver: already initialised");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii|OOz$ippK:CheckpointSaver", names, &rank,
                                     &world_size, &arena, &host_list, &path, &threads, &direct,
                                     &idle_io, &bandwidth))
        return -1;
    if (world_size < 1 || rank < 0 || rank >= world_size || (world_size == 1 && arena != Py_None) ||
        (host_list != Py_None) != (path != NULL)) {
        PyErr_Format(PyExc_ValueError,
                     "CheckpointSaver: rank must be in [0, world_size), only several ranks have "
                     "pages, and several hosts have a path; got %d of %d",
                     rank, world_size);
        return -1;
    }
    if (arena != Py_None && !(pages = read_pages(state, arena, rank, world_size)))
        return -1;
    if (host_list != Py_None && !(hosts = read_hosts(host_list, world_size)))
        return -1;
    sw_saver_options options = {.thread_count = threads,
                                .use_direct = direct != 0,
                                .is_idle_io = idle_io != 0,
                                .bandwidth_bytes_per_second = bandwidth};
    sw_status status = sw_channel_init(&self->channel, rank, world_size, pages, hosts, path, &err);
    free(hosts);
    if (status != SW_OK || sw_saver_create(&self->channel, &options, &self->saver, &err) != SW_OK) {
        sw_channel_fini(&self->channel);
        sw_py_raise(state, &err, NULL);
        return -1;
    }
    if (arena != Py_None) {
        Py_INCREF(arena);
        self->arena = arena;
    }
    self->keeps_only = world_size > 1 && arena == Py_None;
    self->owner_pid = getpid();
    return 0;
}

static void close_saver(saver_object *self)
{
    sw_saver *saver = self->saver;
    self->saver = NULL;
    if (saver && getpid() == self->owner_pid) { /* a forked child lacks the saver's threads, so it
                                                 * frees nothing */
        Py_BEGIN_ALLOW_THREADS
        sw_saver_destroy(saver);
        Py_END_ALLOW_THREADS
        sw_channel_fini(&self->channel);
    }
    Py_CLEAR(self->shared);
    Py_CLEAR(self->own);
    Py_CLEAR(self->arena);
}

static void saver_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    close_saver((saver_object *)op);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

static PyObject *saver_close(PyObject *op, PyObject *unused)
{
    saver_object *self = (saver_object *)op;
    (void)unused;
    if (self->saver && getpid() == self->owner_pid) {
        wait_until_free(self, 2000);
        if (!is_free(self))
            return NULL;
    }
    close_saver(self);
    Py_RETURN_NONE;
}

typedef struct packed_source { /* checkpoint/state/content.py, packed() */
    uint64_t source, begin, size_bytes, address, is_eager, is_on_device;
} packed_source;

/* Returns -1 with an exception if they have neither form. */
static Py_ssize_t count_sources(PyObject *sources)
{
    Py_ssize_t each = (Py_ssize_t)sizeof(packed_source);
    if (PyList_Check(sources))
        return PyList_Size(sources);
    if (PyBytes_Check(sources) && PyBytes_Size(sources) % each == 0)
        return PyBytes_Size(sources) / each;
    PyErr_Format(PyExc_TypeError, "keep: shared_sources must be a list, or bytes in units of %zd",
                 each);
    return -1;
}

/* Reads number `i` of a list of (source, begin, nbytes, address, eager, on_device), or of bytes. */
static bool read_source(PyObject *sources, Py_ssize_t i, packed_source *out)
{
    Py_ssize_t source;
    unsigned long long begin, size_bytes, address;
    int eager, on_device;
    if (PyBytes_Check(sources)) {
        memcpy(out, PyBytes_AsString(sources) + (size_t)i * sizeof *out, sizeof *out);
        return true;
    }
    if (!PyArg_ParseTuple(PyList_GetItem(sources, i), "nKKKpp", &source, &begin, &size_bytes,
                          &address, &eager, &on_device))
        return false;
    *out =
        (packed_source){(uint64_t)source, begin, size_bytes, address, eager != 0, on_device != 0};
    return true;
}

/* Reads sources; those of a negative number are not in the plan. `is_eager` may be NULL. */
static int read_sources(PyObject *list, sw_save_source **sources, bool **is_eager)
{
    Py_ssize_t count = count_sources(list);
    if (count < 0)
        return -1;
    *sources = calloc((size_t)count + 1, sizeof **sources);
    if (is_eager)
        *is_eager = calloc((size_t)count + 1, sizeof **is_eager);
    if (!*sources || (is_eager && !*is_eager)) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        packed_source each;
        if (!read_source(list, i, &each))
            return -1;
        (*sources)[i] = (sw_save_source){.source = (size_t)each.source,
                                         .begin = each.begin,
                                         .size_bytes = each.size_bytes,
                                         .data = (const void *)(uintptr_t)each.address,
                                         .is_on_device = each.is_on_device != 0};
        if (is_eager)
            (*is_eager)[i] = each.is_eager != 0;
        if (each.source > INT64_MAX ||
            (i > 0 && ((*sources)[i - 1].source > each.source ||
                       ((*sources)[i - 1].source == each.source &&
                        (*sources)[i - 1].begin + (*sources)[i - 1].size_bytes > each.begin)))) {
            PyErr_Format(PyExc_ValueError,
                         "begin: sources must ascend without overlap; number %zd does not", i);
            return -1;
        }
    }
    return 0;
}

static int read_strings(PyObject *list, const char ***strings)
{
    Py_ssize_t count = PyList_Size(list);
    *strings = calloc((size_t)count + 1, sizeof **strings);
    if (!*strings) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        (*strings)[i] = PyUnicode_AsUTF8AndSize(PyList_GetItem(list, i), NULL);
        if (!(*strings)[i])
            return -1;
    }
    return 0;
}

static int read_plan(engine_state *state, PyObject *plan, PyObject *sources, sw_save_part *part)
{
    Py_ssize_t count = count_sources(sources);
    if (count < 0)
        return -1;
    if (plan == Py_None && count == 0) /* this rank has no separate state */
        return 0;
    if (Py_TYPE(plan) != state->plan_type) {
        PyErr_SetString(PyExc_TypeError, "begin: shared and own must be CheckpointPlans");
        return -1;
    }
    part->plan = ((plan_object *)plan)->plan;
    part->source_count = (size_t)count;
    return 0;
}

/* Parses None, or (DeviceStage, the stream that wrote the sources on the device). */
static int read_stage(engine_state *state, PyObject *pair, sw_save_request *request)
{
    PyObject *stage, *stream;
    if (pair == Py_None)
        return 0;
    if (!PyArg_ParseTuple(pair, "OO;device must be (DeviceStage, stream) or None", &stage, &stream))
        return -1;
    if (!PyObject_TypeCheck(stage, state->device_stage_type)) {
        PyErr_SetString(PyExc_TypeError, "begin: device must be (DeviceStage, stream) or None");
        return -1;
    }
    request->stage = ((device_stage_object *)stage)->stage;
    request->user = (sw_stream *)PyLong_AsVoidPtr(stream);
    return PyErr_Occurred() ? -1 : 0;
}

static void keep_plans(saver_object *self, PyObject *shared, PyObject *own)
{
    Py_INCREF(shared);
    Py_INCREF(own);
    Py_CLEAR(self->shared);
    Py_CLEAR(self->own);
    self->shared = shared;
    self->own = own;
}

static PyObject *saver_begin(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"folder",  "nonce",       "replaces", "number",
                            "step",    "metric",      "shared",   "shared_sources",
                            "own",     "own_sources", "lazy",     "stale",
                            "retired", "timeout_s",   "device",   NULL};
    saver_object *self = (saver_object *)op;
    engine_state *state = sw_py_state_of(op);
    sw_save_request request = {0};
    request_memory memory = {0};
    PyObject *metric, *shared, *shared_sources, *own, *own_sources, *stale, *retired;
    PyObject *device;
    unsigned long long number, step;
    int lazy;
    double timeout_s;
    sw_error err = {0};
    sw_status status = SW_E_INVALID;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$sssKKOOO!OO!pO!O!dO:begin", names,
                                     &request.folder, &request.nonce, &request.replaces, &number,
                                     &step, &metric, &shared, &PyList_Type, &shared_sources, &own,
                                     &PyList_Type, &own_sources, &lazy, &PyList_Type, &stale,
                                     &PyList_Type, &retired, &timeout_s, &device) ||
        !enter(self))
        return NULL;
    if (metric != Py_None) {
        request.metric = PyFloat_AsDouble(metric);
        request.has_metric = true;
    }
    if (self->keeps_only)
        PyErr_SetString(PyExc_ValueError,
                        "begin: several ranks need the pages that the constructor takes");
    if (PyErr_Occurred() || read_plan(state, shared, shared_sources, &request.shared) < 0 ||
        read_plan(state, own, own_sources, &request.own) < 0 ||
        read_stage(state, device, &request) < 0 ||
        read_sources(shared_sources, &memory.shared, &memory.is_eager) < 0 ||
        read_sources(own_sources, &memory.own, NULL) < 0 ||
        read_strings(stale, &memory.stale) < 0 || read_strings(retired, &memory.retired) < 0)
        goto done;
    request.shared.sources = memory.shared;
    request.own.sources = memory.own;
    request.is_eager = memory.is_eager;
    request.number = number;
    request.step = step;
    request.is_lazy = lazy != 0;
    request.stale = memory.stale;
    request.stale_count = (size_t)PyList_Size(stale);
    request.retired = memory.retired;
    request.retired_count = (size_t)PyList_Size(retired);
    request.timeout_ns = (int64_t)(timeout_s * 1e9);
    Py_BEGIN_ALLOW_THREADS
    status = sw_saver_begin(self->saver, &request, &err);
    Py_END_ALLOW_THREADS
    if (status == SW_OK)
        keep_plans(self, shared, own);
done:
    leave(self);
    request_memory_fini(&memory);
    if (status == SW_OK)
        Py_RETURN_NONE;
    return PyErr_Occurred() ? NULL : sw_py_raise_checkpoint(state, &err);
}

static PyObject *build_kept(const sw_save_kept *kept)
{
    return Py_BuildValue("(y#y#K)", kept->tallies.data ? (const char *)kept->tallies.data : "",
                         (Py_ssize_t)kept->tallies.size_bytes, (const char *)kept->runs,
                         (Py_ssize_t)(kept->run_count * sizeof *kept->runs),
                         (unsigned long long)kept->size_bytes);
}

static PyObject *saver_keep(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nonce", "shared",      "shared_sources", "own",    "own_sources",
                            "image", "image_bytes", "timeout_s",      "device", NULL};
    saver_object *self = (saver_object *)op;
    engine_state *state = sw_py_state_of(op);
    sw_save_request request = {0};
    request_memory memory = {0};
    PyObject *shared, *shared_sources, *own, *own_sources, *device, *result = NULL;
    unsigned long long image, image_bytes;
    double timeout_s;
    sw_save_kept kept = {0};
    sw_error err = {0};
    sw_status status = SW_E_INVALID;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$sOOOO!KKdO:keep", names, &request.nonce,
                                     &shared, &shared_sources, &own, &PyList_Type, &own_sources,
                                     &image, &image_bytes, &timeout_s, &device) ||
        !enter(self))
        return NULL;
    if (read_plan(state, shared, shared_sources, &request.shared) < 0 ||
        read_plan(state, own, own_sources, &request.own) < 0 ||
        read_stage(state, device, &request) < 0 ||
        read_sources(shared_sources, &memory.shared, NULL) < 0 ||
        read_sources(own_sources, &memory.own, NULL) < 0)
        goto done;
    request.shared.sources = memory.shared;
    request.own.sources = memory.own;
    request.timeout_ns = (int64_t)(timeout_s * 1e9);
    Py_BEGIN_ALLOW_THREADS
    status =
        sw_saver_keep(self->saver, &request, (uint8_t *)(uintptr_t)image, image_bytes, &kept, &err);
    Py_END_ALLOW_THREADS
    if (status == SW_OK)
        result = build_kept(&kept);
    sw_save_kept_fini(&kept);
done:
    leave(self);
    request_memory_fini(&memory);
    if (status == SW_OK)
        return result;
    return PyErr_Occurred() ? NULL : sw_py_raise_checkpoint(state, &err);
}

static PyObject *saver_warm(PyObject *op, PyObject *args)
{
    saver_object *self = (saver_object *)op;
    unsigned long long bytes;
    if (!PyArg_ParseTuple(args, "K:warm", &bytes) || !is_usable(self))
        return NULL;
    /* a failure only makes the first save slower */
    return PyBool_FromLong(sw_saver_warm(self->saver, bytes, NULL) == SW_OK);
}

static PyObject *saver_protect(PyObject *op, PyObject *unused)
{
    saver_object *self = (saver_object *)op;
    sw_error err = {0};
    sw_status status;
    (void)unused;
    wait_until_free(self, 60000);
    if (!enter(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_saver_protect(self->saver, &err);
    Py_END_ALLOW_THREADS
    leave(self);
    if (status != SW_OK)
        return sw_py_raise_checkpoint(sw_py_state_of(op), &err);
    Py_RETURN_NONE;
}

static PyObject *saver_wait(PyObject *op, PyObject *args)
{
    saver_object *self = (saver_object *)op;
    double timeout_s;
    bool is_over = false;
    sw_error err = {0};
    sw_status status;
    if (!PyArg_ParseTuple(args, "d:wait", &timeout_s))
        return NULL;
    if (!(timeout_s >= 0 && timeout_s <= 1e9))
        return PyErr_Format(PyExc_ValueError, "wait: timeout_s must be in [0, 1e9] seconds");
    /* The wait polls, so that another thread can enter protect() in between. */
    int64_t until_ns = sw_clock_now_ns() + (int64_t)(timeout_s * 1e9);
    for (bool was_free = false;; was_free = false) {
        if (!is_usable(self))
            return NULL;
        if (!self->in_use) {
            was_free = enter(self);
            Py_BEGIN_ALLOW_THREADS
            status = sw_saver_wait(self->saver, 0, &is_over, &err);
            Py_END_ALLOW_THREADS
            leave(self);
            if (status != SW_OK)
                return sw_py_raise_checkpoint(sw_py_state_of(op), &err);
        }
        if ((was_free && is_over) || sw_clock_now_ns() >= until_ns)
            return PyBool_FromLong(is_over);
        Py_BEGIN_ALLOW_THREADS
        sw_thread_sleep_ns(NAP_NS);
        Py_END_ALLOW_THREADS
    }
}

static PyObject *saver_fail(PyObject *op, PyObject *args)
{
    saver_object *self = (saver_object *)op;
    unsigned long long number;
    const char *message;
    sw_error reason = {0};
    if (!PyArg_ParseTuple(args, "Ks:fail", &number, &message) || !enter(self))
        return NULL;
    (void)sw_error_set(&reason, SW_E_STATE, -1, "%s", message);
    Py_BEGIN_ALLOW_THREADS /* over hosts the message may need a retry */
    sw_saver_fail(self->saver, number, &reason);
    Py_END_ALLOW_THREADS
    leave(self);
    Py_RETURN_NONE;
}

static PyObject *saver_cancel(PyObject *op, PyObject *args)
{
    saver_object *self = (saver_object *)op;
    const char *message;
    sw_error reason = {0};
    if (!PyArg_ParseTuple(args, "s:cancel", &message) || !is_usable(self))
        return NULL;
    (void)sw_error_set(&reason, SW_E_INTERRUPTED, -1, "%s", message);
    sw_saver_cancel(self->saver, &reason);
    Py_RETURN_NONE;
}

static PyObject *saver_progress(PyObject *op, PyObject *unused)
{
    saver_object *self = (saver_object *)op;
    sw_save_progress progress;
    (void)unused;
    if (!is_usable(self))
        return NULL;
    sw_saver_progress(self->saver, &progress);
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:N}", "bytes_total", (unsigned long long)progress.bytes_total,
        "bytes_written", (unsigned long long)progress.bytes_written, "staging_bytes",
        (unsigned long long)progress.staging_bytes, "direct_bytes",
        (unsigned long long)progress.direct_bytes, "busy", PyBool_FromLong(progress.is_busy));
}

static PyObject *saver_unwritten(PyObject *op, PyObject *unused)
{
    saver_object *self = (saver_object *)op;
    (void)unused;
    PyObject *list = is_usable(self) ? PyList_New(0) : NULL;
    for (int r = 0; list && (r = sw_saver_find_unwritten(self->saver, r)) >= 0; ++r) {
        PyObject *item = PyLong_FromLong(r);
        if (!item || PyList_Append(list, item) < 0)
            ENGINE_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *saver_spare(PyObject *op, PyObject *unused)
{
    saver_object *self = (saver_object *)op;
    size_t size_bytes = 0;
    (void)unused;
    PyObject *list = is_usable(self) && is_free(self) ? PyList_New(0) : NULL;
    uint8_t *base;
    for (size_t i = 0; list && (base = sw_saver_spare(self->saver, i, &size_bytes)); ++i) {
        PyObject *item = Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)base,
                                       (unsigned long long)size_bytes);
        if (!item || PyList_Append(list, item) < 0)
            ENGINE_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyMethodDef saver_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))saver_begin, METH_VARARGS | METH_KEYWORDS,
     "Takes the snapshot and starts the rest."},
    {"keep", (PyCFunction)(void (*)(void))saver_keep, METH_VARARGS | METH_KEYWORDS,
     "Writes this rank's part into memory; (tallies, runs, bytes)."},
    {"warm", saver_warm, METH_VARARGS,
     "warm($self, nbytes, /)\n--\n\nTouch staging memory of this size in a separate thread."},
    {"protect", saver_protect, METH_NOARGS,
     "protect($self, /)\n--\n\nCopy the state that is still live."},
    {"wait", saver_wait, METH_VARARGS,
     "wait($self, timeout_s, /)\n--\n\n"
     "Return True if no save is running; raise a save's error once."},
    {"fail", saver_fail, METH_VARARGS,
     "fail($self, number, message, /)\n--\n\n"
     "Tell the other ranks that this rank cannot begin the save."},
    {"cancel", saver_cancel, METH_VARARGS,
     "cancel($self, message, /)\n--\n\nMake a running save fail soon."},
    {"progress", saver_progress, METH_NOARGS,
     "progress($self, /)\n--\n\n"
     "Return bytes_total, bytes_written, staging_bytes, direct_bytes, busy."},
    {"unwritten", saver_unwritten, METH_NOARGS,
     "unwritten($self, /)\n--\n\n"
     "Return the ranks of this host whose part of the last save is not durable yet."},
    {"spare", saver_spare, METH_NOARGS,
     "spare($self, /)\n--\n\n"
     "Return [(address, nbytes)] of memory that the caller may use until the next save begins."},
    {"close", saver_close, METH_NOARGS,
     "close($self, /)\n--\n\nCancel a running save and free everything."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot saver_slots[] = {
    {Py_tp_init, saver_init},
    {Py_tp_dealloc, saver_dealloc},
    {Py_tp_methods, saver_methods},
    {Py_tp_doc, "CheckpointSaver(rank, world_size, pages=None, hosts=None, path=None, *, "
                "threads=2, direct=True, "
                "idle_io=False, bandwidth=0)\n--\n\nOne save at a time."},
    {0, NULL},
};

PyType_Spec sw_py_checkpoint_saver_type_spec = {
    .name = "shardwright._engine.CheckpointSaver",
    .basicsize = sizeof(saver_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = saver_slots,
};
