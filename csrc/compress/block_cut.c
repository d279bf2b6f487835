/* block_cut.c - see the header. */
#include "compress/block_cut.h"

#include <stdlib.h>

#include "base/bytes.h"

static size_t records_of(const sw_block_cut *r, size_t numel)
{
    return (numel + r->codec.block - 1) / r->codec.block;
}

/* Return the first record that begins at `element` of the bucket or after it. */
static size_t first_record(const sw_block_cut *r, size_t element)
{
    for (const sw_block_span *s = r->spans; s < r->spans + r->span_count; ++s)
        if (element < s->offset + s->numel)
            return s->first + (element > s->offset ? records_of(r, element - s->offset) : 0);
    return r->record_count;
}

/* Return the record that crosses `element`; `own` if there is none. */
static size_t record_across(const sw_block_cut *r, size_t element, size_t own)
{
    for (const sw_block_span *s = r->spans; s < r->spans + r->span_count; ++s) {
        size_t inside = element > s->offset ? element - s->offset : 0;
        if (0 < inside && inside < s->numel && inside % r->codec.block)
            return s->first + inside / r->codec.block;
    }
    return own;
}

static void cut(sw_block_cut *r, size_t share, bool keeps_slice)
{
    size_t ranks = (size_t)r->world_size;
    size_t each = sw_size_max(1, (r->record_count + ranks - 1) / ranks);
    r->each = 1;
    for (size_t rank = 0; rank < ranks; ++rank) {
        sw_block_owner *o = &r->owners[rank];
        if (!share) {
            o->begin = o->own = sw_size_min(rank * each, r->record_count);
            o->end = sw_size_min((rank + 1) * each, r->record_count);
        } else {
            o->own = first_record(r, rank * share);
            o->begin = keeps_slice ? record_across(r, rank * share, o->own) : o->own;
            o->end = first_record(r, (rank + 1) * share);
        }
        r->each = sw_size_max(r->each, o->end - o->begin);
    }
}

/* Call `visit` for the parts of one owner's records from `low` to `high`. */
static void visit_between(const sw_block_cut *r, size_t rank, size_t low, size_t high,
                          sw_block_part_fn *visit, void *context)
{
    const sw_block_owner *o = &r->owners[rank];
    for (const sw_block_span *s = r->spans; s < r->spans + r->span_count; ++s) {
        size_t begin = sw_size_max(low, s->first);
        size_t end = sw_size_min(high, s->first + records_of(r, s->numel));
        if (begin >= end)
            continue;
        size_t skip = (begin - s->first) * r->codec.block;
        sw_block_part p = {.at = rank * r->each + begin - o->begin,
                           .values = s->values + skip,
                           .error = s->error ? s->error + skip : NULL,
                           .numel = sw_size_min((end - begin) * r->codec.block, s->numel - skip),
                           .is_copy = low < o->own};
        visit(r, &p, context);
    }
}

void sw_block_cut_visit(const sw_block_cut *r, sw_block_part_fn *visit, void *context)
{
    for (size_t rank = 0; rank < (size_t)r->world_size; ++rank) {
        const sw_block_owner *o = &r->owners[rank];
        visit_between(r, rank, o->begin, o->own, visit, context);
        visit_between(r, rank, o->own, o->end, visit, context);
    }
}

sw_status sw_block_cut_init(sw_block_cut *r, const sw_block_codec *codec, sw_block_span *spans,
                            size_t span_count, size_t share, bool keeps_slice, int rank,
                            int world_size, sw_error *err)
{
    *r = (sw_block_cut){.codec = *codec,
                        .record_bytes = sw_block_codec_record_bytes(codec),
                        .spans = spans,
                        .span_count = span_count,
                        .rank = rank,
                        .world_size = world_size,
                        .owners = calloc((size_t)world_size, sizeof *r->owners)};
    if (!r->owners)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the owners of a bucket's records");
    for (size_t i = 0; i < span_count; ++i) {
        spans[i].first = r->record_count;
        r->record_count += records_of(r, spans[i].numel);
    }
    cut(r, share, keeps_slice);
    return SW_OK;
}

void sw_block_cut_fini(sw_block_cut *r)
{
    free(r->owners);
    r->owners = NULL;
}

size_t sw_block_cut_rests(const sw_block_cut *r, sw_block_rest *rests)
{
    const sw_block_owner *o = &r->owners[r->rank];
    size_t count = 0, block = r->codec.block;
    for (const sw_block_span *s = r->spans; s < r->spans + r->span_count; ++s) {
        size_t start = s->first * block;
        size_t low = sw_size_max(start, o->own * block);
        size_t high = sw_size_min(start + s->numel, o->end * block);
        if (low < high && s->error)
            rests[count++] = (sw_block_rest){.error = s->error + (low - start),
                                             .place = low - o->begin * block,
                                             .numel = high - low};
    }
    return count;
}
