/* account.h - the account of a rank's steps: where the time went, and in which collective it is.
 *
 * Idea: the engine reads the clock at events that it sees anyway and stores the result in two
 * rings. They lie in a file that the rank maps (sw_account_open), or in plain memory until then, so
 * there always is an account, and a dead process leaves its file. docs/design/account.md defines
 * the phases. The structs below are the file's format: any change is a new SW_ACCOUNT_VERSION.
 *
 * Nothing here waits, and nothing fails but sw_account_open. Cost of an event: a clock read and a
 * few stores.
 *
 * Thread rule: phases and texts with the GIL held; collectives and waits from any thread. One
 * account a process. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
    SW_ACCOUNT_VERSION = 2,
    SW_ACCOUNT_ROWS = 10000,
    SW_ACCOUNT_OPS = 1000,
    SW_ACCOUNT_RANKS = 1024, /* that a wait can be for */
    SW_ACCOUNT_GROUPS = 16,  /* that are kept by their ranks */
};

typedef enum sw_link { /* how bytes reach peers */
                       SW_LINK_NONE = 0,
                       SW_LINK_SHARED_MEMORY, /* sizes of buffers given to collectives between ranks
                                                 of a host */
                       SW_LINK_TCP, /* bytes that this rank sent to other hosts: it is their carrier
                                     */
                       SW_LINK_NCCL, /* sizes of buffers given to NCCL */
                       SW_LINK_COUNT,
} sw_link;

typedef enum sw_phase {
    SW_PHASE_DATA = 0, /* from the end of a step, or of a backward without one, to a forward */
    SW_PHASE_FORWARD,
    SW_PHASE_BACKWARD,
    SW_PHASE_OPTIMIZER,
    SW_PHASE_SAVE,
    SW_PHASE_COUNT,
} sw_phase;

typedef struct sw_account_row { /* 152 bytes; times in nanoseconds */
    _Atomic uint64_t step;      /* from 1; written last. 0: being written */
    int64_t begun_ns, ended_ns; /* of the monotonic clock */
    int64_t phase_ns[SW_PHASE_COUNT];
    int64_t wait_ns[SW_PHASE_COUNT]; /* asleep for peers, a part of phase_ns */
    int64_t late_ns;                 /* the part of it for `late_rank` */
    int32_t late_rank;               /* the rank of the job waited for longest; -1: none */
    uint32_t forwards;
    uint64_t size_bytes; /* of the buffers of collectives between hosts' memories that began */
    uint64_t link_bytes[SW_LINK_COUNT - 1]; /* by sw_link, from SHARED_MEMORY on */
} sw_account_row;

typedef struct sw_account_op {          /* 128 bytes: a collective */
    _Atomic uint64_t serial;            /* from 1; written last. 0: being written */
    _Atomic int64_t posted_ns, done_ns; /* done_ns: of the last part that was done here */
    _Atomic uint32_t posted, done;      /* its parts; done here once both are equal */
    _Atomic uint16_t kind, group;       /* sw_op_kind; the number of its group, 0: not kept */
    _Atomic uint32_t number;            /* of the collectives of its communicator, from 1 */
    _Atomic uint32_t step, round;
    _Atomic uint64_t size_bytes;
    _Atomic uint64_t label[9]; /* text, ended by a zero */
} sw_account_op;

typedef struct sw_account_text { /* a name or a sentence that is on, ended by a zero */
    int64_t begun_ns;            /* 0: none */
    _Atomic uint64_t words[63];
} sw_account_text;

typedef struct sw_account_group {          /* ranks that have met */
    uint64_t id;                           /* equal on them */
    uint64_t ranks[SW_ACCOUNT_RANKS / 64]; /* bit r: rank r of the job is one; later ranks: none */
} sw_account_group;

