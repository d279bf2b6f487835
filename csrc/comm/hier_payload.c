/* hier_payload.c - the payload of an operation: use bits, or all data of a small operation on
 * private memory.
 *
 * It is contiguous, in order of hosts with this one first: a hop sends a prefix of it, and received
 * data is appended. Short payloads travel inside frames (hier_frames.c); long ones take the same
 * hops in separate messages, once all hosts agree. */
#include <string.h>

#include "comm/hier_block.h"
#include "comm/hier_carrier_state.h"

/* Return true for a reduction of private memory small enough to run inside frames. */
static bool is_small(const sw_hier_pending *pending, size_t partial_bytes)
{
    const sw_op *op = &pending->op;
    return op->kind == SW_OP_ALL_REDUCE && !op->arena && !op->plan && op->beside_bytes == 0 &&
           partial_bytes > 0 && partial_bytes <= SW_HIER_SMALL_BYTES;
}

static size_t partial_bytes_of(const sw_op *op)
{
    return op->numel * sw_dtype_size_bytes(sw_partial_dtype(op->dtype));
}

sw_payload sw_carrier_payload(const sw_carrier *carrier, const sw_hier_pending *pending)
{
    const sw_op *op = &pending->op;
    size_t partial_bytes = partial_bytes_of(op);
    (void)carrier;
    if (is_small(pending, partial_bytes)) {
        bool merges = op->redop == SW_REDOP_MIN || op->redop == SW_REDOP_MAX;
        return (sw_payload){.kind = merges ? SW_PAYLOAD_MERGED : SW_PAYLOAD_BY_HOST,
                            .unit_bytes = partial_bytes};
    }
    if (op->kind == SW_OP_BROADCAST && pending->arena)
        return (sw_payload){.kind = SW_PAYLOAD_BY_ROOT, .unit_bytes = op->numel};
    bool gathers = op->kind == SW_OP_ALL_GATHER && !op->arena && op->numel > 0;
    if (gathers || op->beside_bytes > 0)
        return (sw_payload){.kind = SW_PAYLOAD_BY_RANK,
                            .unit_bytes = gathers ? op->numel : op->beside_bytes};
    return (sw_payload){.kind = SW_PAYLOAD_NONE};
}

bool sw_carrier_reduces(const sw_carrier *carrier, const sw_hier_pending *pending)
{
    sw_payload_kind kind = sw_carrier_payload(carrier, pending).kind;
    return (pending->op.kind == SW_OP_ALL_REDUCE || pending->op.kind == SW_OP_REDUCE_SCATTER) &&
           kind != SW_PAYLOAD_BY_HOST && kind != SW_PAYLOAD_MERGED;
}

/* Return the number of ranks of `hosts` hosts, this one first. */
static size_t ranks_of(const sw_hier *hier, int hosts)
{
    const sw_host_map *map = &hier->map;
    int end = hier->host + hosts, wrapped = end - map->host_count;
    int ranks = map->first[wrapped > 0 ? map->host_count : end] - map->first[hier->host];
    return (size_t)(ranks + (wrapped > 0 ? map->first[wrapped] : 0));
}

size_t sw_carrier_payload_bytes(const sw_carrier *carrier, const sw_payload *payload, int hosts)
{
    size_t units = payload->kind == SW_PAYLOAD_BY_RANK ? ranks_of(carrier->hier, hosts)
                   : payload->kind == SW_PAYLOAD_BY_HOST
                       ? (size_t)hosts
                       : payload->kind != SW_PAYLOAD_NONE && hosts > 0;
    return units * payload->unit_bytes;
}

static uint8_t *memory_of(const sw_carrier *carrier, uint32_t index)
{
    return carrier->next.memory + carrier->next.payload[index].at_bytes;
}

static const sw_hier_pending *pending_of(const sw_carrier *carrier, uint32_t index)
{
    return sw_carrier_pending(carrier, carrier->next.ticket + index);
}

