/* device_units_type.c - shardwright._engine.DeviceUnits: units of parameters that are gathered into
 * places of GPU memory (zero/unit_plan.h, zero/device_units.h). parameters/unshard_schedule.py
 * decides when; torch allocates all memory. */
#include <stdlib.h>
#include <string.h>

#include "python/owner.h"
#include "python/reducer_object.h"
#include "zero/device_units.h"
#include "zero/unit_plan.h"

typedef struct unit_tensor { /* a parameter of a unit */
    size_t parameter, offset_bytes;
    sw_dtype dtype;
    PyObject *shape, *strides; /* owned, or NULL: no tensor is asked for */
} unit_tensor;

typedef struct unit_memory {
    unit_tensor *tensor; /* owned */
    size_t tensor_count, size_bytes;
    uint8_t *data; /* of its place */
    PyObject *in_place /* owned: torch's tensor, or NULL; that of its place */, *apart;
    uint8_t *data_apart;
} unit_memory;

typedef struct unit_slice { /* this rank's slice of a bucket */
    PyObject *memory;       /* owned; NULL: no unit has the bucket */
    uint8_t *data;
    size_t numel, group; /* group: the unit that has the bucket, of groups of buckets */
    sw_dtype dtype;
} unit_slice;

typedef struct device_units_object {
    sw_py_owner owner;           /* of a sw_device_units */
    PyObject *allocate, *stream; /* owned callables */
    PyObject *announce;          /* owned callable, or NULL */
    unit_memory *unit;           /* owned */
    unit_slice *slice;           /* owned, by bucket */
    sw_layout_place *place;      /* owned, by parameter */
    size_t unit_count, bucket_count, parameter_count, place_bytes;
    int ordinal; /* of capsules: -1 where the memory is the host's */
} device_units_object;

SW_PY_DESTROY(destroy, sw_device_units_destroy)

/* ---- memory ---- */

/* Asks torch for zeroed memory. Returns a new reference to its tensor, or NULL with an exception.
 */
static PyObject *allocate(device_units_object *self, size_t bytes, uint8_t **data)
{
    void *address;
    SW_PY_OWNED *size = PyLong_FromSize_t(bytes);
    PyObject *made = size ? PyObject_CallFunctionObjArgs(self->allocate, size, NULL) : NULL;
    SW_PY_OWNED *flag = made ? PyObject_GetAttrString(made, "is_cuda") : NULL;
    if (!flag || !sw_py_tensor_address(made, &address)) {
        Py_XDECREF(made);
        return NULL;
    }
    self->ordinal = flag == Py_True ? self->owner.comm->comm->device->ordinal : -1;
    *data = address;
    return made;
}

/* Makes this rank's slice of a bucket, unless it exists. Returns false with an exception. */
static bool make_slice(device_units_object *self, const sw_layout_bucket *bucket, unit_slice *slice)
{
    if (slice->memory)
        return true;
    slice->dtype = bucket->dtype;
    slice->numel = bucket->numel / (size_t)self->owner.comm->comm->peers->world_size;
    slice->memory = allocate(self, slice->numel * sw_dtype_size_bytes(slice->dtype), &slice->data);
    return slice->memory != NULL;
}

/* ---- units that are planned ---- */

typedef struct member_row {
    sw_unit_member member;
    PyObject *shape, *strides; /* borrowed */
} member_row;

typedef struct given_unit {
    sw_unit_row row;
    const member_row *members;
} given_unit;

SW_PY_ROW(fill_member, member_row, .member = {.parameter = a[0].size, .dtype = a[1].dtype},
          .shape = a[2].o, .strides = a[3].o)

static bool fill_unit(const sw_py_arg *a, void *row, void *rows)
{
    const sw_py_table *members =
        sw_py_nested_add(rows, a[4].o, "member parameter:N dtype:T shape:U strides:O",
                         sizeof(member_row), fill_member);
    if (members)
        *(given_unit *)row = (given_unit){.row = {.name = a[0].s,
                                                  .level = a[1].size,
                                                  .stays = a[2].p,
                                                  .form_of = a[3].size,
                                                  .member_count = members->count},
                                          .members = members->rows};
    return members != NULL;
}

/* What is made while the object is: owned arrays. */
typedef struct making {
    sw_unit_plan plan;
    sw_unit_row *rows;
    sw_unit_member *members;
    sw_device_unit_spec *specs;
    sw_device_unit_run *runs;
    PyObject **places; /* owned tensors, by place */
    uint8_t **data;    /* by place */
} making;

