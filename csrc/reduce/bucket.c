/* bucket.c - the trailers of a bucket and the plan of its fold. */
#include <string.h>

#include "base/bytes.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"
#include "reduce/host_rounds_state.h"

enum { STORE_NUMEL = 512 };

trailer *sw_bucket_trailer(const host_bucket *b, int rank)
{
    const host_rounds *host = b->host;
    return (trailer *)(void *)(host->memory->trailers->base[rank] +
                               host->parity * host->trailer_stride_bytes + b->trailer_offset_bytes);
}

void sw_bucket_read_trailers(host_bucket *b, bool *contributes, int *abandoned_by)
{
    const host_rounds *host = b->host;
    size_t count = host->base.layout.bucket[b->common->index].count;
    *abandoned_by = -1;
    b->any_accumulated = false;
    memset(b->any, 0, sw_words_of(count) * sizeof *b->any);
    for (int r = 0; r < host->comm->world_size; ++r) {
        const trailer *t = sw_bucket_trailer(b, r);
        contributes[r] = t->contributes != 0;
        if (t->abandoned && *abandoned_by < 0)
            *abandoned_by = r;
        for (size_t w = 0; w < sw_words_of(count); ++w) {
            b->any[w] |= t->bits[w];
            b->any_accumulated |= t->bits[sw_words_of(count) + w] != 0;
        }
    }
    b->all_used = true;
    for (size_t i = 0; i < count && b->all_used; ++i)
        b->all_used = sw_bit_is_set(b->any, i);
}

static void plan_resolve(void *context, bool *contributes, double *scale)
{
    host_bucket *b = context;
    int world_size = b->host->comm->world_size, abandoned_by, active = 0;
    sw_bucket_read_trailers(b, contributes, &abandoned_by);
    for (int r = 0; r < world_size; ++r) {
        if (abandoned_by >= 0)
            contributes[r] = false;
        active += contributes[r];
    }
    b->divisor = b->host->base.divide_by_active && active > 0 ? active : world_size;
    *scale = 1.0 / b->divisor;
    bool coded = b->op.codec && !b->host->base.stays_in_rows;
    for (size_t k = 0; coded && k < b->host->base.layout.bucket[b->common->index].count; ++k)
        b->op.codec->ops->select(b->op.codec, b->common->index, k, sw_bit_is_set(b->any, k));
}

/* The parameters of a bucket in memory order, from `cursor` on: of each slice in turn, if it is cut
 * by rows. */
typedef struct walk {
    const sw_layout *layout;
    const sw_layout_bucket *shape;
    size_t slice, next; /* the slice; the next parameter's number in the bucket */
    size_t from;        /* the element of the parameter with which the last run began */
} walk;

static walk walk_from(const host_bucket *b, size_t cursor)
{
    const sw_layout *layout = &b->host->base.layout;
    const sw_layout_bucket *shape = &layout->bucket[b->common->index];
    size_t slice = shape->by_rows ? cursor / sw_layout_slice_numel(layout, b->common->index) : 0;
    return (walk){.layout = layout, .shape = shape, .slice = slice};
}

/* Return the next parameter's number in the bucket, and its elements there; false after the last.
 */
static bool walk_on(walk *w, size_t *number, size_t *begin, size_t *end)
{
    if (w->next == w->shape->count) {
        w->next = 0;
        w->slice++;
    }
    if (w->shape->count == 0 || w->slice >= (w->shape->by_rows ? w->layout->slice_count : 1))
        return false;
    const sw_layout_place *place = &w->layout->place[w->layout->order[w->shape->first + w->next]];
    sw_layout_run run = {.begin = 0, .end = place->numel, .first = place->begin};
    size_t first = 0;
    if (w->shape->by_rows) {
        first = w->slice * (w->shape->numel / w->layout->slice_count);
        run = sw_layout_run_in(w->layout, w->layout->order[w->shape->first + w->next], w->slice,
                               w->layout->slice_count);
    }
    w->from = run.begin;
    *number = w->next++;
    *begin = first + run.first;
    *end = *begin + (run.end - run.begin);
    return true;
}

