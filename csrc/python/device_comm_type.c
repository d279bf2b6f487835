/* device_comm_type.c - shardwright._engine.DeviceComm: Python's view of a rank's GPU. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/device_comm.h"
#include "python/device_object.h"

/* ---- life ---- */

/* Asks torch's allocator to release cached memory, since GPU memory is short. */
static void make_room(void *context)
{
    SW_PY_GIL(gil);
    SW_PY_ASIDE(pending); /* of a caller that already holds the GIL */
    SW_PY_OWNED *done = PyObject_CallNoArgs(context);
    if (!done)
        PyErr_WriteUnraisable(context);
}

/* Checks an argument that may be None. Returns false with an exception if it has another type. */
static bool keep(PyObject **slot, PyObject *value, bool fits, const char *wanted)
{
    if (value == Py_None)
        return true;
    if (!fits)
        return sw_py_refuse(PyExc_TypeError, "DeviceComm: %s, or None", wanted);
    sw_py_set(slot, value);
    return true;
}

static int device_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    device_comm_object *self = (device_comm_object *)op;
    const engine_state *state = sw_py_state_of(op);
    sw_py_arg a[10] = {[7] = {.o = Py_None}, [8] = {.o = Py_None}, [9] = {.o = Py_None}};
    sw_device_comm *made = NULL;
    sw_error err;
    if (!sw_py_read("DeviceComm ordinal:i | $ libcuda:z libnccl:z packaged:z cache:z nvrtc:z "
                    "builtins:z host:O make_room:O beside:O",
                    args, kwargs, a) ||
        !sw_py_use_make(&self->use, "DeviceComm") ||
        !keep(&self->make_room, a[8].o, PyCallable_Check(a[8].o), "make_room must be callable") ||
        !keep((PyObject **)&self->beside, a[9].o,
              PyObject_TypeCheck(a[9].o, state->device_comm_type) &&
                  ((device_comm_object *)a[9].o)->comm,
              "beside must be a DeviceComm that is open") ||
        !keep((PyObject **)&self->host, a[7].o,
              PyObject_TypeCheck(a[7].o, state->comm_type) && ((comm_object *)a[7].o)->comm &&
                  ((comm_object *)a[7].o)->connected,
              "host must be a HostComm that has joined its peers"))
        return -1;
    if (self->host)
        sw_py_comm_acquire(self->host);
    const sw_device_comm_config config = {
        .ordinal = a[0].i,
        .cuda_library = a[1].s,
        .nccl_library = a[2].s,
        .places = {.packaged_folder = a[3].s,
                   .cache_folder = a[4].s,
                   .nvrtc = a[5].s,
                   .nvrtc_builtins = a[6].s},
        .room = {.make = self->make_room ? make_room : NULL, .context = self->make_room},
        .beside = self->beside ? self->beside->comm : NULL,
        .host = self->host ? self->host->comm : NULL};
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_comm_create(&config, &made, &err));
    self->comm = made;
    if (status == SW_OK)
        return 0;
    sw_py_raise(op, &err, NULL);
    return -1;
}

/* Returns false with an exception unless `self` is open and no thread is inside. */
static bool is_open_and_free(device_comm_object *self, const char *what)
{
    if (!sw_py_device_wait_for_watch(self))
        return false;
    return (self->comm && !self->closed && self->use.kind == SW_PY_FREE) ||
           sw_py_refuse(sw_py_state_of(self)->error,
                        "%s: the GPU's communicator was closed, or was never opened", what);
}

/* Checks the deadline and enters a communicator that has no peers yet. */
static bool enter_to_join(device_comm_object *self, const char *what, double timeout_s)
{
    if (!(timeout_s > 0 && timeout_s <= 1e9))
        return sw_py_refuse(PyExc_ValueError, "%s: timeout_s must be in (0, 1e9]", what);
    if (!is_open_and_free(self, what))
        return false;
    sw_py_device_take(self, SW_PY_ALONE);
    return true;
}

