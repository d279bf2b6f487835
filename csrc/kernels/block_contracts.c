/* block_contracts.c - contracts of QUANTIZE, FOLD_RECORDS, DECODE, VERDICT and OWE. A reference
 * calls the host's kernels on one part after the other. */
#include <stdint.h>
#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernel_contracts.h"
#include "kernels/kernels.h"

/* Values that the .cu text repeats: threads of a block, and blocks on one multiprocessor. */
enum { THREADS = 256, RECORD_BLOCKS = 3, OWE_BLOCKS = 4, VERDICT_BLOCKS = 8 };
enum { LANE_NUMEL = 16, OWE_TILE_NUMEL = 2048 };

static sw_u64 parts(sw_u64 count, sw_u64 each)
{
    return (count + each - 1) / each;
}

static size_t record_bytes(sw_u64 block, int bits)
{
    return sizeof(float) + (size_t)block * (size_t)bits / 8;
}

static size_t records_bytes(sw_u64 numel, sw_u64 block, int bits)
{
    return (size_t)parts(numel, block) * record_bytes(block, bits);
}

static size_t float_bytes(sw_u64 numel)
{
    return (size_t)numel * sizeof(float);
}

static bool is_refused(const void *verdict)
{
    return verdict && *(const int32_t *)verdict != 0;
}

static sw_grid blocks(sw_u64 wanted, int most)
{
    wanted = wanted < (sw_u64)most ? wanted : (sw_u64)most;
    return (sw_grid){.block_count = (unsigned)(wanted ? wanted : 1), .thread_count = THREADS};
}

/* A record takes a team of lanes: the least power of two with at most 16 elements a
 * lane, and at most a warp. */
static sw_grid records_grid(sw_u64 records, sw_u64 block, int processor_count)
{
    sw_u64 lanes = 2;
    while (lanes < 32 && lanes * LANE_NUMEL < block)
        lanes *= 2;
    return blocks(parts(records, THREADS / lanes), processor_count * RECORD_BLOCKS);
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

static sw_status count_check(int part_count, const char *operation, sw_error *err)
{
    if (part_count < 0 || part_count > SW_BLOCK_PARTS_MAX)
        SW_FAIL(err, SW_E_INVALID, "%s: part_count must be in [0, %d], not %d", operation,
                SW_BLOCK_PARTS_MAX, part_count);
    return SW_OK;
}

/* ---- quantize ---- */

sw_status sw_quantize_check(const void *args, sw_error *err)
{
    const sw_quantize_args *a = args;
    SW_TRY(block_check(a->block, a->bits, "quantize", err));
    SW_TRY(count_check(a->part_count, "quantize", err));
    for (int i = 0; i < a->part_count; ++i)
        SW_TRY(records_check(a->part[i].records, "quantize", err));
    return SW_OK;
}

void sw_quantize_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_quantize_args *a = args;
    for (const sw_quantize_part *p = a->part; p < a->part + a->part_count; ++p) {
        if (p->source)
            report(context, p->source, float_bytes(p->numel), SW_ACCESS_READ);
        if (p->source && p->error)
            report(context, p->error, float_bytes(p->numel), SW_ACCESS_READ);
        report(context, p->records, records_bytes(p->numel, a->block, a->bits), SW_ACCESS_WRITE);
    }
}

void sw_quantize_reference(const void *args)
{
    const sw_quantize_args *a = args;
    for (const sw_quantize_part *p = a->part; p < a->part + a->part_count; ++p) {
        if (p->source)
            sw_kernels()->compress->block_quantize(p->records, p->source, p->error,
                                                   (size_t)p->numel, (size_t)a->block, a->bits);
        else if (p->numel > 0)
            memset(p->records, 0, records_bytes(p->numel, a->block, a->bits));
    }
}

sw_grid sw_quantize_grid(const void *args, int processor_count)
{
    const sw_quantize_args *a = args;
    sw_u64 records = 0;
    for (int i = 0; i < a->part_count; ++i)
        records += parts(a->part[i].numel, a->block);
    return records_grid(records, a->block, processor_count);
}

/* ---- fold_records ---- */

static const unsigned char *source_of(const sw_fold_records_args *a, int k)
{
    if (k == a->own_index)
        return a->own;
    return (const unsigned char *)a->others + (sw_u64)k * a->stride_bytes;
}

sw_status sw_fold_records_check(const void *args, sw_error *err)
{
    const sw_fold_records_args *a = args;
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

void sw_fold_records_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_fold_records_args *a = args;
    size_t bytes = records_bytes(a->count * a->block, a->block, a->bits);
    for (int k = 0; k < a->source_count; ++k)
        report(context, source_of(a, k), bytes, SW_ACCESS_READ);
    report(context, a->to, bytes, SW_ACCESS_WRITE);
    if (a->residual)
        report(context, a->residual, float_bytes(a->count * a->block), SW_ACCESS_WRITE);
}

