/* watchdog.c - see watchdog.h. */
#include "comm/watchdog.h"

#include <stdio.h>

#include "comm/wait.h"
#include "platform/clock.h"
#include "platform/thread.h"

static const int64_t PERIOD_NS = 50 * 1000 * 1000;
/* Time for a peer to publish its reason before its end is reported. */
static const int64_t REASON_NS = 200 * 1000 * 1000;

/* No host knows for which rank its GPU waits; a rank of this host that waits for no GPU may be
 * it. */
static void describe(void *context, sw_wait_text *text)
{
    const sw_watchdog *watchdog = context;
    sw_comm *host = watchdog->host;
    int rank;
    char what[SW_WAIT_NOTE_BYTES];
    const sw_wait_note *note;
    sw_wait_text absent = {.rank = -1};
    for (int l = 0; host->ops->note && (note = host->ops->note(host, l, &rank)); ++l)
        if (rank != host->rank && !sw_wait_note_read(note, sw_clock_now_ns(), what, &(int){0}) &&
            !sw_wait_add_missing(&absent, host, rank))
            break;
    snprintf(text->what, sizeof text->what, "%.150s", watchdog->what);
    snprintf(text->missing, sizeof text->missing, "its GPU%s%.280s",
             absent.missing[0] ? "; those that wait for none: " : "", absent.missing);
}

sw_status sw_watchdog_look(sw_watchdog *watchdog, int64_t begun_ns, const char *what,
                           sw_error *reason)
{
    sw_comm *host = watchdog ? watchdog->host : NULL;
    int64_t now = sw_clock_now_ns();
    if (!host || now - begun_ns < PERIOD_NS || now - watchdog->looked_ns < PERIOD_NS)
        return SW_OK;
    if (begun_ns != watchdog->wait.begun_ns)
        watchdog->wait = (sw_wait){.comm = host,
                                   .begun_ns = begun_ns,
                                   .timeout_ns = INT64_MAX, /* the transport has a deadline */
                                   .warn_ns = sw_wait_warn_ns(host),
                                   .describe = describe};
    watchdog->looked_ns = now;
    watchdog->wait.context = watchdog;
    watchdog->what = what;
    if (sw_wait_check(&watchdog->wait, reason) == SW_E_INTERRUPTED) {
        int name = sw_comm_name(host, host->rank);
        sw_error_set(reason, SW_E_COMM, name, "rank %d was interrupted while its GPU waited for %s",
                     name, what);
        return SW_E_INTERRUPTED;
    }
    return host->ops->look(host, watchdog->minds_leaving, reason);
}

/* Return true for errors with the same message on every rank; other errors are this rank's own. */
static bool is_collective_failure(sw_status status)
{
    return status == SW_E_COMM || status == SW_E_TIMEOUT || status == SW_E_MISMATCH;
}

void sw_watchdog_report(const sw_watchdog *watchdog, const sw_error *reason)
{
    sw_comm *host = watchdog ? watchdog->host : NULL;
    sw_error reported = *reason;
    if (!host)
        return;
    if (!is_collective_failure(reported.status)) {
        reported.status = SW_E_COMM;
        reported.detail = sw_comm_name(host, host->rank);
    }
    host->ops->request_end(host, &reported);
}

void sw_watchdog_report_to_hosts(const sw_watchdog *watchdog)
{
    sw_comm *host = watchdog ? watchdog->host : NULL;
    if (host && host->ops->tell_hosts)
        host->ops->tell_hosts(host);
}

void sw_watchdog_find_cause(const sw_watchdog *watchdog, sw_error *reason)
{
    sw_comm *host = watchdog ? watchdog->host : NULL;
    int64_t begun = sw_clock_now_ns();
    sw_error published;
    if (!host)
        return;
    while (host->ops->look(host, false, &published) == SW_OK) {
        if (sw_clock_now_ns() - begun > REASON_NS)
            return;
        sw_thread_rest(sw_clock_now_ns() - begun);
    }
    *reason = published;
}
