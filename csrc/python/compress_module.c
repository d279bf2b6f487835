/* compress_module.c - the codecs and PowerSGD's passes, on addresses.
 *
 * Idea: the Python side (compress/blocks.py, compress/powersgd.py) owns the tensors, has checked
 * dtype, device and layout, and passes addresses, as it does to the communicator. One call handles
 * all matrices of a bucket, without the GIL.
 */
#include "compress/codec.h"
#include "compress/powersgd.h"
#include "python/method.h"

/* ---- blocks: block, bits, ... ---- */

static sw_block_codec codec_of(const sw_py_arg *a)
{
    return (sw_block_codec){a[0].n < 0 ? 0 : a[0].size, a[1].i};
}

static bool check_codec(PyObject *module, const sw_py_arg *a)
{
    const sw_block_codec codec = codec_of(a);
    sw_error err;
    sw_status status = sw_block_codec_check(&codec, &err);
    if (status != SW_OK)
        sw_py_raise(PyModule_GetState(module), &err, NULL);
    return status == SW_OK;
}

SW_PY_VALUE(block_record_bytes, PyObject, "block_record_bytes block:n bits:i", check_codec(self, a),
            PyLong_FromSize_t(sw_block_codec_record_bytes(&(sw_block_codec){a[0].size, a[1].i})))

static sw_status encode(const sw_py_arg *a)
{
    const sw_block_codec codec = codec_of(a);
    sw_block_encode(&codec, a[2].address, a[3].address, a[4].address, a[5].size);
    return SW_OK;
}

static sw_status decode(const sw_py_arg *a)
{
    const sw_block_codec codec = codec_of(a);
    sw_block_decode(&codec, a[2].address, a[3].address, a[4].address, a[5].address, a[6].size);
    return SW_OK;
}

SW_PY_METHOD(block_encode, PyObject,
             "block_encode block:n bits:i records:A source:A error:A numel:N", check_codec(self, a),
             encode(a), sw_py_finish(self, status, &err))
SW_PY_METHOD(block_decode, PyObject,
             "block_decode block:n bits:i out:A records:A error:A own:A numel:N",
             check_codec(self, a), decode(a), sw_py_finish(self, status, &err))
SW_PY_VALUE(block_is_finite, PyObject, "block_is_finite block:n bits:i records:A count:N",
            check_codec(self, a),
            PyBool_FromLong(sw_block_is_finite(&(sw_block_codec){a[0].size, a[1].i}, a[2].address,
                                               a[3].size)))

static sw_status fold_records(const sw_py_arg *a, const sw_py_table *wires)
{
    const sw_block_codec codec = codec_of(a);
    sw_block_fold(&codec, a[2].address, wires->rows, wires->count, a[4].size, (float)a[5].d,
                  a[6].address);
    return SW_OK;
}

SW_PY_METHOD_ON_ROWS(block_fold, PyObject,
                     "block_fold block:n bits:i out:A wires:O count:N scale:d residual:A", , 3,
                     "block_fold wire:A", void *, sw_py_fill_address, check_codec(self, a),
                     fold_records(a, &rows), sw_py_finish(self, status, &err))

/* ---- halves ---- */

SW_PY_METHOD(half_encode, PyObject, "half_encode dtype:s wire:A source:A numel:N scale:d", true,
             sw_half_encode(sw_dtype_from_name(a[0].s), a[1].address, a[2].address, a[3].size,
                            (float)a[4].d, &err),
             sw_py_finish(self, status, &err))
SW_PY_METHOD(half_decode, PyObject, "half_decode dtype:s out:A wire:A numel:N", true,
             sw_half_decode(sw_dtype_from_name(a[0].s), a[1].address, a[2].address, a[3].size,
                            &err),
             sw_py_finish(self, status, &err))

/* ---- PowerSGD ---- */

typedef struct matrices {
    sw_py_table at, p, q; /* owned; one address per matrix in p and q, where they are passed */
} matrices;

static void matrices_fini(matrices *all)
{
    sw_py_table_fini(&all->at);
    sw_py_table_fini(&all->p);
    sw_py_table_fini(&all->q);
}

static bool fill_matrix(const sw_py_arg *a, void *row, void *module)
{
    sw_error err;
    *(sw_powersgd *)row = (sw_powersgd){.gradient = a[0].address,
                                        .memory = a[1].address,
                                        .left = a[2].address,
                                        .right = a[3].address,
                                        .basis = a[4].address,
                                        .rows = a[5].n < 0 ? 0 : a[5].size,
                                        .cols = a[6].n < 0 ? 0 : a[6].size,
                                        .rank = a[7].n < 0 ? 0 : a[7].size,
                                        .seed = a[8].word,
                                        .memory_dtype = sw_dtype_from_name(a[9].s)};
    if (sw_powersgd_check(row, &err) == SW_OK)
        return true;
    sw_py_raise(PyModule_GetState(module), &err, NULL);
    return false;
}

static bool read_addresses(PyObject *sequence, const char *name, size_t wanted, sw_py_table *out)
{
    if (!sequence)
        return true;
    if (!sw_py_table_init(out, sequence, "powersgd address:A", sizeof(void *), sw_py_fill_address,
                          NULL))
        return false;
    if (out->count == wanted)
        return true;
    PyErr_Format(PyExc_ValueError, "powersgd: %s must have one address a matrix, %zu, not %zu",
                 name, wanted, out->count);
    return false;
}

