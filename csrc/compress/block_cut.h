/* block_cut.h - a bucket's records and the ranks that fold them. Arithmetic only, for hosts and
 * GPUs.
 *
 * Records are counted over the parameters that take part, each from its own first element. A record
 * belongs to the rank whose slice holds its first element. With kept slices, the rank whose slice
 * begins inside a record folds it too.
 *
 * Thread rule: any. */
#pragma once

#include "compress/codec.h"

typedef struct sw_block_span { /* a parameter's run in the bucket */
    float *values, *error;     /* error: NULL for none */
    size_t offset, numel;      /* of the run, in the bucket */
    size_t first;              /* its first record; set by init */
} sw_block_span;

typedef struct sw_block_owner { /* folds records [begin, end); owns those from `own` on */
    size_t begin, own, end;
} sw_block_owner;

typedef struct sw_block_part { /* records of one parameter in one owner's slice of the message */
    size_t at;                 /* number of the first record in the message */
    float *values, *error;
    size_t numel;
    bool is_copy; /* the previous owner has these records, too */
} sw_block_part;

typedef struct sw_block_rest { /* elements of an owner's folds, and the error that takes their
                                * rounding error */
    float *error;
    size_t place, numel; /* first element behind the owner's first record */
} sw_block_rest;

typedef struct sw_block_cut {
    sw_block_codec codec;
    size_t record_bytes;
    sw_block_span *spans; /* borrowed */
    size_t span_count, record_count;
    sw_block_owner *owners; /* owned; world_size */
    int rank, world_size;
    size_t each; /* records of a slice of the message */
} sw_block_cut;

/* `share`: elements of a rank's slice of the bucket; 0: equal numbers of records. */
SW_MUST_USE sw_status sw_block_cut_init(sw_block_cut *cut, const sw_block_codec *codec,
                                        sw_block_span *spans, size_t span_count, size_t share,
                                        bool keeps_slice, int rank, int world_size, sw_error *err);
void sw_block_cut_fini(sw_block_cut *cut);

typedef void sw_block_part_fn(const sw_block_cut *cut, const sw_block_part *part, void *context);
/* Call `visit` for every part of the message, owner by owner. */
void sw_block_cut_visit(const sw_block_cut *cut, sw_block_part_fn *visit, void *context);
/* The most parts that visit has. */
static inline size_t sw_block_cut_parts(const sw_block_cut *cut)
{
    return 2 * cut->span_count * (size_t)cut->world_size;
}
/* Write this rank's rests, at most span_count, and return their number. */
size_t sw_block_cut_rests(const sw_block_cut *cut, sw_block_rest *rests);
/* Return true if this rank folds the part. */
static inline bool sw_block_cut_is_own(const sw_block_cut *cut, const sw_block_part *part)
{
    size_t first = (size_t)cut->rank * cut->each;
    return first <= part->at && part->at < first + cut->each;
}
