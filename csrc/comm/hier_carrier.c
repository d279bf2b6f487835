/* hier_carrier.c - the thread that does a host's operations: one a host, on its lowest rank.
 *
 * An operation begins when all ranks of the host have posted it. Carriers first exchange *frames*:
 * what the operation is (compared as ranks of one host compare it), what each rank says beside the
 * data, or that a host has ended and why. Then what has data moves it in blocks (hier_reduce.c,
 * hier_gather.c). Every wait is for the oldest thing under way, and no message of an operation
 * leaves before the frames of it agree: no two carriers can wait for one another crosswise.
 *
 * The thread may wait for the wire for ever; deadlines are kept by those who wait for it. It leaves
 * what the wire may still write to, and never frees it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/hier_carrier.h"
#include "platform/clock.h"
#include "platform/futex.h"

enum { FRAME_MAGIC = 0x53574631 /* "SWF1" */, LEAVE_MS = 1000 };

static const int64_t idle_slice_ns = 200 * 1000 * 1000;
static const int64_t busy_slice_ns = 10 * 1000 * 1000;

sw_status sw_carrier_touch_begin(sw_carrier *carrier, sw_error *err)
{
    sw_hier *hier = carrier->hier;
    pthread_mutex_lock(&hier->lock);
    if (!atomic_load(&hier->ended))
        return SW_OK;
    *err = hier->reason;
    pthread_mutex_unlock(&hier->lock);
    return err->status;
}

void sw_carrier_touch_end(sw_carrier *carrier)
{
    pthread_mutex_unlock(&carrier->hier->lock);
}

sw_status sw_carrier_blame(const sw_carrier *carrier, const char *what, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    char peer[SW_COMM_PEER_BYTES], cause[200];
    int rank = err->detail;
    sw_hier_peer((sw_comm *)(uintptr_t)&hier->comm, rank, peer);
    snprintf(cause, sizeof cause, "%.190s", err->message);
    return sw_error_set(err, SW_E_COMM, rank,
                        "host %.40s lost %s in %.110s: the process or the network between them "
                        "failed: %s",
                        hier->identity[hier->comm.rank].host, peer, what, cause);
}

sw_status sw_carrier_wait(sw_carrier *carrier, sw_transfer *transfer, const char *what,
                          sw_error *err)
{
    return sw_bridge_wait(&carrier->bridge, transfer, err) == SW_OK
               ? SW_OK
               : sw_carrier_blame(carrier, what, err);
}

/* Frames
 * ------------------------------------------------------------------------------------------ */

static const sw_descriptor *descriptor_of(const sw_hier *hier, int local, uint32_t ticket)
{
    return &sw_hier_page(hier, local)->ring[ticket % SW_HIER_RING];
}

/* The next frame of each host has a place to arrive at, so that no host waits to send it. */
static sw_status expect_frames(sw_carrier *carrier, sw_error *err)
{
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_FRAME, carrier->frames + 1,
                              &carrier->in[g], sizeof *carrier->in, &carrier->frame_in[g],
                              err) != SW_OK)
            return sw_carrier_blame(carrier, "waiting for operations", err);
    }
    return SW_OK;
}

/* What the ranks of this host came with. */
static void fill_frame(sw_carrier *carrier, uint32_t ticket)
{
    const sw_hier *hier = carrier->hier;
    sw_frame *out = &carrier->out;
    const sw_descriptor *lowest = descriptor_of(hier, 0, ticket), *counting = NULL;
    memset(out, 0, sizeof *out);
    out->magic = FRAME_MAGIC;
    out->ticket = ticket;
    out->lowest = *lowest;
    out->lowest_rank = hier->members[0];
    out->counting_rank = out->other_rank = -1;
    for (int l = 0; l < hier->local_count; ++l) {
        const sw_descriptor *side = descriptor_of(hier, l, ticket);
        if (!counting && side->round != 0) {
            counting = side;
            out->counting = *side;
            out->counting_rank = hier->members[l];
        }
        if (out->other_rank < 0 && sw_descriptor_contradicted(lowest, counting, side)) {
            out->other = *side;
            out->other_rank = hier->members[l];
        }
    }
}

/* Hosts are compared in order, and all against the lowest ranks of all, so that each host writes
 * the same sentence. */
