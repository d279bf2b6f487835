/* test_account.c - the account of steps: phases tile a step, rings keep the newest, a killed
 * process leaves its file, and a reader never sees half a row. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "comm/account.h"
#include "platform/clock.h"
#include "platform/thread.h"

static const int64_t ms = 1000 * 1000;
static char folder[] = "/tmp/sw-account-XXXXXX";

static const sw_account_row *row_of(const sw_account *account, uint64_t step)
{
    return &account->rows[(step - 1) % SW_ACCOUNT_ROWS];
}

static const sw_account_row *last_row(void)
{
    return row_of(sw_account_get(), atomic_load(&sw_account_get()->head.steps));
}

static int64_t total(const sw_account_row *row)
{
    int64_t sum = 0;
    for (int i = 0; i < SW_PHASE_COUNT; ++i)
        sum += row->phase_ns[i];
    return sum;
}

static uint64_t run_step(int64_t rest_ns)
{
    const sw_phase phases[] = {SW_PHASE_FORWARD, SW_PHASE_BACKWARD, SW_PHASE_OPTIMIZER};
    for (int i = 0; i < 3; ++i) {
        sw_account_enter(phases[i]);
        if (rest_ns)
            sw_thread_sleep_ns(rest_ns * (i + 1));
    }
    sw_account_stepping();
    return sw_account_stepped();
}

static void check_phases(void)
{
    check(sw_account_stepped() == 0, "a step of an optimizer that is not ours");
    check(run_step(5 * ms) == 1, "the first step");
    const sw_account_row *row = last_row();
    check(row->phase_ns[SW_PHASE_DATA] == 0, "data before the first forward");
    for (int i = SW_PHASE_FORWARD; i <= SW_PHASE_OPTIMIZER; ++i)
        check(row->phase_ns[i] >= 5 * ms * i, "phase %d has %lld ns", i,
              (long long)row->phase_ns[i]);
    check(total(row) == row->ended_ns - row->begun_ns, "phases tile the step");
    int64_t ended_ns = row->ended_ns;

    sw_thread_sleep_ns(7 * ms); /* a data loader */
    sw_account_enter(SW_PHASE_FORWARD);
    sw_account_enter(SW_PHASE_BACKWARD);
    sw_account_enter(SW_PHASE_OPTIMIZER); /* no step follows: accumulation */
    sw_thread_sleep_ns(7 * ms);
    check(run_step(0) == 2, "the second step");
    row = last_row();
    check(row->begun_ns == ended_ns, "a step begins where the last one ended");
    check(row->forwards == 2 && row->phase_ns[SW_PHASE_DATA] >= 14 * ms,
          "%u forwards, %lld ns of data", row->forwards, (long long)row->phase_ns[SW_PHASE_DATA]);
    check(total(row) == row->ended_ns - row->begun_ns, "phases tile a step of two backwards");

    int64_t slept_ns = sw_clock_now_ns();
    sw_thread_sleep_ns(7 * ms);
    sw_account_slept(slept_ns, 0, 0);
    check(sw_account_stepped() == 0 && atomic_load(&sw_account_get()->head.steps) == 2,
          "a second optimizer belongs to the same step");
    check(row->phase_ns[SW_PHASE_OPTIMIZER] >= 7 * ms, "its time is the optimizer's");
    check(row->wait_ns[SW_PHASE_OPTIMIZER] >= 7 * ms && row->wait_ns[SW_PHASE_DATA] == 0,
          "and so are its waits");
    check(total(row) == row->ended_ns - row->begun_ns, "phases tile a step of two optimizers");
}

