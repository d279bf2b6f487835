/* device_cuda.c - a GPU as a device, through the CUDA driver.
 *
 * The device retains the primary context, which is torch's, so that pointers, streams and events of
 * torch are valid here. A thread's current context is restored after each call, so that torch finds
 * its current device unchanged.
 *
 * While a program captures a stream into a graph, many driver calls of other threads fail and end
 * the capture. Our calls may come at any time (a watching thread, a collected object) and are not
 * part of the capture. So each call runs in the relaxed capture mode
 * (cuThreadExchangeStreamCaptureMode). sw_device_refuse_capture refuses work on a captured stream.
 *
 * Left out: peer access inside a process, and graphs.
 */
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/cuda_driver.h"
#include "device/device.h"
#include "platform/clock.h"

enum { SPIN_NS = 50000, NAP_NS = 20000, SUBJECT_BYTES = 128 };

typedef struct cuda_device {
    sw_device base;
    sw_cuda_driver driver;
    sw_cu_context context; /* retained */
    sw_cu_device handle;
} cuda_device;

static cuda_device *cuda_of(sw_device *device)
{
    return (cuda_device *)(void *)device;
}

static sw_cu_address address_of(const void *memory)
{
    return (sw_cu_address)(uintptr_t)memory;
}

/* Make our context current and exempt the thread's calls from captures. With a failed context the
 * driver may refuse the exemption; the following call is made anyway and reports the failure under
 * its own name. */
static sw_status enter(cuda_device *cuda, sw_device_visit *visit, sw_error *err)
{
    const sw_cuda_table *call = &cuda->driver.call;
    sw_cu_context current = NULL;
    SW_TRY(sw_cuda_check(&cuda->driver, call->cuCtxGetCurrent(&current), "cuCtxGetCurrent",
                         cuda->base.name, err));
    *visit = (sw_device_visit){.is_pushed = current != cuda->context,
                               .capture_mode = SW_CU_CAPTURE_MODE_RELAXED};
    if (visit->is_pushed)
        SW_TRY(sw_cuda_check(&cuda->driver, call->cuCtxPushCurrent_v2(cuda->context),
                             "cuCtxPushCurrent", cuda->base.name, err));
    visit->is_exempt =
        call->cuThreadExchangeStreamCaptureMode &&
        call->cuThreadExchangeStreamCaptureMode(&visit->capture_mode) == SW_CU_SUCCESS;
    return SW_OK;
}

static void leave(cuda_device *cuda, const sw_device_visit *visit)
{
    sw_cu_context popped;
    int mode = visit->capture_mode;
    if (visit->is_exempt)
        (void)cuda->driver.call.cuThreadExchangeStreamCaptureMode(&mode);
    if (visit->is_pushed)
        (void)cuda->driver.call.cuCtxPopCurrent_v2(&popped);
}