static void making_fini(making *m)
{
    for (size_t p = 0; m->places && p < m->plan.place_count; ++p)
        Py_XDECREF(m->places[p]);
    sw_unit_plan_fini(&m->plan);
    free(m->rows), free(m->members), free(m->specs), free(m->runs), free(m->places), free(m->data);
}
#define MAKING __attribute__((cleanup(making_fini))) making

static bool plan_units(making *m, const sw_layout *layout, const given_unit *given, size_t count,
                       size_t turns, sw_error *err)
{
    size_t members = 0, runs = 0, next = 0;
    for (size_t i = 0; i < count; ++i)
        members += given[i].row.member_count;
    m->rows = calloc(count + 1, sizeof *m->rows);
    m->members = calloc(members + 1, sizeof *m->members);
    if (!m->rows || !m->members)
        return sw_error_set(err, SW_E_MEMORY, -1, "no memory for %zu units", count) == SW_OK;
    for (size_t i = 0; i < count; ++i) {
        m->rows[i] = given[i].row;
        m->rows[i].members = m->members + next;
        for (size_t k = 0; k < given[i].row.member_count; ++k)
            m->members[next++] = given[i].members[k].member;
    }
    if (sw_unit_plan_init(&m->plan, layout, m->rows, count, turns, err) != SW_OK)
        return false;
    for (size_t i = 0; i < count; ++i)
        runs += m->plan.unit[i].part_count;
    m->specs = calloc(count + 1, sizeof *m->specs);
    m->runs = calloc(runs + 1, sizeof *m->runs);
    m->places = calloc(m->plan.place_count + 1, sizeof(PyObject *));
    m->data = calloc(m->plan.place_count + 1, sizeof *m->data);
    if (!m->specs || !m->runs || !m->places || !m->data)
        return sw_error_set(err, SW_E_MEMORY, -1, "no memory for %zu units", count) == SW_OK;
    return true;
}

/* Keeps what tensors over a unit need. Returns false with an exception. */
static bool keep_tensors(device_units_object *self, size_t number, const sw_layout *layout,
                         const sw_planned_unit *planned, const given_unit *given)
{
    unit_memory *unit = &self->unit[number];
    unit->tensor = calloc(given->row.member_count + 1, sizeof *unit->tensor);
    if (!unit->tensor)
        return PyErr_NoMemory() != NULL;
    for (size_t k = 0; k < given->row.member_count; ++k) {
        const member_row *row = &given->members[k];
        const sw_layout_place *at = &layout->place[row->member.parameter];
        const sw_unit_part *part = sw_planned_unit_part(planned, at->bucket);
        size_t begin = at->begin * sw_dtype_size_bytes(part->dtype);
        Py_INCREF(row->shape);
        Py_INCREF(row->strides);
        unit->tensor[unit->tensor_count++] =
            (unit_tensor){.parameter = row->member.parameter,
                          .offset_bytes = part->offset_bytes + begin,
                          .dtype = part->dtype,
                          .shape = row->shape,
                          .strides = row->strides};
    }
    return true;
}

/* Allocates slices and places, and makes the specs. Returns false with an exception. */
static bool fill_specs(device_units_object *self, making *m, const sw_layout *layout,
                       const given_unit *given)
{
    sw_device_unit_run *run = m->runs;
    for (size_t p = 0; p < m->plan.place_count; ++p) {
        m->places[p] = allocate(self, m->plan.place_bytes[p], &m->data[p]);
        if (!m->places[p])
            return false;
        self->place_bytes += m->plan.place_bytes[p];
    }
    for (size_t i = 0; i < m->plan.count; ++i) {
        const sw_planned_unit *planned = &m->plan.unit[i];
        unit_memory *unit = &self->unit[i];
        *unit = (unit_memory){.size_bytes = planned->size_bytes,
                              .data = m->data[planned->place],
                              .in_place = Py_NewRef(m->places[planned->place])};
        m->specs[i] = (sw_device_unit_spec){.name = given[i].row.name,
                                            .place = planned->place,
                                            .data = planned->has_place ? unit->data : NULL,
                                            .runs = run,
                                            .run_count = planned->part_count};
        for (size_t k = 0; k < planned->part_count; ++k, ++run) {
            const sw_unit_part *part = &planned->part[k];
            unit_slice *slice = &self->slice[part->bucket];
            if (!make_slice(self, &layout->bucket[part->bucket], slice))
                return false;
            *run =
                (sw_device_unit_run){.slice = slice->data,
                                     .offset_bytes = part->offset_bytes,
                                     .slice_bytes = slice->numel * sw_dtype_size_bytes(part->dtype),
                                     .slice_dtype = slice->dtype,
                                     .dtype = part->dtype};
        }
        if (!keep_tensors(self, i, layout, planned, &given[i]))
            return false;
    }
    return true;
}

