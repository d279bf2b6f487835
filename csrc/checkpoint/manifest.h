/* manifest.h - MANIFEST.json, the file that makes a folder a checkpoint: built from tallies,
 * printed, and read.
 *
 * It is JSON that ends with its own checksum. docs/format.md defines the bytes.
 *
 * Thread rule: owner only. */
#pragma once

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
    uint64_t first_block, block_count; /* counted through all files of this manifest */
    uint32_t *crcs;                    /* owned; one a block */
    uint16_t *covers;                  /* owned; one a block: tally.h. NULL once read or complete */
    bool is_in_memory; /* its bytes are in `memory_fd` (borrowed) from `memory_begin` on */
    int memory_fd;
    uint64_t memory_begin;
} sw_manifest_file;

typedef struct sw_manifest {
    uint64_t step;
    int world_size;
    char nonce[SW_NONCE_BYTES];
    bool has_metric;
    double metric;
    sw_manifest_file *files; /* owned */
    size_t file_count, file_capacity;
    size_t last_file; /* the file of the last added tally */
    uint64_t block_count;
} sw_manifest;

void sw_manifest_fini(sw_manifest *manifest);

/* True for 1 to 64 characters of [0-9a-z]. */
bool sw_manifest_is_nonce(const char *nonce);

/* Add a file of `size_bytes` of which nothing is written yet. Its blocks get the next numbers. */
SW_MUST_USE sw_status sw_manifest_add_file(sw_manifest *manifest, const char *path,
                                           uint64_t size_bytes, sw_error *err);

/* Record what one rank wrote of block `block`. SW_E_INVALID: no such block. `manifest` is a
 * sw_manifest: sw_tally_list_read calls this. */
SW_MUST_USE sw_status sw_manifest_add_tally(void *manifest, uint64_t block, sw_tally tally,
                                            sw_error *err);

/* Check that every byte was written once and that a reader would accept the manifest; sort the
 * files. SW_E_STATE names a block that fails. */
SW_MUST_USE sw_status sw_manifest_complete(sw_manifest *manifest, sw_error *err);

typedef sw_status sw_manifest_write(void *context, const char *part, size_t size_bytes,
                                    sw_error *err);
/* Print a complete manifest: call `write` with parts of about 64 KiB. */
SW_MUST_USE sw_status sw_manifest_print(const sw_manifest *manifest, sw_manifest_write *write,
                                        void *context, sw_error *err);

/* Read and check a text. SW_E_INVALID states the fault; on success, the caller must fini it. */
SW_MUST_USE sw_status sw_manifest_parse(const char *text, size_t size_bytes, const char *label,
                                        sw_manifest *manifest, sw_error *err);

/* Read `folder`/MANIFEST.json likewise; SW_E_OS (ENOENT) if it does not exist. */
SW_MUST_USE sw_status sw_manifest_read(const char *folder, sw_manifest *manifest, sw_error *err);

/* Find a file; NULL: the manifest does not list it. */
const sw_manifest_file *sw_manifest_find(const sw_manifest *manifest, const char *path);
