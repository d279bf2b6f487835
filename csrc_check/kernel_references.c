/* kernel_references.c - see the header. The kernels that compress call the host's kernels on one
 * part, or one matrix, after the other. */
#include "kernel_references.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"

enum { CAST_BLOCK_NUMEL = 1024, FOLD_BLOCK_BYTES = 65536 };

static size_t array_bytes(sw_u64 numel, int dtype)
{
    return (size_t)numel * sw_dtype_size_bytes((sw_dtype)dtype);
}

/* ---- copies and folds ---- */

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

static void put_accesses(const sw_put_args *a, sw_access_fn *report, void *context)
{
    report(context, a->to, (size_t)a->size_bytes, SW_ACCESS_WRITE);
}

static void put_reference(const sw_put_args *a)
{
    if (a->size_bytes > 0)
        memcpy(a->to, a->byte, (size_t)a->size_bytes);
}

/* ---- optimizers and norms ---- */

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

/* ---- records of blocks ---- */

static int verdict_of(const void *verdict)
{
    return verdict ? *(const int32_t *)verdict : 0;
}

static void report_verdict(const void *verdict, sw_access_fn *report, void *context)
{
    if (verdict)
        report(context, verdict, sizeof(int32_t), SW_ACCESS_READ);
}

static size_t record_bytes(sw_u64 block, int bits)
{
    return sizeof(float) + (size_t)block * (size_t)bits / 8;
}

static size_t records_bytes(sw_u64 numel, sw_u64 block, int bits)
{
    return (size_t)((numel + block - 1) / block) * record_bytes(block, bits);
}

static size_t float_bytes(sw_u64 numel)
{
    return (size_t)numel * sizeof(float);
}

static void quantize_accesses(const sw_quantize_args *a, sw_access_fn *report, void *context)
{
    for (const sw_quantize_part *p = a->part; p < a->part + a->part_count; ++p) {
        if (p->source)
            report(context, p->source, float_bytes(p->numel), SW_ACCESS_READ);
        if (p->source && p->error)
            report(context, p->error, float_bytes(p->numel), SW_ACCESS_READ);
        report(context, p->records, records_bytes(p->numel, a->block, a->bits), SW_ACCESS_WRITE);
    }
}

static void quantize_reference(const sw_quantize_args *a)
{
    for (const sw_quantize_part *p = a->part; p < a->part + a->part_count; ++p) {
        if (p->source)
            sw_kernels()->compress->block_quantize(p->records, p->source, p->error,
                                                   (size_t)p->numel, (size_t)a->block, a->bits);
        else if (p->numel > 0)
            memset(p->records, 0, records_bytes(p->numel, a->block, a->bits));
    }
}

static const unsigned char *source_of(const sw_fold_records_args *a, int k)
{
    if (k == a->own_index)
        return a->own;
    return (const unsigned char *)a->others + (sw_u64)k * a->stride_bytes;
}

static void fold_records_accesses(const sw_fold_records_args *a, sw_access_fn *report,
                                  void *context)
{
    size_t bytes = records_bytes(a->count * a->block, a->block, a->bits);
    for (int k = 0; k < a->source_count; ++k)
        report(context, source_of(a, k), bytes, SW_ACCESS_READ);
    report(context, a->to, bytes, SW_ACCESS_WRITE);
    if (a->residual)
        report(context, a->residual, float_bytes(a->count * a->block), SW_ACCESS_WRITE);
}

static void fold_records_reference(const sw_fold_records_args *a)
{
    const sw_compress_kernels *table = sw_kernels()->compress;
    size_t bytes = record_bytes(a->block, a->bits), block = (size_t)a->block;
    float sum[SW_BLOCK_NUMEL_MAX];
    for (size_t r = 0; r < a->count; ++r) {
        unsigned char *to = (unsigned char *)a->to + r * bytes;
        for (int k = 0; k < a->source_count; ++k)
            table->block_dequantize(sum, source_of(a, k) + r * bytes, block, block, a->bits, k > 0);
        for (size_t i = 0; i < block; ++i)
            sum[i] *= a->scale;
        table->block_quantize(to, sum, NULL, block, block, a->bits);
        if (!a->residual)
            continue;
        float *residual = (float *)a->residual + r * block;
        memset(residual, 0, block * sizeof *residual);
        table->block_residual(residual, sum, to, block, block, a->bits);
    }
}

