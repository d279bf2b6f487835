/* fabric_wait.c - waits for words of peers, which a death, a peer's error or the deadline (wait.h)
 * also ends.
 *
 * A waiter spins briefly if cores are idle, then sleeps on the word it needs, in time slices.
 * Between them it checks for events after which the word never changes. It does not sleep on one
 * rank when another is known to be dead.
 *
 * Of several missing ranks it sleeps on a random one. Usually half of the others have arrived when
 * it wakes, so a rank wakes log2(W) times. If it slept on the lowest and ranks arrived in order, it
 * would wake W times. */
#include <stdio.h>

#include "comm/fabric.h"
#include "comm/wait.h"
#include "platform/clock.h"
#include "platform/futex.h"

enum { DEATHS_A_SLICE = 16 };

static const int64_t slice_ns = 20 * 1000 * 1000;

typedef struct fabric_wait {
    sw_fabric *fabric;
    sw_fabric_awaited awaited;
    sw_wait wait;
    int64_t looked_ns;
    uint32_t turns;
} fabric_wait;

/* Name, for a message, the first operation that is not done here, or the awaited one. */
static void describe_operation(const sw_fabric *fabric, uint32_t ticket, char *text,
                               size_t capacity)
{
    sw_descriptor_name(sw_fabric_descriptor(fabric, fabric->comm.rank, ticket), text, capacity);
}

/* Search from rank `from` on; -1: none. */
static int first_missing(const sw_fabric *fabric, const sw_fabric_awaited *awaited, int from)
{
    int world_size = fabric->comm.world_size;
    for (int turn = 0; turn < world_size; ++turn) {
        int r = from + turn < world_size ? from + turn : from + turn - world_size;
        if (sw_fabric_is_missing(fabric, r, awaited))
            return r;
    }
    return -1;
}

static void describe_wait(void *context, sw_wait_text *text)
{
    const fabric_wait *w = context;
    sw_fabric *fabric = w->fabric;
    describe_operation(fabric, w->awaited.ticket, text->what, sizeof text->what);
    for (int r = 0; r < fabric->comm.world_size; ++r)
        if (sw_fabric_is_missing(fabric, r, &w->awaited) &&
            !sw_wait_add_missing(text, &fabric->comm, r))
            return;
}

static sw_status end_without(sw_fabric *fabric, int rank, const char *how, uint32_t ticket,
                             sw_error *err)
{
    char peer[SW_COMM_PEER_BYTES], what[160];
    sw_error reason;
    sw_fabric_peer(&fabric->comm, rank, peer);
    describe_operation(fabric, ticket, what, sizeof what);
    sw_error_set(&reason, SW_E_COMM, sw_comm_name(&fabric->comm, rank),
                 "%s %s before its part of %s", peer, how, what);
    return sw_fabric_end(fabric, &reason, err);
}

/* Find a peer that met an error, left, or is `dead` (-1: none). Called only while a rank is
 * missing. */
static sw_status check_peers(fabric_wait *w, int dead, sw_error *err)
{
    sw_fabric *fabric = w->fabric;
    uint32_t ticket = w->awaited.ticket;
    for (int r = 0; r < fabric->comm.world_size; ++r) { /* it may record an error, then exit */
        const sw_control *control = &fabric->control[r];
        sw_member_state state = sw_ending_state(&control->ending);
        if (r == fabric->comm.rank || (state == SW_MEMBER_ACTIVE && r != dead))
            continue;
        if (state == SW_MEMBER_ENDED) {
            sw_error reason;
            if (sw_ticket_reached(atomic_load(&control->done), ticket))
                continue; /* it ended after it had done its part here: a later call gets that
                           * error */
            if (first_missing(fabric, &w->awaited, 0) < 0)
                return SW_OK; /* the missing ranks have arrived since */
            (void)!sw_ending_read(&control->ending, &reason);
            return sw_fabric_end(fabric, &reason, err);
        }
        if (sw_fabric_is_missing(fabric, r, &w->awaited)) /* otherwise it has done its part */
            return end_without(fabric, r,
                               state == SW_MEMBER_LEFT ? "left the group" : "died or exited",
                               ticket, err);
    }
    return SW_OK;
}

