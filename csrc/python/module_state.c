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
