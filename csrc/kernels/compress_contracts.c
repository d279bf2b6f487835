/* compress_contracts.c - the contracts of QUANTIZE, FOLD_RECORDS, DECODE, VERDICT and OWE, and of
 * PROJECT, ABSORB, EXPAND, ORTHONORMALIZE and FINITE. */
#include <stdint.h>
#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernel_contracts.h"
#include "kernels/kernels.h"

/* Values that the .cu text repeats: blocks on one multiprocessor, elements of a lane and of a tile,
 * rows of a warp, sides of a block's tile. */
enum { RECORD_BLOCKS = 3, OWE_BLOCKS = 4, VERDICT_BLOCKS = 8, FINITE_BLOCKS = 8 };
enum { PROJECT_BLOCKS = 2, ABSORB_BLOCKS = 3, EXPAND_BLOCKS = 3, ORTHONORMALIZE_BLOCKS = 8 };
enum { LANE_NUMEL = 16, OWE_TILE_NUMEL = 2048, FINITE_TILE_NUMEL = 1024 };
enum { PROJECT_ROWS = SW_CONTRACT_THREADS / 32 * 8, ABSORB_COLS = 32, EXPAND_SIDE = 64 };

static int verdict_of(const void *verdict)
{
    return verdict ? *(const int32_t *)verdict : 0;
}

static void report_verdict(const void *verdict, sw_access_fn *report, void *context)
{
    if (verdict)
        report(context, verdict, sizeof(int32_t), SW_ACCESS_READ);
}

/* ---- records of blocks: a reference calls the host's kernels on one part after the other ---- */

static size_t record_bytes(sw_u64 block, int bits)
{
    return sizeof(float) + (size_t)block * (size_t)bits / 8;
}

static size_t records_bytes(sw_u64 numel, sw_u64 block, int bits)
{
    return (size_t)sw_contract_parts(numel, block) * record_bytes(block, bits);
}

static size_t float_bytes(sw_u64 numel)
{
    return (size_t)numel * sizeof(float);
}

/* A record takes a team of lanes: the least power of two with at most 16 elements a
 * lane, and at most a warp. */
static sw_u64 records_tiles(sw_u64 records, sw_u64 block)
{
    sw_u64 lanes = 2;
    while (lanes < 32 && lanes * LANE_NUMEL < block)
        lanes *= 2;
    return sw_contract_parts(records, SW_CONTRACT_THREADS / lanes);
}

static sw_status block_check(sw_u64 block, int bits, const char *operation, sw_error *err)
{
    if (block < SW_BLOCK_NUMEL_STEP || block > SW_BLOCK_NUMEL_MAX || block % SW_BLOCK_NUMEL_STEP)
        SW_FAIL(err, SW_E_INVALID, "%s: block must be a multiple of %d in [%d, %d], not %llu",
                operation, SW_BLOCK_NUMEL_STEP, SW_BLOCK_NUMEL_STEP, SW_BLOCK_NUMEL_MAX, block);
    if (bits != 8 && bits != 4)
        SW_FAIL(err, SW_E_INVALID, "%s: bits must be 8 or 4, not %d", operation, bits);
    return SW_OK;
}

static sw_status records_check(const void *records, const char *operation, sw_error *err)
{
    if ((uintptr_t)records % sizeof(float) != 0)
        SW_FAIL(err, SW_E_INVALID, "%s: records must be on a 4-byte boundary, not at %p", operation,
                records);
    return SW_OK;
}

/* ---- quantize ---- */