/* Make one driver call in our context and return its result as a status. */
#define CUDA_CALL(cuda, err, subject, name, ...)                                  \
    do {                                                                          \
        sw_device_visit visit_;                                                   \
        SW_TRY(enter((cuda), &visit_, (err)));                                    \
        sw_cu_result result_ = (cuda)->driver.call.name(__VA_ARGS__);             \
        leave((cuda), &visit_);                                                   \
        SW_TRY(sw_cuda_check(&(cuda)->driver, result_, #name, (subject), (err))); \
    } while (0)

/* Make a cleanup call and ignore its failure: a failed context has lost the object anyway.
 */
#define CUDA_UNDO(cuda, name, ...)                       \
    do {                                                 \
        sw_device_visit visit_;                          \
        if (enter((cuda), &visit_, NULL) == SW_OK) {     \
            (void)(cuda)->driver.call.name(__VA_ARGS__); \
            leave((cuda), &visit_);                      \
        }                                                \
    } while (0)

static sw_status cuda_enter(sw_device *device, sw_device_visit *visit, sw_error *err)
{
    return enter(cuda_of(device), visit, err);
}

static void cuda_leave(sw_device *device, const sw_device_visit *visit)
{
    leave(cuda_of(device), visit);
}

static sw_status allocate(cuda_device *cuda, const char *subject, size_t size_bytes,
                          sw_cu_address *made, sw_error *err)
{
    CUDA_CALL(cuda, err, subject, cuMemAlloc_v2, made, size_bytes ? size_bytes : 1);
    return SW_OK;
}

static sw_status cuda_memory_alloc(sw_device *device, size_t size_bytes, void **memory,
                                   sw_error *err)
{
    cuda_device *cuda = cuda_of(device);
    sw_cu_address made = 0;
    char subject[SUBJECT_BYTES];
    snprintf(subject, sizeof subject, "%zu bytes on GPU %d", size_bytes, device->ordinal);
    sw_status status = allocate(cuda, subject, size_bytes, &made, err);
    if (status == SW_E_MEMORY && device->room.make) {
        device->room.make(device->room.context);
        status = allocate(cuda, subject, size_bytes, &made, err);
    }
    SW_TRY(status);
    device->stats.allocations++;
    *memory = (void *)(uintptr_t)made;
    return SW_OK;
}

static void cuda_memory_free(sw_device *device, void *memory)
{
    if (memory)
        CUDA_UNDO(cuda_of(device), cuMemFree_v2, address_of(memory));
}

static sw_status cuda_pinned_alloc(sw_device *device, size_t size_bytes, void **memory,
                                   sw_error *err)
{
    cuda_device *cuda = cuda_of(device);
    void *made = NULL;
    char subject[SUBJECT_BYTES];
    snprintf(subject, sizeof subject, "%zu bytes of pinned memory", size_bytes);
    CUDA_CALL(cuda, err, subject, cuMemHostAlloc, &made, size_bytes ? size_bytes : 1,
              SW_CU_MEMHOSTALLOC_PORTABLE);
    device->stats.allocations++;
    *memory = made;
    return SW_OK;
}

static void cuda_pinned_free(sw_device *device, void *memory)
{
    if (memory)
        CUDA_UNDO(cuda_of(device), cuMemFreeHost, memory);
}

static sw_status cuda_host_register(sw_device *device, void *memory, size_t size_bytes,
                                    void **mapped, sw_error *err)
{
    cuda_device *cuda = cuda_of(device);
    sw_cu_address address = 0;
    char subject[SUBJECT_BYTES];
    snprintf(subject, sizeof subject, "%zu bytes of host memory", size_bytes);
    CUDA_CALL(cuda, err, subject, cuMemHostRegister_v2, memory, size_bytes,
              SW_CU_MEMHOSTREGISTER_PORTABLE | SW_CU_MEMHOSTREGISTER_DEVICEMAP);
    sw_device_visit visit;
    sw_status status = enter(cuda, &visit, err);
    if (status == SW_OK) {
        sw_cu_result result = cuda->driver.call.cuMemHostGetDevicePointer_v2(&address, memory, 0);
        leave(cuda, &visit);
        status = sw_cuda_check(&cuda->driver, result, "cuMemHostGetDevicePointer", subject, err);
    }
    if (status != SW_OK) {
        CUDA_UNDO(cuda, cuMemHostUnregister, memory);
        return status;
    }
    device->stats.allocations++;
    *mapped = (void *)(uintptr_t)address;
    return SW_OK;
}

static void cuda_host_unregister(sw_device *device, void *memory)
{
    if (memory)
        CUDA_UNDO(cuda_of(device), cuMemHostUnregister, memory);
}

static sw_status cuda_memory_export(sw_device *device, void *memory, sw_memory_export *exported,
                                    sw_error *err)
{
    sw_cu_ipc_handle handle;
    CUDA_CALL(cuda_of(device), err, device->name, cuIpcGetMemHandle, &handle, address_of(memory));
    memcpy(exported->handle, handle.reserved, sizeof exported->handle);
    return SW_OK;
}

static sw_status cuda_memory_open(sw_device *device, const sw_memory_export *exported,
                                  void **memory, sw_error *err)
{
    sw_cu_ipc_handle handle;
    sw_cu_address opened = 0;
    memcpy(handle.reserved, exported->handle, sizeof handle.reserved);
    CUDA_CALL(cuda_of(device), err, device->name, cuIpcOpenMemHandle_v2, &opened, handle,
              SW_CU_IPC_LAZY_ENABLE_PEER_ACCESS);
    *memory = (void *)(uintptr_t)opened;
    return SW_OK;
}

static void cuda_memory_close(sw_device *device, void *memory)
{
    if (memory)
        CUDA_UNDO(cuda_of(device), cuIpcCloseMemHandle, address_of(memory));
}

static sw_status cuda_stream_create(sw_device *device, bool urgent, sw_stream **stream,
                                    sw_error *err)
{
    cuda_device *cuda = cuda_of(device);
    sw_cu_stream made = NULL;
    /* The driver clamps priorities to the device's range; -1 is one above the default. */
    CUDA_CALL(cuda, err, device->name, cuStreamCreateWithPriority, &made, SW_CU_STREAM_NON_BLOCKING,
              urgent ? -1 : 0);
    *stream = (sw_stream *)(void *)made;
    return SW_OK;
}

static void cuda_stream_destroy(sw_device *device, sw_stream *stream)
{
    if (stream)
        CUDA_UNDO(cuda_of(device), cuStreamDestroy_v2, (sw_cu_stream)(void *)stream);
}

static sw_status cuda_stream_wait(sw_device *device, sw_stream *stream, sw_event *event,
                                  sw_error *err)
{
    device->stats.stream_waits++;
    CUDA_CALL(cuda_of(device), err, device->name, cuStreamWaitEvent, (sw_cu_stream)(void *)stream,
              (sw_cu_event)(void *)event, 0);
    return SW_OK;
}

static sw_status check_numbers(const cuda_device *cuda, sw_error *err)
{
    if (!cuda->driver.call.cuStreamWriteValue32_v2 || !cuda->driver.call.cuStreamWaitValue32_v2)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "GPU %d: the driver (CUDA %d.%d) has no streams that wait for numbers: install a "
                "driver for CUDA 11.7 or newer",
                cuda->base.ordinal, cuda->driver.version / 1000, cuda->driver.version % 1000 / 10);
    return SW_OK;
}

static sw_status cuda_stream_write_number(sw_device *device, sw_stream *stream, uint32_t *number,
                                          uint32_t value, sw_error *err)
{
    SW_TRY(check_numbers(cuda_of(device), err));
    CUDA_CALL(cuda_of(device), err, device->name, cuStreamWriteValue32_v2,
              (sw_cu_stream)(void *)stream, address_of(number), value,
              SW_CU_STREAM_WRITE_VALUE_DEFAULT);
    return SW_OK;
}

static sw_status cuda_stream_wait_number(sw_device *device, sw_stream *stream, uint32_t *number,
                                         uint32_t value, sw_error *err)
{
    SW_TRY(check_numbers(cuda_of(device), err));
    device->stats.stream_waits++;
    CUDA_CALL(cuda_of(device), err, device->name, cuStreamWaitValue32_v2,
              (sw_cu_stream)(void *)stream, address_of(number), value, SW_CU_STREAM_WAIT_VALUE_GEQ);
    return SW_OK;
}

static sw_status cuda_stream_is_capturing(sw_device *device, sw_stream *stream, bool *capturing,
                                          sw_error *err)
{
    int status = SW_CU_CAPTURE_NONE;
    CUDA_CALL(cuda_of(device), err, device->name, cuStreamIsCapturing, (sw_cu_stream)(void *)stream,
              &status);
    *capturing = status != SW_CU_CAPTURE_NONE;
    return SW_OK;
}

static sw_status cuda_event_create(sw_device *device, sw_event **event, sw_error *err)
{
    sw_cu_event made = NULL;
    CUDA_CALL(cuda_of(device), err, device->name, cuEventCreate, &made, SW_CU_EVENT_DISABLE_TIMING);
    *event = (sw_event *)(void *)made;
    return SW_OK;
}

static void cuda_event_destroy(sw_device *device, sw_event *event)
{
    if (event)
        CUDA_UNDO(cuda_of(device), cuEventDestroy_v2, (sw_cu_event)(void *)event);
}

static sw_status cuda_event_record(sw_device *device, sw_event *event, sw_stream *stream,
                                   sw_error *err)
{
    device->stats.records++;
    CUDA_CALL(cuda_of(device), err, device->name, cuEventRecord, (sw_cu_event)(void *)event,
              (sw_cu_stream)(void *)stream);
    return SW_OK;
}

/* A capture of another stream prevents the query. */
static bool is_of_capture(sw_cu_result result)
{
    return result >= SW_CU_CAPTURE_UNSUPPORTED && result <= SW_CU_CAPTURED_EVENT;
}

static sw_status cuda_event_query(sw_device *device, sw_event *event, bool *done, sw_error *err)
{
    cuda_device *cuda = cuda_of(device);
    sw_device_visit visit;
    SW_TRY(enter(cuda, &visit, err));
    sw_cu_result result = cuda->driver.call.cuEventQuery((sw_cu_event)(void *)event);
    leave(cuda, &visit);
    if (result != SW_CU_NOT_READY && !is_of_capture(result))
        SW_TRY(sw_cuda_check(&cuda->driver, result, "cuEventQuery", device->name, err));
    *done = result == SW_CU_SUCCESS;
    return SW_OK;
}

static sw_status cuda_event_wait(sw_device *device, sw_event *event, int64_t timeout_ns,
                                 const char *operation, sw_error *err)
{
    const struct timespec nap = {.tv_nsec = NAP_NS};
    int64_t start = sw_clock_now_ns();
    device->stats.host_waits++;
    for (;;) {
        bool done;
        SW_TRY(cuda_event_query(device, event, &done, err));
        if (done)
            return SW_OK;
        int64_t passed = sw_clock_now_ns() - start;
        if (passed > timeout_ns)
            SW_FAIL(err, SW_E_TIMEOUT, "GPU %d: %s was not done within %.3g s", device->ordinal,
                    operation, (double)timeout_ns * 1e-9);
        if (passed < SPIN_NS)
            sched_yield();
        else
            nanosleep(&nap, NULL);
    }
}

static sw_status cuda_copy_async(sw_device *device, void *to, const void *from, size_t size_bytes,
                                 sw_stream *stream, sw_error *err)
{
    if (size_bytes == 0)
        return SW_OK;
    device->stats.copies++;
    CUDA_CALL(cuda_of(device), err, device->name, cuMemcpyAsync, address_of(to), address_of(from),
              size_bytes, (sw_cu_stream)(void *)stream);
    return SW_OK;
}

static sw_status cuda_fill_async(sw_device *device, void *to, unsigned char value,
                                 size_t size_bytes, sw_stream *stream, sw_error *err)
{
    if (size_bytes == 0)
        return SW_OK;
    device->stats.copies++;
    CUDA_CALL(cuda_of(device), err, device->name, cuMemsetD8Async, address_of(to), value,
              size_bytes, (sw_cu_stream)(void *)stream);
    return SW_OK;
}

static sw_status cuda_module_load(sw_device *device, const void *image, sw_module **module,
                                  sw_error *err)
{
    sw_cu_module made = NULL;
    char subject[SUBJECT_BYTES];
    snprintf(subject, sizeof subject, "an image of kernels on GPU %d (sm_%d%d)", device->ordinal,
             device->major, device->minor);
    CUDA_CALL(cuda_of(device), err, subject, cuModuleLoadData, &made, image);
    *module = (sw_module *)(void *)made;
    return SW_OK;
}

static void cuda_module_unload(sw_device *device, sw_module *module)
{
    if (module)
        CUDA_UNDO(cuda_of(device), cuModuleUnload, (sw_cu_module)(void *)module);
}

static sw_status cuda_module_function(sw_device *device, sw_module *module, const char *name,
                                      sw_function **function, sw_error *err)
{
    cuda_device *cuda = cuda_of(device);
    sw_cu_function found = NULL;
    CUDA_CALL(cuda, err, name, cuModuleGetFunction, &found, (sw_cu_module)(void *)module, name);
    /* A driver may load a kernel at its first launch. Loading allocates, and allocating waits for
     * running kernels, one of which may be a collective that waits for this launch. Load it now. */
    if (cuda->driver.call.cuFuncLoad)
        CUDA_CALL(cuda, err, name, cuFuncLoad, found);
    *function = (sw_function *)(void *)found;
    return SW_OK;
}

static sw_status cuda_launch_async(sw_device *device, sw_function *function, sw_grid grid,
                                   void *arguments, sw_stream *stream, sw_error *err)
{
    void *parameters[1] = {arguments};
    device->stats.launches++;
    CUDA_CALL(cuda_of(device), err, device->name, cuLaunchKernel, (sw_cu_function)(void *)function,
              grid.block_count, 1, 1, grid.thread_count, 1, 1, 0, (sw_cu_stream)(void *)stream,
              parameters, NULL);
    return SW_OK;
}

static sw_status cuda_pointer_inspect(sw_device *device, const void *address, sw_pointer *pointer,
                                      sw_error *err)
{
    cuda_device *cuda = cuda_of(device);
    sw_device_visit visit;
    int type = 0, ordinal = -1;
    SW_TRY(enter(cuda, &visit, err));
    sw_cu_result result = cuda->driver.call.cuPointerGetAttribute(&type, SW_CU_POINTER_MEMORY_TYPE,
                                                                  address_of(address));
    if (result == SW_CU_SUCCESS)
        result = cuda->driver.call.cuPointerGetAttribute(&ordinal, SW_CU_POINTER_DEVICE_ORDINAL,
                                                         address_of(address));
    leave(cuda, &visit);
    *pointer = (sw_pointer){.kind = SW_MEMORY_UNKNOWN, .ordinal = -1};
    if (result == SW_CU_INVALID_VALUE) /* memory unknown to the driver */
        return SW_OK;
    SW_TRY(sw_cuda_check(&cuda->driver, result, "cuPointerGetAttribute", device->name, err));
    pointer->kind = type == SW_CU_MEMORYTYPE_DEVICE ? SW_MEMORY_DEVICE : SW_MEMORY_PINNED;
    pointer->ordinal = ordinal;
    return SW_OK;
}

static void cuda_destroy(sw_device *device)
{
    cuda_device *cuda = cuda_of(device);
    if (cuda->context)
        (void)cuda->driver.call.cuDevicePrimaryCtxRelease_v2(cuda->handle);
    sw_cuda_driver_fini(&cuda->driver);
    free(cuda);
}

static const sw_device_ops cuda_ops = {
    .enter = cuda_enter,
    .leave = cuda_leave,
    .memory_alloc = cuda_memory_alloc,
    .memory_free = cuda_memory_free,
    .pinned_alloc = cuda_pinned_alloc,
    .pinned_free = cuda_pinned_free,
    .host_register = cuda_host_register,
    .host_unregister = cuda_host_unregister,
    .memory_export = cuda_memory_export,
    .memory_open = cuda_memory_open,
    .memory_close = cuda_memory_close,
    .stream_create = cuda_stream_create,
    .stream_destroy = cuda_stream_destroy,
    .stream_wait = cuda_stream_wait,
    .stream_write_number = cuda_stream_write_number,
    .stream_wait_number = cuda_stream_wait_number,
    .stream_is_capturing = cuda_stream_is_capturing,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_query = cuda_event_query,
    .event_wait = cuda_event_wait,
    .copy_async = cuda_copy_async,
    .fill_async = cuda_fill_async,
    .module_load = cuda_module_load,
    .module_unload = cuda_module_unload,
    .module_function = cuda_module_function,
    .launch_async = cuda_launch_async,
    .pointer_inspect = cuda_pointer_inspect,
    .destroy = cuda_destroy,
};

static sw_status read_properties(cuda_device *cuda, sw_error *err)
{
    const sw_cuda_table *call = &cuda->driver.call;
    sw_device *base = &cuda->base;
    int domain, bus, place;
    SW_TRY(sw_cuda_check(&cuda->driver,
                         call->cuDeviceGetName(base->name, (int)sizeof base->name, cuda->handle),
                         "cuDeviceGetName", "the GPU", err));
    const struct {
        int attribute, *value;
    } wanted[] = {{SW_CU_ATTRIBUTE_CAPABILITY_MAJOR, &base->major},
                  {SW_CU_ATTRIBUTE_CAPABILITY_MINOR, &base->minor},
                  {SW_CU_ATTRIBUTE_MULTIPROCESSOR_COUNT, &base->processor_count},
                  {SW_CU_ATTRIBUTE_PCI_DOMAIN_ID, &domain},
                  {SW_CU_ATTRIBUTE_PCI_BUS_ID, &bus},
                  {SW_CU_ATTRIBUTE_PCI_DEVICE_ID, &place}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; ++i)
        SW_TRY(sw_cuda_check(
            &cuda->driver,
            call->cuDeviceGetAttribute(wanted[i].value, wanted[i].attribute, cuda->handle),
            "cuDeviceGetAttribute", base->name, err));
    snprintf(base->address, sizeof base->address, "%04x:%02x:%02x", (unsigned)domain, (unsigned)bus,
             (unsigned)place);
    return SW_OK;
}

static sw_status open_device(cuda_device *cuda, const char *library, int ordinal, sw_error *err)
{
    SW_TRY(sw_cuda_driver_init(&cuda->driver, library, err));
    if (ordinal < 0 || ordinal >= cuda->driver.device_count)
        SW_FAIL(err, SW_E_INVALID, "cuda device: ordinal must be in [0, %d), not %d",
                cuda->driver.device_count, ordinal);
    SW_TRY(sw_cuda_check(&cuda->driver, cuda->driver.call.cuDeviceGet(&cuda->handle, ordinal),
                         "cuDeviceGet", "the GPU", err));
    SW_TRY(read_properties(cuda, err));
    return sw_cuda_check(&cuda->driver,
                         cuda->driver.call.cuDevicePrimaryCtxRetain(&cuda->context, cuda->handle),
                         "cuDevicePrimaryCtxRetain", cuda->base.name, err);
}

sw_status sw_device_cuda_create(const char *library, int ordinal, sw_device **device, sw_error *err)
{
    cuda_device *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        SW_FAIL(err, SW_E_MEMORY, "cuda device: no memory for %zu bytes", sizeof *cuda);
    cuda->base = (sw_device){.ops = &cuda_ops, .kind = SW_DEVICE_CUDA, .ordinal = ordinal};
    sw_status status = open_device(cuda, library, ordinal, err);
    if (status != SW_OK) {
        cuda_destroy(&cuda->base);
        return status;
    }
    *device = &cuda->base;
    return SW_OK;
}
