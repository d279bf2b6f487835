/* calls.h - collectives that are one call: they run to their end.
 *
 * Thread rule: as for the communicator.
 */
#ifndef SW_COMM_CALLS_H
#define SW_COMM_CALLS_H

#include "comm/comm.h"

SW_MUST_USE sw_status sw_comm_barrier(sw_comm *comm, const char *label, sw_error *err);

typedef struct sw_span { /* a range of an arena */
    size_t offset_bytes, size_bytes;
} sw_span;

/* Gather every rank's slices of these ranges of op->arena, as `op` says otherwise, and wait. Every
 * range is checked before the first is issued: none runs if a later one is refused. */
SW_MUST_USE sw_status sw_comm_all_gather(sw_comm *comm, sw_op *op, const sw_span *ranges,
                                         size_t count, sw_error *err);

#endif
