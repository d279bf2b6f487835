/* save_agree.c - how ranks finish a save together, by a shared file system and a channel alone. */
#include <stdio.h>
#include <stdlib.h>

#include "checkpoint/commit.h"
#include "checkpoint/save_job.h"
#include "checkpoint/write.h"
#include "platform/clock.h"

/* ---- tallies: what each rank wrote of each block, collected on rank 0 ---- */

/* The ranks of a host append their lists to one file, each after a head (tally.h), at an offset
 * that the channel reserves. Except on rank 0's host, the carrier merges the lists of its host; the
 * first carrier of a group of hosts merges those of the group. Adjacent ranks hold adjacent rows of
 * a tensor, which share blocks, so rank 0 reads few entries per block. */

enum { WINDOW_BYTES = 1 << 20 }; /* bytes that rank 0 reads at once */

static sw_status tallies_path(const sw_saver *saver, int host, char path[SW_PATH_BYTES],
                              sw_error *err)
{
    char name[32];
    snprintf(name, sizeof name, "TALLIES-%05d", host);
    return sw_path_join(path, saver->partial, name, err);
}

/* A carrier creates its host's file of tallies. */
static sw_status create_tallies(const sw_saver *saver, sw_error *err)
{
    char path[SW_PATH_BYTES];
    int fd = -1;
    SW_TRY(tallies_path(saver, saver->channel->host, path, err));
    SW_TRY(sw_file_create(path, &fd, err));
    return sw_file_close(&fd, path, err);
}

/* Write a list to the host's file. Append a rank's list (`merged` 0); a list of `merged` hosts
 * replaces all others. */
static sw_status write_list(sw_saver *saver, const sw_tally_list *list, int merged, sw_error *err)
{
    char path[SW_PATH_BYTES];
    int fd = -1;
    sw_tally_head head = {.size_bytes = list->size_bytes,
                          .plan_digest = saver->shared_part.plan->digest,
                          .rank = (uint32_t)saver->channel->rank,
                          .host_count = merged ? (uint32_t)merged : 1};
    struct iovec parts[] = {{.iov_base = &head, .iov_len = sizeof head},
                            {.iov_base = list->data, .iov_len = list->size_bytes}};
    uint64_t size_bytes = sizeof head + list->size_bytes;
    SW_TRY(tallies_path(saver, saver->channel->host, path, err));
    SW_TRY(sw_save_open_late(saver, path, false, true, &fd, err));
    uint64_t place = merged ? 0 : sw_channel_take_place(saver->channel, size_bytes);
    sw_status status = sw_file_write_at(fd, path, parts, 2, place, err);
    if (merged) {
        sw_file_shorten(fd, size_bytes);
        sw_channel_set_tally_bytes(saver->channel, size_bytes);
    }
    return sw_file_close_after(&fd, path, status, err);
}

/* Add a plan's files to the manifest in the order of the plan, which also numbers the blocks. */
static sw_status add_files(sw_saver *saver, const sw_plan *plan, sw_error *err)
{
    for (size_t i = 0; plan && i < plan->file_count; ++i)
        SW_TRY(sw_manifest_add_file(&saver->manifest, plan->files[i].path,
                                    plan->files[i].size_bytes, err));
    return SW_OK;
}

static sw_status begin_manifest(sw_saver *saver, const sw_tally_list *own, sw_error *err)
{
    SW_TRY(add_files(saver, saver->shared_part.plan, err));
    SW_TRY(add_files(saver, saver->own_part.plan, err));
    return sw_tally_list_read(own->data, own->size_bytes, sw_manifest_add_tally, &saver->manifest,
                              err);
}

/* Append this rank's tallies to the file; on rank 0, list files and add them to the manifest. Frees
 * the ranges first, so that their memory and the manifest's are never held together. */
static sw_status tell_tallies(sw_saver *saver, sw_error *err)
{
    sw_tally_list list = {0};
    sw_status status = sw_save_list_tallies(saver, &list, err);
    if (status == SW_OK) {
        sw_save_forget_ranges(saver);
        status = saver->channel->rank == 0 ? begin_manifest(saver, &list, err)
                                           : write_list(saver, &list, 0, err);
    }
    sw_tally_list_fini(&list);
    return status;
}

