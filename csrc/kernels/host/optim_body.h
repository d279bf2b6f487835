/* optim_body.h - one step of Adam and of SGD; compiled once per instruction set.
 *
 * Loops are plain C over float32 that the compiler vectorises. Every rounding is written out, and
 * every fused multiply-add goes through fused(). Options that change a loop are compile-time
 * constants of a forced inline. A run is cut into blocks that stay in the L1 cache; half arrays are
 * widened into it and rounded out of it. A run that is all float32, and the usual bfloat16 forms of
 * Adam, are one uncut loop.
 *
 * The includer defines OPTIM_TABLE and, if the processor has them, KERNEL_FMA and KERNEL_F16C, and
 * has included norm_body.h. Left out: threads (callers split runs) and argument checks
 * (csrc/optim).
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/half_body.h"
#include "kernels/host/stream_body.h"
#include "kernels/host/tables.h"
#include "platform/cpu.h"

enum { OPTIM_BLOCK_NUMEL = 1024, OPTIM_CHUNK_NUMEL = 64 };
/* which array of a parameter is rounded at random */
#define OF_V 1u
#define OF_P 2u
#define OF_M ((uint64_t)1 << 32)

#if defined(__clang__)
#define OPTIM_LANES _Pragma("clang loop vectorize(assume_safety)")
#else
#define OPTIM_LANES _Pragma("GCC ivdep")
#endif
#define OPTIM_INLINE static inline __attribute__((always_inline))

#include "kernels/host/moment_body.h"

/* Return a*b + c rounded once. Without the instruction, the product is exact in double and the
 * sum's rounding error is recovered exactly (Knuth's two-sum). An inexact sum with an even last bit
 * is moved one unit towards the exact value. It is then rounded to odd, so the final rounding is
 * not a double one (Boldo and Melquiond, Emulation of FMA and Correctly Rounded Sums, 2008).
 * Infinities and NaN have a NaN error and are not moved. */
OPTIM_INLINE float fused(float a, float b, float c)
{
#if defined(KERNEL_FMA)
    return __builtin_fmaf(a, b, c);
#else
    double product = (double)a * (double)b, addend = (double)c;
    double sum = product + addend;
    double part = sum - product;
    double error = (product - (sum - part)) + (addend - part);
    uint64_t sum_bits, error_bits, inexact = (uint64_t)((error < 0.0) | (error > 0.0));
    memcpy(&sum_bits, &sum, sizeof sum_bits);
    memcpy(&error_bits, &error, sizeof error_bits);
    uint64_t move = inexact & ~sum_bits & 1u;
    sum_bits += move - 2u * (move & ((sum_bits ^ error_bits) >> 63));
    memcpy(&sum, &sum_bits, sizeof sum);
    return (float)sum;
#endif
}

typedef struct block { /* float32 arrays: in place, or widened into the caller's buffers */
    float *p, *m, *v, *v_max;
    const void *g;  /* float32, or bfloat16 in loops with half_gradient */
    uint16_t *copy; /* bfloat16, in loops with half_copy: the parameter of which p is the master */
    size_t count;
    void *half_m, *half_v; /* bfloat16, in loops with half_state, instead of m and v */
    uint32_t place, key;   /* the first element's, of random_bits() */
} block;

/* Set the random bits of a run from element `start` on. `which` tells arrays apart. */
static void set_place(block *at, const sw_optim_run *run, uint64_t seed, size_t start,
                      uint64_t which)
{
    uint64_t array = 2 * (run->origin >> 40) + which;
    uint64_t key = mixed(mixed(mixed(seed) + array) + (uint64_t)run->step);
    at->place = (uint32_t)key + (uint32_t)(run->origin + start) * PLACE_STEP;
    at->key = (uint32_t)(key >> 32);
}

/* Return the master; or its parameter, widened, if the master is a NaN or does not round to it:
 * other code has written the parameter. Bits are compared, so -0 is not 0. The sum holds what the
 * master rounds to in its upper half. */
OPTIM_INLINE float bfloat16_master(float master, uint16_t parameter)
{
    uint32_t bits = bits_from_float(master), held = (uint32_t)parameter << 16;
    uint32_t apart = bits + 0x7fffu + ((bits >> 16) & 1u) - held;
    return ((apart < 0x10000u) & (master == master)) ? master : float_from_bits(held);
}

/* ---- Adam ---- */

