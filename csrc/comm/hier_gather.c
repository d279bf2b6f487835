/* hier_gather.c - all_gather on an arena over hosts, and broadcast. */
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"
#include "comm/hier_carrier_state.h"
#include "platform/futex.h"

/* ---- all_gather: every rank's slice to the ranks elsewhere ---- */

/* Slices are sent from the arena and arrive in the carrier's blocks. The carrier copies them to
 * each rank of this host, or once if the host (or a replica on it) has one copy. A slice is not
 * sent to a host that also has an owner of it. */

typedef struct gathering {
    const sw_hier_pending *pending;
    sw_cut cut; /* by rank */
    size_t element_bytes;
} gathering;

static int slice_of(const gathering *work, int rank)
{
    return sw_op_slice_of(&work->pending->op, rank);
}

/* Return true if two ranks of this host keep parameters in one part. */
static bool shares_part(const gathering *work, int a, int b)
{
    const sw_slices *slices = work->pending->op.slices;
    return a == b || (work->pending->op.one_copy &&
                      (!slices || slices->replica_of_rank[a] == slices->replica_of_rank[b]));
}

/* Return the lowest rank of this host that shares a part with `rank`; it owns the part. */
static int home_of(const sw_carrier *carrier, const gathering *work, int rank)
{
    int local = 0;
    while (!shares_part(work, carrier->hier->members[local], rank))
        ++local;
    return carrier->hier->members[local];
}

/* Return the part of `rank`, with its slice and those that it receives. */
static uint8_t *part_of(const sw_carrier *carrier, const gathering *work, int rank, size_t begin)
{
    const sw_hier_pending *pending = work->pending;
    return pending->arena->base[home_of(carrier, work, rank)] + pending->at_bytes +
           begin * work->element_bytes;
}

/* Return true if some rank has updated slice `index` in the part of `rank`. */
static bool has_updated(const sw_carrier *carrier, const gathering *work, int rank, int index)
{
    const sw_hier *hier = carrier->hier;
    for (int l = 0; l < hier->local_count; ++l)
        if (slice_of(work, hier->members[l]) == index && shares_part(work, hier->members[l], rank))
            return true;
    return false;
}

/* Return a rank of `host` that owns slice `index`; -1: none. Owners have the same bits. */
static int owner_at(const sw_carrier *carrier, const gathering *work, int host, int index)
{
    return sw_slice_owner(work->pending->table, &carrier->hier->map, host, index);
}

/* Copy `bytes` of slice `index` to the parts of this host's ranks that lack them. */
static void copy_inside(const sw_carrier *carrier, const gathering *work, int index, size_t begin,
                        const uint8_t *data, size_t bytes)
{
    const sw_hier *hier = carrier->hier;
    bool is_here = owner_at(carrier, work, hier->host, index) >= 0;
    for (int l = 0; l < hier->local_count; ++l) {
        int rank = hier->members[l];
        if (home_of(carrier, work, rank) == rank &&
            !(is_here && has_updated(carrier, work, rank, index)))
            memcpy(part_of(carrier, work, rank, begin), data, bytes);
    }
}

static sw_status begin_block(sw_carrier *carrier, const gathering *work, size_t block,
                             sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    sw_carrier_place *at = sw_carrier_places(carrier, block);
    uint32_t number = carrier->blocks + (uint32_t)block;
    int owner;
    size_t begin, numel;
    SW_FOR_OTHER_HOSTS(carrier, g) {
        numel = sw_cut_block(&work->cut, &hier->map, g, block, &begin, &owner);
        if (numel > 0 && owner_at(carrier, work, hier->host, slice_of(work, owner)) >= 0)
            continue;
        SW_TRY(sw_carrier_receive(carrier, g, SW_MESSAGE_SLICE, number, at[g].arrived,
                                  numel * work->element_bytes, &at[g].partial_in, err));
    }
    numel = sw_cut_block(&work->cut, &hier->map, hier->host, block, &begin, &owner);
    if (numel == 0)
        return SW_OK;
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    const uint8_t *own = part_of(carrier, work, owner, begin);
    sw_carrier_touch_end(carrier);
    SW_FOR_OTHER_HOSTS(carrier, g) {
        if (owner_at(carrier, work, g, slice_of(work, owner)) >= 0)
            continue;
        SW_TRY(sw_carrier_send(carrier, g, SW_MESSAGE_SLICE, number, own,
                               numel * work->element_bytes, &at[g].partial_out, err));
    }
    SW_TRY(sw_carrier_touch_begin(carrier, err));
    copy_inside(carrier, work, slice_of(work, owner), begin, own, numel * work->element_bytes);
    sw_carrier_touch_end(carrier);
    return SW_OK;
}

