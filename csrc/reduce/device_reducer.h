/* device_reducer.h - averages buckets of gradients on a GPU, ordered only by events.
 *
 * Idea: three kinds of streams. The caller's producing streams write gradients; the communicator's
 * stream averages bucket after bucket; the caller's consuming stream runs the optimizer. The events
 * and their purposes:
 *
 *   producer --ready[b]--> comm      a bucket is averaged after it was written, while backward goes
 *                                    on
 *   comm --done[b]--> consumer       the optimizer reads bucket b after its mean, while others
 *                                    travel
 *   consumer --consumed--> producer  the next step writes a bucket after the optimizer has read it
 *   comm --gathered--> host          which gradients some rank used; only a rank that left one
 *                                    unused in that step reads it
 *   comm --told--> host              whether ranks are at the same step; read when it has arrived
 *   comm --left[place]--> producer   (sliced) a place of the ring is written again after its
 *                                    previous bucket was averaged
 *
 *   for each step:
 *     begin(backward's stream); post(b, backward's stream) for b in order; finish(used)
 *     take(b, optimizer's stream), optimizer kernels on bucket b, for each b
 *     release(optimizer's stream)
 *
 * The mean is the transport's own, with `deterministic` the two-step fold, or with `wire` the fold
 * of narrowed contributions: device_mean.h. Use bits are one byte for each gradient, in a separate
 * all-reduce after the last bucket. They travel in a launch's arguments, so the GPU reads no host
 * memory. A step in which every gradient was used never makes the host wait.
 *
 * A borrowed communicator needs two more events: producer --> comm in begin, and comm --> the
 * stream on which its owner uses it next (the caller calls sw_device_comm_give_back after take).
 *
 * Sliced (zero >= 2), a bucket has memory only while it travels: it is written into one of two
 * places (reserve), and this rank's slice of its mean is folded into memory that stays. If
 * contributions are on top of the mean standing in the slice, the fold adds that mean to each
 * rank's contribution (with `wire` to the mean). This must be equal on all ranks: the caller
 * records it in `tag`. A sum that is not `deterministic` also uses the fold then, since the
 * transport cannot add the standing mean.
 *
 * The last bucket waits for finish, where it and the use bytes form one group of the transport: one
 * launch, and one wait until NCCL has accepted the calls. Groups must be equal on all ranks, so
 * buckets that happen to be complete at the same time form none.
 *
 * Left out: the places of gradients (tensor/layout.h and the caller), gathers of parameters
 * (zero/device_units.h), graph capture (refused).
 *
 * Thread rule: one at a time per communicator.
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
    const sw_slices *slices;      /* borrowed for the call; NULL: one a rank. Only with `sliced` */
    sw_device_comm *row, *column; /* borrowed, as `comm`: see sw_device_mean_config */
    sw_dtype wire; /* FLOAT16 or BFLOAT16: the dtype in which means of float32, float16 and bfloat16
                      travel. SW_DTYPE_COUNT: their own. MEAN only */
} sw_device_reducer_config;

typedef struct sw_device_reducer sw_device_reducer;

/* Create it, with memory for the use bytes and, with `deterministic`, of the largest bucket's size.
 * SW_E_INVALID names a bucket whose size is not a multiple; SW_E_MEMORY; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_reducer_create(const sw_device_reducer_config *config,
                                               sw_device_reducer **reducer, sw_error *err);

/* Wait under the deadline for the communicator's stream and for released work, then free it. The
 * caller has waited for work that it enqueued on the buckets since. NULL is allowed. */
void sw_device_reducer_destroy(sw_device_reducer *reducer);

/* Let bucket `index` take part from the next post on, with memory as in its spec. SW_E_STATE once a
 * step has posted a bucket. */
SW_MUST_USE sw_status sw_device_reducer_adopt(sw_device_reducer *reducer, size_t index, void *data,
                                              sw_error *err);

bool sw_device_reducer_takes_part(const sw_device_reducer *reducer, size_t index);