typedef struct adam_form { /* compile-time constants of one loop */
    bool l2, small_lerp, amsgrad, half_gradient, half_copy, half_state;
} adam_form;

/* Step elements start to start + count. */
OPTIM_INLINE void adam_elements(const block *at, size_t start, size_t count,
                                const sw_adam_scalars *with, const adam_form form)
{
    float *p = at->p + start, *m = form.half_state ? NULL : at->m + start;
    float *v = form.half_state ? NULL : at->v + start;
    uint16_t *half_m = form.half_state ? (uint16_t *)at->half_m + start : NULL;
    uint16_t *half_v = form.half_state ? (uint16_t *)at->half_v + start : NULL;
    const uint32_t key = at->key;
    uint32_t place = at->place + (uint32_t)start * PLACE_STEP;
    float *v_max = form.amsgrad ? at->v_max + start : NULL;
    const float *g = form.half_gradient ? NULL : (const float *)at->g + start;
    const uint16_t *half_g = form.half_gradient ? (const uint16_t *)at->g + start : NULL;
    uint16_t *copy = form.half_copy ? at->copy + start : NULL;
    const float factor = with->factor, decay = with->decay, weight = with->l2;
    const float beta2 = with->beta2, square = with->square;
    const float lerp = form.small_lerp ? with->lerp : with->lerp - 1.0f;
    const float correction = with->correction, eps = with->eps, negative_step = with->negative_step;
    OPTIM_LANES
    for (size_t i = 0; i < count; ++i) {
        float gradient = (form.half_gradient ? bfloat16_widen(half_g[i]) : g[i]) * factor;
        float parameter = form.half_copy ? bfloat16_master(p[i], copy[i]) : p[i];
        float old = form.half_state ? bfloat16_widen(half_m[i]) : m[i];
        float old_v = form.half_state ? bfloat16_widen(half_v[i]) : v[i];
        if (form.l2)
            gradient = fused(parameter, weight, gradient);
        else
            parameter = parameter * decay;
        float first = fused(lerp, gradient - old, form.small_lerp ? old : gradient);
        float second = fused(square * gradient, gradient, old_v * beta2);
        if (form.half_state) {
            half_m[i] = bfloat16_narrow(first);
            half_v[i] = bfloat16_narrow_randomly(second, random_bits(place, key));
            place += PLACE_STEP;
        } else {
            m[i] = first;
            v[i] = second;
        }
        if (form.amsgrad) {
            float most = v_max[i];
            second = ((most > second) | (most != most)) ? most : second;
            v_max[i] = second;
        }
        float denominator = sqrtf(second) / correction + eps;
        parameter = parameter + (negative_step * first) / denominator;
        p[i] = parameter;
        if (form.half_copy)
            copy[i] = bfloat16_narrow(parameter);
    }
}

/* Where prefetches pay, step chunk by chunk, since a loop that the compiler vectorises cannot
 * prefetch. With half_state they pay on AMD as well: the loop has more instructions an element. */
OPTIM_INLINE void adam_loop(const block *at, const sw_adam_scalars *with, const adam_form form)
{
    const size_t wide_bytes = OPTIM_CHUNK_NUMEL * sizeof(float),
                 half_bytes = OPTIM_CHUNK_NUMEL * sizeof(uint16_t);
    const size_t g_bytes = form.half_gradient ? half_bytes : wide_bytes;
    const size_t state_bytes = form.half_state ? half_bytes : wide_bytes;
    const char *m = form.half_state ? at->half_m : (const void *)at->m;
    const char *v = form.half_state ? at->half_v : (const void *)at->v;
    const bool prefetches = form.half_state || sw_prefetches();
    size_t i = 0;
    for (; prefetches && i + OPTIM_CHUNK_NUMEL <= at->count; i += OPTIM_CHUNK_NUMEL) {
        stream_ask(at->p + i, wide_bytes);
        stream_ask(m + i / OPTIM_CHUNK_NUMEL * state_bytes, state_bytes);
        stream_ask(v + i / OPTIM_CHUNK_NUMEL * state_bytes, state_bytes);
        stream_ask((const char *)at->g + i / OPTIM_CHUNK_NUMEL * g_bytes, g_bytes);
        if (form.half_copy)
            stream_ask(at->copy + i, half_bytes);
        adam_elements(at, i, OPTIM_CHUNK_NUMEL, with, form);
    }
    adam_elements(at, i, at->count - i, with, form);
}

