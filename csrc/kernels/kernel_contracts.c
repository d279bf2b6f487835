/* kernel_contracts.c - the table of device_kernels.h, and its rows but for the kernels that
 * compress, which are in compress_contracts.c. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernel_contracts.h"
#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"

enum { CAST_BLOCK_NUMEL = 1024 };
/* Values that the .cu text repeats: blocks of a kernel on one multiprocessor, and bytes or elements
 * that a block takes at a time. */
enum { CAST_BLOCKS = 4, PACK_BLOCKS = 3, STEP_BLOCKS = 4, NORM_BLOCKS = 3, FOLD_BLOCKS = 3 };
enum {
    TURN_BYTES = SW_CONTRACT_THREADS * 64,
    RUN_TILE_NUMEL = SW_CONTRACT_THREADS * 4,
    FOLD_TURN_BYTES = SW_CONTRACT_THREADS * 32
};
enum { FOLD_BLOCK_BYTES = 65536 };

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), "kernel_args.h and sw_dtype disagree")
SAME(SW_ARG_FLOAT32, SW_DTYPE_FLOAT32);
SAME(SW_ARG_FLOAT64, SW_DTYPE_FLOAT64);
SAME(SW_ARG_FLOAT16, SW_DTYPE_FLOAT16);
SAME(SW_ARG_BFLOAT16, SW_DTYPE_BFLOAT16);
SAME(SW_ARG_INT8, SW_DTYPE_INT8);
SAME(SW_ARG_UINT8, SW_DTYPE_UINT8);
SAME(SW_ARG_INT16, SW_DTYPE_INT16);
SAME(SW_ARG_INT32, SW_DTYPE_INT32);
SAME(SW_ARG_INT64, SW_DTYPE_INT64);
SAME(SW_ARG_COMPLEX64, SW_DTYPE_COMPLEX64);
SAME(SW_ARG_COMPLEX128, SW_DTYPE_COMPLEX128);
SAME(SW_ARG_SUM, SW_REDOP_SUM);
SAME(SW_ARG_MEAN, SW_REDOP_MEAN);
SAME(SW_ARG_MIN, SW_REDOP_MIN);
SAME(SW_ARG_MAX, SW_REDOP_MAX);
SAME(SW_ARG_DIGIT_COUNT, SW_NORM_DIGIT_COUNT);
SAME(SW_ARG_LOWEST_EXPONENT, SW_NORM_LOWEST_EXPONENT);
_Static_assert(offsetof(sw_norm_sum, infinite) == 8 * SW_ARG_DIGIT_COUNT, "layout of a sum");