static sw_status compare_frames(const sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    const sw_frame *first = hier->host == 0 ? &carrier->out : &carrier->in[0], *counting = NULL;
    for (int g = 0; g < hier->map.host_count; ++g) {
        const sw_frame *frame = g == hier->host ? &carrier->out : &carrier->in[g];
        if (!counting && frame->counting_rank >= 0)
            counting = frame;
        const sw_descriptor *counts = counting ? &counting->counting : NULL;
        const sw_descriptor *side[] = {&frame->lowest, &frame->counting, &frame->other};
        const int rank[] = {frame->lowest_rank, frame->counting_rank, frame->other_rank};
        for (int i = 0; i < 3; ++i) {
            const sw_descriptor *against =
                rank[i] < 0 ? NULL : sw_descriptor_contradicted(&first->lowest, counts, side[i]);
            if (against)
                return sw_descriptor_disagree(ticket,
                                              against == &first->lowest ? first->lowest_rank
                                                                        : counting->counting_rank,
                                              against, rank[i], side[i], err);
        }
    }
    return SW_OK;
}

static sw_status read_frame(const sw_carrier *carrier, int host, uint32_t ticket, const char *what,
                            sw_error *err)
{
    const sw_frame *frame = &carrier->in[host];
    char peer[SW_COMM_PEER_BYTES];
    int rank = sw_host_carrier(&carrier->hier->map, host);
    if (frame->magic != FRAME_MAGIC)
        return sw_error_set(err, SW_E_COMM, rank, "rank %d runs another version of the engine",
                            rank);
    if (frame->state == SW_MEMBER_ENDED) {
        *err = frame->reason;
        err->message[sizeof err->message - 1] = '\0';
        return err->status == SW_OK ? SW_E_COMM : err->status;
    }
    sw_hier_peer(&carrier->hier->comm, rank, peer);
    if (frame->state == SW_MEMBER_LEFT)
        return sw_error_set(err, SW_E_COMM, rank, "%s left the group before its part of %s", peer,
                            what);
    if (frame->ticket != ticket)
        return sw_error_set(err, SW_E_COMM, rank, "%s came with operation %u, expected %u", peer,
                            frame->ticket, ticket);
    return SW_OK;
}

/* Beside the data
 * ------------------------------------------------------------------------------------------ */

/* Whether `rank` says something beside this operation. */
static bool speaks(const sw_op *op, int rank)
{
    return op->beside_bytes > 0 && (op->kind != SW_OP_BROADCAST || op->root == rank);
}

static size_t spoken_bytes(const sw_carrier *carrier, const sw_op *op, int host)
{
    const int *members = sw_host_members(&carrier->hier->map, host);
    size_t bytes = 0;
    for (int i = 0; i < sw_host_size(&carrier->hier->map, host); ++i)
        bytes += speaks(op, members[i]) ? op->beside_bytes : 0;
    return bytes;
}

/* What the ranks of a host say, out of the mirrored memory or into it. */
static void copy_spoken(const sw_carrier *carrier, const sw_op *op, int host, uint8_t *bytes,
                        bool into_memory)
{
    const int *members = sw_host_members(&carrier->hier->map, host);
    for (int i = 0; i < sw_host_size(&carrier->hier->map, host); ++i) {
        if (!speaks(op, members[i]))
            continue;
        uint8_t *part = op->beside->base[members[i]] + op->beside_offset_bytes;
        memcpy(into_memory ? part : bytes, into_memory ? bytes : part, op->beside_bytes);
        bytes += op->beside_bytes;
    }
}

static sw_status reserve(uint8_t **memory, size_t *capacity, size_t bytes, sw_error *err)
{
    if (bytes <= *capacity)
        return SW_OK;
    uint8_t *more = realloc(*memory, bytes);
    if (!more)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu bytes beside an operation", bytes);
    *memory = more;
    *capacity = bytes;
    return SW_OK;
}

