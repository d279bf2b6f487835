/* reducer_state.h - the state of a reducer, private to the state machine (reducer.c), the common
 * creation (reducer_base.c), and the two implementations of its table: host_rounds.c with bucket.c,
 * and device_rounds.c.
 *
 * Thread rule: as reducer.h. */
#pragma once

#include "reduce/reducer.h"

typedef enum bucket_state {
    BUCKET_FILLING = 0,
    BUCKET_POSTED,
    BUCKET_DONE,
} bucket_state;

typedef struct bucket {
    size_t index;
    size_t pending,
        unplaced; /* parameters not ready in this round; parameters ready but not placed */
    bucket_state state;
    bool takes_part;                 /* trainable, or unfrozen since */
    bool pinned;                     /* never posted before the end of the backward */
    bool reserved, sealed;           /* in this round */
    char label[SW_COMM_LABEL_BYTES]; /* "bucket 0 of Mlp, 0.bias to 4.weight" */
} bucket;

typedef struct param_state {
    uint64_t averaged_in;               /* see sw_reducer_averaged_in */
    uint8_t used, used_by_any;          /* since the last synchronisation */
    uint8_t ready, placed, accumulated; /* in this round */
    uint8_t written;                    /* in this round, by a function of the table */
    uint8_t kept;                       /* this rank's slice of its row's sum waits for a mean */
    uint8_t passed, expected;           /* in this round, before it was ready: sw_reducer_pass */
} param_state;

/* Memory of a bucket in pieces, `chunk` elements each (the last perhaps fewer) and `pitch` apart.
 */
typedef struct sw_bucket_pieces {
    uint8_t *data;
    size_t numel, chunk, pitch;
    sw_dtype dtype;
} sw_bucket_pieces;

/* `b`: a participating bucket of the reducer. Functions may be NULL only if their comment says
 * so. */
typedef struct sw_reducer_ops {
    sw_reducer_traits traits;
    /* Begin a round that synchronises: its state is OPEN, all buckets are FILLING. May be NULL. */
    void (*open)(sw_reducer *reducer);
    /* Return true if a bucket's memory may be written now. NULL: streams wait, not the host. */
    bool (*has_room)(const sw_reducer *reducer, const bucket *b);
    /* Wait until it may, or order the stream in use; once for each round and bucket. */
    sw_status (*reserve)(sw_reducer *reducer, bucket *b, sw_error *err);
    /* Complete writes to it, in the order of the stream in use; once for each round and bucket. May
     * be NULL. */
    sw_status (*seal)(sw_reducer *reducer, bucket *b, sw_error *err);
    /* Return the first byte of a writable bucket; of this rank's slice of its mean. */
    uint8_t *(*address)(const sw_reducer *reducer, size_t bucket_index);
    uint8_t *(*result)(const sw_reducer *reducer, size_t bucket_index);
    /* Write the elements at `from`; write zeros. The bucket was reserved. */
    sw_status (*write)(sw_reducer *reducer, const sw_bucket_pieces *to, const void *from, bool add,
                       sw_error *err);
    sw_status (*clear)(sw_reducer *reducer, const sw_bucket_pieces *to, sw_error *err);
    /* Post a bucket that was reserved and sealed; it is POSTED from now on. */
    sw_status (*post)(sw_reducer *reducer, bucket *b, sw_error *err);
    /* Return true if buckets can be sent before the end of the backward. NULL: they can. */
    bool (*leaves_early)(const sw_reducer *reducer);
    /* Advance buckets in flight and mark finished ones as DONE. May be NULL. */
    sw_status (*poll)(sw_reducer *reducer, sw_error *err);
    /* Wait for the mean of a POSTED bucket. NULL if the host waits for none. */
    sw_status (*await)(sw_reducer *reducer, const bucket *b, sw_error *err);
    /* All buckets are POSTED: wait for them as needed, and fill in used_by_any. */
    sw_status (*finish)(sw_reducer *reducer, sw_error *err);
    /* The same for a hook's buckets, which are not posted. */
    sw_status (*meet)(sw_reducer *reducer, sw_error *err);
    /* After either: return true if some rank abandoned the round; SW_E_MISMATCH names it unless it
     * is this rank. NULL without traits.can_abandon. */
    bool (*was_abandoned)(const sw_reducer *reducer);
    sw_status (*judge)(sw_reducer *reducer, sw_error *err);
    /* See sw_reducer_try_abandon; NULL without traits.can_abandon. */
    sw_status (*try_abandon)(sw_reducer *reducer, int64_t budget_ns, sw_error *err);
    /* See sw_reducer_hold_back. May be NULL. */
    bool (*hold_back)(sw_reducer *reducer, const bucket *b);
    /* A bucket is DONE: fill in used_by_any of its parameters. Return false if some rank abandoned
     * it, or ranks noted different steps. NULL without options.takes_means. */
    bool (*take)(sw_reducer *reducer, const bucket *b);
    /* Return the number of ranks that contributed to the last round; of those with a contribution
     * on top of the accumulated mean. */
    size_t (*active_ranks)(const sw_reducer *reducer);
    size_t (*accumulated_ranks)(const sw_reducer *reducer, size_t param);
    /* Set *can to whether rows can keep sums, equal on all ranks, and make the memory for them.
     * NULL: they cannot. */
    sw_status (*keep)(sw_reducer *reducer, bool *can, sw_error *err);
    /* Count an optimizer's step; let a parameter's bucket take part from now on. May be NULL. */
    void (*count_step)(sw_reducer *reducer);
    void (*unfreeze)(sw_reducer *reducer, size_t param);
    size_t (*planned_bytes)(const sw_reducer *reducer);
    void (*destroy)(sw_reducer *reducer);
} sw_reducer_ops;

