/* lowrank_contracts.c - contracts of PROJECT, ABSORB, EXPAND, ORTHONORMALIZE and FINITE. A
 * reference calls the host's kernels on one matrix after the other. */
#include "kernels/kernel_contracts.h"

#include <stdint.h>
#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

enum { THREADS = 256, BLOCKS_A_PROCESSOR = 8, NUMEL_A_BLOCK = 1024 };
/* Values that cuda/lowrank.cu repeats: blocks on one multiprocessor, rows of a warp, sides of a
 * block's tile. */
enum { PROJECT_BLOCKS = 2, ABSORB_BLOCKS = 3, EXPAND_BLOCKS = 3 };
enum { PROJECT_ROWS = THREADS / 32 * 8, ABSORB_COLS = 32, EXPAND_SIDE = 64 };

static int verdict_of(const void *verdict)
{
    return verdict ? *(const int32_t *)verdict : 0;
}

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

static void report_verdict(const void *verdict, sw_access_fn *report, void *context)
{
    if (verdict)
        report(context, verdict, sizeof(int32_t), SW_ACCESS_READ);
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

static sw_grid blocks(sw_u64 wanted, int processor_count, int blocks_a_processor)
{
    sw_u64 most = (sw_u64)processor_count * (sw_u64)blocks_a_processor;
    wanted = wanted < most ? wanted : most;
    return (sw_grid){.block_count = (unsigned)(wanted ? wanted : 1), .thread_count = THREADS};
}

static sw_u64 parts(sw_u64 count, sw_u64 each)
{
    return (count + each - 1) / each;
}

/* ---- matrices ---- */

static sw_status matrix_check(const sw_matrix_args *m, const char *operation, sw_error *err)
{
    sw_u64 most = m->rows < m->cols ? m->rows : m->cols;
    most = most < SW_LOWRANK_RANK_MAX ? most : SW_LOWRANK_RANK_MAX;
    if (m->rank < 1 || m->rank > most)
        SW_FAIL(err, SW_E_INVALID,
                "%s: rank of a matrix of %llu x %llu must be in [1, %llu], not %llu", operation,
                m->rows, m->cols, most, m->rank);
    if (m->memory_dtype != SW_DTYPE_FLOAT32 && m->memory_dtype != SW_DTYPE_BFLOAT16)
        SW_FAIL(err, SW_E_INVALID, "%s: memory must be float32 or bfloat16, not %s", operation,
                sw_dtype_name((sw_dtype)m->memory_dtype));
    return SW_OK;
}

static sw_status matrices_check(const sw_matrices_args *a, const char *operation, sw_error *err)
{
    if (a->matrix_count < 0 || a->matrix_count > SW_MATRICES_MAX)
        SW_FAIL(err, SW_E_INVALID, "%s: matrix_count must be in [0, %d], not %d", operation,
                SW_MATRICES_MAX, a->matrix_count);
    for (int i = 0; i < a->matrix_count; ++i)
        SW_TRY(matrix_check(&a->matrix[i], operation, err));
    return SW_OK;
}

sw_status sw_project_check(const void *args, sw_error *err)
{
    return matrices_check(args, "project", err);
}

void sw_project_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_project_args *a = args;
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

void sw_project_reference(const void *args)
{
    const sw_project_args *a = args;
    for (const sw_matrix_args *m = a->matrix; m < a->matrix + a->matrix_count; ++m) {
        const sw_lowrank view = view_of(m);
        sw_kernels()->compress->lowrank_project(&view, m->basis, m->out);
    }
}

sw_grid sw_project_grid(const void *args, int processor_count)
{
    const sw_project_args *a = args;
    sw_u64 tiles = 0;
    for (int i = 0; i < a->matrix_count; ++i)
        tiles += parts(a->matrix[i].rows, PROJECT_ROWS);
    return blocks(tiles, processor_count, PROJECT_BLOCKS);
}

sw_status sw_absorb_check(const void *args, sw_error *err)
{
    return matrices_check(args, "absorb", err);
}

void sw_absorb_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_absorb_args *a = args;
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

void sw_absorb_reference(const void *args)
{
    const sw_absorb_args *a = args;
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

sw_grid sw_absorb_grid(const void *args, int processor_count)
{
    const sw_absorb_args *a = args;
    sw_u64 tiles = 0;
    for (int i = 0; i < a->matrix_count; ++i)
        tiles += parts(a->matrix[i].cols, ABSORB_COLS);
    return blocks(tiles, processor_count, ABSORB_BLOCKS);
}

sw_status sw_expand_check(const void *args, sw_error *err)
{
    return matrices_check(args, "expand", err);
}

void sw_expand_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_expand_args *a = args;
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

void sw_expand_reference(const void *args)
{
    const sw_expand_args *a = args;
    int verdict = verdict_of(a->verdict);
    for (const sw_matrix_args *m = a->matrix; m < a->matrix + a->matrix_count; ++m) {
        if (verdict != 0)
            refuse(m, verdict);
        else
            sw_kernels()->compress->lowrank_expand(m->gradient, m->left, m->right, (size_t)m->rows,
                                                   (size_t)m->cols, (size_t)m->rank);
    }
}

sw_grid sw_expand_grid(const void *args, int processor_count)
{
    const sw_expand_args *a = args;
    sw_u64 tiles = 0;
    for (int i = 0; i < a->matrix_count; ++i)
        tiles += parts(a->matrix[i].rows, EXPAND_SIDE) * parts(a->matrix[i].cols, EXPAND_SIDE);
    return blocks(tiles, processor_count, EXPAND_BLOCKS);
}

/* ---- factors ---- */

sw_status sw_orthonormalize_check(const void *args, sw_error *err)
{
    const sw_orthonormalize_args *a = args;
    if (a->factor_count < 0 || a->factor_count > SW_FACTORS_MAX)
        SW_FAIL(err, SW_E_INVALID, "orthonormalize: factor_count must be in [0, %d], not %d",
                SW_FACTORS_MAX, a->factor_count);
    for (const sw_factor_args *f = a->factor; f < a->factor + a->factor_count; ++f)
        if (f->rank < 1 || f->rank > f->count)
            SW_FAIL(err, SW_E_INVALID, "orthonormalize: rank must be in [1, %llu], not %llu",
                    f->count, f->rank);
    return SW_OK;
}

void sw_orthonormalize_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_orthonormalize_args *a = args;
    for (const sw_factor_args *f = a->factor; f < a->factor + a->factor_count; ++f) {
        report(context, f->from, factor_bytes(f->rank, f->count), SW_ACCESS_READ);
        report(context, f->to, factor_bytes(f->rank, f->count), SW_ACCESS_WRITE);
    }
    report_verdict(a->verdict, report, context);
}

void sw_orthonormalize_reference(const void *args)
{
    const sw_orthonormalize_args *a = args;
    if (verdict_of(a->verdict) != 0)
        return;
    for (const sw_factor_args *f = a->factor; f < a->factor + a->factor_count; ++f) {
        if (f->to != f->from)
            memcpy(f->to, f->from, factor_bytes(f->rank, f->count));
        sw_kernels()->compress->lowrank_orthonormalize(f->to, (size_t)f->count, (size_t)f->rank,
                                                       f->seed);
    }
}

sw_grid sw_orthonormalize_grid(const void *args, int processor_count)
{
    const sw_orthonormalize_args *a = args;
    return blocks((sw_u64)a->factor_count, processor_count, BLOCKS_A_PROCESSOR);
}

/* ---- finite ---- */

sw_status sw_finite_check(const void *args, sw_error *err)
{
    const sw_finite_args *a = args;
    if (!a->verdict)
        SW_FAIL(err, SW_E_INVALID, "finite: verdict must not be NULL");
    if (a->refusal != SW_REFUSED && a->refusal != SW_REFUSED_LATE)
        SW_FAIL(err, SW_E_INVALID, "finite: refusal must be %d or %d, not %d", SW_REFUSED,
                SW_REFUSED_LATE, a->refusal);
    return SW_OK;
}

void sw_finite_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_finite_args *a = args;
    report(context, a->values, (size_t)a->numel * sizeof(float), SW_ACCESS_READ);
    report(context, a->verdict, sizeof(int32_t), SW_ACCESS_BOTH);
}

void sw_finite_reference(const void *args)
{
    const sw_finite_args *a = args;
    int32_t *verdict = a->verdict;
    for (sw_u64 i = 0; i < a->numel; ++i) {
        uint32_t bits;
        memcpy(&bits, (const float *)a->values + i, sizeof bits);
        if ((bits & 0x7fffffffu) >= 0x7f800000u && *verdict == 0)
            *verdict = a->refusal;
    }
}

sw_grid sw_finite_grid(const void *args, int processor_count)
{
    return blocks(parts(((const sw_finite_args *)args)->numel, NUMEL_A_BLOCK), processor_count,
                  BLOCKS_A_PROCESSOR);
}
