/* cuda_driver.c - opens the CUDA driver and describes its results. */
#include "device/cuda_driver.h"

#include <stdlib.h>

#include "platform/library.h"

static const char DEFAULT_LIBRARY[] = "libcuda.so.1";

static const sw_library_symbol symbols[] = {
#define SYMBOL(name, parameters) {#name, offsetof(sw_cuda_table, name)},
    SW_CUDA_FUNCTIONS(SYMBOL)
#undef SYMBOL
};

static const sw_library_symbol newer_symbols[] = {
#define SYMBOL(name, parameters) {#name, offsetof(sw_cuda_table, name)},
    SW_CUDA_NEWER_FUNCTIONS(SYMBOL) SW_CUDA_NEWEST_FUNCTIONS(SYMBOL)
#undef SYMBOL
};

static const char *result_name(const sw_cuda_driver *driver, sw_cu_result result)
{
    const char *name = NULL;
    if (driver->call.cuGetErrorName(result, &name) != SW_CU_SUCCESS || !name)
        return "unknown result";
    return name;
}

sw_status sw_cuda_check(const sw_cuda_driver *driver, sw_cu_result result, const char *call,
                        const char *subject, sw_error *err)
{
    if (result == SW_CU_SUCCESS)
        return SW_OK;
    return sw_error_set(err, result == SW_CU_OUT_OF_MEMORY ? SW_E_MEMORY : SW_E_DEVICE, result,
                        "%s failed for %s: %s (%d)", call, subject, result_name(driver, result),
                        result);
}

static const char *visible_devices(void)
{
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    return value ? value : "unset";
}

/* Without a GPU, cuInit or cuDeviceGetCount fails, or the count is 0. */
static sw_status count_devices(sw_cuda_driver *driver, const char *library, sw_error *err)
{
    sw_cu_result result = driver->call.cuInit(0);
    if (result == SW_CU_SUCCESS)
        result = driver->call.cuDeviceGetCount(&driver->device_count);
    if (result == SW_CU_NO_DEVICE || (result == SW_CU_SUCCESS && driver->device_count < 1))
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "%s works but shows no GPU (CUDA_VISIBLE_DEVICES is %s%s%s): the host path is used",
                library, getenv("CUDA_VISIBLE_DEVICES") ? "\"" : "", visible_devices(),
                getenv("CUDA_VISIBLE_DEVICES") ? "\"" : "");
    if (result == SW_CU_SYSTEM_DRIVER_MISMATCH)
        return sw_error_set(err, SW_E_DEVICE, result,
                            "%s and the kernel module are of different versions: reboot or "
                            "reinstall the driver",
                            library);
    return sw_cuda_check(driver, result, "cuInit", library, err);
}

sw_status sw_cuda_driver_init(sw_cuda_driver *driver, const char *library, sw_error *err)
{
    sw_cuda_driver made = {0};
    sw_status status;
    library = library ? library : DEFAULT_LIBRARY;
    SW_TRY(sw_library_open(library, SW_LIBRARY_STAYING, &made.handle, err));
    SW_TRY_GOTO(status,
                sw_library_bind(made.handle, library, symbols, sizeof symbols / sizeof *symbols,
                                &made.call, err),
                close);
    sw_library_bind_found(made.handle, newer_symbols, sizeof newer_symbols / sizeof *newer_symbols,
                          &made.call);
    SW_TRY_GOTO(status, count_devices(&made, library, err), close);
    SW_TRY_GOTO(status,
                sw_cuda_check(&made, made.call.cuDriverGetVersion(&made.version),
                              "cuDriverGetVersion", library, err),
                close);
    if (made.version < SW_CUDA_OLDEST_VERSION) {
        status = sw_error_set(err, SW_E_UNSUPPORTED, made.version,
                              "%s offers CUDA %d.%d: install a driver for CUDA %d.%d or newer",
                              library, made.version / 1000, made.version % 1000 / 10,
                              SW_CUDA_OLDEST_VERSION / 1000, SW_CUDA_OLDEST_VERSION % 1000 / 10);
        goto close;
    }
    *driver = made;
    return SW_OK;
close:
    sw_library_close(made.handle);
    return status;
}

void sw_cuda_driver_fini(sw_cuda_driver *driver)
{
    sw_library_close(driver->handle);
    driver->handle = NULL;
}
