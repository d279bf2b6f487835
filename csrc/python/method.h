/* method.h - how a method is written.
 *
 *     SW_PY_METHOD(units_take, units_object, "take unit:n stream:A", enter_unit(self, a[0].n),
 *                  sw_device_unit_take(self->units, a[0].size, a[1].address, &err),
 *                  sw_py_device_finish(self->comm, status, &err))
 *
 * defines units_take(op, args). It reads the arguments that the signature names (arguments.h) into
 * a[]. The first expression enters the object, and is false with an exception. The second is the
 * call, a sw_status, evaluated without the GIL. The third leaves the object; its value, None or
 * NULL with an exception, is returned. The expressions may use `self`, `a`, `status` and `err`.
 *
 * A method that takes arguments by name, or returns more, is written out, in the same order.
 */
#pragma once

#include "python/engine.h"

/* The status that an expression gives, without the GIL. A call that enqueues on a GPU blocks while
 * the driver's queue is full, until the GPU proceeds or another thread aborts. */
#define SW_PY_WITHOUT_GIL(expression)                    \
    __extension__({                                      \
        PyThreadState *sw_thread_ = PyEval_SaveThread(); \
        sw_status sw_given_ = (expression);              \
        PyEval_RestoreThread(sw_thread_);                \
        sw_given_;                                       \
    })

#define SW_PY_METHOD(function, object, signature, enter, call, finish) \
    SW_PY_METHOD_WITH(function, object, signature, , enter, call, finish)

/* The same with `local`: declarations of what the expressions fill in, or defaults of a[]. */
#define SW_PY_METHOD_WITH(function, object, signature, local, enter, call, finish) \
    static SW_PY_SHARED_METHOD(function, object, signature, local, enter, call, finish)
#define SW_PY_SHARED_METHOD(function, object, signature, local, enter, call, finish) \
    PyObject *function(PyObject *op, PyObject *args)                                 \
    {                                                                                \
        object *self = (object *)(void *)op;                                         \
        sw_py_arg a[SW_PY_ARGS_MAX] = {{0}};                                         \
        sw_error err = {0};                                                          \
        local;                                                                       \
        (void)self, (void)err;                                                       \
        if (!sw_py_read(signature, args, NULL, a) || !(enter))                       \
            return NULL;                                                             \
        sw_status status = SW_PY_WITHOUT_GIL(call);                                  \
        (void)status;                                                                \
        return finish;                                                               \
    }

/* The same for a method whose argument a[list] is a sequence of rows of C's `type`: the expressions
 * may use `rows`. `fill` gets `self`. */
#define SW_PY_METHOD_ON_ROWS(function, object, signature, local, list, row, type, fill, enter, \
                             call, finish)                                                     \
    static PyObject *function(PyObject *op, PyObject *args)                                    \
    {                                                                                          \
        object *self = (object *)(void *)op;                                                   \
        sw_py_arg a[SW_PY_ARGS_MAX] = {{0}};                                                   \
        SW_PY_TABLE rows = {0};                                                                \
        sw_error err = {0};                                                                    \
        local;                                                                                 \
        (void)err;                                                                             \
        if (!sw_py_read(signature, args, NULL, a) ||                                           \
            !sw_py_table_init(&rows, a[list].o, row, sizeof(type), fill, self) || !(enter))    \
            return NULL;                                                                       \
        sw_status status = SW_PY_WITHOUT_GIL(call);                                            \
        return finish;                                                                         \
    }

/* A method, or a function of the module, that only returns a value. */
#define SW_PY_VALUE(function, object, signature, check, value) \
    static SW_PY_SHARED_VALUE(function, object, signature, check, value)
#define SW_PY_SHARED_VALUE(function, object, signature, check, value) \
    PyObject *function(PyObject *op, PyObject *args)                  \
    {                                                                 \
        object *self = (object *)(void *)op;                          \
        sw_py_arg a[SW_PY_ARGS_MAX] = {{0}};                          \
        (void)self;                                                   \
        if (!sw_py_read(signature, args, NULL, a) || !(check))        \
            return NULL;                                              \
        return value;                                                 \
    }

/* A property without a setter. */
#define SW_PY_GETTER(function, object, value)                        \
    static PyObject *function(PyObject *op, void *Py_UNUSED(unused)) \
    {                                                                \
        const object *self = (const object *)(const void *)op;       \
        return value;                                                \
    }

/* A type of the module, with its slots. */
#define SW_PY_TYPE(spec, name_, object, flags_, doc, ...)                                     \
    static PyType_Slot spec##_slots[] = {__VA_ARGS__, {Py_tp_doc, (void *)(doc)}, {0, NULL}}; \
    PyType_Spec spec = {.name = "shardwright._engine." name_,                                 \
                        .basicsize = sizeof(object),                                          \
                        .flags = Py_TPFLAGS_DEFAULT | (flags_),                               \
                        .slots = spec##_slots};

/* An entry of a table of methods, with the parameters that help() shows. */
#define SW_PY_ENTRY(function, flags, name, parameters, doc) \
    {name, (PyCFunction)(void (*)(void))(function), flags, name "(" parameters ")\n--\n\n" doc}
/* Entries of functions named prefix_name: a method that takes arguments by position, one that also
 * takes them by name, one that takes none, and one of the type itself. */
#define SW_PY_ARGS(prefix, name, parameters, doc) \
    SW_PY_ENTRY(prefix##_##name, METH_VARARGS, #name, "$self, " parameters, doc)
#define SW_PY_KEYS(prefix, name, parameters, doc) \
    SW_PY_ENTRY(prefix##_##name, METH_VARARGS | METH_KEYWORDS, #name, "$self, " parameters, doc)
#define SW_PY_NONE(prefix, name, doc) \
    SW_PY_ENTRY(prefix##_##name, METH_NOARGS, #name, "$self, /", doc)
#define SW_PY_OF_TYPE(prefix, name, parameters, doc) \
    SW_PY_ENTRY(prefix##_##name, METH_VARARGS | METH_CLASS, #name, "$type, " parameters, doc)
/* The same for functions of the module. */
#define SW_PY_FUNCTION(name, parameters, doc) \
    SW_PY_ENTRY(name, METH_VARARGS, #name, "$module, " parameters, doc)
#define SW_PY_FUNCTION_AS(name, flags, parameters, doc) \
    SW_PY_ENTRY(name, flags, #name, "$module, " parameters, doc)
/* A method whose parameters help() does not show. */
#define SW_PY_NAMED(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

/* A count of a struct of statistics, all uint64_t, and a dict of such a table. */
typedef struct sw_py_count {
    const char *name;
    size_t offset;
} sw_py_count;
#define SW_PY_COUNT(type, field) {#field, offsetof(type, field)}
#define SW_PY_COUNT_AS(type, field, name) {name, offsetof(type, field)}
PyObject *sw_py_counts(const void *stats, const sw_py_count *counts, size_t count);

static inline PyObject *sw_py_none(void)
{
    Py_RETURN_NONE;
}
