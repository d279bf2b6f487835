/* library.c - dlopen and dlsym, with errors that name the missing library or function. */
#include "platform/library.h"

#include <dlfcn.h>
#include <string.h>

static const char *reason(void)
{
    const char *text = dlerror();
    return text ? text : "not loaded";
}

sw_status sw_library_open(const char *name, sw_library_kind kind, void **handle, sw_error *err)
{
    static const int flags[] = {[SW_LIBRARY_LOADED] = RTLD_NOLOAD,
                                [SW_LIBRARY_STAYING] = RTLD_NODELETE};
    void *opened = dlopen(name, RTLD_NOW | RTLD_LOCAL | flags[kind]);
    if (!opened)
        SW_FAIL(err, SW_E_UNSUPPORTED, "%s cannot be used: %s", name, reason());
    *handle = opened;
    return SW_OK;
}

sw_status sw_library_bind(void *handle, const char *name, const sw_library_symbol *symbols,
                          size_t count, void *table, sw_error *err)
{
    for (size_t i = 0; i < count; ++i) {
        void *address = dlsym(handle, symbols[i].name);
        if (!address)
            SW_FAIL(err, SW_E_UNSUPPORTED,
                    "%s has no function %s: it is older than this engine supports", name,
                    symbols[i].name);
        memcpy((unsigned char *)table + symbols[i].offset, &address, sizeof address);
    }
    return SW_OK;
}

void sw_library_bind_found(void *handle, const sw_library_symbol *symbols, size_t count,
                           void *table)
{
    for (size_t i = 0; i < count; ++i) {
        void *address = dlsym(handle, symbols[i].name);
        memcpy((unsigned char *)table + symbols[i].offset, &address, sizeof address);
    }
}

void sw_library_close(void *handle)
{
    if (handle)
        dlclose(handle);
}
