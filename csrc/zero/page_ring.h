/* page_ring.h - few warm pages for many address ranges.
 *
 * A parameter's address must not change while autograd holds views of it, but its pages may. A
 * range in use is mapped onto chunks of one memfd. A range not in use is mapped privately onto a
 * small file of 0xff bytes, which is NaN in every floating-point format: a premature read returns
 * NaN. A write to it goes to private pages, which sw_page_ring_find_write finds. The lowest free
 * chunks are taken first, so that few chunks stay warm in the kernel's caches and page tables. The
 * kernel must zero new pages, which costs more than filling them.
 *
 * Memory: as many chunks as were ever in use at once. Free chunks beyond `warm_bytes` are given
 * back to the kernel.
 *
 * Thread rule: one at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_PAGE_RING_CHUNK_BYTES = 2 << 20, SW_PAGE_RING_BLANK_BYTES = 2 << 20 };

typedef struct sw_page_ring {
    int fd, blank_fd, watch; /* owned; -1: none */
    size_t chunk_count, warm_chunks;
    uint8_t *taken; /* owned; one a chunk */
    size_t in_use, most_in_use;
    bool is_warm; /* the first `warm_chunks` were populated */
} sw_page_ring;

/* Return the chunks that a range of `size_bytes` takes. */
size_t sw_page_ring_chunks(size_t size_bytes);

/* Return the bytes of addresses that a range of `size_bytes` takes: whole pages, or whole chunks
 * from one chunk on, so that huge pages can back all of it. */
size_t sw_page_ring_span(size_t size_bytes);

/* Create a ring for ranges that need `chunk_count` chunks in total when all are in use. */
SW_MUST_USE sw_status sw_page_ring_init(sw_page_ring *ring, size_t chunk_count, size_t warm_bytes,
                                        const char *label, sw_error *err);
void sw_page_ring_fini(sw_page_ring *ring);

/* Map pages at [address, address + span of size_bytes), a reserved range, and write the numbers of
 * its sw_page_ring_chunks(size_bytes) chunks to `chunks`. Contents are undefined. On failure the
 * range is blank. */
SW_MUST_USE sw_status sw_page_ring_map(sw_page_ring *ring, uint8_t *address, size_t size_bytes,
                                       uint32_t *chunks, sw_error *err);
/* Make a range blank: it reads as NaN, and writes to it are lost. Frees `chunks`, the numbers that
 * map wrote; NULL if the range has none. On failure the range may be partly blank and keeps its
 * chunks. */
SW_MUST_USE sw_status sw_page_ring_blank(sw_page_ring *ring, uint8_t *address, size_t size_bytes,
                                         const uint32_t *chunks, sw_error *err);
/* Return the first byte of a blank range that was changed; SIZE_MAX if none was seen. */
size_t sw_page_ring_find_write(const sw_page_ring *ring, const uint8_t *address, size_t size_bytes);
