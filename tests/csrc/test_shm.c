/* test_shm.c - the host communicator among processes: hundreds of ranks of an ordinary user with
 * few descriptors, ranks that die at every moment, and ranks that have no descriptor left.
 *
 * Laws: 192 ranks of uid 65534 join within 3 s under ulimit -n 1024 and 256; where W is more than
 * the limit allows, the first rank says so and the others hear of it at once; sums over private
 * memory and arenas are right; a rank that is killed is named on every other within a second. A
 * rank holds as many descriptors as docs/design/comm.md says, and looks at all ranks for the first
 * time without a page fault for each. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"
#include "platform/clock.h"
#include "processes.h"

/* A process under the address sanitizer has ten times the pages, and shadow pages have faults, too.
 */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MANY = 24, FAULTS = 256 };
#else
enum { MANY = 192, FAULTS = 64 };
#endif
enum { FEW = 5, NUMEL = 1000, SECOND_MS = 1000, JOB_S = 60 };

static const int64_t timeout_ns = INT64_C(30) * 1000000000;

typedef enum figure { JOINED_S = 0, OPEN_FILES, NAMED_S, NAMED_RANK, PAGE_FAULTS } figure;

static double seconds_since(int64_t begun_ns)
{
    return (double)(sw_clock_now_ns() - begun_ns) * 1e-9;
}

static long count_page_faults(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_minflt : 0;
}

static int count_open_files(void)
{
    int count = -3; /* ".", ".." and the folder's own */
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count;
}

static sw_op sum_of(const sw_arena *arena, void *data)
{
    return (sw_op){.kind = SW_OP_ALL_REDUCE,
                   .dtype = SW_DTYPE_FLOAT32,
                   .redop = SW_REDOP_SUM,
                   .numel = NUMEL,
                   .arena = arena,
                   .data = data,
                   .label = "sum"};
}

static void fill(float *data, int rank)
{
    for (int i = 0; i < NUMEL; ++i)
        data[i] = (float)(rank + i % 7);
}

static bool is_sum(const float *data, int world_size)
{
    for (int i = 0; i < NUMEL; ++i)
        if (data[i] != (float)(world_size * (world_size - 1) / 2 + i % 7 * world_size))
            return false;
    return true;
}

static sw_status fail_unless(bool ok, const char *what, sw_error *err)
{
    return ok ? SW_OK : sw_error_set(err, SW_E_STATE, -1, "%s", what);
}

/* A sum over private memory, and one over an arena that goes again. */
static sw_status reduce(process_rank *self)
{
    sw_comm *comm = self->comm;
    sw_arena *arena;
    float data[NUMEL];
    sw_op op = sum_of(NULL, data);
    fill(data, self->rank);
    SW_TRY(comm->ops->run(comm, &op, self->err));
    SW_TRY(fail_unless(is_sum(data, self->world_size), "a sum over private memory", self->err));
    SW_TRY(comm->ops->arena_create(comm, sizeof data, "an arena", &arena, self->err));
    float *own = (float *)(void *)arena->base[self->rank];
    fill(own, self->rank);
    op = sum_of(arena, NULL);
    sw_status status = comm->ops->run(comm, &op, self->err);
    if (status == SW_OK)
        status = fail_unless(is_sum(own, self->world_size), "a sum over an arena", self->err);
    process_meet(self); /* nobody takes memory away that another looks at */
    comm->ops->arena_destroy(comm, arena);
    return status;
}

static sw_status wait_at_barrier(process_rank *self)
{
    sw_op op = {.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8, .label = "after"};
    return self->comm->ops->run(self->comm, &op, self->err);
}

/* ---- many ranks ---- */

typedef struct crowd {
    int victim; /* -1: nobody dies */
} crowd;

static void join_reduce_and_die(process_rank *self)
{
    const crowd *given = self->given;
    double *figures = self->board->outcome[self->rank].figure;
    int before = count_open_files();
    int64_t begun_ns = sw_clock_now_ns();
    if (process_join(self, timeout_ns) != SW_OK)
        return;
    figures[JOINED_S] = seconds_since(begun_ns);
    figures[OPEN_FILES] = count_open_files() - before;
    long faults = count_page_faults();
    if (wait_at_barrier(self) != SW_OK)
        return;
    figures[PAGE_FAULTS] = (double)(count_page_faults() - faults);
    if (reduce(self) != SW_OK || given->victim < 0)
        return;
    process_meet(self);
    if (self->rank == given->victim) {
        atomic_store(&self->board->stamp_ns, sw_clock_now_ns());
        (void)kill(getpid(), SIGKILL);
    }
    sw_error named = {.status = SW_OK};
    (void)!wait_at_barrier(self);
    named = *self->err;
    figures[NAMED_S] = seconds_since(atomic_load(&self->board->stamp_ns));
    figures[NAMED_RANK] = named.status == SW_E_COMM ? named.detail : -1;
    self->err->status = SW_OK;
}

