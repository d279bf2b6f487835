/* save_write.c - threads take runs of chunks and write each range at its file offset.
 *
 * Live chunks are first copied to slots of the stage. These are warm; newly mapped memory costs a
 * fault per page, and on a virtual machine another fault on its host. A write has up to 8 MiB, so
 * that two threads keep a disk busy. Whole pages of a range bypass the page cache. The edges of a
 * range, less than a page each, use it: a host's page cache merges what its ranks write of one
 * page. Each thread syncs its writes before it opens another file. A failed fsync ends the save,
 * and is never retried on the same file. */
#include <unistd.h>

#include "checkpoint/save_job.h"
#include "platform/clock.h"

typedef struct writer {
    sw_saver *saver;
    bool is_helper;
    uint8_t *bounce[SW_SAVE_RUN_CHUNKS]; /* slots of the stage, for a live run */
    size_t bounce_count;
    const sw_plan_file *file; /* open, or NULL */
    char path[SW_PATH_BYTES];
    int fd, edge_fd; /* edge_fd: uses the page cache, opened at the first edge; -1: not yet */
    bool is_direct;
    struct iovec batch[SW_SAVE_RUN_CHUNKS]; /* neighbours in the file, still to be written */
    int batch_count;
    uint64_t batch_begin, batch_end, direct_bytes;
} writer;

static sw_status flush_batch(writer *w, sw_error *err)
{
    int count = w->batch_count;
    w->batch_count = 0;
    if (count == 0)
        return SW_OK;
    if (w->is_direct)
        w->direct_bytes += w->batch_end - w->batch_begin;
    return sw_file_write_at(w->fd, w->path, w->batch, count, w->batch_begin, err);
}

static sw_status close_file(writer *w, sw_error *err)
{
    if (w->fd < 0)
        return SW_OK;
    SW_TRY(flush_batch(w, err));
    sw_status status = sw_file_close(&w->edge_fd, w->path, err);
    if (status == SW_OK)
        status = sw_file_sync(w->fd, w->path, err); /* also syncs writes of edge_fd */
    w->file = NULL;
    return sw_file_close_after(&w->fd, w->path, status, err);
}

static sw_status open_file(writer *w, const sw_plan_file *file, sw_error *err)
{
    if (w->file == file)
        return SW_OK;
    SW_TRY(close_file(w, err));
    SW_TRY(sw_path_join(w->path, w->saver->partial, file->path, err));
    SW_TRY(sw_save_open_late(w->saver, w->path, w->saver->options.use_direct, !w->is_helper, &w->fd,
                             err));
    w->is_direct = sw_file_is_direct(w->fd);
    w->file = file;
    return SW_OK;
}

/* Take the next run: consecutive chunks, all staged or all live. */
static size_t take_run_locked(sw_saver *saver, sw_save_chunk **first, bool *is_live)
{
    size_t begin = saver->next_chunk, count = 0;
    while (begin < saver->chunk_count && saver->failure.status == SW_OK &&
           saver->chunks[begin].state == SW_CHUNK_COPYING) { /* the caller is copying it */
        if (!sw_save_help_copy_locked(saver))
            pthread_cond_wait(&saver->changed, &saver->mutex);
        begin = saver->next_chunk;
    }
    if (begin >= saver->chunk_count || saver->failure.status != SW_OK)
        return 0;
    *first = &saver->chunks[begin];
    *is_live = (*first)->state == SW_CHUNK_LIVE;
    for (; count < SW_SAVE_RUN_CHUNKS && begin + count < saver->chunk_count; ++count) {
        sw_save_chunk *chunk = *first + count;
        if (chunk->state != (*is_live ? SW_CHUNK_LIVE : SW_CHUNK_STAGED))
            break;
        chunk->state = *is_live ? SW_CHUNK_COPYING : SW_CHUNK_TAKEN;
    }
    saver->next_chunk = begin + count;
    saver->copying_count += *is_live;
    return count;
}

/* Take the slots that a run of `count` chunks needs, so that small saves take few. */
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

