/* reducer.h - rounds: the gradients of all ranks become their mean, bucket after bucket in index
 * order. docs/design/reduce.md defines a round and its invariants.
 *
 * This is one state machine over two kinds of memory: buckets that the ranks of a host map, and
 * buckets of a GPU's, which are written and averaged in the order of streams. It knows use bits,
 * counts and order; the binding knows `.grad`, and the begin and end of a backward.
 *
 * Thread rule: one at a time, together with its communicator. */
#ifndef SW_REDUCE_REDUCER_H
#define SW_REDUCE_REDUCER_H

#include "comm/comm.h"
#include "comm/device_comm.h"
#include "reduce/gradient_memory.h"
#include "tensor/layout.h"

typedef enum sw_round_state {
    SW_ROUND_CLOSED = 0,
    SW_ROUND_LOCAL, /* a backward that does not synchronise: gradients are only marked as used */
    SW_ROUND_OPEN,
} sw_round_state;

/* The owner of the buckets, which computes their means, and the time at which it does. */
typedef enum sw_bucket_owner {
    SW_BUCKETS_OURS = 0,
    SW_BUCKETS_HOOKS,       /* a communication hook's, at the end of the backward */
    SW_BUCKETS_HOOKS_EARLY, /* the same, each once it is complete and those before it are sent */
} sw_bucket_owner;

typedef struct sw_reducer_stats {
    uint64_t rounds, local_rounds, abandoned;
    uint64_t buckets_sent, buckets_early; /* early: before the end of the backward */
    uint64_t bytes;                       /* size of the buckets sent */
    uint64_t unplaced_bytes_peak; /* maximum in the last round of the bytes that waited for their
                                     place at once, the latest gradient included */
} sw_reducer_stats;

typedef struct sw_reducer sw_reducer;

typedef struct sw_reducer_options {
    size_t bucket_cap_bytes;
    size_t first_cap_bytes; /* cap of the first bucket; those after it double. 0: all equal */
    sw_transport transport;
    bool sums;   /* the sum of the contributions instead of their mean */
    bool sliced; /* keep this rank's slices of the means alone (in a pool; private buckets stay
                    whole) */
    const sw_slices *slices; /* the owners of slices; copied. NULL: rank r owns slice r */
    const char *label;       /* name of the model in messages; copied */
    /* On a GPU, where `transport` and `first_cap_bytes` have no meaning: */
    bool deterministic; /* folds in rank order: the host's bits, not the transport's own mean */
    bool is_lent;       /* sw_reducer_lend brings memory for peers' contributions */
    sw_device_comm *row, *column; /* borrowed: see sw_device_mean_config */
    bool is_narrow;               /* means travel in `wire` */
    sw_dtype wire;                /* FLOAT16 or BFLOAT16 */
} sw_reducer_options;

/* Collective. `names`: one a parameter, copied. The tables must be equal on all ranks (checked by
 * the caller). */
SW_MUST_USE sw_status sw_reducer_create(sw_comm *comm, const sw_layout_param *params,
                                        const char *const *names, size_t param_count,
                                        const sw_reducer_options *options, sw_reducer **reducer,
                                        sw_error *err);
/* The same on a GPU, by this rank alone: no bucket takes part before sw_reducer_adopt. `comm` is
 * connected, and outlives the reducer. */
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
    bool places_late;     /* a contribution is written with its bucket: see sw_reducer_is_due */
    bool averages_unused; /* the mean of a parameter that no rank used is written, too */
    bool can_abandon;     /* a round that failed on one rank is abandoned on all */
} sw_reducer_traits;
const sw_reducer_traits *sw_reducer_get_traits(const sw_reducer *reducer);

/* ---- of a GPU alone ---- */

/* Set the stream of the next calls: the caller's current one. */
void sw_reducer_use_stream(sw_reducer *reducer, sw_stream *stream);
/* Begin a round on the stream in use: its later writes come behind the optimizer that reads the
 * means. */
