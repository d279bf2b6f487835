/* device_module.c - the module's functions about GPUs: device properties, kernel sources and
 * images. */
#include <string.h>

#include "comm/nccl.h"
#include "comm/slot_transport.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include "kernels/kernel_image.h"
#include "kernels/kernel_source.h"
#include "python/engine.h"

static PyObject *describe_device(PyObject *module, const char *library, int ordinal)
{
    sw_device *device;
    sw_error err;
    sw_status status;
    Py_BEGIN_ALLOW_THREADS
    status = sw_device_cuda_create(library, ordinal, &device, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise(PyModule_GetState(module), &err, NULL);
    PyObject *made =
        Py_BuildValue("{s:s,s:(ii),s:i}", "name", device->name, "capability", device->major,
                      device->minor, "multiprocessors", device->processor_count);
    sw_device_destroy(device);
    return made;
}

static PyObject *cuda_devices(PyObject *module, PyObject *args)
{
    const char *library = NULL;
    sw_cuda_driver driver;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "|z:cuda_devices", &library))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_cuda_driver_init(&driver, library, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise(PyModule_GetState(module), &err, NULL);
    int count = driver.device_count, version = driver.version;
    PyObject *devices = PyList_New(0);
    for (int i = 0; devices && i < count; ++i) {
        PyObject *device = describe_device(module, library, i);
        if (!device || PyList_Append(devices, device) < 0)
            ENGINE_CLEAR(devices);
        Py_XDECREF(device);
    }
    sw_cuda_driver_fini(&driver);
    return devices ? Py_BuildValue("{s:(ii),s:N}", "version", version / 1000, version % 1000 / 10,
                                   "devices", devices)
                   : NULL;
}

static PyObject *device_kernel_source(PyObject *module, PyObject *unused)
{
    PyObject *options = PyList_New(0);
    (void)module;
    (void)unused;
    for (const char *const *option = sw_kernel_options; options && *option; ++option) {
        PyObject *text = PyUnicode_FromString(*option);
        if (!text || PyList_Append(options, text) < 0)
            ENGINE_CLEAR(options);
        Py_XDECREF(text);
    }
    return options ? Py_BuildValue("(sN)", sw_kernel_source(), options) : NULL;
}

static PyObject *device_kernel_image(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"major", "minor", "packaged", "cache", "nvrtc", "builtins", NULL};
    sw_image_places places = {0};
    sw_image image;
    sw_error err;
    sw_status status;
    int major, minor;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "ii|zzzz:device_kernel_image", names, &major,
                                     &minor, &places.packaged_folder, &places.cache_folder,
                                     &places.nvrtc, &places.nvrtc_builtins))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_image_find(&image, major, minor, &places, &err);
    Py_END_ALLOW_THREADS
    if (status != SW_OK)
        return sw_py_raise(PyModule_GetState(module), &err, NULL);
    PyObject *bytes = PyBytes_FromStringAndSize(image.data, (Py_ssize_t)image.size_bytes);
    const char *origin = sw_image_origin_name(image.origin);
    sw_image_fini(&image);
    return bytes ? Py_BuildValue("(sN)", origin, bytes) : NULL;
}

static PyObject *nccl_unique_id(PyObject *module, PyObject *args)
{
    const char *library = NULL;
    sw_nccl_library nccl;
    sw_nccl_id id;
    sw_error err;
    sw_status status;
    if (!PyArg_ParseTuple(args, "|z:nccl_unique_id", &library))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sw_nccl_library_init(&nccl, library, &err);
    if (status == SW_OK) {
        status = sw_nccl_id_create(&nccl, &id, &err);
        sw_nccl_library_fini(&nccl);
    }
    Py_END_ALLOW_THREADS
    return status == SW_OK ? PyBytes_FromStringAndSize(id.internal, sizeof id.internal)
                           : sw_py_raise(PyModule_GetState(module), &err, NULL);
}

static PyObject *slot_part_bytes(PyObject *module, PyObject *args)
{
    Py_ssize_t slot_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "n:slot_part_bytes", &slot_bytes))
        return NULL;
    return PyLong_FromSize_t(sw_slot_part_bytes((size_t)slot_bytes));
}

static PyObject *device_tensor(PyObject *module, PyObject *args)
{
    PyObject *owner, *address, *shape, *strides;
    const char *name;
    int ordinal;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOOsOO:device_tensor", &ordinal, &owner, &address, &name, &shape,
                          &strides))
        return NULL;
    sw_dtype dtype = sw_dtype_from_name(name);
    void *data = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred())
        return NULL;
    if (dtype == SW_DTYPE_COUNT)
        return PyErr_Format(PyExc_ValueError,
                            "device_tensor: dtype '%s' is not one the engine moves", name);
    return sw_py_dlpack_capsule_on(ordinal, owner, data, dtype, shape, strides);
}

static PyMethodDef functions[] = {
    {"cuda_devices", cuda_devices, METH_VARARGS,
     "cuda_devices($module, library=None, /)\n--\n\n"
     "Return the driver's version and the visible GPUs."},
    {"device_kernel_source", device_kernel_source, METH_NOARGS,
     "device_kernel_source($module, /)\n--\n\n"
     "Return the CUDA text of the device kernels and its options."},
    {"device_kernel_image", (PyCFunction)(void (*)(void))device_kernel_image,
     METH_VARARGS | METH_KEYWORDS,
     "device_kernel_image($module, major, minor, packaged=None, cache=None, nvrtc=None, "
     "builtins=None)\n--\n\nReturn (origin, image) of the device kernels for one GPU."},
    {"device_tensor", device_tensor, METH_VARARGS,
     "device_tensor($module, ordinal, owner, address, dtype, shape, strides, /)\n--\n\n"
     "Return a DLPack capsule."},
    {"nccl_unique_id", nccl_unique_id, METH_VARARGS,
     "nccl_unique_id($module, library=None, /)\n--\n\n"
     "Return the identifier that one rank makes for all to connect with."},
    {"slot_part_bytes", slot_part_bytes, METH_VARARGS,
     "slot_part_bytes($module, slot_bytes, /)\n--\n\n"
     "Return the bytes of each rank's part of an arena with such slots."},
    {NULL, NULL, 0, NULL},
};

int sw_py_device_functions_add(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