typedef struct sw_account_head { /* one page */
    char magic[8];               /* "swstep" */
    uint32_t version, head_bytes, row_bytes, rows, op_bytes, ops;
    int32_t pid, rank, world_size;
    _Atomic int32_t stack_signal; /* writes Python's stacks to a file beside it; 0: none does */
    uint64_t start_ticks;         /* the process' start in /proc/PID/stat */
    int64_t clock_ns, unix_ns;    /* two clocks at one moment: monotonic, and since 1970 */
    char host[64];
    _Atomic uint64_t steps, op_count; /* rows and entries so far */
    _Atomic uint32_t phase;
    _Atomic int32_t wait_rank;   /* the last wait: the rank it is for, -1 unknown */
    _Atomic uint32_t wait_group; /* in which that is its number; 0 unknown, UINT32_MAX the job */
    _Atomic uint32_t ended;      /* 1: in order */
    _Atomic int64_t phase_begun_ns;
    /* The last wait, from its first sleep to its last turn. A wait that is on turns every 20 ms. */
    _Atomic int64_t wait_begun_ns, wait_turn_ns;
    _Atomic uint64_t wait_serial; /* the newest collective when it began */
    _Atomic uint64_t group;       /* equal on the ranks that met; 0: none has met */
    sw_account_text call;         /* the public call that this rank is in */
    sw_account_text reason;       /* the first error */
    /* Earlier starts of the job: when the first began, when the last kept step of the last one
     * ended (both since 1970), the time lost between them, and their count. */
    int64_t first_unix_ns, kept_unix_ns, lost_ns;
    uint64_t restarts;
    _Atomic uint64_t group_count; /* groups that are kept; group n is groups[n - 1] */
    sw_account_group groups[SW_ACCOUNT_GROUPS];
} sw_account_head;

typedef struct sw_account {
    _Alignas(4096) sw_account_head head;
    _Alignas(4096) sw_account_row rows[SW_ACCOUNT_ROWS]; /* step s at (s - 1) % SW_ACCOUNT_ROWS */
    _Alignas(4096) sw_account_op operations[SW_ACCOUNT_OPS]; /* likewise by serial */
} sw_account;

/* Return the account of this process; never NULL. It may be replaced by open and forget. */
const sw_account *sw_account_get(void);

/* Move the account into a new file at `path` (mode 0600), with its space reserved. SW_E_OS,
 * SW_E_MEMORY: it stays where it is. `host`: cut at 63 bytes. */
SW_MUST_USE sw_status sw_account_open(const char *path, int rank, int world_size, const char *host,
                                      sw_error *err);
/* In a forked child: begin again, in memory of its own. */
void sw_account_forget(void);

/* A phase begins, and the one before it ends. OPTIMIZER: a round has ended. */
void sw_account_enter(sw_phase phase);
/* An optimizer of the engine's modules begins a step. */
void sw_account_stepping(void);
/* Some optimizer's step has ended. The steps since the last forward, if one of them was announced,
 * are one row. Returns its number when it is new; 0: none. */
uint64_t sw_account_stepped(void);
/* The outermost public call begins; its name is cut. `saves`: until the end it is a save. */
void sw_account_call(const char *name, bool saves);
void sw_account_call_end(void);
/* Keep the first error. */
void sw_account_fail(const char *sentence);
/* This rank has left its group, or its process ends in order; true if no error was kept. */
bool sw_account_end(void);
void sw_account_set_stack_signal(int number);
/* This rank has met the others of a group, for which group->id stands; with `leads` it is the one
 * by which readers know the ranks of a job, and this rank goes on if it had ended. Returns the
 * group's number; 0: SW_ACCOUNT_GROUPS are kept already. */
int sw_account_met(const sw_account_group *group, bool leads);
/* Earlier starts of this job, as in the head. */
void sw_account_restarted(int64_t first_unix_ns, int64_t kept_unix_ns, int64_t lost_ns,
                          uint64_t restarts);

typedef struct sw_account_use { /* a communicator's in the account */
    int group;                  /* its number, 0 unknown */
    sw_link link;               /* over which its collectives' buffers go */
    uint32_t number;            /* of its last collective */
} sw_account_use;

/* A collective begins; returns its serial. */
uint64_t sw_account_begin(const sw_account_use *use, uint32_t kind, const char *label,
                          uint64_t size_bytes, uint32_t step, uint32_t round);
/* Bytes go over a link. */
void sw_account_moved(sw_link link, uint64_t size_bytes);
/* One of its parts is posted, or done here. No effect once 1,000 have begun since. */
void sw_account_post(uint64_t serial);
void sw_account_done(uint64_t serial);
/* A thread has slept since `begun_ns`, in a wait for `rank` (-1: unknown) of group `group` (0:
 * unknown, -1: a rank of the job). Returns for how long. */
int64_t sw_account_slept(int64_t begun_ns, int rank, int group);
