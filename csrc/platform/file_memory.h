/* file_memory.h - memory that processes share, with a home on a disk: a nameless file, mapped.
 *
 * Writes go through the mapping. Large reads go through the descriptor into memory of the caller:
 * the kernel keeps both alike, a failed read is an error instead of a signal, and no page of the
 * mapping becomes present. The page cache lies between, so a host with free memory reads what it
 * wrote from there. The file ends with its last descriptor and mapping.
 *
 * Left out: how a descriptor gets to other processes (comm/shm.c). A failed disk raises SIGBUS
 * where the mapping is touched, as for each mapped file.
 *
 * Thread rule: any; the object belongs to its owner.
 */
#pragma once

#include "platform/file.h"

typedef struct sw_file_memory {
    int fd;         /* owned; -1 in a forked child */
    uint8_t *begin; /* owned mapping; NULL before sw_file_memory_map */
    size_t size_bytes;
    char path[SW_PATH_BYTES]; /* in messages */
} sw_file_memory;

/* Name the file, which this process or another creates, in `folder`. SW_E_INVALID: too long. */
SW_MUST_USE sw_status sw_file_memory_init(sw_file_memory *memory, const char *folder,
                                          const char *label, size_t size_bytes, sw_error *err);
/* Create it with its disk space, zeroed. SW_E_OS names the folder and the reason (ENOSPC, EACCES,
 * ENOENT), SW_E_MEMORY a limit of file sizes or descriptors. */
SW_MUST_USE sw_status sw_file_memory_create(sw_file_memory *memory, const char *folder,
                                            sw_error *err);
/* Map the file of memory->fd, which this process or another has created, whole. Its pages are huge
 * where the file system has them: one fault and one entry of the page cache for 512 small ones. */
SW_MUST_USE sw_status sw_file_memory_map(sw_file_memory *memory, sw_error *err);
void sw_file_memory_fini(sw_file_memory *memory);

/* Copy [from, + size_bytes), of the mapping, to `to`. SW_E_OS names the file and the reason. */
SW_MUST_USE sw_status sw_file_memory_read(const sw_file_memory *memory, void *to,
                                          const uint8_t *from, size_t size_bytes, sw_error *err);
/* Let the kernel read a range of the mapping into the page cache meanwhile; a hint. */
void sw_file_memory_read_ahead(const sw_file_memory *memory, const uint8_t *from,
                               size_t size_bytes);
/* Begin to write changed pages of a range to the disk, once what the last call began is there, and
 * let this process's pages of it go. SW_E_OS if the disk refused any. */
SW_MUST_USE sw_status sw_file_memory_write_back(const sw_file_memory *memory, uint8_t *begin,
                                                size_t size_bytes, sw_error *err);
/* Return true if the folder's file system keeps files in memory (tmpfs, ramfs). */
bool sw_file_memory_is_ram(const sw_file_memory *memory);
