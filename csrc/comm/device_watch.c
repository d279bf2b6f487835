/* device_watch.c - see device_watch.h. */
#include "comm/device_watch.h"

#include <pthread.h>
#include <stdlib.h>

#include "platform/clock.h"
#include "platform/thread.h"

static const int64_t PERIOD_NS = INT64_C(100) * 1000000;
/* A longer call may be blocked. */
static const int64_t LONG_CALL_NS = INT64_C(1000) * 1000000;

typedef struct sw_device_watch {
    sw_device_comm *comm; /* borrowed */
    sw_thread thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool is_asked, is_out; /* stop requested; stopped. Under the mutex */
} sw_device_watch;

static struct timespec after(int64_t nanoseconds)
{
    int64_t when = sw_clock_now_ns() + nanoseconds;
    return (struct timespec){.tv_sec = when / 1000000000, .tv_nsec = when % 1000000000};
}

/* Wait for `*flag` until the time has passed; return it. */
static bool wait_for(sw_device_watch *watch, const bool *flag, int64_t nanoseconds)
{
    const struct timespec end = after(nanoseconds);
    pthread_mutex_lock(&watch->mutex);
    while (!*flag && pthread_cond_timedwait(&watch->changed, &watch->mutex, &end) == 0)
        continue;
    bool value = *flag;
    pthread_mutex_unlock(&watch->mutex);
    return value;
}

static void set(sw_device_watch *watch, bool *flag)
{
    pthread_mutex_lock(&watch->mutex);
    *flag = true;
    pthread_cond_broadcast(&watch->changed);
    pthread_mutex_unlock(&watch->mutex);
}

/* True if the last mark is late. Once the mark is due, query the driver. But if the program's
 * thread may be blocked in a driver call, the mark is late once that call has taken as long as the
 * deadline. */
static bool is_late(sw_device_comm *c)
{
    int64_t now = sw_clock_now_ns(), marked = atomic_load(&c->marked_ns);
    int64_t entered = atomic_load(&c->entered_ns);
    bool done = false;
    if (!marked || now - marked <= c->timeout_ns)
        return false;
    if (entered && now - entered > LONG_CALL_NS)
        return now - entered > c->timeout_ns;
    if (c->device->ops->event_query(c->device, c->marked, &done, NULL) != SW_OK)
        return false; /* the program's next call meets and reports the same failure */
    if (done)
        (void)atomic_compare_exchange_strong(&c->marked_ns, &marked, 0);
    return !done && atomic_load(&c->marked_ns) == marked;
}

/* Return SW_OK, or the reason why the transport ended. */
static sw_status look(sw_device_comm *c, sw_error *reason)
{
    sw_comm *host = c->watchdog.host;
    sw_status status = sw_peers_watch(c->peers, reason);
    if (status != SW_OK)
        return status;
    if (host)
        status = host->ops->look(host, false, reason);
    if (status == SW_OK && is_late(c)) {
        sw_peers_explain_late(c->peers, "a collective", reason);
        status = SW_E_TIMEOUT;
    }
    if (status != SW_OK)
        sw_peers_request_end(c->peers, reason);
    return status;
}

static void *run(void *argument)
{
    sw_device_watch *watch = argument;
    sw_comm *host = watch->comm->watchdog.host;
    bool is_reported = false;
    while (!wait_for(watch, &watch->is_asked, PERIOD_NS)) {
        sw_error reason;
        if (look(watch->comm, &reason) == SW_OK || is_reported)
            continue;
        is_reported = true;
        if (host && host->hooks.log) /* takes the GIL, so it comes after the end */
            host->hooks.log(host->hooks.context, reason.message);
    }
    set(watch, &watch->is_out);
    return NULL;
}

sw_status sw_device_watch_start(sw_device_comm *c, sw_error *err)
{
    pthread_condattr_t attributes;
    if (c->watch)
        return SW_OK;
    sw_device_watch *watch = calloc(1, sizeof *watch);
    if (!watch)
        SW_FAIL(err, SW_E_MEMORY, "watch of a GPU's communicator: no memory for %zu bytes",
                sizeof *watch);
    watch->comm = c;
    pthread_mutex_init(&watch->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&watch->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    sw_status status = sw_thread_start(&watch->thread, run, watch, "sw-gpu-watch", err);
    if (status != SW_OK) {
        pthread_cond_destroy(&watch->changed);
        pthread_mutex_destroy(&watch->mutex);
        free(watch);
        return status;
    }
    c->watch = watch;
    return SW_OK;
}

bool sw_device_watch_stop(sw_device_comm *c, int64_t patience_ns)
{
    sw_device_watch *watch = c->watch;
    if (!watch)
        return true;
    set(watch, &watch->is_asked);
    if (!wait_for(watch, &watch->is_out, patience_ns))
        return false;
    sw_thread_join(&watch->thread);
    pthread_cond_destroy(&watch->changed);
    pthread_mutex_destroy(&watch->mutex);
    free(watch);
    c->watch = NULL;
    return true;
}
