/* slot_state.h - the state that the files of the slot transport share: slot_memory.c creates and
 * destroys the parts, slot_rounds.c runs rounds, slot_transport.c has the operations.
 *
 * Thread rule: as slot_transport.h. */
#pragma once

#include <stdatomic.h>

#include "comm/ending.h"
#include "comm/slot_transport.h"

enum {
    SW_SLOT_MAX_WORLD = 1024,
    SW_SLOT_COUNT = 2,
    SW_SLOT_PAGE_BYTES =
        4096, /* alignment inside a part; parts are the arena's, in pages of their own */
    SW_SLOT_PIECE_ALIGNMENT = 16,
    SW_SLOT_LAYOUTS = 8, /* rounds that ranks compare: a rank is usually ahead of another by
                          * fewer */
};

typedef enum sw_slot_answer { SW_SLOT_UNANSWERED = 0, SW_SLOT_YES, SW_SLOT_NO } sw_slot_answer;

typedef enum sw_slot_opening { SW_SLOT_CLOSED = 0, SW_SLOT_OPEN } sw_slot_opening;

/* The beginning of a part. A host reads another rank's fields once it has seen a later round's
 * number, or atomically. */
typedef struct sw_slot_head {
    uint32_t number[SW_SLOT_MAX_WORLD]; /* [p]: the round that rank p has reached; its GPU writes */
    uint64_t layout[SW_SLOT_LAYOUTS];   /* written by its host for the last rounds: round, digest of
                                           sizes */
    sw_ending ending;
    atomic_uint opening; /* sw_slot_opening: of peers' memory */
    sw_memory_export exported;
    uint32_t exports, opens; /* sw_slot_answer of exporting and of opening */
    sw_error refusal;        /* the reason */
} sw_slot_head;

typedef struct sw_slot_arrival { /* data for us in a peer's slot, in the open round */
    int peer;
    void *to;
    size_t offset, size_bytes;
} sw_slot_arrival;

typedef struct sw_slot_transport {
    sw_peers base;
    const sw_kernel_set *kernels; /* borrowed, as the next; NULL if creation failed before it */
    sw_stream *stream;
    size_t slot_bytes;
    uint8_t **part;           /* owned array: the parts' addresses in this process */
    uint8_t **mapped;         /* owned array: their addresses on the device; NULL: not registered */
    uint8_t **slots;          /* owned array: each rank's two slots, as device addresses */
    void *own_slots;          /* owned device memory; NULL: they are in the parts */
    uint8_t **opened;         /* owned array: peers' device memory; NULL: none */
    void *staging;            /* owned device memory, slot_bytes: source of folds */
    sw_event *ended;          /* recorded after the stream's last operation */
    sw_slot_arrival *arrival; /* owned, arrival_max */
    size_t arrival_count, arrival_max, moves;
    size_t used;            /* bytes of each rank's slot that the open round has reserved */
    _Atomic uint32_t round; /* the open round, or the last one */
    uint32_t digest;        /* digest of its reservations */
    bool is_open, is_grouped;
} sw_slot_transport;

static inline sw_slot_head *sw_slot_head_of(const sw_slot_transport *t, int rank)
{
    return (sw_slot_head *)(void *)t->part[rank];
}

/* slot_memory.c: create all but the arrays and the parts' addresses. Collective. */
SW_MUST_USE sw_status sw_slot_memory_init(sw_slot_transport *t, sw_slot_place place, sw_error *err);
/* Destroy the memory; call once the stream has completed. */
void sw_slot_memory_fini(sw_slot_transport *t);

/* slot_rounds.c: reserve `places` adjacent pieces of up to `wanted` bytes (> 0), in the open round
 * or in the next. *size_bytes: bytes of each; *offset: of the first. Place k is at *offset + k *
 * sw_slot_stride(*size_bytes). */
SW_MUST_USE sw_status sw_slot_reserve(sw_slot_transport *t, int places, size_t wanted,
                                      size_t *size_bytes, size_t *offset, sw_error *err);
size_t sw_slot_stride(size_t size_bytes);
SW_MUST_USE sw_status sw_slot_put(sw_slot_transport *t, size_t offset, const void *from,
                                  size_t size_bytes, sw_error *err);
/* When the round closes, copy the bytes that `peer` puts at this place to `to`. */
void sw_slot_get(sw_slot_transport *t, int peer, size_t offset, void *to, size_t size_bytes);
/* End the open round, if there is one. */
SW_MUST_USE sw_status sw_slot_close_round(sw_slot_transport *t, sw_error *err);
/* Run a round without pieces and let the host wait for it: then all ranks have come. */
SW_MUST_USE sw_status sw_slot_meet(sw_slot_transport *t, const char *what, sw_error *err);

/* Functions of sw_peers_ops. The end marks the transport as failed for all ranks and releases this
 * rank's stream. */
void sw_slot_end(sw_peers *peers, const sw_error *reason);
SW_MUST_USE sw_status sw_slot_check(sw_peers *peers, sw_error *err);
/* Release the stream's waits, without a driver call. May be repeated. */
void sw_slot_end_beside(sw_peers *peers, const sw_error *reason);
SW_MUST_USE sw_status sw_slot_look(sw_peers *peers, sw_error *reason);
/* Wait until the stream has completed, for at most `limit_ns`; release its waits if the transport
 * has failed. */
void sw_slot_drain(sw_slot_transport *t, int64_t limit_ns);
