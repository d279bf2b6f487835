/* use.c - see the header. */
#include "python/use.h"

#include <unistd.h>

#include "platform/clock.h"
#include "platform/thread.h"

bool sw_py_use_make(sw_py_use *use, const char *type_name)
{
    if (use->pid == 0) {
        use->pid = getpid();
        return true;
    }
    PyErr_Format(PyExc_TypeError, "%s: already initialised; an object is made once", type_name);
    return false;
}

bool sw_py_use_is_own(const sw_py_use *use)
{
    return use->pid == getpid();
}

bool sw_py_wait_while(sw_py_busy_fn *is_busy, const void *object, int64_t patience_ns)
{
    int64_t begun = sw_clock_now_ns(), waited = 0;
    while (is_busy(object) && waited < patience_ns) {
        if (PyErr_CheckSignals() < 0)
            return false;
        Py_BEGIN_ALLOW_THREADS
        sw_thread_rest(waited);
        Py_END_ALLOW_THREADS
        waited = sw_clock_now_ns() - begun;
    }
    return true;
}

static bool is_closed_to_readers(const void *use)
{
    return !sw_py_use_fits(use, SW_PY_SHARED);
}

static bool is_closed_to_others(const void *use)
{
    return !sw_py_use_fits(use, SW_PY_ALONE);
}

bool sw_py_use_enter(sw_py_use *use, sw_py_use_kind kind, int64_t patience_ns, PyObject *error,
                     const char *noun)
{
    sw_py_busy_fn *is_busy = kind == SW_PY_SHARED ? is_closed_to_readers : is_closed_to_others;
    bool is_left = use->kind != SW_PY_FREE && use->inside_pid != getpid();
    if (!is_left && !sw_py_wait_while(is_busy, use, patience_ns))
        return false;
    if (is_busy(use)) {
        PyErr_Format(error,
                     is_left ? "this process was forked while a thread of its parent was inside "
                               "the %s: only the parent can use it further"
                             : "another thread is inside the %s: one call at a time",
                     noun);
        return false;
    }
    sw_py_use_take(use, kind);
    return true;
}

void sw_py_use_take(sw_py_use *use, sw_py_use_kind kind)
{
    if (use->kind == SW_PY_FREE)
        use->inside_pid = getpid();
    use->kind = kind;
    if (kind == SW_PY_SHARED)
        ++use->readers;
    else
        use->thread = PyThread_get_thread_ident();
}

void sw_py_use_leave(sw_py_use *use)
{
    if (use->kind != SW_PY_SHARED || --use->readers == 0)
        use->kind = SW_PY_FREE;
}
