/* hier_part.h - one operation of any number of ranks, described in constant space.
 *
 * It keeps the lowest rank's descriptor and that of the lowest rank that contradicts it; and, since
 * ranks that joined count no rounds, the same of those that do. Merging two of these is
 * associative, commutative and idempotent. So every host ends with the same one, independent of the
 * order and the number of merges.
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
    uint32_t payload_bytes; /* payload beside the data: of a rank, of a host or of all */
    sw_descriptor descriptor;
} sw_part_side;

typedef struct sw_part {
    sw_part_side lowest, odd;            /* odd: contradicts lowest */
    sw_part_side counting, odd_counting; /* the same of ranks that count rounds */
} sw_part;

/* Describe one rank's operation. */
void sw_part_begin(sw_part *part, int rank, const sw_descriptor *descriptor,
                   uint32_t payload_bytes);
void sw_part_merge(sw_part *into, const sw_part *other);
/* SW_OK, or SW_E_MISMATCH with the sentence about `ticket` that every host writes. */
SW_MUST_USE sw_status sw_part_check(const sw_part *part, uint32_t ticket, sw_error *err);

enum { SW_PART_MOST_BYTES = 4 + 4 * sizeof(sw_part_side) };

/* Write as bytes, of which most parts need a quarter; return how many, at most `capacity`, which is
 * at least SW_PART_MOST_BYTES. */
size_t sw_part_write(const sw_part *part, uint8_t *bytes);
/* *used: bytes read. Returns false for invalid bytes. */
bool sw_part_read(sw_part *part, const uint8_t *bytes, size_t size_bytes, size_t *used);

#endif
