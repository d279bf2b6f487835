/* tensor_access.c - where a torch tensor's data lies, without torch's headers: DLPack's C exchange table, which
 * torch puts on the tensor type from 2.10 on. Older torch has none, and callers fall back to Python. */
#include <string.h>

#include "python/engine.h"

typedef struct dl_tensor { /* dmlc/dlpack, dlpack.h: DLTensor */
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct exchange_table { /* dmlc/dlpack, dlpack.h: DLPackExchangeAPI, major version 1 */
    uint32_t major, minor;
    const struct exchange_table *previous;
    void *managed_tensor_allocator;
    void *managed_tensor_from_py_object_no_sync;
    void *managed_tensor_to_py_object_no_sync;
    int (*dltensor_from_py_object_no_sync)(void *object, dl_tensor *out);
    void *current_work_stream;
} exchange_table;

const void *sw_py_tensor_exchange_table(PyObject *tensor)
{
    PyObject *capsule = PyObject_GetAttrString((PyObject *)Py_TYPE(tensor), "__dlpack_c_exchange_api__");
    const exchange_table *table = NULL;
    if (capsule && PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule); /* the table is static in torch */
    PyErr_Clear();
    while (table && table->major > 1)
        table = table->previous;
    return table && table->major == 1 && table->dltensor_from_py_object_no_sync ? table : NULL;
}

bool sw_py_tensor_view_get(const void *table, PyObject *tensor, tensor_view *view)
{
    dl_tensor seen;
    if (!table)
        return false;
    if (((const exchange_table *)table)->dltensor_from_py_object_no_sync(tensor, &seen) != 0) {
        PyErr_Clear();
        return false;
    }
    *view = (tensor_view){.data = (uint8_t *)seen.data + seen.byte_offset,
                          .ndim = seen.ndim,
                          .device_type = seen.device_type,
                          .code = seen.code,
                          .bits = seen.bits,
                          .shape = seen.shape,
                          .strides = seen.strides};
    return true;
}
