/* save_sample.c - detect whether a chunk's bytes have changed since a lazy save began.
 *
 * Idea: begin() samples (sample.h) each live chunk's part of each tensor; save_snapshot.c samples
 * the copy again. If the samples differ, memory was written to without protect(), and chunks copied
 * earlier hold the old bytes. The save then fails and names the tensor. Chunks that begin() copies
 * need no sample. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "checkpoint/safetensors.h"
#include "checkpoint/sample.h"
#include "checkpoint/save_job.h"

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
    if (saver->sample_count == saver->sample_room) {
        size_t room = 2 * saver->sample_room + 1024;
        uint32_t *larger = realloc(saver->samples, room * sizeof *larger);
        pass->has_failed = !larger;
        if (!larger)
            return;
        saver->samples = larger;
        saver->sample_room = room;
    }
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