static sw_status speak(sw_carrier *carrier, const sw_op *op, sw_error *err)
{
    size_t bytes = spoken_bytes(carrier, op, carrier->hier->host);
    uint8_t *to = carrier->out.beside;
    carrier->out.beside_bytes = (uint32_t)bytes;
    if (bytes > SW_FRAME_INLINE_BYTES) {
        SW_TRY(reserve(&carrier->beside, &carrier->beside_capacity, bytes, err));
        to = carrier->beside;
    }
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    copy_spoken(carrier, op, carrier->hier->host, to, false);
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

static sw_status exchange_long_besides(sw_carrier *carrier, const sw_op *op, uint32_t ticket,
                                       const char *what, sw_error *err)
{
    size_t mine = carrier->out.beside_bytes;
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        size_t theirs = spoken_bytes(carrier, op, g);
        if (theirs <= SW_FRAME_INLINE_BYTES)
            continue;
        SW_TRY(reserve(&carrier->heard[g], &carrier->heard_capacity[g], theirs, err));
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_BESIDE, ticket, carrier->heard[g],
                              theirs, &carrier->beside_in[g], err) != SW_OK)
            return sw_carrier_blame(carrier, what, err);
    }
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (mine > SW_FRAME_INLINE_BYTES &&
            sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_BESIDE, ticket, carrier->beside, mine,
                           &carrier->beside_out[g], err) != SW_OK)
            return sw_carrier_blame(carrier, what, err);
    }
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(sw_carrier_wait(carrier, &carrier->beside_in[g], what, err));
        SW_TRY(sw_carrier_wait(carrier, &carrier->beside_out[g], what, err));
    }
    return SW_OK;
}

static sw_status hear(sw_carrier *carrier, const sw_op *op, sw_error *err)
{
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        bool is_long = spoken_bytes(carrier, op, g) > SW_FRAME_INLINE_BYTES;
        copy_spoken(carrier, op, g, is_long ? carrier->heard[g] : carrier->in[g].beside, true);
    }
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

static sw_status send_frames(sw_carrier *carrier, const char *what, sw_error *err)
{
    carrier->frames++;
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_FRAME, carrier->frames, &carrier->out,
                           sizeof carrier->out, &carrier->frame_out[g], err) != SW_OK)
            return sw_carrier_blame(carrier, what, err);
    }
    return SW_OK;
}

/* All hosts come with the same operation, and every rank's words lie where every rank reads them.
 */
static sw_status exchange_frames(sw_carrier *carrier, const sw_op *op, uint32_t ticket,
                                 const char *what, sw_error *err)
{
    fill_frame(carrier, ticket);
    if (carrier->hier->map.host_count == 1)
        return compare_frames(carrier, ticket, err);
    SW_TRY(speak(carrier, op, err));
    SW_TRY(send_frames(carrier, what, err));
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(sw_carrier_wait(carrier, &carrier->frame_in[g], what, err));
        SW_TRY(read_frame(carrier, g, ticket, what, err));
    }
    SW_TRY(compare_frames(carrier, ticket, err));
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        int rank = sw_host_carrier(&carrier->hier->map, g);
        if (carrier->in[g].beside_bytes != spoken_bytes(carrier, op, g))
            return sw_error_set(err, SW_E_MISMATCH, rank,
                                "rank %d has %u bytes beside %s, where %zu were expected", rank,
                                carrier->in[g].beside_bytes, what, spoken_bytes(carrier, op, g));
    }
    if (op->beside_bytes) {
        SW_TRY(exchange_long_besides(carrier, op, ticket, what, err));
        SW_TRY(hear(carrier, op, err));
    }
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(sw_carrier_wait(carrier, &carrier->frame_out[g], what, err));
    }
    return SW_OK;
}

/* The thread
 * ------------------------------------------------------------------------------------------ */

/* Until all ranks of this host have posted `ticket`. SW_E_STATE when this rank leaves. */
static sw_status await_posts(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    sw_hier *hier = carrier->hier;
    int64_t begun_ns = 0;
    for (;;) {
        int missing;
        if (atomic_load(&carrier->stop))
            SW_FAIL(err, SW_E_STATE, "this rank leaves");
        SW_TRY(sw_carrier_touch_begin(carrier, err));
        sw_carrier_touch_end(carrier);
        int64_t now = sw_clock_now_ns();
        bool waits = begun_ns > 0;
        SW_TRY(sw_hier_check_host(hier, ticket, waits && now - begun_ns > busy_slice_ns, &missing,
                                  err));
        if (missing < 0)
            return SW_OK;
        _Atomic uint32_t *own = &sw_hier_page(hier, 0)->posted;
        if (!sw_ticket_reached(atomic_load(own), ticket)) {
            if (!atomic_load(&carrier->stop))
                sw_futex_wait(own, ticket - 1, idle_slice_ns);
            continue;
        }
        begun_ns = waits ? begun_ns : now;
        _Atomic uint32_t *word = &sw_hier_page(hier, missing)->posted;
        uint32_t value = atomic_load(word);
        if (!sw_ticket_reached(value, ticket))
            sw_futex_wait(word, value, busy_slice_ns);
    }
}

