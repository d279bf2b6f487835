/* hier_carrier.h - what a carrier's thread is made of: shared by hier_carrier.c (the thread),
 * hier_carrier_wait.c (its waits), hier_frames.c (what carriers agree on), hier_said.c (what is
 * said beside the data), hier_last.c (ends and signs of life), hier_reduce.c and hier_gather.c (the
 * data). Not for others.
 *
 * Thread rule: the carrier's thread alone, except where hier_state.h says so.
 */
#ifndef SW_COMM_HIER_CARRIER_H
#define SW_COMM_HIER_CARRIER_H

#include "comm/hier_cut.h"
#include "comm/hier_pack.h"
#include "comm/hier_part.h"
#include "comm/hier_state.h"

enum {
    SW_HIER_BLOCK_BYTES = 256 * 1024,      /* a message of partial sums: 2 ms at 1 Gbit/s */
    SW_HIER_AHEAD = 6,                     /* blocks sent before the first of them is folded */
    SW_HIER_SLOTS = 2 * SW_HIER_AHEAD + 2, /* blocks under way at most */
    SW_HIER_FEW = 32,                      /* hosts, up to which these hold; beyond, less */
    SW_HIER_LEAST_BLOCK_BYTES = 4096,
    SW_HIER_BATCH = 8,                /* operations that carriers agree on at once */
    SW_HIER_INLINE_BYTES = 32 * 1024, /* said by all hosts of a batch, inside its frames */
    SW_HIER_SMALL_BYTES = 2048,       /* private memory that is reduced inside frames */
    SW_HIER_PROBES = 8,               /* that a peer has not taken in yet */
    SW_HIER_WORDS = 4,                /* last ones, a host */
};

/* What is said beside one operation. */
typedef enum sw_said_kind {
    SW_SAID_NOTHING = 0,
    SW_SAID_BY_RANK, /* all_gather of private memory, use bits */
    SW_SAID_BY_HOST, /* partial sums of little private memory */
    SW_SAID_MERGED,  /* minima or maxima of it */
    SW_SAID_BY_ROOT, /* all of a short broadcast */
} sw_said_kind;

typedef struct sw_said {
    sw_said_kind kind;
    size_t unit_bytes; /* a rank, a host, or in all */
    size_t at_bytes;   /* into sw_agreement.memory: units from this host's own on, then those of
                          the hosts behind it, modulo their number */
    bool is_known;     /* BY_ROOT: this host has it */
} sw_said;

/* What some hosts, from this one on, come with next: at first this one, in the end all. */
typedef struct sw_agreement {
    uint32_t ticket, count; /* operations from `ticket` on, 1 to SW_HIER_BATCH */
    bool is_long;           /* what is said of the only one does not fit into frames */
    sw_part part[SW_HIER_BATCH];
    sw_said said[SW_HIER_BATCH];
    uint8_t *memory; /* owned */
    size_t capacity;
    uint8_t *packs; /* owned; a bit a host: its blocks of float32 in these are packets */
} sw_agreement;

/* That a host has ended, and why, whatever its carrier waits for. Whole words: it is looked at
 * while it arrives. */
typedef struct sw_last_word {
    uint32_t magic;
    sw_error reason;
    uint32_t crc; /* CRC-32C of what stands before it */
} sw_last_word;

/* One of hier->spread.hops, both ends: hop->to hears this host's frames, and asks whether it is
 * still there; hop->from is heard, and asked. */
typedef struct sw_carrier_hop {
    uint8_t *out, *in; /* borrowed from carrier->frames */
    sw_transfer frame_out, frame_in, leave_out, said_out, said_in;
    uint32_t sent, heard; /* frames, which number them */
    /* to hop->from: number n at n modulo SW_HIER_PROBES */
    sw_transfer probe_out[SW_HIER_PROBES];
    uint64_t probe_text[SW_HIER_PROBES];
    _Atomic uint32_t probes_sent, probes_settled; /* by the posting thread; by the carrier's */
    /* from hop->to: the next one's place */
    sw_transfer probe_in;
    _Atomic uint64_t probe_place;
    uint32_t probes_heard;
} sw_carrier_hop;

