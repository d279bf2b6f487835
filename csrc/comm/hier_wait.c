/* hier_wait.c - a rank's wait for its carrier: until that says that an operation is complete, or
 * until something says that it never will be. */
#include <stdio.h>
#include <string.h>

#include "comm/hier_state.h"
#include "platform/clock.h"
#include "platform/futex.h"
#include "platform/process.h"

static const int64_t slice_ns = 20 * 1000 * 1000;
/* A host's last word counts once nothing has moved for so long: what was sent before comes first.
 */
static const int64_t quiet_ns = 100 * 1000 * 1000;
/* When nothing has moved for so long, and again after three times as long: see hier_last.c. */
static const int64_t probe_ns = 250 * 1000 * 1000;
/* The time that a host has to say whom it waits for; at most a part of the deadline. */
static const int64_t answer_ns = 400 * 1000 * 1000;

void sw_hier_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES])
{
    const sw_hier *hier = (const sw_hier *)comm;
    if (atomic_load(&hier->is_introduced))
        snprintf(text, SW_COMM_PEER_BYTES, "rank %d (pid %d on host %.40s)", rank, hier->pid[rank],
                 hier->host_name[hier->map.host_of[rank]].text);
    else
        snprintf(text, SW_COMM_PEER_BYTES, "rank %d", rank);
}

static void describe_ticket(const sw_hier *hier, uint32_t ticket, char *text, size_t capacity)
{
    const sw_descriptor *d = &sw_hier_page(hier, hier->local_rank)->ring[ticket % SW_HIER_RING];
    snprintf(text, capacity, "%s '%.*s'", sw_op_kind_name((sw_op_kind)d->kind),
             SW_COMM_LABEL_BYTES - 1, d->label);
}

/* Whether a rank of this host has done what others wait for. */
static bool has_done(const sw_hier *hier, const sw_hier_need *need, int local)
{
    const sw_page *page = sw_hier_page(hier, local);
    return sw_ticket_reached(atomic_load(&page->posted), need->ticket) && local != need->filler &&
           (!need->takes || sw_ticket_reached(atomic_load(&page->taken), need->taken));
}

sw_status sw_hier_check_host(const sw_hier *hier, const sw_hier_need *need, bool deaths,
                             int *missing, sw_error *err)
{
    *missing = -1;
    for (int l = 0; l < hier->local_count; ++l) {
        const sw_page *page = sw_hier_page(hier, l);
        uint32_t state = atomic_load(&page->state);
        if (state == SW_MEMBER_ENDED) {
            *err = page->reason;
            err->message[sizeof err->message - 1] = '\0';
            return err->status;
        }
        if (!sw_ticket_reached(atomic_load(&page->posted), need->ticket) && *missing < 0)
            *missing = l;
        if (has_done(hier, need, l) && l != 0)
            continue; /* it has done its part; the carrier has not until the end */
        bool left = state == SW_MEMBER_LEFT;
        if (left || (deaths && sw_hier_has_gone(hier, l))) {
            char peer[SW_COMM_PEER_BYTES], what[160];
            sw_hier_peer((sw_comm *)(uintptr_t)hier, hier->members[l], peer);
            describe_ticket(hier, need->ticket, what, sizeof what);
            return sw_error_set(err, SW_E_COMM, hier->members[l], "%s %s before its part of %s",
                                peer, left ? "left the group" : "died or exited", what);
        }
    }
    return SW_OK;
}

/* Waiting
 * ------------------------------------------------------------------------------------------ */

static int host_of(const sw_hier *hier, int rank)
{
    return rank >= 0 && rank < hier->comm.world_size ? hier->map.host_of[rank] : hier->host;
}

/* Whether `rank`, which carries for another host (or is -1), may itself wait for a third rank: of
 * its own host, or of a third. */
static bool waits_for_others(const sw_hier *hier, int rank)
{
    int host = host_of(hier, rank);
    return host != hier->host && (hier->map.host_count > 2 || sw_host_size(&hier->map, host) > 1);
}

