/* comm_waits.c - what a HostComm tells of waits: when one is logged, and which rank has died. */
#include "comm/wait.h"
#include "python/arguments.h"
#include "python/engine.h"

bool sw_py_read_warn_after(double seconds, _Atomic int64_t *warn_after_ns)
{
    bool is_legal = seconds >= 0 && seconds <= 1e9;
    if (is_legal)
        *warn_after_ns = (int64_t)(seconds * 1e9);
    else
        PyErr_SetString(PyExc_ValueError, "HostComm: warn_after_s must be in [0, 1e9] seconds");
    return is_legal;
}

PyObject *sw_py_comm_get_waits(PyObject *op, void *unused)
{
    const comm_object *self = (comm_object *)op;
    (void)unused;
    return PyFloat_FromDouble(self->comm ? (double)self->comm->warn_after_ns * 1e-9 : 0);
}

int sw_py_comm_set_waits(PyObject *op, PyObject *value, void *unused)
{
    sw_comm *comm = ((comm_object *)op)->comm;
    double seconds = value ? PyFloat_AsDouble(value) : 0;
    (void)unused;
    if (!PyErr_Occurred() && !comm)
        PyErr_SetString(PyExc_ValueError, "HostComm: warn_after_s is of an open communicator");
    return !PyErr_Occurred() && sw_py_read_warn_after(seconds, &comm->warn_after_ns) ? 0 : -1;
}

PyObject *sw_py_comm_get_dead(PyObject *op, void *unused)
{
    const comm_object *self = (comm_object *)op;
    (void)unused;
    int rank = -1;
    if (sw_py_use_is_own(&self->use) && self->comm && !self->closed && self->connected &&
        self->comm->ops->dead)
        rank = self->comm->ops->dead(self->comm);
    if (rank < 0)
        Py_RETURN_NONE;
    return PyLong_FromLong(rank);
}

PyObject *sw_py_comm_peer(PyObject *op, PyObject *args)
{
    const comm_object *self = (comm_object *)op;
    sw_wait_text text = {.rank = -1};
    sw_py_arg a[1];
    if (!sw_py_read("peer rank:i", args, NULL, a))
        return NULL;
    int rank = a[0].i;
    if (rank < 0 || rank >= self->world_size)
        return PyErr_Format(PyExc_ValueError, "peer: rank must be in [0, %d), got %d",
                            self->world_size, rank);
    if (!sw_py_use_is_own(&self->use) || !self->comm || self->closed || !self->connected)
        return PyUnicode_FromFormat("rank %d", rank);
    (void)sw_wait_add_missing(&text, self->comm, rank);
    return sw_py_text(text.missing);
}
