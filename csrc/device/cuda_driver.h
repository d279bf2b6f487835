/* cuda_driver.h - the CUDA driver as a table of functions, opened by name at run time.
 *
 * Thread rule: any.
 */
#pragma once

#include "base/status.h"
#include "device/cuda_abi.h"

enum { SW_CUDA_OLDEST_VERSION = 11040 }; /* 1000 * major + 10 * minor: the oldest for torch 2.4 */

typedef struct sw_cuda_driver {
    sw_cuda_table call; /* functions that the driver lacks are NULL */
    int version;        /* the version of CUDA that the driver offers */
    int device_count;   /* >= 1 */
    void *handle;       /* owned */
} sw_cuda_driver;

/* Open `library` (NULL: libcuda.so.1) and initialise it. SW_E_UNSUPPORTED, with a message for each
 * cause: no driver; a driver that lacks a function or is older than SW_CUDA_OLDEST_VERSION; no
 * visible GPU (the message has CUDA_VISIBLE_DEVICES). SW_E_DEVICE for any other failure. */
SW_MUST_USE sw_status sw_cuda_driver_init(sw_cuda_driver *driver, const char *library,
                                          sw_error *err);
void sw_cuda_driver_fini(sw_cuda_driver *driver);

/* Return SW_OK for CUDA_SUCCESS; else SW_E_MEMORY or SW_E_DEVICE with `call`, `subject` and the
 * name of the result in the message. The detail is the result. */
SW_MUST_USE sw_status sw_cuda_check(const sw_cuda_driver *driver, sw_cu_result result,
                                    const char *call, const char *subject, sw_error *err);
