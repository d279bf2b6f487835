/* hier_carrier.c - the thread that executes a host's operations, on the host's lowest rank.
 *
 * An operation begins when all ranks of the host have posted it. Carriers first agree on it by
 * *frames* (hier_frames.c); posted reductions form one batch. Then data moves in blocks
 * (hier_reduce.c, hier_gather.c). Every wait is for the oldest transfer, and no message of an
 * operation leaves before its frames agree, so carriers cannot deadlock.
 *
 * The thread's wait for the wire may never return; the threads that wait for the carrier keep the
 * deadlines. The thread never frees memory to which the wire may still write. */
#include <stdlib.h>

#include "base/bytes.h"
#include "comm/hier_carrier_state.h"
#include "platform/futex.h"

enum { LEAVE_MS = 1000, STOP_MS = 60000 };

/* Execute *ticket and the posted operations that join its batch; *ticket becomes the next one. */
static sw_status carry_next(sw_carrier *carrier, uint32_t *ticket, sw_error *err)
{
    uint32_t count;
    SW_TRY(sw_carrier_await_posts(carrier, *ticket, err));
    /* The posting thread overwrites the entry only after `wired` has passed it. */
    const sw_hier_pending *pending = sw_carrier_pending(carrier, *ticket);
    const sw_op *op = &pending->op;
    SW_TRY(sw_carrier_agree(carrier, *ticket, &count, err));
    if (op->codec)
        SW_TRY(sw_carrier_compress(carrier, *ticket, count, err));
    else if (sw_carrier_reduces(pending))
        SW_TRY(sw_carrier_reduce(carrier, *ticket, count, err));
    else if (op->kind == SW_OP_ALL_GATHER && op->arena && op->numel > 0)
        SW_TRY(sw_carrier_gather(carrier, pending, err));
    else if (sw_carrier_streams(pending))
        SW_TRY(sw_carrier_stream(carrier, *ticket, err));
    *ticket += count;
    sw_carrier_complete(carrier, *ticket - 1);
    return SW_OK;
}

static void *carry(void *argument)
{
    sw_carrier *carrier = argument;
    sw_hier *hier = carrier->hier;
    sw_error reason;
    uint32_t ticket = 1;
    void *kept = NULL;
    sw_bridge_enter(&carrier->bridge, &kept);
    sw_status status = sw_carrier_expect_ends(carrier, &reason);
    if (status == SW_OK)
        status = sw_carrier_expect_frames(carrier, &reason);
    while (status == SW_OK)
        status = carry_next(carrier, &ticket, &reason);
    bool leaves = status == SW_E_STATE && atomic_load(&carrier->stop);
    if (!leaves)
        sw_comm_request_end(&hier->comm, &reason);
    sw_carrier_take_leave(carrier, leaves ? NULL : &reason);
    sw_bridge_leave(&carrier->bridge, kept);
    atomic_store(&carrier->finished, true);
    return NULL;
}

/* Every host has blocks in flight, so many hosts get fewer and smaller ones. Results do not depend
 * on it. */
static void choose_blocks(sw_carrier *carrier)
{
    size_t hosts = (size_t)carrier->hier->map.host_count, many = sw_size_max(hosts, SW_HIER_FEW);
    size_t bytes = SW_HIER_BLOCK_BYTES * (size_t)SW_HIER_FEW / many;
    carrier->block_bytes =
        sw_size_max(bytes / SW_ALIGNMENT_BYTES * SW_ALIGNMENT_BYTES, SW_HIER_LEAST_BLOCK_BYTES);
    carrier->ahead = sw_size_max(SW_HIER_AHEAD * (size_t)SW_HIER_FEW / many, 1);
    carrier->slot_count = 2 * carrier->ahead + 2; /* accumulated results are sent one ahead */
}

