/* fabric_wait.c - waiting that ends: for the word, for a death, for an error of a peer, for the
 * deadline.
 *
 * A waiter spins a moment if cores are spare, then sleeps on the word it needs, in slices; between
 * slices it looks at what could keep that word from ever changing. It never sleeps on one rank
 * while another is known to be gone. */
#include <stdio.h>
#include <string.h>

#include "comm/fabric.h"
#include "platform/clock.h"
#include "platform/futex.h"
#include "platform/process.h"

static const int64_t slice_ns = 20 * 1000 * 1000;

typedef struct wait_state {
    int64_t begun_ns, warn_ns;
    bool for_post; /* what is missing: peers' posts, else their dones */
} wait_state;

static _Atomic uint32_t *word_of(const sw_fabric *fabric, int rank, bool for_post)
{
    sw_control *control = fabric->control[rank];
    return for_post ? &control->posted : &control->done;
}

static bool is_missing(const sw_fabric *fabric, int rank, const wait_state *wait, uint32_t ticket)
{
    return !sw_ticket_reached(atomic_load(word_of(fabric, rank, wait->for_post)), ticket);
}

/* The first operation that is not done here, or the one waited for: what a message names. */
static void describe_wait(const sw_fabric *fabric, uint32_t ticket, char *text, size_t capacity)
{
    const sw_descriptor *d = &fabric->control[fabric->comm.rank]->ring[ticket % SW_FABRIC_RING];
    snprintf(text, capacity, "%s '%.*s'", sw_op_kind_name((sw_op_kind)d->kind),
             SW_COMM_LABEL_BYTES - 1, d->label);
}

static void list_missing(sw_fabric *fabric, const wait_state *wait, uint32_t ticket, char *text,
                         size_t capacity)
{
    size_t used = 0;
    text[0] = '\0';
    for (int r = 0; r < fabric->comm.world_size && used + 1 < capacity; ++r) {
        char peer[SW_COMM_PEER_BYTES];
        if (!is_missing(fabric, r, wait, ticket))
            continue;
        sw_fabric_peer(&fabric->comm, r, peer);
        char state = sw_process_state(fabric->control[r]->pid);
        int wrote = snprintf(text + used, capacity - used, "%s%s%s", used ? ", " : "", peer,
                             state == 'T' || state == 't' ? " (stopped)" : "");
        used += wrote > 0 ? (size_t)wrote : 0;
    }
}

static int first_missing(const sw_fabric *fabric, const wait_state *wait, uint32_t ticket)
{
    for (int r = 0; r < fabric->comm.world_size; ++r)
        if (is_missing(fabric, r, wait, ticket))
            return r;
    return -1;
}

/* A peer that met an error, left, or died. Looked at only while something is missing. */
static sw_status check_peers(sw_fabric *fabric, const wait_state *wait, uint32_t ticket,
                             bool deaths, sw_error *err)
{
    for (int r = 0; r < fabric->comm.world_size; ++r) {
        sw_control *control = fabric->control[r];
        char peer[SW_COMM_PEER_BYTES], what[160];
        sw_error reason;
        if (r == fabric->comm.rank)
            continue;
        uint32_t state = atomic_load(&control->state);
        if (state == SW_MEMBER_ENDED) {
            if (sw_ticket_reached(atomic_load(&control->done), ticket))
                continue; /* it ended after all of its part here, whoever else is late: a later call
                             gets that error */
            if (first_missing(fabric, wait, ticket) < 0)
                return SW_OK; /* what was missing has come meanwhile */
            reason = control->reason;
            reason.message[sizeof reason.message - 1] = '\0';
            return sw_fabric_end(fabric, &reason, err);
        }
        bool left = state == SW_MEMBER_LEFT;
        if (!left && !(deaths && fabric->peer_ended(fabric, r)))
            continue;
        if (!is_missing(fabric, r, wait, ticket))
            continue; /* it had done its part */
        sw_fabric_peer(&fabric->comm, r, peer);
        describe_wait(fabric, ticket, what, sizeof what);
        sw_error_set(&reason, SW_E_COMM, sw_comm_name(&fabric->comm, r),
                     "%s %s before its part of %s", peer,
                     left ? "left the group" : "died or exited", what);
        return sw_fabric_end(fabric, &reason, err);
    }
    return SW_OK;
}

