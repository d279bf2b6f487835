/* device_stage_type.c - shardwright._engine.DeviceStage: the buffers through which a
 * CheckpointSaver copies GPU memory to the host. */
#include "python/device_stage_object.h"

#include <unistd.h>

static int stage_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ordinal", "slot_bytes", "libcuda", NULL};
    device_stage_object *self = (device_stage_object *)op;
    int ordinal;
    Py_ssize_t slot_bytes;
    const char *library = NULL;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "in|z:DeviceStage", names, &ordinal, &slot_bytes,
                                     &library))
        return -1;
    if (self->stage || slot_bytes < 0) {
        PyErr_Format(PyExc_ValueError,
                     "DeviceStage: slot_bytes must be positive, got %zd, and a DeviceStage is "
                     "initialised once",
                     slot_bytes);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_stage_create(library, ordinal, (size_t)slot_bytes, &self->stage, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK) {
        sw_py_raise(sw_py_state_of(op), &err, NULL);
        return -1;
    }
    self->owner_pid = getpid();
    return 0;
}

/* A forked child frees nothing: its driver calls would fail, and the memory belongs to the parent.
 */
static void stage_dealloc(PyObject *op)
{
    device_stage_object *self = (device_stage_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->stage && getpid() == self->owner_pid) {
        Py_BEGIN_ALLOW_THREADS
        sw_device_stage_destroy(self->stage);
        Py_END_ALLOW_THREADS
    }
    PyObject_Free(op);
    Py_DECREF(type);
}

static PyObject *stage_stats(PyObject *op, PyObject *unused)
{
    const device_stage_object *self = (device_stage_object *)op;
    (void)unused;
    if (!self->stage)
        return PyDict_New();
    sw_device_stage_stats stats = sw_device_stage_get_stats(self->stage);
    return Py_BuildValue("{s:K,s:K,s:K,s:n}", "batches", (unsigned long long)stats.batches,
                         "bytes_down", (unsigned long long)stats.bytes_down, "host_waits",
                         (unsigned long long)stats.host_waits, "pinned_bytes",
                         (Py_ssize_t)sw_device_stage_pinned_bytes(self->stage));
}

static PyMethodDef stage_methods[] = {
    {"stats", stage_stats, METH_NOARGS,
     "stats($self, /)\n--\n\n"
     "Return batches, bytes_down and host_waits since creation, and pinned_bytes held."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot stage_slots[] = {
    {Py_tp_init, stage_init},
    {Py_tp_dealloc, stage_dealloc},
    {Py_tp_methods, stage_methods},
    {Py_tp_doc, "DeviceStage(ordinal, slot_bytes, libcuda=None)\n--\n\nSlots of pinned memory "
                "between a GPU and a checkpoint."},
    {0, NULL},
};

PyType_Spec sw_py_device_stage_type_spec = {
    .name = "shardwright._engine.DeviceStage",
    .basicsize = sizeof(device_stage_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = stage_slots,
};
