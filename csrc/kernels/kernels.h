/* kernels.h - the contracts of the host kernels, and the table of them that a process selects once.
 *
 * One body file (host/fold_body.h) defines the fold; it is compiled once per instruction set into a
 * table of this type. Every table gives the same bits: elements are folded in source order, in the
 * accumulation type, scaled once and rounded once, and no multiply-add is contracted.
 *
 * Thread rule: any. Kernels keep no state.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tensor/dtype.h"

typedef enum sw_redop {
    SW_REDOP_SUM = 0,
    SW_REDOP_MEAN,
    SW_REDOP_MIN,
    SW_REDOP_MAX,
    SW_REDOP_COUNT,
} sw_redop;

/* Fold `source_count` arrays of `numel` elements into one result and store it to every destination.
 *
 *   result[i] = round(scale * (((source[0][i] + source[1][i]) + source[2][i]) + ...))     SUM, MEAN
 *   result[i] = min or max over the sources; a NaN in any source gives NaN                MIN, MAX
 *
 * The accumulation type is float32 for float16, bfloat16, float32 and complex64, float64 for
 * float64 and complex128, and the type itself for integers, which wrap around in two's complement.
 *
 *   destination  destination_count pointers, each to numel elements, written. A destination may be
 *                one of the sources (the same address), but must not overlap one partially.
 *   source       source_count >= 1 pointers, each to numel elements, read. Any alignment down to
 *                the element.
 *   scale        the factor of MEAN; float32 accumulation multiplies by (float)scale. SUM does not
 *                multiply.
 *
 * Cost: numel * (source_count reads + destination_count writes), in blocks that stay in the L1
 * cache.
 */
typedef void sw_fold_fn(void *const *destination, int destination_count, const void *const *source,
                        int source_count, size_t numel, double scale, sw_redop op);

struct sw_compress_kernels; /* kernels/compress_kernels.h */
struct sw_optim_kernels;    /* kernels/optim_kernels.h */

typedef struct sw_kernel_table {
    const char *name; /* "baseline", "avx2", "avx512" or "neon", as describe() prints it */
    /* One function a dtype; NULL if the dtype cannot be folded (bool). The entries of complex
     * dtypes call their real type with twice the count. sw_redop_check() refuses MEAN of an integer
     * and MIN and MAX of a complex before. */
    sw_fold_fn *fold[SW_DTYPE_COUNT];
    const struct sw_optim_kernels *optim;       /* optimizers and the norm; never NULL */
    const struct sw_compress_kernels *compress; /* codecs and low rank; never NULL */
} sw_kernel_table;

/* Return the table in force: the best that the processor runs, unless sw_kernels_force() named
 * another. Never NULL. */
const sw_kernel_table *sw_kernels(void);

/* List the tables that are compiled in and that the processor runs, best last, and return their
 * count. `tables` may be NULL. */
size_t sw_kernels_available(const sw_kernel_table **tables, size_t capacity);

/* Make sw_kernels() return the named table, for tests; NULL restores the best one. SW_E_INVALID
 * names the legal values if there is no such table. */
SW_MUST_USE sw_status sw_kernels_force(const char *name, sw_error *err);

/* Copy size_bytes from `source` to `destination`, which must not overlap. A large copy bypasses the
 * caches: use it for data that is not read soon. Any alignment. The copy is complete, and ordered
 * before later stores, on return. Cost: size_bytes read and written. */
void sw_copy_streaming(void *destination, const void *source, size_t size_bytes);

/* Return SW_OK if `op` is defined on `dtype`; else SW_E_INVALID with a sentence that names both. */
SW_MUST_USE sw_status sw_redop_check(sw_redop op, sw_dtype dtype, sw_error *err);

/* Return "sum", "mean", "min" or "max"; never NULL. */
const char *sw_redop_name(sw_redop op);