SW_MUST_USE sw_status sw_reducer_arrive(sw_reducer *reducer, sw_error *err);
/* Record that the gradient of `param` was written on the stream in use. Before the mark. */
SW_MUST_USE sw_status sw_reducer_produce(sw_reducer *reducer, size_t param, sw_error *err);
/* Let bucket `bucket` take part from the next round on, in device memory of the caller that
 * outlives the reducer, initialised: the whole bucket, or sliced this rank's slice of its mean. */
SW_MUST_USE sw_status sw_reducer_adopt(sw_reducer *reducer, size_t bucket, void *data,
                                       sw_error *err);
/* Sliced: set the memory in which buckets travel: `count` places of the caller in turn, at most
 * two, the largest first. Between two rounds; work enqueued on earlier places comes before later
 * work of the stream in use. */
SW_MUST_USE sw_status sw_reducer_set_places(sw_reducer *reducer, void *const *places,
                                            const size_t *sizes_bytes, size_t count, sw_error *err);
/* With `is_lent`, before the first round: see sw_device_reducer_lend. */
SW_MUST_USE sw_status sw_reducer_lend(sw_reducer *reducer, void *contributions, void *compressed,
                                      sw_error *err);
/* Average no bucket from the next round on: a user's hook does. Use bits, tags and the order of
 * streams remain. Between two rounds; waits for enqueued work. */
SW_MUST_USE sw_status sw_reducer_withdraw(sw_reducer *reducer, sw_error *err);
/* Set which ranks still train, world_size bytes, equal on all ranks, before a round: the others
 * contribute nothing, and means divide as after sw_reducer_divide_by_active. */
SW_MUST_USE sw_status sw_reducer_set_active(sw_reducer *reducer, const uint8_t *trains,
                                            sw_error *err);
/* Set a number that must be equal on all ranks in later rounds. */
void sw_reducer_set_digest(sw_reducer *reducer, uint32_t digest);
/* Return SW_E_MISMATCH, for the caller to report to all ranks, if ranks differed in an earlier
 * round: in their steps or rounds, in their digests, or in standing means. Never waits. The stream
 * in use must not be captured. */
SW_MUST_USE sw_status sw_reducer_check(sw_reducer *reducer, sw_error *err);

/* Bytes of gradient memory that this rank will touch: contributions, and slices of means. */
size_t sw_reducer_planned_bytes(const sw_reducer *reducer);
const sw_layout *sw_reducer_layout(const sw_reducer *reducer);
const sw_gradient_memory *sw_reducer_memory(const sw_reducer *reducer);
const sw_reducer_stats *sw_reducer_get_stats(const sw_reducer *reducer);
sw_round_state sw_reducer_state(const sw_reducer *reducer);
int64_t sw_reducer_task(const sw_reducer *reducer);
const char *sw_reducer_name(const sw_reducer *reducer, size_t param);

/* First byte of a parameter's contribution; its bytes are place[param].numel elements. Sliced: in
 * this round, while sw_reducer_can_place(), or from sw_reducer_reserve() on. */
uint8_t *sw_reducer_address(const sw_reducer *reducer, size_t param);
/* Set the contribution of `param` to the elements at `from`, in the same layout, or on the host
 * (`add`) to the sum of both. On a GPU the stream in use copies, at sw_reducer_seal() at the
 * latest. */
SW_MUST_USE sw_status sw_reducer_write(sw_reducer *reducer, size_t param, const void *from,
                                       bool add, sw_error *err);
/* Set the contribution of `param` to zeros. */
SW_MUST_USE sw_status sw_reducer_clear(sw_reducer *reducer, size_t param, sw_error *err);
/* Complete writes to the bucket, in the order of the stream in use. sw_reducer_send calls it. */
SW_MUST_USE sw_status sw_reducer_seal(sw_reducer *reducer, size_t bucket, sw_error *err);
/* First byte of this rank's slice of a parameter's mean; *numel elements, 0 if it owns none. */
uint8_t *sw_reducer_result(const sw_reducer *reducer, size_t param, size_t *numel);
/* Let a frozen parameter's bucket take part from the next round on. */
void sw_reducer_unfreeze(sw_reducer *reducer, size_t param);

/* Count a step of the optimizer: rounds are numbered from it, and ranks compare both numbers in
 * each round. */
