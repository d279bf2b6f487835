/* save_snapshot.c - gathers a block from a header and from the ranges of memory that this rank
 * holds. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/save_job.h"
#include "kernels/crc32c.h"

static sw_status list_part(sw_saver *saver, const sw_save_part *part, const uint64_t *owned,
                           size_t count, sw_error *err)
{
    for (size_t i = 0; i < count; ++i) {
        uint64_t number = owned ? owned[i] : i;
        size_t size_bytes;
        sw_save_block *block = &saver->blocks[saver->block_count++];
        *block = (sw_save_block){.part = part};
        block->file = sw_plan_locate(part->plan, number, &block->offset, &size_bytes);
        block->size_bytes = (uint32_t)size_bytes;
        saver->bytes_total += size_bytes;
    }
    for (size_t f = 0; f < part->plan->file_count; ++f)
        SW_TRY(sw_manifest_add_file(&saver->manifest, part->plan->files[f].path,
                                    part->plan->files[f].size_bytes, err));
    return SW_OK;
}

sw_status sw_save_list_blocks(sw_saver *saver, const sw_save_request *request, sw_error *err)
{
    uint64_t *owned = NULL;
    size_t shared = 0, own = request->own.plan ? (size_t)request->own.plan->block_count : 0;
    SW_TRY(sw_plan_owned(request->shared.plan, saver->board->rank, saver->board->world_size, &owned,
                         &shared, err));
    size_t sources = request->shared.source_count + request->own.source_count;
    sw_status status = SW_OK;
    saver->blocks = calloc(shared + own + 1, sizeof *saver->blocks);
    saver->sources = calloc(sources + 1, sizeof *saver->sources);
    if (!saver->blocks || !saver->sources) {
        status =
            sw_error_set(err, SW_E_MEMORY, -1, "no memory for a save of %zu blocks", shared + own);
        goto free_owned;
    }
    if (request->shared.source_count)
        memcpy(saver->sources, request->shared.sources,
               request->shared.source_count * sizeof *saver->sources);
    if (request->own.source_count)
        memcpy(saver->sources + request->shared.source_count, request->own.sources,
               request->own.source_count * sizeof *saver->sources);
    saver->shared_part =
        (sw_save_part){request->shared.plan, saver->sources, request->shared.source_count};
    saver->own_part =
        (sw_save_part){request->own.plan, saver->sources + request->shared.source_count,
                       request->own.source_count};
    SW_TRY_GOTO(status, list_part(saver, &saver->shared_part, owned, shared, err), free_owned);
    if (request->own.plan)
        status = list_part(saver, &saver->own_part, NULL, own, err);
free_owned:
    free(owned);
    return status;
}

/* The first range of `source` that ends after `begin`. */
static const sw_save_source *find_range(const sw_save_part *part, size_t source, uint64_t begin)
{
    size_t low = 0, high = part->source_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const sw_save_source *range = &part->sources[middle];
        if (range->source < source ||
            (range->source == source && range->begin + range->size_bytes <= begin))
            low = middle + 1;
        else
            high = middle;
    }
    return &part->sources[low];
}

/* Whether the ranges hold bytes [begin, begin + size) of `source`. */
static sw_status check_source(const sw_save_part *part, size_t source, uint64_t begin,
                              uint64_t size, int rank, sw_error *err)
{
    const sw_save_source *range = find_range(part, source, begin),
                         *end = part->sources + part->source_count;
    for (; size > 0; ++range) {
        if (range >= end || range->source != source || range->begin > begin)
            SW_FAIL(err, SW_E_STATE,
                    "rank %d does not hold byte %" PRIu64
                    " of tensor number %zu, which lies in a block it writes",
                    rank, begin, source);
        uint64_t left = range->begin + range->size_bytes - begin, piece = left < size ? left : size;
        begin += piece;
        size -= piece;
    }
    return SW_OK;
}

static void walk_source(const sw_save_part *part, size_t source, uint64_t begin, size_t size,
                        size_t at, void (*visit)(void *context, sw_save_span span), void *context)
{
    for (const sw_save_source *range = find_range(part, source, begin); size > 0; ++range) {
        uint64_t left = range->begin + range->size_bytes - begin;
        size_t piece = left < size ? (size_t)left : size;
        visit(context, (sw_save_span){.data = (const uint8_t *)range->data + (begin - range->begin),
                                      .is_on_device = range->is_on_device,
                                      .at = at,
                                      .size_bytes = piece});
        at += piece;
        begin += piece;
        size -= piece;
    }
}

