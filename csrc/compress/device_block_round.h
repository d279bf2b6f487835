/* device_block_round.h - a bucket as records between GPUs: the rounds of block_round.c, enqueued.
 *
 * The host reads no record: where a host decides whether errors change, kernels read a verdict in
 * device memory.
 *
 * Thread rule: as the communicator's. */
#ifndef SW_COMPRESS_DEVICE_BLOCK_ROUND_H
#define SW_COMPRESS_DEVICE_BLOCK_ROUND_H

#include "comm/device_comm.h"
#include "compress/block_cut.h"

/* Device memory of the caller, borrowed until the stream has passed the call. message, received and
 * whole: world_size slices of cut->each records. */
typedef struct sw_device_block_memory {
    uint8_t *message, *received, *whole;
    float *rest;    /* cut->each blocks of elements; NULL: no error feedback */
    int32_t *flags; /* world_size + 1; NULL without error feedback */
} sw_device_block_memory;

/* Enqueue the mean of the cut's spans, which are in device memory. *sent_bytes: to peers. */
SW_MUST_USE sw_status sw_device_block_round(sw_device_comm *comm, const sw_block_cut *cut,
                                            const sw_device_block_memory *memory, bool keeps_slice,
                                            sw_stream *stream, uint64_t *sent_bytes, sw_error *err);

#endif
