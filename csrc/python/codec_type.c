/* codec_type.c - shardwright._engine.Codec: a compressor, and what it keeps for each parameter. */
#include <string.h>

#include "compress/codec.h"
#include "python/codec_object.h"
#include "python/method.h"

static const char *const part_names[SW_PART_COUNT] = {"error", "memory", "left", "right", "basis"};

static int codec_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    codec_object *self = (codec_object *)op;
    sw_py_arg a[11] = {[1] = {.dtype = SW_DTYPE_FLOAT32},
                       [2] = {.size = 256},
                       [3] = {.i = 8},
                       [5] = {.p = true},
                       [6] = {.size = 1},
                       [7] = {.d = 2},
                       [10] = {.dtype = SW_DTYPE_FLOAT32}};
    sw_error err;
    if (!sw_py_read("Codec kind:(plain|half|blocks|powersgd) | $ wire:T block:N bits:i "
                    "error_feedback:p warm_start:p rank:N least_rate:d first_round:K seed:K "
                    "memory:T",
                    args, kwargs, a) ||
        !sw_py_use_make(&self->use, "Codec"))
        return -1;
    const sw_compressor_settings settings = {.kind = (sw_compressor_kind)a[0].i,
                                             .wire = a[1].dtype,
                                             .blocks = {a[2].size, a[3].i},
                                             .error_feedback = a[4].p,
                                             .warm_start = a[5].p,
                                             .rank = a[6].size,
                                             .least_rate = a[7].d,
                                             .first_round = a[8].word,
                                             .seed = a[9].word,
                                             .memory = a[10].dtype};
    sw_status status = sw_compressor_create(&settings, &self->compressor, &err);
    SW_PY_OWNED *done = sw_py_finish(op, status, &err);
    return done ? 0 : -1;
}

static void codec_dealloc(PyObject *op)
{
    sw_compressor_release(((codec_object *)op)->compressor);
    sw_py_free(op);
}

/* The Python side calls none of these while a bucket is in flight (CompressionState). */
static bool enter(codec_object *self)
{
    return (self->compressor ||
            sw_py_refuse(PyExc_RuntimeError, "the codec was not initialised")) &&
           sw_py_use_enter(&self->use, SW_PY_ALONE, SW_PY_PATIENCE_NS, PyExc_RuntimeError, "Codec",
                           "");
}

static PyObject *leave(codec_object *self, sw_status status, const sw_error *err)
{
    sw_py_use_leave(&self->use);
    return sw_py_finish(self, status, err);
}

static PyObject *leave_with(codec_object *self, PyObject *value)
{
    sw_py_use_leave(&self->use);
    return value;
}

static PyObject *leave_number(codec_object *self, sw_status status, size_t number,
                              const sw_error *err)
{
    SW_PY_OWNED *done = leave(self, status, err);
    return done ? PyLong_FromSize_t(number) : NULL;
}

SW_PY_METHOD_WITH(codec_add, codec_object, "Codec.add numel:N rows:N seed:K", size_t number = 0,
                  enter(self),
                  sw_compressor_add(self->compressor, a[0].size, a[1].size, a[2].word, &number,
                                    &err),
                  leave_number(self, status, number, &err))

SW_PY_ROW(fill_member, sw_compressor_member, a[0].size, a[1].size, a[2].size, a[3].p)

/* Enters, unless a member is not in the codec. */
static bool enter_members(codec_object *self, const sw_py_table *rows)
{
    const sw_compressor_member *members = rows->rows;
    if (!enter(self))
        return false;
    for (size_t i = 0; i < rows->count; ++i)
        if (members[i].entry >= sw_compressor_count(self->compressor) ||
            members[i].numel != sw_compressor_entry_of(self->compressor, members[i].entry)->numel) {
            leave_with(self, NULL);
            return sw_py_refuse(PyExc_ValueError,
                                "Codec.set_bucket: member %zu has no entry of %zu elements", i,
                                members[i].numel);
        }
    return true;
}

