/* save_job.h - what the files of a save share. Included by save*.c alone.
 *
 * save.c           the saver and its threads' life
 * save_state.c     whether it goes on
 * save_ranges.c    which bytes this rank writes, in chunks of staging
 * save_snapshot.c  from live memory to chunks
 * save_device.c    from a GPU's memory to chunks
 * save_sample.c    whether live memory is still what it was
 * save_warm.c      staging, before it is needed
 * save_write.c     from chunks to files
 * save_agree.c     the files, what was written of them, the verdict
 *
 * `mutex` guards every field under "shared"; the others are set before the threads start.
 */
#ifndef SW_CHECKPOINT_SAVE_JOB_H
#define SW_CHECKPOINT_SAVE_JOB_H

#include <pthread.h>

#include "checkpoint/commit.h"
#include "checkpoint/save.h"
#include "checkpoint/stage.h"
#include "platform/file.h"
#include "platform/thread.h"

enum { SW_SAVER_THREADS_MAX = 16, SW_SAVE_RUN_CHUNKS = 8, SW_SAVE_COPY_CHUNKS = 4 };

typedef enum sw_chunk_state {
    SW_CHUNK_LIVE = 0, /* its bytes are the caller's memory */
    SW_CHUNK_COPYING,  /* a thread reads them */
    SW_CHUNK_STAGED,   /* they are in a slot */
    SW_CHUNK_TAKEN,    /* a thread writes them */
    SW_CHUNK_WRITTEN,
} sw_chunk_state;

typedef struct sw_save_claim sw_save_claim;

typedef struct sw_save_range { /* bytes of one block of a file that this rank writes */
    const sw_plan_file *file;
    uint64_t offset; /* in the file */
    uint32_t size_bytes;
    uint32_t
        at; /* in its chunk's slot; where the range has a whole page: as `offset`, modulo one */
    uint32_t crc;  /* once it was copied */
    bool is_eager; /* of a lazy save: to be copied by begin() all the same */
} sw_save_range;

typedef struct sw_save_chunk { /* ranges that share a slot of staging, all eager or none */
    const sw_save_part *part;
    sw_save_range *ranges; /* of the saver's, which are in the order of the files */
    uint32_t range_count, size_bytes;
    uint32_t sample_count; /* of the saver's samples, from sample_base on; 0: none were taken */
    sw_chunk_state state;
    size_t sample_base;
    uint8_t *slot; /* of the stage; NULL: none */
    const uint8_t
        *image; /* what is on a device of it, at its place in the slot; while it is copied */
} sw_save_chunk;

struct sw_saver {
    sw_channel *channel; /* borrowed */
    sw_saver_options options;

    /* one save */
    char folder[SW_PATH_BYTES], partial[SW_PATH_BYTES];
    char replaces[SW_IDENTITY_BYTES];
    int lock_fd; /* rank 0: of the file that tells others that this save is alive; -1: none */
    char **stale, **retired; /* owned copies */
    size_t stale_count, retired_count;
    uint64_t number;
    int64_t deadline_ns;
    sw_save_part shared_part, own_part;
    sw_save_source *sources; /* owned copy of both parts' */
    sw_save_range *ranges;   /* owned; those of the shared part first */
    size_t range_count;
    sw_save_chunk *chunks; /* owned; in the order of writing */
    size_t chunk_count;
    uint32_t *samples; /* owned; kept for the next save */
    size_t sample_count, sample_room;
    sw_manifest manifest; /* rank 0's files; of the others the heading alone */
    sw_thread threads[SW_SAVER_THREADS_MAX], warm_thread;

    /* shared */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* on the monotonic clock */
    sw_stage stage;
    size_t next_chunk;
    size_t copying_count;
    int64_t next_write_ns; /* bandwidth */
    uint64_t bytes_total, bytes_written, direct_bytes;
    sw_error failure; /* the first of this rank's threads; status SW_OK: none */
    sw_error outcome;
    sw_save_claim *claim; /* what the caller's thread copies now; NULL: nothing */
    bool is_running, is_open, is_over, warm_is_over;
};

/* save_state.c: SW_OK, or why this rank must stop: another thread's failure or a cancel. */
SW_MUST_USE sw_status sw_save_check(sw_saver *saver, sw_error *err);
/* This rank stops; the first reason stays. */
void sw_save_record_failure(sw_saver *saver, const sw_error *why);