/* What other programs run takes its share: the limit holds for a machine with two idle cores. */
static double loaded(double limit_s)
{
    int running = 1;
    FILE *file = fopen("/proc/loadavg", "r");
    if (file && fscanf(file, "%*f %*f %*f %d", &running) != 1)
        running = 1;
    if (file)
        fclose(file);
    return limit_s * (1 + running / 2.0);
}

static double highest(const process_board *board, int world_size, figure which)
{
    double found = 0;
    for (int r = 0; r < world_size; ++r)
        found = board->outcome[r].figure[which] > found ? board->outcome[r].figure[which] : found;
    return found;
}

static void test_crowd(int world_size, long open_files, int victim)
{
    crowd given = {.victim = victim};
    double wall_s, cpu_s, join_limit_s = loaded(3), name_limit_s = loaded(1);
    process_job job = {.world_size = world_size,
                       .uid = processes_can_change_user() ? PROCESSES_NOBODY : 0,
                       .open_files = open_files,
                       .limit_s = JOB_S,
                       .body = join_reduce_and_die,
                       .given = &given};
    process_board *board = processes_run(&job, &wall_s, &cpu_s);
    double joined_s = highest(board, world_size, JOINED_S);
    for (int r = 0; r < world_size; ++r) {
        const process_outcome *o = &board->outcome[r];
        if (r == victim)
            continue;
        check(o->has_ended && o->err.status == SW_OK, "%d ranks, rank %d: %s", world_size, r,
              o->err.message);
        check(o->figure[OPEN_FILES] == (r == 0 ? world_size : 2), "rank %d holds %g descriptors", r,
              o->figure[OPEN_FILES]);
        check(victim < 0 || o->figure[NAMED_RANK] == victim, "%d ranks, rank %d heard of: %s",
              world_size, r, o->err.message);
    }
    check(joined_s < join_limit_s, "%d ranks joined after %.2f s, not %.2f", world_size, joined_s,
          join_limit_s);
    double faults = highest(board, world_size, PAGE_FAULTS),
           faults_limit = FAULTS + world_size / 16.0;
    check(faults <= faults_limit, "the first barrier of %d ranks took %g page faults, not %g",
          world_size, faults, faults_limit);
    double named_s = highest(board, world_size, NAMED_S);
    check(named_s < name_limit_s, "of %d ranks the last named the dead one after %.2f s, not %.2f",
          world_size, named_s, name_limit_s);
    printf(
        "%d ranks, uid %d, ulimit -n %ld: joined after %.2f s, named after %.2f s; at most %g page "
        "faults in the first barrier; %.2f s in all, %.2f s of processors\n",
        world_size, job.uid, open_files, joined_s, named_s, faults, wall_s, cpu_s);
    processes_free(board);
}

/* One more rank than the first can hold connections to. */
static void test_too_many(void)
{
    crowd given = {.victim = -1};
    double wall_s;
    process_job job = {.world_size = MANY,
                       .uid = processes_can_change_user() ? PROCESSES_NOBODY : 0,
                       .open_files = MANY,
                       .limit_s = JOB_S,
                       .body = join_reduce_and_die,
                       .given = &given};
    process_board *board = processes_run(&job, &wall_s, NULL);
    check(board->outcome[0].err.status == SW_E_MEMORY &&
              strstr(board->outcome[0].err.message, "ulimit -n"),
          "the first rank says what it lacks: %s", board->outcome[0].err.message);
    for (int r = 1; r < MANY; ++r)
        check(board->outcome[r].err.status == SW_E_COMM && board->outcome[r].err.detail == 0,
              "rank %d: %s", r, board->outcome[r].err.message);
    check(wall_s < loaded(10), "they all knew after %.1f s", wall_s);
    processes_free(board);
}

/* ---- no descriptor left ---- */

/* Not one more than there are, and `more`. */
static void leave_open(int more)
{
    struct rlimit limit;
    int lowest = dup(0);
    close(lowest);
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = (rlim_t)(lowest + more);
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}

/* Room for the connection, and none for what comes through it. */
static void join_without_room(process_rank *self)
{
    if (process_listen(self, timeout_ns) != SW_OK)
        return;
    if (self->rank == 2)
        leave_open(1);
    (void)!process_connect(self);
}

