/* wait.h - the end of a wait for ranks that do not come: by the program's signals or the clock.
 *
 * Idea: every loop that waits (for counters in shared pages, for messages of the join, for a GPU)
 * calls this in each of its turns. So there is one deadline, one warning and one interruption, with
 * the same sentences everywhere. How such a loop sleeps, and how it detects that a peer has died,
 * is its own.
 *
 * Thread rule: owner only. */
#ifndef SW_COMM_WAIT_H
#define SW_COMM_WAIT_H

#include "comm/comm.h"

typedef struct sw_wait_text {
    char what[160];    /* "barrier 'evaluation'" */
    char missing[320]; /* "rank 2 (pid 4711 on host a)", and others; "its GPU" */
    int rank;          /* the first of these, by its number in messages; -1: none */
    bool is_stopped;   /* some of these are; `stopped` is the first, by its number in messages */
    int stopped;
} sw_wait_text;

typedef struct sw_wait {
    const sw_comm *comm;          /* borrowed: its hooks, names, deadline, warn_after_ns */
    int64_t begun_ns, timeout_ns; /* INT64_MAX: another wait keeps the deadline */
    int64_t warn_ns;              /* the next warning, from begun_ns on */
    int64_t looked_ns;            /* when stopped peers were looked for */
    int64_t stopped_ns; /* since when one of them is stopped, later by the time in which this
                           rank was stopped itself; 0: none is */
    void *context;      /* borrowed */
    void (*describe)(void *context, sw_wait_text *text); /* for a warning or an error */
} sw_wait;

/* Begin a wait now, with the communicator's deadline. */
sw_wait sw_wait_begin(const sw_comm *comm, void *context,
                      void (*describe)(void *context, sw_wait_text *text));

/* One turn: SW_OK to wait on, maybe after a warning. SW_E_INTERRUPTED: the program was interrupted,
 * and *reason (SW_E_COMM) is the sentence for its peers. SW_E_TIMEOUT: *reason names the wait.
 * SW_E_COMM: a peer is stopped for longer than the communicator's silent_ns. */
SW_MUST_USE sw_status sw_wait_check(sw_wait *wait, sw_error *reason);

/* The same sentence before the deadline, for a wait that is known to be in vain: SW_E_TIMEOUT. */
sw_status sw_wait_give_up(const sw_wait *wait, sw_error *reason);

/* Add a rank of `comm` to text->missing. `pid`: of its process on this host, which may be stopped;
 * 0: not known. Returns false if there is no space for more. */
bool sw_wait_add_missing(sw_wait_text *text, sw_comm *comm, int rank, int pid);

/* The error of the interrupted program itself: SW_E_INTERRUPTED. */
sw_status sw_wait_interrupted(sw_error *err);

#endif
