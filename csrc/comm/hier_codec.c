/* hier_codec.c - a reduction over hosts with a codec: the sum of a host's ranks travels compressed.
 *
 * The fold inside the host is not compressed: float32, in rank order. The carrier turns the mean
 * over hosts into the mean over ranks (H / W), runs the codec's two-step exchange over the bridge,
 * and stores the result in the memory of its host's ranks. A host of any number of ranks sends the
 * bytes of one, and only its carrier keeps the codec's state.
 *
 * Between hosts a message travels in blocks of 256 KiB, each sent once the block six before it has
 * arrived from that peer: messages of megabytes in both directions would fill the link's queues. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/hier_block.h"
#include "comm/hier_carrier_state.h"

/* ---- the exchange over the bridge ---- */

static sw_coded *coded_of(sw_exchange *exchange)
{
    return (sw_coded *)(void *)exchange;
}

static sw_status reserve_transfers(sw_coded *coded, size_t count, sw_error *err)
{
    if (count <= coded->transfer_count)
        return SW_OK;
    free(coded->in); /* every transfer of an earlier message has been waited for */
    coded->transfer_count = 0;
    coded->in = calloc(2 * count, sizeof *coded->in);
    if (!coded->in)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu messages between hosts", count);
    coded->out = coded->in + count;
    coded->transfer_count = count;
    return SW_OK;
}

typedef struct movement { /* host g gets to + g * to_stride, and fills into + g * into_stride */
    sw_message message;
    const uint8_t *to;
    uint8_t *into;
    size_t to_stride, into_stride, size_bytes, block_count;
} movement;

static size_t block_bytes(const movement *m, size_t block)
{
    return sw_size_min(SW_HIER_BLOCK_BYTES, m->size_bytes - block * SW_HIER_BLOCK_BYTES);
}

static sw_status expect(sw_coded *coded, const movement *m, size_t block, sw_error *err)
{
    sw_carrier *carrier = coded->carrier;
    size_t hosts = (size_t)carrier->hier->map.host_count;
    SW_FOR_OTHER_HOSTS(carrier, g)
        SW_TRY(
            sw_carrier_receive(carrier, g, m->message, carrier->blocks + (uint32_t)block,
                               m->into + (size_t)g * m->into_stride + block * SW_HIER_BLOCK_BYTES,
                               block_bytes(m, block), &coded->in[block * hosts + (size_t)g], err));
    return SW_OK;
}

static sw_status send(sw_coded *coded, const movement *m, size_t block, sw_error *err)
{
    sw_carrier *carrier = coded->carrier;
    size_t hosts = (size_t)carrier->hier->map.host_count;
    SW_FOR_OTHER_HOSTS(carrier, g)
        SW_TRY(sw_carrier_send(carrier, g, m->message, carrier->blocks + (uint32_t)block,
                               m->to + (size_t)g * m->to_stride + block * SW_HIER_BLOCK_BYTES,
                               block_bytes(m, block), &coded->out[block * hosts + (size_t)g], err));
    return SW_OK;
}

static sw_status await(sw_coded *coded, sw_transfer *transfers, size_t block, sw_error *err)
{
    sw_carrier *carrier = coded->carrier;
    size_t hosts = (size_t)carrier->hier->map.host_count;
    SW_FOR_OTHER_HOSTS(carrier, g)
        SW_TRY(sw_carrier_wait(carrier, &transfers[block * hosts + (size_t)g], err));
    return SW_OK;
}

static sw_status move(sw_coded *coded, movement m, sw_error *err)
{
    sw_carrier *carrier = coded->carrier;
    m.block_count = (m.size_bytes + SW_HIER_BLOCK_BYTES - 1) / SW_HIER_BLOCK_BYTES;
    SW_TRY(reserve_transfers(coded, m.block_count * (size_t)carrier->hier->map.host_count, err));
    for (size_t b = 0; b < m.block_count; ++b)
        SW_TRY(expect(coded, &m, b, err));
    for (size_t b = 0; b < m.block_count + SW_HIER_AHEAD; ++b) {
        if (b >= SW_HIER_AHEAD)
            SW_TRY(await(coded, coded->in, b - SW_HIER_AHEAD, err));
        if (b < m.block_count)
            SW_TRY(send(coded, &m, b, err));
    }
    for (size_t b = 0; b < m.block_count; ++b)
        SW_TRY(await(coded, coded->out, b, err));
    carrier->blocks += (uint32_t)m.block_count;
    return SW_OK;
}

static sw_status begin(sw_exchange *exchange, uint8_t **message, uint8_t **result, sw_error *err)
{
    return sw_exchange_buffers_begin(&coded_of(exchange)->buffers, exchange, message, result, err);
}

