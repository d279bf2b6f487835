/* peers.c - see peers.h. */
#include "comm/peers.h"

#include <stdio.h>
#include <stdlib.h>

#include "comm/account.h"
#include "comm/wait.h"
#include "platform/clock.h"
#include "platform/thread.h"

/* ---- the watchdog ---- */

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

/* ---- failures and waits ---- */

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
    (void)!sw_peers_report(t, reason, &first);
    sw_watchdog_report_to_hosts(t->watchdog);
    t->ops->end(t, &first);
    return sw_error_pass(err, &first);
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

/* ---- a rank without peers ---- */

static sw_status check(sw_peers *peers, sw_error *err)
{
    return peers->is_failing ? sw_ending_await(&peers->ending, err)
                             : sw_peers_check_request(peers, err);
}

static sw_status copy(sw_peers *peers, const void *from, void *to, size_t size_bytes,
                      sw_stream *stream, sw_error *err)
{
    sw_error cause;
    SW_TRY(check(peers, err));
    if (from == to || size_bytes == 0)
        return SW_OK;
    if (peers->device->ops->copy_async(peers->device, to, from, size_bytes, stream, &cause) !=
        SW_OK)
        return sw_peers_fail_driver(peers, "a copy", &cause, err);
    return SW_OK;
}

static sw_status lone_all_reduce(sw_peers *peers, void *data, size_t numel, sw_dtype dtype,
                                 sw_redop op, sw_stream *stream, sw_error *err)
{
    (void)data, (void)numel, (void)stream;
    SW_TRY(sw_redop_check(op, dtype, err));
    return check(peers, err);
}

static sw_status lone_reduce_scatter(sw_peers *peers, const void *data, void *to,
                                     size_t slice_numel, sw_dtype dtype, sw_redop op,
                                     sw_stream *stream, sw_error *err)
{
    SW_TRY(sw_redop_check(op, dtype, err));
    return copy(peers, data, to, slice_numel * sw_dtype_size_bytes(dtype), stream, err);
}

static sw_status lone_gather_slices(sw_peers *peers, const void *slice, void *data,
                                    size_t slice_bytes, sw_stream *stream, sw_error *err)
{
    return copy(peers, slice, data, slice_bytes, stream, err);
}

static sw_status lone_exchange_slices(sw_peers *peers, const void *data, void *contributions,
                                      size_t slice_bytes, const int *slice_of_rank,
                                      sw_stream *stream, sw_error *err)
{
    (void)data, (void)contributions, (void)slice_bytes, (void)slice_of_rank, (void)stream;
    return check(peers, err);
}

static sw_status lone_gather_among(sw_peers *peers, void *data, size_t slice_bytes,
                                   const int *ranks, int count, sw_stream *stream, sw_error *err)
{
    (void)data, (void)slice_bytes, (void)ranks, (void)count, (void)stream;
    return check(peers, err);
}

static sw_status lone_broadcast(sw_peers *peers, void *data, size_t size_bytes, int root,
                                sw_stream *stream, sw_error *err)
{
    (void)data, (void)size_bytes, (void)stream;
    if (root != 0)
        SW_FAIL(err, SW_E_INVALID, "broadcast of one rank: root must be 0, not %d", root);
    return check(peers, err);
}

static void lone_end(sw_peers *peers, const sw_error *reason)
{
    (void)reason;
    atomic_store(&peers->has_failed, true);
}

static sw_status lone_look(sw_peers *peers, sw_error *reason)
{
    (void)peers, (void)reason;
    return SW_OK;
}

static void lone_end_beside(sw_peers *peers, const sw_error *reason)
{
    sw_error first;
    (void)!sw_peers_report(peers, reason, &first);
    lone_end(peers, reason);
}

static void lone_destroy(sw_peers *peers)
{
    free(peers);
}

static const sw_peers_ops lone_ops = {
    .group_begin = check,
    .group_end = check,
    .all_reduce = lone_all_reduce,
    .reduce_scatter = lone_reduce_scatter,
    .gather_slices = lone_gather_slices,
    .exchange_slices = lone_exchange_slices,
    .gather_among = lone_gather_among,
    .broadcast = lone_broadcast,
    .check = check,
    .end = lone_end,
    .look = lone_look,
    .end_beside = lone_end_beside,
    .destroy = lone_destroy,
};

sw_status sw_lone_rank_create(sw_device *device, int64_t timeout_ns, sw_watchdog *watchdog,
                              sw_peers **peers, sw_error *err)
{
    sw_peers *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "a rank without peers: no memory for %zu bytes", sizeof *made);
    *made = (sw_peers){.ops = &lone_ops,
                       .name = "one rank",
                       .title = "a GPU without peers",
                       .world_size = 1,
                       .device = device,
                       .timeout_ns = timeout_ns,
                       .watchdog = watchdog};
    *peers = made;
    return SW_OK;
}
