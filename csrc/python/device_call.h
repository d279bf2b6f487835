/* device_call.h - how a method of a DeviceComm, or a function whose first argument is one, is
 * written if it enqueues work for a list of rows, or checks more than an expression can.
 *
 * Thread rule: with the GIL held. */
#ifndef SW_PYTHON_DEVICE_CALL_H
#define SW_PYTHON_DEVICE_CALL_H

#include "python/device_object.h"
#include "python/method.h"

/* Runs without the GIL, inside the communicator. `rows` is empty if the call has no list. */
typedef sw_status sw_py_device_fn(sw_device_comm *comm, const sw_py_arg *a, const sw_py_table *rows,
                                  sw_error *err);

typedef struct sw_py_device_call {
    const char *signature; /* of a function: begins with "comm:O" */
    sw_py_device_fn *run;
    int list;        /* which argument is the list */
    const char *row; /* the signature of its rows; NULL: no list */
    size_t row_bytes;
    sw_py_row_fn *fill;
} sw_py_device_call;

/* Reads the arguments, enters the communicator, runs, leaves. Returns None, or NULL with an
 * exception. */
PyObject *sw_py_device_run(PyObject *op, PyObject *args, const sw_py_device_call *call);

/* Defines a function (op, args) of that form; the second one for a call with rows of C's `type`. */
#define SW_PY_ON_DEVICE(function, signature_, run_)                                       \
    static PyObject *function(PyObject *op, PyObject *args)                               \
    {                                                                                     \
        static const sw_py_device_call call = {.signature = (signature_), .run = (run_)}; \
        return sw_py_device_run(op, args, &call);                                         \
    }
#define SW_PY_ON_ROWS(function, signature_, run_, list_, row_, type, fill_) \
    static PyObject *function(PyObject *op, PyObject *args)                 \
    {                                                                       \
        static const sw_py_device_call call = {.signature = (signature_),   \
                                               .run = (run_),               \
                                               .list = (list_),             \
                                               .row = (row_),               \
                                               .row_bytes = sizeof(type),   \
                                               .fill = (fill_)};            \
        return sw_py_device_run(op, args, &call);                           \
    }

/* Returns the DeviceComm that `object` is, or NULL with an exception. */
device_comm_object *sw_py_device_comm_of(engine_state *state, PyObject *object);

#endif
