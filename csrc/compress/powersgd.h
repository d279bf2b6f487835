/* powersgd.h - PowerSGD of one matrix (Vogels, Karimireddy, Jaggi 2019), with local error feedback.
 *
 * A step is three passes with two sums over ranks between them:
 *
 *   sw_powersgd_project      gradient = v = gradient + error of the last step; P = v Q
 *     ... the ranks' P are averaged ...
 *   sw_powersgd_absorb       P̂ = orthonormal P; own Q = vᵀ P̂; memory = v
 *     ... the ranks' own Q are averaged ...
 *   sw_powersgd_decompress   gradient = P̂ Qᵀ; the next step's basis = orthonormal Q
 *
 * The state does not change before absorb. If the averaged P is not finite, the caller stops before
 * absorb, and the step's gradient is lost.
 *
 * Thread rule: one at a time per matrix. Nothing is allocated; all memory is the caller's.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tensor/dtype.h"

/* Factors have `rank` rows of sw_powersgd_stride() elements, with zeros beyond rows or cols. */
typedef struct sw_powersgd {
    float
        *gradient; /* rows x cols, row-major; borrowed for one step; holds the result at its end */
    void *memory;  /* rows x cols of memory_dtype; borrowed; NULL: no error feedback. Zeros at
                      first */
    float *left;   /* rank x rows: P̂ of the last step. Zeros at first */
    float *right;  /* rank x cols: own Q of the last step. Zeros at first */
    float *basis;  /* rank x cols: orthonormal Q of the last step; sw_powersgd_init_basis() at
                      first */
    size_t rows, cols, rank;
    uint64_t seed;         /* seeds the replacements in orthonormalisation; equal on all ranks */
    sw_dtype memory_dtype; /* float32 or bfloat16 */
} sw_powersgd;

/* Return the number of elements from one row of a factor to the next. */
size_t sw_powersgd_stride(size_t count);
/* Return SW_E_INVALID unless rank is in [1, min(rows, cols, 256)] and memory_dtype is legal. */
SW_MUST_USE sw_status sw_powersgd_check(const sw_powersgd *matrix, sw_error *err);
/* basis = orthonormal pseudo-random rows from `seed`. */
void sw_powersgd_init_basis(const sw_powersgd *matrix);
/* Write p (rank x rows) and gradient. */
void sw_powersgd_project(const sw_powersgd *matrix, float *p);
/* Take p, the ranks' average, and orthonormalise it to P̂ in place; write q (rank x cols), left,
 * right and memory. */
void sw_powersgd_absorb(const sw_powersgd *matrix, float *p, float *q);
/* Take q, the ranks' average; write gradient and basis. */
void sw_powersgd_decompress(const sw_powersgd *matrix, const float *q);
/* Return true if all of `numel` values are finite. */
bool sw_powersgd_is_finite(const float *values, size_t numel);
/* Make the rows of `factor` (rank x count) orthonormal; see sw_lowrank_orthonormalize_fn. */
void sw_powersgd_orthonormalize(float *factor, size_t count, size_t rank, uint64_t seed);
