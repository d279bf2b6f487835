/* device.h - memory, streams and events of one device as one table of functions.
 *
 * Code above this layer does not know which form of device it has, and orders all work by events
 * only. device_cuda.c calls the driver that torch has loaded, in torch's primary context. The
 * tests' form (tests/csrc/device_host.c) runs each call at once in the calling thread.
 *
 * Left out: kernels (kernels/device_kernels.h), and the implicit order of the legacy default
 * stream. Our streams are non-blocking, so record an event on the stream that produced the data.
 *
 * Thread rule: any thread may call, one at a time for a stream or an event. Only event_wait blocks,
 * and memory_free may, since the driver may wait there.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum sw_device_kind { SW_DEVICE_HOST = 0, SW_DEVICE_CUDA } sw_device_kind;

enum { SW_DEVICE_NAME_BYTES = 96, SW_DEVICE_ADDRESS_BYTES = 32 };

typedef struct sw_device sw_device;
typedef struct sw_stream sw_stream;     /* opaque: on cuda a CUstream, so torch's streams fit in */
typedef struct sw_event sw_event;       /* opaque: on cuda a CUevent */
typedef struct sw_module sw_module;     /* opaque: a loaded image of kernels; cuda only */
typedef struct sw_function sw_function; /* opaque: a kernel of a module */

typedef struct sw_grid { /* the size of a launch */
    unsigned block_count, thread_count;
} sw_grid;

typedef enum sw_memory_kind {
    SW_MEMORY_UNKNOWN = 0, /* the driver does not know the address: ordinary host memory */
    SW_MEMORY_PINNED,
    SW_MEMORY_DEVICE,
} sw_memory_kind;

typedef struct sw_pointer {
    sw_memory_kind kind;
    int ordinal; /* the device of the memory; -1 if unknown */
} sw_pointer;

/* The state of a thread that entered a device, for leave() to restore. */
typedef struct sw_device_visit {
    bool is_pushed;   /* enter() pushed the device's context */
    bool is_exempt;   /* enter() made the thread's calls exempt from stream captures */
    int capture_mode; /* if is_exempt: the thread's capture mode before */
} sw_device_visit;

/* Device memory that another process may open. */
typedef struct sw_memory_export {
    unsigned char handle[64];
} sw_memory_export;