static void create_arena_without_room(process_rank *self)
{
    sw_arena *arena;
    struct rlimit before;
    if (process_join(self, timeout_ns) != SW_OK)
        return;
    (void)getrlimit(RLIMIT_NOFILE, &before);
    int poor = *(const int *)self->given;
    if (self->rank == poor)
        leave_open(0);
    sw_status status =
        self->comm->ops->arena_create(self->comm, 4096, "no room", &arena, self->err);
    (void)setrlimit(RLIMIT_NOFILE, &before);
    if (status == SW_OK)
        sw_error_set(self->err, SW_E_STATE, -1, "an arena without a descriptor");
    else if (status == SW_E_MEMORY && self->err->detail == poor &&
             strstr(self->err->message, "ulimit -n"))
        self->err->status = reduce(self); /* it goes on */
}

static void test_no_room(void)
{
    process_job job = {.world_size = FEW, .limit_s = JOB_S, .body = join_without_room};
    double wall_s;
    process_board *board = processes_run(&job, &wall_s, NULL);
    for (int r = 0; r < FEW; ++r) {
        const sw_error *err = &board->outcome[r].err;
        bool names = strstr(err->message, "ulimit -n") && strstr(err->message, "rank 2");
        /* One that calls after the first rank has failed is not answered any more. */
        bool is_late = r != 0 && strstr(err->message, "calling rank 0 failed");
        check(r == 2 ? err->status == SW_E_MEMORY && strstr(err->message, "ulimit -n")
                     : err->status == SW_E_COMM && (names || is_late),
              "joining without room for an fd message, rank %d: %s", r, err->message);
    }
    check(wall_s < loaded(5), "all ranks knew after %.1f s", wall_s);
    processes_free(board);
    for (int poor = 0; poor < FEW; poor += 2) {
        job = (process_job){
            .world_size = FEW, .limit_s = JOB_S, .body = create_arena_without_room, .given = &poor};
        board = processes_run(&job, NULL, NULL);
        for (int r = 0; r < FEW; ++r)
            check(board->outcome[r].has_ended && board->outcome[r].err.status == SW_OK,
                  "an arena without room on rank %d, rank %d: %s", poor, r,
                  board->outcome[r].err.message);
        processes_free(board);
    }
}

/* ---- a death at any moment ---- */

typedef struct death {
    int victim, after_us;
    bool joins; /* while it joins; else while arenas are made */
} death;

static void die_soon(const process_rank *self, bool joins)
{
    const death *given = self->given;
    if (self->rank != given->victim || given->joins != joins || fork() != 0)
        return;
    pid_t parent = getppid();
    (void)usleep((useconds_t)given->after_us);
    (void)kill(parent, SIGKILL);
    _exit(0);
}

static void die_at_a_moment(process_rank *self)
{
    const death *given = self->given;
    sw_arena *arena;
    sw_status status = process_listen(self, timeout_ns);
    die_soon(self, true);
    if (status == SW_OK)
        status = process_connect(self);
    die_soon(self, false);
    int64_t begun_ns = sw_clock_now_ns();
    while (status == SW_OK && seconds_since(begun_ns) < 20) {
        status = self->comm->ops->arena_create(self->comm, 8192, "again", &arena, self->err);
        if (status == SW_OK)
            self->comm->ops->arena_destroy(self->comm, arena);
    }
    if (self->rank == given->victim)
        (void)pause();
}

static void test_deaths(void)
{
    int turns = getenv("SW_TEST_LONG") ? 60 : 8;
    for (int joins = 0; joins < 2; ++joins)
        for (int turn = 0; turn < turns; ++turn) {
            death given = {.victim = turn % FEW,
                           .after_us = turn * turn * (joins ? 40 : 150) % 4000,
                           .joins = joins};
            double wall_s;
            process_job job = {
                .world_size = FEW, .limit_s = JOB_S, .body = die_at_a_moment, .given = &given};
            process_board *board = processes_run(&job, &wall_s, NULL);
            for (int r = 0; r < FEW; ++r) {
                const process_outcome *o = &board->outcome[r];
                /* Of a rank that has not joined yet the first one alone hears; it fails then. */
                bool names = o->err.status == SW_E_COMM &&
                             (o->err.detail == given.victim || (joins && o->err.detail == 0));
                if (r != given.victim)
                    check(o->has_ended && names, "rank %d died after %d us, rank %d heard: %s",
                          given.victim, given.after_us, r, o->err.message);
            }
            check(wall_s < loaded(10), "a death after %d us: %.1f s", given.after_us, wall_s);
            processes_free(board);
        }
}

int main(void)
{
    bool is_long = getenv("SW_TEST_LONG") != NULL;
    if (!processes_can_change_user())
        printf("not root: ranks are of this user, uid %d\n", (int)getuid());
    test_crowd(MANY, 1024, MANY / 2);
    test_crowd(MANY, 256, MANY - 1);
    test_crowd(MANY, 1024, 0);
    if (MANY > 100) {
        test_crowd(256, 1024, 255);
        if (is_long)
            test_crowd(512, 1024, 17);
    }
    test_too_many();
    test_no_room();
    test_deaths();
    return check_result();
}
