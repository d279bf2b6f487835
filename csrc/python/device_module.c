/* device_module.c - the module's functions about GPUs: device properties, kernel sources and
 * images. */
#include "comm/nccl.h"
#include "comm/slot_transport.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include "kernels/kernel_image.h"
#include "kernels/kernel_loan.h"
#include "kernels/kernel_source.h"
#include "python/device_object.h"

static PyObject *describe_device(PyObject *module, const char *library, int ordinal)
{
    sw_device *device;
    sw_error err;
    sw_status status = SW_PY_WITHOUT_GIL(sw_device_cuda_create(library, ordinal, &device, &err));
    if (status != SW_OK)
        return sw_py_raise(module, &err, NULL);
    PyObject *made =
        Py_BuildValue("{s:N,s:(ii),s:i}", "name", sw_py_text(device->name), "capability",
                      device->major, device->minor, "multiprocessors", device->processor_count);
    sw_device_destroy(device);
    return made;
}

static PyObject *cuda_devices(PyObject *module, PyObject *args)
{
    sw_py_arg a[1] = {{.s = NULL}};
    sw_cuda_driver driver;
    sw_error err;
    if (!sw_py_read("cuda_devices | library:z", args, NULL, a))
        return NULL;
    sw_status status = SW_PY_WITHOUT_GIL(sw_cuda_driver_init(&driver, a[0].s, &err));
    if (status != SW_OK)
        return sw_py_raise(module, &err, NULL);
    int count = driver.device_count, version = driver.version;
    PyObject *devices = SW_PY_LIST(i, count, describe_device(module, a[0].s, (int)i));
    sw_cuda_driver_fini(&driver);
    return devices ? Py_BuildValue("{s:(ii),s:N}", "version", version / 1000, version % 1000 / 10,
                                   "devices", devices)
                   : NULL;
}

static PyObject *device_kernel_source(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *options = PyList_New(0);
    for (const char *const *option = sw_kernel_options; options && *option; ++option)
        sw_py_append(&options, PyUnicode_FromString(*option));
    return options ? Py_BuildValue("(sN)", sw_kernel_source(), options) : NULL;
}

static PyObject *device_kernel_image(PyObject *module, PyObject *args, PyObject *kwargs)
{
    sw_py_arg a[6] = {{0}};
    sw_image image;
    sw_error err;
    if (!sw_py_read("device_kernel_image major:i minor:i | packaged:z cache:z nvrtc:z builtins:z",
                    args, kwargs, a))
        return NULL;
    const sw_image_places places = {.packaged_folder = a[2].s,
                                    .cache_folder = a[3].s,
                                    .nvrtc = a[4].s,
                                    .nvrtc_builtins = a[5].s};
    sw_status status = SW_PY_WITHOUT_GIL(sw_image_find(&image, a[0].i, a[1].i, &places, &err));
    if (status != SW_OK)
        return sw_py_raise(module, &err, NULL);
    PyObject *bytes = PyBytes_FromStringAndSize(image.data, (Py_ssize_t)image.size_bytes);
    const char *origin = sw_image_origin_name(image.origin);
    sw_image_fini(&image);
    return bytes ? Py_BuildValue("(sN)", origin, bytes) : NULL;
}

static PyObject *kernel_loan(PyObject *module, PyObject *comm)
{
    sw_kernel_loan loan = {.contracts = sw_kernel_contracts,
                           .kernels = sw_kernels,
                           .redop_check = sw_redop_check,
                           .norm_sum_carry = sw_norm_sum_carry,
                           .norm_value = sw_norm_value};
    if (comm != Py_None) {
        device_comm_object *gpu = sw_py_device_comm_of(module, comm);
        if (!gpu || !sw_py_device_lend_kernels(gpu))
            return NULL;
        loan.set = &gpu->comm->kernels;
        loan.stream = gpu->comm->stream;
    }
    return PyBytes_FromStringAndSize((const char *)&loan, sizeof loan);
}

static sw_status make_id(const char *path, sw_nccl_id *id, sw_error *err)
{
    sw_nccl_library nccl;
    SW_TRY(sw_nccl_library_init(&nccl, path, err));
    sw_status status = sw_nccl_id_create(&nccl, id, err);
    sw_nccl_library_fini(&nccl);
    return status;
}

SW_PY_METHOD_WITH(nccl_unique_id, PyObject, "nccl_unique_id | library:z", sw_nccl_id id, true,
                  make_id(a[0].s, &id, &err),
                  sw_py_bytes_if(sw_py_finish(self, status, &err), id.internal, sizeof id.internal))

SW_PY_VALUE(slot_part_bytes, PyObject, "slot_part_bytes slot_bytes:N", true,
            PyLong_FromSize_t(sw_slot_part_bytes(a[0].size)))

static PyObject *device_tensor(PyObject *Py_UNUSED(module), PyObject *args)
{
    sw_py_arg a[6];
    sw_py_layout layout;
    return sw_py_read("device_tensor ordinal:i owner:O address:A dtype:T shape:O strides:O", args,
                      NULL, a) &&
                   sw_py_layout_init(&layout, a[3].dtype, a[4].o, a[5].o, "device_tensor")
               ? sw_py_dlpack_capsule_on(a[0].i, a[1].o, a[2].address, &layout)
               : NULL;
}

PyMethodDef sw_py_device_functions[] = {
    SW_PY_FUNCTION(cuda_devices, "library=None, /", "Return the driver's version and the GPUs."),
    SW_PY_FUNCTION_AS(device_kernel_source, METH_NOARGS, "/",
                      "Return the CUDA text of the device kernels and its options."),
    SW_PY_FUNCTION_AS(device_kernel_image, METH_VARARGS | METH_KEYWORDS,
                      "major, minor, packaged=None, cache=None, nvrtc=None, builtins=None",
                      "Return (origin, image) of the device kernels for one GPU."),
    SW_PY_FUNCTION_AS(
        kernel_loan, METH_O, "comm, /",
        "Return what _engine_check needs to compare the kernels of a DeviceComm, or of none."),
    SW_PY_FUNCTION(device_tensor, "ordinal, owner, address, dtype, shape, strides, /",
                   "Return a DLPack capsule."),
    SW_PY_FUNCTION(nccl_unique_id, "library=None, /",
                   "Return the identifier that one rank makes for all to connect with."),
    SW_PY_FUNCTION(slot_part_bytes, "slot_bytes, /",
                   "Return the bytes of each rank's part of an arena with such slots."),
    {NULL, NULL, 0, NULL},
};
