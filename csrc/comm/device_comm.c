/* device_comm.c - see device_comm.h. */
#include "comm/device_comm.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "comm/peers.h"
#include "platform/clock.h"
#include "platform/thread.h"

enum { CALLS_PER_GROUP = 32, EVERY_RANK = -1 };

/* ---- life ---- */

static sw_status create_all(sw_device_comm *c, const sw_device_comm_config *config, sw_error *err)
{
    void *staged;
    SW_TRY(sw_device_cuda_create(config->cuda_library, config->ordinal, &c->device, err));
    c->device->room = config->room;
    /* Missing NCCL is not an error yet: a rank without peers, or with slots, needs none. */
    (void)!sw_nccl_library_init(&c->library, config->nccl_library, &c->nccl_missing);
    SW_TRY(sw_kernel_set_init(&c->kernels, c->device, &config->places, err));
    const sw_device_ops *ops = c->device->ops;
    c->shares_stream = config->beside != NULL;
    if (c->shares_stream)
        c->stream = config->beside->stream;
    else
        SW_TRY(ops->stream_create(c->device, true, &c->stream, err));
    SW_TRY(ops->event_create(c->device, &c->met, err));
    SW_TRY(ops->event_create(c->device, &c->marked, err));
    SW_TRY(ops->memory_alloc(c->device, sizeof(sw_norm_sum), &c->sum, err));
    SW_TRY(ops->pinned_alloc(c->device, sizeof(sw_norm_sum), &staged, err));
    c->staged = staged;
    return SW_OK;
}

sw_status sw_device_comm_create(const sw_device_comm_config *config, sw_device_comm **comm,
                                sw_error *err)
{
    sw_device_comm *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "device communicator: no memory for %zu bytes", sizeof *made);
    made->watchdog.host = config->host;
    made->norm_room = ((size_t)1 << 31) - 1;
    sw_status status = create_all(made, config, err);
    if (status != SW_OK) {
        sw_device_comm_destroy(made);
        return status;
    }
    *comm = made;
    return SW_OK;
}

static sw_status refuse_connected(const sw_device_comm *c, sw_error *err)
{
    if (c->peers)
        SW_FAIL(err, SW_E_STATE, "device communicator: connected already, as rank %d of %d",
                c->peers->rank, c->peers->world_size);
    return SW_OK;
}

static sw_status require_nccl(const sw_device_comm *c, sw_error *err)
{
    return c->library.handle ? SW_OK : sw_error_pass(err, &c->nccl_missing);
}

sw_status sw_device_comm_connect(sw_device_comm *c, const sw_nccl_id *id, int rank, int world_size,
                                 int64_t timeout_ns, sw_error *err)
{
    SW_TRY(refuse_connected(c, err));
    SW_TRY(require_nccl(c, err));
    c->timeout_ns = timeout_ns;
    c->watchdog.minds_leaving = true;
    sw_status status = sw_nccl_create(&c->library, c->device, id, rank, world_size, timeout_ns,
                                      &c->watchdog, &c->peers, err);
    c->watchdog.minds_leaving = false;
    return status;
}

sw_status sw_device_comm_connect_alone(sw_device_comm *c, int64_t timeout_ns, sw_error *err)
{
    SW_TRY(refuse_connected(c, err));
    c->timeout_ns = timeout_ns;
    return sw_lone_rank_create(c->device, timeout_ns, &c->watchdog, &c->peers, err);
}

sw_status sw_device_comm_connect_slots(sw_device_comm *c, const sw_slot_parts *parts, int rank,
                                       int world_size, int64_t timeout_ns, sw_error *err)
{
    SW_TRY(refuse_connected(c, err));
    c->timeout_ns = timeout_ns;
    sw_slot_config config = {.device = c->device,
                             .kernels = &c->kernels,
                             .stream = c->stream,
                             .parts = *parts,
                             .rank = rank,
                             .world_size = world_size,
                             .timeout_ns = timeout_ns,
                             .watchdog = &c->watchdog};
    c->watchdog.minds_leaving = true;
    sw_status status = sw_slot_transport_create(&config, &c->peers, err);
    c->watchdog.minds_leaving = false;
    return status;
}

sw_status sw_device_comm_borrow(sw_device_comm *c, sw_nccl_comm handle, int rank, int world_size,
                                int64_t timeout_ns, sw_error *err)
{
    SW_TRY(refuse_connected(c, err));
    SW_TRY(require_nccl(c, err));
    c->timeout_ns = timeout_ns;
    return sw_nccl_borrow(&c->library, c->device, handle, rank, world_size, timeout_ns,
                          &c->watchdog, &c->peers, err);
}

