/* save_ranges.c - cut a plan and this rank's sources into ranges of at most one block, and group
 * these into chunks.
 *
 * A chunk fills one slot of staging. A block that this rank writes whole has its own slot; smaller
 * ranges share slots. Each range is stored at its file offset modulo a page, so that its whole
 * pages can be written without the page cache. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "checkpoint/save_job.h"

typedef struct range_list {
    sw_plan_range *ranges; /* owned */
    size_t count;
} range_list;

static sw_status check_source(const sw_plan *plan, const sw_save_source *source, sw_error *err)
{
    uint64_t end;
    if (source->source >= plan->source_count ||
        __builtin_add_overflow(source->begin, source->size_bytes, &end) ||
        end > plan->pieces[plan->piece_of[source->source]].size_bytes)
        SW_FAIL(err, SW_E_INVALID,
                "bytes [%" PRIu64 ", +%" PRIu64 ") of tensor number %zu are not inside the plan",
                source->begin, source->size_bytes, source->source);
    return SW_OK;
}

/* Find the first memory range of `source` that ends after `begin`. */
static const sw_save_source *find_source(const sw_save_part *part, size_t source, uint64_t begin)
{
    size_t low = 0, high = part->source_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const sw_save_source *found = &part->sources[middle];
        if (found->source < source ||
            (found->source == source && found->begin + found->size_bytes <= begin))
            low = middle + 1;
        else
            high = middle;
    }
    return &part->sources[low];
}

typedef struct walk { /* over bytes of a file that this rank writes */
    const sw_save_part *part;
    const sw_plan_file *file;
    sw_save_visit *visit; /* NULL: only check that it holds them */
    void *context;
    int rank; /* for messages */
    sw_save_span span;
} walk;

static void visit_span(walk *w, const void *data, size_t size_bytes)
{
    w->span.data = data;
    w->span.size_bytes = size_bytes;
    if (w->visit)
        w->visit(w->context, w->span);
    w->span.at += size_bytes;
}

/* Visit bytes [begin, begin + size) of `source`. */
static sw_status walk_source(walk *w, size_t source, uint64_t begin, uint64_t size, sw_error *err)
{
    const sw_save_source *found = find_source(w->part, source, begin),
                         *end = w->part->sources + w->part->source_count;
    for (; size > 0; ++found) {
        if (found >= end || found->source != source || found->begin > begin)
            SW_FAIL(err, SW_E_STATE,
                    "rank %d does not hold byte %" PRIu64
                    " of tensor number %zu, which it would write",
                    w->rank, begin, source);
        uint64_t left = found->begin + found->size_bytes - begin, piece = left < size ? left : size;
        w->span.is_on_device = found->is_on_device;
        visit_span(w, (const uint8_t *)found->data + (begin - found->begin), (size_t)piece);
        begin += piece;
        size -= piece;
    }
    return SW_OK;
}

/* Visit bytes [at, end) of the file, its header included. */
static sw_status walk_file(walk *w, uint64_t at, uint64_t end, sw_error *err)
{
    const sw_plan *plan = w->part->plan;
    const sw_plan_file *file = w->file;
    if (at < file->header_bytes && !file->header)
        SW_FAIL(err, SW_E_STATE,
                "rank %d would write the header of '%.200s', which was trimmed from its plan",
                w->rank, file->path);
    if (at < file->header_bytes) {
        uint64_t stop = end < file->header_bytes ? end : file->header_bytes;
        w->span.is_header = true;
        visit_span(w, (const uint8_t *)file->header + at, (size_t)(stop - at));
        w->span.is_header = false;
        at = stop;
    }
    for (size_t p = sw_plan_find_piece(plan, file, at); at < end; ++p) {
        const sw_plan_piece *piece = &plan->pieces[p];
        uint64_t stop =
            piece->begin + piece->size_bytes < end ? piece->begin + piece->size_bytes : end;
        SW_TRY(walk_source(w, piece->source, at - piece->begin, stop - at, err));
        at = stop;
    }
    return SW_OK;
}

