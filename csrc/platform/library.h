/* library.h - opens a foreign library by name at run time and puts its functions into a table.
 *
 * Thread rule: any.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct sw_library_symbol {
    const char *name;
    size_t offset; /* offset of the function pointer in the caller's table */
} sw_library_symbol;

typedef enum sw_library_kind {
    SW_LIBRARY_ANY = 0,
    SW_LIBRARY_LOADED,  /* only if the process has already loaded it */
    SW_LIBRARY_STAYING, /* it has its own threads and handlers: never unload it
                         */
} sw_library_kind;

/* Opens `name`, a path or a soname. SW_E_UNSUPPORTED with the loader's message if it is missing. */
SW_MUST_USE sw_status sw_library_open(const char *name, sw_library_kind kind, void **handle,
                                      sw_error *err);

/* Fills `table` with the addresses of `count` functions. SW_E_UNSUPPORTED names the first function
 * that `name` lacks and what else it may lack; the table must then not be used. */
SW_MUST_USE sw_status sw_library_bind(void *handle, const char *name,
                                      const sw_library_symbol *symbols, size_t count, void *table,
                                      sw_error *err);

/* The same for optional functions: missing ones are NULL in the table. */
void sw_library_bind_found(void *handle, const sw_library_symbol *symbols, size_t count,
                           void *table);

/* NULL is allowed. */
void sw_library_close(void *handle);
