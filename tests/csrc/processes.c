/* processes.c - see processes.h. */
#include "processes.h"

#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <signal.h>

#include "check.h"
#include "platform/clock.h"
#include "platform/futex.h"

enum { SLICE_NS = 50000000 };
static const uint8_t secret[SW_SHM_SECRET_BYTES] = "fifteen letters";

bool processes_can_change_user(void)
{
    return geteuid() == 0;
}

void process_meet(process_rank *self)
{
    process_board *board = self->board;
    uint32_t all = (uint32_t)self->world_size * ++self->meetings, seen;
    if (atomic_fetch_add(&board->met, 1) + 1 == all)
        sw_futex_wake_all(&board->met);
    while ((int32_t)((seen = atomic_load(&board->met)) - all) < 0)
        sw_futex_wait(&board->met, seen, SLICE_NS);
}

sw_status process_listen(process_rank *self, int64_t timeout_ns)
{
    sw_status status = sw_shm_comm_create(self->rank, self->world_size, "here", &self->comm,
                                          self->board->address[self->rank], self->err);
    if (status == SW_OK)
        self->comm->timeout_ns = timeout_ns;
    process_meet(self);
    return status;
}

sw_status process_connect(process_rank *self)
{
    const char **all = malloc((size_t)self->world_size * sizeof *all);
    for (int r = 0; all && r < self->world_size; ++r)
        all[r] = self->board->address[r];
    sw_status status = all ? sw_shm_comm_connect(self->comm, all, secret, self->err) : SW_E_MEMORY;
    free(all);
    return status;
}

sw_status process_join(process_rank *self, int64_t timeout_ns)
{
    SW_TRY(process_listen(self, timeout_ns));
    return process_connect(self);
}

static void run_rank(const process_job *job, process_board *board, int rank)
{
    process_rank self = {.rank = rank,
                         .world_size = job->world_size,
                         .board = board,
                         .given = job->given,
                         .err = &board->outcome[rank].err};
    self.err->status = SW_OK;
    job->body(&self);
    if (self.comm)
        self.comm->ops->destroy(self.comm);
    board->outcome[rank].has_ended = true;
}

static void become(const process_job *job)
{
    struct rlimit limit = {.rlim_cur = (rlim_t)job->open_files,
                           .rlim_max = (rlim_t)job->open_files};
    if ((job->open_files && setrlimit(RLIMIT_NOFILE, &limit) != 0) ||
        (job->uid && (setgroups(0, NULL) != 0 || setgid((gid_t)job->uid) != 0 ||
                      setuid((uid_t)job->uid) != 0))) {
        perror("a job of another user");
        _exit(1);
    }
}

/* Forks the ranks, and kills those that are late. */
static void run_job(const process_job *job, process_board *board)
{
    int64_t deadline_ns = sw_clock_now_ns() + job->limit_s * INT64_C(1000000000);
    int left = 0;
    become(job);
    for (int r = 0; r < job->world_size; ++r) {
        pid_t pid = fork();
        if (pid == 0) {
            run_rank(job, board, r);
            _exit(0);
        }
        if (pid < 0) {
            perror("fork");
            deadline_ns = 0;
            break;
        }
        board->pid[r] = (int32_t)pid;
        left++;
    }
    while (left > 0) {
        left -= waitpid(-1, NULL, WNOHANG) > 0;
        if (sw_clock_now_ns() < deadline_ns) {
            (void)usleep(500);
            continue;
        }
        for (int r = 0; r < job->world_size; ++r)
            if (board->pid[r] && !board->outcome[r].has_ended)
                (void)kill(board->pid[r], SIGKILL);
    }
    _exit(0);
}

static double seconds_of(struct timeval a, struct timeval b)
{
    return (double)(a.tv_sec + b.tv_sec) + (double)(a.tv_usec + b.tv_usec) * 1e-6;
}

process_board *processes_run(const process_job *job, double *wall_s, double *cpu_s)
{
    process_board *board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct rusage before, after;
    int status = 1;
    if (board == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    int64_t begun_ns = sw_clock_now_ns();
    getrusage(RUSAGE_CHILDREN, &before);
    pid_t pid = fork();
    if (pid == 0)
        run_job(job, board);
    check(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0, "a job of %d ranks ran",
          job->world_size);
    getrusage(RUSAGE_CHILDREN, &after);
    if (wall_s)
        *wall_s = (double)(sw_clock_now_ns() - begun_ns) * 1e-9;
    if (cpu_s)
        *cpu_s = seconds_of(after.ru_utime, after.ru_stime) -
                 seconds_of(before.ru_utime, before.ru_stime);
    return board;
}

void processes_free(process_board *board)
{
    munmap(board, sizeof *board);
}
