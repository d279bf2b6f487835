/* save_write.c - threads take runs of neighbouring blocks and write each run at its place.
 *
 * Live blocks are copied on the way, through slots of the stage: those are warm, which memory that
 * is mapped for a save is not (a fault a page, and on a virtual machine one of the host's behind
 * it). Up to 8 MiB a write, so that two threads keep a disk busy. Whole pages go past the page
 * cache; the last bytes of a file, less than a page, through it: no two writes touch one page. Each
 * thread syncs what it wrote before it turns to another file; a failed fsync ends the save, and is
 * never tried again on the same file. */
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint/save_job.h"
#include "platform/clock.h"

typedef struct writer {
    sw_saver *saver;
    bool is_helper;
    uint8_t *bounce[SW_SAVE_RUN_BLOCKS]; /* slots of the stage: a run that was live */
    size_t bounce_count;
    const sw_plan_file *file; /* open, or NULL */
    char path[SW_PATH_BYTES];
    int fd;
} writer;

static sw_status close_file(writer *w, sw_error *err)
{
    if (w->fd < 0)
        return SW_OK;
    sw_status status = sw_file_sync(w->fd, w->path, err);
    sw_status closed = sw_file_close(&w->fd, w->path, status == SW_OK ? err : NULL);
    w->file = NULL;
    return status == SW_OK ? closed : status;
}

static sw_status open_file(writer *w, const sw_plan_file *file, sw_error *err)
{
    if (w->file == file)
        return SW_OK;
    SW_TRY(close_file(w, err));
    SW_TRY(sw_path_join(w->path, w->saver->partial, file->path, err));
    SW_TRY(sw_file_open_write(w->path, w->saver->options.use_direct, &w->fd, err));
    w->file = file;
    return SW_OK;
}

/* The next run: blocks that follow each other in one file, all staged or all live. */
static size_t take_run_locked(sw_saver *saver, sw_save_block **first, bool *is_live)
{
    size_t begin = saver->next_block, count = 0;
    while (begin < saver->block_count && saver->failure.status == SW_OK &&
           saver->blocks[begin].state == SW_BLOCK_COPYING) { /* the caller's: soon staged */
        if (!sw_save_help_copy_locked(saver))
            pthread_cond_wait(&saver->changed, &saver->mutex);
        begin = saver->next_block;
    }
    if (begin >= saver->block_count || saver->failure.status != SW_OK)
        return 0;
    *first = &saver->blocks[begin];
    *is_live = (*first)->state == SW_BLOCK_LIVE;
    for (; count < SW_SAVE_RUN_BLOCKS && begin + count < saver->block_count; ++count) {
        sw_save_block *block = *first + count;
        if (block->file != (*first)->file ||
            block->offset != (*first)->offset + (uint64_t)count * SW_BLOCK_BYTES ||
            block->state != (*is_live ? SW_BLOCK_LIVE : SW_BLOCK_STAGED))
            break;
        block->state = *is_live ? SW_BLOCK_COPYING : SW_BLOCK_TAKEN;
    }
    saver->next_block = begin + count;
    saver->copying_count += *is_live;
    return count;
}

/* As many slots as a run of `count` blocks needs: small saves take few. */
static sw_status take_bounce(writer *w, size_t count, sw_error *err)
{
    sw_status status = SW_OK;
    if (count <= w->bounce_count)
        return SW_OK;
    pthread_mutex_lock(&w->saver->mutex);
    status =
        sw_stage_take(&w->saver->stage, count - w->bounce_count, w->bounce + w->bounce_count, err);
    pthread_mutex_unlock(&w->saver->mutex);
    if (status == SW_OK)
        w->bounce_count = count;
    return status;
}

static void give_bounce(writer *w)
{
    pthread_mutex_lock(&w->saver->mutex);
    while (w->bounce_count > 0)
        sw_stage_give(&w->saver->stage, w->bounce[--w->bounce_count]);
    pthread_mutex_unlock(&w->saver->mutex);
}

static sw_status copy_live(writer *w, sw_save_block *first, size_t count, sw_error *err)
{
    sw_status status = take_bounce(w, count, err);
    for (size_t i = 0; i < count && status == SW_OK; ++i)
        sw_save_fill(w->saver, &first[i], w->bounce[i]);
    pthread_mutex_lock(&w->saver->mutex);
    for (size_t i = 0; i < count; ++i)
        first[i].state = SW_BLOCK_TAKEN;
    w->saver->copying_count--;
    pthread_cond_broadcast(&w->saver->changed);
    pthread_mutex_unlock(&w->saver->mutex);
    return status;
}

