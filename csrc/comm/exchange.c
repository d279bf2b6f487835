/* exchange.c - see the header. */
#include "comm/exchange.h"

#include <stdlib.h>

#include "base/bytes.h"

sw_status sw_exchange_begin(sw_exchange *exchange, size_t slice_bytes, uint8_t **message,
                            uint8_t **result, sw_error *err)
{
    exchange->slice_bytes = slice_bytes;
    return exchange->ops->begin(exchange, message, result, err);
}

static void count_slices(sw_exchange *exchange)
{
    exchange->sent_bytes += (uint64_t)(exchange->world_size - 1) * exchange->slice_bytes;
}

sw_status sw_exchange_scatter(sw_exchange *exchange, const void **pieces, sw_error *err)
{
    count_slices(exchange);
    return exchange->ops->scatter(exchange, pieces, err);
}

sw_status sw_exchange_gather(sw_exchange *exchange, uint8_t **whole, sw_error *err)
{
    count_slices(exchange);
    return exchange->ops->gather(exchange, whole, err);
}

sw_status sw_exchange_swap(sw_exchange *exchange, const void **pieces, uint8_t **whole,
                           bool *swapped, sw_error *err)
{
    *swapped = false;
    if (!exchange->ops->swap)
        return SW_OK;
    SW_TRY(exchange->ops->swap(exchange, pieces, whole, swapped, err));
    if (*swapped)
        exchange->sent_bytes += exchange->slice_bytes * (size_t)exchange->world_size;
    return SW_OK;
}

sw_status sw_exchange_agree(sw_exchange *exchange, bool *ok, sw_error *err)
{
    exchange->sent_bytes += (uint64_t)(exchange->world_size - 1);
    return exchange->ops->agree(exchange, ok, err);
}

static sw_status reserve(sw_exchange_buffers *buffers, size_t ranks, size_t slice_bytes,
                         sw_error *err)
{
    size_t bytes, capacity;
    if (slice_bytes <= buffers->capacity_bytes)
        return SW_OK;
    sw_exchange_buffers_fini(buffers);
    if (!sw_size_round_up(slice_bytes, SW_ALIGNMENT_BYTES, &capacity) ||
        !sw_size_multiply(capacity, 3 * ranks + 1, &bytes) ||
        !(buffers->message = aligned_alloc(SW_ALIGNMENT_BYTES, bytes)))
        SW_FAIL(err, SW_E_MEMORY, "no memory for compressed slices of %zu bytes", slice_bytes);
    buffers->received = buffers->message + ranks * capacity;
    buffers->whole = buffers->received + ranks * capacity;
    buffers->result = buffers->whole + ranks * capacity;
    buffers->capacity_bytes = capacity;
    return SW_OK;
}

sw_status sw_exchange_buffers_begin(sw_exchange_buffers *buffers, const sw_exchange *exchange,
                                    uint8_t **message, uint8_t **result, sw_error *err)
{
    SW_TRY(reserve(buffers, (size_t)exchange->world_size, exchange->slice_bytes, err));
    *message = buffers->message;
    *result = buffers->result;
    return SW_OK;
}

void sw_exchange_buffers_fini(sw_exchange_buffers *buffers)
{
    free(buffers->message);
    *buffers = (sw_exchange_buffers){.capacity_bytes = 0};
}
