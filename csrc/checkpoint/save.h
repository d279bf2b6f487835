/* save.h - one save at a time: a snapshot on the caller's thread, everything else on threads of our
 * own.
 *
 * Idea: the job is a list of ranges that this rank writes (plan.h), in chunks of 1 MiB. A chunk is
 * live (its bytes are still the caller's), staged (copied), or written. begin() copies what may
 * change at once. protect() copies all that is still live, so it must precede any change by the
 * caller. "copy" is begin and protect in one call; "lazy" leaves protect to the next optimizer
 * step. begin() copies GPU memory in either form.
 *
 * Thread rule: begin, protect, wait, fail, spare, destroy: one thread at a time, which the caller
 * ensures. progress, cancel: any. */
#ifndef SW_CHECKPOINT_SAVE_H
#define SW_CHECKPOINT_SAVE_H

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
    uint64_t number; /* of the save, from 1, equal on all ranks */
    uint64_t step;
    bool has_metric;
    double metric;
    sw_save_part shared;  /* equal plans on all ranks; this rank writes its ranges */
    sw_save_part own;     /* rank 0: files that the others do not know; plan NULL: none */
    const bool *is_eager; /* a flag for each of shared.sources: copy at begin() even when lazy;
                           * NULL: none */
    bool is_lazy;
    const char *const *stale; /* rank 0: folders to remove before the first write */
    size_t stale_count;
    const char *const *retired; /* rank 0: checkpoints to remove once this one is durable */
    size_t retired_count;
    int64_t timeout_ns;     /* from begin() to the verdict */
    sw_device_stage *stage; /* borrowed until begin() returns; NULL: no source is on a device */
    sw_stream *user;        /* memory on the device is read after the work that it holds */
} sw_save_request;

typedef struct sw_saver_options {
    int thread_count; /* writing threads, in [1, 16] */
    bool use_direct;  /* past the page cache, where the file system allows it */
    bool is_idle_io;  /* write only while no other process uses the disk, if the I/O scheduler
                       * supports priorities: a busy disk may delay a save past its deadline */
    uint64_t bandwidth_bytes_per_second; /* 0: no limit */
} sw_saver_options;

typedef struct sw_save_progress {
    uint64_t bytes_total, bytes_written; /* of this rank, in the present or last save */
    uint64_t staging_bytes;              /* memory held */
    uint64_t direct_bytes;               /* written past the page cache, in all saves */
    bool is_busy;
} sw_save_progress;

typedef struct sw_saver sw_saver;

/* `channel` is borrowed until destroy. */
SW_MUST_USE sw_status sw_saver_create(sw_channel *channel, const sw_saver_options *options,
                                      sw_saver **saver, sw_error *err);

/* Warm staging for a save of `bytes` in a thread of its own, at any time. A hint; on SW_E_MEMORY or
 * SW_E_OS saves take memory themselves. */
SW_MUST_USE sw_status sw_saver_warm(sw_saver *saver, uint64_t bytes, sw_error *err);

/* Take the snapshot and start the rest. SW_E_STATE while a save runs or wait() has not taken its
 * outcome. The other ranks are told of an error here; a device's error fails the save, as a
 * thread's does. Cost: one read of the ranges, one write of staging; device memory passes through
 * its stage first. */
SW_MUST_USE sw_status sw_saver_begin(sw_saver *saver, const sw_save_request *request,
                                     sw_error *err);

typedef struct sw_save_run { /* bytes of an image that one rank wrote */
    uint64_t begin, size_bytes;
} sw_save_run;

typedef struct sw_save_kept { /* what a rank wrote into an image */
    sw_tally_list tallies;
    sw_save_run *runs; /* owned; ascending, as long as possible */
    size_t run_count;
    uint64_t size_bytes; /* of all runs */
} sw_save_kept;

/* Write this rank's part of a save into memory, and return when it is there. `image` holds the
 * files of both parts, each from a block's boundary on: a block lies at its number times
 * SW_BLOCK_BYTES, those of the own part behind those of the shared part. No message, no file, no
 * commit: the request's folder, deadline (but a device's) and flags are not read. Cost: one read
 * and one write of the ranges. On success, fini `kept`. */
SW_MUST_USE sw_status sw_saver_keep(sw_saver *saver, const sw_save_request *request, uint8_t *image,
                                    uint64_t image_bytes, sw_save_kept *kept, sw_error *err);
void sw_save_kept_fini(sw_save_kept *kept);

/* Copy what is still live. If there is nothing to copy it costs a mutex. */
SW_MUST_USE sw_status sw_saver_protect(sw_saver *saver, sw_error *err);

/* Wait at most `timeout_ns` for the verdict. *is_over: no verdict is outstanding any more. The
 * outcome of a save is returned once. */
SW_MUST_USE sw_status sw_saver_wait(sw_saver *saver, int64_t timeout_ns, bool *is_over,
                                    sw_error *err);

/* Tell the others that this rank cannot begin save `number`. Not while a save runs. */
void sw_saver_fail(sw_saver *saver, uint64_t number, const sw_error *reason);

/* Make a running save fail soon, with this reason. */
void sw_saver_cancel(sw_saver *saver, const sw_error *reason);

void sw_saver_progress(sw_saver *saver, sw_save_progress *progress);

/* Return region `index` of the snapshot memory, free for any use until the next save begins; NULL:
 * no more, or a save runs. */
uint8_t *sw_saver_spare(const sw_saver *saver, size_t index, size_t *size_bytes);

/* Cancel, join the threads, and free. NULL is allowed. */
void sw_saver_destroy(sw_saver *saver);

#endif