static sw_status store_block(sw_carrier *carrier, const gathering *work, size_t block,
                             sw_error *err)
{
    sw_carrier_place *at = sw_carrier_places(carrier, block);
    SW_FOR_OTHER_HOSTS(carrier, g) {
        int owner;
        size_t begin,
            numel = sw_cut_block(&work->cut, &carrier->hier->map, g, block, &begin, &owner);
        SW_TRY(sw_carrier_wait(carrier, &at[g].partial_in, err));
        if (numel > 0) {
            int index = slice_of(work, owner);
            SW_TRY(sw_carrier_touch_begin(carrier, err));
            int here = owner_at(carrier, work, carrier->hier->host, index);
            copy_inside(carrier, work, index, begin,
                        here >= 0 ? part_of(carrier, work, here, begin) : at[g].arrived,
                        numel * work->element_bytes);
            sw_carrier_touch_end(carrier);
        }
        SW_TRY(sw_carrier_wait(carrier, &at[g].partial_out, err));
    }
    return SW_OK;
}

sw_status sw_carrier_gather(sw_carrier *carrier, const sw_hier_pending *pending, sw_error *err)
{
    const sw_op *op = &pending->op;
    gathering work = {.pending = pending, .element_bytes = sw_dtype_size_bytes(op->dtype)};
    sw_cut_init(&work.cut, &carrier->hier->map, op->numel, work.element_bytes,
                carrier->block_bytes / work.element_bytes, true, pending->table);
    size_t count = work.cut.block_count;
    for (size_t step = 0; step < count + carrier->ahead; ++step) {
        if (step < count)
            SW_TRY(begin_block(carrier, &work, step, err));
        if (step >= carrier->ahead)
            SW_TRY(store_block(carrier, &work, step - carrier->ahead, err));
    }
    carrier->blocks += (uint32_t)count;
    return SW_OK;
}

/* ---- broadcast ---- */

/* Pieces go through a ring in each host's shared memory:
 *
 *   root -> its host's ring -> carrier ==> next host's ring -> its ranks
 *                                               carrier ==> next host's ring -> ...
 *
 * A piece is received into the ring, sent on from it, and copied to each rank's destination. Its
 * place is free when every rank has copied it and every next host has received it. So all links are
 * busy at once. For many pieces hosts form a chain: each sends and receives each piece once. For
 * few pieces they form a binary tree, which is less deep. A few KiB travel in frames, as the
 * operation's payload.
 *
 *   filled  pieces put into the ring since creation: by the rank that fills it
 *   taken   pieces that a rank has copied (root: has put there)
 *   sent    pieces that the carrier no longer needs */

enum {
    CHILDREN = 2,
    AHEAD = SW_STREAM_PLACES / 2 /* places to receive into; the rest are being
                                  * copied */
};

static uint32_t pieces_of(size_t size_bytes)
{
    return (uint32_t)((size_bytes + SW_STREAM_PIECE_BYTES - 1) / SW_STREAM_PIECE_BYTES);
}

static size_t piece_bytes(size_t size_bytes, uint32_t index)
{
    size_t begin = (size_t)index * SW_STREAM_PIECE_BYTES;
    return sw_size_min(SW_STREAM_PIECE_BYTES, size_bytes - begin);
}

static uint8_t *place_of(const sw_hier *hier, uint32_t piece)
{
    return hier->ring->base[hier->members[0]] +
           (size_t)(piece % SW_STREAM_PLACES) * SW_STREAM_PIECE_BYTES;
}

static void publish(_Atomic uint32_t *word, uint32_t value)
{
    atomic_store(word, value);
    sw_futex_wake_all(word);
}

/* ---- broadcast: a rank's part ---- */

/* The position of the next byte in a list of ranges. */
typedef struct range_cursor {
    const sw_range *range;
    size_t at_bytes; /* into it */
} range_cursor;

static void copy_ranges(range_cursor *cursor, uint8_t *place, size_t bytes, bool into_place)
{
    while (bytes > 0) {
        size_t count = sw_size_min(bytes, cursor->range->size_bytes - cursor->at_bytes);
        uint8_t *own = (uint8_t *)cursor->range->address + cursor->at_bytes;
        if (count > 0)
            memcpy(into_place ? place : own, into_place ? own : place, count);
        place += count;
        bytes -= count;
        cursor->at_bytes += count;
        if (cursor->at_bytes == cursor->range->size_bytes && bytes > 0)
            *cursor = (range_cursor){.range = cursor->range + 1};
    }
}

