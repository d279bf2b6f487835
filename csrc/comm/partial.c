/* partial.c - see the header. Halves go through float32 in blocks that stay in the L1 cache. */
#include "comm/partial.h"

#include <stdbool.h>
#include <string.h>

#include "base/bytes.h"
#include "kernels/compress_kernels.h"

enum { BLOCK_NUMEL = 1024 };

static bool is_half(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

sw_dtype sw_partial_dtype(sw_dtype dtype)
{
    return is_half(dtype) ? SW_DTYPE_FLOAT32 : dtype;
}

static void fold_halves(float *partial, const void *const *source, int source_count, size_t numel,
                        sw_dtype dtype, sw_redop op)
{
    float wide[BLOCK_NUMEL];
    for (size_t begin = 0; begin < numel; begin += BLOCK_NUMEL) {
        size_t count = sw_size_min(BLOCK_NUMEL, numel - begin);
        void *out = partial + begin;
        for (int s = 0; s < source_count; ++s) {
            const uint16_t *half = (const uint16_t *)source[s] + begin;
            const void *both[] = {out, wide};
            sw_kernels()->compress->half_widen(s ? wide : out, half, count, dtype);
            if (s)
                sw_kernels()->fold[SW_DTYPE_FLOAT32](&out, 1, both, 2, count, 1, op);
        }
    }
}

void sw_partial_fold(void *partial, const void *const *source, int source_count, size_t numel,
                     sw_dtype dtype, sw_redop op)
{
    op = op == SW_REDOP_MEAN ? SW_REDOP_SUM : op;
    if (is_half(dtype))
        fold_halves(partial, source, source_count, numel, dtype, op);
    else
        sw_kernels()->fold[dtype](&partial, 1, source, source_count, numel, 1, op);
}

static void finish_halves(void *const *destination, int destination_count,
                          const void *const *partial, int partial_count, size_t numel,
                          sw_dtype dtype, double scale, sw_redop op)
{
    float sum[BLOCK_NUMEL], next[BLOCK_NUMEL];
    uint16_t half[BLOCK_NUMEL];
    sw_redop joined = op == SW_REDOP_MEAN ? SW_REDOP_SUM : op;
    for (size_t begin = 0; begin < numel; begin += BLOCK_NUMEL) {
        size_t count = sw_size_min(BLOCK_NUMEL, numel - begin);
        void *out = sum;
        memcpy(sum, (const float *)partial[0] + begin, count * sizeof *sum);
        for (int p = 1; p < partial_count; ++p) {
            memcpy(next, (const float *)partial[p] + begin, count * sizeof *next);
            sw_kernels()->fold[SW_DTYPE_FLOAT32](&out, 1, (const void *const[]){sum, next}, 2,
                                                 count, 1, joined);
        }
        if (op == SW_REDOP_MEAN)
            sw_kernels()->fold[SW_DTYPE_FLOAT32](&out, 1, (const void *const[]){sum}, 1, count,
                                                 scale, op);
        sw_kernels()->compress->half_narrow(half, sum, count, 1, dtype);
        for (int d = 0; d < destination_count; ++d)
            memcpy((uint16_t *)destination[d] + begin, half, count * sizeof *half);
    }
}

void sw_partial_finish(void *const *destination, int destination_count, const void *const *partial,
                       int partial_count, size_t numel, sw_dtype dtype, double scale, sw_redop op)
{
    if (is_half(dtype))
        finish_halves(destination, destination_count, partial, partial_count, numel, dtype, scale,
                      op);
    else
        sw_kernels()->fold[dtype](destination, destination_count, partial, partial_count, numel,
                                  scale, op);
}
