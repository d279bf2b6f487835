/* hier_frames.c - what carriers tell one another before they move data: which operations each host
 * comes with, and what its ranks say beside them; or that a host has ended, and why.
 *
 * A carrier offers every operation that all ranks of its host have posted, up to a batch; done is
 * what all hosts offer. An operation about which they disagree is never inside a batch but its
 * first, so that those before it are complete. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/hier_carrier.h"

enum { FRAME_MAGIC = 0x53574634 /* "SWF4" */ };

static const sw_descriptor *descriptor_of(const sw_hier *hier, int local, uint32_t ticket)
{
    return &sw_hier_page(hier, local)->ring[ticket % SW_HIER_RING];
}

sw_status sw_carrier_expect_frames(sw_carrier *carrier, sw_error *err)
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

/* What the ranks of this host came with as `ticket`. */
static void fill_part(const sw_hier *hier, uint32_t ticket, sw_frame_part *part)
{
    const sw_descriptor *lowest = descriptor_of(hier, 0, ticket), *counting = NULL;
    part->lowest = *lowest;
    part->lowest_rank = hier->members[0];
    part->counting_rank = part->other_rank = -1;
    for (int l = 0; l < hier->local_count; ++l) {
        const sw_descriptor *side = descriptor_of(hier, l, ticket);
        if (!counting && side->round != 0) {
            counting = side;
            part->counting = *side;
            part->counting_rank = hier->members[l];
        }
        if (part->other_rank < 0 && sw_descriptor_contradicted(lowest, counting, side)) {
            part->other = *side;
            part->other_rank = hier->members[l];
        }
    }
}

static const sw_frame *frame_of(const sw_carrier *carrier, int host)
{
    return host == carrier->hier->host ? &carrier->out : &carrier->in[host];
}

/* Hosts are compared in order, and all against the lowest ranks of all, so that each host writes
 * the same sentence. */
