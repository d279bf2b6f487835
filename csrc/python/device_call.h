/* device_call.h - how a method of a DeviceComm, or a function whose first argument is one, is
 * written: SW_PY_METHOD's form (method.h), in which `comm` is the sw_device_comm, entered. The
 * second one has a list of rows.
 *
 * Thread rule: with the GIL held. */
#ifndef SW_PYTHON_DEVICE_CALL_H
#define SW_PYTHON_DEVICE_CALL_H

#include "python/device_object.h"
#include "python/method.h"

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

#endif
