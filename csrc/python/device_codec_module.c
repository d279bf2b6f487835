/* device_codec_module.c - the module's functions that compress GPU gradients
 * (compress/device_codec.h). Addresses are integers. Each call enqueues work on the given stream
 * and returns. */
#include <stdlib.h>

#include "compress/device_codec.h"
#include "python/device_object.h"

typedef struct codec_call {
    device_comm_object *comm; /* borrowed, entered */
    sw_device_blocks blocks;
} codec_call;

/* Checks the codec's settings and enters the communicator. Returns false with an exception. */
static bool begin(PyObject *module, PyObject *comm, Py_ssize_t block, int bits,
                  unsigned long long stream, codec_call *call)
{
    sw_error err;
    if (!PyObject_TypeCheck(comm, ((engine_state *)PyModule_GetState(module))->device_comm_type)) {
        PyErr_SetString(PyExc_TypeError, "comm must be a DeviceComm");
        return false;
    }
    call->comm = (device_comm_object *)comm;
    call->blocks =
        (sw_device_blocks){.codec = {.block = block < 0 ? 0 : (size_t)block, .bits = bits},
                           .stream = sw_py_address(stream)};
    if (sw_block_codec_check(&call->blocks.codec, &err) != SW_OK) {
        sw_py_raise(PyModule_GetState(module), &err, NULL);
        return false;
    }
    if (!sw_py_device_enter(call->comm))
        return false;
    call->blocks.kernels = &call->comm->comm->kernels;
    return true;
}

/* ---- tables ---- */

static bool read_quantize_part(PyObject *row, void *out)
{
    unsigned long long records, source, error, numel;
    if (!PyArg_ParseTuple(row, "KKKK;a part is (records, source, error, numel)", &records, &source,
                          &error, &numel))
        return false;
    *(sw_quantize_part *)out = (sw_quantize_part){.records = sw_py_address(records),
                                                  .source = sw_py_address(source),
                                                  .error = sw_py_address(error),
                                                  .numel = numel};
    return true;
}

static bool read_decode_part(PyObject *row, void *out)
{
    unsigned long long values, error, records, own, numel;
    if (!PyArg_ParseTuple(row, "KKKKK;a part is (values, error, records, own, numel)", &values,
                          &error, &records, &own, &numel))
        return false;
    *(sw_decode_part *)out = (sw_decode_part){.values = sw_py_address(values),
                                              .error = sw_py_address(error),
                                              .records = sw_py_address(records),
                                              .own = sw_py_address(own),
                                              .numel = numel};
    return true;
}

static bool read_owe_part(PyObject *row, void *out)
{
    unsigned long long error, rest, numel;
    if (!PyArg_ParseTuple(row, "KKK;a part is (error, rest, numel)", &error, &rest, &numel))
        return false;
    *(sw_owe_part *)out =
        (sw_owe_part){.error = sw_py_address(error), .rest = sw_py_address(rest), .numel = numel};
    return true;
}

/* ---- calls ---- */

static PyObject *block_encode(PyObject *module, PyObject *args)
{
    PyObject *comm, *list, *done = NULL;
    Py_ssize_t block;
    int bits;
    unsigned long long stream;
    codec_call call;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "OniO!K:device_block_encode", &comm, &block, &bits, &PyList_Type,
                          &list, &stream))
        return NULL;
    sw_quantize_part *parts = sw_py_device_table(list, read_quantize_part, sizeof *parts);
    size_t count = (size_t)PyList_Size(list);
    if (parts && begin(module, comm, block, bits, stream, &call)) {
        SW_PY_WITHOUT_GIL(status, sw_device_block_encode(&call.blocks, parts, count, &err));
        done = sw_py_device_finish(call.comm, status, &err);
    }
    free(parts);
    return done;
}

