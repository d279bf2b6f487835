/* device_host.c - the host as a device: every call runs at once in the calling thread.
 *
 * A stream is a placeholder and an event is always done, since all work runs before its call
 * returns. Tests compare the cuda form with this one.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "device_host.h"
#include "kernel_references.h"

static char place_holder; /* the target of every stream and event pointer */

static sw_status host_enter(sw_device *device, sw_device_visit *visit, sw_error *err)
{
    (void)device;
    (void)err;
    *visit = (sw_device_visit){.is_pushed = false};
    return SW_OK;
}

static void host_leave(sw_device *device, const sw_device_visit *visit)
{
    (void)device;
    (void)visit;
}

static sw_status host_memory_alloc(sw_device *device, size_t size_bytes, void **memory,
                                   sw_error *err)
{
    size_t rounded;
    void *made = NULL;
    if (sw_size_round_up(size_bytes ? size_bytes : 1, SW_ALIGNMENT_BYTES, &rounded))
        made = aligned_alloc(SW_ALIGNMENT_BYTES, rounded);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "host device: no memory for %zu bytes", size_bytes);
    device->stats.allocations++;
    *memory = made;
    return SW_OK;
}

static void host_memory_free(sw_device *device, void *memory)
{
    (void)device;
    free(memory);
}

static sw_status host_host_register(sw_device *device, void *memory, size_t size_bytes,
                                    void **mapped, sw_error *err)
{
    (void)device;
    (void)size_bytes;
    (void)err;
    *mapped = memory;
    return SW_OK;
}

static sw_status host_memory_export(sw_device *device, void *memory, sw_memory_export *exported,
                                    sw_error *err)
{
    (void)device;
    (void)memory;
    (void)exported;
    SW_FAIL(err, SW_E_UNSUPPORTED, "host device: memory cannot be exported to another process");
}

static sw_status host_memory_open(sw_device *device, const sw_memory_export *exported,
                                  void **memory, sw_error *err)
{
    (void)device;
    (void)exported;
    (void)memory;
    SW_FAIL(err, SW_E_UNSUPPORTED, "host device: memory of another process cannot be opened");
}

static void host_forget(sw_device *device, void *memory)
{
    (void)device;
    (void)memory;
}

static sw_status host_stream_create(sw_device *device, bool urgent, sw_stream **stream,
                                    sw_error *err)
{
    (void)device;
    (void)urgent;
    (void)err;
    *stream = (sw_stream *)(void *)&place_holder;
    return SW_OK;
}

static void host_stream_destroy(sw_device *device, sw_stream *stream)
{
    (void)device;
    (void)stream;
}

static sw_status host_stream_wait(sw_device *device, sw_stream *stream, sw_event *event,
                                  sw_error *err)
{
    (void)stream;
    (void)event;
    (void)err;
    device->stats.stream_waits++;
    return SW_OK;
}

static sw_status host_stream_write_number(sw_device *device, sw_stream *stream, uint32_t *number,
                                          uint32_t value, sw_error *err)
{
    (void)device;
    (void)stream;
    (void)err;
    __atomic_store_n(number, value, __ATOMIC_RELEASE);
    return SW_OK;
}

/* A wait that is not met now never will be: no work runs later on this device. */
static sw_status host_stream_wait_number(sw_device *device, sw_stream *stream, uint32_t *number,
                                         uint32_t value, sw_error *err)
{
    (void)stream;
    device->stats.stream_waits++;
    if ((int32_t)(__atomic_load_n(number, __ATOMIC_ACQUIRE) - value) < 0)
        SW_FAIL(err, SW_E_UNSUPPORTED, "host device: a stream cannot wait for a peer");
    return SW_OK;
}

static sw_status host_stream_is_capturing(sw_device *device, sw_stream *stream, bool *capturing,
                                          sw_error *err)
{
    (void)device;
    (void)stream;
    (void)err;
    *capturing = false;
    return SW_OK;
}

static sw_status host_event_create(sw_device *device, sw_event **event, sw_error *err)
{
    (void)device;
    (void)err;
    *event = (sw_event *)(void *)&place_holder;
    return SW_OK;
}

static void host_event_destroy(sw_device *device, sw_event *event)
{
    (void)device;
    (void)event;
}

static sw_status host_event_record(sw_device *device, sw_event *event, sw_stream *stream,
                                   sw_error *err)
{
    (void)event;
    (void)stream;
    (void)err;
    device->stats.records++;
    return SW_OK;
}

