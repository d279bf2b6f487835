/* device_reducer.h - buckets of gradients on a GPU to their mean, ordered by events alone.
 *
 * Idea: four streams meet. Gradients come into being on the caller's producing streams; a comm
 * stream of ours averages bucket after bucket; a copy stream of ours brings the sum of squares to
 * pinned memory; the caller's consuming stream runs the optimizer. Events, and what each is for:
 *
 *   producer --ready[b]--> comm      a bucket is averaged after it was written, while backward goes
 * on comm --done[b]--> consumer       the optimizer reads bucket b after its mean, while others
 * travel consumer --consumed--> producer  the next step writes a bucket after the optimizer has
 * read it comm --summed--> copy            the sum leaves when the last bucket is in it copy
 * --copied[slot]--> comm      the next step zeroes the sum after it has left copy --copied[slot]-->
 * host      read one step later, so that the host hardly ever waits
 *
 *   for each step:
 *     begin(backward's stream); post(b, backward's stream) for b in order; finish()
 *     take(b, optimizer's stream), optimizer kernels on bucket(b), for each b
 *     release(optimizer's stream); [norm()]
 *
 * The mean is NCCL's own, or with `deterministic` the two-shot fold whose bits are those of every
 * stage, transport and bucket size (design.md, "Same bits"): slices are exchanged, each owner folds
 * in rank order, slices are gathered. No call but norm() and destroy waits on the host, and none
 * allocates after create.
 *
 * What it leaves out: which parameter lies where (the caller's layout), use bits, slices kept by
 * one rank (zero >= 1), graph capture (refused by name).
 *
 * Thread rule: one at a time a reducer.
 */
#ifndef SW_REDUCE_DEVICE_REDUCER_H
#define SW_REDUCE_DEVICE_REDUCER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/nccl.h"
#include "kernels/device_kernels.h"
#include "kernels/optim_kernels.h"

typedef struct sw_device_bucket_spec {
    size_t numel; /* a multiple of the world size */
    sw_dtype dtype;
} sw_device_bucket_spec;

typedef struct sw_device_reducer_config {
    sw_device *device; /* this and the next two: borrowed, outlive the reducer */
    const sw_kernel_set *kernels;
    sw_nccl *comm;
    const sw_device_bucket_spec *buckets; /* borrowed for the call */
    size_t bucket_count;
    bool deterministic;
    int64_t timeout_ns; /* of norm() and destroy */
} sw_device_reducer_config;

typedef struct sw_device_reducer sw_device_reducer;

/* Allocates everything: the buckets (filled with zeros), with `deterministic` once more the largest
 * of them. SW_E_INVALID names the bucket whose size does not divide; SW_E_MEMORY; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_reducer_create(const sw_device_reducer_config *config,
                                               sw_device_reducer **reducer, sw_error *err);

/* Waits under the deadline for our streams and for what was released; what the caller enqueued on
 * the buckets since, it has waited for itself. NULL is allowed. */
void sw_device_reducer_destroy(sw_device_reducer *reducer);

/* Device memory of bucket `index`, for gradients to be views of. Borrowed until destroy. */
void *sw_device_reducer_bucket(const sw_device_reducer *reducer, size_t index);

/* A step's gradients will be written on `producer` (call once for each such stream). SW_E_STATE
 * when the step before was not released; SW_E_UNSUPPORTED when `producer` is being captured. */
SW_MUST_USE sw_status sw_device_reducer_begin(sw_device_reducer *reducer, sw_stream *producer,
                                              sw_error *err);

/* Bucket `index` is complete on `producer`: its mean is enqueued. In index order, alike on all
 * ranks; SW_E_STATE names the bucket that is due. */
SW_MUST_USE sw_status sw_device_reducer_post(sw_device_reducer *reducer, size_t index,
                                             sw_stream *producer, sw_error *err);

/* What `consumer` does from now on sees the mean of bucket `index`, which was posted in this step.
 */
SW_MUST_USE sw_status sw_device_reducer_take(sw_device_reducer *reducer, size_t index,
                                             sw_stream *consumer, sw_error *err);

/* All buckets are posted: the sum of squares is sent to the host. */
SW_MUST_USE sw_status sw_device_reducer_finish(sw_device_reducer *reducer, sw_error *err);

/* `consumer`, the one stream that took them, has enqueued all that reads the buckets in this step.
 */
SW_MUST_USE sw_status sw_device_reducer_release(sw_device_reducer *reducer, sw_stream *consumer,
                                                sw_error *err);

/* The exact sum of squares of the means of the step before the one released last, or, with `now`,
 * of that one. Carried; see optim_kernels.h. Points into pinned memory, valid for two more steps.
 * Waits under the deadline: not at all, in a loop that computes longer than a copy takes. */
SW_MUST_USE sw_status sw_device_reducer_norm(sw_device_reducer *reducer, bool now,
                                             const sw_norm_sum **sum, sw_error *err);

#endif