static sw_status check_clock(fabric_wait *w, sw_error *err)
{
    sw_error reason;
    sw_status status = sw_wait_check(&w->wait, &reason);
    if (status == SW_OK)
        return SW_OK;
    /* An interrupted caller takes back its memory, which the operation borrowed, so no later call
     * may continue the operation. */
    sw_status ended = sw_fabric_end(w->fabric, &reason, err);
    return status == SW_E_INTERRUPTED ? sw_wait_interrupted(err) : ended;
}

/* Check recorded errors after each sleep; the peers' liveness and the clock once a time slice. */
static sw_status look_around(fabric_wait *w, sw_error *err)
{
    int64_t now_ns = sw_clock_now_ns();
    if (now_ns - w->looked_ns < slice_ns)
        return check_peers(w, -1, err);
    w->looked_ns = now_ns;
    SW_TRY(check_peers(w, sw_fabric_find_dead(w->fabric, DEATHS_A_SLICE, &w->awaited), err));
    return check_clock(w, err);
}

/* Sleep until the word of a missing rank changes, one time slice at most. */
static void sleep_on(fabric_wait *w, int rank)
{
    sw_fabric *fabric = w->fabric;
    sw_control *control = &fabric->control[rank];
    _Atomic uint32_t *word = sw_fabric_word(fabric, rank, w->awaited.for_post);
    atomic_fetch_add(&control->waiters, 1);
    uint32_t value = atomic_load(word);
    if (!sw_ticket_reached(value, w->awaited.ticket) &&
        sw_ending_state(&control->ending) == SW_MEMBER_ACTIVE) {
        int64_t begun = sw_clock_now_ns();
        sw_futex_wait(word, value, slice_ns);
        sw_comm_slept(&fabric->comm, begun, rank);
    }
    atomic_fetch_sub(&control->waiters, 1);
}

static bool spin_for(const fabric_wait *w, int rank)
{
    for (int i = 0; i < w->fabric->spin_count; ++i) {
        if (!sw_fabric_is_missing(w->fabric, rank, &w->awaited))
            return true;
        sw_spin_pause();
    }
    return false;
}

static int draw(fabric_wait *w)
{
    uint32_t seed = (uint32_t)w->fabric->comm.rank * 40503u + w->awaited.ticket + 97u * w->turns++;
    return (int)((seed * UINT32_C(2654435761) >> 8) % (uint32_t)w->fabric->comm.world_size);
}

/* Wait until this rank has done `ticket`; with `by_all`, until every rank has. Wait for posts
 * first, then for `done`. */
static sw_status wait_until(sw_fabric *fabric, uint32_t ticket, bool by_all, sw_error *err)
{
    fabric_wait w = {.fabric = fabric};
    for (;;) {
        SW_TRY(sw_fabric_progress(fabric, err));
        bool is_done = sw_ticket_reached(fabric->done, ticket);
        if (is_done && !by_all)
            return SW_OK;
        if (is_done)
            w.awaited = (sw_fabric_awaited){.ticket = ticket};
        else if (sw_fabric_is_ready(fabric, fabric->done + 1, &w.awaited))
            continue; /* the missing ranks have arrived: progress again */
        int rank = first_missing(fabric, &w.awaited, draw(&w));
        if (rank < 0 && is_done)
            return SW_OK;
        if (rank < 0 || spin_for(&w, rank))
            continue;
        if (!w.wait.comm) {
            w.wait = sw_wait_begin(&fabric->comm, &w, describe_wait);
            w.looked_ns = w.wait.begun_ns;
        }
        sleep_on(&w, rank);
        SW_TRY(look_around(&w, err));
    }
}

sw_status sw_fabric_wait_done(sw_fabric *fabric, uint32_t ticket, sw_error *err)
{
    return wait_until(fabric, ticket, true, err);
}

sw_status sw_fabric_poll(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_fabric_awaited dones = {.ticket = ticket};
    SW_TRY(sw_fabric_progress(fabric, err));
    *complete = sw_ticket_reached(fabric->done, ticket) && first_missing(fabric, &dones, 0) < 0;
    return SW_OK;
}

/* A slot operation is complete for its caller when this rank's part is done; a pool operation when
 * all parts are. */
sw_status sw_fabric_wait(sw_comm *comm, uint32_t ticket, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    return wait_until(fabric, ticket, fabric->pending[ticket % SW_FABRIC_RING].op.arena != NULL,
                      err);
}
