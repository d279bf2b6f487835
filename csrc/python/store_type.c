/* store_type.c - shardwright._engine.Store: where each parameter of a module lies on a host.
 *
 * A tensor over a store's memory keeps the Store alive, which keeps its communicator: no address is
 * reused while a tensor refers to it. A Store holds no reference to the reducer, whose parameters
 * are such tensors. */
#include <stdlib.h>

#include "platform/file_memory.h"
#include "python/owner.h"
#include "python/reducer_object.h"
#include "zero/store.h"

typedef struct store_object {
    sw_py_owner owner; /* of a sw_store; keeps the communicator */
    comm_object *comm; /* borrowed */
} store_object;

#define STORE ((sw_store *)self->owner.made)
#define MAP sw_store_get_map(STORE)

/* ---- life ---- */

static bool fill_unit(const sw_py_arg *a, void *row, void *units)
{
    const sw_py_table *members =
        sw_py_nested_add(units, a[1].o, "unit member:N", sizeof(int64_t), sw_py_fill_size);
    if (members)
        *(sw_store_unit *)row = (sw_store_unit){
            .name = a[0].s, .members = members->rows, .count = members->count, .stays = a[2].p};
    return members != NULL;
}

typedef struct cast_row {
    size_t index;
    sw_dtype dtype;
} cast_row;

SW_PY_ROW(fill_cast, cast_row, a[0].size, a[1].dtype)

/* Returns each parameter's cast, owned by the caller, or NULL with an exception. */
static sw_dtype *read_casts(const sw_py_table *rows, size_t count)
{
    sw_dtype *casts = malloc((count + 1) * sizeof *casts);
    if (!casts) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; ++i)
        casts[i] = SW_DTYPE_COUNT;
    for (size_t i = 0; i < rows->count; ++i) {
        const cast_row *row = (const cast_row *)rows->rows + i;
        if (row->index >= count) {
            free(casts);
            sw_py_refuse(PyExc_IndexError, "Store: narrow: index must be in [0, %zu), got %zu",
                         count, row->index);
            return NULL;
        }
        casts[row->index] = row->dtype;
    }
    return casts;
}

SW_PY_DESTROY(destroy, sw_store_destroy)

static int create(store_object *self, const sw_layout *layout, const sw_store_options *options)
{
    sw_store *made = NULL;
    sw_error err;
    if (!sw_py_comm_enter(self->comm))
        return -1;
    sw_status status =
        SW_PY_WITHOUT_GIL(sw_store_create(self->comm->comm, layout, options, &made, &err));
    sw_py_comm_leave(self->comm);
    if (status != SW_OK)
        sw_py_raise(self, &err, self->comm);
    return status == SW_OK ? sw_py_owner_made(&self->owner, made, destroy, status, &err) : -1;
}

static int store_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    store_object *self = (store_object *)op;
    sw_py_arg a[9] = {[4] = {.o = Py_None}};
    SW_PY_SLICES slices = {.numbers = NULL};
    SW_PY_TABLE hosts = {0}, casts = {0};
    SW_PY_NESTED units = {.begun = 0};
    if (!sw_py_read("Store reducer:O form:(private|shared|units) host_of:O label:s | $ slices:O "
                    "narrow:O units:O coded:p folder:z",
                    args, kwargs, a))
        return -1;
    reducer_object *reducer = (reducer_object *)a[0].o;
    if (!PyObject_TypeCheck(a[0].o, sw_py_state_of(op)->reducer_type) || !reducer->comm ||
        !reducer->reducer) {
        sw_py_refuse(PyExc_TypeError, "Store: reducer must be a Reducer over a HostComm");
        return -1;
    }
    if (!sw_py_use_make(&self->owner.use, "Store"))
        return -1;
    self->comm = reducer->comm;
    sw_py_owner_keep(&self->owner, 0, (PyObject *)self->comm);
    sw_py_comm_acquire(self->comm);
    const sw_layout *layout = sw_reducer_layout(reducer->reducer);
    if (sw_py_slices_init(&slices, a[4].o, self->comm->world_size) < 0 ||
        !sw_py_table_init(&hosts, a[2].o, "Store host:i", sizeof(int), sw_py_fill_int, NULL) ||
        (a[5].o && !sw_py_table_init(&casts, a[5].o, "cast index:N dtype:T", sizeof(cast_row),
                                     fill_cast, NULL)) ||
        (a[6].o && !sw_py_nested_init(&units, a[6].o, "unit name:s members:L stays:p",
                                      sizeof(sw_store_unit), fill_unit)))
        return -1;
    if (hosts.count != (size_t)self->comm->world_size) {
        sw_py_refuse(PyExc_ValueError, "Store: host_of must have %d numbers, got %zu",
                     self->comm->world_size, hosts.count);
        return -1;
    }
    sw_dtype *narrow = read_casts(&casts, layout->param_count);
    if (!narrow)
        return -1;
    const sw_store_options options = {.form = (sw_store_form)a[1].i,
                                      .slices = slices.given,
                                      .host_of = hosts.rows,
                                      .narrow = narrow,
                                      .units = units.outer.rows,
                                      .unit_count = units.outer.count,
                                      .coded = a[7].p,
                                      .folder = a[8].s,
                                      .label = a[3].s};
    int failed = create(self, layout, &options);
    free(narrow);
    return failed;
}

