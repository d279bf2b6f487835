/* store_plan.c - see the header. */
#include "zero/store_plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "zero/page_ring.h"

typedef struct planner {
    sw_store_plan *units;
    const sw_store_map *map;
    bool coded;
    size_t *unit_of; /* owned, by parameter; SIZE_MAX: none */
    size_t *last;    /* owned, by slice: the run of the piece being laid out; SIZE_MAX: none */
    size_t *first;   /* owned, by form: its first run */
} planner;

static size_t aligned(size_t bytes, size_t alignment)
{
    return (bytes + alignment - 1) / alignment * alignment;
}

/* Return true with a place for one more run. */
static bool has_room(sw_store_plan *u)
{
    if (u->run_count < u->run_capacity)
        return true;
    size_t capacity = 2 * u->run_capacity + 64;
    sw_unit_run *runs = realloc(u->runs, capacity * sizeof *runs);
    if (!runs)
        return false;
    u->runs = runs;
    u->run_capacity = capacity;
    return true;
}

/* Add the runs of a parameter that begins at `target`, or extend those of its neighbours. */
static bool add_runs(planner *p, size_t index, size_t target, bool narrow)
{
    const sw_store_map *m = p->map;
    bool coded = p->coded && sw_store_dtype(m, index, false) == SW_DTYPE_FLOAT32;
    for (size_t slice = 0; slice < m->slice_count; ++slice) {
        sw_store_source source = sw_store_source_of(m, index, slice, narrow);
        size_t item = source.item_bytes, bytes = (source.run.end - source.run.begin) * item;
        size_t begin = target + source.run.begin * item;
        if (bytes == 0)
            continue;
        if (p->last[slice] != SIZE_MAX) {
            sw_unit_run *run = &p->units->runs[p->last[slice]];
            run->size_bytes = begin + bytes - run->target_bytes;
            continue;
        }
        if (!has_room(p->units))
            return false;
        p->last[slice] = p->units->run_count;
        p->units->runs[p->units->run_count++] =
            (sw_unit_run){begin, (size_t)source.part, source.offset_bytes, bytes, coded};
    }
    return true;
}

/* Lay out one unit in bucket order, in its own dtypes or those of its casts. */
static bool lay_out(planner *p, size_t unit, size_t form, bool computes)
{
    const sw_store_map *m = p->map;
    size_t size = 0, bucket = SIZE_MAX, item = 0, end = 0;
    p->first[form] = p->units->run_count;
    for (size_t k = 0; k < m->layout.param_count; ++k) {
        size_t i = m->layout.order[k];
        const sw_layout_place *place = &m->layout.place[i];
        if (p->unit_of[i] != unit)
            continue;
        bool narrow = computes && sw_store_is_narrowed(m, i);
        size_t own = sw_store_item_bytes(m, place->bucket, narrow);
        size_t step = SW_ALIGNMENT_BYTES * own / sw_store_item_bytes(m, place->bucket, false);
        if (m->layout.bucket[place->bucket].by_rows || place->bucket != bucket || own != item ||
            aligned(end * own, step) != place->begin * own) { /* no neighbour of the last; rows have
                                                                 none */
            size = aligned(size, SW_ALIGNMENT_BYTES);
            for (size_t slice = 0; slice < m->slice_count; ++slice)
                p->last[slice] = SIZE_MAX;
        }
        bucket = place->bucket;
        item = own;
        end = place->begin + place->numel;
        p->units->form[2 * i + computes] = form;
        p->units->at[2 * i + computes] = size;
        if (!add_runs(p, i, size, narrow))
            return false;
        size += aligned(place->numel * item, step);
    }
    p->units->specs[form].size_bytes = size;
    p->units->specs[form].run_count = p->units->run_count - p->first[form];
    p->units->sizes[unit] = size; /* the compute form comes later */
    return true;
}

static bool computes(const sw_store_map *m, const sw_store_unit *unit)
{
    for (size_t k = 0; k < unit->count; ++k)
        if (sw_store_is_narrowed(m, unit->members[k]))
            return true;
    return false;
}

static bool lay_out_all(planner *p, const sw_store_options *options)
{
    sw_store_plan *u = p->units;
    for (size_t n = 0; n < options->unit_count; ++n) {
        u->specs[n].name = options->units[n].name;
        for (size_t k = 0; k < options->units[n].count; ++k)
            p->unit_of[options->units[n].members[k]] = n;
    }
    for (size_t n = 0; n < options->unit_count; ++n)
        if (!lay_out(p, n, n, false))
            return false;
    u->form_count = options->unit_count;
    for (size_t n = 0; n < options->unit_count; ++n)
        if (computes(p->map, &options->units[n])) {
            u->specs[u->form_count].name = options->units[n].name;
            if (!lay_out(p, n, u->form_count++, true))
                return false;
        }
    for (size_t f = 0; f < u->form_count; ++f)
        u->specs[f].runs = u->runs + p->first[f];
    return true;
}

/* The outermost unit, and the largest other one or all that stay, may be whole at once. */
static size_t warm_bytes(const sw_store_plan *u, const sw_store_options *options)
{
    size_t stay = 0, largest = 0;
    for (size_t n = 1; n < u->unit_count; ++n) {
        size_t span = aligned(u->sizes[n], SW_PAGE_RING_CHUNK_BYTES);
        stay += options->units[n].stays ? span : 0;
        largest = sw_size_max(largest, span);
    }
    return (u->unit_count ? aligned(u->sizes[0], SW_PAGE_RING_CHUNK_BYTES) : 0) +
           sw_size_max(stay, largest);
}

sw_status sw_store_plan_init(sw_store_plan *u, const sw_store_map *m,
                             const sw_store_options *options, sw_error *err)
{
    size_t params = m->layout.param_count, count = options->unit_count;
    *u = (sw_store_plan){.unit_count = count};
    planner p = {.units = u, .map = m, .coded = options->coded};
    p.unit_of = malloc((params + 1) * sizeof *p.unit_of);
    p.last = malloc((m->slice_count + 1) * sizeof *p.last);
    p.first = malloc((2 * count + 1) * sizeof *p.first);
    u->specs = calloc(2 * count + 1, sizeof *u->specs);
    u->form = malloc(2 * (params + 1) * sizeof *u->form);
    u->at = malloc(2 * (params + 1) * sizeof *u->at);
    u->sizes = calloc(count + 1, sizeof *u->sizes);
    bool fits = p.unit_of && p.last && p.first && u->specs && u->form && u->at && u->sizes;
    for (size_t i = 0; fits && i < params; ++i)
        p.unit_of[i] = u->form[2 * i] = u->form[2 * i + 1] = SIZE_MAX;
    fits = fits && lay_out_all(&p, options);
    if (fits)
        u->warm_bytes = warm_bytes(u, options);
    free(p.unit_of);
    free(p.last);
    free(p.first);
    if (!fits)
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for the tables of %zu units", options->label,
                count);
    return SW_OK;
}

void sw_store_plan_fini(sw_store_plan *u)
{
    free(u->specs);
    free(u->runs);
    free(u->form);
    free(u->at);
    free(u->sizes);
}
