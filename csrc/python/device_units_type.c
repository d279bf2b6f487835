/* device_units_type.c - shardwright._engine.DeviceUnits: units of parameters that are gathered into
 * places of GPU memory. parameters/unshard_schedule.py decides when. */
#include "python/method.h"
#include "python/owner.h"
#include "zero/device_units.h"

typedef struct device_units_object {
    sw_py_owner owner; /* of a sw_device_units */
    size_t place_count;
} device_units_object;

SW_PY_ROW(fill_run, sw_device_unit_run, .slice = a[0].address, .offset_bytes = a[1].size,
          .slice_bytes = a[2].size, .slice_dtype = a[3].dtype, .dtype = a[4].dtype)

static bool fill_spec(const sw_py_arg *a, void *row, void *specs)
{
    const sw_py_table *runs = sw_py_nested_add(
        specs, a[3].o, "run address:A offset_bytes:N nbytes:N slice_dtype:T dtype:T",
        sizeof(sw_device_unit_run), fill_run);
    if (runs)
        *(sw_device_unit_spec *)row = (sw_device_unit_spec){.name = a[0].s,
                                                            .place = a[1].size,
                                                            .data = a[2].address,
                                                            .runs = runs->rows,
                                                            .run_count = runs->count};
    return runs != NULL;
}

SW_PY_DESTROY(destroy, sw_device_units_destroy)

static int units_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    sw_py_owner *self = (sw_py_owner *)op;
    sw_py_arg a[3] = {{0}};
    SW_PY_NESTED specs = {.begun = 0};
    sw_device_units *made = NULL;
    sw_error err;
    if (!sw_py_read("DeviceUnits comm:O place_count:N units:L", args, kwargs, a) ||
        !sw_py_owner_bind(self, a[0].o, "DeviceUnits") ||
        !sw_py_nested_init(&specs, a[2].o, "unit name:s place:n address:A runs:L",
                           sizeof(sw_device_unit_spec), fill_spec) ||
        !sw_py_device_enter(self->comm))
        return -1;
    ((device_units_object *)op)->place_count = a[1].size;
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_units_create(
        self->comm->comm, a[1].size, specs.outer.rows, specs.outer.count, &made, &err));
    return sw_py_owner_made(self, made, destroy, status, &err);
}

/* Checks the unit's number and enters the communicator. Returns false with an exception. */
static bool check_unit(const sw_py_owner *self, Py_ssize_t unit)
{
    size_t count = self->made ? sw_device_units_count(self->made) : 0;
    if (!sw_py_owner_check(self, "the units were"))
        return false;
    return (unit >= 0 && (size_t)unit < count) ||
           sw_py_refuse(PyExc_IndexError, "unit must be in [0, %zu), got %zd", count, unit);
}

static bool enter(const sw_py_owner *self)
{
    return sw_py_owner_check(self, "the units were") && sw_py_device_enter(self->comm);
}

#define UNITS_METHOD(name, signature, enter_, call)                            \
    SW_PY_METHOD(units_##name, sw_py_owner, #name " " signature, enter_, call, \
                 sw_py_device_finish(self->comm, status, &err))
#define ONE check_unit(self, a[0].n) && enter(self)

UNITS_METHOD(gather, "unit:n", ONE, sw_device_unit_gather(self->made, a[0].size, &err))
UNITS_METHOD(take, "unit:n stream:A", ONE,
             sw_device_unit_take(self->made, a[0].size, a[1].address, &err))
UNITS_METHOD(wait, "unit:n", ONE, sw_device_unit_wait(self->made, a[0].size, &err))
UNITS_METHOD(release, "unit:n stream:A", ONE,
             sw_device_unit_release(self->made, a[0].size, a[1].address, &err))
UNITS_METHOD(gather_apart, "unit:n address:A stream:A", ONE,
             sw_device_unit_gather_apart(self->made, a[0].size, a[1].address, a[2].address, &err))
UNITS_METHOD(update, "stream:A", enter(self),
             sw_device_units_update(self->made, a[0].address, &err))
UNITS_METHOD(gather_anew, "stream:A", enter(self),
             sw_device_units_gather_anew(self->made, a[0].address, &err))

SW_PY_VALUE(units_state, sw_py_owner, "state unit:n", check_unit(self, a[0].n),
            PyUnicode_FromString(sw_shard_state_name(sw_device_unit_state(self->made, a[0].size))))

static PyObject *units_holder(PyObject *op, PyObject *args)
{
    const device_units_object *self = (device_units_object *)op;
    sw_py_arg a[1];
    if (!sw_py_read("holder place:n", args, NULL, a))
        return NULL;
    if (!self->owner.made || a[0].n < 0 || a[0].size >= self->place_count)
        return PyErr_Format(PyExc_IndexError, "place must be in [0, %zu), got %zd",
                            self->owner.made ? self->place_count : 0, a[0].n);
    size_t holder = sw_device_units_holder(self->owner.made, a[0].size);
    return holder == SW_DEVICE_UNIT_NONE ? sw_py_none() : PyLong_FromSize_t(holder);
}

SW_PY_OWNER_STATS(units_stats, sw_device_units_stats, sw_device_units_get_stats,
                  SW_PY_COUNT(sw_device_units_stats, gathers),
                  SW_PY_COUNT(sw_device_units_stats, releases),
                  SW_PY_COUNT_AS(sw_device_units_stats, bytes, "gathered_bytes"))

static PyMethodDef units_methods[] = {
    SW_PY_ARGS(units, gather, "unit, /", "Gather a unit into its place, after earlier work there."),
    SW_PY_ARGS(units, take, "unit, stream, /", "Let the stream wait for the unit."),
    SW_PY_ARGS(units, wait, "unit, /", "Make the host wait for the unit, for use on all streams."),
    SW_PY_ARGS(units, release, "unit, stream, /", "Release the unit after the stream's work."),
    SW_PY_ARGS(units, gather_apart, "unit, address, stream, /",
               "Gather into separate memory, in the order of the stream."),
    SW_PY_ARGS(units, update, "stream, /", "Order gathers after writes to slices on the stream."),
    SW_PY_ARGS(units, gather_anew, "stream, /", "Gather all units after the stream's writes."),
    SW_PY_ARGS(units, state, "unit, /", "Return 'sharded', 'gathering' or 'unsharded'."),
    SW_PY_ARGS(units, holder, "place, /", "Return the unit in a place, or None."),
    SW_PY_NONE(units, stats, "Return counts since creation."),
    {NULL, NULL, 0, NULL},
};

SW_PY_TYPE(
    sw_py_device_units_type_spec, "DeviceUnits", device_units_object, 0,
    "Units of parameters that are gathered into a GPU's places. units: [(name, place, address or "
    "0, [(slice, offset_bytes, nbytes, dtype of the slice, dtype in the unit)])].",
    {Py_tp_init, units_init}, {Py_tp_dealloc, sw_py_owner_dealloc}, {Py_tp_methods, units_methods})