static sw_status copy_live(writer *w, sw_save_chunk *first, size_t count, sw_error *err)
{
    sw_status status = take_bounce(w, count, err);
    for (size_t i = 0; i < count && status == SW_OK; ++i)
        sw_save_fill(w->saver, &first[i], w->bounce[i]);
    pthread_mutex_lock(&w->saver->mutex);
    for (size_t i = 0; i < count; ++i)
        first[i].state = SW_CHUNK_TAKEN;
    w->saver->copying_count--;
    pthread_cond_broadcast(&w->saver->changed);
    pthread_mutex_unlock(&w->saver->mutex);
    return status;
}

/* Queue a write, to merge it with adjacent writes in the file. */
static sw_status write_later(writer *w, uint8_t *data, size_t size, uint64_t offset, sw_error *err)
{
    if (w->batch_count == SW_SAVE_RUN_CHUNKS || (w->batch_count && w->batch_end != offset))
        SW_TRY(flush_batch(w, err));
    if (size == 0)
        return SW_OK;
    if (w->batch_count == 0)
        w->batch_begin = offset;
    w->batch[w->batch_count++] = (struct iovec){.iov_base = data, .iov_len = size};
    w->batch_end = offset + size;
    return SW_OK;
}

static sw_status write_edge(writer *w, uint8_t *data, size_t size, uint64_t offset, sw_error *err)
{
    struct iovec part = {.iov_base = data, .iov_len = size};
    if (size == 0)
        return SW_OK;
    if (w->edge_fd < 0)
        SW_TRY(sw_file_open_write(w->path, false, &w->edge_fd, err));
    return sw_file_write_at(w->edge_fd, w->path, &part, 1, offset, err);
}

static sw_status write_range(writer *w, const sw_save_range *range, uint8_t *slot, sw_error *err)
{
    const size_t page = sw_file_page_bytes();
    uint8_t *data = slot + range->at;
    size_t size = range->size_bytes, head = (size_t)(-range->offset % page);
    SW_TRY(open_file(w, range->file, err));
    if (!w->is_direct)
        return write_later(w, data, size, range->offset, err);
    if (head + page > size) /* no whole page */
        return write_edge(w, data, size, range->offset, err);
    size_t inside = (size - head) / page * page;
    SW_TRY(write_edge(w, data, head, range->offset, err));
    SW_TRY(write_later(w, data + head, inside, range->offset + head, err));
    return write_edge(w, data + head + inside, size - head - inside, range->offset + head + inside,
                      err);
}

static sw_status write_run(writer *w, const sw_save_chunk *first, size_t count, bool is_live,
                           sw_error *err)
{
    for (size_t i = 0; i < count; ++i)
        for (uint32_t r = 0; r < first[i].range_count; ++r)
            SW_TRY(
                write_range(w, &first[i].ranges[r], is_live ? w->bounce[i] : first[i].slot, err));
    return flush_batch(w, err); /* the caller returns the slots */
}

/* Return the time at which the next run may start under the bandwidth limit. */
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

static sw_status finish_run(writer *w, sw_save_chunk *first, size_t count, sw_error *err)
{
    sw_saver *saver = w->saver;
    uint64_t bytes = 0;
    pthread_mutex_lock(&saver->mutex);
    for (size_t i = 0; i < count; ++i) {
        bytes += first[i].size_bytes;
        first[i].state = SW_CHUNK_WRITTEN;
        if (first[i].slot)
            sw_stage_give(&saver->stage, first[i].slot);
        first[i].slot = NULL;
    }
    saver->bytes_written += bytes;
    saver->direct_bytes += w->direct_bytes;
    w->direct_bytes = 0;
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
        sw_save_chunk *first = NULL;
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
        SW_TRY(write_run(w, first, count, is_live, err));
        SW_TRY(finish_run(w, first, count, err));
    }
}

sw_status sw_save_write(sw_saver *saver, bool is_helper, sw_error *err)
{
    writer w = {.saver = saver, .is_helper = is_helper, .fd = -1, .edge_fd = -1};
    sw_status status = write_all(&w, err);
    if (w.edge_fd >= 0)
        close(w.edge_fd);
    if (w.fd >= 0)
        close(w.fd); /* after an error that is already recorded */
    give_bounce(&w);
    return status;
}
