/* hier_state.h - what a communicator over hosts is made of: shared by hier.c (who posts and waits)
 * and hier_carrier.c (who does it). Not for others.
 *
 *   posted[r] >= t   rank r of this host has described operation t, and its data can be read
 *   wired >= t       operation t is complete for this host (the carrier's page says so)
 *
 * Who touches what: `pending` is written by the posting thread before `posted`, and read by the
 * carrier's after it. The carrier touches the memory and the plan of an operation under `lock`, and
 * only while the communicator has not ended; so a thread that ended it may give both away.
 *
 * Thread rule: as above; pages are shared between processes, each field below says how.
 */
#ifndef SW_COMM_HIER_STATE_H
#define SW_COMM_HIER_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm/fabric.h"
#include "comm/hier.h"
#include "platform/thread.h"

enum {
    SW_HIER_RING = 64,                     /* operations that may be in flight */
    SW_HIER_CHUNK_BYTES = 64 * 1024,       /* of private memory, at a time */
    SW_HIER_BLOCK_BYTES = 256 * 1024,      /* a message of partial sums: 2 ms at 1 Gbit/s */
    SW_HIER_AHEAD = 6,                     /* blocks sent before the first of them is folded */
    SW_HIER_SLOTS = 2 * SW_HIER_AHEAD + 2, /* what stands is sent one ahead */
    SW_HIER_BATCH = 8,                     /* operations that carriers agree on at once */
    SW_FRAME_INLINE_BYTES = 2048,
    SW_HIER_PROBES = 8, /* between two frames */
};

typedef struct sw_page { /* one a rank of this host, in memory that they all map */
    _Alignas(128) _Atomic uint32_t posted; /* futex word; by its owner */
    _Alignas(128) _Atomic uint32_t wired;  /* futex word; by the carrier's thread, in its page */
    _Alignas(128) _Atomic uint32_t state;  /* sw_member_state; released after `reason` */
    sw_error reason;                       /* before state becomes ENDED */
    _Atomic int32_t awaiting;              /* carrier's: the rank of another host, or -1 */
    _Atomic uint64_t sent, received;       /* carrier's: bytes over the bridge */
    _Alignas(128) sw_descriptor ring[SW_HIER_RING];
} sw_page;

typedef struct sw_hier_pending {
    sw_op op;        /* arena and beside as the caller knows them */
    sw_arena *arena; /* all_reduce: where the contributions lie; base of this host's ranks */
    size_t at_bytes; /* into it */
    size_t begin;    /* of this chunk within the plan's elements */
} sw_hier_pending;

/* What a host's ranks came with, as one operation. */
typedef struct sw_frame_part {
    int32_t lowest_rank, counting_rank; /* whose descriptors these are; -1: nobody counts rounds */
    int32_t other_rank;    /* of this host, the first that contradicts them; -1: none */
    uint32_t beside_bytes; /* in all, of this host's ranks */
    sw_descriptor lowest, counting, other;
} sw_frame_part;

/* What a carrier says to another before they move the data of some operations; or that it ends. */
typedef struct sw_frame {
    uint32_t magic, ticket, state;
    uint32_t count;  /* operations from `ticket` on, 1 to SW_HIER_BATCH */
    uint32_t packs;  /* this host's blocks of float32 in them are packets */
    uint32_t probes; /* that this host has sent so far, to each other one */
    sw_error reason; /* state ENDED or LEFT */
    sw_frame_part part[SW_HIER_BATCH];
    uint8_t beside[SW_FRAME_INLINE_BYTES]; /* of one operation after the other, where it fits */
} sw_frame;

/* That a host has ended, and why, whatever its carrier waits for. Whole words: it is looked at
 * while it arrives. */
typedef struct sw_last_word {
    uint32_t magic;
    sw_error reason;
    uint32_t crc; /* CRC-32C of what stands before it */
} sw_last_word;

typedef struct sw_carrier sw_carrier;

typedef struct sw_hier_arena {
    sw_arena arena;             /* first; base of this host's ranks, or of all when mirrored */
    sw_arena *inside;           /* owned by hier->inside */
    struct sw_hier_arena *next; /* in hier->kept */
} sw_hier_arena;