static sw_status allocate_slots(sw_carrier *carrier, sw_error *err)
{
    size_t hosts = (size_t)carrier->hier->map.host_count;
    choose_blocks(carrier);
    /* A buffer for a block or a packet. Pages that are never written take no memory. */
    size_t room = carrier->block_bytes + SW_ALIGNMENT_BYTES;
    size_t rooms = hosts > 1 ? 3 : 1, places = carrier->slot_count * hosts;
    uint8_t *at = carrier->memory = calloc(rooms * places + (hosts > 1 ? hosts : 0), room);
    carrier->hosts = calloc(hosts, sizeof *carrier->hosts);
    carrier->places = calloc(places, sizeof *carrier->places);
    if (!at || !carrier->hosts || !carrier->places)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu hosts", hosts);
    for (size_t g = 0; hosts > 1 && g < hosts; ++g, at += room)
        carrier->hosts[g].opened = at;
    for (size_t i = 0; i < places; ++i, at += rooms * room) {
        carrier->places[i].partial = at;
        carrier->places[i].arrived = hosts > 1 ? at + room : NULL;
        carrier->places[i].packet = hosts > 1 ? at + 2 * room : NULL;
    }
    return SW_OK;
}

static sw_status allocate_hops(sw_carrier *carrier, sw_error *err)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    size_t hops = (size_t)spread->hop_count, peers = (size_t)spread->peer_count;
    size_t hosts = (size_t)carrier->hier->map.host_count;
    carrier->frame_bytes = sw_carrier_frame_bytes(carrier);
    carrier->hops = calloc(hops + 1, sizeof *carrier->hops);
    carrier->peers = calloc(peers + 1, sizeof *carrier->peers);
    carrier->frames = calloc(2 * hops + 1, carrier->frame_bytes);
    carrier->next.packs = calloc(hosts / 8 + 1, 1);
    carrier->next.capacity = SW_HIER_INLINE_BYTES;
    carrier->next.memory = calloc(carrier->next.capacity, 1);
    if (!carrier->hops || !carrier->peers || !carrier->frames || !carrier->next.packs ||
        !carrier->next.memory)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the frames of %zu hosts", hosts);
    carrier->leave = carrier->frames + 2 * hops * carrier->frame_bytes;
    for (size_t i = 0; i < hops; ++i) {
        carrier->hops[i].out = carrier->frames + 2 * i * carrier->frame_bytes;
        carrier->hops[i].in = carrier->hops[i].out + carrier->frame_bytes;
    }
    return SW_OK;
}

static sw_status allocate(sw_carrier *carrier, sw_error *err)
{
    const sw_host_map *map = &carrier->hier->map;
    size_t hosts = (size_t)map->host_count, ranks = (size_t)map->world_size;
    carrier->source = calloc(ranks, sizeof *carrier->source);
    carrier->destination = calloc(ranks, sizeof *carrier->destination);
    carrier->contributes = calloc(SW_HIER_BATCH * ranks, sizeof *carrier->contributes);
    carrier->host_contributes = calloc(SW_HIER_BATCH * hosts, sizeof *carrier->host_contributes);
    if (!carrier->source || !carrier->destination || !carrier->contributes ||
        !carrier->host_contributes)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu hosts", hosts);
    SW_TRY(allocate_hops(carrier, err));
    return allocate_slots(carrier, err);
}

sw_status sw_carrier_start(sw_hier *hier, const sw_wire *wire, sw_error *err)
{
    sw_page *page = sw_hier_page(hier, 0);
    sw_carrier *made = calloc(1, sizeof *made);
    if (!made) {
        if (wire)
            wire->release(wire->context);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the carrier of a host");
    }
    made->hier = hier;
    pthread_mutex_init(&made->ends_lock, NULL);
    made->bridge = (sw_bridge){.wire = wire,
                               .map = &hier->map,
                               .host = hier->host,
                               .sent = &page->sent,
                               .received = &page->received,
                               .awaiting = &page->awaiting};
    made->slow_bytes_per_s = wire ? wire->slow_bytes_per_s : 0;
    made->packing.on = made->slow_bytes_per_s == UINT64_MAX;
    sw_status status = allocate(made, err);
    if (status == SW_OK) {
        hier->carrier = made;
        status = sw_thread_start(&made->thread, carry, made, "sw-carrier", err);
    }
    if (status != SW_OK) {
        hier->carrier = NULL;
        sw_carrier_destroy(made);
    }
    return status;
}