static void store_dealloc(PyObject *op)
{
    comm_object *comm = ((store_object *)op)->comm;
    Py_XINCREF(comm);
    sw_py_owner_dealloc(op);
    if (comm) {
        SW_PY_ASIDE(pending); /* a signal handler may raise as a closed communicator is destroyed */
        sw_py_comm_release(comm);
        Py_DECREF(comm);
    }
}

/* ---- memory ---- */

static bool check_index(const store_object *self, Py_ssize_t index)
{
    if (!sw_py_owner_check(&self->owner, "the store was"))
        return false;
    size_t count = MAP->layout.param_count;
    return (index >= 0 && (size_t)index < count) ||
           sw_py_refuse(PyExc_IndexError, "Store: index must be in [0, %zu), got %zd", count,
                        index);
}

/* Returns a capsule over a run; None where there is no memory. */
static PyObject *capsule_of(PyObject *op, sw_store_run run, PyObject *shape, PyObject *strides)
{
    sw_py_layout layout;
    size_t bytes = (run.end - run.begin) * sw_dtype_size_bytes(run.dtype);
    if (!run.address)
        Py_RETURN_NONE;
    if (!sw_py_layout_init(&layout, run.dtype, shape, strides, "Store"))
        return NULL;
    if (layout.bytes > bytes)
        return PyErr_Format(PyExc_ValueError, "Store: %zu bytes leave a parameter of %zu",
                            layout.bytes, bytes);
    return sw_py_dlpack_capsule_on(-1, op, run.address, &layout);
}

static PyObject *flat_capsule_of(PyObject *op, sw_store_run run)
{
    SW_PY_OWNED *shape = Py_BuildValue("(n)", (Py_ssize_t)(run.end - run.begin));
    return shape ? capsule_of(op, run, shape, Py_None) : NULL;
}

static PyObject *store_whole(PyObject *op, PyObject *args)
{
    const store_object *self = (store_object *)op;
    sw_py_arg a[4] = {[2] = {.o = Py_None}};
    if (!sw_py_read("Store.whole index:n shape:O | strides:O narrow:p", args, NULL, a) ||
        !check_index(self, a[0].n))
        return NULL;
    return capsule_of(op, sw_store_whole(STORE, a[0].size, a[3].p), a[1].o, a[2].o);
}

SW_PY_VALUE(store_slice, store_object, "Store.slice index:n", check_index(self, a[0].n),
            flat_capsule_of(op, sw_store_slice(STORE, a[0].size, (size_t)MAP->slice_of[MAP->rank],
                                               false)))

static PyObject *store_pieces(PyObject *op, PyObject *args)
{
    const store_object *self = (store_object *)op;
    sw_py_arg a[1];
    sw_store_run runs[SW_COMM_MAX_WORLD];
    if (!sw_py_read("Store.pieces index:n", args, NULL, a) || !check_index(self, a[0].n))
        return NULL;
    size_t count = sw_store_pieces(STORE, a[0].size, runs);
    PyObject *made = PyList_New((Py_ssize_t)count);
    for (size_t k = 0; made && k < count; ++k) {
        PyObject *memory = flat_capsule_of(op, runs[k]);
        PyObject *item = memory ? Py_BuildValue("nnN", (Py_ssize_t)runs[k].begin,
                                                (Py_ssize_t)runs[k].end, memory)
                                : NULL;
        if (!item)
            Py_CLEAR(made);
        else
            PyList_SetItem(made, (Py_ssize_t)k, item);
    }
    return made;
}

