/* device_region_type.c - shardwright._engine.DeviceRegion: memory registered with a communicator.
 * Tensors over the region own it (device_tensor), so it may outlive its creators. */
#include "comm/device_region.h"
#include "python/method.h"
#include "python/owner.h"

typedef struct device_region_object {
    sw_py_owner owner; /* of a sw_device_region */
    size_t nbytes;
} device_region_object;

/* If another thread stays inside the communicator for long, the communicator frees the region. */
static void destroy(void *region)
{
    sw_device_region_destroy(region);
}

static void drop(void *region)
{
    sw_device_region_drop(region);
}

static int region_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[3];
    sw_device_region *made = NULL;
    sw_error err;
    sw_status status;
    if (!sw_py_read("DeviceRegion comm:O nbytes:n stream:A", args, kwargs, a))
        return -1;
    if (a[1].n <= 0) {
        PyErr_Format(PyExc_ValueError, "DeviceRegion: nbytes must be positive, got %zd", a[1].n);
        return -1;
    }
    if (!sw_py_owner_bind(self, a[0].o, "DeviceRegion") || !sw_py_device_enter(self->comm))
        return -1;
    self->destroy = destroy;
    self->drop = drop;
    ((device_region_object *)op)->nbytes = a[1].size;
    SW_PY_WITHOUT_GIL(
        status, sw_device_region_create(self->comm->comm, a[1].size, a[2].address, &made, &err));
    self->made = made;
    sw_py_device_leave(self->comm);
    return sw_py_owner_made(self, status, &err); /* all ranks then continue without it */
}

/* Ranks exchange a failure and continue without registration, so it aborts nothing. */
static PyObject *leave(sw_py_owner *self, sw_status status, const sw_error *err)
{
    sw_py_device_leave(self->comm);
    return sw_py_owner_made(self, status, err) < 0 ? NULL : sw_py_none();
}

SW_PY_METHOD(region_register, sw_py_owner, "register | as_window:p",
             sw_py_owner_check(self, "DeviceRegion: it was") && sw_py_device_enter(self->comm),
             sw_device_region_register(self->made, a[0].p, &err), leave(self, status, &err))

/* The region's tensors stay in use, so a failure on this rank aborts the communicator on all ranks:
 * otherwise only some ranks would pass registered memory. */
static PyObject *region_deregister(PyObject *op, PyObject *unused)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_error err;
    sw_status status;
    (void)unused;
    if (!self->made || self->comm->closed)
        Py_RETURN_NONE;
    if (!sw_py_device_enter(self->comm))
        return NULL;
    SW_PY_WITHOUT_GIL(status, sw_device_region_deregister(self->made, &err));
    return sw_py_device_finish(self->comm, status, &err);
}

SW_PY_GETTER(region_get_address, sw_py_owner,
             PyLong_FromVoidPtr(self->made ? sw_device_region_memory(self->made) : NULL))
SW_PY_GETTER(region_get_nbytes, device_region_object, PyLong_FromSize_t(self->nbytes))
SW_PY_GETTER(region_get_registered, sw_py_owner,
             PyBool_FromLong(self->made &&sw_device_region_is_registered(self->made)))
SW_PY_GETTER(region_get_window, sw_py_owner,
             PyBool_FromLong(self->made &&sw_device_region_is_window(self->made)))

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
    {Py_tp_dealloc, sw_py_owner_dealloc},
    {Py_tp_methods, region_methods},
    {Py_tp_getset, region_properties},
    {Py_tp_doc, "DeviceRegion(comm, nbytes, stream)\n--\n\nMemory of NCCL's, for a communicator."},
    {0, NULL},
};

SW_PY_TYPE(sw_py_device_region_type_spec, "DeviceRegion", device_region_object, 0, region_slots)
