/* hier_frames.c - the agreement of carriers before they move data. Frames name the next operations
 * of their hosts and carry their payload; or they announce that a host has ended, and why.
 *
 * A carrier offers every operation that all ranks of its host have posted, up to a batch. In each
 * round (sw_dissemination) it sends all it knows and merges all it receives. After the last round
 * all hosts know the operations that all of them offer, and any disagreement on them. A disputed
 * operation is always the first of a batch, so those before it are complete.
 *
 *     head | of each operation: part, length, payload | a bit a host: packs
 *     head | why this host ends */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/hier_block.h"
#include "comm/hier_carrier_state.h"

/* ---- payloads ---- */

/* The payload of an operation: use bits, or all data of a small operation on
 * private memory.
 *
 * It is contiguous, in order of hosts with this one first: a hop sends a prefix of it, and received
 * data is appended. Short payloads travel inside frames; long ones take the same
 * hops in separate messages, once all hosts agree. */

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

/* Return the description of an operation's payload, without its place. */
static sw_payload payload_of(const sw_hier_pending *pending)
{
    const sw_op *op = &pending->op;
    size_t partial_bytes = partial_bytes_of(op);
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

bool sw_carrier_reduces(const sw_hier_pending *pending)
{
    sw_payload_kind kind = payload_of(pending).kind;
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

/* Return the payload bytes of `hosts` hosts, this one first; for BY_ROOT the maximum. */
static size_t payload_size(const sw_carrier *carrier, const sw_payload *payload, int hosts)
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

/* Copy this host's payload of operation `index` into the agreement. */
static sw_status collect_payload(sw_carrier *carrier, uint32_t index, sw_error *err)
{
    sw_payload *payload = &carrier->next.payload[index];
    if (payload->kind == SW_PAYLOAD_NONE)
        return SW_OK;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    collect(carrier, pending_of(carrier, index), payload, memory_of(carrier, index));
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

/* Copy `size_bytes` of payload of `count` hosts, the first of them `distance` after this one. */
static void take_payload(sw_carrier *carrier, uint32_t index, int distance, int count,
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
    size_t begin = payload_size(carrier, payload, distance);
    size_t end = payload_size(carrier, payload, distance + count);
    if (size_bytes == end - begin) /* otherwise the agreement reports it */
        memcpy(memory + begin, bytes, size_bytes);
}

/* Both sides agree on the operation, so the receiver knows a message's length. */
static sw_status begin_hop(sw_carrier *carrier, int at, bool sends, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    const sw_hop *hop = &spread->hops[at];
    const sw_payload *payload = &carrier->next.payload[0];
    sw_carrier_hop *state = &carrier->hops[at];
    int distance = (hop->from - spread->host + spread->host_count) % spread->host_count;
    size_t begin = payload_size(carrier, payload, distance);
    size_t end = payload_size(carrier, payload, distance + hop->count);
    return sends ? sw_carrier_send(carrier, hop->to, SW_MESSAGE_BESIDE, carrier->turn,
                                   carrier->next.memory, payload_size(carrier, payload, hop->count),
                                   &state->payload_out, err)
                 : sw_carrier_receive(carrier, hop->from, SW_MESSAGE_BESIDE, carrier->turn,
                                      carrier->next.memory + begin, end - begin, &state->payload_in,
                                      err);
}

/* Exchange the payload of the only operation of a long agreement, once all hosts agree on it. */
static sw_status exchange_payload(sw_carrier *carrier, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    for (int i = 0; i < spread->hop_count; ++i)
        SW_TRY(begin_hop(carrier, i, false, err));
    for (int i = 0, next; i < spread->hop_count; i = next) {
        for (next = i;
             next < spread->hop_count && spread->hops[next].round == spread->hops[i].round; ++next)
            SW_TRY(begin_hop(carrier, next, true, err));
        for (int k = i; k < next; ++k)
            SW_TRY(sw_carrier_wait(carrier, &carrier->hops[k].payload_in, err));
    }
    for (int i = 0; i < spread->hop_count; ++i)
        SW_TRY(sw_carrier_wait(carrier, &carrier->hops[i].payload_out, err));
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

/* Deliver the payload of all hosts of operation `index` to this host's ranks. */
static sw_status deliver_payload(sw_carrier *carrier, uint32_t index, sw_error *err)
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

/* ---- frames ---- */

enum {
    FRAME_MAGIC = 0x53574635 /* "SWF5" */,
    ALIGNMENT = 16, /* alignment of payloads */
};

typedef struct frame_head {
    uint32_t magic, bytes;  /* total length */
    uint32_t state;         /* sw_member_state */
    uint32_t ticket, count; /* operations from `ticket` on */
    uint32_t host, hosts;   /* number of hosts in this frame, the sender first */
    uint32_t probes;        /* probes received so far from the reader of this frame */
} frame_head;

typedef struct cursor { /* a position in a received frame, never past `end` */
    const uint8_t *at, *end;
} cursor;

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static size_t packs_bytes(const sw_carrier *carrier)
{
    return ((size_t)carrier->hier->map.host_count + 7) / 8;
}

size_t sw_carrier_frame_bytes(const sw_carrier *carrier)
{
    size_t of_operations = SW_HIER_BATCH * aligned(SW_PART_MOST_BYTES + sizeof(uint32_t));
    return aligned(sizeof(frame_head) + of_operations + SW_HIER_INLINE_BYTES +
                   SW_HIER_BATCH * ALIGNMENT + packs_bytes(carrier) + sizeof(sw_error));
}

static const sw_descriptor *descriptor_of(const sw_hier *hier, int local, uint32_t ticket)
{
    return &sw_hier_page(hier, local)->ring[ticket % SW_HIER_RING];
}

static int rank_of(const sw_carrier *carrier, int host)
{
    return sw_host_carrier(&carrier->hier->map, host);
}

/* ---- receive buffers ---- */

static sw_status expect_frame(sw_carrier *carrier, int at, sw_error *err)
{
    sw_carrier_hop *state = &carrier->hops[at];
    return sw_bridge_expect(&carrier->bridge, carrier->hier->spread.hops[at].from, SW_MESSAGE_FRAME,
                            state->received + 1, state->in, carrier->frame_bytes, &state->frame_in,
                            err);
}

sw_status sw_carrier_expect_frames(sw_carrier *carrier, sw_error *err)
{
    for (int i = 0; i < carrier->hier->spread.hop_count; ++i)
        if (expect_frame(carrier, i, err) != SW_OK)
            return sw_carrier_blame(carrier, "waiting for operations", err);
    return SW_OK;
}

/* ---- sending ---- */

/* Return an operation's payload bytes in a frame about `hosts` hosts. */
static uint32_t sent_payload_bytes(const sw_carrier *carrier, const sw_payload *payload, int hosts)
{
    if (carrier->next.is_long || (payload->kind == SW_PAYLOAD_BY_ROOT && !payload->is_known))
        return 0;
    return (uint32_t)payload_size(carrier, payload, hosts);
}

static size_t write_frame(const sw_carrier *carrier, int at)
{
    const sw_agreement *next = &carrier->next;
    const sw_hop *hop = &carrier->hier->spread.hops[at];
    const sw_carrier_hop *state = &carrier->hops[at];
    size_t used = sizeof(frame_head);
    for (uint32_t i = 0; i < next->count; ++i) {
        uint32_t bytes = sent_payload_bytes(carrier, &next->payload[i], hop->count);
        used += sw_part_write(&next->part[i], state->out + used);
        memcpy(state->out + used, &bytes, sizeof bytes);
        used = aligned(used + sizeof bytes);
        memcpy(state->out + used, next->memory + next->payload[i].at_bytes, bytes);
        used = aligned(used + bytes);
    }
    memcpy(state->out + used, next->packs, packs_bytes(carrier));
    used += packs_bytes(carrier);
    frame_head head = {.magic = FRAME_MAGIC,
                       .bytes = (uint32_t)used,
                       .state = SW_MEMBER_ACTIVE,
                       .ticket = next->ticket,
                       .count = next->count,
                       .host = (uint32_t)carrier->hier->host,
                       .hosts = (uint32_t)hop->count,
                       .probes = state->probes_taken};
    memcpy(state->out, &head, sizeof head);
    return used;
}

static sw_status send_round(sw_carrier *carrier, int round, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    for (int i = 0; i < spread->hop_count; ++i) {
        sw_carrier_hop *state = &carrier->hops[i];
        if (spread->hops[i].round != round)
            continue;
        SW_TRY(sw_carrier_take_probes(carrier, state, spread->hops[i].to, err));
        SW_TRY(sw_carrier_send(carrier, spread->hops[i].to, SW_MESSAGE_FRAME, ++state->sent,
                               state->out, write_frame(carrier, i), &state->frame_out, err));
    }
    return SW_OK;
}

/* ---- receiving ---- */

static bool take(cursor *from, void *to, size_t bytes)
{
    if ((size_t)(from->end - from->at) < bytes)
        return false;
    memcpy(to, from->at, bytes);
    from->at += bytes;
    return true;
}

/* Round `at` up to ALIGNMENT, relative to the frame's `begin`. */
static bool align(cursor *from, const uint8_t *begin)
{
    size_t used = aligned((size_t)(from->at - begin));
    if ((size_t)(from->end - begin) < used)
        return false;
    from->at = begin + used;
    return true;
}

/* Read the entry of one operation; merge it if this host still offers the operation. */
static bool read_operation(sw_carrier *carrier, int at, uint32_t index, const uint8_t *begin,
                           cursor *from)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    const sw_hop *hop = &spread->hops[at];
    int distance = (hop->from - spread->host + spread->host_count) % spread->host_count;
    sw_part part;
    size_t used;
    uint32_t bytes;
    if (!sw_part_read(&part, from->at, (size_t)(from->end - from->at), &used))
        return false;
    from->at += used;
    if (!take(from, &bytes, sizeof bytes) || !align(from, begin) ||
        (size_t)(from->end - from->at) < bytes)
        return false;
    if (index < carrier->next.count) {
        sw_part_merge(&carrier->next.part[index], &part);
        if (!carrier->next.is_long)
            take_payload(carrier, index, distance, hop->count, from->at, bytes);
    }
    from->at += bytes;
    return align(from, begin);
}

static sw_status no_frame(const sw_carrier *carrier, int host, sw_error *err)
{
    int rank = rank_of(carrier, host);
    return sw_error_set(err, SW_E_COMM, rank, "rank %d sent an invalid frame", rank);
}

/* Read why a host ends. */
static sw_status read_end(const sw_carrier *carrier, int host, const frame_head *head, cursor from,
                          sw_error *err)
{
    char peer[SW_COMM_PEER_BYTES];
    int rank = rank_of(carrier, host);
    if (head->state == SW_MEMBER_LEFT) {
        sw_hier_peer(&carrier->hier->comm, rank, peer);
        return sw_error_set(err, SW_E_COMM, rank, "%s left the group before its part of %s", peer,
                            carrier->what);
    }
    if (head->state != SW_MEMBER_ENDED || !take(&from, err, sizeof *err))
        return no_frame(carrier, host, err);
    sw_carrier_take_reason(err);
    return err->status;
}

static sw_status check_head(const sw_carrier *carrier, const sw_hop *hop, const frame_head *head,
                            sw_error *err)
{
    char peer[SW_COMM_PEER_BYTES];
    int rank = rank_of(carrier, hop->from);
    if (head->magic != FRAME_MAGIC)
        return sw_error_set(err, SW_E_COMM, rank, "rank %d runs another version of the engine",
                            rank);
    if (head->bytes < sizeof *head || head->bytes > carrier->frame_bytes)
        return no_frame(carrier, hop->from, err);
    if (head->state != SW_MEMBER_ACTIVE)
        return SW_OK;
    sw_hier_peer(&carrier->hier->comm, rank, peer);
    if (head->ticket != carrier->next.ticket)
        return sw_error_set(err, SW_E_COMM, rank, "%s came with operation %u, expected %u", peer,
                            head->ticket, carrier->next.ticket);
    if (head->count < 1 || head->count > SW_HIER_BATCH || head->host != (uint32_t)hop->from ||
        head->hosts != (uint32_t)hop->count)
        return no_frame(carrier, hop->from, err);
    return SW_OK;
}

/* Merge a frame into what this host knows. */
static sw_status read_frame(sw_carrier *carrier, int at, sw_error *err)
{
    const sw_hop *hop = &carrier->hier->spread.hops[at];
    sw_carrier_hop *state = &carrier->hops[at];
    sw_agreement *next = &carrier->next;
    frame_head head;
    memcpy(&head, state->in, sizeof head);
    SW_TRY(check_head(carrier, hop, &head, err));
    sw_bridge_count_more(&carrier->bridge, head.bytes);
    cursor from = {.at = state->in + sizeof head, .end = state->in + head.bytes};
    if (head.state != SW_MEMBER_ACTIVE)
        return read_end(carrier, hop->from, &head, from, err);
    if (head.count < next->count)
        next->count = head.count;
    for (uint32_t i = 0; i < head.count; ++i)
        if (!read_operation(carrier, at, i, state->in, &from))
            return no_frame(carrier, hop->from, err);
    if ((size_t)(from.end - from.at) != packs_bytes(carrier))
        return no_frame(carrier, hop->from, err);
    for (size_t i = 0; i < packs_bytes(carrier); ++i)
        next->packs[i] |= from.at[i];
    return sw_carrier_settle_probes(carrier, state, hop->from, head.probes, err);
}

/* ---- agreeing ---- */

static bool all_posted(const sw_hier *hier, uint32_t ticket)
{
    for (int l = 0; l < hier->local_count; ++l)
        if (!sw_ticket_reached(atomic_load(&sw_hier_page(hier, l)->posted), ticket))
            return false;
    return true;
}

/* Return the payload bytes of all hosts for `ticket`, if they agree with this host. */
static size_t payload_bytes(const sw_carrier *carrier, uint32_t ticket, sw_payload *payload)
{
    *payload = payload_of(sw_carrier_pending(carrier, ticket));
    return payload_size(carrier, payload, carrier->hier->map.host_count);
}

/* Count this host's operations from `ticket` on that fit into one batch. *bytes: their payload. */
static uint32_t batch_here(sw_carrier *carrier, uint32_t ticket, size_t *bytes)
{
    uint32_t count = 0;
    *bytes = 0;
    do {
        sw_payload payload;
        size_t more = aligned(payload_bytes(carrier, ticket + count, &payload));
        const sw_hier_pending *next = sw_carrier_pending(carrier, ticket + count);
        bool joins = sw_carrier_reduces(next) &&
                     !next->op.codec == !sw_carrier_pending(carrier, ticket)->op.codec;
        if (count > 0 && (!joins || *bytes + more > SW_HIER_INLINE_BYTES))
            return count;
        payload.at_bytes = *bytes;
        carrier->next.payload[count++] = payload;
        *bytes += more;
    } while (sw_carrier_reduces(sw_carrier_pending(carrier, ticket)) && count < SW_HIER_BATCH &&
             all_posted(carrier->hier, ticket + count));
    return count;
}

static sw_status reserve(sw_agreement *next, size_t bytes, sw_error *err)
{
    if (bytes <= next->capacity)
        return SW_OK;
    uint8_t *more = realloc(next->memory, bytes);
    if (!more)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu bytes beside an operation", bytes);
    next->memory = more;
    next->capacity = bytes;
    return SW_OK;
}

/* Describe the operation of this host's ranks. */
static void fill_part(sw_carrier *carrier, uint32_t index)
{
    const sw_hier *hier = carrier->hier;
    uint32_t ticket = carrier->next.ticket + index;
    uint32_t bytes = (uint32_t)carrier->next.payload[index].unit_bytes;
    const sw_op *op = &sw_carrier_pending(carrier, ticket)->op;
    for (int l = 0; l < hier->local_count; ++l) {
        sw_part part;
        sw_part_begin(&part, hier->members[l], descriptor_of(hier, l, ticket), bytes);
        if (l == 0)
            carrier->next.part[index] = part;
        else
            sw_part_merge(&carrier->next.part[index], &part);
    }
    snprintf(sw_carrier_what(carrier, carrier->turn + 1, index), sizeof carrier->operations[0][0],
             "%s '%.*s'", sw_op_kind_name(op->kind), SW_COMM_LABEL_BYTES - 1, op->label);
}

/* Start the next agreement with the operations that this host offers. */
static sw_status offer(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    sw_agreement *next = &carrier->next;
    int host = carrier->hier->host;
    size_t bytes;
    next->ticket = ticket;
    next->count = batch_here(carrier, ticket, &bytes);
    next->is_long = bytes > SW_HIER_INLINE_BYTES;
    SW_TRY(reserve(next, bytes, err));
    memset(next->packs, 0, packs_bytes(carrier));
    if (carrier->packing.on)
        next->packs[host / 8] = (uint8_t)(1u << host % 8);
    for (uint32_t i = 0; i < next->count; ++i) {
        fill_part(carrier, i);
        SW_TRY(collect_payload(carrier, i, err));
    }
    carrier->offered = true;
    carrier->what = sw_carrier_what(carrier, carrier->turn + 1, 0);
    return send_round(carrier, 0, err);
}

sw_status sw_carrier_offer_early(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    sw_payload payload;
    if (carrier->offered || !all_posted(carrier->hier, ticket))
        return SW_OK;
    bool is_short = payload_bytes(carrier, ticket, &payload) <= (size_t)SW_HIER_INLINE_BYTES;
    return is_short && sw_carrier_reduces(sw_carrier_pending(carrier, ticket))
               ? offer(carrier, ticket, err)
               : SW_OK;
}

static sw_status receive_rounds(sw_carrier *carrier, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    for (int i = 0; i < spread->hop_count; ++i) {
        if (i > 0 && spread->hops[i].round != spread->hops[i - 1].round)
            SW_TRY(send_round(carrier, spread->hops[i].round, err));
        SW_TRY(sw_carrier_wait(carrier, &carrier->hops[i].frame_in, err));
        carrier->hops[i].received++;
        SW_TRY(read_frame(carrier, i, err));
    }
    return SW_OK;
}

sw_status sw_carrier_agree(sw_carrier *carrier, uint32_t ticket, uint32_t *count, sw_error *err)
{
    sw_agreement *next = &carrier->next;
    if (!carrier->offered)
        SW_TRY(offer(carrier, ticket, err));
    carrier->offered = false;
    carrier->turn++;
    carrier->what = sw_carrier_what(carrier, carrier->turn, 0);
    SW_TRY(receive_rounds(carrier, err));
    SW_TRY(sw_part_check(&next->part[0], ticket, err));
    *count = 1;
    while (*count < next->count && /* a disputed operation is the first of the next batch */
           sw_part_check(&next->part[*count], ticket + *count, err) == SW_OK)
        ++*count;
    if (next->is_long)
        SW_TRY(exchange_payload(carrier, err));
    for (uint32_t i = 0; i < *count; ++i)
        SW_TRY(deliver_payload(carrier, i, err));
    for (int i = 0; i < carrier->hier->spread.hop_count; ++i)
        SW_TRY(sw_carrier_wait(carrier, &carrier->hops[i].frame_out, err));
    for (int g = 0; g < carrier->hier->map.host_count; ++g)
        carrier->hosts[g].packs = next->packs[g / 8] >> g % 8 & 1;
    return sw_carrier_expect_frames(carrier, err); /* the next frames may arrive while this batch
                                                    * moves */
}

/* ---- ending ---- */

/* Hosts that disagree have read each other's frames, and both end. Without a buffer for the last
 * frame each would wait until the other receives. */
static void expect_last_frames(sw_carrier *carrier)
{
    sw_error ignored;
    for (int i = 0; i < carrier->hier->spread.hop_count; ++i)
        if (!carrier->hops[i].frame_in.work && expect_frame(carrier, i, &ignored) != SW_OK)
            carrier->hops[i].frame_in.work = NULL; /* it has ended already */
}

void sw_carrier_take_leave(sw_carrier *carrier, const sw_error *reason)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    sw_error ignored;
    frame_head head = {.magic = FRAME_MAGIC,
                       .bytes = sizeof head + (reason ? sizeof *reason : 0),
                       .state = reason ? SW_MEMBER_ENDED : SW_MEMBER_LEFT};
    memcpy(carrier->leave, &head, sizeof head);
    if (reason)
        memcpy(carrier->leave + sizeof head, reason, sizeof *reason);
    expect_last_frames(carrier);
    for (int i = 0; i < spread->hop_count; ++i) {
        sw_carrier_hop *state = &carrier->hops[i];
        if (sw_bridge_send(&carrier->bridge, spread->hops[i].to, SW_MESSAGE_FRAME, ++state->sent,
                           carrier->leave, head.bytes, &state->leave_out, &ignored) != SW_OK)
            state->leave_out.work = NULL;
    }
    for (int i = 0; i < spread->hop_count; ++i)
        if (sw_bridge_wait(&carrier->bridge, &carrier->hops[i].leave_out, &ignored) != SW_OK)
            continue; /* it has ended already */
}