/* Wait until the place of `piece` is free: no rank or transfer uses the previous piece in it. */
static sw_status await_place(sw_hier *hier, uint32_t ticket, uint32_t piece, sw_error *err)
{
    uint32_t through = piece + 1 - SW_STREAM_PLACES;
    const sw_hier_need need = {.ticket = ticket, .filler = -1, .takes = true, .taken = through};
    for (int l = 0; l < hier->local_count; ++l)
        if (l != hier->local_rank)
            SW_TRY(sw_hier_await_word(hier, &need, &sw_hier_page(hier, l)->taken, through, err));
    return sw_hier_await_word(hier, &need, &sw_hier_page(hier, 0)->sent_pieces, through, err);
}

static sw_status put(sw_hier *hier, uint32_t ticket, uint32_t piece, range_cursor *cursor,
                     size_t bytes, sw_error *err)
{
    SW_TRY(await_place(hier, ticket, piece, err));
    copy_ranges(cursor, place_of(hier, piece), bytes, true);
    publish(&sw_hier_page(hier, hier->local_rank)->taken, piece + 1);
    publish(&sw_hier_page(hier, 0)->filled, piece + 1);
    return SW_OK;
}

static sw_status get(sw_hier *hier, const sw_hier_need *need, uint32_t piece, range_cursor *cursor,
                     size_t bytes, sw_error *err)
{
    SW_TRY(sw_hier_await_word(hier, need, &sw_hier_page(hier, 0)->filled, piece + 1, err));
    copy_ranges(cursor, place_of(hier, piece), bytes, false);
    publish(&sw_hier_page(hier, hier->local_rank)->taken, piece + 1);
    return SW_OK;
}

/* Few bytes travel as payload in the frames of the operation. */
static sw_status broadcast_short(sw_hier *hier, sw_op *op, range_cursor *cursor, sw_error *err)
{
    uint8_t bytes[SW_STREAM_LEAST_BYTES];
    bool is_root = op->root == hier->comm.rank;
    if (is_root)
        copy_ranges(cursor, bytes, op->numel, true);
    op->data = bytes;
    SW_TRY(sw_hier_run_small(hier, op, err));
    if (!is_root)
        copy_ranges(cursor, bytes, op->numel, false);
    return SW_OK;
}

sw_status sw_hier_broadcast(sw_comm *comm, const sw_range *ranges, size_t count, int root,
                            const char *label, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_op op = {.kind = SW_OP_BROADCAST, .dtype = SW_DTYPE_UINT8, .root = root};
    range_cursor cursor = {.range = ranges};
    uint32_t ticket, first = hier->pieces;
    memcpy(op.label, label, (size_t)sw_text_fit(label, sizeof op.label - 1));
    for (size_t i = 0; i < count; ++i)
        if (!sw_size_add(op.numel, ranges[i].size_bytes, &op.numel))
            SW_FAIL(err, SW_E_INVALID, "broadcast '%s': sizes overflow the address space", label);
    if (op.numel > 0 && op.numel <= SW_STREAM_LEAST_BYTES)
        return broadcast_short(hier, &op, &cursor, err);
    SW_TRY(sw_hier_begin_stream(hier, &op, &ticket, err));
    hier->pieces += pieces_of(op.numel);
    bool is_here = hier->map.host_of[root] == hier->host;
    sw_hier_need need = {.ticket = ticket, .filler = is_here ? sw_hier_local(hier, root) : -1};
    hier->comm.stats.bytes_staged += op.numel;
    for (uint32_t i = 0; i < pieces_of(op.numel); ++i) {
        size_t bytes = piece_bytes(op.numel, i);
        SW_TRY(root == comm->rank ? put(hier, ticket, first + i, &cursor, bytes, err)
                                  : get(hier, &need, first + i, &cursor, bytes, err));
    }
    return sw_hier_await(hier, ticket, err);
}

/* ---- broadcast: the carrier's part ---- */

typedef struct stream {
    const sw_hier_pending *pending;
    uint32_t ticket, first, count; /* pieces */
    int parent, child[CHILDREN];   /* hosts; -1: none */
    sw_transfer in[SW_STREAM_PLACES], out[SW_STREAM_PLACES][CHILDREN];
    uint32_t expected, through; /* pieces with a place to receive into; pieces sent on */
} stream;

static int host_at(const sw_host_map *map, int root, uint32_t position)
{
    return (root + (int)position) % map->host_count;
}

/* Choose how many hosts a host sends to. In units of one piece on one link, a chain takes pieces +
 * hosts - 2, and a binary tree, whose root sends each piece twice, 2 (pieces + depth - 1). */
static uint32_t choose_fan(uint32_t pieces, uint32_t hosts)
{
    uint32_t depth = 0;
    while (hosts >> (depth + 1))
        ++depth;
    return hosts <= pieces + 2 * depth ? 1 : CHILDREN;
}

