/* test_watchdog.c - what a wait for a GPU logs, and who hears of a GPU that cannot join its peers'.
 *
 * Laws: a wait is logged once it has lasted warn_after_ns, and again at twice that; waits that are
 * short are not, however many follow one another, and whatever they wait for; the program is asked
 * whether it was interrupted, but not by waits of a moment. A rank that fails in making NCCL's
 * communicator tells all ranks, which would wait for it there. A thread that ends a communicator
 * beside another lets the GPU go before it tells other hosts, for which it takes the GIL. A thread
 * that is lost in a call is waited for once. */
#include <string.h>

#include "check.h"
#include "comm/device_comm.h"
#include "comm/local.h"
#include "comm/nccl.h"
#include "comm/peers.h"
#include "platform/clock.h"
#include "platform/thread.h"

enum {
    WORLD = 3,
    MS = 1000000,
    TURN_MS = 60 /* more than a watchdog rests */,
    SHORT_WAITS = 5,
    SHORT_TURNS = 3,
    LONG_TURNS = 14
};
static const char WHAT[] = "the sum of squares";

static int logged, asked;
static int64_t looked_after; /* the wait's age after its last look */

static void note(void *context, const char *message)
{
    (void)context;
    check(strstr(message, WHAT) != NULL, "names what is waited for: %s", message);
    ++logged;
}

static bool count(void *context)
{
    (void)context;
    ++asked;
    return false;
}

/* One wait of so many turns. */
static void wait_for(sw_watchdog *watchdog, int turns)
{
    sw_error err;
    int64_t begun = sw_clock_now_ns();
    for (int turn = 0; turn < turns; ++turn) {
        check(sw_watchdog_look(watchdog, begun, WHAT, &err) == SW_OK, "all is well: %s",
              err.message);
        looked_after = sw_clock_now_ns() - begun;
        sw_thread_sleep_ns(TURN_MS * MS);
    }
}

static void check_logging(sw_comm *host)
{
    host->hooks.log = note;
    host->warn_after_ns = INT64_C(10) * TURN_MS * MS;
    host->hooks.interrupted = count;
    sw_watchdog watchdog = {.host = host};
    wait_for(&watchdog, 1);
    check(asked == 0, "a wait of a moment asked the program");
    bool are_short = true; /* a busy machine makes them longer */
    for (int i = 0; i < SHORT_WAITS; ++i) {
        wait_for(&watchdog, SHORT_TURNS);
        are_short = are_short && looked_after < host->warn_after_ns;
    }
    check(logged == 0 || !are_short, "%d short waits were logged", logged);
    check(asked > 0, "the program is not asked whether it was interrupted");
    wait_for(&watchdog, LONG_TURNS);
    check(logged >= 1, "a wait that is long was not logged");
}

static sw_status refuse(sw_device *device, sw_device_visit *visit, sw_error *err)
{
    (void)device;
    (void)visit;
    return sw_error_set(err, SW_E_DEVICE, 201, "the context is lost");
}

static void check_telling(sw_comm *const *host)
{
    static const sw_device_ops ops = {.enter = refuse};
    sw_device device = {.ops = &ops};
    sw_nccl_library nccl = {.version = 0};
    sw_nccl_id id = {.internal = ""};
    sw_watchdog watchdog = {.host = host[1]};
    sw_peers *comm;
    sw_error err, said;
    check(sw_nccl_create(&nccl, &device, &id, 1, WORLD, INT64_C(1000) * MS, &watchdog, &comm,
                         &err) == SW_E_DEVICE,
          "made without a context");
    for (int r = 0; r < WORLD; ++r)
        check(host[r]->ops->look(host[r], false, &said) == SW_E_COMM && said.detail == 1 &&
                  strcmp(said.message, err.message) == 0,
              "rank %d does not hear: %s", r, err.message);
}

/* ---- a communicator over a library of NCCL's that is not there ---- */

static struct {
    sw_peers *peers;
    int aborts, told;
    bool hangs; /* a query does not return until it is false */
    bool is_inside;
    int aborts_when_told;
} nccl_seen;

static sw_status enter(sw_device *device, sw_device_visit *visit, sw_error *err)
{
    (void)device;
    (void)visit;
    (void)err;
    return SW_OK;
}

static void leave(sw_device *device, const sw_device_visit *visit)
{
    (void)device;
    (void)visit;
}

static sw_nccl_result init(sw_nccl_comm *comm, int world_size, sw_nccl_id id, int rank,
                           sw_nccl_config *config)
{
    (void)world_size;
    (void)id;
    (void)rank;
    (void)config;
    *comm = (sw_nccl_comm)(void *)&nccl_seen;
    return SW_NCCL_SUCCESS;
}

static sw_nccl_result abort_comm(sw_nccl_comm comm)
{
    (void)comm;
    nccl_seen.aborts++;
    return SW_NCCL_SUCCESS;
}

