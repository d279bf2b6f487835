/* exchange_type.c - shardwright._engine.Exchange: the ranks between which a Codec compresses.
 * Either those of a HostComm, or those of a transport, an object of Python over another library's
 * group:
 *
 *     rank, world_size
 *     all_to_all(received, message)    DLPack capsules of world_size slices of bytes
 *     all_gather(whole, mine)          of world_size slices, and of one
 */
#include <stdlib.h>
#include <string.h>

#include "python/codec_object.h"

/* ---- a transport of Python ---- */

typedef struct py_exchange {
    sw_exchange base; /* first */
    sw_exchange_buffers buffers;
    exchange_object *object; /* borrowed: the owner of this, and of the transport */
} py_exchange;

static PyObject *bytes_at(const py_exchange *self, void *address, size_t size_bytes)
{
    sw_py_layout layout = {.dtype = SW_DTYPE_UINT8,
                           .ndim = 1,
                           .numel = size_bytes,
                           .bytes = size_bytes,
                           .sizes = {(int64_t)size_bytes},
                           .strides = {1}};
    return sw_py_dlpack_capsule_on(-1, (PyObject *)self->object, address, &layout);
}

/* Calls transport.name(a, b) with tensors' memory. An exception stays set for the caller. */
static sw_status call(py_exchange *self, const char *name, void *to, size_t to_bytes, void *from,
                      size_t from_bytes, sw_error *err)
{
    SW_PY_GIL(gil);
    SW_PY_OWNED *target = bytes_at(self, to, to_bytes);
    SW_PY_OWNED *source = target ? bytes_at(self, from, from_bytes) : NULL;
    SW_PY_OWNED *result = source ? sw_py_call(self->object->transport, name, target, source) : NULL;
    return result ? SW_OK
                  : sw_error_set(err, SW_E_INTERRUPTED, -1, "the transport's %s raised", name);
}

static sw_status begin(sw_exchange *exchange, uint8_t **message, uint8_t **result, sw_error *err)
{
    py_exchange *self = (py_exchange *)(void *)exchange;
    return sw_exchange_buffers_begin(&self->buffers, exchange, message, result, err);
}

static sw_status scatter(sw_exchange *exchange, const void **pieces, sw_error *err)
{
    py_exchange *self = (py_exchange *)(void *)exchange;
    size_t ranks = (size_t)exchange->world_size, size = exchange->slice_bytes;
    bool alone = ranks == 1;
    for (size_t r = 0; r < ranks; ++r)
        pieces[r] = (alone ? self->buffers.message : self->buffers.received) + r * size;
    return alone ? SW_OK
                 : call(self, "all_to_all", self->buffers.received, ranks * size,
                        self->buffers.message, ranks * size, err);
}

static sw_status gather(sw_exchange *exchange, uint8_t **whole, sw_error *err)
{
    py_exchange *self = (py_exchange *)(void *)exchange;
    size_t ranks = (size_t)exchange->world_size, size = exchange->slice_bytes;
    *whole = self->buffers.whole;
    if (ranks > 1)
        return call(self, "all_gather", *whole, ranks * size, self->buffers.result, size, err);
    memcpy(*whole, self->buffers.result, size);
    return SW_OK;
}

static const sw_exchange_ops transport_ops = {.begin = begin, .scatter = scatter, .gather = gather};

/* ---- the object ---- */

static bool read_int(PyObject *object, const char *name, int *value)
{
    SW_PY_OWNED *found = PyObject_GetAttrString(object, name);
    long given = found ? PyLong_AsLong(found) : -1;
    *value = (int)given;
    return !PyErr_Occurred() &&
           ((given >= 0 && given <= SW_COMM_MAX_WORLD) ||
            sw_py_refuse(PyExc_ValueError, "Exchange: %s must be in [0, %d], got %ld", name,
                         SW_COMM_MAX_WORLD, given));
}

static bool over_transport(exchange_object *self, PyObject *transport)
{
    int rank, world_size;
    if (!read_int(transport, "rank", &rank) || !read_int(transport, "world_size", &world_size))
        return false;
    if (rank >= world_size)
        return sw_py_refuse(PyExc_ValueError, "Exchange: rank must be in [0, %d), got %d",
                            world_size, rank);
    py_exchange *made = calloc(1, sizeof *made);
    if (!made)
        return PyErr_NoMemory() != NULL;
    made->base = (sw_exchange){.ops = &transport_ops, .rank = rank, .world_size = world_size};
    made->object = self;
    Py_INCREF(transport);
    self->transport = transport;
    self->exchange = &made->base;
    return true;
}