typedef struct sw_hier {
    sw_comm comm;    /* first */
    sw_comm *inside; /* owned */
    sw_host_map map;
    sw_identity *identity; /* owned */
    int host, local_rank, local_count;
    const int *members; /* of this host: borrowed from map */
    sw_arena *pages;    /* owned by inside: a sw_page a local rank */
    sw_arena *bounce;   /* mirrored: two chunks a rank, for private memory */
    uint32_t posted;    /* own counter, as published */
    uint32_t settled;   /* operations whose plans know the outcome */
    uint32_t chunks;    /* of private memory moved so far: which half of bounce is next */
    _Atomic bool ended; /* changes under lock */
    sw_error reason;    /* of `ended` */
    bool end_is_known;  /* to the posting thread: it may give plans away from here on */
    pthread_mutex_t lock;
    bool *contributes; /* owned scratch of the posting thread, world_size */
    sw_hier_pending pending[SW_HIER_RING];
    sw_slices slices[SW_HIER_RING]; /* of pending operations, which the caller's may not outlive */
    int *slice_numbers;             /* owned: two of world_size for each of them */
    sw_carrier *carrier;            /* owned; NULL on ranks that do not carry */
    sw_hier_arena *kept;            /* owned: destroyed while the wire might read them */
    int owner_pid;
} sw_hier;

static inline sw_page *sw_hier_page(const sw_hier *hier, int local)
{
    return (sw_page *)(void *)hier->pages->base[local];
}

/* Ends it here: no operation's memory or plan is touched once this has returned. The first reason
 * stays: false. Tells this host's ranks; the carrier tells the other hosts. Any thread. */
bool sw_hier_end(sw_hier *hier, const sw_error *reason);

/* Members of sw_comm_ops; any thread. Of ranks on other hosts look() knows what carriers heard. */
void sw_hier_request_end(sw_comm *comm, const sw_error *reason);
SW_MUST_USE sw_status sw_hier_look(sw_comm *comm, bool minds_leaving, sw_error *err);
bool sw_hier_is_alive(sw_comm *comm);

/* Whether the process of a rank of this host has ended; not this one's. Any thread. */
bool sw_hier_has_gone(const sw_hier *hier, int local);

/* What keeps this host from operation `ticket`: a rank of it that ended, left or (with `deaths`)
 * died before it posted. SW_OK: nothing known. *missing: a local rank that has not posted it, -1
 * for none. Any thread. */
sw_status sw_hier_check_host(const sw_hier *hier, uint32_t ticket, bool deaths, int *missing,
                             sw_error *err);

void sw_hier_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES]);

/* Starts the carrier's thread. */
SW_MUST_USE sw_status sw_carrier_start(sw_hier *hier, const sw_wire *wire, sw_error *err);
/* Asks it to take leave, waits for its end, but not for long, and closes the wire; of a
 * communicator that has ended well, when the peers have had a moment to do the same. */
void sw_carrier_stop(sw_carrier *carrier, bool ended_well);
/* Says to all other hosts that this one has ended, at once and once. Any thread; takes the wire's
 * locks, and none of ours may be held. */
void sw_carrier_say_last_word(sw_carrier *carrier, const sw_error *reason);
/* Whether `host` has said so. Any thread. */
bool sw_carrier_hears_last_word(const sw_carrier *carrier, int host, sw_error *reason);
/* Provokes an answer of all other hosts' machines, and finds out about connections that are gone:
 * SW_E_COMM when that to `host` is. The posting thread, while it waits for the carrier. */
SW_MUST_USE sw_status sw_carrier_probe(sw_carrier *carrier, int host, const char *what,
                                       sw_error *err);
/* Whether nothing more is read or written by the wire. Its thread may still be inside a call of it,
 * for ever. Of the posting thread. */
bool sw_carrier_wire_is_closed(const sw_carrier *carrier);
/* The same, and its thread has ended. */
bool sw_carrier_is_over(const sw_carrier *carrier);
/* When it is over, or never began. The wire ends too. */
void sw_carrier_destroy(sw_carrier *carrier);

#endif
