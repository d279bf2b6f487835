/* device_reducer.h - buckets of gradients on a GPU to their mean, ordered by events alone.
 *
 * Idea: three streams meet. Gradients come into being on the caller's producing streams; the
 * communicator's stream averages bucket after bucket; the caller's consuming stream runs the
 * optimizer. Events, and what each is for:
 *
 *   producer --ready[b]--> comm      a bucket is averaged after it was written, while backward goes
 *                                    on
 *   comm --done[b]--> consumer       the optimizer reads bucket b after its mean, while others
 *                                    travel
 *   consumer --consumed--> producer  the next step writes a bucket after the optimizer has read it
 *   comm --gathered--> host          which gradients some rank used; read only by a rank that left
 *                                    one unused itself, in that step
 *   comm --told--> host              whether ranks are at the same step; read when it is there
 *   comm --left[place]--> producer   (sliced) a place of the ring is written again after the bucket
 *                                    that lay there was averaged
 *
 *   for each step:
 *     begin(backward's stream); post(b, backward's stream) for b in order; finish(used)
 *     take(b, optimizer's stream), optimizer kernels on bucket b, for each b
 *     release(optimizer's stream)
 *
 * The mean is the transport's own, or with `deterministic` the two-shot fold, or the fold of what
 * was made narrower (`wire`): device_mean.h. Use bits are one byte a gradient in an all-reduce of
 * their own behind the last bucket. They travel in a launch's arguments, so the GPU reads no host
 * memory. A step in which every gradient was used never waits on the host.
 *
 * Over a borrowed communicator there are two events more, which buy no overlap: producer --> comm
 * in begin, and comm --> the stream whose owner uses it next (sw_device_comm_give_back, the
 * caller's after take).
 *
 * Sliced (zero >= 2), a bucket is memory only while it travels: it is written into one of two
 * places (reserve), and this rank's slice of the mean is folded out of it into memory that stays.
 * Where a contribution is on top of the mean that stands in the slice, the
 * fold adds that mean to each rank's (with `wire` to the mean). This must be alike on all ranks:
 * the caller records it in `tag`. A sum that is not `deterministic` takes this road too, since the
 * transport's own could not add it.
 *
 * The last bucket waits for finish, where it and the use bytes are one group of the transport: one
 * launch, and one wait until NCCL has taken the calls. Which calls are a group must be alike on all
 * ranks, so buckets that happen to be complete at once are none.
 *
 * What it leaves out: which gradient lies where (tensor/layout.h and the caller), where parameters
 * are gathered (zero/device_units.h), graph capture (refused by name).
 *
 * Thread rule: one at a time a communicator.
 */
#ifndef SW_REDUCE_DEVICE_REDUCER_H
#define SW_REDUCE_DEVICE_REDUCER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/comm.h"
#include "comm/device_comm.h"
#include "reduce/device_mean.h"

enum { SW_DEVICE_PLACES = 2 }; /* places of the ring */

typedef struct sw_device_bucket_spec {
    void *data;   /* device memory, initialised; borrowed until destroy. Sliced: this rank's slice
                     of the mean, numel / slices.count elements. NULL: the bucket takes no part
                     until it is adopted */
    size_t numel; /* a multiple of the world size */
    sw_dtype dtype;
} sw_device_bucket_spec;

typedef struct sw_device_reducer_config {
    sw_device_comm *comm;                 /* borrowed, outlives the reducer; connected */
    const sw_device_bucket_spec *buckets; /* borrowed for the call */
    size_t bucket_count;
    size_t gradient_count; /* use bytes that finish() takes */
    sw_redop op;           /* MEAN or SUM */
    bool deterministic;
    bool sliced;
    bool is_lent;                 /* sw_device_reducer_lend brings memory, before the first step */
    const sw_slices *slices;      /* borrowed for the call; NULL: one a rank. Only with `sliced` */
    sw_device_comm *row, *column; /* borrowed, as `comm`: see sw_device_mean_config */
    sw_dtype wire; /* FLOAT16 or BFLOAT16: the dtype in which means of float32, float16 and bfloat16
                      travel. SW_DTYPE_COUNT: their own. MEAN only */
} sw_device_reducer_config;

typedef struct sw_device_reducer sw_device_reducer;

/* Create it, with memory for the use bytes and, with `deterministic`, of the size of the largest
 * bucket. SW_E_INVALID names the bucket whose size does not divide; SW_E_MEMORY; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_reducer_create(const sw_device_reducer_config *config,
                                               sw_device_reducer **reducer, sw_error *err);

/* Wait under the deadline for the communicator's stream and for released work, then free it. The
 * caller has waited for work that it enqueued on the buckets since. NULL is allowed. */
void sw_device_reducer_destroy(sw_device_reducer *reducer);

