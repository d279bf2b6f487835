/* save_job.h - declarations that the files of a save share. Only save*.c include it.
 *
 * save.c           the saver and the life of its threads; a save into memory
 * save_ranges.c    which bytes this rank writes, in chunks of staging
 * save_snapshot.c  from live memory, or a GPU's, to chunks
 * save_policy.c    whether the save continues, and memory has changed; late files; touching staging
 * save_write.c     from chunks to files
 * save_agree.c     what each rank wrote, to rank 0; creation of files, the verdict
 *
 * `mutex` guards every field under "shared"; the others are set before the threads start. */
#pragma once

#include <pthread.h>

#include "checkpoint/commit.h"
#include "checkpoint/device_stage.h"
#include "checkpoint/save.h"
#include "platform/file.h"
#include "platform/thread.h"

enum { SW_SAVER_THREADS_MAX = 16, SW_SAVE_RUN_CHUNKS = 8, SW_SAVE_COPY_CHUNKS = 4 };
enum { SW_SAVE_LOOK_NS = 20000000 }; /* the longest pause between two looks */

typedef enum sw_chunk_state {
    SW_CHUNK_LIVE = 0, /* its bytes are the caller's memory */
    SW_CHUNK_COPYING,  /* a thread copies them */
    SW_CHUNK_STAGED,   /* they are in a slot */
    SW_CHUNK_TAKEN,    /* a thread writes them */
    SW_CHUNK_WRITTEN,
} sw_chunk_state;

typedef struct sw_save_claim sw_save_claim;

typedef struct sw_save_range { /* bytes of one block of a file that this rank writes */
    const sw_plan_file *file;
    uint64_t offset; /* in the file */
    uint32_t size_bytes;
    uint32_t at;   /* in its slot; equals `offset` modulo a page if the range has a whole page */
    uint32_t crc;  /* valid once copied */
    bool is_eager; /* begin() copies it, also in a lazy save */
} sw_save_range;

typedef struct sw_save_chunk { /* ranges that share a slot of staging; all are eager, or none */
    const sw_save_part *part;
    sw_save_range *ranges; /* part of the saver's ranges, which are in file order */
    uint32_t range_count, size_bytes;
    uint32_t sample_count; /* the saver's samples from sample_base on; 0: none were taken */
    sw_chunk_state state;
    size_t sample_base;
    uint8_t *slot; /* slot of the stage; NULL: none */
    const uint8_t
        *image; /* device bytes at their offsets in the slot; valid while the chunk is copied */
} sw_save_chunk;

struct sw_saver {
    sw_channel *channel; /* borrowed */
    sw_saver_options options;

    /* one save */
    char folder[SW_PATH_BYTES], partial[SW_PATH_BYTES];
    char replaces[SW_IDENTITY_BYTES];
    int lock_fd;             /* rank 0: file that shows that this save is alive; -1: none */
    char **stale, **retired; /* owned copies */
    size_t stale_count, retired_count;
    uint64_t number;
    int64_t deadline_ns;
    sw_save_part shared_part, own_part;
    sw_save_source *sources; /* owned copy of the sources of both parts */
    sw_save_range *ranges;   /* owned; those of the shared part first */
    size_t range_count;
    sw_save_chunk *chunks; /* owned; in the order of writing */
    size_t chunk_count;
    uint32_t *samples; /* owned; kept for the next save */
    size_t sample_count, sample_room;
    sw_manifest manifest; /* the heading; on rank 0 also the files, after its ranges are written */
    sw_thread threads[SW_SAVER_THREADS_MAX], warm_thread;
    uint8_t *image; /* borrowed; destination of a save into memory. NULL: slots of the stage */

    /* shared */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* on the monotonic clock */
    sw_stage stage;
    size_t next_chunk;
    size_t copying_count;
    int64_t next_write_ns; /* for the bandwidth limit */
    uint64_t bytes_total, bytes_written, direct_bytes;
    sw_error failure; /* first failure of this rank's threads; status SW_OK: none */
    sw_error outcome;
    sw_save_claim *claim; /* chunks that the caller's thread is copying; NULL: none */
    bool is_running, is_open, is_over, warm_is_over;
};

/* save_policy.c: return SW_OK, or the reason why this rank must stop: another thread's failure or a
 * cancel. */
SW_MUST_USE sw_status sw_save_check(sw_saver *saver, sw_error *err);
/* Stop this rank; the first reason stays. */
void sw_save_record_failure(sw_saver *saver, const sw_error *why);

/* save_ranges.c: list this rank's ranges. SW_E_STATE names a byte that this rank would write but
 * does not hold; later calls cannot fail for this reason. */
