/* save_agree.c - how ranks that share a file system and a board, and nothing else, finish one save
 * together.
 *
 * READY says that the files exist and which plan they follow; ack-<rank>.json what a rank wrote.
 * Both carry the nonce in their text, the folder carries it in its name. LOCK is locked by rank 0:
 * who finds the folder knows whether its save is alive. Waiting is looking again, after 1 to 20 ms.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/commit.h"
#include "checkpoint/removable.h"
#include "checkpoint/save_job.h"
#include "platform/clock.h"

enum { LOOK_FIRST_NS = 1000000, LOOK_LAST_NS = 20000000, READY_BYTES = 128, VERDICT_GRACE_S = 10 };

static sw_status look_again(sw_saver *saver, long *pause_ns, const char *awaited, sw_error *err)
{
    SW_TRY(sw_save_check(saver, err));
    if (sw_clock_now_ns() > saver->deadline_ns)
        SW_FAIL(err, SW_E_TIMEOUT, "'%.300s': the deadline passed while rank %d waited for %s",
                saver->folder, saver->board->rank, awaited);
    sw_thread_sleep_ns(*pause_ns);
    *pause_ns = *pause_ns * 2 < LOOK_LAST_NS ? *pause_ns * 2 : LOOK_LAST_NS;
    return SW_OK;
}

static void print_ready(const sw_saver *saver, char text[READY_BYTES])
{
    snprintf(text, READY_BYTES, "%s %08x %d\n", saver->manifest.nonce,
             saver->shared_part.plan->digest, saver->board->world_size);
}

static sw_status create_files(const sw_saver *saver, const sw_plan *plan, sw_error *err)
{
    char path[SW_PATH_BYTES];
    for (size_t i = 0; plan && i < plan->file_count; ++i) {
        int fd = -1;
        SW_TRY(sw_path_join(path, saver->partial, plan->files[i].path, err));
        SW_TRY(sw_file_create(path, &fd, err));
        sw_status status = sw_file_allocate(fd, path, plan->files[i].size_bytes, err);
        sw_status closed = sw_file_close(&fd, path, status == SW_OK ? err : NULL);
        SW_TRY(status);
        SW_TRY(closed);
    }
    return SW_OK;
}

/* Rank 0. READY is written under another name first: nobody may read half of it. */
static sw_status open_folder(sw_saver *saver, sw_error *err)
{
    char path[SW_PATH_BYTES], ready[SW_PATH_BYTES], text[READY_BYTES];
    SW_TRY(sw_checkpoint_check_replaceable(saver->folder, err));
    for (size_t i = 0; i < saver->stale_count; ++i)
        sw_folder_remove(saver->stale[i]);
    SW_TRY(sw_folder_create(saver->partial, err));
    SW_TRY(sw_path_join(path, saver->partial, SW_LOCK_NAME, err));
    SW_TRY(sw_file_create_locked(path, &saver->lock_fd, err));
    SW_TRY(sw_path_join(path, saver->partial, SW_RANKS_FOLDER, err));
    SW_TRY(sw_folder_create(path, err));
    SW_TRY(create_files(saver, saver->shared_part.plan, err));
    SW_TRY(create_files(saver, saver->own_part.plan, err));
    if (saver->board->world_size == 1)
        return SW_OK;
    print_ready(saver, text);
    SW_TRY(sw_path_join(path, saver->partial, "READY.tmp", err));
    SW_TRY(sw_path_join(ready, saver->partial, "READY", err));
    SW_TRY(sw_file_write_new(path, text, strlen(text), false, err));
    return sw_file_rename(path, ready, err);
}

