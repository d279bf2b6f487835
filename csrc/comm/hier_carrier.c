/* hier_carrier.c - the thread that does a host's operations: one a host, on its lowest rank.
 *
 * An operation begins when all ranks of the host have posted it. Carriers first exchange *frames*:
 * what the operation is (compared as ranks of one host compare it), what each rank says beside the
 * data, or that a host has ended and why. An all_reduce then goes through in blocks: partial sums
 * of block t + SW_HIER_AHEAD leave while those of block t arrive, and results of block t leave
 * while those of t - SW_HIER_AHEAD arrive, so that both directions of the wire stay busy. Every
 * wait is for the oldest thing under way, and no message of an operation leaves before the frames
 * of it agree: no two carriers can wait for one another crosswise.
 *
 * The thread may wait for the wire for ever; deadlines are kept by those who wait for it. It leaves
 * what the wire may still write to, and never frees it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "comm/hier_state.h"
#include "comm/partial.h"
#include "platform/clock.h"
#include "platform/futex.h"

enum { FRAME_MAGIC = 0x53574631 /* "SWF1" */, LEAVE_MS = 1000 };

static const int64_t idle_slice_ns = 200 * 1000 * 1000;
static const int64_t busy_slice_ns = 10 * 1000 * 1000;

typedef struct slot { /* one block under way; arrays of host_count */
    uint8_t **partial, **arrived;
    sw_transfer *partial_out, *partial_in, *result_out, *result_in;
} slot;

struct sw_carrier {
    sw_hier *hier;
    sw_bridge bridge;
    sw_thread thread;
    bool thread_began;
    _Atomic bool stop, finished;
    bool midway;             /* in an operation: what moves then may be under way for ever */
    uint32_t frames;         /* sent so far: one an operation, and one more at the end */
    uint32_t blocks;         /* begun so far, over all operations */
    sw_frame out, last, *in; /* in: owned, host_count */
    sw_transfer *frame_out, *frame_in, *beside_out, *beside_in; /* owned, host_count */
    uint8_t *beside;                                            /* owned: what this host says */
    uint8_t **heard;                                            /* owned: what each host says */
    size_t beside_capacity, *heard_capacity;
    slot slots[SW_HIER_SLOTS];
    uint8_t *memory; /* owned: of the slots */
    const void **source;
    void **destination;
    bool *contributes, *host_contributes;
};

typedef struct all_reduce {
    const sw_hier_pending *pending;
    sw_dtype partial_dtype;
    size_t element_bytes, partial_bytes, slice, block_numel, block_count;
    double scale;
} all_reduce;

/* Memory of operations is touched between these alone. */
static sw_status touch_begin(sw_carrier *carrier, sw_error *err)
{
    sw_hier *hier = carrier->hier;
    pthread_mutex_lock(&hier->lock);
    if (!atomic_load(&hier->ended))
        return SW_OK;
    *err = hier->reason;
    pthread_mutex_unlock(&hier->lock);
    return err->status;
}

static void touch_end(sw_carrier *carrier)
{
    pthread_mutex_unlock(&carrier->hier->lock);
}

/* What a failure of the wire means. */
static sw_status blame(const sw_carrier *carrier, const char *what, sw_error *err)
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

static sw_status wait_for(sw_carrier *carrier, sw_transfer *transfer, const char *what,
                          sw_error *err)
{
    return sw_bridge_wait(&carrier->bridge, transfer, err) == SW_OK ? SW_OK
                                                                    : blame(carrier, what, err);
}

#define FOR_OTHER_HOSTS(carrier, g)                           \
    for (int g = 0; g < (carrier)->hier->map.host_count; ++g) \
        if (g != (carrier)->hier->host)

/* Frames
 * ------------------------------------------------------------------------------------------ */

static const sw_descriptor *descriptor_of(const sw_hier *hier, int local, uint32_t ticket)
{
    return &sw_hier_page(hier, local)->ring[ticket % SW_HIER_RING];
}

/* The next frame of each host has a place to arrive at, so that no host waits to send it. */
static sw_status expect_frames(sw_carrier *carrier, sw_error *err)
{
    FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_FRAME, carrier->frames + 1,
                              &carrier->in[g], sizeof *carrier->in, &carrier->frame_in[g],
                              err) != SW_OK)
            return blame(carrier, "waiting for operations", err);
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
    SW_TRY(touch_begin(carrier, err));
    copy_spoken(carrier, op, carrier->hier->host, to, false);
    touch_end(carrier);
    return SW_OK;
}

