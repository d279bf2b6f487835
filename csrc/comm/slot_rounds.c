/* slot_rounds.c - rounds of the slot transport, and how they end. See slot_transport.h.
 *
 * What breaks if the order changes: a number that is written before the pieces are copied shows
 * peers an old slot; a copy out of a peer's slot before the wait for it reads what is half written;
 * a round closed on one rank and not on another shifts all later ones.
 */

#include "comm/slot_state.h"
#include "platform/clock.h"
#include "platform/thread.h"

enum { LET_GO_NS = 1000000000 };

/* ---- failing ---- */

/* The numbers that waits of ours look for, into our own page. A peer's GPU may write an older one
 * over it later, so whoever needs the stream to end does this again. */
static void let_go(const sw_slot_transport *t)
{
    sw_slot_head *own = sw_slot_head_of(t, t->base.rank);
    for (int p = 0; p < t->base.world_size; ++p)
        __atomic_store_n(&own->number[p], t->round, __ATOMIC_RELEASE);
}

void sw_slot_drain(sw_slot_transport *t, int64_t limit_ns)
{
    const sw_device_ops *ops = t->device->ops;
    int64_t start = sw_clock_now_ns();
    bool done = false;
    if (!t->ended || ops->event_record(t->device, t->ended, t->stream, NULL) != SW_OK)
        return;
    while (!done && sw_clock_now_ns() - start < limit_ns) {
        if (t->has_failed)
            let_go(t);
        if (ops->event_query(t->device, t->ended, &done, NULL) != SW_OK)
            return;
        if (!done)
            sw_thread_rest(sw_clock_now_ns() - start);
    }
}

/* The mark comes first: what is made of a wait that was let go is never taken for good by a rank
 * that asks. Then those hear of it that wait for this rank's host. Returns whether the caller is
 * the first to come here. */
static bool mark(sw_slot_transport *t, const sw_error *reason)
{
    sw_error first;
    sw_ending_say(&t->ending, SW_MEMBER_ENDED, reason);
    if (atomic_exchange(&t->has_failed, true))
        return false;
    (void)!sw_ending_await(&t->ending, &first);
    sw_ending_say(&sw_slot_head_of(t, t->base.rank)->ending, SW_MEMBER_ENDED, &first);
    sw_lookout_tell(t->lookout, &first);
    return true;
}

sw_status sw_slot_fail(sw_slot_transport *t, const sw_error *reason, sw_error *err)
{
    if (mark(t, reason))
        sw_slot_drain(t, LET_GO_NS);
    return sw_ending_await(&t->ending, err);
}

void sw_slot_end_beside(sw_slot_transport *t, const sw_error *reason)
{
    (void)mark(t, reason);
    let_go(t);
}

void sw_slot_explain_late(const sw_slot_transport *t, const char *what, sw_error *reason)
{
    sw_error_set(reason, SW_E_TIMEOUT, -1,
                 "GPU slots on rank %d of %d: %s was not done within %.3g s; a peer has not come "
                 "to it",
                 t->base.rank, t->base.world_size, what, (double)t->timeout_ns * 1e-9);
}

sw_status sw_slot_fail_late(sw_slot_transport *t, const char *what, sw_error *err)
{
    sw_error reason;
    sw_slot_explain_late(t, what, &reason);
    return sw_slot_fail(t, &reason, err);
}

/* Whether a round that this rank has enqueued is another one on rank `p`: sizes that differ would
 * be read as if they did not. */
static bool differs(const sw_slot_transport *t, int p, uint32_t *round)
{
    const sw_slot_head *own = sw_slot_head_of(t, t->base.rank), *other = sw_slot_head_of(t, p);
    for (int k = 0; k < SW_SLOT_LAYOUTS; ++k) {
        uint64_t mine = own->layout[k],
                 theirs = __atomic_load_n(&other->layout[k], __ATOMIC_ACQUIRE);
        *round = (uint32_t)(mine >> 32);
        if (*round && *round == (uint32_t)(theirs >> 32) && mine != theirs)
            return true;
    }
    return false;
}

