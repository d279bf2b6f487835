/* read.c - read ranges of a checkpoint into memory with several threads.
 *
 * The work is cut into units: the wanted blocks of one window of 1 MiB of a file. Threads take
 * units in order, so that some wait for the disk while others checksum and copy, and the disk sees
 * one ascending stream. No two units read the same block.
 *
 * A thread reads a unit into a huge page, checks it in the CPU cache and copies it from there. A
 * read that bypasses the page cache costs one request per page of memory: many for small pages, one
 * for a huge page (0.41 s against 0.5 to 1.3 s a GiB on a virtual disk). The page cache copies
 * anyway, so a block that is wanted whole is read through it to its destination and checked there.
 *
 * If ranges have `undo`, a unit is copied to its destinations only after all of it was checked, and
 * the bytes that it replaces are saved. */
#include "checkpoint/read.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/crc32c.h"
#include "platform/file.h"
#include "platform/memory.h"
#include "platform/thread.h"

enum {
    UNIT_BLOCKS = 1, /* few bytes in flight, so that they stay in the CPU cache */
    UNIT_BYTES = UNIT_BLOCKS * SW_BLOCK_BYTES,
    HUGE_PAGE_BYTES = 2 << 20
};

typedef struct load_unit {
    size_t first_range; /* the first range that touches it */
    uint64_t window;    /* number in the file, in UNIT_BYTES */
    bool is_kept;       /* the bytes that its ranges replace are in their `undo` */
} load_unit;

typedef struct loader {
    const char *folder;
    const sw_manifest *manifest;
    const sw_load_range *ranges;
    size_t range_count;
    const sw_load_options *options;
    load_unit *units; /* owned */
    size_t unit_count, first_unit;
    size_t buffers_bytes;

    pthread_mutex_t mutex; /* guards the following fields */
    uint8_t *buffers;      /* owned; UNIT_BYTES a thread, in huge pages; NULL until the first use */
    size_t buffers_used;
    size_t next;      /* next unit, in order */
    size_t failed_at; /* SIZE_MAX: none failed */
    sw_error failure;
} loader;

typedef struct worker { /* a thread's state */
    loader *job;
    const sw_manifest_file *file; /* open, or NULL */
    char path[SW_PATH_BYTES];
    int fd, direct_fd; /* direct_fd -1: only through the page cache */
    uint8_t *buffer;   /* in job->buffers; NULL until the first use */
} worker;

/* True if range `i` may have bytes in `unit`: ranges ascend. */
static bool reaches(const loader *job, const load_unit *unit, size_t i)
{
    return i < job->range_count && job->ranges[i].file == job->ranges[unit->first_range].file &&
           job->ranges[i].begin < (unit->window + 1) * UNIT_BYTES;
}

/* Clip the range to the unit. */
static void clip(const sw_load_range *range, const load_unit *unit, uint64_t *begin, uint64_t *end)
{
    uint64_t low = unit->window * UNIT_BYTES, high = low + UNIT_BYTES,
             stop = range->begin + range->size_bytes;
    *begin = range->begin > low ? range->begin : low;
    *end = stop < high ? stop : high;
}

static void keep_unit(const loader *job, load_unit *unit)
{
    for (size_t i = unit->first_range; reaches(job, unit, i); ++i) {
        const sw_load_range *range = &job->ranges[i];
        uint64_t begin, end;
        clip(range, unit, &begin, &end);
        if (range->undo && begin < end)
            memcpy(range->undo + (begin - range->begin),
                   range->destination + (begin - range->begin), (size_t)(end - begin));
    }
    unit->is_kept = true;
}

/* Return the destination to which a block can be read directly, because one range wants all of it.
 * NULL: none. */
static uint8_t *own_place(const loader *job, const load_unit *unit, uint64_t begin, size_t size)
{
    for (size_t i = unit->first_range; reaches(job, unit, i); ++i) {
        const sw_load_range *range = &job->ranges[i];
        if (range->begin <= begin && begin + size <= range->begin + range->size_bytes)
            return range->destination && !range->undo ? range->destination + (begin - range->begin)
                                                      : NULL;
    }
    return NULL;
}

static void close_file(worker *w)
{
    if (w->fd >= 0)
        close(w->fd);
    if (w->direct_fd >= 0)
        close(w->direct_fd);
    w->fd = w->direct_fd = -1;
    w->file = NULL;
}

