/* host_codec.c - means of a reducer on the host that travel through a compressor.
 *
 * Over hosts the compressor is the codec of each bucket's operation: buckets are posted as without
 * one, and the carriers compress what they exchange (comm/hier_codec.c). Private buckets travel
 * through memory that this host's ranks map. On one host all ranks compress, at the end of a
 * backward, over shared memory: each bucket once the use bits are known.
 *
 * A bucket by rows is compressed in memory of its own, where each parameter lies whole, as
 * compressors see it in any bucket; this rank then takes its rows of the result. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "compress/shared_exchange.h"
#include "kernels/kernels.h"
#include "reduce/host_rounds_state.h"

static host_rounds *host_of(sw_reducer *reducer)
{
    return (host_rounds *)(void *)reducer;
}

/* Floats of an element: complex numbers are compressed as pairs. */
static size_t lanes_of(sw_dtype dtype)
{
    return dtype == SW_DTYPE_COMPLEX64 || dtype == SW_DTYPE_COMPLEX128 ? 2 : 1;
}

static sw_status describe(host_rounds *host, size_t bucket_index, sw_compressor *compressor,
                          sw_error *err)
{
    const sw_layout *layout = &host->base.layout;
    const sw_layout_bucket *shape = &layout->bucket[bucket_index];
    size_t lanes = lanes_of(shape->dtype);
    const char *label = host->base.buckets[bucket_index].label;
    sw_compressor_member *members = calloc(shape->count + 1, sizeof *members);
    size_t *whole = shape->by_rows ? calloc(shape->count + 1, sizeof *whole) : NULL;
    size_t at = 0, aligned = SW_ALIGNMENT_BYTES / sw_dtype_size_bytes(shape->dtype);
    if (!members || (shape->by_rows && !whole)) {
        free(members), free(whole);
        SW_FAIL(err, SW_E_MEMORY, "%s: no memory for %zu members", label, shape->count);
    }
    for (size_t k = 0; k < shape->count; ++k) {
        size_t param = layout->order[shape->first + k];
        const sw_layout_place *place = &layout->place[param];
        size_t begin = shape->by_rows ? at : place->begin;
        if (whole)
            whole[k] = at;
        members[k] = (sw_compressor_member){
            .entry = param, .offset = begin * lanes, .numel = place->numel * lanes};
        at += (place->numel + aligned - 1) / aligned * aligned;
    }
    sw_status status =
        sw_compressor_set_bucket(compressor, bucket_index, members, shape->count, err);
    free(members);
    free(host->buckets[bucket_index].coded_at);
    host->buckets[bucket_index].coded_at = whole;
    host->buckets[bucket_index].op.codec_numel = whole ? at : 0;
    sw_bucket_plan(&host->buckets[bucket_index], host->ring);
    return status;
}

static size_t largest_bucket(const host_rounds *host)
{
    size_t most = 0;
    for (size_t i = 0; i < host->base.layout.bucket_count; ++i)
        most = sw_size_max(most, sw_bucket_bytes(&host->base, i));
    return most;
}

/* Return true if slice r is rank r's alone, for every rank. */
static bool slices_are_ranks(const host_rounds *host)
{
    bool found = host->base.slice_count == host->comm->world_size;
    for (int r = 0; found && host->owners && r < host->comm->world_size; ++r)
        found = host->owners[r] == r;
    return found;
}

sw_status sw_reducer_set_compressor(sw_reducer *reducer, sw_compressor *compressor, bool *at_end,
                                    sw_error *err)
{
    host_rounds *host = host_of(reducer);
    if (reducer->ops->traits.on_device)
        SW_FAIL(err, SW_E_UNSUPPORTED, "a compressor of the host was given to a reducer on a GPU");
    if (reducer->state != SW_ROUND_CLOSED || reducer->compressor)
        SW_FAIL(err, SW_E_STATE, "a compressor is set once, between two rounds");
    if (sw_compressor_count(compressor) != reducer->layout.param_count)
        SW_FAIL(err, SW_E_INVALID, "a compressor of %zu parameters was given to a model of %zu",
                sw_compressor_count(compressor), reducer->layout.param_count);
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        SW_TRY(describe(host, i, compressor, err));
    host->keeps_slice = host->ring && slices_are_ranks(host);
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i)
        host->keeps_slice = host->keeps_slice && !reducer->layout.bucket[i].by_rows;
    *at_end = !host->comm->is_carried;
    if (*at_end)
        SW_TRY(sw_shared_exchange_create(host->comm, &host->exchange, err));
    else if (host->memory->transport != SW_TRANSPORT_POOL)
        SW_TRY(host->comm->ops->arena_create(host->comm, largest_bucket(host),
                                             "buckets to compress", &host->bounce, err));
    sw_compressor_codec(compressor)->ops->acquire(sw_compressor_codec(compressor));
    reducer->compressor = compressor;
    for (size_t i = 0; !*at_end && i < reducer->layout.bucket_count; ++i) {
        host->buckets[i].op.codec = sw_compressor_codec(compressor);
        host->buckets[i].op.codec_bucket = i;
    }
    return SW_OK;
}

