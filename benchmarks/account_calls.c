/* account_calls.c - the account's calls of a step, alone: nanoseconds of processor time for each.
 *
 * Built by bench_account with csrc/comm/account.c. The account lies in a file, as that of a rank. */
#include <time.h>

#include "comm/account.h"
#include "platform/clock.h"

static double spent_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

int open_account(const char *path)
{
    return sw_account_open(path, 0, 2, "host", NULL) == SW_OK ? 0 : -1;
}

/* A step's own events: a forward, a backward, the round's end, the optimizer. */
double time_steps(int count)
{
    double begun_ns = spent_ns();
    for (int i = 0; i < count; ++i) {
        sw_account_enter(SW_PHASE_FORWARD);
        sw_account_enter(SW_PHASE_BACKWARD);
        sw_account_enter(SW_PHASE_OPTIMIZER);
        sw_account_stepping();
        sw_account_stepped();
    }
    return (spent_ns() - begun_ns) / count;
}

/* A collective, from its begin until it is done, with its bytes. */
double time_collectives(int count)
{
    sw_account_use use = {.group = 1, .link = SW_LINK_SHARED_MEMORY};
    double begun_ns = spent_ns();
    for (int i = 0; i < count; ++i) {
        use.number++;
        uint64_t serial = sw_account_begin(&use, 1, "bucket 0 of GPT", 1 << 20, 1, 1);
        sw_account_post(serial);
        sw_account_done(serial);
    }
    return (spent_ns() - begun_ns) / count;
}

/* A sleep in a wait. Its clock is read whether or not it is accounted for. */
double time_sleeps(int count)
{
    double begun_ns = spent_ns();
    int64_t slept_ns = sw_clock_now_ns();
    for (int i = 0; i < count; ++i)
        sw_account_slept(slept_ns, i % 2, 1);
    return (spent_ns() - begun_ns) / count;
}
