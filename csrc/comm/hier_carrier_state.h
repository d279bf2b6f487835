/* hier_carrier_state.h - the state of a carrier's thread, shared by hier_carrier.c (the thread),
 * hier_host.c (its waits), hier_frames.c (agreement, data beside
 * operations), hier_last.c (ends and probes), hier_reduce.c and hier_gather.c (the data). Private
 * to them.
 *
 * Thread rule: the carrier's thread alone, except where hier_state.h says so. */
#pragma once

#include "comm/descriptor.h"
#include "comm/hier_block.h"
#include "comm/hier_state.h"
#include "comm/host_map.h"

enum {
    SW_HIER_BLOCK_BYTES = 256 * 1024, /* a message of partial sums: 2 ms at 1 Gbit/s */
    SW_HIER_AHEAD = 6,                /* blocks sent before the first of them is folded */
    SW_HIER_FEW = 32,                 /* with more hosts than this the values shrink */
    SW_HIER_LEAST_BLOCK_BYTES = 4096,
    SW_HIER_BATCH = 8,                /* operations that carriers agree on at once */
    SW_HIER_INLINE_BYTES = 32 * 1024, /* payload of all hosts for a batch, inside its frames */
    SW_HIER_SMALL_BYTES = 2048,       /* private memory that is reduced inside frames */
    SW_HIER_PROBES = 8,               /* probes in flight to a peer */
    SW_HIER_ENDS = 4,                 /* end messages per host */
};

/* The payload that travels beside one operation. */
typedef enum sw_payload_kind {
    SW_PAYLOAD_NONE = 0,
    SW_PAYLOAD_BY_RANK, /* all_gather of private memory, use bits */
    SW_PAYLOAD_BY_HOST, /* partial sums of little private memory */
    SW_PAYLOAD_MERGED,  /* minima or maxima of it */
    SW_PAYLOAD_BY_ROOT, /* all of a short broadcast */
} sw_payload_kind;

typedef struct sw_payload {
    sw_payload_kind kind;
    size_t unit_bytes; /* bytes of a rank, a host or all hosts */
    size_t at_bytes;   /* into sw_agreement.memory: this host's unit, then those of the hosts after
                        * it, modulo their number */
    bool is_known;     /* BY_ROOT: this host has it */
} sw_payload;

/* The next operations of consecutive hosts, this one first: at the start only this one, at the end
 * all. */
typedef struct sw_agreement {
    uint32_t ticket, count; /* operations from `ticket` on, 1 to SW_HIER_BATCH */
    bool is_long;           /* its only operation's payload does not fit into frames */
    sw_part part[SW_HIER_BATCH];
    sw_payload payload[SW_HIER_BATCH];
    uint8_t *memory; /* owned */
    size_t capacity;
    uint8_t *packs; /* owned; a bit a host: set if its float32 blocks in this batch are packets */
} sw_agreement;

/* Announces that a host has ended, and why, at any point of its carrier's work. It consists of
 * whole words, since it is read while it arrives. */
typedef struct sw_end_message {
    uint32_t magic;
    sw_error reason;
    uint32_t crc; /* CRC-32C of the bytes before it */
} sw_end_message;

/* One of hier->spread.hops, both ends: hop->to receives this host's frames and sends probes;
 * hop->from sends frames and receives probes. */
typedef struct sw_carrier_hop {
    uint8_t *out, *in; /* borrowed from carrier->frames */
    sw_transfer frame_out, frame_in, leave_out, payload_out, payload_in;
    uint32_t sent, received; /* frames so far: their numbers */
    /* probes to hop->from: number n at n modulo SW_HIER_PROBES */
    sw_transfer probe_out[SW_HIER_PROBES];
    uint64_t probe_text[SW_HIER_PROBES];
    _Atomic uint32_t probes_sent, probes_settled; /* probes sent, by the posting thread;
                                                   * acknowledged, by the carrier's */
    /* buffer of the next probe from hop->to */
    sw_transfer probe_in;
    _Atomic uint64_t probe_place;
    uint32_t probes_taken;
} sw_carrier_hop;

typedef struct sw_carrier_peer { /* one of hier->spread.peers */
    sw_end_message end[SW_HIER_ENDS];
    sw_transfer in[SW_HIER_ENDS], out[SW_HIER_ENDS]; /* never waited for */
} sw_carrier_peer;

