/* device_units_type.c - shardwright._engine.DeviceUnits: units of parameters that are gathered into
 * places of GPU memory. parameters/prefetch.py decides when. */
#include <stdlib.h>
#include <string.h>

#include "python/device_object.h"
#include "zero/device_units.h"

typedef struct device_units_object {
    PyObject_HEAD device_comm_object *comm; /* owned */
    sw_device_units *units;                 /* owned; NULL before init */
    size_t place_count;
} device_units_object;

typedef struct spec_list {
    sw_device_unit_spec *spec; /* owned */
    sw_device_unit_run **runs; /* owned, each element too */
    size_t count;
} spec_list;

/* ---- life ---- */

static void specs_fini(spec_list *list)
{
    for (size_t i = 0; list->runs && i < list->count; ++i)
        free(list->runs[i]);
    free(list->runs);
    free(list->spec);
}

/* Parses (address, offset_bytes, nbytes, dtype of the slice, dtype in the unit). */
static int read_run(PyObject *item, sw_device_unit_run *run)
{
    PyObject *slice;
    Py_ssize_t offset, bytes;
    const char *from, *to;
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "Onnss;a run is (address, offset_bytes, nbytes, dtype, dtype)",
                          &slice, &offset, &bytes, &from, &to))
        return -1;
    *run = (sw_device_unit_run){.slice = PyLong_AsVoidPtr(slice),
                                .offset_bytes = (size_t)offset,
                                .slice_bytes = (size_t)bytes,
                                .slice_dtype = sw_dtype_from_name(from),
                                .dtype = sw_dtype_from_name(to)};
    if (PyErr_Occurred())
        return -1;
    if (offset < 0 || bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "DeviceUnits: a run has no negative numbers");
        return -1;
    }
    if (run->slice_dtype != SW_DTYPE_COUNT && run->dtype != SW_DTYPE_COUNT)
        return 0;
    PyErr_Format(PyExc_ValueError, "DeviceUnits: dtypes '%s' and '%s' must be the engine's", from,
                 to);
    return -1;
}

/* Parses (name, place, address, runs). */
static int read_spec(PyObject *item, sw_device_unit_spec *spec, sw_device_unit_run **runs)
{
    PyObject *list, *address;
    Py_ssize_t place;
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "snOO!;a unit is (name, place, address, runs)", &spec->name, &place,
                          &address, &PyList_Type, &list))
        return -1;
    spec->place = (size_t)place;
    spec->data = PyLong_AsVoidPtr(address);
    spec->run_count = (size_t)PyList_Size(list);
    if (PyErr_Occurred())
        return -1;
    *runs = calloc(spec->run_count + 1, sizeof **runs);
    if (!*runs) {
        PyErr_NoMemory();
        return -1;
    }
    spec->runs = *runs;
    for (size_t i = 0; i < spec->run_count; ++i)
        if (read_run(PyList_GetItem(list, (Py_ssize_t)i), &(*runs)[i]) < 0)
            return -1;
    return 0;
}

static int read_specs(PyObject *list, spec_list *out)
{
    size_t count = (size_t)PyList_Size(list);
    *out = (spec_list){.spec = calloc(count + 1, sizeof *out->spec),
                       .runs = calloc(count + 1, sizeof *out->runs),
                       .count = count};
    if (!out->spec || !out->runs) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; ++i) {
        PyObject *item = PyList_GetItem(list, (Py_ssize_t)i);
        if (read_spec(item, &out->spec[i], &out->runs[i]) < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a unit is (name, place, address, runs)");
            return -1;
        }
    }
    return 0;
}

