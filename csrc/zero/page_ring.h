/* page_ring.h - few warm pages for many address ranges.
 *
 * Idea: a parameter's address must not change while autograd holds views of it, but its pages may.
 * A range that is in use is mapped onto chunks of one memfd; a range that is not, onto a private
 * view of a small file of 0xff bytes, which is NaN in every floating-point format: who reads there
 * too early reads NaN; who writes there writes to pages of his own, which sw_page_ring_find_write
 * finds. The lowest free chunks are taken first, so that a few stay in the caches and page tables
 * of the kernel: pages that come anew have to be zeroed first, which costs more than filling them.
 *
 * Memory: as many chunks as were ever in use at once; of these, what lies beyond `warm_bytes` is
 * given back when it is free.
 *
 * Thread rule: one at a time.
 */
#ifndef SW_ZERO_PAGE_RING_H
#define SW_ZERO_PAGE_RING_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_PAGE_RING_CHUNK_BYTES = 2 << 20, SW_PAGE_RING_BLANK_BYTES = 2 << 20 };

typedef struct sw_page_ring {
    int fd, blank_fd, watch; /* owned; -1: none */
    size_t chunk_count, warm_chunks;
    uint8_t *taken; /* owned; one a chunk */
    size_t in_use, most_in_use;
} sw_page_ring;

/* Chunks that a range of `size_bytes` takes. */
size_t sw_page_ring_chunks(size_t size_bytes);

/* Bytes of addresses that a range of `size_bytes` takes: whole pages, and from one chunk on whole
 * chunks, so that huge pages can lie behind all of it. */
size_t sw_page_ring_span(size_t size_bytes);

/* For ranges of `chunk_count` chunks together, all in use at once. */
SW_MUST_USE sw_status sw_page_ring_init(sw_page_ring *ring, size_t chunk_count, size_t warm_bytes,
                                        const char *label, sw_error *err);
void sw_page_ring_fini(sw_page_ring *ring);

/* Puts pages behind [address, address + span of size_bytes), which is a reserved range. `chunks`:
 * sw_page_ring_chunks(size_bytes) numbers, written. Contents are undefined. On failure the range is
 * blank. */
SW_MUST_USE sw_status sw_page_ring_map(sw_page_ring *ring, uint8_t *address, size_t size_bytes,
                                       uint32_t *chunks, sw_error *err);
/* Makes a range blank: what it reads is NaN, and what is written there is nobody's. `chunks`: what
 * map wrote, now free; NULL: it has none. On failure it may be blank in part, and keeps its chunks.
 */
SW_MUST_USE sw_status sw_page_ring_blank(sw_page_ring *ring, uint8_t *address, size_t size_bytes,
                                         const uint32_t *chunks, sw_error *err);
/* The first byte of a blank range that was changed; SIZE_MAX: none was seen. */
size_t sw_page_ring_find_write(const sw_page_ring *ring, const uint8_t *address, size_t size_bytes);

#endif
