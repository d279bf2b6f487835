/* optim.c - check options, round the scalars once, and call the kernel table in force. */
#include "optim/optim.h"

#include <math.h>

#include "kernels/kernels.h"

typedef enum optim_kind { KIND_ADAM, KIND_ADAM_AMSGRAD, KIND_SGD, KIND_SGD_MOMENTUM } optim_kind;

static sw_status check_range(const char *option, double value, double below, sw_error *err)
{
    if (value >= 0.0 && value < below)
        return SW_OK;
    if (isinf(below))
        SW_FAIL(err, SW_E_INVALID, "%s must be finite and at least 0, not %g", option, value);
    SW_FAIL(err, SW_E_INVALID, "%s must be in [0, %g), not %g", option, below, value);
}

static sw_status check_grad_scale(const char *operation, double value, sw_error *err)
{
    if (!isfinite(value))
        SW_FAIL(err, SW_E_INVALID, "%s: grad_scale must be finite, not %g", operation, value);
    return SW_OK;
}

static bool is_narrow(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT32 || dtype == SW_DTYPE_BFLOAT16 || dtype == SW_DTYPE_FLOAT16;
}

static sw_status check_dtype(const char *operation, size_t index, const char *array, sw_dtype dtype,
                             sw_error *err)
{
    if (!is_narrow(dtype))
        SW_FAIL(err, SW_E_INVALID,
                "%s: the %s of run %zu must be float32, bfloat16 or float16, not %s", operation,
                array, index, sw_dtype_name(dtype));
    return SW_OK;
}

static sw_status check_state(const char *operation, size_t index, const sw_optim_run *run,
                             sw_error *err)
{
    if (run->state_dtype != SW_DTYPE_UINT8 || !run->is_random)
        return check_dtype(operation, index, "state", run->state_dtype, err);
    if (run->origin % SW_MOMENT_BLOCK_NUMEL != 0)
        SW_FAIL(err, SW_E_INVALID,
                "%s: run %zu must begin at a multiple of %d elements of its parameter, not at %llu",
                operation, index, SW_MOMENT_BLOCK_NUMEL,
                (unsigned long long)(run->origin & (((uint64_t)1 << 40) - 1)));
    return SW_OK;
}

static const char *missing_array(const sw_optim_run *run, optim_kind kind)
{
    bool adam = kind == KIND_ADAM || kind == KIND_ADAM_AMSGRAD;
    if (run->numel == 0)
        return NULL;
    if (!run->p)
        return "parameter";
    if (!run->g)
        return "gradient";
    if (!run->m && kind != KIND_SGD)
        return adam ? "first moment" : "momentum buffer";
    if (!run->v && adam)
        return "second moment";
    return !run->v_max && kind == KIND_ADAM_AMSGRAD ? "maximum of the second moment" : NULL;
}

static sw_status check_runs(const char *operation, const sw_optim_run *runs, size_t count,
                            optim_kind kind, sw_error *err)
{
    for (size_t i = 0; i < count; ++i) {
        const char *missing = missing_array(&runs[i], kind);
        if (missing)
            SW_FAIL(err, SW_E_INVALID, "%s: run %zu of %zu elements has no %s", operation, i,
                    runs[i].numel, missing);
        SW_TRY(check_dtype(operation, i, "parameter", runs[i].p_dtype, err));
        SW_TRY(check_dtype(operation, i, "gradient", runs[i].g_dtype, err));
        if (kind != KIND_SGD)
            SW_TRY(check_state(operation, i, &runs[i], err));
        if (runs[i].copy)
            SW_TRY(check_dtype(operation, i, "copy", runs[i].copy_dtype, err));
        if (runs[i].step < 1)
            SW_FAIL(err, SW_E_INVALID, "%s: step of run %zu must be at least 1, not %lld",
                    operation, i, (long long)runs[i].step);
    }
    return SW_OK;
}

/* ---- Adam ---- */

static sw_status check_adam_options(const sw_adam_options *options, sw_error *err)
{
    SW_TRY(check_range("adam_step: lr", options->lr, INFINITY, err));
    SW_TRY(check_range("adam_step: beta1", options->beta1, 1.0, err));
    SW_TRY(check_range("adam_step: beta2", options->beta2, 1.0, err));
    SW_TRY(check_range("adam_step: eps", options->eps, INFINITY, err));
    SW_TRY(check_range("adam_step: weight_decay", options->weight_decay, INFINITY, err));
    return check_grad_scale("adam_step", options->grad_scale, err);
}

