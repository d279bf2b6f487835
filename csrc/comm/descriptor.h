/* descriptor.h - descriptors of operations, which ranks compare byte by byte.
 *
 * All ranks must have equal descriptors of operation t, on every transport. If one differs, every
 * rank writes the same message about the lowest rank and the first that differs.
 *
 * Thread rule: any. */
#ifndef SW_COMM_DESCRIPTOR_H
#define SW_COMM_DESCRIPTOR_H

#include "comm/comm.h"

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

#endif