static sw_status open_file(worker *w, const sw_manifest_file *file, sw_error *err)
{
    if (w->file == file)
        return SW_OK;
    close_file(w);
    SW_TRY(sw_checkpoint_open_file(w->job->folder, file, false, w->path, &w->fd, err));
    if (w->job->options->is_direct && !file->is_in_memory &&
        sw_checkpoint_open_file(w->job->folder, file, true, w->path, &w->direct_fd, NULL) ==
            SW_OK &&
        !sw_file_is_direct(w->direct_fd)) {
        close(w->direct_fd);
        w->direct_fd = -1;
    }
    /* Hints. A header's read-ahead would pull the reads of its neighbours into the cache. */
    bool is_stream = w->job->options->thread_count > 1 && w->direct_fd < 0;
    (void)posix_fadvise(w->fd, 0, 0, is_stream ? POSIX_FADV_SEQUENTIAL : POSIX_FADV_RANDOM);
    w->file = file;
    return SW_OK;
}

static sw_status check_block(const worker *w, const uint8_t *data, uint64_t number, size_t size,
                             sw_error *err)
{
    uint64_t offset = number * SW_BLOCK_BYTES;
    uint32_t found = sw_crc32c(0, data, size), stated = w->file->crcs[number];
    if (found != stated)
        SW_FAIL(err, SW_E_INVALID,
                "'%s' was changed or did not survive: block %" PRIu64 " (bytes %" PRIu64
                " to %" PRIu64 ") has checksum %08x, the manifest says %08x",
                w->path, number, offset, offset + size, found, stated);
    return SW_OK;
}

/* Take this thread's buffer: two share a huge page, which the system clears at its first use. */
static sw_status take_buffer(worker *w, sw_error *err)
{
    loader *job = w->job;
    sw_status status = SW_OK;
    if (w->buffer)
        return SW_OK;
    pthread_mutex_lock(&job->mutex);
    if (!job->buffers)
        status = sw_pages_map(job->buffers_bytes, &job->buffers, err);
    if (status == SW_OK)
        w->buffer = job->buffers + job->buffers_used++ * UNIT_BYTES;
    pthread_mutex_unlock(&job->mutex);
    return status;
}

/* Read without the page cache, except the last bytes of a file that fill no page. */
static sw_status read_direct(worker *w, uint8_t *data, uint64_t offset, size_t size, sw_error *err)
{
    size_t tail = size % SW_FILE_ALIGNMENT_BYTES;
    if (size > tail)
        SW_TRY(sw_file_read_at(w->direct_fd, w->path, data, size - tail, offset, err));
    return tail ? sw_file_read_at(w->fd, w->path, data + size - tail, tail, offset + size - tail,
                                  err)
                : SW_OK;
}

/* Copy from the thread's buffer to the destinations, except blocks that were read into them. */
static void place_unit(const worker *w, load_unit *unit, const bool *is_placed)
{
    const loader *job = w->job;
    keep_unit(job, unit);
    for (size_t i = unit->first_range; reaches(job, unit, i); ++i) {
        const sw_load_range *range = &job->ranges[i];
        uint64_t at, end;
        clip(range, unit, &at, &end);
        for (uint64_t next; range->destination && at < end; at = next) {
            uint64_t block = at / SW_BLOCK_BYTES, stop = (block + 1) * SW_BLOCK_BYTES;
            next = stop < end ? stop : end;
            if (!is_placed[block % UNIT_BLOCKS])
                memcpy(range->destination + (at - range->begin), w->buffer + at % UNIT_BYTES,
                       (size_t)(next - at));
        }
    }
}

