/* cuda_driver.h - the CUDA driver as a table of functions, opened by name at run time.
 *
 * Thread rule: any.
 */
#ifndef SW_DEVICE_CUDA_DRIVER_H
#define SW_DEVICE_CUDA_DRIVER_H

#include "base/status.h"
#include "device/cuda_abi.h"

enum { SW_CUDA_OLDEST_VERSION = 11040 }; /* 1000 * major + 10 * minor; of torch 2.4's oldest */

typedef struct sw_cuda_driver {
    sw_cuda_table call; /* of an older driver newer functions are NULL */
    int version;        /* of the interface it offers */
    int device_count;   /* >= 1 */
    void *handle;       /* owned */
} sw_cuda_driver;

/* Opens `library` (NULL: libcuda.so.1) and initialises it. SW_E_UNSUPPORTED, in one sentence each:
 * no driver, a driver that lacks a function or is older than SW_CUDA_OLDEST_VERSION, a driver that
 * shows no GPU (with CUDA_VISIBLE_DEVICES). SW_E_DEVICE for any other failure. */
SW_MUST_USE sw_status sw_cuda_driver_init(sw_cuda_driver *driver, const char *library,
                                          sw_error *err);
void sw_cuda_driver_fini(sw_cuda_driver *driver);

/* SW_OK for CUDA_SUCCESS; else SW_E_MEMORY or SW_E_DEVICE with "<call>: <name of the result>" and
 * `what`, which says the subject; detail is the result. */
SW_MUST_USE sw_status sw_cuda_check(const sw_cuda_driver *driver, sw_cu_result result,
                                    const char *call, const char *what, sw_error *err);

#endif