static sw_nccl_result query(sw_nccl_comm comm, sw_nccl_result *result)
{
    (void)comm;
    *result = SW_NCCL_SUCCESS;
    __atomic_store_n(&nccl_seen.is_inside, true, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&nccl_seen.hangs, __ATOMIC_SEQ_CST))
        sw_thread_sleep_ns(MS);
    return SW_NCCL_SUCCESS;
}

static const char *text_of(sw_nccl_result result)
{
    (void)result;
    return "a result";
}

static const char *last_error(sw_nccl_comm comm)
{
    (void)comm;
    return "";
}

static void note_hosts(sw_comm *comm)
{
    (void)comm;
    nccl_seen.told++;
    nccl_seen.aborts_when_told = nccl_seen.aborts;
}

static const sw_device_ops working = {.enter = enter, .leave = leave};
static sw_device gpu = {.ops = &working};
static const sw_nccl_library library = {.call = {.ncclCommInitRankConfig = init,
                                                 .ncclCommAbort = abort_comm,
                                                 .ncclCommGetAsyncError = query,
                                                 .ncclGetErrorString = text_of,
                                                 .ncclGetLastError = last_error}};

static sw_peers *connect(sw_watchdog *watchdog, int64_t timeout_ns)
{
    sw_nccl_id id = {.internal = ""};
    sw_error err;
    memset(&nccl_seen, 0, sizeof nccl_seen);
    check(sw_nccl_create(&library, &gpu, &id, 0, WORLD, timeout_ns, watchdog, &nccl_seen.peers,
                         &err) == SW_OK,
          "%s", err.message);
    return nccl_seen.peers;
}

static void check_ending_beside(sw_comm *host)
{
    sw_comm_ops ops = *host->ops;
    const sw_comm_ops *plain = host->ops;
    sw_watchdog watchdog = {.host = host};
    sw_peers *peers = connect(&watchdog, INT64_C(1000) * MS);
    sw_error reason, said;
    ops.tell_hosts = note_hosts;
    host->ops = &ops;
    sw_error_set(&reason, SW_E_COMM, 1, "rank 1 has died");
    sw_peers_request_end(peers, &reason);
    check(nccl_seen.aborts == 1 && nccl_seen.told == 1 && nccl_seen.aborts_when_told == 1,
          "%d aborts, other hosts told %d times, behind %d aborts", nccl_seen.aborts,
          nccl_seen.told, nccl_seen.aborts_when_told);
    check(host->ops->look(host, false, &said) == SW_E_COMM, "this host's ranks know");
    sw_peers_destroy(peers);
    host->ops = plain;
}

static void check_a_lost_thread(void)
{
    sw_device_comm comm = {.device = &gpu, .timeout_ns = INT64_C(150) * MS};
    sw_error err;
    comm.peers = connect(NULL, comm.timeout_ns);
    __atomic_store_n(&nccl_seen.hangs, true, __ATOMIC_SEQ_CST);
    check(sw_device_watch_start(&comm, &err) == SW_OK, "%s", err.message);
    while (!__atomic_load_n(&nccl_seen.is_inside, __ATOMIC_SEQ_CST))
        sw_thread_sleep_ns(MS);
    sw_device_comm_disconnect(&comm);
    check(comm.is_abandoned, "a thread that is lost was not");
    int64_t shortest =
        INT64_MAX; /* each of them would wait; a busy machine makes some of them late */
    for (int i = 0; i < 10 && shortest >= comm.timeout_ns; ++i) {
        int64_t begun = sw_clock_now_ns();
        sw_device_comm_disconnect(&comm);
        int64_t took = sw_clock_now_ns() - begun;
        shortest = took < shortest ? took : shortest;
    }
    check(shortest < comm.timeout_ns, "a lost thread was waited for twice");
    __atomic_store_n(&nccl_seen.hangs, false, __ATOMIC_SEQ_CST);
    check(sw_device_watch_stop(&comm, INT64_C(20000) * MS), "it is out");
    sw_error_set(&err, SW_E_COMM, 0, "the test is over");
    sw_peers_abort(comm.peers, &err);
    sw_peers_destroy(comm.peers);
}

int main(void)
{
    sw_error err;
    sw_comm *host[WORLD] = {NULL};
    sw_local_group *group = NULL, *other = NULL;
    sw_comm *alone = NULL;
    bool is_made = sw_local_group_create(WORLD, &group, &err) == SW_OK &&
                   sw_local_group_create(1, &other, &err) == SW_OK &&
                   sw_local_comm_create(other, 0, &alone, &err) == SW_OK;
    for (int r = 0; is_made && r < WORLD; ++r)
        is_made = sw_local_comm_create(group, r, &host[r], &err) == SW_OK;
    if (check(is_made, "%s", err.message)) {
        check_logging(host[0]);
        check_ending_beside(alone);
        check_telling(host);
        check_a_lost_thread();
    }
    for (int r = 0; r < WORLD; ++r)
        if (host[r])
            host[r]->ops->destroy(host[r]);
    sw_local_group_destroy(group);
    if (alone)
        alone->ops->destroy(alone);
    sw_local_group_destroy(other);
    return check_result();
}
