/* hook_type.c - the post-accumulate-grad hook of one parameter: a small callable that reaches its
 * reducer by a link, so that a hook that torch keeps on a tensor does not keep the engine alive. */
#include <stdlib.h>

#include "python/method.h"

typedef struct hook_object {
    PyObject_HEAD reducer_link *link; /* counted */
    size_t index;
} hook_object;

static PyObject *hook_call(PyObject *op, PyObject *param)
{
    hook_object *self = (hook_object *)op;
    struct reducer_object *reducer = self->link->reducer;
    if (reducer && Py_REFCNT(reducer) == 0) /* a subclass drops its attributes before we are told */
        reducer = NULL;
    SW_PY_OWNED *held = (PyObject *)reducer; /* another thread may drop the model meanwhile */
    Py_XINCREF(held);
    return !reducer || sw_py_reducer_take_gradient(reducer, self->index, param) == 0 ? sw_py_none()
                                                                                     : NULL;
}

static PyMethodDef hook_method = {"gradient_hook", hook_call, METH_O,
                                  "Takes the gradient of one parameter."};

PyObject *sw_py_hook_object_new(engine_state *state, reducer_link *link, size_t index)
{
    hook_object *made = PyObject_New(hook_object, state->hook_type);
    if (!made)
        return NULL;
    made->link = link;
    made->index = index;
    link->references++;
    PyObject *callable = PyCFunction_NewEx(&hook_method, (PyObject *)made, NULL);
    Py_DECREF(made);
    return callable;
}

void sw_py_reducer_link_release(reducer_link *link)
{
    if (--link->references == 0)
        free(link);
}

static void hook_dealloc(PyObject *op)
{
    sw_py_reducer_link_release(((hook_object *)op)->link);
    sw_py_free(op);
}

SW_PY_TYPE(sw_py_hook_type_spec, "GradientHook", hook_object, Py_TPFLAGS_DISALLOW_INSTANTIATION,
           NULL, {Py_tp_dealloc, hook_dealloc})
