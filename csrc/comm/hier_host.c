/* hier_host.c - the state of a host's ranks: which have done their part, which never will, and
 * their names in messages; and how a carrier's thread waits for them and for the wire. */
#include <stdio.h>

#include "comm/hier_carrier_state.h"
#include "comm/hier_state.h"
#include "platform/clock.h"
#include "platform/futex.h"

void sw_hier_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES])
{
    const sw_hier *hier = (const sw_hier *)comm;
    if (atomic_load(&hier->is_introduced))
        snprintf(text, SW_COMM_PEER_BYTES, "rank %d (pid %d on host %.40s)", rank, hier->pid[rank],
                 hier->host_name[hier->map.host_of[rank]].text);
    else
        snprintf(text, SW_COMM_PEER_BYTES, "rank %d", rank);
}

sw_wait_note *sw_hier_note(sw_comm *comm, int local, int *rank)
{
    const sw_hier *hier = (const sw_hier *)comm;
    sw_wait_note *found = hier->inside->ops->note(hier->inside, local, rank);
    if (found)
        *rank = hier->members[local];
    return found;
}

int sw_hier_pid(sw_comm *comm, int rank)
{
    const sw_hier *hier = (const sw_hier *)comm;
    for (int l = 0; l < hier->local_count; ++l)
        if (hier->members[l] == rank)
            return hier->inside->ops->pid(hier->inside, l);
    return 0;
}

int sw_hier_dead(sw_comm *comm)
{
    const sw_hier *hier = (const sw_hier *)comm;
    int local = hier->inside->ops->dead(hier->inside);
    return local < 0 ? -1 : hier->members[local];
}

void sw_hier_describe(const sw_hier *hier, uint32_t ticket, char *text, size_t capacity)
{
    const sw_page *own = sw_hier_page(hier, hier->local_rank);
    if (sw_ticket_reached(atomic_load(&own->posted), ticket))
        sw_descriptor_name(&own->ring[ticket % SW_HIER_RING], text, capacity);
    else
        snprintf(text, capacity, "operation %u", ticket);
}

bool sw_hier_has_done(const sw_hier *hier, const sw_hier_need *need, int local)
{
    const sw_page *page = sw_hier_page(hier, local);
    return sw_ticket_reached(atomic_load(&page->posted), need->ticket) && local != need->filler &&
           (!need->takes || sw_ticket_reached(atomic_load(&page->taken), need->taken));
}

sw_status sw_hier_check_host(const sw_hier *hier, const sw_hier_need *need, bool deaths,
                             sw_error *err)
{
    sw_fabric *inside = (sw_fabric *)hier->inside;
    for (int l = 0; l < hier->local_count; ++l) {
        const sw_ending *ending = &inside->control[l].ending;
        if (sw_ending_state(ending) == SW_MEMBER_ENDED)
            return sw_ending_read(ending, err);
        if (sw_hier_has_done(hier, need, l) && l != 0)
            continue; /* it has done its part; the carrier's ends with the operation */
        bool left = sw_ending_state(ending) == SW_MEMBER_LEFT;
        if (left || (deaths && l != hier->local_rank && inside->peer_ended(inside, l))) {
            char peer[SW_COMM_PEER_BYTES], what[160];
            sw_hier_peer((sw_comm *)(uintptr_t)hier, hier->members[l], peer);
            sw_hier_describe(hier, need->ticket, what, sizeof what);
            return sw_error_set(err, SW_E_COMM, hier->members[l], "%s %s before its part of %s",
                                peer, left ? "left the group" : "died or exited", what);
        }
    }
    return SW_OK;
}

/* ---- for all phases of a carrier's thread ---- */

static const int64_t idle_slice_ns = 200 * 1000 * 1000;
static const int64_t busy_slice_ns = 10 * 1000 * 1000;

sw_status sw_carrier_touch_begin(sw_carrier *carrier, sw_error *err)
{
    sw_hier *hier = carrier->hier;
    pthread_mutex_lock(&hier->lock);
    sw_status status = sw_ending_read(sw_hier_ending(hier), err);
    if (status != SW_OK)
        pthread_mutex_unlock(&hier->lock);
    return status;
}

