/* device_object.h - the DeviceComm object, shared by its type and those of what is made with it;
 * and the DeviceOffload object, which optimizers step through.
 *
 * Thread rule: with the GIL held.
 */
#ifndef SW_PYTHON_DEVICE_OBJECT_H
#define SW_PYTHON_DEVICE_OBJECT_H

#include "comm/device_norm.h"
#include "python/engine.h"
#include "zero/device_offload.h"

/* A thread that is inside a call has given the GIL away, as a rule. */
typedef enum device_use {
    DEVICE_FREE = 0,
    DEVICE_USED,    /* by the program's thread */
    DEVICE_WATCHED, /* by one that looks after it or ends it, which is soon out */
} device_use;

typedef struct device_comm_object {
    PyObject_HEAD sw_device_comm *comm; /* owned; NULL before init */
    PyObject *arena;                    /* owned: the slots to the peers; NULL: none */
    comm_object *host;                  /* owned, and acquired; NULL: none */
    PyObject *make_room;                /* owned: called where GPU memory is short; NULL: none */
    struct device_comm_object *beside;  /* owned: its stream is used, and its user may use this one,
                                           too; NULL: a stream of its own */
    long owner_pid;
    device_use use;
    unsigned long user; /* the thread that is inside */
    int enders;         /* threads that end it beside that one */
    bool closed;
} device_comm_object;

typedef struct device_offload_object {
    PyObject_HEAD device_comm_object *comm; /* owned */
    sw_device_offload *offload;             /* owned; NULL before init */
} device_offload_object;

/* Marks it as in use by this thread; false with an exception when it is not connected, closed, used
 * by another thread, or inherited by a forked child. */
bool sw_py_device_enter(device_comm_object *self);
void sw_py_device_leave(device_comm_object *self);
/* For its kernels alone, which need no peers and which any number of threads may launch at once,
 * each on its own stream: not marked as in use. The caller holds a reference meanwhile. false with
 * an exception when it is inherited by a forked child. */
bool sw_py_device_lend_kernels(device_comm_object *self);

/* status = expression, without the GIL: a call that enqueues blocks while the driver's queue is
 * full, until the GPU goes on or another thread lets it. */
#define SW_PY_WITHOUT_GIL(status, expression) \
    do {                                      \
        Py_BEGIN_ALLOW_THREADS(status)        \
        = (expression);                       \
        Py_END_ALLOW_THREADS                  \
    } while (0)

/* The parts of it. The thread that looks after the communicator is out of it at once, unless a call
 * of the driver's does not return; false with an exception: interrupted, or too late. A forked
 * child waits for no thread: its next call is refused. */
bool sw_py_device_wait_for_watch(device_comm_object *self);
void sw_py_device_take(device_comm_object *self, device_use use);

/* destroy(made) of what was made with it, without the GIL, and when no other thread is inside, if
 * that is soon. From a destructor: no exception comes of it, none is lost. */
typedef void sw_py_destroy_fn(void *made);
void sw_py_device_destroy(device_comm_object *self, sw_py_destroy_fn *destroy, void *made);
/* The first part of it, before sw_py_device_leave: false where this thread is inside, or another
 * for long. */
bool sw_py_device_enter_to_destroy(device_comm_object *self);
/* The same where no thread can be inside. */
void sw_py_destroy_quietly(sw_py_destroy_fn *destroy, void *made);

/* Whether this process opened it, not one that it was forked from. */
bool sw_py_device_is_own(const device_comm_object *self);

/* Sets the exception of `err`. What the driver has refused this rank alone ends the communicator,
 * for all. This thread is inside. */
void sw_py_device_raise(device_comm_object *self, const sw_error *err);
/* Leaves; None, or NULL with the exception of `err`. */
PyObject *sw_py_device_finish(device_comm_object *self, sw_status status, const sw_error *err);

/* A stream as torch gives it: its address as an integer. false with an exception. */
bool sw_py_device_stream(PyObject *value, sw_stream **stream);

/* device_table.c. One row of a table; false with an exception. */
typedef bool sw_py_row_fn(PyObject *row, void *out);

/* Owned array of `row_bytes` a tuple of the list; NULL with an exception. */
void *sw_py_device_table(PyObject *list, sw_py_row_fn *read, size_t row_bytes);

static inline void *sw_py_address(unsigned long long address)
{
    return (void *)(uintptr_t)address;
}

#endif
