/* store.c - the memory of a store, and what moves in it: slices, casts, records and outcomes. */
#include "zero/store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"
#include "comm/comm.h"
#include "kernels/compress_kernels.h"
#include "platform/file_memory.h"
#include "platform/memory.h"

enum {
    LABEL_BYTES = 256,
    CAST_NUMEL = 1024,
    /* Of a rank's slices, which are populated together: while one rank clears pages, others keep
     * the disk busy. */
    WINDOW_BYTES = 64 << 20,
};

struct sw_store {
    sw_comm *comm; /* borrowed */
    sw_store_map map;
    sw_store_plan plan;      /* UNITS only */
    sw_units *units;         /* owned; UNITS only */
    sw_arena *arena, *codes; /* owned; arena NULL: */
    uint8_t *pages;          /* owned */
    bool *is_present; /* owned; windows of this rank's slices; NULL: nothing is populated later */
    unsigned turn; /* of the set of outcomes. Steps alternate: a rank writes one while a slower one
                    * still reads the other */
    char reason[SW_ERROR_MESSAGE_BYTES], label[LABEL_BYTES];
};

/* ---- memory ---- */

#define LABELED(s, name, before) \
    char name[LABEL_BYTES + 64]; \
    (void)snprintf(name, sizeof name, before "%s", (s)->label)

static uint8_t *base_of(const sw_store *s, int rank)
{
    return s->arena ? s->arena->base[rank] : s->pages;
}

/* End the communicator with an error of this rank's disk. */
static sw_status end_here(const sw_store *s, sw_error *err)
{
    const sw_error why = *err;
    return sw_comm_give_up(s->comm, SW_E_COMM, err, "%s", why.message);
}

static uint8_t *in_copy(const sw_store *s, size_t index, bool narrow)
{
    return base_of(s, s->map.home) + sw_store_copy_bytes(&s->map, index, narrow);
}

static sw_status make_arena(sw_store *s, size_t size_bytes, const char *folder, const char *label,
                            sw_arena **arena, sw_error *err)
{
    const sw_comm_ops *ops = s->comm->ops;
    return folder ? ops->home_create(s->comm, size_bytes, folder, label, arena, err)
                  : ops->arena_create(s->comm, size_bytes, label, arena, err);
}

static sw_status make_arenas(sw_store *s, const sw_store_options *options, bool *is_alone,
                             sw_error *err)
{
    LABELED(s, what, "parameters of ");
    LABELED(s, slices, "slices of the parameters of ");
    LABELED(s, records, "records of the parameters of ");
    sw_status status = make_arena(s, s->map.size_bytes, options->folder,
                                  s->map.form == SW_STORE_UNITS ? slices : what, &s->arena, err);
    if (status == SW_E_MEMORY && s->map.form == SW_STORE_PRIVATE) { /* the same on every rank */
        (void)snprintf(s->reason, sizeof s->reason, "%s", err->message);
        *is_alone = true;
        return sw_pages_map(s->map.size_bytes, &s->pages, err);
    }
    if (status != SW_OK || !options->coded)
        return status;
    size_t blocks = s->map.bucket_bytes / SW_UNIT_BLOCK_BYTES +
                    (s->map.bucket_bytes % SW_UNIT_BLOCK_BYTES != 0);
    return make_arena(s, sw_size_max(blocks * SW_UNIT_RECORD_BYTES, SW_ALIGNMENT_BYTES),
                      options->folder, records, &s->codes, err);
}

static void populate_range(uint8_t *part, size_t begin, size_t end)
{
    if (end > begin)
        sw_memory_populate(part + begin, end - begin);
}

/* Populate the windows of this rank's slices that have bytes of [begin, end). */
static void prepare_bytes(const sw_store *s, size_t begin, size_t end)
{
    uint8_t *part = base_of(s, (int)s->map.rank);
    for (size_t w = begin / WINDOW_BYTES; s->is_present && w * WINDOW_BYTES < end; ++w)
        if (!s->is_present[w]) {
            s->is_present[w] = true;
            populate_range(part, w * WINDOW_BYTES,
                           sw_size_min((w + 1) * WINDOW_BYTES, s->map.part_bytes));
        }
}