/* Our own communicator completes enqueued operations as it ends. A borrowed one's owner may end it
 * at once, so wait for them. */
static void return_borrowed(sw_device_comm *c)
{
    const sw_device_ops *ops = c->device->ops;
    if (!sw_peers_has_failed(c->peers) &&
        ops->event_record(c->device, c->met, c->stream, NULL) == SW_OK)
        (void)!sw_peers_wait(c->peers, c->met, "our last operation", NULL);
}

void sw_device_comm_disconnect(sw_device_comm *c)
{
    c->is_abandoned = c->is_abandoned || !sw_device_watch_stop(c, c->timeout_ns);
    if (c->is_abandoned)
        return;
    if (c->peers && c->peers->is_borrowed)
        return_borrowed(c);
    sw_peers_destroy(c->peers);
    c->peers = NULL;
}

void sw_device_comm_destroy(sw_device_comm *c)
{
    if (!c)
        return;
    sw_device_comm_disconnect(c);
    if (c->is_abandoned)
        return;
    if (c->device) {
        const sw_device_ops *ops = c->device->ops;
        ops->memory_free(c->device, c->sum);
        ops->pinned_free(c->device, c->staged);
        ops->event_destroy(c->device, c->met);
        ops->event_destroy(c->device, c->marked);
        if (!c->shares_stream)
            ops->stream_destroy(c->device, c->stream);
        sw_kernel_set_fini(&c->kernels);
    }
    sw_nccl_library_fini(&c->library);
    sw_device_destroy(c->device);
    free(c);
}

/* ---- order ---- */

sw_status sw_device_comm_follow(sw_device_comm *c, sw_stream *later, sw_stream *earlier,
                                sw_error *err)
{
    const sw_device_ops *ops = c->device->ops;
    if (later == earlier)
        return SW_OK;
    SW_TRY(ops->event_record(c->device, c->met, earlier, err));
    SW_TRY(ops->stream_wait(c->device, later, c->met, err));
    return SW_OK;
}

sw_status sw_device_comm_take_over(sw_device_comm *c, sw_stream *user, sw_error *err)
{
    if (!c->peers->is_borrowed)
        return SW_OK;
    return sw_device_comm_follow(c, c->stream, user, err);
}

sw_status sw_device_comm_give_back(sw_device_comm *c, sw_stream *user, sw_error *err)
{
    if (!c->peers->is_borrowed)
        return SW_OK;
    return sw_device_comm_follow(c, user, c->stream, err);
}

typedef struct moves {
    sw_device_comm *comm;
    const sw_device_range *ranges;
    size_t count;
    int root;       /* broadcast; EVERY_RANK: slices */
    void *received; /* destination of exchanged slices; NULL: gather */
} moves;

static sw_status move_range(const moves *m, const sw_device_range *range, sw_error *err)
{
    sw_device_comm *c = m->comm;
    size_t slice_numel = range->numel / (size_t)c->peers->world_size;
    if (range->numel == 0)
        return SW_OK;
    if (m->root != EVERY_RANK)
        return sw_peers_broadcast(c->peers, range->data, range->numel, range->dtype, m->root,
                                  c->stream, err);
    if (m->received)
        return sw_peers_exchange_slices(c->peers, range->data, m->received, slice_numel,
                                        range->dtype, NULL, c->stream, err);
    return sw_peers_all_gather(c->peers, range->data, slice_numel, range->dtype, c->stream, err);
}

static sw_status move_some(const moves *m, size_t begin, size_t end, sw_error *err)
{
    sw_peers *peers = m->comm->peers;
    sw_status status = SW_OK;
    SW_TRY(sw_peers_group_begin(peers, err));
    for (size_t i = begin; i < end && status == SW_OK; ++i)
        status = move_range(m, &m->ranges[i], err);
    /* Close the group even after an error; it must not include later operations of the thread. */
    sw_status ended = sw_peers_group_end(peers, status == SW_OK ? err : NULL);
    return status != SW_OK ? status : ended;
}

sw_status sw_device_comm_between(sw_device_comm *c, sw_stream *user,
                                 sw_status (*enqueue)(void *context, sw_error *err), void *context,
                                 sw_error *err)
{
    SW_TRY(sw_device_refuse_capture(c->device, user, "a collective of the GPUs", err));
    SW_TRY(sw_device_comm_follow(c, c->stream, user, err));
    SW_TRY(enqueue(context, err));
    SW_TRY(sw_device_comm_mark(c, err));
    return sw_device_comm_follow(c, user, c->stream, err);
}

