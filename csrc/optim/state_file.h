/* state_file.h - optimizer state that lives in a file and is seen as memory.
 *
 * Idea: the file has no name, so that nothing stays of a process that is killed, and lies past the
 * page cache where the file system allows it. Every part of it is mapped too: whoever is not the
 * step (state dicts, checkpoints) reads and writes plain memory, whose pages are the file's and can
 * be dropped. The step itself moves ranges of it through buffers (offload.h). Both see the same
 * bytes, as long as they take turns.
 *
 * Thread rule: one at a time; sw_state_file_read and _write also from two threads at once, of
 * ranges that do not overlap.
 */
#ifndef SW_OPTIM_STATE_FILE_H
#define SW_OPTIM_STATE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "platform/file.h"

typedef struct sw_state_segment {
    uint8_t *base; /* owned mapping */
    size_t size_bytes;
    uint64_t offset; /* of its first byte in the file */
} sw_state_segment;

typedef struct sw_state_file {
    int fd; /* owned */
    char path[SW_PATH_BYTES];
    sw_state_segment *segments; /* owned */
    size_t segment_count;
    uint64_t size_bytes;
    sw_error failure; /* what broke off a step that had changed something; SW_OK: nothing */
} sw_state_file;

/* A file of no bytes in `folder`, which must exist; `label` is part of its name in messages.
 * SW_E_OS names the folder and the reason. */
SW_MUST_USE sw_status sw_state_file_init(sw_state_file *file, const char *folder, const char *label,
                                         sw_error *err);
/* Every tensor over it must be gone. */
void sw_state_file_fini(sw_state_file *file);

/* `size_bytes` more, rounded up to pages: zeroed, with their disk space. Addresses of earlier ones
 * stay. SW_E_OS with ENOSPC (a full disk), EFBIG (RLIMIT_FSIZE) or another errno: the file is as
 * before. */
SW_MUST_USE sw_status sw_state_file_grow(sw_state_file *file, size_t size_bytes, uint8_t **address,
                                         sw_error *err);

/* Where in the file [address, +size_bytes) lies; UINT64_MAX: not, or not all of it. */
uint64_t sw_state_file_locate(const sw_state_file *file, const void *address, size_t size_bytes);

/* Whole pages. SW_E_OS names the file and the reason. */
SW_MUST_USE sw_status sw_state_file_read(sw_state_file *file, void *data, size_t size_bytes,
                                         uint64_t offset, sw_error *err);
SW_MUST_USE sw_status sw_state_file_write(sw_state_file *file, const void *data, size_t size_bytes,
                                          uint64_t offset, sw_error *err);

/* Whether it goes past the page cache. */
bool sw_state_file_is_direct(const sw_state_file *file);

/* The mapping's pages are this process's memory no longer; a hint. */
void sw_state_file_forget(sw_state_file *file);

#endif