static bool is_small_float(int dtype)
{
    return dtype == SW_DTYPE_FLOAT32 || dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

static size_t array_bytes(sw_u64 numel, int dtype)
{
    return (size_t)numel * sw_dtype_size_bytes((sw_dtype)dtype);
}

/* ---- cast ---- */

static sw_status small_float_pair_check(const char *what, int to_dtype, int from_dtype,
                                        sw_error *err)
{
    int wrong = is_small_float(to_dtype) ? from_dtype : to_dtype;
    if (!is_small_float(wrong))
        SW_FAIL(err, SW_E_INVALID, "%s: dtype must be float32, float16 or bfloat16, not %s", what,
                sw_dtype_name((sw_dtype)wrong));
    return SW_OK;
}

static sw_status cast_check(const sw_cast_args *a, sw_error *err)
{
    return small_float_pair_check("cast", a->to_dtype, a->from_dtype, err);
}

static void cast_accesses(const sw_cast_args *a, sw_access_fn *report, void *context)
{
    report(context, a->from, array_bytes(a->numel, a->from_dtype), SW_ACCESS_READ);
    report(context, a->to, array_bytes(a->numel, a->to_dtype), SW_ACCESS_WRITE);
}

/* Cast `numel` elements; `to` may be `from` if the dtypes are equal. */
static void cast_elements(void *to_array, int to_dtype, const void *from_array, int from_dtype,
                          size_t numel, float scale)
{
    const sw_compress_kernels *table = sw_kernels()->compress;
    float wide[CAST_BLOCK_NUMEL];
    for (size_t start = 0; start < numel; start += CAST_BLOCK_NUMEL) {
        size_t left = numel - start;
        size_t count = left < CAST_BLOCK_NUMEL ? left : CAST_BLOCK_NUMEL;
        const char *from = (const char *)from_array + array_bytes(start, from_dtype);
        char *to = (char *)to_array + array_bytes(start, to_dtype);
        if (from_dtype == SW_DTYPE_FLOAT32)
            memcpy(wide, from, count * sizeof *wide);
        else
            table->half_widen(wide, (const uint16_t *)(const void *)from, count,
                              (sw_dtype)from_dtype);
        if (to_dtype != SW_DTYPE_FLOAT32) {
            table->half_narrow((uint16_t *)(void *)to, wide, count, scale, (sw_dtype)to_dtype);
            continue;
        }
        for (size_t k = 0; k < count; ++k)
            wide[k] *= scale;
        memcpy(to, wide, count * sizeof *wide);
    }
}

static void cast_reference(const sw_cast_args *a)
{
    cast_elements(a->to, a->to_dtype, a->from, a->from_dtype, (size_t)a->numel, a->scale);
}

static sw_u64 cast_tiles(const sw_cast_args *a)
{
    return sw_contract_parts(array_bytes(a->numel, a->from_dtype), TURN_BYTES);
}

/* ---- pack ---- */

static sw_status pack_check(const sw_pack_args *a, sw_error *err)
{
    SW_TRY(sw_contract_count("pack: segment_count", a->segment_count, SW_PACK_SEGMENT_MAX, err));
    for (int i = 0; i < a->segment_count; ++i) {
        const sw_pack_segment *s = &a->segment[i];
        if (s->piece_count && (s->size_bytes > s->piece_count * s->piece_bytes ||
                               s->size_bytes <= (s->piece_count - 1) * s->piece_bytes))
            SW_FAIL(err, SW_E_INVALID,
                    "pack: the %llu bytes of segment %d must end in the last of its %llu pieces of "
                    "%llu bytes",
                    s->size_bytes, i, s->piece_count, s->piece_bytes);
    }
    return a->converts ? small_float_pair_check("pack", a->to_dtype, a->from_dtype, err) : SW_OK;
}

/* Return piece k of a segment, as a segment of one range. */
static sw_pack_segment pack_piece(const sw_pack_segment *s, sw_u64 k)
{
    if (s->piece_count == 0)
        return *s;
    sw_u64 left = s->size_bytes - k * s->piece_bytes;
    return (sw_pack_segment){.to = (char *)s->to + k * s->to_pitch,
                             .from = s->from ? (const char *)s->from + k * s->from_pitch : NULL,
                             .size_bytes = left < s->piece_bytes ? left : s->piece_bytes};
}

static sw_u64 pack_pieces(const sw_pack_segment *s)
{
    return s->piece_count ? s->piece_count : 1;
}

static sw_u64 segment_numel(const sw_pack_args *a, const sw_pack_segment *s)
{
    return s->size_bytes / sw_dtype_size_bytes((sw_dtype)a->from_dtype);
}

static void pack_accesses(const sw_pack_args *a, sw_access_fn *report, void *context)
{
    for (int i = 0; i < a->segment_count; ++i)
        for (sw_u64 k = 0; k < pack_pieces(&a->segment[i]); ++k) {
            const sw_pack_segment piece = pack_piece(&a->segment[i], k);
            size_t bytes = (size_t)piece.size_bytes;
            size_t written =
                a->converts ? array_bytes(segment_numel(a, &piece), a->to_dtype) : bytes;
            report(context, piece.from, piece.from ? bytes : 0, SW_ACCESS_READ);
            report(context, piece.to, written, SW_ACCESS_WRITE);
        }
    if (a->verdict)
        report(context, a->verdict, sizeof(int32_t), SW_ACCESS_READ);
    if (a->converts && a->factor)
        report(context, a->factor, sizeof(float), SW_ACCESS_READ);
}

static void pack_reference(const sw_pack_args *a)
{
    float scale = a->converts && a->factor ? *(const float *)a->factor : a->scale;
    if (a->verdict && *(const int32_t *)a->verdict != 0)
        return;
    for (int i = 0; i < a->segment_count; ++i)
        for (sw_u64 k = 0; k < pack_pieces(&a->segment[i]); ++k) {
            const sw_pack_segment s = pack_piece(&a->segment[i], k);
            if (!s.from)
                memset(s.to, 0,
                       a->converts ? array_bytes(segment_numel(a, &s), a->to_dtype)
                                   : (size_t)s.size_bytes);
            else if (!a->converts && s.size_bytes > 0)
                memcpy(s.to, s.from, (size_t)s.size_bytes);
            else if (a->converts && !(a->factor && scale == 1.0f && s.to == s.from))
                cast_elements(s.to, a->to_dtype, s.from, a->from_dtype,
                              (size_t)segment_numel(a, &s), scale);
        }
}

static sw_u64 pack_tiles(const sw_pack_args *a)
{
    sw_u64 tiles = 0;
    for (int i = 0; i < a->segment_count; ++i) {
        const sw_pack_segment *s = &a->segment[i];
        sw_u64 range_bytes = s->piece_count ? s->piece_bytes : s->size_bytes;
        tiles += pack_pieces(s) * sw_contract_parts(range_bytes, TURN_BYTES);
    }
    return tiles;
}

/* ---- fold ---- */

static sw_status fold_check(const sw_fold_args *a, sw_error *err)
{
    SW_TRY(sw_redop_check((sw_redop)a->op, (sw_dtype)a->dtype, err));
    if (a->source_count < 1)
        SW_FAIL(err, SW_E_INVALID, "fold: source_count must be at least 1, not %d",
                a->source_count);
    if (a->own_index < -1 || a->own_index >= a->source_count)
        SW_FAIL(err, SW_E_INVALID, "fold: own_index must be in [-1, %d), not %d", a->source_count,
                a->own_index);
    return SW_OK;
}

static const void *fold_source(const sw_fold_args *a, int k)
{
    return k == a->own_index ? a->own : (const char *)a->rest + (sw_u64)k * a->stride_bytes;
}

static bool fold_widens(const sw_fold_args *a)
{
    return a->widens && (a->dtype == SW_DTYPE_FLOAT16 || a->dtype == SW_DTYPE_BFLOAT16);
}

static int fold_result(const sw_fold_args *a)
{
    return fold_widens(a) ? (int)SW_DTYPE_FLOAT32 : a->dtype;
}

static void fold_accesses(const sw_fold_args *a, sw_access_fn *report, void *context)
{
    for (int k = 0; k < a->source_count; ++k)
        report(context, fold_source(a, k), array_bytes(a->numel, a->dtype), SW_ACCESS_READ);
    if (a->addend)
        report(context, a->addend, array_bytes(a->numel, a->dtype), SW_ACCESS_READ);
    report(context, a->to, array_bytes(a->numel, fold_result(a)), SW_ACCESS_WRITE);
}

/* Widen halves that lie at the end of `to`, from its begin on. */
static void widen_up(float *to, const uint16_t *half, size_t numel, sw_dtype dtype)
{
    for (size_t i = 0; i < numel; ++i) {
        uint16_t bits = half[i];
        sw_kernels()->compress->half_widen(to + i, &bits, 1, dtype);
    }
}

/* Set source[k] to elements [start, start + count) of contribution k: on the addend, and in the
 * result's dtype, in `sums`, which has room for `step` elements of each; NULL: as they are. */
static void fold_prepare(const sw_fold_args *a, const void **source, unsigned char *sums,
                         size_t step, size_t start, size_t count)
{
    size_t offset = array_bytes(start, a->dtype), bytes = array_bytes(count, a->dtype);
    for (int k = 0; k < a->source_count; ++k) {
        const void *parts[] = {(const char *)a->addend + offset,
                               (const char *)fold_source(a, k) + offset};
        void *sum = sums + (size_t)k * step * array_bytes(1, fold_result(a));
        void *at = fold_widens(a) ? (char *)sum + bytes : sum;
        source[k] = sums ? sum : parts[1];
        if (sums && a->addend)
            sw_kernels()->fold[a->dtype](&at, 1, parts, 2, count, 1, SW_REDOP_SUM);
        else if (sums)
            memcpy(at, parts[1], bytes);
        if (fold_widens(a))
            widen_up(sum, at, count, (sw_dtype)a->dtype);
    }
}

/* Fold block by block, through `sums` if `to` may be the addend or the own contribution, or has
 * another dtype. Without memory for its tables it writes nothing. */
static void fold_reference(const sw_fold_args *a)
{
    size_t count = (size_t)a->source_count, element = array_bytes(1, fold_result(a));
    bool is_through = a->addend || fold_widens(a);
    size_t step = is_through ? FOLD_BLOCK_BYTES / (count * element) + 1 : (size_t)a->numel;
    const void **source = calloc(count, sizeof *source);
    unsigned char *sums = is_through ? calloc(count, step * element) : NULL;
    for (size_t start = 0; source && (sums || !is_through) && start < a->numel; start += step) {
        size_t left = (size_t)a->numel - start, some = left < step ? left : step;
        void *to = (char *)a->to + start * element;
        fold_prepare(a, source, sums, step, start, some);
        sw_kernels()->fold[fold_result(a)](&to, 1, source, a->source_count, some, a->scale,
                                           (sw_redop)a->op);
    }
    free(sums);
    free(source);
}

static sw_u64 fold_tiles(const sw_fold_args *a)
{
    return sw_contract_parts(array_bytes(a->numel, a->dtype), FOLD_TURN_BYTES);
}

/* ---- optimizers ---- */

static sw_status run_check(const sw_run_args *run, const char *operation, sw_error *err)
{
    const int dtypes[] = {run->p_dtype, run->state_dtype, run->g_dtype, run->copy_dtype};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; ++i)
        if (!is_small_float(dtypes[i]))
            SW_FAIL(err, SW_E_INVALID, "%s: dtype must be float32, float16 or bfloat16, not %s",
                    operation, sw_dtype_name((sw_dtype)dtypes[i]));
    return SW_OK;
}