SW_MUST_USE sw_status sw_save_list_ranges(sw_saver *saver, const sw_save_request *request,
                                          sw_error *err);
typedef struct sw_save_span { /* bytes of a chunk that are contiguous in memory and in a file */
    sw_save_range *range;
    const uint8_t *data;
    bool is_on_device, is_header;
    size_t at, size_bytes; /* in the slot */
} sw_save_span;
/* Return the number of the block that `range` of `chunk` touches, through the files of both parts.
 */
uint64_t sw_save_block_of(const sw_saver *saver, const sw_save_chunk *chunk,
                          const sw_save_range *range);
/* Free sources, ranges and chunks, once all chunks are written. */
void sw_save_forget_ranges(sw_saver *saver);
typedef void sw_save_visit(void *context, sw_save_span span);
/* Call `visit` with the spans of a chunk in order, headers included. */
void sw_save_walk(const sw_save_chunk *chunk, sw_save_visit *visit, void *context);
/* List this rank's tally of each block, ascending: the shared part, then its own. */
SW_MUST_USE sw_status sw_save_list_tallies(const sw_saver *saver, sw_tally_list *list,
                                           sw_error *err);

/* save_snapshot.c: copy `chunk` to `destination` and set the checksums of its ranges. The save
 * fails if the bytes have changed since it began. Without the mutex. */
void sw_save_fill(sw_saver *saver, sw_save_chunk *chunk, uint8_t *destination);

struct sw_save_claim { /* live chunks that the caller's thread will copy, and their destinations */
    size_t *wanted;    /* owned; indices of chunks */
    uint8_t **slots;   /* owned list; the slots are the stage's */
    size_t count;
    size_t next, done; /* shared: chunks begun, and copied */
};
/* Mark the live chunks, or only the eager ones. */
SW_MUST_USE sw_status sw_save_claim_live(sw_saver *saver, bool eager_only, sw_save_claim *claim,
                                         sw_error *err);
/* Copy the claimed chunks, together with helping threads. Each may be written as soon as it is
 * copied. */
void sw_save_copy(sw_saver *saver, sw_save_claim *claim);
/* Copy some of the caller's chunks, the only work that training waits for. False: none is left.
 * Releases the mutex during the copy. */
bool sw_save_help_copy_locked(sw_saver *saver);
void sw_save_claim_fini(sw_save_claim *claim);

/* Sample every live chunk, before the threads start. */
SW_MUST_USE sw_status sw_save_take_samples(sw_saver *saver, sw_error *err);
/* SW_E_STATE names a tensor of the chunk that has changed since. */
SW_MUST_USE sw_status sw_save_compare_sample(const sw_saver *saver, const sw_save_chunk *chunk,
                                             const uint8_t *copy, sw_error *err);

/* sw_save_copy for a claim with bytes on a device. After an error, chunks that were
 * not copied stay marked and have no slot. */
SW_MUST_USE sw_status sw_save_copy_down(sw_saver *saver, sw_save_claim *claim,
                                        const sw_save_request *request, sw_error *err);
/* Wait until no writing thread reads the caller's memory. */
void sw_save_await_copies(sw_saver *saver);

/* Wait until no thread touches staging. */
void sw_save_end_warming(sw_saver *saver);

/* save_write.c: run one writing thread until no chunk is left or a thread failed. While the
 * caller's thread copies, a helper copies first. */
SW_MUST_USE sw_status sw_save_write(sw_saver *saver, bool is_helper, sw_error *err);

/* save_policy.c: open a file for writing that rank 0 has created. Retry for some seconds, because a
 * network file system may not show it yet; the first thread also looks for a verdict. */
SW_MUST_USE sw_status sw_save_open_late(sw_saver *saver, const char *path, bool direct,
                                        bool is_first_thread, int *fd, sw_error *err);
typedef struct sw_save_late_file { /* a file of which its writers have announced the size */
    const char *path;              /* borrowed */
    uint64_t size_bytes;
    int fd; /* -1: the next read opens it */
} sw_save_late_file;
/* Read a part of such a file; retry until its data have arrived. */
SW_MUST_USE sw_status sw_save_read_late(sw_saver *saver, sw_save_late_file *file, void *data,
                                        size_t size_bytes, uint64_t offset, sw_error *err);
void sw_save_close_late(sw_save_late_file *file);

/* save_agree.c */
SW_MUST_USE sw_status sw_save_open(sw_saver *saver,
                                   sw_error *err); /* create folder and files, or wait for them */
SW_MUST_USE sw_status sw_save_acknowledge(sw_saver *saver,
                                          sw_error *err); /* sync this rank's writes, say so */
void sw_save_conclude(sw_saver *saver, const sw_error *own,
                      sw_error *outcome); /* rank 0 commits or abandons; others wait */
