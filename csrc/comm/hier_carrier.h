/* hier_carrier.h - what a carrier's thread is made of: shared by hier_carrier.c (the thread),
 * hier_frames.c (what carriers agree on), hier_reduce.c and hier_gather.c (the data). Not for
 * others.
 *
 * Thread rule: the carrier's thread alone, except where hier_state.h says so.
 */
#ifndef SW_COMM_HIER_CARRIER_H
#define SW_COMM_HIER_CARRIER_H

#include "comm/hier_cut.h"
#include "comm/hier_pack.h"
#include "comm/hier_state.h"

typedef struct sw_carrier_slot {  /* one block under way; arrays of host_count */
    uint8_t **partial, **arrived; /* a block, or its packet */
    uint8_t **packet;             /* to a host; the result's, where this host is */
    sw_transfer *partial_out, *partial_in, *result_out, *result_in, *standing_out, *standing_in;
} sw_carrier_slot;

struct sw_carrier {
    sw_hier *hier;
    sw_bridge bridge;
    sw_thread thread;
    _Atomic bool stop, finished;
    bool wire_closed;         /* or there is none; the posting thread's, as are the probes sent */
    uint32_t frames;          /* sent so far: one a batch, and one more at the end */
    uint32_t blocks;          /* of batches that are complete */
    sw_frame out, last, *in;  /* in: owned, host_count */
    sw_last_word *last_words; /* owned; by host, this one's own among them */
    sw_transfer *last_in, *last_out; /* owned by last_in; never waited for */
    _Atomic bool last_said;
    sw_transfer *probe_out; /* owned, SW_HIER_PROBES of host_count: number n at n modulo that */
    _Atomic uint32_t probes_sent, probes_settled; /* by the posting thread; by the carrier's */
    uint32_t *probes_heard;                       /* owned; by host */
    sw_transfer *frame_out, *frame_in, *beside_out, *beside_in, *leave_out; /* owned, host_count */
    uint8_t *beside; /* owned: what this host says */
    uint8_t **heard; /* owned: what each host says */
    size_t beside_capacity, *heard_capacity;
    sw_carrier_slot slots[SW_HIER_SLOTS];
    uint8_t *memory; /* owned: of the slots */
    const void **source;
    void **destination;
    bool *contributes, *host_contributes; /* owned: SW_HIER_BATCH of each */
    sw_packing packing;
    uint64_t slow_bytes_per_s; /* of the wire */
    uint8_t **opened;          /* owned; a block of memory for each host: what came in a packet */
    uint8_t **elements;        /* owned; of the block that is folded, by host */
    bool *packs;               /* owned; by host, whether its blocks of this batch are packets */
    bool offered;              /* the next frame has left before this batch is over */
    unsigned turn;
    char whats[2][SW_HIER_BATCH][160]; /* of this batch and the next one, for messages: by turn */
};

#define SW_FOR_OTHER_HOSTS(carrier, g)                        \
    for (int g = 0; g < (carrier)->hier->map.host_count; ++g) \
        if (g != (carrier)->hier->host)

/* Memory of operations is touched between these alone; not at all when the first fails. */
SW_MUST_USE sw_status sw_carrier_touch_begin(sw_carrier *carrier, sw_error *err);
void sw_carrier_touch_end(sw_carrier *carrier);
/* What a failure of the wire, in *err, means: in *err again. */
sw_status sw_carrier_blame(const sw_carrier *carrier, const char *what, sw_error *err);
SW_MUST_USE sw_status sw_carrier_wait(sw_carrier *carrier, sw_transfer *transfer, const char *what,
                                      sw_error *err);

/* The operation `ticket`, of which this rank's thread has posted it. */
static inline const sw_hier_pending *sw_carrier_pending(const sw_carrier *carrier, uint32_t ticket)
{
    return &carrier->hier->pending[ticket % SW_HIER_RING];
}

static inline char *sw_carrier_what(sw_carrier *carrier, unsigned turn, uint32_t index)
{
    return carrier->whats[turn % 2][index];
}

/* Whether operations of this kind go through in one pipeline (hier_reduce.c). */
static inline bool sw_carrier_reduces(const sw_op *op)
{
    return op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER;
}

/* The last word of each host has a place to arrive at. */
SW_MUST_USE sw_status sw_carrier_expect_last_words(sw_carrier *carrier, sw_error *err);
/* Other hosts' probes that their frames tell of arrive; those that our frame told of have left. */
SW_MUST_USE sw_status sw_carrier_settle_probes(sw_carrier *carrier, const char *what,
                                               sw_error *err);
/* The next frame of each host has a place to arrive at, so that no host waits to send it. */
SW_MUST_USE sw_status sw_carrier_expect_frames(sw_carrier *carrier, sw_error *err);
/* What all hosts come with next, from `ticket` on, which all ranks of this host have posted: the
 * same operations, *count of them, and every rank's words beside them lie where every rank reads
 * them. */
SW_MUST_USE sw_status sw_carrier_exchange_frames(sw_carrier *carrier, uint32_t ticket,
                                                 uint32_t *count, sw_error *err);
/* While a batch is ending: what this host comes with next, if all its ranks have posted it from
 * `ticket` on and it reduces, so that carriers agree on it meanwhile. */
SW_MUST_USE sw_status sw_carrier_offer_early(sw_carrier *carrier, uint32_t ticket, sw_error *err);
/* The other hosts' next frame from here says that this one goes, and why (NULL: it leaves). As good
 * as it can: a host that cannot be reached keeps this thread, and nobody waits for it. */
void sw_carrier_take_leave(sw_carrier *carrier, const sw_error *reason);

/* The data of `count` operations that reduce, each complete as its own is through. */
SW_MUST_USE sw_status sw_carrier_reduce(sw_carrier *carrier, uint32_t ticket, uint32_t count,
                                        sw_error *err);
/* The data of an all_gather on an arena. */
SW_MUST_USE sw_status sw_carrier_gather(sw_carrier *carrier, const sw_hier_pending *pending,
                                        const char *what, sw_error *err);
/* Operations up to `ticket` are complete for this host. */
void sw_carrier_complete(sw_carrier *carrier, uint32_t ticket);

#endif
