/* catalog.h - the small parts of a checkpoint in one buffer: the manifest, headers of safetensors
 * files, JSON. One rank reads it and sends it to the others, which then open only files with
 * tensors that they read.
 *
 * Thread rule: any; a catalog does not change. */
#ifndef SW_CHECKPOINT_CATALOG_H
#define SW_CHECKPOINT_CATALOG_H

#include "base/status.h"
#include "checkpoint/manifest.h"

typedef struct sw_catalog {
    uint8_t *data; /* owned */
    size_t size_bytes;
} sw_catalog;

/* Read only the header of each of `paths` that ends in .safetensors, and all other files whole.
 * Check each block. Errors: as sw_checkpoint_read; SW_E_INVALID for a path not in the manifest. */
SW_MUST_USE sw_status sw_catalog_read(const char *folder, const sw_manifest *manifest,
                                      const char *const *paths, size_t count, sw_catalog *catalog,
                                      sw_error *err);

/* Copy a catalog that another rank has read, and parse the manifest in it. SW_E_INVALID: not a
 * catalog. */
SW_MUST_USE sw_status sw_catalog_copy(const void *data, size_t size_bytes, sw_catalog *catalog,
                                      sw_manifest *manifest, sw_error *err);

/* Return a file's bytes in the catalog; NULL: it has none. Borrowed. */
const uint8_t *sw_catalog_find(const sw_catalog *catalog, const char *path, size_t *size_bytes);

void sw_catalog_fini(sw_catalog *catalog);

#endif
