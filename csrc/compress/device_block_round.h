/* device_block_round.h - a bucket as records between GPUs: the rounds of block_round.c, enqueued.
 *
 * The host reads no record: where a host decides whether errors change, kernels read a verdict in
 * device memory.
 *
 * Over several hosts (device_hosts.h) the ranks of each add float32 values first. Then all of them
 * have their host's mean, and its error, and encode it alike; each sends the records of some
 * owners, and hosts are what a record is folded over.
 *
 * Thread rule: as the communicator's. */
#pragma once

#include "comm/device_hosts.h"
#include "compress/block_cut.h"

/* Device memory of the caller, borrowed until the stream has passed the call. message, received and
 * whole: world_size slices of cut->each records. */
typedef struct sw_device_block_memory {
    uint8_t *message, *received, *whole;
    /* cut->each blocks of elements, with `hosts` for each rank of this host; NULL: no error
     * feedback */
    float *rest;
    int32_t *flags;       /* world_size + 1; NULL without error feedback */
    sw_device_range flat; /* with `hosts`: what the spans lie in */
} sw_device_block_memory;

/* Enqueue the mean of the cut's spans, which are in device memory. *sent_bytes: to peers. `hosts`:
 * with memory; NULL: one host. */
SW_MUST_USE sw_status sw_device_block_round(sw_device_comm *comm, const sw_device_hosts *hosts,
                                            const sw_block_cut *cut,
                                            const sw_device_block_memory *memory, bool keeps_slice,
                                            sw_stream *stream, uint64_t *sent_bytes, sw_error *err);
