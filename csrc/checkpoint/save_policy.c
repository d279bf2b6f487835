/* save_policy.c - what decides over a save while it runs: this rank's first failure, a change of
 * live memory, files that are late; and staging that is touched before a save. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/bytes.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/save_job.h"
#include "kernels/crc32c.h"
#include "platform/clock.h"
#include "platform/memory.h"

/* ---- whether it goes on: this rank's first failure ends it ---- */

void sw_save_record_failure(sw_saver *saver, const sw_error *why)
{
    pthread_mutex_lock(&saver->mutex);
    if (saver->failure.status == SW_OK)
        saver->failure = *why;
    pthread_cond_broadcast(&saver->changed);
    pthread_mutex_unlock(&saver->mutex);
}

sw_status sw_save_check(sw_saver *saver, sw_error *err)
{
    pthread_mutex_lock(&saver->mutex);
    sw_status status = saver->failure.status;
    if (status != SW_OK && err)
        *err = saver->failure;
    pthread_mutex_unlock(&saver->mutex);
    return status;
}

uint32_t sw_sample_crc32c(const void *data, size_t size_bytes, size_t stride_bytes)
{
    const uint8_t *bytes = data;
    uint32_t crc = 0;
    if (size_bytes <= 2 * SW_SAMPLE_BYTES)
        return sw_crc32c(0, data, size_bytes);
    size_t last = size_bytes - SW_SAMPLE_BYTES;
    for (size_t at = 0; at < last; at += stride_bytes)
        crc = sw_crc32c(crc, bytes + at, SW_SAMPLE_BYTES);
    return sw_crc32c(crc, bytes + last, SW_SAMPLE_BYTES);
}

/* ---- whether memory has changed ---- */

/* Detect whether a chunk's bytes have changed since a lazy save began.
 *
 * Idea: begin() samples each live chunk's part of each tensor; save_snapshot.c samples
 * the copy again. If the samples differ, memory was written to without protect(), and chunks copied
 * earlier hold the old bytes. The save then fails and names the tensor. Chunks that begin() copies
 * need no sample. */

enum { STRIDE_BYTES = 256 << 10 };

typedef struct sampling {
    sw_saver *saver;
    bool has_failed; /* no memory */
} sampling;

static void sample_span(void *context, sw_save_span span)
{
    sampling *pass = context;
    sw_saver *saver = pass->saver;
    if (span.is_header || pass->has_failed)
        return;
    uint32_t *samples =
        sw_grown(saver->samples, &saver->sample_room, saver->sample_count, sizeof *samples, 1024);
    pass->has_failed = !samples;
    if (!samples)
        return;
    saver->samples = samples;
    saver->samples[saver->sample_count++] =
        sw_sample_crc32c(span.data, span.size_bytes, STRIDE_BYTES);
}

sw_status sw_save_take_samples(sw_saver *saver, sw_error *err)
{
    sampling pass = {.saver = saver};
    saver->sample_count = 0;
    for (size_t i = 0; i < saver->chunk_count && !pass.has_failed; ++i) {
        sw_save_chunk *chunk = &saver->chunks[i];
        if (chunk->state != SW_CHUNK_LIVE)
            continue;
        chunk->sample_base = saver->sample_count;
        sw_save_walk(chunk, sample_span, &pass);
        chunk->sample_count = (uint32_t)(saver->sample_count - chunk->sample_base);
    }
    if (pass.has_failed)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the samples of %zu chunks", saver->chunk_count);
    return SW_OK;
}

typedef struct comparison {
    const uint8_t *copy;      /* the chunk's copy */
    const uint32_t *expected; /* sample of the next span */
    const sw_plan_file *file; /* place of the change */
    uint64_t changed_at;
    bool is_changed;
} comparison;

static void compare_span(void *context, sw_save_span span)
{
    comparison *pass = context;
    if (span.is_header || pass->is_changed)
        return;
    pass->is_changed =
        sw_sample_crc32c(pass->copy + span.at, span.size_bytes, STRIDE_BYTES) != *pass->expected++;
    pass->file = span.range->file;
    pass->changed_at = span.range->offset + (span.at - span.range->at);
}

/* Fail with the name of the tensor at offset `at` of a file, or with the offset if the header is
 * gone. */
static void fail_with_name(const sw_plan_file *file, uint64_t at, sw_error *err)
{
    sw_safetensors header = {0};
    char place[256];
    const char *name = place;
    snprintf(place, sizeof place, "byte %" PRIu64 " of %.200s", at, file->path);
    if (file->header && sw_safetensors_read((const uint8_t *)file->header, file->header_bytes,
                                            file->size_bytes, file->path, &header, NULL) == SW_OK)
        for (size_t i = 0; i < header.entry_count; ++i)
            if (header.entries[i].begin <= at &&
                at < header.entries[i].begin + header.entries[i].size_bytes)
                name = header.entries[i].name;
    (void)sw_error_set(err, SW_E_STATE, -1,
                       "'%.200s' was changed before the optimizer's step, while it was being "
                       "saved: use snapshot='copy'",
                       name);
    sw_safetensors_fini(&header);
}

sw_status sw_save_compare_sample(const sw_saver *saver, const sw_save_chunk *chunk,
                                 const uint8_t *copy, sw_error *err)
{
    if (chunk->sample_count == 0)
        return SW_OK;
    comparison pass = {.copy = copy, .expected = saver->samples + chunk->sample_base};
    sw_save_walk(chunk, compare_span, &pass);
    if (!pass.is_changed)
        return SW_OK;
    fail_with_name(pass.file, pass.changed_at, err);
    return err ? err->status : SW_E_STATE;
}

