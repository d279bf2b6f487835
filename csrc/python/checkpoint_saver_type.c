/* checkpoint_saver_type.c - shardwright._engine.CheckpointSaver: parses arguments, calls the saver,
 * raises its errors. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint/device_stage.h"
#include "checkpoint/save.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "python/method.h"
#include "python/owner.h"

typedef struct saver_object {
    PyObject_HEAD sw_channel channel;
    sw_saver *saver;       /* owned; NULL once closed */
    PyObject *arena;       /* owned; the channel's pages; NULL at world size 1 */
    plan_object *plans[2]; /* owned, and entered: what a save that is under way reads; or NULL */
    sw_py_use use;         /* of every call but progress and cancel */
    bool keeps_only;       /* several ranks without shared pages: only keep() works */
} saver_object;

static const int64_t CLOSE_NS = INT64_C(2) * 1000000000, PROTECT_NS = INT64_C(60) * 1000000000;

/* ---- use ---- */

static bool is_usable(saver_object *self)
{
    PyObject *error = sw_py_state_of(self)->checkpoint_error;
    if (!self->saver)
        return sw_py_refuse(error, "the Checkpointer was closed");
    return sw_py_use_is_own(&self->use) ||
           sw_py_refuse(error, "this process was forked from the one that made the Checkpointer; "
                               "only that one saves");
}

/* Begins a call that excludes others, once their calls have ended; one of them may be close(). */
static bool enter(saver_object *self, int64_t patience_ns)
{
    PyObject *error = sw_py_state_of(self)->checkpoint_error;
    if (!is_usable(self) ||
        !sw_py_use_enter(&self->use, SW_PY_ALONE, patience_ns, error, "Checkpointer", ""))
        return false;
    if (is_usable(self))
        return true;
    sw_py_use_leave(&self->use);
    return false;
}

/* ---- the plans of a save, whose headers its threads write ---- */

typedef plan_object *plan_pair[2];

static void leave_plans(plan_pair plans)
{
    for (int i = 0; i < 2; ++i) {
        if (plans[i])
            sw_py_use_leave(&plans[i]->use);
        ENGINE_CLEAR(plans[i]);
    }
}

/* Enters the plan, and takes a reference. None stands for no sources of this kind. */
static bool enter_plan(engine_state *state, PyObject *plan, const sw_py_table *sources,
                       plan_object **entered, sw_save_part *part)
{
    part->sources = sources->rows;
    part->source_count = sources->count;
    if (plan == Py_None && sources->count == 0)
        return true;
    if (Py_TYPE(plan) != state->plan_type)
        return sw_py_refuse(PyExc_TypeError, "begin: shared and own must be CheckpointPlans");
    if (!sw_py_plan_enter((plan_object *)plan, SW_PY_SHARED))
        return false;
    Py_INCREF(plan);
    *entered = (plan_object *)plan;
    part->plan = (*entered)->plan;
    return true;
}

/* ---- life ---- */

/* Finds the control pages of the ranks of this host. Returns NULL with an exception. */
static uint8_t **read_pages(saver_object *self, PyObject *arena, int rank, int world_size)
{
    const sw_arena *memory = sw_py_arena_of(self, arena);
    if (memory && memory->world_size == world_size &&
        ((arena_object *)arena)->owner->comm->rank == rank &&
        memory->size_bytes >= SW_CHANNEL_PAGE_BYTES)
        return memory->base;
    PyErr_Format(PyExc_TypeError,
                 "CheckpointSaver: pages must be an Arena of these ranks with at least %d bytes",
                 SW_CHANNEL_PAGE_BYTES);
    return NULL;
}

/* Reads each rank's host. */
static bool read_hosts(sw_py_table *hosts, PyObject *list, int world_size)
{
    if (list == Py_None)
        return true;
    if (!sw_py_table_init(hosts, list, "CheckpointSaver hosts:i", sizeof(int), sw_py_fill_int,
                          NULL))
        return false;
    bool fits = hosts->count == (size_t)world_size;
    for (int r = 0; fits && r < world_size; ++r) {
        int host = ((const int *)hosts->rows)[r];
        fits = host >= 0 && host < world_size;
    }
    return fits || sw_py_refuse(PyExc_ValueError,
                                "CheckpointSaver: hosts must be a list of %d numbers in [0, %d)",
                                world_size, world_size);
}