void sw_host_rounds_drop_compressor(host_rounds *host)
{
    if (host->bounce)
        host->comm->ops->arena_destroy(host->comm, host->bounce);
    sw_shared_exchange_destroy(host->exchange);
}

sw_status sw_host_rounds_bounce(host_rounds *host, host_bucket *b, sw_error *err)
{
    size_t bytes = sw_bucket_bytes(&host->base, b->common->index);
    uint8_t *shared = host->bounce->base[host->comm->rank];
    sw_op op = b->op;
    op.arena = host->bounce;
    op.offset_bytes = 0;
    op.data = NULL;
    memcpy(shared, b->op.data, bytes);
    SW_TRY(host->comm->ops->run(host->comm, &op, err));
    memcpy(b->op.data, shared, bytes);
    return SW_OK;
}

/* ---- one host ---- */

typedef struct one_host {
    host_rounds *host;
    host_bucket *b;
    const sw_layout_bucket *shape;
    const sw_compressor_member *members; /* by rows their offsets are those in `data` */
    uint8_t *data;                       /* the bucket's place; by rows, owned */
    size_t element_bytes, end;           /* behind the last parameter */
} one_host;

static size_t begin_of(const one_host *one, size_t k)
{
    return one->members[k].offset / lanes_of(one->shape->dtype);
}

static const sw_layout_place *place_of(const one_host *one, size_t k)
{
    const sw_layout *layout = &one->host->base.layout;
    return &layout->place[layout->order[one->shape->first + k]];
}

static bool is_used(const one_host *one, size_t k)
{
    return sw_bit_is_set(one->b->any, k);
}

/* Fill the gaps between parameters, and behind the last, with zeros up to `end`. */
static void clear_gaps(const one_host *one, size_t end)
{
    size_t at = 0;
    for (size_t k = 0; k < one->shape->count; ++k) {
        const sw_layout_place *place = place_of(one, k);
        size_t begin = begin_of(one, k);
        if (begin > at)
            memset(one->data + at * one->element_bytes, 0, (begin - at) * one->element_bytes);
        at = sw_size_max(at, begin + place->numel);
    }
    memset(one->data + at * one->element_bytes, 0, (end - at) * one->element_bytes);
}

/* Copy the parameters that no rank used to `saved`, or back. */
static void keep_unused(const one_host *one, uint8_t *saved, bool back)
{
    for (size_t k = 0; k < one->shape->count; ++k) {
        const sw_layout_place *place = place_of(one, k);
        uint8_t *at = one->data + begin_of(one, k) * one->element_bytes;
        size_t bytes = place->numel * one->element_bytes;
        if (is_used(one, k))
            continue;
        memcpy(back ? at : saved, back ? saved : at, bytes);
        saved += bytes;
    }
}

static size_t unused_bytes(const one_host *one)
{
    size_t found = 0;
    for (size_t k = 0; k < one->shape->count; ++k)
        found += is_used(one, k) ? 0 : place_of(one, k)->numel * one->element_bytes;
    return found;
}

/* By rows: copy the parameters from the bucket's place to memory where each is whole, or back. */
static void gather_rows(const one_host *one, bool back)
{
    const sw_reducer *reducer = &one->host->base;
    for (size_t k = 0; k < one->shape->count; ++k) {
        size_t index = reducer->layout.order[one->shape->first + k], numel;
        uint8_t *whole = one->data + begin_of(one, k) * one->element_bytes;
        for (size_t begin = 0; begin < place_of(one, k)->numel; begin += numel) {
            uint8_t *rows = sw_reducer_run(reducer, index, begin, &numel);
            uint8_t *here = whole + begin * one->element_bytes;
            memcpy(back ? rows : here, back ? here : rows, numel * one->element_bytes);
        }
    }
}

/* Return this rank's first element of a parameter, in `data`. */
static size_t own_begin(const one_host *one, size_t k)
{
    const sw_reducer *reducer = &one->host->base;
    size_t slices = (size_t)reducer->slice_count, own = (size_t)reducer->own_slice;
    if (!one->shape->by_rows)
        return sw_size_max(own * (one->shape->numel / slices), begin_of(one, k));
    sw_layout_run run = sw_layout_run_in(&reducer->layout,
                                         reducer->layout.order[one->shape->first + k], own, slices);
    return begin_of(one, k) + run.begin;
}