bool sw_carrier_wire_is_closed(const sw_carrier *carrier)
{
    return carrier->wire_closed;
}

bool sw_carrier_is_over(const sw_carrier *carrier)
{
    return atomic_load(&carrier->finished) && carrier->wire_closed;
}

/* Only a call of the wire may take for ever: outside of one the thread sees soon that it is to
 * stop, however late a busy machine runs it. Past STOP_MS it counts as inside one, too. */
static bool await_end(sw_carrier *carrier)
{
    _Atomic uint32_t *word = &sw_hier_page(carrier->hier, 0)->posted;
    for (int i = 0; !atomic_load(&carrier->finished) && i < STOP_MS &&
                    (i < LEAVE_MS || atomic_load(&carrier->bridge.inside) == 0);
         ++i) {
        sw_futex_wake_all(word);
        sw_thread_sleep_ns(1000 * 1000);
    }
    return atomic_load(&carrier->finished);
}

void sw_carrier_stop(sw_carrier *carrier, bool ended_well)
{
    const sw_wire *wire = carrier->bridge.wire;
    if (!atomic_exchange(&carrier->stop, true)) {
        bool took_leave = await_end(carrier);
        carrier->wire_closed = !wire || wire->close(wire->context, ended_well && took_leave);
        if (carrier->wire_closed) /* otherwise a thread inside the wire sees no change */
            (void)await_end(carrier);
    }
    if (atomic_load(&carrier->finished))
        sw_thread_join(&carrier->thread);
}

static void drop_all(sw_carrier *carrier, sw_transfer *transfers, size_t count)
{
    for (size_t i = 0; transfers && i < count; ++i)
        sw_bridge_drop(&carrier->bridge, &transfers[i]);
}

/* Drop the transfers that were in flight at the end. */
static void drop_transfers(sw_carrier *carrier)
{
    const sw_dissemination *spread = &carrier->hier->spread;
    size_t hosts = (size_t)carrier->hier->map.host_count;
    for (size_t i = 0; carrier->places && i < carrier->slot_count * hosts; ++i) {
        sw_carrier_place *place = &carrier->places[i];
        sw_transfer *own[] = {&place->partial_out, &place->partial_in,      &place->result_out,
                              &place->result_in,   &place->accumulated_out, &place->accumulated_in};
        for (size_t k = 0; k < sizeof own / sizeof *own; ++k)
            drop_all(carrier, own[k], 1);
    }
    drop_all(carrier, carrier->coded.in, 2 * carrier->coded.transfer_count);
    for (int i = 0; carrier->hops && i < spread->hop_count; ++i) {
        sw_carrier_hop *hop = &carrier->hops[i];
        sw_transfer *others[] = {&hop->frame_out,   &hop->frame_in,   &hop->leave_out,
                                 &hop->payload_out, &hop->payload_in, &hop->probe_in};
        for (size_t k = 0; k < sizeof others / sizeof *others; ++k)
            drop_all(carrier, others[k], 1);
        drop_all(carrier, hop->probe_out, SW_HIER_PROBES);
    }
    for (int p = 0; carrier->peers && p < spread->peer_count; ++p) {
        drop_all(carrier, carrier->peers[p].in, SW_HIER_ENDS);
        drop_all(carrier, carrier->peers[p].out, SW_HIER_ENDS);
    }
}

void sw_carrier_destroy(sw_carrier *carrier)
{
    if (!carrier)
        return;
    const sw_wire *wire = carrier->bridge.wire;
    drop_transfers(carrier);
    free(carrier->places);
    free(carrier->memory);
    sw_exchange_buffers_fini(&carrier->coded.buffers);
    free(carrier->coded.in);
    free(carrier->coded.flat);
    free(carrier->hops);
    free(carrier->peers);
    free(carrier->frames);
    free(carrier->next.packs);
    free(carrier->next.memory);
    free(carrier->hosts);
    pthread_mutex_destroy(&carrier->ends_lock);
    free(carrier->source);
    free(carrier->destination);
    free(carrier->contributes);
    free(carrier->host_contributes);
    free(carrier);
    if (wire)
        wire->release(wire->context);
}
