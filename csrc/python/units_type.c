/* units_type.c - shardwright._engine.Units: parameters that are gathered and released in units.
 *
 * A tensor over a unit's addresses keeps the Units object alive, which keeps the arena of the
 * slices alive: no address is reused while a tensor refers to it. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "python/engine.h"
#include "zero/unit.h"

typedef struct units_object {
    PyObject_HEAD sw_units *units; /* owned; NULL before __init__ */
    PyObject *arena, *codes;       /* owned: the arena of the slices, and its records or NULL */
    pid_t process; /* pid of the owner of the pages: a forked child would write into its parent's */
} units_object;

static int raise(units_object *self, sw_status status, const sw_error *err)
{
    if (status == SW_OK)
        return 0;
    sw_py_raise(sw_py_state_of((PyObject *)self), err, NULL);
    return -1;
}

/* Fills *spec from (name, nbytes, runs). The caller owns *runs. */
static int read_spec(PyObject *item, sw_unit_spec *spec, sw_unit_run **runs)
{
    PyObject *list;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(item, "snO!:unit", &spec->name, &size, &PyList_Type, &list))
        return -1;
    Py_ssize_t count = PyList_Size(list);
    if (size < 0) {
        PyErr_Format(PyExc_ValueError, "Units: nbytes must be at least 0, got %zd", size);
        return -1;
    }
    *runs = calloc((size_t)count + 1, sizeof **runs);
    if (!*runs) {
        PyErr_NoMemory();
        return -1;
    }
    spec->size_bytes = (size_t)size;
    spec->runs = *runs;
    spec->run_count = (size_t)count;
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_ssize_t target, rank, source, bytes;
        int coded;
        if (!PyArg_ParseTuple(PyList_GetItem(list, i), "nnnnp:run", &target, &rank, &source, &bytes,
                              &coded))
            return -1;
        if (target < 0 || rank < 0 || source < 0 || bytes < 0) {
            PyErr_SetString(PyExc_ValueError, "Units: a run has no negative numbers");
            return -1;
        }
        (*runs)[i] = (sw_unit_run){.target_bytes = (size_t)target,
                                   .rank = (size_t)rank,
                                   .source_bytes = (size_t)source,
                                   .size_bytes = (size_t)bytes,
                                   .coded = coded};
    }
    return 0;
}

static int create(units_object *self, const sw_unit_parts *parts, PyObject *list, size_t warm_bytes,
                  const char *label)
{
    size_t count = (size_t)PyList_Size(list);
    int failed = -1;
    sw_error err;
    sw_unit_spec *specs = calloc(count + 1, sizeof *specs);
    sw_unit_run **runs = calloc(count + 1, sizeof *runs);
    if (!specs || !runs) {
        PyErr_NoMemory();
        goto done;
    }
    for (size_t i = 0; i < count; ++i)
        if (read_spec(PyList_GetItem(list, (Py_ssize_t)i), &specs[i], &runs[i]) < 0)
            goto done;
    sw_status status;
    Py_BEGIN_ALLOW_THREADS
    status = sw_units_create(parts, specs, count, warm_bytes, label, &self->units, &err);
    Py_END_ALLOW_THREADS
    failed = raise(self, status, &err);
done:
    for (size_t i = 0; runs && i < count; ++i)
        free(runs[i]);
    free(runs);
    free(specs);
    return failed;
}

static int units_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"arena", "units", "warm_bytes", "label", "codes", NULL};
    units_object *self = (units_object *)op;
    PyObject *arena, *list, *codes = NULL;
    Py_ssize_t warm_bytes;
    const char *label;
    PyTypeObject *arena_type = sw_py_state_of(op)->arena_type;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!ns|O!:Units", names, arena_type, &arena,
                                     &PyList_Type, &list, &warm_bytes, &label, arena_type, &codes))
        return -1;
    const sw_arena *slices = ((arena_object *)arena)->arena;
    const sw_arena *records = codes ? ((arena_object *)codes)->arena : NULL;
    if (self->units || !slices || (codes && !records) || warm_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "Units: made once, over an arena that ranks share, with "
                                          "warm_bytes of at least 0");
        return -1;
    }
    Py_INCREF(arena);
    Py_XINCREF(codes);
    self->arena = arena;
    self->codes = codes;
    self->process = getpid();
    const sw_unit_parts parts = {.slices = slices->base,
                                 .codes = records ? records->base : NULL,
                                 .world_size = (size_t)slices->world_size,
                                 .slice_bytes = slices->size_bytes,
                                 .code_bytes = records ? records->size_bytes : 0};
    return create(self, &parts, list, (size_t)warm_bytes, label);
}