static sw_status runs_check(const sw_run_args *runs, int count, const char *operation,
                            sw_error *err)
{
    for (int r = 0; r < count; ++r)
        SW_TRY(run_check(&runs[r], operation, err));
    return SW_OK;
}

static sw_u64 runs_tiles(const sw_run_args *runs, int count)
{
    sw_u64 tiles = 0;
    for (int r = 0; r < count; ++r)
        tiles += sw_contract_parts(runs[r].numel, RUN_TILE_NUMEL);
    return tiles;
}

static sw_optim_run run_of(const sw_run_args *run)
{
    return (sw_optim_run){.p = run->p,
                          .m = run->m,
                          .v = run->v,
                          .v_max = run->v_max,
                          .g = run->g,
                          .copy = run->copy,
                          .numel = (size_t)run->numel,
                          .step = 1, /* the kernels do not read it */
                          .p_dtype = (sw_dtype)run->p_dtype,
                          .state_dtype = (sw_dtype)run->state_dtype,
                          .g_dtype = (sw_dtype)run->g_dtype,
                          .copy_dtype = (sw_dtype)run->copy_dtype};
}

static void run_accesses(const sw_run_args *run, bool is_clipped, sw_access_fn *report,
                         void *context)
{
    size_t state_bytes = array_bytes(run->numel, run->state_dtype);
    report(context, run->g, array_bytes(run->numel, run->g_dtype),
           is_clipped ? SW_ACCESS_BOTH : SW_ACCESS_READ);
    report(context, run->p, array_bytes(run->numel, run->p_dtype), SW_ACCESS_BOTH);
    if (run->copy)
        report(context, run->copy, array_bytes(run->numel, run->copy_dtype), SW_ACCESS_BOTH);
    if (run->v)
        report(context, run->v, state_bytes, SW_ACCESS_BOTH);
}