/* Let bucket `index` take part from the next post on, with memory as in its spec. SW_E_STATE once a
 * step has posted a bucket. */
SW_MUST_USE sw_status sw_device_reducer_adopt(sw_device_reducer *reducer, size_t index, void *data,
                                              sw_error *err);

/* With `is_lent`: use memory of the caller, which outlives the reducer, instead of as much of its
 * own; see sw_device_mean_lend. SW_E_STATE without, or after a step. */
SW_MUST_USE sw_status sw_device_reducer_lend(sw_device_reducer *reducer, void *contributions,
                                             void *compressed, sw_error *err);

size_t sw_device_reducer_bucket_count(const sw_device_reducer *reducer);
bool sw_device_reducer_takes_part(const sw_device_reducer *reducer, size_t index);

/* Begin a step whose gradients are written on `producer` (call once for each such stream).
 * SW_E_STATE when the step before was not released; SW_E_UNSUPPORTED when `producer` is being
 * captured. */
SW_MUST_USE sw_status sw_device_reducer_begin(sw_device_reducer *reducer, sw_stream *producer,
                                              sw_error *err);

/* What contributions to bucket `index` are multiplied by, and rounded to its dtype, before it is
 * posted; 1: by nothing. */
float sw_device_reducer_prescale(const sw_device_reducer *reducer, size_t index);

/* Bucket `index` is complete on `producer`: its mean is enqueued. In index order, alike on all
 * ranks; SW_E_STATE names the bucket that is due. Not with `sliced`. */
SW_MUST_USE sw_status sw_device_reducer_post(sw_device_reducer *reducer, size_t index,
                                             sw_stream *producer, sw_error *err);

/* With `sliced`: let `producer` write `place` in [0, SW_DEVICE_PLACES) from now on, for the bucket
 * that is due. The caller chooses the place: with two in turn, one is written while the other is
 * averaged. */
SW_MUST_USE sw_status sw_device_reducer_reserve(sw_device_reducer *reducer, size_t place,
                                                sw_stream *producer, sw_error *err);

/* The same as post with `sliced`: the bucket is at `data`, the place that was reserved. In the
 * elements of `standing` (ascending, disjoint, of this rank's slice) contributions of all ranks are
 * on top of the mean that the slice holds. */
SW_MUST_USE sw_status sw_device_reducer_post_slice(sw_device_reducer *reducer, size_t index,
                                                   void *data, const sw_device_run *standing,
                                                   size_t standing_count, sw_stream *producer,
                                                   sw_error *err);

/* What `consumer` does from now on sees the mean of bucket `index`, which was posted in this step;
 * the last one after finish. */
SW_MUST_USE sw_status sw_device_reducer_take(sw_device_reducer *reducer, size_t index,
                                             sw_stream *consumer, sw_error *err);

/* End the posts: all buckets are posted. used[i]: this rank used gradient i. *tag must be equal on
 * all ranks: see check. NULL: this rank takes part without contributing, so it has no tag. */
SW_MUST_USE sw_status sw_device_reducer_finish(sw_device_reducer *reducer, const uint8_t *used,
                                               const uint64_t *tag, sw_error *err);

/* Divide means of buckets posted from now on by `count`, in [1, world_size], equal on all ranks; at
 * first by the world size. The other ranks contribute -0.0, which changes no sum. With `wire` the
 * mean over all ranks is multiplied by world_size / count. */
SW_MUST_USE sw_status sw_device_reducer_divide_by(sw_device_reducer *reducer, int count,
                                                  sw_error *err);

/* With `sliced`: leave ranks with a zero byte in `trains` out of buckets posted from now on, also
 * their standing mean (sw_device_mean_leave_out). A byte a rank, equal on all ranks. */
SW_MUST_USE sw_status sw_device_reducer_leave_out(sw_device_reducer *reducer, const uint8_t *trains,
                                                  sw_error *err);

/* Return SW_E_MISMATCH when ranks finished a step with different tags; *tag: this rank's; *unlike:
 * the bytes set in which they differ. Never waits: tags that have not arrived are checked later, or
 * replaced by those of later steps. */
SW_MUST_USE sw_status sw_device_reducer_check(sw_device_reducer *reducer, uint64_t *tag,
                                              uint64_t *unlike, sw_error *err);

/* After finish: any[i], true if some rank used gradient i; valid until the next finish. Waits on
 * the host, under the deadline, if this rank left one unused; else not at all. */
SW_MUST_USE sw_status sw_device_reducer_used_by_any(sw_device_reducer *reducer, const uint8_t **any,
                                                    sw_error *err);

/* End the step: `consumer`, the one stream that took the buckets, has enqueued all its reads of
 * them. */
SW_MUST_USE sw_status sw_device_reducer_release(sw_device_reducer *reducer, sw_stream *consumer,
                                                sw_error *err);

#endif
