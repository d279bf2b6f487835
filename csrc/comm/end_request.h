/* end_request.h - one thread asks that a transport end in which another is waiting.
 *
 * Idea: a transport belongs to one thread at a time, so whoever else learns that a wait is in vain
 * (the thread that watches the peers' processes) may not end it. He leaves the reason here, and the
 * waiting thread, which looks at every turn of its loop, ends it itself.
 *
 * Thread rule: any; the first reason stays.
 */
#ifndef SW_COMM_END_REQUEST_H
#define SW_COMM_END_REQUEST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef enum sw_end_request_state {
    SW_END_NOT_ASKED = 0,
    SW_END_BEING_WRITTEN,
    SW_END_ASKED,
} sw_end_request_state;

typedef struct sw_end_request { /* zeroed: nobody has asked */
    _Atomic int state;          /* sw_end_request_state; released after `reason` is written */
    sw_error reason;
} sw_end_request;

static inline void sw_end_request_make(sw_end_request *request, const sw_error *reason)
{
    int expected = SW_END_NOT_ASKED;
    if (!atomic_compare_exchange_strong(&request->state, &expected, SW_END_BEING_WRITTEN))
        return;
    request->reason = *reason;
    atomic_store_explicit(&request->state, SW_END_ASKED, memory_order_release);
}

/* The first reason, by whichever thread: waits out the moment in which another thread writes it.
 * Only after some thread has called sw_end_request_make. */
static inline const sw_error *sw_end_request_await(const sw_end_request *request)
{
    while (atomic_load_explicit(&request->state, memory_order_acquire) != SW_END_ASKED)
        continue;
    return &request->reason;
}

/* The reason, or NULL: nobody has asked yet. */
static inline const sw_error *sw_end_request_reason(const sw_end_request *request)
{
    return atomic_load_explicit(&request->state, memory_order_acquire) == SW_END_ASKED
               ? &request->reason
               : NULL;
}

#endif