typedef struct sw_carrier_place { /* one block in flight, to and from one host */
    uint8_t *partial, *arrived;   /* a block, or its packet */
    uint8_t *packet;              /* the packet to the host; this host's: of the result */
    sw_transfer partial_out, partial_in, result_out, result_in, accumulated_out, accumulated_in;
} sw_carrier_place;

typedef struct sw_carrier_host {
    uint8_t *opened;   /* a block of memory for an opened packet */
    uint8_t *elements; /* of the block that is folded */
    bool packs;        /* its blocks of this batch are packets */
} sw_carrier_host;

/* What a host's sum travels through, compressed: hier_codec.c. */
typedef struct sw_coded {
    sw_exchange exchange; /* first; over hosts */
    sw_carrier *carrier;  /* borrowed */
    sw_exchange_buffers buffers;
    sw_transfer *in, *out; /* owned as one block: transfer_count of each */
    size_t transfer_count;
    float *flat; /* owned: this host's sum */
    size_t capacity;
} sw_coded;

struct sw_carrier {
    sw_hier *hier;
    sw_bridge bridge;
    sw_thread thread;
    _Atomic bool stop, finished;
    bool wire_closed; /* even without a wire; the posting thread's */
    uint32_t blocks;  /* blocks of complete batches */
    uint32_t pieces;  /* pieces of complete broadcasts */

    sw_agreement next;    /* the one in progress, or offered */
    sw_carrier_hop *hops; /* owned */
    uint8_t *frames;      /* owned: memory of all hops' frames */
    size_t frame_bytes;   /* longest frame */
    uint8_t *leave;       /* owned: the frame that ends it */
    uint32_t turn;        /* agreements so far */
    bool offered;         /* the next one has begun before this batch is complete */
    char operations[2][SW_HIER_BATCH][160]; /* names of operations of this batch and the next, for
                                             * messages: in turn */
    const char *what; /* borrowed: names the operation that the wire works for */

    sw_carrier_peer *peers; /* owned */
    sw_end_message ends[SW_HIER_ENDS];
    pthread_mutex_t ends_lock; /* guards ends_sent, and `ends` up to it */
    int ends_sent;

    size_t block_bytes, ahead, slot_count; /* at most the limits above */
    sw_carrier_place *places; /* owned; slot_count times host_count: sw_carrier_places */
    uint8_t *memory;          /* owned: memory of the places */
    const void **source;
    void **destination;
    bool *contributes, *host_contributes; /* owned: SW_HIER_BATCH of each */
    sw_packing packing;
    uint64_t slow_bytes_per_s; /* threshold of the wire */
    sw_carrier_host *hosts;    /* owned; by host */
    sw_coded coded;
};

#define SW_FOR_OTHER_HOSTS(carrier, g)                        \
    for (int g = 0; g < (carrier)->hier->map.host_count; ++g) \
        if (g != (carrier)->hier->host)

/* ---- hier_host.c ---- */

/* Access memory of operations only between these two, and only if the first succeeds. */
SW_MUST_USE sw_status sw_carrier_touch_begin(sw_carrier *carrier, sw_error *err);
void sw_carrier_touch_end(sw_carrier *carrier);
/* Replace the wire's error in *err by one that names operation and peer. The calls below do so with
 * carrier->what. */
sw_status sw_carrier_blame(const sw_carrier *carrier, const char *what, sw_error *err);
SW_MUST_USE sw_status sw_carrier_wait(sw_carrier *carrier, sw_transfer *transfer, sw_error *err);
SW_MUST_USE sw_status sw_carrier_send(sw_carrier *carrier, int host, sw_message message,
                                      uint32_t number, const void *data, size_t size_bytes,
                                      sw_transfer *transfer, sw_error *err);
SW_MUST_USE sw_status sw_carrier_receive(sw_carrier *carrier, int host, sw_message message,
                                         uint32_t number, void *data, size_t size_bytes,
                                         sw_transfer *transfer, sw_error *err);
/* Mark operations up to `ticket` as complete for this host. */
void sw_carrier_complete(sw_carrier *carrier, uint32_t ticket);

/* Wait until all ranks of this host have posted `ticket`. SW_E_STATE when this rank leaves. */
SW_MUST_USE sw_status sw_carrier_await_posts(sw_carrier *carrier, uint32_t ticket, sw_error *err);
/* Wait until `word` of a page of this host has reached `value`. SW_E_STATE: this rank leaves. */
SW_MUST_USE sw_status sw_carrier_await_local(sw_carrier *carrier, const sw_hier_need *need,
                                             _Atomic uint32_t *word, uint32_t value, sw_error *err);