static void prepare(const sw_store *s, const sw_store_run *run)
{
    size_t begin = (size_t)(run->address - base_of(s, (int)s->map.rank));
    size_t bytes = (run->end - run->begin) * sw_dtype_size_bytes(run->dtype);
    if (bytes)
        prepare_bytes(s, begin, begin + bytes);
}

/* Populate what this rank writes first; neighbours together, since a huge page may span both. */
static void populate(const sw_store *s)
{
    const sw_store_map *m = &s->map;
    size_t begin = 0, end = 0;
    if (!s->arena || s->arena->file || !m->has_whole || !sw_store_is_home(m))
        return;
    uint8_t *part = base_of(s, (int)m->rank);
    for (size_t b = 0; b < m->layout.bucket_count; ++b) {
        if (m->form == SW_STORE_PRIVATE && !m->stepped[b])
            continue; /* frozen parameters stay where they are */
        if (m->at[b] != end) {
            populate_range(part, begin, end);
            begin = m->at[b];
        }
        end = m->at[b] + sw_store_bucket_bytes(m, b);
    }
    if (end != m->bucket_bytes) {
        populate_range(part, begin, end);
        begin = m->bucket_bytes;
    }
    populate_range(part, begin, m->part_bytes);
}

/* ---- life ---- */

static sw_status make_units(sw_store *s, sw_error *err)
{
    LABELED(s, what, "units of ");
    const sw_unit_parts parts = {.slices = s->arena->base,
                                 .codes = s->codes ? s->codes->base : NULL,
                                 .world_size = s->map.world_size,
                                 .slice_bytes = s->map.size_bytes,
                                 .code_bytes = s->codes ? s->codes->size_bytes : 0,
                                 .file = s->arena->file,
                                 .code_file = s->codes ? s->codes->file : NULL};
    return sw_units_create(&parts, s->plan.specs, s->plan.form_count, s->plan.warm_bytes, what,
                           &s->units, err);
}

static sw_status build(sw_store *s, const sw_layout *layout, const sw_store_options *options,
                       bool *is_alone, sw_error *err)
{
    *is_alone = true; /* an error is this rank's only */
    SW_TRY(sw_store_map_init(&s->map, s->comm->rank, s->comm->world_size, layout, options, err));
    SW_TRY(sw_store_plan_init(&s->plan, &s->map, options, err));
    *is_alone = false;
    SW_TRY(make_arenas(s, options, is_alone, err));
    *is_alone = true;
    populate(s);
    if (!s->map.has_whole && !s->arena->file) {
        s->is_present = calloc(s->map.part_bytes / WINDOW_BYTES + 1, sizeof *s->is_present);
        if (!s->is_present)
            SW_FAIL(err, SW_E_MEMORY, "%s: no memory for a table of windows", s->label);
    }
    return s->map.form == SW_STORE_UNITS ? make_units(s, err) : SW_OK;
}

sw_status sw_store_create(sw_comm *comm, const sw_layout *layout, const sw_store_options *options,
                          sw_store **store, sw_error *err)
{
    sw_store *s = calloc(1, sizeof *s);
    bool is_alone;
    if (!s)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "%s: no memory for a store", options->label);
    s->comm = comm;
    memcpy(s->label, options->label, (size_t)sw_text_fit(options->label, sizeof s->label - 1));
    sw_status status = build(s, layout, options, &is_alone, err);
    if (status == SW_OK) {
        *store = s;
        return SW_OK;
    }
    if (status == SW_E_MEMORY && is_alone) {
        const sw_error why = *err;
        status = sw_comm_give_up(comm, status, err, "%s", why.message);
    }
    sw_store_destroy(s);
    return status;
}