/* save_ranges.c. SW_E_STATE names a byte that this rank would write and does not hold; what comes
 * after cannot fail for such a reason. */
SW_MUST_USE sw_status sw_save_list_ranges(sw_saver *saver, const sw_save_request *request,
                                          sw_error *err);
typedef struct sw_save_span { /* bytes of a chunk that lie side by side in memory and in a file */
    sw_save_range *range;
    const uint8_t *data;
    bool is_on_device, is_header;
    size_t at, size_bytes; /* in the slot */
} sw_save_span;
/* `visit` gets the spans of a chunk in order, the headers' too. */
void sw_save_walk(const sw_save_chunk *chunk, void (*visit)(void *context, sw_save_span span),
                  void *context);
/* What this rank wrote of each block, the shared part's and then its own, in ascending order. */
SW_MUST_USE sw_status sw_save_each_tally(const sw_saver *saver,
                                         sw_status (*take)(void *context, uint64_t block,
                                                           sw_tally tally, sw_error *err),
                                         void *context, sw_error *err);

/* save_snapshot.c. The bytes of `chunk` to `destination`, and their checksums to its ranges; a
 * failure of the save if they are not what they were when it began. Without the mutex. */
void sw_save_fill(sw_saver *saver, sw_save_chunk *chunk, uint8_t *destination);

struct sw_save_claim { /* live chunks that the caller's thread is about to copy, and where to */
    size_t *wanted;    /* owned; indices of chunks */
    uint8_t **slots;   /* owned list; the slots are the stage's */
    size_t count;
    size_t next, done; /* shared: begun, and copied */
};
/* Marks the live chunks, or the eager ones of them. */
SW_MUST_USE sw_status sw_save_claim_live(sw_saver *saver, bool eager_only, sw_save_claim *claim,
                                         sw_error *err);
/* Copies them, together with helping threads; each may be written from the moment that it is
 * copied. */
void sw_save_copy(sw_saver *saver, sw_save_claim *claim);
/* Copies some of what the caller's thread is copying: it is all that the training waits for.
 * False: nothing is left to help with. The mutex is let go of meanwhile. */
bool sw_save_help_copy_locked(sw_saver *saver);
void sw_save_claim_fini(sw_save_claim *claim);

/* save_sample.c. Of every chunk that is live: before the threads start. */
SW_MUST_USE sw_status sw_save_take_samples(sw_saver *saver, sw_error *err);
/* SW_E_STATE names a tensor of the chunk that has changed since. */
SW_MUST_USE sw_status sw_save_compare_sample(const sw_saver *saver, const sw_save_chunk *chunk,
                                             const uint8_t *copy, sw_error *err);

/* save_device.c: sw_save_copy of a claim whose chunks have bytes on a device. After an error those
 * that were not copied stay marked, and have no slot. */
SW_MUST_USE sw_status sw_save_copy_down(sw_saver *saver, sw_save_claim *claim,
                                        const sw_save_request *request, sw_error *err);
/* Waits until no writing thread reads the caller's memory. */
void sw_save_await_copies(sw_saver *saver);

/* save_warm.c: no thread touches staging any more. */
void sw_save_end_warming(sw_saver *saver);

/* save_write.c: one writing thread's work, until no chunk is left or some thread failed. A helper
 * copies first, whenever the caller's thread does. */
SW_MUST_USE sw_status sw_save_write(sw_saver *saver, bool is_helper, sw_error *err);

/* save_agree.c. Opens a file that rank 0 has made, for writing; tried again for some seconds where
 * a network file system does not show it yet. The first thread looks for a verdict meanwhile. */
SW_MUST_USE sw_status sw_save_open_late(sw_saver *saver, const char *path, bool direct,
                                        bool is_first_thread, int *fd, sw_error *err);
SW_MUST_USE sw_status sw_save_open(sw_saver *saver,
                                   sw_error *err); /* folder and files; or wait for them */
SW_MUST_USE sw_status sw_save_acknowledge(sw_saver *saver,
                                          sw_error *err); /* what this rank wrote, durable, named */
void sw_save_conclude(sw_saver *saver, const sw_error *own,
                      sw_error *outcome); /* rank 0 commits or abandons; others wait */

#endif
