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
    PyObject *reducer = (PyObject *)self->link->reducer;
    if (!reducer)
        Py_RETURN_NONE;
    Py_INCREF(reducer); /* another thread may drop the model while this one reduces */
    int failed = sw_py_reducer_take_gradient((struct reducer_object *)reducer, self->index, param);
    Py_DECREF(reducer);
    if (failed < 0)
        return NULL;
    Py_RETURN_NONE;
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