/* Return the address at which `rank` provides its payload and this host's ranks read it. */
static uint8_t *place_of(const sw_carrier *carrier, const sw_hier_pending *pending, int rank)
{
    const sw_op *op = &pending->op;
    return op->beside_bytes > 0 ? op->beside->base[rank] + op->beside_offset_bytes
                                : sw_hier_mirrored(carrier->hier, pending, rank);
}

/* Write this host's payload to `to`. */
static void collect(sw_carrier *carrier, const sw_hier_pending *pending, sw_payload *payload,
                    uint8_t *to)
{
    const sw_hier *hier = carrier->hier;
    const sw_op *op = &pending->op;
    if (payload->kind == SW_PAYLOAD_BY_ROOT) {
        payload->is_known = hier->map.host_of[op->root] == hier->host;
        if (payload->is_known)
            memcpy(to, sw_carrier_contribution(carrier, pending, sw_hier_local(hier, op->root), 0),
                   op->numel);
        return;
    }
    for (int l = 0; l < hier->local_count; ++l) {
        if (payload->kind == SW_PAYLOAD_BY_RANK)
            memcpy(to + (size_t)l * payload->unit_bytes,
                   place_of(carrier, pending, hier->members[l]), payload->unit_bytes);
        else
            carrier->source[l] = sw_carrier_contribution(carrier, pending, l, 0);
    }
    if (payload->kind != SW_PAYLOAD_BY_RANK)
        sw_partial_fold(to, carrier->source, hier->local_count, op->numel, op->dtype, op->redop);
}

