/* device_units_type.c - shardwright._engine.DeviceUnits: units of parameters that are gathered into
 * places of GPU memory (zero/unit_plan.h, zero/device_units.h). parameters/unshard_schedule.py
 * decides when; torch allocates all memory. */
#include <stdlib.h>
#include <string.h>

#include "python/owner.h"
#include "python/reducer_object.h"
#include "zero/device_units.h"
#include "zero/unit_plan.h"

typedef struct held_memory {
    PyObject *tensor; /* owned: torch's, or NULL */
    uint8_t *data;
} held_memory;

typedef struct device_units_object {
    sw_py_owner owner;                  /* of a sw_device_units */
    PyObject *allocate, *stream;        /* owned callables; groups of buckets allocate nothing */
    PyObject *home;                     /* owned callable that allocates slices, or NULL */
    PyObject *announce;                 /* owned callable, or NULL */
    sw_unit_plan plan;                  /* owned; a group of buckets has no parts */
    held_memory *place, *apart, *slice; /* owned: by place, by unit, by bucket */
    held_memory beside;                 /* of slices by rows */
    held_memory *part;                  /* owned, by unit: what stays near */
    PyObject *nears;                    /* owned list: their communicators, or NULL */
    size_t slack_bytes, near_bytes;     /* behind a place, for units that stay near; of `part` */
    size_t *group_of;                   /* owned, by bucket: its group, or SIZE_MAX */
    sw_layout layout;                   /* its arrays: owned copies, as the reducer may go */
    int ordinal;                        /* of capsules: -1 where the memory is the host's */
} device_units_object;

SW_PY_DESTROY(destroy, sw_device_units_destroy)

static bool no_memory(void)
{
    PyErr_NoMemory();
    return false;
}

static size_t world_size_of(const device_units_object *self)
{
    return (size_t)self->owner.comm->comm->peers->world_size;
}

/* Asks a callable for zeroed memory. Returns false with an exception. */
static bool allocate_by(device_units_object *self, PyObject *callable, size_t bytes,
                        held_memory *held)
{
    void *address;
    SW_PY_OWNED *size = PyLong_FromSize_t(bytes);
    SW_PY_OWNED *made = size ? PyObject_CallFunctionObjArgs(callable, size, NULL) : NULL;
    SW_PY_OWNED *flag = made ? PyObject_GetAttrString(made, "is_cuda") : NULL;
    if (!flag || !sw_py_tensor_address(made, &address))
        return false;
    self->ordinal = flag == Py_True ? self->owner.comm->comm->device->ordinal : -1;
    sw_py_set(&held->tensor, made);
    held->data = address;
    return true;
}

static bool allocate(device_units_object *self, size_t bytes, held_memory *held)
{
    return allocate_by(self, self->allocate, bytes, held);
}

/* ---- making ---- */

typedef struct making { /* owned arrays */
    sw_device_unit_spec *specs;
    sw_device_unit_run *runs;
    sw_device_unit_rows *rows, *next_rows; /* the second: the first one not used yet */
} making;

static bool making_init(making *m, size_t units, size_t runs, size_t rows)
{
    m->specs = calloc(units + 1, sizeof *m->specs);
    m->runs = calloc(runs + 1, sizeof *m->runs);
    m->rows = m->next_rows = calloc(rows + 1, sizeof *m->rows);
    return (m->specs && m->runs && m->rows) || no_memory();
}

static void making_fini(making *m)
{
    free(m->specs);
    free(m->runs);
    free(m->rows);
}
#define MAKING __attribute__((cleanup(making_fini))) making

SW_PY_ROW(fill_member, sw_unit_member, .parameter = a[0].size, .dtype = a[1].dtype)

static bool fill_unit(const sw_py_arg *a, void *row, void *rows)
{
    const sw_py_table *members = sw_py_nested_add(rows, a[4].o, "member parameter:N dtype:T",
                                                  sizeof(sw_unit_member), fill_member);
    if (members)
        *(sw_unit_row *)row = (sw_unit_row){.name = a[0].s,
                                            .level = a[1].size,
                                            .stays = a[2].p,
                                            .form_of = a[3].size,
                                            .members = members->rows,
                                            .member_count = members->count};
    return members != NULL;
}

/* Makes the parameters of a part by rows. */
static void make_rows(device_units_object *self, making *m, const sw_unit_part *part,
                      sw_device_unit_run *run)
{
    const sw_layout_bucket *bucket = &self->layout.bucket[part->bucket];
    size_t element_bytes = sw_dtype_size_bytes(part->dtype);
    run->offset_bytes = part->beside_bytes;
    run->rows = m->next_rows;
    run->row_count = bucket->count;
    for (size_t k = 0; k < bucket->count; ++k) {
        size_t parameter = self->layout.order[bucket->first + k];
        const sw_layout_place *place = &self->layout.place[parameter];
        *m->next_rows++ = (sw_device_unit_rows){
            .begin_bytes = place->begin * element_bytes,
            .offset_bytes = sw_unit_offset_bytes(&self->layout, part, parameter),
            .size_bytes = place->numel * element_bytes,
            .chunk_bytes = place->chunk * element_bytes};
    }
}

