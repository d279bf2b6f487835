/* save.c - the saver: one save at a time, and the life of its threads.
 *
 * Thread 0 coordinates: it starts the others, opens the folder, writes, acknowledges and concludes.
 * The other threads help the caller's thread to copy, then write. Threads live only during a save,
 * so an idle saver has none and a process may fork between saves. */
#include "checkpoint/save.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/save_job.h"
#include "platform/clock.h"
#include "platform/spans.h"

enum { HEADING_BYTES = 1024 }; /* bytes of a manifest without its files */

sw_status sw_saver_create(sw_channel *channel, const sw_saver_options *options, sw_saver **saver,
                          sw_error *err)
{
    if (options->thread_count < 1 || options->thread_count > SW_SAVER_THREADS_MAX)
        SW_FAIL(err, SW_E_INVALID, "saver: thread_count must be in [1, %d], not %d",
                SW_SAVER_THREADS_MAX, options->thread_count);
    sw_saver *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a saver");
    made->channel = channel;
    made->options = *options;
    made->lock_fd = -1;
    pthread_mutex_init(&made->mutex, NULL);
    sw_thread_cond_init(&made->changed);
    *saver = made;
    return SW_OK;
}

static void free_strings(char ***strings, size_t *count)
{
    for (size_t i = 0; i < *count; ++i)
        free((*strings)[i]);
    free(*strings);
    *strings = NULL;
    *count = 0;
}

static sw_status copy_strings(const char *const *from, size_t count, char ***to, size_t *copied,
                              sw_error *err)
{
    *to = calloc(count + 1, sizeof **to);
    for (size_t i = 0; *to && i < count; ++i, ++*copied)
        if (!((*to)[i] = strdup(from[i])))
            break;
    if (!*to || *copied != count)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the names of %zu folders", count);
    return SW_OK;
}

/* Clear the state of one save: return slots, keep memory. */
static void clear(sw_saver *saver)
{
    for (size_t i = 0; i < saver->chunk_count; ++i)
        if (saver->chunks[i].slot)
            sw_stage_give(&saver->stage, saver->chunks[i].slot);
    sw_save_forget_ranges(saver);
    saver->copying_count = 0;
    free_strings(&saver->stale, &saver->stale_count);
    free_strings(&saver->retired, &saver->retired_count);
    sw_manifest_fini(&saver->manifest);
}

/* Help the caller's thread to copy until the files exist; false: a thread failed. */
static bool await_open(sw_saver *saver)
{
    pthread_mutex_lock(&saver->mutex);
    while (!saver->is_open && saver->failure.status == SW_OK)
        if (!sw_save_help_copy_locked(saver))
            pthread_cond_wait(&saver->changed, &saver->mutex);
    bool is_open = saver->failure.status == SW_OK;
    pthread_mutex_unlock(&saver->mutex);
    return is_open;
}

static void *help(void *context)
{
    sw_saver *saver = context;
    sw_error err = {0};
    if (saver->options.is_idle_io)
        sw_thread_lower_io_priority();
    bool is_open = await_open(saver);
    int64_t begun_ns = sw_clock_now_ns();
    if (is_open && sw_save_write(saver, true, &err) != SW_OK)
        sw_save_record_failure(saver, &err);
    sw_spans_add(SW_SPAN_SAVE, 0, begun_ns, sw_clock_now_ns());
    return NULL;
}

static void set_open(sw_saver *saver)
{
    pthread_mutex_lock(&saver->mutex);
    saver->is_open = true;
    pthread_cond_broadcast(&saver->changed);
    pthread_mutex_unlock(&saver->mutex);
}

static sw_status open_and_write(sw_saver *saver, sw_error *err)
{
    SW_TRY(sw_save_open(saver, err));
    set_open(saver);
    return sw_save_write(saver, false, err);
}

