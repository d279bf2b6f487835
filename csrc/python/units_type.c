/* units_type.c - shardwright._engine.Units: parameters that are gathered and released in units.
 *
 * A tensor over a unit's addresses keeps the Units object alive, which keeps the arena of the
 * slices alive: no address is reused while a tensor refers to it. */
#include "python/method.h"
#include "python/owner.h"
#include "zero/unit.h"

enum { KEPT_ARENA, KEPT_CODES }; /* the arena of the slices, and that of its records */

SW_PY_ROW(fill_run, sw_unit_run, .target_bytes = a[0].size, .rank = a[1].size,
          .source_bytes = a[2].size, .size_bytes = a[3].size, .coded = a[4].p)

static bool fill_spec(const sw_py_arg *a, void *row, void *specs)
{
    const sw_py_table *runs =
        sw_py_nested_add(specs, a[2].o, "run target_bytes:N rank:N source_bytes:N nbytes:N coded:p",
                         sizeof(sw_unit_run), fill_run);
    if (runs)
        *(sw_unit_spec *)row = (sw_unit_spec){
            .name = a[0].s, .size_bytes = a[1].size, .runs = runs->rows, .run_count = runs->count};
    return runs != NULL;
}

SW_PY_DESTROY(destroy, sw_units_destroy)

static int units_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[5] = {{0}};
    SW_PY_NESTED specs = {.begun = 0};
    sw_units *made = NULL;
    sw_error err;
    if (!sw_py_read("Units arena:O units:L warm_bytes:N label:s | codes:O", args, kwargs, a))
        return -1;
    PyObject *arena = a[0].o, *codes = a[4].o;
    const sw_arena *slices = sw_py_arena_of(op, arena);
    const sw_arena *records = codes ? sw_py_arena_of(op, codes) : NULL;
    if (!slices || (codes && !records)) {
        PyErr_SetString(PyExc_ValueError, "Units: arena and codes must be Arenas that ranks share");
        return -1;
    }
    if (!sw_py_use_make(&self->use, "Units"))
        return -1;
    sw_py_owner_keep(self, KEPT_ARENA, arena);
    if (codes)
        sw_py_owner_keep(self, KEPT_CODES, codes);
    const sw_unit_parts parts = {.slices = slices->base,
                                 .codes = records ? records->base : NULL,
                                 .world_size = (size_t)slices->world_size,
                                 .slice_bytes = slices->size_bytes,
                                 .code_bytes = records ? records->size_bytes : 0};
    if (!sw_py_nested_init(&specs, a[1].o, "unit name:s nbytes:N runs:L", sizeof(sw_unit_spec),
                           fill_spec))
        return -1;
    sw_status status = SW_PY_WITHOUT_GIL(sw_units_create(
        &parts, specs.outer.rows, specs.outer.count, a[2].size, a[3].s, &made, &err));
    return sw_py_owner_made(self, made, destroy, status, &err);
}

static bool check_unit(const sw_py_owner *self, Py_ssize_t unit)
{
    size_t count = self->made ? sw_units_count(self->made) : 0;
    return (unit >= 0 && (size_t)unit < count) ||
           sw_py_refuse(PyExc_ValueError, "Units: unit must be in [0, %zu), got %zd", count, unit);
}

/* Enters to change a unit: units share pages, so that one thread at a time changes any of them. */
static bool enter(sw_py_owner *self, Py_ssize_t unit)
{
    PyObject *error = sw_py_state_of(self)->error;
    if (!check_unit(self, unit))
        return false;
    if (sw_py_use_is_own(&self->use))
        return sw_py_use_enter(&self->use, SW_PY_ALONE, SW_PY_PATIENCE_NS, error, "units", "");
    return sw_py_refuse(
        error, "units: this process is a child of the one that wrapped the module, whose pages it "
               "would overwrite: fork inside `with sw.full_parameters(module)`, or copy the "
               "module there");
}

static PyObject *finish(sw_py_owner *self, sw_status status, const sw_error *err)
{
    sw_py_use_leave(&self->use);
    return sw_py_finish(self, status, err);
}

#define UNITS_METHOD(name, call)                                                        \
    SW_PY_METHOD(units_##name, sw_py_owner, #name " unit:n", enter(self, a[0].n), call, \
                 finish(self, status, &err))

SW_PY_METHOD_WITH(units_gather, sw_py_owner, "gather unit:n | apart:p exact:p", a[2].p = true,
                  enter(self, a[0].n),
                  sw_unit_gather(self->made, a[0].size, a[2].p ? SW_UNIT_SLICES : SW_UNIT_CODES,
                                 &err),
                  finish(self, status, &err))
