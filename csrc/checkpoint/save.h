/* save.h - one save at a time: the caller's thread takes a snapshot, our own threads do all else.
 *
 * Idea: the job is a list of ranges that this rank writes (plan.h), in chunks of 1 MiB. A chunk is
 * live (its bytes are still the caller's), staged (copied), or written. begin() copies chunks that
 * may change immediately. protect() copies all chunks that are still live, so the caller must call
 * it before any change. "copy" is begin and protect in one call; "lazy" leaves protect to the next
 * optimizer step. begin() copies GPU memory in both forms.
 *
 * Thread rule: begin, protect, wait, fail, spare, destroy: one thread at a time, which the caller
 * ensures. progress, cancel: any. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "checkpoint/channel.h"
#include "checkpoint/device_stage.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plan.h"
#include "checkpoint/tally.h"

typedef struct sw_save_source { /* bytes of a plan's source that this rank holds */
    size_t source;              /* its number in the plan */
    uint64_t begin, size_bytes; /* the range in the source */
    const void *data;           /* borrowed until protect() */
    bool is_on_device;          /* GPU memory: borrowed until begin() returns */
} sw_save_source;

typedef struct sw_save_part {
    const sw_plan *plan; /* borrowed until the save ends */
    const sw_save_source
        *sources; /* borrowed until protect(); ascending by (source, begin), no overlap */
    size_t source_count;
} sw_save_part;

typedef struct sw_save_request {
    const char *folder; /* the checkpoint's path; its parent exists */
    const char *nonce;  /* equal on all ranks, never used before */
    const char
        *replaces;   /* rank 0: identity of `folder` when the save began (commit.h); NULL: "" */
    uint64_t number; /* number of the save, from 1, equal on all ranks */
    uint64_t step;
    bool has_metric;
    double metric;
    sw_save_part shared;  /* equal plans on all ranks; this rank writes its ranges */
    sw_save_part own;     /* rank 0: files that the other ranks do not know; plan NULL: none */
    const bool *is_eager; /* a flag for each of shared.sources: copy at begin() even when lazy;
                           * NULL: none */
    bool is_lazy;
    const char *const *stale; /* rank 0: folders to remove before the first write */
    size_t stale_count;
    const char *const *retired; /* rank 0: checkpoints to remove once this one is durable */
    size_t retired_count;
    int64_t timeout_ns;     /* from begin() to the verdict */
    sw_device_stage *stage; /* borrowed until begin() returns; NULL: no source is on a device */
    sw_stream *user;        /* device memory is read after the work on this stream */
} sw_save_request;

typedef struct sw_saver_options {
    int thread_count; /* writing threads, in [1, 16] */
    bool use_direct;  /* bypass the page cache, where the file system allows it */
    bool is_idle_io;  /* write only while no other process uses the disk, if the I/O scheduler
                       * supports priorities: a busy disk may delay a save past its deadline */
    uint64_t bandwidth_bytes_per_second; /* 0: no limit */
} sw_saver_options;

typedef struct sw_save_progress {
    uint64_t bytes_total, bytes_written; /* this rank's, in the current or last save */
    uint64_t staging_bytes;              /* memory held */
    uint64_t direct_bytes;               /* written past the page cache, in all saves */
    bool is_busy;
} sw_save_progress;

typedef struct sw_saver sw_saver;

/* `channel` is borrowed until destroy. */
SW_MUST_USE sw_status sw_saver_create(sw_channel *channel, const sw_saver_options *options,
                                      sw_saver **saver, sw_error *err);

/* Touch staging for a save of `bytes` ahead of time, in a separate thread. A hint: after
 * SW_E_MEMORY or SW_E_OS, saves allocate memory themselves. */
SW_MUST_USE sw_status sw_saver_warm(sw_saver *saver, uint64_t bytes, sw_error *err);

/* Take the snapshot and start the save. SW_E_STATE while a save runs or before wait() has returned
 * its outcome. Errors are reported to the other ranks; a device error fails the save, as a thread's
 * error does. Cost: one read of the ranges, one write of staging; device memory passes through its
 * stage first. */
SW_MUST_USE sw_status sw_saver_begin(sw_saver *saver, const sw_save_request *request,
                                     sw_error *err);

typedef struct sw_save_run { /* bytes of an image that one rank wrote */
    uint64_t begin, size_bytes;
} sw_save_run;

typedef struct sw_save_kept { /* the bytes that a rank wrote into an image */
    sw_tally_list tallies;
    sw_save_run *runs; /* owned; ascending and maximal */
    size_t run_count;
    uint64_t size_bytes; /* sum over the runs */
} sw_save_kept;

/* Write this rank's part of a save into memory; return when it is complete. `image` holds the files
 * of both parts, each at a block boundary: a block is at its number times SW_BLOCK_BYTES, and
 * blocks of the own part follow those of the shared part. Sends no message, writes no file and
 * commits nothing: the request's folder and flags are ignored, and its deadline limits only device
 * copies. `disk_fd`: the file on a disk that `image` maps, whose ranges get disk space first, so
 * that a full disk is an error and no signal; -1: memory. Cost: one read and one write of the
 * ranges. On success, the caller must fini `kept`. */
SW_MUST_USE sw_status sw_saver_keep(sw_saver *saver, const sw_save_request *request, uint8_t *image,
                                    uint64_t image_bytes, int disk_fd, sw_save_kept *kept,
                                    sw_error *err);
void sw_save_kept_fini(sw_save_kept *kept);

/* Copy all chunks that are still live. Cost without such chunks: one mutex. */
SW_MUST_USE sw_status sw_saver_protect(sw_saver *saver, sw_error *err);

/* Wait at most `timeout_ns` for the verdict. *is_over: no verdict is outstanding. Returns the
 * outcome of a save once. */
SW_MUST_USE sw_status sw_saver_wait(sw_saver *saver, int64_t timeout_ns, bool *is_over,
                                    sw_error *err);

/* Report to the other ranks that this rank cannot begin save `number`. Must not be called while a
 * save runs. */
void sw_saver_fail(sw_saver *saver, uint64_t number, const sw_error *reason);

/* Make a running save fail soon, for this reason. */
void sw_saver_cancel(sw_saver *saver, const sw_error *reason);

/* Return the lowest rank from `from` on, of this host, whose ranges of the last save are not
 * durable yet; -1: none. The thread of begin. */
int sw_saver_find_unwritten(const sw_saver *saver, int from);

void sw_saver_progress(sw_saver *saver, sw_save_progress *progress);

/* Return region `index` of the snapshot memory, free for any use until the next save begins; NULL:
 * no more, or a save runs. */
uint8_t *sw_saver_spare(const sw_saver *saver, size_t index, size_t *size_bytes);

/* Cancel, join the threads, and free. NULL is allowed. */
void sw_saver_destroy(sw_saver *saver);

/* ---- samples: checksums of a few cache lines, to detect a change between two points in time ----
 */

/* Idea: reading all memory would cost a pass, and a write to a whole tensor also changes the
 * sampled lines. These are the first and the last 64 bytes, and 64 bytes per stride: at 256 KiB,
 * 4,100 reads a GiB. A write only to other bytes is not detected. Any thread. */

enum { SW_SAMPLE_BYTES = 64 };

/* Compute the checksum. Equal sizes are sampled at equal offsets. `stride_bytes`: above 0. */
uint32_t sw_sample_crc32c(const void *data, size_t size_bytes, size_t stride_bytes);