static bool make_planned(device_units_object *self, making *m, const sw_layout *layout,
                         PyObject *units, size_t turns)
{
    SW_PY_NESTED given = {.begun = 0};
    sw_error err;
    if (!sw_py_nested_init(&given, units, "unit name:s level:N stays:p form_of:N members:L",
                           sizeof(given_unit), fill_unit))
        return false;
    self->unit_count = given.outer.count;
    self->unit = calloc(self->unit_count + 1, sizeof *self->unit);
    if (!self->unit)
        return PyErr_NoMemory() != NULL;
    if (!plan_units(m, layout, given.outer.rows, self->unit_count, turns, &err))
        return sw_py_raise(self, &err, NULL) != NULL;
    return fill_specs(self, m, layout, given.outer.rows);
}

/* ---- groups of buckets, which lie in their own memory and contain the slices ---- */

typedef struct given_bucket {
    size_t bucket;
    PyObject *tensor; /* borrowed */
} given_bucket;

SW_PY_ROW(fill_bucket, given_bucket, .bucket = a[0].size, .tensor = a[1].o)
SW_PY_ROW(fill_number, size_t, a->size)

typedef struct grouping {
    sw_py_table buckets, order, ends;
    size_t *group_of, *sequence; /* owned, by bucket */
    uint8_t **data;              /* owned, by bucket */
    bool *wanted;                /* owned, by bucket */
} grouping;

static void grouping_fini(grouping *g)
{
    sw_py_table_fini(&g->buckets);
    sw_py_table_fini(&g->order);
    sw_py_table_fini(&g->ends);
    free(g->group_of), free(g->sequence), free(g->data), free(g->wanted);
}
#define GROUPING __attribute__((cleanup(grouping_fini))) grouping

/* Reads the arguments. Returns false with an exception. */
static bool read_grouping(grouping *g, const sw_layout *layout, const sw_py_arg *a)
{
    size_t count = layout->bucket_count + 1;
    if (!sw_py_table_init(&g->buckets, a[5].o, "bucket number:N tensor:O", sizeof(given_bucket),
                          fill_bucket, NULL) ||
        !sw_py_table_init(&g->order, a[6].o, "order parameter:N", sizeof(size_t), fill_number,
                          NULL) ||
        !sw_py_table_init(&g->ends, a[7].o, "ends end:N", sizeof(size_t), fill_number, NULL))
        return false;
    g->group_of = calloc(count, sizeof *g->group_of);
    g->sequence = calloc(count, sizeof *g->sequence);
    g->data = calloc(count, sizeof *g->data);
    g->wanted = calloc(count, sizeof *g->wanted);
    if (!g->group_of || !g->sequence || !g->data || !g->wanted)
        return PyErr_NoMemory() != NULL;
    for (size_t i = 0; i < g->buckets.count; ++i) {
        const given_bucket *given = &((const given_bucket *)g->buckets.rows)[i];
        void *address = NULL;
        if (given->bucket >= layout->bucket_count)
            return sw_py_refuse(PyExc_IndexError, "bucket index must be in [0, %zu), got %zu",
                                layout->bucket_count, given->bucket);
        if (!sw_py_tensor_address(given->tensor, &address))
            return false;
        g->data[given->bucket] = address;
        g->wanted[given->bucket] = layout->bucket[given->bucket].numel > 0;
    }
    for (size_t i = 0; i < g->order.count; ++i)
        if (((const size_t *)g->order.rows)[i] >= layout->param_count)
            return sw_py_refuse(PyExc_IndexError, "parameter index must be in [0, %zu), got %zu",
                                layout->param_count, ((const size_t *)g->order.rows)[i]);
    return true;
}

