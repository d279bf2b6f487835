/* arguments.h - the one reader of arguments, positional and by name, and of lists of rows.
 *
 * A signature names the operation, then each argument with the letter of what it becomes:
 *
 *     "all_reduce address:A numel:N dtype:T | op:s label:s $ arena:O"
 *
 * Those behind `|` may be left out, those behind `$` are passed by name. "op:(sum|mean)" takes one
 * of these texts. The names are in every message, so a wrong argument is refused in one sentence:
 * "all_reduce: numel must be at least 0, got -1". A letter never cuts a number: one out of range is
 * an OverflowError.
 *
 * Thread rule: with the GIL held. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "tensor/dtype.h"

typedef union sw_py_arg { /* by its letter */
    Py_ssize_t n;         /* n: an int */
    size_t size;          /* N: an int of at least 0 */
    uint64_t word;        /* K: an int in [0, 2**64) */
    int i;                /* i: an int that fits; (a|b|c): the number of the text given */
    double d;             /* d: a float */
    bool p;               /* p: any object, by its truth */
    void *address;        /* A: an int in [0, 2**64), 0 for none */
    const char *s;        /* s: a str; z: or None, which is NULL. The caller's object owns it */
    sw_dtype dtype;       /* T: the name of a dtype that the engine moves */
    PyObject *o;          /* O: any object; L: a list; U: a tuple; B: bytes; D: a dict. Borrowed */
} sw_py_arg;

enum { SW_PY_ARGS_MAX = 20 };

/* Reads a tuple, and `kwargs` unless that is NULL, into out[], one entry for each name. Entries of
 * arguments that were left out keep their values. Returns false with an exception. */
bool sw_py_read(const char *signature, PyObject *args, PyObject *kwargs, sw_py_arg *out);

/* Sets an exception, with a text like PyErr_Format's. Returns false. */
bool sw_py_refuse(PyObject *type, const char *format, ...);

/* Rows of C made from a sequence: one row of `row_bytes` for each item. An item is a tuple that the
 * signature describes, or the one argument itself if the signature has one name. The table keeps
 * the items, and so their strings, alive: the caller's list may change while other code runs. */
typedef struct sw_py_table {
    PyObject *items; /* owned tuple */
    void *rows;      /* owned */
    size_t count;
} sw_py_table;

/* Fills a row from an item's arguments. Returns false with an exception. */
typedef bool sw_py_row_fn(const sw_py_arg *a, void *row, void *context);

/* Defines such a function for a row whose values are these expressions of a[]. */
#define SW_PY_SHARED_ROW(function, type, ...)                             \
    bool function(const sw_py_arg *a, void *row, void *Py_UNUSED(unused)) \
    {                                                                     \
        *(type *)row = (type){__VA_ARGS__};                               \
        return true;                                                      \
    }
#define SW_PY_ROW(function, type, ...) static SW_PY_SHARED_ROW(function, type, __VA_ARGS__)

/* Returns false with an exception. The caller calls fini in both cases; {0} needs none. */
bool sw_py_table_init(sw_py_table *table, PyObject *sequence, const char *signature,
                      size_t row_bytes, sw_py_row_fn *fill, void *context);
void sw_py_table_fini(sw_py_table *table);
/* A local table that ends with its block; begun as {0}. */
#define SW_PY_TABLE __attribute__((cleanup(sw_py_table_fini))) sw_py_table

/* Rows that have a table of their own each, such as units with their runs. */
typedef struct sw_py_nested {
    sw_py_table outer, *inner; /* owned; inner[i] is of row i */
    size_t begun;              /* inner tables */
} sw_py_nested;

/* As sw_py_table_init; `fill` gets the sw_py_nested as its context and makes the row's own table
 * with sw_py_nested_add, once. */
bool sw_py_nested_init(sw_py_nested *nested, PyObject *sequence, const char *signature,
                       size_t row_bytes, sw_py_row_fn *fill);
sw_py_table *sw_py_nested_add(sw_py_nested *nested, PyObject *sequence, const char *signature,
                              size_t row_bytes, sw_py_row_fn *fill);
void sw_py_nested_fini(sw_py_nested *nested);
#define SW_PY_NESTED __attribute__((cleanup(sw_py_nested_fini))) sw_py_nested

/* Rows of one argument each. */
bool sw_py_fill_int(const sw_py_arg *a, void *row, void *unused);
bool sw_py_fill_size(const sw_py_arg *a, void *row, void *unused); /* int64_t, by N */
bool sw_py_fill_address(const sw_py_arg *a, void *row, void *unused);
bool sw_py_fill_text(const sw_py_arg *a, void *row, void *unused);
