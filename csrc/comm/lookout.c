/* lookout.c - see lookout.h. */
#include "comm/lookout.h"

#include <stdio.h>

#include "platform/clock.h"
#include "platform/thread.h"

static const int64_t PERIOD_NS = 50 * 1000 * 1000;
/* Time for a peer to publish its reason before its end is reported. */
static const int64_t REASON_NS = 200 * 1000 * 1000;

static void describe(void *context, sw_wait_text *text)
{
    snprintf(text->what, sizeof text->what, "%.150s", (const char *)context);
    snprintf(text->missing, sizeof text->missing, "its GPU");
}

sw_status sw_lookout_look(sw_lookout *lookout, int64_t begun_ns, const char *what, sw_error *reason)
{
    sw_comm *host = lookout ? lookout->host : NULL;
    int64_t now = sw_clock_now_ns();
    if (!host || now - begun_ns < PERIOD_NS || now - lookout->looked_ns < PERIOD_NS)
        return SW_OK;
    if (begun_ns != lookout->wait.begun_ns)
        lookout->wait = (sw_wait){.comm = host,
                                  .begun_ns = begun_ns,
                                  .timeout_ns = INT64_MAX, /* the transport has a deadline */
                                  .warn_ns = host->warn_after_ns,
                                  .describe = describe};
    lookout->looked_ns = now;
    lookout->wait.context = (void *)(uintptr_t)what;
    if (sw_wait_check(&lookout->wait, reason) == SW_E_INTERRUPTED) {
        int name = sw_comm_name(host, host->rank);
        sw_error_set(reason, SW_E_COMM, name, "rank %d was interrupted while its GPU waited for %s",
                     name, what);
        return SW_E_INTERRUPTED;
    }
    return host->ops->look(host, lookout->minds_leaving, reason);
}

/* Return true for errors with the same message on every rank; other errors are this rank's own. */
static bool is_collective_failure(sw_status status)
{
    return status == SW_E_COMM || status == SW_E_TIMEOUT || status == SW_E_MISMATCH;
}

void sw_lookout_report(const sw_lookout *lookout, const sw_error *reason)
{
    sw_comm *host = lookout ? lookout->host : NULL;
    sw_error reported = *reason;
    if (!host)
        return;
    if (!is_collective_failure(reported.status)) {
        reported.status = SW_E_COMM;
        reported.detail = sw_comm_name(host, host->rank);
    }
    host->ops->request_end(host, &reported);
}

void sw_lookout_report_to_hosts(const sw_lookout *lookout)
{
    sw_comm *host = lookout ? lookout->host : NULL;
    if (host && host->ops->tell_hosts)
        host->ops->tell_hosts(host);
}

void sw_lookout_find_cause(const sw_lookout *lookout, sw_error *reason)
{
    sw_comm *host = lookout ? lookout->host : NULL;
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