static void check_saves_and_waits(void)
{
    sw_account_call("Checkpointer.save()", true);
    sw_thread_sleep_ns(7 * ms);
    int64_t begun_ns = sw_clock_now_ns();
    sw_thread_sleep_ns(3 * ms);
    sw_account_slept(begun_ns, 1, 0);
    sw_account_call_end();
    sw_account_enter(SW_PHASE_FORWARD);
    for (int i = 0; i < 3; ++i) {
        begun_ns = sw_clock_now_ns();
        sw_thread_sleep_ns(3 * ms);
        check(sw_account_slept(begun_ns, i == 2 ? 0 : 3, 4711) >= 3 * ms, "sleep");
    }
    check(atomic_load(&sw_account_get()->head.wait_pid) == 4711, "the awaited process");
    run_step(0);
    const sw_account_row *row = last_row();
    check(row->phase_ns[SW_PHASE_SAVE] >= 10 * ms && row->wait_ns[SW_PHASE_SAVE] >= 3 * ms, "save");
    check(row->phase_ns[SW_PHASE_DATA] < 7 * ms, "a save is no data");
    check(row->wait_ns[SW_PHASE_FORWARD] >= 9 * ms, "waits by phase");
    check(row->late_rank == 3 && row->late_ns >= 6 * ms, "rank %d was late by %lld ns",
          row->late_rank, (long long)row->late_ns);
    run_step(0);
    check(last_row()->late_rank == -1 && last_row()->wait_ns[SW_PHASE_FORWARD] == 0,
          "waits of one step are not the next one's");
}

static const sw_account_op *op_of(uint64_t serial)
{
    return &sw_account_get()->operations[(serial - 1) % SW_ACCOUNT_OPS];
}

static void check_operations(void)
{
    uint64_t serial = sw_account_begin(1,
                                       "bucket 0 of a model whose name is longer than an entry "
                                       "has bytes for, by far",
                                       4, 1024, 7, 2);
    const sw_account_op *op = op_of(serial);
    sw_account_post(serial);
    sw_account_post(serial);
    sw_account_done(serial);
    check(atomic_load(&op->posted) == 2 && atomic_load(&op->done) == 1, "one part is not done");
    sw_account_done(serial);
    check(op->done == 2 && op->done_ns >= op->posted_ns && op->step == 7, "both are");
    check(strncmp((const char *)op->label, "bucket 0 of", 11) == 0 &&
              strlen((const char *)op->label) == sizeof op->label - 1,
          "the label '%s'", (const char *)op->label);
    for (int i = 0; i < SW_ACCOUNT_OPS; ++i)
        sw_account_begin(0, "barrier", 4, 0, 0, 0);
    check(atomic_load(&op_of(serial)->serial) == serial + SW_ACCOUNT_OPS, "the ring");
    sw_account_done(serial);
    check(atomic_load(&op_of(serial)->done) == 0, "an entry that is gone is not changed");
}

