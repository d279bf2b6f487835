/* store_map.c - see the header. */
#include "zero/store_map.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"

/* ---- ownership ---- */

static bool are_together(const sw_store_map *m, size_t a, size_t b)
{
    return m->replica_of[a] == m->replica_of[b] && m->host_of[a] == m->host_of[b];
}

/* Return true if two ranks of one replica are on one host, or else on two. */
static bool some_pair(const sw_store_map *m, bool on_one_host)
{
    for (size_t a = 0; a < m->world_size; ++a)
        for (size_t b = 0; b < a; ++b)
            if (m->replica_of[a] == m->replica_of[b] && are_together(m, a, b) == on_one_host)
                return true;
    return false;
}

static void read_ranks(sw_store_map *m, const sw_store_options *options)
{
    const sw_slices *given = options->slices;
    m->is_one_host = true;
    for (size_t r = 0; r < m->world_size; ++r) {
        m->slice_of[r] = given ? given->of_rank[r] : (int)r;
        m->replica_of[r] = given ? given->replica_of_rank[r] : 0;
        m->host_of[r] = options->host_of[r];
        m->is_one_host = m->is_one_host && m->host_of[r] == m->host_of[0];
    }
    m->is_replicated = given != NULL;
    m->slice_count = given ? (size_t)given->count : m->world_size;
}

static sw_status init_ranks(sw_store_map *m, const sw_store_options *options, sw_error *err)
{
    size_t world = m->world_size;
    m->slice_of = calloc(5 * world, sizeof *m->slice_of);
    if (!m->slice_of)
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for a table of %zu ranks", options->label, world);
    m->replica_of = m->slice_of + world;
    m->host_of = m->replica_of + world;
    m->owner = m->host_of + world;
    m->beside = m->owner + world;
    read_ranks(m, options);
    for (size_t r = 0; r < world; ++r) {
        if (m->replica_of[r] == m->replica_of[m->rank])
            m->owner[m->slice_of[r]] = (int)r;
        if (r == m->rank)
            m->place = m->beside_count;
        if (are_together(m, r, m->rank))
            m->beside[m->beside_count++] = (int)r;
    }
    m->is_apart = some_pair(m, false);
    m->has_whole = m->form != SW_STORE_UNITS || m->is_apart;
    m->home = m->form == SW_STORE_PRIVATE ? (int)m->rank : m->beside[0];
    m->outcome_home = m->form == SW_STORE_UNITS ? 0 : m->home;
    return SW_OK;
}

/* ---- casts and offsets ---- */

static sw_status add_cast(sw_store_map *m, size_t index, sw_dtype to, const char *label,
                          sw_error *err)
{
    sw_dtype from = sw_store_dtype(m, index, false);
    if (to == SW_DTYPE_COUNT)
        return SW_OK;
    if ((to != SW_DTYPE_FLOAT16 && to != SW_DTYPE_BFLOAT16) ||
        (from != SW_DTYPE_FLOAT32 && from != SW_DTYPE_FLOAT64))
        SW_FAIL(err, SW_E_INVALID,
                "%s: a cast is from float32 or float64 to float16 or bfloat16, not of parameter "
                "%zu from %s to %s",
                label, index, sw_dtype_name(from), sw_dtype_name(to));
    m->narrow[index] = to;
    m->has_casts = true;
    return SW_OK;
}

static sw_status init_casts(sw_store_map *m, const sw_store_options *options, sw_error *err)
{
    for (size_t i = 0; i < m->layout.param_count; ++i)
        m->narrow[i] = SW_DTYPE_COUNT;
    for (size_t i = 0; m->form == SW_STORE_SHARED && i < m->layout.param_count; ++i)
        if (some_pair(m, true)) /* a rank that shares with no other may write its parameters */
            SW_TRY(add_cast(m, i, options->narrow[i], options->label, err));
    if (m->form != SW_STORE_UNITS && options->unit_count > 0)
        SW_FAIL(err, SW_E_INVALID, "%s: only the form 'units' has units, got %zu", options->label,
                options->unit_count);
    if (options->folder && m->form != SW_STORE_UNITS)
        SW_FAIL(err, SW_E_INVALID, "%s: only the form 'units' has a home in a file",
                options->label);
    if (options->coded && m->has_whole)
        SW_FAIL(err, SW_E_INVALID, "%s: records need the form 'units' on one host", options->label);
    for (size_t b = 0; b < m->layout.bucket_count; ++b)
        if (m->layout.bucket[b].by_rows && m->form != SW_STORE_UNITS)
            SW_FAIL(err, SW_E_INVALID,
                    "%s: bucket %zu is cut by rows, which needs the form 'units'", options->label,
                    b);
    for (size_t u = 0; u < options->unit_count; ++u)
        for (size_t k = 0; k < options->units[u].count; ++k) {
            size_t i = options->units[u].members[k];
            if (i >= m->layout.param_count)
                SW_FAIL(err, SW_E_INVALID, "unit '%s': member must be in [0, %zu), got %zu",
                        options->units[u].name, m->layout.param_count, i);
            if (!options->coded)
                SW_TRY(add_cast(m, i, options->narrow[i], options->label, err));
        }
    return SW_OK;
}

/* Elements of a bucket in a part. */
static size_t held_numel(const sw_store_map *m, size_t b)
{
    return m->has_whole ? m->layout.bucket[b].numel : sw_store_width(m, b);
}

