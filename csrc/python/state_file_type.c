/* state_file_type.c - shardwright._engine.StateFile: optimizer state in a file, mapped as tensors.
 *
 * A tensor over the file keeps an owner that the caller chose alive, and the owner keeps the
 * StateFile alive: the mapping lives as long as the last tensor. */
#include "python/engine.h"

static int state_file_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"folder", "label", "buffer_bytes", NULL};
    state_file_object *self = (state_file_object *)op;
    PyObject *folder = NULL;
    const char *label;
    Py_ssize_t buffer_bytes;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&sn:StateFile", names, PyUnicode_FSConverter,
                                     &folder, &label, &buffer_bytes))
        return -1;
    if (buffer_bytes < 0)
        PyErr_Format(PyExc_ValueError, "StateFile: buffer_bytes must be at least 0, got %zd",
                     buffer_bytes);
    if (buffer_bytes < 0 || !sw_py_use_make(&self->use, "StateFile")) {
        Py_DECREF(folder);
        return -1;
    }
    const char *path = PyBytes_AsString(folder);
    Py_BEGIN_ALLOW_THREADS
    status = sw_offload_init(&self->offload, path, label, (size_t)buffer_bytes, &err);
    Py_END_ALLOW_THREADS
    Py_DECREF(folder);
    if (status == SW_OK) {
        self->is_open = true;
        return 0;
    }
    sw_py_raise(sw_py_state_of(op), &err, NULL);
    return -1;
}

static void state_file_dealloc(PyObject *op)
{
    state_file_object *self = (state_file_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->is_open)
        sw_offload_fini(&self->offload);
    PyObject_Free(op);
    Py_DECREF(type);
}

static bool enter(state_file_object *self, sw_py_use_kind kind)
{
    if (!self->is_open)
        PyErr_SetString(PyExc_RuntimeError, "StateFile: not made yet");
    return self->is_open &&
           sw_py_use_enter(&self->use, kind, SW_PY_PATIENCE_NS, PyExc_RuntimeError, "StateFile");
}

static PyObject *state_file_grow(PyObject *op, PyObject *size)
{
    state_file_object *self = (state_file_object *)op;
    size_t bytes = PyLong_AsSize_t(size);
    uint8_t *address = NULL;
    sw_error err;
    sw_status status;
    if (PyErr_Occurred() || !enter(self, SW_PY_ALONE))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_state_file_grow(&self->offload.file, bytes, &address, &err);
    Py_END_ALLOW_THREADS
    sw_py_use_leave(&self->use);
    if (status != SW_OK)
        return sw_py_raise(sw_py_state_of(op), &err, NULL);
    return PyLong_FromVoidPtr(address);
}

static bool read_bytes(PyObject *shape, size_t *bytes)
{
    Py_ssize_t count = PySequence_Size(shape);
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PySequence_GetItem(shape, i);
        size_t size = item ? PyLong_AsSize_t(item) : 0;
        Py_XDECREF(item);
        if (PyErr_Occurred())
            return false;
        if (__builtin_mul_overflow(*bytes, size, bytes)) {
            PyErr_SetString(PyExc_ValueError, "StateFile.tensor: shape overflows");
            return false;
        }
    }
    return count >= 0;
}

static PyObject *state_file_tensor(PyObject *op, PyObject *args)
{
    state_file_object *self = (state_file_object *)op;
    unsigned long long address;
    const char *name;
    PyObject *shape, *strides, *owner;
    if (!PyArg_ParseTuple(args, "KsOOO:tensor", &address, &name, &shape, &strides, &owner))
        return NULL;
    sw_dtype dtype = sw_dtype_from_name(name);
    if (dtype == SW_DTYPE_COUNT)
        return PyErr_Format(PyExc_ValueError, "StateFile.tensor: dtype '%s' is not the engine's",
                            name);
    size_t bytes = sw_dtype_size_bytes(dtype);
    void *data = (void *)(uintptr_t)address;
    if (!read_bytes(shape, &bytes) || !enter(self, SW_PY_SHARED))
        return NULL;
    uint64_t place = sw_state_file_locate(&self->offload.file, data, bytes);
    sw_py_use_leave(&self->use);
    if (place == UINT64_MAX)
        return PyErr_Format(PyExc_ValueError, "StateFile.tensor: %zu bytes leave the file", bytes);
    return sw_py_dlpack_capsule_new(owner, data, dtype, shape, strides);
}

static PyObject *state_file_forget(PyObject *op, PyObject *unused)
{
    state_file_object *self = (state_file_object *)op;
    (void)unused;
    if (!enter(self, SW_PY_ALONE))
        return NULL;
    sw_state_file_forget(&self->offload.file);
    sw_py_use_leave(&self->use);
    Py_RETURN_NONE;
}

static PyObject *get_nbytes(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(((state_file_object *)op)->offload.file.size_bytes);
}

static PyObject *get_buffer_nbytes(PyObject *op, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(SW_OFFLOAD_BUFFERS * ((state_file_object *)op)->offload.buffer_bytes);
}

static PyObject *get_direct(PyObject *op, void *unused)
{
    state_file_object *self = (state_file_object *)op;
    (void)unused;
    return PyBool_FromLong(self->is_open && sw_state_file_is_direct(&self->offload.file));
}

static PyMethodDef state_file_methods[] = {
    {"grow", state_file_grow, METH_O,
     "grow($self, nbytes, /)\n--\n\nAppend zeroed bytes to the file; return their address."},
    {"tensor", state_file_tensor, METH_VARARGS,
     "tensor($self, address, dtype, shape, strides, owner, /)\n--\n\n"
     "Return a DLPack capsule that keeps owner alive."},
    {"forget", state_file_forget, METH_NOARGS,
     "forget($self, /)\n--\n\nDrop the file's pages from this process's memory."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef state_file_properties[] = {
    {"nbytes", get_nbytes, NULL, "of the file", NULL},
    {"buffer_nbytes", get_buffer_nbytes, NULL, "bytes of the buffers that a step uses", NULL},
    {"direct", get_direct, NULL, "True if steps bypass the page cache", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot state_file_slots[] = {
    {Py_tp_init, state_file_init},
    {Py_tp_dealloc, state_file_dealloc},
    {Py_tp_methods, state_file_methods},
    {Py_tp_getset, state_file_properties},
    {Py_tp_doc, "Optimizer state in a file without a name, seen as memory."},
    {0, NULL},
};

PyType_Spec sw_py_state_file_type_spec = {
    .name = "shardwright._engine.StateFile",
    .basicsize = sizeof(state_file_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = state_file_slots,
};