UNITS_METHOD(release, sw_unit_release(self->made, a[0].size, &err))

/* Returns a byte's place, -1 for SIZE_MAX, unless the call has failed. */
static PyObject *place_if(PyObject *finished, size_t place)
{
    SW_PY_OWNED *done = finished;
    return done ? PyLong_FromSsize_t((Py_ssize_t)place) : NULL;
}

SW_PY_METHOD_WITH(units_take_write, sw_py_owner, "take_write unit:n", size_t found,
                  enter(self, a[0].n),
                  (found = sw_unit_find_write(self->made, a[0].size)) == SIZE_MAX
                      ? SW_OK
                      : sw_unit_forget_writes(self->made, a[0].size, &err),
                  place_if(finish(self, status, &err), found))

SW_PY_VALUE(units_state, sw_py_owner, "state unit:n", check_unit(self, a[0].n),
            PyUnicode_FromString(sw_shard_state_name(sw_unit_state(self->made, a[0].size))))

SW_PY_VALUE(units_is_whole, sw_py_owner, "is_whole unit:n", check_unit(self, a[0].n),
            PyBool_FromLong(sw_unit_state(self->made, a[0].size) == SW_SHARD_UNSHARDED))
SW_PY_VALUE(units_is_apart, sw_py_owner, "is_apart unit:n", check_unit(self, a[0].n),
            PyBool_FromLong(0))
SW_PY_GETTER(units_is_collective, sw_py_owner, PyBool_FromLong(self->comm != NULL))

SW_PY_OWNER_STATS(units_stats, sw_units_stats, sw_units_get_stats,
                  SW_PY_COUNT(sw_units_stats, gathers), SW_PY_COUNT(sw_units_stats, releases),
                  SW_PY_COUNT_AS(sw_units_stats, bytes, "gathered_bytes"),
                  SW_PY_COUNT(sw_units_stats, gather_ns),
                  SW_PY_COUNT_AS(sw_units_stats, most_bytes, "most_unit_bytes"))

static PyObject *units_tensor(PyObject *op, PyObject *args)
{
    const sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[6];
    sw_py_layout layout;
    if (!sw_py_read("Units.tensor unit:n offset_bytes:n numel:n dtype:T shape:O strides:O", args,
                    NULL, a) ||
        !check_unit(self, a[0].n) ||
        !sw_py_layout_init(&layout, a[3].dtype, a[4].o, a[5].o, "Units.tensor"))
        return NULL;
    size_t size = sw_unit_size_bytes(self->made, a[0].size);
    if (layout.numel != a[2].size)
        return PyErr_Format(PyExc_ValueError, "Units.tensor: shape has %zu elements, not %zd",
                            layout.numel, a[2].n);
    if (a[1].n < 0 || a[2].n <= 0 || a[1].size > size || layout.bytes > size - a[1].size)
        return PyErr_Format(PyExc_ValueError,
                            "Units.tensor: %zd elements from byte %zd leave the unit of %zu bytes",
                            a[2].n, a[1].n, size);
    return sw_py_dlpack_capsule_on(-1, op, sw_unit_address(self->made, a[0].size) + a[1].n,
                                   &layout);
}

static PyMethodDef units_methods[] = {
    SW_PY_ARGS(units, gather, "unit, apart=False, exact=True, /",
               "Gather a unit: sharded to unsharded; without exact by decoding coded runs. `apart` "
               "has no effect: each unit has its own addresses."),
    SW_PY_ARGS(units, release, "unit, /", "Release a unit: unsharded to sharded."),
    SW_PY_ARGS(units, take_write, "unit, /",
               "Return the first byte written in a released unit, once; -1: none."),
    SW_PY_ARGS(units, state, "unit, /", "Return 'sharded', 'gathering' or 'unsharded'."),
    SW_PY_ARGS(units, is_whole, "unit, /", "Return True if the unit is unsharded."),
    SW_PY_ARGS(units, is_apart, "unit, /", "Return False: a unit lies at its own addresses."),
    SW_PY_NONE(units, stats, "Return counts since creation."),
    SW_PY_ARGS(units, tensor, "unit, offset_bytes, numel, dtype, shape, strides, /",
               "Return a DLPack capsule."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef units_properties[] = {
    {"is_collective", units_is_collective, NULL, "False: a rank gathers without the others", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_units_type_spec, "Units", sw_py_owner, 0,
           "Parameters that are gathered and released in units, over an arena of slices. units: "
           "[(name, nbytes, [(target_bytes, rank, source_bytes, nbytes, coded)])].",
           {Py_tp_init, units_init}, {Py_tp_dealloc, sw_py_owner_dealloc},
           {Py_tp_methods, units_methods}, {Py_tp_getset, units_properties})