static bool init_offsets(sw_store_map *m)
{
    size_t at = 0, count = m->layout.bucket_count, bytes;
    for (size_t b = 0; b < count; ++b) {
        m->at[b] = at;
        m->narrow_at[b] = SIZE_MAX;
        m->stepped[b] = m->layout.bucket[b].trainable;
        if (!sw_size_add(at, held_numel(m, b) * sw_store_item_bytes(m, b, false), &at))
            return false;
    }
    m->bucket_bytes = at;
    for (size_t i = 0; i < m->layout.param_count; ++i)
        if (sw_store_is_narrowed(m, i))
            m->narrow_at[m->layout.place[i].bucket] = 0;
    for (size_t b = 0; b < count; ++b)
        if (m->narrow_at[b] == 0) {
            m->narrow_at[b] = at;
            if (!sw_size_round_up(held_numel(m, b) * SW_STORE_NARROW_BYTES, SW_ALIGNMENT_BYTES,
                                  &bytes) ||
                !sw_size_add(at, bytes, &at))
                return false;
        }
    m->part_bytes = at;
    return sw_size_add(at, 2 * SW_ALIGNMENT_BYTES * m->world_size, &m->size_bytes);
}

static void *copied(const void *table, size_t count, size_t item_bytes)
{
    void *copy = malloc((count + 1) * item_bytes);
    if (copy && count)
        memcpy(copy, table, count * item_bytes);
    return copy;
}

static sw_status init_tables(sw_store_map *m, const sw_layout *layout, const char *label,
                             sw_error *err)
{
    size_t params = layout->param_count, buckets = layout->bucket_count;
    m->layout = *layout;
    m->layout.place = copied(layout->place, params, sizeof *layout->place);
    m->layout.bucket = copied(layout->bucket, buckets, sizeof *layout->bucket);
    m->layout.order = copied(layout->order, params, sizeof *layout->order);
    m->narrow = malloc((params + 1) * sizeof *m->narrow);
    m->stepped = malloc(buckets + 1);
    m->at = malloc((buckets + 1) * sizeof *m->at);
    m->narrow_at = malloc((buckets + 1) * sizeof *m->narrow_at);
    if (!m->layout.place || !m->layout.bucket || !m->layout.order || !m->narrow || !m->stepped ||
        !m->at || !m->narrow_at)
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for tables of %zu parameters", label, params);
    return SW_OK;
}

sw_status sw_store_map_init(sw_store_map *m, int rank, int world_size, const sw_layout *layout,
                            const sw_store_options *options, sw_error *err)
{
    *m = (sw_store_map){
        .form = options->form, .rank = (size_t)rank, .world_size = (size_t)world_size};
    SW_TRY(init_ranks(m, options, err));
    SW_TRY(init_tables(m, layout, options->label, err));
    SW_TRY(init_casts(m, options, err));
    if (!init_offsets(m))
        SW_FAIL(err, SW_E_INVALID, "%s: its parameters overflow the address space", options->label);
    return SW_OK;
}

void sw_store_map_fini(sw_store_map *m)
{
    sw_layout_fini(&m->layout);
    free(m->slice_of);
    free(m->narrow);
    free(m->stepped);
    free(m->at);
    free(m->narrow_at);
}

/* ---- answers ---- */

bool sw_store_is_home(const sw_store_map *m)
{
    return m->home == (int)m->rank;
}

bool sw_store_has_one_copy(const sw_store_map *m)
{
    return m->has_whole && m->form != SW_STORE_PRIVATE;
}

bool sw_store_is_by_rows(const sw_store_map *m, size_t index)
{
    return m->layout.bucket[m->layout.place[index].bucket].by_rows;
}

bool sw_store_is_stepped(const sw_store_map *m, size_t index)
{
    return m->stepped[m->layout.place[index].bucket];
}

bool sw_store_is_narrowed(const sw_store_map *m, size_t index)
{
    return m->narrow[index] != SW_DTYPE_COUNT;
}

sw_dtype sw_store_dtype(const sw_store_map *m, size_t index, bool narrow)
{
    return narrow && sw_store_is_narrowed(m, index)
               ? m->narrow[index]
               : m->layout.bucket[m->layout.place[index].bucket].dtype;
}

size_t sw_store_item_bytes(const sw_store_map *m, size_t b, bool narrow)
{
    return narrow ? SW_STORE_NARROW_BYTES : sw_dtype_size_bytes(m->layout.bucket[b].dtype);
}

size_t sw_store_width(const sw_store_map *m, size_t b)
{
    return m->layout.bucket[b].numel / m->slice_count;
}

size_t sw_store_bucket_bytes(const sw_store_map *m, size_t b)
{
    return m->layout.bucket[b].numel * sw_store_item_bytes(m, b, false);
}

sw_store_source sw_store_source_of(const sw_store_map *m, size_t index, size_t slice, bool narrow)
{
    size_t b = m->layout.place[index].bucket, item = sw_store_item_bytes(m, b, narrow);
    sw_layout_run run = sw_layout_run_in(&m->layout, index, slice, m->slice_count);
    size_t first = run.first + (m->has_whole ? slice * sw_store_width(m, b) : 0);
    return (sw_store_source){run, m->has_whole ? m->home : m->owner[slice],
                             (narrow ? m->narrow_at : m->at)[b] + first * item, item};
}

size_t sw_store_copy_bytes(const sw_store_map *m, size_t index, bool narrow)
{
    const sw_layout_place *place = &m->layout.place[index];
    return (narrow ? m->narrow_at : m->at)[place->bucket] +
           place->begin * sw_store_item_bytes(m, place->bucket, narrow);
}
