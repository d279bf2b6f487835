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
    const sw_device_ops *ops = t->base.device->ops;
    int64_t start = sw_clock_now_ns();
    bool done = false;
    if (!t->ended || ops->event_record(t->base.device, t->ended, t->stream, NULL) != SW_OK)
        return;
    while (!done && sw_clock_now_ns() - start < limit_ns) {
        if (sw_peers_has_failed(&t->base))
            let_go(t);
        if (ops->event_query(t->base.device, t->ended, &done, NULL) != SW_OK)
            return;
        if (!done)
            sw_thread_rest(sw_clock_now_ns() - start);
    }
}

/* The mark comes first: what is made of a wait that was let go is never taken for good by a rank
 * that asks. */
void sw_slot_end(sw_peers *peers, const sw_error *reason)
{
    sw_slot_transport *t = (sw_slot_transport *)(void *)peers;
    if (sw_peers_has_failed(peers))
        return;
    atomic_store(&peers->has_failed, true);
    sw_ending_say(&sw_slot_head_of(t, peers->rank)->ending, SW_MEMBER_ENDED, reason);
    sw_slot_drain(t, LET_GO_NS);
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

static sw_status check_layouts(sw_slot_transport *t, sw_error *err)
{
    for (int p = 0; p < t->base.world_size; ++p) {
        sw_error reason;
        uint32_t round;
        if (p == t->base.rank || !differs(t, p, &round))
            continue;
        sw_error_set(
            &reason, SW_E_MISMATCH, -1,
            "GPU slots: ranks %d and %d of %d issue different operations: their round %u is "
            "of different sizes",
            p < t->base.rank ? p : t->base.rank, p < t->base.rank ? t->base.rank : p,
            t->base.world_size, round);
        return sw_peers_fail(&t->base, &reason, err);
    }
    return SW_OK;
}

sw_status sw_slot_check(sw_peers *peers, sw_error *err)
{
    sw_slot_transport *t = (sw_slot_transport *)(void *)peers;
    sw_error reason;
    if (sw_peers_has_failed(peers))
        let_go(t);
    SW_TRY(sw_peers_check_request(peers, err));
    for (int p = 0; p < peers->world_size; ++p)
        if (p != peers->rank && sw_ending_read(&sw_slot_head_of(t, p)->ending, &reason) != SW_OK)
            return sw_peers_fail(peers, &reason, err);
    return check_layouts(t, err);
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
    const sw_device_ops *ops = t->base.device->ops;
    for (int p = 0; p < t->base.world_size; ++p)
        if (p != t->base.rank)
            SW_TRY(ops->stream_write_number(t->base.device, t->stream,
                                            number_of(t, p, t->base.rank), t->round, err));
    return SW_OK;
}

static sw_status await_peers(const sw_slot_transport *t, sw_error *err)
{
    const sw_device_ops *ops = t->base.device->ops;
    for (int p = 0; p < t->base.world_size; ++p)
        if (p != t->base.rank)
            SW_TRY(ops->stream_wait_number(t->base.device, t->stream, number_of(t, t->base.rank, p),
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
        SW_TRY(t->base.device->ops->copy_async(
            t->base.device, a->to, slot_of(t, a->peer) + a->offset, a->size_bytes, t->stream, err));
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
    return t->base.device->ops->copy_async(t->base.device, slot_of(t, t->base.rank) + offset, from,
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
    SW_TRY(t->base.device->ops->event_record(t->base.device, t->ended, t->stream, err));
    return sw_peers_await(&t->base, t->ended, what, err);
}
