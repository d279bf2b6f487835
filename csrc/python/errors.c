/* errors.c - the one place where a status becomes a Python exception. */
#include <string.h>

#include "python/engine.h"

/* `bases`: one class or a tuple; NULL, with an exception, makes none. */
static PyObject *add_exception(PyObject *module, const char *qualified, const char *doc,
                               PyObject *bases)
{
    PyObject *made =
        PyErr_Occurred() ? NULL : PyErr_NewExceptionWithDoc(qualified, doc, bases, NULL);
    if (made && PyModule_AddObjectRef(module, strrchr(qualified, '.') + 1, made) < 0)
        ENGINE_CLEAR(made);
    return made;
}

int sw_py_errors_init(PyObject *module, engine_state *state)
{
    state->error = add_exception(
        module, "shardwright.Error",
        "Base of the engine's errors: ranks that disagree, a move the state does not allow.",
        PyExc_RuntimeError);
    state->comm_error = add_exception(
        module, "shardwright.CommError",
        "A peer died or left. `rank`: the peer, -1 if unknown; `host`: its host name.",
        state->error);
    SW_PY_OWNED *bases =
        state->comm_error ? PyTuple_Pack(2, state->comm_error, PyExc_TimeoutError) : NULL;
    state->comm_timeout_error = add_exception(module, "shardwright.CommTimeoutError",
                                              "A peer did not come before the deadline.", bases);
    state->checkpoint_error =
        add_exception(module, "shardwright.CheckpointError",
                      "A checkpoint could not be written or read. `errno`: of the system, or None.",
                      state->error);
    state->newer_checkpoint_error = add_exception(
        module, "shardwright.NewerCheckpointError",
        "A checkpoint is of a newer version than this program reads.", state->checkpoint_error);
    return state->newer_checkpoint_error
               ? PyObject_SetAttrString(state->checkpoint_error, "errno", Py_None)
               : -1;
}

PyObject *sw_py_text(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *make_exception(PyObject *type, const sw_error *err)
{
    SW_PY_OWNED *text = sw_py_text(err->message);
    return text ? PyObject_CallFunctionObjArgs(type, text, NULL) : NULL;
}

/* Sets an attribute to `value`, whose reference it takes. A failure clears *exception. */
static void set_attribute(PyObject **exception, const char *name, PyObject *value)
{
    if (*exception && (!value || PyObject_SetAttrString(*exception, name, value) < 0))
        ENGINE_CLEAR(*exception);
    Py_XDECREF(value);
}

/* Raises `exception`, whose reference it takes, unless that is NULL. */
static PyObject *raise_made(PyObject *type, PyObject *exception)
{
    if (exception)
        PyErr_SetObject(type, exception);
    Py_XDECREF(exception);
    return NULL;
}

static PyObject *raise_comm(PyObject *type, const sw_error *err, const comm_object *comm)
{
    PyObject *exception = make_exception(type, err);
    bool is_named =
        comm && comm->hosts && err->detail >= 0 && err->detail < PyList_Size(comm->hosts);
    set_attribute(&exception, "rank", PyLong_FromLong(err->detail));
    set_attribute(&exception, "host",
                  is_named ? sw_py_item(comm->hosts, (size_t)err->detail)
                           : PyUnicode_FromString(""));
    return raise_made(type, exception);
}

static PyObject *raise_os(const sw_error *err)
{
    PyObject *text = sw_py_text(err->message);
    return raise_made(PyExc_OSError, text ? Py_BuildValue("(iN)", err->detail, text) : NULL);
}

PyObject *sw_py_raise(const void *op, const sw_error *err, const comm_object *comm)
{
    const engine_state *state = sw_py_state_of(op);
    PyObject *type = state->error;
    if (err->status == SW_E_COMM || err->status == SW_E_TIMEOUT || err->status == SW_E_MISMATCH)
        sw_account_fail(err->message);
    switch (err->status) {
    case SW_E_INVALID:
        type = PyExc_ValueError;
        break;
    case SW_E_MEMORY:
        type = PyExc_MemoryError;
        break;
    case SW_E_UNSUPPORTED:
        type = PyExc_NotImplementedError;
        break;
    case SW_E_OS:
        return raise_os(err);
    case SW_E_COMM:
        return raise_comm(state->comm_error, err, comm);
    case SW_E_TIMEOUT:
        return raise_comm(state->comm_timeout_error, err, comm);
    case SW_E_INTERRUPTED:
        if (!PyErr_Occurred())
            PyErr_SetNone(PyExc_KeyboardInterrupt);
        return NULL;
    case SW_OK:
    case SW_E_STATE:
    case SW_E_MISMATCH:
    case SW_E_DEVICE:
        break;
    }
    return raise_made(type, make_exception(type, err));
}

PyObject *sw_py_finish(const void *op, sw_status status, const sw_error *err)
{
    return status == SW_OK ? Py_BuildValue("") : sw_py_raise(op, err, NULL);
}

PyObject *sw_py_raise_checkpoint(const void *op, const sw_error *err)
{
    const engine_state *state = sw_py_state_of(op);
    if (err->status == SW_E_MEMORY)
        return sw_py_raise(op, err, NULL);
    PyObject *type =
        err->status == SW_E_UNSUPPORTED ? state->newer_checkpoint_error : state->checkpoint_error;
    PyObject *exception = make_exception(type, err);
    set_attribute(&exception, "errno",
                  err->status == SW_E_OS ? PyLong_FromLong(err->detail) : Py_BuildValue(""));
    return raise_made(type, exception);
}

PyObject *sw_py_finish_checkpoint(const void *op, sw_py_use *use, sw_status status,
                                  const sw_error *err)
{
    if (use)
        sw_py_use_leave(use);
    return status == SW_OK ? Py_BuildValue("") : sw_py_raise_checkpoint(op, err);
}