static bool check_ranks(const saver_object *self, const sw_py_arg *a)
{
    int rank = a[0].i, world_size = a[1].i;
    if (self->saver || self->use.kind != SW_PY_FREE)
        return sw_py_refuse(PyExc_TypeError, "CheckpointSaver: already initialised");
    return (world_size >= 1 && rank >= 0 && rank < world_size &&
            (world_size > 1 || a[2].o == Py_None) && (a[3].o != Py_None) == (a[4].s != NULL)) ||
           sw_py_refuse(PyExc_ValueError,
                        "CheckpointSaver: rank must be in [0, world_size), only several ranks have "
                        "pages, and several hosts have a path; got %d of %d",
                        rank, world_size);
}

static int saver_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    saver_object *self = (saver_object *)op;
    sw_py_arg a[9] = {
        [2] = {.o = Py_None}, [3] = {.o = Py_None}, [5] = {.i = 2}, [6] = {.p = true}};
    SW_PY_TABLE hosts = {0};
    sw_error err = {0};
    if (!sw_py_read(
            "CheckpointSaver rank:i world_size:i | pages:O hosts:O path:z $ threads:i direct:p "
            "idle_io:p bandwidth:K",
            args, kwargs, a) ||
        !read_hosts(&hosts, a[3].o, a[1].i) || /* runs code, which may initialise this object */
        !check_ranks(self, a))
        return -1;
    int rank = a[0].i, world_size = a[1].i;
    PyObject *arena = a[2].o;
    uint8_t **pages = arena == Py_None ? NULL : read_pages(self, arena, rank, world_size);
    if (PyErr_Occurred())
        return -1;
    const sw_saver_options options = {.thread_count = a[5].i,
                                      .use_direct = a[6].p,
                                      .is_idle_io = a[7].p,
                                      .bandwidth_bytes_per_second = a[8].word};
    sw_status status =
        sw_channel_init(&self->channel, rank, world_size, pages, hosts.rows, a[4].s, &err);
    if (status == SW_OK)
        status = sw_saver_create(&self->channel, &options, &self->saver, &err);
    if (status != SW_OK) {
        sw_channel_fini(&self->channel);
        sw_py_raise(op, &err, NULL);
        return -1;
    }
    sw_py_set_or_clear(&self->arena, arena);
    self->keeps_only = world_size > 1 && arena == Py_None;
    self->use = (sw_py_use){.pid = getpid()};
    return 0;
}

SW_PY_DESTROY(destroy, sw_saver_destroy)

/* Takes the saver away first: progress() and cancel() of other threads do not enter. A forked child
 * lacks the saver's threads, so it frees nothing. */
static void close_saver(saver_object *self)
{
    sw_saver *saver = self->saver;
    self->saver = NULL;
    if (saver && sw_py_use_is_own(&self->use)) {
        sw_py_use_take(&self->use, SW_PY_ALONE);
        sw_py_destroy_quietly(destroy, saver);
        sw_channel_fini(&self->channel);
        sw_py_use_leave(&self->use);
    }
    leave_plans(self->plans);
    ENGINE_CLEAR(self->arena);
}

static void saver_dealloc(PyObject *op)
{
    close_saver((saver_object *)op);
    sw_py_free(op);
}

static PyObject *saver_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    saver_object *self = (saver_object *)op;
    if (self->saver && sw_py_use_is_own(&self->use)) {
        if (!sw_py_use_enter(&self->use, SW_PY_ALONE, CLOSE_NS,
                             sw_py_state_of(op)->checkpoint_error, "Checkpointer", ""))
            return NULL;
        sw_py_use_leave(&self->use);
    }
    close_saver(self);
    Py_RETURN_NONE;
}

/* ---- sources ---- */

typedef struct packed_source { /* checkpoint/state/content.py, packed() */
    uint64_t source, begin, size_bytes, address, is_eager, is_on_device;
} packed_source;

SW_PY_ROW(fill_source, packed_source, (uint64_t)a[0].n, a[1].word, a[2].word,
          (uintptr_t)a[3].address, a[4].p, a[5].p)

/* Reads a list of (source, begin, nbytes, address, eager, on_device), or bytes of such rows. */
static bool read_packed(sw_py_table *rows, PyObject *sources)
{
    size_t each = sizeof(packed_source);
    if (PyList_Check(sources))
        return sw_py_table_init(rows, sources,
                                "source source:n begin:K nbytes:K address:A eager:p on_device:p",
                                each, fill_source, NULL);
    if (!PyBytes_Check(sources) || (size_t)PyBytes_Size(sources) % each != 0)
        return sw_py_refuse(PyExc_TypeError,
                            "keep: shared_sources must be a list, or bytes in units of %zu", each);
    rows->count = (size_t)PyBytes_Size(sources) / each;
    rows->rows = malloc(rows->count * each + 1);
    if (!rows->rows)
        return PyErr_NoMemory() != NULL;
    memcpy(rows->rows, PyBytes_AsString(sources), rows->count * each);
    return true;
}

