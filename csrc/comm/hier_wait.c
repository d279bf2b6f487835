/* hier_wait.c - a rank's wait for its carrier: until an operation is complete or cannot complete.
 * The latter follows from a rank of this host, another host's end message, the wire, or the clock
 * (wait.h). */
#include <stdio.h>
#include <string.h>

#include "comm/account.h"
#include "comm/hier_state.h"
#include "comm/wait.h"
#include "platform/clock.h"
#include "platform/futex.h"
#include "platform/process.h"

static const int64_t slice_ns = 20 * 1000 * 1000;
/* A host's end message takes effect once no byte has moved for this long: data sent before it comes
 * first. */
static const int64_t quiet_ns = 100 * 1000 * 1000;
/* Probe when no byte has moved for this long, then after three times as long: see hier_last.c. */
static const int64_t probe_ns = 250 * 1000 * 1000;
/* Time for a host to name the rank for which it waits; at most a part of the deadline. */
static const int64_t answer_ns = 400 * 1000 * 1000;

static int host_of(const sw_hier *hier, int rank)
{
    return rank >= 0 && rank < hier->comm.world_size ? hier->map.host_of[rank] : hier->host;
}

/* Return true if `rank`, another host's carrier or -1, may itself wait for a third rank, of its own
 * host or of another. */
static bool waits_for_others(const sw_hier *hier, int rank)
{
    int host = host_of(hier, rank);
    return host != hier->host && (hier->map.host_count > 2 || sw_host_size(&hier->map, host) > 1);
}

typedef struct hier_wait {
    sw_hier *hier;
    const sw_hier_need *need;
    sw_wait wait;
    int64_t end_seen_ns; /* time of an end message; bytes moved by then */
    uint64_t moved_bytes;
    int64_t still_ns, probe_ns; /* since when no byte has moved; delay of the next probe */
    uint64_t still_bytes;
} hier_wait;

static bool is_stopped(sw_comm *inside, int local)
{
    return sw_process_state_of(inside->ops->pid(inside, local)) == SW_PROCESS_STOPPED;
}

/* Return a rank of this host for which the operation waits, else the carrier that this host's
 * awaits; -1: none. */
static int awaited_rank(const sw_hier *hier, const sw_hier_need *need)
{
    for (int l = 0; l < hier->local_count; ++l)
        if (l != hier->local_rank && !sw_hier_has_done(hier, need, l))
            return hier->members[l];
    return atomic_load(&sw_hier_page(hier, 0)->awaiting);
}

/* Name the ranks for which the operation waits, as far as this host knows. */
static void describe_wait(void *context, sw_wait_text *text)
{
    const hier_wait *w = context;
    sw_hier *hier = w->hier;
    sw_hier_describe(hier, w->need->ticket, text->what, sizeof text->what);
    for (int l = 0; l < hier->local_count; ++l) {
        bool is_missing =
            !sw_hier_has_done(hier, w->need, l) || (l == 0 && is_stopped(hier->inside, l));
        if (l != hier->local_rank && is_missing &&
            !sw_wait_add_missing(text, &hier->comm, hier->members[l]))
            return;
    }
    if (text->rank >= 0)
        return;
    int awaited = atomic_load(&sw_hier_page(hier, 0)->awaiting);
    (void)sw_wait_add_missing(text, &hier->comm, awaited < 0 ? hier->members[0] : awaited);
    size_t used = strlen(text->missing);
    if (waits_for_others(hier, awaited))
        snprintf(text->missing + used, sizeof text->missing - used, ", or a rank it awaits");
}

/* Return the index of `host` among this host's peers; -1: none, or this rank is not a carrier. */
static int peer_at(const sw_hier *hier, int host)
{
    for (int p = 0; hier->carrier && p < hier->spread.peer_count; ++p)
        if (hier->spread.peers[p] == host)
            return p;
    return -1;
}

/* The deadline has passed for *reason, but its rank may itself wait for another. Send that rank the
 * reason and adopt its answer. The first answer may name a rank that waits for a third; if hosts
 * exchange frames over several rounds, a better answer may follow. */
