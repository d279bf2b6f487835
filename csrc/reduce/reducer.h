/* reducer.h - rounds, which average the gradients of all ranks, bucket after bucket in index order.
 * docs/design/reduce.md defines a round and its invariants.
 *
 * One state machine serves two kinds of memory: buckets that the ranks of a host map, and GPU
 * buckets, which are written and averaged in the order of streams. It handles use bits, counts and
 * order; the binding handles `.grad` and the begin and end of a backward.
 *
 * Thread rule: one at a time, together with its communicator. */
#pragma once

#include "comm/comm.h"
#include "comm/device_comm.h"
#include "compress/compressor.h"
#include "reduce/gradient_memory.h"
#include "tensor/layout.h"

typedef enum sw_round_state {
    SW_ROUND_CLOSED = 0,
    SW_ROUND_LOCAL, /* a backward that does not synchronise: gradients are only marked as used */
    SW_ROUND_OPEN,
} sw_round_state;

/* The owner of the buckets, which computes their means, and when it does. */
typedef enum sw_bucket_owner {
    SW_BUCKETS_OURS = 0,
    SW_BUCKETS_HOOKS, /* a communication hook, at the end of the backward */
} sw_bucket_owner;

typedef struct sw_reducer_stats {
    uint64_t rounds, local_rounds, abandoned;
    uint64_t buckets_sent, buckets_early; /* early: before the end of the backward */
    uint64_t bytes;                       /* size of the buckets sent */
    uint64_t row_rounds, row_bytes; /* of those, the rounds that stayed in rows, not in `rounds`;
                                     * their buckets */
    uint64_t unplaced_bytes_peak;   /* last round: most bytes of gradients that waited for their
                                       place at once, the latest gradient included */
} sw_reducer_stats;

typedef struct sw_reducer sw_reducer;

typedef struct sw_reducer_options {
    size_t bucket_cap_bytes;
    size_t first_cap_bytes; /* cap of the first bucket; later caps double. 0: all equal */
    sw_transport transport;
    bool sums;        /* sum the contributions instead of averaging them */
    bool sliced;      /* keep only this rank's slices of the means (in a pool; private buckets stay
                         whole) */
    bool takes_means; /* sliced, in a pool: means share memory: see sw_reducer_next_mean */
    const sw_slices *slices; /* the owners of slices; copied. NULL: rank r owns slice r */
    const char *label;       /* name of the model in messages; copied */
    /* On a GPU (without `transport` and `first_cap_bytes`): */
    bool deterministic; /* fold in rank order, with the host's bits, instead of the transport's own
                         * mean */
    sw_device_comm *row, *column; /* borrowed: see sw_device_mean_config */
    bool is_narrow;               /* means travel in `wire` */
    sw_dtype wire;                /* FLOAT16 or BFLOAT16 */
} sw_reducer_options;

/* Collective. `names`: one for each parameter, copied. The caller has checked that the tables are
 * equal on all ranks. */
SW_MUST_USE sw_status sw_reducer_create(sw_comm *comm, const sw_layout_param *params,
                                        const char *const *names, size_t param_count,
                                        const sw_reducer_options *options, sw_reducer **reducer,
                                        sw_error *err);
/* The same on a GPU, not collective: buckets take part only after sw_reducer_adopt. `comm` is
 * connected and outlives the reducer. */
SW_MUST_USE sw_status sw_reducer_create_on_device(sw_device_comm *comm,
                                                  const sw_layout_param *params,
                                                  const char *const *names, size_t param_count,
                                                  const sw_reducer_options *options,
                                                  sw_reducer **reducer, sw_error *err);
/* Destroy the reducer without its memory: see sw_reducer_take_memory. */
void sw_reducer_destroy(sw_reducer *reducer);
/* Return the memory. The caller destroys it once, after the reducer and every view. NULL on a
 * GPU. */
sw_gradient_memory *sw_reducer_take_memory(sw_reducer *reducer);

