/* arguments.c - see the header. */
#include "python/arguments.h"

#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

bool sw_py_refuse(PyObject *type, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyErr_FormatV(type, format, values);
    va_end(values);
    return false;
}

typedef struct field { /* of a signature */
    const char *operation;
    int operation_length, length;
    const char *name;
    char letter;
} field;

/* Moves to the next name of a signature. Returns false at its end. */
static bool next_field(const char **at, field *found, bool *is_optional, bool *is_named)
{
    for (;; ++*at) {
        *is_optional |= **at == '|';
        *is_named |= **at == '$';
        if (**at != ' ' && **at != '|' && **at != '$')
            break;
    }
    if (**at == '\0')
        return false;
    found->name = *at;
    found->length = (int)strcspn(*at, ":");
    found->letter = found->name[found->length + 1];
    *at = found->name + found->length + 2;
    if (found->letter == '(')
        *at += strcspn(*at, ")") + 1;
    return true;
}

/* Raises "operation: name" and `text`, which may have one %R, for `value`. Returns false. */
static bool refuse_as(const field *f, PyObject *error, const char *text, PyObject *value)
{
    char format[256];
    PyOS_snprintf(format, sizeof format, "%.*s: %.*s %s", f->operation_length, f->operation,
                  f->length, f->name, text);
    return sw_py_refuse(error, format, value);
}

static bool refuse(const field *f, PyObject *error, const char *wanted, PyObject *value)
{
    char text[96];
    PyOS_snprintf(text, sizeof text, "must be %s, got %%R", wanted);
    return refuse_as(f, error, text, value);
}

static bool refuse_type(const field *f, const char *wanted, PyObject *value)
{
    return refuse(f, PyExc_TypeError, wanted, (PyObject *)Py_TYPE(value));
}

static bool read_integer(const field *f, PyObject *value, sw_py_arg *out)
{
    PyObject *whole = PyIndex_Check(value) ? PyNumber_Index(value) : NULL;
    if (!whole)
        return !PyErr_Occurred() && refuse_type(f, "an int", value);
    if (f->letter == 'A' || f->letter == 'K')
        out->word = PyLong_AsUnsignedLongLong(whole);
    else
        out->n = PyLong_AsSsize_t(whole);
    bool fits = !PyErr_Occurred();
    PyErr_Clear();
    if (f->letter == 'i') {
        fits = fits && out->n >= INT_MIN && out->n <= INT_MAX;
        out->i = fits ? (int)out->n : 0;
    }
    if (!fits)
        refuse(f, PyExc_OverflowError,
               f->letter == 'i'                       ? "an int of 32 bits"
               : f->letter == 'A' || f->letter == 'K' ? "an int in [0, 2**64)"
                                                      : "an int of 64 bits",
               whole);
    else if (f->letter == 'N' && out->n < 0)
        fits = refuse(f, PyExc_ValueError, "at least 0", whole);
    Py_DECREF(whole);
    return fits;
}

/* Returns the number of `text` among a field's choices; -1 for another. `wanted`: all of them. */
static int find_choice(const field *f, const char *text, char *wanted, size_t capacity)
{
    const char *at = f->name + f->length + 1;
    size_t used = 0;
    int found = -1;
    for (int number = 0; *at != ')'; ++number) {
        size_t length = strcspn(++at, "|)");
        const char *before = number == 0 ? "" : at[length] == ')' ? " or " : ", ";
        if (strlen(text) == length && memcmp(text, at, length) == 0)
            found = number;
        used += (size_t)PyOS_snprintf(wanted + used, capacity - used, "%s'%.*s'", before,
                                      (int)length, at);
        used = used < capacity ? used : capacity - 1;
        at += length;
    }
    return found;
}