void sw_store_destroy(sw_store *s)
{
    if (!s)
        return;
    sw_units_destroy(s->units);
    sw_store_plan_fini(&s->plan);
    if (s->codes)
        s->comm->ops->arena_destroy(s->comm, s->codes);
    if (s->arena)
        s->comm->ops->arena_destroy(s->comm, s->arena);
    sw_memory_unmap(s->pages, s->map.size_bytes);
    free(s->is_present);
    sw_store_map_fini(&s->map);
    free(s);
}

/* ---- what it is ---- */

const char *sw_store_reason(const sw_store *s)
{
    return s->reason;
}

const sw_file_memory *sw_store_file(const sw_store *s)
{
    return s->arena ? s->arena->file : NULL;
}

const sw_store_map *sw_store_get_map(const sw_store *s)
{
    return &s->map;
}

size_t sw_store_bytes_held(const sw_store *s)
{
    const sw_store_map *m = &s->map;
    size_t bytes = 0;
    if (m->form == SW_STORE_UNITS)
        return m->part_bytes;
    for (size_t b = 0; b < m->layout.bucket_count; ++b)
        bytes += m->stepped[b] || m->form == SW_STORE_SHARED ? sw_store_bucket_bytes(m, b) : 0;
    for (size_t i = 0; i < m->layout.param_count; ++i)
        if (sw_store_is_narrowed(m, i) && m->beside_count > 1)
            bytes += m->layout.place[i].numel * SW_STORE_NARROW_BYTES;
    return bytes;
}

uint8_t *sw_store_mapped(const sw_store *s, size_t *size_bytes, size_t *bucket_bytes)
{
    *size_bytes = s->arena ? s->map.size_bytes : 0;
    *bucket_bytes = s->map.bucket_bytes;
    return base_of(s, s->map.home);
}

sw_units *sw_store_units(const sw_store *s)
{
    return s->units;
}

const sw_store_plan *sw_store_get_plan(const sw_store *s)
{
    return &s->plan;
}

sw_status sw_store_gather(sw_store *s, size_t index, sw_unit_source source, sw_error *err)
{
    sw_status status = sw_unit_gather(s->units, index, source, err);
    return status == SW_E_OS ? end_here(s, err) : status;
}

/* ---- elements of a parameter ---- */

sw_store_run sw_store_whole(const sw_store *s, size_t index, bool narrow)
{
    const sw_store_map *m = &s->map;
    size_t at = 2 * index + narrow;
    sw_store_run run = {NULL, 0, m->layout.place[index].numel, sw_store_dtype(m, index, narrow)};
    if (m->form == SW_STORE_UNITS) {
        if (s->plan.form[at] != SIZE_MAX)
            run.address = sw_unit_address(s->units, s->plan.form[at]) + s->plan.at[at];
    } else if (!narrow || (sw_store_is_narrowed(m, index) && m->beside_count > 1)) {
        run.address = in_copy(s, index, narrow);
    }
    return run;
}

sw_store_run sw_store_slice(const sw_store *s, size_t index, size_t slice, bool narrow)
{
    sw_store_source source = sw_store_source_of(&s->map, index, slice, narrow);
    return (sw_store_run){base_of(s, source.part) + source.offset_bytes, source.run.begin,
                          source.run.end, sw_store_dtype(&s->map, index, narrow)};
}

static size_t own_slice(const sw_store *s)
{
    return (size_t)s->map.slice_of[s->map.rank];
}

size_t sw_store_pieces(const sw_store *s, size_t index, sw_store_run *piece)
{
    const sw_store_map *m = &s->map;
    size_t numel = m->layout.place[index].numel, count = m->beside_count, made = 0;
    if (!sw_store_has_one_copy(m)) {
        piece[0] = sw_store_slice(s, index, own_slice(s), false);
        prepare(s, &piece[0]);
        return 1;
    }
    if (sw_store_is_by_rows(m, index)) {
        for (size_t slice = m->place; slice < m->slice_count; slice += count)
            piece[made++] = sw_store_slice(s, index, slice, false);
        return made;
    }
    piece[0] = (sw_store_run){.begin = numel * m->place / count,
                              .end = numel * (m->place + 1) / count,
                              .dtype = sw_store_dtype(m, index, false)};
    piece[0].address =
        in_copy(s, index, false) + piece[0].begin * sw_dtype_size_bytes(piece[0].dtype);
    return 1;
}