static sw_status write_together(sw_saver *saver, sw_error *err)
{
    sw_status status = SW_OK;
    for (int t = 1; t < saver->options.thread_count && status == SW_OK; ++t)
        status = sw_thread_start(&saver->threads[t], help, saver, "sw-save", err);
    if (status == SW_OK)
        status = open_and_write(saver, err);
    if (status != SW_OK)
        sw_save_record_failure(saver, err); /* ends the helpers, and a caller's wait in protect() */
    for (int t = 1; t < saver->options.thread_count; ++t)
        sw_thread_join(&saver->threads[t]);
    return sw_save_check(saver, err);
}

static void *coordinate(void *context)
{
    sw_saver *saver = context;
    sw_error own = {0}, outcome = {0};
    if (saver->options.is_idle_io)
        sw_thread_lower_io_priority();
    int64_t begun_ns = sw_clock_now_ns();
    sw_status status = write_together(saver, &own);
    int64_t written_ns = sw_clock_now_ns();
    sw_spans_add(SW_SPAN_SAVE, 0, begun_ns, written_ns);
    if (status == SW_OK)
        status = sw_save_acknowledge(saver, &own);
    if (status != SW_OK)
        sw_save_record_failure(saver, &own);
    else
        own = (sw_error){0};
    sw_save_conclude(saver, &own, &outcome);
    sw_spans_add(SW_SPAN_SAVE, 1, written_ns, sw_clock_now_ns());
    pthread_mutex_lock(&saver->mutex);
    saver->outcome = outcome;
    saver->is_over = true;
    pthread_cond_broadcast(&saver->changed);
    pthread_mutex_unlock(&saver->mutex);
    return NULL;
}

static sw_status check_request(const sw_saver *saver, const sw_save_request *request, sw_error *err)
{
    if (saver->is_running)
        SW_FAIL(err, SW_E_STATE,
                "a save is under way, or its outcome was not asked for: call wait() first");
    if (!sw_manifest_is_nonce(request->nonce))
        SW_FAIL(err, SW_E_INVALID, "nonce must be 1 to %d of [0-9a-z], not '%.80s'",
                SW_NONCE_BYTES - 1, request->nonce);
    if (!request->shared.plan || (!request->own.plan && request->own.source_count > 0))
        SW_FAIL(err, SW_E_INVALID,
                "a save needs the plan of what ranks share, and of what this rank has alone if it "
                "has any; 'shared' is %s",
                request->shared.plan ? "given" : "missing");
    size_t slot_bytes = request->stage ? sw_device_stage_slot_bytes(request->stage) : 0;
    if (slot_bytes % SW_BLOCK_BYTES != 0)
        SW_FAIL(err, SW_E_INVALID,
                "slots of a device stage must hold whole chunks of %d bytes, "
                "not %zu bytes",
                SW_BLOCK_BYTES, slot_bytes);
    uint64_t manifest_bytes = request->shared.plan->manifest_bytes +
                              (request->own.plan ? request->own.plan->manifest_bytes : 0);
    if (manifest_bytes + HEADING_BYTES > SW_MANIFEST_MAX_BYTES)
        SW_FAIL(err, SW_E_INVALID,
                "a checkpoint of %" PRIu64
                " MiB cannot be listed: a manifest of at most %d bytes has 8 a MiB",
                request->shared.plan->block_count, SW_MANIFEST_MAX_BYTES);
    for (size_t i = 0; i < request->shared.source_count && !request->stage; ++i)
        if (request->shared.sources[i].is_on_device)
            SW_FAIL(err, SW_E_INVALID, "tensor number %zu is on a device, and no stage was given",
                    request->shared.sources[i].source);
    return SW_OK;
}

static void start_save(sw_saver *saver, const sw_save_request *request, uint8_t *image)
{
    saver->number = request->number;
    saver->bytes_total = saver->bytes_written = 0;
    saver->deadline_ns = sw_clock_now_ns() + request->timeout_ns;
    saver->failure = saver->outcome = (sw_error){0};
    saver->is_open = saver->is_over = false;
    saver->image = image;
}

