/* optim_steps.cu - ADAM and SGD: host/optim_body.h's arithmetic, element by element.
 *
 * All runs are cut into tiles that blocks of threads take in turns, so many small runs keep as many
 * blocks busy as one large run. A thread takes four elements and loads its four of every array
 * before it uses one. If all are float32 the dtypes are compile-time constants; else a thread
 * tests them once for four elements, after the loads. A run with an array that is not on a boundary
 * of four elements, and the last elements of a run, go four elements of a tile apart.
 */

enum { SW_RUN_TILE_NUMEL = 1024 };

/* The dtypes of a run: all float32, or as the run says. */
template <bool PLAIN> struct sw_run_dtypes {
    const sw_run_args &run;

    SW_METHOD int p() const
    {
        return PLAIN ? SW_ARG_FLOAT32 : run.p_dtype;
    }
    SW_METHOD int state() const
    {
        return PLAIN ? SW_ARG_FLOAT32 : run.state_dtype;
    }
    SW_METHOD int g() const
    {
        return PLAIN ? SW_ARG_FLOAT32 : run.g_dtype;
    }
};

/* Multiply four gradients, round them to their dtype as torch's mul_ does, and write them back. */
template <bool WIDE>
SW_INLINE void sw_clip_four(const sw_run_args &run, const sw_four<WIDE> &at, float *g, int dtype,
                            float clip)
{
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        g[k] = g[k] * clip;
        if (dtype == SW_ARG_BFLOAT16)
            g[k] = sw_bfloat16_widen(sw_bfloat16_narrow(g[k]));
        else if (dtype == SW_ARG_FLOAT16)
            g[k] = sw_float16_widen(sw_float16_narrow(g[k]));
    }
    at.store((void *)run.g, g, dtype);
}

/* Replace masters by their parameters where they do not round to them: other code has written the
 * parameters. Bits are compared, so -0 is not 0. */
template <bool WIDE>
SW_INLINE void sw_take_written(float *p, const sw_four<WIDE> &at, const sw_lane16 &raw, int dtype)
{
    const sw_lane16 rounded = at.narrow(p, dtype);
    float written[4];
    at.widen(written, raw, dtype);
#pragma unroll
    for (int k = 0; k < 4; ++k)
        p[k] = rounded.word[k] == at.bits(raw, k, dtype) ? p[k] : written[k];
}

/* The step of one launch on four elements of a run. */
struct sw_adam_step {
    const sw_adam_args &a;
    const float clip; /* 1: gradients stay */

    template <bool WIDE, bool PLAIN>
    SW_METHOD void four(const sw_run_args &run, const sw_four<WIDE> &at) const
    {
        const sw_run_dtypes<PLAIN> dtype = {run};
        const bool small_lerp = a.lerp < 0.5f;
        const float lerp = small_lerp ? a.lerp : a.lerp - 1.0f;
        float g[4], p[4], m[4], v[4], most[4];
        const sw_lane16 raw_g = at.load(run.g, dtype.g()), raw_p = at.load(run.p, dtype.p());
        const sw_lane16 raw_m = at.load(run.m, dtype.state());
        const sw_lane16 raw_v = at.load(run.v, dtype.state());
        sw_lane16 raw_most = {}, raw_copy = {};
        if (run.copy)
            raw_copy = at.load(run.copy, run.copy_dtype);
        if (a.amsgrad)
            raw_most = at.load(run.v_max, dtype.state());
        at.widen(g, raw_g, dtype.g());
        at.widen(p, raw_p, dtype.p());
        at.widen(m, raw_m, dtype.state());
        at.widen(v, raw_v, dtype.state());
        at.widen(most, raw_most, dtype.state());
        if (run.copy)
            sw_take_written(p, at, raw_copy, run.copy_dtype);
        if (clip != 1.0f)
            sw_clip_four(run, at, g, dtype.g(), clip);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float gradient = g[k] * a.factor, parameter = p[k];
            if (a.l2 != 0.0f)
                gradient = __fmaf_rn(parameter, a.l2, gradient);
            else
                parameter = parameter * a.decay;
            m[k] = __fmaf_rn(lerp, gradient - m[k], small_lerp ? m[k] : gradient);
            v[k] = __fmaf_rn(a.square * gradient, gradient, v[k] * a.beta2);
            float second = v[k];
            if (a.amsgrad)
                second = most[k] = (most[k] > second || most[k] != most[k]) ? most[k] : second;
            const float denominator = __fdiv_rn(__fsqrt_rn(second), a.correction) + a.eps;
            p[k] = parameter + __fdiv_rn(a.negative_step * m[k], denominator);
        }
        at.store(run.m, m, dtype.state());
        at.store(run.v, v, dtype.state());
        if (a.amsgrad)
            at.store(run.v_max, most, dtype.state());
        at.store(run.p, p, dtype.p());
        if (run.copy)
            at.store(run.copy, p, run.copy_dtype);
    }

    SW_METHOD bool is_wide(const sw_run_args &run) const
    {
        return sw_is_wide(run.m, run.state_dtype) && sw_is_wide(run.v, run.state_dtype) &&
               (!a.amsgrad || sw_is_wide(run.v_max, run.state_dtype));
    }

    SW_METHOD bool has_state() const
    {
        return true;
    }
};