static void copy_run(const sw_store_run *run, uint8_t *flat, const uint8_t *from)
{
    size_t item = sw_dtype_size_bytes(run->dtype), bytes = (run->end - run->begin) * item;
    if (bytes && from)
        memcpy(run->address, from + run->begin * item, bytes);
    else if (bytes)
        memcpy(flat + run->begin * item, run->address, bytes);
}

sw_status sw_store_read(const sw_store *s, size_t index, void *flat, sw_error *err)
{
    const sw_file_memory *file = sw_store_file(s);
    for (size_t slice = 0; slice < s->map.slice_count; ++slice) {
        sw_store_run run = sw_store_slice(s, index, slice, false);
        size_t item = sw_dtype_size_bytes(run.dtype), bytes = (run.end - run.begin) * item;
        if (file && file->fd >= 0 && bytes) /* other ranks' pages stay out of this one's memory */
            SW_TRY(sw_file_memory_read(file, (uint8_t *)flat + run.begin * item, run.address, bytes,
                                       err));
        else
            copy_run(&run, flat, NULL);
    }
    return SW_OK;
}

void sw_store_write(const sw_store *s, size_t index, const void *flat, sw_store_share share)
{
    if (share == SW_STORE_OWN || (share == SW_STORE_MINE && !s->map.has_whole)) {
        sw_store_run run = sw_store_slice(s, index, own_slice(s), false);
        prepare(s, &run);
        copy_run(&run, NULL, flat);
    } else if (share == SW_STORE_ALL || sw_store_is_home(&s->map)) {
        for (size_t slice = 0; slice < s->map.slice_count; ++slice) {
            sw_store_run run = sw_store_slice(s, index, slice, false);
            copy_run(&run, NULL, flat);
        }
    }
}

void sw_store_adopt(sw_store *s, size_t index)
{
    s->map.stepped[s->map.layout.place[index].bucket] = true;
}

/* ---- casts and records ---- */

static void cast(void *to, sw_dtype narrow, const void *from, sw_dtype wide, size_t numel)
{
    sw_half_narrow_fn *kernel = sw_kernels()->compress->half_narrow;
    float some[CAST_NUMEL];
    const double *source = from;
    if (wide == SW_DTYPE_FLOAT32) {
        kernel(to, from, numel, 1.0f, narrow);
        return;
    }
    for (size_t done = 0, count; done < numel; done += count) {
        count = sw_size_min(numel - done, CAST_NUMEL);
        for (size_t i = 0; i < count; ++i)
            some[i] = (float)source[done + i];
        kernel((uint16_t *)to + done, some, count, 1.0f, narrow);
    }
}

static void cast_slice(const sw_store *s, size_t i, size_t slice)
{
    sw_store_run to = sw_store_slice(s, i, slice, true);
    sw_store_run from = sw_store_slice(s, i, slice, false);
    cast(to.address, s->map.narrow[i], from.address, from.dtype, from.end - from.begin);
}

/* Refresh every `count`-th cast from the `first`, whole in the host's copy or this rank's slices:
 * those of parameters that train, or all. */
static void cast_some(const sw_store *s, size_t first, size_t count, bool all)
{
    const sw_store_map *m = &s->map;
    size_t number = 0;
    for (size_t i = 0; i < m->layout.param_count; ++i) {
        if (!sw_store_is_narrowed(m, i) || number++ % count != first ||
            !(all || sw_store_is_stepped(m, i)))
            continue;
        if (!m->has_whole)
            cast_slice(s, i, own_slice(s));
        else if (sw_store_is_by_rows(m, i))
            for (size_t slice = 0; slice < m->slice_count; ++slice)
                cast_slice(s, i, slice);
        else
            cast(in_copy(s, i, true), m->narrow[i], in_copy(s, i, false),
                 sw_store_dtype(m, i, false), m->layout.place[i].numel);
    }
}

