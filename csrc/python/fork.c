/* fork.c - a forked child's copies of the communicators: it keeps the bytes that their memory
 * shows, and later writes stay private to it. */
#include "python/engine.h"

void sw_py_comm_link(engine_state *state, comm_object *self)
{
    self->next = state->comms;
    state->comms = self;
}

void sw_py_comm_unlink(engine_state *state, const comm_object *self)
{
    for (comm_object **at = &state->comms; *at; at = &(*at)->next)
        if (*at == self) {
            *at = self->next;
            return;
        }
}

static PyObject *forked(PyObject *module, PyObject *unused)
{
    engine_state *state = PyModule_GetState(module);
    sw_error err;
    sw_status status = SW_OK;
    (void)unused;
    for (comm_object *each = state->comms; each && status == SW_OK; each = each->next)
        if (each->comm && each->comm->ops->forked)
            status = each->comm->ops->forked(each->comm, &err);
    if (status != SW_OK)
        return sw_py_raise(state, &err, NULL);
    Py_RETURN_NONE;
}

PyMethodDef sw_py_fork_functions[] = {
    {"forked", forked, METH_NOARGS,
     "forked($module, /)\n--\n\n"
     "Make a forked child's writes private. Call it there before anything else."},
    {NULL, NULL, 0, NULL},
};
