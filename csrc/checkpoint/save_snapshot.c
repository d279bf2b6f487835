/* save_snapshot.c - the caller's thread and its helpers copy live chunks to slots of staging. */
#include <stdlib.h>

#include "checkpoint/save_job.h"
#include "kernels/crc32c.h"

typedef struct chunk_filling {
    const sw_saver *saver;
    const sw_save_chunk *chunk;
    uint8_t *destination; /* a slot; NULL: the saver's image */
} chunk_filling;

/* Return the address of a span: in its slot, or in the image at its file offset. */
static uint8_t *place_of(const chunk_filling *filling, const sw_save_span *span)
{
    if (filling->destination)
        return filling->destination + span->at;
    uint64_t block = sw_save_block_of(filling->saver, filling->chunk, span->range);
    uint64_t in_block = span->range->offset % SW_BLOCK_BYTES + (span->at - span->range->at);
    return filling->saver->image + block * SW_BLOCK_BYTES + in_block;
}

static void fill_span(void *context, sw_save_span span)
{
    const chunk_filling *filling = context;
    const uint8_t *from = span.is_on_device ? filling->chunk->image + span.at : span.data;
    uint32_t before = span.at == span.range->at ? 0 : span.range->crc;
    span.range->crc = sw_crc32c_copy(before, place_of(filling, &span), from, span.size_bytes);
}

void sw_save_fill(sw_saver *saver, sw_save_chunk *chunk, uint8_t *destination)
{
    sw_error why;
    chunk_filling filling = {.saver = saver, .chunk = chunk, .destination = destination};
    sw_save_walk(chunk, fill_span, &filling);
    if (sw_save_compare_sample(saver, chunk, destination, &why) != SW_OK)
        sw_save_record_failure(saver, &why);
}

/* Mark the wanted live chunks as being copied; put their indices into `wanted`. */
static size_t claim_live_locked(sw_saver *saver, bool eager_only, size_t *wanted)
{
    size_t count = 0;
    for (size_t i = 0; i < saver->chunk_count; ++i) {
        sw_save_chunk *chunk = &saver->chunks[i];
        if (chunk->state == SW_CHUNK_LIVE && (!eager_only || chunk->ranges[0].is_eager)) {
            chunk->state = SW_CHUNK_COPYING;
            wanted[count++] = i;
        }
    }
    return count;
}

void sw_save_claim_fini(sw_save_claim *claim)
{
    free(claim->wanted);
    free(claim->slots);
    *claim = (sw_save_claim){0};
}

sw_status sw_save_claim_live(sw_saver *saver, bool eager_only, sw_save_claim *claim, sw_error *err)
{
    sw_status status = SW_OK;
    pthread_mutex_lock(&saver->mutex);
    size_t room = saver->chunk_count + 1;
    sw_save_claim made = {.wanted = malloc(room * sizeof *made.wanted),
                          .slots = calloc(room, sizeof *made.slots)};
    if (made.wanted && made.slots)
        made.count = claim_live_locked(saver, eager_only, made.wanted);
    else
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory to stage %zu chunks", room);
    if (made.count && !saver->image)
        status = sw_stage_take(&saver->stage, made.count, made.slots, err);
    pthread_mutex_unlock(&saver->mutex);
    if (status == SW_OK)
        *claim = made;
    else
        sw_save_claim_fini(&made); /* the chunks stay marked: the caller ends the save */
    return status;
}

/* Copy the claim's next chunks, releasing the mutex meanwhile; false: none is left to begin. */
static bool copy_some_locked(sw_saver *saver, sw_save_claim *claim)
{
    size_t begin = claim->next, left = claim->count - begin;
    size_t end = begin + (left < SW_SAVE_COPY_CHUNKS ? left : SW_SAVE_COPY_CHUNKS);
    if (left == 0)
        return false;
    claim->next = end;
    pthread_mutex_unlock(&saver->mutex);
    for (size_t i = begin; i < end; ++i)
        sw_save_fill(saver, &saver->chunks[claim->wanted[i]], claim->slots[i]);
    pthread_mutex_lock(&saver->mutex);
    for (size_t i = begin; i < end; ++i) {
        sw_save_chunk *chunk = &saver->chunks[claim->wanted[i]];
        chunk->slot = claim->slots[i];
        chunk->state = SW_CHUNK_STAGED;
    }
    claim->done += end - begin;
    pthread_cond_broadcast(&saver->changed);
    return true;
}

bool sw_save_help_copy_locked(sw_saver *saver)
{
    return saver->claim && copy_some_locked(saver, saver->claim);
}

void sw_save_copy(sw_saver *saver, sw_save_claim *claim)
{
    pthread_mutex_lock(&saver->mutex);
    saver->claim = claim;
    pthread_cond_broadcast(&saver->changed);
    while (copy_some_locked(saver, claim))
        ;
    while (claim->done < claim->count)
        pthread_cond_wait(&saver->changed, &saver->mutex);
    saver->claim = NULL;
    pthread_mutex_unlock(&saver->mutex);
}

void sw_save_await_copies(sw_saver *saver)
{
    pthread_mutex_lock(&saver->mutex);
    while (saver->copying_count > 0)
        pthread_cond_wait(&saver->changed, &saver->mutex);
    pthread_mutex_unlock(&saver->mutex);
}