typedef struct sw_carrier_peer { /* one of hier->spread.peers */
    sw_last_word word[SW_HIER_WORDS];
    sw_transfer in[SW_HIER_WORDS], out[SW_HIER_WORDS]; /* never waited for */
} sw_carrier_peer;

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
    bool wire_closed; /* or there is none; the posting thread's */
    uint32_t blocks;  /* of batches that are complete */
    uint32_t pieces;  /* of broadcasts that are */

    sw_agreement next;                 /* the one under way, or offered */
    sw_carrier_hop *hops;              /* owned */
    uint8_t *frames;                   /* owned: memory of all hops' */
    size_t frame_bytes;                /* of one, at most */
    uint8_t *leave;                    /* owned: the frame that ends it */
    uint32_t turn;                     /* agreements so far */
    bool offered;                      /* the next one has begun before this batch is over */
    char whats[2][SW_HIER_BATCH][160]; /* of this batch and the next one, for messages: by turn */

    sw_carrier_peer *peers; /* owned */
    sw_last_word said[SW_HIER_WORDS];
    pthread_mutex_t words_lock; /* over words_said, and `said` up to it */
    int words_said;

    size_t block_bytes, ahead, slot_count; /* of blocks: see above */
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
};

#define SW_FOR_OTHER_HOSTS(carrier, g)                        \
    for (int g = 0; g < (carrier)->hier->map.host_count; ++g) \
        if (g != (carrier)->hier->host)

/* hier_carrier_wait.c
 * ------------------------------------------------------------------------------------------ */

/* Memory of operations is touched between these alone; not at all when the first fails. */
SW_MUST_USE sw_status sw_carrier_touch_begin(sw_carrier *carrier, sw_error *err);
void sw_carrier_touch_end(sw_carrier *carrier);
/* What a failure of the wire, in *err, means: in *err again. */
sw_status sw_carrier_blame(const sw_carrier *carrier, const char *what, sw_error *err);
SW_MUST_USE sw_status sw_carrier_wait(sw_carrier *carrier, sw_transfer *transfer, const char *what,
                                      sw_error *err);
/* Operations up to `ticket` are complete for this host. */
void sw_carrier_complete(sw_carrier *carrier, uint32_t ticket);

/* Until all ranks of this host have posted `ticket`. SW_E_STATE when this rank leaves. */
SW_MUST_USE sw_status sw_carrier_await_posts(sw_carrier *carrier, uint32_t ticket, sw_error *err);
/* Until a word of some page of this host has reached `value`. SW_E_STATE when this rank leaves. */
SW_MUST_USE sw_status sw_carrier_await_local(sw_carrier *carrier, const sw_hier_need *need,
                                             _Atomic uint32_t *word, uint32_t value, sw_error *err);

/* The operation `ticket`, of which this rank's thread has posted it. */
static inline const sw_hier_pending *sw_carrier_pending(const sw_carrier *carrier, uint32_t ticket)
{
    return &carrier->hier->pending[ticket % SW_HIER_RING];
}

static inline char *sw_carrier_what(sw_carrier *carrier, unsigned turn, uint32_t index)
{
    return carrier->whats[turn % 2][index];
}

/* hier_last.c
 * ------------------------------------------------------------------------------------------ */

/* Last words and probes of each peer have a place to arrive at. */
SW_MUST_USE sw_status sw_carrier_expect_words(sw_carrier *carrier, sw_error *err);
/* Takes in the probes that have come from hop->to. */
SW_MUST_USE sw_status sw_carrier_take_probes(sw_carrier *carrier, sw_carrier_hop *hop, int from,
                                             const char *what, sw_error *err);
/* hop->from has taken in as many as `taken` of those sent to it: they have left. */
SW_MUST_USE sw_status sw_carrier_settle_probes(sw_carrier *carrier, sw_carrier_hop *hop, int to,
                                               uint32_t taken, const char *what, sw_error *err);