/* Reads sources, and which of them are eager. */
static bool read_sources(PyObject *given, sw_py_table *sources, bool **is_eager)
{
    SW_PY_TABLE packed = {0};
    if (!read_packed(&packed, given))
        return false;
    sw_save_source *made = sources->rows = calloc(packed.count + 1, sizeof *made);
    *is_eager = calloc(packed.count + 1, sizeof **is_eager);
    if (!made || !*is_eager)
        return PyErr_NoMemory() != NULL;
    sources->count = packed.count;
    for (size_t i = 0; i < packed.count; ++i) {
        const packed_source *each = (const packed_source *)packed.rows + i;
        const packed_source *before = i ? each - 1 : NULL;
        (*is_eager)[i] = each->is_eager != 0;
        made[i] = (sw_save_source){.source = (size_t)each->source,
                                   .begin = each->begin,
                                   .size_bytes = each->size_bytes,
                                   .data = (const void *)(uintptr_t)each->address,
                                   .is_on_device = each->is_on_device != 0};
        if (each->source > INT64_MAX ||
            (before &&
             (before->source > each->source || (before->source == each->source &&
                                                before->begin + before->size_bytes > each->begin))))
            return sw_py_refuse(PyExc_ValueError,
                                "begin: sources must ascend without overlap; number %zu does not",
                                i);
    }
    return true;
}

/* ---- a save ---- */

typedef struct save_call { /* what a request borrows */
    sw_save_request request;
    sw_py_table shared, own, stale, retired; /* owned */
    bool *is_eager, *is_own_eager;           /* owned; the second is of no use */
    plan_pair plans;                         /* owned, and entered */
} save_call;

static void save_call_fini(save_call *call)
{
    sw_py_table_fini(&call->shared);
    sw_py_table_fini(&call->own);
    sw_py_table_fini(&call->stale);
    sw_py_table_fini(&call->retired);
    free(call->is_eager);
    free(call->is_own_eager);
    leave_plans(call->plans);
}

/* Parses None, or (DeviceStage, the stream that wrote the sources on the device). */
static bool read_stage(engine_state *state, PyObject *pair, sw_save_request *request)
{
    sw_py_arg a[2];
    if (pair == Py_None)
        return true;
    if (PyTuple_Check(pair) && !sw_py_read("device stage:O stream:A", pair, NULL, a))
        return false;
    if (!PyTuple_Check(pair) || !PyObject_TypeCheck(a[0].o, state->device_stage_type))
        return sw_py_refuse(PyExc_TypeError, "begin: device must be (DeviceStage, stream) or None");
    request->stage = ((sw_py_owner *)a[0].o)->made;
    request->user = a[1].address;
    return true;
}

/* Reads the arguments that begin() and keep() share. */
static bool read_save(saver_object *self, save_call *call, const sw_py_arg *shared,
                      const sw_py_arg *own, double timeout_s, PyObject *device)
{
    engine_state *state = sw_py_state_of(self);
    sw_save_request *request = &call->request;
    if (!(timeout_s >= 0))
        return sw_py_refuse(PyExc_ValueError, "begin: timeout_s must be at least 0 seconds");
    request->timeout_ns = (int64_t)((timeout_s > 1e9 ? 1e9 : timeout_s) * 1e9);
    return read_sources(shared[1].o, &call->shared, &call->is_eager) &&
           read_sources(own[1].o, &call->own, &call->is_own_eager) &&
           enter_plan(state, shared[0].o, &call->shared, &call->plans[0], &request->shared) &&
           enter_plan(state, own[0].o, &call->own, &call->plans[1], &request->own) &&
           read_stage(state, device, request);
}

static bool read_texts(sw_py_table *texts, PyObject *list, const char *signature,
                       const char *const **to, size_t *count)
{
    if (!sw_py_table_init(texts, list, signature, sizeof(const char *), sw_py_fill_text, NULL))
        return false;
    *to = texts->rows;
    *count = texts->count;
    return true;
}

