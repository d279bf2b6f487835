/* manifest.h - MANIFEST.json, which alone makes a folder a checkpoint, and the acknowledgements it
 * is made from.
 *
 * Both are JSON closed by their own checksum. An acknowledgement is a manifest whose files list
 * runs of blocks: what one rank wrote. The bytes are in docs/format.md.
 *
 * Thread rule: owner only.
 */
#ifndef SW_CHECKPOINT_MANIFEST_H
#define SW_CHECKPOINT_MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "checkpoint/plan.h"

enum { SW_MANIFEST_VERSION = 1, SW_NONCE_BYTES = 65, SW_MANIFEST_MAX_BYTES = 256 << 20 };
#define SW_MANIFEST_NAME "MANIFEST.json"

typedef struct sw_manifest_file {
    char *path; /* owned */
    uint64_t size_bytes;
    uint64_t first_block, block_count; /* through all files of this manifest; in an acknowledgement:
                                          of the file, a run */
    uint32_t *crcs;                    /* owned; a block each */
    bool
        *is_written; /* owned; while a manifest is put together. NULL once it is read or complete */
} sw_manifest_file;

typedef struct sw_manifest {
    uint64_t step;
    int world_size;
    char nonce[SW_NONCE_BYTES];
    bool has_metric;
    double metric;
    sw_manifest_file *files; /* owned */
    size_t file_count, file_capacity;
    uint64_t block_count;
} sw_manifest;

void sw_manifest_fini(sw_manifest *manifest);

/* 1 to 64 of [0-9a-z]. */
bool sw_manifest_is_nonce(const char *nonce);

/* A file of `size_bytes` with no block written yet. */
SW_MUST_USE sw_status sw_manifest_add_file(sw_manifest *manifest, const char *path,
                                           uint64_t size_bytes, sw_error *err);

/* Records that block `block` of file `path` was written. SW_E_INVALID: no such block, or written
 * before. */
SW_MUST_USE sw_status sw_manifest_add_block(sw_manifest *manifest, const char *path, uint64_t block,
                                            uint32_t crc, sw_error *err);

/* Adds what rank `rank` acknowledges. Files that the manifest lacks must be the rank's own,
 * ranks/<rank>.*. */
SW_MUST_USE sw_status sw_manifest_merge(sw_manifest *manifest, const sw_manifest *acknowledgement,
                                        int rank, sw_error *err);

/* Sorts the files and checks that every block was written. SW_E_STATE names one that was not. */
SW_MUST_USE sw_status sw_manifest_complete(sw_manifest *manifest, sw_error *err);

/* The text; of the written runs alone when `is_acknowledgement`. *text is malloc'ed. */
SW_MUST_USE sw_status sw_manifest_print(const sw_manifest *manifest, bool is_acknowledgement,
                                        char **text, size_t *size_bytes, sw_error *err);

/* Reads and checks a text. SW_E_INVALID says what is wrong; on success, fini it. */
SW_MUST_USE sw_status sw_manifest_parse(const char *text, size_t size_bytes,
                                        bool is_acknowledgement, const char *label,
                                        sw_manifest *manifest, sw_error *err);

/* The same, from `folder`/MANIFEST.json; SW_E_OS (ENOENT) when there is none. */
SW_MUST_USE sw_status sw_manifest_read(const char *folder, sw_manifest *manifest, sw_error *err);

/* NULL when the manifest does not list it. */
const sw_manifest_file *sw_manifest_find(const sw_manifest *manifest, const char *path);

#endif
