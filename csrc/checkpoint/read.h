/* read.h - bytes out of a checkpoint, every block checked.
 *
 * Thread rule: owner only; calls on one folder may run on several threads.
 */
#ifndef SW_CHECKPOINT_READ_H
#define SW_CHECKPOINT_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "checkpoint/manifest.h"

enum { SW_LOAD_THREADS_MAX = 16 };

typedef struct sw_read_range { /* of one file */
    uint64_t begin;
    size_t size_bytes;
    void *destination;
} sw_read_range;

typedef struct sw_load_range {
    size_t file; /* its place in the manifest */
    uint64_t begin;
    size_t size_bytes;
    uint8_t *destination; /* NULL: its blocks are checked, and that is all */
    uint8_t *undo;        /* gets what stood at `destination`; NULL: nobody will want it */
} sw_load_range;

typedef struct sw_load_options {
    int thread_count; /* 1: the caller's alone */
    bool is_direct;   /* what is not in the page cache is read past it, where the system allows */
    size_t turn, turn_count; /* begins at this part of the work, of so many; 0 of 0: at the first */
} sw_load_options;

/* Fills ranges (ascending, no overlap; of neither `destination` nor `undo`), each block of them
 * read and checked once. Cost: their blocks read once, 2 MiB of memory a thread. After an error,
 * which is that of the first bad block in the order of the work, destinations hold anything, but
 * those with an `undo` can be had back: whatever the outcome, `undo` holds all that stood there. */
SW_MUST_USE sw_status sw_checkpoint_load(const char *folder, const sw_manifest *manifest,
                                         const sw_load_range *ranges, size_t count,
                                         const sw_load_options *options, sw_error *err);

/* Fills `ranges` (ascending, no overlap) from file `path`. After an error they hold anything. */
SW_MUST_USE sw_status sw_checkpoint_read(const char *folder, const sw_manifest *manifest,
                                         const char *path, const sw_read_range *ranges,
                                         size_t range_count, sw_error *err);

#endif
