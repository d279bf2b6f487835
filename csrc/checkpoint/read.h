/* read.h - read bytes of a checkpoint and check every block.
 *
 * Thread rule: owner only; calls on one folder may run on several threads. */
#ifndef SW_CHECKPOINT_READ_H
#define SW_CHECKPOINT_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "checkpoint/manifest.h"

enum { SW_LOAD_THREADS_MAX = 16 };

typedef struct sw_read_range { /* a range of one file */
    uint64_t begin;
    size_t size_bytes;
    void *destination;
} sw_read_range;

typedef struct sw_load_range {
    size_t file; /* its index in the manifest */
    uint64_t begin;
    size_t size_bytes;
    uint8_t *destination; /* NULL: only check its blocks */
    uint8_t *undo;        /* receives the bytes that `destination` held; NULL: not needed */
} sw_load_range;

typedef struct sw_load_options {
    int thread_count; /* 1: only the caller's thread */
    bool is_direct;   /* bypass the page cache for bytes outside it, where the system allows */
    size_t turn, turn_count; /* start at part `turn` of so many; 0 of 0: at the first */
} sw_load_options;

/* Fill ranges; read and check each block once. Ranges ascend without overlap; neither `destination`
 * nor `undo` memory overlaps. Memory: 1 MiB a thread, in huge pages. The error is that of the first
 * bad block in order. After an error the contents of destinations are undefined, but those with an
 * `undo` can be restored: `undo` always holds all replaced bytes. */
SW_MUST_USE sw_status sw_checkpoint_load(const char *folder, const sw_manifest *manifest,
                                         const sw_load_range *ranges, size_t count,
                                         const sw_load_options *options, sw_error *err);

/* Check the size of a file before it is read whole, because parsed values may take many times their
 * 256 MiB of text. SW_E_INVALID: it has more than SW_VALUES_MAX_BYTES. */
SW_MUST_USE sw_status sw_checkpoint_check_values(const char *folder, const sw_manifest_file *file,
                                                 sw_error *err);

/* Fill `ranges` (ascending, no overlap) from file `path`. After an error their contents are
 * undefined. */
SW_MUST_USE sw_status sw_checkpoint_read(const char *folder, const sw_manifest *manifest,
                                         const char *path, const sw_read_range *ranges,
                                         size_t range_count, sw_error *err);

#endif
