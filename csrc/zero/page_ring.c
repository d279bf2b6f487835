/* page_ring.c - map ranges onto chunks of a memfd or onto the blank file; see page_ring.h. */
#include "zero/page_ring.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "platform/memory.h"

static const size_t chunk_bytes = SW_PAGE_RING_CHUNK_BYTES, blank_bytes = SW_PAGE_RING_BLANK_BYTES;
static const uint8_t blank_byte = 0xff;

size_t sw_page_ring_chunks(size_t size_bytes)
{
    return size_bytes / chunk_bytes + (size_bytes % chunk_bytes != 0);
}

size_t sw_page_ring_span(size_t size_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE),
           unit = size_bytes < chunk_bytes ? page : chunk_bytes;
    return (size_bytes + unit - 1) / unit * unit;
}

/* Create the file behind blank ranges. Its bytes are written once, here. */
static sw_status make_blank(int *fd, const char *label, sw_error *err)
{
    uint8_t *bytes;
    SW_TRY(sw_memfd_create(blank_bytes, label, fd, err));
    SW_TRY(sw_memfd_map(*fd, blank_bytes, &bytes, err));
    memset(bytes, blank_byte, blank_bytes);
    sw_memory_unmap(bytes, blank_bytes);
    return SW_OK;
}

/* Allocate the first pages that units use, as huge pages if the kernel can. Not before a unit is
 * mapped: parameters are loaded before, and need the memory then. */
static void warm(sw_page_ring *ring)
{
    uint8_t *bytes;
    size_t size_bytes = ring->warm_chunks * chunk_bytes;
    sw_error ignored;
    if (ring->is_warm || size_bytes == 0)
        return;
    ring->is_warm = true;
    if (sw_memfd_map(ring->fd, size_bytes, &bytes, &ignored) != SW_OK)
        return;
    sw_memory_populate(bytes, size_bytes);
    sw_memory_unmap(bytes, size_bytes);
}

sw_status sw_page_ring_init(sw_page_ring *ring, size_t chunk_count, size_t warm_bytes,
                            const char *label, sw_error *err)
{
    sw_status status;
    *ring = (sw_page_ring){.fd = -1, .blank_fd = -1, .watch = -1, .chunk_count = chunk_count};
    if (chunk_count == 0)
        return SW_OK;
    ring->warm_chunks = sw_size_min(sw_page_ring_chunks(warm_bytes), chunk_count);
    ring->taken = calloc(chunk_count, sizeof *ring->taken);
    if (!ring->taken)
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for a table of %zu chunks", label, chunk_count);
    SW_TRY_GOTO(status, sw_memfd_create(chunk_count * chunk_bytes, label, &ring->fd, err), failed);
    SW_TRY_GOTO(status, make_blank(&ring->blank_fd, label, err), failed);
    ring->watch = sw_memory_watch();
    return SW_OK;
failed:
    sw_page_ring_fini(ring);
    return status;
}

void sw_page_ring_fini(sw_page_ring *ring)
{
    if (ring->fd >= 0)
        close(ring->fd);
    if (ring->blank_fd >= 0)
        close(ring->blank_fd);
    if (ring->watch >= 0)
        close(ring->watch);
    free(ring->taken);
    *ring = (sw_page_ring){.fd = -1, .blank_fd = -1, .watch = -1};
}

static void take(sw_page_ring *ring, size_t count, uint32_t *chunks)
{
    size_t found = 0;
    for (size_t i = 0; i < ring->chunk_count && found < count; ++i) {
        if (ring->taken[i])
            continue;
        ring->taken[i] = 1;
        chunks[found++] = (uint32_t)i;
    }
    ring->in_use += count;
    ring->most_in_use = sw_size_max(ring->most_in_use, ring->in_use);
}

static void give_back(sw_page_ring *ring, size_t count, const uint32_t *chunks)
{
    for (size_t i = 0; i < count; ++i) {
        ring->taken[chunks[i]] = 0;
        if (chunks[i] >= ring->warm_chunks)
            sw_memory_discard(ring->fd, chunks[i] * chunk_bytes, chunk_bytes);
    }
    ring->in_use -= count;
}

static sw_status show_blank(const sw_page_ring *ring, uint8_t *address, size_t size_bytes,
                            sw_error *err)
{
    for (size_t at = 0; at < size_bytes; at += blank_bytes)
        SW_TRY(sw_memory_remap(address + at, sw_size_min(blank_bytes, size_bytes - at),
                               ring->blank_fd, 0, false, err));
    return SW_OK;
}

sw_status sw_page_ring_map(sw_page_ring *ring, uint8_t *address, size_t size_bytes,
                           uint32_t *chunks, sw_error *err)
{
    size_t size = sw_page_ring_span(size_bytes), count = sw_page_ring_chunks(size_bytes);
    if (count > ring->chunk_count - ring->in_use)
        SW_FAIL(err, SW_E_STATE, "a range of %zu chunks does not fit a ring with %zu of %zu free",
                count, ring->chunk_count - ring->in_use, ring->chunk_count);
    warm(ring);
    take(ring, count, chunks);
    for (size_t i = 0, run; i < count; i += run) { /* one mapping for contiguous chunks */
        for (run = 1; i + run < count && chunks[i + run] == chunks[i] + run; ++run)
            ;
        size_t at = i * chunk_bytes;
        sw_status status = sw_memory_remap(address + at, sw_size_min(run * chunk_bytes, size - at),
                                           ring->fd, chunks[i] * chunk_bytes, true, err);
        if (status == SW_OK)
            continue;
        sw_error second;
        if (show_blank(ring, address, at, &second) ==
            SW_OK) /* on failure they stay mapped, so they stay in use */
            give_back(ring, count, chunks);
        return status;
    }
    return SW_OK;
}

sw_status sw_page_ring_blank(sw_page_ring *ring, uint8_t *address, size_t size_bytes,
                             const uint32_t *chunks, sw_error *err)
{
    SW_TRY(show_blank(ring, address, sw_page_ring_span(size_bytes), err));
    if (chunks)
        give_back(ring, sw_page_ring_chunks(size_bytes), chunks);
    return SW_OK;
}

size_t sw_page_ring_find_write(const sw_page_ring *ring, const uint8_t *address, size_t size_bytes)
{
    return sw_memory_find_write(ring->watch, address, sw_page_ring_span(size_bytes), blank_byte);
}
