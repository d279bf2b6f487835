/* compressor.c - entries, buckets, and the rounds of plain and 16-bit messages; see compressor.h.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "compress/compressor_state.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

static sw_compressor *compressor_of(sw_codec *codec)
{
    return (sw_compressor *)(void *)codec;
}

/* ---- life ---- */

static void acquire(sw_codec *codec)
{
    atomic_fetch_add(&compressor_of(codec)->references, 1);
}

static void release(sw_codec *codec)
{
    sw_compressor *c = compressor_of(codec);
    if (atomic_fetch_sub(&c->references, 1) > 1)
        return;
    sw_compressor_restart(c, 0);
    for (size_t b = 0; b < c->bucket_count; ++b)
        free(c->buckets[b].rows);
    free(c->buckets);
    free(c->entries);
    free(c->wide.floats);
    free(c->rest.floats);
    free(c->factors.floats);
    free(c->own_q.floats);
    free(c);
}

void sw_compressor_release(sw_compressor *compressor)
{
    if (compressor)
        release(&compressor->codec);
}

sw_codec *sw_compressor_codec(sw_compressor *compressor)
{
    return &compressor->codec;
}

static bool is_half(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

static sw_status check(const sw_compressor_settings *s, sw_error *err)
{
    bool factors = s->kind == SW_COMPRESS_POWERSGD;
    if (s->kind == SW_COMPRESS_BLOCKS)
        return sw_block_codec_check(&s->blocks, err);
    if ((factors || s->kind == SW_COMPRESS_HALF) && !is_half(s->wire) &&
        !(factors && s->wire == SW_DTYPE_FLOAT32))
        SW_FAIL(err, SW_E_INVALID, "compressor: %s cannot travel as %s",
                factors ? "factors" : "gradients", sw_dtype_name(s->wire));
    if (factors && (s->rank < 1 || s->rank > SW_LOWRANK_RANK_MAX))
        SW_FAIL(err, SW_E_INVALID, "compressor: rank must be in [1, %d], not %zu",
                (int)SW_LOWRANK_RANK_MAX, s->rank);
    if (factors && s->memory != SW_DTYPE_FLOAT32 && s->memory != SW_DTYPE_BFLOAT16)
        SW_FAIL(err, SW_E_INVALID, "compressor: memory must be float32 or bfloat16, not %s",
                sw_dtype_name(s->memory));
    return SW_OK;
}

static const sw_codec_ops codec_ops;

sw_status sw_compressor_create(const sw_compressor_settings *settings, sw_compressor **compressor,
                               sw_error *err)
{
    SW_TRY(check(settings, err));
    sw_compressor *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a compressor");
    made->codec.ops = &codec_ops;
    made->settings = *settings;
    atomic_init(&made->references, 1);
    *compressor = made;
    return SW_OK;
}

static void select_member(sw_codec *codec, size_t bucket, size_t member, bool used)
{
    sw_compressor *c = compressor_of(codec);
    if (bucket < c->bucket_count && member < c->buckets[bucket].count)
        c->buckets[bucket].rows[member].used = used;
}

/* Fold this rank's slice alone; *own: its result. */
static sw_status fold_slice(sw_exchange *exchange, uint8_t *message, uint8_t *result, size_t numel,
                            sw_dtype dtype, sw_redop op, uint8_t **own, sw_error *err)
{
    const void *pieces[SW_COMM_MAX_WORLD];
    *own = message;
    if (exchange->world_size == 1)
        return SW_OK;
    SW_TRY(sw_exchange_scatter(exchange, pieces, err));
    sw_exchange_fold(exchange, result, pieces, numel, dtype, op);
    *own = result;
    return SW_OK;
}

/* ---- messages without state ---- */

static sw_status average_plain(const sw_compressor_bucket *bucket, void *data, size_t numel,
                               sw_dtype dtype, sw_exchange *exchange, sw_error *err)
{
    size_t each = sw_dtype_size_bytes(dtype), ranks = (size_t)exchange->world_size;
    size_t share =
        bucket->share ? bucket->share : sw_compressor_slice_numel(numel, exchange->world_size);
    uint8_t *message, *result, *whole;
    bool ok = true;
    if (ranks == 1)
        return SW_OK;
    SW_TRY(sw_exchange_begin(exchange, share * each, &message, &result, err));
    memcpy(message, data, numel * each);
    memset(message + numel * each, 0, (share * ranks - numel) * each);
    if (!bucket->keeps_slice) {
        SW_TRY(sw_exchange_fold_message(exchange, message, result, share, dtype, SW_REDOP_MEAN,
                                        &whole, err));
        memcpy(data, whole, numel * each);
        return SW_OK;
    }
    SW_TRY(fold_slice(exchange, message, result, share, dtype, SW_REDOP_MEAN, &whole, err));
    memcpy((uint8_t *)data + (size_t)exchange->rank * share * each, whole, share * each);
    return sw_exchange_agree(exchange, &ok, err);
}

static sw_status average_half(sw_dtype wire, const sw_compressor_bucket *bucket, float *flat,
                              size_t numel, sw_exchange *exchange, sw_error *err)
{
    const sw_compress_kernels *kernels = sw_kernels()->compress;
    size_t ranks = (size_t)exchange->world_size;
    size_t share =
        bucket->share ? bucket->share : sw_compressor_slice_numel(numel, exchange->world_size);
    uint8_t *message, *result, *whole;
    bool ok = true;
    SW_TRY(sw_exchange_begin(exchange, share * 2, &message, &result, err));
    kernels->half_narrow((void *)message, flat, numel, (float)(1.0 / exchange->world_size), wire);
    memset(message + numel * 2, 0, (share * ranks - numel) * 2);
    if (!bucket->keeps_slice) {
        SW_TRY(sw_exchange_fold_message(exchange, message, result, share, wire, SW_REDOP_SUM,
                                        &whole, err));
        kernels->half_widen(flat, (void *)whole, numel, wire);
        return SW_OK;
    }
    SW_TRY(fold_slice(exchange, message, result, share, wire, SW_REDOP_SUM, &whole, err));
    kernels->half_widen(flat + (size_t)exchange->rank * share, (void *)whole, share, wire);
    return sw_exchange_agree(exchange, &ok, err);
}

/* ---- a bucket ---- */

static sw_status average_wide(sw_compressor *c, const sw_compressor_bucket *bucket, float *flat,
                              size_t numel, sw_exchange *exchange, sw_error *err)
{
    switch (c->settings.kind) {
    case SW_COMPRESS_HALF:
        return average_half(c->settings.wire, bucket, flat, numel, exchange, err);
    case SW_COMPRESS_BLOCKS:
        return sw_block_round(c, bucket, flat, exchange, err);
    case SW_COMPRESS_POWERSGD:
        return sw_powersgd_round(c, bucket, flat, exchange, err);
    default:
        return average_plain(bucket, flat, numel, SW_DTYPE_FLOAT32, exchange, err);
    }
}

static void widen(float *wide, const void *data, size_t numel, sw_dtype dtype)
{
    const double *doubles = data;
    if (is_half(dtype))
        sw_kernels()->compress->half_widen(wide, data, numel, dtype);
    else
        for (size_t i = 0; i < numel; ++i)
            wide[i] = (float)doubles[i];
}

static void narrow(void *data, const float *wide, size_t numel, sw_dtype dtype)
{
    double *doubles = data;
    if (is_half(dtype))
        sw_kernels()->compress->half_narrow(data, wide, numel, 1, dtype);
    else
        for (size_t i = 0; i < numel; ++i)
            doubles[i] = (double)wide[i];
}

static sw_status average(sw_compressor *c, const sw_compressor_bucket *bucket, void *data,
                         size_t numel, sw_dtype dtype, sw_exchange *exchange, sw_error *err)
{
    bool plain = c->settings.kind == SW_COMPRESS_PLAIN ||
                 (c->settings.kind == SW_COMPRESS_POWERSGD && c->rounds < c->settings.first_round);
    if (plain)
        return average_plain(bucket, data, numel, dtype, exchange, err);
    if (dtype == SW_DTYPE_FLOAT32)
        return average_wide(c, bucket, data, numel, exchange, err);
    if (!is_half(dtype) && dtype != SW_DTYPE_FLOAT64)
        SW_FAIL(err, SW_E_UNSUPPORTED, "compressor: gradients of %s cannot be compressed",
                sw_dtype_name(dtype));
    float *wide = sw_scratch_reserve(&c->wide, numel, err);
    if (!wide)
        return SW_E_MEMORY;
    widen(wide, data, numel, dtype);
    SW_TRY(average_wide(c, bucket, wide, numel, exchange, err));
    narrow(data, wide, numel, dtype);
    return SW_OK;
}

sw_status sw_compressor_average(sw_compressor *c, const sw_compressor_bucket *bucket, void *data,
                                size_t numel, sw_dtype dtype, sw_exchange *exchange, sw_error *err)
{
    uint64_t before = exchange->sent_bytes;
    size_t whole = 0, ranks = (size_t)exchange->world_size;
    sw_compressor_bucket own = *bucket;
    if (numel == 0) /* on every rank */
        return SW_OK;
    bool fits = sw_size_multiply(own.share, ranks, &whole) && whole >= numel;
    if (own.share && own.keeps_slice && !fits)
        SW_FAIL(err, SW_E_INVALID,
                "compressed mean: slices of %zu elements of %zu ranks are fewer than %zu",
                own.share, ranks, numel);
    if (!fits) /* slices of other ranks than these */
        own.share = 0;
    sw_status status = average(c, &own, data, numel, dtype, exchange, err);
    c->sent_bytes += exchange->sent_bytes - before;
    return status;
}

sw_status sw_compressor_average_bucket(sw_compressor *c, size_t number, size_t share,
                                       bool keeps_slice, void *data, size_t numel, sw_dtype dtype,
                                       sw_exchange *exchange, sw_error *err)
{
    uint64_t before = exchange->sent_bytes;
    sw_compressor_bucket bucket = {.share = share, .keeps_slice = keeps_slice};
    bucket.members = sw_compressor_members(c, number, &bucket.count);
    sw_status status = sw_compressor_average(c, &bucket, data, numel, dtype, exchange, err);
    if (number < c->bucket_count)
        c->buckets[number].sent_bytes = exchange->sent_bytes - before;
    return status;
}

uint64_t sw_compressor_sent_bytes(const sw_compressor *c)
{
    return c->sent_bytes;
}

uint64_t sw_compressor_bucket_sent_bytes(const sw_compressor *c, size_t number)
{
    return number < c->bucket_count ? c->buckets[number].sent_bytes : 0;
}

static sw_status average_operation(sw_codec *codec, size_t number, float *flat, size_t numel,
                                   sw_exchange *exchange, sw_error *err)
{
    return sw_compressor_average_bucket(compressor_of(codec), number, 0, false, flat, numel,
                                        SW_DTYPE_FLOAT32, exchange, err);
}

static const sw_codec_ops codec_ops = {
    .acquire = acquire, .release = release, .select = select_member, .average = average_operation};
