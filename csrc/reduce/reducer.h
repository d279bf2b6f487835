/* reducer.h - rounds: the gradients of all ranks become their mean, bucket after bucket in index
 * order.
 *
 * What a round is, and what must never happen in one, is in docs/design/reduce.md. This is one
 * state machine over two kinds of memory: buckets that the ranks of a host map, and buckets of a
 * GPU's, which are written and averaged in the order of streams. It knows use bits, counts and
 * order; what a `.grad` is, and when a backward begins and ends, is the binding's.
 *
 * Thread rule: one at a time, together with its communicator.
 */
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

/* The owner of the buckets, which makes their means, and when it does. */
typedef enum sw_bucket_owner {
    SW_BUCKETS_OURS = 0,
    SW_BUCKETS_HOOKS,       /* a communication hook's, at the end of the backward */
    SW_BUCKETS_HOOKS_EARLY, /* the same, each as soon as it is complete and those before it went */
} sw_bucket_owner;

typedef struct sw_reducer_stats {
    uint64_t rounds, local_rounds, abandoned;
    uint64_t buckets_sent, buckets_early; /* early: before the end of the backward */
    uint64_t bytes;                       /* of the buckets sent */
    uint64_t unplaced_bytes_peak; /* of the last round: the most that waited for its place at once,
                                     the gradient that had just come among it */
} sw_reducer_stats;

typedef struct sw_reducer sw_reducer;

typedef struct sw_reducer_options {
    size_t bucket_cap_bytes;
    size_t first_cap_bytes; /* of the first bucket; those after it double. 0: all alike */
    sw_transport transport;
    bool sums;   /* the sum of the contributions instead of their mean */
    bool sliced; /* keep this rank's slices of the means alone (in a pool; private buckets stay
                    whole) */
    const sw_slices *slices; /* the owners of slices; copied. NULL: rank r owns slice r */
    const char *label;       /* of the model, in messages; copied */
    /* On a GPU, where `transport` and `first_cap_bytes` have no meaning: */
    bool deterministic; /* folds in rank order: the host's bits, not the transport's own mean */
    bool is_lent;       /* sw_reducer_lend brings memory for what others send */
    bool is_narrow;     /* means travel in `wire` */
    sw_dtype wire;      /* FLOAT16 or BFLOAT16 */
} sw_reducer_options;

/* Collective. `names`: one a parameter, copied. The tables must be equal on all ranks (checked by
 * the caller). */
SW_MUST_USE sw_status sw_reducer_create(sw_comm *comm, const sw_layout_param *params,
                                        const char *const *names, size_t param_count,
                                        const sw_reducer_options *options, sw_reducer **reducer,
                                        sw_error *err);
/* The same on a GPU, of this rank alone: no bucket takes part before sw_reducer_adopt. `comm` is
 * connected, and outlives the reducer. */
SW_MUST_USE sw_status sw_reducer_create_on_device(sw_device_comm *comm,
                                                  const sw_layout_param *params,
                                                  const char *const *names, size_t param_count,
                                                  const sw_reducer_options *options,
                                                  sw_reducer **reducer, sw_error *err);
/* Leaves the memory to its own owner: see sw_reducer_take_memory. */
void sw_reducer_destroy(sw_reducer *reducer);
/* The memory, to be destroyed by the caller once, after the reducer and every view. NULL on a GPU.
 */
sw_gradient_memory *sw_reducer_take_memory(sw_reducer *reducer);

/* What the memory behind a reducer is like. */
typedef struct sw_reducer_traits {
    bool on_device;
    bool places_late;     /* a contribution is written with its bucket: see sw_reducer_is_due */
    bool averages_unused; /* the mean of a parameter that no rank used is written, too */
    bool can_abandon;     /* a round that failed on one rank is taken back on all */
} sw_reducer_traits;
const sw_reducer_traits *sw_reducer_get_traits(const sw_reducer *reducer);

