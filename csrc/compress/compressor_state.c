/* compressor_state.c - entries, buckets, and the arithmetic that the rounds share. */
#include "compress/compressor_state.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/comm.h"

enum { SLICE_NUMEL = 64 };

/* ---- entries ---- */

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

void sw_compressor_set_rounds(sw_compressor *c, uint64_t rounds)
{
    c->rounds = rounds;
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
