/* read.h - bytes out of a checkpoint, every block checked. After an error destinations hold
 * anything.
 *
 * Thread rule: owner only; verify() and read() of one folder may run on several threads.
 */
#ifndef SW_CHECKPOINT_READ_H
#define SW_CHECKPOINT_READ_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "checkpoint/manifest.h"

typedef struct sw_read_range { /* of one file */
    uint64_t begin;
    size_t size_bytes;
    void *destination;
} sw_read_range;

/* Opens a checkpoint: reads its manifest and looks at the size of every file. SW_E_INVALID or
 * SW_E_OS: it is none. */
SW_MUST_USE sw_status sw_checkpoint_open(const char *folder, sw_manifest *manifest, sw_error *err);

/* Checks blocks [first, end) of all files, in the manifest's numbering. SW_E_INVALID names the file
 * and block. */
SW_MUST_USE sw_status sw_checkpoint_verify(const char *folder, const sw_manifest *manifest,
                                           uint64_t first, uint64_t end, sw_error *err);

/* Fills `ranges` (ascending, no overlap) from file `path`. Blocks that no range touches are not
 * read. */
SW_MUST_USE sw_status sw_checkpoint_read(const char *folder, const sw_manifest *manifest,
                                         const char *path, const sw_read_range *ranges,
                                         size_t range_count, sw_error *err);

#endif
