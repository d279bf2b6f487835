/* device_stage_type.c - shardwright._engine.DeviceStage: the buffers through which a
 * CheckpointSaver copies GPU memory to the host. */
#include "checkpoint/device_stage.h"
#include "python/method.h"
#include "python/owner.h"

SW_PY_DESTROY(destroy, sw_device_stage_destroy)

static int stage_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[3] = {{0}};
    sw_device_stage *made = NULL;
    sw_error err;
    if (!sw_py_read("DeviceStage ordinal:i slot_bytes:N | libcuda:z", args, kwargs, a) ||
        !sw_py_use_make(&self->use, "DeviceStage"))
        return -1;
    self->is_the_parents = true;
    sw_status status =
        SW_PY_WITHOUT_GIL(sw_device_stage_create(a[2].s, a[0].i, a[1].size, &made, &err));
    return sw_py_owner_made(self, made, destroy, status, &err);
}

static PyObject *stage_stats(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const sw_py_owner *self = (sw_py_owner *)op;
    if (!self->made)
        return PyDict_New();
    sw_device_stage_stats stats = sw_device_stage_get_stats(self->made);
    return Py_BuildValue("{s:K,s:K,s:K,s:n}", "batches", (unsigned long long)stats.batches,
                         "bytes_down", (unsigned long long)stats.bytes_down, "host_waits",
                         (unsigned long long)stats.host_waits, "pinned_bytes",
                         (Py_ssize_t)sw_device_stage_pinned_bytes(self->made));
}

static PyMethodDef stage_methods[] = {
    SW_PY_NONE(stage, stats, "Return batches, bytes_down and host_waits so far, and pinned_bytes."),
    {NULL, NULL, 0, NULL},
};

SW_PY_TYPE(sw_py_device_stage_type_spec, "DeviceStage", sw_py_owner, 0,
           "DeviceStage(ordinal, slot_bytes, libcuda=None)\n--\n\nSlots of pinned memory between a "
           "GPU and a checkpoint.",
           {Py_tp_init, stage_init}, {Py_tp_dealloc, sw_py_owner_dealloc},
           {Py_tp_methods, stage_methods})
