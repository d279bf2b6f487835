/* read.h - find a checkpoint, open its files, and read them.
 *
 * open.c      its folder, which a writer may be replacing, and its files
 * read.c      ranges of bytes, with a check of every block
 * catalog.c   the small parts in one buffer: the manifest, headers of safetensors files, JSON. One
 *             rank reads it and sends it to the others, which then open only files with tensors
 *             that they read
 *
 * Thread rule: any; calls on one folder may run on several threads. A catalog does not change. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "platform/file.h"

/* Return the name that a checkpoint has while it is replaced on a file system that cannot exchange
 * two names: `folder`.replaced, without slashes at the end of `folder`. */
SW_MUST_USE sw_status sw_checkpoint_replaced_name(char replaced[SW_PATH_BYTES], const char *folder,
                                                  sw_error *err);

/* Find the path of the checkpoint `folder`: its replaced name if only that exists, else `folder`
 * itself. */
SW_MUST_USE sw_status sw_checkpoint_locate(const char *folder, char found[SW_PATH_BYTES],
                                           sw_error *err);

/* Find a checkpoint; check only that a manifest exists. False: none found. */
bool sw_checkpoint_stands(const char *folder, char found[SW_PATH_BYTES]);

/* Open a checkpoint: read its manifest and check the size of every file. SW_E_INVALID or SW_E_OS:
 * not a checkpoint. */
SW_MUST_USE sw_status sw_checkpoint_open(const char *folder, sw_manifest *manifest, sw_error *err);

/* Open the checkpoint at `folder`, or at its replaced name if `folder` is missing. Look again if a
 * writer moved it meanwhile. `found`: its path. */
SW_MUST_USE sw_status sw_checkpoint_find(const char *folder, char found[SW_PATH_BYTES],
                                         sw_manifest *manifest, sw_error *err);

/* Open a file of a checkpoint without following links; its size must match the manifest. Bypass the
 * page cache if `direct` is set and the file system allows it. `path` is for messages. The file
 * begins at offset `memory_begin` of *fd. */
SW_MUST_USE sw_status sw_checkpoint_open_file(const char *folder, const sw_manifest_file *file,
                                              bool direct, char path[SW_PATH_BYTES], int *fd,
                                              sw_error *err);

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

typedef struct sw_catalog {
    uint8_t *data; /* owned */
    size_t size_bytes;
} sw_catalog;

/* Read only the header of each of `paths` that ends in .safetensors, and all other files whole.
 * Check each block. Errors: as sw_checkpoint_read; SW_E_INVALID for a path not in the manifest. */
SW_MUST_USE sw_status sw_catalog_read(const char *folder, const sw_manifest *manifest,
                                      const char *const *paths, size_t count, sw_catalog *catalog,
                                      sw_error *err);

/* Copy a catalog that another rank has read, and parse the manifest in it. SW_E_INVALID: not a
 * catalog. */
SW_MUST_USE sw_status sw_catalog_copy(const void *data, size_t size_bytes, sw_catalog *catalog,
                                      sw_manifest *manifest, sw_error *err);

/* Return a file's bytes in the catalog; NULL: it has none. Borrowed. */
const uint8_t *sw_catalog_find(const sw_catalog *catalog, const char *path, size_t *size_bytes);

void sw_catalog_fini(sw_catalog *catalog);