void sw_reducer_count_step(sw_reducer *reducer);
/* Count from 0 again: on all ranks, after some have taken steps without others (join). */
void sw_reducer_forget_steps(sw_reducer *reducer);
/* Add the configuration of the next step (`digest`, of its hyperparameters) to the values that
 * contributing ranks compare in each round, in any order of the steps between two rounds. It needs
 * no message: it travels with the use bits. */
void sw_reducer_note_step(sw_reducer *reducer, uint32_t digest);
/* After a round: return true if contributing ranks had noted different steps, equal on every rank.
 * Returned once: steps are compared anew from here on. */
bool sw_reducer_take_unlike_steps(sw_reducer *reducer);

/* Open a round for graph task `task`. The state must be CLOSED. */
SW_MUST_USE sw_status sw_reducer_open(sw_reducer *reducer, int64_t task, bool synchronised,
                                      sw_error *err);

/* Mark that a hook in graph task `task` wrote the gradient of `param` to its memory (except in a
 * LOCAL round). Never waits; *advance: call sw_reducer_advance() next. */
SW_MUST_USE sw_status sw_reducer_mark(sw_reducer *reducer, size_t param, int64_t task,
                                      bool *advance, sw_error *err);
/* The same in two steps, for a gradient that cannot be placed yet: `param` has its gradient in
 * other memory; */
SW_MUST_USE sw_status sw_reducer_mark_ready(sw_reducer *reducer, size_t param, int64_t task,
                                            bool *advance, sw_error *err);
/* and now in its own. `standing`: the contribution is that plus the standing mean (sliced, in a
 * pool). */
void sw_reducer_place(sw_reducer *reducer, size_t param, bool standing);
/* Return true if the memory of `param` may be written in this round: false while its slot belongs
 * to an earlier bucket. */
bool sw_reducer_can_place(const sw_reducer *reducer, size_t param);
/* Rest a moment on a rank that is ahead of its peers: more than a bucket of usual size, `param`
 * included, waits for a slot that peers still read. Returns false at once otherwise, or if half of
 * the round was rest: a peer may be waiting for this rank by other means. */
bool sw_reducer_hold_back(sw_reducer *reducer, size_t param);
/* Return true if the next bucket to send has all its gradients, not all of them placed, and a free
 * slot: reserve it, place them, and advance. */
bool sw_reducer_is_waiting(const sw_reducer *reducer, size_t *bucket);
/* At the end of a backward, bucket by bucket: the next to send; wait for its slot; send it. */
bool sw_reducer_next_unsent(const sw_reducer *reducer, size_t *bucket);
SW_MUST_USE sw_status sw_reducer_reserve(sw_reducer *reducer, size_t bucket, sw_error *err);
SW_MUST_USE sw_status sw_reducer_send(sw_reducer *reducer, size_t bucket, sw_error *err);

/* Mark `param` as used, and keep its gradient in other memory until the end of the backward,
 * because it may still change; the same for its bucket, from now on. False if that was sent
 * already. */
bool sw_reducer_pin(sw_reducer *reducer, size_t param);
/* Return true if the next bucket can be posted now, and sw_reducer_advance() would: post it alone;
 * wait for the mean of a posted one. They give a caller that measures a bucket its begin and end.
 */
bool sw_reducer_next_complete(const sw_reducer *reducer, size_t *bucket);
SW_MUST_USE sw_status sw_reducer_send_complete(sw_reducer *reducer, size_t bucket, sw_error *err);
SW_MUST_USE sw_status sw_reducer_await(sw_reducer *reducer, size_t bucket, sw_error *err);
/* Post, in order, the complete buckets, and advance those in flight. */
SW_MUST_USE sw_status sw_reducer_advance(sw_reducer *reducer, sw_error *err);

/* Return true if `param` was marked in this round; if its gradient was placed. */
bool sw_reducer_is_ready(const sw_reducer *reducer, size_t param);
bool sw_reducer_is_placed(const sw_reducer *reducer, size_t param);
/* Return true if the bucket of `param` takes part in rounds (trainable, or unfrozen since). */
bool sw_reducer_takes_part(const sw_reducer *reducer, size_t param);
/* Return true if the bucket of `param` was sent in this round. */
bool sw_reducer_is_sent(const sw_reducer *reducer, size_t param);

