/* comm_use.c - which thread is inside a HostComm, how it enters and leaves, and the count of users
 * that keep it alive. */
#include <unistd.h>

#include "platform/thread.h"
#include "python/engine.h"

enum { LEAVER_POLLS = 1000 };

bool sw_py_comm_is_own(const comm_object *self)
{
    return getpid() == self->owner_pid;
}

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

/* Waits for the thread inside a failed communicator, which leaves soon, so that a caller that wants
 * the reason, such as the watch thread of a GPU, is not refused as a second user. */
static void wait_for_leavers(const comm_object *self)
{
    for (int look = 0; look < LEAVER_POLLS && self->in_use && !self->closed && self->comm &&
                       !self->comm->ops->is_alive(self->comm);
         ++look) {
        Py_BEGIN_ALLOW_THREADS;
        sw_thread_sleep_ns(1000 * 1000);
        Py_END_ALLOW_THREADS;
    }
}

static const char OTHER_THREAD[] =
    "another thread is inside the communicator; one thread a rank issues its collectives";

/* Raises an exception with the text `why` unless that is NULL. */
static bool enter(comm_object *self, const char *why)
{
    if (why) {
        PyErr_SetString(sw_py_state_of((PyObject *)self)->error, why);
        return false;
    }
    self->in_use = true;
    sw_py_comm_acquire(self);
    return true;
}

bool sw_py_comm_enter(comm_object *self)
{
    const char *why = NULL;
    if (sw_py_comm_is_own(self)) /* a thread that was inside at the fork does not exist here */
        wait_for_leavers(self);
    if (!sw_py_comm_is_own(self))
        why = "this process was forked from the one that joined the group; the engine works in "
              "that one only";
    else if (self->closed)
        why = "the communicator was closed";
    else if (!self->connected)
        why = "the communicator has not joined its peers: call connect() first";
    else if (self->in_use)
        why = OTHER_THREAD;
    return enter(self, why);
}

bool sw_py_comm_enter_to_join(comm_object *self)
{
    bool has_joined = !self->comm || self->closed || (self->connected && !self->group);
    return enter(self, self->in_use ? OTHER_THREAD
                       : has_joined ? "connect: the communicator is closed or has joined already"
                                    : NULL);
}

void sw_py_comm_leave(comm_object *self)
{
    self->in_use = false;
    sw_py_comm_release(self);
}

PyObject *sw_py_comm_finish(comm_object *self, sw_status status, const sw_error *err)
{
    sw_py_comm_leave(self);
    if (status != SW_OK)
        return sw_py_raise(sw_py_state_of((PyObject *)self), err, self);
    Py_RETURN_NONE;
}
