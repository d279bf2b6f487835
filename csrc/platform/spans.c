/* spans.c - see the header. */
#include "platform/spans.h"

#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct slot {
    _Atomic uint64_t serial;
    _Atomic int64_t begun_ns, ended_ns, what, thread; /* what: kind and value */
} slot;

static slot *_Atomic ring; /* NULL while off */
static slot *made;         /* owned: never freed */
static _Atomic uint64_t last;

sw_status sw_spans_turn(bool on, sw_error *err)
{
    if (on && !made)
        made = calloc(SW_SPANS, sizeof *made);
    if (on && !made)
        SW_FAIL(err, SW_E_MEMORY, "a trace: no memory for %zu bytes of spans",
                SW_SPANS * sizeof *made);
    atomic_store_explicit(&ring, on ? made : NULL, memory_order_release);
    return SW_OK;
}

void sw_spans_add(sw_span_kind kind, int value, int64_t begun_ns, int64_t ended_ns)
{
    slot *to = atomic_load_explicit(&ring, memory_order_acquire);
    if (!to || begun_ns == 0)
        return;
    uint64_t serial = atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
    to += (serial - 1) % SW_SPANS;
    atomic_store_explicit(&to->serial, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&to->begun_ns, begun_ns, memory_order_relaxed);
    atomic_store_explicit(&to->ended_ns, ended_ns, memory_order_relaxed);
    atomic_store_explicit(&to->what, (int64_t)kind << 32 | (uint32_t)value, memory_order_relaxed);
    atomic_store_explicit(&to->thread, (int64_t)syscall(SYS_gettid), memory_order_relaxed);
    atomic_store_explicit(&to->serial, serial, memory_order_release);
}

size_t sw_spans_take(uint64_t after, sw_interval *spans)
{
    size_t count = 0;
    uint64_t newest = atomic_load(&last), first = after;
    if (newest > SW_SPANS && newest - SW_SPANS > first)
        first = newest - SW_SPANS;
    for (uint64_t serial = first + 1; made && serial <= newest; ++serial) {
        slot *from = &made[(serial - 1) % SW_SPANS];
        if (atomic_load_explicit(&from->serial, memory_order_acquire) != serial)
            continue;
        int64_t what = atomic_load_explicit(&from->what, memory_order_relaxed);
        spans[count] = (sw_interval){
            .serial = serial,
            .begun_ns = atomic_load_explicit(&from->begun_ns, memory_order_relaxed),
            .ended_ns = atomic_load_explicit(&from->ended_ns, memory_order_relaxed),
            .kind = (int32_t)(what >> 32),
            .value = (int32_t)(uint32_t)what,
            .thread = (int32_t)atomic_load_explicit(&from->thread, memory_order_relaxed),
        };
        atomic_thread_fence(memory_order_acquire);
        count += atomic_load_explicit(&from->serial, memory_order_relaxed) == serial;
    }
    return count;
}
