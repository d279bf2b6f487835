/* bridge.h - bytes between the carriers of hosts, over somebody else's group.
 *
 * A sw_wire is what moves them: torch's Gloo group in a process (python/wire.c), queues between
 * threads in tests. It moves bytes and never adds two of them. The bridge numbers messages, so that
 * both sides may issue them in different orders, counts bytes, and knows for whom it waits.
 *
 * Whoever waits on a wire may wait for ever: deadlines belong to the threads that wait for the
 * waiting one (hier.c). What a wire may still write to lives until the wire is closed.
 *
 * Thread rule: the carrier's thread alone, but for what hier_last.c does; the counters and
 * `awaiting` may be read by any.
 */
#ifndef SW_COMM_BRIDGE_H
#define SW_COMM_BRIDGE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/host_map.h"

typedef struct sw_wire {
    void *context;
    /* Begin to move `size_bytes` > 0 to or from `rank`; both sides give the same tag, and the one
     * that receives at least the other's size. *work is to be waited for once. Memory is borrowed
     * until then. */
    sw_status (*send)(void *context, int rank, uint32_t tag, const void *data, size_t size_bytes,
                      void **work, sw_error *err);
    sw_status (*receive)(void *context, int rank, uint32_t tag, void *data, size_t size_bytes,
                         void **work, sw_error *err);
    /* Until it has moved. SW_E_COMM when the connection is gone; but a message of which a part has
     * moved may be waited for in vain. */
    sw_status (*wait)(void *context, void *work, sw_error *err);
    /* Closes all connections: nothing is read or written any more, and who waits is told. `gently`:
     * the peers are about to do the same, and what was sent to them is to arrive. False: it could
     * not, and memory may still be written to. Any thread. */
    bool (*close)(void *context, bool gently);
    /* Of a closed wire: a work that was never waited for. */
    void (*drop)(void *context, void *work);
    /* The last call: `context`, and what else the wire is made of, ends. */
    void (*release)(void *context);
    /* The carrier's thread begins and ends: what each call of it would have to make anew otherwise
     * is made once. *kept: what leave() gets. NULL, both: nothing is. */
    void (*enter)(void *context, void **kept);
    void (*leave)(void *context, void *kept);
    /* Where less than this passes, time is better spent on sending less (hier_pack.h). 0: never;
     * UINT64_MAX: always. */
    uint64_t slow_bytes_per_s;
    int radix; /* of dissemination.h, alike on all hosts; 0: SW_DISSEMINATION_RADIX */
} sw_wire;

/* What a message is; with a number, its tag. */
typedef enum sw_message {
    SW_MESSAGE_FRAME = 0, /* numbered by hop (hier_carrier.h) */
    SW_MESSAGE_BESIDE,    /* numbered by agreement */
    SW_MESSAGE_PARTIAL,   /* numbered by block, counted over all operations */
    SW_MESSAGE_RESULT,    /* likewise */
    SW_MESSAGE_STANDING,  /* likewise: results of the round before, for who adds to them */
    SW_MESSAGE_SLICE,     /* likewise: updated slices */
    SW_MESSAGE_LAST,      /* below 16: a host has ended; others are the wire's own */
    SW_MESSAGE_PROBE,     /* numbered by themselves: whether somebody is there */
} sw_message;

typedef struct sw_transfer {
    void *work; /* NULL: nothing under way */
    int rank;
} sw_transfer;

typedef struct sw_bridge {
    const sw_wire *wire;               /* borrowed; NULL where there is one host */
    const sw_host_map *map;            /* borrowed */
    int host;                          /* this one */
    _Atomic uint64_t *sent, *received; /* borrowed counters, bytes */
    _Atomic int32_t *awaiting;         /* borrowed: the rank waited for, or -1 */
} sw_bridge;

/* A message to or from the carrier of `host`. Of 0 bytes: nothing moves. */
SW_MUST_USE sw_status sw_bridge_send(sw_bridge *bridge, int host, sw_message message,
                                     uint32_t number, const void *data, size_t size_bytes,
                                     sw_transfer *transfer, sw_error *err);
SW_MUST_USE sw_status sw_bridge_receive(sw_bridge *bridge, int host, sw_message message,
                                        uint32_t number, void *data, size_t size_bytes,
                                        sw_transfer *transfer, sw_error *err);
/* The same, not counted: of a few bytes, by any thread; and of a message whose length is not known
 * yet. */
SW_MUST_USE sw_status sw_bridge_probe(sw_bridge *bridge, int host, uint32_t number,
                                      const void *data, size_t size_bytes, sw_transfer *transfer,
                                      sw_error *err);
SW_MUST_USE sw_status sw_bridge_expect(sw_bridge *bridge, int host, sw_message message,
                                       uint32_t number, void *data, size_t size_bytes,
                                       sw_transfer *transfer, sw_error *err);
/* So many bytes of what was expected have come. */
void sw_bridge_count_more(sw_bridge *bridge, size_t size_bytes);
/* A message that was received was so much shorter than it might have been. */
void sw_bridge_count_less(sw_bridge *bridge, size_t size_bytes);
/* Nothing where nothing is under way. err->detail: the rank of the other carrier. */
SW_MUST_USE sw_status sw_bridge_wait(sw_bridge *bridge, sw_transfer *transfer, sw_error *err);
/* Of a closed wire: what was never waited for. */
void sw_bridge_drop(sw_bridge *bridge, sw_transfer *transfer);

#endif
