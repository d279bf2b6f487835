/* hier_block.h - the arithmetic of one block between hosts, and its form on the wire.
 *
 * Thread rule: any, but the carrier's thread alone for sw_packing. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/kernels.h"

/* ---- partial sums ---- */

/* A fold in two steps: partial sums inside a host in the accumulation type, then their sum over
 * hosts, scaled once and rounded once. On one host the two steps give the bits of the whole
 * fold. */

/* The type of a partial result: float32 for halves, else the type itself. */
sw_dtype sw_partial_dtype(sw_dtype dtype);

/* partial = source[0] + source[1] + ... (or min, or max), in sw_partial_dtype(dtype). */
void sw_partial_fold(void *partial, const void *const *source, int source_count, size_t numel,
                     sw_dtype dtype, sw_redop op);

/* Set every destination to round(scale * (partial[0] + partial[1] + ...)) in `dtype`; scale only
 * for SW_REDOP_MEAN. If the partial type is `dtype`, a destination may be one of the partials.
 * partial_count >= 1. */
void sw_partial_finish(void *const *destination, int destination_count, const void *const *partial,
                       int partial_count, size_t numel, sw_dtype dtype, double scale, sw_redop op);

/* ---- packets ---- */

/* Float32 blocks on a slow wire: fewer bytes, the same bits.
 *
 * A *packet* is a block as it travels: an 8-byte length, then the exact record of that length
 * (kernels/compress_kernels.h); or 0, then the plain elements. Before each batch a carrier decides,
 * by the previous batch's rate, whether to pack its blocks, and announces it in its frame. Results
 * do not depend on it. */

enum { SW_PACKET_HEAD_BYTES = 8 };

/* The most bytes of a packet of `numel` > 0 elements. */
static inline size_t sw_packet_most_bytes(size_t numel)
{
    return SW_PACKET_HEAD_BYTES + numel * sizeof(float);
}

/* Fill `packet`, of sw_packet_most_bytes(); return the bytes to send. */
size_t sw_packet_fill(uint8_t *packet, const void *source, size_t numel);
/* Unpack the elements into `out`; *size_bytes: its size. SW_E_COMM unless it holds `numel`
 * elements. */
SW_MUST_USE sw_status sw_packet_open(void *out, const uint8_t *packet, size_t numel,
                                     size_t *size_bytes, sw_error *err);

typedef struct sw_packing_span {
    uint64_t plain_bytes, sent_bytes; /* elements, and as sent */
    int64_t elapsed_ns;               /* set only in `seen` */
} sw_packing_span;

typedef struct sw_packing {
    bool on;               /* this host's blocks of the next batch are packets */
    bool seen_packed;      /* blocks in `seen` were packets */
    uint32_t pause;        /* batches until the next attempt after one without gain */
    sw_packing_span batch; /* the batch in progress */
    sw_packing_span
        seen; /* batches of one kind since the last decision: a single one may be too short */
} sw_packing;

/* Decide for the next batch. The last one, `packed` or not, took `elapsed_ns` from its agreement to
 * its end. `slow_bytes_per_s`: see sw_wire. */
void sw_packing_learn(sw_packing *packing, bool packed, uint64_t slow_bytes_per_s,
                      int64_t elapsed_ns);
