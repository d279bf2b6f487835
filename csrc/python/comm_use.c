/* comm_use.c - how a thread enters and leaves a HostComm, and the count of users that keep it
 * alive. */
#include "python/engine.h"

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
