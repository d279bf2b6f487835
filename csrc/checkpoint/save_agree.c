/* save_agree.c - how ranks finish one save together with only a shared file system and a channel.
 *
 * Rank 0 creates the files and announces them. Each rank writes its ranges, adds its tallies of
 * each block to its host's file, and announces that. Carriers merge their hosts' tallies; rank 0
 * merges all of them and commits. No rank looks up a name before the channel has announced it,
 * because a client of a network file system caches for a while that a name is missing. Rank 0 locks
 * LOCK, so that a process that finds the folder knows whether its save is alive. A wait is a look
 * repeated after 1 to 20 ms. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/commit.h"
#include "checkpoint/removable.h"
#include "checkpoint/save_job.h"
#include "checkpoint/save_lock.h"
#include "checkpoint/write.h"
#include "platform/clock.h"

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
    return saver->channel->world_size > 1 ? sw_save_create_tallies(saver, err) : SW_OK;
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
    return asks_first ? sw_save_create_tallies(saver, err) : SW_OK;
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
    SW_TRY(sw_save_tell_tallies(saver, err));
    if (channel->rank != 0 && sw_channel_is_carrier(channel)) {
        if (!await_host(saver))
            return SW_OK;
        SW_TRY(sw_save_merge_tallies(saver, err));
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
    SW_TRY(sw_save_collect_tallies(saver, err));
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
