/* layout.c - cut parameters into buckets in reverse order, then buckets into slices. */
#include "tensor/layout.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"

enum { KEYS = SW_DTYPE_COUNT * 2 };

typedef struct cutter {
    const sw_layout_param *params;
    sw_layout *layout;
    size_t open[KEYS];  /* the bucket being filled, plus 1; 0: none */
    size_t group[KEYS]; /* the group of that bucket */
    sw_layout_caps caps;
} cutter;

static size_t cap_of(const cutter *c, size_t bucket)
{
    size_t cap = c->caps.first_bytes;
    while (cap > 0 && cap < c->caps.bytes && bucket-- > 0)
        cap = cap > SIZE_MAX / 2 ? SIZE_MAX : 2 * cap;
    return cap > 0 && cap < c->caps.bytes ? cap : c->caps.bytes;
}

static bool place_in(const sw_layout *layout, sw_layout_bucket *bucket, sw_layout_place *place,
                     const sw_layout_param *param)
{
    size_t element_bytes = sw_dtype_size_bytes(param->dtype), held = param->numel;
    size_t bytes, begin_bytes, end_bytes;
    if (param->row_numel > 0) {
        size_t rows = param->numel / param->row_numel;
        held = (rows / layout->slice_count + (rows % layout->slice_count != 0)) * param->row_numel;
        place->chunk = sw_size_max(held, 1);
    }
    if (!sw_size_multiply(held, element_bytes, &bytes) ||
        !sw_size_round_up(bucket->numel * element_bytes, SW_ALIGNMENT_BYTES, &begin_bytes) ||
        !sw_size_add(begin_bytes, bytes, &end_bytes))
        return false;
    place->begin = begin_bytes / element_bytes;
    place->numel = param->numel;
    bucket->numel = end_bytes / element_bytes;
    bucket->count++;
    return true;
}

static bool is_full(const cutter *c, size_t index)
{
    const sw_layout_bucket *bucket = &c->layout->bucket[index];
    size_t slices = bucket->by_rows ? c->layout->slice_count : 1, bytes;
    return !sw_size_multiply(bucket->numel * sw_dtype_size_bytes(bucket->dtype), slices, &bytes) ||
           bytes >= cap_of(c, index);
}

static bool cut(cutter *c)
{
    sw_layout *layout = c->layout;
    for (size_t i = layout->param_count; i-- > 0;) {
        const sw_layout_param *param = &c->params[i];
        bool by_rows = param->row_numel > 0;
        size_t key = (size_t)param->dtype * 2 + param->trainable, *open = &c->open[key];
        if (*open == 0 || c->group[key] != param->group ||
            layout->bucket[*open - 1].by_rows != by_rows) {
            c->group[key] = param->group;
            layout->bucket[layout->bucket_count] = (sw_layout_bucket){
                .dtype = param->dtype, .trainable = param->trainable, .by_rows = by_rows};
            *open = ++layout->bucket_count;
        }
        layout->place[i].bucket = *open - 1;
        if (!place_in(layout, &layout->bucket[*open - 1], &layout->place[i], param))
            return false;
        if (is_full(c, *open - 1))
            *open = 0;
    }
    return true;
}

/* Round every bucket up to W equal slices, place it in the arena, and list its parameters. */
static bool finish(sw_layout *layout, size_t pieces)
{
    size_t at = 0, slices = layout->slice_count;
    for (size_t b = 0; b < layout->bucket_count; ++b) {
        sw_layout_bucket *bucket = &layout->bucket[b];
        size_t element_bytes = sw_dtype_size_bytes(bucket->dtype);
        size_t piece_bytes, bytes;
        bucket->first = at;
        at += bucket->count;
        bucket->count = 0; /* counted again by the loop over parameters below */
        size_t slice_numel = bucket->numel;
        if (!bucket->by_rows)
            slice_numel = bucket->numel / slices + (bucket->numel % slices != 0);
        size_t piece_numel = slice_numel / pieces + (slice_numel % pieces != 0);
        if (!sw_size_round_up(piece_numel * element_bytes, SW_ALIGNMENT_BYTES, &piece_bytes) ||
            !sw_size_multiply(piece_bytes, slices * pieces, &bytes))
            return false;
        bucket->numel = bytes / element_bytes;
        bucket->offset_bytes = layout->size_bytes;
        if (!sw_size_add(layout->size_bytes, bytes, &layout->size_bytes))
            return false;
        if (bucket->trainable)
            layout->trainable_bytes += bytes;
    }
    for (size_t i = layout->param_count; i-- > 0;) {
        sw_layout_bucket *bucket = &layout->bucket[layout->place[i].bucket];
        layout->order[bucket->first + bucket->count++] = i;
    }
    return true;
}