static sw_status load_one(worker *w, load_unit *unit, sw_error *err)
{
    const loader *job = w->job;
    bool is_placed[UNIT_BLOCKS] = {false};
    uint64_t first = UINT64_MAX, stop = 0;
    SW_TRY(open_file(w, &job->manifest->files[job->ranges[unit->first_range].file], err));
    for (size_t i = unit->first_range; reaches(job, unit, i); ++i) {
        uint64_t begin, end;
        clip(&job->ranges[i], unit, &begin, &end);
        if (begin < end && first == UINT64_MAX)
            first = begin / SW_BLOCK_BYTES;
        if (begin < end)
            stop = end;
    }
    uint64_t begin = first * SW_BLOCK_BYTES,
             end = (stop + SW_BLOCK_BYTES - 1) / SW_BLOCK_BYTES * SW_BLOCK_BYTES;
    if (end > w->file->size_bytes)
        end = w->file->size_bytes;
    bool is_direct = w->direct_fd >= 0 && !sw_file_is_cached(w->fd, begin, (size_t)(end - begin));
    if (is_direct) {
        SW_TRY(take_buffer(w, err));
        SW_TRY(read_direct(w, w->buffer + begin % UNIT_BYTES, begin, (size_t)(end - begin), err));
    }
    for (uint64_t b = first, at = begin; at < end; ++b, at += SW_BLOCK_BYTES) {
        size_t size = (size_t)(end - at < SW_BLOCK_BYTES ? end - at : SW_BLOCK_BYTES);
        uint8_t *place = is_direct ? NULL : own_place(job, unit, at, size);
        if (!place)
            SW_TRY(take_buffer(w, err));
        uint8_t *to = place ? place : w->buffer + at % UNIT_BYTES;
        is_placed[b % UNIT_BLOCKS] = place != NULL;
        if (!is_direct)
            SW_TRY(sw_file_read_at(w->fd, w->path, to, size, w->file->memory_begin + at, err));
        SW_TRY(check_block(w, to, b, size, err));
    }
    place_unit(w, unit, is_placed);
    return SW_OK;
}

/* Take the next unit in order; false: none is left, or a thread failed. */
static bool take_unit(loader *job, size_t *turn)
{
    pthread_mutex_lock(&job->mutex);
    bool found = job->next < job->unit_count && job->failed_at == SIZE_MAX;
    if (found)
        *turn = job->next++;
    pthread_mutex_unlock(&job->mutex);
    return found;
}

/* Record the first of several failures in unit order. Threads finish the earlier units that they
 * have taken. */
static void record_failure(loader *job, size_t turn, const sw_error *why)
{
    pthread_mutex_lock(&job->mutex);
    if (turn < job->failed_at) {
        job->failed_at = turn;
        job->failure = *why;
    }
    pthread_mutex_unlock(&job->mutex);
}

static void *work(void *context)
{
    loader *job = context;
    worker w = {.job = job, .fd = -1, .direct_fd = -1};
    size_t turn;
    while (take_unit(job, &turn)) {
        sw_error why = {0};
        if (load_one(&w, &job->units[(job->first_unit + turn) % job->unit_count], &why) != SW_OK)
            record_failure(job, turn, &why);
    }
    close_file(&w);
    return NULL;
}

static sw_status check_ranges(const loader *job, sw_error *err)
{
    for (size_t i = 0; i < job->range_count; ++i) {
        const sw_load_range *range = &job->ranges[i];
        const sw_load_range *before = i && range[-1].file == range->file ? &range[-1] : NULL;
        uint64_t end = 0, after = before ? before->begin + before->size_bytes : 0;
        if (range->file >= job->manifest->file_count || (i && range[-1].file > range->file))
            SW_FAIL(err, SW_E_INVALID,
                    "a load's files must ascend in [0, %zu); of range number %zu it is %zu",
                    job->manifest->file_count, i, range->file);
        const sw_manifest_file *file = &job->manifest->files[range->file];
        if (range->begin < after || __builtin_add_overflow(range->begin, range->size_bytes, &end) ||
            end > file->size_bytes)
            SW_FAIL(err, SW_E_INVALID,
                    "read of '%s': ranges must ascend inside its %" PRIu64
                    " bytes; number %zu is [%" PRIu64 ", +%zu)",
                    file->path, file->size_bytes, i, range->begin, range->size_bytes);
    }
    return SW_OK;
}

static sw_status list_units(loader *job, sw_error *err)
{
    size_t most = 0;
    for (size_t i = 0; i < job->range_count; ++i)
        most += job->ranges[i].size_bytes / UNIT_BYTES + 2;
    job->units = malloc((most + 1) * sizeof *job->units);
    if (!job->units)
        SW_FAIL(err, SW_E_MEMORY, "no memory to load %zu ranges", job->range_count);
    for (size_t i = 0; i < job->range_count; ++i) {
        const sw_load_range *range = &job->ranges[i];
        uint64_t end = range->begin + range->size_bytes;
        for (uint64_t window = range->begin / UNIT_BYTES; window * UNIT_BYTES < end; ++window) {
            const load_unit *last = job->unit_count ? &job->units[job->unit_count - 1] : NULL;
            if (range->size_bytes == 0 || (last && last->window == window &&
                                           job->ranges[last->first_range].file == range->file))
                continue;
            job->units[job->unit_count++] = (load_unit){.first_range = i, .window = window};
        }
    }
    if (job->options->turn_count)
        job->first_unit = job->unit_count * job->options->turn / job->options->turn_count;
    return SW_OK;
}