static bool plan_next_run(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel)
{
    const host_bucket *b = context;
    *begin = cursor;
    *numel = end - cursor;
    if (b->all_used)
        return true;
    size_t run_end = 0, i, place_begin, place_end;
    bool found = false;
    for (walk w = walk_from(b, cursor); walk_on(&w, &i, &place_begin, &place_end);) {
        if (place_end <= cursor || place_begin == place_end)
            continue;
        if (place_begin >= end)
            break;
        if (!sw_bit_is_set(b->any, i)) {
            if (found)
                break;
            continue;
        }
        if (!found)
            *begin = sw_size_max(cursor, place_begin);
        found = true;
        run_end = sw_size_min(end, place_end);
    }
    *numel = found ? run_end - *begin : 0;
    return found;
}

/* By rows: a codec sees each parameter whole. */
static bool plan_next_coded(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel,
                            size_t *at)
{
    const host_bucket *b = context;
    size_t i, place_begin, place_end;
    for (walk w = walk_from(b, cursor); walk_on(&w, &i, &place_begin, &place_end);) {
        *begin = sw_size_max(cursor, place_begin);
        if (*begin >= end)
            return false;
        *numel = sw_size_min(end, place_end) - *begin;
        *at = b->coded_at[i] + w.from + (*begin - place_begin);
        if (place_end > *begin)
            return true;
    }
    return false;
}

static bool plan_accumulates(void *context)
{
    return ((const host_bucket *)context)->any_accumulated;
}

/* Add the accumulated mean to the contributions of [begin, begin + numel) that include it, with the
 * rounding of autograd's own addition. Only the folding rank reads them, and no rank writes them
 * until the fold is done. */
static void plan_add_accumulated(void *context, size_t begin, size_t numel, const void *accumulated)
{
    const host_bucket *b = context;
    const host_rounds *host = b->host;
    const sw_layout_bucket *shape = &host->base.layout.bucket[b->common->index];
    size_t element_bytes = sw_dtype_size_bytes(b->op.dtype), i, place_begin, place_end;
    for (walk w = walk_from(b, begin); walk_on(&w, &i, &place_begin, &place_end);) {
        if (place_begin >= begin + numel)
            break;
        size_t from = sw_size_max(begin, place_begin), to = sw_size_min(begin + numel, place_end);
        for (int r = 0; from < to && r < host->comm->world_size; ++r) {
            uint8_t *base = host->memory->arena->base[r];
            if (!base ||
                !sw_bit_is_set(sw_bucket_trailer(b, r)->bits + sw_words_of(shape->count), i))
                continue;
            void *part = base + b->op.offset_bytes + from * element_bytes;
            const void *sources[] = {(const uint8_t *)accumulated + (from - begin) * element_bytes,
                                     part};
            sw_kernels()->fold[b->op.dtype](&part, 1, sources, 2, to - from, 1, SW_REDOP_SUM);
        }
    }
}

size_t sw_bucket_accumulated_ranks(const host_bucket *b, size_t k)
{
    size_t words = sw_words_of(b->host->base.layout.bucket[b->common->index].count), found = 0;
    for (int r = 0; r < b->host->comm->world_size; ++r)
        found += sw_bit_is_set(sw_bucket_trailer(b, r)->bits + words, k);
    return found;
}

void sw_bucket_add_mean(const host_bucket *b, void *to, const void *mean, size_t numel,
                        size_t lacking)
{
    sw_fold_fn *fold = sw_kernels()->fold[b->op.dtype];
    const void *there[] = {to, mean};
    double kept = (double)lacking / b->divisor;
    if (lacking == 0) {
        memcpy(to, mean, numel * sw_dtype_size_bytes(b->op.dtype));
        return;
    }
    if (kept != 1)
        fold(&to, 1, there, 1, numel, kept, SW_REDOP_MEAN);
    fold(&to, 1, there, 2, numel, 1, SW_REDOP_SUM);
}

