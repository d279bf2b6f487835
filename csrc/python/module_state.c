/* module_state.c - finds the module's state, and the small helpers of every other file. */
#include "python/engine.h"

engine_state *sw_py_state_of(const void *op)
{
    PyObject *self = (PyObject *)(uintptr_t)op;
    if (PyModule_Check(self))
        return PyModule_GetState(self);
    PyTypeObject *type = PyType_Check(self) ? (PyTypeObject *)self : Py_TYPE(self);
    engine_state *state = PyType_GetModuleState(type);
    while (!state && type) { /* a Python subclass belongs to another module */
        PyErr_Clear();
        type = PyType_GetSlot(type, Py_tp_base);
        state = type ? PyType_GetModuleState(type) : NULL;
    }
    return state;
}

void *sw_py_alloc(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

void sw_py_free(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(op);
    Py_DECREF(type);
}

sw_py_pending sw_py_set_aside(void)
{
    sw_py_pending pending;
    PyErr_Fetch(&pending.type, &pending.value, &pending.trace);
    return pending;
}

void sw_py_bring_back(sw_py_pending *pending)
{
    if (pending->type)
        PyErr_Restore(pending->type, pending->value, pending->trace);
}

void sw_py_bring_back_quietly(sw_py_pending *pending)
{
    if (PyErr_Occurred())
        PyErr_WriteUnraisable(NULL);
    PyErr_Restore(pending->type, pending->value, pending->trace);
}

void sw_py_let_go(sw_py_pending *pending)
{
    Py_XDECREF(pending->type);
    Py_XDECREF(pending->value);
    Py_XDECREF(pending->trace);
}

PyObject *sw_py_bytes_if(PyObject *finished, const void *data, size_t size_bytes)
{
    SW_PY_OWNED *done = finished;
    return done ? PyBytes_FromStringAndSize(data, (Py_ssize_t)size_bytes) : NULL;
}

void sw_py_append(PyObject **list, PyObject *item)
{
    if (!item || PyList_Append(*list, item) < 0)
        ENGINE_CLEAR(*list);
    Py_XDECREF(item);
}

void sw_py_put(PyObject **dict, const char *key, PyObject *value)
{
    if (!value || PyDict_SetItemString(*dict, key, value) < 0)
        ENGINE_CLEAR(*dict);
    Py_XDECREF(value);
}

void sw_py_set(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;
    Py_XINCREF(value);
    *slot = value;
    Py_XDECREF(old);
}

void sw_py_set_or_clear(PyObject **slot, PyObject *value)
{
    sw_py_set(slot, value == Py_None ? NULL : value);
}

PyObject *sw_py_item(PyObject *list, size_t index)
{
    PyObject *item = PyList_GetItem(list, (Py_ssize_t)index);
    Py_XINCREF(item);
    return item;
}

PyObject *sw_py_call(void *self, const char *name, PyObject *a, PyObject *b)
{
    SW_PY_OWNED *method = PyObject_GetAttrString(self, name);
    return method ? PyObject_CallFunctionObjArgs(method, a, b, NULL) : NULL;
}

PyObject *sw_py_call_at(void *self, const char *name, size_t index)
{
    SW_PY_OWNED *position = PyLong_FromSize_t(index);
    return position ? sw_py_call(self, name, position, NULL) : NULL;
}
