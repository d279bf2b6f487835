/* plan.h - the position of all bytes in the files of a checkpoint, and which of them a rank writes.
 * Arithmetic only.
 *
 * Idea: a file is a header and pieces; it is cut into blocks of 1 MiB. Names, shapes, dtypes and
 * max_file_bytes alone decide the bytes. A source is held in one of three ways, so a rank computes
 * its ranges without a table of other ranks' ranges. Bytes that all ranks hold, including headers,
 * are divided by blocks. The blocks that contain such bytes are numbered through all files, and
 * rank r writes the common bytes of the r-th part of the numbers. Example: all ranks hold 2 files
 * of 5 and 3 blocks, W = 3. Rank 0 writes blocks 0 1 2, rank 1 blocks 3 4, rank 2 blocks 5 6 7.
 *
 * Thread rule: any; only sw_plan_trim changes a plan. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
    SW_BLOCK_BYTES = 1 << 20,
    SW_VALUES_MAX_BYTES = 256 << 20, /* limit of a file of values, or of a rank's line of them */
};

typedef enum sw_plan_holder {
    SW_HELD_BY_ALL = 0,   /* every rank holds the same bytes: each writes a part */
    SW_HELD_BY_FIRST = 1, /* ranks may hold different bytes: rank 0 writes its copy */
    SW_HELD_IN_PARTS = 2, /* each rank writes all bytes that it passes as sources of a save */
} sw_plan_holder;

typedef struct sw_plan_tensor {
    const char *name;  /* borrowed for the call */
    const char *dtype; /* safetensors' name; borrowed for the call */
    const int64_t *shape;
    int ndim;
    sw_plan_holder holder;
} sw_plan_tensor;

typedef struct sw_plan_group { /* tensors that become one or more safetensors files */
    const char *stem;          /* "model": model.safetensors, or model-00001-of-0000N.safetensors */
    bool is_numbered;          /* the second form even for one file */
    uint64_t max_file_bytes;   /* tensor bytes; a larger tensor gets its own file. 0: no limit */
    const char *metadata;      /* the text of the JSON object __metadata__ */
    const sw_plan_tensor *tensors;
    size_t tensor_count;
} sw_plan_group;

typedef struct sw_plan_text { /* a file whose bytes the caller gives */
    const char *path;
    uint64_t size_bytes;
    sw_plan_holder holder;
} sw_plan_text;

typedef struct sw_plan_piece {
    uint64_t begin; /* in the file */
    uint64_t size_bytes;
    uint32_t source; /* number of the tensor through all groups; texts are counted after them */
    sw_plan_holder holder;
} sw_plan_piece;

typedef struct sw_plan_file {
    char *path;          /* owned; in the checkpoint's folder */
    char *header;        /* owned; NULL: a text, or trimmed */
    size_t header_bytes; /* offset of the first piece */
    uint64_t size_bytes;
    size_t first_piece, piece_count; /* in byte order */
    uint64_t first_block, block_count;
} sw_plan_file;

typedef struct sw_plan_range { /* contiguous bytes of a file */
    size_t file;
    uint64_t begin, end;
} sw_plan_range;

typedef struct sw_plan_common { /* a range of bytes that all ranks hold */
    sw_plan_range range;
    uint64_t first; /* number of its first block among the blocks with common bytes */
} sw_plan_common;

typedef struct sw_plan {
    sw_plan_file *files; /* owned */
    size_t file_count;
    sw_plan_piece *pieces; /* owned */
    size_t piece_count, source_count;
    uint32_t *piece_of;     /* owned; one a source */
    sw_plan_common *common; /* owned; in file order, each as long as possible */
    size_t common_count;
    uint64_t common_blocks, first_bytes; /* blocks with common bytes; bytes of SW_HELD_BY_FIRST */
    uint64_t block_count;
    uint64_t manifest_bytes; /* upper bound of its part of a manifest */
    bool is_trimmed;
    uint32_t digest; /* covers paths, headers and sizes: equal for equal plans */
} sw_plan;

/* Create a plan. SW_E_INVALID: a dtype unknown to safetensors, a name twice in one group, a header
 * beyond 100 MB, 2^32 tensors, a text beyond SW_VALUES_MAX_BYTES (except texts of all ranks), a bad
 * path.
 */
SW_MUST_USE sw_status sw_plan_create(const sw_plan_group *groups, size_t group_count,
                                     const sw_plan_text *texts, size_t text_count, sw_plan **plan,
                                     sw_error *err);
void sw_plan_destroy(sw_plan *plan);

/* Compare two ranges by file and offset; for qsort. */
int sw_plan_compare_ranges(const void *a, const void *b);

/* List the ranges, in file order, that `rank` of `world_size` writes of sources not held in parts
 * (*ranges is malloc'ed). The ranges of all ranks cover these bytes once. Cost: O(log pieces +
 * ranges); on rank 0 O(pieces + ranges). */
SW_MUST_USE sw_status sw_plan_own_ranges(const sw_plan *plan, int rank, int world_size,
                                         sw_plan_range **ranges, size_t *count, sw_error *err);

/* Free the text of the headers that other ranks write, 140 bytes a tensor and most of a plan, if
 * all headers take more than `keep_bytes`. Afterwards only `rank` of `world_size` may save with
 * this plan, and saves cannot name tensors. Threads may use the plan for a save meanwhile. A
 * failure leaves it unchanged. */
void sw_plan_trim(sw_plan *plan, int rank, int world_size, uint64_t keep_bytes);

/* Return the file of a piece. */
const sw_plan_file *sw_plan_file_of(const sw_plan *plan, size_t piece);

/* Find the first piece of a file that ends after `offset`. */
size_t sw_plan_find_piece(const sw_plan *plan, const sw_plan_file *file, uint64_t offset);

/* True for one or two components of [A-Za-z0-9._-], none beginning with a dot, each at most 128
 * bytes. */
bool sw_plan_is_path(const char *path);