/* Index of the first piece that ends after `offset`. */
static size_t find_piece(const sw_plan *plan, const sw_plan_file *file, uint64_t offset)
{
    size_t low = file->first_piece, high = file->first_piece + file->piece_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (plan->pieces[middle].begin + plan->pieces[middle].size_bytes <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static sw_status check_block(const sw_save_block *block, int rank, sw_error *err)
{
    const sw_plan *plan = block->part->plan;
    uint64_t at = block->offset, end = at + block->size_bytes;
    if (at < block->file->header_bytes)
        at = end < block->file->header_bytes ? end : block->file->header_bytes;
    for (size_t p = find_piece(plan, block->file, at); at < end; ++p) {
        const sw_plan_piece *piece = &plan->pieces[p];
        uint64_t stop =
            piece->begin + piece->size_bytes < end ? piece->begin + piece->size_bytes : end;
        SW_TRY(check_source(block->part, piece->source, at - piece->begin, stop - at, rank, err));
        at = stop;
    }
    return SW_OK;
}

sw_status sw_save_check_blocks(const sw_saver *saver, sw_error *err)
{
    for (size_t i = 0; i < saver->block_count; ++i)
        SW_TRY(check_block(&saver->blocks[i], saver->board->rank, err));
    return SW_OK;
}

void sw_save_walk(const sw_save_block *block, void (*visit)(void *context, sw_save_span span),
                  void *context)
{
    const sw_plan *plan = block->part->plan;
    const sw_plan_file *file = block->file;
    uint64_t at = block->offset, end = at + block->size_bytes;
    if (at < file->header_bytes) {
        size_t size = (size_t)((end < file->header_bytes ? end : file->header_bytes) - at);
        visit(context, (sw_save_span){.data = (const uint8_t *)file->header + at,
                                      .is_header = true,
                                      .size_bytes = size});
        at += size;
    }
    for (size_t p = find_piece(plan, file, at); at < end; ++p) {
        const sw_plan_piece *piece = &plan->pieces[p];
        uint64_t stop =
            piece->begin + piece->size_bytes < end ? piece->begin + piece->size_bytes : end;
        walk_source(block->part, piece->source, at - piece->begin, (size_t)(stop - at),
                    (size_t)(at - block->offset), visit, context);
        at = stop;
    }
}

typedef struct block_filling {
    const uint8_t *image;
    uint8_t *destination;
    uint32_t crc;
} block_filling;

static void fill_span(void *context, sw_save_span span)
{
    block_filling *filling = context;
    const uint8_t *from = span.is_on_device ? filling->image + span.at : span.data;
    filling->crc =
        sw_crc32c_copy(filling->crc, filling->destination + span.at, from, span.size_bytes);
}

void sw_save_fill(sw_saver *saver, sw_save_block *block, uint8_t *destination)
{
    sw_error why;
    block_filling filling = {.image = block->image, .destination = destination};
    sw_save_walk(block, fill_span, &filling);
    block->crc = filling.crc;
    if (sw_save_compare_sample(saver, block, destination, &why) != SW_OK)
        sw_save_record_failure(saver, &why);
}

static bool touches_eager(const sw_saver *saver, const sw_save_block *block, const bool *is_eager)
{
    const sw_plan *plan = block->part->plan;
    if (block->part == &saver->own_part)
        return true;
    size_t end = block->file->first_piece + block->file->piece_count;
    for (size_t p = find_piece(plan, block->file, block->offset);
         p < end && plan->pieces[p].begin < block->offset + block->size_bytes; ++p)
        if (is_eager[plan->pieces[p].source])
            return true;
    return false;
}

/* Marks the live blocks that are wanted as being copied; their indices to `wanted`. */
static size_t claim_live_locked(sw_saver *saver, const bool *is_eager, size_t *wanted)
{
    size_t count = 0;
    for (size_t i = 0; i < saver->block_count; ++i) {
        sw_save_block *block = &saver->blocks[i];
        if (block->state == SW_BLOCK_LIVE && (!is_eager || touches_eager(saver, block, is_eager))) {
            block->state = SW_BLOCK_COPYING;
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

sw_status sw_save_claim_live(sw_saver *saver, const bool *is_eager, sw_save_claim *claim,
                             sw_error *err)
{
    sw_save_claim made = {.wanted = malloc((saver->block_count + 1) * sizeof *made.wanted),
                          .slots = calloc(saver->block_count + 1, sizeof *made.slots)};
    sw_status status = SW_OK;
    if (!made.wanted || !made.slots) {
        sw_save_claim_fini(&made);
        SW_FAIL(err, SW_E_MEMORY, "no memory to stage %zu blocks", saver->block_count);
    }
    pthread_mutex_lock(&saver->mutex);
    made.count = claim_live_locked(saver, is_eager, made.wanted);
    if (!is_eager)
        sw_save_ahead_end_locked(saver, made.count);
    if (made.count)
        status = sw_stage_take(&saver->stage, made.count, made.slots, err);
    pthread_mutex_unlock(&saver->mutex);
    if (status == SW_OK)
        *claim = made;
    else
        sw_save_claim_fini(&made); /* the blocks stay marked: the caller ends the save */
    return status;
}

/* Copies the claim's next blocks, without the mutex; false: none is left to begin with. */
static bool copy_some_locked(sw_saver *saver, sw_save_claim *claim)
{
    size_t begin = claim->next, left = claim->count - begin;
    size_t end = begin + (left < SW_SAVE_COPY_BLOCKS ? left : SW_SAVE_COPY_BLOCKS);
    if (left == 0)
        return false;
    claim->next = end;
    pthread_mutex_unlock(&saver->mutex);
    for (size_t i = begin; i < end; ++i)
        sw_save_fill(saver, &saver->blocks[claim->wanted[i]], claim->slots[i]);
    pthread_mutex_lock(&saver->mutex);
    for (size_t i = begin; i < end; ++i) {
        sw_save_block *block = &saver->blocks[claim->wanted[i]];
        block->slot = claim->slots[i];
        block->state = SW_BLOCK_STAGED;
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
