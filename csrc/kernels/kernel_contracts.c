/* kernel_contracts.c - the table of device_kernels.h: the check of each kernel's arguments, and its
 * grid. What a kernel computes is in csrc_check/kernel_references.h.
 *
 * Of a kernel's arguments, sw_<noun>_args, there are noun_check and noun_tiles: the tiles that
 * blocks of threads take in turn. CONTRACT(noun, n) makes the untyped functions of the table; n
 * blocks run on a multiprocessor. */
#include <stdint.h>

#include "kernels/compress_kernels.h"
#include "kernels/device_kernels.h"
#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"

/* Values that the .cu text repeats: threads of a block, and blocks of a kernel on a multiprocessor.
 * A block takes so many bytes or elements at a time, a lane elements and a warp rows. A tile of a
 * block has sides. */
enum { THREADS = 256 };
enum { CAST_BLOCKS = 4, PACK_BLOCKS = 3, STEP_BLOCKS = 4, NORM_BLOCKS = 3, FOLD_BLOCKS = 3 };
enum { RECORD_BLOCKS = 3, OWE_BLOCKS = 4, VERDICT_BLOCKS = 8, FINITE_BLOCKS = 8 };
enum { PROJECT_BLOCKS = 2, ABSORB_BLOCKS = 3, EXPAND_BLOCKS = 3, ORTHONORMALIZE_BLOCKS = 8 };
enum { TURN_BYTES = THREADS * 64, RUN_TILE_NUMEL = THREADS * 4, FOLD_TURN_BYTES = THREADS * 32 };
enum { LANE_NUMEL = 16, OWE_TILE_NUMEL = 2048, FINITE_TILE_NUMEL = 1024 };
enum { PROJECT_ROWS = THREADS / 32 * 8, ABSORB_COLS = 32, EXPAND_SIDE = 64 };

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

static sw_u64 parts(sw_u64 count, sw_u64 each)
{
    return (count + each - 1) / each;
}

/* Check a number of items. `what`: "pack: segment_count". */
static sw_status count_check(const char *what, int count, int most, sw_error *err)
{
    if (count < 0 || count > most)
        SW_FAIL(err, SW_E_INVALID, "%s must be in [0, %d], not %d", what, most, count);
    return SW_OK;
}