struct sw_reducer {
    const sw_reducer_ops *ops;
    int rank, world_size;
    int own_slice, slice_count;
    sw_layout layout;
    bucket *buckets;       /* owned */
    param_state *params;   /* owned */
    char **names;          /* owned */
    char label[32];        /* label of the model, cut */
    size_t next_bucket;    /* lowest bucket that is not posted */
    size_t next_mean;      /* takes_means: lowest bucket that was not taken */
    bool takes_means;      /* see sw_reducer_next_mean */
    size_t unplaced_bytes; /* bytes of gradients that are ready and not placed */
    sw_round_state state;
    int64_t task;
    uint32_t step, rounds; /* steps counted, and rounds opened since the last one */
    uint32_t digest;       /* see sw_reducer_set_digest */
    uint32_t history;      /* on a GPU, sliced: digest over all rounds of digests and accumulated
                            * means */
    uint32_t stepped;      /* digest of all steps since ranks last were at equal steps */
    uint32_t noted, notes; /* sum and count of steps since the last round, mixed into its digest */
    bool stepped_unlike;   /* see sw_reducer_take_unlike_steps */
    uint32_t forwards, round_forwards; /* counted since the last round; before this one */
    sw_forward_counts forward_counts;  /* of the last round */
    uint32_t marks;                    /* gradients taken, for regular polls */
    bool contributes, abandoned, divide_by_active;
    bool stays_in_rows, next_stays_in_rows; /* see sw_reducer_keep_in_rows */
    bool sends_first;                       /* see sw_reducer_send_first */
    bool last_round_failed;                 /* see sw_reducer_last_round_failed */
    bool met;                  /* use bits of this or the last round were exchanged for a hook */
    sw_bucket_owner owner;     /* owner of the buckets */
    sw_compressor *compressor; /* holds a reference; NULL: means travel as they are */
    sw_reducer_stats stats;
};

static inline const sw_layout_bucket *sw_bucket_shape(const sw_reducer *reducer, const bucket *b)
{
    return &reducer->layout.bucket[b->index];
}

static inline size_t sw_bucket_bytes(const sw_reducer *reducer, size_t bucket_index)
{
    const sw_layout_bucket *shape = &reducer->layout.bucket[bucket_index];
    return shape->numel * sw_dtype_size_bytes(shape->dtype);
}

static inline size_t sw_pieces_count(const sw_bucket_pieces *pieces)
{
    return pieces->numel / pieces->chunk + (pieces->numel % pieces->chunk != 0);
}

/* Return piece k as pieces of one range. */
static inline sw_bucket_pieces sw_pieces_at(const sw_bucket_pieces *pieces, size_t k)
{
    sw_bucket_pieces piece = *pieces;
    size_t left = pieces->numel - k * pieces->chunk;
    piece.data += k * pieces->pitch * sw_dtype_size_bytes(pieces->dtype);
    piece.numel = left < pieces->chunk ? left : pieces->chunk;
    return piece;
}

/* Return where the contribution of a parameter lies. */
sw_bucket_pieces sw_bucket_pieces_of(const sw_reducer *reducer, size_t param);

/* Return the next run of slice `slice`, from the bucket's parameter *next on, under contributions,
 * or with `kept` one that its row has kept. Padding between two such parameters is included. */
bool sw_bucket_next_run(const sw_reducer *reducer, const bucket *b, size_t slice, bool kept,
                        size_t *next, size_t *begin, size_t *end);

static inline bucket *sw_bucket_of(const sw_reducer *reducer, size_t param)
{
    return &reducer->buckets[reducer->layout.place[param].bucket];
}

/* Create the common parts: layout, buckets, names. The caller has set ops, rank and world_size;
 * buckets are cut for `slice_count` slices of
 * `pieces` pieces. On failure the caller still calls sw_reducer_fini. */
SW_MUST_USE sw_status sw_reducer_init(sw_reducer *reducer, const sw_layout_param *params,
                                      const char *const *names, size_t param_count,
                                      const sw_reducer_options *options, int slice_count,
                                      int pieces, sw_error *err);
void sw_reducer_fini(sw_reducer *reducer);

/* Fill label with the parameter that was unfrozen last, so that ranks that unfroze another one
 * disagree. */
void sw_bucket_name_unfrozen(const sw_reducer *reducer, bucket *b, size_t param);