/* Take the head at *at of a file and advance *at to its list. */
static sw_status next_head(sw_saver *saver, sw_save_late_file *file, uint64_t *at,
                           sw_tally_head *head, sw_error *err)
{
    uint64_t left = file->size_bytes - *at;
    if (left >= sizeof *head)
        SW_TRY(sw_save_read_late(saver, file, head, sizeof *head, *at, err));
    if (left < sizeof *head || head->size_bytes > left - sizeof *head)
        SW_FAIL(err, SW_E_INVALID, "'%.300s' has no list of tallies at byte %llu", file->path,
                (unsigned long long)*at);
    *at += sizeof *head;
    return SW_OK;
}

static sw_status merge_list(sw_saver *saver, sw_save_late_file *file, uint64_t at, size_t size,
                            sw_tally_list *sum, sw_error *err)
{
    uint8_t *data = malloc(size + 1);
    if (!data)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu bytes of '%.300s'", size, file->path);
    sw_status status = sw_save_read_late(saver, file, data, size, at, err);
    if (status == SW_OK)
        status = sw_tally_list_merge(sum, data, size, err);
    free(data);
    return status;
}

/* Leave a list of another plan unmerged, so that rank 0 can name its rank. */
static sw_status merge_file(sw_saver *saver, int host, sw_tally_list *sum, bool *is_alike,
                            sw_error *err)
{
    char path[SW_PATH_BYTES];
    sw_tally_head head;
    sw_save_late_file file = {path, sw_channel_tally_bytes(saver->channel, host), -1};
    SW_TRY(tallies_path(saver, host, path, err));
    sw_status status = SW_OK;
    for (uint64_t at = 0; at < file.size_bytes && *is_alike && status == SW_OK;) {
        status = next_head(saver, &file, &at, &head, err);
        if (status == SW_OK)
            *is_alike = head.plan_digest == saver->shared_part.plan->digest;
        if (status == SW_OK && *is_alike)
            status = merge_list(saver, &file, at, (size_t)head.size_bytes, sum, err);
        at += head.size_bytes;
    }
    sw_save_close_late(&file);
    return status;
}

static sw_status remove_file(const sw_saver *saver, int host, sw_error *err)
{
    char path[SW_PATH_BYTES];
    SW_TRY(tallies_path(saver, host, path, err));
    return sw_file_remove(path, err);
}

/* True if the hosts from `first` to before `end` have one rank. */
static bool is_alone(const sw_channel *channel, int first, int end)
{
    int ranks = 0;
    for (int r = 0; r < channel->world_size; ++r)
        ranks += channel->host_of[r] >= first && channel->host_of[r] < end;
    return ranks == 1;
}

/* On a carrier: merge tallies into its host's file, after all ranks concerned appended theirs. */
static sw_status merge_tallies(sw_saver *saver, sw_error *err)
{
    sw_tally_list sum = {0};
    bool is_alike = true;
    int own = saver->channel->host, end = sw_channel_merges_until(saver->channel);
    sw_status status = SW_OK;
    if (is_alone(saver->channel, own, end))
        return SW_OK; /* its list is the sum */
    for (int host = own; host < end && is_alike && status == SW_OK; ++host)
        status = merge_file(saver, host, &sum, &is_alike, err);
    if (status == SW_OK && is_alike)
        status = write_list(saver, &sum, end - own, err);
    for (int host = own + 1; host < end && is_alike && status == SW_OK; ++host)
        status = remove_file(saver, host, err);
    sw_tally_list_fini(&sum);
    return status;
}

/* Add a list to the manifest, a window at a time. */
static sw_status take_list(sw_saver *saver, sw_save_late_file *file, uint64_t at, uint64_t size,
                           uint8_t *window, sw_error *err)
{
    uint64_t block = UINT64_MAX;
    for (size_t used = 0; size > 0; at += used, size -= used) {
        size_t part = size < WINDOW_BYTES ? (size_t)size : WINDOW_BYTES;
        SW_TRY(sw_save_read_late(saver, file, window, part, at, err));
        SW_TRY(sw_tally_list_read_part(window, part, part == size, &block, &used,
                                       sw_manifest_add_tally, &saver->manifest, err));
    }
    return SW_OK;
}