static PyObject *block_fold(PyObject *module, PyObject *args)
{
    PyObject *comm;
    Py_ssize_t block, count;
    int bits;
    double scale;
    unsigned long long out, own, others, stride, rest, stream;
    sw_device_wires wires;
    codec_call call;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "OniKKKKiindKK:device_block_fold", &comm, &block, &bits, &out, &own,
                          &others, &stride, &wires.own_index, &wires.count, &count, &scale, &rest,
                          &stream) ||
        !begin(module, comm, block, bits, stream, &call))
        return NULL;
    wires.own = sw_py_address(own);
    wires.others = sw_py_address(others);
    wires.stride_bytes = (size_t)stride;
    SW_PY_WITHOUT_GIL(status,
                      sw_device_block_fold(&call.blocks, sw_py_address(out), &wires, (size_t)count,
                                           (float)scale, sw_py_address(rest), &err));
    return sw_py_device_finish(call.comm, status, &err);
}

static PyObject *block_verdict(PyObject *module, PyObject *args)
{
    PyObject *comm;
    Py_ssize_t block, count;
    int bits;
    unsigned long long verdict, records, stream;
    codec_call call;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "OniKKnK:device_block_verdict", &comm, &block, &bits, &verdict,
                          &records, &count, &stream) ||
        !begin(module, comm, block, bits, stream, &call))
        return NULL;
    SW_PY_WITHOUT_GIL(status, sw_device_block_verdict(&call.blocks, sw_py_address(verdict),
                                                      sw_py_address(records), (size_t)count, &err));
    return sw_py_device_finish(call.comm, status, &err);
}

static PyObject *block_decode(PyObject *module, PyObject *args)
{
    PyObject *comm, *list, *done = NULL;
    Py_ssize_t block;
    int bits;
    unsigned long long verdict, stream;
    codec_call call;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "OniO!KK:device_block_decode", &comm, &block, &bits, &PyList_Type,
                          &list, &verdict, &stream))
        return NULL;
    sw_decode_part *parts = sw_py_device_table(list, read_decode_part, sizeof *parts);
    size_t count = (size_t)PyList_Size(list);
    if (parts && begin(module, comm, block, bits, stream, &call)) {
        SW_PY_WITHOUT_GIL(status, sw_device_block_decode(&call.blocks, parts, count,
                                                         sw_py_address(verdict), &err));
        done = sw_py_device_finish(call.comm, status, &err);
    }
    free(parts);
    return done;
}

static PyObject *block_owe(PyObject *module, PyObject *args)
{
    PyObject *comm, *list, *done = NULL;
    Py_ssize_t block;
    int bits;
    double scale;
    unsigned long long verdict, stream;
    codec_call call;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "OniO!KdK:device_block_owe", &comm, &block, &bits, &PyList_Type,
                          &list, &verdict, &scale, &stream))
        return NULL;
    sw_owe_part *parts = sw_py_device_table(list, read_owe_part, sizeof *parts);
    size_t count = (size_t)PyList_Size(list);
    if (parts && begin(module, comm, block, bits, stream, &call)) {
        SW_PY_WITHOUT_GIL(status, sw_device_block_owe(&call.blocks, parts, count,
                                                      sw_py_address(verdict), (float)scale, &err));
        done = sw_py_device_finish(call.comm, status, &err);
    }
    free(parts);
    return done;
}

static PyMethodDef functions[] = {
    {"device_block_encode", block_encode, METH_VARARGS,
     "device_block_encode($module, comm, block, bits, parts, stream, /)\n--\n\n"
     "Encode all parts like block_encode."},
    {"device_block_fold", block_fold, METH_VARARGS,
     "device_block_fold($module, comm, block, bits, out, own, others, stride_bytes, own_index, "
     "world_size, count, scale, rest, stream, /)\n--\n\nFold like block_fold."},
    {"device_block_verdict", block_verdict, METH_VARARGS,
     "device_block_verdict($module, comm, block, bits, verdict, records, count, stream, /)\n--\n\n"
     "Set the int32 to 0 if all records have finite values, else to 1."},
    {"device_block_decode", block_decode, METH_VARARGS,
     "device_block_decode($module, comm, block, bits, parts, verdict, stream, /)\n--\n\n"
     "Decode all parts like block_decode; keep errors unless the verdict is 1."},
    {"device_block_owe", block_owe, METH_VARARGS,
     "device_block_owe($module, comm, block, bits, parts, verdict, scale, stream, /)\n--\n\n"
     "Add rest * scale to the error of all parts, unless the verdict is 1."},
    {NULL, NULL, 0, NULL},
};

int sw_py_device_codec_functions_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
