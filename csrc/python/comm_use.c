/* comm_use.c - how a thread enters and leaves a HostComm, and the count of users that keep it
 * alive. */
#include "platform/memory.h"
#include "python/engine.h"
#include "python/method.h"

static const int64_t LEAVERS_NS = 1000 * 1000 * 1000;

void sw_py_comm_acquire(comm_object *self)
{
    self->users++;
}

void sw_py_comm_release(comm_object *self)
{
    sw_comm *comm = self->comm;
    sw_local_group *group = self->group;
    if (--self->users > 0 || !self->closed || !comm)
        return;
    self->comm = NULL;
    self->group = NULL;
    Py_BEGIN_ALLOW_THREADS /* the carrier's last message needs the GIL */
    comm->ops->destroy(comm);
    sw_local_group_destroy(group);
    Py_END_ALLOW_THREADS
}

/* The thread inside a failed communicator leaves soon. A caller that wants the reason, such as the
 * watch thread of a GPU, waits for it, so as not to be refused as a second user. */
static bool has_leaver(const void *op)
{
    const comm_object *self = op;
    return self->use.kind != SW_PY_FREE && !self->closed && self->comm &&
           !self->comm->ops->is_alive(self->comm);
}

static bool enter(comm_object *self, const char *why)
{
    if (!why && self->use.kind != SW_PY_FREE)
        why = "another thread is inside the communicator; one thread a rank issues its collectives";
    if (why)
        return sw_py_refuse(sw_py_state_of(self)->error, "%s", why);
    sw_py_use_take(&self->use, SW_PY_ALONE);
    sw_py_comm_acquire(self);
    return true;
}

bool sw_py_comm_enter(comm_object *self)
{
    bool is_own = sw_py_use_is_own(&self->use);
    if (is_own && !sw_py_wait_while(has_leaver, self, LEAVERS_NS))
        return false;
    return enter(self, !self->use.pid ? "the communicator was not initialised"
                       : !is_own ? "this process was forked from the one that joined the group; "
                                   "the engine works in that one only"
                       : self->closed ? "the communicator was closed"
                       : self->connected
                           ? NULL
                           : "the communicator has not joined its peers: call connect() first");
}

bool sw_py_comm_enter_to_join(comm_object *self)
{
    bool has_joined = !self->comm || self->closed || (self->connected && !self->group);
    return enter(self, has_joined && self->use.kind == SW_PY_FREE
                           ? "connect: the communicator is closed or has joined already"
                           : NULL);
}

void sw_py_comm_leave(comm_object *self)
{
    sw_py_use_leave(&self->use);
    sw_py_comm_release(self);
}

PyObject *sw_py_comm_finish(comm_object *self, sw_status status, const sw_error *err)
{
    sw_py_comm_leave(self);
    return status == SW_OK ? Py_BuildValue("") : sw_py_raise(self, err, self);
}

/* ---- in a forked child ---- */

/* A forked child's copies of the communicators: its writes stay private to it, and own_pages()
 * makes the bytes its own that it reads. */

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