/* *host_count: number of hosts with tallies in the file. */
static sw_status take_file(sw_saver *saver, sw_save_late_file *file, int host, uint8_t *window,
                           int *host_count, sw_error *err)
{
    sw_tally_head head;
    *host_count = 1;
    for (uint64_t at = 0; at < file->size_bytes; at += head.size_bytes) {
        SW_TRY(next_head(saver, file, &at, &head, err));
        if (head.plan_digest != saver->shared_part.plan->digest)
            SW_FAIL(err, SW_E_STATE,
                    "rank %u would write other files than rank 0: names, shapes, dtypes or "
                    "max_file_bytes differ",
                    head.rank);
        if (head.host_count < 1 || head.host_count > (unsigned)(saver->channel->host_count - host))
            SW_FAIL(err, SW_E_INVALID, "'%.300s' has tallies of %u hosts from number %d on",
                    file->path, head.host_count, host);
        *host_count = head.host_count > (unsigned)*host_count ? (int)head.host_count : *host_count;
        SW_TRY(take_list(saver, file, at, head.size_bytes, window, err));
    }
    return SW_OK;
}

/* Rank 0: add the tallies of all hosts to the manifest, and remove the files. */
static sw_status collect_tallies(sw_saver *saver, sw_error *err)
{
    int host_count = saver->channel->world_size > 1 ? saver->channel->host_count : 0;
    uint8_t *window = malloc(WINDOW_BYTES);
    sw_status status = SW_OK;
    if (!window)
        SW_FAIL(err, SW_E_MEMORY, "no memory to read tallies");
    for (int host = 0, merged = 1; host < host_count && status == SW_OK; host += merged) {
        char path[SW_PATH_BYTES];
        sw_save_late_file file = {path, sw_channel_tally_bytes(saver->channel, host), -1};
        status = tallies_path(saver, host, path, err);
        if (status == SW_OK)
            status = take_file(saver, &file, host, window, &merged, err);
        sw_save_close_late(&file);
        if (status == SW_OK)
            status = sw_file_remove(path, err);
    }
    free(window);
    return status;
}

/* ---- the verdict ---- */

/* Rank 0 creates the files and announces them. Each rank writes its ranges, adds its tallies of
 * each block to its host's file, and announces that. Carriers merge their hosts' tallies; rank 0
 * merges all of them and commits. No rank looks up a name before the channel has announced it,
 * because a client of a network file system caches for a while that a name is missing. Rank 0 locks
 * LOCK, so that a process that finds the folder knows whether its save is alive. A wait is a look
 * repeated after 1 to 20 ms. */

enum { LOOK_FIRST_NS = 1000000, VERDICT_GRACE_S = 10 };
enum { CANCEL_GRACE_NS = 1000000000 }; /* for rank 0's earlier words to arrive */
enum { COMMIT_S = 600 };               /* longest wait of a cancelled rank for a commit */

static sw_status check_time(sw_saver *saver, const char *awaited, sw_error *err)
{
    SW_TRY(sw_save_check(saver, err));
    if (sw_clock_now_ns() > saver->deadline_ns)
        SW_FAIL(err, SW_E_TIMEOUT, "'%.300s': the deadline passed while rank %d waited for %s",
                saver->folder, saver->channel->rank, awaited);
    return SW_OK;
}

static sw_status look_again(sw_saver *saver, long *pause_ns, const char *awaited, sw_error *err)
{
    SW_TRY(check_time(saver, awaited, err));
    sw_thread_sleep_ns(*pause_ns);
    *pause_ns = *pause_ns * 2 < SW_SAVE_LOOK_NS ? *pause_ns * 2 : SW_SAVE_LOOK_NS;
    return SW_OK;
}

/* Open the folder on rank 0. */
static sw_status open_folder(sw_saver *saver, sw_error *err)
{
    SW_TRY(sw_checkpoint_check_replaceable(saver->folder, err));
    for (size_t i = 0; i < saver->stale_count; ++i)
        (void)!sw_folder_remove(saver->stale[i], NULL);
    SW_TRY(sw_partial_create(saver->shared_part.plan, saver->partial, &saver->lock_fd, err));
    if (saver->own_part.plan)
        SW_TRY(sw_plan_create_files(saver->own_part.plan, saver->partial, err));
    return saver->channel->world_size > 1 ? create_tallies(saver, err) : SW_OK;
}