static bool read_id(PyObject *bytes, sw_nccl_id *id)
{
    if (PyBytes_Size(bytes) == (Py_ssize_t)sizeof *id) {
        memcpy(id, PyBytes_AsString(bytes), sizeof *id);
        return true;
    }
    return sw_py_refuse(PyExc_ValueError, "connect: id must be %zd bytes, not %zd bytes",
                        (Py_ssize_t)sizeof *id, PyBytes_Size(bytes));
}

SW_PY_METHOD_WITH(device_connect, device_comm_object,
                  "connect id:B rank:i world_size:i timeout_s:d", sw_nccl_id id,
                  read_id(a[0].o, &id) && enter_to_join(self, "connect", a[3].d),
                  sw_device_comm_connect(self->comm, &id, a[1].i, a[2].i, (int64_t)(a[3].d * 1e9),
                                         &err),
                  sw_py_device_finish(self, status, &err))
SW_PY_METHOD(device_connect_alone, device_comm_object, "connect_alone timeout_s:d",
             enter_to_join(self, "connect_alone", a[0].d),
             sw_device_comm_connect_alone(self->comm, (int64_t)(a[0].d * 1e9), &err),
             sw_py_device_finish(self, status, &err))
SW_PY_METHOD(device_borrow, device_comm_object, "borrow handle:A rank:i world_size:i timeout_s:d",
             enter_to_join(self, "borrow", a[3].d),
             sw_device_comm_borrow(self->comm, a[0].address, a[1].i, a[2].i,
                                   (int64_t)(a[3].d * 1e9), &err),
             sw_py_device_finish(self, status, &err))

/* The parts of the arena that belong to ranks of its group, in the order of this communicator. */
typedef struct slot_ranks {
    const sw_arena *memory; /* NULL: it has no parts of others */
    size_t part_bytes;
} slot_ranks;

static bool fill_part(const sw_py_arg *a, void *row, void *context)
{
    const slot_ranks *of = context;
    const sw_arena *memory = of->memory;
    if (memory && a[0].i >= 0 && a[0].i < memory->world_size && memory->base[a[0].i] &&
        memory->size_bytes >= of->part_bytes) {
        *(uint8_t **)row = memory->base[a[0].i];
        return true;
    }
    return sw_py_refuse(PyExc_ValueError,
                        "connect_slots: the arena has no part of %zu bytes of rank %d",
                        of->part_bytes, a[0].i);
}

static PyObject *device_connect_slots(PyObject *op, PyObject *args)
{
    device_comm_object *self = (device_comm_object *)op;
    sw_py_arg a[6];
    SW_PY_TABLE table = {0};
    sw_error err;
    if (!sw_py_read("connect_slots arena:O members:O slot_bytes:N place:(auto|shm|ipc) rank:i "
                    "timeout_s:d",
                    args, NULL, a))
        return NULL;
    PyObject *arena = a[0].o;
    if (Py_TYPE(arena) != sw_py_state_of(op)->arena_type)
        return PyErr_Format(PyExc_TypeError, "connect_slots: arena must be an Arena, got %R",
                            (PyObject *)Py_TYPE(arena));
    slot_ranks of = {((arena_object *)arena)->arena, sw_slot_part_bytes(a[2].size)};
    if (!sw_py_table_init(&table, a[1].o, "connect_slots members:i", sizeof(uint8_t *), fill_part,
                          &of) ||
        !enter_to_join(self, "connect_slots", a[5].d))
        return NULL;
    const sw_slot_parts parts = {
        .place = (sw_slot_place)a[3].i, .slot_bytes = a[2].size, .base = table.rows};
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_comm_connect_slots(
        self->comm, &parts, a[4].i, (int)table.count, (int64_t)(a[5].d * 1e9), &err));
    if (status == SW_OK)
        sw_py_set(&self->arena, arena);
    return sw_py_device_finish(self, status, &err);
}