static PyObject *saver_begin(PyObject *op, PyObject *args, PyObject *kwargs)
{
    saver_object *self = (saver_object *)op;
    sw_py_arg a[15];
    save_call call = {.is_eager = NULL};
    sw_save_request *request = &call.request;
    sw_error err = {0};
    sw_status status = SW_E_INVALID;
    if (!sw_py_read("begin $ folder:s nonce:s replaces:s number:K step:K metric:O shared:O "
                    "shared_sources:L own:O own_sources:L lazy:p stale:L retired:L timeout_s:d "
                    "device:O",
                    args, kwargs, a) ||
        !enter(self, 0))
        return NULL;
    request->folder = a[0].s;
    request->nonce = a[1].s;
    request->replaces = a[2].s;
    request->number = a[3].word;
    request->step = a[4].word;
    request->is_lazy = a[10].p;
    request->has_metric = a[5].o != Py_None;
    request->metric = request->has_metric ? PyFloat_AsDouble(a[5].o) : 0;
    if (self->keeps_only)
        PyErr_SetString(PyExc_ValueError,
                        "begin: several ranks need the pages that the constructor takes");
    if (!PyErr_Occurred() && read_save(self, &call, &a[6], &a[8], a[13].d, a[14].o) &&
        read_texts(&call.stale, a[11].o, "begin stale:s", &request->stale, &request->stale_count) &&
        read_texts(&call.retired, a[12].o, "begin retired:s", &request->retired,
                   &request->retired_count)) {
        request->is_eager = call.is_eager;
        status = SW_PY_WITHOUT_GIL(sw_saver_begin(self->saver, request, &err));
    }
    if (status == SW_OK) {
        plan_pair before = {self->plans[0], self->plans[1]};
        memcpy(self->plans, call.plans, sizeof call.plans);
        memcpy(call.plans, before, sizeof before);
    }
    save_call_fini(&call);
    PyObject *done = PyErr_Occurred() ? NULL : sw_py_finish_checkpoint(self, NULL, status, &err);
    sw_py_use_leave(&self->use);
    return done;
}

static PyObject *saver_keep(PyObject *op, PyObject *args, PyObject *kwargs)
{
    saver_object *self = (saver_object *)op;
    sw_py_arg a[10];
    save_call call = {.is_eager = NULL};
    PyObject *result = NULL;
    sw_save_kept kept = {0};
    sw_error err = {0};
    if (!sw_py_read("keep $ nonce:s shared:O shared_sources:O own:O own_sources:L image:A "
                    "image_bytes:K disk_fd:i timeout_s:d device:O",
                    args, kwargs, a) ||
        !enter(self, 0))
        return NULL;
    call.request.nonce = a[0].s;
    if (read_save(self, &call, &a[1], &a[3], a[8].d, a[9].o)) {
        sw_status status = SW_PY_WITHOUT_GIL(sw_saver_keep(self->saver, &call.request, a[5].address,
                                                           a[6].word, a[7].i, &kept, &err));
        result =
            status == SW_OK
                ? Py_BuildValue("(y#y#K)", kept.tallies.data ? (const char *)kept.tallies.data : "",
                                (Py_ssize_t)kept.tallies.size_bytes, (const char *)kept.runs,
                                (Py_ssize_t)(kept.run_count * sizeof *kept.runs),
                                (unsigned long long)kept.size_bytes)
                : sw_py_raise_checkpoint(op, &err);
    }
    sw_save_kept_fini(&kept);
    save_call_fini(&call);
    sw_py_use_leave(&self->use);
    return result;
}

/* A failure only makes the first save slower. */
SW_PY_VALUE(saver_warm, saver_object, "warm nbytes:K", is_usable(self),
            PyBool_FromLong(sw_saver_warm(self->saver, a[0].word, NULL) == SW_OK))

SW_PY_METHOD(saver_protect, saver_object, "protect", enter(self, PROTECT_NS),
             sw_saver_protect(self->saver, &err),
             sw_py_finish_checkpoint(self, &self->use, status, &err))

static PyObject *saver_wait(PyObject *op, PyObject *args)
{
    saver_object *self = (saver_object *)op;
    sw_py_arg a[1];
    bool is_over = false;
    sw_error err = {0};
    if (!sw_py_read("wait timeout_s:d", args, NULL, a))
        return NULL;
    if (!(a[0].d >= 0 && a[0].d <= 1e9))
        return PyErr_Format(PyExc_ValueError, "wait: timeout_s must be in [0, 1e9] seconds");
    /* The wait polls, so that another thread can enter protect() in between. */
    int64_t until_ns = sw_clock_now_ns() + (int64_t)(a[0].d * 1e9);
    for (bool was_free = false;; was_free = false) {
        if (!is_usable(self))
            return NULL;
        if (self->use.kind == SW_PY_FREE) {
            was_free = true;
            sw_py_use_take(&self->use, SW_PY_ALONE);
            sw_status status = SW_PY_WITHOUT_GIL(sw_saver_wait(self->saver, 0, &is_over, &err));
            if (status != SW_OK || is_over)
                leave_plans(self->plans);
            SW_PY_OWNED *done = sw_py_finish_checkpoint(self, &self->use, status, &err);
            if (!done)
                return NULL;
        }
        if ((was_free && is_over) || sw_clock_now_ns() >= until_ns)
            return PyBool_FromLong(is_over);
        SW_PY_DO_WITHOUT_GIL(sw_thread_sleep_ns(1000 * 1000));
    }
}