static sw_status carry_next(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    sw_hier *hier = carrier->hier;
    sw_page *page = sw_hier_page(hier, 0);
    char what[160];
    SW_TRY(await_posts(carrier, ticket, err));
    /* The posting thread overwrites it only after `wired` has passed it. */
    const sw_hier_pending *pending = &hier->pending[ticket % SW_HIER_RING];
    const sw_op *op = &pending->op;
    carrier->midway = true;
    snprintf(what, sizeof what, "%s '%.*s'", sw_op_kind_name(op->kind), SW_COMM_LABEL_BYTES - 1,
             op->label);
    SW_TRY(exchange_frames(carrier, op, ticket, what, err));
    if ((op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER) && op->numel > 0)
        SW_TRY(sw_carrier_reduce(carrier, pending, what, err));
    else if (op->kind == SW_OP_ALL_GATHER && op->arena && op->numel > 0)
        SW_TRY(sw_carrier_gather(carrier, pending, what, err));
    SW_TRY(expect_frames(carrier, err));
    carrier->midway = false;
    atomic_store(&page->wired, ticket);
    sw_futex_wake_all(&page->wired);
    return SW_OK;
}

/* The other hosts' next frame from here says that this one goes, and why. As good as it can: a host
 * that cannot be reached keeps this thread, and nobody waits for it. */
static void take_leave(sw_carrier *carrier, const sw_error *reason)
{
    sw_error ignored;
    sw_frame *last = &carrier->last;
    last->magic = FRAME_MAGIC;
    last->state = reason ? SW_MEMBER_ENDED : SW_MEMBER_LEFT;
    if (reason)
        last->reason = *reason;
    carrier->frames++;
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_FRAME, carrier->frames, last,
                           sizeof *last, &carrier->frame_out[g], &ignored) != SW_OK)
            carrier->frame_out[g].work = NULL;
    }
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_wait(&carrier->bridge, &carrier->frame_out[g], &ignored) != SW_OK)
            continue; /* it has gone already */
    }
}

static void *carry(void *argument)
{
    sw_carrier *carrier = argument;
    sw_hier *hier = carrier->hier;
    sw_error reason;
    sw_status status = expect_frames(carrier, &reason);
    for (uint32_t ticket = 1; status == SW_OK; ++ticket)
        status = carry_next(carrier, ticket, &reason);
    bool leaves = status == SW_E_STATE && atomic_load(&carrier->stop);
    if (!leaves)
        sw_hier_end(hier, &reason);
    take_leave(carrier, leaves ? NULL : &reason);
    atomic_store(&carrier->finished, true);
    return NULL;
}

static sw_status allocate_slots(sw_carrier *carrier, sw_error *err)
{
    size_t hosts = (size_t)carrier->hier->map.host_count;
    size_t block = hosts > 1 ? SW_HIER_BLOCK_BYTES : 0;
    uint8_t *at = carrier->memory =
        calloc(1, SW_HIER_SLOTS * (2 * hosts * block + SW_HIER_BLOCK_BYTES));
    for (int i = 0; at && i < SW_HIER_SLOTS; ++i) {
        sw_carrier_slot *s = &carrier->slots[i];
        s->partial = calloc(hosts, sizeof *s->partial);
        s->arrived = calloc(hosts, sizeof *s->arrived);
        s->partial_out = calloc(6 * hosts, sizeof *s->partial_out);
        if (!s->partial || !s->arrived || !s->partial_out)
            SW_FAIL(err, SW_E_MEMORY, "no memory for %zu hosts", hosts);
        s->partial_in = s->partial_out + hosts;
        s->result_out = s->partial_out + 2 * hosts;
        s->result_in = s->partial_out + 3 * hosts;
        s->standing_out = s->partial_out + 4 * hosts;
        s->standing_in = s->partial_out + 5 * hosts;
        for (size_t g = 0; g < hosts; ++g) {
            s->partial[g] = at;
            at += SW_HIER_BLOCK_BYTES;
            s->arrived[g] = at;
            at += block;
        }
    }
    if (!at)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu hosts", hosts);
    return SW_OK;
}

