/* library.h - a foreign library by name at run time: opened, and its functions put into a table.
 *
 * Thread rule: any.
 */
#ifndef SW_PLATFORM_LIBRARY_H
#define SW_PLATFORM_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct sw_library_symbol {
    const char *name;
    size_t offset; /* of the function pointer in the caller's table */
} sw_library_symbol;

typedef enum sw_library_kind {
    SW_LIBRARY_ANY = 0,
    SW_LIBRARY_LOADED,  /* only what the process has loaded already */
    SW_LIBRARY_STAYING, /* has threads and handlers of its own: not unloaded before the process ends
                         */
} sw_library_kind;

/* Opens `name`, a path or a soname. SW_E_UNSUPPORTED with the loader's own words when it is not
 * there. */
SW_MUST_USE sw_status sw_library_open(const char *name, sw_library_kind kind, void **handle,
                                      sw_error *err);

/* Fills `table` with the addresses of `count` functions. SW_E_UNSUPPORTED names the first that
 * `name` does not have and says what else it may lack, then nothing of the table may be used. */
SW_MUST_USE sw_status sw_library_bind(void *handle, const char *name,
                                      const sw_library_symbol *symbols, size_t count, void *table,
                                      sw_error *err);

/* The same where some may be missing: those are NULL in the table. */
void sw_library_bind_found(void *handle, const sw_library_symbol *symbols, size_t count,
                           void *table);

/* NULL is allowed. */
void sw_library_close(void *handle);

/* The file that the function at `address` was loaded from; "" when it cannot be told. */
void sw_library_path_of(const void *address, char *path, size_t path_bytes);

#endif