static void decode_accesses(const sw_decode_args *a, sw_access_fn *report, void *context)
{
    for (const sw_decode_part *p = a->part; p < a->part + a->part_count; ++p) {
        size_t bytes = records_bytes(p->numel, a->block, a->bits);
        if (p->error) {
            report(context, p->values, float_bytes(p->numel), SW_ACCESS_READ);
            report(context, p->own, bytes, SW_ACCESS_READ);
            report(context, p->error, float_bytes(p->numel), SW_ACCESS_BOTH);
        }
        if (p->records) {
            report(context, p->records, bytes, SW_ACCESS_READ);
            report(context, p->values, float_bytes(p->numel), SW_ACCESS_WRITE);
        }
    }
    report_verdict(a->verdict, report, context);
}

static void decode_reference(const sw_decode_args *a)
{
    const sw_compress_kernels *table = sw_kernels()->compress;
    for (const sw_decode_part *p = a->part; p < a->part + a->part_count; ++p) {
        if (p->error && verdict_of(a->verdict) == 0)
            table->block_residual(p->error, p->values, p->own, (size_t)p->numel, (size_t)a->block,
                                  a->bits);
        if (p->records)
            table->block_dequantize(p->values, p->records, (size_t)p->numel, (size_t)a->block,
                                    a->bits, false);
    }
}

static void verdict_accesses(const sw_verdict_args *a, sw_access_fn *report, void *context)
{
    size_t bytes = records_bytes(a->count * a->block, a->block, a->bits);
    report(context, a->records, bytes, SW_ACCESS_READ);
    report(context, a->verdict, sizeof(int32_t), SW_ACCESS_BOTH);
}

static void verdict_reference(const sw_verdict_args *a)
{
    size_t bytes = record_bytes(a->block, a->bits);
    for (sw_u64 r = 0; r < a->count; ++r) {
        float scale;
        memcpy(&scale, (const char *)a->records + r * bytes, sizeof scale);
        if (scale != scale)
            *(int32_t *)a->verdict = 1;
    }
}

static void owe_accesses(const sw_owe_args *a, sw_access_fn *report, void *context)
{
    for (const sw_owe_part *p = a->part; p < a->part + a->part_count; ++p) {
        report(context, p->rest, float_bytes(p->numel), SW_ACCESS_READ);
        report(context, p->error, float_bytes(p->numel), SW_ACCESS_BOTH);
    }
    report(context, a->verdict, sizeof(int32_t), SW_ACCESS_READ);
}

static void owe_reference(const sw_owe_args *a)
{
    if (verdict_of(a->verdict) != 0)
        return;
    for (const sw_owe_part *p = a->part; p < a->part + a->part_count; ++p)
        for (sw_u64 i = 0; i < p->numel; ++i)
            ((float *)p->error)[i] += ((const float *)p->rest)[i] * a->scale;
}

/* ---- matrices and factors ---- */

static size_t factor_bytes(sw_u64 rank, sw_u64 count)
{
    return (size_t)rank * sw_lowrank_stride((size_t)count) * sizeof(float);
}

static size_t memory_bytes(const sw_matrix_args *m)
{
    return (size_t)(m->rows * m->cols) * sw_dtype_size_bytes((sw_dtype)m->memory_dtype);
}

static size_t gradient_bytes(const sw_matrix_args *m)
{
    return (size_t)(m->rows * m->cols) * sizeof(float);
}