static void clip_access(const void *clip, sw_access_fn *report, void *context)
{
    if (clip)
        report(context, clip, sizeof(float), SW_ACCESS_READ);
}

static void clip_run(const sw_run_args *run, const void *clip)
{
    float factor = clip ? *(const float *)clip : 1.0f;
    void *g = (void *)(uintptr_t)run->g;
    if (factor != 1.0f)
        cast_elements(g, run->g_dtype, g, run->g_dtype, (size_t)run->numel, factor);
}

static sw_status adam_check(const sw_adam_args *a, sw_error *err)
{
    SW_TRY(sw_contract_count("adam: run_count", a->run_count, SW_RUNS_MAX, err));
    return runs_check(a->run, a->run_count, "adam", err);
}

static void adam_accesses(const sw_adam_args *a, sw_access_fn *report, void *context)
{
    clip_access(a->clip, report, context);
    for (const sw_run_args *run = a->run; run < a->run + a->run_count; ++run) {
        size_t state_bytes = array_bytes(run->numel, run->state_dtype);
        run_accesses(run, a->clip != NULL, report, context);
        report(context, run->m, state_bytes, SW_ACCESS_BOTH);
        if (a->amsgrad)
            report(context, run->v_max, state_bytes, SW_ACCESS_BOTH);
    }
}

