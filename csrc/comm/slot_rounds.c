/* slot_rounds.c - rounds of the slot transport, and their end. See slot_transport.h.
 *
 * The order matters. A number written before the pieces are copied shows peers an old slot. A copy
 * from a peer's slot before the wait for it reads half-written data. A round that closes on only
 * some ranks shifts all later ones. */

#include "comm/slot_state.h"
#include "platform/clock.h"
#include "platform/thread.h"

enum { RELEASE_NS = 1000000000 };

/* ---- failing ---- */

/* Write the numbers that our waits need into our own page. A peer's GPU may later overwrite them
 * with older ones, so a caller that needs the stream to end repeats this. */
static void release_waits(const sw_slot_transport *t)
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
            release_waits(t);
        if (ops->event_query(t->base.device, t->ended, &done, NULL) != SW_OK)
            return;
        if (!done)
            sw_thread_rest(sw_clock_now_ns() - start);
    }
}

/* Mark first, so that no rank takes the data of a released wait for valid. Returns false if another
 * thread has marked before. */
static bool mark(sw_slot_transport *t, const sw_error *reason)
{
    if (atomic_exchange(&t->base.has_failed, true))
        return false;
    sw_ending_record(&sw_slot_head_of(t, t->base.rank)->ending, SW_MEMBER_ENDED, reason);
    return true;
}

void sw_slot_end(sw_peers *peers, const sw_error *reason)
{
    sw_slot_transport *t = (sw_slot_transport *)(void *)peers;
    if (mark(t, reason))
        sw_slot_drain(t, RELEASE_NS);
}

void sw_slot_end_beside(sw_peers *peers, const sw_error *reason)
{
    sw_slot_transport *t = (sw_slot_transport *)(void *)peers;
    sw_error first;
    (void)!sw_peers_report(peers, reason, &first);
    (void)mark(t, &first);
    release_waits(t);
}

/* Return true if a round that this rank has enqueued differs on rank `p`: without this check, data
 * of other sizes would be read. */
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

/* Return the reason of a failure that the shared parts record. */
sw_status sw_slot_look(sw_peers *peers, sw_error *reason)
{
    const sw_slot_transport *t = (const sw_slot_transport *)(const void *)peers;
    const int rank = peers->rank, world_size = peers->world_size;
    uint32_t round;
    for (int p = 0; p < world_size; ++p)
        if (p != rank)
            SW_TRY(sw_ending_read(&sw_slot_head_of(t, p)->ending, reason));
    for (int p = 0; p < world_size; ++p)
        if (p != rank && differs(t, p, &round))
            SW_FAIL(
                reason, SW_E_MISMATCH,
                "GPU slots: ranks %d and %d of %d issue different operations: sizes of their round "
                "%u differ",
                p < rank ? p : rank, p < rank ? rank : p, world_size, round);
    return SW_OK;
}

sw_status sw_slot_check(sw_peers *peers, sw_error *err)
{
    sw_slot_transport *t = (sw_slot_transport *)(void *)peers;
    sw_error reason;
    if (sw_peers_has_failed(peers))
        release_waits(t);
    SW_TRY(sw_peers_check_request(peers, err));
    return sw_slot_look(peers, &reason) == SW_OK ? SW_OK : sw_peers_fail(peers, &reason, err);
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

/* Return the device address of rank `writer`'s number in `rank`'s page. */
static uint32_t *number_of(const sw_slot_transport *t, int rank, int writer)
{
    sw_slot_head *head = (sw_slot_head *)(void *)t->mapped[rank];
    return &head->number[writer];
}

static sw_status write_numbers(const sw_slot_transport *t, sw_error *err)
{
    const sw_device_ops *ops = t->base.device->ops;
    for (int p = 0; p < t->base.world_size; ++p)
        if (p != t->base.rank)
            SW_TRY(ops->stream_write_number(t->base.device, t->stream,
                                            number_of(t, p, t->base.rank), t->round, err));
    return SW_OK;
}

static sw_status await_numbers(const sw_slot_transport *t, sw_error *err)
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
    SW_TRY(write_numbers(t, err));
    SW_TRY(await_numbers(t, err));
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
    size_t most = t->slot_bytes / count / unit * unit; /* capacity of an empty slot */
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
