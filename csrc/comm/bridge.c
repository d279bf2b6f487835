/* bridge.c - see the header. */
#include "comm/bridge.h"

#include "comm/account.h"

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

/* A thread inside the wire may never return from it; see hier_carrier.c. */
static const sw_wire *begin_call(sw_bridge *bridge)
{
    atomic_fetch_add(&bridge->inside, 1);
    return bridge->wire;
}

static void end_call(sw_bridge *bridge)
{
    atomic_fetch_sub(&bridge->inside, 1);
}

void sw_bridge_enter(sw_bridge *bridge, void **kept)
{
    if (!bridge->wire || !bridge->wire->enter)
        return;
    begin_call(bridge)->enter(bridge->wire->context, kept);
    end_call(bridge);
}

void sw_bridge_leave(sw_bridge *bridge, void *kept)
{
    if (!bridge->wire || !bridge->wire->leave)
        return;
    begin_call(bridge)->leave(bridge->wire->context, kept);
    end_call(bridge);
}

static sw_status begin_send(sw_bridge *bridge, int host, uint32_t tag, const void *data,
                            size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    *transfer = (sw_transfer){.rank = sw_host_carrier(bridge->map, host)};
    if (size_bytes == 0)
        return SW_OK;
    sw_status status = begin_call(bridge)->send(bridge->wire->context, transfer->rank, tag, data,
                                                size_bytes, &transfer->work, err);
    end_call(bridge);
    return name_rank(status, transfer->rank, err);
}

sw_status sw_bridge_send(sw_bridge *bridge, int host, sw_message message, uint32_t number,
                         const void *data, size_t size_bytes, sw_transfer *transfer, sw_error *err)
{
    if (size_bytes > 0) {
        atomic_fetch_add_explicit(bridge->sent, size_bytes, memory_order_relaxed);
        sw_account_moved(SW_LINK_TCP, size_bytes);
    }
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
    sw_status status =
        begin_call(bridge)->receive(bridge->wire->context, transfer->rank, tag_of(message, number),
                                    data, size_bytes, &transfer->work, err);
    end_call(bridge);
    return name_rank(status, transfer->rank, err);
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
    sw_status status = begin_call(bridge)->wait(bridge->wire->context, work, err);
    end_call(bridge);
    atomic_store_explicit(bridge->awaiting, -1, memory_order_relaxed);
    return name_rank(status, transfer->rank, err);
}

void sw_bridge_drop(sw_bridge *bridge, sw_transfer *transfer)
{
    if (transfer->work) {
        begin_call(bridge)->drop(bridge->wire->context, transfer->work);
        end_call(bridge);
    }
    transfer->work = NULL;
}