static PyObject *store_words(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const store_object *self = (store_object *)op;
    size_t size, buckets;
    if (!sw_py_owner_check(&self->owner, "the store was"))
        return NULL;
    uint8_t *address = sw_store_mapped(STORE, &size, &buckets);
    return flat_capsule_of(op,
                           (sw_store_run){address, 0, buckets / sizeof(int32_t), SW_DTYPE_INT32});
}

static PyObject *store_mapped(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const store_object *self = (store_object *)op;
    size_t size, buckets;
    if (!sw_py_owner_check(&self->owner, "the store was"))
        return NULL;
    uint8_t *address = sw_store_mapped(STORE, &size, &buckets);
    return size ? Py_BuildValue("[(Nn)]", PyLong_FromVoidPtr(address), (Py_ssize_t)size)
                : PyList_New(0);
}

static PyObject *span_of(const sw_store_map *map, size_t index)
{
    size_t bytes =
        map->layout.place[index].numel * sw_dtype_size_bytes(sw_store_dtype(map, index, false));
    return Py_BuildValue("nn", (Py_ssize_t)(sw_store_copy_bytes(map, index, false) / 4),
                         (Py_ssize_t)((bytes + 3) / 4));
}

SW_PY_VALUE(store_span, store_object, "span index:n", check_index(self, a[0].n),
            span_of(MAP, a[0].size))
SW_PY_VALUE(store_is_stepped, store_object, "is_stepped index:n", check_index(self, a[0].n),
            PyBool_FromLong(sw_store_is_stepped(MAP, a[0].size)))
SW_PY_VALUE(store_adopt, store_object, "adopt index:n", check_index(self, a[0].n),
            (sw_store_adopt(STORE, a[0].size), sw_py_none()))

/* ---- calls that move bytes ---- */

/* Enters for one thread at a time: units share pages. */
static bool enter(store_object *self)
{
    PyObject *error = sw_py_state_of(self)->error;
    if (!sw_py_owner_check(&self->owner, "the store was"))
        return false;
    if (sw_py_use_is_own(&self->owner.use))
        return sw_py_use_enter(&self->owner.use, SW_PY_ALONE, SW_PY_PATIENCE_NS, error, "units",
                               "");
    return sw_py_refuse(
        error, "units: this process is a child of the one that wrapped the module, whose pages it "
               "would overwrite: fork inside `with sw.full_parameters(module)`, or copy the "
               "module there");
}

static PyObject *finish(store_object *self, sw_status status, const sw_error *err)
{
    sw_py_use_leave(&self->owner.use);
    return sw_py_finish(self, status, err);
}

SW_PY_METHOD(store_read, store_object, "read index:n address:A",
             check_index(self, a[0].n) && enter(self),
             sw_store_read(STORE, a[0].size, a[1].address, &err), finish(self, status, &err))
SW_PY_METHOD(store_write, store_object, "Store.write index:n address:A share:(own|mine|all)",
             check_index(self, a[0].n) && enter(self),
             (sw_store_write(STORE, a[0].size, a[1].address, (sw_store_share)a[2].i), SW_OK),
             finish(self, status, &err))
SW_PY_METHOD(store_settle, store_object, "settle", enter(self), sw_store_settle(STORE, &err),
             finish(self, status, &err))
SW_PY_METHOD(store_derive, store_object, "derive", enter(self), (sw_store_derive(STORE), SW_OK),
             finish(self, status, &err))

static bool enter_comm(store_object *self)
{
    return sw_py_owner_check(&self->owner, "the store was") && sw_py_comm_enter(self->comm);
}

SW_PY_METHOD(store_cast, store_object, "cast | all:p", enter_comm(self),
             sw_store_cast(STORE, a[0].p, &err), sw_py_comm_finish(self->comm, status, &err))

static PyObject *store_publish(PyObject *op, PyObject *args, PyObject *kwargs)
{
    store_object *self = (store_object *)op;
    sw_py_arg a[3] = {[0] = {.o = Py_None}};
    uint8_t outcomes[SW_COMM_MAX_WORLD];
    sw_error err;
    if (!sw_py_read("publish | failed:O $ foreign:p all:p", args, kwargs, a))
        return NULL;
    int failed = a[0].o == Py_None ? 0 : PyObject_IsTrue(a[0].o);
    if (failed < 0)
        return NULL;
    sw_store_update update = {.tells = a[0].o != Py_None,
                              .failed = failed != 0,
                              .foreign = a[1].p,
                              .all = a[2].p,
                              .outcomes = outcomes};
    if (!enter_comm(self))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(sw_store_publish(STORE, &update, &err));
    PyObject *done = sw_py_comm_finish(self->comm, status, &err);
    if (!done || !update.told)
        return done;
    Py_DECREF(done);
    return SW_PY_LIST(r, MAP->world_size, PyLong_FromLong(outcomes[r]));
}

