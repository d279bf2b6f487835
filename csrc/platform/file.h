/* file.h - files and folders, for what must survive a crash: every call is checked, every error
 * names the operation, the path and errno (detail). No file is opened through a link in the last
 * component of its path.
 *
 * Thread rule: any; a descriptor belongs to one thread, but for reads and writes at given places.
 */
#ifndef SW_PLATFORM_FILE_H
#define SW_PLATFORM_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/status.h"

enum { SW_FILE_ALIGNMENT_BYTES = 4096, SW_PATH_BYTES = 4096 };

/* Opens a new file for writing; SW_E_OS (EEXIST) when the name is taken. */
SW_MUST_USE sw_status sw_file_create(const char *path, int *fd, sw_error *err);

/* Takes a lock on a whole file that is open for writing, without waiting. It belongs to the open
 * file: another descriptor of the same file, in this process too, does not end it. *is_taken: false
 * if another open file has it. SW_E_OS: the file system has no locks. */
SW_MUST_USE sw_status sw_file_lock(int fd, const char *path, bool *is_taken, sw_error *err);

/* Opens a new empty file in `folder` for reading and writing, without a name: it goes with its last
 * descriptor and mapping. Past the page cache when `direct` and the file system allows it. `path`:
 * its name in messages, and for a moment where the file system has no nameless ones. */
SW_MUST_USE sw_status sw_file_create_nameless(const char *folder, const char *path, bool direct,
                                              int *fd, sw_error *err);

/* Adds `more_bytes` behind the file's `size_bytes`, both whole pages. They are zeroed and have
 * their disk space; they are written where the file system cannot allocate. After an error the file
 * is as before. */
SW_MUST_USE sw_status sw_file_extend(int fd, const char *path, uint64_t size_bytes,
                                     uint64_t more_bytes, sw_error *err);

/* Cuts the file after `size_bytes`, where the file system can. */
void sw_file_shorten(int fd, uint64_t size_bytes);

/* Gives the file its size and its disk space; only its size where the file system cannot allocate.
 */
SW_MUST_USE sw_status sw_file_allocate(int fd, const char *path, uint64_t size_bytes,
                                       sw_error *err);

/* Opens an existing regular file for writing; past the page cache when `direct` and the file system
 * allows it. */
SW_MUST_USE sw_status sw_file_open_write(const char *path, bool direct, int *fd, sw_error *err);

/* Opens an existing regular file for reading, and gets its size; past the page cache as
 * sw_file_open_write. */
SW_MUST_USE sw_status sw_file_open_read(const char *path, bool direct, int *fd,
                                        uint64_t *size_bytes, sw_error *err);

/* Writes all of `parts` (changed on the way) at `offset`. A descriptor opened past the page cache
 * goes through it from the moment that the system refuses an alignment. */
SW_MUST_USE sw_status sw_file_write_at(int fd, const char *path, struct iovec *parts,
                                       int part_count, uint64_t offset, sw_error *err);

/* Reads exactly `size_bytes`; SW_E_OS with EIO when the file ends before. Past the page cache as
 * sw_file_write_at. */
SW_MUST_USE sw_status sw_file_read_at(int fd, const char *path, void *data, size_t size_bytes,
                                      uint64_t offset, sw_error *err);

/* True if reads and writes of the descriptor go past the page cache. */
bool sw_file_is_direct(int fd);

/* True if a range of an open file, from a whole page on, is in the page cache, or if that is
 * unknown. */
bool sw_file_is_cached(int fd, uint64_t offset, size_t size_bytes);

SW_MUST_USE sw_status sw_file_sync(int fd, const char *path, sw_error *err);

/* Closes *fd (-1: nothing to do) and makes it -1. */
SW_MUST_USE sw_status sw_file_close(int *fd, const char *path, sw_error *err);

/* Writes a new file with these bytes, durable when `sync`. */
SW_MUST_USE sw_status sw_file_write_new(const char *path, const void *data, size_t size_bytes,
                                        bool sync, sw_error *err);

/* Reads the whole file into malloc'ed memory with a zero byte behind it; SW_E_INVALID when larger
 * than `limit_bytes`. */
SW_MUST_USE sw_status sw_file_read_whole(const char *path, uint64_t limit_bytes, char **data,
                                         size_t *size_bytes, sw_error *err);

bool sw_file_exists(const char *path);

SW_MUST_USE sw_status sw_folder_create(const char *path, sw_error *err);
/* The folder `path` and those above it, as far as they are missing, durable when this returns. */
SW_MUST_USE sw_status sw_folder_make(const char *path, sw_error *err);
SW_MUST_USE sw_status sw_folder_sync(const char *path, sw_error *err);
SW_MUST_USE sw_status sw_file_remove(const char *path, sw_error *err);
SW_MUST_USE sw_status sw_file_rename(const char *from, const char *to, sw_error *err);

/* Swaps two names in one step; *swapped is false, and nothing was done, where the system cannot. */
SW_MUST_USE sw_status sw_file_exchange(const char *a, const char *b, bool *swapped, sw_error *err);

/* Removes a file or a link, or a folder with what is in it, three folders deep. Goes on after a
 * failure; SW_E_OS names the first. A missing path is no failure. */
SW_MUST_USE sw_status sw_folder_remove(const char *path, sw_error *err);

/* Calls back with the name of each entry until it answers false. SW_E_OS when the folder cannot be
 * read. */
SW_MUST_USE sw_status sw_folder_list(const char *path,
                                     bool (*entry)(void *context, const char *name), void *context,
                                     sw_error *err);

/* The folder that holds `path`: "." where it has none. */
SW_MUST_USE sw_status sw_path_parent(const char *path, char parent[SW_PATH_BYTES], sw_error *err);

/* "folder/name"; SW_E_INVALID when that is too long. */
SW_MUST_USE sw_status sw_path_join(char path[SW_PATH_BYTES], const char *folder, const char *name,
                                   sw_error *err);

#endif
