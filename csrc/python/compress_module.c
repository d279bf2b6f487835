/* compress_module.c - the codecs and PowerSGD's passes, on addresses.
 *
 * Idea: the Python side (compress/blocks.py, compress/powersgd.py) owns the tensors, has checked
 * dtype, device and layout, and passes addresses, as it does to the communicator. One call handles
 * all matrices of a bucket, without the GIL.
 */
#include "compress/codec.h"
#include "compress/powersgd.h"
#include "python/method.h"

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
SW_PY_VALUE(block_is_finite, PyObject, "block_is_finite block:n bits:i records:A count:N",
            check_codec(self, a),
            PyBool_FromLong(sw_block_is_finite(CODEC, a[2].address, a[3].size)))
SW_PY_METHOD(block_encode, PyObject,
             "block_encode block:n bits:i records:A source:A error:A numel:N", check_codec(self, a),
             (sw_block_encode(CODEC, a[2].address, a[3].address, a[4].address, a[5].size), SW_OK),
             sw_py_finish(self, status, &err))
SW_PY_METHOD(block_decode, PyObject,
             "block_decode block:n bits:i out:A records:A error:A own:A numel:N",
             check_codec(self, a),
             (sw_block_decode(CODEC, a[2].address, a[3].address, a[4].address, a[5].address,
                              a[6].size),
              SW_OK),
             sw_py_finish(self, status, &err))
SW_PY_METHOD_ON_ROWS(block_fold, PyObject,
                     "block_fold block:n bits:i out:A wires:O count:N scale:d residual:A", , 3,
                     "block_fold wire:A", void *, sw_py_fill_address, check_codec(self, a),
                     (sw_block_fold(CODEC, a[2].address, rows.rows, rows.count, a[4].size,
                                    (float)a[5].d, a[6].address),
                      SW_OK),
                     sw_py_finish(self, status, &err))

SW_PY_METHOD(half_encode, PyObject, "half_encode dtype:s wire:A source:A numel:N scale:d", true,
             sw_half_encode(sw_dtype_from_name(a[0].s), a[1].address, a[2].address, a[3].size,
                            (float)a[4].d, &err),
             sw_py_finish(self, status, &err))
SW_PY_METHOD(half_decode, PyObject, "half_decode dtype:s out:A wire:A numel:N", true,
             sw_half_decode(sw_dtype_from_name(a[0].s), a[1].address, a[2].address, a[3].size,
                            &err),
             sw_py_finish(self, status, &err))

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
    sw_py_raise(module, &err, NULL);
    return false;
}

static bool read_addresses(PyObject *sequence, const char *name, size_t wanted, sw_py_table *out)
{
    if (!sequence)
        return true;
    return sw_py_table_init(out, sequence, "powersgd address:A", sizeof(void *), sw_py_fill_address,
                            NULL) &&
           (out->count == wanted ||
            sw_py_refuse(PyExc_ValueError,
                         "powersgd: %s must have one address a matrix, %zu, not %zu", name, wanted,
                         out->count));
}

/* Reads (matrices, p, q), or the first of them, by the signature; `first` is what it calls p. */
static bool matrices_init(PyObject *module, PyObject *args, const char *signature,
                          const char *first, matrices *all)
{
    sw_py_arg a[3] = {{.o = NULL}, {.o = NULL}, {.o = NULL}};
    *all = (matrices){.at = {0}};
    if (sw_py_read(signature, args, NULL, a) &&
        sw_py_table_init(&all->at, a[0].o,
                         "matrix gradient:A memory:A left:A right:A basis:A rows:n cols:n rank:n "
                         "seed:K dtype:s",
                         sizeof(sw_powersgd), fill_matrix, module) &&
        read_addresses(a[1].o, first, all->at.count, &all->p) &&
        read_addresses(a[2].o, "q", all->at.count, &all->q))
        return true;
    matrices_fini(all);
    return false;
}

