/* nccl_library.c - opening the NCCL that torch has loaded. */
#include "comm/nccl_library.h"

#include "platform/library.h"

static const char DEFAULT_LIBRARY[] = "libnccl.so.2";

static const sw_library_symbol symbols[] = {
#define SYMBOL(name, parameters) {#name, offsetof(sw_nccl_table, name)},
    SW_NCCL_FUNCTIONS(SYMBOL) SYMBOL(ncclGetErrorString, ) SYMBOL(ncclGetLastError, )
#undef SYMBOL
};

/* Read the version before the functions are looked up, so that the error for an old library names
 * its version instead of a missing function. */
static sw_status read_version(void *handle, const char *name, int *version, sw_error *err)
{
    static const sw_library_symbol one[] = {{"ncclGetVersion", 0}};
    sw_nccl_result (*get_version)(int *);
    SW_TRY(sw_library_bind(handle, name, one, 1, &get_version, err));
    int result = get_version(version);
    if (result != SW_NCCL_SUCCESS)
        return sw_error_set(err, SW_E_DEVICE, result, "%s: ncclGetVersion failed with %d", name,
                            result);
    if (*version < SW_NCCL_OLDEST_VERSION)
        return sw_error_set(err, SW_E_UNSUPPORTED, *version,
                            "%s is NCCL %d.%d.%d: 2.14 or newer is needed", name, *version / 10000,
                            *version % 10000 / 100, *version % 100);
    return SW_OK;
}

sw_status sw_nccl_library_init(sw_nccl_library *nccl, const char *library, sw_error *err)
{
    sw_nccl_library made = {0};
    const char *name = library ? library : DEFAULT_LIBRARY;
    sw_status status;
    sw_library_kind kind = library ? SW_LIBRARY_STAYING : SW_LIBRARY_LOADED; /* the thread that
                                                                              * waits for an id's
                                                                              * ranks */
    SW_TRY(sw_library_open(name, kind, &made.handle, err));
    SW_TRY_GOTO(status, read_version(made.handle, name, &made.version, err), close);
    SW_TRY_GOTO(status,
                sw_library_bind(made.handle, name, symbols, sizeof symbols / sizeof *symbols,
                                &made.call, err),
                close);
    *nccl = made;
    return SW_OK;
close:
    sw_library_close(made.handle);
    return status;
}

void sw_nccl_library_fini(sw_nccl_library *nccl)
{
    sw_library_close(nccl->handle);
    nccl->handle = NULL;
}
