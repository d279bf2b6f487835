/* tensor_access.c - finds a torch tensor's data without torch's headers, through DLPack's C
 * exchange table, which torch puts on the tensor type from 2.10 on. With older torch callers fall
 * back to Python. */
#include <string.h>

#include "python/dlpack_abi.h"
#include "python/engine.h"

const void *sw_py_tensor_exchange_table(PyObject *tensor)
{
    PyObject *capsule =
        PyObject_GetAttrString((PyObject *)Py_TYPE(tensor), "__dlpack_c_exchange_api__");
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
    bool empty = false;
    for (int d = 0; d < seen.ndim; ++d)
        empty |= seen.shape[d] == 0;
    if (!seen.data && !empty) /* the tensor has no memory of its own */
        return false;
    *view = (tensor_view){.data = (uint8_t *)seen.data + seen.byte_offset,
                          .ndim = seen.ndim,
                          .device_type = seen.device_type,
                          .code = seen.code,
                          .bits = seen.bits,
                          .shape = seen.shape,
                          .strides = seen.strides};
    return true;
}

/* Maps DLPack's floating dtypes, and bytes, to ours. */
static sw_dtype floating_dtype(uint8_t code, uint8_t bits)
{
    if (code == DL_UINT && bits == 8)
        return SW_DTYPE_UINT8;
    if (code == DL_BFLOAT && bits == 16)
        return SW_DTYPE_BFLOAT16;
    if (code != DL_FLOAT)
        return SW_DTYPE_COUNT;
    return bits == 32   ? SW_DTYPE_FLOAT32
           : bits == 16 ? SW_DTYPE_FLOAT16
           : bits == 64 ? SW_DTYPE_FLOAT64
                        : SW_DTYPE_COUNT;
}

/* Raises "grads[3] must be <wanted>, not <the value of attribute `name`>" in place of what is
 * raised already. Returns false. */
static bool refuse(PyObject *tensor, const char *what, Py_ssize_t index, const char *wanted,
                   const char *name)
{
    PyErr_Clear();
    SW_PY_OWNED *value = PyObject_GetAttrString(tensor, name);
    SW_PY_OWNED *text = value ? PyObject_Str(value) : NULL;
    PyErr_Clear();
    return sw_py_refuse(PyExc_ValueError, "%s[%zd] must be %s, not %V", what, index, wanted, text,
                        "that");
}

/* Copies a tuple of integers, whose reference it takes, to `into`. Returns its length, or -1 with
 * an exception. */
static int read_integers(PyObject *taken, int64_t *into)
{
    SW_PY_OWNED *tuple = taken;
    Py_ssize_t count = tuple ? PySequence_Size(tuple) : -1;
    for (Py_ssize_t i = 0; i < count && i < SW_PY_TENSOR_DIMS_MAX; ++i) {
        SW_PY_OWNED *item = PySequence_GetItem(tuple, i);
        into[i] = item ? (int64_t)PyLong_AsLongLong(item) : -1;
    }
    return PyErr_Occurred() || count > SW_PY_TENSOR_DIMS_MAX ? -1 : (int)count;
}

/* Returns an attribute's text, like "torch.float32", owned by `text`; NULL with an exception. */
static const char *attribute_text(PyObject *object, const char *name, PyObject **text)
{
    SW_PY_OWNED *value = PyObject_GetAttrString(object, name);
    *text = value ? PyObject_Str(value) : NULL;
    return *text ? PyUnicode_AsUTF8AndSize(*text, NULL) : NULL;
}

bool sw_py_tensor_address(PyObject *tensor, void **address)
{
    SW_PY_OWNED *value = sw_py_call(tensor, "data_ptr", NULL, NULL);
    *address = value ? PyLong_AsVoidPtr(value) : NULL;
    return !PyErr_Occurred();
}

static bool read_by_methods(PyObject *tensor, const char *what, Py_ssize_t index, bool anywhere,
                            tensor_reading *out)
{
    PyObject *text = NULL;
    const char *name = attribute_text(tensor, "device", &text);
    bool on_cpu = name && strncmp(name, "cpu", 3) == 0;
    Py_XDECREF(text);
    if (!name)
        return false;
    if (!on_cpu && !anywhere)
        return refuse(tensor, what, index, "on the CPU", "device");
    name = attribute_text(tensor, "dtype", &text);
    out->dtype =
        name && strncmp(name, "torch.", 6) == 0 ? sw_dtype_from_name(name + 6) : SW_DTYPE_COUNT;
    Py_XDECREF(text);
    if (PyErr_Occurred() || !sw_py_tensor_address(tensor, &out->data))
        return refuse(tensor, what, index, "a dense tensor", "layout");
    out->ndim = read_integers(PyObject_GetAttrString(tensor, "shape"), out->own);
    int strides =
        read_integers(sw_py_call(tensor, "stride", NULL, NULL), out->own + SW_PY_TENSOR_DIMS_MAX);
    out->shape = out->own;
    out->strides = out->own + SW_PY_TENSOR_DIMS_MAX;
    return (out->ndim >= 0 && strides == out->ndim) ||
           refuse(tensor, what, index, "a dense tensor", "layout");
}

bool sw_py_tensor_read(const void *table, PyObject *tensor, const char *what, Py_ssize_t index,
                       bool anywhere, tensor_reading *out)
{
    tensor_view view;
    if (sw_py_tensor_view_get(table, tensor, &view) && (anywhere || view.device_type == DL_CPU)) {
        out->data = view.data;
        out->dtype = floating_dtype(view.code, view.bits);
        out->ndim = view.ndim;
        out->shape = view.shape;
        out->strides = view.strides;
    } else if (!read_by_methods(tensor, what, index, anywhere, out)) {
        return false;
    }
    if (out->dtype != SW_DTYPE_FLOAT32 && out->dtype != SW_DTYPE_BFLOAT16 &&
        out->dtype != SW_DTYPE_FLOAT16 && out->dtype != SW_DTYPE_FLOAT64 &&
        out->dtype != SW_DTYPE_UINT8)
        return refuse(tensor, what, index, "float32, bfloat16 or float16", "dtype");
    out->numel = 1;
    for (int d = 0; d < out->ndim; ++d)
        out->numel *= (size_t)out->shape[d];
    if (!out->data && out->numel > 0) /* a wrapper subclass, or freed storage */
        return refuse(tensor, what, index, "a tensor with memory of its own", "__class__");
    return true;
}

bool sw_py_tensor_same_shape(const tensor_reading *a, const tensor_reading *b)
{
    return a->ndim == b->ndim &&
           memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0;
}

bool sw_py_tensor_same_strides(const tensor_reading *a, const tensor_reading *b)
{
    for (int d = 0; d < a->ndim && a->numel > 0; ++d)
        if (a->shape[d] > 1 && a->strides[d] != b->strides[d])
            return false;
    return true;
}

bool sw_py_tensor_is_dense(const tensor_reading *a)
{
    int64_t expected = 1;
    int left = 0;
    for (int d = 0; d < a->ndim; ++d)
        left += a->shape[d] > 1;
    if (a->numel == 0)
        return true;
    for (; left > 0; --left) { /* find the next outer dimension */
        int found = a->ndim - 1;
        while (found >= 0 && (a->shape[found] <= 1 || a->strides[found] != expected))
            --found;
        if (found < 0)
            return false;
        expected *= a->shape[found];
    }
    return true;
}