/* Of whom the operation waits, as far as this host knows. */
static int list_missing(sw_hier *hier, const sw_hier_need *need, char *text, size_t capacity)
{
    size_t used = 0;
    int first = -1;
    text[0] = '\0';
    for (int l = 0; l < hier->local_count && used + 1 < capacity; ++l) {
        char peer[SW_COMM_PEER_BYTES];
        bool is_known = atomic_load(&hier->is_introduced);
        char state = is_known ? sw_process_state(hier->pid[hier->members[l]]) : '?';
        bool stopped = state == 'T' || state == 't';
        if (l == hier->local_rank || (has_done(hier, need, l) && !(stopped && l == 0)))
            continue;
        first = first < 0 ? hier->members[l] : first;
        sw_hier_peer(&hier->comm, hier->members[l], peer);
        int wrote = snprintf(text + used, capacity - used, "%s%s%s", used ? ", " : "", peer,
                             stopped ? " (stopped)" : "");
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    if (first >= 0)
        return first;
    char peer[SW_COMM_PEER_BYTES];
    first = atomic_load(&sw_hier_page(hier, 0)->awaiting);
    bool asks = waits_for_others(hier, first);
    first = first < 0 ? hier->members[0] : first;
    sw_hier_peer(&hier->comm, first, peer);
    snprintf(text, capacity, "%s%s", peer, asks ? ", or for whom it waits" : "");
    return first;
}

typedef struct wait_state {
    int64_t begun_ns, warn_ns;
    int64_t heard_ns; /* a last word; and what had moved by then */
    uint64_t moved_bytes;
    int64_t still_ns, probe_ns; /* since when nothing has moved; after how much of that is asked */
    uint64_t still_bytes;
} wait_state;

/* The place of `host` among this host's peers; -1: it is none, or nobody here hears peers. */
static int peer_at(const sw_hier *hier, int host)
{
    for (int p = 0; hier->carrier && p < hier->spread.peer_count; ++p)
        if (hier->spread.peers[p] == host)
            return p;
    return -1;
}

/* The deadline has passed for *reason, whose rank may itself wait for another: it is told, and what
 * it answers is the reason. Its first answer may name one that waits for a third; where hosts hear
 * one another over several rounds, a better one may follow. */
static void ask_whom_it_waits_for(sw_hier *hier, sw_error *reason)
{
    int asked = host_of(hier, reason->detail), peer = peer_at(hier, asked);
    int64_t end = sw_clock_now_ns() +
                  (answer_ns < hier->comm.timeout_ns / 4 ? answer_ns : hier->comm.timeout_ns / 4);
    sw_error answer;
    if (peer < 0 || !waits_for_others(hier, reason->detail))
        return;
    sw_carrier_say_last_word(hier->carrier, reason);
    while (sw_clock_now_ns() < end && !atomic_load(&hier->ended)) {
        if (sw_carrier_hears_last_word(hier->carrier, peer, &answer)) {
            int host = host_of(hier, answer.detail);
            if (host == hier->host)
                return;
            *reason = answer;
            if (host == asked || hier->spread.rounds == 1)
                return;
            sw_carrier_say_last_word(hier->carrier, reason);
        }
        sw_thread_sleep_ns(5 * 1000 * 1000);
    }
}

static sw_status give_up(sw_hier *hier, const sw_hier_need *need, const wait_state *wait,
                         sw_error *err)
{
    char missing[320], what[160];
    sw_error reason;
    int first = list_missing(hier, need, missing, sizeof missing);
    describe_ticket(hier, need->ticket, what, sizeof what);
    sw_error_set(&reason, SW_E_TIMEOUT, first, "waited %.1f s (timeout_s=%.1f) in %s for %s",
                 (double)(sw_clock_now_ns() - wait->begun_ns) * 1e-9,
                 (double)hier->comm.timeout_ns * 1e-9, what, missing);
    ask_whom_it_waits_for(hier, &reason);
    return sw_hier_end_here(hier, &reason, err);
}

/* Another host has ended, and nothing moves any more: its reason is this host's; but if it gave up
 * waiting for this host, or this one waits for a third, that is whom this one gives up. */
static sw_status check_last_words(sw_hier *hier, const sw_hier_need *need, wait_state *wait,
                                  sw_error *err)
{
    const sw_page *page = sw_hier_page(hier, 0);
    uint64_t moved = atomic_load(&page->sent) + atomic_load(&page->received);
    int64_t now = sw_clock_now_ns();
    sw_error reason;
    int peer = 0, count = hier->carrier ? hier->spread.peer_count : 0;
    while (peer < count && !sw_carrier_hears_last_word(hier->carrier, peer, &reason))
        ++peer;
    if (peer == count)
        return SW_OK;
    int from = hier->spread.peers[peer];
    if (wait->heard_ns == 0 || moved != wait->moved_bytes) {
        wait->heard_ns = now;
        wait->moved_bytes = moved;
    }
    if (now - wait->heard_ns < quiet_ns)
        return SW_OK;
    int awaited = atomic_load(&page->awaiting);
    bool of_this_host = host_of(hier, reason.detail) == hier->host;
    bool of_a_third = awaited >= 0 && host_of(hier, awaited) != from;
    if (reason.status == SW_E_TIMEOUT && (of_this_host || of_a_third))
        return give_up(hier, need, wait, err);
    return sw_hier_end_here(hier, &reason, err);
}

/* Whether the host that the carrier waits for is still there, where it says nothing. */
static sw_status check_wire(sw_hier *hier, const sw_hier_need *need, wait_state *wait,
                            sw_error *err)
{
    const sw_page *page = sw_hier_page(hier, 0);
    uint64_t moved = atomic_load(&page->sent) + atomic_load(&page->received);
    int awaited = atomic_load(&page->awaiting);
    int64_t now = sw_clock_now_ns();
    char what[160];
    sw_error reason;
    if (!hier->carrier || awaited < 0)
        return SW_OK;
    if (wait->still_ns == 0 || moved != wait->still_bytes) {
        wait->still_ns = now;
        wait->still_bytes = moved;
        wait->probe_ns = probe_ns;
    }
    if (now - wait->still_ns < wait->probe_ns)
        return SW_OK;
    wait->probe_ns *= 3;
    describe_ticket(hier, need->ticket, what, sizeof what);
    if (sw_carrier_probe(hier->carrier, host_of(hier, awaited), what, &reason) == SW_OK)
        return SW_OK;
    return sw_hier_end_here(hier, &reason, err);
}

static sw_status check_clock(sw_hier *hier, const sw_hier_need *need, wait_state *wait,
                             sw_error *err)
{
    sw_comm *comm = &hier->comm;
    char missing[320], what[160], message[SW_ERROR_MESSAGE_BYTES];
    int64_t waited = sw_clock_now_ns() - wait->begun_ns;
    /* Who carries asks first; the others of its host have its answer. */
    bool is_asked = hier->local_rank > 0 &&
                    waits_for_others(hier, atomic_load(&sw_hier_page(hier, 0)->awaiting));
    int64_t patience = is_asked ? 2 * answer_ns : 0;
    sw_error reason;
    if (comm->hooks.interrupted && comm->hooks.interrupted(comm->hooks.context)) {
        describe_ticket(hier, need->ticket, what, sizeof what);
        sw_error_set(&reason, SW_E_COMM, comm->rank,
                     "rank %d was interrupted while it waited in %s", comm->rank, what);
        sw_hier_end_here(hier, &reason, NULL);
        SW_FAIL(err, SW_E_INTERRUPTED, "interrupted while waiting for a peer");
    }
    if (waited < wait->warn_ns && waited < comm->timeout_ns)
        return SW_OK;
    if (waited >= comm->timeout_ns + patience)
        return give_up(hier, need, wait, err);
    if (waited < wait->warn_ns)
        return SW_OK;
    list_missing(hier, need, missing, sizeof missing);
    describe_ticket(hier, need->ticket, what, sizeof what);
    wait->warn_ns *= 2;
    snprintf(message, sizeof message,
             "rank %d has waited %.1f s in %.120s for %.200s; the deadline is %.1f s", comm->rank,
             (double)waited * 1e-9, what, missing, (double)comm->timeout_ns * 1e-9);
    if (comm->hooks.log)
        comm->hooks.log(comm->hooks.context, message);
    return SW_OK;
}

/* What was folded on this rank's behalf: the caller's plans learn who took part. What was complete
 * before the carrier ended stays so. Not after this thread has learnt of the end: it may have taken
 * a plan away since. */
void sw_hier_settle(sw_hier *hier, uint32_t wired)
{
    const sw_page *carrier = sw_hier_page(hier, 0);
    double scale;
    for (; !hier->end_is_known && hier->settled != hier->posted &&
           sw_ticket_reached(wired, hier->settled + 1);
         ++hier->settled) {
        const sw_fold_plan *plan = hier->pending[(hier->settled + 1) % SW_HIER_RING].op.plan;
        if (plan)
            plan->resolve(plan->context, hier->contributes, &scale);
    }
    hier->comm.stats.wire_bytes_sent = atomic_load(&carrier->sent);
    hier->comm.stats.wire_bytes_received = atomic_load(&carrier->received);
}

sw_status sw_hier_await_word(sw_hier *hier, const sw_hier_need *need, _Atomic uint32_t *word,
                             uint32_t value, sw_error *err)
{
    wait_state wait = {.begun_ns = 0};
    for (;;) {
        uint32_t seen = atomic_load(word);
        if (sw_ticket_reached(seen, value))
            return SW_OK;
        SW_TRY(sw_hier_check_alive(hier, err));
        int64_t now = sw_clock_now_ns();
        if (wait.begun_ns == 0)
            wait = (wait_state){.begun_ns = now, .warn_ns = hier->comm.warn_after_ns};
        sw_futex_wait(word, seen, slice_ns);
        hier->comm.stats.waits++;
        hier->comm.stats.wait_ns += (uint64_t)(sw_clock_now_ns() - now);
        int missing;
        sw_error reason;
        bool deaths = now - wait.begun_ns > slice_ns;
        sw_status status = sw_hier_check_host(hier, need, deaths, &missing, &reason);
        if (sw_ticket_reached(atomic_load(word), value))
            return SW_OK; /* it was complete before what was seen */
        if (status != SW_OK)
            return sw_hier_end_here(hier, &reason, err);
        SW_TRY(check_last_words(hier, need, &wait, err));
        SW_TRY(check_clock(hier, need, &wait, err)); /* takes an interrupt before a probe would */
        SW_TRY(check_wire(hier, need, &wait, err));
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
