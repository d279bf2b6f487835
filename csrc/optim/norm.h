/* norm.h - the global 2-norm: an exact sum of squares that any number of ranks can add up.
 *
 * sw_norm_sum (kernels/optim_kernels.h) is an integer, so ranks may add theirs in any order and get
 * the same sum. It is rounded once, at the end. The norm is therefore the same for any cut, stage
 * or world size.
 *
 *   sw_norm_init(&sum); sw_norm_add(&sum, mine, count, err);
 *   sw_norm_close(&sum);       all_reduce SUM of SW_NORM_WORD_COUNT int64 at &sum (1,112 bytes);
 *   norm = sw_norm_value(&sum);
 *
 * Thread rule: one at a time per sum.
 */
#pragma once

#include "base/status.h"
#include "kernels/optim_kernels.h"

typedef struct sw_norm_array {
    const void *data; /* borrowed for the call; may be NULL if numel is 0 */
    size_t numel;
    sw_dtype dtype;
} sw_norm_array;

void sw_norm_init(sw_norm_sum *sum);

/* Add the squares of all elements. SW_E_INVALID, before anything is added, unless each dtype is
 * float32, bfloat16, float16 or float64. */
SW_MUST_USE sw_status sw_norm_add(sw_norm_sum *sum, const sw_norm_array *arrays, size_t count,
                                  sw_error *err);

/* Carry, so that up to 2^31 closed sums can be added word by word. Equal sums then have equal
 * bytes. */
void sw_norm_close(sw_norm_sum *sum);

/* into += from, as the all-reduce does for two ranks. Both are closed, and so is the result. */
void sw_norm_merge(sw_norm_sum *into, const sw_norm_sum *from);