struct sw_sgd_step {
    const sw_sgd_args &a;
    const float clip;

    template <bool WIDE, bool PLAIN>
    SW_METHOD void four(const sw_run_args &run, const sw_four<WIDE> &at) const
    {
        const sw_run_dtypes<PLAIN> dtype = {run};
        const bool has_buffer = has_state(), reads_buffer = has_buffer && !a.first;
        float g[4], p[4], m[4];
        const sw_lane16 raw_g = at.load(run.g, dtype.g()), raw_p = at.load(run.p, dtype.p());
        sw_lane16 raw_m = {}, raw_copy = {};
        if (run.copy)
            raw_copy = at.load(run.copy, run.copy_dtype);
        if (reads_buffer)
            raw_m = at.load(run.m, dtype.state());
        at.widen(g, raw_g, dtype.g());
        at.widen(p, raw_p, dtype.p());
        at.widen(m, raw_m, dtype.state());
        if (run.copy)
            sw_take_written(p, at, raw_copy, run.copy_dtype);
        if (clip != 1.0f)
            sw_clip_four(run, at, g, dtype.g(), clip);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            float gradient = g[k] * a.factor;
            if (a.l2 != 0.0f)
                gradient = __fmaf_rn(p[k], a.l2, gradient);
            if (has_buffer) {
                m[k] =
                    reads_buffer ? __fmaf_rn(gradient, a.undampening, m[k] * a.momentum) : gradient;
                gradient = a.nesterov ? __fmaf_rn(m[k], a.momentum, gradient) : m[k];
            }
            p[k] = __fmaf_rn(gradient, a.negative_lr, p[k]);
        }
        if (has_buffer)
            at.store(run.m, m, dtype.state());
        at.store(run.p, p, dtype.p());
        if (run.copy)
            at.store(run.copy, p, run.copy_dtype);
    }

    SW_METHOD bool is_wide(const sw_run_args &run) const
    {
        return !has_state() || sw_is_wide(run.m, run.state_dtype);
    }

    SW_METHOD bool has_state() const
    {
        return a.momentum != 0.0f;
    }
};

/* Step elements [start, end) of a run by a block. `start` is a multiple of a tile's elements. */
template <class STEP>
SW_INLINE void sw_run_tile(const STEP &step, const sw_run_args &run, sw_u64 start, sw_u64 end)
{
    const bool is_wide = sw_is_wide(run.p, run.p_dtype) && sw_is_wide(run.g, run.g_dtype) &&
                         sw_is_wide(run.copy, run.copy_dtype) && step.is_wide(run);
    const bool is_plain = run.p_dtype == SW_ARG_FLOAT32 && run.g_dtype == SW_ARG_FLOAT32 &&
                          (!step.has_state() || run.state_dtype == SW_ARG_FLOAT32);
    const sw_u64 covered = is_wide ? start + (end - start) / 4 * 4 : start;
    for (sw_u64 i = start + 4 * threadIdx.x; i < covered; i += 4 * blockDim.x) {
        const sw_four<true> at = {i, 0, 0};
        if (is_plain)
            step.template four<true, true>(run, at);
        else
            step.template four<true, false>(run, at);
    }
    for (sw_u64 i = covered + threadIdx.x; i < end; i += 4 * blockDim.x)
        step.template four<false, false>(run, {i, blockDim.x, end});
}

template <class ARGS> SW_INLINE sw_u64 sw_run_tiles(const ARGS &a, int i)
{
    return sw_parts(a.run[i].numel, SW_RUN_TILE_NUMEL);
}

template <class STEP, class ARGS> SW_INLINE void sw_runs(const STEP &step, const ARGS &a)
{
    sw_u64 first = 0;
    int i = 0;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<ARGS, sw_run_tiles<ARGS>>(a, a.run_count, i, first, at);
        if (i == a.run_count)
            return;
        const sw_u64 start = (at - first) * SW_RUN_TILE_NUMEL;
        sw_run_tile(step, a.run[i], start, sw_low(a.run[i].numel, start + SW_RUN_TILE_NUMEL));
    }
}

SW_INLINE float sw_clip_of(const void *clip)
{
    return clip ? *(const float *)clip : 1.0f;
}

SW_KERNEL_OF(4) sw_adam(const sw_adam_args a)
{
    sw_runs(sw_adam_step{a, sw_clip_of(a.clip)}, a);
}

SW_KERNEL_OF(4) sw_sgd(const sw_sgd_args a)
{
    sw_runs(sw_sgd_step{a, sw_clip_of(a.clip)}, a);
}