/* The loops of the usual options (no amsgrad, beta1 > 1/2) take bfloat16 gradients and copies
 * directly. */
static void adam_usual(const block *at, const sw_adam_scalars *with, bool half_gradient,
                       bool half_copy)
{
    bool l2 = with->l2 != 0.0f;
    if (half_gradient && half_copy && l2)
        adam_loop(
            at, with,
            (adam_form){.small_lerp = true, .l2 = true, .half_gradient = true, .half_copy = true});
    else if (half_gradient && half_copy)
        adam_loop(at, with,
                  (adam_form){.small_lerp = true, .half_gradient = true, .half_copy = true});
    else if (half_gradient && l2)
        adam_loop(at, with, (adam_form){.small_lerp = true, .l2 = true, .half_gradient = true});
    else if (half_gradient)
        adam_loop(at, with, (adam_form){.small_lerp = true, .half_gradient = true});
    else if (half_copy && l2)
        adam_loop(at, with, (adam_form){.small_lerp = true, .l2 = true, .half_copy = true});
    else if (half_copy)
        adam_loop(at, with, (adam_form){.small_lerp = true, .half_copy = true});
    else if (l2)
        adam_loop(at, with, (adam_form){.small_lerp = true, .l2 = true});
    else
        adam_loop(at, with, (adam_form){.small_lerp = true});
}

/* The usual options with bfloat16 moments that are rounded at random. L2 goes through the cache. */
static void adam_half_state(const block *at, const sw_adam_scalars *with, bool half_gradient,
                            bool half_copy)
{
    if (half_gradient && half_copy)
        adam_loop(
            at, with,
            (adam_form){
                .small_lerp = true, .half_state = true, .half_gradient = true, .half_copy = true});
    else if (half_gradient)
        adam_loop(at, with,
                  (adam_form){.small_lerp = true, .half_state = true, .half_gradient = true});
    else if (half_copy)
        adam_loop(at, with, (adam_form){.small_lerp = true, .half_state = true, .half_copy = true});
    else
        adam_loop(at, with, (adam_form){.small_lerp = true, .half_state = true});
}

static bool is_usual(const sw_adam_scalars *with)
{
    return with->lerp < 0.5f && !with->amsgrad;
}

/* Step a block of float32 arrays. */
static void adam_block(const block *at, const sw_adam_scalars *with)
{
    bool l2 = with->l2 != 0.0f, small_lerp = with->lerp < 0.5f;
    if (is_usual(with))
        adam_usual(at, with, false, false);
    else if (l2 && with->amsgrad && small_lerp)
        adam_loop(at, with, (adam_form){.l2 = true, .amsgrad = true, .small_lerp = true});
    else if (l2 && with->amsgrad)
        adam_loop(at, with, (adam_form){.l2 = true, .amsgrad = true});
    else if (l2)
        adam_loop(at, with, (adam_form){.l2 = true});
    else if (with->amsgrad && small_lerp)
        adam_loop(at, with, (adam_form){.amsgrad = true, .small_lerp = true});
    else if (with->amsgrad)
        adam_loop(at, with, (adam_form){.amsgrad = true});
    else
        adam_loop(at, with, (adam_form){0});
}

/* ---- SGD ---- */

OPTIM_INLINE void sgd_loop(const block *at, const sw_sgd_scalars *with, const bool l2,
                           const bool buffered, const bool first)
{
    float *p = at->p, *m = at->m;
    const float *g = at->g;
    const float factor = with->factor, weight = with->l2, momentum = with->momentum,
                undampening = with->undampening;
    const float negative_lr = with->negative_lr;
    const bool nesterov = with->nesterov;
    OPTIM_LANES
    for (size_t i = 0; i < at->count; ++i) {
        float gradient = g[i] * factor, parameter = p[i];
        if (l2)
            gradient = fused(parameter, weight, gradient);
        if (buffered) {
            float buffer = first ? gradient : fused(gradient, undampening, m[i] * momentum);
            m[i] = buffer;
            gradient = nesterov ? fused(buffer, momentum, gradient) : buffer;
        }
        p[i] = fused(gradient, negative_lr, parameter);
    }
}

static void sgd_block(const block *at, const sw_sgd_scalars *with)
{
    bool buffered = with->momentum != 0.0f, l2 = with->l2 != 0.0f;
    if (!buffered && l2)
        sgd_loop(at, with, true, false, false);
    else if (!buffered)
        sgd_loop(at, with, false, false, false);
    else if (with->first && l2)
        sgd_loop(at, with, true, true, true);
    else if (with->first)
        sgd_loop(at, with, false, true, true);
    else if (l2)
        sgd_loop(at, with, true, true, false);
    else
        sgd_loop(at, with, false, true, false);
}

