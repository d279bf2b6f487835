/* device_mean.h - one bucket of a GPU to its mean, all of it on the communicator's stream.
 *
 * Idea: there are three forms.
 *
 * 1. The transport's own reduction, in NCCL's order, or again in rank order. NCCL adds: its mean
 *    would be a product and a sum, which NVLS does not take. Contributions come multiplied by
 *    1 / divisor, a product that costs nothing where they are copied (sw_device_mean_prescale).
 * 2. The two-step fold in rank order, with the same bits at every stage, transport and bucket size.
 * 3. That fold with 16 bits an element, divided and rounded into memory of their own: the bits of
 *    the host's 16-bit compressors (docs/design/compress.md).
 *
 * On a mesh form 1 may go by rows and columns (`row`, `column`): a reduce-scatter in the row, an
 * all-reduce of the slice in the column, and where the mean is whole an all-gather in the row. If
 * each row is one host, only a slice crosses between hosts. Every stage does the same additions.
 *
 * One rank has nothing to reduce: its bucket is its mean, unless it is rounded by form 3.
 *
 * Each ends in the whole bucket, or in this rank's slice alone, which lies elsewhere and where the
 * mean of an earlier round may stand. Where several ranks own a slice (`slices`), each folds a
 * piece of it, as of a bucket of world_size slices. They exchange their pieces, so owners have
 * equal bits.
 *
 * device_reducer.h orders the buckets on the stream.
 *
 * Thread rule: one at a time a communicator.
 */
#ifndef SW_REDUCE_DEVICE_MEAN_H
#define SW_REDUCE_DEVICE_MEAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/comm.h"
#include "comm/device_comm.h"

typedef struct sw_device_run { /* elements of a slice */
    size_t begin, end;
} sw_device_run;

typedef struct sw_device_mean_config {
    sw_device_comm *comm;    /* borrowed */
    sw_redop op;             /* MEAN or SUM */
    sw_dtype wire;           /* SW_DTYPE_COUNT: buckets travel in their own dtype */
    bool folds;              /* in rank order; implied by `wire` and shared slices */
    const sw_slices *slices; /* borrowed for the call; NULL: rank r owns slice r alone */
    /* Borrowed, both or none, on the stream of `comm`: this rank among the ranks of its row, which
     * are in the order of their slices, and among those of its column. Unused where the fold is
     * ours. */
    sw_device_comm *row, *column;
    bool is_lent;        /* sw_device_mean_lend brings its memory */
    size_t numel, bytes; /* size of the largest buckets */
} sw_device_mean_config;

typedef struct sw_device_mean {
    sw_device_comm *comm;         /* borrowed, as the next */
    sw_device_comm *row, *column; /* NULL: one communicator, or the fold */
    sw_redop op;
    int divisor;     /* divisor of means */
    size_t bytes;    /* size of the largest bucket */
    int active;      /* ranks that contribute to slices */
    uint8_t *trains; /* owned, a byte a rank: it contributes */
    sw_dtype wire;
    int slice_count;     /* slices of a bucket */
    int *piece;          /* owned, a number a rank: its piece of a bucket's world_size pieces */
    int *owners;         /* owned: the ranks of this rank's slice, in the order of its pieces */
    bool folds;          /* from the first bucket on */
    void *contributions; /* device memory; only if the fold is ours, not the transport's */
    void *compressed;    /* device memory; only with `wire` */
    bool is_lent;        /* both are borrowed; else they are owned */
    void *lent;          /* borrowed: later `contributions` */
} sw_device_mean;

/* On failure the caller still calls fini. */
SW_MUST_USE sw_status sw_device_mean_init(sw_device_mean *mean, const sw_device_mean_config *config,
                                          sw_error *err);
/* Call once the stream has passed all enqueued work. */
void sw_device_mean_fini(sw_device_mean *mean);

/* With `is_lent`, before the first bucket: use device memory of the caller, which outlives the
 * mean. `contributions`: as many bytes as the largest bucket; `compressed`: as many elements of
 * `wire` as it has, NULL without. */
void sw_device_mean_lend(sw_device_mean *mean, void *contributions, void *compressed);

/* In slices reduced from now on, only ranks with a non-zero byte in `trains`, at least one,
 * contribute: the standing mean is under their contributions alone. `trains` is equal on all ranks.
 * Once a rank is left out, the fold is ours. SW_E_MEMORY. */
SW_MUST_USE sw_status sw_device_mean_leave_out(sw_device_mean *mean, const uint8_t *trains,
                                               sw_error *err);

/* What contributions of `dtype` are multiplied by, and rounded to it, before they come here; 1: by
 * nothing. The same on all ranks. */
float sw_device_mean_prescale(const sw_device_mean *mean, sw_dtype dtype);

/* `bucket` becomes its mean, or sum. */
SW_MUST_USE sw_status sw_device_mean_whole(const sw_device_mean *mean,
                                           const sw_device_range *bucket, sw_error *err);

/* `slice` becomes this rank's slice of it, in two parts that follow one another; `bucket` is
 * anything afterwards. In the runs of `standing` (ascending, disjoint) contributions of all ranks
 * are on top of what `slice` holds. */
SW_MUST_USE sw_status sw_device_mean_collect(const sw_device_mean *mean,
                                             const sw_device_range *bucket, void *slice,
                                             bool is_standing, sw_error *err);
SW_MUST_USE sw_status sw_device_mean_complete(const sw_device_mean *mean,
                                              const sw_device_range *bucket, void *slice,
                                              const sw_device_run *standing, size_t standing_count,
                                              sw_error *err);

/* Whether sw_device_mean_whole, or _collect, is one call of the transport for a bucket of `dtype`:
 * it may be in one group with another. The same on all ranks. */
bool sw_device_mean_is_one_call(const sw_device_mean *mean, sw_dtype dtype);

#endif
