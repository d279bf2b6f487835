/* comm_average.h - means of private float32 memory over a communicator, through a compressor.
 *
 * Over hosts the memory is copied to a range that this host's ranks map and posted as an operation
 * with a codec: it travels while the caller computes. On one host the ranks compress over shared
 * memory, in the wait.
 *
 * Thread rule: as the communicator's. Every rank makes the same calls; one mean is in flight. */
#pragma once

#include "comm/comm.h"
#include "compress/compressor.h"

typedef struct sw_comm_average sw_comm_average;

/* `comm` is borrowed: it outlives the object. */
SW_MUST_USE sw_status sw_comm_average_create(sw_comm *comm, sw_comm_average **average,
                                             sw_error *err);
void sw_comm_average_destroy(sw_comm_average *average);
/* Begin the mean of `numel` elements at `data`, borrowed until the wait, as bucket `number` of the
 * compressor, whose members were set. Collective when memory grows. */
SW_MUST_USE sw_status sw_comm_average_begin(sw_comm_average *average, sw_compressor *compressor,
                                            size_t number, float *data, size_t numel,
                                            const char *label, sw_error *err);
/* Wait until `data` has the mean. No effect if none is in flight. */
SW_MUST_USE sw_status sw_comm_average_wait(sw_comm_average *average, sw_error *err);
bool sw_comm_average_is_in_flight(const sw_comm_average *average);
/* The number of ranks between which messages are compressed: of hosts, if there are several. */
int sw_comm_average_world_size(const sw_comm_average *average);
