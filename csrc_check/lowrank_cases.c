/* lowrank_cases.c - the cases of PROJECT, ABSORB, EXPAND, ORTHONORMALIZE and FINITE; see
 * kernel_cases.h.
 */
#include <string.h>

#include "case_parts.h"
#include "kernels/compress_kernels.h"

typedef struct shape {
    size_t rows, cols, rank;
} shape;

static void *put_verdict(const sw_case_maker *maker, int verdict)
{
    return memcpy(sw_case_region(maker, 15, 0), &verdict, sizeof verdict);
}

/* Rows of a factor: ordinary, alike, zeros, the first not finite, tiny, huge. */
enum { ROWS_ORDINARY, ROWS_ALIKE, ROWS_ZERO, ROWS_INFINITE, ROWS_TINY, ROWS_HUGE, ROWS_FORMS };

/* A factor of rank x count, with zeros behind its rows. */
static void *make_factor(sw_case_maker *maker, void *place, size_t rank, size_t count, int form)
{
    static const float scales[ROWS_FORMS] = {1.0f, 1.0f, 0.0f, 1.0f, 0x1p-140f, 0x1p120f};
    size_t stride = sw_lowrank_stride(count);
    float *at = place;
    memset(at, 0, rank * stride * sizeof *at);
    for (size_t r = 0; r < rank; ++r) {
        sw_case_fill(maker, at + r * stride, count, SW_DTYPE_FLOAT32, false);
        if (form == ROWS_ALIKE && r > 0)
            memcpy(at + r * stride, at, count * sizeof *at);
        for (size_t i = 0; i < count; ++i)
            at[r * stride + i] *= scales[form];
    }
    if (form == ROWS_INFINITE)
        at[count / 2] = __builtin_inff();
    return place;
}

/* ---- PROJECT, ABSORB, EXPAND ---- */

static const shape matrix_shapes[] = {{1, 1, 1},    {3, 5, 2},    {33, 17, 4},  {40, 97, 5},
                                      {17, 200, 9}, {3, 1024, 3}, {1009, 4, 2}, {64, 60, 19}};
enum { SHAPES = sizeof matrix_shapes / sizeof *matrix_shapes, MEMORIES = 3, OFFSETS = 2 };
enum { MATRIX_CASES = SHAPES * MEMORIES * OFFSETS };

/* On boundaries, or `offset` bytes off them; without a memory, or with one of float32 or bfloat16.
 */
static sw_matrix_args make_matrix(sw_case_maker *maker, size_t first, size_t offset, shape of,
                                  size_t memory)
{
    sw_dtype dtype = memory == 2 ? SW_DTYPE_BFLOAT16 : SW_DTYPE_FLOAT32;
    void *gradient = sw_case_region(maker, first, offset);
    void *remembered = sw_case_region(maker, first + 1, offset);
    void *left = sw_case_region(maker, first + 2, offset);
    void *right = sw_case_region(maker, first + 3, offset);
    void *basis = sw_case_region(maker, first + 4, offset);
    sw_case_fill(maker, gradient, of.rows * of.cols, SW_DTYPE_FLOAT32, false);
    sw_case_fill(maker, remembered, of.rows * of.cols, dtype, false);
    return (sw_matrix_args){.gradient = gradient,
                            .memory = memory ? remembered : NULL,
                            .left = make_factor(maker, left, of.rank, of.rows, ROWS_ORDINARY),
                            .right = make_factor(maker, right, of.rank, of.cols, ROWS_ORDINARY),
                            .basis = make_factor(maker, basis, of.rank, of.cols, ROWS_ORDINARY),
                            .out = sw_case_region(maker, first + 5, 4),
                            .copy = memory ? sw_case_region(maker, first + 6, 4) : NULL,
                            .rows = of.rows,
                            .cols = of.cols,
                            .rank = of.rank,
                            .memory_dtype = (int)dtype};
}

static void make_matrices(sw_case_maker *maker, size_t *index)
{
    sw_matrices_args *args = &maker->made->args.matrices;
    size_t offset = sw_case_pick(index, OFFSETS) ? 4 : 16, memory = sw_case_pick(index, MEMORIES);
    size_t number = sw_case_pick(index, SHAPES);
    args->matrix_count = 2;
    args->verdict = put_verdict(maker, 0);
    args->matrix[0] = make_matrix(maker, 0, offset, matrix_shapes[number], memory);
    args->matrix[1] = make_matrix(maker, 8, 20 - offset, matrix_shapes[(number + 3) % SHAPES],
                                  (memory + 1) % MEMORIES);
    maker->made->label = offset == 4 ? "first off a boundary" : "first on a boundary";
}

