/* hier_end.c - how a communicator over hosts ends, and who sees that it has: what any thread may do
 * or ask, beside the one that posts and the carrier's. */
#include "comm/hier_state.h"
#include "platform/futex.h"

bool sw_hier_end(sw_hier *hier, const sw_error *reason)
{
    sw_page *own = sw_hier_page(hier, hier->local_rank);
    pthread_mutex_lock(&hier->lock);
    bool first = !atomic_load(&hier->ended);
    if (first) {
        hier->reason = own->reason = *reason;
        atomic_store(&hier->ended, true);
        atomic_store(&own->state, SW_MEMBER_ENDED);
    }
    pthread_mutex_unlock(&hier->lock);
    sw_futex_wake_all(&own->posted);
    sw_futex_wake_all(&own->wired);
    return first;
}

sw_status sw_hier_end_here(sw_hier *hier, const sw_error *reason, sw_error *err)
{
    sw_hier_end(hier, reason);
    hier->end_is_known = true;
    hier->inside->ops->abort(hier->inside, &hier->reason);
    if (hier->carrier) /* whose own thread may be inside a call of the wire */
        sw_carrier_say_last_word(hier->carrier, &hier->reason);
    if (err)
        *err = hier->reason;
    return hier->reason.status;
}

sw_status sw_hier_check_alive(sw_hier *hier, sw_error *err)
{
    return atomic_load(&hier->ended) ? sw_hier_end_here(hier, &hier->reason, err) : SW_OK;
}

bool sw_hier_has_gone(const sw_hier *hier, int local)
{
    sw_fabric *inside = (sw_fabric *)hier->inside;
    return local != hier->local_rank && inside->peer_ended(inside, local);
}

/* The thread that posts learns of it in its next call. Where that one ends it, or leaves, all is
 * said: what is said after a leave would be an end that nobody has met. */
void sw_hier_request_end(sw_comm *comm, const sw_error *reason)
{
    sw_hier *hier = (sw_hier *)comm;
    if (!sw_hier_end(hier, reason))
        return;
    hier->inside->ops->request_end(hier->inside, reason);
    if (hier->carrier)
        sw_carrier_say_last_word(hier->carrier, reason);
}

/* Of ranks on other hosts: what carriers have heard. */
sw_status sw_hier_look(sw_comm *comm, bool minds_leaving, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    const sw_page *own = sw_hier_page(hier, hier->local_rank);
    pthread_mutex_lock(&hier->lock); /* the end is said with it */
    bool has_ended_here = atomic_load(&own->state) == SW_MEMBER_ENDED;
    sw_error reason = hier->reason;
    pthread_mutex_unlock(&hier->lock);
    if (has_ended_here)
        return sw_error_set(err, reason.status, reason.detail, "%s", reason.message);
    for (int l = 0; l < hier->local_count; ++l) {
        const sw_page *page = sw_hier_page(hier, l);
        if (atomic_load(&page->state) != SW_MEMBER_ENDED)
            continue;
        reason = page->reason;
        reason.message[sizeof reason.message - 1] = '\0';
        return sw_error_set(err, reason.status, reason.detail, "%s", reason.message);
    }
    return hier->inside->ops->look(hier->inside, minds_leaving, err);
}

bool sw_hier_is_alive(sw_comm *comm)
{
    const sw_hier *hier = (const sw_hier *)comm;
    for (int l = 0; l < hier->local_count; ++l)
        if (atomic_load(&sw_hier_page(hier, l)->state) != SW_MEMBER_ACTIVE ||
            sw_hier_has_gone(hier, l))
            return false;
    return !atomic_load(&hier->ended);
}