static void adam_reference(const sw_adam_args *a)
{
    sw_adam_scalars scalars = {.factor = a->factor,
                               .decay = a->decay,
                               .l2 = a->l2,
                               .lerp = a->lerp,
                               .beta2 = a->beta2,
                               .square = a->square,
                               .correction = a->correction,
                               .eps = a->eps,
                               .negative_step = a->negative_step,
                               .amsgrad = a->amsgrad != 0};
    for (int r = 0; r < a->run_count; ++r) {
        sw_optim_run run = run_of(&a->run[r]);
        if (!scalars.amsgrad)
            run.v_max = NULL;
        clip_run(&a->run[r], a->clip);
        sw_kernels()->optim->adam(&run, &scalars);
    }
}

static sw_u64 adam_tiles(const sw_adam_args *a)
{
    return runs_tiles(a->run, a->run_count);
}

static sw_status sgd_check(const sw_sgd_args *a, sw_error *err)
{
    SW_TRY(sw_contract_count("sgd: run_count", a->run_count, SW_RUNS_MAX, err));
    return runs_check(a->run, a->run_count, "sgd", err);
}

static void sgd_accesses(const sw_sgd_args *a, sw_access_fn *report, void *context)
{
    clip_access(a->clip, report, context);
    for (int r = 0; r < a->run_count; ++r) {
        sw_run_args run = a->run[r];
        run.v = NULL;
        run_accesses(&run, a->clip != NULL, report, context);
        if (a->momentum != 0.0f)
            report(context, run.m, array_bytes(run.numel, run.state_dtype),
                   a->first ? SW_ACCESS_WRITE : SW_ACCESS_BOTH);
    }
}

static void sgd_reference(const sw_sgd_args *a)
{
    sw_sgd_scalars scalars = {.factor = a->factor,
                              .l2 = a->l2,
                              .momentum = a->momentum,
                              .undampening = a->undampening,
                              .negative_lr = a->negative_lr,
                              .nesterov = a->nesterov != 0,
                              .first = a->first != 0};
    for (int r = 0; r < a->run_count; ++r) {
        sw_optim_run run = run_of(&a->run[r]);
        clip_run(&a->run[r], a->clip);
        sw_kernels()->optim->sgd(&run, &scalars);
    }
}

static sw_u64 sgd_tiles(const sw_sgd_args *a)
{
    return runs_tiles(a->run, a->run_count);
}

/* ---- norm ---- */

static sw_status norm_check(const sw_norm_args *a, sw_error *err)
{
    sw_u64 numel = 0;
    if (!is_small_float(a->dtype) && a->dtype != SW_DTYPE_FLOAT64)
        SW_FAIL(err, SW_E_INVALID,
                "norm: dtype must be float32, float64, float16 or bfloat16, not %s",
                sw_dtype_name((sw_dtype)a->dtype));
    SW_TRY(sw_contract_count("norm: part_count", a->part_count, SW_NORM_PARTS_MAX, err));
    for (int i = 0; i < a->part_count; ++i)
        numel += a->part[i].numel;
    if (numel > UINT64_C(1) << 31)
        SW_FAIL(err, SW_E_INVALID, "norm: numel must be at most 2^31, not %llu", numel);
    return SW_OK;
}

