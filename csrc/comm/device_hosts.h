/* device_hosts.h - the fold of a bucket over several hosts of GPUs: inside each host first, then
 * between hosts.
 *
 * Idea: a bucket is one piece a rank. Inside its host a rank folds the pieces of those ranks whose
 * number in their own host is its number here, modulo the size of this host. It sends each sum to
 * the owner of the piece, which folds the hosts' sums. So each byte of a sum crosses between hosts
 * once, whatever the number of ranks of a host. Pieces of the result go back the same way. Hosts
 * may differ in size, and their ranks need not follow one another.
 *
 *   hosts {0, 1} and {2, 3}     rank 0 folds pieces of 0 and 2 from ranks 0 and 1,
 *                               rank 2 the same pieces from ranks 2 and 3;
 *                               rank 0 gets the other sum of its piece from rank 2
 *
 * Order of additions: a host's ranks in rank order, then hosts in order of their lowest ranks, as
 * on CPUs (docs/design/hosts.md). Sums are float32 for 16-bit dtypes.
 *
 * Everything is enqueued on the communicator's stream, unless a function takes another. Users:
 * reduce/device_mean.h, which has the last fold, and compress/device_block_round.h.
 *
 * Thread rule: as the communicator's. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/device_comm.h"
#include "comm/host_map.h"

typedef struct sw_device_run { /* a range of elements */
    size_t begin, end;
} sw_device_run;

typedef struct sw_device_hosts {
    sw_device_comm *comm; /* borrowed */
    sw_host_map map;      /* owned, as all below */
    int host, local;      /* of this rank: its host, its number there */
    int *local_of;        /* a number a rank: its number in its host */
    const int *piece;     /* borrowed: a number a rank, its piece of a bucket; NULL: its own */
    int *folded;          /* the ranks whose pieces this rank folds, ascending */
    size_t folded_count;
    uint8_t *takes_part; /* scratch, a byte a rank */
    bool owns_memory;
    void *contributions; /* device memory: of each rank of this host its copies of the folded
                            pieces; then sums of the hosts, and pieces in the wire's dtype */
    void *sums;          /* device memory: this host's sums of the folded pieces */
    void *accumulated;   /* device memory: the mean that is under them; NULL: never any */
} sw_device_hosts;

/* Return the map of the communicator's ranks if they gain by this: there are several hosts, and
 * some has two ranks. Else NULL. It lives as long as their host communicator. */
const sw_host_map *sw_device_hosts_map(const sw_device_comm *comm);
bool sw_device_hosts_pay(const sw_host_map *map);

/* `piece` lives as long as `hosts`. On failure the caller still calls fini. SW_E_UNSUPPORTED if the
 * transport stays inside a host. */
SW_MUST_USE sw_status sw_device_hosts_init(sw_device_hosts *hosts, sw_device_comm *comm,
                                           const sw_host_map *map, const int *piece, sw_error *err);
/* Make device memory for buckets of at most `bytes` and `numel`. `accumulates`: means may lie under
 * the contributions. */
SW_MUST_USE sw_status sw_device_hosts_alloc(sw_device_hosts *hosts, size_t bytes, size_t numel,
                                            bool accumulates, sw_error *err);
/* Call once the stream has run all enqueued work. */
void sw_device_hosts_fini(sw_device_hosts *hosts);

/* The sizes of a caller's `contributions` and `sums`, in place of alloc, for float32 buckets of
 * `numel`. */
void sw_device_hosts_sizes(const sw_device_hosts *hosts, size_t numel, size_t *contributions,
                           size_t *sums);

/* Give those that fold this rank's piece what lies under its contributions: `piece` of the
 * accumulated mean. Equal on all ranks whether it is called. */
SW_MUST_USE sw_status sw_device_hosts_lend(const sw_device_hosts *hosts,
                                           const sw_device_range *bucket, const void *piece,
                                           sw_error *err);

/* Fold this host's copies of the pieces that this rank folds, times `scale`, from ranks with a
 * non-zero byte in `trains` (NULL: from all), into `sums`. In `runs` (ascending, disjoint; elements
 * of the folded pieces, one after the other) the accumulated mean lies under each contribution. */
SW_MUST_USE sw_status sw_device_hosts_fold(const sw_device_hosts *hosts,
                                           const sw_device_range *bucket, double scale,
                                           const uint8_t *trains, const sw_device_run *runs,
                                           size_t run_count, sw_error *err);

/* Turn the sums, float32, into the wire's dtype, times `scale`: the next call sends those. */
SW_MUST_USE sw_status sw_device_hosts_narrow(const sw_device_hosts *hosts,
                                             const sw_device_range *bucket, sw_dtype wire,
                                             float scale, sw_error *err);

/* Send sums to the owners of their pieces and set *fold to the fold of this rank's, over the hosts
 * of which some rank has a non-zero byte in `trains` (NULL: over all). The caller sets its op,
 * scale and target, which may be `own`. `wire`: after narrow its dtype, else SW_DTYPE_COUNT. */
SW_MUST_USE sw_status sw_device_hosts_meet(const sw_device_hosts *hosts,
                                           const sw_device_range *bucket, sw_dtype wire,
                                           const uint8_t *trains, sw_fold_args *fold,
                                           sw_error *err);

/* Set each rank's piece of `bucket` to its own copy. */
SW_MUST_USE sw_status sw_device_hosts_gather(const sw_device_hosts *hosts,
                                             const sw_device_range *bucket, sw_error *err);

/* ---- in the order of the stream `user` ---- */

/* Replace a float32 bucket of any size by the sum of this host's ranks, times `scale`, on each of
 * them. Memory as sw_device_hosts_sizes says, written before. *sent_bytes: to peers. */
SW_MUST_USE sw_status sw_device_hosts_add_inside(const sw_device_hosts *hosts,
                                                 const sw_device_range *bucket, double scale,
                                                 sw_stream *user, uint64_t *sent_bytes,
                                                 sw_error *err);
/* The ranks of a host have equal ranges of one slice a rank. Place h of `received` becomes host h's
 * copy of this rank's slice; that of its own host stays in the range. */
SW_MUST_USE sw_status sw_device_hosts_exchange(const sw_device_hosts *hosts,
                                               const sw_device_range *range, void *received,
                                               sw_stream *user, sw_error *err);
/* Set slice r of the range to rank r's. */
SW_MUST_USE sw_status sw_device_hosts_gather_slices(const sw_device_hosts *hosts,
                                                    const sw_device_range *range, sw_stream *user,
                                                    sw_error *err);
/* Set place l of `data` to that of rank number l of this host. */
SW_MUST_USE sw_status sw_device_hosts_swap_inside(const sw_device_hosts *hosts, void *data,
                                                  size_t place_bytes, sw_stream *user,
                                                  sw_error *err);

/* Make the contributions with a non-zero byte of the `count` in `trains` adjacent, in order, and
 * let `fold` take only those. Adding -0.0 for the others would be wrong, because the sum may begin
 * with an accumulated mean. */
SW_MUST_USE sw_status sw_fold_leave_out(const sw_device_comm *comm, const uint8_t *trains,
                                        int count, sw_fold_args *fold, sw_error *err);
