/* test_lookout.c - what a wait for a GPU logs, and who hears of a GPU that cannot join its peers'.
 *
 * Laws: a wait is logged once it has lasted warn_after_ns, and again at twice that; waits that are
 * short are not, however many follow one another, and whatever they wait for; the program is asked
 * whether it was interrupted, but not by waits of a moment. A rank that fails in making NCCL's
 * communicator tells all ranks, which would wait for it there. */
#include <string.h>

#include "check.h"
#include "comm/local.h"
#include "comm/lookout.h"
#include "comm/nccl.h"
#include "platform/clock.h"
#include "platform/thread.h"

enum {
    WORLD = 3,
    MS = 1000000,
    TURN_MS = 60 /* more than a lookout rests */,
    SHORT_WAITS = 5,
    SHORT_TURNS = 3,
    LONG_TURNS = 14
};
static const char WHAT[] = "the sum of squares";

static int logged, asked;

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
static void wait_for(sw_lookout *lookout, int turns)
{
    sw_error err;
    int64_t begun = sw_clock_now_ns();
    for (int turn = 0; turn < turns; ++turn) {
        check(sw_lookout_look(lookout, begun, WHAT, &err) == SW_OK, "all is well: %s", err.message);
        sw_thread_sleep_ns(TURN_MS * MS);
    }
}

static void check_logging(sw_comm *host)
{
    host->hooks.log = note;
    host->warn_after_ns = INT64_C(10) * TURN_MS * MS;
    host->hooks.interrupted = count;
    sw_lookout lookout = {.host = host};
    wait_for(&lookout, 1);
    check(asked == 0, "a wait of a moment asked the program");
    for (int i = 0; i < SHORT_WAITS; ++i)
        wait_for(&lookout, SHORT_TURNS);
    check(logged == 0, "%d short waits were logged", logged);
    check(asked > 0, "the program is not asked whether it was interrupted");
    wait_for(&lookout, LONG_TURNS);
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
    sw_lookout lookout = {.host = host[1]};
    sw_peers *comm;
    sw_error err, said;
    check(sw_nccl_create(&nccl, &device, &id, 1, WORLD, INT64_C(1000) * MS, &lookout, &comm,
                         &err) == SW_E_DEVICE,
          "made without a context");
    for (int r = 0; r < WORLD; ++r)
        check(host[r]->ops->look(host[r], false, &said) == SW_E_COMM && said.detail == 1 &&
                  strcmp(said.message, err.message) == 0,
              "rank %d does not hear: %s", r, err.message);
}

int main(void)
{
    sw_error err;
    sw_comm *host[WORLD] = {NULL};
    sw_local_group *group = NULL;
    bool is_made = sw_local_group_create(WORLD, &group, &err) == SW_OK;
    for (int r = 0; is_made && r < WORLD; ++r)
        is_made = sw_local_comm_create(group, r, &host[r], &err) == SW_OK;
    if (check(is_made, "%s", err.message)) {
        check_logging(host[0]);
        check_telling(host);
    }
    for (int r = 0; r < WORLD; ++r)
        if (host[r])
            host[r]->ops->destroy(host[r]);
    sw_local_group_destroy(group);
    return check_result();
}