static bool layouts_differ(const sw_slot_transport *t, sw_error *reason)
{
    for (int p = 0; p < t->base.world_size; ++p) {
        uint32_t round;
        if (p == t->base.rank || !differs(t, p, &round))
            continue;
        sw_error_set(reason, SW_E_MISMATCH, -1,
                     "GPU slots: ranks %d and %d of %d issue different operations: their round %u "
                     "is of different sizes",
                     p < t->base.rank ? p : t->base.rank, p < t->base.rank ? t->base.rank : p,
                     t->base.world_size, round);
        return true;
    }
    return false;
}

/* Why the transport has failed, if it has: as far as the parts in shared memory say. */
static bool find_failure(const sw_slot_transport *t, sw_error *reason)
{
    if (sw_ending_read(&t->ending, reason) != SW_OK)
        return true;
    for (int p = 0; p < t->base.world_size; ++p)
        if (p != t->base.rank && sw_ending_read(&sw_slot_head_of(t, p)->ending, reason) != SW_OK)
            return true;
    return layouts_differ(t, reason);
}

sw_status sw_slot_check(sw_slot_transport *t, sw_error *err)
{
    sw_error reason;
    if (t->has_failed) {
        let_go(t);
        return sw_ending_await(&t->ending, err);
    }
    return find_failure(t, &reason) ? sw_slot_fail(t, &reason, err) : SW_OK;
}

sw_status sw_slot_watch(sw_slot_transport *t, sw_error *err)
{
    sw_error reason;
    if (!find_failure(t, &reason))
        return SW_OK;
    sw_slot_end_beside(t, &reason);
    return sw_ending_await(&t->ending, err);
}

/* What the ranks' hosts say of a wait. */
static sw_status look_out(sw_slot_transport *t, int64_t begun_ns, const char *what, sw_error *err)
{
    sw_error reason;
    sw_status status = sw_lookout_look(t->lookout, begun_ns, what, &reason);
    if (status == SW_OK)
        return SW_OK;
    sw_status failed = sw_slot_fail(t, &reason, err);
    if (status == SW_E_INTERRUPTED)
        SW_FAIL(err, status, "interrupted while waiting for %s", what);
    return failed;
}

/* A call of the driver's has failed. */
static sw_status fail_driver(sw_slot_transport *t, const char *what, const sw_error *cause,
                             sw_error *err)
{
    sw_error reason;
    sw_error_set(&reason, cause->status, cause->detail, "GPU slots on rank %d of %d: %s: %.300s",
                 t->base.rank, t->base.world_size, what, cause->message);
    return sw_slot_fail(t, &reason, err);
}

sw_status sw_slot_wait(sw_slot_transport *t, sw_event *event, const char *what, sw_error *err)
{
    int64_t start = sw_clock_now_ns();
    for (;;) {
        bool done;
        sw_error reason;
        if (t->device->ops->event_query(t->device, event, &done, &reason) != SW_OK)
            return fail_driver(t, what, &reason, err);
        SW_TRY(sw_slot_check(t, err)); /* after the event: what it stands for may be garbage */
        if (done)
            return SW_OK;
        if (sw_clock_now_ns() - start > t->timeout_ns)
            return sw_slot_fail_late(t, what, err);
        SW_TRY(look_out(t, start, what, err));
        sw_thread_rest(sw_clock_now_ns() - start);
    }
}

/* ---- rounds ---- */

size_t sw_slot_stride(size_t size_bytes)
{
    size_t unit = SW_SLOT_PIECE_ALIGNMENT;
    return (size_bytes + unit - 1) / unit * unit;
}

static uint8_t *slot_of(const sw_slot_transport *t, int rank)
{
    return t->slots[rank] + t->round % SW_SLOT_COUNT * t->slot_bytes;
}