/* Defines a function of the module that runs `call` on each matrix, with its addresses in p and q.
 */
#define POWERSGD_FUNCTION(name, arguments, first, call)                     \
    static PyObject *name(PyObject *module, PyObject *args)                 \
    {                                                                       \
        matrices all;                                                       \
        if (!matrices_init(module, args, #name " " arguments, first, &all)) \
            return NULL;                                                    \
        const sw_powersgd *matrix = all.at.rows;                            \
        void *const *p = all.p.rows, *const *q = all.q.rows;                \
        (void)p;                                                            \
        (void)q;                                                            \
        Py_BEGIN_ALLOW_THREADS                                              \
        for (size_t i = 0; i < all.at.count; ++i, ++matrix)                 \
            call;                                                           \
        Py_END_ALLOW_THREADS                                                \
        matrices_fini(&all);                                                \
        Py_RETURN_NONE;                                                     \
    }

POWERSGD_FUNCTION(powersgd_init_basis, "matrices:O", "", sw_powersgd_init_basis(matrix))
POWERSGD_FUNCTION(powersgd_project, "matrices:O p:O", "p", sw_powersgd_project(matrix, p[i]))
POWERSGD_FUNCTION(powersgd_absorb, "matrices:O p:O q:O", "p",
                  sw_powersgd_absorb(matrix, p[i], q[i]))
POWERSGD_FUNCTION(powersgd_decompress, "matrices:O q:O", "q", sw_powersgd_decompress(matrix, p[i]))
POWERSGD_FUNCTION(powersgd_error, "matrices:O errors:O", "errors", sw_powersgd_error(matrix, p[i]))

SW_PY_VALUE(powersgd_is_finite, PyObject, "powersgd_is_finite values:A numel:N", true,
            PyBool_FromLong(sw_powersgd_is_finite(a[0].address, a[1].size)))
SW_PY_VALUE(powersgd_stride, PyObject, "powersgd_stride count:N", true,
            PyLong_FromSize_t(sw_powersgd_stride(a[0].size)))

PyMethodDef sw_py_compress_functions[] = {
    SW_PY_FUNCTION(block_record_bytes, "block, bits, /", "Return the bytes of one record."),
    SW_PY_FUNCTION(block_encode, "block, bits, records, source, error, numel, /",
                   "Quantize source (+ error) to records, of which an array begins a new one."),
    SW_PY_FUNCTION(block_fold, "block, bits, out, wires, count, scale, residual, /",
                   "Fold count records of all wires in order: out = quantized(scale * sum); the "
                   "residual gets the rest."),
    SW_PY_FUNCTION(block_is_finite, "block, bits, records, count, /",
                   "Return True if all encoded values were finite."),
    SW_PY_FUNCTION(
        block_decode, "block, bits, out, records, error, own, numel, /",
        "Decode records to out. With an error, first error = out + error - decoded own."),
    SW_PY_FUNCTION(half_encode, "dtype, wire, source, numel, scale, /", "Scale and round."),
    SW_PY_FUNCTION(half_decode, "dtype, out, wire, numel, /", "Widen to float32."),
    SW_PY_FUNCTION(powersgd_stride, "count, /", "Return the elements of a factor's row."),
    SW_PY_FUNCTION(powersgd_init_basis, "matrices, /", "Write a first basis."),
    SW_PY_FUNCTION(powersgd_project, "matrices, p, /", "Compute P = v Q."),
    SW_PY_FUNCTION(powersgd_absorb, "matrices, p, q, /",
                   "Orthonormalize P, compute Q = vᵀ P, and keep v."),
    SW_PY_FUNCTION(powersgd_decompress, "matrices, q, /", "Compute gradients from P and Q."),
    SW_PY_FUNCTION(powersgd_error, "matrices, errors, /", "Write the error."),
    SW_PY_FUNCTION(powersgd_is_finite, "values, numel, /", "Return True if all values are finite."),
    {NULL, NULL, 0, NULL},
};