/* Reads (matrices, p, q), or the first of them, by the signature. */
static bool matrices_init(PyObject *module, PyObject *args, const char *signature, matrices *all)
{
    sw_py_arg a[3] = {{.o = NULL}, {.o = NULL}, {.o = NULL}};
    *all = (matrices){.at = {0}};
    if (sw_py_read(signature, args, NULL, a) &&
        sw_py_table_init(&all->at, a[0].o,
                         "matrix gradient:A memory:A left:A right:A basis:A rows:n cols:n rank:n "
                         "seed:K dtype:s",
                         sizeof(sw_powersgd), fill_matrix, module) &&
        read_addresses(a[1].o, "p", all->at.count, &all->p) &&
        read_addresses(a[2].o, "q", all->at.count, &all->q))
        return true;
    matrices_fini(all);
    return false;
}

/* Defines a function of the module that runs `call` on each matrix, with its addresses in p and q.
 */
#define POWERSGD_FUNCTION(name, arguments, call)                     \
    static PyObject *name(PyObject *module, PyObject *args)          \
    {                                                                \
        matrices all;                                                \
        if (!matrices_init(module, args, #name " " arguments, &all)) \
            return NULL;                                             \
        const sw_powersgd *matrix = all.at.rows;                     \
        void *const *p = all.p.rows, *const *q = all.q.rows;         \
        (void)p;                                                     \
        (void)q;                                                     \
        Py_BEGIN_ALLOW_THREADS                                       \
        for (size_t i = 0; i < all.at.count; ++i, ++matrix)          \
            call;                                                    \
        Py_END_ALLOW_THREADS                                         \
        matrices_fini(&all);                                         \
        Py_RETURN_NONE;                                              \
    }

POWERSGD_FUNCTION(powersgd_init_basis, "matrices:O", sw_powersgd_init_basis(matrix))
POWERSGD_FUNCTION(powersgd_project, "matrices:O p:O", sw_powersgd_project(matrix, p[i]))
POWERSGD_FUNCTION(powersgd_absorb, "matrices:O p:O q:O", sw_powersgd_absorb(matrix, p[i], q[i]))
POWERSGD_FUNCTION(powersgd_decompress, "matrices:O q:O", sw_powersgd_decompress(matrix, p[i]))
POWERSGD_FUNCTION(powersgd_error, "matrices:O errors:O", sw_powersgd_error(matrix, p[i]))

SW_PY_VALUE(powersgd_is_finite, PyObject, "powersgd_is_finite values:A numel:N", true,
            PyBool_FromLong(sw_powersgd_is_finite(a[0].address, a[1].size)))
SW_PY_VALUE(powersgd_stride, PyObject, "powersgd_stride count:N", true,
            PyLong_FromSize_t(sw_powersgd_stride(a[0].size)))

PyMethodDef sw_py_compress_functions[] = {
    {"block_record_bytes", block_record_bytes, METH_VARARGS,
     "block_record_bytes($module, block, bits, /)\n--\n\nReturn the bytes of one record."},
    {"block_encode", block_encode, METH_VARARGS,
     "block_encode($module, block, bits, records, source, error, numel, /)\n--\n\n"
     "Quantize source (+ error) to records, of which an array begins a new one."},
    {"block_fold", block_fold, METH_VARARGS,
     "block_fold($module, block, bits, out, wires, count, scale, residual, /)\n--\n\n"
     "Fold count records of all wires in order: out = quantized(scale * sum); the residual gets "
     "the rest."},
    {"block_is_finite", block_is_finite, METH_VARARGS,
     "block_is_finite($module, block, bits, records, count, /)\n--\n\n"
     "Return True if all encoded values were finite."},
    {"block_decode", block_decode, METH_VARARGS,
     "block_decode($module, block, bits, out, records, error, own, numel, /)\n--\n\n"
     "Decode records to out. With an error, first error = out + error - decoded own."},
    {"half_encode", half_encode, METH_VARARGS,
     "half_encode($module, dtype, wire, source, numel, scale, /)\n--\n\n"
     "Scale and round in one pass."},
    {"half_decode", half_decode, METH_VARARGS,
     "half_decode($module, dtype, out, wire, numel, /)\n--\n\nWiden to float32."},
    {"powersgd_stride", powersgd_stride, METH_VARARGS,
     "powersgd_stride($module, count, /)\n--\n\nReturn the elements of a factor's row."},
    {"powersgd_init_basis", powersgd_init_basis, METH_VARARGS,
     "powersgd_init_basis($module, matrices, /)\n--\n\nWrite a first basis."},
    {"powersgd_project", powersgd_project, METH_VARARGS,
     "powersgd_project($module, matrices, p, /)\n--\n\nCompute P = v Q."},
    {"powersgd_absorb", powersgd_absorb, METH_VARARGS,
     "powersgd_absorb($module, matrices, p, q, /)\n--\n\n"
     "Orthonormalize P, compute Q = vᵀ P, and keep v."},
    {"powersgd_decompress", powersgd_decompress, METH_VARARGS,
     "powersgd_decompress($module, matrices, q, /)\n--\n\nCompute gradients from P and Q."},
    {"powersgd_error", powersgd_error, METH_VARARGS,
     "powersgd_error($module, matrices, errors, /)\n--\n\nWrite the error."},
    {"powersgd_is_finite", powersgd_is_finite, METH_VARARGS,
     "powersgd_is_finite($module, values, numel, /)\n--\n\n"
     "Return True if all float32 values are finite."},
    {NULL, NULL, 0, NULL},
};