static void cast_mine(const sw_store *s, bool all)
{
    if (s->map.has_casts && !s->map.has_whole)
        cast_some(s, 0, 1, all);
    else if (s->map.has_casts && (s->map.form == SW_STORE_UNITS || s->map.beside_count > 1))
        cast_some(s, s->map.place, s->map.beside_count, all);
}

static void encode(const sw_store *s)
{
    int me = s->comm->rank;
    for (size_t b = 0; s->codes && b < s->map.layout.bucket_count; ++b)
        if (s->map.layout.bucket[b].dtype == SW_DTYPE_FLOAT32)
            sw_kernels()->compress->block_quantize(
                s->codes->base[me] + s->map.at[b] / SW_UNIT_BLOCK_BYTES * SW_UNIT_RECORD_BYTES,
                (const float *)(const void *)(s->arena->base[me] + s->map.at[b]), NULL,
                sw_store_width(&s->map, b), SW_UNIT_BLOCK_NUMEL, 8);
}

void sw_store_derive(sw_store *s)
{
    prepare_bytes(s, s->map.bucket_bytes, s->map.has_casts ? s->map.part_bytes : 0); /* casts */
    if (!s->map.has_whole)
        cast_mine(s, true);
    else if (sw_store_is_home(&s->map)) /* the host's other ranks do not see its writes yet */
        cast_some(s, 0, 1, true);
    encode(s);
}

static sw_status settle(const sw_store *s, const sw_arena *arena, sw_error *err)
{
    size_t part = s->map.has_whole ? (size_t)s->map.home : s->map.rank;
    if (!arena || !arena->file)
        return SW_OK;
    return sw_file_memory_write_back(arena->file, arena->base[part], arena->size_bytes, err);
}

sw_status sw_store_settle(sw_store *s, sw_error *err)
{
    SW_TRY(settle(s, s->arena, err));
    return settle(s, s->codes, err);
}

sw_status sw_store_cast(sw_store *s, bool all, sw_error *err)
{
    LABELED(s, label, "casts of the parameters of ");
    if (!s->map.has_casts)
        return SW_OK;
    cast_mine(s, all);
    return sw_comm_barrier(s->comm, label, err);
}

/* ---- publish ---- */

static uint8_t *outcome_of(const sw_store *s, size_t rank)
{
    return base_of(s, s->map.outcome_home) + s->map.part_bytes +
           (s->turn * s->map.world_size + rank) * SW_ALIGNMENT_BYTES;
}

static bool begin_outcomes(sw_store *s, const sw_store_update *update)
{
    if (!update->tells || s->map.is_replicated || !s->arena ||
        (s->map.form == SW_STORE_UNITS && !s->map.is_one_host))
        return false; /* a rank may not see all ranks' */
    s->turn ^= 1;
    *outcome_of(s, (size_t)s->comm->rank) = update->failed;
    return true;
}

static void end_outcomes(const sw_store *s, sw_store_update *update, bool told)
{
    update->told = told;
    for (size_t r = 0; told && r < s->map.world_size; ++r)
        update->outcomes[r] = *outcome_of(s, r);
}

static bool is_sent(const sw_store *s, const sw_store_update *update, size_t b)
{
    return s->map.stepped[b] || update->all;
}

/* Gather the buckets that a step changes, and the outcomes. */
static sw_status gather_all(sw_store *s, const sw_store_update *update, bool told,
                            const char *label, sw_error *err)
{
    size_t count = 0;
    const sw_slices slices = {(int)s->map.slice_count, s->map.slice_of, s->map.replica_of};
    sw_op op = {.arena = s->arena,
                .one_copy = s->map.form != SW_STORE_PRIVATE,
                .slices = s->map.is_replicated ? &slices : NULL};
    sw_span *spans = malloc((s->map.layout.bucket_count + 1) * sizeof *spans);
    if (!spans)
        return sw_comm_give_up(s->comm, SW_E_MEMORY, err, "%s: no memory for a list of buckets",
                               label);
    for (size_t b = 0; b < s->map.layout.bucket_count; ++b)
        if (is_sent(s, update, b))
            spans[count++] = (sw_span){s->map.at[b], sw_store_bucket_bytes(&s->map, b)};
    if (told)
        spans[count++] = (sw_span){(size_t)(outcome_of(s, 0) - base_of(s, s->map.home)),
                                   s->map.world_size * SW_ALIGNMENT_BYTES};
    sw_op_set_label(&op, label);
    sw_status status = sw_comm_all_gather(s->comm, &op, spans, count, err);
    free(spans);
    return status;
}