static sw_status prepare(sw_saver *saver, const sw_save_request *request, sw_error *err)
{
    size_t length = strlen(request->folder);
    if (length == 0 || request->folder[length - 1] == '/' ||
        length + SW_NONCE_BYTES + 64 > SW_PATH_BYTES)
        SW_FAIL(err, SW_E_INVALID,
                "folder must be a path of 1 to %d bytes that does not end with '/', not '%.200s'",
                SW_PATH_BYTES - SW_NONCE_BYTES - 64, request->folder);
    snprintf(saver->folder, sizeof saver->folder, "%s", request->folder);
    if (snprintf(saver->partial, sizeof saver->partial, "%s.%s.partial", request->folder,
                 request->nonce) >= SW_PATH_BYTES)
        SW_FAIL(err, SW_E_INVALID, "folder '%.200s' is too long", request->folder);
    snprintf(saver->replaces, sizeof saver->replaces, "%s",
             request->replaces ? request->replaces : "");
    start_save(saver, request, NULL);
    saver->manifest.step = request->step;
    saver->manifest.world_size = saver->channel->world_size;
    saver->manifest.has_metric = request->has_metric;
    saver->manifest.metric = request->metric;
    snprintf(saver->manifest.nonce, sizeof saver->manifest.nonce, "%s", request->nonce);
    SW_TRY(copy_strings(request->stale, request->stale_count, &saver->stale, &saver->stale_count,
                        err));
    SW_TRY(copy_strings(request->retired, request->retired_count, &saver->retired,
                        &saver->retired_count, err));
    return sw_save_list_ranges(saver, request, err);
}

/* The save already runs: a device error fails it, as a thread's error does. */
static void copy_claim(sw_saver *saver, sw_save_claim *claim, const sw_save_request *request)
{
    sw_error why;
    if (!request->stage)
        sw_save_copy(saver, claim);
    else if (sw_save_copy_down(saver, claim, request, &why) != SW_OK)
        sw_save_record_failure(saver, &why);
}

static void set_running(sw_saver *saver, bool is_running)
{
    pthread_mutex_lock(&saver->mutex);
    saver->is_running = is_running;
    pthread_mutex_unlock(&saver->mutex);
}

sw_status sw_saver_begin(sw_saver *saver, const sw_save_request *request, sw_error *err)
{
    sw_error why = {0};
    sw_status status;
    sw_save_claim claim = {0};
    SW_TRY(check_request(saver, request, err));
    pthread_mutex_lock(&saver->mutex); /* any thread may ask for progress at any time */
    status = prepare(saver, request, &why);
    pthread_mutex_unlock(&saver->mutex);
    if (status != SW_OK)
        goto failed;
    SW_TRY_GOTO(status, sw_save_claim_live(saver, request->is_lazy, &claim, &why), failed);
    SW_TRY_GOTO(status, sw_save_take_samples(saver, &why), failed);
    SW_TRY_GOTO(status, sw_thread_start(&saver->threads[0], coordinate, saver, "sw-save", &why),
                failed);
    set_running(saver, true);
    copy_claim(saver, &claim, request); /* while threads write the first blocks */
    sw_save_claim_fini(&claim);
    return SW_OK;
failed:
    for (size_t i = 0; i < claim.count; ++i)
        sw_stage_give(&saver->stage, claim.slots[i]);
    sw_save_claim_fini(&claim);
    clear(saver);
    sw_saver_fail(saver, request->number, &why);
    return sw_error_pass(err, &why);
}

sw_status sw_saver_protect(sw_saver *saver, sw_error *err)
{
    sw_error why = {0};
    sw_save_claim claim = {0};
    if (!saver->is_running)
        return SW_OK;
    sw_status status = sw_save_check(saver, NULL) == SW_OK
                           ? sw_save_claim_live(saver, false, &claim, &why)
                           : SW_OK;
    if (status == SW_OK) {
        sw_save_copy(saver, &claim);
    } else {
        sw_save_record_failure(saver, &why);
        (void)!sw_error_pass(err, &why);
    }
    sw_save_claim_fini(&claim);
    sw_save_await_copies(saver); /* also after a failure */
    return status;
}

