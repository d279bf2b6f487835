/* state_file.h - optimizer state in a file, visible as memory.
 *
 * The file has no name, so a killed process leaves nothing behind. It bypasses the page cache if
 * the file system allows it. Every part of it is also mapped: code other than the step (state
 * dicts, checkpoints) reads and writes plain memory, whose pages belong to the file and can be
 * dropped. The step moves ranges through buffers (offload.h). Both see the same bytes, if they take
 * turns.
 *
 * Thread rule: one at a time. sw_state_file_read and _write also from two threads at once, on
 * ranges that do not overlap.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "platform/file.h"

typedef struct sw_state_segment {
    uint8_t *base; /* owned mapping */
    size_t size_bytes;
    uint64_t offset; /* offset of its first byte in the file */
} sw_state_segment;

typedef struct sw_state_file {
    int fd; /* owned */
    char path[SW_PATH_BYTES];
    sw_state_segment *segments; /* owned */
    size_t segment_count;
    uint64_t size_bytes;
    sw_error failure; /* the error of a step that failed after it changed state; SW_OK: none */
} sw_state_file;

/* Create an empty file in `folder`, which must exist; `label` is part of its name in messages.
 * SW_E_OS names the folder and the reason. */
SW_MUST_USE sw_status sw_state_file_init(sw_state_file *file, const char *folder, const char *label,
                                         sw_error *err);
/* Unmap and close the file. No tensor may use its memory any more. */
void sw_state_file_fini(sw_state_file *file);

/* Add `size_bytes`, rounded up to pages: zeroed, with their disk space. Earlier addresses stay
 * valid. SW_E_OS with ENOSPC (a full disk), EFBIG (RLIMIT_FSIZE) or another errno: the file is
 * unchanged. */
SW_MUST_USE sw_status sw_state_file_grow(sw_state_file *file, size_t size_bytes, uint8_t **address,
                                         sw_error *err);

/* Return the offset in the file of [address, +size_bytes), or UINT64_MAX if any of it lies outside.
 */
uint64_t sw_state_file_locate(const sw_state_file *file, const void *address, size_t size_bytes);

/* Read or write whole pages. SW_E_OS names the file and the reason. */
SW_MUST_USE sw_status sw_state_file_read(sw_state_file *file, void *data, size_t size_bytes,
                                         uint64_t offset, sw_error *err);
SW_MUST_USE sw_status sw_state_file_write(sw_state_file *file, const void *data, size_t size_bytes,
                                          uint64_t offset, sw_error *err);

/* Return true if the file bypasses the page cache. */
bool sw_state_file_is_direct(const sw_state_file *file);

/* Let the kernel drop the mapping's pages from this process's memory; a hint. */
void sw_state_file_forget(sw_state_file *file);
