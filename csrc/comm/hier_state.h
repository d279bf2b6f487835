/* hier_state.h - the state of a communicator over hosts, shared by hier.c, hier_post.c,
 * hier_wait.c and hier_host.c (a rank that posts and waits) and by the carrier's files
 * (hier_carrier_state.h). Private to them.
 *
 *   posted[r] >= t   rank r of this host has described operation t, and its data can be read
 *   wired >= t       operation t is complete for this host (published in the carrier's page)
 *
 * Memory: the posting thread writes `pending` before `posted`, the carrier's thread reads it after.
 * The carrier accesses an operation's memory and plan under `lock`, and only until the communicator
 * has ended. So a thread that ended it and then held `lock` once may free both.
 *
 * End: the communicator of this host's ranks, `inside`, ends with this one and keeps the end's
 * state and reason for them (ending.h). The carriers notify the other hosts.
 *
 * Thread rule: as above; pages are shared between processes, as stated for each field below. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "comm/fabric.h"
#include "comm/hier.h"
#include "comm/host_map.h"
#include "platform/thread.h"

enum {
    SW_HIER_RING = 64,                      /* operations that may be in flight */
    SW_HIER_CHUNK_BYTES = 64 * 1024,        /* chunk of private memory */
    SW_HIER_MIRROR_BYTES = 4 * 1024 * 1024, /* gathered: total of all ranks' chunks, */
    SW_HIER_LEAST_CHUNK_BYTES = 64,         /* but at least this much for each rank */
    SW_STREAM_PIECE_BYTES = 256 * 1024,     /* piece of a broadcast */
    SW_STREAM_PLACES = 16,                  /* pieces in flight on a host */
    SW_STREAM_LEAST_BYTES = 8 * 1024,       /* the most bytes of a broadcast inside frames */
};

typedef struct sw_page { /* one for each rank of this host, in memory that they all map */
    _Alignas(128) _Atomic uint32_t posted; /* futex word; by its owner */
    _Alignas(128) _Atomic uint32_t wired;  /* futex word; by the carrier's thread, in its page */
    /* The carrier's: the rank of another host for which it waits, or -1; bytes over the bridge. */
    _Alignas(128) _Atomic int32_t awaiting;
    _Atomic uint64_t sent, received;
    /* Broadcast (hier_gather.c): futex words. `filled` and `sent_pieces` in the carrier's page. */
    _Alignas(128) _Atomic uint32_t filled;
    _Alignas(128) _Atomic uint32_t taken;
    _Atomic uint32_t sent_pieces;
    _Alignas(128) sw_descriptor ring[SW_HIER_RING];
} sw_page;

typedef struct sw_hier_pending {
    sw_op op;                    /* arena and beside: the caller's */
    sw_arena *arena;             /* arena of all_reduce contributions; base of this host's ranks */
    size_t at_bytes;             /* into it, or into hier->mirror */
    uint64_t serial;             /* in the account */
    size_t begin;                /* offset of this chunk within the plan's elements */
    const sw_slice_table *table; /* table of op.slices, borrowed from hier->tables; NULL without */
} sw_hier_pending;

typedef struct sw_carrier sw_carrier;

typedef struct sw_hier_arena {
    sw_arena arena;             /* first; base of this host's ranks, or of all when mirrored */
    sw_arena *inside;           /* owned by hier->inside */
    struct sw_hier_arena *next; /* in hier->kept */
} sw_hier_arena;

typedef struct sw_hier_table {
    sw_slice_table table; /* first */
    struct sw_hier_table *next;
} sw_hier_table;

typedef struct sw_host_name {
    char text[sizeof(((sw_identity *)0)->host)];
} sw_host_name;

