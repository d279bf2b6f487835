/* host_rounds_state.h - a reducer whose buckets the ranks of a host map: private to host_rounds.c
 * (its table), host_build.c (creation), bucket.c (trailers and plans of folds) and bucket_ring.c.
 *
 * A bucket's *trailer* travels with its data. It says whether the rank contributes, whether it
 * abandoned the round. It also has a digest of the
 * hyperparameters of the rank's steps, the count of its forwards, and two bits for each parameter.
 * There are two trailers, by the round's parity: a rank may post the next round while a peer still
 * reads this one's trailer, but not the round after, which needs the peer's `done`.
 *
 * Thread rule: as reducer.h. */
#pragma once

#include "reduce/reducer_state.h"

typedef struct trailer {
    uint16_t contributes, abandoned;
    uint32_t stepped;  /* digest of the steps of the rank's optimizers */
    uint32_t forwards; /* see sw_forward_counts */
    uint32_t
        bits[]; /* use bits of the bucket's parameters, in memory order; then accumulated bits */
} trailer;

typedef struct host_bucket {
    struct host_rounds *host; /* borrowed: the plan's context */
    bucket *common;           /* borrowed, of host->base */
    size_t trailer_offset_bytes,
        trailer_bytes;          /* offset in the trailers arena, of the even parity */
    size_t result_offset_bytes; /* sliced: offset of this rank's slice in the results */
    struct host_bucket *before; /* ring: the previous bucket at the same place; NULL:
                                   none. Borrowed */
    uint32_t *any;              /* owned: union of all ranks' use bits */
    size_t *coded_at; /* owned: where each parameter begins in the memory of a codec that sees it
                       * whole; NULL: as in the bucket */
    sw_fold_plan plan;
    sw_op op;
    uint32_t ticket;
    bool all_used, any_accumulated;
    int divisor; /* ranks by which this round's mean divides */
} host_bucket;

typedef struct host_rounds {
    sw_reducer base;
    sw_comm *comm;               /* borrowed */
    sw_gradient_memory *memory;  /* owned until taken */
    host_bucket *buckets;        /* owned */
    bool *contributors;          /* owned scratch, world_size */
    sw_slices slices;            /* the owners of slices */
    int *owners;                 /* owned, of `slices`; NULL: rank r owns slice r */
    bool rows_on_hosts;          /* all ranks of each row of `slices` are on one host */
    size_t trailer_stride_bytes; /* bytes from the even parity's trailers to the odd one's */
    size_t cap_bytes;            /* limit of a bucket, as requested */
    size_t ring_bytes;           /* size of the ring that participating buckets share */
    int64_t opened_ns, held_ns;  /* time at which the round was opened; time rested in it */
    bool ring, unfrozen;         /* buckets share a ring; its layout or its pages are out of date */
    uint32_t parity;
    sw_exchange *exchange; /* owned: a compressor's on one host; NULL: over hosts, or none */
    sw_arena *kept;        /* owned: this rank's slices of its row's sums; NULL: none yet */
    sw_arena *bounce;      /* owned: where private buckets are compressed over hosts */
    bool keeps_slice;      /* a compressor's result is needed of this rank's slice alone */
} host_rounds;

/* Every rank takes whole means: they replace the contributions, and are no results beside them. */
static inline bool sw_host_rounds_is_in_place(const host_rounds *host)
{
    return host->base.takes_means && host->base.slice_count == 1;
}

/* host_rounds.c */
extern const sw_reducer_ops sw_host_rounds_ops;

static inline size_t sw_words_of(size_t bits)
{
    return (bits + 31) / 32;
}

static inline bool sw_bit_is_set(const uint32_t *bits, size_t i)
{
    return bits[i / 32] >> (i % 32) & 1;
}

/* Set each bucket's place in the ring and the previous bucket at that place. Buckets that never
 * took part get none, unless `with_frozen`. Returns the ring's bytes; where means share memory, and
 * places stay once there is memory, the bytes of these buckets. */
size_t sw_host_rounds_lay_ring(host_rounds *host, bool with_frozen);

/* Return the trailer of `rank` in this round. */
trailer *sw_bucket_trailer(const host_bucket *b, int rank);
/* Write this rank's trailer, before the bucket is posted. */
void sw_bucket_write_trailer(host_bucket *b);
/* Read every rank's trailer of this round: the ranks that contribute (world_size flags), the
 * parameters that some rank used, and the rank that abandoned it, -1 for none. */
void sw_bucket_read_trailers(host_bucket *b, bool *contributes, int *abandoned_by);
/* Number of ranks whose contribution to the k-th parameter stands on the accumulated mean. */
size_t sw_bucket_accumulated_ranks(const host_bucket *b, size_t k);
/* Store a mean of this round, in the bucket's dtype, where `lacking` ranks' contributions stood on
 * what is there: that many of `divisor` parts of it are added. */
void sw_bucket_add_mean(const host_bucket *b, void *to, const void *mean, size_t numel,
                        size_t lacking);

/* host_codec.c: run the operation of a private bucket over hosts through the compressor. */
SW_MUST_USE sw_status sw_host_rounds_bounce(host_rounds *host, host_bucket *b, sw_error *err);
void sw_host_rounds_drop_compressor(host_rounds *host);

/* Fill in the plan: the ranges of a bucket to fold. */
void sw_bucket_plan(host_bucket *b, bool accumulated);