/* Makes the run of a part, with this rank's slice of its bucket. */
static bool make_run(device_units_object *self, making *m, const sw_unit_part *part,
                     sw_device_unit_run *run)
{
    const sw_layout_bucket *bucket = &self->layout.bucket[part->bucket];
    held_memory *slice = &self->slice[part->bucket];
    size_t numel = bucket->numel / world_size_of(self);
    if (!slice->tensor && !allocate_by(self, self->home ? self->home : self->allocate,
                                       numel * sw_dtype_size_bytes(bucket->dtype), slice))
        return false;
    *run = (sw_device_unit_run){.slice = slice->data,
                                .is_home = self->home != NULL,
                                .offset_bytes = part->offset_bytes,
                                .slice_bytes = numel * sw_dtype_size_bytes(part->dtype),
                                .slice_dtype = bucket->dtype,
                                .dtype = part->dtype};
    if (bucket->by_rows)
        make_rows(self, m, part, run);
    return true;
}

static bool plan_units(device_units_object *self, making *m, const sw_unit_row *rows, size_t count,
                       size_t turns)
{
    sw_unit_plan *plan = &self->plan;
    sw_error err;
    size_t runs = 0, members = 0;
    if (sw_unit_plan_init(plan, &self->layout, rows, count, turns, &err) != SW_OK)
        return sw_py_raise(self, &err, NULL) != NULL;
    self->place = calloc(plan->place_count + 1, sizeof *self->place);
    for (size_t i = 0; i < count; ++i) {
        runs += plan->unit[i].part_count;
        for (size_t k = 0; k < plan->unit[i].part_count; ++k)
            members += self->layout.bucket[plan->unit[i].part[k].bucket].count;
    }
    if (!self->place || !making_init(m, count, runs, members))
        return self->place ? false : no_memory();
    if (plan->beside_bytes && !allocate(self, plan->beside_bytes, &self->beside))
        return false;
    for (size_t p = 0; p < plan->place_count; ++p)
        if (!allocate(self, plan->place_bytes[p] + self->slack_bytes, &self->place[p]))
            return false;
    sw_device_unit_run *run = m->runs;
    for (size_t i = 0; i < count; ++i) {
        const sw_planned_unit *unit = &plan->unit[i];
        m->specs[i] =
            (sw_device_unit_spec){.name = rows[i].name,
                                  .place = unit->place,
                                  .data = unit->has_place ? self->place[unit->place].data : NULL,
                                  .runs = run,
                                  .run_count = unit->part_count};
        for (size_t k = 0; k < unit->part_count; ++k)
            if (!make_run(self, m, &unit->part[k], run++))
                return false;
    }
    return true;
}

static bool make_planned(device_units_object *self, making *m, PyObject *units, size_t turns)
{
    SW_PY_NESTED given = {.begun = 0};
    return sw_py_nested_init(&given, units, "unit name:s level:N stays:p form_of:N members:L",
                             sizeof(sw_unit_row), fill_unit) &&
           plan_units(self, m, given.outer.rows, given.outer.count, turns);
}

/* Groups of buckets, which lie in memory that contains the slices. */
typedef struct given_bucket {
    size_t bucket;
    PyObject *tensor; /* borrowed */
} given_bucket;

SW_PY_ROW(fill_bucket, given_bucket, .bucket = a[0].size, .tensor = a[1].o)
SW_PY_ROW(fill_number, size_t, a->size)

static bool read_numbers(sw_py_table *table, PyObject *list, size_t limit)
{
    if (!sw_py_table_init(table, list, "order number:N", sizeof(size_t), fill_number, NULL))
        return false;
    for (size_t i = 0; i < table->count; ++i)
        if (((const size_t *)table->rows)[i] >= limit)
            return sw_py_refuse(PyExc_IndexError, "order: number must be in [0, %zu), got %zu",
                                limit, ((const size_t *)table->rows)[i]);
    return true;
}