static sw_status await_folder(sw_saver *saver, sw_error *err)
{
    char path[SW_PATH_BYTES], expected[READY_BYTES];
    char *found = NULL;
    size_t size_bytes = 0;
    long pause_ns = LOOK_FIRST_NS;
    SW_TRY(sw_path_join(path, saver->partial, "READY", err));
    for (sw_error why;;) {
        if (sw_board_is_decided(saver->board, saver->number, &why))
            SW_FAIL(err, why.status == SW_OK ? SW_E_STATE : why.status, "%.480s", why.message);
        if (sw_board_is_gone(saver->board, &why))
            SW_FAIL(err, why.status, "%.480s", why.message);
        sw_status status = sw_file_read_whole(path, READY_BYTES, &found, &size_bytes, &why);
        if (status == SW_OK)
            break;
        if (status != SW_E_OS || why.detail != ENOENT) {
            *err = why;
            return status;
        }
        SW_TRY(look_again(saver, &pause_ns, "rank 0 to create the files", err));
    }
    print_ready(saver, expected);
    bool same = strcmp(found, expected) == 0;
    free(found);
    if (!same)
        SW_FAIL(err, SW_E_MISMATCH,
                "'%.200s': this rank would write other files than rank 0: names, shapes, dtypes or "
                "max_file_bytes differ",
                saver->folder);
    return create_files(saver, saver->own_part.plan, err);
}

sw_status sw_save_open(sw_saver *saver, sw_error *err)
{
    return saver->board->rank == 0 ? open_folder(saver, err) : await_folder(saver, err);
}

static sw_status acknowledgement_path(const sw_saver *saver, int rank, const char *suffix,
                                      char path[SW_PATH_BYTES], sw_error *err)
{
    char name[48];
    snprintf(name, sizeof name, "ack-%05d.%s", rank, suffix);
    return sw_path_join(path, saver->partial, name, err);
}

sw_status sw_save_acknowledge(sw_saver *saver, sw_error *err)
{
    char temporary[SW_PATH_BYTES], path[SW_PATH_BYTES];
    char *text = NULL;
    size_t size_bytes = 0;
    for (size_t i = 0; i < saver->block_count; ++i) {
        const sw_save_block *block = &saver->blocks[i];
        SW_TRY(sw_manifest_add_block(&saver->manifest, block->file->path,
                                     block->offset / SW_BLOCK_BYTES, block->crc, err));
    }
    if (saver->board->rank == 0)
        return SW_OK;
    SW_TRY(acknowledgement_path(saver, saver->board->rank, "tmp", temporary, err));
    SW_TRY(acknowledgement_path(saver, saver->board->rank, "json", path, err));
    SW_TRY(sw_manifest_print(&saver->manifest, true, &text, &size_bytes, err));
    sw_status status = sw_file_write_new(temporary, text, size_bytes, false, err);
    free(text);
    SW_TRY(status);
    return sw_file_rename(temporary, path, err);
}

/* Rank 0: merges what `rank` acknowledged, once it has, and removes the file. */
static sw_status collect_one(sw_saver *saver, int rank, sw_error *err)
{
    char path[SW_PATH_BYTES], awaited[64];
    char *text = NULL;
    size_t size_bytes = 0;
    long pause_ns = LOOK_FIRST_NS;
    sw_manifest found = {0};
    snprintf(awaited, sizeof awaited, "rank %d to write its blocks", rank);
    SW_TRY(acknowledgement_path(saver, rank, "json", path, err));
    for (sw_error why;;) {
        sw_status status =
            sw_file_read_whole(path, SW_MANIFEST_MAX_BYTES, &text, &size_bytes, &why);
        if (status == SW_OK)
            break;
        if (status != SW_E_OS || why.detail != ENOENT) {
            *err = why;
            return status;
        }
        if (sw_board_has_failure(saver->board, saver->number, saver->manifest.step, err))
            return err->status;
        SW_TRY(look_again(saver, &pause_ns, awaited, err));
    }
    sw_status status = sw_manifest_parse(text, size_bytes, true, path, &found, err);
    free(text);
    SW_TRY(status);
    if (strcmp(found.nonce, saver->manifest.nonce) != 0 ||
        found.world_size != saver->board->world_size)
        status = sw_error_set(
            err, SW_E_MISMATCH, -1, "'%s' belongs to save %s of %d ranks, not to %s of %d", path,
            found.nonce, found.world_size, saver->manifest.nonce, saver->board->world_size);
    if (status == SW_OK)
        status = sw_manifest_merge(&saver->manifest, &found, rank, err);
    sw_manifest_fini(&found);
    return status == SW_OK ? sw_file_remove(path, err) : status;
}

