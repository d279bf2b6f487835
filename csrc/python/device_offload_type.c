/* device_offload_type.c - shardwright._engine.DeviceOffload: buffers of an optimizer whose state is
 * in host memory while parameters are on a GPU. adam_step and sgd_step (optim_module.c) do the
 * step. */
#include "python/method.h"
#include "python/owner.h"
#include "zero/device_offload.h"

SW_PY_DESTROY(destroy, sw_device_offload_destroy)

static int offload_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[3];
    sw_device_offload *made = NULL;
    sw_error err;
    if (!sw_py_read("DeviceOffload comm:O slot_bytes:N thread_count:i", args, kwargs, a) ||
        !sw_py_owner_bind(self, a[0].o, "DeviceOffload") || !sw_py_device_enter(self->comm))
        return -1;
    sw_status status = SW_PY_WITHOUT_GIL(
        sw_device_offload_create(self->comm->comm, a[1].size, a[2].i, &made, &err));
    return sw_py_owner_made(self, made, destroy, status, &err);
}

SW_PY_OWNER_STATS(offload_stats, sw_device_offload_stats, sw_device_offload_get_stats,
                  SW_PY_COUNT(sw_device_offload_stats, batches),
                  SW_PY_COUNT(sw_device_offload_stats, bytes_down),
                  SW_PY_COUNT(sw_device_offload_stats, bytes_up))
SW_PY_GETTER(get_buffer_nbytes, sw_py_owner,
             PyLong_FromSize_t(self->made ? sw_device_offload_pinned_bytes(self->made) : 0))
SW_PY_GETTER(get_thread_count, sw_py_owner,
             PyLong_FromLong(self->made ? sw_device_offload_thread_count(self->made) : 0))

static PyMethodDef offload_methods[] = {
    SW_PY_NONE(offload, stats, "Return batches stepped on and the bytes each way since creation."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef offload_properties[] = {
    {"buffer_nbytes", get_buffer_nbytes, NULL, "bytes of pinned memory that steps use", NULL},
    {"thread_count", get_thread_count, NULL, "number of threads that step, the caller's included",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_device_offload_type_spec, "DeviceOffload", sw_py_owner, 0,
           "Steps on the host, in batches through pinned memory, for parameters on a GPU.",
           {Py_tp_init, offload_init}, {Py_tp_dealloc, sw_py_owner_dealloc},
           {Py_tp_methods, offload_methods}, {Py_tp_getset, offload_properties})