static bool read_text(const field *f, PyObject *value, sw_py_arg *out)
{
    Py_ssize_t length;
    out->s = NULL;
    if (f->letter == 'z' && value == Py_None)
        return true;
    if (!PyUnicode_Check(value))
        return refuse_type(f, f->letter == 'z' ? "a str or None" : "a str", value);
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (!text)
        return false;
    if (strlen(text) != (size_t)length)
        return refuse(f, PyExc_ValueError, "without null characters", value);
    if (f->letter == '(') {
        char wanted[80];
        out->i = find_choice(f, text, wanted, sizeof wanted);
        return out->i >= 0 || refuse(f, PyExc_ValueError, wanted, value);
    }
    if (f->letter == 'T') {
        out->dtype = sw_dtype_from_name(text);
        return out->dtype != SW_DTYPE_COUNT ||
               refuse(f, PyExc_ValueError, "a dtype that the engine moves", value);
    }
    out->s = text;
    return true;
}

/* Checks an object whose letter names its type. */
static bool is_of_kind(const field *f, PyObject *value)
{
    static const struct {
        char letter;
        unsigned long flag;
        const char *wanted;
    } kinds[] = {{'L', Py_TPFLAGS_LIST_SUBCLASS, "a list"},
                 {'U', Py_TPFLAGS_TUPLE_SUBCLASS, "a tuple"},
                 {'B', Py_TPFLAGS_BYTES_SUBCLASS, "bytes"},
                 {'D', Py_TPFLAGS_DICT_SUBCLASS, "a dict"}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; ++i)
        if (f->letter == kinds[i].letter && !PyType_HasFeature(Py_TYPE(value), kinds[i].flag))
            return refuse_type(f, kinds[i].wanted, value);
    return true;
}

static bool read_value(const field *f, PyObject *value, sw_py_arg *out)
{
    switch (f->letter) {
    case 's':
    case 'z':
    case 'T':
    case '(':
        return read_text(f, value, out);
    case 'd':
        if (!PyNumber_Check(value))
            return refuse_type(f, "a float", value);
        out->d = PyFloat_AsDouble(value);
        return !PyErr_Occurred();
    case 'p': {
        int truth = PyObject_IsTrue(value);
        out->p = truth > 0;
        return truth >= 0;
    }
    case 'O':
    case 'L':
    case 'U':
    case 'B':
    case 'D':
        out->o = value;
        return is_of_kind(f, value);
    default:
        return read_integer(f, value, out);
    }
}

/* Returns the borrowed value that was passed by name, or NULL, also with an exception. */
static PyObject *find_named(const field *f, PyObject *kwargs)
{
    PyObject *key = PyUnicode_FromStringAndSize(f->name, f->length);
    PyObject *value = key ? PyDict_GetItemWithError(kwargs, key) : NULL;
    Py_XDECREF(key);
    return value;
}

/* Refuses what the signature does not have, or has been given twice. */
static bool refuse_rest(const char *signature, const field *f, Py_ssize_t positional,
                        Py_ssize_t given, PyObject *kwargs)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    char operation[64];
    PyOS_snprintf(operation, sizeof operation, "%.*s", f->operation_length, f->operation);
    if (given > positional)
        PyErr_Format(PyExc_TypeError, "%s: takes at most %zd arguments by position, got %zd",
                     operation, positional, given);
    while (given <= positional && !PyErr_Occurred() && PyDict_Next(kwargs, &at, &key, &value)) {
        const char *name = PyUnicode_AsUTF8AndSize(key, NULL);
        const char *rest = signature + f->operation_length;
        field each = *f;
        bool is_optional = false, is_named = false, is_known = false;
        for (Py_ssize_t i = 0; name && next_field(&rest, &each, &is_optional, &is_named); ++i)
            is_known |= (is_named || i >= given) && strlen(name) == (size_t)each.length &&
                        strncmp(name, each.name, (size_t)each.length) == 0;
        if (name && !is_known)
            PyErr_Format(PyExc_TypeError, "%s: has no argument '%s', or has it already", operation,
                         name);
    }
    return false;
}