/* Adds the parameters of a bucket to its group. Returns false with an exception. */
static bool add_parameters(unit_memory *unit, const sw_layout *layout, size_t bucket)
{
    const sw_layout_bucket *added = &layout->bucket[bucket];
    size_t bytes = (unit->tensor_count + added->count) * sizeof *unit->tensor;
    unit_tensor *tensor = realloc(unit->tensor, bytes);
    if (!tensor)
        return PyErr_NoMemory() != NULL;
    unit->tensor = tensor;
    for (size_t i = 0; i < added->count; ++i)
        tensor[unit->tensor_count++] = (unit_tensor){.parameter = layout->order[added->first + i]};
    return true;
}

static bool make_groups(device_units_object *self, making *m, const sw_layout *layout,
                        const sw_py_arg *a)
{
    const sw_peers *peers = self->owner.comm->comm->peers;
    size_t world_size = (size_t)peers->world_size, rank = (size_t)peers->rank;
    GROUPING g = {.group_of = NULL};
    if (!read_grouping(&g, layout, a))
        return false;
    size_t count = sw_unit_groups(layout, g.wanted, g.order.rows, g.ends.rows, g.ends.count,
                                  g.group_of, g.sequence);
    self->unit_count = count ? g.group_of[g.sequence[count - 1]] + 1 : 0;
    self->unit = calloc(self->unit_count + 1, sizeof *self->unit);
    m->specs = calloc(self->unit_count + 1, sizeof *m->specs);
    m->runs = calloc(count + 1, sizeof *m->runs);
    if (!self->unit || !m->specs || !m->runs)
        return PyErr_NoMemory() != NULL;
    m->plan.place_count = self->unit_count;
    for (size_t i = 0; i < count; ++i) { /* the first byte of each group */
        uint8_t *data = g.data[g.sequence[i]];
        sw_device_unit_spec *spec = &m->specs[g.group_of[g.sequence[i]]];
        if (!spec->run_count++)
            *spec = (sw_device_unit_spec){.name = a[8].s,
                                          .place = g.group_of[g.sequence[i]],
                                          .data = data,
                                          .runs = &m->runs[i],
                                          .run_count = 1};
        else if (data < (uint8_t *)spec->data)
            spec->data = data;
    }
    for (size_t i = 0; i < count; ++i) {
        size_t bucket = g.sequence[i], group = g.group_of[bucket];
        self->slice[bucket].group = group;
        sw_dtype dtype = layout->bucket[bucket].dtype;
        size_t bytes = layout->bucket[bucket].numel / world_size * sw_dtype_size_bytes(dtype);
        m->runs[i] = (sw_device_unit_run){
            .slice = g.data[bucket] + rank * bytes,
            .offset_bytes = (size_t)(g.data[bucket] - (uint8_t *)m->specs[group].data),
            .slice_bytes = bytes,
            .slice_dtype = dtype,
            .dtype = dtype};
        if (!add_parameters(&self->unit[group], layout, bucket))
            return false;
    }
    return true;
}

/* ---- the object ---- */

/* Returns the reducer's layout, or NULL with an exception. */
static const sw_layout *layout_of(device_units_object *self, PyObject *reducer)
{
    PyTypeObject *wanted = sw_py_state_of(self)->reducer_type;
    if (!PyObject_TypeCheck(reducer, wanted)) {
        PyErr_Format(PyExc_TypeError, "DeviceUnits: reducer must be a Reducer, got %R",
                     (PyObject *)Py_TYPE(reducer));
        return NULL;
    }
    reducer_object *made = (reducer_object *)reducer;
    return reducer_check_made(made) == 0 ? sw_reducer_layout(made->reducer) : NULL;
}

/* Keeps what a slice's position needs, which may outlive the reducer. */
static bool keep_layout(device_units_object *self, const sw_layout *layout)
{
    self->slice = calloc(layout->bucket_count + 1, sizeof *self->slice);
    self->place = calloc(layout->param_count + 1, sizeof *self->place);
    if (!self->slice || !self->place)
        return PyErr_NoMemory() != NULL;
    for (size_t b = 0; b < layout->bucket_count; ++b)
        self->slice[b].group = SIZE_MAX;
    memcpy(self->place, layout->place, layout->param_count * sizeof *self->place);
    self->bucket_count = layout->bucket_count;
    self->parameter_count = layout->param_count;
    return true;
}

