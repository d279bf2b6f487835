/* wire.c - torch's process group as a wire. Only here does an engine thread take the GIL, for the
 * call that moves bytes. A wait inside torch releases it. */
#include <stdlib.h>

#include "python/engine.h"

/* Moves the current exception's text to *err and clears the exception. */
static sw_status take_exception(sw_error *err)
{
    sw_py_pending pending = sw_py_set_aside();
    PyErr_NormalizeException(&pending.type, &pending.value, &pending.trace);
    SW_PY_OWNED *text = pending.value ? PyObject_Str(pending.value) : NULL;
    const char *utf8 = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    sw_error_set(err, SW_E_COMM, -1, "%.300s", utf8 ? utf8 : "torch's group failed");
    PyErr_Clear();
    sw_py_let_go(&pending);
    return SW_E_COMM;
}

typedef struct py_wire {
    sw_wire wire;
    PyObject *group; /* owned */
} py_wire;

/* Calls group.method(*arguments) and drops the arguments. */
static PyObject *call(void *context, const char *method, PyObject *arguments)
{
    SW_PY_OWNED *held = arguments;
    SW_PY_OWNED *bound = held ? PyObject_GetAttrString(((py_wire *)context)->group, method) : NULL;
    return bound ? PyObject_CallObject(bound, held) : NULL;
}

static sw_status begin(void *context, const char *method, int rank, uint32_t tag, const void *data,
                       size_t size_bytes, void **work, sw_error *err)
{
    SW_PY_GIL(gil);
    SW_PY_ASIDE(pending); /* of this thread, such as an interrupt */
    PyObject *made =
        call(context, method,
             Py_BuildValue("(iIKn)", rank, (unsigned)tag, (unsigned long long)(uintptr_t)data,
                           (Py_ssize_t)size_bytes));
    if (!made)
        return take_exception(err);
    *work = made;
    return SW_OK;
}

/* Gives the carrier's thread a lasting thread state: otherwise each call would create and destroy
 * one, and map and unmap memory. */
static void wire_enter(void *Py_UNUSED(context), void **kept)
{
    (void)PyGILState_Ensure();
    *kept = PyEval_SaveThread();
}

static void wire_leave(void *Py_UNUSED(context), void *kept)
{
    PyEval_RestoreThread(kept);
    PyGILState_Release(PyGILState_UNLOCKED);
}

static sw_status wire_send(void *context, int rank, uint32_t tag, const void *data,
                           size_t size_bytes, void **work, sw_error *err)
{
    return begin(context, "send", rank, tag, data, size_bytes, work, err);
}

static sw_status wire_receive(void *context, int rank, uint32_t tag, void *data, size_t size_bytes,
                              void **work, sw_error *err)
{
    return begin(context, "receive", rank, tag, data, size_bytes, work, err);
}

static sw_status wire_wait(void *context, void *work, sw_error *err)
{
    SW_PY_GIL(gil);
    SW_PY_ASIDE(pending);
    SW_PY_OWNED *held = work;
    SW_PY_OWNED *result = call(context, "wait", Py_BuildValue("(O)", held));
    return result ? SW_OK : take_exception(err);
}

static bool wire_close(void *context, bool gently)
{
    SW_PY_GIL(gil);
    SW_PY_ASIDE(pending);
    SW_PY_OWNED *result = call(context, "close", Py_BuildValue("(O)", gently ? Py_True : Py_False));
    PyErr_Clear(); /* after any error it counts as not closed */
    return result == Py_True;
}

static void wire_drop(void *Py_UNUSED(context), void *work)
{
    SW_PY_GIL(gil);
    Py_DECREF((PyObject *)work);
}

static void wire_release(void *context)
{
    SW_PY_GIL(gil);
    Py_DECREF(((py_wire *)context)->group);
    free(context);
}

const sw_wire *sw_py_wire_new(PyObject *group)
{
    PyObject *slow = PyObject_GetAttrString(group, "slow_bytes_per_s");
    unsigned long long slow_bytes_per_s = slow ? PyLong_AsUnsignedLongLong(slow) : 0;
    Py_XDECREF(slow);
    if (PyErr_Occurred())
        return NULL;
    py_wire *made = calloc(1, sizeof *made);
    if (!made) {
        PyErr_NoMemory();
        return NULL;
    }
    Py_INCREF(group);
    made->group = group;
    made->wire = (sw_wire){.context = made,
                           .send = wire_send,
                           .receive = wire_receive,
                           .wait = wire_wait,
                           .close = wire_close,
                           .drop = wire_drop,
                           .release = wire_release,
                           .enter = wire_enter,
                           .leave = wire_leave,
                           .slow_bytes_per_s = slow_bytes_per_s};
    return &made->wire;
}