/* Ring: move this rank's slices of the means out of the bucket's place. */
static void keep_slices(const one_host *one)
{
    const sw_reducer *reducer = &one->host->base;
    const sw_layout *layout = &reducer->layout;
    for (size_t k = 0; k < one->shape->count; ++k) {
        size_t numel;
        uint8_t *to = sw_reducer_result(reducer, layout->order[one->shape->first + k], &numel);
        if (is_used(one, k) && numel)
            sw_bucket_add_mean(one->b, to, one->data + own_begin(one, k) * one->element_bytes,
                               numel, sw_bucket_accumulated_ranks(one->b, k));
    }
}

static sw_dtype real_of(sw_dtype dtype)
{
    return dtype == SW_DTYPE_COMPLEX64    ? SW_DTYPE_FLOAT32
           : dtype == SW_DTYPE_COMPLEX128 ? SW_DTYPE_FLOAT64
                                          : dtype;
}

static sw_status average(const one_host *one, sw_error *err)
{
    host_rounds *host = one->host;
    sw_compressor *compressor = host->base.compressor;
    sw_codec *codec = sw_compressor_codec(compressor);
    int world_size = host->comm->world_size;
    size_t lanes = lanes_of(one->shape->dtype);
    size_t numel = host->keeps_slice ? one->shape->numel : one->end;
    size_t share = sw_comm_slice_numel(one->end, one->element_bytes, world_size);
    void *data = one->data;
    if (one->end == 0) { /* no elements, on any rank */
        one->b->divisor = (int)sw_reducer_divisor(&host->base);
        return SW_OK;
    }
    for (size_t k = 0; k < one->shape->count; ++k)
        codec->ops->select(codec, one->b->common->index, k, is_used(one, k));
    clear_gaps(one, numel);
    SW_TRY(sw_compressor_average_bucket(compressor, one->b->common->index, share * lanes,
                                        host->keeps_slice, data, numel * lanes,
                                        real_of(one->shape->dtype), host->exchange, err));
    one->b->divisor = (int)sw_reducer_divisor(&host->base);
    if (one->b->divisor != world_size)
        sw_kernels()->fold[one->shape->dtype](&data, 1, (const void *const[]){data}, 1, numel,
                                              (double)world_size / one->b->divisor, SW_REDOP_MEAN);
    return SW_OK;
}

static bool is_last(const sw_reducer *reducer, size_t bucket_index)
{
    while (++bucket_index < reducer->layout.bucket_count)
        if (reducer->buckets[bucket_index].takes_part)
            return false;
    return true;
}

sw_status sw_reducer_compress(sw_reducer *reducer, size_t bucket_index, sw_error *err)
{
    host_rounds *host = host_of(reducer);
    one_host one = {.host = host,
                    .b = &host->buckets[bucket_index],
                    .shape = &reducer->layout.bucket[bucket_index],
                    .data = sw_reducer_slot(reducer, bucket_index)};
    size_t count;
    one.members = sw_compressor_members(reducer->compressor, bucket_index, &count);
    one.element_bytes = sw_dtype_size_bytes(one.shape->dtype);
    for (size_t k = 0; k < one.shape->count; ++k)
        one.end = sw_size_max(one.end, begin_of(&one, k) + place_of(&one, k)->numel);
    if (one.shape->by_rows) {
        one.data = malloc(one.shape->numel * one.element_bytes + 1);
        if (!one.data)
            return sw_comm_give_up(host->comm, SW_E_MEMORY, err,
                                   "no memory for a bucket of %zu elements", one.shape->numel);
        gather_rows(&one, false);
    }
    size_t unused = host->ring ? 0 : unused_bytes(&one);
    uint8_t *saved = unused ? malloc(unused) : NULL;
    if (unused && !saved) {
        free(one.shape->by_rows ? one.data : NULL);
        return sw_comm_give_up(host->comm, SW_E_MEMORY, err, "no memory for unused gradients");
    }
    if (saved)
        keep_unused(&one, saved, false);
    sw_status status = average(&one, err);
    if (status == SW_E_MEMORY) { /* the peers wait for this rank */
        const sw_error why = *err;
        status = sw_comm_give_up(host->comm, status, err, "%s", why.message);
    }
    if (saved)
        keep_unused(&one, saved, true);
    free(saved);
    if (status == SW_OK && host->ring)
        keep_slices(&one);
    else if (status == SW_OK && one.shape->by_rows)
        gather_rows(&one, true);
    free(one.shape->by_rows ? one.data : NULL);
    if (status == SW_OK && is_last(reducer, bucket_index))
        sw_compressor_count_round(reducer->compressor);
    return status;
}