/* ---- runs: arrays that are not float32 go through the L1 cache ---- */

/* Return the address of element `at` of an array of that dtype. */
static void *element(void *array, size_t at, sw_dtype dtype)
{
    return array ? (unsigned char *)array + sw_optim_bytes(at, dtype) : NULL;
}

/* Return the block as float32: itself, or widened into `buffer`. */
static float *open_block(void *array, sw_dtype dtype, float *buffer, size_t count)
{
    if (!array || dtype == SW_DTYPE_FLOAT32)
        return array;
    if (dtype == SW_DTYPE_BFLOAT16)
        widen_bfloat16(buffer, array, count);
    else
        widen_float16(buffer, array, count);
    return buffer;
}

static float *open_moment(void *array, sw_dtype dtype, float *buffer, size_t count,
                          const moment_form form)
{
    if (!array || dtype != SW_DTYPE_UINT8)
        return open_block(array, dtype, buffer, count);
    moment_decode(buffer, array, count, form);
    return buffer;
}

static void store_block(void *array, sw_dtype dtype, const float *from, size_t count)
{
    if (!array || (const void *)from == array)
        return;
    if (dtype == SW_DTYPE_FLOAT32)
        memcpy(array, from, count * sizeof *from);
    else if (dtype == SW_DTYPE_BFLOAT16)
        narrow_bfloat16(array, from, count);
    else
        narrow_float16(array, from, count);
}

/* Store an array of a run whose bfloat16 is rounded at random. */
static void store_randomly(void *array, sw_dtype dtype, const float *from, const block *at)
{
    uint32_t place = at->place;
    uint16_t *half = array;
    if (dtype != SW_DTYPE_BFLOAT16) {
        store_block(array, dtype, from, at->count);
        return;
    }
    OPTIM_LANES
    for (size_t i = 0; i < at->count; ++i, place += PLACE_STEP)
        half[i] = bfloat16_narrow_randomly(from[i], random_bits(place, at->key));
}

static const float *open_gradient(const void *array, sw_dtype dtype, float *buffer, size_t count)
{
    if (dtype == SW_DTYPE_FLOAT32)
        return array;
    if (dtype == SW_DTYPE_BFLOAT16)
        widen_bfloat16(buffer, array, count);
    else
        widen_float16(buffer, array, count);
    return buffer;
}

static bool is_master(const sw_optim_run *run)
{
    return run->p_dtype == SW_DTYPE_FLOAT32 && run->state_dtype == SW_DTYPE_FLOAT32;
}

static bool is_plain(const sw_optim_run *run)
{
    return is_master(run) && run->g_dtype == SW_DTYPE_FLOAT32 && !run->copy;
}

typedef struct buffers {
    float p[OPTIM_BLOCK_NUMEL], m[OPTIM_BLOCK_NUMEL], v[OPTIM_BLOCK_NUMEL],
        v_max[OPTIM_BLOCK_NUMEL];
    float g[OPTIM_BLOCK_NUMEL], written[OPTIM_BLOCK_NUMEL];
    uint16_t rounded[OPTIM_BLOCK_NUMEL];
} buffers;

/* Set a block of masters to their parameter where they do not round to it. */
static void take_written(float *restrict master, const void *parameter, sw_dtype dtype,
                         buffers *restrict wide, size_t count)
{
    const uint16_t *held = parameter;
    const float *written = open_gradient(parameter, dtype, wide->written, count);
    if (dtype == SW_DTYPE_FLOAT32) {
        memcpy(master, written, count * sizeof *master);
        return;
    }
    store_block(wide->rounded, dtype, master, count);
    for (size_t i = 0; i < count; ++i)
        master[i] = wide->rounded[i] == held[i] ? master[i] : written[i];
}

