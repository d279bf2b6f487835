/* device_call.c - see the header. */
#include "python/device_call.h"

device_comm_object *sw_py_device_comm_of(engine_state *state, PyObject *object)
{
    if (PyObject_TypeCheck(object, state->device_comm_type))
        return (device_comm_object *)object;
    PyErr_Format(PyExc_TypeError, "comm must be a DeviceComm, got %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

PyObject *sw_py_device_run(PyObject *op, PyObject *args, const sw_py_device_call *call)
{
    sw_py_arg a[SW_PY_ARGS_MAX] = {{0}};
    sw_py_table rows = {0};
    sw_error err = {0};
    PyObject *done = NULL;
    if (!sw_py_read(call->signature, args, NULL, a))
        return NULL;
    device_comm_object *comm = PyModule_Check(op)
                                   ? sw_py_device_comm_of(PyModule_GetState(op), a[0].o)
                                   : (device_comm_object *)op;
    if (comm &&
        (!call->row ||
         sw_py_table_init(&rows, a[call->list].o, call->row, call->row_bytes, call->fill, NULL)) &&
        sw_py_device_enter(comm)) {
        sw_status status = SW_PY_WITHOUT_GIL(call->run(comm->comm, a, &rows, &err));
        done = sw_py_device_finish(comm, status, &err);
    }
    sw_py_table_fini(&rows);
    return done;
}