/* Call from a thread inside it, or inside the communicator whose stream it uses. */
static bool is_used(const device_comm_object *self)
{
    return self->use.kind != SW_PY_FREE || (self->beside && self->beside->use.kind == SW_PY_ALONE);
}

static PyObject *device_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    device_comm_object *self = (device_comm_object *)op;
    if (self->closed || !self->comm || !sw_py_use_is_own(&self->use))
        Py_RETURN_NONE;
    if (!sw_py_device_wait_for_watch(self))
        return NULL;
    if (self->closed || is_used(self))
        Py_RETURN_NONE;
    self->closed = true;
    sw_py_device_take(self, SW_PY_ALONE);
    SW_PY_DO_WITHOUT_GIL(sw_device_comm_disconnect(self->comm));
    sw_py_device_leave(self);
    ENGINE_CLEAR(self->arena);
    return PyErr_Occurred() ? NULL : sw_py_none(); /* a signal handler raised meanwhile */
}

SW_PY_DESTROY(disconnect_comm, sw_device_comm_disconnect)
SW_PY_DESTROY(destroy_comm, sw_device_comm_destroy)

/* No reference is left, so no thread can be inside. */
static void device_dealloc(PyObject *op)
{
    device_comm_object *self = (device_comm_object *)op;
    /* An abandoned watch thread still reads the host communicator. */
    bool is_abandoned = false;
    /* A forked child has no CUDA context, so its calls would fail. */
    if (self->comm && sw_py_use_is_own(&self->use)) {
        sw_py_destroy_quietly(disconnect_comm, self->comm);
        is_abandoned = self->comm->is_abandoned;
        sw_py_destroy_quietly(destroy_comm, self->comm);
    }
    Py_XDECREF(self->arena);
    if (self->host && !is_abandoned) {
        sw_py_comm_release(self->host);
        Py_DECREF(self->host);
    }
    Py_XDECREF(self->make_room);
    Py_XDECREF(self->beside);
    sw_py_free(op);
}

/* ---- ranges ---- */

#define RANGE "range address:A numel:N dtype:T"

SW_PY_ROW(fill_range, sw_device_range, .data = a[0].address, .numel = a[1].size,
          .dtype = a[2].dtype)

SW_PY_ON_ROWS(device_broadcast, "broadcast ranges:O root:i stream:A", 0, RANGE, sw_device_range,
              fill_range,
              sw_device_comm_broadcast(comm, rows.rows, rows.count, a[1].i, a[2].address, &err))
SW_PY_ON_ROWS(device_all_gather, "all_gather ranges:O stream:A", 0, RANGE, sw_device_range,
              fill_range,
              sw_device_comm_all_gather(comm, rows.rows, rows.count, a[1].address, &err))
/* Enqueues the norm and the factor that clips it to max_norm: two float32 at `result`. */
SW_PY_ON_ROWS(device_clip, "clip ranges:O max_norm:d is_sliced:p result:A stream:A", 0, RANGE,
              sw_device_range, fill_range,
              sw_device_comm_clip(comm, rows.rows, rows.count,
                                  &(sw_device_clip){.max_norm = a[1].d,
                                                    .is_sliced = a[2].p,
                                                    .norm = a[3].address,
                                                    .factor = (float *)a[3].address + 1},
                                  a[4].address, &err))

SW_PY_METHOD_WITH(device_exchange, device_comm_object, "exchange range:U received:A stream:A",
                  sw_device_range range;
                  sw_py_arg parts[3],
                  sw_py_read(RANGE, a[0].o, NULL, parts) && fill_range(parts, &range, NULL) &&
                      sw_py_device_enter(self),
                  sw_device_comm_exchange(self->comm, &range, a[1].address, a[2].address, &err),
                  sw_py_device_finish(self, status, &err))

