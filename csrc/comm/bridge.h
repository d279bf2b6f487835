/* bridge.h - messages between the carriers of hosts, over another library's process group.
 *
 * A sw_wire moves them: torch's Gloo group in a process (python/wire.c), queues between threads in
 * tests. A wire moves bytes and never adds. The bridge numbers messages, so that both sides may
 * issue them in different orders. It counts bytes and records the rank for which it waits.
 *
 * A wait on a wire may never return. The threads that wait for the carrier's thread keep the
 * deadlines (hier.c). Memory to which a wire may still write lives until the wire is closed.
 *
 * Thread rule: the carrier's thread only, except for hier_last.c; any thread may read the counters
 * and `awaiting`. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/host_map.h"

typedef struct sw_wire {
    void *context;
    /* Begin to move `size_bytes` > 0 to or from `rank`. Both sides give the same tag; the receiver
     * gives at least the sender's size. The caller waits for *work once. Memory is borrowed until
     * then. */
    sw_status (*send)(void *context, int rank, uint32_t tag, const void *data, size_t size_bytes,
                      void **work, sw_error *err);
    sw_status (*receive)(void *context, int rank, uint32_t tag, void *data, size_t size_bytes,
                         void **work, sw_error *err);
    /* Wait until the message has moved. SW_E_COMM when the connection is lost; but the wait for a
     * partly moved message may never return. */
    sw_status (*wait)(void *context, void *work, sw_error *err);
    /* Close all connections: the wire no longer reads or writes memory, and waiting threads return.
     * `gently`: the peers are about to close too, and sent messages must arrive. Returns false if
     * it failed and memory may still be written. Any thread. */
    bool (*close)(void *context, bool gently);
    /* Release a work of a closed wire that was never waited for. */
    void (*drop)(void *context, void *work);
    /* The last call: free `context` and the rest of the wire. */
    void (*release)(void *context);
    /* Called as the carrier's thread begins and ends. enter() builds once the state that each call
     * of the wire needs. *kept: passed to leave(). Both NULL: the wire needs no such state. */
    void (*enter)(void *context, void **kept);
    void (*leave)(void *context, void *kept);
    /* Below this throughput a message is worth packing (hier_block.h). 0: never; UINT64_MAX:
     * always. */
    uint64_t slow_bytes_per_s;
    int radix; /* radix of sw_dissemination, equal on all hosts; 0: SW_DISSEMINATION_RADIX */
} sw_wire;

/* The kind of a message; with its number it forms the tag. */
typedef enum sw_message {
    SW_MESSAGE_FRAME = 0,   /* numbered by hop (hier_carrier_state.h) */
    SW_MESSAGE_BESIDE,      /* numbered by agreement */
    SW_MESSAGE_PARTIAL,     /* numbered by block, counted over all operations */
    SW_MESSAGE_RESULT,      /* likewise */
    SW_MESSAGE_ACCUMULATED, /* likewise: results of the previous round, for the carrier that adds to
                            them */
    SW_MESSAGE_SLICE,       /* likewise: updated slices */
    SW_MESSAGE_END,         /* below 16: a host has ended; the wire uses the other numbers */
    SW_MESSAGE_PROBE,       /* numbered separately: tests the connection */
} sw_message;

typedef struct sw_transfer {
    void *work; /* NULL: no transfer */
    int rank;
} sw_transfer;

typedef struct sw_bridge {
    const sw_wire *wire;               /* borrowed; NULL for one host */
    const sw_host_map *map;            /* borrowed */
    int host;                          /* this one */
    _Atomic uint64_t *sent, *received; /* borrowed counters, bytes */
    _Atomic int32_t *awaiting;         /* borrowed: the rank that the bridge waits for, or -1 */
    _Atomic int inside; /* threads inside a call of the wire, each of which counts (begin_call), as
                           only there a thread may stay for ever */
} sw_bridge;

/* Run as the carrier's thread begins and ends; see sw_wire. */
void sw_bridge_enter(sw_bridge *bridge, void **kept);
void sw_bridge_leave(sw_bridge *bridge, void *kept);

/* A message to or from the carrier of `host`. 0 bytes move nothing. */
SW_MUST_USE sw_status sw_bridge_send(sw_bridge *bridge, int host, sw_message message,
                                     uint32_t number, const void *data, size_t size_bytes,
                                     sw_transfer *transfer, sw_error *err);
SW_MUST_USE sw_status sw_bridge_receive(sw_bridge *bridge, int host, sw_message message,
                                        uint32_t number, void *data, size_t size_bytes,
                                        sw_transfer *transfer, sw_error *err);
/* The same without counting bytes: for a few bytes from any thread, and for a message of unknown
 * length. */
SW_MUST_USE sw_status sw_bridge_probe(sw_bridge *bridge, int host, uint32_t number,
                                      const void *data, size_t size_bytes, sw_transfer *transfer,
                                      sw_error *err);
SW_MUST_USE sw_status sw_bridge_expect(sw_bridge *bridge, int host, sw_message message,
                                       uint32_t number, void *data, size_t size_bytes,
                                       sw_transfer *transfer, sw_error *err);
/* Count bytes of an expected message that have arrived. */
void sw_bridge_count_more(sw_bridge *bridge, size_t size_bytes);
/* Correct the count: a received message was shorter than its limit by `size_bytes`. */
void sw_bridge_count_less(sw_bridge *bridge, size_t size_bytes);
/* Return at once if no transfer is running. err->detail: the rank of the other carrier. */
SW_MUST_USE sw_status sw_bridge_wait(sw_bridge *bridge, sw_transfer *transfer, sw_error *err);
/* Release a transfer of a closed wire that was never waited for. */
void sw_bridge_drop(sw_bridge *bridge, sw_transfer *transfer);
