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
    sw_account_slept(sw_clock_now_ns() - 40 * ms, 1, 0);
    check(run_step(5 * ms) == 1, "the first step");
    const sw_account_row *row = last_row();
    check(row->phase_ns[SW_PHASE_DATA] == 0, "data before the first forward");
    check(row->wait_ns[SW_PHASE_DATA] == 0 && row->late_rank == -1, "a wait before it");
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

static void check_closures(void)
{
    uint64_t steps = atomic_load(&sw_account_get()->head.steps);
    sw_account_stepping();
    for (int i = 0; i < 2; ++i) { /* the optimizer evaluates its closure twice */
        sw_account_enter(SW_PHASE_FORWARD);
        sw_thread_sleep_ns(3 * ms);
        sw_account_enter(SW_PHASE_BACKWARD);
        sw_account_enter(SW_PHASE_OPTIMIZER);
    }
    check(sw_account_stepped() == steps + 1, "a step that runs forwards itself");
    check(last_row()->forwards == 2 && last_row()->phase_ns[SW_PHASE_FORWARD] >= 6 * ms, "two");
    sw_account_enter(SW_PHASE_FORWARD);
    check(sw_account_stepped() == 0, "another optimizer's step after a forward");
}

static void check_saves_and_waits(void)
{
    sw_account_call("Checkpointer.save()", true);
    int64_t called_ns = sw_clock_now_ns();
    sw_thread_sleep_ns(7 * ms);
    int64_t begun_ns = sw_clock_now_ns();
    sw_thread_sleep_ns(3 * ms);
    sw_account_slept(begun_ns, 1, 0);
    int64_t save_ns = sw_clock_now_ns() - called_ns;
    sw_account_call_end();
    sw_account_enter(SW_PHASE_FORWARD);
    int64_t slept_ns[2] = {0, 0}; /* for rank 3, for rank 0 */
    for (int i = 0; i < 3; ++i) {
        begun_ns = sw_clock_now_ns();
        sw_thread_sleep_ns(3 * ms);
        int64_t ns = sw_account_slept(begun_ns, i == 2 ? 0 : 3, -1);
        check(ns >= 3 * ms, "sleep");
        slept_ns[i / 2] += ns;
    }
    int late = slept_ns[1] > slept_ns[0]; /* a busy machine sleeps longer */
    check(atomic_load(&sw_account_get()->head.wait_group) == (uint32_t)-1, "the group of the wait");
    run_step(0);
    const sw_account_row *row = last_row();
    check(row->phase_ns[SW_PHASE_SAVE] >= 10 * ms && row->wait_ns[SW_PHASE_SAVE] >= 3 * ms, "save");
    check(row->phase_ns[SW_PHASE_DATA] + save_ns <= total(row), "a save is no data");
    check(row->wait_ns[SW_PHASE_FORWARD] >= 9 * ms, "waits by phase");
    check(row->late_rank == (late ? 0 : 3) && row->late_ns == slept_ns[late],
          "rank %d was late by %lld ns", row->late_rank, (long long)row->late_ns);
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
    sw_account_use use = {.group = 3, .link = SW_LINK_SHARED_MEMORY, .number = 9};
    uint64_t serial = sw_account_begin(&use, 1,
                                       "bucket 0 of a model whose name is longer than an entry "
                                       "has bytes for, by far",
                                       1024, 7, 2);
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
    check(op->group == 3 && op->number == 9 && op->kind == 1, "which of its group's");
    sw_account_moved(SW_LINK_TCP, 70);
    sw_account_moved(SW_LINK_NCCL, 5);
    sw_account_moved(SW_LINK_TCP, 7);
    run_step(0);
    check(last_row()->size_bytes == 1024 && last_row()->link_bytes[0] == 1024 &&
              last_row()->link_bytes[1] == 77 && last_row()->link_bytes[2] == 5,
          "bytes by link");
    run_step(0);
    check(last_row()->size_bytes == 0 && last_row()->link_bytes[1] == 0, "of that step alone");
    for (int i = 0; i < SW_ACCOUNT_OPS; ++i)
        sw_account_begin(&use, 0, "barrier", 0, 0, 0);
    check(atomic_load(&op_of(serial)->serial) == serial + SW_ACCOUNT_OPS, "the ring");
    sw_account_done(serial);
    check(atomic_load(&op_of(serial)->done) == 0, "an entry that is gone is not changed");
}

static void check_groups(void)
{
    const sw_account_head *head = &sw_account_get()->head;
    sw_account_group group = {.id = 11, .ranks = {5}};
    check(sw_account_met(&group, true) == 1 && head->group == 11, "the first group");
    group.id = 12;
    check(sw_account_met(&group, false) == 2 && head->group == 11, "another one beside it");
    group.id = 11;
    group.ranks[0] = 7;
    check(sw_account_met(&group, true) == 1 && head->groups[0].ranks[0] == 7, "the same again");
    check(sw_account_end() && head->ended == 1, "it has left");
    sw_account_met(&group, true);
    check(head->ended == 0, "and joined again");
    check(sw_account_end() && run_step(0) > 0 && head->ended == 0, "or steps without it");
    for (uint64_t id = 100; id < 100 + SW_ACCOUNT_GROUPS; ++id) {
        group.id = id;
        int number = sw_account_met(&group, false);
        check(number == (id < 114 ? (int)(id - 100) + 3 : 0), "group %d", number);
    }
    check(head->group_count == SW_ACCOUNT_GROUPS, "sixteen are kept");
    check(sw_account_met(&group, true) == SW_ACCOUNT_GROUPS && head->group == group.id &&
              head->groups[SW_ACCOUNT_GROUPS - 1].id == group.id,
          "the group that leads is kept");
    group = (sw_account_group){.id = 11, .ranks = {12}};
    check(sw_account_met(&group, false) == 1, "ranks 2 and 3");
    run_step(0);
    sw_account_slept(sw_clock_now_ns() - 7 * ms, 1, 1);
    run_step(0);
    check(last_row()->late_rank == 3, "rank 1 of them is rank 3 of the job, not %d",
          last_row()->late_rank);
}

/* What a process has counted since its last row is not its child's. */
static void check_forgets(void)
{
    sw_account_moved(SW_LINK_NCCL, 3);
    sw_account_use use = {.group = 1};
    sw_account_begin(&use, 0, "barrier", 4096, 0, 0);
    sw_account_slept(sw_clock_now_ns() - 7 * ms, 5, 0);
    pid_t child = fork();
    if (child == 0) {
        sw_account_forget();
        run_step(0);
        const sw_account_row *row = last_row();
        _exit(row->step == 1 && row->late_rank == -1 && row->late_ns == 0 && row->size_bytes == 0 &&
                      row->link_bytes[2] == 0 && sw_account_get()->head.group_count == 0
                  ? 0
                  : 1);
    }
    int status;
    waitpid(child, &status, 0);
    check(status == 0, "a child's first row has its parent's counts");
    run_step(0);
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
    check_closures();
    check_saves_and_waits();
    check_operations();
    check_groups();
    check_forgets();
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