/* hier_said.c
 * ------------------------------------------------------------------------------------------ */

/* What is said beside an operation, but for where it lies. */
sw_said sw_carrier_said(const sw_carrier *carrier, const sw_hier_pending *pending);
/* Bytes of it that `hosts` hosts say, from this one on; BY_ROOT: at most. */
size_t sw_carrier_said_bytes(const sw_carrier *carrier, const sw_said *said, int hosts);
/* What this host's ranks say of operation `index` of the agreement. */
SW_MUST_USE sw_status sw_carrier_speak(sw_carrier *carrier, uint32_t index, sw_error *err);
/* What `count` hosts say, the first of which is `distance` behind this one: size_bytes of it. */
void sw_carrier_take_said(sw_carrier *carrier, uint32_t index, int distance, int count,
                          const uint8_t *bytes, size_t size_bytes);
/* The same of the only operation of a long agreement, which all hosts have agreed on. */
SW_MUST_USE sw_status sw_carrier_exchange_said(sw_carrier *carrier, const char *what,
                                               sw_error *err);
/* What all hosts say of operation `index` comes to this host's ranks. */
SW_MUST_USE sw_status sw_carrier_hear(sw_carrier *carrier, uint32_t index, sw_error *err);

/* hier_frames.c
 * ------------------------------------------------------------------------------------------ */

/* Whether operations of this kind go through in one pipeline (hier_reduce.c). */
static inline bool sw_carrier_reduces(const sw_carrier *carrier, const sw_hier_pending *pending)
{
    sw_said_kind kind = sw_carrier_said(carrier, pending).kind;
    return (pending->op.kind == SW_OP_ALL_REDUCE || pending->op.kind == SW_OP_REDUCE_SCATTER) &&
           kind != SW_SAID_BY_HOST && kind != SW_SAID_MERGED;
}

/* Whether its data is moved by hier_stream.c. */
static inline bool sw_carrier_streams(const sw_hier_pending *pending)
{
    return pending->op.kind == SW_OP_BROADCAST && !pending->arena;
}

/* The longest frame. */
size_t sw_carrier_frame_bytes(const sw_carrier *carrier);
/* The next frame of each hop has a place to arrive at, so that no host waits to send it. */
SW_MUST_USE sw_status sw_carrier_expect_frames(sw_carrier *carrier, sw_error *err);
/* What all hosts come with next, from `ticket` on, which all ranks of this host have posted: the
 * same operations, *count of them, and what ranks say beside them has been heard. */
SW_MUST_USE sw_status sw_carrier_agree(sw_carrier *carrier, uint32_t ticket, uint32_t *count,
                                       sw_error *err);
/* While a batch is ending: what this host comes with next, if all its ranks have posted it from
 * `ticket` on and it reduces, so that carriers agree on it meanwhile. */
SW_MUST_USE sw_status sw_carrier_offer_early(sw_carrier *carrier, uint32_t ticket, sw_error *err);
/* The next frame of each hop says that this host goes, and why (NULL: it leaves). As good as it
 * can: a host that cannot be reached keeps this thread, and nobody waits for it. */
void sw_carrier_take_leave(sw_carrier *carrier, const sw_error *reason);

/* hier_reduce.c, hier_gather.c, hier_stream.c
 * ------------------------------------------------------------------------------------------ */

/* The data of `count` operations that reduce, each complete as its own is through. */
SW_MUST_USE sw_status sw_carrier_reduce(sw_carrier *carrier, uint32_t ticket, uint32_t count,
                                        sw_error *err);
/* The data of an all_gather on an arena. */
SW_MUST_USE sw_status sw_carrier_gather(sw_carrier *carrier, const sw_hier_pending *pending,
                                        const char *what, sw_error *err);

/* The data of broadcast `ticket`. */
SW_MUST_USE sw_status sw_carrier_stream(sw_carrier *carrier, uint32_t ticket, sw_error *err);

#endif