/* Properties of the memory behind a reducer. */
typedef struct sw_reducer_traits {
    bool on_device;
    bool places_late;     /* contributions are written bucket by bucket: see sw_reducer_is_due */
    bool averages_unused; /* means of parameters that no rank used are written too */
    bool can_abandon;     /* a round that failed on one rank is abandoned on all */
} sw_reducer_traits;
const sw_reducer_traits *sw_reducer_get_traits(const sw_reducer *reducer);

/* ---- GPU only ---- */

/* Set the stream of the next calls: the caller's current one. */
void sw_reducer_use_stream(sw_reducer *reducer, sw_stream *stream);
/* Begin a round on the stream in use: order its later writes after the optimizer that reads the
 * means. */
SW_MUST_USE sw_status sw_reducer_arrive(sw_reducer *reducer, sw_error *err);
/* Record that the gradient of `param` was written on the stream in use. Call before the mark. */
SW_MUST_USE sw_status sw_reducer_produce(sw_reducer *reducer, size_t param, sw_error *err);
/* Let bucket `bucket` take part from the next round on. The caller's device memory outlives the
 * reducer and is initialised: the whole bucket, or sliced this rank's slice of its mean. */
SW_MUST_USE sw_status sw_reducer_adopt(sw_reducer *reducer, size_t bucket, void *data,
                                       sw_error *err);
/* Sliced: set the memory in which buckets travel, one after the other: the caller's, of the largest
 * one's size. Call between two rounds; later work of the stream in use runs after work enqueued on
 * an earlier place. */
SW_MUST_USE sw_status sw_reducer_set_place(sw_reducer *reducer, void *place, sw_error *err);
/* Sliced: order later work of the stream in use, which writes to the place itself, after the mean
 * that leaves it. Call between a bucket's reserve and its seal. */
SW_MUST_USE sw_status sw_reducer_lend_place(sw_reducer *reducer, sw_error *err);
/* Return true if gradients that were written to the last sealed bucket must live until the next
 * reserve, or the end of the round. */
bool sw_reducer_reads_gradients(const sw_reducer *reducer);
/* Leave averaging to a user's hook from the next round on. Use bits, tags and the order of streams
 * remain. Call between two rounds; waits for enqueued work. */
SW_MUST_USE sw_status sw_reducer_withdraw(sw_reducer *reducer, sw_error *err);
/* Set, before a round, which ranks still train: world_size bytes, equal on all ranks. The others do
 * not contribute, and means divide as after sw_reducer_divide_by_active. */
SW_MUST_USE sw_status sw_reducer_set_active(sw_reducer *reducer, const uint8_t *trains,
                                            sw_error *err);
/* Set a number that must be equal on all ranks in later rounds. */
void sw_reducer_set_digest(sw_reducer *reducer, uint32_t digest);
/* Return SW_E_MISMATCH, which the caller reports to all ranks, if ranks differed in an earlier
 * round: in steps, rounds, digests or accumulated means. Never waits. The stream in use must not be
 * captured. */
SW_MUST_USE sw_status sw_reducer_check(sw_reducer *reducer, sw_error *err);

/* Return the bytes of gradient memory that this rank will touch: contributions and slices of
 * means. */
size_t sw_reducer_planned_bytes(const sw_reducer *reducer);
const sw_layout *sw_reducer_layout(const sw_reducer *reducer);
const sw_gradient_memory *sw_reducer_memory(const sw_reducer *reducer);
const sw_reducer_stats *sw_reducer_get_stats(const sw_reducer *reducer);
sw_round_state sw_reducer_state(const sw_reducer *reducer);

/* Return the first byte of a parameter's contribution, of place[param].numel elements; by rows, of
 * its first chunk. Sliced: valid in this round while sw_reducer_can_place(), or after
 * sw_reducer_reserve(). */
uint8_t *sw_reducer_address(const sw_reducer *reducer, size_t param);
/* Return the same of element `begin`, and in *numel how many elements are adjacent from there. */
uint8_t *sw_reducer_run(const sw_reducer *reducer, size_t param, size_t begin, size_t *numel);
/* Set the contribution of `param` to the elements at `from`, in the same layout; with `add` (host
 * only) add them to it. On a GPU the stream in use copies, at the latest in sw_reducer_seal(). */