SW_PY_METHOD_ON_ROWS(device_norm_sum, device_comm_object, "norm_sum ranges:O stream:A",
                     sw_norm_sum sum, 0, RANGE, sw_device_range, fill_range,
                     sw_py_device_enter(self),
                     sw_device_comm_norm(self->comm, rows.rows, rows.count, a[1].address, &sum,
                                         &err),
                     sw_py_bytes_if(sw_py_device_finish(self, status, &err), &sum, sizeof sum))

SW_PY_ON_DEVICE(device_follow, "follow later:A earlier:A",
                sw_device_comm_follow(comm, a[0].address, a[1].address, &err))
SW_PY_ON_DEVICE(device_refuse_capture, "refuse_capture stream:A what:s",
                sw_device_refuse_capture(comm->device, a[0].address, a[1].s, &err))
SW_PY_ON_DEVICE(device_give_back, "give_back stream:A",
                sw_device_comm_give_back(comm, a[0].address, &err))

/* ---- copies ---- */

SW_PY_ROW(fill_segment, sw_pack_segment, .to = a[0].address, .from = a[1].address,
          .size_bytes = a[2].size)

/* Returns true if both segments are scaled in place and `next` begins where `segment` ends. */
static bool goes_on(const sw_pack_segment *segment, const sw_pack_segment *next)
{
    return segment->to == segment->from && next->to == next->from &&
           (const char *)segment->from + segment->size_bytes == (const char *)next->from;
}

/* Launches PACK. Adjacent segments that are scaled in place count as one of its copies. */
static sw_status launch_pack(const sw_device_comm *comm, const sw_py_table *copies,
                             sw_pack_args *args, sw_stream *stream, sw_error *err)
{
    const sw_pack_segment *segments = copies->rows;
    for (size_t at = 0; at < copies->count;) {
        sw_pack_segment *taken = &args->segment[args->segment_count++];
        for (*taken = segments[at++]; at < copies->count && goes_on(taken, &segments[at]); ++at)
            taken->size_bytes += segments[at].size_bytes;
        if (at < copies->count && args->segment_count < SW_PACK_SEGMENT_MAX)
            continue;
        SW_TRY(sw_kernel_launch(&comm->kernels, SW_KERNEL_PACK, args, stream, err));
        args->segment_count = 0;
    }
    return SW_OK;
}

static sw_status small_dtype(const char *name, int *dtype, sw_error *err)
{
    *dtype = (int)sw_dtype_from_name(name);
    if (*dtype != SW_DTYPE_FLOAT32 && *dtype != SW_DTYPE_FLOAT16 && *dtype != SW_DTYPE_BFLOAT16)
        SW_FAIL(err, SW_E_INVALID,
                "convert: dtype must be float32, float16 or bfloat16, not '%.40s'", name);
    return SW_OK;
}

/* Enqueues copies that convert dtypes and multiply each element by `scale`, or by the float32 at
 * `factor`. */
static sw_status convert(sw_device_comm *comm, const sw_py_arg *a, const sw_py_table *copies,
                         sw_error *err)
{
    sw_pack_args args = {.converts = 1, .scale = (float)a[3].d, .factor = a[5].address};
    SW_TRY(small_dtype(a[1].s, &args.to_dtype, err));
    SW_TRY(small_dtype(a[2].s, &args.from_dtype, err));
    return launch_pack(comm, copies, &args, a[4].address, err);
}

#define COPY "copy to:A from:A nbytes:N"

/* Copies are skipped if *verdict is set. */
SW_PY_ON_ROWS(device_pack, "pack copies:L stream:A | verdict:A", 0, COPY, sw_pack_segment,
              fill_segment,
              launch_pack(comm, &rows, &(sw_pack_args){.verdict = a[2].address}, a[1].address,
                          &err))
SW_PY_ON_ROWS(device_convert,
              "convert copies:L to_dtype:s from_dtype:s scale:d stream:A | factor:A", 0, COPY,
              sw_pack_segment, fill_segment, convert(comm, a, &rows, &err))

/* ---- state and end ---- */