/* Without memory that ranks map: each owner of the first replica broadcasts its slices. */
static sw_status broadcast_all(sw_store *s, const sw_store_update *update, const char *label,
                               sw_error *err)
{
    sw_status status = SW_OK;
    sw_range *ranges = malloc((s->map.layout.bucket_count + 1) * sizeof *ranges);
    if (!ranges)
        return sw_comm_give_up(s->comm, SW_E_MEMORY, err, "%s: no memory for a list of buckets",
                               label);
    for (size_t slice = 0; status == SW_OK && slice < s->map.slice_count; ++slice) {
        size_t count = 0, root = 0;
        while (s->map.slice_of[root] != (int)slice || s->map.replica_of[root] != 0)
            ++root;
        for (size_t b = 0; b < s->map.layout.bucket_count; ++b)
            if (is_sent(s, update, b)) {
                size_t bytes = sw_store_bucket_bytes(&s->map, b) / s->map.slice_count;
                ranges[count++] =
                    (sw_range){base_of(s, s->map.home) + s->map.at[b] + slice * bytes, bytes};
            }
        if (count)
            status = sw_comm_broadcast(s->comm, ranges, count, (int)root, label, err);
    }
    free(ranges);
    return status;
}

static bool sends_any(const sw_store *s, const sw_store_update *update)
{
    for (size_t b = 0; b < s->map.layout.bucket_count; ++b)
        if (is_sent(s, update, b))
            return true;
    return false;
}

static sw_status publish_units(sw_store *s, const sw_store_update *update, bool told,
                               const char *label, sw_error *err)
{
    LABELED(s, slices, "updated slices of ");
    LABELED(s, casts, "casts of ");
    if (s->codes) { /* slices of any rank */
        SW_TRY(sw_comm_barrier(s->comm, slices, err));
        encode(s);
    }
    if (s->map.has_casts && !s->map.has_whole) {
        if (update->foreign)
            SW_TRY(sw_comm_barrier(s->comm, slices, err));
        cast_mine(s, update->all);
    }
    if (s->map.has_whole && !update->foreign && sends_any(s, update))
        SW_TRY(gather_all(s, update, told, label, err));
    else
        SW_TRY(sw_comm_barrier(s->comm, label, err));
    if (!s->map.has_casts || !s->map.has_whole)
        return SW_OK;
    cast_mine(s, update->all);
    return sw_comm_barrier(s->comm, casts, err);
}

static sw_status publish_whole(sw_store *s, const sw_store_update *update, bool *told,
                               const char *label, sw_error *err)
{
    if (s->map.form == SW_STORE_SHARED && (!s->map.is_apart || !sends_any(s, update))) {
        *told = *told && !s->map.is_apart;
        SW_TRY(sw_comm_barrier(s->comm, label, err));
    } else {
        SW_TRY(s->arena ? gather_all(s, update, *told, label, err)
                        : broadcast_all(s, update, label, err));
    }
    return sw_store_cast(s, update->all, err);
}

sw_status sw_store_publish(sw_store *s, sw_store_update *update, sw_error *err)
{
    LABELED(s, label, "updated parameters of ");
    bool told = begin_outcomes(s, update);
    SW_TRY(s->map.form == SW_STORE_UNITS ? publish_units(s, update, told, label, err)
                                         : publish_whole(s, update, &told, label, err));
    end_outcomes(s, update, told);
    if (s->units)
        sw_units_end_step(s->units);
    return sw_store_settle(s, err) == SW_OK ? SW_OK : end_here(s, err);
}