static bool over_comm(exchange_object *self, comm_object *comm)
{
    sw_error err;
    if (!sw_py_comm_enter(comm))
        return false;
    sw_status status = sw_comm_average_create(comm->comm, &self->average, &err);
    if (status == SW_OK) {
        sw_py_comm_acquire(comm);
        Py_INCREF(comm);
        self->comm = comm;
    }
    SW_PY_OWNED *done = sw_py_comm_finish(comm, status, &err);
    return done != NULL;
}

static int exchange_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    exchange_object *self = (exchange_object *)op;
    sw_py_arg a[1];
    if (!sw_py_read("Exchange ranks:O", args, kwargs, a) || !sw_py_use_make(&self->use, "Exchange"))
        return -1;
    bool is_comm = PyObject_TypeCheck(a[0].o, sw_py_state_of(op)->comm_type);
    return (is_comm ? over_comm(self, (comm_object *)a[0].o) : over_transport(self, a[0].o)) ? 0
                                                                                             : -1;
}

static int exchange_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((exchange_object *)op)->transport);
    return 0;
}

static int exchange_clear(PyObject *op)
{
    ENGINE_CLEAR(((exchange_object *)op)->transport);
    return 0;
}

static void exchange_dealloc(PyObject *op)
{
    exchange_object *self = (exchange_object *)op;
    PyObject_GC_UnTrack(op);
    SW_PY_ASIDE(pending);
    exchange_clear(op);
    if (self->exchange) {
        sw_exchange_buffers_fini(&((py_exchange *)(void *)self->exchange)->buffers);
        free(self->exchange);
    }
    if (self->comm) {
        sw_comm_average_destroy(self->average);
        sw_py_comm_release(self->comm);
        Py_DECREF(self->comm);
    }
    sw_py_free(op);
}

static bool enter(exchange_object *self)
{
    return (self->comm || sw_py_refuse(PyExc_TypeError,
                                       "Exchange.wait: these are not the ranks of a HostComm")) &&
           sw_py_comm_enter(self->comm);
}

SW_PY_METHOD(exchange_wait, exchange_object, "Exchange.wait", enter(self),
             sw_comm_average_wait(self->average, &err), sw_py_comm_finish(self->comm, status, &err))

SW_PY_GETTER(exchange_get_rank, exchange_object,
             PyLong_FromLong(self->exchange                   ? self->exchange->rank
                             : self->comm && self->comm->comm ? self->comm->comm->rank
                                                              : -1))
SW_PY_GETTER(exchange_get_world_size, exchange_object,
             PyLong_FromLong(self->exchange  ? self->exchange->world_size
                             : self->average ? sw_comm_average_world_size(self->average)
                                             : 0))
SW_PY_GETTER(exchange_get_in_flight, exchange_object,
             PyBool_FromLong(self->average &&sw_comm_average_is_in_flight(self->average)))

static PyMethodDef exchange_methods[] = {
    SW_PY_ARGS(exchange, wait, "/", "Wait for the mean that Codec.begin() began."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef exchange_properties[] = {
    {"rank", exchange_get_rank, NULL, "this rank", NULL},
    {"world_size", exchange_get_world_size, NULL,
     "ranks between which messages are compressed; of several hosts, their number", NULL},
    {"in_flight", exchange_get_in_flight, NULL, "True between begin() and wait()", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_exchange_type_spec, "Exchange", exchange_object, Py_TPFLAGS_HAVE_GC,
           "The ranks between which a Codec compresses: of a HostComm, or of an object with rank, "
           "world_size, all_to_all(received, message) and all_gather(whole, mine).",
           {Py_tp_init, exchange_init}, {Py_tp_dealloc, exchange_dealloc},
           {Py_tp_traverse, exchange_traverse}, {Py_tp_clear, exchange_clear},
           {Py_tp_methods, exchange_methods}, {Py_tp_getset, exchange_properties})
