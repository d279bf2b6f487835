/* device_region_type.c - shardwright._engine.DeviceRegion: memory registered with a communicator.
 * Tensors over the region own it (device_tensor), so it may outlive its creators. */
#include "comm/device_region.h"
#include "python/device_object.h"

typedef struct device_region_object {
    PyObject_HEAD device_comm_object *comm; /* owned */
    sw_device_region *region;               /* owned */
    Py_ssize_t nbytes;
} device_region_object;

static int region_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"comm", "nbytes", "stream", NULL};
    device_region_object *self = (device_region_object *)op;
    PyObject *comm, *stream_value;
    sw_stream *stream;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnO:DeviceRegion", names, &comm, &self->nbytes,
                                     &stream_value) ||
        !sw_py_device_stream(stream_value, &stream))
        return -1;
    if (self->comm || !PyObject_TypeCheck(comm, sw_py_state_of(op)->device_comm_type)) {
        PyErr_SetString(PyExc_TypeError, "DeviceRegion: comm must be a DeviceComm, and a "
                                         "DeviceRegion is initialised once");
        return -1;
    }
    if (self->nbytes <= 0) {
        PyErr_Format(PyExc_ValueError, "DeviceRegion: nbytes must be positive, got %zd",
                     self->nbytes);
        return -1;
    }
    Py_INCREF(comm);
    self->comm = (device_comm_object *)comm;
    if (!sw_py_device_enter(self->comm))
        return -1;
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_region_create(self->comm->comm, (size_t)self->nbytes, stream, &self->region,
                                     &err);
    Py_END_ALLOW_THREADS
    sw_py_device_leave(self->comm);
    if (status == SW_OK)
        return 0;
    sw_py_raise(sw_py_state_of(op), &err, NULL); /* all ranks then continue without it */
    return -1;
}

static void destroy_region(void *region)
{
    sw_device_region_destroy(region);
}

/* A forked child frees nothing: its driver calls would fail, and the memory belongs to the parent.
 * If another thread stays inside the communicator for long, the communicator frees the region. */
static void region_dealloc(PyObject *op)
{
    device_region_object *self = (device_region_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->region && sw_py_device_is_own(self->comm)) {
        if (sw_py_device_enter_to_destroy(self->comm)) {
            sw_py_destroy_quietly(destroy_region, self->region);
            sw_py_device_leave(self->comm);
        } else {
            sw_device_region_drop(self->region);
        }
    }
    Py_XDECREF(self->comm);
    PyObject_Free(op);
    Py_DECREF(type);
}

static PyObject *region_register(PyObject *op, PyObject *args)
{
    device_region_object *self = (device_region_object *)op;
    int as_window = 0;
    sw_error err;
    sw_status status;
    if (!self->region) {
        PyErr_SetString(PyExc_TypeError, "DeviceRegion: it was not initialised");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "|p:register", &as_window) || !sw_py_device_enter(self->comm))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_region_register(self->region, as_window != 0, &err);
    Py_END_ALLOW_THREADS
    sw_py_device_leave(self->comm);
    if (status == SW_OK)
        Py_RETURN_NONE;
    sw_py_raise(sw_py_state_of(op), &err, NULL); /* ranks exchange the failure and continue without
                                                  * registration */
    return NULL;
}

/* The region's tensors stay in use, so a failure on this rank aborts the communicator on all ranks:
 * otherwise only some ranks would pass registered memory. */
static PyObject *region_deregister(PyObject *op, PyObject *unused)
{
    device_region_object *self = (device_region_object *)op;
    sw_error err;
    sw_status status;
    (void)unused;
    if (!self->region || self->comm->closed)
        Py_RETURN_NONE;
    if (!sw_py_device_enter(self->comm))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_region_deregister(self->region, &err);
    Py_END_ALLOW_THREADS
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *region_get_address(PyObject *op, void *unused)
{
    const device_region_object *self = (device_region_object *)op;
    (void)unused;
    return PyLong_FromVoidPtr(self->region ? sw_device_region_memory(self->region) : NULL);
}

static PyObject *region_get_nbytes(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromSsize_t(((const device_region_object *)op)->nbytes);
}

static PyObject *region_get_registered(PyObject *op, void *unused)
{
    const device_region_object *self = (device_region_object *)op;
    (void)unused;
    return PyBool_FromLong(self->region && sw_device_region_is_registered(self->region));
}

static PyObject *region_get_window(PyObject *op, void *unused)
{
    const device_region_object *self = (device_region_object *)op;
    (void)unused;
    return PyBool_FromLong(self->region && sw_device_region_is_window(self->region));
}

static PyMethodDef region_methods[] = {
    {"register", region_register, METH_VARARGS,
     "register($self, as_window=False, /)\n--\n\nRegister with NCCL. As a window: collective."},
    {"deregister", region_deregister, METH_NOARGS,
     "deregister($self, /)\n--\n\n"
     "Deregister and keep the memory; waits for the communicator's stream."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef region_properties[] = {
    {"address", region_get_address, NULL, "address of its first byte", NULL},
    {"nbytes", region_get_nbytes, NULL, "its size", NULL},
    {"is_registered", region_get_registered, NULL, "True if NCCL may use it in place", NULL},
    {"is_window", region_get_window, NULL, "True if it is registered as a window", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot region_slots[] = {
    {Py_tp_init, region_init},
    {Py_tp_dealloc, region_dealloc},
    {Py_tp_methods, region_methods},
    {Py_tp_getset, region_properties},
    {Py_tp_doc, "DeviceRegion(comm, nbytes, stream)\n--\n\nMemory of NCCL's, for a communicator."},
    {0, NULL},
};

PyType_Spec sw_py_device_region_type_spec = {
    .name = "shardwright._engine.DeviceRegion",
    .basicsize = sizeof(device_region_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = region_slots,
};