SW_PY_METHOD_ON_ROWS(codec_set_bucket, codec_object, "Codec.set_bucket number:N members:O", , 1,
                     "Codec.set_bucket entry:N offset:N numel:N used:p", sw_compressor_member,
                     fill_member, enter_members(self, &rows),
                     sw_compressor_set_bucket(self->compressor, a[0].size, rows.rows, rows.count,
                                              &err),
                     leave(self, status, &err))

static bool check_bucket(const codec_object *self, size_t number, size_t numel)
{
    size_t count;
    const sw_compressor_member *m = sw_compressor_members(self->compressor, number, &count);
    for (size_t i = 0; i < count; ++i)
        if (m[i].offset > numel || m[i].numel > numel - m[i].offset)
            return sw_py_refuse(PyExc_ValueError,
                                "Codec: bucket %zu has a member behind its %zu elements", number,
                                numel);
    return true;
}

static exchange_object *exchange_of(const codec_object *self, PyObject *object)
{
    if (PyObject_TypeCheck(object, sw_py_state_of(self)->exchange_type))
        return (exchange_object *)object;
    PyErr_Format(PyExc_TypeError, "Codec: exchange must be an Exchange, got %R",
                 (PyObject *)Py_TYPE(object));
    return NULL;
}

static sw_status run(const codec_object *self, exchange_object *ranks, const sw_py_arg *a,
                     bool waits, sw_error *err)
{
    if (ranks->exchange) {
        sw_status status =
            sw_compressor_average_bucket(self->compressor, a[1].size, a[5].size, false,
                                         a[2].address, a[3].size, a[4].dtype, ranks->exchange, err);
        return status;
    }
    SW_TRY(sw_comm_average_begin(ranks->average, self->compressor, a[1].size, a[2].address,
                                 a[3].size, a[6].s, err));
    return waits ? sw_comm_average_wait(ranks->average, err) : SW_OK;
}

static PyObject *average(codec_object *self, PyObject *args, bool waits)
{
    sw_py_arg a[7] = {[4] = {.dtype = SW_DTYPE_FLOAT32}, [6] = {.s = "compressed gradients"}};
    sw_error err = {0};
    if (!sw_py_read("Codec.average exchange:O number:N address:A numel:N | dtype:T share:N label:s",
                    args, NULL, a))
        return NULL;
    exchange_object *ranks = exchange_of(self, a[0].o);
    if (!ranks)
        return NULL;
    if (!ranks->exchange && (!ranks->average || a[4].dtype != SW_DTYPE_FLOAT32 || a[5].size))
        return PyErr_Format(PyExc_ValueError,
                            "Codec: a HostComm's ranks average float32, in no given slices");
    if (!enter(self))
        return NULL;
    if (!check_bucket(self, a[1].size, a[3].size) ||
        (ranks->comm && !sw_py_comm_enter(ranks->comm)))
        return leave_with(self, NULL);
    Py_INCREF(ranks);
    sw_status status = SW_PY_WITHOUT_GIL(run(self, ranks, a, waits, &err));
    PyObject *result = ranks->comm ? sw_py_comm_finish(ranks->comm, status, &err)
                                   : sw_py_finish(self, status, &err);
    sw_py_use_leave(&self->use);
    Py_DECREF(ranks);
    return result;
}

static PyObject *codec_average(PyObject *op, PyObject *args)
{
    return average((codec_object *)op, args, true);
}

static PyObject *codec_begin(PyObject *op, PyObject *args)
{
    return average((codec_object *)op, args, false);
}

/* ---- state ---- */

static bool has_entry(const codec_object *self, size_t number)
{
    size_t count = self->compressor ? sw_compressor_count(self->compressor) : 0;
    return number < count ||
           sw_py_refuse(PyExc_IndexError, "Codec: entry must be in [0, %zu), got %zu", count,
                        number);
}

static PyObject *shape_of(const codec_object *self, size_t number, int part)
{
    const sw_compressor_entry *e = sw_compressor_entry_of(self->compressor, number);
    size_t numel = sw_compressor_part_numel(self->compressor, number, (sw_compressor_part)part);
    if (part == SW_PART_ERROR)
        return Py_BuildValue("(n)", (Py_ssize_t)numel);
    if (part == SW_PART_MEMORY)
        return Py_BuildValue("(nn)", (Py_ssize_t)e->rows, (Py_ssize_t)e->cols);
    return Py_BuildValue("(nn)", (Py_ssize_t)e->rank, (Py_ssize_t)(numel / e->rank));
}