static sw_status exchange_long_besides(sw_carrier *carrier, const sw_op *op, uint32_t ticket,
                                       const char *what, sw_error *err)
{
    size_t mine = carrier->out.beside_bytes;
    FOR_OTHER_HOSTS(carrier, g)
    {
        size_t theirs = spoken_bytes(carrier, op, g);
        if (theirs <= SW_FRAME_INLINE_BYTES)
            continue;
        SW_TRY(reserve(&carrier->heard[g], &carrier->heard_capacity[g], theirs, err));
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_BESIDE, ticket, carrier->heard[g],
                              theirs, &carrier->beside_in[g], err) != SW_OK)
            return blame(carrier, what, err);
    }
    FOR_OTHER_HOSTS(carrier, g)
    {
        if (mine > SW_FRAME_INLINE_BYTES &&
            sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_BESIDE, ticket, carrier->beside, mine,
                           &carrier->beside_out[g], err) != SW_OK)
            return blame(carrier, what, err);
    }
    FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(wait_for(carrier, &carrier->beside_in[g], what, err));
        SW_TRY(wait_for(carrier, &carrier->beside_out[g], what, err));
    }
    return SW_OK;
}

static sw_status hear(sw_carrier *carrier, const sw_op *op, sw_error *err)
{
    SW_TRY(touch_begin(carrier, err));
    FOR_OTHER_HOSTS(carrier, g)
    {
        bool is_long = spoken_bytes(carrier, op, g) > SW_FRAME_INLINE_BYTES;
        copy_spoken(carrier, op, g, is_long ? carrier->heard[g] : carrier->in[g].beside, true);
    }
    touch_end(carrier);
    return SW_OK;
}

static sw_status send_frames(sw_carrier *carrier, const char *what, sw_error *err)
{
    carrier->frames++;
    FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_FRAME, carrier->frames, &carrier->out,
                           sizeof carrier->out, &carrier->frame_out[g], err) != SW_OK)
            return blame(carrier, what, err);
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
    FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(wait_for(carrier, &carrier->frame_in[g], what, err));
        SW_TRY(read_frame(carrier, g, ticket, what, err));
    }
    SW_TRY(compare_frames(carrier, ticket, err));
    FOR_OTHER_HOSTS(carrier, g)
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
    FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(wait_for(carrier, &carrier->frame_out[g], what, err));
    }
    return SW_OK;
}

/* all_reduce
 * ------------------------------------------------------------------------------------------ */

/* Elements of block `block` of the slice of `host`. */
static size_t block_range(const all_reduce *work, int host, size_t block, size_t *begin)
{
    size_t numel = work->pending->op.numel;
    size_t end = sw_size_min(((size_t)host + 1) * work->slice, numel);
    *begin = sw_size_min((size_t)host * work->slice + block * work->block_numel, end);
    return sw_size_min(work->block_numel, end - *begin);
}

static uint8_t *contribution(const sw_carrier *carrier, const all_reduce *work, int local,
                             size_t begin)
{
    const sw_hier_pending *pending = work->pending;
    return pending->arena->base[carrier->hier->members[local]] + pending->at_bytes +
           begin * work->element_bytes;
}

/* This host's partial sums of a range: in `memory`, or where they lie already. */
static uint8_t *fold_host(const sw_carrier *carrier, const all_reduce *work, size_t begin,
                          size_t numel, uint8_t *memory)
{
    const sw_hier *hier = carrier->hier;
    int count = 0;
    for (int l = 0; l < hier->local_count; ++l)
        if (carrier->contributes[hier->members[l]])
            carrier->source[count++] = contribution(carrier, work, l, begin);
    if (count == 1 && hier->local_count == 1 && work->partial_dtype == work->pending->op.dtype)
        return contribution(carrier, work, 0, begin);
    sw_partial_fold(memory, carrier->source, count, numel, work->pending->op.dtype,
                    work->pending->op.redop);
    return memory;
}

static bool next_run(const all_reduce *work, size_t cursor, size_t end, size_t *begin,
                     size_t *numel)
{
    const sw_fold_plan *plan = work->pending->op.plan;
    size_t shift = work->pending->begin;
    *begin = cursor;
    *numel = end - cursor;
    if (!plan)
        return cursor < end;
    if (cursor >= end || !plan->next_run(plan->context, cursor + shift, end + shift, begin, numel))
        return false;
    *begin -= shift;
    return true;
}