static sw_status write_tail(const writer *w, const uint8_t *data, size_t size_bytes,
                            uint64_t offset, sw_error *err)
{
    int fd = -1;
    struct iovec part = {.iov_base = (void *)(uintptr_t)data, .iov_len = size_bytes};
    SW_TRY(sw_file_open_write(w->path, false, &fd, err));
    sw_status status = sw_file_write_at(fd, w->path, &part, 1, offset, err);
    if (status == SW_OK)
        status = sw_file_sync(fd, w->path, err);
    sw_status closed = sw_file_close(&fd, w->path, status == SW_OK ? err : NULL);
    return status == SW_OK ? closed : status;
}

static sw_status write_run(const writer *w, const sw_save_block *first, size_t count, bool is_live,
                           sw_error *err)
{
    struct iovec parts[SW_SAVE_RUN_BLOCKS];
    const sw_save_block *last = &first[count - 1];
    size_t tail = last->size_bytes % SW_FILE_ALIGNMENT_BYTES;
    const uint8_t *tail_data = NULL;
    for (size_t i = 0; i < count; ++i) {
        uint8_t *data = is_live ? w->bounce[i] : first[i].slot;
        parts[i] = (struct iovec){.iov_base = data,
                                  .iov_len = first[i].size_bytes - (&first[i] == last ? tail : 0)};
        tail_data = data + parts[i].iov_len;
    }
    int used = (int)count - (parts[count - 1].iov_len == 0);
    if (used > 0)
        SW_TRY(sw_file_write_at(w->fd, w->path, parts, used, first->offset, err));
    return tail ? write_tail(w, tail_data, tail, last->offset + last->size_bytes - tail, err)
                : SW_OK;
}

/* When this run may be followed by the next, under the bandwidth limit. */
static int64_t book_locked(sw_saver *saver, uint64_t bytes)
{
    uint64_t limit = saver->options.bandwidth_bytes_per_second;
    int64_t now = sw_clock_now_ns();
    if (limit == 0)
        return now;
    if (saver->next_write_ns < now)
        saver->next_write_ns = now;
    saver->next_write_ns += (int64_t)((double)bytes * 1e9 / (double)limit);
    return saver->next_write_ns;
}

static sw_status finish_run(writer *w, sw_save_block *first, size_t count, sw_error *err)
{
    sw_saver *saver = w->saver;
    uint64_t bytes = 0;
    pthread_mutex_lock(&saver->mutex);
    for (size_t i = 0; i < count; ++i) {
        bytes += first[i].size_bytes;
        first[i].state = SW_BLOCK_WRITTEN;
        if (first[i].slot)
            sw_stage_give(&saver->stage, first[i].slot);
        first[i].slot = NULL;
    }
    saver->bytes_written += bytes;
    if (sw_file_is_direct(w->fd))
        saver->direct_bytes += bytes;
    int64_t until = book_locked(saver, bytes);
    pthread_mutex_unlock(&saver->mutex);
    for (int64_t now; (now = sw_clock_now_ns()) < until;) {
        SW_TRY(sw_save_check(saver, err));
        sw_thread_sleep_ns(until - now < 20000000 ? (long)(until - now) : 20000000);
    }
    return SW_OK;
}

static sw_status write_all(writer *w, sw_error *err)
{
    for (;;) {
        sw_save_block *first = NULL;
        bool is_live = false;
        pthread_mutex_lock(&w->saver->mutex);
        while (w->is_helper && sw_save_help_copy_locked(w->saver))
            ;
        size_t count = take_run_locked(w->saver, &first, &is_live);
        pthread_mutex_unlock(&w->saver->mutex);
        if (count == 0)
            return close_file(w, err);
        if (is_live)
            SW_TRY(copy_live(w, first, count, err));
        SW_TRY(open_file(w, first->file, err));
        SW_TRY(write_run(w, first, count, is_live, err));
        SW_TRY(finish_run(w, first, count, err));
    }
}

sw_status sw_save_write(sw_saver *saver, bool is_helper, sw_error *err)
{
    writer w = {.saver = saver, .is_helper = is_helper, .fd = -1};
    sw_status status = write_all(&w, err);
    if (w.fd >= 0)
        close(w.fd); /* after an error that is already told */
    give_bounce(&w);
    return status;
}