static sw_status collect_and_commit(sw_saver *saver, sw_error *err)
{
    char ready[SW_PATH_BYTES], lock[SW_PATH_BYTES];
    for (int rank = 1; rank < saver->board->world_size; ++rank)
        SW_TRY(collect_one(saver, rank, err));
    SW_TRY(sw_path_join(ready, saver->partial, "READY", err));
    SW_TRY(sw_file_remove(ready, err));
    SW_TRY(sw_path_join(lock, saver->partial, SW_LOCK_NAME, err));
    SW_TRY(sw_file_remove(lock, err));
    SW_TRY(sw_file_close(&saver->lock_fd, lock, err)); /* NFS keeps a name for what is open */
    SW_TRY(sw_manifest_complete(&saver->manifest, err));
    SW_TRY(sw_save_check(saver, err));
    SW_TRY(sw_commit(saver->partial, saver->folder, saver->replaces_any ? NULL : saver->replaces,
                     &saver->manifest, err));
    sw_retire((const char *const *)saver->retired, saver->retired_count, saver->manifest.nonce);
    return SW_OK;
}

static void conclude_first(sw_saver *saver, const sw_error *own, sw_error *outcome)
{
    *outcome = *own;
    if (own->status == SW_OK) {
        sw_error found = {0};
        if (collect_and_commit(saver, &found) != SW_OK)
            *outcome = found;
    }
    sw_board_decide(saver->board, saver->number, outcome);
    (void)!sw_file_close(&saver->lock_fd, saver->partial, NULL); /* it has no bytes to lose */
    if (outcome->status != SW_OK)
        sw_folder_remove(saver->partial);
}

/* The sentence of rank 0 is everybody's; without one, this rank's own. */
static void conclude_other(sw_saver *saver, const sw_error *own, sw_error *outcome)
{
    long pause_ns = LOOK_FIRST_NS;
    int64_t deadline_ns =
        saver->deadline_ns +
        (int64_t)VERDICT_GRACE_S * 1000000000; /* rank 0's own ends a moment later */
    if (own->status != SW_OK)
        sw_board_fail(saver->board, saver->number, own);
    while (!sw_board_is_decided(saver->board, saver->number, outcome)) {
        sw_error stop = {0};
        if (own->status == SW_OK && sw_save_check(saver, &stop) != SW_OK) {
            sw_board_fail(saver->board, saver->number, &stop);
            *outcome = stop;
            return;
        }
        /* No verdict: rank 0 may be about to publish the folder, which is its to remove. */
        if (sw_board_is_gone(saver->board, &stop)) {
            *outcome = own->status == SW_OK ? stop : *own;
            return;
        }
        if (sw_clock_now_ns() > deadline_ns ||
            (own->status != SW_OK && sw_save_check(saver, &stop) == SW_E_INTERRUPTED)) {
            *outcome = *own;
            if (own->status == SW_OK)
                (void)sw_error_set(
                    outcome, SW_E_TIMEOUT, -1,
                    "'%.300s': the deadline passed while rank %d waited for rank 0 to commit",
                    saver->folder, saver->board->rank);
            return;
        }
        sw_thread_sleep_ns(pause_ns);
        pause_ns = pause_ns * 2 < LOOK_LAST_NS ? pause_ns * 2 : LOOK_LAST_NS;
    }
    /* Abandoned by rank 0's own word: every rank removes once it writes no more, so the last one
     * leaves nothing. */
    if (outcome->status != SW_OK)
        sw_folder_remove(saver->partial);
}

void sw_save_conclude(sw_saver *saver, const sw_error *own, sw_error *outcome)
{
    if (saver->board->rank == 0)
        conclude_first(saver, own, outcome);
    else
        conclude_other(saver, own, outcome);
}
