/* device_object.h - the DeviceComm object, shared by its type and the types of objects made from
 * it.
 *
 * Thread rule: with the GIL held. */
#pragma once

#include "comm/device_norm.h"
#include "python/method.h"

typedef struct device_comm_object {
    PyObject_HEAD sw_device_comm *comm; /* owned; NULL before init */
    PyObject *arena;                    /* owned: the slots shared with peers, or NULL */
    comm_object *host;                  /* owned, and acquired; or NULL */
    PyObject *make_room;                /* owned: called when GPU memory is short, or NULL */
    struct device_comm_object *beside;  /* owned: the communicator whose stream it uses. A thread
                                           inside that one may use this one. NULL: an own stream */
    sw_py_use use;
    int enders; /* threads that abort it beside the one inside */
    bool closed;
} device_comm_object;

/* Marks the communicator as in use by this thread, once other threads have left it. Returns false
 * with an exception if it is not connected, closed, still in use at the deadline, or inherited by a
 * forked child. */
bool sw_py_device_enter(device_comm_object *self);
void sw_py_device_leave(device_comm_object *self);
/* Returns true if it is connected, open and without a failure. */
bool sw_py_device_is_alive(const device_comm_object *self);
/* Checks that the caller may launch kernels. Launches need no peers, and any number of threads may
 * launch at once, each on its own stream, so the communicator is not marked as in use. The caller
 * holds a reference meanwhile. Returns false with an exception if a forked child inherited the
 * communicator. */
bool sw_py_device_lend_kernels(device_comm_object *self);

/* The two steps of sw_py_device_enter(). wait_for_watch waits for the watch thread, which leaves at
 * once unless a driver call does not return; wait_for_others also for calls of other threads. Both
 * return false with an exception if a signal or the deadline ends the wait. A forked child does not
 * wait; its next call is refused. */
bool sw_py_device_wait_for_watch(device_comm_object *self);
bool sw_py_device_wait_for_others(device_comm_object *self);
void sw_py_device_take(device_comm_object *self, sw_py_use_kind kind);

/* Calls destroy(made) for an object made from the communicator, without the GIL, once no other
 * thread is inside. If this thread is, or another stays inside for long, calls drop(made), or
 * destroy where that is NULL. For destructors: it raises no exception and keeps the current one. */
typedef void sw_py_destroy_fn(void *made);
void sw_py_device_destroy(device_comm_object *self, sw_py_destroy_fn *destroy,
                          sw_py_destroy_fn *drop, void *made);
/* Does the same when no thread can be inside. */
void sw_py_destroy_quietly(sw_py_destroy_fn *destroy, void *made);
/* Defines a sw_py_destroy_fn that calls `call`. */
#define SW_PY_DESTROY(function, call) \
    static void function(void *made)  \
    {                                 \
        call(made);                   \
    }

/* Sets the exception of `err`. An error of the driver on this rank aborts the communicator on all
 * ranks. This thread is inside. */
void sw_py_device_raise(device_comm_object *self, const sw_error *err);
/* Leaves the communicator. Returns None, or NULL with the exception of `err`. */
PyObject *sw_py_device_finish(device_comm_object *self, sw_status status, const sw_error *err);

/* Returns the DeviceComm that is `op` or, if that is the module, `first`; NULL with an exception.
 */
device_comm_object *sw_py_device_comm_of(PyObject *op, PyObject *first);

/* How a method of a DeviceComm, or a function whose first argument is one, is written: in
 * SW_PY_METHOD's form, in which `comm` is the sw_device_comm, entered. The second one has a list of
 * rows. */
#define SW_PY_ON_DEVICE(function, signature, call)                                         \
    SW_PY_METHOD_WITH(function, PyObject, signature, SW_PY_DEVICE_LOCALS, SW_PY_ENTER_GPU, \
                      (comm = gpu->comm, call), sw_py_device_finish(gpu, status, &err))
#define SW_PY_ON_ROWS(function, signature, list, row, type, fill, call)                       \
    SW_PY_METHOD_ON_ROWS(function, PyObject, signature, SW_PY_DEVICE_LOCALS, list, row, type, \
                         fill, SW_PY_ENTER_GPU, (comm = gpu->comm, call),                     \
                         sw_py_device_finish(gpu, status, &err))

#define SW_PY_DEVICE_LOCALS  \
    device_comm_object *gpu; \
    sw_device_comm *comm
#define SW_PY_ENTER_GPU (gpu = sw_py_device_comm_of(op, a[0].o)) && sw_py_device_enter(gpu)