SW_MUST_USE sw_status sw_reducer_write(sw_reducer *reducer, size_t param, const void *from,
                                       bool add, sw_error *err);
/* Set the contribution of `param` to zeros. */
SW_MUST_USE sw_status sw_reducer_clear(sw_reducer *reducer, size_t param, sw_error *err);
/* Complete the writes to the bucket, in the order of the stream in use. sw_reducer_send calls
 * it. */
SW_MUST_USE sw_status sw_reducer_seal(sw_reducer *reducer, size_t bucket, sw_error *err);
/* Return the first byte of this rank's slice of a parameter's mean, of *numel elements; 0 if it
 * owns none. */
uint8_t *sw_reducer_result(const sw_reducer *reducer, size_t param, size_t *numel);
/* Let a frozen parameter's bucket take part from the next round on. */
void sw_reducer_unfreeze(sw_reducer *reducer, size_t param);

/* Count a step of the optimizer. Rounds are numbered from it, and ranks compare both numbers in
 * each round. */
void sw_reducer_count_step(sw_reducer *reducer);
/* Count from 0 again, on all ranks, after only some have taken steps (join). */
void sw_reducer_forget_steps(sw_reducer *reducer);
/* Add `digest`, of the next step's hyperparameters, to the values that contributing ranks compare
 * in each round. The order of steps between two rounds does not matter. It travels with the use
 * bits, without a message. */
void sw_reducer_note_step(sw_reducer *reducer, uint32_t digest);
/* After a round: return true if contributing ranks had noted different steps, equal on every rank.
 * Returned once; the comparison then starts again. */
bool sw_reducer_take_unlike_steps(sw_reducer *reducer);

/* Extremes of the forwards that contributing ranks have counted between two rounds, equal on every
 * rank. A rank that skips a backward has counted one more in its next round. */
typedef struct sw_forward_counts {
    int most_rank, fewest_rank; /* the lowest such ranks */
    uint32_t most, fewest;
} sw_forward_counts;

/* Count a forward that synchronises. */
void sw_reducer_count_forward(sw_reducer *reducer);
/* After a round: return its counts. They are zeros on a GPU, where no rank sees those of others. */
const sw_forward_counts *sw_reducer_forward_counts(const sw_reducer *reducer);
/* Return the steps counted, and the rounds opened since the last one. */
void sw_reducer_position(const sw_reducer *reducer, uint32_t *step, uint32_t *rounds);

/* Open a round for graph task `task`. The state must be CLOSED. */
SW_MUST_USE sw_status sw_reducer_open(sw_reducer *reducer, int64_t task, bool synchronised,
                                      sw_error *err);

/* Let the next round's sums stay in the rows of a mesh (`keeps`): each rank keeps its slice of its
 * row's sum, and means stand as they are. A later mean of all ranks includes what rows have kept: a
 * rank adds it to its own contribution. A round that failed drops it. *kept: the next round stays
 * there, on every rank; false if it cannot: slices have one owner, a row is on several hosts,
 * buckets are private or a hook's, or a GPU's means are folded. Collective. Between two rounds. */
SW_MUST_USE sw_status sw_reducer_keep_in_rows(sw_reducer *reducer, bool keeps, bool *kept,
                                              sw_error *err);
/* Return true if the round opened last stays, or stayed, in rows. */
bool sw_reducer_stays_in_rows(const sw_reducer *reducer);

/* Mark that a hook in graph task `task` wrote the gradient of `param` to its memory (except in a
 * LOCAL round). Never waits. *advance: call sw_reducer_advance() next. */
SW_MUST_USE sw_status sw_reducer_mark(sw_reducer *reducer, size_t param, int64_t task,
                                      bool *advance, sw_error *err);
/* The same in two steps, for a gradient that cannot be placed yet. First: `param` has its gradient
 * in other memory. */
SW_MUST_USE sw_status sw_reducer_mark_ready(sw_reducer *reducer, size_t param, int64_t task,
                                            bool *advance, sw_error *err);
