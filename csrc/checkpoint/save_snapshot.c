/* save_snapshot.c - the caller's thread and its helpers copy live chunks to slots of staging: from
 * its memory, then from a GPU's. */
#include <stdlib.h>

#include "base/bytes.h"
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

/* ---- from a GPU's memory ---- */

/* The caller's thread copies chunks from a GPU, one slot of the device stage at a time. Helping
 * threads copy from each slot, as in sw_save_copy.
 *
 * A slot is an image of its chunks: a chunk's bytes on the device go to their place in the image,
 * so that filling the chunk needs no second list. */

typedef struct copy_list {
    sw_device_stage_copy *copies; /* owned */
    size_t count, room;
    size_t at; /* offset of the chunk in its slot */
    bool has_failed;
} copy_list;

typedef struct down_pass {
    sw_saver *saver;
    sw_save_claim *claim;
    size_t chunks_a_slot;
} down_pass;

static void list_span(void *context, sw_save_span span)
{
    copy_list *list = context;
    if (!span.is_on_device || list->has_failed)
        return;
    sw_device_stage_copy *copies =
        sw_grown(list->copies, &list->room, list->count, sizeof *copies, 16);
    list->has_failed = !copies;
    if (!copies)
        return;
    list->copies = copies;
    list->copies[list->count++] =
        (sw_device_stage_copy){span.data, list->at + span.at, span.size_bytes};
}

/* Return the chunks of batch `number` as a separate claim that borrows the lists of the whole
 * claim. */
static sw_save_claim chunks_of(const down_pass *pass, size_t number)
{
    const sw_save_claim *whole = pass->claim;
    size_t first = number * pass->chunks_a_slot, left = whole->count - first;
    return (sw_save_claim){.wanted = whole->wanted + first,
                           .slots = whole->slots + first,
                           .count = left < pass->chunks_a_slot ? left : pass->chunks_a_slot};
}

static void copy_batch(void *context, size_t number, const uint8_t *memory)
{
    const down_pass *pass = context;
    sw_saver *saver = pass->saver;
    sw_save_claim chunks = chunks_of(pass, number);
    for (size_t i = 0; i < chunks.count; ++i)
        saver->chunks[chunks.wanted[i]].image = memory ? memory + i * SW_BLOCK_BYTES : NULL;
    sw_save_copy(saver, &chunks);
    pass->claim->done += chunks.count;
}

static void give_back(sw_saver *saver, const sw_save_claim *claim)
{
    pthread_mutex_lock(&saver->mutex);
    for (size_t i = claim->done; i < claim->count; ++i)
        if (claim->slots[i])
            sw_stage_give(&saver->stage, claim->slots[i]);
    pthread_mutex_unlock(&saver->mutex);
}

static sw_status list_batch(const down_pass *pass, size_t number, copy_list *list,
                            sw_device_stage_batch *batch, sw_error *err)
{
    sw_save_claim chunks = chunks_of(pass, number);
    batch->first = list->count;
    for (size_t i = 0; i < chunks.count; ++i) {
        list->at = i * SW_BLOCK_BYTES;
        sw_save_walk(&pass->saver->chunks[chunks.wanted[i]], list_span, list);
    }
    if (list->has_failed)
        SW_FAIL(err, SW_E_MEMORY, "no memory to list %zu copies of a save", list->count);
    batch->count = list->count - batch->first;
    return SW_OK;
}

sw_status sw_save_copy_down(sw_saver *saver, sw_save_claim *claim, const sw_save_request *request,
                            sw_error *err)
{
    down_pass pass = {.saver = saver,
                      .claim = claim,
                      .chunks_a_slot = sw_device_stage_slot_bytes(request->stage) / SW_BLOCK_BYTES};
    copy_list list = {0};
    size_t count = (claim->count + pass.chunks_a_slot - 1) / pass.chunks_a_slot;
    sw_device_stage_batch *batches = calloc(count + 1, sizeof *batches);
    sw_status status = SW_OK;
    if (!batches)
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory to list %zu batches", count);
    for (size_t b = 0; b < count && status == SW_OK; ++b)
        status = list_batch(&pass, b, &list, &batches[b], err);
    sw_device_stage_work work = {.copies = list.copies,
                                 .batches = batches,
                                 .batch_count = count,
                                 .consume = copy_batch,
                                 .context = &pass};
    if (status == SW_OK)
        status =
            sw_device_stage_run(request->stage, &work, request->user, request->timeout_ns, err);
    if (status != SW_OK)
        give_back(saver, claim);
    free(batches);
    free(list.copies);
    return status;
}