static sw_status run(loader *job, sw_error *err)
{
    sw_thread threads[SW_LOAD_THREADS_MAX] = {0};
    int wanted = job->options->thread_count < SW_LOAD_THREADS_MAX ? job->options->thread_count
                                                                  : SW_LOAD_THREADS_MAX;
    if (wanted < 1)
        wanted = 1;
    job->buffers_bytes =
        ((size_t)wanted * UNIT_BYTES + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    pthread_mutex_init(&job->mutex, NULL);
    for (int t = 1; t < wanted && (size_t)t < job->unit_count; ++t)
        if (sw_thread_start(&threads[t], work, job, "sw-load", NULL) != SW_OK)
            break; /* the threads that exist do all of the work */
    work(job);
    for (int t = 1; t < wanted; ++t)
        sw_thread_join(&threads[t]);
    sw_memory_unmap(job->buffers, job->buffers_bytes);
    pthread_mutex_destroy(&job->mutex);
    if (job->failed_at == SIZE_MAX)
        return SW_OK;
    if (err)
        *err = job->failure;
    return job->failure.status;
}

/* Fill `undo` with all replaced bytes, regardless of how much was loaded. */
static void keep_the_rest(loader *job)
{
    for (size_t u = 0; u < job->unit_count; ++u)
        if (!job->units[u].is_kept)
            keep_unit(job, &job->units[u]);
    for (size_t i = 0; !job->units && i < job->range_count; ++i)
        if (job->ranges[i].undo)
            memcpy(job->ranges[i].undo, job->ranges[i].destination, job->ranges[i].size_bytes);
}

sw_status sw_checkpoint_load(const char *folder, const sw_manifest *manifest,
                             const sw_load_range *ranges, size_t count,
                             const sw_load_options *options, sw_error *err)
{
    loader job = {.folder = folder,
                  .manifest = manifest,
                  .ranges = ranges,
                  .range_count = count,
                  .options = options,
                  .failed_at = SIZE_MAX};
    sw_status status = check_ranges(&job, err);
    if (status == SW_OK)
        status = list_units(&job, err);
    if (status == SW_OK)
        status = run(&job, err);
    if (status != SW_OK)
        keep_the_rest(&job);
    free(job.units);
    return status;
}

/* ---- simple reads: each is a load on the caller's thread alone ---- */

static const sw_load_options ALONE = {.thread_count = 1};

sw_status sw_checkpoint_check_values(const char *folder, const sw_manifest_file *file,
                                     sw_error *err)
{
    if (file->size_bytes > SW_VALUES_MAX_BYTES)
        SW_FAIL(err, SW_E_INVALID,
                "'%.300s/%.120s' has %" PRIu64 " bytes; a file of values has at most %d", folder,
                file->path, file->size_bytes, SW_VALUES_MAX_BYTES);
    return SW_OK;
}

sw_status sw_checkpoint_read(const char *folder, const sw_manifest *manifest, const char *path,
                             const sw_read_range *ranges, size_t range_count, sw_error *err)
{
    const sw_manifest_file *file = sw_manifest_find(manifest, path);
    if (!file)
        SW_FAIL(err, SW_E_INVALID, "the checkpoint '%.300s' has no file '%.120s'", folder, path);
    sw_load_range *loads = calloc(range_count + 1, sizeof *loads);
    if (!loads)
        SW_FAIL(err, SW_E_MEMORY, "no memory to read %zu ranges of '%s'", range_count, path);
    for (size_t i = 0; i < range_count; ++i)
        loads[i] = (sw_load_range){.file = (size_t)(file - manifest->files),
                                   .begin = ranges[i].begin,
                                   .size_bytes = ranges[i].size_bytes,
                                   .destination = ranges[i].destination};
    sw_status status = sw_checkpoint_load(folder, manifest, loads, range_count, &ALONE, err);
    free(loads);
    return status;
}
