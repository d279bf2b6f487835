/* device_offload_type.c - shardwright._engine.DeviceOffload: buffers of an optimizer whose state is
 * in host memory while parameters are on a GPU. adam_step and sgd_step (optim_module.c) do the
 * step. */
#include "python/device_object.h"

static int offload_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"comm", "slot_bytes", "thread_count", NULL};
    device_offload_object *self = (device_offload_object *)op;
    PyObject *comm;
    Py_ssize_t slot_bytes;
    int thread_count;
    sw_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oni:DeviceOffload", names, &comm, &slot_bytes,
                                     &thread_count))
        return -1;
    if (self->comm || !PyObject_TypeCheck(comm, sw_py_state_of(op)->device_comm_type)) {
        PyErr_SetString(PyExc_TypeError, "DeviceOffload: comm must be a DeviceComm, and a "
                                         "DeviceOffload is initialised once");
        return -1;
    }
    if (slot_bytes < 0) {
        PyErr_Format(PyExc_ValueError, "DeviceOffload: slot_bytes must be positive, got %zd",
                     slot_bytes);
        return -1;
    }
    Py_INCREF(comm);
    self->comm = (device_comm_object *)comm;
    if (!sw_py_device_enter(self->comm))
        return -1;
    sw_status status;
    SW_PY_WITHOUT_GIL(status, sw_device_offload_create(self->comm->comm, (size_t)slot_bytes,
                                                       thread_count, &self->offload, &err));
    PyObject *done = sw_py_device_finish(self->comm, status, &err);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static void destroy(void *offload)
{
    sw_device_offload_destroy(offload);
}

/* A forked child frees nothing: its driver calls would fail, and the memory belongs to the parent.
 */
static void offload_dealloc(PyObject *op)
{
    device_offload_object *self = (device_offload_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->offload && sw_py_device_is_own(self->comm))
        sw_py_device_destroy(self->comm, destroy, self->offload);
    Py_XDECREF(self->comm);
    PyObject_Free(op);
    Py_DECREF(type);
}

static PyObject *offload_stats(PyObject *op, PyObject *unused)
{
    const device_offload_object *self = (device_offload_object *)op;
    (void)unused;
    if (!self->offload)
        return PyDict_New();
    sw_device_offload_stats stats = sw_device_offload_get_stats(self->offload);
    return Py_BuildValue("{s:K,s:K,s:K}", "batches", (unsigned long long)stats.batches,
                         "bytes_down", (unsigned long long)stats.bytes_down, "bytes_up",
                         (unsigned long long)stats.bytes_up);
}

static PyObject *get_buffer_nbytes(PyObject *op, void *unused)
{
    const device_offload_object *self = (device_offload_object *)op;
    (void)unused;
    return PyLong_FromSize_t(self->offload ? sw_device_offload_pinned_bytes(self->offload) : 0);
}

static PyObject *get_thread_count(PyObject *op, void *unused)
{
    const device_offload_object *self = (device_offload_object *)op;
    (void)unused;
    return PyLong_FromLong(self->offload ? sw_device_offload_thread_count(self->offload) : 0);
}

static PyMethodDef offload_methods[] = {
    {"stats", offload_stats, METH_NOARGS,
     "stats($self, /)\n--\n\nReturn the batches stepped on and the bytes each way since creation."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef offload_properties[] = {
    {"buffer_nbytes", get_buffer_nbytes, NULL, "bytes of pinned memory that steps use", NULL},
    {"thread_count", get_thread_count, NULL, "number of threads that step, the caller's included",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot offload_slots[] = {
    {Py_tp_init, offload_init},
    {Py_tp_dealloc, offload_dealloc},
    {Py_tp_methods, offload_methods},
    {Py_tp_getset, offload_properties},
    {Py_tp_doc, "Steps on the host, in batches through pinned memory, for parameters on a GPU."},
    {0, NULL},
};

PyType_Spec sw_py_device_offload_type_spec = {
    .name = "shardwright._engine.DeviceOffload",
    .basicsize = sizeof(device_offload_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = offload_slots,
};
