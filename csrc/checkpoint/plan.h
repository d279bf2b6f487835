/* plan.h - which bytes stand where in which file, and which rank writes them. Arithmetic only.
 *
 * Idea: a file is a header and pieces; it is cut into blocks of 1 MiB; blocks are numbered through
 * all files. A rank owns a run of block numbers. Nothing but names, shapes, dtypes and
 * max_file_bytes decides the bytes; the world size decides only the owners. Example, 2 files of 5
 * and 3 blocks, block 7 pinned, W = 3: rank 0 owns 0 1 7, rank 1 owns 2 3, rank 2 owns 4 5 6.
 *
 * Thread rule: any; a plan does not change, but by assign() before it is used.
 */
#ifndef SW_CHECKPOINT_PLAN_H
#define SW_CHECKPOINT_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_BLOCK_BYTES = 1 << 20 };

typedef struct sw_plan_tensor {
    const char *name;  /* borrowed for the call */
    const char *dtype; /* safetensors' name; borrowed for the call */
    const int64_t *shape;
    int ndim;
    bool is_pinned; /* ranks may hold different values: rank 0 writes every block that touches it */
} sw_plan_tensor;

typedef struct sw_plan_group { /* a list of tensors that becomes one or more safetensors files */
    const char *stem;          /* "model": model.safetensors, or model-00001-of-0000N.safetensors */
    bool is_numbered;          /* the second form even for one file */
    uint64_t max_file_bytes;   /* of tensors; a larger tensor has a file of its own. 0: no limit */
    const char *metadata;      /* the text of the JSON object __metadata__ */
    const sw_plan_tensor *tensors;
    size_t tensor_count;
} sw_plan_group;

typedef struct sw_plan_text { /* a file whose bytes are the caller's */
    const char *path;
    uint64_t size_bytes;
} sw_plan_text;

typedef struct sw_plan_piece {
    size_t source;  /* number of the tensor through all groups; then of the text, counted on */
    uint64_t begin; /* in the file */
    uint64_t size_bytes;
} sw_plan_piece;

typedef struct sw_plan_file {
    char *path;          /* owned; in the checkpoint's folder */
    char *header;        /* owned; NULL for a text */
    size_t header_bytes; /* pieces begin there */
    uint64_t size_bytes;
    size_t first_piece, piece_count; /* in the order of their bytes */
    uint64_t first_block, block_count;
} sw_plan_file;

typedef struct sw_plan {
    sw_plan_file *files; /* owned */
    size_t file_count;
    sw_plan_piece *pieces; /* owned */
    size_t piece_count, source_count;
    bool *is_pinned; /* owned; a block each */
    int *owners;     /* owned; a rank each block, by assign(); NULL: equal runs */
    uint64_t block_count, pinned_count;
    uint32_t digest; /* of paths, headers and sizes: equal plans have equal digests */
} sw_plan;

/* SW_E_INVALID: a dtype safetensors cannot name, a name twice in one group, a header beyond 100 MB,
 * a bad path. */
SW_MUST_USE sw_status sw_plan_create(const sw_plan_group *groups, size_t group_count,
                                     const sw_plan_text *texts, size_t text_count, sw_plan **plan,
                                     sw_error *err);
void sw_plan_destroy(sw_plan *plan);

typedef struct sw_plan_holding { /* bytes of a source that this rank holds, and others need not */
    size_t source;
    uint64_t begin, size_bytes; /* in the source */
    int rank;
} sw_plan_holding;

typedef struct sw_plan_transfer { /* bytes that the writer of their block does not hold */
    size_t source;
    uint64_t begin, size_bytes; /* in the source */
    int holder, owner;
} sw_plan_transfer;

/* Gives blocks to the ranks that hold most of their bytes. `holdings` name each byte at most once;
 * bytes they do not name are held by every rank. *transfers (malloc'ed, in the holdings' order) is
 * what owners lack. Equal arguments give equal results on every rank. SW_E_INVALID: a holding
 * outside its source. Cost: 4 bytes of memory a block and rank. */
SW_MUST_USE sw_status sw_plan_assign(sw_plan *plan, const sw_plan_holding *holdings, size_t count,
                                     int world_size, sw_plan_transfer **transfers,
                                     size_t *transfer_count, sw_error *err);

/* The blocks that `rank` of `world_size` writes, ascending; *blocks is malloc'ed. Their union over
 * ranks is every block, once. */
SW_MUST_USE sw_status sw_plan_owned(const sw_plan *plan, int rank, int world_size,
                                    uint64_t **blocks, size_t *count, sw_error *err);

/* The file of a block, and the block's place in it. */
const sw_plan_file *sw_plan_locate(const sw_plan *plan, uint64_t block, uint64_t *offset,
                                   size_t *size_bytes);

/* One or two components of [A-Za-z0-9._-], none beginning with a dot, each at most 128 bytes. */
bool sw_plan_is_path(const char *path);

#endif
