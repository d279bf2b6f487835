/* peers.c - see the header. */
#include "comm/peers.h"

#include "comm/account.h"
#include "platform/clock.h"
#include "platform/thread.h"

/* NCCL takes most calls within some 100 us, and a step at zero=3 has hundreds of them. */
static const int64_t YIELDS_NS = 2 * 1000 * 1000;

sw_status sw_peers_report(sw_peers *t, const sw_error *reason, sw_error *first)
{
    sw_ending_record(&t->ending, SW_MEMBER_ENDED, reason);
    sw_status status = sw_ending_await(&t->ending, first);
    if (!atomic_exchange(&t->is_failing, true))
        sw_watchdog_report(t->watchdog, first);
    return status;
}

sw_status sw_peers_fail(sw_peers *t, const sw_error *reason, sw_error *err)
{
    sw_error first;
    sw_status status = sw_peers_report(t, reason, &first);
    sw_watchdog_report_to_hosts(t->watchdog);
    t->ops->end(t, &first);
    if (err)
        *err = first;
    return status;
}

sw_status sw_peers_fail_driver(sw_peers *t, const char *what, const sw_error *cause, sw_error *err)
{
    sw_error reason;
    sw_error_set(&reason, cause->status, cause->detail, "%s on rank %d of %d: %s: %.300s", t->title,
                 t->rank, t->world_size, what, cause->message);
    return sw_peers_fail(t, &reason, err);
}

void sw_peers_explain_late(const sw_peers *t, const char *what, sw_error *reason)
{
    sw_error_set(reason, SW_E_TIMEOUT, -1,
                 "%s on rank %d of %d: %s was not done within %.3g s; a peer has not issued it",
                 t->title, t->rank, t->world_size, what, (double)t->timeout_ns * 1e-9);
}

sw_status sw_peers_give_up(sw_peers *t, const char *what, sw_error *err)
{
    sw_error reason;
    sw_peers_explain_late(t, what, &reason);
    return sw_peers_fail(t, &reason, err);
}

void sw_peers_abort(sw_peers *t, const sw_error *reason)
{
    if (!t->is_failing)
        (void)!sw_peers_fail(t, reason, NULL);
}

void sw_peers_request_end(sw_peers *t, const sw_error *reason)
{
    sw_ending_record(&t->ending, SW_MEMBER_ENDED, reason);
    t->ops->end_beside(t, reason);
    sw_watchdog_report_to_hosts(
        t->watchdog); /* takes the GIL, which a thread may hold until the GPU is released */
}

sw_status sw_peers_watch(sw_peers *t, sw_error *err)
{
    sw_error reason;
    if (sw_ending_read(&t->ending, &reason) == SW_OK && t->ops->look(t, &reason) == SW_OK)
        return SW_OK;
    sw_peers_request_end(t, &reason);
    return sw_ending_await(&t->ending, err);
}

sw_status sw_peers_check_request(sw_peers *t, sw_error *err)
{
    sw_error reason;
    return sw_ending_read(&t->ending, &reason) == SW_OK ? SW_OK : sw_peers_fail(t, &reason, err);
}

sw_status sw_peers_turn(sw_peers *t, int64_t begun_ns, const char *what, sw_error *err)
{
    sw_error reason;
    if (sw_clock_now_ns() - begun_ns > t->timeout_ns)
        return sw_peers_give_up(t, what, err);
    sw_status status = sw_watchdog_look(t->watchdog, begun_ns, what, &reason);
    if (status != SW_OK) {
        sw_status failed = sw_peers_fail(t, &reason, err);
        if (status == SW_E_INTERRUPTED)
            SW_FAIL(err, status, "interrupted while waiting for %s", what);
        return failed;
    }
    sw_thread_rest_after(sw_clock_now_ns() - begun_ns, YIELDS_NS);
    return SW_OK;
}

sw_status sw_peers_await(sw_peers *t, sw_event *event, const char *what, sw_error *err)
{
    int64_t begun_ns = sw_clock_now_ns();
    int turns = 0;
    for (;;) {
        bool done;
        sw_error cause;
        if (t->device->ops->event_query(t->device, event, &done, &cause) != SW_OK)
            return sw_peers_fail_driver(t, what, &cause, err);
        SW_TRY(sw_peers_check(t, err)); /* check after the event, since its data may be garbage */
        if (done && turns > 0)
            (void)sw_account_slept(begun_ns, -1, 0);
        if (done)
            return SW_OK;
        turns++;
        SW_TRY(sw_peers_turn(t, begun_ns, what, err));
    }
}

sw_status sw_peers_wait(sw_peers *t, sw_event *event, const char *what, sw_error *err)
{
    t->device->stats.host_waits++;
    return sw_peers_await(t, event, what, err);
}
