/* compressor.h - the rounds of compression: begin, encode, scatter, fold, gather, decode, and the
 * state that a compressor keeps between rounds.
 *
 * A compressor knows its parameters by number. A bucket is a list of *members*: parameters and
 * where they lie. `average` runs one bucket over an exchange (comm/exchange.h). It changes state
 * only when the bucket's result is finite on every rank (docs/design/compress.md).
 *
 * Names, state dicts and the checks of loaded states are Python's (compress/state.py).
 *
 * Thread rule: one at a time. A carrier's thread is inside while a bucket is in flight. */
#pragma once

#include "comm/exchange.h"
#include "compress/codec.h"
#include "compress/powersgd.h"

typedef enum sw_compressor_kind {
    SW_COMPRESS_PLAIN = 0, /* the bucket's own dtype on the wire */
    SW_COMPRESS_HALF,
    SW_COMPRESS_BLOCKS,
    SW_COMPRESS_POWERSGD,
} sw_compressor_kind;

typedef struct sw_compressor_settings {
    sw_compressor_kind kind;
    sw_dtype wire;         /* halves: float16 or bfloat16; PowerSGD: of factors, float32 too */
    sw_block_codec blocks; /* blocks only */
    bool error_feedback;
    /* PowerSGD only: */
    bool warm_start;
    size_t rank;          /* in [1, 256] */
    double least_rate;    /* a matrix is compressed if (rows + cols) rank least_rate < rows cols */
    uint64_t first_round; /* earlier rounds are averaged without compression */
    uint64_t seed;
    sw_dtype memory; /* float32 or bfloat16 */
} sw_compressor_settings;

/* What a parameter keeps between rounds. Blocks have an error; matrices the others. */
typedef enum sw_compressor_part {
    SW_PART_ERROR = 0,
    SW_PART_MEMORY,
    SW_PART_LEFT,
    SW_PART_RIGHT,
    SW_PART_BASIS,
    SW_PART_COUNT,
} sw_compressor_part;

typedef struct sw_compressor_entry {
    size_t numel, rows, cols;  /* rows x cols in memory order; rows 0: no matrix */
    size_t rank;               /* 0: not compressed by PowerSGD */
    uint64_t seed;             /* the parameter's, equal on all ranks */
    bool is_made;              /* it has state; zeros at first */
    void *part[SW_PART_COUNT]; /* owned; NULL: it has no such part */
} sw_compressor_entry;

typedef struct sw_compressor_member { /* a parameter in a bucket */
    size_t entry, offset, numel;
    bool used;
} sw_compressor_member;

typedef struct sw_compressor sw_compressor;

SW_MUST_USE sw_status sw_compressor_create(const sw_compressor_settings *settings,
                                           sw_compressor **compressor, sw_error *err);
/* The compressor as a codec of operations, whose references keep it alive. */
sw_codec *sw_compressor_codec(sw_compressor *compressor);
void sw_compressor_release(sw_compressor *compressor);

/* Add a parameter; *number: its number, counted from 0. Not while a bucket is in flight. */
SW_MUST_USE sw_status sw_compressor_add(sw_compressor *compressor, size_t numel, size_t rows,
                                        uint64_t seed, size_t *number, sw_error *err);
size_t sw_compressor_count(const sw_compressor *compressor);
const sw_compressor_entry *sw_compressor_entry_of(const sw_compressor *compressor, size_t number);
/* Elements of a part: rows x stride for factors. 0: the entry has no such part. */
size_t sw_compressor_part_numel(const sw_compressor *compressor, size_t number,
                                sw_compressor_part part);
sw_dtype sw_compressor_part_dtype(const sw_compressor *compressor, sw_compressor_part part);
/* Give the entry its state, zeros, if it has none. */
SW_MUST_USE sw_status sw_compressor_make(sw_compressor *compressor, size_t number, sw_error *err);
/* Drop all state, and set the number of complete rounds. */
void sw_compressor_restart(sw_compressor *compressor, uint64_t rounds);
uint64_t sw_compressor_rounds(const sw_compressor *compressor);
void sw_compressor_set_rounds(sw_compressor *compressor, uint64_t rounds);
void sw_compressor_count_round(sw_compressor *compressor);
/* Return true if the next round uses state. */
bool sw_compressor_keeps(const sw_compressor *compressor);

/* A bucket's slices: `share` elements a rank, as the engine cuts it; 0: the codec's own cut. With
 * keeps_slice only this rank's slice of the result is needed; the rest is undefined. */
typedef struct sw_compressor_bucket {
    const sw_compressor_member *members;
    size_t count, share;
    bool keeps_slice;
} sw_compressor_bucket;

/* Set the members of bucket `number`, which operations name; copied. */
SW_MUST_USE sw_status sw_compressor_set_bucket(sw_compressor *compressor, size_t number,
                                               const sw_compressor_member *members, size_t count,
                                               sw_error *err);
/* Return the members of a bucket that was set; NULL: it was not. */
const sw_compressor_member *sw_compressor_members(const sw_compressor *compressor, size_t number,
                                                  size_t *count);
/* Average `numel` elements of `dtype` in place. Other dtypes than float32 are compressed as float32
 * and rounded at the end, without feedback of that rounding. Complex numbers are given as reals. */
SW_MUST_USE sw_status sw_compressor_average(sw_compressor *compressor,
                                            const sw_compressor_bucket *bucket, void *data,
                                            size_t numel, sw_dtype dtype, sw_exchange *exchange,
                                            sw_error *err);

/* The same for bucket `number`, whose members were set; `share` and `keeps_slice` as above. Counts
 * what it sent. */
SW_MUST_USE sw_status sw_compressor_average_bucket(sw_compressor *compressor, size_t number,
                                                   size_t share, bool keeps_slice, void *data,
                                                   size_t numel, sw_dtype dtype,
                                                   sw_exchange *exchange, sw_error *err);
/* Bytes that this rank has sent to peers; of the last round of a bucket. */
uint64_t sw_compressor_sent_bytes(const sw_compressor *compressor);
uint64_t sw_compressor_bucket_sent_bytes(const sw_compressor *compressor, size_t number);

/* Elements of a slice that holds this fraction of `numel`: a multiple of 64. */
size_t sw_compressor_slice_numel(size_t numel, int world_size);