static int units_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    device_units_object *self = (device_units_object *)op;
    sw_py_owner *owner = &self->owner;
    sw_py_arg a[10] = {{0}};
    MAKING m = {.rows = NULL};
    sw_device_units *made = NULL;
    sw_error err;
    if (!sw_py_read("DeviceUnits comm:O reducer:O stream:O | allocate:O units:L buckets:L order:L "
                    "ends:L label:s turns:N",
                    args, kwargs, a) ||
        !sw_py_owner_bind(owner, a[0].o, "DeviceUnits"))
        return -1;
    bool is_planned = a[3].o && a[4].o, is_grouped = a[5].o && a[6].o && a[7].o && a[8].s;
    const sw_layout *layout = layout_of(self, a[1].o);
    if (is_planned == is_grouped) {
        PyErr_SetString(PyExc_TypeError, "DeviceUnits: give allocate and units, or buckets, order, "
                                         "ends and label");
        return -1;
    }
    if (!layout || !sw_py_device_enter(owner->comm)) /* it is connected from here on */
        return -1;
    sw_py_device_leave(owner->comm);
    sw_py_set(&self->stream, a[2].o);
    sw_py_set(&self->allocate, a[3].o);
    if (!keep_layout(self, layout) ||
        !(is_planned ? make_planned(self, &m, layout, a[4].o, a[9].size)
                     : make_groups(self, &m, layout, a)) ||
        !sw_py_device_enter(owner->comm))
        return -1;
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_units_create(
        owner->comm->comm, m.plan.place_count, m.specs, self->unit_count, &made, &err));
    return sw_py_owner_made(owner, made, destroy, status, &err);
}

/* Memory is let go of once no gather writes to it. */
static void units_dealloc(PyObject *op)
{
    device_units_object *self = (device_units_object *)op, old = *self;
    sw_py_owner_dealloc(op);
    for (size_t i = 0; old.unit && i < old.unit_count; ++i) {
        for (size_t k = 0; k < old.unit[i].tensor_count; ++k) {
            Py_XDECREF(old.unit[i].tensor[k].shape);
            Py_XDECREF(old.unit[i].tensor[k].strides);
        }
        free(old.unit[i].tensor);
        Py_XDECREF(old.unit[i].in_place);
        Py_XDECREF(old.unit[i].apart);
    }
    for (size_t b = 0; old.slice && b < old.bucket_count; ++b)
        Py_XDECREF(old.slice[b].memory);
    free(old.unit), free(old.slice), free(old.place);
    Py_XDECREF(old.allocate);
    Py_XDECREF(old.stream);
    Py_XDECREF(old.announce);
}

static bool check_unit(const device_units_object *self, Py_ssize_t unit)
{
    if (!sw_py_owner_check(&self->owner, "the units were"))
        return false;
    return (unit >= 0 && (size_t)unit < self->unit_count) ||
           sw_py_refuse(PyExc_IndexError, "unit must be in [0, %zu), got %zd", self->unit_count,
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
    SW_PY_OWNED *apart = NULL;
    uint8_t *data = NULL;
    sw_stream *stream;
    sw_error err;
    if (!sw_py_read("gather unit:n | apart:p exact:p", args, NULL, a) || !check_unit(self, a[0].n))
        return NULL;
    unit_memory *unit = &self->unit[a[0].size];
    sw_unit_way way = sw_device_unit_way(made, a[0].size, a[1].p);
    if (way == SW_UNIT_BLOCKED)
        return PyLong_FromSize_t(sw_device_unit_holder(made, a[0].size));
    if (way == SW_UNIT_APART && !self->allocate)
        return PyErr_Format(PyExc_ValueError, "gather: groups of buckets lie in their own memory");
    if (way == SW_UNIT_APART && !(apart = allocate(self, unit->size_bytes, &data)))
        return NULL;
    if ((way != SW_UNIT_TAKE && !announce(self, a[0].size)) || !enter(self, &stream))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(
        way == SW_UNIT_APART ? sw_device_unit_gather_apart(made, a[0].size, data, stream, &err)
                             : sw_device_unit_make_whole(made, a[0].size, stream, &err));
    if (status == SW_OK && apart) {
        sw_py_set(&unit->apart, apart);
        unit->data_apart = data;
    }
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
    if (is_there || !self->unit[a[0].size].tensor_count)
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
        ENGINE_CLEAR(self->unit[a[0].size].apart);
        return sw_py_finish(self, status, &err);
    }
    if (!enter(self, &stream))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_unit_release(made, a[0].size, stream, &err));
    return sw_py_device_finish(self->owner.comm, status, &err);
}