/* Releases the GIL, since a driver call may never return. Then only threads that need the
 * communicator wait. */
static PyObject *device_watch(PyObject *op, PyObject *Py_UNUSED(unused))
{
    device_comm_object *self = (device_comm_object *)op;
    sw_error err;
    if (!sw_py_device_wait_for_watch(self)) /* raise the other watcher's error here too */
        return NULL;
    if (self->use.kind != SW_PY_FREE || self->closed || !self->comm || !self->comm->peers ||
        !sw_py_use_is_own(&self->use))
        Py_RETURN_NONE;
    sw_py_device_take(self, SW_PY_WATCHED);
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_comm_watch(self->comm, &err));
    return sw_py_device_finish(self, status, &err);
}

static PyObject *device_abort(PyObject *op, PyObject *args)
{
    device_comm_object *self = (device_comm_object *)op;
    sw_py_arg a[1];
    sw_error reason;
    if (!sw_py_read("abort reason:s", args, NULL, a))
        return NULL;
    if (!sw_py_use_is_own(&self->use) || !sw_py_device_wait_for_watch(self))
        return PyErr_Occurred() ? NULL : Py_BuildValue("");
    if (self->closed || !self->comm || !self->comm->peers)
        Py_RETURN_NONE;
    sw_error_set(&reason, SW_E_COMM, -1, "%.480s", a[0].s);
    bool is_beside = is_used(self); /* another thread is inside and may be blocked */
    sw_peers *peers = self->comm->peers;
    self->enders++;
    if (!is_beside)
        sw_py_device_take(self, SW_PY_WATCHED);
    Py_BEGIN_ALLOW_THREADS /* the call may wait until other communicators are aborted too */
    if (is_beside)
        sw_peers_request_end(peers, &reason);
    else
        sw_peers_abort(peers, &reason);
    Py_END_ALLOW_THREADS
    if (!is_beside)
        sw_py_device_leave(self);
    self->enders--;
    Py_RETURN_NONE;
}

/* Starts a thread that watches the communicator and can abort it while a call is blocked. */
SW_PY_ON_DEVICE(device_start_watch, "start_watch", sw_device_watch_start(comm, &err))

static PyObject *device_describe(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const device_comm_object *self = (device_comm_object *)op;
    if (!self->comm)
        Py_RETURN_NONE;
    const sw_device_comm *comm = self->comm;
    const sw_device *device = comm->device;
    bool has_nccl = comm->library.handle != NULL;
    int version = has_nccl ? comm->library.version : 0;
    return Py_BuildValue("{s:i,s:s,s:s,s:(ii),s:(iii),s:N,s:s,s:z}", "ordinal", device->ordinal,
                         "name", device->name, "address", device->address, "capability",
                         device->major, device->minor, "nccl", version / 10000,
                         version % 10000 / 100, version % 100, "nccl_missing",
                         sw_py_text(has_nccl ? "" : comm->nccl_missing.message), "kernels",
                         sw_image_origin_name(comm->kernels.origin), "transport",
                         comm->peers && !self->closed ? comm->peers->name : NULL);
}

static PyObject *device_stats(PyObject *op, PyObject *Py_UNUSED(unused))
{
    static const sw_py_count counts[] = {
        SW_PY_COUNT(sw_device_stats, launches),   SW_PY_COUNT(sw_device_stats, copies),
        SW_PY_COUNT(sw_device_stats, records),    SW_PY_COUNT(sw_device_stats, stream_waits),
        SW_PY_COUNT(sw_device_stats, host_waits), SW_PY_COUNT(sw_device_stats, allocations)};
    const device_comm_object *self = (device_comm_object *)op;
    return self->comm
               ? sw_py_counts(&self->comm->device->stats, counts, sizeof counts / sizeof *counts)
               : sw_py_none();
}

SW_PY_GETTER(device_get_stream, device_comm_object,
             PyLong_FromVoidPtr(self->comm ? (void *)self->comm->stream : NULL))