sw_status sw_saver_wait(sw_saver *saver, int64_t timeout_ns, bool *is_over, sw_error *err)
{
    const struct timespec until = sw_thread_time_after(timeout_ns);
    pthread_mutex_lock(&saver->mutex);
    bool over = !saver->is_running || saver->is_over;
    while (!over && pthread_cond_timedwait(&saver->changed, &saver->mutex, &until) != ETIMEDOUT)
        over = saver->is_over;
    over = !saver->is_running || saver->is_over;
    pthread_mutex_unlock(&saver->mutex);
    *is_over = over;
    if (!over || !saver->is_running)
        return SW_OK;
    sw_thread_join(&saver->threads[0]);
    set_running(saver, false);
    clear(saver);
    return saver->outcome.status == SW_OK ? SW_OK : sw_error_pass(err, &saver->outcome);
}

void sw_saver_fail(sw_saver *saver, uint64_t number, const sw_error *reason)
{
    if (saver->channel->rank != 0) {
        sw_channel_fail(saver->channel, number, reason);
        return;
    }
    sw_error verdict = *reason;
    if (saver->channel->world_size > 1)
        (void)sw_error_set(&verdict, reason->status, reason->detail, "rank 0: %.480s",
                           reason->message);
    sw_channel_decide(saver->channel, number, &verdict);
}

void sw_saver_cancel(sw_saver *saver, const sw_error *reason)
{
    pthread_mutex_lock(&saver->mutex);
    saver->failure = *reason;
    saver->failure.status = SW_E_INTERRUPTED;
    pthread_cond_broadcast(&saver->changed);
    pthread_mutex_unlock(&saver->mutex);
}

int sw_saver_find_unwritten(const sw_saver *saver, int from)
{
    return sw_channel_find_unwritten_here(saver->channel, saver->number, from);
}

void sw_saver_progress(sw_saver *saver, sw_save_progress *progress)
{
    pthread_mutex_lock(&saver->mutex);
    *progress =
        (sw_save_progress){.bytes_total = saver->bytes_total,
                           .bytes_written = saver->bytes_written,
                           .staging_bytes = saver->stage.slot_count * (uint64_t)SW_BLOCK_BYTES,
                           .direct_bytes = saver->direct_bytes,
                           .is_busy = saver->is_running && !saver->is_over};
    pthread_mutex_unlock(&saver->mutex);
}

uint8_t *sw_saver_spare(const sw_saver *saver, size_t index, size_t *size_bytes)
{
    if (saver->is_running || index >= saver->stage.region_count)
        return NULL;
    *size_bytes = saver->stage.regions[index].touched * SW_BLOCK_BYTES;
    return saver->stage.regions[index].base;
}

void sw_saver_destroy(sw_saver *saver)
{
    if (!saver)
        return;
    if (saver->is_running) {
        sw_error reason = {.status = SW_E_INTERRUPTED,
                           .detail = -1,
                           .message = "the save was given up: its Checkpointer was closed"};
        if (sw_save_check(saver, NULL) == SW_OK)
            sw_saver_cancel(saver, &reason);
        else
            sw_saver_cancel(saver, &saver->failure);
        sw_thread_join(&saver->threads[0]);
    }
    sw_save_end_warming(saver);
    clear(saver);
    free(saver->samples);
    sw_stage_fini(&saver->stage);
    pthread_cond_destroy(&saver->changed);
    pthread_mutex_destroy(&saver->mutex);
    free(saver);
}

/* ---- a save into memory ---- */

/* A save into memory that outlives this process: an image of the files, in a memfd that the caller
 * has mapped.
 *
 * A save to disk stages in private memory, which a thread then writes to files. Here each range is
 * staged at its place in the image, so one pass makes the copy and its checksum, and no write
 * follows. Tallies and runs describe what this rank wrote, as for a save to disk. */

void sw_save_kept_fini(sw_save_kept *kept)
{
    sw_tally_list_fini(&kept->tallies);
    free(kept->runs);
    *kept = (sw_save_kept){0};
}