static void make_project(sw_case_maker *maker, size_t index)
{
    make_matrices(maker, &index);
}

enum { ABSORB_FORMS = 3 }; /* kept, refused, the memory alone without a verdict */

static void make_absorb(sw_case_maker *maker, size_t index)
{
    const float beyond_bfloat16 = 0x1.fffffep127f;
    make_matrices(maker, &index);
    sw_matrices_args *args = &maker->made->args.matrices;
    if (index == 1)
        args->verdict = put_verdict(maker, SW_REFUSED);
    if (index < 2)
        return;
    args->verdict = NULL;
    args->matrix[0].out = NULL;
    memcpy(args->matrix[0].gradient, &beyond_bfloat16, sizeof beyond_bfloat16);
}

static void make_expand(sw_case_maker *maker, size_t index)
{
    make_matrices(maker, &index);
    maker->made->args.matrices.verdict = put_verdict(maker, (int)index);
}

static void settle_gradients(const void *args)
{
    const sw_matrices_args *a = args;
    for (int i = 0; i < a->matrix_count; ++i)
        sw_case_settle_floats(a->matrix[i].gradient,
                              (size_t)(a->matrix[i].rows * a->matrix[i].cols), SW_DTYPE_FLOAT32);
}

/* ---- ORTHONORMALIZE ---- */

static const shape factor_shapes[] = {{1, 1, 1}, {0, 5, 5}, {0, 97, 4}, {0, 1024, 3}, {0, 40, 17}};
enum { FACTOR_SHAPES = sizeof factor_shapes / sizeof *factor_shapes };

/* Three factors, one of them in place. */
static void make_orthonormalize(sw_case_maker *maker, size_t index)
{
    sw_orthonormalize_args *args = &maker->made->args.orthonormalize;
    size_t number = sw_case_pick(&index, FACTOR_SHAPES);
    int form = (int)sw_case_pick(&index, ROWS_FORMS);
    args->factor_count = 3;
    args->verdict = put_verdict(maker, (int)index);
    for (size_t f = 0; f < 3; ++f) {
        shape of = factor_shapes[(number + f) % FACTOR_SHAPES];
        void *from = make_factor(maker, sw_case_region(maker, 4 * f, 4), of.rank, of.cols, form);
        args->factor[f] =
            (sw_factor_args){.to = f == 1 ? from : sw_case_region(maker, 4 * f + 1, 4),
                             .from = from,
                             .count = of.cols,
                             .rank = of.rank,
                             .seed = UINT64_C(0x123456789abcdef) * f};
    }
    maker->made->label = "three factors";
}

/* ---- FINITE ---- */

static void make_finite(sw_case_maker *maker, size_t index)
{
    size_t numel = sw_case_numel(sw_case_pick(&index, SW_CASE_NUMELS));
    bool wild = sw_case_pick(&index, 2);
    void *values = sw_case_region(maker, 0, 4);
    sw_case_fill(maker, values, numel, SW_DTYPE_FLOAT32, wild);
    maker->made->args.finite = (sw_finite_args){.verdict = put_verdict(maker, (int)index),
                                                .values = values,
                                                .numel = numel,
                                                .refusal = SW_REFUSED};
    maker->made->label = wild ? "wild" : "finite";
}

const sw_case_table sw_project_cases = {
    .count = MATRIX_CASES, .make = make_project, .settle = settle_gradients};
const sw_case_table sw_absorb_cases = {.count = MATRIX_CASES * ABSORB_FORMS, .make = make_absorb};
const sw_case_table sw_expand_cases = {
    .count = MATRIX_CASES * (SW_REFUSED_LATE + 1), .make = make_expand, .settle = settle_gradients};
const sw_case_table sw_orthonormalize_cases = {.count = FACTOR_SHAPES * ROWS_FORMS * 2,
                                               .make = make_orthonormalize};
const sw_case_table sw_finite_cases = {.count = SW_CASE_NUMELS * 2 * 3, .make = make_finite};