static sw_status begin_block(sw_carrier *carrier, const all_reduce *work, size_t block,
                             const char *what, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    slot *at = &carrier->slots[block % SW_HIER_SLOTS];
    uint32_t number = carrier->blocks + (uint32_t)block;
    size_t begin, own = block_range(work, hier->host, block, &begin);
    FOR_OTHER_HOSTS(carrier, g)
    {
        if (carrier->host_contributes[g] &&
            sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_PARTIAL, number, at->arrived[g],
                              own * work->partial_bytes, &at->partial_in[g], err) != SW_OK)
            return blame(carrier, what, err);
    }
    FOR_OTHER_HOSTS(carrier, g)
    {
        size_t numel = block_range(work, g, block, &begin);
        if (!carrier->host_contributes[hier->host] || numel == 0)
            continue;
        SW_TRY(touch_begin(carrier, err));
        const uint8_t *partial = fold_host(carrier, work, begin, numel, at->partial[g]);
        touch_end(carrier);
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_PARTIAL, number, partial,
                           numel * work->partial_bytes, &at->partial_out[g], err) != SW_OK)
            return blame(carrier, what, err);
    }
    return SW_OK;
}

/* Partials of all hosts, in host order, become the result in the memory of this host's ranks. */
static void finish_own(sw_carrier *carrier, const all_reduce *work, slot *at, size_t begin,
                       size_t numel)
{
    const sw_hier *hier = carrier->hier;
    const sw_op *op = &work->pending->op;
    size_t run, run_numel;
    if (carrier->host_contributes[hier->host])
        at->arrived[hier->host] = fold_host(carrier, work, begin, numel, at->partial[hier->host]);
    for (size_t cursor = begin; next_run(work, cursor, begin + numel, &run, &run_numel);
         cursor = run + run_numel) {
        int count = 0;
        for (int g = 0; g < hier->map.host_count; ++g)
            if (carrier->host_contributes[g])
                carrier->source[count++] = at->arrived[g] + (run - begin) * work->partial_bytes;
        for (int l = 0; l < hier->local_count; ++l)
            carrier->destination[l] = contribution(carrier, work, l, run);
        sw_partial_finish(carrier->destination, hier->local_count, carrier->source, count,
                          run_numel, op->dtype, work->scale, op->redop);
    }
}

static sw_status fold_block(sw_carrier *carrier, const all_reduce *work, size_t block,
                            const char *what, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    slot *at = &carrier->slots[block % SW_HIER_SLOTS];
    uint32_t number = carrier->blocks + (uint32_t)block;
    size_t begin, numel = block_range(work, hier->host, block, &begin), unused;
    FOR_OTHER_HOSTS(carrier, g) /* what was sent makes room for the result that comes back */
    {
        SW_TRY(wait_for(carrier, &at->partial_out[g], what, err));
        if (sw_bridge_receive(&carrier->bridge, g, SW_MESSAGE_RESULT, number, at->partial[g],
                              block_range(work, g, block, &unused) * work->element_bytes,
                              &at->result_in[g], err) != SW_OK)
            return blame(carrier, what, err);
    }
    FOR_OTHER_HOSTS(carrier, g)
    {
        SW_TRY(wait_for(carrier, &at->partial_in[g], what, err));
    }
    if (numel == 0)
        return SW_OK;
    SW_TRY(touch_begin(carrier, err));
    finish_own(carrier, work, at, begin, numel);
    touch_end(carrier);
    /* Elements that nobody used are not the result here; they are not taken over there. */
    FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_RESULT, number,
                           contribution(carrier, work, 0, begin), numel * work->element_bytes,
                           &at->result_out[g], err) != SW_OK)
            return blame(carrier, what, err);
    }
    return SW_OK;
}

