/* wait.h - ends waits for late ranks: at the deadline, by a signal, or for stopped peers.
 *
 * Idea: every loop that waits (for counters in shared pages, for messages of the join, for a GPU)
 * calls this in each of its turns. So deadline, warning and interruption exist once, with the same
 * messages everywhere. Each loop sleeps and detects dead peers in its own way.
 *
 * Thread rule: owner only; notes as they say. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "comm/comm.h"

typedef struct sw_wait_text {
    char what[160];    /* "barrier 'evaluation'" */
    char missing[320]; /* "rank 2 (pid 4711 on host a)", and others; "its GPU" */
    int rank;          /* the first of them, by its number in messages; -1: none */
    bool is_stopped;   /* some of them are stopped; `stopped` is the first, by its number in
                        * messages */
    int stopped;
} sw_wait_text;

typedef struct sw_wait {
    const sw_comm *comm;          /* borrowed: its hooks, names, deadline, warn_after_ns */
    int64_t begun_ns, timeout_ns; /* INT64_MAX: another wait keeps the deadline */
    int64_t warn_ns;              /* the next warning, from begun_ns on; INT64_MAX: none */
    int64_t noted_ns;             /* when the note was written last; 0: not yet */
    int64_t looked_ns;            /* when stopped peers were looked for */
    int64_t stopped_ns; /* time since which one of them is stopped, plus the time in which this
                           rank was stopped itself; 0: none is */
    void *context;      /* borrowed */
    void (*describe)(void *context, sw_wait_text *text); /* for a warning or an error */
} sw_wait;

/* Begin a wait now, with the communicator's deadline. */
sw_wait sw_wait_begin(const sw_comm *comm, void *context,
                      void (*describe)(void *context, sw_wait_text *text));

/* One turn. SW_OK: wait on, perhaps after a warning. A wait of half the time to its warning is
 * noted for the peers. SW_E_INTERRUPTED: the program was interrupted, and *reason
 * (SW_E_COMM) is the message for its peers. SW_E_TIMEOUT: *reason names the wait. SW_E_COMM: a peer
 * has been stopped for longer than the communicator's silent_ns. */
SW_MUST_USE sw_status sw_wait_check(sw_wait *wait, sw_error *reason);

/* The same message before the deadline, for a wait that cannot succeed: SW_E_TIMEOUT. */
sw_status sw_wait_give_up(const sw_wait *wait, sw_error *reason);

/* Add a rank of `comm` to text->missing, with what its process does, if it is one of this host and
 * PID namespace. Returns false if there is no space for more. */
bool sw_wait_add_missing(sw_wait_text *text, sw_comm *comm, int rank);

/* Return the time to a warning of a wait that begins now: sw_wait.warn_ns. */
int64_t sw_wait_warn_ns(const sw_comm *comm);

/* Return the interrupted program's own error: SW_E_INTERRUPTED. */
sw_status sw_wait_interrupted(sw_error *err);

/* ---- notes ---- */

/* What a rank that has waited for long waits for, in pages that its host's ranks map.
 *
 * Idea: a waiting rank reads its peers' notes when it logs its wait, so one line tells which
 * rank waits for which, and no rank sends a message. A note is written by a thread that has waited
 * for long already, and stays valid for a moment after each of its turns.
 *
 * Thread rule: any thread of its rank writes, such as the one that issues collectives and a GPU's
 * watch thread; any number of readers, also in other processes. */

enum { SW_WAIT_NOTE_WORDS = 12, SW_WAIT_NOTE_BYTES = 8 * SW_WAIT_NOTE_WORDS };

typedef struct sw_wait_note {   /* zeroed: nothing is noted */
    _Atomic uint32_t version;   /* odd while it is written */
    _Atomic int32_t awaited;    /* the first missing rank, by its number in messages; -1: unknown */
    _Atomic int64_t renewed_ns; /* the wait's last turn; 0: none */
    _Atomic uint64_t what[SW_WAIT_NOTE_WORDS]; /* text, ended by a zero */
} sw_wait_note;

/* Cuts `what` at SW_WAIT_NOTE_BYTES - 1. Writes nothing while another thread does. */
void sw_wait_note_write(sw_wait_note *note, const char *what, int awaited);
/* Call in each later turn of the wait. */
static inline void sw_wait_note_renew(sw_wait_note *note, int64_t now_ns)
{
    atomic_store_explicit(&note->renewed_ns, now_ns, memory_order_release);
}
/* Returns false if the rank does not wait, or its note changes meanwhile. */
bool sw_wait_note_read(const sw_wait_note *note, int64_t now_ns, char what[SW_WAIT_NOTE_BYTES],
                       int *awaited);
