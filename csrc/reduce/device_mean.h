/* device_mean.h - one bucket of a GPU to its mean, all of it on the communicator's stream.
 *
 * Idea: three ways. NCCL's own reduction; the two-shot fold in rank order, whose bits are those of
 * every stage, transport and bucket size; and that fold of 16 bits an element, divided and rounded
 * on their way into memory of their own: the bits of the host's halves (docs/design/compress.md).
 * Each ends in the whole bucket, or in this rank's slice alone, which lies elsewhere and where the
 * mean of a round before may stand.
 *
 * When the stream comes to a bucket, and who comes after it, is device_reducer.h's affair.
 *
 * Thread rule: one at a time a communicator.
 */
#ifndef SW_REDUCE_DEVICE_MEAN_H
#define SW_REDUCE_DEVICE_MEAN_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "comm/device_comm.h"

typedef struct sw_device_run { /* elements of a slice */
    size_t begin, end;
} sw_device_run;

typedef struct sw_device_mean {
    sw_device_comm *comm; /* borrowed */
    sw_redop op;          /* MEAN or SUM */
    int divisor;          /* of means */
    sw_dtype wire;        /* SW_DTYPE_COUNT: buckets travel as they are */
    void *contributions;  /* owned device memory; only where the fold is ours, not NCCL's */
    void *compressed;     /* owned device memory; only with `wire` */
} sw_device_mean;

/* Memory for buckets of at most `numel` elements and `size_bytes`. `folds`: in rank order, which
 * `wire` does in any case. On failure fini is still to be called. */
SW_MUST_USE sw_status sw_device_mean_init(sw_device_mean *mean, sw_device_comm *comm, sw_redop op,
                                          sw_dtype wire, bool folds, size_t numel,
                                          size_t size_bytes, sw_error *err);
/* The stream has passed what was enqueued. */
void sw_device_mean_fini(sw_device_mean *mean);

/* `bucket` becomes its mean, or sum. */
SW_MUST_USE sw_status sw_device_mean_whole(const sw_device_mean *mean,
                                           const sw_device_range *bucket, sw_error *err);

/* `slice` becomes this rank's slice of it; `bucket` is anything afterwards. In the runs of
 * `standing` (ascending, disjoint) contributions of all ranks are on top of what `slice` holds. */
SW_MUST_USE sw_status sw_device_mean_slice(const sw_device_mean *mean,
                                           const sw_device_range *bucket, void *slice,
                                           const sw_device_run *standing, size_t standing_count,
                                           sw_error *err);

#endif