/* ---- of a GPU alone ---- */

/* What comes next is in the order of `stream`: the caller's current one. */
void sw_reducer_use_stream(sw_reducer *reducer, sw_stream *stream);
/* A round begins on the stream in use: what is written on it from now on comes behind the optimizer
 * that reads the means there. */
SW_MUST_USE sw_status sw_reducer_arrive(sw_reducer *reducer, sw_error *err);
/* The gradient of `param` was written on the stream in use. Before the mark. */
SW_MUST_USE sw_status sw_reducer_produce(sw_reducer *reducer, size_t param, sw_error *err);
/* Bucket `bucket` takes part from the next round on, in device memory of the caller's that outlives
 * the reducer, all of it written: the whole bucket, or sliced this rank's slice of its mean. */
SW_MUST_USE sw_status sw_reducer_adopt(sw_reducer *reducer, size_t bucket, void *data,
                                       sw_error *err);
/* Sliced: where buckets travel; `count` places of the caller's in turn, at most two, the largest
 * first. Between two rounds; what was enqueued on earlier places comes before what the stream in
 * use is given next. */
SW_MUST_USE sw_status sw_reducer_set_places(sw_reducer *reducer, void *const *places,
                                            const size_t *sizes_bytes, size_t count, sw_error *err);
/* With `is_lent`, before the first round: see sw_device_reducer_lend. */
SW_MUST_USE sw_status sw_reducer_lend(sw_reducer *reducer, void *contributions, void *compressed,
                                      sw_error *err);
/* The engine averages no bucket from the next round on: a user's hook does. Use bits, tags and the
 * order of streams are left. Between two rounds; waits for what was enqueued. */
SW_MUST_USE sw_status sw_reducer_withdraw(sw_reducer *reducer, sw_error *err);
/* Which ranks still train, world_size bytes, alike on all ranks before a round: the others
 * contribute nothing, and means divide as sw_reducer_divide_by_active has it. */
SW_MUST_USE sw_status sw_reducer_set_active(sw_reducer *reducer, const uint8_t *trains,
                                            sw_error *err);
/* A number that must be equal on all ranks in the rounds to come. */
void sw_reducer_set_digest(sw_reducer *reducer, uint32_t digest);
/* SW_E_MISMATCH, for all ranks to hear, where ranks differed in a round before: in their steps or
 * rounds, in their digests, or in what stood. Never waits. The stream in use must not be captured.
 */
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
/* The contribution of `param` becomes the elements at `from`, laid out alike, or on the host
 * (`add`) the sum of both. On a GPU the stream in use copies, at sw_reducer_seal() at the latest.
 */
SW_MUST_USE sw_status sw_reducer_write(sw_reducer *reducer, size_t param, const void *from,
                                       bool add, sw_error *err);
/* The contribution of `param` becomes zeros. */
SW_MUST_USE sw_status sw_reducer_clear(sw_reducer *reducer, size_t param, sw_error *err);
/* What was written to the bucket lies there, for the stream in use. sw_reducer_send does so. */
SW_MUST_USE sw_status sw_reducer_seal(sw_reducer *reducer, size_t bucket, sw_error *err);
/* First byte of this rank's slice of a parameter's mean; *numel elements, 0 if it owns none. */
uint8_t *sw_reducer_result(const sw_reducer *reducer, size_t param, size_t *numel);
/* Makes a frozen parameter's bucket take part from the next round on. */
void sw_reducer_unfreeze(sw_reducer *reducer, size_t param);

/* Counts a step of the optimizer: rounds are numbered from it, and ranks compare both numbers in
 * each round. */
void sw_reducer_count_step(sw_reducer *reducer);
/* Counts from 0 again: on all ranks, where some have taken steps without others (join). */
void sw_reducer_forget_steps(sw_reducer *reducer);
/* Adds what the next step uses (`digest`, of its hyperparameters) to what contributing ranks
 * compare in each round, whatever the order of the steps between two rounds. No message is added
 * for it: it travels with the use bits. */
