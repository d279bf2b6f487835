/* fold_body.h - the fold and its table; compiled once per instruction set.
 *
 * A block of every source is folded into an array that stays in the L1 cache, scaled once, rounded
 * once and only then stored, so a destination may be a source. Blocks of float16 and bfloat16
 * are widened to float32 (half_body.h) and use float32's operations. Loops are plain C that the
 * compiler vectorises.
 *
 * The includer defines FOLD_TABLE, FOLD_TABLE_NAME, OPTIM_TABLE and
 * COMPRESS_TABLE (see tables.h) and, if the processor has it, KERNEL_F16C with immintrin.h
 * included. The payload of a float32 or float64 NaN depends on the processor.
 *
 * Left out: threads (callers split the range) and argument checks (callers use sw_redop_check()).
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/half_body.h"
#include "kernels/host/tables.h"

/* Two float blocks, a block of halves and the lines of the sources fill half of a 32 KiB L1. */
enum { FOLD_BLOCK_BYTES = 4096, HALF_BLOCK_NUMEL = FOLD_BLOCK_BYTES / sizeof(float) };

#if defined(__clang__)
#define FOLD_LANES _Pragma("clang loop vectorize(assume_safety)")
#else
#define FOLD_LANES _Pragma("GCC ivdep")
#endif

#define FOLD_T float
#define FOLD_NAME(f) f##_float32
#define FOLD_ADD(a, b) ((a) + (b))
#define FOLD_FLOATING 1
#include "kernels/host/fold_type.h"

#define FOLD_T double
#define FOLD_NAME(f) f##_float64
#define FOLD_ADD(a, b) ((a) + (b))
#define FOLD_FLOATING 1
#include "kernels/host/fold_type.h"

/* Integers add as unsigned, because signed overflow is undefined and the contract is to wrap. */
#define FOLD_T int8_t
#define FOLD_NAME(f) f##_int8
#define FOLD_ADD(a, b) ((int8_t)((unsigned)(a) + (unsigned)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

#define FOLD_T uint8_t
#define FOLD_NAME(f) f##_uint8
#define FOLD_ADD(a, b) ((uint8_t)((unsigned)(a) + (unsigned)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

#define FOLD_T int16_t
#define FOLD_NAME(f) f##_int16
#define FOLD_ADD(a, b) ((int16_t)((unsigned)(a) + (unsigned)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

#define FOLD_T int32_t
#define FOLD_NAME(f) f##_int32
#define FOLD_ADD(a, b) ((int32_t)((uint32_t)(a) + (uint32_t)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

#define FOLD_T int64_t
#define FOLD_NAME(f) f##_int64
#define FOLD_ADD(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b)))
#define FOLD_FLOATING 0
#include "kernels/host/fold_type.h"

typedef void widen_fn(float *restrict out, const uint16_t *restrict in, size_t count);
typedef void narrow_fn(uint16_t *restrict out, const float *restrict in, size_t count);

static void fold_half(void *const *destination, int destination_count, const void *const *source,
                      int source_count, size_t numel, double scale, sw_redop op, widen_fn *widen,
                      narrow_fn *narrow)
{
    float sum[HALF_BLOCK_NUMEL], wide[HALF_BLOCK_NUMEL];
    uint16_t rounded[HALF_BLOCK_NUMEL];
    for (size_t start = 0; start < numel; start += HALF_BLOCK_NUMEL) {
        size_t count = numel - start < HALF_BLOCK_NUMEL ? numel - start : HALF_BLOCK_NUMEL;
        widen(sum, (const uint16_t *)source[0] + start, count);
        for (int k = 1; k < source_count; ++k) {
            widen(wide, (const uint16_t *)source[k] + start, count);
            combine_float32(sum, sum, wide, count, op);
        }
        if (op == SW_REDOP_MEAN)
            scale_float32(sum, count, (float)scale);
        narrow(rounded, sum, count);
        for (int k = 0; k < destination_count; ++k)
            memcpy((uint16_t *)destination[k] + start, rounded, count * sizeof rounded[0]);
    }
}

static void fold_float16(void *const *destination, int destination_count, const void *const *source,
                         int source_count, size_t numel, double scale, sw_redop op)
{
    fold_half(destination, destination_count, source, source_count, numel, scale, op, widen_float16,
              narrow_float16);
}

static void fold_bfloat16(void *const *destination, int destination_count,
                          const void *const *source, int source_count, size_t numel, double scale,
                          sw_redop op)
{
    fold_half(destination, destination_count, source, source_count, numel, scale, op,
              widen_bfloat16, narrow_bfloat16);
}

static void fold_complex64(void *const *destination, int destination_count,
                           const void *const *source, int source_count, size_t numel, double scale,
                           sw_redop op)
{
    fold_float32(destination, destination_count, source, source_count, 2 * numel, scale, op);
}

static void fold_complex128(void *const *destination, int destination_count,
                            const void *const *source, int source_count, size_t numel, double scale,
                            sw_redop op)
{
    fold_float64(destination, destination_count, source, source_count, 2 * numel, scale, op);
}

const sw_kernel_table FOLD_TABLE = {
    .name = FOLD_TABLE_NAME,
    .optim = &OPTIM_TABLE,
    .compress = &COMPRESS_TABLE,
    .fold = {[SW_DTYPE_FLOAT32] = fold_float32,
             [SW_DTYPE_FLOAT64] = fold_float64,
             [SW_DTYPE_FLOAT16] = fold_float16,
             [SW_DTYPE_BFLOAT16] = fold_bfloat16,
             [SW_DTYPE_INT8] = fold_int8,
             [SW_DTYPE_UINT8] = fold_uint8,
             [SW_DTYPE_INT16] = fold_int16,
             [SW_DTYPE_INT32] = fold_int32,
             [SW_DTYPE_INT64] = fold_int64,
             [SW_DTYPE_COMPLEX64] = fold_complex64,
             [SW_DTYPE_COMPLEX128] = fold_complex128},
};
