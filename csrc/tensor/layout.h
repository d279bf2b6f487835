/* layout.h - the position of every gradient in the arena. Arithmetic only: no memory, no ranks.
 *
 * Parameters in reverse registration order are cut into buckets. A bucket holds parameters of one
 * dtype and one group, all trainable or all frozen. It has W equal slices, one a rank. Every
 * parameter and every slice starts on a 128-byte boundary:
 *
 *     W = 3, cap 1 KiB, float32: fc2.bias 10, fc2.weight 300 | fc1.bias 20, fc1.weight 200
 *     bucket 0: fc2.bias at element 0, fc2.weight at 32, 332 elements -> slices of 128, 384 in all
 *     bucket 1: fc1.bias at element 0, fc1.weight at 32, 232 elements -> slices of 96, 288 in all
 *
 * By rows, a parameter is cut as torch.chunk cuts its first dimension, and each slice holds a chunk
 * of every parameter of the bucket:
 *
 *     W = 3, fc2.bias of 10 rows, fc2.weight of 10 rows of 30: chunks of 4 rows
 *     every slice: fc2.bias at element 0, fc2.weight at 32, 152 elements -> slices of 160, 480 in
 * all
 *
 * In both, the elements of a parameter that a slice holds are one run, in memory order.
 *
 * Thread rule: any, once made.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "tensor/dtype.h"

typedef struct sw_layout_param {
    size_t numel;
    sw_dtype dtype;
    bool trainable;
    size_t group;     /* parameters of different groups share no bucket */
    size_t row_numel; /* > 0: cut by rows of so many elements, of which numel is a multiple */
} sw_layout_param;

typedef struct sw_layout_place { /* the place of one parameter */
    size_t bucket;
    size_t begin; /* first element, within the bucket; by rows, within each slice */
    size_t numel;
    size_t chunk; /* by rows: the most elements that a slice holds; else 0 */
} sw_layout_place;

typedef struct sw_layout_bucket {
    sw_dtype dtype;
    bool trainable, by_rows;
    size_t offset_bytes; /* the bucket's offset in the arena */
    size_t numel; /* a multiple of W * 128 bytes for each piece of a slice; padding included */
    size_t first, count; /* its parameters: order[first .. first + count), in memory order */
} sw_layout_bucket;

typedef struct sw_layout {
    size_t param_count, bucket_count;
    size_t slice_count;       /* W */
    sw_layout_place *place;   /* owned, by parameter in registration order */
    sw_layout_bucket *bucket; /* owned */
    size_t *order;            /* owned, parameters bucket by bucket */
    size_t size_bytes;        /* bytes of the arena */
    size_t trainable_bytes;   /* bytes of the trainable buckets */
} sw_layout;

/* Bucket size limits. A bucket is closed by the parameter with which it reaches its cap. */
typedef struct sw_layout_caps {
    size_t bytes;       /* >= 1 */
    size_t first_bytes; /* cap of bucket 0, doubled for each later bucket up to `bytes`; 0: every
                           bucket has the cap `bytes` */
    size_t pieces;      /* equal parts of a slice, each a multiple of 128 bytes, one for each of
                         * its owners; 0: one */
} sw_layout_caps;

/* Elements of a parameter that are adjacent in its memory and in the bucket. */
typedef struct sw_layout_run {
    size_t begin, end; /* in the parameter's memory order; equal if there are none */
    size_t first;      /* the first one's position, in the slice or in the bucket */
} sw_layout_run;

/* A parameter in its bucket, as pieces that are adjacent in its memory. */
typedef struct sw_layout_pieces {
    size_t first;        /* first element, within the bucket */
    size_t numel, chunk; /* elements in all; in each piece, the last of which may have fewer */
    size_t pitch;        /* from one piece's first element to the next one's, in the bucket */
} sw_layout_pieces;

/* Cut the parameters. SW_E_INVALID if a size overflows or a dtype is unknown; SW_E_MEMORY. */
SW_MUST_USE sw_status sw_layout_init(sw_layout *layout, const sw_layout_param *params,
                                     size_t param_count, int world_size, sw_layout_caps caps,
                                     sw_error *err);
void sw_layout_fini(sw_layout *layout);

size_t sw_layout_slice_numel(const sw_layout *layout, size_t bucket);
/* Return the elements of a parameter that lie in slice `slice` of `slice_count`, which divides
 * every bucket; by rows it is the layout's own. This is the one rule of ownership: all else
 * asks it. */
sw_layout_run sw_layout_run_in(const sw_layout *layout, size_t index, size_t slice,
                               size_t slice_count);
/* Return how a parameter lies in the whole bucket: in one piece; by rows, in at most one a slice.
 */
sw_layout_pieces sw_layout_pieces_of(const sw_layout *layout, size_t param);
/* Return the run that begins with element `begin` of a parameter, `first` within the bucket: to its
 * end; by rows, to the end of a chunk. */
sw_layout_run sw_layout_bucket_run(const sw_layout *layout, size_t param, size_t begin);