/* Keeps the memory of the buckets. Returns false with an exception. */
static bool read_buckets(device_units_object *self, PyObject *list, bool *wanted)
{
    SW_PY_TABLE table = {0};
    if (!sw_py_table_init(&table, list, "bucket number:N tensor:O", sizeof(given_bucket),
                          fill_bucket, NULL))
        return false;
    for (size_t i = 0; i < table.count; ++i) {
        const given_bucket *given = &((const given_bucket *)table.rows)[i];
        void *address;
        if (given->bucket >= self->layout.bucket_count)
            return sw_py_refuse(PyExc_IndexError, "bucket index must be in [0, %zu), got %zu",
                                self->layout.bucket_count, given->bucket);
        if (!sw_py_tensor_address(given->tensor, &address))
            return false;
        if (self->layout.bucket[given->bucket].by_rows)
            return sw_py_refuse(PyExc_ValueError,
                                "DeviceUnits: bucket %zu is cut by rows, so its slices are no one "
                                "copy of it: give units",
                                given->bucket);
        sw_py_set(&self->slice[given->bucket].tensor, given->tensor);
        self->slice[given->bucket].data = address;
        wanted[given->bucket] = self->layout.bucket[given->bucket].numel > 0;
    }
    return true;
}

static bool group_buckets(device_units_object *self, making *m, const size_t *sequence,
                          size_t count, const char *label)
{
    size_t groups = count ? self->group_of[sequence[count - 1]] + 1 : 0, run = 0;
    size_t rank = (size_t)self->owner.comm->comm->peers->rank;
    self->plan.unit = calloc(groups + 1, sizeof *self->plan.unit);
    if (!self->plan.unit || !making_init(m, groups, count, 0))
        return self->plan.unit ? false : no_memory();
    self->plan.count = self->plan.place_count = groups;
    for (size_t group = 0; group < groups; ++group) {
        size_t end = run;
        uint8_t *data = self->slice[sequence[run]].data;
        for (; end < count && self->group_of[sequence[end]] == group; ++end)
            if (self->slice[sequence[end]].data < data)
                data = self->slice[sequence[end]].data;
        m->specs[group] = (sw_device_unit_spec){.name = label,
                                                .place = group,
                                                .data = data,
                                                .runs = &m->runs[run],
                                                .run_count = end - run};
        for (; run < end; ++run) {
            const sw_layout_bucket *bucket = &self->layout.bucket[sequence[run]];
            uint8_t *at = self->slice[sequence[run]].data;
            size_t bytes = bucket->numel / world_size_of(self) * sw_dtype_size_bytes(bucket->dtype);
            m->runs[run] = (sw_device_unit_run){.slice = at + rank * bytes,
                                                .offset_bytes = (size_t)(at - data),
                                                .slice_bytes = bytes,
                                                .slice_dtype = bucket->dtype,
                                                .dtype = bucket->dtype};
        }
    }
    return true;
}

static bool make_groups(device_units_object *self, making *m, const sw_py_arg *a)
{
    const sw_layout *layout = &self->layout;
    SW_PY_TABLE order = {0}, ends = {0};
    bool *wanted = calloc(layout->bucket_count + 1, sizeof *wanted);
    size_t *sequence = calloc(layout->bucket_count + 1, sizeof *sequence);
    bool done = (wanted && sequence) || no_memory();
    done = done && read_buckets(self, a[5].o, wanted) &&
           read_numbers(&order, a[6].o, layout->param_count) &&
           read_numbers(&ends, a[7].o, order.count + 1) &&
           group_buckets(self, m, sequence,
                         sw_unit_groups(layout, wanted, order.rows, ends.rows, ends.count,
                                        self->group_of, sequence),
                         a[8].s);
    free(wanted);
    free(sequence);
    return done;
}

/* ---- the object ---- */

/* Copies what is needed of the reducer's layout. Returns false with an exception. */
static bool keep_layout(device_units_object *self, PyObject *reducer)
{
    if (!PyObject_TypeCheck(reducer, sw_py_state_of(self)->reducer_type))
        return sw_py_refuse(PyExc_TypeError, "DeviceUnits: reducer must be a Reducer, got %R",
                            (PyObject *)Py_TYPE(reducer));
    if (reducer_check_made((reducer_object *)reducer) < 0)
        return false;
    const sw_layout *from = sw_reducer_layout(((reducer_object *)reducer)->reducer);
    size_t buckets = from->bucket_count;
    for (size_t b = 0; b < buckets; ++b)
        if (from->bucket[b].by_rows && from->slice_count != world_size_of(self))
            return sw_py_refuse(
                PyExc_ValueError,
                "DeviceUnits: bucket %zu is cut by rows for %zu ranks, and comm has "
                "%zu",
                b, from->slice_count, world_size_of(self));
    self->layout = (sw_layout){.param_count = from->param_count,
                               .slice_count = from->slice_count,
                               .bucket_count = buckets,
                               .place = calloc(from->param_count + 1, sizeof *from->place),
                               .bucket = calloc(buckets + 1, sizeof *from->bucket),
                               .order = calloc(from->param_count + 1, sizeof *from->order)};
    self->slice = calloc(buckets + 1, sizeof *self->slice);
    self->group_of = calloc(buckets + 1, sizeof *self->group_of);
    if (!self->layout.place || !self->layout.bucket || !self->layout.order || !self->slice ||
        !self->group_of)
        return no_memory();
    memcpy(self->layout.place, from->place, from->param_count * sizeof *from->place);
    memcpy(self->layout.bucket, from->bucket, buckets * sizeof *from->bucket);
    memcpy(self->layout.order, from->order, from->param_count * sizeof *from->order);
    memset(self->group_of, 0xff, buckets * sizeof *self->group_of);
    return true;
}