/* ---- files of other ranks, which a network file system may show with a delay ---- */

enum { LATE_S = 10 };

/* True if the name may exist but be hidden for a moment by a network file system's caches. */
static bool is_of_a_moment(const sw_error *why)
{
    return why->status == SW_E_OS &&
           (why->detail == ENOENT || why->detail == ESTALE || why->detail == EIO);
}

sw_status sw_save_open_late(sw_saver *saver, const char *path, bool direct, bool is_first_thread,
                            int *fd, sw_error *err)
{
    int64_t until_ns = sw_clock_now_ns() + LATE_S * INT64_C(1000000000);
    for (sw_error why = {0}, verdict;;) {
        sw_status status = sw_file_open_write(path, direct, fd, &why);
        if (status == SW_OK)
            return SW_OK;
        bool is_over =
            sw_save_check(saver, NULL) != SW_OK ||
            (is_first_thread && sw_channel_is_decided(saver->channel, saver->number, &verdict));
        if (!is_of_a_moment(&why) || is_over || saver->channel->rank == 0 ||
            sw_clock_now_ns() > until_ns)
            return sw_error_pass(err, &why);
        sw_thread_sleep_ns(SW_SAVE_LOOK_NS);
    }
}

static sw_status open_whole(sw_save_late_file *file, sw_error *err)
{
    uint64_t size_bytes = 0;
    SW_TRY(sw_file_open_read(file->path, false, &file->fd, &size_bytes, err));
    if (size_bytes == file->size_bytes)
        return SW_OK;
    return sw_error_set(err, SW_E_OS, EIO,
                        "'%.300s' has %" PRIu64 " bytes where %" PRIu64 " were written", file->path,
                        size_bytes, file->size_bytes);
}

sw_status sw_save_read_late(sw_saver *saver, sw_save_late_file *file, void *data, size_t size_bytes,
                            uint64_t offset, sw_error *err)
{
    int64_t until_ns = sw_clock_now_ns() + LATE_S * INT64_C(1000000000);
    for (sw_error why = {0};;) {
        sw_status status = file->fd < 0 ? open_whole(file, &why) : SW_OK;
        if (status == SW_OK)
            status = sw_file_read_at(file->fd, file->path, data, size_bytes, offset, &why);
        if (status == SW_OK)
            return SW_OK;
        sw_save_close_late(file);
        if (!is_of_a_moment(&why) || sw_clock_now_ns() > until_ns)
            return sw_error_pass(err, &why);
        SW_TRY(sw_save_check(saver, err));
        sw_thread_sleep_ns(SW_SAVE_LOOK_NS);
    }
}

void sw_save_close_late(sw_save_late_file *file)
{
    if (file->fd >= 0)
        close(file->fd);
    file->fd = -1;
}

/* ---- staging, touched before the first save needs it ---- */

/* The first touch of new memory costs 0.1 to 0.3 s a GiB here, and seconds on a virtual machine
 * with a host that must provide it. A thread of low priority touches 2 MiB at a time, in the order
 * in which saves take slots. (With the lowest priority it starved while training used all cores.) A
 * save that comes earlier uses the touched memory and touches the rest. */

enum { TOUCH_SLOTS = 2 };

/* Return the next slots to touch, of region *index; 0: none. */
static size_t next_cold_locked(const sw_saver *saver, size_t *index)
{
    for (size_t i = 0; i < saver->stage.region_count && !saver->warm_is_over; ++i) {
        const sw_stage_region *region = &saver->stage.regions[i];
        size_t left = region->slot_count - region->touched;
        *index = i;
        if (left > 0)
            return left < TOUCH_SLOTS ? left : TOUCH_SLOTS;
    }
    return 0;
}

static void *warm(void *context)
{
    sw_saver *saver = context;
    size_t index, count;
    sw_thread_lower_priority();
    pthread_mutex_lock(&saver->mutex);
    while ((count = next_cold_locked(saver, &index)) > 0) {
        const sw_stage_region *region = &saver->stage.regions[index];
        uint8_t *base = region->base + region->touched * SW_BLOCK_BYTES;
        pthread_mutex_unlock(&saver->mutex);
        sw_memory_touch(base, count * SW_BLOCK_BYTES);
        pthread_mutex_lock(&saver->mutex);
        saver->stage.regions[index].touched += count;
    }
    saver->warm_is_over = true;
    pthread_mutex_unlock(&saver->mutex);
    return NULL;
}

sw_status sw_saver_warm(sw_saver *saver, uint64_t bytes, sw_error *err)
{
    size_t count = (size_t)((bytes + SW_BLOCK_BYTES - 1) / SW_BLOCK_BYTES);
    pthread_mutex_lock(&saver->mutex);
    bool runs = saver->warm_thread.is_started && !saver->warm_is_over;
    sw_status status = sw_stage_reserve(&saver->stage, count, err);
    pthread_mutex_unlock(&saver->mutex);
    if (status != SW_OK || runs)
        return status;
    sw_thread_join(&saver->warm_thread);
    saver->warm_is_over = false;
    return sw_thread_start(&saver->warm_thread, warm, saver, "sw-warm", err);
}

void sw_save_end_warming(sw_saver *saver)
{
    pthread_mutex_lock(&saver->mutex);
    saver->warm_is_over = true;
    pthread_mutex_unlock(&saver->mutex);
    sw_thread_join(&saver->warm_thread);
}
