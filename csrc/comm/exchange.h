/* exchange.h - the two-step exchange of encoded slices, and the codec that runs over it.
 *
 * Idea: a message has world_size equal slices. In the first step each rank gets its own slice of
 * every message. It folds them in rank order into the result of its slice. In the second step each
 * rank gets all results. An element is folded once, on one rank, so all ranks end with the same
 * bytes. A rank sends 2 (W - 1) / W of its message.
 *
 * Transports: the bridge between hosts (hier_codec.c), shared memory (compress/shared_exchange.c)
 * and torch's groups (python/codec_type.c).
 *
 * Thread rule: one at a time per exchange. Every rank makes the same calls. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tensor/dtype.h"

typedef struct sw_exchange sw_exchange;

/* Memory that a call returns is valid until the next begin. */
typedef struct sw_exchange_ops {
    /* Return the message, world_size slices of slice_bytes, and the memory for this rank's result.
     * Their contents are undefined. */
    sw_status (*begin)(sw_exchange *exchange, uint8_t **message, uint8_t **result, sw_error *err);
    /* Return this rank's slice of every message, in rank order: world_size addresses. */
    sw_status (*scatter)(sw_exchange *exchange, const void **pieces, sw_error *err);
    /* Return all results in rank order, contiguous, in private memory. */
    sw_status (*gather)(sw_exchange *exchange, uint8_t **whole, sw_error *err);
    /* *swapped: whole messages were exchanged, as it costs no more bytes; `pieces` has them, to be
     * folded into *whole. Equal on all ranks. */
    sw_status (*swap)(sw_exchange *exchange, const void **pieces, uint8_t **whole, bool *swapped,
                      sw_error *err);
    /* *ok: true if it is on every rank. It replaces gather where each rank needs only its result.
     */
    sw_status (*agree)(sw_exchange *exchange, bool *ok, sw_error *err);
} sw_exchange_ops;

struct sw_exchange {
    const sw_exchange_ops *ops;
    int rank, world_size;
    size_t slice_bytes;  /* of the message in progress */
    uint64_t sent_bytes; /* to peers, since creation */
};

/* The same, counted. `pieces`: world_size entries. */
SW_MUST_USE sw_status sw_exchange_begin(sw_exchange *exchange, size_t slice_bytes,
                                        uint8_t **message, uint8_t **result, sw_error *err);
SW_MUST_USE sw_status sw_exchange_scatter(sw_exchange *exchange, const void **pieces,
                                          sw_error *err);
SW_MUST_USE sw_status sw_exchange_gather(sw_exchange *exchange, uint8_t **whole, sw_error *err);
SW_MUST_USE sw_status sw_exchange_swap(sw_exchange *exchange, const void **pieces, uint8_t **whole,
                                       bool *swapped, sw_error *err);
SW_MUST_USE sw_status sw_exchange_agree(sw_exchange *exchange, bool *ok, sw_error *err);

/* Private memory of an exchange whose transport copies: a message, the slices received, a result
 * and the whole. */
typedef struct sw_exchange_buffers {
    uint8_t *message, *received, *result, *whole; /* owned as one block: message */
    size_t capacity_bytes;                        /* of a slice */
} sw_exchange_buffers;

/* Begin: make room for the exchange's slices. Contents are lost. No transport may access the old
 * ones. */
SW_MUST_USE sw_status sw_exchange_buffers_begin(sw_exchange_buffers *buffers,
                                                const sw_exchange *exchange, uint8_t **message,
                                                uint8_t **result, sw_error *err);
void sw_exchange_buffers_fini(sw_exchange_buffers *buffers);

/* A codec as an operation sees it: it averages float32 memory over an exchange, with state between
 * the rounds. Reference-counted, as a carrier may use it after its owner has given up. */
typedef struct sw_codec sw_codec;
typedef struct sw_codec_ops {
    void (*acquire)(sw_codec *codec);
    void (*release)(sw_codec *codec);
    /* Set whether some rank used member `member` of `bucket` in this round. An unused one takes no
     * part, and its state stays. */
    void (*select)(sw_codec *codec, size_t bucket, size_t member, bool used);
    /* Average numel elements in place. All ranks of the exchange end with the same bits. */
    sw_status (*average)(sw_codec *codec, size_t bucket, float *flat, size_t numel,
                         sw_exchange *exchange, sw_error *err);
} sw_codec_ops;
struct sw_codec {
    const sw_codec_ops *ops;
};