/* The backward of all modules that use `param` is over: without a gradient so far it gets none in
 * this round, and its bucket no longer waits for one. If one comes after all, its bucket is sent
 * only at the end of the backward, from now on. Return true if the bucket waited. `expected`: the
 * graph has a gradient for it, and the bucket still waits; this shows the late ones. */
bool sw_reducer_pass(sw_reducer *reducer, size_t param, bool expected);
/* Second: the gradient now lies in its place. `accumulated`: the contribution is that plus the
 * accumulated mean (sliced, in a pool). */
void sw_reducer_place(sw_reducer *reducer, size_t param, bool accumulated);
/* Return true if the memory of `param` may be written in this round: false while its slot belongs
 * to an earlier bucket. */
bool sw_reducer_can_place(const sw_reducer *reducer, size_t param);
/* Rest briefly if this rank is ahead of its peers: gradients of more than a usual bucket, `param`
 * included, wait for a slot that peers still read. Otherwise return false at once, also if half of
 * the round was rest, since a peer may wait for this rank elsewhere; with options.takes_means after
 * 2,500 rests without a complete bucket. */
bool sw_reducer_hold_back(sw_reducer *reducer, size_t param);
/* Return true if the next bucket to send has all its gradients, not all of them placed, and a free
 * slot: reserve it, place them, and advance. */
bool sw_reducer_is_waiting(const sw_reducer *reducer, size_t *bucket);
/* For each bucket at the end of a backward: return the next one to send; wait for its slot; send
 * it. */
bool sw_reducer_next_unsent(const sw_reducer *reducer, size_t *bucket);
SW_MUST_USE sw_status sw_reducer_reserve(sw_reducer *reducer, size_t bucket, sw_error *err);
SW_MUST_USE sw_status sw_reducer_send(sw_reducer *reducer, size_t bucket, sw_error *err);

/* Mark `param` as used, and keep its gradient in other memory until the end of the backward,
 * because it may still change. Its bucket is sent only then, from now on. False if the bucket was
 * already sent. */
bool sw_reducer_pin(sw_reducer *reducer, size_t param);
/* Return true if the next bucket can be posted now; post it alone; wait for the mean of a posted
 * one. A caller that measures each bucket takes these steps of sw_reducer_advance() one by one. */
bool sw_reducer_next_complete(const sw_reducer *reducer, size_t *bucket);
SW_MUST_USE sw_status sw_reducer_send_complete(sw_reducer *reducer, size_t bucket, sw_error *err);
SW_MUST_USE sw_status sw_reducer_await(sw_reducer *reducer, size_t bucket, sw_error *err);
/* Post complete buckets in order and advance those in flight. */
SW_MUST_USE sw_status sw_reducer_advance(sw_reducer *reducer, sw_error *err);

/* With options.takes_means: return true if the next bucket's mean is complete, not abandoned, and
 * all ranks noted the same steps. The caller takes it, used_by_any() included, before it reserves,
 * sends or finishes anything: its memory is then a later bucket's. Call it after each advance or
 * wait. */
bool sw_reducer_next_mean(sw_reducer *reducer, size_t *bucket);
/* Return true if peers may have taken a mean of the open round, so that it cannot be abandoned. */
bool sw_reducer_is_half_taken(const sw_reducer *reducer);

/* Return true if `param` was marked in this round; if its gradient was placed. */
bool sw_reducer_is_ready(const sw_reducer *reducer, size_t param);
bool sw_reducer_is_placed(const sw_reducer *reducer, size_t param);
/* Return true if the bucket of `param` takes part in rounds (trainable, or unfrozen since). */
bool sw_reducer_takes_part(const sw_reducer *reducer, size_t param);
/* Return true if the bucket of `param` was sent in this round. */
bool sw_reducer_is_sent(const sw_reducer *reducer, size_t param);

/* End a round whose gradients are all placed: send the rest and wait. SW_E_MISMATCH names a rank
 * that abandoned it. A LOCAL round just ends. */
SW_MUST_USE sw_status sw_reducer_finish(sw_reducer *reducer, sw_error *err);
/* End a round that an exception left open: complete its exchanges without folding. Waits for
 * peers. */
