/* device_home_type.c - shardwright._engine.DeviceHome: pinned host memory that a GPU uses as its
 * own (zero/device_home.h). */
#include <stdlib.h>

#include "python/method.h"
#include "python/owner.h"
#include "zero/device_home.h"

typedef struct device_home_object {
    sw_py_owner owner; /* of a made_home */
    PyObject *stream;  /* owned callable */
} device_home_object;

typedef struct made_home {
    sw_device_home home;
    sw_stream *user; /* torch's stream as the object ends */
} made_home;

static void destroy(void *given)
{
    made_home *made = given;
    sw_device_home_fini(&made->home, made->user);
    free(made);
}

static int home_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    device_home_object *self = (device_home_object *)op;
    sw_py_arg a[3];
    sw_error err;
    if (!sw_py_read("DeviceHome comm:O nbytes:N stream:O", args, kwargs, a) ||
        !sw_py_owner_bind(&self->owner, a[0].o, "DeviceHome"))
        return -1;
    sw_py_set(&self->stream, a[2].o);
    made_home *made = calloc(1, sizeof *made);
    if (!made || !sw_py_device_enter(self->owner.comm)) {
        if (!made)
            PyErr_NoMemory();
        free(made);
        return -1;
    }
    sw_status status = SW_PY_WITHOUT_GIL(
        sw_device_home_init(&made->home, self->owner.comm->comm, a[1].size, &err));
    return sw_py_owner_made(&self->owner, made, destroy, status, &err);
}

static void home_dealloc(PyObject *op)
{
    device_home_object *self = (device_home_object *)op;
    SW_PY_OWNED *stream = self->stream;
    made_home *made = self->owner.made;
    if (made && sw_py_use_is_own(&self->owner.comm->use)) {
        SW_PY_ASIDE(pending); /* of the code that dropped the last reference */
        SW_PY_OWNED *value = PyObject_CallNoArgs(stream);
        made->user = value ? PyLong_AsVoidPtr(value) : NULL;
        PyErr_Clear();
    }
    sw_py_owner_dealloc(op);
}

SW_PY_GETTER(get_address, sw_py_owner,
             PyLong_FromVoidPtr(self->made ? ((made_home *)self->made)->home.memory : NULL))

static PyGetSetDef home_properties[] = {
    {"address", get_address, NULL, "address of the first byte", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_device_home_type_spec, "DeviceHome", device_home_object, 0,
           "Zeroed pinned memory of the host that a GPU uses as its own. stream: returns torch's "
           "current stream, whose work on the memory ends before it is freed.",
           {Py_tp_init, home_init}, {Py_tp_dealloc, home_dealloc}, {Py_tp_getset, home_properties})
