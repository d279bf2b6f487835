/* wait.h - what ends a wait for other ranks that do not come: the program's signals and the clock.
 *
 * Idea: every loop that waits (for counters in shared pages, for messages of the join, for a GPU)
 * asks here in each of its turns. So there is one deadline, one warning and one interruption, with
 * the same sentences everywhere. What such a loop sleeps on, and how it finds out that a peer has
 * died, is its own.
 *
 * Thread rule: owner only.
 */
#ifndef SW_COMM_WAIT_H
#define SW_COMM_WAIT_H

#include "comm/comm.h"

typedef struct sw_wait_text {
    char what[160];    /* "barrier 'evaluation'" */
    char missing[320]; /* "rank 2 (pid 4711 on host a)", and others; "its GPU" */
    int rank;          /* the first of these, as messages call it; -1: none */
} sw_wait_text;

typedef struct sw_wait {
    const sw_comm *comm;          /* borrowed: its hooks, names, deadline, warn_after_ns */
    int64_t begun_ns, timeout_ns; /* INT64_MAX: another wait keeps the deadline */
    int64_t warn_ns;              /* the next warning, from begun_ns on */
    void *context;                /* borrowed */
    void (*describe)(void *context, sw_wait_text *text); /* when there is something to say */
} sw_wait;

/* A wait that begins now, with the communicator's deadline. */
sw_wait sw_wait_begin(const sw_comm *comm, void *context,
                      void (*describe)(void *context, sw_wait_text *text));

/* One turn: SW_OK to wait on, maybe after a warning. SW_E_INTERRUPTED: the program was interrupted,
 * and *reason (SW_E_COMM) is what its peers are to hear. SW_E_TIMEOUT: *reason says so. */
SW_MUST_USE sw_status sw_wait_check(sw_wait *wait, sw_error *reason);

/* The same sentence before the deadline, where the wait is known to be in vain: SW_E_TIMEOUT. */
sw_status sw_wait_give_up(const sw_wait *wait, sw_error *reason);

/* Adds a rank of `comm` to text->missing. `pid`: of its process on this host, which may be stopped;
 * 0: not known. False: there is no room for more. */
bool sw_wait_add_missing(sw_wait_text *text, sw_comm *comm, int rank, int pid);

/* What the interrupted program itself gets: SW_E_INTERRUPTED. */
sw_status sw_wait_interrupted(sw_error *err);

#endif