bool sw_py_read(const char *signature, PyObject *args, PyObject *kwargs, sw_py_arg *out)
{
    Py_ssize_t given = PyTuple_Size(args), positional = 0, named = 0, i = 0;
    bool is_optional = false, is_named = false;
    field f = {.operation = signature, .operation_length = (int)strcspn(signature, " ")};
    const char *at = signature + f.operation_length;
    for (; next_field(&at, &f, &is_optional, &is_named); ++i) {
        PyObject *value = NULL;
        positional += !is_named;
        if (!is_named && i < given) {
            value = PyTuple_GetItem(args, i);
        } else if (kwargs) {
            value = find_named(&f, kwargs);
            named += value != NULL;
        }
        if (PyErr_Occurred() || (value && !read_value(&f, value, &out[i])))
            return false;
        if (!value && !is_optional)
            return refuse_as(&f, PyExc_TypeError, "is missing", NULL);
    }
    if (given > positional || (kwargs && PyDict_Size(kwargs) > named))
        return refuse_rest(signature, &f, positional, given, kwargs);
    return true;
}

static bool fill_row(const char *signature, PyObject *item, void *row, sw_py_row_fn *fill,
                     void *context)
{
    sw_py_arg a[SW_PY_ARGS_MAX] = {{0}};
    if (PyTuple_Check(item))
        return sw_py_read(signature, item, NULL, a) && fill(a, row, context);
    return sw_py_refuse(PyExc_TypeError, "%s: a row must be a tuple of these, got %R", signature,
                        item);
}

bool sw_py_table_init(sw_py_table *table, PyObject *sequence, const char *signature,
                      size_t row_bytes, sw_py_row_fn *fill, void *context)
{
    bool is_single = strchr(signature, ':') == strrchr(signature, ':');
    *table = (sw_py_table){.items = PySequence_Tuple(sequence)};
    if (!table->items)
        return false;
    table->count = (size_t)PyTuple_Size(table->items);
    table->rows = calloc(table->count + 1, row_bytes);
    if (!table->rows)
        return PyErr_NoMemory() != NULL;
    bool is_filled = true;
    for (size_t i = 0; is_filled && i < table->count; ++i) {
        PyObject *item = PyTuple_GetItem(table->items, (Py_ssize_t)i);
        PyObject *row = is_single ? PyTuple_Pack(1, item) : item;
        is_filled =
            row && fill_row(signature, row, (char *)table->rows + i * row_bytes, fill, context);
        if (is_single)
            Py_XDECREF(row);
    }
    return is_filled;
}

void sw_py_table_fini(sw_py_table *table)
{
    Py_XDECREF(table->items);
    free(table->rows);
    *table = (sw_py_table){0};
}

bool sw_py_nested_init(sw_py_nested *nested, PyObject *sequence, const char *signature,
                       size_t row_bytes, sw_py_row_fn *fill)
{
    PyObject *items = PySequence_Tuple(sequence); /* its length must not change any more */
    *nested = (sw_py_nested){.begun = 0};
    if (items) {
        nested->inner = calloc((size_t)PyTuple_Size(items) + 1, sizeof *nested->inner);
        if (!nested->inner)
            PyErr_NoMemory();
    }
    bool is_read = nested->inner &&
                   sw_py_table_init(&nested->outer, items, signature, row_bytes, fill, nested);
    Py_XDECREF(items);
    return is_read;
}

sw_py_table *sw_py_nested_add(sw_py_nested *nested, PyObject *sequence, const char *signature,
                              size_t row_bytes, sw_py_row_fn *fill)
{
    sw_py_table *table = &nested->inner[nested->begun++];
    return sw_py_table_init(table, sequence, signature, row_bytes, fill, NULL) ? table : NULL;
}

void sw_py_nested_fini(sw_py_nested *nested)
{
    for (size_t i = 0; i < nested->begun; ++i)
        sw_py_table_fini(&nested->inner[i]);
    free(nested->inner);
    sw_py_table_fini(&nested->outer);
}

SW_PY_SHARED_ROW(sw_py_fill_int, int, a->i)
SW_PY_SHARED_ROW(sw_py_fill_size, int64_t, a->n)
SW_PY_SHARED_ROW(sw_py_fill_address, void *, a->address)
SW_PY_SHARED_ROW(sw_py_fill_text, const char *, a->s)