static int units_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"comm", "place_count", "units", NULL};
    device_units_object *self = (device_units_object *)op;
    PyObject *comm, *list;
    Py_ssize_t place_count;
    spec_list specs;
    sw_error err;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnO!:DeviceUnits", names, &comm, &place_count,
                                     &PyList_Type, &list))
        return -1;
    if (self->comm || !PyObject_TypeCheck(comm, sw_py_state_of(op)->device_comm_type)) {
        PyErr_SetString(PyExc_TypeError, "DeviceUnits: comm must be a DeviceComm, and a "
                                         "DeviceUnits is initialised once");
        return -1;
    }
    if (place_count < 0) {
        PyErr_Format(PyExc_ValueError, "DeviceUnits: place_count must be at least 0, got %zd",
                     place_count);
        return -1;
    }
    Py_INCREF(comm);
    self->comm = (device_comm_object *)comm;
    self->place_count = (size_t)place_count;
    int result = read_specs(list, &specs);
    if (result == 0 && !sw_py_device_enter(self->comm))
        result = -1;
    else if (result == 0) {
        sw_status status;
        SW_PY_WITHOUT_GIL(status,
                          sw_device_units_create(self->comm->comm, self->place_count, specs.spec,
                                                 specs.count, &self->units, &err));
        PyObject *done = sw_py_device_finish(self->comm, status, &err);
        result = done ? 0 : -1;
        Py_XDECREF(done);
    }
    specs_fini(&specs);
    return result;
}

static void destroy(void *units)
{
    sw_device_units_destroy(units);
}

/* A forked child frees nothing: its driver calls would fail, and the memory belongs to the parent.
 */
static void units_dealloc(PyObject *op)
{
    device_units_object *self = (device_units_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->units && sw_py_device_is_own(self->comm))
        sw_py_device_destroy(self->comm, destroy, self->units);
    Py_XDECREF(self->comm);
    PyObject_Free(op);
    Py_DECREF(type);
}

/* ---- one unit ---- */

/* Checks the unit's number and enters the communicator. Returns false with an exception. */
static bool enter_unit(device_units_object *self, Py_ssize_t index)
{
    if (!self->units) {
        PyErr_SetString(sw_py_state_of((PyObject *)self)->error, "the units were not initialised");
        return false;
    }
    if (index < 0 || (size_t)index >= sw_device_units_count(self->units)) {
        PyErr_Format(PyExc_IndexError, "unit must be in [0, %zu), got %zd",
                     sw_device_units_count(self->units), index);
        return false;
    }
    return sw_py_device_enter(self->comm);
}

static PyObject *units_gather(PyObject *op, PyObject *value)
{
    device_units_object *self = (device_units_object *)op;
    Py_ssize_t index = PyLong_AsSsize_t(value);
    sw_error err;
    sw_status status;
    if (PyErr_Occurred() || !enter_unit(self, index))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_unit_gather(self->units, (size_t)index, &err);
    Py_END_ALLOW_THREADS
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *units_take(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    Py_ssize_t index;
    PyObject *stream_value;
    sw_stream *stream;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "nO:take", &index, &stream_value) ||
        !sw_py_device_stream(stream_value, &stream) || !enter_unit(self, index))
        return NULL;
    SW_PY_WITHOUT_GIL(status, sw_device_unit_take(self->units, (size_t)index, stream, &err));
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *units_wait(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    Py_ssize_t index;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "n:wait", &index) || !enter_unit(self, index))
        return NULL;
    SW_PY_WITHOUT_GIL(status, sw_device_unit_wait(self->units, (size_t)index, &err));
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *units_release(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    Py_ssize_t index;
    PyObject *stream_value;
    sw_stream *stream;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "nO:release", &index, &stream_value) ||
        !sw_py_device_stream(stream_value, &stream) || !enter_unit(self, index))
        return NULL;
    SW_PY_WITHOUT_GIL(status, sw_device_unit_release(self->units, (size_t)index, stream, &err));
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *units_gather_apart(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    Py_ssize_t index;
    PyObject *address, *stream_value;
    sw_stream *stream;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "nOO:gather_apart", &index, &address, &stream_value) ||
        !sw_py_device_stream(stream_value, &stream))
        return NULL;
    void *data = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred() || !enter_unit(self, index))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_unit_gather_apart(self->units, (size_t)index, data, stream, &err);
    Py_END_ALLOW_THREADS
    return sw_py_device_finish(self->comm, status, &err);
}

/* ---- all units ---- */

typedef sw_status units_call(sw_device_units *units, sw_stream *user, sw_error *err);