static void ask_awaited_host(sw_hier *hier, sw_error *reason)
{
    int asked = host_of(hier, reason->detail), peer = peer_at(hier, asked);
    int64_t end = sw_clock_now_ns() +
                  (answer_ns < hier->comm.timeout_ns / 4 ? answer_ns : hier->comm.timeout_ns / 4);
    sw_error answer;
    if (peer < 0 || !waits_for_others(hier, reason->detail))
        return;
    sw_carrier_send_end(hier->carrier, reason);
    while (sw_clock_now_ns() < end && sw_hier_is_active(hier)) {
        if (sw_carrier_received_end(hier->carrier, peer, &answer)) {
            int host = host_of(hier, answer.detail);
            if (host == hier->host)
                return;
            *reason = answer;
            if (host == asked || hier->spread.rounds == 1)
                return;
            sw_carrier_send_end(hier->carrier, reason);
        }
        sw_thread_sleep_ns(5 * 1000 * 1000);
    }
}

/* End a failed wait with its own reason or with the answer of the host that it asks. */
static sw_status end_wait(hier_wait *w, sw_status status, sw_error *reason, sw_error *err)
{
    if (status == SW_E_TIMEOUT)
        ask_awaited_host(w->hier, reason);
    sw_status ended = sw_hier_end_here(w->hier, reason, err);
    return status == SW_E_INTERRUPTED ? sw_wait_interrupted(err) : ended;
}

/* Another host has ended and no byte moves: adopt its reason. But if that host gave up waiting for
 * this one, or this one waits for a third, report the rank awaited here. */
static sw_status check_ends(hier_wait *w, sw_error *err)
{
    sw_hier *hier = w->hier;
    const sw_page *page = sw_hier_page(hier, 0);
    uint64_t moved = atomic_load(&page->sent) + atomic_load(&page->received);
    int64_t now = sw_clock_now_ns();
    sw_error reason;
    int peer = 0, count = hier->carrier ? hier->spread.peer_count : 0;
    while (peer < count && !sw_carrier_received_end(hier->carrier, peer, &reason))
        ++peer;
    if (peer == count)
        return SW_OK;
    int from = hier->spread.peers[peer];
    if (w->end_seen_ns == 0 || moved != w->moved_bytes) {
        w->end_seen_ns = now;
        w->moved_bytes = moved;
    }
    if (now - w->end_seen_ns < quiet_ns)
        return SW_OK;
    int awaited = atomic_load(&page->awaiting);
    bool of_this_host = host_of(hier, reason.detail) == hier->host;
    bool of_a_third = awaited >= 0 && host_of(hier, awaited) != from;
    if (reason.status == SW_E_TIMEOUT && (of_this_host || of_a_third))
        return end_wait(w, sw_wait_give_up(&w->wait, &reason), &reason, err);
    return sw_hier_end_here(hier, &reason, err);
}

/* Probe the host that the carrier waits for, if it sends nothing. */
static sw_status check_wire(hier_wait *w, sw_error *err)
{
    sw_hier *hier = w->hier;
    const sw_page *page = sw_hier_page(hier, 0);
    uint64_t moved = atomic_load(&page->sent) + atomic_load(&page->received);
    int awaited = atomic_load(&page->awaiting);
    int64_t now = sw_clock_now_ns();
    char what[160];
    sw_error reason;
    if (!hier->carrier || awaited < 0)
        return SW_OK;
    if (w->still_ns == 0 || moved != w->still_bytes) {
        w->still_ns = now;
        w->still_bytes = moved;
        w->probe_ns = probe_ns;
    }
    if (now - w->still_ns < w->probe_ns)
        return SW_OK;
    w->probe_ns *= 3;
    sw_hier_describe(hier, w->need->ticket, what, sizeof what);
    if (sw_carrier_probe(hier->carrier, host_of(hier, awaited), what, &reason) == SW_OK)
        return SW_OK;
    return sw_hier_end_here(hier, &reason, err);
}

/* The carrier asks first; the other ranks of its host adopt its answer. */
static sw_status check_clock(hier_wait *w, sw_error *err)
{
    sw_hier *hier = w->hier;
    bool is_asked = hier->local_rank > 0 &&
                    waits_for_others(hier, atomic_load(&sw_hier_page(hier, 0)->awaiting));
    sw_error reason;
    w->wait.timeout_ns = hier->comm.timeout_ns + (is_asked ? 2 * answer_ns : 0);
    sw_status status = sw_wait_check(&w->wait, &reason);
    return status == SW_OK ? SW_OK : end_wait(w, status, &reason, err);
}

/* Resolve the caller's plans of operations that the carrier folded. Operations that completed
 * before the end stay complete. But once this thread has seen the end, its caller may have freed a
 * plan. */
