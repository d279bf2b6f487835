/* gradient_memory.h - the memory of buckets and use bits, and the transport that follows from it.
 *
 * pool: the buckets are an arena, and all ranks fold in place. staged: they are this rank's private
 * pages and travel through the communicator's slots. The small use bits are an arena in both. The
 * whole group uses one transport: an arena that fails on one rank fails on all, with the same
 * message.
 *
 * Thread rule: owner only. */
#pragma once

#include "comm/comm.h"

typedef enum sw_transport {
    SW_TRANSPORT_AUTO = 0, /* pool if every rank can, else staged */
    SW_TRANSPORT_POOL,
    SW_TRANSPORT_STAGED,
} sw_transport;

typedef struct sw_gradient_memory {
    sw_comm *comm;      /* borrowed: it outlives this */
    sw_arena *arena;    /* owned; NULL when staged */
    sw_arena *trailers; /* owned */
    uint8_t *base;      /* this rank's buckets: in the arena, or owned private pages */
    size_t size_bytes;
    uint8_t *results; /* this rank's slices of the means, in owned private pages or in result_arena;
                         NULL: they stay in the buckets */
    size_t result_bytes;
    sw_arena *result_arena; /* owned; used if other ranks write it too */
    sw_transport transport; /* the transport chosen */
    char why[SW_ERROR_MESSAGE_BYTES];
} sw_gradient_memory;

typedef struct sw_gradient_sizes { /* all in bytes */
    size_t pool, staged;           /* size of the buckets, by transport */
    size_t results;  /* size of this rank's slices outside the buckets; in a pool only. 0: none */
    size_t trailers; /* size of use bits */
    bool results_mapped; /* other ranks write results too */
} sw_gradient_sizes;

/* Collective. All memory is zeroed; pages are allocated when touched. */
SW_MUST_USE sw_status sw_gradient_memory_create(sw_comm *comm, const sw_gradient_sizes *sizes,
                                                sw_transport wanted, const char *label,
                                                sw_gradient_memory **memory, sw_error *err);
void sw_gradient_memory_destroy(sw_gradient_memory *memory);

const char *sw_transport_name(sw_transport transport);