typedef struct sw_hier {
    sw_comm comm;    /* first */
    sw_comm *inside; /* owned: a fabric */
    sw_host_map map;
    sw_dissemination spread;
    _Atomic bool is_introduced; /* the next two fields are written */
    int32_t *pid;               /* owned: by rank */
    sw_host_name *host_name;    /* owned: by host */
    int host, local_rank, local_count;
    const int *members; /* ranks of this host: borrowed from map */
    sw_arena *pages;    /* owned by inside: a sw_page a local rank */
    sw_arena *bounce;   /* two chunks a rank, for private memory that is reduced */
    sw_arena *mirror;   /* the carrier's part: two chunks for each rank, for private memory that is
                           gathered */
    size_t mirror_chunk_bytes;
    sw_arena *ring;    /* the carrier's part: SW_STREAM_PLACES pieces */
    uint32_t pieces;   /* pieces of earlier broadcasts */
    uint32_t posted;   /* own counter, as published */
    uint32_t settled;  /* operations with resolved plans */
    uint32_t chunks;   /* chunks of private memory moved so far: selects the next half */
    bool end_is_known; /* the posting thread has ended it: it may free plans */
    pthread_mutex_t lock;
    bool *contributes; /* owned scratch of the posting thread, world_size */
    sw_hier_pending pending[SW_HIER_RING];
    sw_hier_table *tables; /* owned: tables of all slices so far; a program has few */
    sw_carrier *carrier;   /* owned; NULL on ranks other than the carrier */
    sw_hier_arena *kept;   /* owned: destroyed while the wire might read them */
    int owner_pid;
} sw_hier;

static inline sw_page *sw_hier_page(const sw_hier *hier, int local)
{
    return (sw_page *)(void *)hier->pages->base[local];
}

/* Return the place of `rank` in an all_gather of private memory; every rank of this host reads
 * it. */
static inline uint8_t *sw_hier_mirrored(const sw_hier *hier, const sw_hier_pending *pending,
                                        int rank)
{
    return hier->mirror->base[hier->members[0]] + pending->at_bytes +
           (size_t)rank * pending->op.numel;
}

/* Return the index of `rank`, a rank of this host, among its ranks. */
static inline int sw_hier_local(const sw_hier *hier, int rank)
{
    int local = 0;
    while (hier->members[local] != rank)
        ++local;
    return local;
}

/* ---- hier_host.c ---- */

/* Functions of sw_comm_ops. */
void sw_hier_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES]);
sw_wait_note *sw_hier_note(sw_comm *comm, int local, int *rank);
int sw_hier_pid(sw_comm *comm, int rank);
int sw_hier_dead(sw_comm *comm);
/* Write the name of an operation, even of one that this rank has not posted yet. */
void sw_hier_describe(const sw_hier *hier, uint32_t ticket, char *text, size_t capacity);

/* The condition that a wait needs of this host's ranks. */
typedef struct sw_hier_need {
    uint32_t ticket; /* all of them have posted this ticket */
    int filler;      /* and this rank of the host has not done its part yet; -1: none */
    bool takes;      /* and all ranks but the waiting one have taken `taken` pieces */
    uint32_t taken;
} sw_hier_need;

/* Return true if a rank of this host fulfils the condition. */
bool sw_hier_has_done(const sw_hier *hier, const sw_hier_need *need, int local);
/* Find a reason why this host never will: a rank that ended, left or (with `deaths`) died before it
 * had done its part. SW_OK: none known. Any thread. */
SW_MUST_USE sw_status sw_hier_check_host(const sw_hier *hier, const sw_hier_need *need, bool deaths,
                                         sw_error *err);

/* ---- hier_wait.c: the end ---- */

/* Return why this communicator ended on this rank; any of its threads. */
static inline const sw_ending *sw_hier_ending(const sw_hier *hier)
{
    return &((const sw_fabric *)hier->inside)->ending;
}

static inline bool sw_hier_is_active(const sw_hier *hier)
{
    return sw_ending_state(sw_hier_ending(hier)) == SW_MEMBER_ACTIVE;
}

/* Return once the carrier's thread no longer accesses memory and plans of an ended communicator's
 * operations. Wakes this rank's threads. Any thread. */
void sw_hier_await_untouched(sw_hier *hier);
/* End it for this host's ranks and, if this rank is the carrier, for the other hosts; then as
 * above. The first reason wins; returns its status. Posting thread. */