/* Return operation `ticket`, which this rank's thread has posted. */
static inline const sw_hier_pending *sw_carrier_pending(const sw_carrier *carrier, uint32_t ticket)
{
    return &carrier->hier->pending[ticket % SW_HIER_RING];
}

/* Address of the contribution of rank number `local` of this host, from an element on. */
static inline uint8_t *sw_carrier_contribution(const sw_carrier *carrier,
                                               const sw_hier_pending *pending, int local,
                                               size_t element)
{
    return pending->arena->base[carrier->hier->members[local]] + pending->at_bytes +
           element * sw_dtype_size_bytes(pending->op.dtype);
}

/* Return the place of each host for a block. */
static inline sw_carrier_place *sw_carrier_places(const sw_carrier *carrier, size_t block)
{
    return carrier->places + block % carrier->slot_count * (size_t)carrier->hier->map.host_count;
}

static inline char *sw_carrier_what(sw_carrier *carrier, unsigned turn, uint32_t index)
{
    return carrier->operations[turn % 2][index];
}

/* ---- hier_last.c ---- */

/* Make a reason whose bytes another host has sent one that can be raised here. */
static inline void sw_carrier_take_reason(sw_error *reason)
{
    reason->message[sizeof reason->message - 1] = '\0';
    if ((unsigned)reason->status - 1 >= SW_E_DEVICE)
        reason->status = SW_E_COMM;
}

/* Expect end messages and probes of each peer. */
SW_MUST_USE sw_status sw_carrier_expect_ends(sw_carrier *carrier, sw_error *err);
/* Receive the probes that have arrived from hop->to. */
SW_MUST_USE sw_status sw_carrier_take_probes(sw_carrier *carrier, sw_carrier_hop *hop, int from,
                                             sw_error *err);
/* hop->from has received `taken` of the probes sent to it: complete their transfers. */
SW_MUST_USE sw_status sw_carrier_settle_probes(sw_carrier *carrier, sw_carrier_hop *hop, int to,
                                               uint32_t taken, sw_error *err);

/* ---- hier_frames.c ---- */

/* Return true for operations that run in one pipeline (hier_reduce.c). */
bool sw_carrier_reduces(const sw_hier_pending *pending);
/* Return true if hier_gather.c moves its data. */
static inline bool sw_carrier_streams(const sw_hier_pending *pending)
{
    return pending->op.kind == SW_OP_BROADCAST && !pending->arena;
}

/* Bytes of the longest frame. */
size_t sw_carrier_frame_bytes(const sw_carrier *carrier);
/* Post the receive of each hop's next frame, so that no host waits to send it. */
SW_MUST_USE sw_status sw_carrier_expect_frames(sw_carrier *carrier, sw_error *err);
/* Agree on the next *count operations, equal on all hosts, and deliver their payload. `ticket` is
 * the first; all ranks of this host have posted it. */
SW_MUST_USE sw_status sw_carrier_agree(sw_carrier *carrier, uint32_t ticket, uint32_t *count,
                                       sw_error *err);
/* While a batch is ending, offer this host's next operations if all its ranks have posted `ticket`
 * and it is a reduction, so that carriers agree on it meanwhile. */
SW_MUST_USE sw_status sw_carrier_offer_early(sw_carrier *carrier, uint32_t ticket, sw_error *err);
/* Send a frame on each hop that this host ends, and why (NULL: it leaves). Best effort: an
 * unreachable host may block this thread, for which no rank waits. */
void sw_carrier_take_leave(sw_carrier *carrier, const sw_error *reason);

/* ---- hier_reduce.c, hier_gather.c ---- */

/* Move the data of `count` reductions; each completes with its last block. */
SW_MUST_USE sw_status sw_carrier_reduce(sw_carrier *carrier, uint32_t ticket, uint32_t count,
                                        sw_error *err);
/* hier_codec.c: the same for reductions with a codec, one after the other. */
SW_MUST_USE sw_status sw_carrier_compress(sw_carrier *carrier, uint32_t ticket, uint32_t count,
                                          sw_error *err);
/* Move the data of an all_gather on an arena. */
SW_MUST_USE sw_status sw_carrier_gather(sw_carrier *carrier, const sw_hier_pending *pending,
                                        sw_error *err);

/* Move the data of broadcast `ticket`. */
SW_MUST_USE sw_status sw_carrier_stream(sw_carrier *carrier, uint32_t ticket, sw_error *err);
