/* use.h - which thread is inside an object whose calls give up the GIL. Every such type has one
 * guard: a second thread must not change what the first reads, nor free it.
 *
 * Thread rule: with the GIL held, which is what guards the guard. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

typedef enum sw_py_use_kind {
    SW_PY_FREE = 0,
    SW_PY_SHARED,  /* any number of threads that only read */
    SW_PY_ALONE,   /* one thread */
    SW_PY_WATCHED, /* one thread that only watches or aborts a communicator, briefly */
} sw_py_use_kind;

typedef struct sw_py_use {
    long pid;             /* the process that made the object and alone enters it; 0: none has, it
                             failed, or a forked child's copy is its own */
    sw_py_use_kind kind;  /* what is inside now */
    int readers;          /* threads that share it */
    unsigned long thread; /* the last that entered otherwise */
    long inside_pid;      /* the process whose threads are inside */
} sw_py_use;

/* Begins __init__, once in an object's life, also if that fails or the object is closed later.
 * Returns false with a TypeError that begins with the type's name. */
bool sw_py_use_make(sw_py_use *use, const char *type_name);
/* Returns true if this process made the object, not a process that it was forked from. */
bool sw_py_use_is_own(const sw_py_use *use);

/* Enters, once other threads have left, for which it waits without the GIL for at most
 * `patience_ns`; in a forked child not at all for its parent's threads, which never leave there.
 * Returns false with an exception of type `error` that names the object by `noun`, and by `also`
 * what else may be inside, or with the one of a signal handler. A forked child does not enter what
 * its parent made. */
bool sw_py_use_enter(sw_py_use *use, sw_py_use_kind kind, int64_t patience_ns, PyObject *error,
                     const char *noun, const char *also);
void sw_py_use_take(sw_py_use *use, sw_py_use_kind kind);
void sw_py_use_leave(sw_py_use *use);

/* The wait below all of them: until `is_busy` returns false, in short sleeps without the GIL. The
 * caller looks again, since time may be up. Returns false with the exception of a signal handler.
 */
typedef bool sw_py_busy_fn(const void *object);
bool sw_py_wait_while(sw_py_busy_fn *is_busy, const void *object, int64_t patience_ns);

/* Longer than any call that other threads may wait for, but for one that hangs. */
#define SW_PY_PATIENCE_NS (INT64_C(10) * 1000000000)
