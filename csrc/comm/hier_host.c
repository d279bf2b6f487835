/* hier_host.c - the state of a host's ranks: which have done their part, which never will, and
 * their names in messages. */
#include <stdio.h>

#include "comm/hier_state.h"

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
