/* powersgd.h - one matrix under PowerSGD (Vogels, Karimireddy, Jaggi 2019), with local error
 * feedback.
 *
 * Idea: a step is three passes with two sums over ranks between them:
 *
 *   sw_powersgd_project      gradient = v = gradient + error of the last step; P = v Q
 *     ... the ranks' P are averaged ...
 *   sw_powersgd_absorb       P̂ = orthonormal P; own Q = vᵀ P̂; memory = v
 *     ... the ranks' own Q are averaged ...
 *   sw_powersgd_decompress   gradient = P̂ Qᵀ; the next step's basis = orthonormal Q
 *
 * Until absorb nothing of the state changes: a step whose averaged P is not finite simply stops
 * there, and its gradient is lost anyway.
 *
 * Thread rule: one at a time for one matrix. Nothing is allocated; all memory is the caller's.
 */
#ifndef SW_COMPRESS_POWERSGD_H
#define SW_COMPRESS_POWERSGD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tensor/dtype.h"

/* Factors are `rank` rows of sw_powersgd_stride() elements, zeros beyond rows or cols. */
typedef struct sw_powersgd {
    float *gradient; /* rows x cols, row-major; borrowed for one step; the result at its end */
    void *
        memory; /* rows x cols of memory_dtype; borrowed; NULL: no error feedback. Zeros at first */
    float *left;  /* rank x rows: P̂ of the last step. Zeros at first */
    float *right; /* rank x cols: own Q of the last step. Zeros at first */
    float
        *basis; /* rank x cols: orthonormal Q of the last step; sw_powersgd_init_basis() at first */
    size_t rows, cols, rank;
    uint64_t seed;         /* of replacements in orthonormalisation; the same on every rank */
    sw_dtype memory_dtype; /* float32 or bfloat16 */
} sw_powersgd;

/* Elements of a row of a factor. */
size_t sw_powersgd_stride(size_t count);
/* SW_E_INVALID unless rank is in [1, min(rows, cols, 256)] and memory_dtype one of the two. */
SW_MUST_USE sw_status sw_powersgd_check(const sw_powersgd *matrix, sw_error *err);
/* basis = orthonormal pseudo-random rows of `seed`. */
void sw_powersgd_init_basis(const sw_powersgd *matrix);
/* p (rank x rows) is written, and gradient. */
void sw_powersgd_project(const sw_powersgd *matrix, float *p);
/* p: the ranks' average, which becomes P̂ in place; q (rank x cols) is written. left, right and
 * memory change. */
void sw_powersgd_absorb(const sw_powersgd *matrix, float *p, float *q);
/* q: the ranks' average. gradient and basis change. */
void sw_powersgd_decompress(const sw_powersgd *matrix, const float *q);
/* error (rows x cols) = what the state still owes: memory - left right. */
void sw_powersgd_error(const sw_powersgd *matrix, float *error);
/* Whether all of `numel` values are finite. */
bool sw_powersgd_is_finite(const float *values, size_t numel);
/* Rows of `factor` (rank x count) made orthonormal; see sw_lowrank_orthonormalize_fn. */
void sw_powersgd_orthonormalize(float *factor, size_t count, size_t rank, uint64_t seed);

#endif