static void open_round(sw_slot_transport *t)
{
    t->round++;
    t->is_open = true;
    t->used = t->moves = t->arrival_count = 0;
    t->digest = 0;
}

/* Where rank `writer`'s number lies in `rank`'s page, as the device calls it. */
static uint32_t *number_of(const sw_slot_transport *t, int rank, int writer)
{
    sw_slot_head *head = (sw_slot_head *)(void *)t->mapped[rank];
    return &head->number[writer];
}

static sw_status tell_peers(const sw_slot_transport *t, sw_error *err)
{
    const sw_device_ops *ops = t->device->ops;
    for (int p = 0; p < t->base.world_size; ++p)
        if (p != t->base.rank)
            SW_TRY(ops->stream_write_number(t->device, t->stream, number_of(t, p, t->base.rank),
                                            t->round, err));
    return SW_OK;
}

static sw_status await_peers(const sw_slot_transport *t, sw_error *err)
{
    const sw_device_ops *ops = t->device->ops;
    for (int p = 0; p < t->base.world_size; ++p)
        if (p != t->base.rank)
            SW_TRY(ops->stream_wait_number(t->device, t->stream, number_of(t, t->base.rank, p),
                                           t->round, err));
    return SW_OK;
}

sw_status sw_slot_close_round(sw_slot_transport *t, sw_error *err)
{
    if (!t->is_open)
        return SW_OK;
    __atomic_store_n(&sw_slot_head_of(t, t->base.rank)->layout[t->round % SW_SLOT_LAYOUTS],
                     (uint64_t)t->round << 32 | t->digest, __ATOMIC_RELEASE);
    SW_TRY(tell_peers(t, err));
    SW_TRY(await_peers(t, err));
    for (size_t i = 0; i < t->arrival_count; ++i) {
        const sw_slot_arrival *a = &t->arrival[i];
        SW_TRY(t->device->ops->copy_async(t->device, a->to, slot_of(t, a->peer) + a->offset,
                                          a->size_bytes, t->stream, err));
    }
    t->is_open = false;
    return SW_OK;
}

sw_status sw_slot_reserve(sw_slot_transport *t, int places, size_t wanted, size_t *size_bytes,
                          size_t *offset, sw_error *err)
{
    size_t unit = SW_SLOT_PIECE_ALIGNMENT, count = (size_t)places;
    size_t most = t->slot_bytes / count / unit * unit; /* of an empty slot */
    size_t size = wanted < most ? wanted : most;
    size_t world_size = (size_t)t->base.world_size;
    if (t->is_open && (t->slot_bytes - t->used < sw_slot_stride(size) * count ||
                       t->moves + world_size > t->arrival_max))
        SW_TRY(sw_slot_close_round(t, err));
    if (!t->is_open)
        open_round(t);
    *size_bytes = size;
    *offset = t->used;
    t->used += sw_slot_stride(size) * count;
    t->digest = (t->digest ^ (uint32_t)size ^ (uint32_t)places << 24) * 2654435761u + 1;
    t->moves += world_size;
    return SW_OK;
}

sw_status sw_slot_put(sw_slot_transport *t, size_t offset, const void *from, size_t size_bytes,
                      sw_error *err)
{
    return t->device->ops->copy_async(t->device, slot_of(t, t->base.rank) + offset, from,
                                      size_bytes, t->stream, err);
}

void sw_slot_get(sw_slot_transport *t, int peer, size_t offset, void *to, size_t size_bytes)
{
    t->arrival[t->arrival_count++] = (sw_slot_arrival){peer, to, offset, size_bytes};
}

sw_status sw_slot_meet(sw_slot_transport *t, const char *what, sw_error *err)
{
    if (!t->is_open)
        open_round(t);
    SW_TRY(sw_slot_close_round(t, err));
    SW_TRY(t->device->ops->event_record(t->device, t->ended, t->stream, err));
    return sw_slot_wait(t, t->ended, what, err);
}