static PyObject *call_on_stream(PyObject *op, PyObject *stream_value, units_call *call)
{
    device_units_object *self = (device_units_object *)op;
    sw_stream *stream;
    sw_error err;
    sw_status status;
    if (!sw_py_device_stream(stream_value, &stream))
        return NULL;
    if (!self->units) {
        PyErr_SetString(sw_py_state_of(op)->error, "the units were not initialised");
        return NULL;
    }
    if (!sw_py_device_enter(self->comm))
        return NULL;
    SW_PY_WITHOUT_GIL(status, call(self->units, stream, &err));
    return sw_py_device_finish(self->comm, status, &err);
}

static PyObject *units_update(PyObject *op, PyObject *stream)
{
    return call_on_stream(op, stream, sw_device_units_update);
}

static PyObject *units_gather_anew(PyObject *op, PyObject *stream)
{
    return call_on_stream(op, stream, sw_device_units_gather_anew);
}

static PyObject *units_state(PyObject *op, PyObject *value)
{
    device_units_object *self = (device_units_object *)op;
    size_t index = PyLong_AsSize_t(value);
    if (PyErr_Occurred())
        return NULL;
    if (!self->units || index >= sw_device_units_count(self->units)) {
        PyErr_SetString(PyExc_IndexError, "there is no such unit");
        return NULL;
    }
    return PyUnicode_FromString(sw_shard_state_name(sw_device_unit_state(self->units, index)));
}

static PyObject *units_holder(PyObject *op, PyObject *value)
{
    device_units_object *self = (device_units_object *)op;
    size_t place = PyLong_AsSize_t(value);
    if (PyErr_Occurred())
        return NULL;
    if (!self->units || place >= self->place_count) {
        PyErr_SetString(PyExc_IndexError, "there is no such place");
        return NULL;
    }
    size_t holder = sw_device_units_holder(self->units, place);
    if (holder == SW_DEVICE_UNIT_NONE)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(holder);
}

static PyObject *units_stats(PyObject *op, PyObject *unused)
{
    device_units_object *self = (device_units_object *)op;
    (void)unused;
    if (!self->units)
        return PyDict_New();
    sw_device_units_stats stats = sw_device_units_get_stats(self->units);
    return Py_BuildValue("{s:K,s:K,s:K}", "gathers", (unsigned long long)stats.gathers, "releases",
                         (unsigned long long)stats.releases, "gathered_bytes",
                         (unsigned long long)stats.bytes);
}

static PyMethodDef units_methods[] = {
    {"gather", units_gather, METH_O,
     "gather($self, unit, /)\n--\n\n"
     "Gather a unit into its place after earlier work on that; do not wait."},
    {"take", units_take, METH_VARARGS,
     "take($self, unit, stream, /)\n--\n\nLet the stream wait for the unit."},
    {"wait", units_wait, METH_VARARGS,
     "wait($self, unit, /)\n--\n\n"
     "Make the host wait until the unit is whole, for use on all streams."},
    {"release", units_release, METH_VARARGS,
     "release($self, unit, stream, /)\n--\n\n"
     "Release the unit after the work enqueued on the stream."},
    {"gather_apart", units_gather_apart, METH_VARARGS,
     "gather_apart($self, unit, address, stream, /)\n--\n\n"
     "Gather into separate memory, in the order of the stream."},
    {"update", units_update, METH_O,
     "update($self, stream, /)\n--\n\nOrder later gathers after writes to slices on the stream."},
    {"gather_anew", units_gather_anew, METH_O,
     "gather_anew($self, stream, /)\n--\n\n"
     "Gather all units after writes to their slices on the stream."},
    {"state", units_state, METH_O,
     "state($self, unit, /)\n--\n\nReturn 'sharded', 'gathering' or 'unsharded'."},
    {"holder", units_holder, METH_O,
     "holder($self, place, /)\n--\n\nReturn the unit in a place, or None."},
    {"stats", units_stats, METH_NOARGS, "stats($self, /)\n--\n\nReturn counts since creation."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot units_slots[] = {
    {Py_tp_init, units_init},
    {Py_tp_dealloc, units_dealloc},
    {Py_tp_methods, units_methods},
    {Py_tp_doc, "Units of parameters that are gathered into a GPU's places."},
    {0, NULL},
};

PyType_Spec sw_py_device_units_type_spec = {
    .name = "shardwright._engine.DeviceUnits",
    .basicsize = sizeof(device_units_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = units_slots,
};