SW_MUST_USE sw_status sw_reducer_abandon(sw_reducer *reducer, sw_error *err);
/* The same, in a pool, for at most `budget_ns` and while all ranks live; sw_reducer_abandon does
 * the rest, and the round stays open until then. No effect if no round is open. */
SW_MUST_USE sw_status sw_reducer_try_abandon(sw_reducer *reducer, int64_t budget_ns, sw_error *err);
/* Run a whole round without a contribution of this rank. If a user's hook owns the buckets, only
 * the use bits are exchanged. On a GPU the caller fills each bucket with values that change no sum:
 * it calls open_shadow, then reserve, seal and send for each bucket, then finish. */
SW_MUST_USE sw_status sw_reducer_shadow(sw_reducer *reducer, sw_error *err);
SW_MUST_USE sw_status sw_reducer_open_shadow(sw_reducer *reducer, sw_error *err);
/* For a user's communication hook, in place of finish: exchange the use bits (one barrier) and end
 * the round; the caller reduces the buckets. SW_E_MISMATCH as finish. */
SW_MUST_USE sw_status sw_reducer_exchange_use(sw_reducer *reducer, sw_error *err);

/* Sliced, before sw_reducer_exchange_use(): record that the contribution of `param`, not placed
 * yet, is on top of the accumulated mean. */
void sw_reducer_accumulate(sw_reducer *reducer, size_t param);
/* After sw_reducer_exchange_use(): return the number of ranks that recorded it. */
size_t sw_reducer_accumulated_ranks(const sw_reducer *reducer, size_t param);
/* Return the first byte of a bucket in this rank's memory; sliced in a pool: of its shared slot. */
uint8_t *sw_reducer_slot(const sw_reducer *reducer, size_t bucket);

/* On the host: let means travel through a compressor from the next round on; holds a reference.
 * Entry i of the compressor is parameter i. Collective. Over hosts buckets travel as they do
 * without one, during the backward. On one host *at_end: the caller gives the buckets to a hook,
 * and calls sw_reducer_compress() in its place. Needs a mean. */
SW_MUST_USE sw_status sw_reducer_set_compressor(sw_reducer *reducer, sw_compressor *compressor,
                                                bool *at_end, sw_error *err);
/* After sw_reducer_exchange_use(), for each bucket in order: average it. */
SW_MUST_USE sw_status sw_reducer_compress(sw_reducer *reducer, size_t bucket, sw_error *err);
/* Return true if buckets of an open round went through the compressor, or are on their way, so that
 * its state is that of no round. */
bool sw_reducer_is_compressing(const sw_reducer *reducer);

/* Set the owner from the next round on. On a GPU to HOOKS, once, after sw_reducer_withdraw. */
void sw_reducer_give_buckets(sw_reducer *reducer, sw_bucket_owner owner);
/* Set this rank's contribution to a bucket to zeros. Not sliced. */
SW_MUST_USE sw_status sw_reducer_clear_bucket(sw_reducer *reducer, size_t bucket, sw_error *err);

/* Return true if this rank used `param` since the last synchronisation. */
bool sw_reducer_is_used(const sw_reducer *reducer, size_t param);
/* After a round: return true if some rank used `param` in it. */
bool sw_reducer_used_by_any(const sw_reducer *reducer, size_t param);
/* Return true if the last synchronised round averaged nothing: a rank abandoned it, or it failed.
 */
bool sw_reducer_last_round_failed(const sw_reducer *reducer);
/* After sw_reducer_exchange_use(): return the number of ranks by which the mean divides. */
size_t sw_reducer_divisor(const sw_reducer *reducer);
/* Return the number, from 1, of the last round in which some rank used `param`; 0: none. */
uint64_t sw_reducer_averaged_in(const sw_reducer *reducer, size_t param);
/* Divide means by the contributing ranks (true) or by the world size (false, the default). */
void sw_reducer_divide_by_active(sw_reducer *reducer, bool active_only);
/* Send buckets of the first round before the end of its backward, too (true): all whole gradients
 * may be larger than a rank's memory. The default is false: the first round shows which parameters
 * get their gradient twice. */
void sw_reducer_send_first(sw_reducer *reducer, bool sends);
