/* shard_state.c - the table of state transitions. */
#include "zero/shard_state.h"

typedef struct move {
    const char *name;
    sw_shard_state from, to;
} move;

static const move moves[SW_SHARD_EVENT_COUNT] = {
    [SW_SHARD_GATHER] = {"gathered", SW_SHARD_SHARDED, SW_SHARD_GATHERING},
    [SW_SHARD_COMPLETE] = {"completed", SW_SHARD_GATHERING, SW_SHARD_UNSHARDED},
    [SW_SHARD_FAIL] = {"given up", SW_SHARD_GATHERING, SW_SHARD_SHARDED},
    [SW_SHARD_RELEASE] = {"released", SW_SHARD_UNSHARDED, SW_SHARD_SHARDED},
};

const char *sw_shard_state_name(sw_shard_state state)
{
    static const char *const names[] = {"sharded", "gathering", "unsharded"};
    return (unsigned)state < SW_SHARD_STATE_COUNT ? names[state] : "invalid";
}

sw_status sw_shard_move(sw_shard_state *state, sw_shard_event event, const char *unit,
                        sw_error *err)
{
    if ((unsigned)event >= SW_SHARD_EVENT_COUNT)
        SW_FAIL(err, SW_E_INVALID, "unit '%s': %d is not a move", unit, (int)event);
    const move *wanted = &moves[event];
    if (*state != wanted->from)
        SW_FAIL(err, SW_E_STATE, "unit '%s' cannot be %s: it is %s and must be %s", unit,
                wanted->name, sw_shard_state_name(*state), sw_shard_state_name(wanted->from));
    *state = wanted->to;
    return SW_OK;
}