void sw_reducer_note_step(sw_reducer *reducer, uint32_t digest);
/* After a round: whether contributing ranks had noted different steps, which every rank finds
 * alike. Said once: steps are compared anew from here on. */
bool sw_reducer_take_unlike_steps(sw_reducer *reducer);

/* Opens a round for graph task `task`. The state must be CLOSED. */
SW_MUST_USE sw_status sw_reducer_open(sw_reducer *reducer, int64_t task, bool synchronised,
                                      sw_error *err);

/* Parameter `param` got its gradient, which lies in its memory (except in a LOCAL round), by a hook
 * in graph task `task`. Never waits; *advance tells that sw_reducer_advance() has something to do.
 */
SW_MUST_USE sw_status sw_reducer_mark(sw_reducer *reducer, size_t param, int64_t task,
                                      bool *advance, sw_error *err);
/* The same in two steps, for a gradient that cannot be placed yet: `param` has its gradient
 * somewhere; */
SW_MUST_USE sw_status sw_reducer_mark_ready(sw_reducer *reducer, size_t param, int64_t task,
                                            bool *advance, sw_error *err);
/* and now it lies in its memory. `standing`: the contribution is that plus the standing mean
 * (sliced, in a pool). */
void sw_reducer_place(sw_reducer *reducer, size_t param, bool standing);
/* Whether the memory of `param` may be written in this round: false while its slot belongs to an
 * earlier bucket. */
bool sw_reducer_can_place(const sw_reducer *reducer, size_t param);
/* A moment's rest for a rank that is ahead of its peers: more than a bucket of usual size waits for
 * its place, and `param` among it, for a slot that peers still read. False, at once, where that is
 * not so, or half of the round was rest: a peer may be waiting for this rank by other means. */
bool sw_reducer_hold_back(sw_reducer *reducer, size_t param);
/* Whether the next bucket to send has all its gradients, not all of them placed, and a free slot:
 * reserve it, place them, and advance. */
bool sw_reducer_is_waiting(const sw_reducer *reducer, size_t *bucket);
/* At the end of a backward, bucket by bucket: the next to send; its slot, once it is free (waits);
 * sent. */
bool sw_reducer_next_unsent(const sw_reducer *reducer, size_t *bucket);
SW_MUST_USE sw_status sw_reducer_reserve(sw_reducer *reducer, size_t bucket, sw_error *err);
SW_MUST_USE sw_status sw_reducer_send(sw_reducer *reducer, size_t bucket, sw_error *err);

/* Parameter `param` is used, and its gradient stays where it is until the end of the backward,
 * because others may still change it; so does its bucket, from now on. false if that was sent
 * already. */
bool sw_reducer_pin(sw_reducer *reducer, size_t param);
/* Posts, in order, the buckets that are complete, and helps on those under way. */
SW_MUST_USE sw_status sw_reducer_advance(sw_reducer *reducer, sw_error *err);

/* Whether a mark came of `param` in this round; whether its gradient was put into place. */
bool sw_reducer_is_ready(const sw_reducer *reducer, size_t param);
bool sw_reducer_is_placed(const sw_reducer *reducer, size_t param);
/* Whether the bucket of `param` takes part in rounds (trainable, or unfrozen since). */
bool sw_reducer_takes_part(const sw_reducer *reducer, size_t param);
/* Whether the bucket of `param` was already sent in this round. */
bool sw_reducer_is_sent(const sw_reducer *reducer, size_t param);

/* Ends a round whose gradients all lie in place: sends the rest, waits. SW_E_MISMATCH names a rank
 * that abandoned it. In a LOCAL round: ends it only. */
SW_MUST_USE sw_status sw_reducer_finish(sw_reducer *reducer, sw_error *err);
/* Ends a round that an exception left open: peers get in step, nothing is folded. Waits for them.
 */
