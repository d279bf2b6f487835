/* reducer_state.h - what a reducer is made of: shared by reducer.c (rounds), reducer_build.c
 * (making it) and bucket.c (what a rank says beside a bucket's data, and what is folded of it). Not
 * for others.
 *
 * A bucket's *tail* is what a rank says beside the data: whether it contributes, whether it
 * abandoned the round, whether a hook has the bucket already, a digest of the hyperparameters of
 * its steps, and two bits a parameter. Tails are
 * doubled by the round's parity: a rank may post the next round while a peer still reads this
 * one's, but not the one after, because that needs the peer's done.
 *
 * Thread rule: as reducer.h.
 */
#ifndef SW_REDUCE_REDUCER_STATE_H
#define SW_REDUCE_REDUCER_STATE_H

#include "reduce/reducer.h"

typedef struct tail {
    uint32_t contributes, abandoned;
    uint32_t handed_over; /* to a hook, before the end of the backward */
    uint32_t stepped;     /* digest of what the rank's optimizers have stepped with */
    uint32_t bits[]; /* use bits of the bucket's parameters, in memory order; then standing bits */
} tail;

typedef enum bucket_state {
    BUCKET_FILLING = 0,
    BUCKET_POSTED,
    BUCKET_DONE,
    BUCKET_HANDED_OVER, /* to a hook, before the end of the backward */
} bucket_state;

typedef struct bucket {
    struct sw_reducer *reducer; /* borrowed: the plan's context */
    size_t index;
    size_t tail_offset_bytes, tail_bytes; /* in the tails arena, of the even parity */
    size_t pending,
        unplaced; /* parameters not ready yet in this round; and ready, but not placed */
    size_t result_offset_bytes; /* sliced: of this rank's slice in the results */
    struct bucket *before; /* ring: the last bucket before this one that lies where it does; NULL:
                              none. Borrowed */
    uint32_t *any;         /* owned: use bits of all ranks together */
    sw_fold_plan plan;
    sw_op op;
    uint32_t ticket;
    bucket_state state;
    bool takes_part; /* trainable, or unfrozen since */
    bool pinned;     /* never posted before the end of the backward */
    bool all_used, any_standing;
    bool crosses; /* some rank handed it over early in this round */
} bucket;

typedef struct param_state {
    uint64_t averaged_in; /* number of the last round in which some rank used it, from 1; 0: none */
    uint8_t used, used_by_any;       /* since the last synchronisation */
    uint8_t ready, placed, standing; /* in this round */
} param_state;

struct sw_reducer {
    sw_comm *comm; /* borrowed */
    sw_layout layout;
    sw_gradient_memory *memory; /* owned until taken */
    bucket *buckets;            /* owned */
    param_state *params;        /* owned */
    bool *contributors;         /* owned scratch, world_size */
    char **names;               /* owned */
    sw_slices slices;           /* who owns what */
    int *owners;                /* owned, of `slices`; NULL: rank r owns slice r */
    char label[32];             /* of the model, cut */
    size_t tail_stride_bytes;   /* from the even parity's tails to the odd one's */
    size_t next_bucket;         /* the lowest that is not posted */
    size_t cap_bytes;           /* of a bucket, as asked for */
    size_t ring_bytes;          /* of the ring that the buckets which take part share */
    size_t unplaced_bytes;      /* of gradients that are ready and not placed */
    int64_t opened_ns, held_ns; /* when the round was opened, and the rest taken in it */
    bool ring, unfrozen;        /* buckets share a ring; it has to be laid again */
    sw_round_state state;
    int64_t task;
    uint32_t step, rounds; /* steps counted, and rounds opened since the last one */
    uint32_t stepped; /* digest of what was stepped with, since ranks last began from equal ones */
    uint32_t noted, notes; /* since the last round, to be mixed into it: a sum, and how many */
    bool stepped_unlike;   /* in the last round contributing ranks had different ones */
    uint32_t parity;
    uint32_t marks; /* gradients taken, to poll now and then */
    bool contributes, abandoned, divide_by_active;
    bool met; /* the use bits of this round, or the last one, were exchanged for a hook */
    sw_bucket_owner owner; /* whose the buckets are */
    sw_reducer_stats stats;
};

static inline int sw_reducer_slice_count(const sw_reducer *reducer)
{
    return reducer->owners ? reducer->slices.count : reducer->comm->world_size;
}

static inline size_t sw_bucket_bytes(const bucket *b)
{
    return b->op.numel * sw_dtype_size_bytes(b->op.dtype);
}

static inline size_t sw_words_of(size_t bits)
{
    return (bits + 31) / 32;
}

static inline bool sw_bit_is_set(const uint32_t *bits, size_t i)
{
    return bits[i / 32] >> (i % 32) & 1;
}

/* Gives the buckets of a ring their places in it, and each the last bucket before it that lies
 * there too; those that never took part get none, unless `with_frozen`. Returns the ring's bytes.
 */
size_t sw_reducer_lay_ring(sw_reducer *reducer, bool with_frozen);

/* What `rank` says of this round. */
tail *sw_bucket_tail(const bucket *b, int rank);
/* Says what this rank has to say, before the bucket is posted. */
void sw_bucket_write_tail(bucket *b);
/* Reads every rank's tail of this round: who contributes (world_size flags), which parameters
 * anybody used, and which rank abandoned it, -1 for none. */
void sw_bucket_read_tails(bucket *b, bool *contributes, int *abandoned_by);
/* This rank's slice of a bucket, in elements of it. */
void sw_bucket_own_slice(const bucket *b, size_t *begin, size_t *end);
/* Fills op.label: "bucket 0 of Mlp, 0.bias to 4.weight". */
void sw_bucket_name(bucket *b, const char *label);
/* The same with the parameter that was unfrozen last: ranks that unfroze another one disagree. */
void sw_bucket_name_unfrozen(bucket *b, const char *label, size_t param);
/* Fills the plan: what of a bucket is folded. */
void sw_bucket_plan(bucket *b, bool standing);

#endif