/* Wait until rank 0, and on another host also the carrier, has created the files. */
static sw_status await_folder(sw_saver *saver, sw_error *err)
{
    sw_channel *channel = saver->channel;
    bool asks_first = sw_channel_is_carrier(channel);
    long pause_ns = LOOK_FIRST_NS;
    sw_error why;
    while (asks_first ? !sw_channel_is_open_at_first(channel, saver->number)
                      : !sw_channel_is_open(channel, saver->number)) {
        if (sw_channel_is_decided(channel, saver->number, &why))
            SW_FAIL(err, why.status == SW_OK ? SW_E_STATE : why.status, "%.480s", why.message);
        if (sw_channel_is_gone(channel, &why))
            SW_FAIL(err, why.status, "%.480s", why.message);
        SW_TRY(look_again(saver, &pause_ns, "rank 0 to create the files", err));
    }
    return asks_first ? create_tallies(saver, err) : SW_OK;
}

sw_status sw_save_open(sw_saver *saver, sw_error *err)
{
    SW_TRY(saver->channel->rank == 0 ? open_folder(saver, err) : await_folder(saver, err));
    if (sw_channel_is_carrier(saver->channel))
        sw_channel_say_open(saver->channel, saver->number);
    return SW_OK;
}

/* On a carrier: wait until the other ranks of its host have written. False: the save ended before;
 * sw_save_conclude reports how. */
static bool await_host(sw_saver *saver)
{
    sw_error ignored;
    long pause_ns = LOOK_FIRST_NS;
    while (!sw_channel_have_others_written(saver->channel, saver->number))
        if (sw_channel_is_decided(saver->channel, saver->number, &ignored) ||
            sw_channel_is_gone(saver->channel, &ignored) ||
            look_again(saver, &pause_ns, "the other ranks of its host", NULL) != SW_OK)
            return false;
    return true;
}

sw_status sw_save_acknowledge(sw_saver *saver, sw_error *err)
{
    const sw_channel *channel = saver->channel;
    SW_TRY(tell_tallies(saver, err));
    if (channel->rank != 0 && sw_channel_is_carrier(channel)) {
        if (!await_host(saver))
            return SW_OK;
        SW_TRY(merge_tallies(saver, err));
    }
    sw_channel_say_written(saver->channel, saver->number);
    return SW_OK;
}

static sw_status await_written(sw_saver *saver, sw_error *err)
{
    long pause_ns = LOOK_FIRST_NS;
    for (int rank; (rank = sw_channel_find_unwritten(saver->channel, saver->number)) >= 0;) {
        char awaited[64];
        snprintf(awaited, sizeof awaited, "rank %d to write its ranges", rank);
        if (sw_channel_has_failure(saver->channel, saver->number, err))
            return err->status;
        SW_TRY(look_again(saver, &pause_ns, awaited, err));
    }
    return SW_OK;
}

/* The deadline ends here: ranks that read this word wait for the verdict. A rank that gave up
 * before has reported a failure. */
static sw_status begin_commit(sw_saver *saver, sw_error *err)
{
    SW_TRY(check_time(saver, "the tallies of all ranks", err));
    sw_channel_say_committing(saver->channel, saver->number);
    return sw_channel_has_failure(saver->channel, saver->number, err) ? err->status : SW_OK;
}

static sw_status collect_and_commit(sw_saver *saver, sw_error *err)
{
    SW_TRY(await_written(saver, err));
    SW_TRY(collect_tallies(saver, err));
    SW_TRY(sw_manifest_complete(&saver->manifest, err));
    SW_TRY(begin_commit(saver, err));
    return sw_commit(saver->partial, saver->folder, saver->replaces, &saver->manifest, err);
}