static void *help_keep(void *context)
{
    (void)await_open(context);
    return NULL;
}

/* Starting and ending a thread costs about as much as copying 1 MiB. */
enum { HELPER_LEAST_BYTES = 8 << 20 };

static int threads_for(const sw_saver *saver)
{
    uint64_t useful = 1 + saver->bytes_total / HELPER_LEAST_BYTES;
    return useful < (uint64_t)saver->options.thread_count ? (int)useful
                                                          : saver->options.thread_count;
}

/* Copy all chunks, together with helping threads if these pay. */
static sw_status copy_all(sw_saver *saver, const sw_save_request *request, sw_error *err)
{
    sw_save_claim claim = {0};
    int wanted = threads_for(saver), started = 1;
    SW_TRY(sw_save_claim_live(saver, false, &claim, err));
    while (started < wanted && (size_t)started < saver->chunk_count &&
           sw_thread_start(&saver->threads[started], help_keep, saver, "sw-keep", NULL) == SW_OK)
        ++started; /* the threads that exist do all of the work */
    copy_claim(saver, &claim, request);
    set_open(saver);
    for (int t = 1; t < started; ++t)
        sw_thread_join(&saver->threads[t]);
    sw_save_claim_fini(&claim);
    return sw_save_check(saver, err);
}

/* List runs; SW_E_INVALID: the image ends before one. */
static sw_status list_runs(const sw_saver *saver, uint64_t image_bytes, sw_save_kept *kept,
                           sw_error *err)
{
    kept->runs = calloc(saver->range_count + 1, sizeof *kept->runs);
    if (!kept->runs)
        SW_FAIL(err, SW_E_MEMORY, "no memory to list %zu runs of a save", saver->range_count);
    for (size_t c = 0; c < saver->chunk_count; ++c)
        for (uint32_t i = 0; i < saver->chunks[c].range_count; ++i) {
            const sw_save_range *range = &saver->chunks[c].ranges[i];
            uint64_t begin = sw_save_block_of(saver, &saver->chunks[c], range) * SW_BLOCK_BYTES +
                             range->offset % SW_BLOCK_BYTES;
            sw_save_run *last = kept->run_count ? &kept->runs[kept->run_count - 1] : NULL;
            if (begin + range->size_bytes > image_bytes)
                SW_FAIL(err, SW_E_INVALID, "an image of %llu bytes does not hold '%.200s'",
                        (unsigned long long)image_bytes, range->file->path);
            if (last && last->begin + last->size_bytes == begin)
                last->size_bytes += range->size_bytes;
            else
                kept->runs[kept->run_count++] = (sw_save_run){begin, range->size_bytes};
            kept->size_bytes += range->size_bytes;
        }
    return SW_OK;
}

static sw_status keep(sw_saver *saver, const sw_save_request *request, uint64_t image_bytes,
                      int disk_fd, sw_save_kept *kept, sw_error *err)
{
    SW_TRY(sw_save_list_ranges(saver, request, err));
    SW_TRY(list_runs(saver, image_bytes, kept, err));
    for (size_t i = 0; disk_fd >= 0 && i < kept->run_count; ++i)
        SW_TRY(sw_file_reserve(disk_fd, "an image on disk", kept->runs[i].begin,
                               kept->runs[i].size_bytes, err));
    SW_TRY(copy_all(saver, request, err));
    return sw_save_list_tallies(saver, &kept->tallies, err);
}

sw_status sw_saver_keep(sw_saver *saver, const sw_save_request *request, uint8_t *image,
                        uint64_t image_bytes, int disk_fd, sw_save_kept *kept, sw_error *err)
{
    sw_save_kept made = {0};
    SW_TRY(check_request(saver, request, err));
    start_save(saver, request, image);
    sw_status status = keep(saver, request, image_bytes, disk_fd, &made, err);
    clear(saver);
    saver->image = NULL;
    if (status == SW_OK)
        *kept = made;
    else
        sw_save_kept_fini(&made);
    return status;
}
