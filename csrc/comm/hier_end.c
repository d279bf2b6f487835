/* hier_end.c - the end of a communicator over hosts: functions that any thread may call. */
#include "comm/hier_state.h"
#include "platform/futex.h"

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