#define UNITS_METHOD(name, signature, check, call)                                           \
    SW_PY_METHOD_WITH(units_##name, device_units_object, #name signature, sw_stream *stream, \
                      (check) && enter(self, &stream), call,                                 \
                      sw_py_device_finish(self->owner.comm, status, &err))

UNITS_METHOD(update, "", true, sw_device_units_update(self->owner.made, stream, &err))
UNITS_METHOD(gather_anew, "", true, sw_device_units_gather_anew(self->owner.made, stream, &err))

#define UNITS_VALUE(name, value) \
    SW_PY_VALUE(units_##name, device_units_object, #name " unit:n", check_unit(self, a[0].n), value)

#define STATE sw_device_unit_state(self->owner.made, a[0].size)
#define TENSOR self->unit[a[0].size].tensor[i]

UNITS_VALUE(state, PyUnicode_FromString(sw_shard_state_name(STATE)))
UNITS_VALUE(is_whole, PyBool_FromLong(STATE == SW_SHARD_UNSHARDED))
UNITS_VALUE(is_apart, PyBool_FromLong(sw_device_unit_is_apart(self->owner.made, a[0].size)))
UNITS_VALUE(take_write, PyLong_FromLong(-1))
UNITS_VALUE(members,
            SW_PY_LIST(i, self->unit[a[0].size].tensor_count, PyLong_FromSize_t(TENSOR.parameter)))

/* Returns a capsule over a parameter of a unit, where the unit lies now. That of a unit without a
 * place is never read: it has the shape alone. */
static PyObject *tensor_of(device_units_object *self, const unit_memory *unit,
                           const unit_tensor *tensor)
{
    sw_py_layout layout;
    uint8_t *data = unit->apart ? unit->data_apart : unit->data;
    PyObject *memory = unit->apart ? unit->apart : unit->in_place;
    if (!tensor->shape)
        return PyErr_Format(PyExc_ValueError, "tensors: groups of buckets have none");
    if (!sw_py_layout_init(&layout, tensor->dtype, tensor->shape, tensor->strides, "DeviceUnits"))
        return NULL;
    return sw_py_dlpack_capsule_on(self->ordinal, memory, data + tensor->offset_bytes, &layout);
}

UNITS_VALUE(tensors, SW_PY_LIST(i, self->unit[a[0].size].tensor_count,
                                tensor_of(self, &self->unit[a[0].size], &TENSOR)))

static PyObject *units_slice(PyObject *op, PyObject *args)
{
    device_units_object *self = (device_units_object *)op;
    sw_py_arg a[1];
    sw_py_layout layout;
    if (!sw_py_read("slice index:n", args, NULL, a) ||
        !sw_py_owner_check(&self->owner, "the units were"))
        return NULL;
    if (a[0].n < 0 || a[0].size >= self->parameter_count ||
        !self->slice[self->place[a[0].size].bucket].memory)
        return PyErr_Format(PyExc_IndexError, "slice: no unit has parameter %zd", a[0].n);
    const sw_layout_place *place = &self->place[a[0].size];
    const unit_slice *slice = &self->slice[place->bucket];
    size_t first = (size_t)self->owner.comm->comm->peers->rank * slice->numel;
    size_t low = place->begin < first ? first : place->begin;
    size_t end = place->begin + place->numel, high = first + slice->numel;
    high = end < high ? end : high;
    size_t numel = low < high ? high - low : 0;
    SW_PY_OWNED *shape = Py_BuildValue("(n)", (Py_ssize_t)numel);
    if (!shape || !sw_py_layout_init(&layout, slice->dtype, shape, Py_None, "DeviceUnits"))
        return NULL;
    size_t begin = numel ? (low - first) * sw_dtype_size_bytes(slice->dtype) : 0;
    return sw_py_dlpack_capsule_on(self->ordinal, slice->memory, slice->data + begin, &layout);
}

static size_t slice_bytes(const device_units_object *self)
{
    size_t bytes = 0;
    for (size_t b = 0; b < self->bucket_count; ++b)
        if (self->slice[b].memory)
            bytes += self->slice[b].numel * sw_dtype_size_bytes(self->slice[b].dtype);
    return bytes;
}

SW_PY_VALUE(units_sizes, device_units_object, "sizes",
            sw_py_owner_check(&self->owner, "the units were"),
            Py_BuildValue("Nnn",
                          SW_PY_LIST(i, self->unit_count,
                                     PyLong_FromSize_t(self->unit[i].size_bytes)),
                          (Py_ssize_t)self->place_bytes, (Py_ssize_t)slice_bytes(self)))

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
    for (size_t i = 0; found && self->owner.made && i < self->unit_count; ++i)
        if (sw_device_unit_state(self->owner.made, i) == SW_SHARD_GATHERING)
            sw_py_append(&found, PyLong_FromSize_t(i));
    return found;
}