static int units_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    device_units_object *self = (device_units_object *)op;
    sw_py_owner *owner = &self->owner;
    sw_py_arg a[12] = {[11] = {.o = Py_None}};
    MAKING m = {.specs = NULL};
    sw_device_units *made = NULL;
    sw_error err;
    if (!sw_py_read("DeviceUnits comm:O reducer:O stream:O | allocate:O units:L buckets:L order:L "
                    "ends:L label:s turns:N near:N home:O",
                    args, kwargs, a) ||
        !sw_py_owner_bind(owner, a[0].o, "DeviceUnits"))
        return -1;
    bool is_planned = a[3].o && a[4].o;
    if (is_planned == (a[5].o && a[6].o && a[7].o && a[8].s)) {
        PyErr_SetString(PyExc_TypeError, "DeviceUnits: give allocate and units, or buckets, order, "
                                         "ends and label");
        return -1;
    }
    if (!sw_py_device_enter(owner->comm)) /* it is connected from here on */
        return -1;
    sw_py_device_leave(owner->comm);
    sw_py_set(&self->stream, a[2].o);
    sw_py_set(&self->allocate, a[3].o);
    sw_py_set_or_clear(&self->home, a[11].o);
    self->slack_bytes = a[10].size * SW_UNIT_ALIGNMENT;
    if (!keep_layout(self, a[1].o) ||
        !(is_planned ? make_planned(self, &m, a[4].o, a[9].size) : make_groups(self, &m, a)))
        return -1;
    self->apart = calloc(self->plan.count + 1, sizeof *self->apart);
    self->part = calloc(self->plan.count + 1, sizeof *self->part);
    self->nears = PyList_New(0);
    if (!self->nears || !((self->apart && self->part) || no_memory()) ||
        !sw_py_device_enter(owner->comm))
        return -1;
    sw_status status = SW_PY_WITHOUT_GIL(
        sw_device_units_create(owner->comm->comm, self->plan.place_count, self->beside.data,
                               m.specs, self->plan.count, &made, &err));
    return sw_py_owner_made(owner, made, destroy, status, &err);
}

static void let_go(held_memory *held, size_t count)
{
    for (size_t i = 0; held && i < count; ++i)
        Py_XDECREF(held[i].tensor);
    free(held);
}

/* Memory is let go of once no gather writes to it. */
static void units_dealloc(PyObject *op)
{
    device_units_object old = *(device_units_object *)op;
    sw_py_owner_dealloc(op);
    let_go(old.place, old.plan.place_count);
    let_go(old.apart, old.plan.count);
    let_go(old.part, old.plan.count);
    Py_XDECREF(old.nears);
    let_go(old.slice, old.layout.bucket_count);
    sw_unit_plan_fini(&old.plan);
    free(old.layout.place);
    free(old.layout.bucket);
    free(old.layout.order);
    Py_XDECREF(old.beside.tensor);
    free(old.group_of);
    Py_XDECREF(old.allocate);
    Py_XDECREF(old.home);
    Py_XDECREF(old.stream);
    Py_XDECREF(old.announce);
}

static bool check_unit(const device_units_object *self, Py_ssize_t unit)
{
    if (!sw_py_owner_check(&self->owner, "the units were"))
        return false;
    return (unit >= 0 && (size_t)unit < self->plan.count) ||
           sw_py_refuse(PyExc_IndexError, "unit must be in [0, %zu), got %zd", self->plan.count,
                        unit);
}

/* Reads torch's current stream and enters the communicator. Returns false with an exception. */
static bool enter(const device_units_object *self, sw_stream **stream)
{
    if (!sw_py_owner_check(&self->owner, "the units were"))
        return false;
    SW_PY_OWNED *value = PyObject_CallFunctionObjArgs(self->stream, NULL);
    *stream = value ? PyLong_AsVoidPtr(value) : NULL;
    return !PyErr_Occurred() && sw_py_device_enter(self->owner.comm);
}