void sw_save_walk(const sw_save_chunk *chunk, sw_save_visit *visit, void *context)
{
    for (uint32_t i = 0; i < chunk->range_count; ++i) {
        sw_save_range *range = &chunk->ranges[i];
        walk w = {.part = chunk->part,
                  .file = range->file,
                  .visit = visit,
                  .context = context,
                  .span = {.range = range, .at = range->at}};
        (void)!walk_file(&w, range->offset, range->offset + range->size_bytes, NULL);
    }
}

/* Add the ranges that this rank holds in parts to those assigned to it. `file` starts at the
 * previous source's file, since sources mostly ascend in file order. */
static sw_status add_held(const sw_save_part *part, range_list *list, sw_error *err)
{
    const sw_plan *plan = part->plan;
    const sw_plan_file *file = plan->files;
    for (size_t i = 0; i < part->source_count; ++i) {
        const sw_save_source *source = &part->sources[i];
        SW_TRY(check_source(plan, source, err));
        size_t number = plan->piece_of[source->source];
        const sw_plan_piece *piece = &plan->pieces[number];
        if (piece->holder != SW_HELD_IN_PARTS || source->size_bytes == 0)
            continue;
        if (number - file->first_piece >= file->piece_count)
            file = sw_plan_file_of(plan, number);
        uint64_t begin = piece->begin + source->begin;
        list->ranges[list->count++] =
            (sw_plan_range){(size_t)(file - plan->files), begin, begin + source->size_bytes};
    }
    return SW_OK;
}

static void sort_ranges(range_list *list)
{
    for (size_t i = 1; i < list->count; ++i)
        if (sw_plan_compare_ranges(&list->ranges[i - 1], &list->ranges[i]) > 0) {
            qsort(list->ranges, list->count, sizeof *list->ranges, sw_plan_compare_ranges);
            return;
        }
}

/* Merge adjacent ranges. */
static sw_status join_ranges(const sw_plan *plan, range_list *list, sw_error *err)
{
    size_t used = 0;
    for (size_t i = 0; i < list->count; ++i) {
        sw_plan_range *last = used ? &list->ranges[used - 1] : NULL, next = list->ranges[i];
        if (last && last->file == next.file && last->end > next.begin)
            SW_FAIL(err, SW_E_INVALID, "byte %" PRIu64 " of '%.200s' would be written twice",
                    next.begin, plan->files[next.file].path);
        if (last && last->file == next.file && last->end == next.begin)
            last->end = next.end;
        else
            list->ranges[used++] = next;
    }
    list->count = used;
    return SW_OK;
}

/* List the ranges of `part` that `rank` writes, ascending and maximal. Ranges held in parts are
 * held here by definition; if another one is missing, the error names rank `speaker`. */
static sw_status list_files_ranges(const sw_save_part *part, int rank, int world_size, int speaker,
                                   range_list *list, sw_error *err)
{
    SW_TRY(sw_plan_own_ranges(part->plan, rank, world_size, &list->ranges, &list->count, err));
    size_t given = list->count;
    sw_plan_range *grown = realloc(list->ranges, (given + part->source_count + 1) * sizeof *grown);
    if (!grown)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu ranges of a save", part->source_count);
    list->ranges = grown;
    SW_TRY(add_held(part, list, err));
    for (size_t i = 0; i < given; ++i) {
        const sw_plan_range *range = &list->ranges[i];
        walk w = {.part = part, .file = &part->plan->files[range->file], .rank = speaker};
        SW_TRY(walk_file(&w, range->begin, range->end, err));
    }
    sort_ranges(list);
    return join_ranges(part->plan, list, err);
}

