/* use.c - see the header. */
#include "python/use.h"

#include <unistd.h>

#include "platform/clock.h"
#include "platform/thread.h"
#include "python/arguments.h"

bool sw_py_use_make(sw_py_use *use, const char *type_name)
{
    if (use->pid == 0) {
        use->pid = getpid();
        return true;
    }
    return sw_py_refuse(PyExc_TypeError, "%s: already initialised; an object is made once",
                        type_name);
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

typedef struct entry {
    const sw_py_use *use;
    sw_py_use_kind kind;
} entry;

static bool is_closed(const void *wanted)
{
    const entry *at = wanted;
    return at->use->kind != SW_PY_FREE &&
           !(at->use->kind == SW_PY_SHARED && at->kind == SW_PY_SHARED);
}

bool sw_py_use_enter(sw_py_use *use, sw_py_use_kind kind, int64_t patience_ns, PyObject *error,
                     const char *noun, const char *also)
{
    const entry wanted = {use, kind};
    bool is_left = use->kind != SW_PY_FREE && use->inside_pid != getpid();
    if (!is_left && !sw_py_wait_while(is_closed, &wanted, patience_ns))
        return false;
    if (!is_left && use->pid && !sw_py_use_is_own(use))
        return sw_py_refuse(error,
                            "this process was forked from the one that made the %s, which both "
                            "would change: only the parent can use it further",
                            noun);
    if (is_closed(&wanted))
        return sw_py_refuse(error,
                            is_left ? "this process was forked while a thread of its parent was "
                                      "inside the %s: only the parent can use it further"
                                    : "another thread is inside the %s%s: one call at a time",
                            noun, also);
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
