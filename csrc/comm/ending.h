/* ending.h - the reason why a communicator or transport ends: the first one recorded wins.
 *
 * Idea: several threads of a rank, and in shared pages several processes, may detect that a
 * communicator has ended. Each records its reason; every rank reports the first one. Recording
 * takes no lock, so a process killed in the middle blocks no other: its reason is ignored, and its
 * death is detected otherwise.
 *
 * Recording does not end anything: a transport's own thread ends it when it finds the reason in the
 * next turn of its loop.
 *
 * Thread rule: any; also between processes that map it. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "platform/futex.h"

typedef enum sw_member_state {
    SW_MEMBER_ACTIVE = 0,
    SW_MEMBER_LEFT,      /* closed in order */
    SW_MEMBER_ENDED,     /* met an error */
    SW_MEMBER_RECORDING, /* transient: the reason is being written. Counts as active */
} sw_member_state;

typedef struct sw_ending { /* zeroed: active */
    _Atomic uint32_t state;
    sw_error reason; /* reason of LEFT and ENDED; written before the state */
} sw_ending;

static inline sw_member_state sw_ending_state(const sw_ending *ending)
{
    uint32_t state = atomic_load(&ending->state);
    return state == SW_MEMBER_RECORDING ? SW_MEMBER_ACTIVE : (sw_member_state)state;
}

/* `how`: LEFT or ENDED. Returns false, and changes nothing, if a reason is recorded already. */
static inline bool sw_ending_record(sw_ending *ending, sw_member_state how, const sw_error *reason)
{
    uint32_t expected = SW_MEMBER_ACTIVE;
    if (!atomic_compare_exchange_strong(&ending->state, &expected, SW_MEMBER_RECORDING))
        return false;
    ending->reason = *reason;
    atomic_store(&ending->state, (uint32_t)how);
    return true;
}

/* For a forked child's copy: a thread that does not exist in the child may have been writing the
 * reason. */
static inline void sw_ending_force(sw_ending *ending, const sw_error *reason)
{
    if (sw_ending_state(ending) != SW_MEMBER_ACTIVE)
        return;
    ending->reason = *reason;
    atomic_store(&ending->state, SW_MEMBER_ENDED);
}

/* Return SW_OK while it is active, else the reason. */
static inline sw_status sw_ending_read(const sw_ending *ending, sw_error *err)
{
    if (sw_ending_state(ending) == SW_MEMBER_ACTIVE)
        return SW_OK;
    return sw_error_set(err, ending->reason.status, ending->reason.detail, "%.*s",
                        SW_ERROR_MESSAGE_BYTES - 1, ending->reason.message);
}

/* The same after another thread of this process has recorded first: wait until its reason is
 * written. */
static inline sw_status sw_ending_await(const sw_ending *ending, sw_error *err)
{
    while (atomic_load(&ending->state) == SW_MEMBER_RECORDING)
        sw_spin_pause();
    return sw_ending_read(ending, err);
}
