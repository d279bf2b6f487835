/* save_job.h - what the files of a save share. Included by save*.c alone.
 *
 * save.c           the saver and its threads' life
 * save_snapshot.c  from live memory to bytes of blocks
 * save_device.c    from a GPU's memory to bytes of blocks
 * save_ahead.c     copies what the next step would have to wait for
 * save_sample.c    whether live memory is still what it was
 * save_write.c     from blocks to files
 * save_agree.c     READY, acknowledgements, the verdict
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

enum { SW_SAVER_THREADS_MAX = 16, SW_SAVE_RUN_BLOCKS = 8, SW_SAVE_COPY_BLOCKS = 4 };

typedef enum sw_block_state {
    SW_BLOCK_LIVE = 0, /* its bytes are the caller's memory */
    SW_BLOCK_COPYING,  /* a thread reads them */
    SW_BLOCK_STAGED,   /* they are in a slot */
    SW_BLOCK_TAKEN,    /* a thread writes them */
    SW_BLOCK_WRITTEN,
} sw_block_state;

typedef struct sw_save_claim sw_save_claim;

typedef struct sw_save_block {
    const sw_save_part *part;
    const sw_plan_file *file;
    uint64_t offset; /* in the file */
    uint32_t size_bytes, crc;
    uint32_t sample_count; /* of the saver's samples, from sample_base on; 0: none were taken */
    size_t sample_base;
    sw_block_state state;
    uint8_t *slot; /* of the stage; NULL: none */
    const uint8_t
        *image; /* what is on a device of it, at its place in the block; while it is copied */
} sw_save_block;

typedef struct sw_save_ahead { /* what a lazy save copies before protect() asks for it */
    size_t goal;               /* blocks: as many as the save before met */
    size_t met;                /* blocks that protect() found not written nor begun */
    size_t begin;              /* looked at from here on; goes down */
    size_t copied;
    uint8_t **slots; /* owned list while the thread runs; the slots are the stage's */
    size_t slot_count;
    bool is_over; /* protect() has come */
} sw_save_ahead;

struct sw_saver {
    sw_board *board; /* borrowed */
    sw_saver_options options;

    /* one save */
    char folder[SW_PATH_BYTES], partial[SW_PATH_BYTES];
    char replaces[SW_IDENTITY_BYTES];
    bool replaces_any;
    int lock_fd; /* rank 0: of the file that tells others that this save is alive; -1: none */
    char **stale, **retired; /* owned copies */
    size_t stale_count, retired_count;
    uint64_t number;
    int64_t deadline_ns;
    sw_save_part shared_part, own_part;
    sw_save_source *sources; /* owned copy of both parts' */
    sw_save_block *blocks;   /* owned; in the order of writing */
    size_t block_count;
    uint32_t *samples; /* owned; kept for the next save */
    size_t sample_count, sample_room;
    sw_manifest manifest; /* what this rank wrote; on rank 0 in the end all */
    sw_thread threads[SW_SAVER_THREADS_MAX], ahead_thread;

    /* shared */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* on the monotonic clock */
    sw_stage stage;
    sw_save_ahead ahead;
    size_t next_block;
    size_t copying_count;
    int64_t next_write_ns; /* bandwidth */
    uint64_t bytes_total, bytes_written, direct_bytes;
    sw_error failure; /* the first of this rank's threads; status SW_OK: none */
    sw_error outcome;
    sw_save_claim *claim; /* what the caller's thread copies now; NULL: nothing */
    bool is_running, is_open, is_over;
};

/* save_snapshot.c */
SW_MUST_USE sw_status sw_save_list_blocks(sw_saver *saver, const sw_save_request *request,
                                          sw_error *err);
/* That this rank holds every byte of its blocks: SW_E_STATE names one that it does not. What comes
 * after cannot fail. */
SW_MUST_USE sw_status sw_save_check_blocks(const sw_saver *saver, sw_error *err);
typedef struct sw_save_span { /* bytes of a block that lie side by side */
    const uint8_t *data;
    bool is_on_device, is_header;
    size_t at, size_bytes; /* in the block */
} sw_save_span;
/* `visit` gets the spans of a block in order, the header's too. */
void sw_save_walk(const sw_save_block *block, void (*visit)(void *context, sw_save_span span),
                  void *context);
/* The bytes of `block` to `destination`, and their checksum to block->crc; a failure of the save if
 * they are not what they were when it began. Without the mutex. */
void sw_save_fill(sw_saver *saver, sw_save_block *block, uint8_t *destination);

struct sw_save_claim { /* live blocks that the caller's thread is about to copy, and where to */
    size_t *wanted;    /* owned; indices of blocks */
    uint8_t **slots;   /* owned list; the slots are the stage's */
    size_t count;
    size_t next, done; /* shared: begun, and copied */
};
/* Marks the live blocks; those that touch an eager source alone when `is_eager` is not NULL. */
SW_MUST_USE sw_status sw_save_claim_live(sw_saver *saver, const bool *is_eager,
                                         sw_save_claim *claim, sw_error *err);
/* Copies them, together with helping threads; each may be written from the moment that it is
 * copied. */
void sw_save_copy(sw_saver *saver, sw_save_claim *claim);
/* Copies some of what the caller's thread is copying: it is all that the training waits for.
 * False: nothing is left to help with. The mutex is let go of meanwhile. */
bool sw_save_help_copy_locked(sw_saver *saver);
void sw_save_claim_fini(sw_save_claim *claim);

/* save_sample.c. Of every block that is live: before the threads start. */
SW_MUST_USE sw_status sw_save_take_samples(sw_saver *saver, sw_error *err);
/* SW_E_STATE names a tensor of the block that has changed since. */
SW_MUST_USE sw_status sw_save_compare_sample(const sw_saver *saver, const sw_save_block *block,
                                             const uint8_t *copy, sw_error *err);

/* save_device.c: sw_save_copy of a claim whose blocks have bytes on a device. After an error those
 * that were not copied stay marked, and have no slot. */
SW_MUST_USE sw_status sw_save_copy_down(sw_saver *saver, sw_save_claim *claim,
                                        const sw_save_request *request, sw_error *err);
/* Waits until no writing thread reads the caller's memory. */
void sw_save_await_copies(sw_saver *saver);

/* save_ahead.c. Before the threads start: */
void sw_save_ahead_prepare(sw_saver *saver, bool is_lazy);
/* A thread's body, until the goal is reached, the writers are met, or protect() comes. */
void *sw_save_copy_ahead(void *saver);
/* protect() has come, and claims `claimed` blocks: what follows is its. */
void sw_save_ahead_end_locked(sw_saver *saver, size_t claimed);

/* save_write.c: one writing thread's work, until no block is left or some thread failed. A helper
 * copies first, whenever the caller's thread does. */
SW_MUST_USE sw_status sw_save_write(sw_saver *saver, bool is_helper, sw_error *err);

/* save_agree.c */
SW_MUST_USE sw_status sw_save_open(sw_saver *saver,
                                   sw_error *err); /* folder, files, READY; or wait for it */
SW_MUST_USE sw_status sw_save_acknowledge(sw_saver *saver,
                                          sw_error *err); /* what this rank wrote, durable, named */
void sw_save_conclude(sw_saver *saver, const sw_error *own,
                      sw_error *outcome); /* rank 0 commits or abandons; others wait */

/* save.c: SW_OK, or why this rank must stop: another thread's failure or a cancel. */
SW_MUST_USE sw_status sw_save_check(sw_saver *saver, sw_error *err);
/* save.c: this rank stops; the first reason stays. */
void sw_save_record_failure(sw_saver *saver, const sw_error *why);

#endif