/* Read the file as another program would. */
static sw_account *map_file(const char *path)
{
    struct stat found;
    int fd = open(path, O_RDONLY);
    check(fd >= 0 && fstat(fd, &found) == 0, "the file");
    check((found.st_mode & 07777) == 0600 && found.st_size == (off_t)sizeof(sw_account),
          "mode %o, %lld bytes", found.st_mode & 07777, (long long)found.st_size);
    void *mapped = mmap(NULL, sizeof(sw_account), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    return mapped == MAP_FAILED ? NULL : mapped;
}

static void check_file(void)
{
    char path[256], none[256];
    sw_error err;
    snprintf(path, sizeof path, "%s/rank-2", folder);
    snprintf(none, sizeof none, "%s/none/rank-2", folder);
    uint64_t steps = atomic_load(&sw_account_get()->head.steps);
    check(sw_account_open(none, 2, 4, "host", &err) == SW_E_OS, "no folder");
    check(run_step(0) == steps + 1, "an account without a file goes on");
    umask(0777);
    pid_t child = fork();
    if (child == 0) {
        sw_account_forget();
        if (sw_account_open(path, 2, 4, "host", &err) != SW_OK)
            _exit(1);
        for (int i = 0; i < 3; ++i)
            run_step(0);
        sw_account_fail("rank 1 died");
        sw_account_fail("a later error");
        sw_account_call("sw.save()", true);
        if (fork() == 0) { /* a worker of a data loader */
            sw_account_forget();
            sw_account_enter(SW_PHASE_BACKWARD);
            _exit(0);
        }
        wait(NULL);
        kill(getpid(), SIGKILL);
    }
    int status;
    waitpid(child, &status, 0);
    check(WIFSIGNALED(status), "the child ended with %d", status);
    const sw_account *left = map_file(path);
    if (!left)
        return;
    check(strcmp(left->head.magic, "swstep") == 0 && left->head.version == SW_ACCOUNT_VERSION,
          "mark");
    check(left->head.pid == child && left->head.rank == 2 && left->head.world_size == 4, "who");
    check(left->head.start_ticks > 0, "since when");
    check(left->head.steps == 3 && row_of(left, 3)->step == 3, "%llu steps",
          (unsigned long long)left->head.steps);
    check(strcmp((const char *)left->head.reason.words, "rank 1 died") == 0, "the first error");
    check(left->head.phase == SW_PHASE_SAVE && left->head.call.begun_ns > 0, "the call");
    check(sw_account_open(path, 2, 4, "host", &err) == SW_E_OS,
          "a file that is there is not taken");
    munmap((void *)(uintptr_t)left, sizeof *left);
    snprintf(path, sizeof path, "%s/rank-0", folder);
    steps = atomic_load(&sw_account_get()->head.steps);
    check(sw_account_open(path, 0, 4, "host", &err) == SW_OK, "open");
    check(atomic_load(&sw_account_get()->head.steps) == steps && last_row()->step == steps,
          "rows of before go with it");
}

static _Atomic bool stops;

static void *write_rows(void *unused)
{
    while (!atomic_load(&stops))
        run_step(0);
    return unused;
}

/* A row that was read whole by its number tiles its step. */
static void check_reader(void)
{
    pthread_t writer;
    int taken = 0;
    if (pthread_create(&writer, NULL, write_rows, NULL) != 0)
        return;
    for (int turn = 0; taken < 20000 && turn < 100 * 1000 * 1000; ++turn) {
        sw_account_row copy;
        uint64_t step = atomic_load(&sw_account_get()->head.steps);
        const sw_account_row *row = row_of(sw_account_get(), step);
        uint64_t before = atomic_load_explicit(&row->step, memory_order_acquire);
        memcpy((void *)&copy, (const void *)row, sizeof copy);
        atomic_thread_fence(memory_order_acquire);
        if (before != step || atomic_load(&row->step) != step)
            continue;
        taken++;
        if (total(&copy) != copy.ended_ns - copy.begun_ns)
            check(false, "half a row was taken for a row");
    }
    atomic_store(&stops, true);
    pthread_join(writer, NULL);
    check(taken == 20000, "%d rows were read", taken);
    check(atomic_load(&sw_account_get()->head.steps) > SW_ACCOUNT_ROWS || taken > 0, "the ring");
}

int main(void)
{
    char command[64];
    if (!mkdtemp(folder))
        return 1;
    check_phases();
    check_saves_and_waits();
    check_operations();
    check_file();
#if !defined(__SANITIZE_THREAD__) /* the copy of a row that is then refused is a race on purpose \
                                   */
    check_reader();
#endif
    for (uint64_t step = 0; step < SW_ACCOUNT_ROWS + 2; ++step)
        run_step(0);
    uint64_t steps = atomic_load(&sw_account_get()->head.steps);
    check(last_row()->step == steps &&
              row_of(sw_account_get(), steps + 1)->step == steps + 1 - SW_ACCOUNT_ROWS,
          "the ring has the last rows");
    snprintf(command, sizeof command, "%s/rank-0", folder);
    unlink(command);
    snprintf(command, sizeof command, "%s/rank-2", folder);
    unlink(command);
    check(rmdir(folder) == 0, "nothing else is left");
    return check_result();
}
