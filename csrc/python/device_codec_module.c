/* device_codec_module.c - the module's functions that make GPU gradients small
 * (compress/device_codec.h). Addresses are integers; each call is enqueued on the stream given, and
 * none waits. */
#include <stdlib.h>

#include "compress/device_codec.h"
#include "python/device_object.h"

typedef struct codec_call {
    device_comm_object *comm; /* borrowed, entered */
    sw_device_blocks blocks;
} codec_call;

static void *address_of(unsigned long long address)
{
    return (void *)(uintptr_t)address;
}

/* false with an exception. */
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
                           .stream = address_of(stream)};
    if (sw_block_codec_check(&call->blocks.codec, &err) != SW_OK) {
        sw_py_raise(PyModule_GetState(module), &err, NULL);
        return false;
    }
    if (!sw_py_device_enter(call->comm))
        return false;
    call->blocks.kernels = &call->comm->comm->kernels;
    return true;
}

static PyObject *block_encode(PyObject *module, PyObject *args)
{
    PyObject *comm;
    Py_ssize_t block, numel;
    int bits;
    unsigned long long records, source, error, stream;
    codec_call call;
    sw_error err;
    if (!PyArg_ParseTuple(args, "OniKKKnK:device_block_encode", &comm, &block, &bits, &records,
                          &source, &error, &numel, &stream) ||
        !begin(module, comm, block, bits, stream, &call))
        return NULL;
    return sw_py_device_finish(call.comm,
                               sw_device_block_encode(&call.blocks, address_of(records),
                                                      address_of(source), address_of(error),
                                                      (size_t)numel, &err),
                               &err);
}

static PyObject *block_fold(PyObject *module, PyObject *args)
{
    PyObject *comm, *list;
    Py_ssize_t block, count;
    int bits;
    double scale;
    unsigned long long out, sum, rest, stream;
    codec_call call;
    sw_error err;
    if (!PyArg_ParseTuple(args, "OniKO!ndKKK:device_block_fold", &comm, &block, &bits, &out,
                          &PyList_Type, &list, &count, &scale, &sum, &rest, &stream))
        return NULL;
    size_t wire_count = (size_t)PyList_Size(list);
    const void **wires = calloc(wire_count + 1, sizeof *wires);
    if (!wires)
        return PyErr_NoMemory();
    for (size_t w = 0; w < wire_count; ++w)
        wires[w] = PyLong_AsVoidPtr(PyList_GetItem(list, (Py_ssize_t)w));
    PyObject *done = NULL;
    if (!PyErr_Occurred() && begin(module, comm, block, bits, stream, &call)) {
        sw_status status =
            sw_device_block_fold(&call.blocks, address_of(out), wires, wire_count, (size_t)count,
                                 (float)scale, address_of(sum), address_of(rest), &err);
        done = sw_py_device_finish(call.comm, status, &err);
    }
    free(wires);
    return done;
}

static PyObject *block_verdict(PyObject *module, PyObject *args)
{
    PyObject *comm;
    Py_ssize_t block, count;
    int bits;
    unsigned long long verdict, records, stream;
    codec_call call;
    sw_error err;
    if (!PyArg_ParseTuple(args, "OniKKnK:device_block_verdict", &comm, &block, &bits, &verdict,
                          &records, &count, &stream) ||
        !begin(module, comm, block, bits, stream, &call))
        return NULL;
    return sw_py_device_finish(call.comm,
                               sw_device_block_verdict(&call.blocks, address_of(verdict),
                                                       address_of(records), (size_t)count, &err),
                               &err);
}

static PyObject *block_decode(PyObject *module, PyObject *args)
{
    PyObject *comm;
    Py_ssize_t block, numel;
    int bits;
    unsigned long long out, records, error, own, verdict, stream;
    codec_call call;
    sw_error err;
    if (!PyArg_ParseTuple(args, "OniKKKKKnK:device_block_decode", &comm, &block, &bits, &out,
                          &records, &error, &own, &verdict, &numel, &stream) ||
        !begin(module, comm, block, bits, stream, &call))
        return NULL;
    return sw_py_device_finish(call.comm,
                               sw_device_block_decode(&call.blocks, address_of(out),
                                                      address_of(records), address_of(error),
                                                      address_of(own), address_of(verdict),
                                                      (size_t)numel, &err),
                               &err);
}

static PyObject *block_owe(PyObject *module, PyObject *args)
{
    PyObject *comm;
    Py_ssize_t block, numel;
    int bits;
    double scale;
    unsigned long long error, rest, verdict, stream;
    codec_call call;
    sw_error err;
    if (!PyArg_ParseTuple(args, "OniKKKndK:device_block_owe", &comm, &block, &bits, &error, &rest,
                          &verdict, &numel, &scale, &stream) ||
        !begin(module, comm, block, bits, stream, &call))
        return NULL;
    return sw_py_device_finish(call.comm,
                               sw_device_block_owe(&call.blocks, address_of(error),
                                                   address_of(rest), address_of(verdict),
                                                   (size_t)numel, (float)scale, &err),
                               &err);
}

static PyMethodDef functions[] = {
    {"device_block_encode", block_encode, METH_VARARGS,
     "device_block_encode(comm, block, bits, records, source, error, numel, stream)\n--\n\nAs "
     "block_encode."},
    {"device_block_fold", block_fold, METH_VARARGS,
     "device_block_fold(comm, block, bits, out, wires, count, scale, sum, rest, stream)\n--\n\nAs "
     "block_fold, with scratch memory."},
    {"device_block_verdict", block_verdict, METH_VARARGS,
     "device_block_verdict(comm, block, bits, verdict, records, count, stream)\n--\n\nThe "
     "int32 becomes 0 if all records are of finite values, else 1."},
    {"device_block_decode", block_decode, METH_VARARGS,
     "device_block_decode(comm, block, bits, out, records, error, own, verdict, numel, "
     "stream)\n--\n\nAs block_decode; the error is kept unless the verdict is 1."},
    {"device_block_owe", block_owe, METH_VARARGS,
     "device_block_owe(comm, block, bits, error, rest, verdict, numel, scale, stream)\n--\n\n"
     "error += rest * scale, unless the verdict is 1."},
    {NULL, NULL, 0, NULL},
};

int sw_py_device_codec_functions_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