/* Tells joined ranks, inside a join, to gather the same unit. Returns false with an exception. */
static bool announce(const device_units_object *self, size_t unit)
{
    if (!self->announce)
        return true;
    SW_PY_OWNED *number = PyLong_FromSize_t(unit), *called = Py_NewRef(self->announce);
    SW_PY_OWNED *done = number ? PyObject_CallFunctionObjArgs(called, number, NULL) : NULL;
    return done != NULL;
}

static PyObject *units_gather(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    sw_device_units *made = self->owner.made;
    sw_py_arg a[3] = {{0}};
    sw_stream *stream;
    sw_error err;
    if (!sw_py_read("gather unit:n | apart:p exact:p", args, NULL, a) || !check_unit(self, a[0].n))
        return NULL;
    held_memory *apart = &self->apart[a[0].size];
    sw_unit_way way = sw_device_unit_way(made, a[0].size, a[1].p);
    if (way == SW_UNIT_BLOCKED)
        return PyLong_FromSize_t(sw_device_unit_holder(made, a[0].size));
    if (way == SW_UNIT_APART && !self->allocate)
        return PyErr_Format(PyExc_ValueError, "gather: groups of buckets lie in their own memory");
    if ((way == SW_UNIT_APART && !allocate(self, self->plan.unit[a[0].size].size_bytes, apart)) ||
        (way != SW_UNIT_TAKE && !announce(self, a[0].size)) || !enter(self, &stream))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(
        way == SW_UNIT_APART
            ? sw_device_unit_gather_apart(made, a[0].size, apart->data, stream, &err)
            : sw_device_unit_make_whole(made, a[0].size, stream, &err));
    return sw_py_device_finish(self->owner.comm, status, &err);
}

static PyObject *units_ahead(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    sw_device_units *made = self->owner.made;
    sw_py_arg a[2] = {{0}};
    sw_stream *stream;
    sw_error err;
    if (!sw_py_read("ahead unit:n | apart:p", args, NULL, a) || !check_unit(self, a[0].n))
        return NULL;
    bool is_there = sw_device_unit_state(made, a[0].size) != SW_SHARD_SHARDED;
    if (is_there || !self->plan.unit[a[0].size].part_count)
        Py_RETURN_TRUE;
    if (sw_device_unit_way(made, a[0].size, a[1].p) != SW_UNIT_GATHER ||
        sw_device_unit_holder(made, a[0].size) != SW_DEVICE_UNIT_NONE)
        Py_RETURN_FALSE;
    if (!announce(self, a[0].size) || !enter(self, &stream))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_unit_gather(made, a[0].size, &err));
    SW_PY_OWNED *done = sw_py_device_finish(self->owner.comm, status, &err);
    return done ? Py_NewRef(Py_True) : NULL;
}

/* Memory apart is torch's, whose allocator orders its reuse: no stream is needed, and a
 * communicator that has failed is not asked. */
static PyObject *units_release(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    sw_device_units *made = self->owner.made;
    sw_py_arg a[1];
    sw_stream *stream = NULL;
    sw_error err;
    if (!sw_py_read("release unit:n", args, NULL, a) || !check_unit(self, a[0].n))
        return NULL;
    if (sw_device_unit_is_apart(made, a[0].size)) {
        sw_status status = sw_device_unit_release(made, a[0].size, NULL, &err);
        sw_py_set(&self->apart[a[0].size].tensor, NULL);
        return sw_py_finish(self, status, &err);
    }
    if (!enter(self, &stream))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_unit_release(made, a[0].size, stream, &err));
    return sw_py_device_finish(self->owner.comm, status, &err);
}

/* Lets a unit stay with the ranks of another communicator after it is released. */
static PyObject *units_keep_near(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    sw_py_arg a[2];
    if (!sw_py_read("keep_near unit:n comm:O", args, NULL, a) || !check_unit(self, a[0].n))
        return NULL;
    const sw_planned_unit *unit = &self->plan.unit[a[0].size];
    sw_device_comm *near = PyObject_TypeCheck(a[1].o, sw_py_state_of(self)->device_comm_type)
                               ? ((device_comm_object *)a[1].o)->comm
                               : NULL;
    size_t ranks = near && near->peers ? (size_t)near->peers->world_size : 0;
    if (ranks == 0 || ranks * SW_UNIT_ALIGNMENT > self->slack_bytes)
        return PyErr_Format(PyExc_ValueError,
                            "keep_near: comm must be a connected DeviceComm of at most %zu ranks, "
                            "for which places have room",
                            self->slack_bytes / SW_UNIT_ALIGNMENT);
    if (!unit->has_place || !unit->size_bytes)
        Py_RETURN_NONE;
    size_t part = (unit->size_bytes / ranks / SW_UNIT_ALIGNMENT + 1) * SW_UNIT_ALIGNMENT;
    if (PyList_Append(self->nears, a[1].o) < 0 || !allocate(self, part, &self->part[a[0].size]) ||
        !sw_py_device_enter(self->owner.comm))
        return NULL;
    self->near_bytes += part;
    sw_device_unit_keep_near(self->owner.made, a[0].size, near, self->part[a[0].size].data, part);
    sw_py_device_leave(self->owner.comm);
    Py_RETURN_NONE;
}

