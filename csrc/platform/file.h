/* file.h - files and folders for data that must survive a crash. Every call is checked; every error
 * names the operation, the path and errno (detail). No file is opened through a link in the last
 * component of its path.
 *
 * Thread rule: any; one thread at a time a descriptor, except for reads and writes at an offset.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/status.h"

enum { SW_FILE_ALIGNMENT_BYTES = 4096, SW_PATH_BYTES = 4096 };

/* The kernel's page, at least SW_FILE_ALIGNMENT_BYTES: a page of a file that is written both with
 * and without the page cache may lose bytes. */
size_t sw_file_page_bytes(void);

/* Opens a new file for writing; SW_E_OS (EEXIST) if the name exists. */
SW_MUST_USE sw_status sw_file_create(const char *path, int *fd, sw_error *err);

/* Takes a lock on a whole file that is open for writing, without waiting. It belongs to the open
 * file: another descriptor of the same file, in this process too, does not end it. *is_taken: false
 * if another open file has it. Uses flock(2) where the system has no locks of open files (gVisor).
 * SW_E_OS: the file system has no locks. */
SW_MUST_USE sw_status sw_file_lock(int fd, const char *path, bool *is_taken, sw_error *err);

/* Opens a new empty file in `folder` for reading and writing, without a name: it ends with its last
 * descriptor and mapping. With `direct` it bypasses the page cache if the file system can. `path`:
 * its name in messages, and briefly on disk if the file system has no unnamed files. */
SW_MUST_USE sw_status sw_file_create_nameless(const char *folder, const char *path, bool direct,
                                              int *fd, sw_error *err);

/* Gives a range of a file, which the caller overwrites, disk space. If the file system cannot
 * allocate, zeros are written. */
SW_MUST_USE sw_status sw_file_reserve(int fd, const char *path, uint64_t offset,
                                      uint64_t size_bytes, sw_error *err);

/* Appends `more_bytes` to the file's `size_bytes`, both whole pages. They are zeroed and have disk
 * space; if the file system cannot allocate, zeros are written. After an error the file is
 * unchanged. */
SW_MUST_USE sw_status sw_file_extend(int fd, const char *path, uint64_t size_bytes,
                                     uint64_t more_bytes, sw_error *err);

/* Truncates the file to `size_bytes`, if the file system can. */
void sw_file_shorten(int fd, uint64_t size_bytes);

/* Sets the file's size and allocates disk space; sets only the size if the file system cannot
 * allocate.
 */
SW_MUST_USE sw_status sw_file_allocate(int fd, const char *path, uint64_t size_bytes,
                                       sw_error *err);

/* Opens an existing regular file for writing. With `direct` it bypasses the page cache if the file
 * system can. */
SW_MUST_USE sw_status sw_file_open_write(const char *path, bool direct, int *fd, sw_error *err);

/* Opens an existing regular file for reading and returns its size; `direct` as in
 * sw_file_open_write. */
SW_MUST_USE sw_status sw_file_open_read(const char *path, bool direct, int *fd,
                                        uint64_t *size_bytes, sw_error *err);

/* Writes all of `parts` (which it modifies) at `offset`. A direct descriptor uses the page cache
 * once the system has refused an alignment. */
SW_MUST_USE sw_status sw_file_write_at(int fd, const char *path, struct iovec *parts,
                                       int part_count, uint64_t offset, sw_error *err);

/* Reads exactly `size_bytes`; SW_E_OS with EIO if the file is shorter. Direct descriptors as in
 * sw_file_write_at. */
SW_MUST_USE sw_status sw_file_read_at(int fd, const char *path, void *data, size_t size_bytes,
                                      uint64_t offset, sw_error *err);

/* True if reads and writes of the descriptor bypass the page cache. */
bool sw_file_is_direct(int fd);

/* True if a page-aligned range of an open file is in the page cache, or if that is unknown. */
bool sw_file_is_cached(int fd, uint64_t offset, size_t size_bytes);

SW_MUST_USE sw_status sw_file_sync(int fd, const char *path, sw_error *err);

/* Closes *fd (-1: no effect) and sets it to -1. */
SW_MUST_USE sw_status sw_file_close(int *fd, const char *path, sw_error *err);
/* Does so after calls that ended with `status`. Returns the first failure. */
SW_MUST_USE sw_status sw_file_close_after(int *fd, const char *path, sw_status status,
                                          sw_error *err);

/* Writes a new file with these bytes, durable when `sync`. */
SW_MUST_USE sw_status sw_file_write_new(const char *path, const void *data, size_t size_bytes,
                                        bool sync, sw_error *err);

/* Reads the whole file into malloc'ed memory and appends a zero byte; SW_E_INVALID if it is larger
 * than `limit_bytes`. */
SW_MUST_USE sw_status sw_file_read_whole(const char *path, uint64_t limit_bytes, char **data,
                                         size_t *size_bytes, sw_error *err);

bool sw_file_exists(const char *path);

SW_MUST_USE sw_status sw_folder_create(const char *path, sw_error *err);
/* Makes the folder `path` and missing ones above it; durable when this returns. */
SW_MUST_USE sw_status sw_folder_make(const char *path, sw_error *err);
/* Makes the folder's names durable; without an effect if the file system cannot (CIFS, some FUSE).
 */
SW_MUST_USE sw_status sw_folder_sync(const char *path, sw_error *err);
SW_MUST_USE sw_status sw_file_remove(const char *path, sw_error *err);
SW_MUST_USE sw_status sw_file_rename(const char *from, const char *to, sw_error *err);

/* Swaps two names atomically; *swapped is false, without an effect, if the system cannot. */
SW_MUST_USE sw_status sw_file_exchange(const char *a, const char *b, bool *swapped, sw_error *err);

/* Removes a file, a link, or a folder with its contents, three folders deep. Goes on after a
 * failure; SW_E_OS names the first. A missing path is not a failure. */
SW_MUST_USE sw_status sw_folder_remove(const char *path, sw_error *err);

/* Calls back with each entry's name until the callback returns false. SW_E_OS if the folder cannot
 * be read. */
SW_MUST_USE sw_status sw_folder_list(const char *path,
                                     bool (*entry)(void *context, const char *name), void *context,
                                     sw_error *err);

/* Returns the folder of `path`; "." if it names none. */
SW_MUST_USE sw_status sw_path_parent(const char *path, char parent[SW_PATH_BYTES], sw_error *err);

/* Writes "folder/name"; SW_E_INVALID if that is too long. */
SW_MUST_USE sw_status sw_path_join(char path[SW_PATH_BYTES], const char *folder, const char *name,
                                   sw_error *err);
