/* block_cases.c - the cases of QUANTIZE, FOLD_RECORDS, DECODE, VERDICT and OWE; see kernel_cases.h.
 */
#include <string.h>

#include "case_parts.h"
#include "kernel_references.h"
#include "kernels/compress_kernels.h"

/* Options that all but OWE have: the size of a record, its bits, and whether values are wild. */
enum { RECORD_SIZES = 4, RECORD_OPTIONS = RECORD_SIZES * 2 * 2 };
static const size_t record_sizes[RECORD_SIZES] = {32, 96, 256, 1056};

typedef struct record_options {
    size_t numel, block;
    int bits;
    bool wild;
} record_options;

static record_options pick_options(sw_case_maker *maker, size_t *index)
{
    record_options picked = {.numel = sw_case_numel(sw_case_pick(index, SW_CASE_NUMELS)),
                             .block = record_sizes[sw_case_pick(index, RECORD_SIZES)]};
    picked.bits = sw_case_pick(index, 2) ? 8 : 4;
    picked.wild = sw_case_pick(index, 2);
    maker->made->label = picked.bits == 8 ? "int8" : "int4";
    return picked;
}

/* Records of `numel` pseudo-random elements. */
static void make_records(sw_case_maker *maker, void *records, void *elements, size_t numel,
                         const record_options *how, bool wild)
{
    sw_quantize_args args = {.block = how->block, .bits = how->bits, .part_count = 1};
    args.part[0] = (sw_quantize_part){.records = records, .source = elements, .numel = numel};
    sw_case_fill(maker, elements, numel, SW_DTYPE_FLOAT32, wild);
    sw_kernel_references()[SW_KERNEL_QUANTIZE].reference(&args);
}

/* A scale may be a NaN; the codes behind it are bytes. */
static void settle_scales(void *records, size_t numel, sw_u64 block, int bits)
{
    size_t bytes = sizeof(float) + (size_t)block * (size_t)bits / 8;
    size_t count = (numel + (size_t)block - 1) / (size_t)block;
    for (size_t i = 0; i < count; ++i)
        sw_case_settle_floats((char *)records + i * bytes, 1, SW_DTYPE_FLOAT32);
}

/* ---- QUANTIZE ---- */

/* Four parts, one of zeros and one empty, whose records have gaps between them; or one part. */
static void make_quantize(sw_case_maker *maker, size_t index)
{
    record_options how = pick_options(maker, &index);
    const size_t counts[] = {how.numel, how.numel / 3, 0, how.numel % 5 * how.block};
    sw_quantize_args *args = &maker->made->args.quantize;
    args->block = how.block;
    args->bits = how.bits;
    args->part_count = index ? 1 : 4;
    for (size_t i = 0; i < 4; ++i) {
        void *source = sw_case_region(maker, 4 + i, 4 * i),
             *error = sw_case_region(maker, 8 + i, 0);
        args->part[i] = (sw_quantize_part){.records = sw_case_region(maker, i, 4),
                                           .source = i < 3 ? source : NULL,
                                           .error = i || index ? error : NULL,
                                           .numel = counts[i]};
        sw_case_fill(maker, source, counts[i], SW_DTYPE_FLOAT32, how.wild);
        sw_case_fill(maker, error, counts[i], SW_DTYPE_FLOAT32, false);
    }
}

static void settle_quantize(const void *args)
{
    const sw_quantize_args *a = args;
    for (int i = 0; i < a->part_count; ++i)
        settle_scales(a->part[i].records, (size_t)a->part[i].numel, a->block, a->bits);
}

/* ---- FOLD_RECORDS ---- */

static void make_fold_records(sw_case_maker *maker, size_t index)
{
    record_options how = pick_options(maker, &index);
    int sources = 1 + 2 * (int)index;
    void *own = sw_case_region(maker, 1, 4), *others = sw_case_region(maker, 2, 8);
    maker->made->args.fold_records =
        (sw_fold_records_args){.to = sw_case_region(maker, 0, 4),
                               .own = own,
                               .others = others,
                               .residual = sw_case_region(maker, 8, sources == 3 ? 4 : 0),
                               .count = (how.numel + how.block - 1) / how.block,
                               .block = how.block,
                               .stride_bytes = maker->region_bytes,
                               .scale = 1.0f / (float)sources,
                               .bits = how.bits,
                               .own_index = sources / 2,
                               .source_count = sources};
    for (size_t k = 0; k < 6; ++k) {
        void *records = k == 5 ? own : (char *)others + k * maker->region_bytes;
        make_records(maker, records, sw_case_region(maker, 9, 0), how.numel, &how,
                     how.wild && k % 2);
    }
}

