/* save_device.c - the caller's thread copies chunks from a GPU, one slot of the device stage at a
 * time. Helping threads copy from each slot, as in sw_save_copy.
 *
 * A slot is an image of its chunks: a chunk's bytes on the device go to their place in the image,
 * so that filling the chunk needs no second list. */
#include <stdlib.h>
#include <string.h>

#include "checkpoint/save_job.h"

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
    if (list->count == list->room) {
        size_t room = 2 * list->room + 16;
        sw_device_stage_copy *larger = realloc(list->copies, room * sizeof *larger);
        list->has_failed = !larger;
        if (!larger)
            return;
        list->copies = larger;
        list->room = room;
    }
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