static sw_status cut_at_blocks(sw_saver *saver, const sw_plan *plan, const range_list *list,
                               sw_error *err)
{
    size_t count = saver->range_count;
    for (size_t i = 0; i < list->count; ++i)
        count += (size_t)((list->ranges[i].end - 1) / SW_BLOCK_BYTES -
                          list->ranges[i].begin / SW_BLOCK_BYTES + 1);
    sw_save_range *grown = realloc(saver->ranges, (count + 1) * sizeof *grown);
    if (!grown)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a save of %zu ranges", count);
    saver->ranges = grown;
    for (size_t i = 0; i < list->count; ++i)
        for (uint64_t at = list->ranges[i].begin, next; at < list->ranges[i].end; at = next) {
            next = (at / SW_BLOCK_BYTES + 1) * SW_BLOCK_BYTES;
            if (next > list->ranges[i].end)
                next = list->ranges[i].end;
            saver->ranges[saver->range_count++] =
                (sw_save_range){.file = &plan->files[list->ranges[i].file],
                                .offset = at,
                                .size_bytes = (uint32_t)(next - at)};
            saver->bytes_total += next - at;
        }
    return SW_OK;
}

static bool has_whole_page(const sw_save_range *range)
{
    uint64_t page = sw_file_page_bytes(), first = (range->offset + page - 1) / page * page;
    return first + page <= range->offset + range->size_bytes;
}

/* Return the offset of a range in a slot that has `used` bytes in use. */
static uint32_t place_after(const sw_save_range *range, uint32_t used)
{
    uint32_t page = (uint32_t)sw_file_page_bytes(), wanted = (uint32_t)(range->offset % page);
    return has_whole_page(range) ? used + (wanted + page - used % page) % page : used;
}

static sw_save_chunk *add_chunk(sw_saver *saver, size_t *capacity, sw_error *err)
{
    sw_save_chunk *chunks =
        sw_grown(saver->chunks, capacity, saver->chunk_count, sizeof *chunks, 16);
    if (!chunks) {
        (void)sw_error_set(err, SW_E_MEMORY, -1, "no memory for the chunks of %zu ranges",
                           saver->range_count);
        return NULL;
    }
    saver->chunks = chunks;
    return &saver->chunks[saver->chunk_count++];
}

/* Distribute ranges [first, end) to chunks of `part`. */
static sw_status fill_chunks(sw_saver *saver, const sw_save_part *part, size_t first, size_t end,
                             size_t *capacity, sw_error *err)
{
    sw_save_chunk *chunk = NULL;
    uint32_t used = 0;
    for (size_t i = first; i < end; ++i) {
        sw_save_range *range = &saver->ranges[i];
        range->at = place_after(range, used);
        if (!chunk || range->at + range->size_bytes > SW_BLOCK_BYTES ||
            range->is_eager != range[-1].is_eager) {
            chunk = add_chunk(saver, capacity, err);
            if (!chunk)
                return SW_E_MEMORY;
            *chunk = (sw_save_chunk){.part = part, .ranges = range};
            range->at = place_after(range, 0);
        }
        used = range->at + range->size_bytes;
        chunk->range_count++;
        chunk->size_bytes += range->size_bytes;
    }
    return SW_OK;
}

static bool touches_eager(const sw_plan *plan, const sw_save_range *range, const bool *is_eager)
{
    const sw_plan_file *file = range->file;
    size_t end = file->first_piece + file->piece_count;
    for (size_t p = sw_plan_find_piece(plan, file, range->offset);
         p < end && plan->pieces[p].begin < range->offset + range->size_bytes; ++p)
        if (is_eager[plan->pieces[p].source])
            return true;
    return false;
}

/* `is_eager`: one flag per source; NULL: all are eager, or the save is not lazy. */
static sw_status list_part(sw_saver *saver, const sw_save_part *part, int rank, int world_size,
                           const bool *is_eager, sw_error *err)
{
    range_list list = {0};
    size_t first = saver->range_count;
    sw_status status = list_files_ranges(part, rank, world_size, saver->channel->rank, &list, err);
    if (status == SW_OK)
        status = cut_at_blocks(saver, part->plan, &list, err);
    free(list.ranges);
    for (size_t i = first; status == SW_OK && i < saver->range_count; ++i)
        saver->ranges[i].is_eager =
            !is_eager || touches_eager(part->plan, &saver->ranges[i], is_eager);
    return status;
}