static void settle_fold_records(const void *args)
{
    const sw_fold_records_args *a = args;
    size_t numel = (size_t)(a->count * a->block);
    settle_scales(a->to, numel, a->block, a->bits);
    sw_case_settle_floats(a->residual, numel, SW_DTYPE_FLOAT32);
}

/* ---- DECODE ---- */

enum { DECODE_FORMS = 3 }; /* kept, refused, without a verdict */

/* Four parts: errors and values, values alone, nothing, errors alone. */
static void make_decode(sw_case_maker *maker, size_t index)
{
    record_options how = pick_options(maker, &index);
    const size_t counts[] = {how.numel, how.numel / 2, 0, how.numel / 3};
    sw_decode_args *args = &maker->made->args.decode;
    int verdict = index == 1;
    args->verdict = memcpy(sw_case_region(maker, 15, 0), &verdict, sizeof verdict);
    args->verdict = index == 2 ? NULL : args->verdict;
    args->block = how.block;
    args->bits = how.bits;
    args->part_count = 4;
    for (size_t i = 0; i < 4; ++i) {
        void *values = sw_case_region(maker, i, 4 * i), *own = sw_case_region(maker, 4 + i, 4);
        void *records = sw_case_region(maker, 8 + i, 8),
             *error = sw_case_region(maker, 12 + i % 3, 0);
        make_records(maker, records, values, counts[i], &how, how.wild);
        make_records(maker, own, values, counts[i], &how, false);
        args->part[i] = (sw_decode_part){.values = values,
                                         .error = i == 1 ? NULL : error,
                                         .records = i < 3 ? records : NULL,
                                         .own = i == 1 ? NULL : own,
                                         .numel = counts[i]};
    }
    args->part[3].error = sw_case_region(maker, 13, 0);
    sw_case_fill(maker, args->part[0].error, counts[0], SW_DTYPE_FLOAT32, false);
    sw_case_fill(maker, args->part[3].error, counts[3], SW_DTYPE_FLOAT32, false);
}

static void settle_decode(const void *args)
{
    const sw_decode_args *a = args;
    for (int i = 0; i < a->part_count; ++i) {
        size_t numel = (size_t)a->part[i].numel;
        sw_case_settle_floats(a->part[i].values, a->part[i].records ? numel : 0, SW_DTYPE_FLOAT32);
    }
}

/* ---- VERDICT ---- */

static void make_verdict(sw_case_maker *maker, size_t index)
{
    record_options how = pick_options(maker, &index);
    sw_verdict_args *args = &maker->made->args.verdict;
    args->records = sw_case_region(maker, 0, 4);
    args->verdict = memset(sw_case_region(maker, 4, 0), 0, sizeof(int));
    args->count = (how.numel + how.block - 1) / how.block;
    args->block = how.block;
    args->bits = how.bits;
    make_records(maker, sw_case_region(maker, 0, 4), sw_case_region(maker, 1, 0), how.numel, &how,
                 how.wild);
}

/* ---- OWE ---- */

static void make_owe(sw_case_maker *maker, size_t index)
{
    size_t numel = sw_case_numel(sw_case_pick(&index, SW_CASE_NUMELS));
    const size_t counts[] = {numel, 0, numel / 3};
    sw_owe_args *args = &maker->made->args.owe;
    int verdict = (int)index;
    args->verdict = memcpy(sw_case_region(maker, 15, 0), &verdict, sizeof verdict);
    args->scale = 3.0f;
    args->part_count = 3;
    for (size_t i = 0; i < 3; ++i) {
        void *error = sw_case_region(maker, i, 4), *rest = sw_case_region(maker, 4 + i, 4 * i);
        args->part[i] = (sw_owe_part){.error = error, .rest = rest, .numel = counts[i]};
        sw_case_fill(maker, error, counts[i], SW_DTYPE_FLOAT32, false);
        sw_case_fill(maker, rest, counts[i], SW_DTYPE_FLOAT32, false);
    }
}

const sw_case_table sw_quantize_cases = {
    .count = SW_CASE_NUMELS * RECORD_OPTIONS * 2, .make = make_quantize, .settle = settle_quantize};
const sw_case_table sw_fold_records_cases = {.count = SW_CASE_NUMELS * RECORD_OPTIONS * 3,
                                             .make = make_fold_records,
                                             .settle = settle_fold_records};
const sw_case_table sw_decode_cases = {.count = SW_CASE_NUMELS * RECORD_OPTIONS * DECODE_FORMS,
                                       .make = make_decode,
                                       .settle = settle_decode};
const sw_case_table sw_verdict_cases = {.count = SW_CASE_NUMELS * RECORD_OPTIONS,
                                        .make = make_verdict};
const sw_case_table sw_owe_cases = {.count = SW_CASE_NUMELS * 2, .make = make_owe};
