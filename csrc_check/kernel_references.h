/* kernel_references.h - what each device kernel computes, as a function of the host, and the memory
 * that it accesses. A kernel's text is compared with it (kernel_check.h), and the simulated GPU of
 * the tests runs it in the kernel's place, and looks for writes outside the declared ranges.
 *
 * Thread rule: any. */
#pragma once

#include "kernels/device_kernels.h"

typedef enum sw_access { SW_ACCESS_READ = 1, SW_ACCESS_WRITE = 2, SW_ACCESS_BOTH = 3 } sw_access;

/* Report one range, which may have 0 bytes. */
typedef void sw_access_fn(void *context, const void *begin, size_t size_bytes, sw_access access);

typedef struct sw_kernel_reference {
    const char *name; /* of the kernel's contract, as args_bytes */
    size_t args_bytes;
    void (*accesses)(const void *args, sw_access_fn *report, void *context);
    void (*reference)(const void *args);
} sw_kernel_reference;

/* Return the references of all kernels, by number. */
const sw_kernel_reference *sw_kernel_references(void);