sw_status sw_layout_init(sw_layout *layout, const sw_layout_param *params, size_t param_count,
                         int world_size, sw_layout_caps caps, sw_error *err)
{
    cutter c = {.params = params, .layout = layout, .caps = caps};
    memset(layout, 0, sizeof *layout);
    for (size_t i = 0; i < param_count; ++i) {
        if (sw_dtype_size_bytes(params[i].dtype) == 0)
            SW_FAIL(err, SW_E_INVALID, "layout: parameter %zu has no supported dtype (%d)", i,
                    (int)params[i].dtype);
        if (params[i].row_numel > 0 && params[i].numel % params[i].row_numel != 0)
            SW_FAIL(err, SW_E_INVALID,
                    "layout: parameter %zu has %zu elements, which are no rows of %zu", i,
                    params[i].numel, params[i].row_numel);
    }
    layout->param_count = param_count;
    layout->slice_count = (size_t)world_size;
    layout->place = calloc(param_count + 1, sizeof *layout->place);
    layout->bucket = calloc(param_count + 1, sizeof *layout->bucket);
    layout->order = calloc(param_count + 1, sizeof *layout->order);
    if (!layout->place || !layout->bucket || !layout->order) {
        sw_layout_fini(layout);
        SW_FAIL(err, SW_E_MEMORY, "layout: no memory for %zu parameters", param_count);
    }
    if (!cut(&c) || !finish(layout, sw_size_max(caps.pieces, 1))) {
        sw_layout_fini(layout);
        SW_FAIL(err, SW_E_INVALID,
                "layout: the gradients of %zu parameters overflow the address space", param_count);
    }
    return SW_OK;
}

void sw_layout_fini(sw_layout *layout)
{
    free(layout->place);
    free(layout->bucket);
    free(layout->order);
    memset(layout, 0, sizeof *layout);
}

size_t sw_layout_slice_numel(const sw_layout *layout, size_t bucket)
{
    return layout->bucket[bucket].numel / layout->slice_count;
}

sw_layout_run sw_layout_run_in(const sw_layout *layout, size_t index, size_t slice,
                               size_t slice_count)
{
    const sw_layout_place *place = &layout->place[index];
    if (place->chunk > 0) {
        size_t at = sw_size_min(slice * place->chunk, place->numel);
        return (sw_layout_run){at, sw_size_min(at + place->chunk, place->numel), place->begin};
    }
    size_t width = layout->bucket[place->bucket].numel / slice_count, from = slice * width;
    size_t begin = sw_size_max(place->begin, from);
    size_t end = sw_size_min(place->begin + place->numel, from + width);
    if (begin >= end)
        return (sw_layout_run){.begin = 0};
    return (sw_layout_run){begin - place->begin, end - place->begin, begin - from};
}

sw_layout_pieces sw_layout_pieces_of(const sw_layout *layout, size_t param)
{
    const sw_layout_place *place = &layout->place[param];
    size_t chunk = place->chunk > 0 ? place->chunk : sw_size_max(place->numel, 1);
    return (sw_layout_pieces){.first = place->begin,
                              .numel = place->numel,
                              .chunk = chunk,
                              .pitch = sw_layout_slice_numel(layout, place->bucket)};
}

sw_layout_run sw_layout_bucket_run(const sw_layout *layout, size_t param, size_t begin)
{
    const sw_layout_place *place = &layout->place[param];
    if (place->chunk == 0)
        return (sw_layout_run){begin, place->numel, place->begin + begin};
    size_t slice = begin / place->chunk, width = sw_layout_slice_numel(layout, place->bucket);
    return (sw_layout_run){begin, sw_size_min((slice + 1) * place->chunk, place->numel),
                           slice * width + place->begin + begin % place->chunk};
}