static sw_status scatter(sw_exchange *exchange, const void **pieces, sw_error *err)
{
    sw_coded *coded = coded_of(exchange);
    size_t size = exchange->slice_bytes;
    for (int g = 0; g < exchange->world_size; ++g)
        pieces[g] = coded->buffers.received + (size_t)g * size;
    pieces[exchange->rank] = coded->buffers.message + (size_t)exchange->rank * size;
    return move(coded,
                (movement){.message = SW_MESSAGE_PARTIAL,
                           .to = coded->buffers.message,
                           .into = coded->buffers.received,
                           .to_stride = size,
                           .into_stride = size,
                           .size_bytes = size},
                err);
}

static sw_status gather(sw_exchange *exchange, uint8_t **whole, sw_error *err)
{
    sw_coded *coded = coded_of(exchange);
    size_t size = exchange->slice_bytes;
    *whole = coded->buffers.whole;
    memcpy(*whole + (size_t)exchange->rank * size, coded->buffers.result, size);
    return move(coded,
                (movement){.message = SW_MESSAGE_RESULT,
                           .to = coded->buffers.result,
                           .into = *whole,
                           .into_stride = size,
                           .size_bytes = size},
                err);
}

/* Two hosts swap a message of one block whole: it costs as much as a half of it, and one step. */
static sw_status swap(sw_exchange *exchange, const void **pieces, uint8_t **whole, bool *swapped,
                      sw_error *err)
{
    sw_coded *coded = coded_of(exchange);
    size_t size = exchange->slice_bytes * (size_t)exchange->world_size;
    *swapped = exchange->world_size == 2 && size <= SW_HIER_BLOCK_BYTES;
    if (!*swapped)
        return SW_OK;
    pieces[exchange->rank] = coded->buffers.message;
    pieces[1 - exchange->rank] = coded->buffers.received;
    *whole = coded->buffers.whole;
    return move(coded,
                (movement){.message = SW_MESSAGE_PARTIAL,
                           .to = coded->buffers.message,
                           .into = coded->buffers.received,
                           .size_bytes = size},
                err);
}

static const sw_exchange_ops bridge_ops = {
    .begin = begin, .scatter = scatter, .gather = gather, .swap = swap};

/* ---- an operation ---- */

typedef struct coded_sum {
    const sw_hier_pending *pending;
    sw_dtype real;     /* of one float: complex numbers are pairs */
    size_t lanes;      /* floats an element */
    bool *contributes; /* borrowed: by rank */
    int contributors;
} coded_sum;

/* Return the next elements to fold or to store that are adjacent in the codec's memory, from *at.
 */
static bool next_coded(const coded_sum *sum, size_t cursor, size_t end, size_t *begin,
                       size_t *numel, size_t *at)
{
    const sw_fold_plan *plan = sum->pending->op.plan;
    if (!sw_op_next_run(&sum->pending->op, 0, cursor, end, begin, numel))
        return false;
    *at = *begin;
    return !plan || !plan->next_coded ||
           plan->next_coded(plan->context, *begin, *begin + *numel, begin, numel, at);
}

/* Add float64 values to a sum, each rounded to float32. */
static void add_doubles(float *sum, const double *values, size_t numel, bool is_first)
{
    for (size_t i = 0; i < numel; ++i)
        sum[i] = is_first ? (float)values[i] : sum[i] + (float)values[i];
}

/* Fold this host's contributions to a run, which the codec has at `at`, in rank order. */
static void fold_run(sw_carrier *carrier, const coded_sum *sum, size_t begin, size_t numel,
                     size_t at)
{
    float *flat = carrier->coded.flat + at * sum->lanes;
    int count = 0;
    for (int l = 0; l < carrier->hier->local_count; ++l) {
        if (!sum->contributes[carrier->hier->members[l]])
            continue;
        const uint8_t *source = sw_carrier_contribution(carrier, sum->pending, l, begin);
        if (sum->real == SW_DTYPE_FLOAT64)
            add_doubles(flat, (const double *)(const void *)source, numel * sum->lanes, count == 0);
        carrier->source[count++] = source;
    }
    if (count > 0 && sum->real != SW_DTYPE_FLOAT64)
        sw_partial_fold(flat, carrier->source, count, numel * sum->lanes, sum->real, SW_REDOP_SUM);
}

