/* wait.c - see the header. */
#include "comm/wait.h"

#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "platform/clock.h"
#include "platform/process.h"

static const int64_t look_ns = 100 * 1000 * 1000;

sw_wait sw_wait_begin(const sw_comm *comm, void *context,
                      void (*describe)(void *context, sw_wait_text *text))
{
    return (sw_wait){.comm = comm,
                     .begun_ns = sw_clock_now_ns(),
                     .timeout_ns = comm->timeout_ns,
                     .warn_ns = comm->warn_after_ns,
                     .context = context,
                     .describe = describe};
}

static void warn(sw_wait *wait, const sw_wait_text *text, int64_t waited_ns)
{
    const sw_comm *comm = wait->comm;
    char message[SW_ERROR_MESSAGE_BYTES];
    wait->warn_ns *= 2;
    if (!comm->hooks.log)
        return;
    snprintf(message, sizeof message,
             "rank %d has waited %.1f s in %.120s for %.200s; the deadline is %.1f s",
             sw_comm_name(comm, comm->rank), (double)waited_ns * 1e-9, text->what, text->missing,
             (double)comm->timeout_ns * 1e-9);
    sw_text_mend(message);
    comm->hooks.log(comm->hooks.context, message);
}

static sw_status give_up(const sw_wait *wait, const sw_wait_text *text, int64_t waited_ns,
                         sw_error *reason)
{
    return sw_error_set(reason, SW_E_TIMEOUT, text->rank,
                        "waited %.1f s (timeout_s=%.1f) in %s for %s", (double)waited_ns * 1e-9,
                        (double)wait->comm->timeout_ns * 1e-9, text->what, text->missing);
}

sw_status sw_wait_give_up(const sw_wait *wait, sw_error *reason)
{
    sw_wait_text text = {.rank = -1};
    wait->describe(wait->context, &text);
    return give_up(wait, &text, sw_clock_now_ns() - wait->begun_ns, reason);
}

bool sw_wait_add_missing(sw_wait_text *text, sw_comm *comm, int rank, int pid)
{
    char peer[SW_COMM_PEER_BYTES];
    size_t used = strlen(text->missing);
    bool is_stopped = sw_process_is_stopped(pid);
    if (text->rank < 0)
        text->rank = sw_comm_name(comm, rank);
    if (is_stopped && !text->is_stopped)
        text->stopped = sw_comm_name(comm, rank);
    text->is_stopped = text->is_stopped || is_stopped;
    comm->ops->peer(comm, rank, peer);
    snprintf(text->missing + used, sizeof text->missing - used, "%s%s%s", used ? ", " : "", peer,
             is_stopped ? " (stopped)" : "");
    return strlen(text->missing) + 1 < sizeof text->missing;
}

/* Check for stopped peers from time to time, since it reads a file of each missing one. If one goes
 * on and another is stopped, their times add up. Time without checks does not count: then this rank
 * was stopped too, as in a suspended job. */
static sw_status check_stopped(sw_wait *wait, sw_error *reason)
{
    const sw_comm *comm = wait->comm;
    int64_t now_ns = sw_clock_now_ns();
    int64_t pause_ns = comm->silent_ns / 4 < look_ns ? comm->silent_ns / 4 : look_ns;
    int64_t passed_ns = now_ns - wait->looked_ns;
    sw_wait_text text = {.rank = -1};
    if (comm->silent_ns == 0 || passed_ns < pause_ns)
        return SW_OK;
    if (wait->stopped_ns != 0 && passed_ns > 4 * pause_ns)
        wait->stopped_ns += passed_ns - pause_ns;
    wait->looked_ns = now_ns;
    wait->describe(wait->context, &text);
    if (!text.is_stopped)
        wait->stopped_ns = 0;
    else if (wait->stopped_ns == 0)
        wait->stopped_ns = now_ns;
    else if (now_ns - wait->stopped_ns >= comm->silent_ns)
        return sw_error_set(
            reason, SW_E_COMM, text.stopped,
            "rank %d has been stopped for %.1f s (silent_s=%g) in %s, waited for: %s", text.stopped,
            (double)(now_ns - wait->stopped_ns) * 1e-9, (double)comm->silent_ns * 1e-9, text.what,
            text.missing);
    return SW_OK;
}

sw_status sw_wait_check(sw_wait *wait, sw_error *reason)
{
    const sw_comm *comm = wait->comm;
    int64_t waited_ns = sw_clock_now_ns() - wait->begun_ns;
    sw_wait_text text = {.rank = -1};
    bool is_interrupted = comm->hooks.interrupted && comm->hooks.interrupted(comm->hooks.context);
    if (!is_interrupted && waited_ns < wait->warn_ns && waited_ns < wait->timeout_ns)
        return check_stopped(wait, reason);
    wait->describe(wait->context, &text);
    if (is_interrupted) {
        int name = sw_comm_name(comm, comm->rank);
        sw_error_set(reason, SW_E_COMM, name, "rank %d was interrupted while it waited in %s", name,
                     text.what);
        return SW_E_INTERRUPTED;
    }
    if (waited_ns >= wait->timeout_ns)
        return give_up(wait, &text, waited_ns, reason);
    warn(wait, &text, waited_ns);
    return SW_OK;
}

sw_status sw_wait_interrupted(sw_error *err)
{
    SW_FAIL(err, SW_E_INTERRUPTED, "interrupted while waiting for a peer");
}