static sw_status copy_sources(sw_saver *saver, const sw_save_request *request, sw_error *err)
{
    const sw_save_part *shared = &request->shared, *own = &request->own;
    saver->sources = calloc(shared->source_count + own->source_count + 1, sizeof *saver->sources);
    if (!saver->sources)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the %zu sources of a save",
                shared->source_count + own->source_count);
    if (shared->source_count)
        memcpy(saver->sources, shared->sources, shared->source_count * sizeof *saver->sources);
    if (own->source_count)
        memcpy(saver->sources + shared->source_count, own->sources,
               own->source_count * sizeof *saver->sources);
    saver->shared_part = (sw_save_part){shared->plan, saver->sources, shared->source_count};
    saver->own_part =
        (sw_save_part){own->plan, saver->sources + shared->source_count, own->source_count};
    return SW_OK;
}

/* Convert flags of memory sources to flags of the shared plan's sources. Device memory is always
 * eager, because the threads of a save have no stream. */
static sw_status list_eager(const sw_save_request *request, bool **is_eager, sw_error *err)
{
    size_t count = request->shared.plan->source_count;
    bool *made = calloc(count + 1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the flags of %zu tensors", count);
    for (size_t i = 0; i < request->shared.source_count; ++i) {
        const sw_save_source *source = &request->shared.sources[i];
        if (source->source < count)
            made[source->source] |=
                source->is_on_device || (request->is_eager && request->is_eager[i]);
    }
    *is_eager = made;
    return SW_OK;
}

sw_status sw_save_list_ranges(sw_saver *saver, const sw_save_request *request, sw_error *err)
{
    bool *is_eager = NULL;
    size_t capacity = 0;
    SW_TRY(copy_sources(saver, request, err));
    if (request->is_lazy)
        SW_TRY(list_eager(request, &is_eager, err));
    sw_status status = list_part(saver, &saver->shared_part, saver->channel->rank,
                                 saver->channel->world_size, is_eager, err);
    free(is_eager);
    SW_TRY(status);
    size_t own = saver->range_count;
    if (saver->own_part.plan)
        SW_TRY(list_part(saver, &saver->own_part, 0, 1, NULL, err));
    SW_TRY(fill_chunks(saver, &saver->shared_part, 0, own, &capacity, err));
    SW_TRY(fill_chunks(saver, &saver->own_part, own, saver->range_count, &capacity, err));
    saver->chunks = sw_shrunk(saver->chunks, (saver->chunk_count + 1) * sizeof *saver->chunks);
    return SW_OK;
}

void sw_save_forget_ranges(sw_saver *saver)
{
    pthread_mutex_lock(&saver->mutex); /* protect() looks for live chunks */
    free(saver->chunks);
    free(saver->ranges);
    free(saver->sources);
    saver->chunks = NULL;
    saver->ranges = NULL;
    saver->sources = NULL;
    saver->chunk_count = saver->range_count = saver->next_chunk = 0;
    pthread_mutex_unlock(&saver->mutex);
}

uint64_t sw_save_block_of(const sw_saver *saver, const sw_save_chunk *chunk,
                          const sw_save_range *range)
{
    uint64_t base = chunk->part == &saver->own_part ? saver->shared_part.plan->block_count : 0;
    return base + range->file->first_block + range->offset / SW_BLOCK_BYTES;
}

sw_status sw_save_list_tallies(const sw_saver *saver, sw_tally_list *list, sw_error *err)
{
    for (size_t c = 0; c < saver->chunk_count; ++c)
        for (uint32_t i = 0; i < saver->chunks[c].range_count; ++i) {
            const sw_save_range *range = &saver->chunks[c].ranges[i];
            sw_tally_list_add(list, sw_save_block_of(saver, &saver->chunks[c], range), range->crc,
                              range->offset, range->size_bytes, range->file->size_bytes);
        }
    sw_tally_list_end(list);
    if (list->is_out_of_memory)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the tallies of %zu ranges", saver->range_count);
    return SW_OK;
}