static stream stream_of(sw_carrier *carrier, uint32_t ticket)
{
    const sw_hier *hier = carrier->hier;
    const sw_host_map *map = &hier->map;
    stream made = {.pending = sw_carrier_pending(carrier, ticket),
                   .ticket = ticket,
                   .first = carrier->pieces,
                   .parent = -1,
                   .child = {-1, -1}};
    made.count = pieces_of(made.pending->op.numel);
    int root = map->host_of[made.pending->op.root];
    uint32_t hosts = (uint32_t)map->host_count;
    uint32_t position = (uint32_t)((hier->host - root + map->host_count) % map->host_count);
    uint32_t fan = choose_fan(made.count, hosts);
    if (position > 0)
        made.parent = host_at(map, root, (position - 1) / fan);
    for (uint32_t i = 0; i < fan; ++i)
        if (position * fan + 1 + i < hosts)
            made.child[i] = host_at(map, root, position * fan + 1 + i);
    return made;
}

static size_t bytes_of(const stream *work, uint32_t index)
{
    return piece_bytes(work->pending->op.numel, index);
}

/* Wait until pieces before `end` were sent: this thread no longer needs their places. */
static sw_status finish_sending(sw_carrier *carrier, stream *work, uint32_t end, sw_error *err)
{
    for (; (int32_t)(end - work->through) > 0; ++work->through)
        for (int c = 0; c < CHILDREN; ++c)
            SW_TRY(sw_carrier_wait(carrier, &work->out[work->through % SW_STREAM_PLACES][c], err));
    publish(&sw_hier_page(carrier->hier, 0)->sent_pieces, work->first + work->through);
    return SW_OK;
}

/* Post the receives of pieces before `end`, each into its place. */
static sw_status expect(sw_carrier *carrier, stream *work, uint32_t end, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    for (; work->expected < end; ++work->expected) {
        uint32_t i = work->expected, through = work->first + i + 1 - SW_STREAM_PLACES;
        const sw_hier_need need = {
            .ticket = work->ticket, .filler = -1, .takes = true, .taken = through};
        if (i >= SW_STREAM_PLACES)
            SW_TRY(finish_sending(carrier, work, i + 1 - SW_STREAM_PLACES, err));
        for (int l = 0; l < hier->local_count; ++l)
            SW_TRY(sw_carrier_await_local(carrier, &need, &sw_hier_page(hier, l)->taken, through,
                                          err));
        SW_TRY(sw_carrier_receive(carrier, work->parent, SW_MESSAGE_SLICE, carrier->blocks + i,
                                  place_of(hier, work->first + i), bytes_of(work, i),
                                  &work->in[i % SW_STREAM_PLACES], err));
    }
    return SW_OK;
}

static sw_status send_on(sw_carrier *carrier, stream *work, uint32_t index, sw_error *err)
{
    for (int c = 0; c < CHILDREN; ++c)
        if (work->child[c] >= 0)
            SW_TRY(
                sw_carrier_send(carrier, work->child[c], SW_MESSAGE_SLICE, carrier->blocks + index,
                                place_of(carrier->hier, work->first + index), bytes_of(work, index),
                                &work->out[index % SW_STREAM_PLACES][c], err));
    return SW_OK;
}

/* Wait until the next piece is in the ring. */
static sw_status await_piece(sw_carrier *carrier, stream *work, uint32_t index, sw_error *err)
{
    sw_hier *hier = carrier->hier;
    _Atomic uint32_t *filled = &sw_hier_page(hier, 0)->filled;
    if (work->parent < 0) {
        const sw_hier_need need = {.ticket = work->ticket,
                                   .filler = sw_hier_local(hier, work->pending->op.root)};
        return sw_carrier_await_local(carrier, &need, filled, work->first + index + 1, err);
    }
    uint32_t left = work->count - index;
    SW_TRY(expect(carrier, work, index + (left < AHEAD ? left : AHEAD), err));
    SW_TRY(sw_carrier_wait(carrier, &work->in[index % SW_STREAM_PLACES], err));
    publish(filled, work->first + index + 1);
    return SW_OK;
}

sw_status sw_carrier_stream(sw_carrier *carrier, uint32_t ticket, sw_error *err)
{
    stream work = stream_of(carrier, ticket);
    bool sends = work.child[0] >= 0;
    carrier->pieces += work.count;
    if (!sends && work.parent < 0) /* one host: its ranks need no carrier */
        work.through = work.count;
    for (uint32_t i = work.through; i < work.count; ++i) {
        SW_TRY(await_piece(carrier, &work, i, err));
        if (i >= AHEAD)
            SW_TRY(finish_sending(carrier, &work, i + 1 - AHEAD, err));
        SW_TRY(send_on(carrier, &work, i, err));
    }
    SW_TRY(finish_sending(carrier, &work, work.count, err));
    carrier->blocks += work.count;
    return SW_OK;
}