static sw_status enqueue_moves(void *context, sw_error *err)
{
    const moves *m = context;
    for (size_t i = 0; i < m->count; i += CALLS_PER_GROUP)
        SW_TRY(move_some(m, i, sw_size_min(m->count, i + CALLS_PER_GROUP), err));
    return SW_OK;
}

sw_status sw_device_comm_broadcast(sw_device_comm *c, const sw_device_range *ranges, size_t count,
                                   int root, sw_stream *user, sw_error *err)
{
    if (root < 0)
        SW_FAIL(err, SW_E_INVALID, "device broadcast: root must be in [0, %d), not %d",
                c->peers->world_size, root);
    return sw_device_comm_between(c, user, enqueue_moves, &(moves){c, ranges, count, root, NULL},
                                  err);
}

/* One rank has nothing to move. */
static sw_status move_slices(sw_device_comm *c, const sw_device_range *ranges, size_t count,
                             void *received, const char *what, sw_stream *user, sw_error *err)
{
    size_t world_size = (size_t)c->peers->world_size;
    moves m = {c, ranges, count, EVERY_RANK, received};
    for (size_t i = 0; i < count; ++i)
        if (ranges[i].numel % world_size != 0)
            SW_FAIL(err, SW_E_INVALID,
                    "device %s: numel of range %zu must be a multiple of world_size %zu, not %zu",
                    what, i, world_size, ranges[i].numel);
    return world_size == 1 ? SW_OK : sw_device_comm_between(c, user, enqueue_moves, &m, err);
}

sw_status sw_device_comm_all_gather(sw_device_comm *c, const sw_device_range *ranges, size_t count,
                                    sw_stream *user, sw_error *err)
{
    return move_slices(c, ranges, count, NULL, "all_gather", user, err);
}

sw_status sw_device_comm_exchange(sw_device_comm *c, const sw_device_range *range, void *received,
                                  sw_stream *user, sw_error *err)
{
    return move_slices(c, range, 1, received, "exchange", user, err);
}

/* ---- watching ---- */

void sw_device_comm_await(sw_device_comm *c, sw_event *event, const char *what)
{
    int64_t start = sw_clock_now_ns();
    bool done = false;
    sw_error reason;
    c->device->stats.host_waits++;
    while (!done && sw_clock_now_ns() - start < c->timeout_ns) {
        if (c->device->ops->event_query(c->device, event, &done, NULL) != SW_OK)
            return; /* a lost context runs no work */
        if (done)
            return;
        if (c->peers) {
            (void)!sw_peers_check(c->peers, NULL);
            if (sw_watchdog_look(&c->watchdog, start, what, &reason) != SW_OK)
                sw_peers_abort(c->peers, &reason);
        }
        sw_thread_rest(sw_clock_now_ns() - start);
    }
}

/* Clear the time first, so that a watching thread never sees the new event with the old time. */
sw_status sw_device_comm_mark(sw_device_comm *c, sw_error *err)
{
    atomic_store(&c->marked_ns, 0);
    SW_TRY(c->device->ops->event_record(c->device, c->marked, c->stream, err));
    atomic_store(&c->marked_ns, sw_clock_now_ns());
    return SW_OK;
}

sw_status sw_device_comm_watch(sw_device_comm *c, sw_error *err)
{
    bool done;
    int64_t marked = atomic_load(&c->marked_ns);
    SW_TRY(sw_peers_check(c->peers, err));
    if (!marked)
        return SW_OK;
    SW_TRY(c->device->ops->event_query(c->device, c->marked, &done, err));
    if (done)
        atomic_store(&c->marked_ns, 0);
    else if (sw_clock_now_ns() - marked > c->timeout_ns)
        return sw_peers_give_up(c->peers, "a collective", err);
    return SW_OK;
}

/* ---- the watch thread ---- */

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

/* Wait for `*flag` until the time has passed; return it. */
static bool wait_for(sw_device_watch *watch, const bool *flag, int64_t nanoseconds)
{
    const struct timespec end = sw_thread_time_after(nanoseconds);
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
    if (c->watch)
        return SW_OK;
    sw_device_watch *watch = calloc(1, sizeof *watch);
    if (!watch)
        SW_FAIL(err, SW_E_MEMORY, "watch of a GPU's communicator: no memory for %zu bytes",
                sizeof *watch);
    watch->comm = c;
    pthread_mutex_init(&watch->mutex, NULL);
    sw_thread_cond_init(&watch->changed);
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