/* ---- units ---- */

#define UNITS sw_store_units(STORE)

static bool check_unit(const store_object *self, Py_ssize_t unit)
{
    size_t count = self->owner.made && UNITS ? sw_units_count(UNITS) : 0;
    return (unit >= 0 && (size_t)unit < count) ||
           sw_py_refuse(PyExc_ValueError, "Store: unit must be in [0, %zu), got %zd", count, unit);
}

SW_PY_METHOD_WITH(store_gather, store_object, "gather unit:n | apart:p exact:p", a[2].p = true,
                  check_unit(self, a[0].n) && enter(self),
                  sw_store_gather(STORE, a[0].size, a[2].p ? SW_UNIT_SLICES : SW_UNIT_CODES, &err),
                  finish(self, status, &err))
SW_PY_METHOD(store_release, store_object, "release unit:n", check_unit(self, a[0].n) && enter(self),
             sw_unit_release(UNITS, a[0].size, &err), finish(self, status, &err))

/* Returns a byte's place, -1 for SIZE_MAX, unless the call has failed. */
static PyObject *place_if(PyObject *finished, size_t place)
{
    SW_PY_OWNED *done = finished;
    return done ? PyLong_FromSsize_t((Py_ssize_t)place) : NULL;
}

SW_PY_METHOD_WITH(store_take_write, store_object, "take_write unit:n", size_t found,
                  check_unit(self, a[0].n) && enter(self),
                  (found = sw_unit_find_write(UNITS, a[0].size)) == SIZE_MAX
                      ? SW_OK
                      : sw_unit_forget_writes(UNITS, a[0].size, &err),
                  place_if(finish(self, status, &err), found))

SW_PY_VALUE(store_state, store_object, "state unit:n", check_unit(self, a[0].n),
            PyUnicode_FromString(sw_shard_state_name(sw_unit_state(UNITS, a[0].size))))

SW_PY_VALUE(store_is_whole, store_object, "is_whole unit:n", check_unit(self, a[0].n),
            PyBool_FromLong(sw_unit_state(UNITS, a[0].size) == SW_SHARD_UNSHARDED))
SW_PY_VALUE(store_is_apart, store_object, "is_apart unit:n", check_unit(self, a[0].n),
            PyBool_FromLong(0))

static PyObject *store_stats(PyObject *op, PyObject *Py_UNUSED(unused))
{
    static const sw_py_count counts[] = {
        SW_PY_COUNT(sw_units_stats, gathers), SW_PY_COUNT(sw_units_stats, releases),
        SW_PY_COUNT_AS(sw_units_stats, bytes, "gathered_bytes"),
        SW_PY_COUNT(sw_units_stats, gather_ns),
        SW_PY_COUNT_AS(sw_units_stats, most_bytes, "most_unit_bytes")};
    const store_object *self = (store_object *)op;
    if (!self->owner.made || !UNITS)
        return PyDict_New();
    const sw_units_stats stats = sw_units_get_stats(UNITS);
    return sw_py_counts(&stats, counts, sizeof counts / sizeof *counts);
}

#define PLAN sw_store_get_plan(STORE)
SW_PY_VALUE(store_unit_sizes, store_object, "unit_sizes",
            sw_py_owner_check(&self->owner, "the store was"),
            SW_PY_LIST(i, PLAN->unit_count, PyLong_FromSize_t(PLAN->sizes[i])))

/* ---- the type ---- */

