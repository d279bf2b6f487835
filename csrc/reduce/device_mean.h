/* device_mean.h - the mean of one bucket on a GPU, computed on the communicator's stream.
 *
 * Idea: there are three forms.
 *
 * 1. The transport's own reduction, in NCCL's order or, with slots, in rank order. NCCL only adds:
 * its mean would be a product and a sum, which NVLS does not support. Contributions are multiplied
 * by 1 / divisor as they are copied, at no cost (sw_device_mean_prescale).
 * 2. The two-step fold in rank order, with the same bits at every stage, transport and bucket size.
 * Over several hosts each folds first, and then hosts do (device_hosts.h).
 * 3. That fold with 16 bits an element, divided and rounded into separate memory: the bits of the
 * host's 16-bit compressors (docs/design/compress.md). Over several hosts only a host's mean is.
 *
 * On a mesh form 1 may use rows and columns (`row`, `column`): a reduce-scatter in the row, an
 * all-reduce of the slice in the column and, for whole means, an all-gather in the row. If each row
 * is one host, only a slice crosses between hosts. Every stage does the same additions.
 *
 * One rank has nothing to reduce: its bucket is its mean, unless it is rounded by form 3.
 *
 * The result is the whole bucket, or only this rank's slice in separate memory, where an earlier
 * round's mean may stand. If several ranks own a slice (`slices`), each folds one of a bucket's
 * world_size pieces. They exchange their pieces, so owners have equal bits.
 *
 * device_rounds.c orders the buckets on the stream.
 *
 * Thread rule: one at a time per communicator.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/comm.h"
#include "comm/device_comm.h"
#include "comm/device_hosts.h"

typedef struct sw_device_part { /* elements of a slice */
    size_t slice, begin, end;
} sw_device_part;

/* The accumulated mean that is under all ranks' contributions. */
typedef struct sw_device_accumulated {
    bool is_there; /* somewhere in the bucket; equal on all ranks */
    /* Ascending and disjoint: elements of the parts of sw_device_mean_part, one after the other. */
    const sw_device_run *runs;
    size_t count;
} sw_device_accumulated;

typedef struct sw_device_mean_config {
    sw_device_comm *comm;    /* borrowed */
    sw_redop op;             /* MEAN or SUM */
    sw_dtype wire;           /* SW_DTYPE_COUNT: buckets travel in their own dtype */
    bool folds;              /* fold in rank order; implied by `wire` and shared slices */
    const sw_slices *slices; /* borrowed for the call; NULL: rank r owns slice r alone */
    /* Borrowed, both or none, on the stream of `comm`: the communicators of this rank's row, in the
     * order of slices, and of its column. Unused by forms 2 and 3. */
    sw_device_comm *row, *column;
    const sw_host_map *hosts; /* borrowed, outlives the mean; NULL: one host */
    bool is_sliced;           /* only slices of means are made */
    size_t numel, bytes;      /* size of the largest buckets */
} sw_device_mean_config;

typedef struct sw_device_mean {
    sw_device_comm *comm;         /* borrowed, as the next */
    sw_device_comm *row, *column; /* NULL: one communicator, or the fold */
    sw_redop op;
    int divisor;            /* divisor of means */
    const sw_host_map *map; /* borrowed; NULL: one host */
    bool is_sliced;
    size_t numel, bytes; /* size of the largest buckets */
    int active;          /* ranks that contribute to slices */
    uint8_t *trains;     /* owned, a byte a rank: it contributes */
    sw_dtype wire;
    int slice_count;       /* slices of a bucket */
    int *piece;            /* owned, a number a rank: its piece of a bucket's world_size pieces */
    int *owners;           /* owned: the ranks of this rank's slice, in the order of its pieces */
    bool folds;            /* set by the first bucket */
    void *contributions;   /* device memory; only if the fold is ours, not the transport's */
    sw_device_hosts hosts; /* owned, with the contributions; without `comm`: one exchange */
    void *compressed;      /* device memory; only with `wire` */
} sw_device_mean;

/* On failure the caller still calls fini. */
SW_MUST_USE sw_status sw_device_mean_init(sw_device_mean *mean, const sw_device_mean_config *config,
                                          sw_error *err);
/* Call once the stream has run all enqueued work. */
void sw_device_mean_fini(sw_device_mean *mean);

/* From now on only ranks with a non-zero byte in `trains` (at least one) contribute to slices; the
 * accumulated mean is under only their contributions. `trains` is equal on all ranks. Once a rank
 * is left out, form 2 is used. SW_E_MEMORY. */
SW_MUST_USE sw_status sw_device_mean_leave_out(sw_device_mean *mean, const uint8_t *trains,
                                               sw_error *err);

/* Return the factor by which the caller multiplies contributions of `dtype`, rounded to it; 1:
 * none. Equal on all ranks. */
float sw_device_mean_prescale(const sw_device_mean *mean, sw_dtype dtype);

/* Replace `bucket` by its mean or sum. */
SW_MUST_USE sw_status sw_device_mean_whole(const sw_device_mean *mean,
                                           const sw_device_range *bucket, sw_error *err);

/* Set *part to part `i` of the bucket whose accumulated runs this rank needs; false: there are
 * fewer. One: its slice. By hosts: the pieces that it folds. */
bool sw_device_mean_part(const sw_device_mean *mean, const sw_device_range *bucket, size_t i,
                         sw_device_part *part);

/* Set `slice` to this rank's slice of the mean, in two consecutive calls; `bucket` is undefined
 * afterwards. In the runs of `under` all ranks' contributions are on top of the mean that stands in
 * the slices. */
SW_MUST_USE sw_status sw_device_mean_collect(const sw_device_mean *mean,
                                             const sw_device_range *bucket, void *slice,
                                             const sw_device_accumulated *under, sw_error *err);
SW_MUST_USE sw_status sw_device_mean_complete(const sw_device_mean *mean,
                                              const sw_device_range *bucket, void *slice,
                                              const sw_device_accumulated *under, sw_error *err);

/* Return true if means go by rows and columns, so that a row's sum can stay in it. */
bool sw_device_mean_goes_by_rows(const sw_device_mean *mean);
/* Set `slice` to this rank's slice of its row's sum of `bucket`, whose other elements are undefined
 * afterwards. Only then. */
SW_MUST_USE sw_status sw_device_mean_of_row(const sw_device_mean *mean,
                                            const sw_device_range *bucket, void *slice,
                                            sw_error *err);
/* Add `run` of such a slice to this rank's contribution. */
SW_MUST_USE sw_status sw_device_mean_add_kept(const sw_device_mean *mean,
                                              const sw_device_range *bucket, const void *slice,
                                              sw_device_run run, sw_error *err);

/* Return true if sw_device_mean_whole, or _collect, is one call of the transport for a bucket of
 * `dtype`, so that it may share a group with another call. Equal on all ranks. */
bool sw_device_mean_is_one_call(const sw_device_mean *mean, sw_dtype dtype);