/* Publish the verdict before removing anything: removal may take longer than the others wait. */
static void conclude_first(sw_saver *saver, const sw_error *own, sw_error *outcome)
{
    *outcome = *own;
    if (own->status == SW_OK) {
        sw_error found = {0};
        if (collect_and_commit(saver, &found) != SW_OK)
            *outcome = found;
    }
    sw_channel_decide(saver->channel, saver->number, outcome);
    if (outcome->status != SW_OK) {
        sw_partial_abandon(saver->partial, &saver->lock_fd);
        return;
    }
    sw_save_lock_release(saver->folder, &saver->lock_fd);
    sw_commit_clean(saver->partial, saver->folder, saver->manifest.nonce);
    sw_retire((const char *const *)saver->retired, saver->retired_count, saver->manifest.nonce);
}

/* Rank 0 holds LOCK until it has published the verdict. */
static bool is_first_alive(const sw_saver *saver)
{
    return sw_save_lock_look(saver->partial) == SW_SAVE_ALIVE ||
           sw_save_lock_look(saver->folder) == SW_SAVE_ALIVE;
}

/* Return the time for rank 0's earlier words to arrive: 0 for a dead rank 0 on this host, because
 * this rank reads its words from shared memory. */
static int64_t grace_ns(const sw_saver *saver)
{
    return saver->channel->host_count <= 1 && !is_first_alive(saver) ? 0 : CANCEL_GRACE_NS;
}

/* Every rank reports rank 0's message, or its own if there is none. A rank that is cancelled during
 * rank 0's commit waits while rank 0 is alive, because its own report could be wrong. */
static void conclude_other(sw_saver *saver, const sw_error *own, sw_error *outcome)
{
    sw_channel *channel = saver->channel;
    long pause_ns = LOOK_FIRST_NS;
    sw_error mine = *own, stop = {0};
    int64_t cancelled_ns = 0;
    int64_t until_ns = saver->deadline_ns +
                       (int64_t)VERDICT_GRACE_S * 1000000000; /* rank 0's wait ends a bit later */
    if (mine.status != SW_OK)
        sw_channel_fail(channel, saver->number, &mine);
    while (!sw_channel_is_decided(channel, saver->number, outcome)) {
        int64_t now_ns = sw_clock_now_ns();
        sw_status status = cancelled_ns ? SW_OK : sw_save_check(saver, &stop);
        if (own->status == SW_OK ? status != SW_OK : status == SW_E_INTERRUPTED) {
            cancelled_ns = now_ns;
            until_ns = now_ns + grace_ns(saver);
            if (own->status == SW_OK)
                sw_channel_fail(channel, saver->number, &stop);
            mine = own->status == SW_OK ? stop : *own;
        }
        /* No verdict: rank 0 may be about to publish the folder, so it alone may remove it. */
        if (sw_channel_is_gone(channel, &stop)) {
            sw_channel_fail(channel, saver->number, &stop); /* its host's ranks still read it */
            *outcome = mine.status == SW_OK ? stop : mine;
            return;
        }
        if (sw_channel_is_committing(channel, saver->number) &&
            (!cancelled_ns ||
             (now_ns < cancelled_ns + COMMIT_S * INT64_C(1000000000) && is_first_alive(saver))))
            until_ns = now_ns + CANCEL_GRACE_NS;
        if (now_ns > until_ns) {
            *outcome = mine;
            if (mine.status == SW_OK)
                (void)sw_error_set(
                    outcome, SW_E_TIMEOUT, -1,
                    "'%.300s': the deadline passed while rank %d waited for rank 0 to commit",
                    saver->folder, channel->rank);
            return;
        }
        sw_thread_sleep_ns(pause_ns);
        pause_ns = pause_ns * 2 < SW_SAVE_LOOK_NS ? pause_ns * 2 : SW_SAVE_LOOK_NS;
    }
    /* Rank 0 abandoned the save. Every rank removes the folder after it stopped writing, so the
     * last one leaves no files. */
    if (outcome->status != SW_OK)
        (void)!sw_folder_remove(saver->partial, NULL);
}

void sw_save_conclude(sw_saver *saver, const sw_error *own, sw_error *outcome)
{
    if (saver->channel->rank == 0)
        conclude_first(saver, own, outcome);
    else
        conclude_other(saver, own, outcome);
}
