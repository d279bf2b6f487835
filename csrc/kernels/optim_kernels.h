/* optim_kernels.h - the contracts of the optimizer kernels and of the sum of squares.
 *
 * Kernels take scalars that are already rounded to float32, and one run of arrays. csrc/optim
 * computes the scalars from the hyperparameters; docs/design/optim.md has the formulas. Every
 * kernel table gives the same bits, and so does every way to cut a run, because each element is
 * computed on its own.
 *
 * Thread rule: any. Kernels keep no state.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/dtype.h"

/* Moments as records: 32 codes and an exponent, from a multiple of 32 elements of the parameter on.
 * Their state_dtype is SW_DTYPE_UINT8. The last record of a parameter has zeros behind its end. */
enum { SW_MOMENT_BLOCK_NUMEL = 32, SW_MOMENT_RECORD_BYTES = 33 };

/* Return the bytes of `numel` elements of an array of a run; of whole blocks, in records. */
static inline size_t sw_optim_bytes(size_t numel, sw_dtype dtype)
{
    if (dtype == SW_DTYPE_UINT8)
        return (numel + SW_MOMENT_BLOCK_NUMEL - 1) / SW_MOMENT_BLOCK_NUMEL * SW_MOMENT_RECORD_BYTES;
    return numel * (dtype == SW_DTYPE_FLOAT32 ? 4u : 2u);
}

/* One run: the same `numel` elements of each array. Arrays are disjoint and aligned to their
 * element. Dtypes are float32, bfloat16 or float16, and of moments records; arithmetic is always
 * float32. Memory is the caller's. */
typedef struct sw_optim_run {
    void *p;       /* parameter, or its master: read and written */
    void *m;       /* first moment or momentum buffer: read and written; unread in SGD without
                      momentum */
    void *v;       /* second moment: read and written; Adam only */
    void *v_max;   /* maximum of v: read and written; Adam with amsgrad only */
    const void *g; /* gradient: read */
    void *copy;    /* the parameter in copy_dtype, whose master is p: read and written; or NULL */
    size_t numel;
    int64_t step; /* the number of this step, from 1 */
    sw_dtype p_dtype, state_dtype, g_dtype, copy_dtype;
    /* Adam without amsgrad: v, and p if it has no copy, are rounded at random where they are
     * bfloat16, and records of m and v always are. The random bits depend on the seed, `origin`,
     * `step` and the element alone. */
    bool is_random;
    uint64_t origin; /* the parameter's number << 40, plus the first element's in the parameter */
} sw_optim_run;

typedef struct sw_adam_scalars {
    float factor;        /* multiplies the gradient; negative to maximize; 1 for none */
    float decay;         /* p *= decay; 1 for none */
    float l2;            /* g += l2 * p, fused; 0 for none */
    float lerp;          /* 1 - beta1 */
    float beta2, square; /* v = beta2 * v + square * g * g; square is 1 - beta2 */
    float correction;    /* sqrt(1 - beta2^t) */
    float eps;
    float negative_step; /* -lr / (1 - beta1^t) */
    bool amsgrad;
    uint64_t seed; /* of runs that are rounded at random */
} sw_adam_scalars;

typedef struct sw_sgd_scalars {
    float factor; /* as in sw_adam_scalars */
    float l2;
    float momentum;    /* 0: no buffer */
    float undampening; /* 1 - dampening */
    float negative_lr;
    bool nesterov;
    bool first; /* the buffer is not read: it is set to the gradient */
} sw_sgd_scalars;

/* Where p does not round to `copy`, bit by bit, other code has written the parameter: the step
 * begins with `copy` instead of p. Afterwards p rounds to `copy`.
 *
 * Cost: one read of each array that is read and one write of each that is written, in blocks of
 * 4 KiB that stay in the L1 cache. */
typedef void sw_adam_fn(const sw_optim_run *run, const sw_adam_scalars *scalars);
typedef void sw_sgd_fn(const sw_optim_run *run, const sw_sgd_scalars *scalars);

/* ---- the sum of squares ---- */

enum {
    SW_NORM_DIGIT_COUNT = 136,
    SW_NORM_LOWEST_EXPONENT = -2176, /* unit of digit 0; the least square of float64 is 2^-2148 */
};

/* The exact number sum over j of digit[j] * 2^(32 j - 2176), with infinities and NaN counted apart.
 * An all-zero structure is zero. Fields are int64 without padding, so two carried sums are added by
 * adding their int64 words: an all-reduce of SW_NORM_WORD_COUNT int64 merges them
 * (csrc/optim/norm.h). */
typedef struct sw_norm_sum {
    int64_t digit[SW_NORM_DIGIT_COUNT];
    int64_t infinite, nan; /* infinities and NaN seen */
    int64_t additions;     /* additions since the last carry; a digit holds 2^31 of them */
} sw_norm_sum;

enum { SW_NORM_WORD_COUNT = sizeof(sw_norm_sum) / sizeof(int64_t) };

/* Add the squares of `numel` elements at `data` to *sum and carry when digits fill up. While the
 * exponents of a block span at most 23 binades, an element costs about as much as in a plain sum in
 * double. Each further 23 binades cost one more pass over the block in the cache. A float64 element
 * takes some nanoseconds. */
typedef void sw_norm_fn(sw_norm_sum *sum, const void *data, size_t numel, sw_dtype dtype);

/* Move what exceeds 32 bits of a digit to the next digit. Afterwards digits are in [0, 2^32), and
 * equal sums have equal bytes. */
void sw_norm_sum_carry(sw_norm_sum *sum);

/* Return the square root of the sum, which is first rounded to 53 bits. NaN if a NaN was added,
 * else infinity if an infinity was. */
double sw_norm_value(const sw_norm_sum *sum);

typedef struct sw_optim_kernels {
    sw_adam_fn *adam;
    sw_sgd_fn *sgd;
    sw_norm_fn *norm;
} sw_optim_kernels;