typedef struct sw_device_ops {
    /* Make the device current for the calling thread, for calls of a foreign library, and exempt
     * its calls from captures of other threads. *visit gets the state for leave(). The other
     * functions of this table enter and leave by themselves. */
    sw_status (*enter)(sw_device *device, sw_device_visit *visit, sw_error *err);
    void (*leave)(sw_device *device, const sw_device_visit *visit);

    /* Allocate device memory with undefined contents. If memory is short, call `room` and try once
     * more. SW_E_MEMORY names the size. */
    sw_status (*memory_alloc)(sw_device *device, size_t size_bytes, void **memory, sw_error *err);
    /* Free device memory. The host must have waited for its last use. NULL is allowed. */
    void (*memory_free)(sw_device *device, void *memory);
    /* Allocate pinned host memory, which copies need no staging buffer for. */
    sw_status (*pinned_alloc)(sw_device *device, size_t size_bytes, void **memory, sw_error *err);
    void (*pinned_free)(sw_device *device, void *memory);

    /* Pin existing host memory, which may be shared with other processes. *mapped is its address on
     * the device. Unregister it before it is unmapped. */
    sw_status (*host_register)(sw_device *device, void *memory, size_t size_bytes, void **mapped,
                               sw_error *err);
    void (*host_unregister)(sw_device *device, void *memory);

    /* Export memory of memory_alloc() to other processes and open memory that they exported. The
     * exporter must keep it until all have closed it. A process may not open its own export.
     * SW_E_UNSUPPORTED on the host. */
    sw_status (*memory_export)(sw_device *device, void *memory, sw_memory_export *exported,
                               sw_error *err);
    sw_status (*memory_open)(sw_device *device, const sw_memory_export *exported, void **memory,
                             sw_error *err);
    void (*memory_close)(sw_device *device, void *memory);

    /* Create a non-blocking stream. The device schedules `urgent` streams first. */
    sw_status (*stream_create)(sw_device *device, bool urgent, sw_stream **stream, sw_error *err);
    void (*stream_destroy)(sw_device *device, sw_stream *stream);
    /* Work enqueued on `stream` from now on runs after the work that `event` last recorded. */
    sw_status (*stream_wait)(sw_device *device, sw_stream *stream, sw_event *event, sw_error *err);
    /* In the order of `stream`: write a number after all earlier writes of the stream; wait until
     * (int32_t)(*number - value) >= 0. `number` is the device address of registered memory, and any
     * process may write it. SW_E_UNSUPPORTED if the driver is too old. */
    sw_status (*stream_write_number)(sw_device *device, sw_stream *stream, uint32_t *number,
                                     uint32_t value, sw_error *err);
    sw_status (*stream_wait_number)(sw_device *device, sw_stream *stream, uint32_t *number,
                                    uint32_t value, sw_error *err);
    /* Report if the stream is being captured into a graph. */
    sw_status (*stream_is_capturing)(sw_device *device, sw_stream *stream, bool *capturing,
                                     sw_error *err);

    sw_status (*event_create)(sw_device *device, sw_event **event, sw_error *err);
    void (*event_destroy)(sw_device *device, sw_event *event);
    /* Make the event stand for all work enqueued on `stream` so far. */
    sw_status (*event_record)(sw_device *device, sw_event *event, sw_stream *stream, sw_error *err);
    /* Report if the recorded work is done, without waiting. An event that was never recorded is
     * done. An event that the driver cannot query during a capture is not done. */
    sw_status (*event_query)(sw_device *device, sw_event *event, bool *done, sw_error *err);
    /* Block the calling thread until the event is done. SW_E_TIMEOUT after `timeout_ns`; the
     * message names `operation`. */
    sw_status (*event_wait)(sw_device *device, sw_event *event, int64_t timeout_ns,
                            const char *operation, sw_error *err);

    /* Copy or fill in the order of `stream`, between any two of device, pinned and host memory. The
     * memory must stay until the copy is done. Host memory that is not pinned may make the call
     * synchronous. */
    sw_status (*copy_async)(sw_device *device, void *to, const void *from, size_t size_bytes,
                            sw_stream *stream, sw_error *err);
    sw_status (*fill_async)(sw_device *device, void *to, unsigned char value, size_t size_bytes,
                            sw_stream *stream, sw_error *err);

    /* Load an image of kernels (a cubin). SW_E_UNSUPPORTED on the host. */
    sw_status (*module_load)(sw_device *device, const void *image, sw_module **module,
                             sw_error *err);
    void (*module_unload)(sw_device *device, sw_module *module);
    /* Find a kernel and, if the driver supports it, load it now instead of at its first launch. */
    sw_status (*module_function)(sw_device *device, sw_module *module, const char *name,
                                 sw_function **function, sw_error *err);
    /* Launch a kernel with one parameter: the structure at `arguments`, copied before return. */
    sw_status (*launch_async)(sw_device *device, sw_function *function, sw_grid grid,
                              void *arguments, sw_stream *stream, sw_error *err);

    sw_status (*pointer_inspect)(sw_device *device, const void *address, sw_pointer *pointer,
                                 sw_error *err);
    void (*destroy)(sw_device *device);
} sw_device_ops;

typedef struct sw_device_stats { /* counts of calls; a training step must not raise host_waits */
    _Atomic uint64_t launches, copies, records, stream_waits, host_waits, allocations;
} sw_device_stats;

/* Called when device memory is short, before the second try: makes torch's allocator free its
 * unused memory. Any thread, without locks. */
typedef struct sw_device_room {
    void (*make)(void *context); /* NULL: no cache to free */
    void *context;               /* borrowed: outlives the device */
} sw_device_room;

struct sw_device {
    const sw_device_ops *ops;
    sw_device_kind kind;
    int ordinal;         /* 0 on the host */
    int major, minor;    /* compute capability; 0 on the host */
    int processor_count; /* multiprocessors; 1 on the host */
    char name[SW_DEVICE_NAME_BYTES];
    char address[SW_DEVICE_ADDRESS_BYTES]; /* PCI address, unique to a card; "" on the host */
    sw_device_stats stats;
    sw_device_room room; /* set by the owner */
};

/* Open the device of that ordinal through the driver library `library` (NULL: libcuda.so.1). The
 * device uses the primary context, as torch does. SW_E_UNSUPPORTED if there is no driver, or the
 * driver shows no GPU or lacks a function; SW_E_INVALID if the ordinal is out of range;
 * SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_cuda_create(const char *library, int ordinal, sw_device **device,
                                            sw_error *err);

/* Return SW_E_UNSUPPORTED, with the name of `operation`, if the stream is being captured into a
 * CUDA graph. Call this before work is enqueued on the stream, since a graph would repeat a
 * decision that the host made once, and before any event is queried, since a query would end the
 * capture. */
SW_MUST_USE sw_status sw_device_refuse_capture(sw_device *device, sw_stream *stream,
                                               const char *operation, sw_error *err);

/* Destroy the device after its streams, events and memory. NULL is allowed. */
void sw_device_destroy(sw_device *device);
