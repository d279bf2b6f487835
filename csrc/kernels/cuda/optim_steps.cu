/* optim_steps.cu - ADAM and SGD: host/optim_body.h's arithmetic, element by element. Each run is
 * passed by the whole grid. */

SW_INLINE void sw_adam_run(const sw_adam_args &a, const sw_run_args &run)
{
    const bool small_lerp = a.lerp < 0.5f;
    const float lerp = small_lerp ? a.lerp : a.lerp - 1.0f;
    SW_EACH(i, run.numel)
    {
        float gradient = sw_load(run.g, i, run.g_dtype) * a.factor;
        float parameter = sw_load(run.p, i, run.p_dtype);
        float old = sw_load(run.m, i, run.state_dtype);
        if (a.l2 != 0.0f)
            gradient = __fmaf_rn(parameter, a.l2, gradient);
        else
            parameter = parameter * a.decay;
        float first = __fmaf_rn(lerp, gradient - old, small_lerp ? old : gradient);
        float second = __fmaf_rn(a.square * gradient, gradient,
                                 sw_load(run.v, i, run.state_dtype) * a.beta2);
        sw_store(run.m, i, run.state_dtype, first);
        sw_store(run.v, i, run.state_dtype, second);
        if (a.amsgrad) {
            float most = sw_load(run.v_max, i, run.state_dtype);
            second = (most > second || most != most) ? most : second;
            sw_store(run.v_max, i, run.state_dtype, second);
        }
        float denominator = __fdiv_rn(__fsqrt_rn(second), a.correction) + a.eps;
        parameter = parameter + __fdiv_rn(a.negative_step * first, denominator);
        sw_store(run.p, i, run.p_dtype, parameter);
        if (run.copy)
            sw_store(run.copy, i, run.copy_dtype, parameter);
    }
}

SW_KERNEL sw_adam(const sw_adam_args a)
{
    for (int r = 0; r < a.run_count; ++r)
        sw_adam_run(a, a.run[r]);
}

SW_INLINE void sw_sgd_run(const sw_sgd_args &a, const sw_run_args &run)
{
    SW_EACH(i, run.numel)
    {
        float gradient = sw_load(run.g, i, run.g_dtype) * a.factor;
        float parameter = sw_load(run.p, i, run.p_dtype);
        if (a.l2 != 0.0f)
            gradient = __fmaf_rn(parameter, a.l2, gradient);
        if (a.momentum != 0.0f) {
            float buffer = gradient;
            if (!a.first)
                buffer = __fmaf_rn(gradient, a.undampening,
                                   sw_load(run.m, i, run.state_dtype) * a.momentum);
            sw_store(run.m, i, run.state_dtype, buffer);
            gradient = a.nesterov ? __fmaf_rn(buffer, a.momentum, gradient) : buffer;
        }
        parameter = __fmaf_rn(gradient, a.negative_lr, parameter);
        sw_store(run.p, i, run.p_dtype, parameter);
        if (run.copy)
            sw_store(run.copy, i, run.copy_dtype, parameter);
    }
}

SW_KERNEL sw_sgd(const sw_sgd_args a)
{
    for (int r = 0; r < a.run_count; ++r)
        sw_sgd_run(a, a.run[r]);
}