static void norm_accesses(const sw_norm_args *a, sw_access_fn *report, void *context)
{
    for (int i = 0; i < a->part_count; ++i)
        report(context, a->part[i].data, array_bytes(a->part[i].numel, a->dtype), SW_ACCESS_READ);
    report(context, a->sum, sizeof(sw_norm_sum), SW_ACCESS_BOTH);
}

static void norm_reference(const sw_norm_args *a)
{
    for (int i = 0; i < a->part_count; ++i)
        sw_kernels()->optim->norm(a->sum, a->part[i].data, (size_t)a->part[i].numel,
                                  (sw_dtype)a->dtype);
}

static sw_u64 norm_tiles(const sw_norm_args *a)
{
    sw_u64 tiles = 0;
    for (int i = 0; i < a->part_count; ++i)
        tiles += sw_contract_parts(array_bytes(a->part[i].numel, a->dtype), TURN_BYTES);
    return tiles;
}

/* ---- clip ---- */

static sw_status clip_check(const sw_clip_args *a, sw_error *err)
{
    if (a->norm && (!a->factor || !(a->max_norm >= 0)))
        SW_FAIL(err, SW_E_INVALID, "clip: max_norm must be at least 0 and factor not NULL, not %g",
                a->max_norm);
    return SW_OK;
}

static void clip_accesses(const sw_clip_args *a, sw_access_fn *report, void *context)
{
    report(context, a->sum, sizeof(sw_norm_sum), SW_ACCESS_BOTH);
    if (!a->norm)
        return;
    report(context, a->norm, sizeof(float), SW_ACCESS_WRITE);
    report(context, a->factor, sizeof(float), SW_ACCESS_WRITE);
}

static void clip_reference(const sw_clip_args *a)
{
    sw_norm_sum_carry(a->sum);
    if (!a->norm)
        return;
    double norm = sw_norm_value(a->sum), factor = a->max_norm / (norm + 1e-6);
    *(float *)a->norm = (float)norm;
    *(float *)a->factor = factor >= 1.0 ? 1.0f : (float)factor;
}

static sw_u64 clip_tiles(const sw_clip_args *a)
{
    (void)a;
    return 1;
}

/* ---- put ---- */

static sw_status put_check(const sw_put_args *a, sw_error *err)
{
    return sw_contract_count("put: size_bytes", a->size_bytes, SW_PUT_BYTES_MAX, err);
}

static void put_accesses(const sw_put_args *a, sw_access_fn *report, void *context)
{
    report(context, a->to, (size_t)a->size_bytes, SW_ACCESS_WRITE);
}

static void put_reference(const sw_put_args *a)
{
    if (a->size_bytes > 0)
        memcpy(a->to, a->byte, (size_t)a->size_bytes);
}

static sw_u64 put_tiles(const sw_put_args *a)
{
    return sw_contract_parts((sw_u64)a->size_bytes, SW_CONTRACT_THREADS);
}

SW_CONTRACT(cast, CAST_BLOCKS)
SW_CONTRACT(pack, PACK_BLOCKS)
SW_CONTRACT(fold, FOLD_BLOCKS)
SW_CONTRACT(adam, STEP_BLOCKS)
SW_CONTRACT(sgd, STEP_BLOCKS)
SW_CONTRACT(norm, NORM_BLOCKS)
SW_CONTRACT(clip, 1)
SW_CONTRACT(put, 1)

#define ROW(number, noun)                                                \
    [SW_KERNEL_##number] = {.name = "sw_" #noun,                         \
                            .args_bytes = sizeof(sw_##noun##_args),      \
                            .check = sw_contract_##noun##_check,         \
                            .accesses = sw_contract_##noun##_accesses,   \
                            .reference = sw_contract_##noun##_reference, \
                            .grid = sw_contract_##noun##_grid},
static const sw_kernel_contract contracts[SW_KERNEL_COUNT] = {SW_KERNELS(ROW)};

const sw_kernel_contract *sw_kernel_contracts(void)
{
    return contracts;
}