void sw_hier_settle(sw_hier *hier, uint32_t wired)
{
    const sw_page *carrier = sw_hier_page(hier, 0);
    double scale;
    for (; !hier->end_is_known && hier->settled != hier->posted &&
           sw_ticket_reached(wired, hier->settled + 1);
         ++hier->settled) {
        const sw_hier_pending *pending = &hier->pending[(hier->settled + 1) % SW_HIER_RING];
        const sw_fold_plan *plan = pending->op.plan;
        if (plan)
            plan->resolve(plan->context, hier->contributes, &scale);
        sw_account_done(pending->serial);
    }
    hier->comm.stats.wire_bytes_sent = atomic_load(&carrier->sent);
    hier->comm.stats.wire_bytes_received = atomic_load(&carrier->received);
}

sw_status sw_hier_await_word(sw_hier *hier, const sw_hier_need *need, _Atomic uint32_t *word,
                             uint32_t value, sw_error *err)
{
    hier_wait w = {.hier = hier, .need = need};
    for (;;) {
        sw_error reason;
        sw_status alive = sw_ending_read(sw_hier_ending(hier), &reason);
        uint32_t seen = atomic_load(word); /* after the counter: operations complete before an end
                                            * stay complete */
        if (sw_ticket_reached(seen, value))
            return SW_OK;
        if (alive != SW_OK)
            return sw_hier_end_here(hier, &reason, err);
        int64_t now = sw_clock_now_ns();
        if (!w.wait.comm)
            w.wait = sw_wait_begin(&hier->comm, &w, describe_wait);
        sw_futex_wait(word, seen, slice_ns);
        sw_comm_slept(&hier->comm, now, awaited_rank(hier, need));
        bool deaths = now - w.wait.begun_ns > slice_ns;
        sw_status status = sw_hier_check_host(hier, need, deaths, &reason);
        if (sw_ticket_reached(atomic_load(word), value))
            return SW_OK; /* it was complete before the error was seen */
        if (status != SW_OK)
            return sw_hier_end_here(hier, &reason, err);
        SW_TRY(check_ends(&w, err));
        SW_TRY(check_clock(&w, err)); /* handles an interrupt before a probe could */
        SW_TRY(check_wire(&w, err));
    }
}

sw_status sw_hier_await(sw_hier *hier, uint32_t ticket, sw_error *err)
{
    const sw_hier_need need = {.ticket = ticket, .filler = -1};
    _Atomic uint32_t *wired = &sw_hier_page(hier, 0)->wired;
    SW_TRY(sw_hier_await_word(hier, &need, wired, ticket, err));
    sw_hier_settle(hier, atomic_load(wired));
    return sw_ticket_reached(hier->settled, ticket) ? SW_OK : sw_hier_check_alive(hier, err);
}

/* ---- the end: functions that any thread may call ---- */

void sw_hier_await_untouched(sw_hier *hier)
{
    sw_page *own = sw_hier_page(hier, hier->local_rank);
    pthread_mutex_lock(&hier->lock); /* accesses that began before the end are over */
    pthread_mutex_unlock(&hier->lock);
    sw_futex_wake_all(&own->posted);
    sw_futex_wake_all(&own->wired);
}

/* The posting thread gets the error in its next call. A leave is not passed on, since no rank has
 * met an error. */
void sw_hier_request_end(sw_comm *comm, const sw_error *reason)
{
    sw_hier *hier = (sw_hier *)comm;
    hier->inside->ops->request_end(hier->inside, reason);
    sw_hier_await_untouched(hier);
}

void sw_hier_tell_hosts(sw_comm *comm)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_error first;
    (void)!sw_ending_read(sw_hier_ending(hier), &first);
    if (hier->carrier && sw_ending_state(sw_hier_ending(hier)) == SW_MEMBER_ENDED)
        sw_carrier_send_end(hier->carrier, &first);
}

sw_status sw_hier_end_here(sw_hier *hier, const sw_error *reason, sw_error *err)
{
    sw_comm_request_end(&hier->comm, reason);
    hier->end_is_known = true;
    return sw_ending_read(sw_hier_ending(hier), err);
}

sw_status sw_hier_check_alive(sw_hier *hier, sw_error *err)
{
    sw_error reason;
    return sw_ending_read(sw_hier_ending(hier), &reason) == SW_OK
               ? SW_OK
               : sw_hier_end_here(hier, &reason, err);
}

sw_status sw_hier_look(sw_comm *comm, bool minds_leaving, sw_error *err)
{
    sw_comm *inside = ((sw_hier *)comm)->inside;
    return inside->ops->look(inside, minds_leaving, err);
}

bool sw_hier_is_alive(sw_comm *comm)
{
    sw_comm *inside = ((sw_hier *)comm)->inside;
    return inside->ops->is_alive(inside);
}