/* End a round whose gradients are all placed: send the rest, wait. SW_E_MISMATCH names a rank that
 * abandoned it. In a LOCAL round: end it only. */
SW_MUST_USE sw_status sw_reducer_finish(sw_reducer *reducer, sw_error *err);
/* End a round that an exception left open: bring peers in step, fold nothing. Waits for them. */
SW_MUST_USE sw_status sw_reducer_abandon(sw_reducer *reducer, sw_error *err);
/* The same for as long as `budget_ns` allows and all ranks live, in a pool: the rest is left to
 * sw_reducer_abandon, and the round stays open until then. Nothing if no round is open. */
SW_MUST_USE sw_status sw_reducer_try_abandon(sw_reducer *reducer, int64_t budget_ns, sw_error *err);
/* Run a whole round in which this rank contributes nothing. If a user's hook owns the buckets, only
 * the use bits are exchanged. On a GPU the caller fills each bucket with values that change no sum:
 * open_shadow, then the calls that reserve, seal and send need, then finish. */
SW_MUST_USE sw_status sw_reducer_shadow(sw_reducer *reducer, sw_error *err);
SW_MUST_USE sw_status sw_reducer_open_shadow(sw_reducer *reducer, sw_error *err);
/* For a user's communication hook, in place of finish: exchange the use bits (one barrier) and end
 * the round; the caller reduces the buckets. SW_E_MISMATCH as finish. */
SW_MUST_USE sw_status sw_reducer_exchange_use(sw_reducer *reducer, sw_error *err);

/* Before that, sliced: record that the contribution of `param`, not placed yet, is on top of the
 * standing mean. */
void sw_reducer_stand(sw_reducer *reducer, size_t param);
/* After it: number of ranks that recorded it. */
size_t sw_reducer_standing_ranks(const sw_reducer *reducer, size_t param);
/* First byte of a bucket in this rank's memory; sliced in a pool: of its slot, which others
 * share. */
uint8_t *sw_reducer_slot(const sw_reducer *reducer, size_t bucket);

/* Set the owner from the next round on. On a GPU to HOOKS, once, after sw_reducer_withdraw. */
void sw_reducer_give_buckets(sw_reducer *reducer, sw_bucket_owner owner);
/* SW_BUCKETS_HOOKS_EARLY: return the next bucket that is complete before the end of the backward,
 * and count it as sent: this rank used all its parameters. False if there is none. */
bool sw_reducer_hand_over(sw_reducer *reducer, size_t *bucket);
/* Return true if all ranks came to sw_reducer_exchange_use() of the last opened round. */
bool sw_reducer_has_met(const sw_reducer *reducer);
/* Return true if this rank handed the bucket over in this round; after sw_reducer_exchange_use(),
 * until the next round, if some rank did. In an abandoned round all ranks reduce exactly those
 * buckets. */
bool sw_reducer_is_handed_over(const sw_reducer *reducer, size_t bucket);
bool sw_reducer_is_handed_over_by_any(const sw_reducer *reducer, size_t bucket);
/* Set this rank's contribution to a bucket to zeros. Not sliced. */
SW_MUST_USE sw_status sw_reducer_clear_bucket(sw_reducer *reducer, size_t bucket, sw_error *err);

/* Return true if this rank used `param` since the last synchronisation. */
bool sw_reducer_is_used(const sw_reducer *reducer, size_t param);
/* After a round: return true if some rank used `param` in it. */
bool sw_reducer_used_by_any(const sw_reducer *reducer, size_t param);
/* Return true if the last synchronised round averaged nothing: a rank abandoned it, or it failed.
 */
bool sw_reducer_last_round_failed(const sw_reducer *reducer);
/* After sw_reducer_exchange_use(): the divisor of the mean, in ranks. */
size_t sw_reducer_divisor(const sw_reducer *reducer);
/* The number, from 1, of the last round in which some rank used `param`; 0: none. */
uint64_t sw_reducer_averaged_in(const sw_reducer *reducer, size_t param);
/* Divide means by the contributing ranks (true) or by the world size (false, the start). */
void sw_reducer_divide_by_active(sw_reducer *reducer, bool active_only);

#endif