/* Begin a step with gradients written on `producer` (call once for each such stream). SW_E_STATE if
 * the previous step was not released; SW_E_UNSUPPORTED if `producer` is being captured. */
SW_MUST_USE sw_status sw_device_reducer_begin(sw_device_reducer *reducer, sw_stream *producer,
                                              sw_error *err);

/* Return the factor by which the caller multiplies contributions to bucket `index`, rounded to its
 * dtype, before the post; 1: none. */
float sw_device_reducer_prescale(const sw_device_reducer *reducer, size_t index);

/* Enqueue the mean of bucket `index`, which is complete on `producer`. In index order, equal on all
 * ranks; SW_E_STATE names the bucket that is due. Not with `sliced`. */
SW_MUST_USE sw_status sw_device_reducer_post(sw_device_reducer *reducer, size_t index,
                                             sw_stream *producer, sw_error *err);

/* With `sliced`: let `producer` write `place` in [0, SW_DEVICE_PLACES) from now on, for the next
 * bucket. The caller chooses the place: with two in turn, one is written while the other is
 * averaged. */
SW_MUST_USE sw_status sw_device_reducer_reserve(sw_device_reducer *reducer, size_t place,
                                                sw_stream *producer, sw_error *err);

/* The same as post with `sliced`: the bucket is at `data`, the reserved place. In the elements of
 * `standing` (ascending, disjoint, of this rank's slice) all ranks' contributions are on top of the
 * mean in the slice. */
SW_MUST_USE sw_status sw_device_reducer_post_slice(sw_device_reducer *reducer, size_t index,
                                                   void *data, const sw_device_run *standing,
                                                   size_t standing_count, sw_stream *producer,
                                                   sw_error *err);

/* Order later work of `consumer` after the mean of bucket `index`, which was posted in this step;
 * for the last bucket, after finish. */
SW_MUST_USE sw_status sw_device_reducer_take(sw_device_reducer *reducer, size_t index,
                                             sw_stream *consumer, sw_error *err);

/* Call once all buckets are posted. used[i]: this rank used gradient i. *tag must be equal on all
 * ranks: see check. NULL: this rank does not contribute, so it has no tag. */
SW_MUST_USE sw_status sw_device_reducer_finish(sw_device_reducer *reducer, const uint8_t *used,
                                               const uint64_t *tag, sw_error *err);

/* Divide means of buckets posted from now on by `count`, in [1, world_size], equal on all ranks (at
 * first the world size). The other ranks contribute -0.0, which changes no sum. With `wire` the
 * mean over all ranks is multiplied by world_size / count. */
SW_MUST_USE sw_status sw_device_reducer_divide_by(sw_device_reducer *reducer, int count,
                                                  sw_error *err);

/* With `sliced`: leave ranks with a zero byte in `trains`, and their standing mean, out of buckets
 * posted from now on (sw_device_mean_leave_out). A byte for each rank, equal on all ranks. */
SW_MUST_USE sw_status sw_device_reducer_leave_out(sw_device_reducer *reducer, const uint8_t *trains,
                                                  sw_error *err);

/* Return SW_E_MISMATCH if ranks finished a step with different tags. *tag: this rank's tag;
 * *unlike: a mask of the bytes that differ. Never waits: tags that have not arrived are checked
 * later, or replaced by those of later steps. */
SW_MUST_USE sw_status sw_device_reducer_check(sw_device_reducer *reducer, uint64_t *tag,
                                              uint64_t *unlike, sw_error *err);

/* After finish: any[i] is true if some rank used gradient i; valid until the next finish. The host
 * waits, under the deadline, only if this rank left a gradient unused. */
SW_MUST_USE sw_status sw_device_reducer_used_by_any(sw_device_reducer *reducer, const uint8_t **any,
                                                    sw_error *err);

/* End the step: `consumer`, the only stream that took the buckets, has enqueued all its reads of
 * them. */
SW_MUST_USE sw_status sw_device_reducer_release(sw_device_reducer *reducer, sw_stream *consumer,
                                                sw_error *err);

#endif