static sw_status allocate(sw_carrier *carrier, sw_error *err)
{
    const sw_host_map *map = &carrier->hier->map;
    size_t hosts = (size_t)map->host_count, ranks = (size_t)map->world_size;
    carrier->in = calloc(hosts, sizeof *carrier->in);
    carrier->frame_out = calloc(4 * hosts, sizeof *carrier->frame_out);
    carrier->heard = calloc(hosts, sizeof *carrier->heard);
    carrier->heard_capacity = calloc(hosts, sizeof *carrier->heard_capacity);
    carrier->source = calloc(ranks, sizeof *carrier->source);
    carrier->destination = calloc(ranks, sizeof *carrier->destination);
    carrier->contributes = calloc(ranks, sizeof *carrier->contributes);
    carrier->host_contributes = calloc(hosts, sizeof *carrier->host_contributes);
    if (!carrier->in || !carrier->frame_out || !carrier->heard || !carrier->heard_capacity ||
        !carrier->source || !carrier->destination || !carrier->contributes ||
        !carrier->host_contributes)
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu hosts", hosts);
    carrier->frame_in = carrier->frame_out + hosts;
    carrier->beside_out = carrier->frame_out + 2 * hosts;
    carrier->beside_in = carrier->frame_out + 3 * hosts;
    return allocate_slots(carrier, err);
}

sw_status sw_carrier_start(sw_hier *hier, const sw_wire *wire, sw_error *err)
{
    sw_page *page = sw_hier_page(hier, 0);
    sw_carrier *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for the carrier of a host");
    made->hier = hier;
    made->bridge = (sw_bridge){.wire = wire,
                               .map = &hier->map,
                               .host = hier->host,
                               .sent = &page->sent,
                               .received = &page->received,
                               .awaiting = &page->awaiting};
    sw_status status = allocate(made, err);
    if (status == SW_OK) {
        hier->carrier = made;
        status = sw_thread_start(&made->thread, carry, made, "sw-carrier", err);
        made->thread_began = status == SW_OK;
    }
    if (status != SW_OK) {
        hier->carrier = NULL;
        sw_carrier_destroy(made);
    }
    return status;
}

bool sw_carrier_has_ended(const sw_carrier *carrier)
{
    return atomic_load(&carrier->finished);
}

bool sw_carrier_stop(sw_carrier *carrier)
{
    _Atomic uint32_t *word = &sw_hier_page(carrier->hier, 0)->posted;
    atomic_store(&carrier->stop, true);
    for (int i = 0; i < LEAVE_MS && !sw_carrier_has_ended(carrier); ++i) {
        sw_futex_wake_all(word);
        sw_thread_sleep_ns(1000 * 1000);
    }
    if (sw_carrier_has_ended(carrier))
        sw_thread_join(&carrier->thread);
    return sw_carrier_has_ended(carrier);
}

/* Frees memory, unless a message may still come into it. */
static void give_away(const sw_carrier *carrier, void *memory, bool may_be_written)
{
    const sw_wire *wire = carrier->bridge.wire;
    if (memory && may_be_written && wire)
        wire->keep(wire->context, memory);
    else
        free(memory);
}

void sw_carrier_destroy(sw_carrier *carrier)
{
    if (!carrier)
        return;
    for (int i = 0; i < SW_HIER_SLOTS; ++i) {
        free(carrier->slots[i].partial);
        free(carrier->slots[i].arrived);
        free(carrier->slots[i].partial_out);
    }
    bool midway = carrier->midway;
    for (int g = 0; carrier->heard && g < carrier->hier->map.host_count; ++g)
        give_away(carrier, carrier->heard[g], midway);
    give_away(carrier, carrier->memory, midway);
    give_away(carrier, carrier->beside, midway);
    give_away(carrier, carrier->in, carrier->thread_began); /* a host's last word may still come */
    free(carrier->heard);
    free(carrier->heard_capacity);
    free(carrier->frame_out);
    free(carrier->source);
    free(carrier->destination);
    free(carrier->contributes);
    free(carrier->host_contributes);
    free(carrier);
}