static sw_status compare_parts(const sw_carrier *carrier, uint32_t ticket, uint32_t index,
                               sw_error *err)
{
    const sw_frame_part *first = &frame_of(carrier, 0)->part[index], *counting = NULL;
    for (int g = 0; g < carrier->hier->map.host_count; ++g) {
        const sw_frame_part *part = &frame_of(carrier, g)->part[index];
        if (!counting && part->counting_rank >= 0)
            counting = part;
        const sw_descriptor *counts = counting ? &counting->counting : NULL;
        const sw_descriptor *side[] = {&part->lowest, &part->counting, &part->other};
        const int rank[] = {part->lowest_rank, part->counting_rank, part->other_rank};
        for (int i = 0; i < 3; ++i) {
            const sw_descriptor *against =
                rank[i] < 0 ? NULL : sw_descriptor_contradicted(&first->lowest, counts, side[i]);
            if (against)
                return sw_descriptor_disagree(ticket + index,
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
    if (frame->ticket != ticket || frame->count < 1 || frame->count > SW_HIER_BATCH)
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

static const sw_op *op_of(const sw_carrier *carrier, uint32_t ticket)
{
    return &sw_carrier_pending(carrier, ticket)->op;
}

/* What this host's ranks say: in the frame, or, of one operation alone, in memory of its own. */
static sw_status speak(sw_carrier *carrier, uint32_t ticket, uint32_t count, sw_error *err)
{
    uint8_t *to = carrier->out.beside;
    for (uint32_t i = 0; i < count; ++i) {
        const sw_op *op = op_of(carrier, ticket + i);
        size_t bytes = spoken_bytes(carrier, op, carrier->hier->host);
        carrier->out.part[i].beside_bytes = (uint32_t)bytes;
        if (bytes > SW_FRAME_INLINE_BYTES) {
            SW_TRY(reserve(&carrier->beside, &carrier->beside_capacity, bytes, err));
            to = carrier->beside;
        }
        SW_TRY(sw_carrier_touch_begin(carrier, err));
        copy_spoken(carrier, op, carrier->hier->host, to, false);
        sw_carrier_touch_end(carrier);
        to += bytes;
    }
    return SW_OK;
}

static sw_status exchange_long_besides(sw_carrier *carrier, const sw_op *op, uint32_t ticket,
                                       const char *what, sw_error *err)
{
    size_t mine = carrier->out.part[0].beside_bytes;
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

static sw_status hear(sw_carrier *carrier, uint32_t ticket, uint32_t count, sw_error *err)
{
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        uint8_t *said = carrier->in[g].beside;
        for (uint32_t i = 0; i < count; ++i) {
            const sw_op *op = op_of(carrier, ticket + i);
            size_t bytes = spoken_bytes(carrier, op, g);
            copy_spoken(carrier, op, g, bytes > SW_FRAME_INLINE_BYTES ? carrier->heard[g] : said,
                        true);
            said += bytes;
        }
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

static bool all_posted(const sw_hier *hier, uint32_t ticket)
{
    for (int l = 0; l < hier->local_count; ++l)
        if (!sw_ticket_reached(atomic_load(&sw_hier_page(hier, l)->posted), ticket))
            return false;
    return true;
}

/* Operations from `ticket` on that this host could do as one batch. */
static uint32_t batch_here(const sw_carrier *carrier, uint32_t ticket)
{
    size_t bytes = 0;
    uint32_t count = 0;
    do {
        const sw_op *op = op_of(carrier, ticket + count);
        bytes += spoken_bytes(carrier, op, carrier->hier->host);
        if (count > 0 && (!sw_carrier_reduces(op) || bytes > SW_FRAME_INLINE_BYTES))
            return count;
        ++count;
    } while (sw_carrier_reduces(op_of(carrier, ticket)) && count < SW_HIER_BATCH &&
             all_posted(carrier->hier, ticket + count));
    return count;
}

static void fill_frame(sw_carrier *carrier, uint32_t ticket, uint32_t count)
{
    sw_frame *out = &carrier->out;
    memset(out, 0, sizeof *out);
    out->magic = FRAME_MAGIC;
    out->ticket = ticket;
    out->count = count;
    out->packs = carrier->packing.on;
    out->probes = atomic_load(&carrier->probes_sent);
    for (uint32_t i = 0; i < count; ++i) {
        const sw_op *op = op_of(carrier, ticket + i);
        fill_part(carrier->hier, ticket + i, &out->part[i]);
        snprintf(sw_carrier_what(carrier, carrier->turn + 1, i), sizeof carrier->whats[0][0],
                 "%s '%.*s'", sw_op_kind_name(op->kind), SW_COMM_LABEL_BYTES - 1, op->label);
    }
}

static sw_status check_part(sw_carrier *carrier, uint32_t ticket, uint32_t index, sw_error *err)
{
    SW_TRY(compare_parts(carrier, ticket, index, err));
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        int rank = sw_host_carrier(&carrier->hier->map, g);
        size_t expected = spoken_bytes(carrier, op_of(carrier, ticket + index), g);
        uint32_t said = carrier->in[g].part[index].beside_bytes;
        if (said != expected)
            return sw_error_set(err, SW_E_MISMATCH, rank,
                                "rank %d has %u bytes beside %s, where %zu were expected", rank,
                                said, sw_carrier_what(carrier, carrier->turn, index), expected);
    }
    return SW_OK;
}

/* The next turn's frame leaves. */
static sw_status offer(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    uint32_t count = batch_here(carrier, ticket);
    fill_frame(carrier, ticket, count);
    carrier->offered = true;
    if (carrier->hier->map.host_count == 1)
        return SW_OK;
    SW_TRY(speak(carrier, ticket, count, err));
    return send_frames(carrier, sw_carrier_what(carrier, carrier->turn + 1, 0), err);
}

sw_status sw_carrier_offer_early(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    if (carrier->offered || !all_posted(carrier->hier, ticket))
        return SW_OK;
    const sw_op *op = op_of(carrier, ticket);
    bool is_short = spoken_bytes(carrier, op, carrier->hier->host) <= (size_t)SW_FRAME_INLINE_BYTES;
    return sw_carrier_reduces(op) && is_short ? offer(carrier, ticket, err) : SW_OK;
}

sw_status sw_carrier_exchange_frames(sw_carrier *carrier, uint32_t ticket, uint32_t *count,
                                     sw_error *err)
{
    if (!carrier->offered)
        SW_TRY(offer(carrier, ticket, err));
    carrier->offered = false;
    carrier->turn++;
    *count = carrier->out.count;
    const char *what = sw_carrier_what(carrier, carrier->turn, 0);
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(sw_carrier_wait(carrier, &carrier->frame_in[g], what, err));
        SW_TRY(read_frame(carrier, g, ticket, what, err));
        if (carrier->in[g].count < *count)
            *count = carrier->in[g].count;
    }
    SW_TRY(check_part(carrier, ticket, 0, err));
    for (uint32_t i = 1; i < *count; ++i) /* what they disagree on is the next batch's first */
        if (check_part(carrier, ticket, i, err) != SW_OK)
            *count = i;
    if (op_of(carrier, ticket)->beside_bytes && *count == 1)
        SW_TRY(exchange_long_besides(carrier, op_of(carrier, ticket), ticket, what, err));
    SW_TRY(hear(carrier, ticket, *count, err));
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(sw_carrier_wait(carrier, &carrier->frame_out[g], what, err));
    }
    SW_TRY(sw_carrier_settle_probes(carrier, what, err));
    for (int g = 0; g < carrier->hier->map.host_count; ++g)
        carrier->packs[g] = frame_of(carrier, g)->packs != 0;
    return sw_carrier_expect_frames(carrier, err); /* the next may come while this batch moves */
}

/* Hosts that disagree have each read the other's frame, and end both: without a place for its last
 * one each would wait for the other to take it in. */
static void expect_last_frame(sw_carrier *carrier, int host)
{
    sw_error ignored;
    if (!carrier->frame_in[host].work &&
        sw_bridge_receive(&carrier->bridge, host, SW_MESSAGE_FRAME, carrier->frames + 1,
                          &carrier->in[host], sizeof *carrier->in, &carrier->frame_in[host],
                          &ignored) != SW_OK)
        carrier->frame_in[host].work = NULL; /* it has gone already */
}

void sw_carrier_take_leave(sw_carrier *carrier, const sw_error *reason)
{
    sw_error ignored;
    sw_frame *last = &carrier->last;
    last->magic = FRAME_MAGIC;
    last->state = reason ? SW_MEMBER_ENDED : SW_MEMBER_LEFT;
    if (reason)
        last->reason = *reason;
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        expect_last_frame(carrier, g);
    }
    carrier->frames++;
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_FRAME, carrier->frames, last,
                           sizeof *last, &carrier->leave_out[g], &ignored) != SW_OK)
            carrier->leave_out[g].work = NULL;
    }
    SW_FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_wait(&carrier->bridge, &carrier->leave_out[g], &ignored) != SW_OK)
            continue; /* it has gone already */
    }
}
