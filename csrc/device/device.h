/* device.h - memory, streams and events of one device as one table of functions.
 *
 * Idea: what must happen in what order is said with events alone. The host form (device_host.c)
 * runs everything at once, in the calling thread, so each order holds; the cuda form
 * (device_cuda.c) calls the driver that torch has loaded, in torch's own (primary) context. Code
 * above does not know which it has.
 *
 * What it leaves out: kernels (kernels/device_kernels.h), the legacy default stream's implicit
 * order (our streams are non-blocking; an event is recorded on the stream that produced the data).
 *
 * Thread rule: any thread may call, one at a time for a stream or an event. No call blocks but
 * event_wait (and memory_free, for which the driver may wait).
 */
#ifndef SW_DEVICE_DEVICE_H
#define SW_DEVICE_DEVICE_H

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
typedef struct sw_function sw_function; /* opaque: a kernel of it */

typedef struct sw_grid { /* of a launch */
    unsigned block_count, thread_count;
} sw_grid;

typedef enum sw_memory_kind {
    SW_MEMORY_UNKNOWN = 0, /* the device does not know the address: ordinary host memory */
    SW_MEMORY_PINNED,
    SW_MEMORY_DEVICE,
} sw_memory_kind;

typedef struct sw_pointer {
    sw_memory_kind kind;
    int ordinal; /* of the device that has it; -1 if unknown */
} sw_pointer;

/* What a thread has while it is in a device, for leave() to undo. */
typedef struct sw_device_visit {
    bool is_pushed;   /* the device's context was not the current one */
    bool is_exempt;   /* from captures; then */
    int capture_mode; /* the thread's own */
} sw_device_visit;

/* Device memory that another process may open. */
typedef struct sw_memory_export {
    unsigned char handle[64];
} sw_memory_export;