static sw_status quantize_check(const sw_quantize_args *a, sw_error *err)
{
    SW_TRY(block_check(a->block, a->bits, "quantize", err));
    SW_TRY(sw_contract_count("quantize: part_count", a->part_count, SW_BLOCK_PARTS_MAX, err));
    for (int i = 0; i < a->part_count; ++i)
        SW_TRY(records_check(a->part[i].records, "quantize", err));
    return SW_OK;
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

static sw_u64 quantize_tiles(const sw_quantize_args *a)
{
    sw_u64 records = 0;
    for (int i = 0; i < a->part_count; ++i)
        records += sw_contract_parts(a->part[i].numel, a->block);
    return records_tiles(records, a->block);
}

/* ---- fold_records ---- */

static const unsigned char *source_of(const sw_fold_records_args *a, int k)
{
    if (k == a->own_index)
        return a->own;
    return (const unsigned char *)a->others + (sw_u64)k * a->stride_bytes;
}

static sw_status fold_records_check(const sw_fold_records_args *a, sw_error *err)
{
    SW_TRY(block_check(a->block, a->bits, "fold_records", err));
    if (a->source_count < 1)
        SW_FAIL(err, SW_E_INVALID, "fold_records: source_count must be at least 1, not %d",
                a->source_count);
    if (a->own_index < -1 || a->own_index >= a->source_count)
        SW_FAIL(err, SW_E_INVALID, "fold_records: own_index must be in [-1, %d), not %d",
                a->source_count, a->own_index);
    SW_TRY(records_check(a->to, "fold_records", err));
    for (int k = 0; k < a->source_count; ++k)
        SW_TRY(records_check(source_of(a, k), "fold_records", err));
    return SW_OK;
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

static sw_u64 fold_records_tiles(const sw_fold_records_args *a)
{
    return records_tiles(a->count, a->block);
}

/* ---- decode ---- */

static sw_status decode_check(const sw_decode_args *a, sw_error *err)
{
    SW_TRY(block_check(a->block, a->bits, "decode", err));
    SW_TRY(sw_contract_count("decode: part_count", a->part_count, SW_BLOCK_PARTS_MAX, err));
    for (int i = 0; i < a->part_count; ++i) {
        SW_TRY(records_check(a->part[i].records, "decode", err));
        SW_TRY(records_check(a->part[i].own, "decode", err));
    }
    return SW_OK;
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

static sw_u64 decode_tiles(const sw_decode_args *a)
{
    sw_u64 records = 0;
    for (int i = 0; i < a->part_count; ++i)
        records += sw_contract_parts(a->part[i].numel, a->block);
    return records_tiles(records, a->block);
}

/* ---- verdict ---- */

static sw_status verdict_check(const sw_verdict_args *a, sw_error *err)
{
    SW_TRY(block_check(a->block, a->bits, "verdict", err));
    return records_check(a->records, "verdict", err);
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

static sw_u64 verdict_tiles(const sw_verdict_args *a)
{
    return sw_contract_parts(a->count, SW_CONTRACT_THREADS);
}

/* ---- owe ---- */

static sw_status owe_check(const sw_owe_args *a, sw_error *err)
{
    if (!a->verdict)
        SW_FAIL(err, SW_E_INVALID, "owe: verdict must not be NULL");
    return sw_contract_count("owe: part_count", a->part_count, SW_BLOCK_PARTS_MAX, err);
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

static sw_u64 owe_tiles(const sw_owe_args *a)
{
    sw_u64 tiles = 0;
    for (int i = 0; i < a->part_count; ++i)
        tiles += sw_contract_parts(a->part[i].numel, OWE_TILE_NUMEL);
    return tiles;
}

/* ---- low rank: a reference calls the host's kernels on one matrix after the other ---- */

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
    for (int i = 0; i < a->matrix_count; ++i)
        SW_TRY(matrix_check(&a->matrix[i], operation, err));
    return SW_OK;
}

static sw_status project_check(const sw_project_args *a, sw_error *err)
{
    SW_TRY(sw_contract_count("project: matrix_count", a->matrix_count, SW_MATRICES_MAX, err));
    return matrices_check(a, "project", err);
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

static sw_u64 project_tiles(const sw_project_args *a)
{
    sw_u64 tiles = 0;
    for (int i = 0; i < a->matrix_count; ++i)
        tiles += sw_contract_parts(a->matrix[i].rows, PROJECT_ROWS);
    return tiles;
}

static sw_status absorb_check(const sw_absorb_args *a, sw_error *err)
{
    SW_TRY(sw_contract_count("absorb: matrix_count", a->matrix_count, SW_MATRICES_MAX, err));
    return matrices_check(a, "absorb", err);
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

static sw_u64 absorb_tiles(const sw_absorb_args *a)
{
    sw_u64 tiles = 0;
    for (int i = 0; i < a->matrix_count; ++i)
        tiles += sw_contract_parts(a->matrix[i].cols, ABSORB_COLS);
    return tiles;
}

static sw_status expand_check(const sw_expand_args *a, sw_error *err)
{
    SW_TRY(sw_contract_count("expand: matrix_count", a->matrix_count, SW_MATRICES_MAX, err));
    return matrices_check(a, "expand", err);
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

static sw_u64 expand_tiles(const sw_expand_args *a)
{
    sw_u64 tiles = 0;
    for (int i = 0; i < a->matrix_count; ++i)
        tiles += sw_contract_parts(a->matrix[i].rows, EXPAND_SIDE) *
                 sw_contract_parts(a->matrix[i].cols, EXPAND_SIDE);
    return tiles;
}

/* ---- factors ---- */

static sw_status orthonormalize_check(const sw_orthonormalize_args *a, sw_error *err)
{
    SW_TRY(sw_contract_count("orthonormalize: factor_count", a->factor_count, SW_FACTORS_MAX, err));
    for (const sw_factor_args *f = a->factor; f < a->factor + a->factor_count; ++f)
        if (f->rank < 1 || f->rank > f->count)
            SW_FAIL(err, SW_E_INVALID, "orthonormalize: rank must be in [1, %llu], not %llu",
                    f->count, f->rank);
    return SW_OK;
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

static sw_u64 orthonormalize_tiles(const sw_orthonormalize_args *a)
{
    return (sw_u64)a->factor_count;
}

/* ---- finite ---- */

static sw_status finite_check(const sw_finite_args *a, sw_error *err)
{
    if (!a->verdict)
        SW_FAIL(err, SW_E_INVALID, "finite: verdict must not be NULL");
    if (a->refusal != SW_REFUSED && a->refusal != SW_REFUSED_LATE)
        SW_FAIL(err, SW_E_INVALID, "finite: refusal must be %d or %d, not %d", SW_REFUSED,
                SW_REFUSED_LATE, a->refusal);
    return SW_OK;
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

static sw_u64 finite_tiles(const sw_finite_args *a)
{
    return sw_contract_parts(a->numel, FINITE_TILE_NUMEL);
}

SW_CONTRACT(quantize, RECORD_BLOCKS)
SW_CONTRACT(fold_records, RECORD_BLOCKS)
SW_CONTRACT(decode, RECORD_BLOCKS)
SW_CONTRACT(verdict, VERDICT_BLOCKS)
SW_CONTRACT(owe, OWE_BLOCKS)
SW_CONTRACT(project, PROJECT_BLOCKS)
SW_CONTRACT(absorb, ABSORB_BLOCKS)
SW_CONTRACT(expand, EXPAND_BLOCKS)
SW_CONTRACT(orthonormalize, ORTHONORMALIZE_BLOCKS)
SW_CONTRACT(finite, FINITE_BLOCKS)
