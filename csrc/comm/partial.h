/* partial.h - a fold in two steps: partial sums inside a host in the accumulation type, then their
 * sum over hosts, scaled once and rounded once. On one host the two steps give the bits of the
 * whole fold.
 *
 * Thread rule: any. */
#ifndef SW_COMM_PARTIAL_H
#define SW_COMM_PARTIAL_H

#include "kernels/kernels.h"

/* The type of a partial result: float32 for halves, else the type itself. */
sw_dtype sw_partial_dtype(sw_dtype dtype);

/* partial = source[0] + source[1] + ... (or min, or max), in sw_partial_dtype(dtype). */
void sw_partial_fold(void *partial, const void *const *source, int source_count, size_t numel,
                     sw_dtype dtype, sw_redop op);

/* Set every destination to round(scale * (partial[0] + partial[1] + ...)) in `dtype`; scale only
 * for SW_REDOP_MEAN. If the partial type is `dtype`, a destination may be one of the partials.
 * partial_count >= 1. */
void sw_partial_finish(void *const *destination, int destination_count, const void *const *partial,
                       int partial_count, size_t numel, sw_dtype dtype, double scale, sw_redop op);

#endif
