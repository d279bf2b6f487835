/* slot_transport.h - the transport between GPUs of one host, or between ranks of one GPU, through
 * slots in memory that all of them map; needs only the driver.
 *
 * Idea: all ranks run the same rounds, each enqueued on the one stream:
 *
 *     copy this rank's pieces into its slot number n mod 2
 *     for each peer: write n into its page (a number a pair of ranks)
 *     for each peer: wait until its number in our page is n or more
 *     copy the pieces for this rank out of the peers' slots
 *
 * A number n from a peer means that its pieces of round n are in its slot, and that it has read all
 * of round n - 1. So slot n mod 2 is free again after the waits of round n + 1, and no
 * acknowledgement is needed. FOLD sums in rank order: the bits of the deterministic fold. The host
 * waits only in create, wait and destroy.
 *
 *     part of a rank   a page of numbers, its end | slot 0 | slot 1
 *
 * If every rank can export GPU memory to the others (CUDA IPC), the slots lie there and copies
 * bypass the host; the ranks agree on it in create.
 *
 * A rank that fails marks its part, then releases its own waits: it writes the numbers that they
 * need into its own page. The data behind them is garbage; a check sees the mark.
 *
 * Cost of a round: W - 1 writes, W - 1 waits, and a copy for each piece. Bytes of a rank for n in
 * total: gather n / W to slots and n from them, all_reduce at most 2 n each way.
 *
 * Thread rule: as peers.h. */
#pragma once

#include "comm/peers.h"
#include "kernels/device_kernels.h"

typedef enum sw_slot_place {
    SW_SLOTS_ANYWHERE = 0, /* on the device if all ranks can, else on the host */
    SW_SLOTS_ON_HOST,
    SW_SLOTS_ON_DEVICE, /* or SW_E_UNSUPPORTED */
} sw_slot_place;

typedef struct sw_slot_parts {
    uint8_t *const *base; /* borrowed for the call; world_size addresses in this process of memory
                           * of sw_slot_part_bytes() each, page-aligned, zero at first, which
                           * outlives the transport */
    size_t slot_bytes;    /* at least 64 a rank; equal on all ranks, as the rest */
    sw_slot_place place;
} sw_slot_parts;

typedef struct sw_slot_config {
    sw_device *device;            /* borrowed, as the next two */
    const sw_kernel_set *kernels; /* for FOLD */
    sw_stream *stream;            /* stream of all operations */
    sw_slot_parts parts;
    int rank, world_size;
    int64_t timeout_ns;    /* limit of every wait */
    sw_watchdog *watchdog; /* borrowed: its errors end every wait; failures are reported to it */
} sw_slot_config;

size_t sw_slot_part_bytes(size_t slot_bytes);

/* Collective. Waits until all ranks have come, under the deadline: SW_E_TIMEOUT. SW_E_INVALID for
 * sizes. SW_E_UNSUPPORTED if the driver's streams cannot wait for numbers; also, with the same
 * message on all ranks, if slots must be on the device and some rank does not support that. Another
 * rank's failure returns that rank's message. */
SW_MUST_USE sw_status sw_slot_transport_create(const sw_slot_config *config, sw_peers **peers,
                                               sw_error *err);
