/* module_state.c - from an instance of one of the module's types to the state of the module. */
#include "python/engine.h"

engine_state *sw_py_state_of(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    engine_state *state = PyType_GetModuleState(type);
    while (!state && type) { /* a subclass in Python is of another module */
        PyErr_Clear();
        type = PyType_GetSlot(type, Py_tp_base);
        state = type ? PyType_GetModuleState(type) : NULL;
    }
    return state;
}