typedef struct sw_device_ops {
    /* Makes the device current for the calling thread, for a foreign library's sake, and its calls
     * no concern of captures that run elsewhere; *visit is what leave() gets. Calls of this table
     * do so by themselves. */
    sw_status (*enter)(sw_device *device, sw_device_visit *visit, sw_error *err);
    void (*leave)(sw_device *device, const sw_device_visit *visit);

    /* Device memory; contents undefined. SW_E_MEMORY names the size. */
    sw_status (*memory_alloc)(sw_device *device, size_t size_bytes, void **memory, sw_error *err);
    /* The host has waited for the device's last use of it. NULL is allowed. */
    void (*memory_free)(sw_device *device, void *memory);
    /* Host memory that copies reach without a staging buffer. */
    sw_status (*pinned_alloc)(sw_device *device, size_t size_bytes, void **memory, sw_error *err);
    void (*pinned_free)(sw_device *device, void *memory);

    /* Memory of the host's, page by page and perhaps shared with other processes, becomes like
     * pinned; *mapped is what it is called on the device. Undone before it is unmapped. */
    sw_status (*host_register)(sw_device *device, void *memory, size_t size_bytes, void **mapped,
                               sw_error *err);
    void (*host_unregister)(sw_device *device, void *memory);

    /* Memory of memory_alloc's, of other processes' as long as they have it open. SW_E_UNSUPPORTED
     * on the host. A process does not open its own. */
    sw_status (*memory_export)(sw_device *device, void *memory, sw_memory_export *exported,
                               sw_error *err);
    sw_status (*memory_open)(sw_device *device, const sw_memory_export *exported, void **memory,
                             sw_error *err);
    void (*memory_close)(sw_device *device, void *memory);

    /* A stream that the legacy default stream does not order; `urgent` ones are scheduled first. */
    sw_status (*stream_create)(sw_device *device, bool urgent, sw_stream **stream, sw_error *err);
    void (*stream_destroy)(sw_device *device, sw_stream *stream);
    /* What is enqueued on `stream` from now on runs after what `event` last recorded. */
    sw_status (*stream_wait)(sw_device *device, sw_stream *stream, sw_event *event, sw_error *err);
    /* In the order of `stream`: writes a number, behind all that was written before it; waits until
     * (int32_t)(*number - value) >= 0, whoever writes it. `number` is registered memory, as the
     * device calls it. SW_E_UNSUPPORTED where the driver is too old. */
    sw_status (*stream_write_number)(sw_device *device, sw_stream *stream, uint32_t *number,
                                     uint32_t value, sw_error *err);
    sw_status (*stream_wait_number)(sw_device *device, sw_stream *stream, uint32_t *number,
                                    uint32_t value, sw_error *err);
    /* Whether the stream is being captured into a graph. */
    sw_status (*stream_is_capturing)(sw_device *device, sw_stream *stream, bool *capturing,
                                     sw_error *err);

    sw_status (*event_create)(sw_device *device, sw_event **event, sw_error *err);
    void (*event_destroy)(sw_device *device, sw_event *event);
    /* The event stands for all that was enqueued on `stream` so far. */
    sw_status (*event_record)(sw_device *device, sw_event *event, sw_stream *stream, sw_error *err);
    /* Does not wait. An event that was never recorded is done; one that a capture keeps the driver
     * from judging is not, yet. */
    sw_status (*event_query)(sw_device *device, sw_event *event, bool *done, sw_error *err);
    /* The host waits; SW_E_TIMEOUT names `what` when `timeout_ns` have passed. */
    sw_status (*event_wait)(sw_device *device, sw_event *event, int64_t timeout_ns,
                            const char *what, sw_error *err);

    /* Between any two of device, pinned and host memory, in the order of `stream`. Memory must
     * outlive it; host memory that is not pinned may make it synchronous. */
    sw_status (*copy_async)(sw_device *device, void *to, const void *from, size_t size_bytes,
                            sw_stream *stream, sw_error *err);
    sw_status (*fill_async)(sw_device *device, void *to, unsigned char value, size_t size_bytes,
                            sw_stream *stream, sw_error *err);

    /* An image of kernels (a cubin) for this device. SW_E_UNSUPPORTED on the host. */
    sw_status (*module_load)(sw_device *device, const void *image, sw_module **module,
                             sw_error *err);
    void (*module_unload)(sw_device *device, sw_module *module);
    /* Loaded, where the driver can be asked for it: its first launch is like any later one. */
    sw_status (*module_function)(sw_device *device, sw_module *module, const char *name,
                                 sw_function **function, sw_error *err);
    /* A kernel with one parameter, the structure at `arguments` (copied before it returns). */
    sw_status (*launch_async)(sw_device *device, sw_function *function, sw_grid grid,
                              void *arguments, sw_stream *stream, sw_error *err);

    sw_status (*pointer_inspect)(sw_device *device, const void *address, sw_pointer *pointer,
                                 sw_error *err);
    void (*destroy)(sw_device *device);
} sw_device_ops;

typedef struct sw_device_stats { /* calls made; host_waits is what a step must not have */
    uint64_t launches, copies, records, stream_waits, host_waits, allocations;
} sw_device_stats;

struct sw_device {
    const sw_device_ops *ops;
    sw_device_kind kind;
    int ordinal;         /* 0 on the host */
    int major, minor;    /* compute capability; 0 on the host */
    int processor_count; /* multiprocessors; 1 on the host */
    char name[SW_DEVICE_NAME_BYTES];
    char address[SW_DEVICE_ADDRESS_BYTES]; /* on the PCI bus; one card has one, "" on the host */
    sw_device_stats stats;
};

SW_MUST_USE sw_status sw_device_host_create(sw_device **device, sw_error *err);

/* The device of that ordinal through the driver library `library` (NULL: libcuda.so.1), in its
 * primary context, which torch uses too. SW_E_UNSUPPORTED when there is no driver, the driver shows
 * no GPU or lacks a function; SW_E_INVALID when the ordinal is out of range; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_cuda_create(const char *library, int ordinal, sw_device **device,
                                            sw_error *err);

/* SW_E_UNSUPPORTED, naming `what`, when the caller's stream is being captured into a CUDA graph:
 * asked before anything is enqueued on it, since a graph would repeat what the host decided once,
 * and before the driver is asked for events, which would end the capture. */
SW_MUST_USE sw_status sw_device_refuse_capture(sw_device *device, sw_stream *stream,
                                               const char *what, sw_error *err);

/* NULL is allowed. Streams, events and memory of the device go before it. */
void sw_device_destroy(sw_device *device);

#endif
