/* shard_state.h - the state of a unit's parameters: one enum, one transition function.
 *
 *     SHARDED    --gather-->   GATHERING   --complete-->  UNSHARDED  --release-->  SHARDED
 *                              GATHERING   --fail------>  SHARDED
 *
 * Every other move is SW_E_STATE: a unit is never gathered twice, nor released while it is written.
 *
 * Thread rule: any; a state belongs to its owner.
 */
#pragma once

#include "base/status.h"

typedef enum sw_shard_state {
    SW_SHARD_SHARDED = 0, /* only slices exist; the unit's addresses read as NaN */
    SW_SHARD_GATHERING,   /* memory is mapped, but not all bytes are written */
    SW_SHARD_UNSHARDED,   /* all bytes are valid */
    SW_SHARD_STATE_COUNT,
} sw_shard_state;

typedef enum sw_shard_event {
    SW_SHARD_GATHER = 0,
    SW_SHARD_COMPLETE,
    SW_SHARD_FAIL,
    SW_SHARD_RELEASE,
    SW_SHARD_EVENT_COUNT,
} sw_shard_event;

/* Return "sharded", "gathering" or "unsharded"; never NULL. */
const char *sw_shard_state_name(sw_shard_state state);

/* Move *state; or leave it unchanged and return SW_E_STATE with the unit, the move and the required
 * state. */
SW_MUST_USE sw_status sw_shard_move(sw_shard_state *state, sw_shard_event event, const char *unit,
                                    sw_error *err);