static void open_run(block *at, buffers *wide, const sw_optim_run *run, size_t start)
{
    size_t left = run->numel - start, count = left < OPTIM_BLOCK_NUMEL ? left : OPTIM_BLOCK_NUMEL;
    sw_dtype state = run->state_dtype;
    const unsigned char *g = (const unsigned char *)run->g + sw_optim_bytes(start, run->g_dtype);
    at->count = count;
    at->p = open_block(element(run->p, start, run->p_dtype), run->p_dtype, wide->p, count);
    at->m = open_moment(element(run->m, start, state), state, wide->m, count, FORM_M);
    at->v = open_moment(element(run->v, start, state), state, wide->v, count, FORM_V);
    at->v_max = open_block(element(run->v_max, start, state), state, wide->v_max, count);
    at->g = open_gradient(g, run->g_dtype, wide->g, count);
    if (run->copy)
        take_written(at->p, element(run->copy, start, run->copy_dtype), run->copy_dtype, wide,
                     count);
}

static void close_run(const block *at, const sw_optim_run *run, size_t start)
{
    sw_dtype state = run->state_dtype;
    store_block(element(run->p, start, run->p_dtype), run->p_dtype, at->p, at->count);
    store_block(element(run->m, start, state), state, at->m, at->count);
    store_block(element(run->v, start, state), state, at->v, at->count);
    store_block(element(run->v_max, start, state), state, at->v_max, at->count);
    store_block(element(run->copy, start, run->copy_dtype), run->copy_dtype, at->p, at->count);
}

static void close_random(block *at, const sw_optim_run *run, size_t start, uint64_t seed)
{
    sw_optim_run nearest = *run;
    void *v = element(run->v, start, run->state_dtype);
    set_place(at, run, seed, start, OF_V);
    if (run->state_dtype == SW_DTYPE_UINT8) {
        moment_encode(v, at->v, at->count, at->place, at->key, FORM_V);
        set_place(at, run, seed, start, OF_M);
        moment_encode(element(run->m, start, run->state_dtype), at->m, at->count, at->place,
                      at->key, FORM_M);
        nearest.m = NULL;
    } else {
        store_randomly(v, run->state_dtype, at->v, at);
    }
    nearest.v = NULL;
    if (!run->copy) {
        set_place(at, run, seed, start, OF_P);
        store_randomly(element(run->p, start, run->p_dtype), run->p_dtype, at->p, at);
        nearest.p = NULL;
    }
    close_run(at, &nearest, start);
}

static void adam_run(const sw_optim_run *run, const sw_adam_scalars *with)
{
    block at = {.p = run->p,
                .m = run->m,
                .v = run->v,
                .v_max = run->v_max,
                .g = run->g,
                .copy = run->copy,
                .count = run->numel};
    bool half_gradient = run->g_dtype == SW_DTYPE_BFLOAT16,
         half_copy = run->copy_dtype == SW_DTYPE_BFLOAT16;
    bool is_direct = is_usual(with) && run->p_dtype == SW_DTYPE_FLOAT32 &&
                     (half_gradient || run->g_dtype == SW_DTYPE_FLOAT32) &&
                     (half_copy || !run->copy);
    if (is_plain(run)) {
        adam_block(&at, with);
        return;
    }
    if (is_direct && run->state_dtype == SW_DTYPE_FLOAT32) {
        adam_usual(&at, with, half_gradient, run->copy != NULL);
        return;
    }
    if (is_direct && run->is_random && run->state_dtype == SW_DTYPE_BFLOAT16 && with->l2 == 0.0f) {
        set_place(&at, run, with->seed, 0, OF_V);
        at.half_m = run->m;
        at.half_v = run->v;
        adam_half_state(&at, with, half_gradient, run->copy != NULL);
        return;
    }
    buffers wide;
    for (size_t start = 0; start < run->numel; start += OPTIM_BLOCK_NUMEL) {
        open_run(&at, &wide, run, start);
        adam_block(&at, with);
        if (run->is_random)
            close_random(&at, run, start, with->seed);
        else
            close_run(&at, run, start);
    }
}

static void sgd_run(const sw_optim_run *run, const sw_sgd_scalars *with)
{
    block at = {.p = run->p, .m = run->m, .g = run->g, .count = run->numel};
    if (is_plain(run)) {
        sgd_block(&at, with);
        return;
    }
    buffers wide;
    sw_optim_run used = *run;
    used.m = with->momentum != 0.0f ? run->m : NULL;
    used.v = used.v_max = NULL;
    for (size_t start = 0; start < run->numel; start += OPTIM_BLOCK_NUMEL) {
        open_run(&at, &wide, &used, start);
        sgd_block(&at, with);
        close_run(&at, &used, start);
    }
}

const sw_optim_kernels OPTIM_TABLE = {.adam = adam_run, .sgd = sgd_run, .norm = norm_add};
