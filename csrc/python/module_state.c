/* module_state.c - finds the module's state from an instance of one of its types. */
#include "python/engine.h"

engine_state *sw_py_state_of(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    engine_state *state = PyType_GetModuleState(type);
    while (!state && type) { /* a Python subclass belongs to another module */
        PyErr_Clear();
        type = PyType_GetSlot(type, Py_tp_base);
        state = type ? PyType_GetModuleState(type) : NULL;
    }
    return state;
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
