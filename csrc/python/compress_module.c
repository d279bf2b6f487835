/* compress_module.c - the codecs and PowerSGD's passes, on addresses.
 *
 * Idea: the Python side (compress/blocks.py, compress/powersgd.py) owns the tensors, has checked
 * dtype, device and layout, and passes addresses, as it does to the communicator. One call handles
 * all matrices of a bucket, without the GIL.
 */
#include <stdlib.h>

#include "compress/codec.h"
#include "compress/powersgd.h"
#include "python/engine.h"

/* ---- blocks ---- */

static int codec_of(PyObject *module, Py_ssize_t block, int bits, sw_block_codec *codec)
{
    sw_error err;
    *codec = (sw_block_codec){block < 0 ? 0 : (size_t)block, bits};
    if (sw_block_codec_check(codec, &err) == SW_OK)
        return 0;
    sw_py_raise(PyModule_GetState(module), &err, NULL);
    return -1;
}

static int count_check(const char *operation, const char *name, Py_ssize_t value)
{
    if (value >= 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s: %s must be at least 0, not %zd", operation, name, value);
    return -1;
}

static void *address_of(unsigned long long address)
{
    return (void *)(uintptr_t)address;
}

static PyObject *block_record_bytes(PyObject *module, PyObject *args)
{
    Py_ssize_t block;
    int bits;
    sw_block_codec codec;
    if (!PyArg_ParseTuple(args, "ni:block_record_bytes", &block, &bits) ||
        codec_of(module, block, bits, &codec) < 0)
        return NULL;
    return PyLong_FromSize_t(sw_block_codec_record_bytes(&codec));
}

static PyObject *block_encode(PyObject *module, PyObject *args)
{
    Py_ssize_t block, numel;
    int bits;
    unsigned long long records, source, error;
    sw_block_codec codec;
    if (!PyArg_ParseTuple(args, "niKKKn:block_encode", &block, &bits, &records, &source, &error,
                          &numel) ||
        codec_of(module, block, bits, &codec) < 0 ||
        count_check("block_encode", "numel", numel) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sw_block_encode(&codec, address_of(records), address_of(source), address_of(error),
                    (size_t)numel);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Reads a sequence of addresses into an array that the caller owns. Returns NULL with an exception.
 */
static void **addresses_of(PyObject *sequence, Py_ssize_t *count)
{
    *count = PySequence_Size(sequence);
    void **found = *count < 0 ? NULL : calloc(*count ? (size_t)*count : 1, sizeof *found);
    if (!found && *count >= 0)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; found && i < *count; ++i) {
        PyObject *item = PySequence_GetItem(sequence, i);
        found[i] = item ? PyLong_AsVoidPtr(item) : NULL;
        Py_XDECREF(item);
        if (PyErr_Occurred()) {
            free(found);
            return NULL;
        }
    }
    return found;
}

static PyObject *block_fold(PyObject *module, PyObject *args)
{
    Py_ssize_t block, count, wire_count;
    int bits;
    unsigned long long out, residual;
    double scale;
    PyObject *wires;
    sw_block_codec codec;
    if (!PyArg_ParseTuple(args, "niKOndK:block_fold", &block, &bits, &out, &wires, &count, &scale,
                          &residual) ||
        codec_of(module, block, bits, &codec) < 0 || count_check("block_fold", "count", count) < 0)
        return NULL;
    void **addresses = addresses_of(wires, &wire_count);
    if (!addresses)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sw_block_fold(&codec, address_of(out), (const unsigned char *const *)addresses,
                  (size_t)wire_count, (size_t)count, (float)scale, address_of(residual));
    Py_END_ALLOW_THREADS
    free(addresses);
    Py_RETURN_NONE;
}

static PyObject *block_is_finite(PyObject *module, PyObject *args)
{
    Py_ssize_t block, count;
    int bits;
    unsigned long long records;
    sw_block_codec codec;
    if (!PyArg_ParseTuple(args, "niKn:block_is_finite", &block, &bits, &records, &count) ||
        codec_of(module, block, bits, &codec) < 0 ||
        count_check("block_is_finite", "count", count) < 0)
        return NULL;
    return PyBool_FromLong(sw_block_is_finite(&codec, address_of(records), (size_t)count));
}

static PyObject *block_decode(PyObject *module, PyObject *args)
{
    Py_ssize_t block, numel;
    int bits;
    unsigned long long out, records, error, own;
    sw_block_codec codec;
    if (!PyArg_ParseTuple(args, "niKKKKn:block_decode", &block, &bits, &out, &records, &error, &own,
                          &numel) ||
        codec_of(module, block, bits, &codec) < 0 ||
        count_check("block_decode", "numel", numel) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    sw_block_decode(&codec, address_of(out), address_of(records), address_of(error),
                    address_of(own), (size_t)numel);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- halves ---- */

static PyObject *half_encode(PyObject *module, PyObject *args)
{
    const char *dtype;
    unsigned long long wire, source;
    Py_ssize_t numel;
    double scale;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "sKKnd:half_encode", &dtype, &wire, &source, &numel, &scale) ||
        count_check("half_encode", "numel", numel) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_half_encode(sw_dtype_from_name(dtype), address_of(wire), address_of(source),
                            (size_t)numel, (float)scale, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise(PyModule_GetState(module), &err, NULL);
    Py_RETURN_NONE;
}

static PyObject *half_decode(PyObject *module, PyObject *args)
{
    const char *dtype;
    unsigned long long out, wire;
    Py_ssize_t numel;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "sKKn:half_decode", &dtype, &out, &wire, &numel) ||
        count_check("half_decode", "numel", numel) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_half_decode(sw_dtype_from_name(dtype), address_of(out), address_of(wire),
                            (size_t)numel, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise(PyModule_GetState(module), &err, NULL);
    Py_RETURN_NONE;
}

/* ---- PowerSGD ---- */

typedef struct matrices {
    sw_powersgd *at; /* owned */
    Py_ssize_t count;
    void **p, **q; /* owned; one address per matrix, or NULL */
} matrices;

static void matrices_fini(matrices *all)
{
    free(all->at);
    free(all->p);
    free(all->q);
}

static bool read_matrix(PyObject *module, PyObject *row, sw_powersgd *out)
{
    unsigned long long gradient, memory, left, right, basis, seed;
    Py_ssize_t rows, cols, rank;
    const char *dtype;
    sw_error err;
    if (!PyArg_ParseTuple(row, "KKKKKnnnKs:powersgd", &gradient, &memory, &left, &right, &basis,
                          &rows, &cols, &rank, &seed, &dtype))
        return false;
    *out = (sw_powersgd){.gradient = address_of(gradient),
                         .memory = address_of(memory),
                         .left = address_of(left),
                         .right = address_of(right),
                         .basis = address_of(basis),
                         .rows = rows < 0 ? 0 : (size_t)rows,
                         .cols = cols < 0 ? 0 : (size_t)cols,
                         .rank = rank < 0 ? 0 : (size_t)rank,
                         .seed = seed,
                         .memory_dtype = sw_dtype_from_name(dtype)};
    if (sw_powersgd_check(out, &err) == SW_OK)
        return true;
    sw_py_raise(PyModule_GetState(module), &err, NULL);
    return false;
}

static bool read_addresses(PyObject *sequence, const char *name, Py_ssize_t wanted, void ***out)
{
    Py_ssize_t count;
    if (!sequence)
        return true;
    *out = addresses_of(sequence, &count);
    if (*out && count != wanted)
        PyErr_Format(PyExc_ValueError, "powersgd: %s must have one address a matrix, %zd, not %zd",
                     name, wanted, count);
    return *out && count == wanted;
}

/* Parses (matrices, p, q), or only the first of them, by `format`. */
static bool matrices_init(PyObject *module, PyObject *args, const char *format, matrices *all)
{
    PyObject *rows, *p = NULL, *q = NULL;
    *all = (matrices){0};
    if (!PyArg_ParseTuple(args, format, &rows, &p, &q))
        return false;
    all->count = PySequence_Size(rows);
    if (all->count < 0)
        return false;
    all->at = calloc(all->count ? (size_t)all->count : 1, sizeof *all->at);
    if (!all->at) {
        PyErr_NoMemory();
        return false;
    }
    bool ok =
        read_addresses(p, "p", all->count, &all->p) && read_addresses(q, "q", all->count, &all->q);
    for (Py_ssize_t i = 0; ok && i < all->count; ++i) {
        PyObject *row = PySequence_GetItem(rows, i);
        ok = row && read_matrix(module, row, &all->at[i]);
        Py_XDECREF(row);
    }
    if (!ok)
        matrices_fini(all);
    return ok;
}

/* Defines a function of the module that runs `call` on each matrix i. */
#define POWERSGD_FUNCTION(name, format, call)               \
    static PyObject *name(PyObject *module, PyObject *args) \
    {                                                       \
        matrices all;                                       \
        if (!matrices_init(module, args, format, &all))     \
            return NULL;                                    \
        Py_BEGIN_ALLOW_THREADS                              \
        for (Py_ssize_t i = 0; i < all.count; ++i)          \
            call;                                           \
        Py_END_ALLOW_THREADS                                \
        matrices_fini(&all);                                \
        Py_RETURN_NONE;                                     \
    }

POWERSGD_FUNCTION(powersgd_init_basis, "O:powersgd_init_basis", sw_powersgd_init_basis(&all.at[i]))
POWERSGD_FUNCTION(powersgd_project, "OO:powersgd_project",
                  sw_powersgd_project(&all.at[i], all.p[i]))
POWERSGD_FUNCTION(powersgd_absorb, "OOO:powersgd_absorb",
                  sw_powersgd_absorb(&all.at[i], all.p[i], all.q[i]))
POWERSGD_FUNCTION(powersgd_decompress, "OO:powersgd_decompress",
                  sw_powersgd_decompress(&all.at[i], all.p[i]))
POWERSGD_FUNCTION(powersgd_error, "OO:powersgd_error", sw_powersgd_error(&all.at[i], all.p[i]))

static PyObject *powersgd_is_finite(PyObject *module, PyObject *args)
{
    unsigned long long values;
    Py_ssize_t numel;
    (void)module;
    if (!PyArg_ParseTuple(args, "Kn:powersgd_is_finite", &values, &numel) ||
        count_check("powersgd_is_finite", "numel", numel) < 0)
        return NULL;
    return PyBool_FromLong(sw_powersgd_is_finite(address_of(values), (size_t)numel));
}

static PyObject *powersgd_stride(PyObject *module, PyObject *count)
{
    size_t value = PyLong_AsSize_t(count);
    (void)module;
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(sw_powersgd_stride(value));
}

static PyMethodDef compress_functions[] = {
    {"block_record_bytes", block_record_bytes, METH_VARARGS,
     "block_record_bytes($module, block, bits, /)\n--\n\nReturn the bytes of one record."},
    {"block_encode", block_encode, METH_VARARGS,
     "block_encode($module, block, bits, records, source, error, numel, /)\n--\n\n"
     "Quantize an array."},
    {"block_fold", block_fold, METH_VARARGS,
     "block_fold($module, block, bits, out, wires, count, scale, residual, /)\n--\n\n"
     "Fold records as their owner."},
    {"block_is_finite", block_is_finite, METH_VARARGS,
     "block_is_finite($module, block, bits, records, count, /)\n--\n\n"
     "Return True if all encoded values were finite."},
    {"block_decode", block_decode, METH_VARARGS,
     "block_decode($module, block, bits, out, records, error, own, numel, /)\n--\n\n"
     "Decode, and keep the rounding error."},
    {"half_encode", half_encode, METH_VARARGS,
     "half_encode($module, dtype, wire, source, numel, scale, /)\n--\n\n"
     "Scale and round in one pass."},
    {"half_decode", half_decode, METH_VARARGS,
     "half_decode($module, dtype, out, wire, numel, /)\n--\n\nWiden to float32."},
    {"powersgd_stride", powersgd_stride, METH_O,
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

int sw_py_compress_functions_add(PyObject *module)
{
    return PyModule_AddFunctions(module, compress_functions);
}
