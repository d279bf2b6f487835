/* owner.c - see the header. */
#include "python/owner.h"

#include "python/method.h"

bool sw_py_owner_bind(sw_py_owner *self, PyObject *comm, const char *type_name)
{
    PyTypeObject *wanted = sw_py_state_of(self)->device_comm_type;
    if (!PyObject_TypeCheck(comm, wanted))
        return sw_py_refuse(PyExc_TypeError, "%s: comm must be a DeviceComm, got %R", type_name,
                            (PyObject *)Py_TYPE(comm));
    if (!sw_py_use_make(&self->use, type_name))
        return false;
    Py_INCREF(comm);
    self->comm = (device_comm_object *)comm;
    return true;
}

void sw_py_owner_keep(sw_py_owner *self, int place, PyObject *value)
{
    Py_INCREF(value);
    self->kept[place] = value;
}

bool sw_py_owner_check(const sw_py_owner *self, const char *what)
{
    return self->made || sw_py_refuse(sw_py_state_of(self)->error, "%s not initialised", what);
}

int sw_py_owner_made(sw_py_owner *self, void *made, sw_py_destroy_fn *destroy, sw_status status,
                     const sw_error *err)
{
    self->made = made;
    self->destroy = destroy;
    SW_PY_OWNED *done =
        self->comm ? sw_py_device_finish(self->comm, status, err) : sw_py_finish(self, status, err);
    return done ? 0 : -1;
}

/* A forked child's driver calls would fail, and the memory belongs to the parent. */
void sw_py_owner_dealloc(PyObject *op)
{
    sw_py_owner *self = (sw_py_owner *)op;
    if (self->made && self->comm && sw_py_use_is_own(&self->comm->use))
        sw_py_device_destroy(self->comm, self->destroy, self->drop, self->made);
    else if (self->made && !self->comm && (!self->is_the_parents || sw_py_use_is_own(&self->use)))
        sw_py_destroy_quietly(self->destroy, self->made);
    Py_XDECREF(self->comm);
    Py_XDECREF(self->kept[0]);
    Py_XDECREF(self->kept[1]);
    sw_py_free(op);
}

PyObject *sw_py_counts(const void *stats, const sw_py_count *counts, size_t count)
{
    PyObject *made = PyDict_New();
    for (size_t i = 0; made && i < count; ++i) {
        const void *at = (const char *)stats + counts[i].offset;
        uint64_t value = __atomic_load_n((const uint64_t *)at, __ATOMIC_RELAXED);
        PyObject *number = PyLong_FromUnsignedLongLong(value);
        if (!number || PyDict_SetItemString(made, counts[i].name, number) < 0)
            ENGINE_CLEAR(made);
        Py_XDECREF(number);
    }
    return made;
}
