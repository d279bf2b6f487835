/* shard_state.h - what a unit's parameters are at a moment: one enum, one transition function.
 *
 *     SHARDED    --gather-->   GATHERING   --complete-->  UNSHARDED  --release-->  SHARDED
 *                              GATHERING   --fail------>  SHARDED
 *
 * Every other move is SW_E_STATE: a unit is never gathered twice, nor released while it is written.
 *
 * Thread rule: any; a state belongs to its owner.
 */
#ifndef SW_ZERO_SHARD_STATE_H
#define SW_ZERO_SHARD_STATE_H

#include "base/status.h"

typedef enum sw_shard_state {
    SW_SHARD_SHARDED = 0, /* ranks have their slices; the unit's addresses read as NaN */
    SW_SHARD_GATHERING,   /* pages are there, not all bytes are */
    SW_SHARD_UNSHARDED,   /* whole */
    SW_SHARD_STATE_COUNT,
} sw_shard_state;

typedef enum sw_shard_event {
    SW_SHARD_GATHER = 0,
    SW_SHARD_COMPLETE,
    SW_SHARD_FAIL,
    SW_SHARD_RELEASE,
    SW_SHARD_EVENT_COUNT,
} sw_shard_event;

/* "sharded" and so on; never NULL. */
const char *sw_shard_state_name(sw_shard_state state);

/* Moves *state, or leaves it: SW_E_STATE names the unit, the move, and the state it needs. */
SW_MUST_USE sw_status sw_shard_move(sw_shard_state *state, sw_shard_event event, const char *unit,
                                    sw_error *err);

#endif
