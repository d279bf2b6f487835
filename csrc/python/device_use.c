/* device_use.c - how a thread enters and leaves a DeviceComm, and how its failure
 * reaches other threads and ranks. */
#include "platform/clock.h"
#include "python/device_object.h"

void sw_py_device_take(device_comm_object *self, sw_py_use_kind kind)
{
    sw_py_use_take(&self->use, kind);
    if (self->comm && kind == SW_PY_ALONE)
        atomic_store(&self->comm->entered_ns, sw_clock_now_ns());
}

static int64_t patience_of(const device_comm_object *self)
{
    int64_t timeout_ns = self->comm ? self->comm->timeout_ns : 0;
    return timeout_ns ? timeout_ns : SW_PY_PATIENCE_NS;
}

static bool is_being_ended(const void *op)
{
    const device_comm_object *self = op;
    return self->use.kind == SW_PY_WATCHED || self->enders > 0;
}

/* True for another thread's call. On CUDA autograd runs the hooks of one module in two threads if
 * one of its outputs is on the CPU: the caller's, and its own for the GPU. */
static bool is_held_by_another(const void *op)
{
    const sw_py_use *use = &((const device_comm_object *)op)->use;
    return use->kind != SW_PY_FREE && use->thread != PyThread_get_thread_ident() &&
           sw_py_use_is_own(use);
}

static bool is_busy(const void *op)
{
    return is_being_ended(op) || is_held_by_another(op);
}

/* Threads exist only in the process that made the object. */
static bool wait_while(device_comm_object *self, sw_py_busy_fn *is_inside, const char *what)
{
    if (!sw_py_use_is_own(&self->use) || !is_inside(self))
        return true;
    if (!sw_py_wait_while(is_inside, self, patience_of(self)))
        return false;
    return !is_inside(self) || sw_py_refuse(sw_py_state_of(self)->error,
                                            "%s has not returned within the deadline", what);
}

bool sw_py_device_wait_for_watch(device_comm_object *self)
{
    return wait_while(self, is_being_ended, "a driver call by the communicator's watch thread");
}

bool sw_py_device_wait_for_others(device_comm_object *self)
{
    return sw_py_device_wait_for_watch(self) &&
           wait_while(self, is_busy, "another thread's call inside the GPU's communicator");
}

bool sw_py_device_enter(device_comm_object *self)
{
    const char *why = NULL;
    if (!sw_py_device_wait_for_others(self))
        return false;
    if (self->comm && !sw_py_use_is_own(&self->use))
        why = "this process was forked from the one that opened the GPU; the engine works in that "
              "one only";
    else if (!self->comm || !self->comm->peers)
        why = self->closed
                  ? "the GPU's communicator was closed"
                  : "the GPU's communicator has not joined its peers: call connect() first";
    else if (self->use.kind != SW_PY_FREE)
        why = "this thread is inside the GPU's communicator already";
    if (why)
        return sw_py_refuse(sw_py_state_of(self)->error, "%s", why);
    sw_py_device_take(self, SW_PY_ALONE);
    return true;
}

device_comm_object *sw_py_device_comm_of(PyObject *op, PyObject *first)
{
    bool is_method = !PyModule_Check(op);
    if (is_method || PyObject_TypeCheck(first, sw_py_state_of(op)->device_comm_type))
        return (device_comm_object *)(is_method ? op : first);
    PyErr_Format(PyExc_TypeError, "comm must be a DeviceComm, got %R", (PyObject *)Py_TYPE(first));
    return NULL;
}

bool sw_py_device_lend_kernels(device_comm_object *self)
{
    return (self->comm && sw_py_use_is_own(&self->use)) ||
           sw_py_refuse(sw_py_state_of(self)->error, "this process has not opened the GPU: it was "
                                                     "forked from the one that did");
}

static bool enter_to_destroy(device_comm_object *self)
{
    SW_PY_ASIDE(pending); /* a signal handler may raise */
    (void)sw_py_wait_while(is_held_by_another, self, SW_PY_PATIENCE_NS);
    if (self->use.kind != SW_PY_FREE)
        return false;
    sw_py_device_take(self, SW_PY_ALONE);
    return true;
}

/* Releases the GIL, since the driver may wait before it frees memory. */
void sw_py_destroy_quietly(sw_py_destroy_fn *destroy, void *made)
{
    SW_PY_ASIDE(pending); /* a signal handler may raise while this thread waits */
    SW_PY_DO_WITHOUT_GIL(destroy(made));
}

void sw_py_device_destroy(device_comm_object *self, sw_py_destroy_fn *destroy,
                          sw_py_destroy_fn *drop, void *made)
{
    bool entered = enter_to_destroy(self);
    sw_py_destroy_quietly(entered || !drop ? destroy : drop, made);
    if (entered)
        sw_py_device_leave(self);
}

void sw_py_device_leave(device_comm_object *self)
{
    sw_py_use_leave(&self->use);
    if (self->comm)
        atomic_store(&self->comm->entered_ns, 0);
}

/* Aborts the communicator on all ranks after a driver call failed on this rank, since peers wait
 * for its part. `err` gets the message that all ranks get. */
static void end_for_all(device_comm_object *self, sw_error *err)
{
    sw_peers *peers = self->comm->peers;
    sw_error reason;
    sw_error_set(&reason, err->status, err->detail, "the GPU of rank %d of %d: %.400s", peers->rank,
                 peers->world_size, err->message);
    SW_PY_DO_WITHOUT_GIL(sw_peers_abort(peers, &reason));
    *err = reason;
}

void sw_py_device_raise(device_comm_object *self, const sw_error *err)
{
    sw_error told;
    if (err->status == SW_E_DEVICE && self->comm && self->comm->peers &&
        !sw_peers_has_failed(self->comm->peers)) {
        told = *err;
        end_for_all(self, &told);
        err = &told;
    }
    sw_py_raise(self, err, self->host);
}

PyObject *sw_py_device_finish(device_comm_object *self, sw_status status, const sw_error *err)
{
    if (status != SW_OK)
        sw_py_device_raise(self, err);
    sw_py_device_leave(self);
    return status == SW_OK ? Py_BuildValue("") : NULL;
}
