/* errors.c - the one place where a status becomes a Python exception. */
#include <string.h>

#include "python/engine.h"

static PyObject *add_exception(PyObject *module, const char *qualified, const char *doc,
                               PyObject *bases)
{
    PyObject *made = PyErr_NewExceptionWithDoc(qualified, doc, bases, NULL);
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
    if (!state->error)
        return -1;
    state->comm_error = add_exception(
        module, "shardwright.CommError",
        "A peer died or left. `rank`: the peer, -1 if unknown; `host`: its host name.",
        state->error);
    if (!state->comm_error)
        return -1;
    PyObject *bases = PyTuple_Pack(2, state->comm_error, PyExc_TimeoutError);
    if (!bases)
        return -1;
    state->comm_timeout_error = add_exception(module, "shardwright.CommTimeoutError",
                                              "A peer did not come before the deadline.", bases);
    Py_DECREF(bases);
    state->checkpoint_error =
        add_exception(module, "shardwright.CheckpointError",
                      "A checkpoint could not be written or read. `errno`: of the system, or None.",
                      state->error);
    if (!state->comm_timeout_error || !state->checkpoint_error)
        return -1;
    state->newer_checkpoint_error = add_exception(
        module, "shardwright.NewerCheckpointError",
        "A checkpoint is of a newer version than this program reads.", state->checkpoint_error);
    if (!state->newer_checkpoint_error)
        return -1;
    return PyObject_SetAttrString(state->checkpoint_error, "errno", Py_None);
}

PyObject *sw_py_text(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static void raise_plain(PyObject *type, const char *message)
{
    PyObject *text = sw_py_text(message);
    if (text)
        PyErr_SetObject(type, text);
    Py_XDECREF(text);
}

static PyObject *raise_comm(PyObject *type, const sw_error *err, const comm_object *comm)
{
    PyObject *host = NULL;
    PyObject *text = sw_py_text(err->message);
    PyObject *exception = text ? PyObject_CallFunctionObjArgs(type, text, NULL) : NULL;
    Py_XDECREF(text);
    PyObject *rank = PyLong_FromLong(err->detail);
    if (comm && comm->hosts && err->detail >= 0 && err->detail < PyList_Size(comm->hosts)) {
        host = PyList_GetItem(comm->hosts, err->detail);
        Py_XINCREF(host);
    } else {
        host = PyUnicode_FromString("");
    }
    if (exception && rank && host && PyObject_SetAttrString(exception, "rank", rank) == 0 &&
        PyObject_SetAttrString(exception, "host", host) == 0)
        PyErr_SetObject(type, exception);
    Py_XDECREF(exception);
    Py_XDECREF(rank);
    Py_XDECREF(host);
    return NULL;
}

static PyObject *raise_os(const sw_error *err)
{
    PyObject *text = sw_py_text(err->message);
    PyObject *arguments = text ? Py_BuildValue("(iN)", err->detail, text) : NULL;
    if (arguments)
        PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    return NULL;
}

PyObject *sw_py_raise(engine_state *state, const sw_error *err, const comm_object *comm)
{
    switch (err->status) {
    case SW_E_INVALID:
        raise_plain(PyExc_ValueError, err->message);
        break;
    case SW_E_MEMORY:
        raise_plain(PyExc_MemoryError, err->message);
        break;
    case SW_E_UNSUPPORTED:
        raise_plain(PyExc_NotImplementedError, err->message);
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
        break;
    case SW_OK:
    case SW_E_STATE:
    case SW_E_MISMATCH:
    case SW_E_DEVICE:
        raise_plain(state->error, err->message);
        break;
    }
    return NULL;
}

PyObject *sw_py_finish(PyObject *module, sw_status status, const sw_error *err)
{
    return status == SW_OK ? Py_BuildValue("") : sw_py_raise(PyModule_GetState(module), err, NULL);
}

PyObject *sw_py_raise_checkpoint(engine_state *state, const sw_error *err)
{
    if (err->status == SW_E_MEMORY)
        return sw_py_raise(state, err, NULL);
    PyObject *type =
        err->status == SW_E_UNSUPPORTED ? state->newer_checkpoint_error : state->checkpoint_error;
    PyObject *text = sw_py_text(err->message);
    PyObject *exception = text ? PyObject_CallFunctionObjArgs(type, text, NULL) : NULL;
    Py_XDECREF(text);
    PyObject *code = err->status == SW_E_OS ? PyLong_FromLong(err->detail) : Py_BuildValue("");
    if (exception && code && PyObject_SetAttrString(exception, "errno", code) == 0)
        PyErr_SetObject(type, exception);
    Py_XDECREF(exception);
    Py_XDECREF(code);
    return NULL;
}
