/* memory.h - memory that other processes can map: sealed memfds.
 *
 * A memfd has no name in any file system, so a killed process leaves nothing behind. Its size is
 * sealed, so no peer can make another's mapping fault by shrinking it.
 *
 * Thread rule: any; a mapping belongs to its owner.
 */
#ifndef SW_PLATFORM_MEMORY_H
#define SW_PLATFORM_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* A new memfd of `size_bytes` > 0, sealed against a change of size, close-on-exec. Pages come when
 * touched. SW_E_MEMORY names the limit that forbids it (RLIMIT_FSIZE, RLIMIT_NOFILE, memory.max).
 */
SW_MUST_USE sw_status sw_memfd_create(size_t size_bytes, const char *label, int *fd, sw_error *err);

/* The same for `count` parts, each of them touched by a process of its own: one memory limit bounds
 * only part_bytes. Part r begins at r * sw_memfd_stride(part_bytes). */
SW_MUST_USE sw_status sw_memfd_create_parts(size_t part_bytes, int count, const char *label,
                                            int *fd, sw_error *err);

/* From one part to the next: whole pages, and whole huge ones where a part is that large. 0 on
 * overflow. */
size_t sw_memfd_stride(size_t part_bytes);

/* Checks that `fd` is sealed and holds at least `size_bytes`, and maps it shared. The caller keeps
 * fd. */
SW_MUST_USE sw_status sw_memfd_map(int fd, size_t size_bytes, uint8_t **address, sw_error *err);

/* Private zeroed pages, for one rank alone. Pages come when touched. */
SW_MUST_USE sw_status sw_pages_map(size_t size_bytes, uint8_t **address, sw_error *err);

/* Asks for huge pages where a range covers them whole and nothing was touched yet. A hint. */
void sw_memory_prefer_huge(uint8_t *address, size_t size_bytes);

/* Reserves an address range without memory, on a huge page's boundary if it is that large;
 * NULL with errno where there is none. Ended by sw_memory_unmap. */
uint8_t *sw_memory_reserve(size_t size_bytes);

/* Puts `size_bytes` of `fd` from `offset_bytes` (multiples of the page size, as `address`) over
 * whatever lies in a reserved range, in one step. SW_E_MEMORY: the old pages stay.
 * `shared`: the file's own pages, there at once. Else a private view of them, whose pages come when
 * touched: no other process sees writes to
 * it, and they are gone at the next remap. */
SW_MUST_USE sw_status sw_memory_remap(uint8_t *address, size_t size_bytes, int fd,
                                      size_t offset_bytes, bool shared, sw_error *err);

/* Returns the file descriptor that sw_memory_find_write needs: owned, ended by close; -1 where the
 * system has none. It is of this process, not of its children. */
int sw_memory_watch(void);

/* Returns the offset of the first byte that differs from `byte` in a private view (sw_memory_remap)
 * of a file filled with `byte`; SIZE_MAX if there is none or it is unknown. Cost: 8 bytes read a
 * page, and pages that were written to. */
size_t sw_memory_find_write(int watch, const uint8_t *address, size_t size_bytes, uint8_t byte);

/* Allows or forbids writes to a mapping; a write to one that may not is a SIGSEGV. `address` as it
 * was mapped. */
SW_MUST_USE sw_status sw_memory_protect(uint8_t *address, size_t size_bytes, bool writable,
                                        sw_error *err);

/* Gives the pages of a range of `fd` back to the system; a hint. */
void sw_memory_discard(int fd, size_t offset_bytes, size_t size_bytes);

/* Ends either mapping. NULL is allowed. */
void sw_memory_unmap(uint8_t *address, size_t size_bytes);

/* Makes the pages of a private range present now, without a change of what is in them. Any thread
 * may read and write them meanwhile. A hint. */
void sw_memory_touch(uint8_t *address, size_t size_bytes);

/* Makes the pages of a range present and writable now, so that the first step does not pay for
 * them, and gathers them into huge pages where the kernel can (Linux >= 6.1), for two seconds at
 * most. A hint: failing is silent, the pages then come when touched, or stay small. */
void sw_memory_populate(uint8_t *address, size_t size_bytes);

#endif