sw_adam_scalars sw_adam_scalars_of(const sw_adam_options *options, int64_t step)
{
    double correction1 = 1.0 - pow(options->beta1, (double)step);
    double correction2 = 1.0 - pow(options->beta2, (double)step);
    double decay = options->decoupled ? 1.0 - options->lr * options->weight_decay : 1.0;
    return (sw_adam_scalars){
        .factor = (float)(options->maximize ? -options->grad_scale : options->grad_scale),
        .decay = (float)decay,
        .l2 = options->decoupled ? 0.0f : (float)options->weight_decay,
        .lerp = (float)(1.0 - options->beta1),
        .beta2 = (float)options->beta2,
        .square = (float)(1.0 - options->beta2),
        .correction = (float)sqrt(correction2),
        .eps = (float)options->eps,
        .negative_step = (float)(-(options->lr / correction1)),
        .amsgrad = options->amsgrad,
        .seed = options->seed,
    };
}

sw_status sw_adam_check(const sw_adam_options *options, const sw_optim_run *runs, size_t count,
                        sw_error *err)
{
    SW_TRY(check_adam_options(options, err));
    for (size_t i = 0; i < count; ++i)
        if (runs[i].is_random && options->amsgrad)
            SW_FAIL(err, SW_E_INVALID, "adam_step: run %zu: amsgrad has no random rounding", i);
    return check_runs("adam_step", runs, count, options->amsgrad ? KIND_ADAM_AMSGRAD : KIND_ADAM,
                      err);
}

sw_status sw_adam_step(const sw_adam_options *options, const sw_optim_run *runs, size_t count,
                       sw_error *err)
{
    SW_TRY(sw_adam_check(options, runs, count, err));
    sw_adam_fn *kernel = sw_kernels()->optim->adam;
    sw_adam_scalars scalars = {0};
    for (size_t i = 0; i < count; ++i) {
        if (i == 0 || runs[i].step != runs[i - 1].step)
            scalars = sw_adam_scalars_of(options, runs[i].step);
        kernel(&runs[i], &scalars);
    }
    return SW_OK;
}

/* ---- SGD ---- */

static sw_status check_sgd_options(const sw_sgd_options *options, sw_error *err)
{
    SW_TRY(check_range("sgd_step: lr", options->lr, INFINITY, err));
    SW_TRY(check_range("sgd_step: momentum", options->momentum, INFINITY, err));
    SW_TRY(check_range("sgd_step: weight_decay", options->weight_decay, INFINITY, err));
    if (!isfinite(options->dampening))
        SW_FAIL(err, SW_E_INVALID, "sgd_step: dampening must be finite, not %g",
                options->dampening);
    if (options->nesterov && (options->momentum <= 0.0 || options->dampening != 0.0))
        SW_FAIL(err, SW_E_INVALID,
                "sgd_step: nesterov needs momentum > 0 and dampening 0, not %g and %g",
                options->momentum, options->dampening);
    return check_grad_scale("sgd_step", options->grad_scale, err);
}

sw_status sw_sgd_check(const sw_sgd_options *options, const sw_optim_run *runs, size_t count,
                       sw_error *err)
{
    SW_TRY(check_sgd_options(options, err));
    return check_runs("sgd_step", runs, count,
                      options->momentum != 0.0 ? KIND_SGD_MOMENTUM : KIND_SGD, err);
}

sw_sgd_scalars sw_sgd_scalars_of(const sw_sgd_options *options, int64_t step)
{
    return (sw_sgd_scalars){
        .factor = (float)(options->maximize ? -options->grad_scale : options->grad_scale),
        .l2 = (float)options->weight_decay,
        .momentum = (float)options->momentum,
        .undampening = (float)(1.0 - options->dampening),
        .negative_lr = (float)-options->lr,
        .nesterov = options->nesterov,
        .first = step == 1,
    };
}

sw_status sw_sgd_step(const sw_sgd_options *options, const sw_optim_run *runs, size_t count,
                      sw_error *err)
{
    SW_TRY(sw_sgd_check(options, runs, count, err));
    sw_sgd_fn *kernel = sw_kernels()->optim->sgd;
    for (size_t i = 0; i < count; ++i) {
        sw_sgd_scalars scalars = sw_sgd_scalars_of(options, runs[i].step);
        kernel(&runs[i], &scalars);
    }
    return SW_OK;
}