static sw_status fold_host(sw_carrier *carrier, coded_sum *sum, sw_error *err)
{
    const sw_op *op = &sum->pending->op;
    const sw_host_map *map = &carrier->hier->map;
    size_t begin, run, at;
    double scale;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    sw_op_resolve(op, map->world_size, sum->contributes, &scale);
    for (int r = 0; r < map->world_size; ++r)
        sum->contributors += sum->contributes[r];
    for (size_t cursor = 0;
         sum->contributors && next_coded(sum, cursor, op->numel, &begin, &run, &at);
         cursor = begin + run)
        fold_run(carrier, sum, begin, run, at);
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

/* Store the mean of [begin, begin + numel), which the codec has at `at`, in the buffer's dtype. */
static void store(const sw_carrier *carrier, const coded_sum *sum, size_t begin, size_t numel,
                  size_t at, uint8_t *to)
{
    const sw_fold_plan *plan = sum->pending->op.plan;
    const float *mean = carrier->coded.flat + at * sum->lanes;
    if (plan)
        plan->store(plan->context, begin, numel, mean, to);
    else
        memcpy(to, mean, numel * sizeof *mean);
}

/* Store the elements that a rank of this host keeps: all, or its slice. */
static void store_for(const sw_carrier *carrier, const coded_sum *sum, int local)
{
    const sw_op *op = &sum->pending->op;
    size_t bytes = sw_dtype_size_bytes(op->dtype), first = 0, end = op->numel, begin, run, at;
    int rank = carrier->hier->members[local];
    uint8_t *to = sw_carrier_contribution(carrier, sum->pending, local, 0);
    if (op->kind == SW_OP_REDUCE_SCATTER) {
        size_t slice = sw_comm_slice_numel(op->numel, bytes,
                                           sw_op_slice_count(op, carrier->hier->comm.world_size));
        first = sw_size_min((size_t)sw_op_slice_of(op, rank) * slice, op->numel);
        end = sw_size_min(first + slice, op->numel);
        to = op->results ? op->results->base[rank] + op->results_offset_bytes : to + first * bytes;
    }
    for (size_t cursor = first; next_coded(sum, cursor, end, &begin, &run, &at);
         cursor = begin + run)
        store(carrier, sum, begin, run, at, to + (begin - first) * bytes);
}

static sw_status reserve_flat(sw_coded *coded, size_t numel, sw_error *err)
{
    if (numel > coded->capacity) {
        free(coded->flat);
        coded->capacity = 0;
        coded->flat = malloc(numel * sizeof *coded->flat);
        if (!coded->flat)
            SW_FAIL(err, SW_E_MEMORY, "no memory for the sum of a compressed bucket");
        coded->capacity = numel;
    }
    memset(coded->flat, 0, numel * sizeof *coded->flat);
    return SW_OK;
}

static sw_status compress(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    const sw_hier_pending *pending = sw_carrier_pending(carrier, ticket);
    const sw_op *op = &pending->op;
    const sw_hier *hier = carrier->hier;
    bool is_complex = op->dtype == SW_DTYPE_COMPLEX64 || op->dtype == SW_DTYPE_COMPLEX128;
    coded_sum sum = {.pending = pending,
                     .real = op->dtype == SW_DTYPE_COMPLEX64    ? SW_DTYPE_FLOAT32
                             : op->dtype == SW_DTYPE_COMPLEX128 ? SW_DTYPE_FLOAT64
                                                                : op->dtype,
                     .lanes = is_complex ? 2 : 1,
                     .contributes = carrier->contributes};
    size_t numel = (op->codec_numel ? op->codec_numel : op->numel) * sum.lanes;
    float share = (float)((double)hier->map.host_count / hier->comm.world_size);
    SW_TRY(reserve_flat(&carrier->coded, numel, err));
    SW_TRY(fold_host(carrier, &sum, err));
    if (sum.contributors == 0)
        return SW_OK;
    for (size_t i = 0; share != 1 && i < numel; ++i)
        carrier->coded.flat[i] *= share;
    SW_TRY(op->codec->ops->average(op->codec, op->codec_bucket, carrier->coded.flat, numel,
                                   &carrier->coded.exchange, err));
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    for (int l = 0; l < hier->local_count; ++l)
        store_for(carrier, &sum, l);
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

sw_status sw_carrier_compress(sw_carrier *carrier, uint32_t ticket, uint32_t count, sw_error *err)
{
    sw_coded *coded = &carrier->coded;
    coded->exchange.ops = &bridge_ops;
    coded->exchange.rank = carrier->hier->host;
    coded->exchange.world_size = carrier->hier->map.host_count;
    coded->carrier = carrier;
    for (uint32_t i = 0; i < count; ++i) {
        carrier->what = sw_carrier_what(carrier, carrier->turn, i);
        SW_TRY(compress(carrier, ticket + i, err));
        sw_carrier_complete(carrier, ticket + i);
    }
    return SW_OK;
}
