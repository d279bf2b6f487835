/* descriptor.h - descriptors of operations, which ranks compare byte by byte.
 *
 * All ranks must have equal descriptors of operation t, on every transport. If one differs, every
 * rank writes the same message about the lowest rank and the first that differs.
 *
 * Thread rule: any. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/comm.h"

/* ---- one rank's ---- */

enum {
    SW_FORM_POOL = 0,
    SW_FORM_SLOT,    /* every rank folds the whole chunk */
    SW_FORM_PIECE,   /* every rank folds a piece of the chunk, into its slot, */
    SW_FORM_COLLECT, /* and copies the peers' pieces from their slots: the next ticket */
};

typedef struct sw_descriptor { /* compared byte by byte between ranks up to `step`: no padding,
                                  zeroed before use */
    uint32_t kind, dtype, redop, form;
    int32_t root; /* of a reduction: 1 if it stays in replicas */
    uint32_t subject;
    uint64_t numel;
    uint64_t offset_bytes;
    uint64_t chunk;
    char label[SW_COMM_LABEL_BYTES];
    uint32_t step, round; /* compared between ranks whose round is not 0 */
} sw_descriptor;

/* Every `form` but POOL is private memory, which travels in chunks; the caller then sets
 * `chunk`. */
void sw_descriptor_fill(sw_descriptor *descriptor, const sw_op *op, uint32_t form);

/* "all_reduce 'bucket 0 of Mlp'": the short name, for errors of ranks that wait for the
 * operation. */
void sw_descriptor_name(const sw_descriptor *descriptor, char *text, size_t capacity);

/* Compare one rank's descriptor with those of the lowest rank and of the lowest rank that counts
 * rounds (NULL: none does). Returns the one that it contradicts, or NULL. */
const sw_descriptor *sw_descriptor_contradicted(const sw_descriptor *lowest,
                                                const sw_descriptor *counting,
                                                const sw_descriptor *other);

/* "ranks disagree on collective 7: rank 0 came with ...; rank 2 came with ...". SW_E_MISMATCH. */
sw_status sw_descriptor_disagree(uint32_t ticket, int first_rank, const sw_descriptor *first,
                                 int other_rank, const sw_descriptor *other, sw_error *err);

/* SW_E_INVALID for an operation that no transport of `world_size` ranks could run. */
SW_MUST_USE sw_status sw_op_check(const sw_op *op, int world_size, sw_error *err);
/* The same, and SW_E_STATE for private memory, which cannot be posted. */
SW_MUST_USE sw_status sw_op_check_post(const sw_op *op, int world_size, sw_error *err);

/* Return the operation of sw_comm_ops.gather. */
sw_op sw_op_gather(const void *mine, size_t size_bytes, const char *label);

/* ---- one operation of any number of ranks, described in constant space ---- */

/* It keeps the descriptors of the lowest rank and of the lowest rank that contradicts it, and the
 * same two among ranks that count rounds (joined ranks do not). Merging is associative, commutative
 * and idempotent, so every host ends with the same part, whatever the order and number of merges.
 */

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
