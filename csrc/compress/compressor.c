/* compressor.c - entries, buckets, and the rounds of plain and 16-bit messages; see compressor.h.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "compress/compressor_state.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

enum { SLICE_NUMEL = 64 };

static sw_compressor *compressor_of(sw_codec *codec)
{
    return (sw_compressor *)(void *)codec;
}

/* ---- life ---- */

static void acquire(sw_codec *codec)
{
    atomic_fetch_add(&compressor_of(codec)->references, 1);
}

static void drop_state(sw_compressor *c)
{
    for (size_t i = 0; i < c->count; ++i) {
        for (int part = 0; part < SW_PART_COUNT; ++part) {
            free(c->entries[i].part[part]);
            c->entries[i].part[part] = NULL;
        }
        c->entries[i].is_made = false;
    }
}

static void release(sw_codec *codec)
{
    sw_compressor *c = compressor_of(codec);
    if (atomic_fetch_sub(&c->references, 1) > 1)
        return;
    drop_state(c);
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

/* ---- entries ---- */

sw_status sw_compressor_add(sw_compressor *c, size_t numel, size_t rows, uint64_t seed,
                            size_t *number, sw_error *err)
{
    if (c->count == c->capacity) {
        size_t capacity = c->capacity ? 2 * c->capacity : 64;
        sw_compressor_entry *grown = realloc(c->entries, capacity * sizeof *grown);
        if (!grown)
            SW_FAIL(err, SW_E_MEMORY, "no memory for %zu parameters of a compressor", capacity);
        c->entries = grown;
        c->capacity = capacity;
    }
    size_t cols = rows ? numel / rows : 0,
           rank = sw_size_min(sw_size_min(rows, cols), c->settings.rank);
    bool is_low =
        c->settings.kind == SW_COMPRESS_POWERSGD &&
        (double)(rows + cols) * (double)rank * c->settings.least_rate < (double)rows * (double)cols;
    c->entries[c->count] = (sw_compressor_entry){
        .numel = numel, .rows = rows, .cols = cols, .rank = is_low ? rank : 0, .seed = seed};
    *number = c->count++;
    return SW_OK;
}

size_t sw_compressor_count(const sw_compressor *c)
{
    return c->count;
}

const sw_compressor_entry *sw_compressor_entry_of(const sw_compressor *c, size_t number)
{
    return &c->entries[number];
}

size_t sw_compressor_part_numel(const sw_compressor *c, size_t number, sw_compressor_part part)
{
    const sw_compressor_entry *e = &c->entries[number];
    bool keeps = c->settings.error_feedback;
    if (part == SW_PART_ERROR)
        return c->settings.kind == SW_COMPRESS_BLOCKS && keeps ? e->numel : 0;
    if (part == SW_PART_MEMORY)
        return e->rank && keeps ? e->numel : 0;
    return e->rank * sw_powersgd_stride(part == SW_PART_LEFT ? e->rows : e->cols);
}

sw_dtype sw_compressor_part_dtype(const sw_compressor *c, sw_compressor_part part)
{
    return part == SW_PART_MEMORY ? c->settings.memory : SW_DTYPE_FLOAT32;
}

sw_status sw_compressor_make(sw_compressor *c, size_t number, sw_error *err)
{
    sw_compressor_entry *e = &c->entries[number];
    for (int part = 0; !e->is_made && part < SW_PART_COUNT; ++part) {
        size_t numel = sw_compressor_part_numel(c, number, (sw_compressor_part)part);
        size_t bytes =
            numel * sw_dtype_size_bytes(sw_compressor_part_dtype(c, (sw_compressor_part)part));
        if (numel && !e->part[part] && !(e->part[part] = calloc(1, bytes)))
            SW_FAIL(err, SW_E_MEMORY, "no memory for %zu bytes of a compressor's state", bytes);
    }
    e->is_made = true;
    return SW_OK;
}

void sw_compressor_restart(sw_compressor *c, uint64_t rounds)
{
    drop_state(c);
    c->rounds = rounds;
}

uint64_t sw_compressor_rounds(const sw_compressor *c)
{
    return c->rounds;
}

void sw_compressor_count_round(sw_compressor *c)
{
    c->rounds++;
}

bool sw_compressor_keeps(const sw_compressor *c)
{
    return c->settings.kind == SW_COMPRESS_BLOCKS     ? c->settings.error_feedback
           : c->settings.kind == SW_COMPRESS_POWERSGD ? c->rounds >= c->settings.first_round
                                                      : false;
}

/* ---- buckets ---- */

sw_status sw_compressor_set_bucket(sw_compressor *c, size_t number,
                                   const sw_compressor_member *members, size_t count, sw_error *err)
{
    if (number >= c->bucket_count) {
        sw_members *grown = realloc(c->buckets, (number + 1) * sizeof *grown);
        if (!grown)
            SW_FAIL(err, SW_E_MEMORY, "no memory for %zu buckets of a compressor", number + 1);
        memset(grown + c->bucket_count, 0, (number + 1 - c->bucket_count) * sizeof *grown);
        c->buckets = grown;
        c->bucket_count = number + 1;
    }
    sw_compressor_member *rows = calloc(count + 1, sizeof *rows);
    if (!rows)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu parameters of a bucket", count);
    memcpy(rows, members, count * sizeof *rows);
    free(c->buckets[number].rows);
    c->buckets[number] = (sw_members){.rows = rows, .count = count};
    return SW_OK;
}

const sw_compressor_member *sw_compressor_members(const sw_compressor *c, size_t number,
                                                  size_t *count)
{
    *count = number < c->bucket_count ? c->buckets[number].count : 0;
    return number < c->bucket_count ? c->buckets[number].rows : NULL;
}

static void select_member(sw_codec *codec, size_t bucket, size_t member, bool used)
{
    sw_compressor *c = compressor_of(codec);
    if (bucket < c->bucket_count && member < c->buckets[bucket].count)
        c->buckets[bucket].rows[member].used = used;
}

/* ---- arithmetic that the rounds share ---- */

float *sw_scratch_reserve(sw_scratch *scratch, size_t numel, sw_error *err)
{
    if (numel <= scratch->capacity && scratch->floats)
        return scratch->floats;
    free(scratch->floats);
    *scratch = (sw_scratch){.floats = malloc((numel + 1) * sizeof(float)), .capacity = numel};
    if (!scratch->floats) {
        scratch->capacity = 0;
        (void)sw_error_set(err, SW_E_MEMORY, -1, "no memory for %zu floats of a compressor", numel);
    }
    return scratch->floats;
}

size_t sw_compressor_slice_numel(size_t numel, int world_size)
{
    size_t ranks = (size_t)world_size, each = (numel + ranks - 1) / ranks;
    return sw_size_max(SLICE_NUMEL, (each + SLICE_NUMEL - 1) / SLICE_NUMEL * SLICE_NUMEL);
}

void sw_exchange_fold(const sw_exchange *exchange, void *result, const void *const *pieces,
                      size_t numel, sw_dtype dtype, sw_redop op)
{
    sw_kernels()->fold[dtype](&result, 1, pieces, exchange->world_size, numel,
                              1.0 / exchange->world_size, op);
}

sw_status sw_exchange_fold_message(sw_exchange *exchange, uint8_t *message, uint8_t *result,
                                   size_t numel, sw_dtype dtype, sw_redop op, uint8_t **whole,
                                   sw_error *err)
{
    const void *pieces[SW_COMM_MAX_WORLD];
    bool swapped;
    *whole = message;
    if (exchange->world_size == 1)
        return SW_OK;
    SW_TRY(sw_exchange_swap(exchange, pieces, whole, &swapped, err));
    if (swapped) {
        sw_exchange_fold(exchange, *whole, pieces, numel * (size_t)exchange->world_size, dtype, op);
        return SW_OK;
    }
    SW_TRY(sw_exchange_scatter(exchange, pieces, err));
    sw_exchange_fold(exchange, result, pieces, numel, dtype, op);
    return sw_exchange_gather(exchange, whole, err);
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
    sw_status status = average(c, bucket, data, numel, dtype, exchange, err);
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
