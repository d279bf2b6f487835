/* hier_pack.h - float32 blocks on a slow wire: fewer bytes, the same bits.
 *
 * A *packet* is a block as it travels: 8 bytes that say how long the exact record is that follows
 * (kernels/compress_kernels.h), or 0, and the elements follow as they are. A carrier decides from
 * batch to batch, by how fast the one before went, whether its own blocks travel so, and says it in
 * its frame. Nothing that is computed depends on it.
 *
 * Thread rule: the carrier's thread alone.
 */
#ifndef SW_COMM_HIER_PACK_H
#define SW_COMM_HIER_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { SW_PACKET_HEAD_BYTES = 8 };

/* What a packet of `numel` > 0 elements may take. */
static inline size_t sw_packet_most_bytes(size_t numel)
{
    return SW_PACKET_HEAD_BYTES + numel * sizeof(float);
}

/* Fills `packet`, of sw_packet_most_bytes(); the bytes to be sent. */
size_t sw_packet_fill(uint8_t *packet, const void *source, size_t numel);
/* Its elements into `out`, and *size_bytes of it. SW_E_COMM when it is none of `numel` elements. */
SW_MUST_USE sw_status sw_packet_open(void *out, const uint8_t *packet, size_t numel,
                                     size_t *size_bytes, sw_error *err);

typedef struct sw_packing_span {
    uint64_t plain_bytes, sent_bytes; /* as elements, and as sent */
    int64_t elapsed_ns;               /* of `seen` alone */
} sw_packing_span;

typedef struct sw_packing {
    bool on;               /* this host's blocks of the next batch are packets */
    bool seen_packed;      /* those in `seen` were */
    uint32_t pause;        /* batches until it is tried again where it gained nothing */
    sw_packing_span batch; /* this one, while it goes on */
    sw_packing_span
        seen; /* those of one kind since the last decision: one alone may be too short */
} sw_packing;

/* A batch, `packed` or not, took `elapsed_ns` from agreement to its end: what the next one does.
 * `slow_bytes_per_s`: see sw_wire. */
void sw_packing_learn(sw_packing *packing, bool packed, uint64_t slow_bytes_per_s,
                      int64_t elapsed_ns);

#endif