static sw_lowrank view_of(const sw_matrix_args *m)
{
    return (sw_lowrank){.gradient = m->gradient,
                        .memory = m->memory,
                        .left = m->left,
                        .right = m->right,
                        .rows = (size_t)m->rows,
                        .cols = (size_t)m->cols,
                        .rank = (size_t)m->rank,
                        .memory_dtype = (sw_dtype)m->memory_dtype};
}

static void project_accesses(const sw_project_args *a, sw_access_fn *report, void *context)
{
    for (const sw_matrix_args *m = a->matrix; m < a->matrix + a->matrix_count; ++m) {
        report(context, m->gradient, gradient_bytes(m),
               m->memory ? SW_ACCESS_BOTH : SW_ACCESS_READ);
        if (m->memory) {
            report(context, m->memory, memory_bytes(m), SW_ACCESS_READ);
            report(context, m->left, factor_bytes(m->rank, m->rows), SW_ACCESS_READ);
            report(context, m->right, factor_bytes(m->rank, m->cols), SW_ACCESS_READ);
        }
        report(context, m->basis, factor_bytes(m->rank, m->cols), SW_ACCESS_READ);
        report(context, m->out, factor_bytes(m->rank, m->rows), SW_ACCESS_WRITE);
    }
}

static void project_reference(const sw_project_args *a)
{
    for (const sw_matrix_args *m = a->matrix; m < a->matrix + a->matrix_count; ++m) {
        const sw_lowrank view = view_of(m);
        sw_kernels()->compress->lowrank_project(&view, m->basis, m->out);
    }
}

static void absorb_accesses(const sw_absorb_args *a, sw_access_fn *report, void *context)
{
    for (const sw_matrix_args *m = a->matrix; m < a->matrix + a->matrix_count; ++m) {
        report(context, m->gradient, gradient_bytes(m), SW_ACCESS_READ);
        if (m->memory)
            report(context, m->memory, memory_bytes(m), SW_ACCESS_WRITE);
        if (!m->out)
            continue;
        report(context, m->left, factor_bytes(m->rank, m->rows), SW_ACCESS_READ);
        report(context, m->out, factor_bytes(m->rank, m->cols), SW_ACCESS_WRITE);
        if (m->copy)
            report(context, m->copy, factor_bytes(m->rank, m->cols), SW_ACCESS_WRITE);
    }
    report_verdict(a->verdict, report, context);
}

/* Store memory = v and compute nothing else. */
static void remember(const sw_matrix_args *m)
{
    const float *v = m->gradient;
    if (!m->memory)
        return;
    if (m->memory_dtype == SW_DTYPE_FLOAT32) {
        memcpy(m->memory, v, memory_bytes(m));
        return;
    }
    for (size_t i = 0; i < (size_t)(m->rows * m->cols); ++i) {
        uint32_t bits;
        memcpy(&bits, v + i, sizeof bits);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        ((uint16_t *)m->memory)[i] = (uint16_t)(rounded - ((rounded & 0x7fffu) == 0x7f80u));
    }
}

static void absorb_reference(const sw_absorb_args *a)
{
    if (verdict_of(a->verdict) != 0)
        return;
    for (const sw_matrix_args *m = a->matrix; m < a->matrix + a->matrix_count; ++m) {
        const sw_lowrank view = view_of(m);
        if (!m->out) {
            remember(m);
            continue;
        }
        sw_kernels()->compress->lowrank_absorb(&view, m->left, m->out);
        if (m->copy)
            memcpy(m->copy, m->out, factor_bytes(m->rank, m->cols));
    }
}

static void expand_accesses(const sw_expand_args *a, sw_access_fn *report, void *context)
{
    for (const sw_matrix_args *m = a->matrix; m < a->matrix + a->matrix_count; ++m) {
        report(context, m->left, factor_bytes(m->rank, m->rows), SW_ACCESS_READ);
        report(context, m->right, factor_bytes(m->rank, m->cols), SW_ACCESS_READ);
        report(context, m->gradient, gradient_bytes(m), SW_ACCESS_WRITE);
        if (m->memory)
            report(context, m->memory, memory_bytes(m), SW_ACCESS_WRITE);
        if (m->out)
            report(context, m->out, factor_bytes(m->rank, m->cols), SW_ACCESS_WRITE);
    }
    report_verdict(a->verdict, report, context);
}