void sw_fold_records_reference(const void *args)
{
    const sw_fold_records_args *a = args;
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

sw_grid sw_fold_records_grid(const void *args, int processor_count)
{
    const sw_fold_records_args *a = args;
    return records_grid(a->count, a->block, processor_count);
}

/* ---- decode ---- */

sw_status sw_decode_check(const void *args, sw_error *err)
{
    const sw_decode_args *a = args;
    SW_TRY(block_check(a->block, a->bits, "decode", err));
    SW_TRY(count_check(a->part_count, "decode", err));
    for (int i = 0; i < a->part_count; ++i) {
        SW_TRY(records_check(a->part[i].records, "decode", err));
        SW_TRY(records_check(a->part[i].own, "decode", err));
    }
    return SW_OK;
}

void sw_decode_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_decode_args *a = args;
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
    if (a->verdict)
        report(context, a->verdict, sizeof(int32_t), SW_ACCESS_READ);
}

void sw_decode_reference(const void *args)
{
    const sw_decode_args *a = args;
    const sw_compress_kernels *table = sw_kernels()->compress;
    for (const sw_decode_part *p = a->part; p < a->part + a->part_count; ++p) {
        if (p->error && !is_refused(a->verdict))
            table->block_residual(p->error, p->values, p->own, (size_t)p->numel, (size_t)a->block,
                                  a->bits);
        if (p->records)
            table->block_dequantize(p->values, p->records, (size_t)p->numel, (size_t)a->block,
                                    a->bits, false);
    }
}

sw_grid sw_decode_grid(const void *args, int processor_count)
{
    const sw_decode_args *a = args;
    sw_u64 records = 0;
    for (int i = 0; i < a->part_count; ++i)
        records += parts(a->part[i].numel, a->block);
    return records_grid(records, a->block, processor_count);
}

/* ---- verdict ---- */

sw_status sw_verdict_check(const void *args, sw_error *err)
{
    const sw_verdict_args *a = args;
    SW_TRY(block_check(a->block, a->bits, "verdict", err));
    return records_check(a->records, "verdict", err);
}

void sw_verdict_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_verdict_args *a = args;
    size_t bytes = records_bytes(a->count * a->block, a->block, a->bits);
    report(context, a->records, bytes, SW_ACCESS_READ);
    report(context, a->verdict, sizeof(int32_t), SW_ACCESS_BOTH);
}

void sw_verdict_reference(const void *args)
{
    const sw_verdict_args *a = args;
    size_t bytes = record_bytes(a->block, a->bits);
    for (sw_u64 r = 0; r < a->count; ++r) {
        float scale;
        memcpy(&scale, (const char *)a->records + r * bytes, sizeof scale);
        if (scale != scale)
            *(int32_t *)a->verdict = 1;
    }
}

sw_grid sw_verdict_grid(const void *args, int processor_count)
{
    sw_u64 count = ((const sw_verdict_args *)args)->count;
    return blocks(parts(count, THREADS), processor_count * VERDICT_BLOCKS);
}

/* ---- owe ---- */

sw_status sw_owe_check(const void *args, sw_error *err)
{
    const sw_owe_args *a = args;
    if (!a->verdict)
        SW_FAIL(err, SW_E_INVALID, "owe: verdict must not be NULL");
    return count_check(a->part_count, "owe", err);
}

void sw_owe_accesses(const void *args, sw_access_fn *report, void *context)
{
    const sw_owe_args *a = args;
    for (const sw_owe_part *p = a->part; p < a->part + a->part_count; ++p) {
        report(context, p->rest, float_bytes(p->numel), SW_ACCESS_READ);
        report(context, p->error, float_bytes(p->numel), SW_ACCESS_BOTH);
    }
    report(context, a->verdict, sizeof(int32_t), SW_ACCESS_READ);
}

void sw_owe_reference(const void *args)
{
    const sw_owe_args *a = args;
    if (is_refused(a->verdict))
        return;
    for (const sw_owe_part *p = a->part; p < a->part + a->part_count; ++p)
        for (sw_u64 i = 0; i < p->numel; ++i)
            ((float *)p->error)[i] += ((const float *)p->rest)[i] * a->scale;
}

sw_grid sw_owe_grid(const void *args, int processor_count)
{
    const sw_owe_args *a = args;
    sw_u64 tiles = 0;
    for (int i = 0; i < a->part_count; ++i)
        tiles += parts(a->part[i].numel, OWE_TILE_NUMEL);
    return blocks(tiles, processor_count * OWE_BLOCKS);
}
