/* save_image.c - a save into memory that outlives this process: an image of the files, in a memfd
 * that the caller has mapped.
 *
 * A save to disk stages in private memory, which a thread then writes to files. Here each range is
 * staged at its place in the image, so one pass makes the copy and its checksum, and no write
 * follows. Tallies and runs describe what this rank wrote, as for a save to disk. */
#include <stdlib.h>

#include "checkpoint/save_job.h"
#include "platform/clock.h"

void sw_save_kept_fini(sw_save_kept *kept)
{
    sw_tally_list_fini(&kept->tallies);
    free(kept->runs);
    *kept = (sw_save_kept){0};
}

static void *help(void *context)
{
    (void)sw_save_await_open(context);
    return NULL;
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
           sw_thread_start(&saver->threads[started], help, saver, "sw-keep", NULL) == SW_OK)
        ++started; /* the threads that exist do all of the work */
    sw_save_copy_claim(saver, &claim, request);
    pthread_mutex_lock(&saver->mutex);
    saver->is_open = true;
    pthread_cond_broadcast(&saver->changed);
    pthread_mutex_unlock(&saver->mutex);
    for (int t = 1; t < started; ++t)
        sw_thread_join(&saver->threads[t]);
    sw_save_claim_fini(&claim);
    return sw_save_check(saver, err);
}

static sw_status append(void *context, uint64_t block, sw_tally tally, sw_error *err)
{
    (void)err;
    sw_tally_list_append(context, block, tally);
    return SW_OK;
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
                      sw_save_kept *kept, sw_error *err)
{
    SW_TRY(sw_save_list_ranges(saver, request, err));
    SW_TRY(list_runs(saver, image_bytes, kept, err));
    SW_TRY(copy_all(saver, request, err));
    SW_TRY(sw_save_each_tally(saver, append, &kept->tallies, err));
    if (kept->tallies.is_out_of_memory)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the tallies of %zu ranges", saver->range_count);
    return SW_OK;
}

sw_status sw_saver_keep(sw_saver *saver, const sw_save_request *request, uint8_t *image,
                        uint64_t image_bytes, sw_save_kept *kept, sw_error *err)
{
    sw_save_kept made = {0};
    SW_TRY(sw_save_check_request(saver, request, err));
    start_save(saver, request, image);
    sw_status status = keep(saver, request, image_bytes, &made, err);
    sw_save_clear(saver);
    saver->image = NULL;
    if (status == SW_OK)
        *kept = made;
    else
        sw_save_kept_fini(&made);
    return status;
}