static PyObject *shapes(const codec_object *self, size_t number)
{
    PyObject *made = PyDict_New();
    for (int part = 0; made && part < SW_PART_COUNT; ++part)
        if (sw_compressor_part_numel(self->compressor, number, (sw_compressor_part)part))
            sw_py_put(&made, part_names[part], shape_of(self, number, part));
    return made;
}

SW_PY_VALUE(codec_shapes, codec_object, "Codec.shapes entry:N",
            has_entry(self, a[0].size) && enter(self), leave_with(self, shapes(self, a[0].size)))
SW_PY_VALUE(codec_is_made, codec_object, "Codec.is_made entry:N", has_entry(self, a[0].size),
            PyBool_FromLong(sw_compressor_entry_of(self->compressor, a[0].size)->is_made))

/* Copies a part of an entry to or from memory of its size. */
static sw_status copy(const codec_object *self, const sw_py_arg *a, bool in, sw_error *err)
{
    for (int part = 0; part < SW_PART_COUNT; ++part) {
        size_t bytes =
            sw_compressor_part_numel(self->compressor, a[0].size, (sw_compressor_part)part) *
            sw_dtype_size_bytes(
                sw_compressor_part_dtype(self->compressor, (sw_compressor_part)part));
        if (strcmp(part_names[part], a[1].s) != 0)
            continue;
        if (in)
            SW_TRY(sw_compressor_make(self->compressor, a[0].size, err));
        void *memory = sw_compressor_entry_of(self->compressor, a[0].size)->part[part];
        if (!memory || bytes != a[3].size)
            SW_FAIL(err, SW_E_INVALID, "Codec: entry %zu has %zu bytes of %s, got %zu", a[0].size,
                    memory ? bytes : 0, a[1].s, a[3].size);
        memcpy(in ? memory : a[2].address, in ? a[2].address : memory, bytes);
        return SW_OK;
    }
    SW_FAIL(err, SW_E_INVALID, "Codec: no part is named '%s'", a[1].s);
}

SW_PY_METHOD(codec_read, codec_object, "Codec.read entry:N part:s address:A nbytes:N",
             has_entry(self, a[0].size) && enter(self), copy(self, a, false, &err),
             leave(self, status, &err))
SW_PY_METHOD(codec_write, codec_object, "Codec.write entry:N part:s address:A nbytes:N",
             has_entry(self, a[0].size) && enter(self), copy(self, a, true, &err),
             leave(self, status, &err))
SW_PY_METHOD(codec_restart, codec_object, "Codec.restart rounds:K", enter(self),
             (sw_compressor_restart(self->compressor, a[0].word), SW_OK), leave(self, status, &err))
SW_PY_METHOD(codec_set_rounds, codec_object, "Codec.set_rounds rounds:K", enter(self),
             (sw_compressor_set_rounds(self->compressor, a[0].word), SW_OK),
             leave(self, status, &err))
SW_PY_VALUE(codec_bucket_sent_bytes, codec_object, "Codec.bucket_sent_bytes number:N",
            self->compressor != NULL,
            PyLong_FromUnsignedLongLong(sw_compressor_bucket_sent_bytes(self->compressor,
                                                                        a[0].size)))

SW_PY_GETTER(codec_get_rounds, codec_object,
             PyLong_FromUnsignedLongLong(self->compressor ? sw_compressor_rounds(self->compressor)
                                                          : 0))
SW_PY_GETTER(codec_get_sent_bytes, codec_object,
             PyLong_FromUnsignedLongLong(self->compressor
                                             ? sw_compressor_sent_bytes(self->compressor)
                                             : 0))
SW_PY_GETTER(codec_get_keeps, codec_object,
             PyBool_FromLong(self->compressor &&sw_compressor_keeps(self->compressor)))

