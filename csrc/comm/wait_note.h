/* wait_note.h - what a rank that has waited for long waits for, in pages that its host's ranks map.
 *
 * Idea: a waiting rank reads its peers' notes when it logs its wait, so one line tells which
 * rank waits for which, and no rank sends a message. A note is written by a thread that has waited
 * for long already, and stays valid for a moment after each of its turns.
 *
 * Thread rule: any thread of its rank writes, such as the one that issues collectives and a GPU's
 * watch thread; any number of readers, also in other processes. */
#ifndef SW_COMM_WAIT_NOTE_H
#define SW_COMM_WAIT_NOTE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

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

#endif
