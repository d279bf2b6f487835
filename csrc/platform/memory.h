/* memory.h - memory that other processes can map: sealed memfds.
 *
 * A memfd has no name in any file system, so a killed process leaves nothing behind. Its size is
 * sealed, so no peer can make another's mapping fault by shrinking it.
 *
 * Thread rule: any; a mapping belongs to its owner.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Creates a memfd of `size_bytes` > 0 with a sealed size, close-on-exec. Pages are allocated when
 * touched. SW_E_MEMORY names the limit that was hit (RLIMIT_FSIZE, RLIMIT_NOFILE, memory.max).
 */
SW_MUST_USE sw_status sw_memfd_create(size_t size_bytes, const char *label, int *fd, sw_error *err);

/* The same for `count` parts, each touched by a different process, so one process's memory limit
 * bounds only part_bytes. Part r begins at r * sw_memfd_stride(part_bytes). */
SW_MUST_USE sw_status sw_memfd_create_parts(size_t part_bytes, int count, const char *label,
                                            int *fd, sw_error *err);

/* Returns the bytes from one part to the next: whole pages, or whole huge pages if a part is that
 * large. 0 on overflow. */
size_t sw_memfd_stride(size_t part_bytes);

/* Checks that `fd` is sealed and has at least `size_bytes`, and maps it shared. The caller keeps
 * fd. */
SW_MUST_USE sw_status sw_memfd_map(int fd, size_t size_bytes, uint8_t **address, sw_error *err);

/* Maps private zeroed memory of one rank. Pages are allocated when touched. */
SW_MUST_USE sw_status sw_pages_map(size_t size_bytes, uint8_t **address, sw_error *err);

/* Requests huge pages for the untouched parts of a range that cover whole ones. A hint. */
void sw_memory_prefer_huge(uint8_t *address, size_t size_bytes);

/* Reserves an address range without memory, aligned to huge pages if it is that large; NULL with
 * errno on failure. Release it with sw_memory_unmap. */
uint8_t *sw_memory_reserve(size_t size_bytes);

/* Maps `size_bytes` of `fd` from `offset_bytes` (multiples of the page size, like `address`) over a
 * reserved range, atomically. SW_E_MEMORY: the old pages stay. `shared`: the file's pages, present
 * at once. Else a private view: pages are allocated when touched, other processes do not see
 * writes, and the next remap discards them. */
SW_MUST_USE sw_status sw_memory_remap(uint8_t *address, size_t size_bytes, int fd,
                                      size_t offset_bytes, bool shared, sw_error *err);

/* Returns the file descriptor that sw_memory_find_write needs, owned by the caller; -1 if the
 * system has none. It is valid in this process, not in its children. */
int sw_memory_watch(void);

/* Returns the offset of the first byte that differs from `byte` in a private view (sw_memory_remap)
 * of a file filled with `byte`; SIZE_MAX if there is none or it is unknown. Cost: reads 8 bytes for
 * each page, and the written pages. */
size_t sw_memory_find_write(int watch, const uint8_t *address, size_t size_bytes, uint8_t byte);

/* Frees the pages of a range of `fd`; a hint. */
void sw_memory_discard(int fd, size_t offset_bytes, size_t size_bytes);

/* Replaces the pages that hold `size_bytes` from `address`, of any mapping, by private ones with
 * the same contents. Other threads must not write there meanwhile. SW_E_MEMORY: the old pages stay.
 */
SW_MUST_USE sw_status sw_memory_own(uint8_t *address, size_t size_bytes, sw_error *err);

/* Unmaps any of these mappings. NULL is allowed. */
void sw_memory_unmap(uint8_t *address, size_t size_bytes);

/* Makes the pages of a private range present and keeps their contents. Other threads may read and
 * write them meanwhile. A hint. */
void sw_memory_touch(uint8_t *address, size_t size_bytes);

/* Makes the pages of a range present and writable, so that the first step does not pay for them,
 * as huge pages if the kernel can collapse (Linux >= 6.1), for at most two seconds. Cost: 0.1 s of
 * processor time a GiB; 0.4 of small pages. A hint: a failure is silent, and pages are then
 * allocated when touched or stay small. */
void sw_memory_populate(uint8_t *address, size_t size_bytes);
