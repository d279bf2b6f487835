/* kernels.h - the contracts of the host kernels, and the table that a process picks once.
 *
 * Idea: one body file (host/fold_body.h) holds the meaning; it is compiled once per instruction set
 * into a table of this type. Every table gives the same bits: elements are folded in source order,
 * in the accumulation type, scaled once and rounded once, and no multiply-add is ever contracted.
 *
 * Thread rule: any. Kernels keep no state.
 */
#ifndef SW_KERNELS_KERNELS_H
#define SW_KERNELS_KERNELS_H

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

/* Folds `source_count` arrays of `numel` elements into one result and stores it to every
 * destination.
 *
 *   result[i] = round(scale * (((source[0][i] + source[1][i]) + source[2][i]) + ...))     SUM, MEAN
 *   result[i] = min or max over the sources; a NaN in any source gives NaN                MIN, MAX
 *
 * The accumulation type is float32 for float16, bfloat16, float32 and complex64, float64 for
 * float64 and complex128, and the type itself for integers (which wrap around, as two's complement
 * does).
 *
 * destination   destination_count pointers, each to numel elements, written. A destination may be
 * one of the sources (the same address), never a partial overlap. source        source_count >= 1
 * pointers, each to numel elements, read. Any alignment down to the element. scale         used by
 * MEAN only: rounded to the accumulation type by the caller's choice of value (float32 accumulation
 * multiplies by (float)scale). SUM does not multiply. Cost: numel * (source_count reads +
 * destination_count writes), in blocks that stay in the L1 cache.
 */
typedef void sw_fold_fn(void *const *destination, int destination_count, const void *const *source,
                        int source_count, size_t numel, double scale, sw_redop op);

struct sw_compress_kernels; /* kernels/compress_kernels.h */
struct sw_optim_kernels;    /* kernels/optim_kernels.h */

typedef struct sw_kernel_table {
    const char *name; /* "baseline", "avx2", "avx512", "neon": what describe() prints */
    /* One function a dtype; NULL where the dtype cannot be folded (bool). complex goes through its
     * real type with twice the count: the caller sees complex64 entries that do this themselves.
     * MEAN of an integer and MIN/MAX of a complex are refused earlier, by sw_redop_check(). */
    sw_fold_fn *fold[SW_DTYPE_COUNT];
    const struct sw_optim_kernels
        *optim; /* optimizers and the norm, same instruction set; never NULL */
    const struct sw_compress_kernels *compress; /* codecs and low rank, likewise; never NULL */
} sw_kernel_table;

/* The table in force: the best the processor runs, unless sw_kernels_force() named another.
 * The choice is stored in one atomic pointer, so that any thread may call. Never NULL. */
const sw_kernel_table *sw_kernels(void);

/* All tables that were compiled in and that this processor runs, best last. Returns the count;
 * tables may be NULL to ask for the count alone. For describe() and for tests. */
size_t sw_kernels_available(const sw_kernel_table **tables, size_t capacity);

/* Debug entry: makes sw_kernels() return the named table; NULL returns to the best one.
 * SW_E_INVALID names the legal values when there is no such table here. */
SW_MUST_USE sw_status sw_kernels_force(const char *name, sw_error *err);

/* Copies size_bytes from `source` to `destination`, which do not overlap; past the caches if it is
 * much. For data that nobody reads soon. Any alignment; complete (and ordered before later stores)
 * on return. Cost: size_bytes read and written. */
void sw_copy_streaming(void *destination, const void *source, size_t size_bytes);

/* SW_OK if `op` is defined on `dtype`; else SW_E_INVALID with a sentence naming both. */
SW_MUST_USE sw_status sw_redop_check(sw_redop op, sw_dtype dtype, sw_error *err);

/* "sum", "mean", "min", "max"; never NULL. */
const char *sw_redop_name(sw_redop op);

#endif