#define PROPERTY(name, value) \
    SW_PY_GETTER(store_get_##name, store_object, self->owner.made ? (value) : sw_py_none())

PROPERTY(reason, sw_py_text(sw_store_reason(STORE)))
PROPERTY(is_home, PyBool_FromLong(sw_store_is_home(MAP)))
PROPERTY(one_copy, PyBool_FromLong(sw_store_has_one_copy(MAP)))
PROPERTY(is_collective, PyBool_FromLong(0))
PROPERTY(bytes_held, PyLong_FromSize_t(sw_store_bytes_held(STORE)))
PROPERTY(unit_bytes, PyLong_FromSize_t(PLAN->warm_bytes))

static PyObject *home_of(const sw_file_memory *file)
{
    return file ? sw_py_text(sw_file_memory_is_ram(file) ? "file system in memory" : "file")
                : sw_py_text("memory");
}

PROPERTY(home, home_of(sw_store_file(STORE)))

static PyMethodDef store_methods[] = {
    SW_PY_ARGS(store, whole, "index, shape, strides=None, narrow=False, /",
               "Return a DLPack capsule over all of a parameter, or over its cast; None without."),
    SW_PY_ARGS(store, slice, "index, /", "Return one over this rank's elements of a parameter."),
    SW_PY_ARGS(store, pieces, "index, /",
               "Return [(begin, end, capsule)] of the elements of which this rank writes new "
               "values."),
    SW_PY_NONE(store, words, "Return a capsule over all buckets, as words of 4 bytes."),
    SW_PY_NONE(store, mapped, "Return [(address, nbytes)] of memory that other processes write."),
    SW_PY_ARGS(store, span, "index, /", "Return (first, count) of a parameter's words."),
    SW_PY_ARGS(store, is_stepped, "index, /", "Return True if a parameter trains or has trained."),
    SW_PY_ARGS(store, adopt, "index, /", "Note that a parameter trains from now on."),
    SW_PY_ARGS(store, read, "index, address, /", "Copy a parameter from all ranks' slices."),
    SW_PY_ARGS(
        store, write, "index, address, share, /",
        "Copy a parameter to slices: this rank's ('own'), 'all', or 'mine': its own, but all "
        "for the first rank of a host's one copy."),
    SW_PY_ARGS(store, derive, "/", "Make casts and records of the slices this rank wrote."),
    SW_PY_ARGS(store, settle, "/",
               "Begin to write this rank's part of a file back, and let its pages go."),
    SW_PY_ARGS(store, cast, "all=False, /",
               "Refresh casts that the host shares, of parameters that train or all. Collective."),
    SW_PY_KEYS(store, publish, "failed=None, *, foreign=False, all=False",
               "Make updated slices visible. Return which ranks failed, or None. Collective."),
    SW_PY_ARGS(
        store, gather, "unit, apart=False, exact=True, /",
        "Gather a unit: sharded to unsharded; without exact by decoding records. `apart` has "
        "no effect: each unit has its own addresses."),
    SW_PY_ARGS(store, release, "unit, /", "Release a unit: unsharded to sharded."),
    SW_PY_ARGS(store, take_write, "unit, /",
               "Return the first byte written in a released unit, once; -1: none."),
    SW_PY_ARGS(store, state, "unit, /", "Return 'sharded', 'gathering' or 'unsharded'."),
    SW_PY_ARGS(store, is_whole, "unit, /", "Return True if the unit is unsharded."),
    SW_PY_ARGS(store, is_apart, "unit, /", "Return False: a unit lies at its own addresses."),
    SW_PY_NONE(store, stats, "Return counts of units since creation."),
    SW_PY_ARGS(store, unit_sizes, "/",
               "Return the bytes of each unit, in its compute form if any."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef store_properties[] = {
    {"reason", store_get_reason, NULL, "why slices are broadcast; empty: they are gathered", NULL},
    {"home", store_get_home, NULL, "'memory', 'file', or 'file system in memory'", NULL},
    {"is_home", store_get_is_home, NULL, "this rank writes first values", NULL},
    {"one_copy", store_get_one_copy, NULL, "the host's ranks share whole buckets", NULL},
    {"is_collective", store_get_is_collective, NULL, "False: a rank gathers without others", NULL},
    {"bytes_held", store_get_bytes_held, NULL, "bytes of parameters, on the rank or host", NULL},
    {"unit_bytes", store_get_unit_bytes, NULL, "bytes of the pages that units share", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(
    sw_py_store_type_spec, "Store", store_object, 0,
    "Where each parameter lies on a host. form: 'private' (each rank has all), 'shared' (one "
    "copy a host) or 'units' (slices; units are gathered and released). Collective. "
    "narrow: [(index, dtype)] of 16-bit casts; units: [(name, [index], stays)]. folder: of "
    "units, whose parts then lie in a file there.",
    {Py_tp_init, store_init}, {Py_tp_dealloc, store_dealloc}, {Py_tp_methods, store_methods},
    {Py_tp_getset, store_properties})