#define UNITS_METHOD(name, signature, check, call)                                           \
    SW_PY_METHOD_WITH(units_##name, device_units_object, #name signature, sw_stream *stream, \
                      (check) && enter(self, &stream), call,                                 \
                      sw_py_device_finish(self->owner.comm, status, &err))

UNITS_METHOD(follow, "", true, sw_device_units_follow(self->owner.made, stream, &err))
UNITS_METHOD(update, "", true, sw_device_units_update(self->owner.made, stream, &err))
UNITS_METHOD(gather_anew, "", true, sw_device_units_gather_anew(self->owner.made, stream, &err))

#define UNITS_VALUE(name, value) \
    SW_PY_VALUE(units_##name, device_units_object, #name " unit:n", check_unit(self, a[0].n), value)

#define STATE sw_device_unit_state(self->owner.made, a[0].size)
UNITS_VALUE(state, PyUnicode_FromString(sw_shard_state_name(STATE)))
UNITS_VALUE(is_whole, PyBool_FromLong(STATE == SW_SHARD_UNSHARDED))
UNITS_VALUE(is_apart, PyBool_FromLong(sw_device_unit_is_apart(self->owner.made, a[0].size)))
UNITS_VALUE(take_write, PyLong_FromLong(-1))

/* Returns a capsule over a parameter of a unit, where the unit lies now. That of a unit without a
 * place is never read: it has the shape alone. */
static PyObject *units_tensor(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    sw_py_arg a[4];
    sw_py_layout layout;
    if (!sw_py_read("tensor unit:n parameter:n shape:O strides:O", args, NULL, a) ||
        !check_unit(self, a[0].n))
        return NULL;
    const sw_planned_unit *unit = &self->plan.unit[a[0].size];
    const sw_layout_place *at =
        a[1].n >= 0 && a[1].size < self->layout.param_count ? &self->layout.place[a[1].size] : NULL;
    const sw_unit_part *part = at ? sw_planned_unit_part(unit, at->bucket) : NULL;
    if (!part)
        return PyErr_Format(PyExc_IndexError, "tensor: unit %zd has no parameter %zd", a[0].n,
                            a[1].n);
    const held_memory *held = sw_device_unit_is_apart(self->owner.made, a[0].size)
                                  ? &self->apart[a[0].size]
                                  : &self->place[unit->place];
    if (!sw_py_layout_init(&layout, part->dtype, a[2].o, a[3].o, "tensor"))
        return NULL;
    if (layout.numel != at->numel || layout.bytes > at->numel * sw_dtype_size_bytes(part->dtype))
        return PyErr_Format(PyExc_ValueError, "tensor: shape must have %zu dense elements",
                            at->numel);
    size_t offset = sw_unit_offset_bytes(&self->layout, part, a[1].size);
    return sw_py_dlpack_capsule_on(self->ordinal, held->tensor, held->data + offset, &layout);
}

static PyObject *units_slice(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    sw_py_arg a[1];
    sw_py_layout layout;
    if (!sw_py_read("slice parameter:n", args, NULL, a) ||
        !sw_py_owner_check(&self->owner, "the units were"))
        return NULL;
    if (a[0].n < 0 || a[0].size >= self->layout.param_count ||
        !self->slice[self->layout.place[a[0].size].bucket].tensor)
        return PyErr_Format(PyExc_IndexError, "slice: no unit has parameter %zd", a[0].n);
    const sw_layout_place *at = &self->layout.place[a[0].size];
    const sw_layout_bucket *bucket = &self->layout.bucket[at->bucket];
    const held_memory *held = &self->slice[at->bucket];
    const sw_layout_run run = sw_layout_run_in(
        &self->layout, a[0].size, (size_t)self->owner.comm->comm->peers->rank, world_size_of(self));
    size_t begin = run.first * sw_dtype_size_bytes(bucket->dtype);
    SW_PY_OWNED *shape = Py_BuildValue("(n)", (Py_ssize_t)(run.end - run.begin));
    if (!shape || !sw_py_layout_init(&layout, bucket->dtype, shape, Py_None, "slice"))
        return NULL;
    return sw_py_dlpack_capsule_on(self->ordinal, held->tensor, held->data + begin, &layout);
}

/* Returns the bytes of all places and the memory beside, and of all slices. */
static PyObject *bytes_of(const device_units_object *self, const PyObject *units)
{
    size_t places = self->plan.beside_bytes + self->near_bytes, slices = 0;
    for (size_t p = 0; self->plan.place_bytes && p < self->plan.place_count; ++p)
        places += self->plan.place_bytes[p] + self->slack_bytes;
    for (size_t b = 0; b < self->layout.bucket_count; ++b) {
        const sw_layout_bucket *bucket = &self->layout.bucket[b];
        if (self->slice[b].tensor)
            slices += bucket->numel / world_size_of(self) * sw_dtype_size_bytes(bucket->dtype);
    }
    return Py_BuildValue("Nnn", units, (Py_ssize_t)places, (Py_ssize_t)slices);
}

SW_PY_VALUE(units_sizes, device_units_object, "sizes",
            sw_py_owner_check(&self->owner, "the units were"),
            bytes_of(self, SW_PY_LIST(i, self->plan.count,
                                      PyLong_FromSize_t(self->plan.unit[i].size_bytes))))

SW_PY_VALUE(units_digest, device_units_object, "digest",
            sw_py_owner_check(&self->owner, "the units were"),
            PyLong_FromUnsignedLong(sw_device_units_digest(self->owner.made)))

SW_PY_VALUE(units_set_announce, device_units_object, "set_announce callable:O", true,
            (sw_py_set_or_clear(&self->announce, a[0].o), sw_py_none()))

/* Returns the units that are GATHERING. */
static PyObject *units_coming(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const device_units_object *self = (const device_units_object *)op;
    PyObject *found = PyList_New(0);
    for (size_t i = 0; found && self->owner.made && i < self->plan.count; ++i)
        if (sw_device_unit_state(self->owner.made, i) == SW_SHARD_GATHERING)
            sw_py_append(&found, PyLong_FromSize_t(i));
    return found;
}

#define GROUP_OF(parameter) self->group_of[self->layout.place[parameter].bucket]

/* Marks the units that are GATHERING and have one of these parameters; None: all of those. Returns
 * their number, or -1 with an exception. */
static Py_ssize_t mark_arriving(const device_units_object *self, PyObject *parameters, bool *marks)
{
    Py_ssize_t found = 0;
    SW_PY_TABLE given = {0};
    if (parameters != Py_None && !sw_py_table_init(&given, parameters, "arrive parameter:N",
                                                   sizeof(size_t), fill_number, NULL))
        return -1;
    for (size_t i = 0; i < self->plan.count; ++i)
        marks[i] = parameters == Py_None;
    for (size_t i = 0; i < given.count; ++i) {
        size_t parameter = ((const size_t *)given.rows)[i];
        size_t group = parameter < self->layout.param_count ? GROUP_OF(parameter) : SIZE_MAX;
        if (group < self->plan.count)
            marks[group] = true;
    }
    for (size_t i = 0; i < self->plan.count; ++i) {
        marks[i] &= sw_device_unit_state(self->owner.made, i) == SW_SHARD_GATHERING;
        found += marks[i];
    }
    return found;
}

/* Lets the stream wait for marked units. After a failure of the communicator the next collective
 * raises. */
static bool arrive_marked(device_units_object *self, const bool *marks)
{
    const device_comm_object *comm = self->owner.comm;
    sw_stream *stream;
    sw_error err;
    bool done = enter(self, &stream);
    if (done) {
        sw_status status = SW_OK;
        for (size_t i = 0; i < self->plan.count && status == SW_OK; ++i)
            if (marks[i])
                status =
                    SW_PY_WITHOUT_GIL(sw_device_unit_arrive(self->owner.made, i, stream, &err));
        SW_PY_OWNED *finished = sw_py_device_finish(self->owner.comm, status, &err);
        done = finished != NULL;
    }
    if (!done && PyErr_ExceptionMatches(sw_py_state_of(self)->error) &&
        !sw_py_device_is_alive(comm)) {
        PyErr_Clear();
        done = true;
    }
    return done;
}

static PyObject *units_arrive(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    sw_py_arg a[1];
    if (!sw_py_read("arrive parameters:O", args, NULL, a) ||
        !sw_py_owner_check(&self->owner, "the units were"))
        return NULL;
    bool *marks = calloc(self->plan.count + 1, sizeof *marks);
    Py_ssize_t count = marks ? mark_arriving(self, a[0].o, marks) : -1;
    PyObject *found =
        count < 0 || (count > 0 && !arrive_marked(self, marks)) ? NULL : PyList_New(0);
    for (size_t p = 0; found && count > 0 && p < self->layout.param_count; ++p)
        if (GROUP_OF(p) < self->plan.count && marks[GROUP_OF(p)])
            sw_py_append(&found, PyLong_FromSize_t(p));
    if (!marks)
        PyErr_NoMemory();
    free(marks);
    return found;
}

/* A communicator that has failed is not asked if there is none. */
static PyObject *units_drop_ahead(PyObject *op, PyObject *unused)
{
    device_units_object *self = (device_units_object *)op;
    SW_PY_OWNED *coming = units_coming(op, unused);
    sw_stream *stream;
    sw_error err;
    if (!coming || PyList_Size(coming) == 0)
        return coming ? sw_py_none() : NULL;
    if (!enter(self, &stream))
        return NULL;
    sw_status status =
        SW_PY_WITHOUT_GIL(sw_device_units_drop_ahead(self->owner.made, stream, &err));
    return sw_py_device_finish(self->owner.comm, status, &err);
}

SW_PY_OWNER_STATS(units_stats, sw_device_units_stats, sw_device_units_get_stats,
                  SW_PY_COUNT(sw_device_units_stats, gathers),
                  SW_PY_COUNT(sw_device_units_stats, releases),
                  SW_PY_COUNT(sw_device_units_stats, near_gathers),
                  SW_PY_COUNT(sw_device_units_stats, home_bytes),
                  SW_PY_COUNT_AS(sw_device_units_stats, bytes, "gathered_bytes"))

SW_PY_GETTER(units_is_collective, sw_py_owner, PyBool_FromLong(self->comm != NULL))
static PyGetSetDef units_properties[] = {
    {"is_collective", units_is_collective, NULL, "True: all ranks gather the same units in order",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef units_methods[] = {
    SW_PY_ARGS(units, gather, "unit, apart=False, exact=True, /",
               "Make a unit whole for later work on torch's current stream: in its place, or with "
               "apart in memory of its own. Return None, or the whole unit that must leave the "
               "place first."),
    SW_PY_ARGS(units, ahead, "unit, apart=False, /",
               "Begin to gather a unit into its place, unless it is whole or under way. Return "
               "False if it cannot be: the place is in use, or apart is true."),
    SW_PY_ARGS(units, release, "unit, /", "Release a whole unit after the stream's work."),
    SW_PY_ARGS(units, arrive, "parameters, /",
               "Let torch's current stream, and that of gather_anew(), wait for the units under "
               "way that have one of these parameters, or with None for all. Return all "
               "parameters of those units."),
    SW_PY_NONE(units, coming, "Return the units that are under way."),
    SW_PY_NONE(units, drop_ahead, "Release the units that are under way."),
    SW_PY_ARGS(units, keep_near, "unit, comm, /",
               "Let the unit stay with the ranks of `comm` after it is released, for one gather."),
    SW_PY_ARGS(units, follow, "/", "Order gathers after the stream's writes to slices."),
    SW_PY_ARGS(units, update, "/", "Do that, while all units are sharded."),
    SW_PY_ARGS(units, gather_anew, "/", "Gather all units after the stream's writes."),
    SW_PY_ARGS(units, state, "unit, /", "Return 'sharded', 'gathering' or 'unsharded'."),
    SW_PY_ARGS(units, is_whole, "unit, /", "Return True if the unit is unsharded."),
    SW_PY_ARGS(units, is_apart, "unit, /", "Return True if the unit is whole outside its place."),
    SW_PY_ARGS(units, take_write, "unit, /",
               "Return -1: a write to a released unit is not seen on a GPU."),
    SW_PY_ARGS(units, tensor, "unit, parameter, shape, strides, /",
               "Return a DLPack capsule over a unit's parameter, where the unit lies now."),
    SW_PY_ARGS(units, slice, "parameter, /",
               "Return a DLPack capsule over this rank's elements of a parameter."),
    SW_PY_ARGS(units, sizes, "/",
               "Return ([bytes of each unit], bytes that units share, of slices)."),
    SW_PY_ARGS(units, digest, "/", "Return a digest of the units gathered so far, in order."),
    SW_PY_ARGS(units, set_announce, "announce, /",
               "Set a callable that gets each unit before it is gathered, or None."),
    SW_PY_NONE(units, stats, "Return counts since creation."),
    {NULL, NULL, 0, NULL},
};

SW_PY_TYPE(
    sw_py_device_units_type_spec, "DeviceUnits", device_units_object, 0,
    "Units of parameters that are gathered into places of a GPU. stream: returns torch's current "
    "stream. Planned: units is [(name, level of nesting, stays whole, the unit of which it is a "
    "form or its own number, [(parameter, dtype)])], turns the places of a level, "
    "allocate(nbytes) returns zeroed memory; home(nbytes) that of slices at home. Or groups of "
    "whole buckets: buckets is [(number, "
    "tensor)], order parameters in the order of use, which ends[] cuts.",
    {Py_tp_init, units_init}, {Py_tp_dealloc, units_dealloc}, {Py_tp_methods, units_methods},
    {Py_tp_getset, units_properties})
