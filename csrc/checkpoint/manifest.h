/* manifest.h - MANIFEST.json, which alone makes a folder a checkpoint: put together from tallies,
 * printed, and read.
 *
 * It is JSON closed by its own checksum. The bytes are in docs/format.md.
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
#include "checkpoint/tally.h"

enum { SW_MANIFEST_VERSION = 1, SW_NONCE_BYTES = 65, SW_MANIFEST_MAX_BYTES = 256 << 20 };
#define SW_MANIFEST_NAME "MANIFEST.json"
#define SW_RANKS_FOLDER "ranks"

typedef struct sw_manifest_file {
    char *path; /* owned */
    uint64_t size_bytes;
    uint64_t first_block, block_count; /* through all files of this manifest */
    uint32_t *crcs;                    /* owned; a block each */
    uint16_t *covers; /* owned; a block each: tally.h. NULL once it is read or complete */
} sw_manifest_file;

typedef struct sw_manifest {
    uint64_t step;
    int world_size;
    char nonce[SW_NONCE_BYTES];
    bool has_metric;
    double metric;
    sw_manifest_file *files; /* owned */
    size_t file_count, file_capacity;
    size_t last_file; /* that a tally was added to */
    uint64_t block_count;
} sw_manifest;

void sw_manifest_fini(sw_manifest *manifest);

/* 1 to 64 of [0-9a-z]. */
bool sw_manifest_is_nonce(const char *nonce);

/* A file of `size_bytes` of which nothing was written yet. Its blocks are numbered on. */
SW_MUST_USE sw_status sw_manifest_add_file(sw_manifest *manifest, const char *path,
                                           uint64_t size_bytes, sw_error *err);

/* Records what one rank wrote of block `block`. SW_E_INVALID: there is no such block. `manifest` is
 * a sw_manifest: this is what sw_tally_list_read calls. */
SW_MUST_USE sw_status sw_manifest_add_tally(void *manifest, uint64_t block, sw_tally tally,
                                            sw_error *err);

/* Checks that every byte was written once and that a reader would take it, and sorts the files.
 * SW_E_STATE names a block of which that does not hold. */
SW_MUST_USE sw_status sw_manifest_complete(sw_manifest *manifest, sw_error *err);

/* The text of a complete manifest, in parts of about 64 KiB to `write`. */
SW_MUST_USE sw_status sw_manifest_print(const sw_manifest *manifest,
                                        sw_status (*write)(void *context, const char *part,
                                                           size_t size_bytes, sw_error *err),
                                        void *context, sw_error *err);

/* Reads and checks a text. SW_E_INVALID says what is wrong; on success, fini it. */
SW_MUST_USE sw_status sw_manifest_parse(const char *text, size_t size_bytes, const char *label,
                                        sw_manifest *manifest, sw_error *err);

/* The same, from `folder`/MANIFEST.json; SW_E_OS (ENOENT) when there is none. */
SW_MUST_USE sw_status sw_manifest_read(const char *folder, sw_manifest *manifest, sw_error *err);

/* NULL when the manifest does not list it. */
const sw_manifest_file *sw_manifest_find(const sw_manifest *manifest, const char *path);

#endif
