/* device_step.c - pack runs into kernel arguments and launch; see device_step.h. */
#include "optim/device_step.h"

static sw_run_args args_of(const sw_optim_run *run)
{
    return (sw_run_args){.p = run->p,
                         .m = run->m,
                         .v = run->v,
                         .v_max = run->v_max,
                         .g = run->g,
                         .copy = run->copy,
                         .numel = run->numel,
                         .p_dtype = (int)run->p_dtype,
                         .state_dtype = (int)run->state_dtype,
                         .g_dtype = (int)run->g_dtype,
                         .copy_dtype = (int)run->copy_dtype};
}

/* Pack the next runs of one step count, without empty runs, and move *at behind them. */
static int take_runs(sw_run_args *to, const sw_optim_run *runs, size_t count, size_t *at,
                     int64_t step)
{
    int taken = 0;
    for (; *at < count && runs[*at].step == step && taken < SW_RUNS_MAX; ++*at)
        if (runs[*at].numel > 0)
            to[taken++] = args_of(&runs[*at]);
    return taken;
}

sw_status sw_device_adam_step(const sw_kernel_set *kernels, const sw_adam_options *options,
                              const sw_optim_run *runs, size_t count, const void *clip,
                              sw_stream *stream, sw_error *err)
{
    SW_TRY(sw_adam_check(options, runs, count, err));
    SW_TRY(sw_device_refuse_capture(kernels->device, stream, "an optimizer's step", err));
    for (size_t at = 0; at < count;) {
        int64_t step = runs[at].step;
        sw_adam_scalars s = sw_adam_scalars_of(options, step);
        sw_adam_args args = {.clip = clip,
                             .factor = s.factor,
                             .decay = s.decay,
                             .l2 = s.l2,
                             .lerp = s.lerp,
                             .beta2 = s.beta2,
                             .square = s.square,
                             .correction = s.correction,
                             .eps = s.eps,
                             .negative_step = s.negative_step,
                             .amsgrad = s.amsgrad};
        args.run_count = take_runs(args.run, runs, count, &at, step);
        if (args.run_count > 0)
            SW_TRY(sw_kernel_launch(kernels, SW_KERNEL_ADAM, &args, stream, err));
    }
    return SW_OK;
}

sw_status sw_device_sgd_step(const sw_kernel_set *kernels, const sw_sgd_options *options,
                             const sw_optim_run *runs, size_t count, const void *clip,
                             sw_stream *stream, sw_error *err)
{
    SW_TRY(sw_sgd_check(options, runs, count, err));
    SW_TRY(sw_device_refuse_capture(kernels->device, stream, "an optimizer's step", err));
    for (size_t at = 0; at < count;) {
        int64_t step = runs[at].step;
        sw_sgd_scalars s = sw_sgd_scalars_of(options, step);
        sw_sgd_args args = {.clip = clip,
                            .factor = s.factor,
                            .l2 = s.l2,
                            .momentum = s.momentum,
                            .undampening = s.undampening,
                            .negative_lr = s.negative_lr,
                            .nesterov = s.nesterov,
                            .first = s.first};
        args.run_count = take_runs(args.run, runs, count, &at, step);
        if (args.run_count > 0)
            SW_TRY(sw_kernel_launch(kernels, SW_KERNEL_SGD, &args, stream, err));
    }
    return SW_OK;
}