static void units_dealloc(PyObject *op)
{
    units_object *self = (units_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    sw_units_destroy(self->units);
    ENGINE_CLEAR(self->arena);
    ENGINE_CLEAR(self->codes);
    PyObject_Free(op);
    Py_DECREF(type);
}

/* Reads the number of a unit. Returns -1 with an exception. */
static Py_ssize_t read_unit(const units_object *self, PyObject *position)
{
    Py_ssize_t unit = PyLong_AsSsize_t(position);
    if (unit == -1 && PyErr_Occurred())
        return -1;
    size_t count = self->units ? sw_units_count(self->units) : 0;
    if (unit < 0 || (size_t)unit >= count) {
        PyErr_Format(PyExc_ValueError, "Units: unit must be in [0, %zu), got %zd", count, unit);
        return -1;
    }
    return unit;
}

/* Reads the number of a unit that is about to change. Returns -1 with an exception. */
static Py_ssize_t enter_unit(units_object *self, PyObject *position)
{
    Py_ssize_t unit = read_unit(self, position);
    sw_error err;
    if (unit < 0 || self->process == getpid())
        return unit;
    sw_error_set(
        &err, SW_E_STATE, -1,
        "units: this process is a child of the one that wrapped the module, whose pages it "
        "would overwrite: fork inside `with sw.full_parameters(module)`, or copy the "
        "module there");
    return raise(self, SW_E_STATE, &err);
}

static PyObject *gather_from(PyObject *op, PyObject *position, sw_unit_source source)
{
    units_object *self = (units_object *)op;
    Py_ssize_t unit = enter_unit(self, position);
    sw_status status;
    sw_error err;
    if (unit < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_unit_gather(self->units, (size_t)unit, source, &err);
    Py_END_ALLOW_THREADS
    if (raise(self, status, &err) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *units_gather(PyObject *op, PyObject *position)
{
    return gather_from(op, position, SW_UNIT_SLICES);
}

static PyObject *units_gather_codes(PyObject *op, PyObject *position)
{
    return gather_from(op, position, SW_UNIT_CODES);
}

static PyObject *units_release(PyObject *op, PyObject *position)
{
    units_object *self = (units_object *)op;
    Py_ssize_t unit = enter_unit(self, position);
    sw_error err;
    if (unit < 0 || raise(self, sw_unit_release(self->units, (size_t)unit, &err), &err) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *units_take_write(PyObject *op, PyObject *position)
{
    units_object *self = (units_object *)op;
    Py_ssize_t unit = enter_unit(self, position);
    sw_error err;
    if (unit < 0)
        return NULL;
    size_t found = sw_unit_find_write(self->units, (size_t)unit);
    if (found == SIZE_MAX)
        return PyLong_FromLong(-1);
    if (raise(self, sw_unit_forget_writes(self->units, (size_t)unit, &err), &err) < 0)
        return NULL;
    return PyLong_FromSize_t(found);
}

static PyObject *units_state(PyObject *op, PyObject *position)
{
    units_object *self = (units_object *)op;
    Py_ssize_t unit = read_unit(self, position);
    if (unit < 0)
        return NULL;
    return PyUnicode_FromString(sw_shard_state_name(sw_unit_state(self->units, (size_t)unit)));
}

static PyObject *units_stats(PyObject *op, PyObject *unused)
{
    units_object *self = (units_object *)op;
    sw_units_stats stats = {0};
    (void)unused;
    if (self->units)
        stats = sw_units_get_stats(self->units);
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:n}", "gathers", (unsigned long long)stats.gathers,
                         "releases", (unsigned long long)stats.releases, "gathered_bytes",
                         (unsigned long long)stats.bytes, "gather_ns",
                         (unsigned long long)stats.gather_ns, "most_unit_bytes",
                         (Py_ssize_t)stats.most_bytes);
}

static PyObject *units_tensor(PyObject *op, PyObject *args)
{
    units_object *self = (units_object *)op;
    PyObject *position, *shape, *strides;
    Py_ssize_t offset, numel, unit;
    const char *name;
    if (!PyArg_ParseTuple(args, "OnnsOO:tensor", &position, &offset, &numel, &name, &shape,
                          &strides) ||
        (unit = read_unit(self, position)) < 0)
        return NULL;
    sw_dtype dtype = sw_dtype_from_name(name);
    if (dtype == SW_DTYPE_COUNT)
        return PyErr_Format(PyExc_ValueError,
                            "Units.tensor: dtype '%s' is not one the engine moves", name);
    size_t size = sw_unit_size_bytes(self->units, (size_t)unit), bytes;
    if (offset < 0 || numel <= 0 || (size_t)offset > size ||
        __builtin_mul_overflow((size_t)numel, sw_dtype_size_bytes(dtype), &bytes) ||
        bytes > size - (size_t)offset)
        return PyErr_Format(PyExc_ValueError,
                            "Units.tensor: %zd elements from byte %zd leave the unit of %zu bytes",
                            numel, offset, size);
    return sw_py_dlpack_capsule_new(op, sw_unit_address(self->units, (size_t)unit) + offset, dtype,
                                    shape, strides);
}

static PyMethodDef units_methods[] = {
    {"gather", units_gather, METH_O,
     "gather($self, unit, /)\n--\n\nGather a unit: sharded to unsharded."},
    {"gather_codes", units_gather_codes, METH_O,
     "gather_codes($self, unit, /)\n--\n\nGather a unit and decode coded runs from their records."},
    {"release", units_release, METH_O,
     "release($self, unit, /)\n--\n\nRelease a unit: unsharded to sharded."},
    {"take_write", units_take_write, METH_O,
     "take_write($self, unit, /)\n--\n\n"
     "Return the first byte written in a released unit, once; -1: none."},
    {"state", units_state, METH_O,
     "state($self, unit, /)\n--\n\nReturn 'sharded', 'gathering' or 'unsharded'."},
    {"stats", units_stats, METH_NOARGS, "stats($self, /)\n--\n\nReturn counts since creation."},
    {"tensor", units_tensor, METH_VARARGS,
     "tensor($self, unit, offset_bytes, numel, dtype, shape, strides, /)\n--\n\n"
     "Return a DLPack capsule."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot units_slots[] = {
    {Py_tp_init, units_init},
    {Py_tp_dealloc, units_dealloc},
    {Py_tp_methods, units_methods},
    {Py_tp_doc, "Parameters that are gathered and released in units, over an arena of slices."},
    {0, NULL},
};

PyType_Spec sw_py_units_type_spec = {
    .name = "shardwright._engine.Units",
    .basicsize = sizeof(units_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = units_slots,
};
