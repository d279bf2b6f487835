/* owner.h - an object that owns one thing of the engine: made once, destroyed with the object, in
 * the process that made it.
 *
 * Thread rule: with the GIL held. */
#pragma once

#include "python/device_object.h"

typedef struct sw_py_owner {
    PyObject_HEAD void *made;  /* owned; NULL before init */
    sw_py_destroy_fn *destroy; /* of `made` */
    sw_py_destroy_fn *drop;    /* in its place while another thread stays inside `comm`; or NULL */
    device_comm_object *comm; /* owned: the GPU's communicator it was made from; NULL on the host */
    PyObject *kept[2];        /* owned: what `made` borrows from, or NULL */
    bool is_the_parents;      /* a forked child frees nothing of it */
    sw_py_use use;
} sw_py_owner;

/* Begins __init__ of an object that is made from a DeviceComm. Returns false with an exception that
 * begins with the type's name. */
bool sw_py_owner_bind(sw_py_owner *self, PyObject *comm, const char *type_name);
void sw_py_owner_keep(sw_py_owner *self, int place, PyObject *value);
void sw_py_owner_dealloc(PyObject *op);
/* Returns false with an exception if __init__ has not made it. */
bool sw_py_owner_check(const sw_py_owner *self, const char *what);
/* Ends __init__ with what it made, or NULL: returns 0, or -1 with the exception of `err`. It leaves
 * the communicator, which an object that is made from one has entered. */
int sw_py_owner_made(sw_py_owner *self, void *made, sw_py_destroy_fn *destroy, sw_status status,
                     const sw_error *err);

/* Defines stats(): a dict of counts, empty before __init__. */
#define SW_PY_OWNER_STATS(function, type, get, ...)                          \
    static PyObject *function(PyObject *op, PyObject *Py_UNUSED(unused))     \
    {                                                                        \
        static const sw_py_count counts[] = {__VA_ARGS__};                   \
        const sw_py_owner *self = (sw_py_owner *)op;                         \
        if (!self->made)                                                     \
            return PyDict_New();                                             \
        const type stats = get(self->made);                                  \
        return sw_py_counts(&stats, counts, sizeof counts / sizeof *counts); \
    }
