/* account_module.c - functions of the module over the account of steps (comm/account.h). */
#include "platform/clock.h"
#include "platform/spans.h"
#include "python/method.h"

static PyObject *account_open(PyObject *self, PyObject *args)
{
    sw_py_arg a[4];
    sw_error err;
    if (!sw_py_read("account_open path:s rank:i world_size:i host:s", args, NULL, a))
        return NULL;
    return sw_py_finish(self, sw_account_open(a[0].s, a[1].i, a[2].i, a[3].s, &err), &err);
}

SW_PY_VALUE(account_call, PyObject, "account_call name:s saves:p", true,
            (sw_account_call(a[0].s, a[1].p), sw_py_none()))
SW_PY_VALUE(account_fail, PyObject, "account_fail sentence:s", true,
            (sw_account_fail(a[0].s), sw_py_none()))
SW_PY_VALUE(account_stack_signal, PyObject, "account_stack_signal number:i", true,
            (sw_account_set_stack_signal(a[0].i), sw_py_none()))
SW_PY_VALUE(account_restarted, PyObject,
            "account_restarted first_unix_ns:N kept_unix_ns:N lost_ns:N restarts:N", true,
            (sw_account_restarted((int64_t)a[0].size, (int64_t)a[1].size, (int64_t)a[2].size,
                                  a[3].size),
             sw_py_none()))

static PyObject *note_sleep(double seconds, int rank)
{
    sw_account_slept(sw_clock_now_ns() - (int64_t)(seconds * 1e9), rank, -1);
    return sw_py_none();
}

SW_PY_VALUE(account_slept, PyObject, "account_slept seconds:d rank:i", true,
            note_sleep(a[0].d, a[1].i))

static PyObject *account_met(PyObject *Py_UNUSED(self), PyObject *args)
{
    sw_account_group group;
    sw_py_arg a[3];
    if (!sw_py_read("account_met group:K ranks:B leads:p", args, NULL, a))
        return NULL;
    if (PyBytes_Size(a[1].o) != (Py_ssize_t)sizeof group.ranks)
        return PyErr_Format(PyExc_ValueError, "account_met: ranks must be %zu bytes, got %zd",
                            sizeof group.ranks, PyBytes_Size(a[1].o));
    group.id = a[0].word;
    memcpy(group.ranks, PyBytes_AsString(a[1].o), sizeof group.ranks);
    return PyLong_FromLong(sw_account_met(&group, a[2].p));
}

static PyObject *account_call_end(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    sw_account_call_end();
    Py_RETURN_NONE;
}

static PyObject *account_end(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(sw_account_end());
}

static PyObject *watch(PyObject *self, uint64_t every, PyObject *callback)
{
    engine_state *state = sw_py_state_of(self);
    state->on_step_every = every;
    sw_py_set_or_clear(&state->on_step, callback);
    Py_RETURN_NONE;
}

SW_PY_VALUE(account_watch, PyObject, "account_watch every:K callback:O",
            a[0].word > 0 ||
                sw_py_refuse(PyExc_ValueError, "account_watch: every must be at least 1, got 0"),
            watch(op, a[0].word, a[1].o))

/* torch calls it after each step of any optimizer. Its arguments do not matter. */
static PyObject *account_stepped(PyObject *self, PyObject *Py_UNUSED(args))
{
    engine_state *state = sw_py_state_of(self);
    uint64_t step = sw_account_stepped();
    if (step == 0 || !state->on_step || step % state->on_step_every != 0)
        Py_RETURN_NONE;
    SW_PY_OWNED *callback = state->on_step;
    Py_INCREF(callback);
    SW_PY_OWNED *result = PyObject_CallFunction(callback, "K", (unsigned long long)step);
    if (!result && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL; /* an interrupt, or a signal handler's sys.exit(), is the program's */
    if (!result)     /* what looks at a step never fails it */
        PyErr_WriteUnraisable(callback);
    Py_RETURN_NONE;
}

static PyObject *account_row(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    const sw_account *from = sw_account_get();
    uint64_t step = atomic_load(&from->head.steps);
    if (step == 0)
        Py_RETURN_NONE;
    const sw_account_row *row = &from->rows[(step - 1) % SW_ACCOUNT_ROWS];
    return PyBytes_FromStringAndSize((const char *)row, sizeof *row);
}

static PyObject *spans_turn(PyObject *self, PyObject *args)
{
    sw_py_arg a[1];
    sw_error err;
    if (!sw_py_read("spans_turn on:p", args, NULL, a))
        return NULL;
    return sw_py_finish(self, sw_spans_turn(a[0].p, &err), &err);
}

static PyObject *take_spans(uint64_t after)
{
    PyObject *found = PyBytes_FromStringAndSize(NULL, SW_SPANS * sizeof(sw_interval));
    if (!found)
        return NULL;
    size_t count = sw_spans_take(after, (sw_interval *)(void *)PyBytes_AsString(found));
    SW_PY_OWNED *whole = found;
    return PyBytes_FromStringAndSize(PyBytes_AsString(whole),
                                     (Py_ssize_t)(count * sizeof(sw_interval)));
}

SW_PY_VALUE(spans_take, PyObject, "spans_take after:K", true, take_spans(a[0].word))

PyMethodDef sw_py_account_functions[] = {
    SW_PY_FUNCTION(account_open, "path, rank, world_size, host, /",
                   "Move the account of steps into a new file."),
    SW_PY_FUNCTION(account_call, "name, saves, /",
                   "A public call begins. With `saves` it is a save, until account_call_end()."),
    SW_PY_FUNCTION_AS(account_call_end, METH_NOARGS, "/", "The call has ended."),
    SW_PY_FUNCTION(account_fail, "sentence, /", "Keep the first error of this rank."),
    SW_PY_FUNCTION_AS(account_end, METH_NOARGS, "/",
                      "This rank ends in order. Return True if no error was kept."),
    SW_PY_FUNCTION(account_stack_signal, "number, /",
                   "Note the signal that writes Python's stacks; 0: none."),
    SW_PY_FUNCTION(account_met, "group, ranks, leads, /",
                   "Note a group of ranks that have met; return its number, 0: not kept."),
    SW_PY_FUNCTION(
        account_slept, "seconds, rank, /",
        "This rank has slept until now, in a wait of Python's own for a rank of the job."),
    SW_PY_FUNCTION(account_restarted, "first_unix_ns, kept_unix_ns, lost_ns, restarts, /",
                   "Note earlier starts of this job."),
    SW_PY_FUNCTION(
        account_watch, "every, callback, /",
        "Call callback(step) after each step whose number `every` divides; None: no more. "
        "Its errors stop nothing."),
    SW_PY_FUNCTION(account_stepped, "optimizer, args, kwargs, /", "An optimizer's step has ended."),
    SW_PY_FUNCTION_AS(account_row, METH_NOARGS, "/",
                      "Return the last step's row as bytes (csrc/comm/account.h); None before it."),
    SW_PY_FUNCTION(spans_turn, "on, /", "Begin or end the recording of spans for a trace."),
    SW_PY_FUNCTION(spans_take, "after, /",
                   "Return spans with a serial above `after` as bytes (csrc/platform/spans.h)."),
    {NULL, NULL, 0, NULL},
};