static sw_error reason_of(sw_status status, const char *message)
{
    sw_error reason;
    (void)sw_error_set(&reason, status, -1, "%s", message);
    return reason;
}

/* Over hosts the message may need a retry, so it goes without the GIL. */
SW_PY_METHOD_WITH(saver_fail, saver_object, "fail number:K message:s", sw_error reason,
                  enter(self, 0),
                  (reason = reason_of(SW_E_STATE, a[1].s),
                   sw_saver_fail(self->saver, a[0].word, &reason), SW_OK),
                  sw_py_finish_checkpoint(self, &self->use, status, &err))

static PyObject *cancel(sw_saver *saver, const char *message)
{
    const sw_error reason = reason_of(SW_E_INTERRUPTED, message);
    sw_saver_cancel(saver, &reason);
    return sw_py_none();
}

SW_PY_VALUE(saver_cancel, saver_object, "cancel message:s", is_usable(self),
            cancel(self->saver, a[0].s))

static PyObject *saver_progress(PyObject *op, PyObject *Py_UNUSED(unused))
{
    saver_object *self = (saver_object *)op;
    sw_save_progress progress;
    if (!is_usable(self))
        return NULL;
    sw_saver_progress(self->saver, &progress);
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:N}", "bytes_total", (unsigned long long)progress.bytes_total,
        "bytes_written", (unsigned long long)progress.bytes_written, "staging_bytes",
        (unsigned long long)progress.staging_bytes, "direct_bytes",
        (unsigned long long)progress.direct_bytes, "busy", PyBool_FromLong(progress.is_busy));
}

static PyObject *saver_unwritten(PyObject *op, PyObject *Py_UNUSED(unused))
{
    saver_object *self = (saver_object *)op;
    PyObject *list = PyList_New(0); /* a destructor that runs meanwhile may close the saver */
    if (list && !is_usable(self))
        ENGINE_CLEAR(list);
    for (int r = 0; list && (r = sw_saver_find_unwritten(self->saver, r)) >= 0; ++r)
        sw_py_append(&list, PyLong_FromLong(r));
    return list;
}

static PyObject *saver_spare(PyObject *op, PyObject *Py_UNUSED(unused))
{
    saver_object *self = (saver_object *)op;
    size_t size_bytes = 0;
    uint8_t *base;
    if (!enter(self, 0))
        return NULL;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && (base = sw_saver_spare(self->saver, i, &size_bytes)); ++i)
        sw_py_append(&list, Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)base,
                                          (unsigned long long)size_bytes));
    sw_py_use_leave(&self->use);
    return list;
}

static PyMethodDef saver_methods[] = {
    {"begin", SW_PY_NAMED(saver_begin),
     "Take the snapshot of [(source, begin, nbytes, address, eager, on_device)] and start the "
     "rest."},
    {"keep", SW_PY_NAMED(saver_keep),
     "Writes this rank's part into memory; (tallies, runs, bytes)."},
    SW_PY_ARGS(saver, warm, "nbytes, /", "Touch staging memory of this size in a separate thread."),
    SW_PY_ARGS(saver, protect, "/", "Copy the state that is still live."),
    SW_PY_ARGS(saver, wait, "timeout_s, /", "Return True if no save runs; raise its error once."),
    SW_PY_ARGS(saver, fail, "number, message, /", "Tell peers that this rank cannot begin it."),
    SW_PY_ARGS(saver, cancel, "message, /", "Make a running save fail soon."),
    SW_PY_NONE(saver, progress, "bytes_total, bytes_written, staging_bytes, direct_bytes, busy."),
    SW_PY_NONE(saver, unwritten, "Return ranks of this host whose last part is not durable yet."),
    SW_PY_NONE(saver, spare,
               "Return [(address, nbytes)] of memory that the caller may use until the next save."),
    SW_PY_NONE(saver, close, "Cancel a running save and free everything."),
    {NULL, NULL, 0, NULL},
};

SW_PY_TYPE(sw_py_checkpoint_saver_type_spec, "CheckpointSaver", saver_object, 0,
           "CheckpointSaver(rank, world_size, pages=None, hosts=None, path=None, *, threads=2, "
           "direct=True, idle_io=False, bandwidth=0)\n--\n\nOne save at a time.",
           {Py_tp_init, saver_init}, {Py_tp_dealloc, saver_dealloc}, {Py_tp_methods, saver_methods})