static sw_status check_clock(sw_fabric *fabric, wait_state *wait, uint32_t ticket, sw_error *err)
{
    sw_comm *comm = &fabric->comm;
    int64_t waited = sw_clock_now_ns() - wait->begun_ns;
    char missing[320], what[160], message[SW_ERROR_MESSAGE_BYTES];
    if (comm->hooks.interrupted && comm->hooks.interrupted(comm->hooks.context)) {
        /* The caller takes its memory back, and with it what the operation borrowed: no later call
         * may go on with it. */
        sw_error reason;
        describe_wait(fabric, ticket, what, sizeof what);
        int name = sw_comm_name(comm, comm->rank);
        sw_error_set(&reason, SW_E_COMM, name, "rank %d was interrupted while it waited in %s",
                     name, what);
        sw_fabric_end(fabric, &reason, NULL);
        SW_FAIL(err, SW_E_INTERRUPTED, "interrupted while waiting for a peer");
    }
    if (waited < wait->warn_ns && waited < comm->timeout_ns)
        return SW_OK;
    list_missing(fabric, wait, ticket, missing, sizeof missing);
    describe_wait(fabric, ticket, what, sizeof what);
    if (waited >= comm->timeout_ns) {
        sw_error reason;
        sw_error_set(&reason, SW_E_TIMEOUT, sw_comm_name(comm, first_missing(fabric, wait, ticket)),
                     "waited %.1f s (timeout_s=%.1f) in %s for %s", (double)waited * 1e-9,
                     (double)comm->timeout_ns * 1e-9, what, missing);
        return sw_fabric_end(fabric, &reason, err);
    }
    wait->warn_ns *= 2;
    snprintf(message, sizeof message,
             "rank %d has waited %.1f s in %.120s for %.200s; the deadline is %.1f s",
             sw_comm_name(comm, comm->rank), (double)waited * 1e-9, what, missing,
             (double)comm->timeout_ns * 1e-9);
    if (comm->hooks.log)
        comm->hooks.log(comm->hooks.context, message);
    return SW_OK;
}

/* Sleeps until `word` of a rank that is missing changes, one slice at most. */
static void sleep_on(sw_fabric *fabric, int rank, const wait_state *wait, uint32_t ticket)
{
    sw_control *control = fabric->control[rank];
    _Atomic uint32_t *word = word_of(fabric, rank, wait->for_post);
    atomic_fetch_add(&control->waiters, 1);
    uint32_t value = atomic_load(word);
    if (!sw_ticket_reached(value, ticket) && atomic_load(&control->state) == SW_MEMBER_ACTIVE) {
        int64_t begun = sw_clock_now_ns();
        sw_futex_wait(word, value, slice_ns);
        fabric->comm.stats.waits++;
        fabric->comm.stats.wait_ns += (uint64_t)(sw_clock_now_ns() - begun);
    }
    atomic_fetch_sub(&control->waiters, 1);
}

static bool spin_for(sw_fabric *fabric, int rank, const wait_state *wait, uint32_t ticket)
{
    for (int i = 0; i < fabric->spin_count; ++i) {
        if (!is_missing(fabric, rank, wait, ticket))
            return true;
        sw_spin_pause();
    }
    return false;
}

/* What keeps `ticket` from being complete: first posts of the next operation to do here, then
 * dones. */
static uint32_t next_obstacle(const sw_fabric *fabric, uint32_t ticket, wait_state *wait)
{
    wait->for_post = !sw_ticket_reached(fabric->done, ticket);
    return wait->for_post ? fabric->done + 1 : ticket;
}

/* Until this rank has done `ticket`; with `by_all`, until every rank has. */
static sw_status wait_until(sw_fabric *fabric, uint32_t ticket, bool by_all, sw_error *err)
{
    wait_state wait = {.for_post = true};
    for (;;) {
        SW_TRY(sw_fabric_progress(fabric, err));
        uint32_t needed = next_obstacle(fabric, ticket, &wait);
        if (!wait.for_post && !by_all)
            return SW_OK;
        int rank = first_missing(fabric, &wait, needed);
        if (rank < 0 && !wait.for_post)
            return SW_OK;
        if (rank < 0 || spin_for(fabric, rank, &wait, needed))
            continue; /* what was missing has come: progress again */
        if (wait.begun_ns == 0) {
            wait.begun_ns = sw_clock_now_ns();
            wait.warn_ns = fabric->comm.warn_after_ns;
        }
        sleep_on(fabric, rank, &wait, needed);
        SW_TRY(
            check_peers(fabric, &wait, needed, sw_clock_now_ns() - wait.begun_ns > slice_ns, err));
        SW_TRY(check_clock(fabric, &wait, needed, err));
    }
}

sw_status sw_fabric_wait_done(sw_fabric *fabric, uint32_t ticket, sw_error *err)
{
    return wait_until(fabric, ticket, true, err);
}

sw_status sw_fabric_poll(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    wait_state dones = {.for_post = false};
    SW_TRY(sw_fabric_progress(fabric, err));
    *complete =
        sw_ticket_reached(fabric->done, ticket) && first_missing(fabric, &dones, ticket) < 0;
    return SW_OK;
}

/* A slot operation is complete for its caller when its own part is done; a pool operation when all
 * are. */
sw_status sw_fabric_wait(sw_comm *comm, uint32_t ticket, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    return wait_until(fabric, ticket, fabric->pending[ticket % SW_FABRIC_RING].op.arena != NULL,
                      err);
}