SW_MUST_USE sw_status sw_reducer_abandon(sw_reducer *reducer, sw_error *err);
/* The same for as long as `budget_ns` allows and all ranks live, in a pool: what is not done then
 * is left to sw_reducer_abandon, and the round stays open until it. A round that is not open is
 * nothing to do. */
SW_MUST_USE sw_status sw_reducer_try_abandon(sw_reducer *reducer, int64_t budget_ns, sw_error *err);
/* A whole round in which this rank contributes nothing. Where a user's hook owns the buckets, only
 * the use bits are exchanged. On a GPU the caller fills each bucket with what a sum does not see:
 * open_shadow, then what reserve, seal and send ask for, then finish. */
SW_MUST_USE sw_status sw_reducer_shadow(sw_reducer *reducer, sw_error *err);
SW_MUST_USE sw_status sw_reducer_open_shadow(sw_reducer *reducer, sw_error *err);
/* For a user's communication hook, in place of finish: exchanges the use bits (one barrier) and
 * ends the round; the buckets are the caller's to reduce. SW_E_MISMATCH as finish. */
SW_MUST_USE sw_status sw_reducer_exchange_use(sw_reducer *reducer, sw_error *err);

/* Before that, sliced: the contribution of `param`, which is not placed yet, is on top of the
 * standing mean. */
void sw_reducer_stand(sw_reducer *reducer, size_t param);
/* After it: how many ranks said so. */
size_t sw_reducer_standing_ranks(const sw_reducer *reducer, size_t param);
/* First byte of a bucket in this rank's memory; sliced in a pool: of its slot, which others share.
 */
uint8_t *sw_reducer_slot(const sw_reducer *reducer, size_t bucket);

/* From the next round on. On a GPU to HOOKS, once, after sw_reducer_withdraw. */
void sw_reducer_give_buckets(sw_reducer *reducer, sw_bucket_owner owner);
/* SW_BUCKETS_HOOKS_EARLY: the next bucket that is complete before the end of the backward, which
 * counts as sent from now on: all its parameters are used, on this rank. false if there is none. */
bool sw_reducer_hand_over(sw_reducer *reducer, size_t *bucket);
/* Whether all ranks came to sw_reducer_exchange_use() of the round that was opened last. */
bool sw_reducer_has_met(const sw_reducer *reducer);
/* Whether this rank handed the bucket over in this round; and after sw_reducer_exchange_use(),
 * until the next round, whether some rank did. In a round that was abandoned exactly those buckets
 * are to be reduced by all. */
bool sw_reducer_is_handed_over(const sw_reducer *reducer, size_t bucket);
bool sw_reducer_is_handed_over_by_any(const sw_reducer *reducer, size_t bucket);
/* Zeros in place of this rank's contribution to a bucket. Not sliced. */
SW_MUST_USE sw_status sw_reducer_clear_bucket(sw_reducer *reducer, size_t bucket, sw_error *err);

/* Whether this rank used `param` since the last synchronisation. */
bool sw_reducer_is_used(const sw_reducer *reducer, size_t param);
/* After a round: whether some rank used `param` in it. */
bool sw_reducer_used_by_any(const sw_reducer *reducer, size_t param);
/* Whether the last round that synchronised averaged nothing: some rank abandoned it, or it failed.
 */
bool sw_reducer_last_round_failed(const sw_reducer *reducer);
/* After sw_reducer_exchange_use(): how many ranks the mean is to be over. */
size_t sw_reducer_divisor(const sw_reducer *reducer);
/* The number, from 1, of the last round in which some rank used `param`; 0: none. */
uint64_t sw_reducer_averaged_in(const sw_reducer *reducer, size_t param);
/* The mean is over the contributing ranks (true) or over the world size (false, the start). */
void sw_reducer_divide_by_active(sw_reducer *reducer, bool active_only);

#endif
