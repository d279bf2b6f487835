/* processes.h - ranks as processes, without Python: a job of a user with a limit on descriptors.
 *
 * The ranks of a job are forked by one process, which first becomes that user. They meet, and leave
 * what they found, on a board of shared memory. A job whose ranks do not end in time is killed.
 * Thread rule: owner only.
 */
#ifndef SW_TEST_PROCESSES_H
#define SW_TEST_PROCESSES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "comm/shm.h"

enum { PROCESSES_MAX = 1024, PROCESSES_FIGURES = 5, PROCESSES_NOBODY = 65534 };

typedef struct process_outcome {
    bool has_ended;                   /* its body has returned */
    sw_error err;                     /* of its communicator */
    double figure[PROCESSES_FIGURES]; /* the body's to fill */
} process_outcome;

typedef struct process_board {
    _Atomic uint32_t met, wait_for; /* futex words */
    _Atomic int64_t stamp_ns;       /* a body's */
    int32_t pid[PROCESSES_MAX];
    char address[PROCESSES_MAX][SW_SOCKET_NAME_BYTES];
    process_outcome outcome[PROCESSES_MAX];
} process_board;

typedef struct process_rank {
    int rank, world_size;
    process_board *board;
    const void *given;
    sw_comm *comm; /* owned by the body's caller; NULL until process_join */
    sw_error *err; /* of its outcome */
    uint32_t meetings;
} process_rank;

typedef struct process_job {
    int world_size;
    int uid;         /* 0: stay who we are */
    long open_files; /* RLIMIT_NOFILE; 0: as it is */
    int limit_s;
    void (*body)(process_rank *self);
    const void *given;
} process_job;

/* Runs it to its end; *cpu_s is what all ranks have used of the processors. The board is the
 * caller's until processes_free. */
process_board *processes_run(const process_job *job, double *wall_s, double *cpu_s);
void processes_free(process_board *board);

/* Whether this process may become another user. */
bool processes_can_change_user(void);

/* Waits for all ranks of the job. */
void process_meet(process_rank *self);
/* Creates the communicator, and waits until all have. */
sw_status process_listen(process_rank *self, int64_t timeout_ns);
sw_status process_connect(process_rank *self);
/* Both. */
sw_status process_join(process_rank *self, int64_t timeout_ns);

#endif