void sw_carrier_touch_end(sw_carrier *carrier)
{
    pthread_mutex_unlock(&carrier->hier->lock);
}

sw_status sw_carrier_blame(const sw_carrier *carrier, const char *what, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    char peer[SW_COMM_PEER_BYTES], cause[200];
    int rank = err->detail;
    sw_hier_peer((sw_comm *)(uintptr_t)&hier->comm, rank, peer);
    snprintf(cause, sizeof cause, "%.190s", err->message);
    const char *host = atomic_load(&hier->is_introduced) ? hier->host_name[hier->host].text : "";
    return sw_error_set(err, SW_E_COMM, rank,
                        "host %.40s lost %s in %.110s: the process or the network between them "
                        "failed: %s",
                        host, peer, what, cause);
}

static sw_status named(const sw_carrier *carrier, sw_status status, sw_error *err)
{
    return status == SW_OK ? SW_OK : sw_carrier_blame(carrier, carrier->what, err);
}

sw_status sw_carrier_wait(sw_carrier *carrier, sw_transfer *transfer, sw_error *err)
{
    return named(carrier, sw_bridge_wait(&carrier->bridge, transfer, err), err);
}

sw_status sw_carrier_send(sw_carrier *carrier, int host, sw_message message, uint32_t number,
                          const void *data, size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    sw_status status =
        sw_bridge_send(&carrier->bridge, host, message, number, data, size_bytes, transfer, err);
    return named(carrier, status, err);
}

sw_status sw_carrier_receive(sw_carrier *carrier, int host, sw_message message, uint32_t number,
                             void *data, size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    sw_status status =
        sw_bridge_receive(&carrier->bridge, host, message, number, data, size_bytes, transfer, err);
    return named(carrier, status, err);
}

/* Return SW_E_STATE when this rank leaves, the reason if the communicator has ended, or the error
 * of one of this host's ranks for which `need` waits. */
static sw_status check_here(sw_carrier *carrier, const sw_hier_need *need, bool deaths,
                            sw_error *err)
{
    if (atomic_load(&carrier->stop))
        SW_FAIL(err, SW_E_STATE, "this rank leaves");
    SW_TRY(sw_ending_read(sw_hier_ending(carrier->hier), err));
    return sw_hier_check_host(carrier->hier, need, deaths, err);
}

/* `idles`: ranks may still be computing. */
static sw_status await_word(sw_carrier *carrier, const sw_hier_need *need, bool idles,
                            _Atomic uint32_t *word, uint32_t value, sw_error *err)
{
    int64_t begun_ns = sw_clock_now_ns();
    for (;;) {
        uint32_t seen = atomic_load(word);
        if (sw_ticket_reached(seen, value))
            return SW_OK;
        bool deaths = !idles && sw_clock_now_ns() - begun_ns > busy_slice_ns;
        SW_TRY(check_here(carrier, need, deaths, err));
        sw_futex_wait(word, seen, idles ? idle_slice_ns : busy_slice_ns);
    }
}

sw_status sw_carrier_await_local(sw_carrier *carrier, const sw_hier_need *need,
                                 _Atomic uint32_t *word, uint32_t value, sw_error *err)
{
    return await_word(carrier, need, false, word, value, err);
}

sw_status sw_carrier_await_posts(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    sw_hier *hier = carrier->hier;
    const sw_hier_need need = {.ticket = ticket, .filler = -1};
    SW_TRY(check_here(carrier, &need, false, err));
    for (int l = 0; l < hier->local_count; ++l)
        SW_TRY(await_word(carrier, &need, l == 0, &sw_hier_page(hier, l)->posted, ticket, err));
    return SW_OK;
}

void sw_carrier_complete(sw_carrier *carrier, uint32_t ticket)
{
    sw_page *page = sw_hier_page(carrier->hier, 0);
    atomic_store(&page->wired, ticket);
    sw_futex_wake_all(&page->wired);
}
