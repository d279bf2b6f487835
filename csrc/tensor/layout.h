/* layout.h - where every gradient lies: arithmetic only, no memory, no ranks' state.
 *
 * Parameters in reverse registration order are cut into buckets of one dtype, trainable and frozen
 * apart, and different groups too; every bucket is W equal rank slices, every parameter and every
 * cut on a 128-byte boundary:
 *
 *     W = 3, cap 1 KiB, float32: fc2.bias 10, fc2.weight 300 | fc1.bias 20, fc1.weight 200
 *     bucket 0: fc2.bias at element 0, fc2.weight at 32, 332 elements -> slices of 128, 384 in all
 *     bucket 1: fc1.bias at element 0, fc1.weight at 32, 232 elements -> slices of 96, 288 in all
 *
 * Thread rule: any, once made.
 */
#ifndef SW_TENSOR_LAYOUT_H
#define SW_TENSOR_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "tensor/dtype.h"

typedef struct sw_layout_param {
    size_t numel;
    sw_dtype dtype;
    bool trainable;
    size_t group; /* those of different groups share no bucket */
} sw_layout_param;

typedef struct sw_layout_place { /* of one parameter */
    size_t bucket;
    size_t begin; /* first element, within the bucket */
    size_t numel;
} sw_layout_place;

typedef struct sw_layout_bucket {
    sw_dtype dtype;
    bool trainable;
    size_t offset_bytes; /* of the bucket in the arena */
    size_t numel;        /* a multiple of world_size * 128 bytes; padding included */
    size_t first, count; /* its parameters: order[first .. first + count), in memory order */
} sw_layout_bucket;

typedef struct sw_layout {
    size_t param_count, bucket_count;
    sw_layout_place *place;   /* owned, by parameter in registration order */
    sw_layout_bucket *bucket; /* owned */
    size_t *order;            /* owned, parameters bucket by bucket */
    size_t size_bytes;        /* of the arena */
    size_t trainable_bytes;   /* of the buckets that hold gradients from the start */
} sw_layout;

/* When a bucket is full: its parameters reach its cap; the one that reaches it is its last. */
typedef struct sw_layout_caps {
    size_t bytes;       /* >= 1 */
    size_t first_bytes; /* of bucket 0, each after it twice the one before, up to `bytes`; 0: all
                           alike */
} sw_layout_caps;

/* Cuts. SW_E_INVALID on a size that overflows; SW_E_MEMORY. */
SW_MUST_USE sw_status sw_layout_init(sw_layout *layout, const sw_layout_param *params,
                                     size_t param_count, int world_size, sw_layout_caps caps,
                                     sw_error *err);
void sw_layout_fini(sw_layout *layout);

#endif
