/* fabric.h - a group of ranks that share pages: two counters a rank, a ring of descriptors, slots.
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
#pragma once

#include <stdatomic.h>

#include "comm/comm.h"
#include "comm/descriptor.h"
#include "comm/ending.h"
#include "comm/wait.h"

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

/* ---- private to the fabric's files ---- */

/* Fold or copy this rank's part of operation `pending`; all ranks have posted it. */
void sw_fabric_execute(sw_fabric *fabric, const sw_pending *pending, uint32_t ticket);
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

/* ---- for transports ---- */

/* Bytes of the pages that `world_size` ranks share. They begin with the control blocks. */
size_t sw_fabric_pages_bytes(int world_size);

/* Join with rank, world_size and pages; the transport has already written its pid and host. On
 * failure peers get the same message. */
SW_MUST_USE sw_status sw_fabric_init(sw_fabric *fabric, int rank, int world_size, uint8_t *pages,
                                     sw_error *err);
/* Leave the group (notifying peers that wait for this rank) and free the scratch. */
void sw_fabric_fini(sw_fabric *fabric);

/* Functions of sw_comm_ops that need no transport. */
SW_MUST_USE sw_status sw_fabric_post(sw_comm *comm, const sw_op *op, uint32_t *ticket,
                                     sw_error *err);
SW_MUST_USE sw_status sw_fabric_poll(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err);
SW_MUST_USE sw_status sw_fabric_wait(sw_comm *comm, uint32_t ticket, sw_error *err);
SW_MUST_USE sw_status sw_fabric_run(sw_comm *comm, const sw_op *op, sw_error *err);
SW_MUST_USE sw_status sw_fabric_gather(sw_comm *comm, const void *mine, size_t size_bytes,
                                       void *all, const char *label, sw_error *err);
void sw_fabric_abort(sw_comm *comm, const sw_error *reason);
SW_MUST_USE sw_status sw_fabric_look(sw_comm *comm, bool minds_leaving, sw_error *err);
void sw_fabric_leave(sw_comm *comm);
bool sw_fabric_is_alive(sw_comm *comm);
void sw_fabric_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES]);
sw_wait_note *sw_fabric_note(sw_comm *comm, int local, int *rank);
int sw_fabric_pid(sw_comm *comm, int rank);
int sw_fabric_dead(sw_comm *comm);
#define SW_FABRIC_OPS                                                                             \
    .post = sw_fabric_post, .poll = sw_fabric_poll, .wait = sw_fabric_wait, .run = sw_fabric_run, \
    .gather = sw_fabric_gather, .abort = sw_fabric_abort, .request_end = sw_fabric_abort,         \
    .look = sw_fabric_look, .peer = sw_fabric_peer, .note = sw_fabric_note, .pid = sw_fabric_pid, \
    .dead = sw_fabric_dead, .is_alive = sw_fabric_is_alive, .leave = sw_fabric_leave
/* Publish this process in the block of its rank. */
void sw_control_introduce(sw_control *own, const char *host);

/* Record the end of `rank` in its block, and wake all sleepers of all blocks. The first reason
 * wins. */
void sw_control_end(sw_control *control, int world_size, int rank, sw_member_state how,
                    const sw_error *reason);
