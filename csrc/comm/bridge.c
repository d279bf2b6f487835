/* bridge.c - see the header. */
#include "comm/bridge.h"

#include <stdio.h>

enum { NUMBER_BITS = 28 }; /* a Gloo tag is a non-negative int32_t */

static uint32_t tag_of(sw_message message, uint32_t number)
{
    return (uint32_t)message << NUMBER_BITS | (number & ((UINT32_C(1) << NUMBER_BITS) - 1));
}

static sw_status name_rank(sw_status status, int rank, sw_error *err)
{
    if (status != SW_OK && err)
        err->detail = rank;
    return status;
}

static sw_status begin_send(sw_bridge *bridge, int host, uint32_t tag, const void *data,
                            size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    *transfer = (sw_transfer){.rank = sw_host_carrier(bridge->map, host)};
    if (size_bytes == 0)
        return SW_OK;
    return name_rank(bridge->wire->send(bridge->wire->context, transfer->rank, tag, data,
                                        size_bytes, &transfer->work, err),
                     transfer->rank, err);
}

sw_status sw_bridge_send(sw_bridge *bridge, int host, sw_message message, uint32_t number,
                         const void *data, size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    if (size_bytes > 0)
        atomic_fetch_add_explicit(bridge->sent, size_bytes, memory_order_relaxed);
    return begin_send(bridge, host, tag_of(message, number), data, size_bytes, transfer, err);
}

sw_status sw_bridge_probe(sw_bridge *bridge, int host, uint32_t number, const void *data,
                          size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    return begin_send(bridge, host, tag_of(SW_MESSAGE_PROBE, number), data, size_bytes, transfer,
                      err);
}

sw_status sw_bridge_expect(sw_bridge *bridge, int host, sw_message message, uint32_t number,
                           void *data, size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    *transfer = (sw_transfer){.rank = sw_host_carrier(bridge->map, host)};
    if (size_bytes == 0)
        return SW_OK;
    return name_rank(bridge->wire->receive(bridge->wire->context, transfer->rank,
                                           tag_of(message, number), data, size_bytes,
                                           &transfer->work, err),
                     transfer->rank, err);
}

sw_status sw_bridge_receive(sw_bridge *bridge, int host, sw_message message, uint32_t number,
                            void *data, size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    sw_bridge_count_more(bridge, size_bytes);
    return sw_bridge_expect(bridge, host, message, number, data, size_bytes, transfer, err);
}

void sw_bridge_count_more(sw_bridge *bridge, size_t size_bytes)
{
    atomic_fetch_add_explicit(bridge->received, size_bytes, memory_order_relaxed);
}

void sw_bridge_count_less(sw_bridge *bridge, size_t size_bytes)
{
    atomic_fetch_sub_explicit(bridge->received, size_bytes, memory_order_relaxed);
}

sw_status sw_bridge_wait(sw_bridge *bridge, sw_transfer *transfer, sw_error *err)
{
    void *work = transfer->work;
    if (!work)
        return SW_OK;
    transfer->work = NULL;
    atomic_store_explicit(bridge->awaiting, transfer->rank, memory_order_relaxed);
    sw_status status = bridge->wire->wait(bridge->wire->context, work, err);
    atomic_store_explicit(bridge->awaiting, -1, memory_order_relaxed);
    return name_rank(status, transfer->rank, err);
}

void sw_bridge_drop(sw_bridge *bridge, sw_transfer *transfer)
{
    if (transfer->work)
        bridge->wire->drop(bridge->wire->context, transfer->work);
    transfer->work = NULL;
}
