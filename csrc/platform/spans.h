/* spans.h - intervals of time that a trace shows: phases of a step, waits, the work of a save.
 *
 * Off until a trace begins; then each thread adds what it did to one ring. Costs a load when off.
 * The ring is made once and stays, since a thread may still write into it when the trace has ended.
 *
 * Thread rule: any; sw_spans_turn and sw_spans_take one at a time. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_SPANS = 1 << 16 }; /* the last ones that are kept */

typedef enum sw_span_kind {
    SW_SPAN_PHASE = 0, /* value: sw_phase */
    SW_SPAN_WAIT,      /* value: the rank it is for, -1 unknown */
    SW_SPAN_SAVE,      /* value: 0 blocks of a checkpoint are written, 1 it is made valid */
} sw_span_kind;

typedef struct sw_interval { /* 40 bytes; times in nanoseconds of the monotonic clock */
    uint64_t serial;         /* from 1; 0: being written */
    int64_t begun_ns, ended_ns;
    int32_t kind, value;
    int32_t thread, reserved; /* the system's number of the thread */
} sw_interval;

/* Begin or end recording. SW_E_MEMORY: there is no ring, and nothing is recorded. */
SW_MUST_USE sw_status sw_spans_turn(bool on, sw_error *err);
/* Add what ends now; no effect while off, or for `begun_ns` 0. */
void sw_spans_add(sw_span_kind kind, int value, int64_t begun_ns, int64_t ended_ns);
/* Copy those with a serial above `after` to `spans`, which has SW_SPANS places, the oldest first.
 * Returns their number. One that is being written is left out. */
size_t sw_spans_take(uint64_t after, sw_interval *spans);
