/* fork.c - a forked child's copies of the communicators: its writes stay private to it, and
 * own_pages() makes the bytes its own that it reads. */
#include "platform/memory.h"
#include "python/method.h"

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

static PyObject *forked(PyObject *module, PyObject *Py_UNUSED(unused))
{
    engine_state *state = sw_py_state_of(module);
    sw_error err = {0}, each_err;
    sw_account_forget();
    for (comm_object *each = state->comms; each; each = each->next) /* all, also after a failure */
        if (each->comm && each->comm->ops->forked &&
            each->comm->ops->forked(each->comm, &each_err) != SW_OK)
            err = each_err;
    return err.status == SW_OK ? sw_py_none() : sw_py_raise(module, &err, NULL);
}

SW_PY_METHOD(own_pages, PyObject, "own_pages address:A nbytes:N", true,
             sw_memory_own(a[0].address, a[1].size, &err), sw_py_finish(self, status, &err))

PyMethodDef sw_py_fork_functions[] = {
    SW_PY_FUNCTION_AS(forked, METH_NOARGS, "/",
                      "Make a forked child's writes private. Call it there before anything else."),
    SW_PY_FUNCTION(
        own_pages, "address, nbytes, /",
        "In a forked child, replace inherited pages by private ones with the same contents."),
    {NULL, NULL, 0, NULL},
};
