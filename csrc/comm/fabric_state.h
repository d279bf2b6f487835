/* fabric_state.h - the protocol of ranks that share pages: two counters a rank, a ring of
 * descriptors, slots.
 *
 *   posted[r] >= t   rank r's data and descriptor of operation t can be read
 *   done[r] >= t     rank r has read its part of operation t and has stored its slice
 *
 * The pages are a process's own (comm/local: ranks are threads) or mapped memfds (comm/shm). See
 * docs/design/comm.md. Each control block is written by its owner alone, except `waiters`.
 *
 *   pages: control blocks by rank | descriptors by ticket, then rank | slots by rank
 *
 * A rank reads the words of all ranks, and all descriptors of one ticket. Each kind is contiguous,
 * so that its first access touches O(W / 64) pages instead of O(W).
 *
 * Thread rule: one at a time per fabric; the control blocks are shared, as stated for each field
 * below. */
#ifndef SW_COMM_FABRIC_STATE_H
#define SW_COMM_FABRIC_STATE_H

#include <stdatomic.h>

#include "comm/comm.h"
#include "comm/descriptor.h"
#include "comm/ending.h"
#include "comm/wait_note.h"

enum {
    SW_FABRIC_RING = 128,              /* operations that may be in flight */
    SW_FABRIC_SLOTS = 4,               /* private chunks that may be in flight */
    SW_FABRIC_SLOT_BYTES = 128 * 1024, /* a chunk of W ranks stays in the L2 cache */
};

typedef enum sw_fabric_join {
    SW_FABRIC_NOT_JOINED = 0,
    SW_FABRIC_JOINED,     /* pid, host and liveness token are published */
    SW_FABRIC_ALL_JOINED, /* published by the first rank */
} sw_fabric_join;

typedef struct sw_control {                /* zeroed at first; world_size consecutive blocks */
    _Alignas(128) _Atomic uint32_t posted; /* futex words; release by the owner, acquire by peers */
    _Alignas(128) _Atomic uint32_t done;
    _Alignas(128) _Atomic uint32_t waiters; /* peers asleep on either word; the sleepers write it */
    _Atomic uint32_t has_joined; /* sw_fabric_join; a futex word, released by its owner */
    int32_t pid;
    uint64_t pid_space; /* sw_process_space */
    char host[64];
    sw_wait_note note; /* written by its owner */
    sw_ending ending;  /* written by its owner's threads */
} sw_control;

typedef struct sw_fabric_entry { /* entry of a ring of descriptors */
    _Alignas(64) sw_descriptor descriptor;
} sw_fabric_entry;

typedef struct sw_pending {
    sw_op op;
    sw_descriptor descriptor;
    uint64_t serial;     /* in the account */
    size_t begin, count; /* elements of this chunk within the operation (slot form) */
    void *gathered;      /* all_gather: world_size * count bytes; borrowed */
} sw_pending;

typedef struct sw_fabric {
    sw_comm comm;        /* first: a fabric is a communicator */
    sw_control *control; /* borrowed from the transport, as the next two: world_size blocks */
    sw_fabric_entry *ring;
    uint8_t *slots;
    bool (*peer_ended)(struct sw_fabric *fabric,
                       int rank); /* transport's: true if the process has ended */
    _Atomic bool is_open;         /* control is set: for threads other than the joining one */
    bool is_foreign;              /* a forked child's copy, which notifies no peer */
    int spin_count;
    uint32_t posted, done;              /* this rank's counters, as published */
    sw_ending ending;                   /* this rank's end, for all of its threads */
    _Atomic uint32_t asked;             /* the rank whose liveness was checked last */
    sw_pending pending[SW_FABRIC_RING]; /* by ticket modulo the ring */
    const uint8_t **source;             /* owned scratch, world_size pointers each */
    uint8_t **destination;
    bool *contributes;
} sw_fabric;

/* Private to the fabric's files */

/* Set a word of this rank's block to `value`; wake the ranks that sleep on it. */
void sw_control_publish(_Atomic uint32_t *word, uint32_t value, sw_control *own);
/* Fold or copy this rank's part of operation `pending`; all ranks have posted it. */
void sw_fabric_execute(sw_fabric *fabric, const sw_pending *pending, uint32_t ticket);
/* Execute every operation that all ranks have posted, in order. */
SW_MUST_USE sw_status sw_fabric_progress(sw_fabric *fabric, sw_error *err);
/* Wait until every rank's `done` has reached `ticket`; make progress meanwhile. */
SW_MUST_USE sw_status sw_fabric_wait_done(sw_fabric *fabric, uint32_t ticket, sw_error *err);
/* The condition of a wait, for every rank: its post of `ticket`, or its `done`. */
typedef struct sw_fabric_awaited {
    bool for_post;
    uint32_t ticket;
} sw_fabric_awaited;

/* Return true if operation `ticket` can be executed here; else *awaited is the missing
 * condition. */
bool sw_fabric_is_ready(const sw_fabric *fabric, uint32_t ticket, sw_fabric_awaited *awaited);

/* Return a rank whose process has ended; -1: none found. Checks at most `budget` ranks (`awaited`
 * NULL: all, else only missing ones); the next call continues after them. Any thread. */
int sw_fabric_find_dead(sw_fabric *fabric, int budget, const sw_fabric_awaited *awaited);
/* End the communicator here and notify the peers. Returns the first recorded reason. Any thread of
 * this rank. */
sw_status sw_fabric_end(sw_fabric *fabric, const sw_error *reason, sw_error *err);

/* Return true if counter `value` has reached `ticket`, over the wrap of 32 bits. */
static inline bool sw_ticket_reached(uint32_t value, uint32_t ticket)
{
    return (int32_t)(value - ticket) >= 0;
}

static inline sw_descriptor *sw_fabric_descriptor(const sw_fabric *fabric, int rank,
                                                  uint32_t ticket)
{
    size_t row = ticket % SW_FABRIC_RING;
    return &fabric->ring[row * (size_t)fabric->comm.world_size + (size_t)rank].descriptor;
}

static inline uint8_t *sw_fabric_slot(const sw_fabric *fabric, int rank, uint32_t ticket)
{
    size_t slot = (size_t)rank * SW_FABRIC_SLOTS + ticket % SW_FABRIC_SLOTS;
    return fabric->slots + slot * SW_FABRIC_SLOT_BYTES;
}

static inline _Atomic uint32_t *sw_fabric_word(const sw_fabric *fabric, int rank, bool for_post)
{
    sw_control *control = &fabric->control[rank];
    return for_post ? &control->posted : &control->done;
}

static inline bool sw_fabric_is_missing(const sw_fabric *fabric, int rank,
                                        const sw_fabric_awaited *awaited)
{
    return !sw_ticket_reached(atomic_load(sw_fabric_word(fabric, rank, awaited->for_post)),
                              awaited->ticket);
}

#endif