/* Round float32 means to the bucket's dtype, and turn means over all ranks into those over the
 * ranks that train. */
static void round_means(const host_bucket *b, void *out, const float *mean, size_t numel)
{
    sw_dtype dtype = b->op.dtype;
    int world_size = b->host->comm->world_size;
    bool is_half = dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
    bool is_wide = dtype == SW_DTYPE_FLOAT64 || dtype == SW_DTYPE_COMPLEX128;
    double *doubles = out;
    size_t bytes = numel * sw_dtype_size_bytes(dtype);
    if (is_half)
        sw_kernels()->compress->half_narrow(out, mean, numel, 1, dtype);
    else if (!is_wide)
        memcpy(out, mean, bytes);
    for (size_t i = 0; is_wide && i < bytes / sizeof *doubles; ++i)
        doubles[i] = (double)mean[i];
    if (b->divisor != world_size)
        sw_kernels()->fold[dtype](&out, 1, (const void *const[]){out}, 1, numel,
                                  (double)world_size / b->divisor, SW_REDOP_MEAN);
}

static void plan_store(void *context, size_t begin, size_t numel, const float *mean, void *to)
{
    const host_bucket *b = context;
    size_t bytes = sw_dtype_size_bytes(b->op.dtype), i, place_begin, place_end;
    size_t lanes = b->op.dtype == SW_DTYPE_COMPLEX64 || b->op.dtype == SW_DTYPE_COMPLEX128 ? 2 : 1;
    uint64_t rounded[2 * STORE_NUMEL];
    for (walk w = walk_from(b, begin); walk_on(&w, &i, &place_begin, &place_end);) {
        size_t from = sw_size_max(begin, place_begin), end = sw_size_min(begin + numel, place_end);
        if (place_begin >= begin + numel)
            break;
        size_t lacking = from < end && b->plan.accumulates ? sw_bucket_accumulated_ranks(b, i) : 0;
        for (size_t count; from < end; from += count) {
            count = sw_size_min(STORE_NUMEL, end - from);
            round_means(b, rounded, mean + (from - begin) * lanes, count);
            sw_bucket_add_mean(b, (uint8_t *)to + (from - begin) * bytes, rounded, count, lacking);
        }
    }
}

void sw_bucket_write_trailer(host_bucket *b)
{
    const host_rounds *host = b->host;
    const sw_reducer *reducer = &host->base;
    const sw_layout_bucket *shape = &host->base.layout.bucket[b->common->index];
    trailer *t = sw_bucket_trailer(b, host->comm->rank);
    memset(t, 0, b->trailer_bytes);
    t->contributes = reducer->contributes;
    t->abandoned = reducer->abandoned;
    t->stepped = reducer->stepped;
    t->forwards = reducer->round_forwards;
    for (size_t i = 0; reducer->contributes && i < shape->count; ++i) {
        const param_state *state = &reducer->params[reducer->layout.order[shape->first + i]];
        t->bits[i / 32] |= (uint32_t)(state->used | state->kept) << (i % 32);
        t->bits[sw_words_of(shape->count) + i / 32] |= (uint32_t)state->accumulated << (i % 32);
    }
}

void sw_bucket_plan(host_bucket *b, bool accumulated)
{
    b->plan = (sw_fold_plan){.context = b,
                             .resolve = plan_resolve,
                             .next_run = plan_next_run,
                             .store = plan_store,
                             .next_coded = b->coded_at ? plan_next_coded : NULL,
                             .accumulates = accumulated ? plan_accumulates : NULL,
                             .add_accumulated = accumulated ? plan_add_accumulated : NULL};
    b->op.plan = &b->plan;
}