sw_status sw_carrier_collect_payload(sw_carrier *carrier, uint32_t index, sw_error *err)
{
    sw_payload *payload = &carrier->next.payload[index];
    if (payload->kind == SW_PAYLOAD_NONE)
        return SW_OK;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    collect(carrier, pending_of(carrier, index), payload, memory_of(carrier, index));
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

void sw_carrier_take_payload(sw_carrier *carrier, uint32_t index, int distance, int count,
                             const uint8_t *bytes, size_t size_bytes)
{
    sw_payload *payload = &carrier->next.payload[index];
    const sw_op *op = &pending_of(carrier, index)->op;
    uint8_t *memory = memory_of(carrier, index);
    if (payload->kind == SW_PAYLOAD_BY_ROOT) {
        if (size_bytes == payload->unit_bytes && !payload->is_known)
            memcpy(memory, bytes, size_bytes);
        payload->is_known |= size_bytes == payload->unit_bytes;
        return;
    }
    if (payload->kind == SW_PAYLOAD_MERGED) {
        void *to = memory;
        const void *both[] = {memory, bytes};
        if (size_bytes == payload->unit_bytes)
            sw_kernels()->fold[sw_partial_dtype(op->dtype)](&to, 1, both, 2, op->numel, 1,
                                                            op->redop);
        return;
    }
    size_t begin = sw_carrier_payload_bytes(carrier, payload, distance);
    size_t end = sw_carrier_payload_bytes(carrier, payload, distance + count);
    if (size_bytes == end - begin) /* otherwise the agreement reports it */
        memcpy(memory + begin, bytes, size_bytes);
}

/* Both sides agree on the operation, so the receiver knows a message's length. */
static sw_status begin_hop(sw_carrier *carrier, int at, bool sends, const char *what, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    const sw_hop *hop = &spread->hops[at];
    const sw_payload *payload = &carrier->next.payload[0];
    sw_carrier_hop *state = &carrier->hops[at];
    int distance = (hop->from - spread->host + spread->host_count) % spread->host_count;
    size_t begin = sw_carrier_payload_bytes(carrier, payload, distance);
    size_t end = sw_carrier_payload_bytes(carrier, payload, distance + hop->count);
    return sends ? sw_carrier_send(carrier, hop->to, SW_MESSAGE_BESIDE, carrier->turn,
                                   carrier->next.memory,
                                   sw_carrier_payload_bytes(carrier, payload, hop->count),
                                   &state->payload_out, what, err)
                 : sw_carrier_receive(carrier, hop->from, SW_MESSAGE_BESIDE, carrier->turn,
                                      carrier->next.memory + begin, end - begin, &state->payload_in,
                                      what, err);
}

sw_status sw_carrier_exchange_payload(sw_carrier *carrier, const char *what, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    for (int i = 0; i < spread->hop_count; ++i)
        SW_TRY(begin_hop(carrier, i, false, what, err));
    for (int i = 0, next; i < spread->hop_count; i = next) {
        for (next = i;
             next < spread->hop_count && spread->hops[next].round == spread->hops[i].round; ++next)
            SW_TRY(begin_hop(carrier, next, true, what, err));
        for (int k = i; k < next; ++k)
            SW_TRY(sw_carrier_wait(carrier, &carrier->hops[k].payload_in, what, err));
    }
    for (int i = 0; i < spread->hop_count; ++i)
        SW_TRY(sw_carrier_wait(carrier, &carrier->hops[i].payload_out, what, err));
    return SW_OK;
}

/* Copy other hosts' payload to all places where this host's ranks read it. */
static void deliver_ranks(sw_carrier *carrier, const sw_hier_pending *pending,
                          const sw_payload *payload, const uint8_t *from)
{
    const sw_host_map *map = &carrier->hier->map;
    size_t bytes = payload->unit_bytes;
    from += (size_t)carrier->hier->local_count * bytes;
    for (int n = 1; n < map->host_count; ++n) {
        int host = (carrier->hier->host + n) % map->host_count;
        for (int i = 0; i < sw_host_size(map, host); ++i, from += bytes)
            memcpy(place_of(carrier, pending, sw_host_members(map, host)[i]), from, bytes);
    }
}

static void finish_small(sw_carrier *carrier, const sw_hier_pending *pending,
                         const sw_payload *payload, const uint8_t *from)
{
    const sw_hier *hier = carrier->hier;
    const sw_op *op = &pending->op;
    int hosts = hier->map.host_count, count = payload->kind == SW_PAYLOAD_MERGED ? 1 : hosts;
    for (int l = 0; l < hier->local_count; ++l)
        carrier->destination[l] = sw_carrier_contribution(carrier, pending, l, 0);
    for (int g = 0; g < count; ++g) /* in host order, equal on every host */
        carrier->source[g] = from + (size_t)(count == 1 ? 0 : (g - hier->host + hosts) % hosts) *
                                        payload->unit_bytes;
    sw_partial_finish(carrier->destination, hier->local_count, carrier->source, count, op->numel,
                      op->dtype, 1.0 / hier->comm.world_size, op->redop);
}

sw_status sw_carrier_deliver_payload(sw_carrier *carrier, uint32_t index, sw_error *err)
{
    const sw_hier_pending *pending = pending_of(carrier, index);
    const sw_payload *payload = &carrier->next.payload[index];
    if (payload->kind == SW_PAYLOAD_NONE)
        return SW_OK;
    if (payload->kind == SW_PAYLOAD_BY_ROOT && !payload->is_known)
        return sw_error_set(err, SW_E_COMM, pending->op.root,
                            "no host has the data that rank %d broadcasts as '%.*s'",
                            pending->op.root, SW_COMM_LABEL_BYTES - 1, pending->op.label);
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    if (payload->kind == SW_PAYLOAD_BY_RANK)
        deliver_ranks(carrier, pending, payload, memory_of(carrier, index));
    else if (payload->kind == SW_PAYLOAD_BY_ROOT)
        for (int l = 0; l < carrier->hier->local_count; ++l)
            memcpy(sw_carrier_contribution(carrier, pending, l, 0), memory_of(carrier, index),
                   pending->op.numel);
    else
        finish_small(carrier, pending, payload, memory_of(carrier, index));
    sw_carrier_touch_end(carrier);
    return SW_OK;
}