static sw_status store_block(sw_carrier *carrier, const all_reduce *work, size_t block,
                             const char *what, sw_error *err)
{
    const sw_hier *hier = carrier->hier;
    slot *at = &carrier->slots[block % SW_HIER_SLOTS];
    size_t begin, run, run_numel;
    FOR_OTHER_HOSTS(carrier, g)
    {
        size_t numel = block_range(work, g, block, &begin);
        SW_TRY(wait_for(carrier, &at->result_in[g], what, err));
        SW_TRY(touch_begin(carrier, err));
        for (size_t cursor = begin; next_run(work, cursor, begin + numel, &run, &run_numel);
             cursor = run + run_numel)
            for (int l = 0; l < hier->local_count; ++l)
                memcpy(contribution(carrier, work, l, run),
                       at->partial[g] + (run - begin) * work->element_bytes,
                       run_numel * work->element_bytes);
        touch_end(carrier);
        SW_TRY(wait_for(carrier, &at->result_out[g], what, err));
    }
    return SW_OK;
}

/* Who contributes, and the factor. False: nothing is to be folded, here and on all hosts. */
static sw_status resolve(sw_carrier *carrier, all_reduce *work, bool *any, sw_error *err)
{
    const sw_host_map *map = &carrier->hier->map;
    const sw_fold_plan *plan = work->pending->op.plan;
    size_t begin, numel;
    work->scale = 1.0 / map->world_size;
    for (int r = 0; r < map->world_size; ++r)
        carrier->contributes[r] = true;
    SW_TRY(touch_begin(carrier, err));
    if (plan)
        plan->resolve(plan->context, carrier->contributes, &work->scale);
    *any = next_run(work, 0, work->pending->op.numel, &begin, &numel);
    touch_end(carrier);
    memset(carrier->host_contributes, 0, (size_t)map->host_count * sizeof(bool));
    bool somebody = false;
    for (int r = 0; r < map->world_size; ++r) {
        carrier->host_contributes[map->host_of[r]] |= carrier->contributes[r];
        somebody |= carrier->contributes[r];
    }
    *any &= somebody;
    return SW_OK;
}

static sw_status run_all_reduce(sw_carrier *carrier, const sw_hier_pending *pending,
                                const char *what, sw_error *err)
{
    const sw_op *op = &pending->op;
    all_reduce work = {.pending = pending,
                       .partial_dtype = sw_partial_dtype(op->dtype),
                       .element_bytes = sw_dtype_size_bytes(op->dtype)};
    bool any;
    work.partial_bytes = sw_dtype_size_bytes(work.partial_dtype);
    work.slice = sw_comm_slice_numel(op->numel, work.element_bytes, carrier->hier->map.host_count);
    work.block_numel = SW_HIER_BLOCK_BYTES / work.partial_bytes;
    work.block_count = (work.slice + work.block_numel - 1) / work.block_numel;
    SW_TRY(resolve(carrier, &work, &any, err));
    if (!any)
        return SW_OK;
    for (size_t step = 0; step < work.block_count + 2 * SW_HIER_AHEAD; ++step) {
        if (step < work.block_count)
            SW_TRY(begin_block(carrier, &work, step, what, err));
        if (step >= SW_HIER_AHEAD && step - SW_HIER_AHEAD < work.block_count)
            SW_TRY(fold_block(carrier, &work, step - SW_HIER_AHEAD, what, err));
        if (step >= 2 * SW_HIER_AHEAD)
            SW_TRY(store_block(carrier, &work, step - 2 * SW_HIER_AHEAD, what, err));
    }
    carrier->blocks += (uint32_t)work.block_count;
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
        SW_TRY(touch_begin(carrier, err));
        touch_end(carrier);
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
    if (op->kind == SW_OP_ALL_REDUCE && op->numel > 0)
        SW_TRY(run_all_reduce(carrier, pending, what, err));
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
    FOR_OTHER_HOSTS(carrier, g)
    {
        if (sw_bridge_send(&carrier->bridge, g, SW_MESSAGE_FRAME, carrier->frames, last,
                           sizeof *last, &carrier->frame_out[g], &ignored) != SW_OK)
            carrier->frame_out[g].work = NULL;
    }
    FOR_OTHER_HOSTS(carrier, g)
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
        slot *s = &carrier->slots[i];
        s->partial = calloc(hosts, sizeof *s->partial);
        s->arrived = calloc(hosts, sizeof *s->arrived);
        s->partial_out = calloc(4 * hosts, sizeof *s->partial_out);
        if (!s->partial || !s->arrived || !s->partial_out)
            SW_FAIL(err, SW_E_MEMORY, "no memory for %zu hosts", hosts);
        s->partial_in = s->partial_out + hosts;
        s->result_out = s->partial_out + 2 * hosts;
        s->result_in = s->partial_out + 3 * hosts;
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