static sw_status host_event_query(sw_device *device, sw_event *event, bool *done, sw_error *err)
{
    (void)device;
    (void)event;
    (void)err;
    *done = true;
    return SW_OK;
}

static sw_status host_event_wait(sw_device *device, sw_event *event, int64_t timeout_ns,
                                 const char *operation, sw_error *err)
{
    (void)event;
    (void)timeout_ns;
    (void)operation;
    (void)err;
    device->stats.host_waits++;
    return SW_OK;
}

static sw_status host_copy_async(sw_device *device, void *to, const void *from, size_t size_bytes,
                                 sw_stream *stream, sw_error *err)
{
    (void)stream;
    (void)err;
    device->stats.copies++;
    if (size_bytes > 0)
        memmove(to, from, size_bytes);
    return SW_OK;
}

static sw_status host_fill_async(sw_device *device, void *to, unsigned char value,
                                 size_t size_bytes, sw_stream *stream, sw_error *err)
{
    (void)stream;
    (void)err;
    device->stats.copies++;
    if (size_bytes > 0)
        memset(to, value, size_bytes);
    return SW_OK;
}

static sw_status host_module_load(sw_device *device, const void *image, sw_module **module,
                                  sw_error *err)
{
    (void)device;
    (void)image;
    (void)module;
    SW_FAIL(err, SW_E_UNSUPPORTED,
            "host device: kernels are functions of the engine and cannot be loaded from an image");
}

static void host_module_unload(sw_device *device, sw_module *module)
{
    (void)device;
    (void)module;
}

static sw_status host_module_function(sw_device *device, sw_module *module, const char *name,
                                      sw_function **function, sw_error *err)
{
    (void)device;
    (void)module;
    for (int k = 0; k < SW_KERNEL_COUNT; ++k)
        if (strcmp(sw_kernel_references()[k].name, name) == 0) {
            *function = (sw_function *)(uintptr_t)&sw_kernel_references()[k];
            return SW_OK;
        }
    SW_FAIL(err, SW_E_UNSUPPORTED, "host device: there is no kernel %s", name);
}

static sw_status host_launch_async(sw_device *device, sw_function *function, sw_grid grid,
                                   void *arguments, sw_stream *stream, sw_error *err)
{
    (void)grid;
    (void)stream;
    (void)err;
    device->stats.launches++;
    ((const sw_kernel_reference *)(const void *)function)->reference(arguments);
    return SW_OK;
}

static sw_status host_pointer_inspect(sw_device *device, const void *address, sw_pointer *pointer,
                                      sw_error *err)
{
    (void)device;
    (void)address;
    (void)err;
    *pointer = (sw_pointer){.kind = SW_MEMORY_UNKNOWN, .ordinal = -1};
    return SW_OK;
}

static void host_destroy(sw_device *device)
{
    free(device);
}

static const sw_device_ops host_ops = {
    .enter = host_enter,
    .leave = host_leave,
    .memory_alloc = host_memory_alloc,
    .memory_free = host_memory_free,
    .pinned_alloc = host_memory_alloc,
    .pinned_free = host_memory_free,
    .host_register = host_host_register,
    .host_unregister = host_forget,
    .memory_export = host_memory_export,
    .memory_open = host_memory_open,
    .memory_close = host_forget,
    .stream_create = host_stream_create,
    .stream_destroy = host_stream_destroy,
    .stream_wait = host_stream_wait,
    .stream_write_number = host_stream_write_number,
    .stream_wait_number = host_stream_wait_number,
    .stream_is_capturing = host_stream_is_capturing,
    .event_create = host_event_create,
    .event_destroy = host_event_destroy,
    .event_record = host_event_record,
    .event_query = host_event_query,
    .event_wait = host_event_wait,
    .copy_async = host_copy_async,
    .fill_async = host_fill_async,
    .module_load = host_module_load,
    .module_unload = host_module_unload,
    .module_function = host_module_function,
    .launch_async = host_launch_async,
    .pointer_inspect = host_pointer_inspect,
    .destroy = host_destroy,
};

sw_status sw_device_host_create(sw_device **device, sw_error *err)
{
    sw_device *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "host device: no memory for %zu bytes", sizeof *made);
    *made =
        (sw_device){.ops = &host_ops, .kind = SW_DEVICE_HOST, .processor_count = 1, .name = "host"};
    *device = made;
    return SW_OK;
}