static PyMethodDef codec_methods[] = {
    SW_PY_ARGS(codec, add, "numel, rows, seed, /",
               "Add a parameter and return its entry. rows > 0: a matrix in memory order."),
    SW_PY_ARGS(codec, set_bucket, "number, members, /",
               "Set a bucket's parameters: (entry, offset, numel, used) of each, in elements."),
    SW_PY_ARGS(codec, average,
               "exchange, number, address, numel, dtype='float32', share=0, label='compressed "
               "gradients', /",
               "Average a bucket in place over the ranks of an Exchange; share: elements of each "
               "rank's slice. Collective."),
    SW_PY_ARGS(codec, begin,
               "exchange, number, address, numel, dtype='float32', share=0, label='compressed "
               "gradients', /",
               "Begin that over the ranks of a HostComm; Exchange.wait() ends it."),
    SW_PY_ARGS(codec, shapes, "entry, /", "Return {part: shape} of what an entry keeps."),
    SW_PY_ARGS(codec, is_made, "entry, /", "Return True if the entry has state."),
    SW_PY_ARGS(codec, read, "entry, part, address, nbytes, /", "Copy a part of an entry out."),
    SW_PY_ARGS(codec, write, "entry, part, address, nbytes, /", "Copy a part of an entry in."),
    SW_PY_ARGS(codec, restart, "rounds, /", "Drop all state and set the complete rounds."),
    SW_PY_ARGS(codec, set_rounds, "rounds, /", "Set the complete rounds and keep the state."),
    SW_PY_ARGS(codec, bucket_sent_bytes, "number, /",
               "Return the bytes that this rank sent for the bucket's last mean."),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef codec_properties[] = {
    {"rounds", codec_get_rounds, NULL, "complete rounds", NULL},
    {"sent_bytes", codec_get_sent_bytes, NULL, "bytes that this rank has sent to peers", NULL},
    {"keeps", codec_get_keeps, NULL, "True if the next round uses state", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

SW_PY_TYPE(sw_py_codec_type_spec, "Codec", codec_object, 0,
           "A compressor of gradients: its settings, and what it keeps between rounds.",
           {Py_tp_init, codec_init}, {Py_tp_dealloc, codec_dealloc}, {Py_tp_methods, codec_methods},
           {Py_tp_getset, codec_properties})

/* ---- functions of the module: a block's bytes, and the 16-bit codec on addresses ---- */

static bool check_codec(PyObject *module, const sw_py_arg *a)
{
    const sw_block_codec codec = {a[0].n < 0 ? 0 : a[0].size, a[1].i};
    sw_error err;
    SW_PY_OWNED *done = sw_py_finish(module, sw_block_codec_check(&codec, &err), &err);
    return done != NULL;
}

#define CODEC &(const sw_block_codec){a[0].size, a[1].i} /* once it is checked */

SW_PY_VALUE(block_record_bytes, PyObject, "block_record_bytes block:n bits:i", check_codec(self, a),
            PyLong_FromSize_t(sw_block_codec_record_bytes(CODEC)))
SW_PY_METHOD(half_encode, PyObject, "half_encode dtype:s wire:A source:A numel:N scale:d", true,
             sw_half_encode(sw_dtype_from_name(a[0].s), a[1].address, a[2].address, a[3].size,
                            (float)a[4].d, &err),
             sw_py_finish(self, status, &err))
SW_PY_METHOD(half_decode, PyObject, "half_decode dtype:s out:A wire:A numel:N", true,
             sw_half_decode(sw_dtype_from_name(a[0].s), a[1].address, a[2].address, a[3].size,
                            &err),
             sw_py_finish(self, status, &err))

PyMethodDef sw_py_compress_functions[] = {
    SW_PY_FUNCTION(block_record_bytes, "block, bits, /", "Return the bytes of one record."),
    SW_PY_FUNCTION(half_encode, "dtype, wire, source, numel, scale, /", "Scale and round."),
    SW_PY_FUNCTION(half_decode, "dtype, out, wire, numel, /", "Widen to float32."),
    {NULL, NULL, 0, NULL},
};
