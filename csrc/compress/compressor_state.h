/* compressor_state.h - the state of a compressor, private to compressor.c (plain and 16-bit
 * rounds), compressor_state.c (entries, buckets), block_round.c, powersgd_round.c and
 * factor_message.c. */
#pragma once

#include <stdatomic.h>

#include "compress/compressor.h"
#include "kernels/kernels.h"

typedef struct sw_scratch { /* memory that is kept between buckets */
    float *floats;          /* owned */
    size_t capacity;
} sw_scratch;

/* Return room for `numel` floats with undefined contents; NULL with an error. */
float *sw_scratch_reserve(sw_scratch *scratch, size_t numel, sw_error *err);

typedef struct sw_members {
    sw_compressor_member *rows; /* owned */
    size_t count;
    uint64_t sent_bytes; /* in the last round */
} sw_members;

struct sw_compressor {
    sw_codec codec; /* first */
    _Atomic int references;
    sw_compressor_settings settings;
    sw_compressor_entry *entries; /* owned */
    size_t count, capacity;
    sw_members *buckets; /* owned */
    size_t bucket_count;
    uint64_t rounds, sent_bytes;
    sw_scratch wide, rest, factors, own_q;
};

/* Fold `pieces` of numel elements in rank order into `result`. */
void sw_exchange_fold(const sw_exchange *exchange, void *result, const void *const *pieces,
                      size_t numel, sw_dtype dtype, sw_redop op);
/* Average or sum the begun message, numel elements a slice, over ranks; *whole: the result. */
SW_MUST_USE sw_status sw_exchange_fold_message(sw_exchange *exchange, uint8_t *message,
                                               uint8_t *result, size_t numel, sw_dtype dtype,
                                               sw_redop op, uint8_t **whole, sw_error *err);

SW_MUST_USE sw_status sw_block_round(sw_compressor *compressor, const sw_compressor_bucket *bucket,
                                     float *flat, sw_exchange *exchange, sw_error *err);
SW_MUST_USE sw_status sw_powersgd_round(sw_compressor *compressor,
                                        const sw_compressor_bucket *bucket, float *flat,
                                        sw_exchange *exchange, sw_error *err);