/* Define noun_check() of arguments that are a list: their number, and `check` of each `item`. */
#define CHECK_ITEMS(noun, item_type, list, count, most, check)                   \
    static sw_status noun##_check(const sw_##noun##_args *a, sw_error *err)      \
    {                                                                            \
        SW_TRY(count_check(#noun ": " #count, a->count, most, err));             \
        for (const item_type *item = a->list; item < a->list + a->count; ++item) \
            SW_TRY(check);                                                       \
        return SW_OK;                                                            \
    }

/* Define noun_tiles() of such arguments: `total`, of the `sum` over each `item`. */
#define COUNT_ITEMS(noun, item_type, list, count, each, total)                   \
    static sw_u64 noun##_tiles(const sw_##noun##_args *a)                        \
    {                                                                            \
        sw_u64 sum = 0;                                                          \
        for (const item_type *item = a->list; item < a->list + a->count; ++item) \
            sum += each;                                                         \
        return total;                                                            \
    }

static bool is_small_float(int dtype)
{
    return dtype == SW_DTYPE_FLOAT32 || dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

static size_t array_bytes(sw_u64 numel, int dtype)
{
    return (size_t)numel * sw_dtype_size_bytes((sw_dtype)dtype);
}

/* ---- copies and folds ---- */

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

static sw_u64 cast_tiles(const sw_cast_args *a)
{
    return parts(array_bytes(a->numel, a->from_dtype), TURN_BYTES);
}

static sw_status segment_check(const sw_pack_segment *s, int number, sw_error *err)
{
    if (s->piece_count && (s->size_bytes > s->piece_count * s->piece_bytes ||
                           s->size_bytes <= (s->piece_count - 1) * s->piece_bytes))
        SW_FAIL(err, SW_E_INVALID,
                "pack: the %llu bytes of segment %d must end in the last of its %llu pieces of "
                "%llu bytes",
                s->size_bytes, number, s->piece_count, s->piece_bytes);
    return SW_OK;
}

static sw_status pack_check(const sw_pack_args *a, sw_error *err)
{
    SW_TRY(count_check("pack: segment_count", a->segment_count, SW_PACK_SEGMENT_MAX, err));
    for (int i = 0; i < a->segment_count; ++i)
        SW_TRY(segment_check(&a->segment[i], i, err));
    return a->converts ? small_float_pair_check("pack", a->to_dtype, a->from_dtype, err) : SW_OK;
}

COUNT_ITEMS(pack, sw_pack_segment, segment, segment_count,
            item->piece_count ? item->piece_count * parts(item->piece_bytes, TURN_BYTES)
                              : parts(item->size_bytes, TURN_BYTES),
            sum)

static sw_status sources_check(int source_count, int own_index, const char *operation,
                               sw_error *err)
{
    if (source_count < 1)
        SW_FAIL(err, SW_E_INVALID, "%s: source_count must be at least 1, not %d", operation,
                source_count);
    if (own_index < -1 || own_index >= source_count)
        SW_FAIL(err, SW_E_INVALID, "%s: own_index must be in [-1, %d), not %d", operation,
                source_count, own_index);
    return SW_OK;
}

static sw_status fold_check(const sw_fold_args *a, sw_error *err)
{
    SW_TRY(sw_redop_check((sw_redop)a->op, (sw_dtype)a->dtype, err));
    return sources_check(a->source_count, a->own_index, "fold", err);
}

static sw_u64 fold_tiles(const sw_fold_args *a)
{
    return parts(array_bytes(a->numel, a->dtype), FOLD_TURN_BYTES);
}

static sw_status put_check(const sw_put_args *a, sw_error *err)
{
    return count_check("put: size_bytes", a->size_bytes, SW_PUT_BYTES_MAX, err);
}

static sw_u64 put_tiles(const sw_put_args *a)
{
    return parts((sw_u64)a->size_bytes, THREADS);
}

/* ---- optimizers and norms ---- */

static sw_status run_check(const sw_run_args *run, const char *operation, sw_error *err)
{
    const int dtypes[] = {run->p_dtype, run->state_dtype, run->g_dtype, run->copy_dtype};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; ++i)
        if (!is_small_float(dtypes[i]))
            SW_FAIL(err, SW_E_INVALID, "%s: dtype must be float32, float16 or bfloat16, not %s",
                    operation, sw_dtype_name((sw_dtype)dtypes[i]));
    return SW_OK;
}

CHECK_ITEMS(adam, sw_run_args, run, run_count, SW_RUNS_MAX, run_check(item, "adam", err))
CHECK_ITEMS(sgd, sw_run_args, run, run_count, SW_RUNS_MAX, run_check(item, "sgd", err))
COUNT_ITEMS(adam, sw_run_args, run, run_count, parts(item->numel, RUN_TILE_NUMEL), sum)
COUNT_ITEMS(sgd, sw_run_args, run, run_count, parts(item->numel, RUN_TILE_NUMEL), sum)

static sw_status norm_check(const sw_norm_args *a, sw_error *err)
{
    sw_u64 numel = 0;
    if (!is_small_float(a->dtype) && a->dtype != SW_DTYPE_FLOAT64)
        SW_FAIL(err, SW_E_INVALID,
                "norm: dtype must be float32, float64, float16 or bfloat16, not %s",
                sw_dtype_name((sw_dtype)a->dtype));
    SW_TRY(count_check("norm: part_count", a->part_count, SW_NORM_PARTS_MAX, err));
    for (int i = 0; i < a->part_count; ++i)
        numel += a->part[i].numel;
    if (numel > UINT64_C(1) << 31)
        SW_FAIL(err, SW_E_INVALID, "norm: numel must be at most 2^31, not %llu", numel);
    return SW_OK;
}

COUNT_ITEMS(norm, sw_norm_part, part, part_count,
            parts(array_bytes(item->numel, a->dtype), TURN_BYTES), sum)

static sw_status clip_check(const sw_clip_args *a, sw_error *err)
{
    if (a->norm && (!a->factor || !(a->max_norm >= 0)))
        SW_FAIL(err, SW_E_INVALID, "clip: max_norm must be at least 0 and factor not NULL, not %g",
                a->max_norm);
    return SW_OK;
}

static sw_u64 clip_tiles(const sw_clip_args *a)
{
    (void)a;
    return 1;
}

/* ---- records of blocks ---- */

/* A record takes a team of lanes: the least power of two with at most 16 elements a
 * lane, and at most a warp. */
static sw_u64 records_tiles(sw_u64 records, sw_u64 block)
{
    sw_u64 lanes = 2;
    while (lanes < 32 && lanes * LANE_NUMEL < block)
        lanes *= 2;
    return parts(records, THREADS / lanes);
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

static sw_status quantize_check(const sw_quantize_args *a, sw_error *err)
{
    SW_TRY(block_check(a->block, a->bits, "quantize", err));
    SW_TRY(count_check("quantize: part_count", a->part_count, SW_BLOCK_PARTS_MAX, err));
    for (int i = 0; i < a->part_count; ++i)
        SW_TRY(records_check(a->part[i].records, "quantize", err));
    return SW_OK;
}

COUNT_ITEMS(quantize, sw_quantize_part, part, part_count, parts(item->numel, a->block),
            records_tiles(sum, a->block))

static sw_status fold_records_check(const sw_fold_records_args *a, sw_error *err)
{
    SW_TRY(block_check(a->block, a->bits, "fold_records", err));
    SW_TRY(sources_check(a->source_count, a->own_index, "fold_records", err));
    SW_TRY(records_check(a->to, "fold_records", err));
    for (int k = 0; k < a->source_count; ++k)
        SW_TRY(records_check(
            k == a->own_index ? a->own : (const char *)a->others + (sw_u64)k * a->stride_bytes,
            "fold_records", err));
    return SW_OK;
}

static sw_u64 fold_records_tiles(const sw_fold_records_args *a)
{
    return records_tiles(a->count, a->block);
}

static sw_status decode_check(const sw_decode_args *a, sw_error *err)
{
    SW_TRY(block_check(a->block, a->bits, "decode", err));
    SW_TRY(count_check("decode: part_count", a->part_count, SW_BLOCK_PARTS_MAX, err));
    for (int i = 0; i < a->part_count; ++i) {
        SW_TRY(records_check(a->part[i].records, "decode", err));
        SW_TRY(records_check(a->part[i].own, "decode", err));
    }
    return SW_OK;
}

COUNT_ITEMS(decode, sw_decode_part, part, part_count, parts(item->numel, a->block),
            records_tiles(sum, a->block))

static sw_status verdict_check(const sw_verdict_args *a, sw_error *err)
{
    SW_TRY(block_check(a->block, a->bits, "verdict", err));
    return records_check(a->records, "verdict", err);
}

static sw_u64 verdict_tiles(const sw_verdict_args *a)
{
    return parts(a->count, THREADS);
}

static sw_status owe_check(const sw_owe_args *a, sw_error *err)
{
    if (!a->verdict)
        SW_FAIL(err, SW_E_INVALID, "owe: verdict must not be NULL");
    return count_check("owe: part_count", a->part_count, SW_BLOCK_PARTS_MAX, err);
}

COUNT_ITEMS(owe, sw_owe_part, part, part_count, parts(item->numel, OWE_TILE_NUMEL), sum)

/* ---- matrices and factors ---- */

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

#define CHECK_MATRICES(noun)                                                 \
    CHECK_ITEMS(noun, sw_matrix_args, matrix, matrix_count, SW_MATRICES_MAX, \
                matrix_check(item, #noun, err))
CHECK_MATRICES(project)
CHECK_MATRICES(absorb)
CHECK_MATRICES(expand)
COUNT_ITEMS(project, sw_matrix_args, matrix, matrix_count, parts(item->rows, PROJECT_ROWS), sum)
COUNT_ITEMS(absorb, sw_matrix_args, matrix, matrix_count, parts(item->cols, ABSORB_COLS), sum)
COUNT_ITEMS(expand, sw_matrix_args, matrix, matrix_count,
            parts(item->rows, EXPAND_SIDE) * parts(item->cols, EXPAND_SIDE), sum)

static sw_status orthonormalize_check(const sw_orthonormalize_args *a, sw_error *err)
{
    SW_TRY(count_check("orthonormalize: factor_count", a->factor_count, SW_FACTORS_MAX, err));
    for (const sw_factor_args *f = a->factor; f < a->factor + a->factor_count; ++f)
        if (f->rank < 1 || f->rank > f->count)
            SW_FAIL(err, SW_E_INVALID, "orthonormalize: rank must be in [1, %llu], not %llu",
                    f->count, f->rank);
    return SW_OK;
}

static sw_u64 orthonormalize_tiles(const sw_orthonormalize_args *a)
{
    return (sw_u64)a->factor_count;
}

static sw_status finite_check(const sw_finite_args *a, sw_error *err)
{
    if (!a->verdict)
        SW_FAIL(err, SW_E_INVALID, "finite: verdict must not be NULL");
    if (a->refusal != SW_REFUSED && a->refusal != SW_REFUSED_LATE)
        SW_FAIL(err, SW_E_INVALID, "finite: refusal must be %d or %d, not %d", SW_REFUSED,
                SW_REFUSED_LATE, a->refusal);
    return SW_OK;
}

static sw_u64 finite_tiles(const sw_finite_args *a)
{
    return parts(a->numel, FINITE_TILE_NUMEL);
}

#define CONTRACT(noun, blocks)                                                                   \
    static sw_status check_##noun(const void *args, sw_error *err)                               \
    {                                                                                            \
        return noun##_check(args, err);                                                          \
    }                                                                                            \
    static sw_grid grid_of_##noun(const void *args, int processor_count)                         \
    {                                                                                            \
        sw_u64 most = (sw_u64)processor_count * (blocks), tiles = noun##_tiles(args);            \
        tiles = tiles < most ? tiles : most;                                                     \
        return (sw_grid){.block_count = (unsigned)(tiles ? tiles : 1), .thread_count = THREADS}; \
    }
CONTRACT(cast, CAST_BLOCKS)
CONTRACT(pack, PACK_BLOCKS)
CONTRACT(fold, FOLD_BLOCKS)
CONTRACT(adam, STEP_BLOCKS)
CONTRACT(sgd, STEP_BLOCKS)
CONTRACT(norm, NORM_BLOCKS)
CONTRACT(clip, 1)
CONTRACT(quantize, RECORD_BLOCKS)
CONTRACT(fold_records, RECORD_BLOCKS)
CONTRACT(decode, RECORD_BLOCKS)
CONTRACT(verdict, VERDICT_BLOCKS)
CONTRACT(owe, OWE_BLOCKS)
CONTRACT(project, PROJECT_BLOCKS)
CONTRACT(absorb, ABSORB_BLOCKS)
CONTRACT(expand, EXPAND_BLOCKS)
CONTRACT(orthonormalize, ORTHONORMALIZE_BLOCKS)
CONTRACT(finite, FINITE_BLOCKS)
CONTRACT(put, 1)

#define ROW(number, noun)                                           \
    [SW_KERNEL_##number] = {.name = "sw_" #noun,                    \
                            .args_bytes = sizeof(sw_##noun##_args), \
                            .check = check_##noun,                  \
                            .grid = grid_of_##noun},
static const sw_kernel_contract contracts[SW_KERNEL_COUNT] = {SW_KERNELS(ROW)};

const sw_kernel_contract *sw_kernel_contracts(void)
{
    return contracts;
}