/* Marks the units that are GATHERING and have one of these parameters; None: all of those. Returns
 * their number, or -1 with an exception. */
static Py_ssize_t mark_arriving(const device_units_object *self, PyObject *parameters, bool *marks)
{
    Py_ssize_t found = 0;
    SW_PY_TABLE given = {0};
    if (parameters != Py_None && !sw_py_table_init(&given, parameters, "arrive parameter:N",
                                                   sizeof(size_t), fill_number, NULL))
        return -1;
    for (size_t i = 0; i < self->unit_count; ++i)
        marks[i] = parameters == Py_None;
    for (size_t i = 0; i < given.count; ++i) {
        size_t parameter = ((const size_t *)given.rows)[i];
        size_t group = parameter < self->parameter_count
                           ? self->slice[self->place[parameter].bucket].group
                           : SIZE_MAX;
        if (group < self->unit_count)
            marks[group] = true;
    }
    for (size_t i = 0; i < self->unit_count; ++i) {
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
        for (size_t i = 0; i < self->unit_count && status == SW_OK; ++i)
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
    bool *marks = calloc(self->unit_count + 1, sizeof *marks);
    Py_ssize_t count = marks ? mark_arriving(self, a[0].o, marks) : -1;
    PyObject *found =
        count < 0 || (count > 0 && !arrive_marked(self, marks)) ? NULL : PyList_New(0);
    for (size_t i = 0; found && i < self->unit_count; ++i)
        for (size_t k = 0; found && marks[i] && k < self->unit[i].tensor_count; ++k)
            sw_py_append(&found, PyLong_FromSize_t(self->unit[i].tensor[k].parameter));
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
                  SW_PY_COUNT_AS(sw_device_units_stats, bytes, "gathered_bytes"))

SW_PY_GETTER(units_is_collective, sw_py_owner, PyBool_FromLong(self->comm != NULL))
SW_PY_GETTER(units_count, device_units_object, PyLong_FromSize_t(self->unit_count))

static PyGetSetDef units_properties[] = {
    {"unit_count", units_count, NULL, "number of units, forms included", NULL},
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
    SW_PY_ARGS(units, update, "/", "Order gathers after the stream's writes to slices."),
    SW_PY_ARGS(units, gather_anew, "/", "Gather all units after the stream's writes."),
    SW_PY_ARGS(units, state, "unit, /", "Return 'sharded', 'gathering' or 'unsharded'."),
    SW_PY_ARGS(units, is_whole, "unit, /", "Return True if the unit is unsharded."),
    SW_PY_ARGS(units, is_apart, "unit, /", "Return True if the unit is whole outside its place."),
    SW_PY_ARGS(units, take_write, "unit, /",
               "Return -1: a write to a released unit is not seen on a GPU."),
    SW_PY_ARGS(units, members, "unit, /", "Return the numbers of a unit's parameters."),
    SW_PY_ARGS(units, tensors, "unit, /",
               "Return DLPack capsules over a unit's parameters, where it lies now."),
    SW_PY_ARGS(units, slice, "index, /",
               "Return a DLPack capsule over this rank's elements of a parameter."),
    SW_PY_ARGS(units, sizes, "/", "Return ([bytes of each unit], bytes of places, of slices)."),
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
    "form or its own number, [(parameter, dtype, shape, strides)])], turns the places of a level, "
    "allocate(nbytes) returns zeroed memory. Or groups of whole buckets: buckets is [(number, "
    "tensor)], order parameters in the order of use, which ends[] cuts.",
    {Py_tp_init, units_init}, {Py_tp_dealloc, units_dealloc}, {Py_tp_methods, units_methods},
    {Py_tp_getset, units_properties})