sw_status sw_hier_end_here(sw_hier *hier, const sw_error *reason, sw_error *err);
/* Return the reason, once it has ended. Posting thread. */
SW_MUST_USE sw_status sw_hier_check_alive(sw_hier *hier, sw_error *err);

/* Functions of sw_comm_ops; any thread. For ranks on other hosts look() knows only what the carrier
 * has received. */
void sw_hier_request_end(sw_comm *comm, const sw_error *reason);
void sw_hier_tell_hosts(sw_comm *comm);
SW_MUST_USE sw_status sw_hier_look(sw_comm *comm, bool minds_leaving, sw_error *err);
bool sw_hier_is_alive(sw_comm *comm);

/* ---- hier_wait.c ---- */

/* Wait until a word of some page of this host has reached `value`. */
SW_MUST_USE sw_status sw_hier_await_word(sw_hier *hier, const sw_hier_need *need,
                                         _Atomic uint32_t *word, uint32_t value, sw_error *err);
/* Wait until operation `ticket` is complete for this host. */
SW_MUST_USE sw_status sw_hier_await(sw_hier *hier, uint32_t ticket, sw_error *err);
/* Drop the references of operations to codecs, once the carrier's thread has ended. */
void sw_hier_drop_codecs(sw_hier *hier);
/* Resolve the caller's plans of operations up to `wired`. */
void sw_hier_settle(sw_hier *hier, uint32_t wired);

/* ---- hier_post.c: functions of sw_comm_ops ---- */

SW_MUST_USE sw_status sw_hier_post(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err);
SW_MUST_USE sw_status sw_hier_run(sw_comm *comm, const sw_op *op, sw_error *err);
SW_MUST_USE sw_status sw_hier_gather(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                                     const char *label, sw_error *err);
/* Run an operation on less than a chunk of private memory, which travels in frames. */
SW_MUST_USE sw_status sw_hier_run_small(sw_hier *hier, const sw_op *op, sw_error *err);
/* Post a broadcast; hier_gather.c moves its data. */
SW_MUST_USE sw_status sw_hier_begin_stream(sw_hier *hier, const sw_op *op, uint32_t *ticket,
                                           sw_error *err);
/* hier_gather.c: the same. */
SW_MUST_USE sw_status sw_hier_broadcast(sw_comm *comm, const sw_range *ranges, size_t count,
                                        int root, const char *label, sw_error *err);

/* ---- functions of the carrier for the posting thread ---- */

/* Start the carrier's thread. */
SW_MUST_USE sw_status sw_carrier_start(sw_hier *hier, const sw_wire *wire, sw_error *err);
/* Ask it to leave, wait briefly for its end, and close the wire. If the communicator ended without
 * an error, the peers first get a moment to do the same. */
void sw_carrier_stop(sw_carrier *carrier, bool ended_well);
/* Send this host's peers an end message at once; later calls may send a better reason, a few times.
 * Any thread; takes the wire's locks, so none of ours may be held. */
void sw_carrier_send_end(sw_carrier *carrier, const sw_error *reason);
/* Return the last end message of host `peer` of hier->spread.peers; false: none yet. Any thread. */
bool sw_carrier_received_end(const sw_carrier *carrier, int peer, sw_error *reason);
/* Check the connection to `host`, from which this host receives frames: SW_E_COMM if it is lost.
 * The posting thread, while it waits for the carrier. */
SW_MUST_USE sw_status sw_carrier_probe(sw_carrier *carrier, int host, const char *what,
                                       sw_error *err);
/* Return true if the wire no longer accesses memory. The carrier's thread may still be inside a
 * call of it, for ever. Posting thread. */
bool sw_carrier_wire_is_closed(const sw_carrier *carrier);
/* The same, and the carrier's thread has ended. */
bool sw_carrier_is_over(const sw_carrier *carrier);
/* Destroy the carrier once its thread has ended or if it never started. Also releases the wire. */
void sw_carrier_destroy(sw_carrier *carrier);
