/* kernel_image.h - finding the image of the device kernels for one GPU: packaged, cached, compiled.
 *
 *   <folder>/shardwright-<hash>-sm_<arch>.image
 *     bytes 0..7    "SWIMAGE1"
 *     bytes 8..11   CRC32C of all that follows byte 15, little-endian
 *     bytes 12..15  zero
 *     bytes 16..    a cubin or PTX, as the driver's cuModuleLoadData takes it (PTX with its zero)
 *
 * A file is valid if and only if it has the name, the eight bytes and the checksum; another is as
 * good as none and is replaced. The hash covers the kernels' text and options, so a file never
 * becomes stale. It is written under a name of its own and renamed: readers see all of it or
 * nothing, and two writers write the same bytes. The cache folder is made 0700 and used only if it
 * is the user's own and nobody else may write to it, since its contents run on the GPU.
 *
 * Thread rule: any.
 */
#ifndef SW_KERNELS_KERNEL_IMAGE_H
#define SW_KERNELS_KERNEL_IMAGE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum sw_image_origin {
    SW_IMAGE_NONE = 0,
    SW_IMAGE_PACKAGED,
    SW_IMAGE_CACHED,
    SW_IMAGE_COMPILED,          /* and put into the cache */
    SW_IMAGE_COMPILED_UNCACHED, /* the cache could not be used: the next process compiles again */
} sw_image_origin;

typedef struct sw_image_places { /* where to look, in this order; each may be NULL: not there */
    const char *packaged_folder;
    const char *cache_folder; /* made if it is missing (its parent is not) */
    const char *nvrtc;        /* path or soname of the compiler */
    const char *nvrtc_builtins;
} sw_image_places;

typedef struct sw_image {
    void *data; /* owned */
    size_t size_bytes;
    sw_image_origin origin;
} sw_image;

/* SW_E_UNSUPPORTED says for each place why it has no image; SW_E_STATE when the text does not
 * compile; SW_E_MEMORY. Cost: a file of some 500 KB read, or some seconds of the compiler. */
SW_MUST_USE sw_status sw_image_find(sw_image *image, int major, int minor,
                                    const sw_image_places *places, sw_error *err);
void sw_image_fini(sw_image *image);

/* The hash in the files' names: FNV-1a, 64 bits, over the kernels' text and its options. */
uint64_t sw_image_hash(void);

/* "packaged", "cached", "compiled", "compiled, not cached"; never NULL. */
const char *sw_image_origin_name(sw_image_origin origin);

#endif