static void refuse(const sw_matrix_args *m, int verdict)
{
    static const uint32_t nan_bits = 0x7fc00000u;
    float *gradient = m->gradient;
    for (size_t i = 0; i < (size_t)(m->rows * m->cols); ++i)
        memcpy(gradient + i, &nan_bits, sizeof nan_bits);
    if (verdict != SW_REFUSED_LATE)
        return;
    if (m->memory)
        memset(m->memory, 0, memory_bytes(m));
    if (m->out)
        memset(m->out, 0, factor_bytes(m->rank, m->cols));
}

static void expand_reference(const sw_expand_args *a)
{
    int verdict = verdict_of(a->verdict);
    for (const sw_matrix_args *m = a->matrix; m < a->matrix + a->matrix_count; ++m) {
        if (verdict != 0)
            refuse(m, verdict);
        else
            sw_kernels()->compress->lowrank_expand(m->gradient, m->left, m->right, (size_t)m->rows,
                                                   (size_t)m->cols, (size_t)m->rank);
    }
}

static void orthonormalize_accesses(const sw_orthonormalize_args *a, sw_access_fn *report,
                                    void *context)
{
    for (const sw_factor_args *f = a->factor; f < a->factor + a->factor_count; ++f) {
        report(context, f->from, factor_bytes(f->rank, f->count), SW_ACCESS_READ);
        report(context, f->to, factor_bytes(f->rank, f->count), SW_ACCESS_WRITE);
    }
    report_verdict(a->verdict, report, context);
}

static void orthonormalize_reference(const sw_orthonormalize_args *a)
{
    if (verdict_of(a->verdict) != 0)
        return;
    for (const sw_factor_args *f = a->factor; f < a->factor + a->factor_count; ++f) {
        if (f->to != f->from)
            memcpy(f->to, f->from, factor_bytes(f->rank, f->count));
        sw_kernels()->compress->lowrank_orthonormalize(f->to, (size_t)f->count, (size_t)f->rank,
                                                       f->seed);
    }
}

static void finite_accesses(const sw_finite_args *a, sw_access_fn *report, void *context)
{
    report(context, a->values, (size_t)a->numel * sizeof(float), SW_ACCESS_READ);
    report(context, a->verdict, sizeof(int32_t), SW_ACCESS_BOTH);
}

static void finite_reference(const sw_finite_args *a)
{
    int32_t *verdict = a->verdict;
    for (sw_u64 i = 0; i < a->numel; ++i) {
        uint32_t bits;
        memcpy(&bits, (const float *)a->values + i, sizeof bits);
        if ((bits & 0x7fffffffu) >= 0x7f800000u && *verdict == 0)
            *verdict = a->refusal;
    }
}

#define REFERENCE(number, noun)                                                           \
    static void accesses_of_##noun(const void *args, sw_access_fn *report, void *context) \
    {                                                                                     \
        noun##_accesses(args, report, context);                                           \
    }                                                                                     \
    static void run_##noun(const void *args)                                              \
    {                                                                                     \
        noun##_reference(args);                                                           \
    }
SW_KERNELS(REFERENCE)

#define ROW(number, noun)                                           \
    [SW_KERNEL_##number] = {.name = "sw_" #noun,                    \
                            .args_bytes = sizeof(sw_##noun##_args), \
                            .accesses = accesses_of_##noun,         \
                            .reference = run_##noun},
static const sw_kernel_reference references[SW_KERNEL_COUNT] = {SW_KERNELS(ROW)};

const sw_kernel_reference *sw_kernel_references(void)
{
    return references;
}
