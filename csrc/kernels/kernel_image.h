/* kernel_image.h - find the image of the device kernels for one GPU: packaged, cached or compiled.
 *
 *   <folder>/shardwright-<hash>-sm_<arch>-nvrtc<major>.<minor>.image
 *     bytes 0..7    "SWIMAGE1"
 *     bytes 8..11   CRC32C of all bytes from 16 on, little-endian
 *     bytes 12..15  zero
 *     bytes 16..    a cubin or PTX, as the driver's cuModuleLoadData takes it (PTX with its zero)
 *
 * A file is valid if and only if it has the name, the eight bytes and the checksum. An invalid file
 * is ignored and replaced. The hash covers the kernels' text and options, so a file never becomes
 * stale. Hosts with different compilers may share a home: in the cache each looks for its own
 * compiler's file. Without a compiler, and among packaged files, the oldest compiler's is taken,
 * since a driver loads images of compilers up to its own version; a name without a version counts
 * as older. A file is written under a unique name and renamed: a reader sees all of it or nothing,
 * and two writers write the same bytes. The cache folder is created with mode 0700. It is used only
 * if the user owns it and no other user may write to it, since its contents run on the GPU.
 *
 * Thread rule: any.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum sw_image_origin {
    SW_IMAGE_NONE = 0,
    SW_IMAGE_PACKAGED,
    SW_IMAGE_CACHED,
    SW_IMAGE_COMPILED,          /* and written to the cache */
    SW_IMAGE_COMPILED_UNCACHED, /* the cache cannot be used: the next process compiles again */
} sw_image_origin;

typedef struct sw_image_places { /* searched in this order; each may be NULL */
    const char *packaged_folder;
    const char *cache_folder; /* created if it is missing; its parent must exist */
    const char *nvrtc;        /* path or soname of the compiler */
    const char *nvrtc_builtins;
    bool replaces_cached; /* the driver refused the cached file: compile anew and replace it */
} sw_image_places;

typedef struct sw_image {
    void *data; /* owned */
    size_t size_bytes;
    sw_image_origin origin;
} sw_image;

/* Find or compile an image. SW_E_UNSUPPORTED says for each place why it has no image; SW_E_STATE if
 * the text does not compile; SW_E_MEMORY. Cost: opening the compiler and reading
 * some 500 KB, or some seconds to compile. */
SW_MUST_USE sw_status sw_image_find(sw_image *image, int major, int minor,
                                    const sw_image_places *places, sw_error *err);
void sw_image_fini(sw_image *image);

/* Return the hash in the files' names: FNV-1a, 64 bits, over the kernels' text and options. */
uint64_t sw_image_hash(void);

/* Return "packaged", "cached", "compiled" or "compiled, not cached". */
const char *sw_image_origin_name(sw_image_origin origin);