static bool has_peers(const device_comm_object *self)
{
    return self->comm && self->comm->peers && !self->closed;
}

bool sw_py_device_is_alive(const device_comm_object *self)
{
    return has_peers(self) && !sw_peers_has_failed(self->comm->peers);
}

SW_PY_GETTER(device_get_alive, device_comm_object, PyBool_FromLong(sw_py_device_is_alive(self)))
SW_PY_GETTER(device_get_failed, device_comm_object,
             PyBool_FromLong(has_peers(self) && sw_peers_has_failed(self->comm->peers)))

static PyMethodDef device_methods[] = {
    SW_PY_ARGS(device, connect, "id, rank, world_size, timeout_s, /", "Join peers. Collective."),
    SW_PY_ARGS(device, connect_alone, "timeout_s, /", "Be the only rank."),
    SW_PY_ARGS(device, connect_slots, "arena, members, slot_bytes, place, rank, timeout_s, /",
               "Join members of arena, this rank as number rank, through slots in place: \"shm\", "
               "\"ipc\" or \"auto\". Collective."),
    SW_PY_ARGS(device, borrow, "handle, rank, world_size, timeout_s, /",
               "Use a communicator that its owner keeps, instead of connect()."),
    SW_PY_ARGS(device, give_back, "stream, /",
               "Order the stream's next operations after ours, if the communicator is borrowed."),
    SW_PY_ARGS(device, refuse_capture, "stream, what, /", "Raise if a graph captures it."),
    SW_PY_ARGS(device, broadcast, "ranges, root, stream, /", "Broadcast (address, numel, dtype)."),
    SW_PY_ARGS(device, all_gather, "ranges, stream, /", "Gather the ranks' slices of each range."),
    SW_PY_ARGS(device, exchange, "range, received, stream, /", "Exchange slices of all ranks."),
    SW_PY_ARGS(device, norm_sum, "ranges, stream, /",
               "Return the exact sum of squares in norm_sum()'s format; the host waits."),
    SW_PY_ARGS(device, clip, "ranges, max_norm, is_sliced, result, stream, /",
               "Write the norm and min(1, max_norm / (norm + 1e-6)) as float32 to result. "
               "is_sliced: over all ranks."),
    SW_PY_ARGS(device, follow, "later, earlier, /", "Order one stream after another."),
    SW_PY_ARGS(device, pack, "copies, stream, verdict=0, /", "Copy (to, from, nbytes)."),
    SW_PY_ARGS(device, convert, "copies, to_dtype, from_dtype, scale, stream, factor=0, /",
               "Copy like pack, and scale and round each element."),
    SW_PY_ARGS(device, start_watch, "/", "Watch the communicator in a thread until it is closed."),
    SW_PY_NONE(device, watch, "Raise if a rank has failed or is late; do not wait."),
    SW_PY_ARGS(device, abort, "reason, /", "End the communicator on this rank."),
    SW_PY_NONE(device, describe, "Return the facts of this GPU and communicator."),
    SW_PY_NONE(device, stats, "Return driver calls since creation."),
    SW_PY_NONE(device, close, "End the communicator."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_properties[] = {
    {"stream", device_get_stream, NULL, "the stream of all collectives", NULL},
    {"is_alive", device_get_alive, NULL, "True if connected, open and without a failure", NULL},
    {"has_failed", device_get_failed, NULL, "True if connected, open and failed", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(
    sw_py_device_comm_type_spec, "DeviceComm", device_comm_object, 0,
    "A rank's GPU: its kernels, a communicator and one stream for it. Streams are addresses, like "
    "torch.cuda.Stream.cuda_stream. host: asked if awaited ranks live, and ended with it. beside: "
    "its stream is used. make_room() is called on any thread after a failed allocation.",
    {Py_tp_init, device_init}, {Py_tp_dealloc, device_dealloc}, {Py_tp_methods, device_methods},
    {Py_tp_getset, device_properties})
