/* hier_part.h - one operation of any number of ranks, described in constant space.
 *
 * It keeps the descriptors of the lowest rank and of the lowest rank that contradicts it, and the
 * same two among ranks that count rounds (joined ranks do not). Merging is associative, commutative
 * and idempotent, so every host ends with the same part, whatever the order and number of merges.
 *
 * Thread rule: any. */
#ifndef SW_COMM_HIER_PART_H
#define SW_COMM_HIER_PART_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/descriptor.h"

typedef struct sw_part_side {
    int32_t rank;           /* -1: none */
    uint32_t payload_bytes; /* payload beside the data: per rank, per host or total */
    sw_descriptor descriptor;
} sw_part_side;

typedef struct sw_part {
    sw_part_side lowest, odd;            /* odd: contradicts lowest */
    sw_part_side counting, odd_counting; /* the same two among ranks that count rounds */
} sw_part;

/* Describe one rank's operation. */
void sw_part_begin(sw_part *part, int rank, const sw_descriptor *descriptor,
                   uint32_t payload_bytes);
void sw_part_merge(sw_part *into, const sw_part *other);
/* SW_OK, or SW_E_MISMATCH with the message about `ticket`, equal on every host. */
SW_MUST_USE sw_status sw_part_check(const sw_part *part, uint32_t ticket, sw_error *err);

enum { SW_PART_MOST_BYTES = 4 + 4 * sizeof(sw_part_side) };

/* Encode as bytes; return their number. Most parts need a quarter of `capacity`, which is at least
 * SW_PART_MOST_BYTES. */
size_t sw_part_write(const sw_part *part, uint8_t *bytes);
/* *used: bytes read. Returns false for invalid bytes. */
bool sw_part_read(sw_part *part, const uint8_t *bytes, size_t size_bytes, size_t *used);

#endif
