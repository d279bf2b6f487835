/* optim.h - one step of Adam, AdamW or SGD over an array of runs.
 *
 * Hyperparameters are doubles, as the user gave them. They are converted to the kernels' float32
 * scalars once per distinct step count. A run is a whole tensor or a slice of an arena: the bits do
 * not depend on which (docs/design/optim.md).
 *
 * Thread rule: any, as long as two threads do not share a run. Nothing is kept.
 */
#pragma once

#include "base/status.h"
#include "kernels/optim_kernels.h"

typedef struct sw_adam_options {
    double lr, beta1, beta2, eps, weight_decay;
    double grad_scale; /* each gradient is multiplied by (float)grad_scale: clip factor divided by
                          loss scale; 1 for none */
    bool decoupled;    /* AdamW: the decay acts on the parameter, not through the gradient */
    bool amsgrad, maximize;
    uint64_t seed; /* of runs that are rounded at random */
} sw_adam_options;

typedef struct sw_sgd_options {
    double lr, momentum, dampening, weight_decay;
    double grad_scale; /* as in sw_adam_options */
    bool nesterov, maximize;
} sw_sgd_options;

/* Update every run in order. SGD with momentum treats step 1 of a run as the first: the buffer is
 * set to the gradient, regardless of its contents.
 *
 * `runs` has `count` runs (0: nothing happens), with fields as in kernels/optim_kernels.h. p, g, m
 * (SGD: with momentum), v (Adam) and v_max (amsgrad) may be NULL only if numel is 0; step counts
 * from 1.
 *
 * Errors come before anything is written, and `err` names the run by its index. SW_E_INVALID for an
 * option out of torch's range: lr, eps, weight_decay >= 0, betas in [0, 1), momentum >= 0, nesterov
 * with momentum > 0 and dampening 0, a finite grad_scale. SW_E_INVALID for a dtype that is not
 * float32, bfloat16 or float16, a missing array, a step below 1, amsgrad with a run that is rounded
 * at random, or records of one that is not, or that begins inside a block. */
SW_MUST_USE sw_status sw_adam_step(const sw_adam_options *options, const sw_optim_run *runs,
                                   size_t count, sw_error *err);
SW_MUST_USE sw_status sw_sgd_step(const sw_sgd_options *options, const sw_optim_run *runs,
                                  size_t count, sw_error *err);

/* Return the scalars of the kernels for a run of that step. */
sw_adam_scalars sw_adam_scalars_of(const sw_adam_options *options, int64_t step);
sw_sgd_scalars sw_sgd_scalars_of(const sw_sgd_options *options, int64_t step);

/* Return the errors of a step without doing it. */
SW_MUST_USE sw_status sw_adam_check(const sw_adam_options *options, const sw_optim_run *runs,
                                    size_t count, sw_error *err);
SW_MUST_USE sw_status sw_sgd_check(const sw_sgd_options *options, const sw_optim_run *runs,
                                   size_t count, sw_error *err);
