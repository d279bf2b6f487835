/* hier.c - posting and waiting. What is done with an operation is the carrier's (hier_carrier.c);
 * this file only describes it to this host's ranks, and waits until the carrier says that it is
 * complete, or until something says that it never will be. */
#include "comm/hier.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "comm/hier_state.h"
#include "platform/clock.h"
#include "platform/futex.h"
#include "platform/process.h"

static const int64_t slice_ns = 20 * 1000 * 1000;
/* A host's last word counts once nothing has moved for so long: what it sent before comes first. */
static const int64_t quiet_ns = 100 * 1000 * 1000;
/* When nothing has moved for so long, and again after three times as long: see hier_last.c. */
static const int64_t probe_ns = 250 * 1000 * 1000;
/* How long whoever is asked "what do you wait for?" has time to answer; at most a part of the
 * deadline. */
static const int64_t answer_ns = 400 * 1000 * 1000;

/* Ending
 * ------------------------------------------------------------------------------------------ */

/* From the posting thread: this host's ranks may wait in memory of their own, too. */
static sw_status end_here(sw_hier *hier, const sw_error *reason, sw_error *err)
{
    sw_hier_end(hier, reason);
    hier->end_is_known = true;
    hier->inside->ops->abort(hier->inside, &hier->reason);
    if (hier->carrier) /* whose own thread may be inside a call of the wire */
        sw_carrier_say_last_word(hier->carrier, &hier->reason);
    if (err)
        *err = hier->reason;
    return hier->reason.status;
}

static sw_status check_alive(sw_hier *hier, sw_error *err)
{
    return atomic_load(&hier->ended) ? end_here(hier, &hier->reason, err) : SW_OK;
}

void sw_hier_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES])
{
    const sw_identity *identity = &((const sw_hier *)comm)->identity[rank];
    snprintf(text, SW_COMM_PEER_BYTES, "rank %d (pid %d on host %.40s)", rank, identity->pid,
             identity->host);
}

static void describe_ticket(const sw_hier *hier, uint32_t ticket, char *text, size_t capacity)
{
    const sw_descriptor *d = &sw_hier_page(hier, hier->local_rank)->ring[ticket % SW_HIER_RING];
    snprintf(text, capacity, "%s '%.*s'", sw_op_kind_name((sw_op_kind)d->kind),
             SW_COMM_LABEL_BYTES - 1, d->label);
}

sw_status sw_hier_check_host(const sw_hier *hier, uint32_t ticket, bool deaths, int *missing,
                             sw_error *err)
{
    *missing = -1;
    for (int l = 0; l < hier->local_count; ++l) {
        const sw_page *page = sw_hier_page(hier, l);
        uint32_t state = atomic_load(&page->state);
        if (state == SW_MEMBER_ENDED) {
            *err = page->reason;
            err->message[sizeof err->message - 1] = '\0';
            return err->status;
        }
        bool has_posted = sw_ticket_reached(atomic_load(&page->posted), ticket);
        if (!has_posted && *missing < 0)
            *missing = l;
        if (has_posted && l != 0)
            continue; /* it has done its part; the carrier has not until the end */
        bool left = state == SW_MEMBER_LEFT;
        if (left || (deaths && sw_hier_has_gone(hier, l))) {
            char peer[SW_COMM_PEER_BYTES], what[160];
            sw_hier_peer((sw_comm *)(uintptr_t)hier, hier->members[l], peer);
            describe_ticket(hier, ticket, what, sizeof what);
            return sw_error_set(err, SW_E_COMM, hier->members[l], "%s %s before its part of %s",
                                peer, left ? "left the group" : "died or exited", what);
        }
    }
    return SW_OK;
}

/* Waiting
 * ------------------------------------------------------------------------------------------ */

static int host_of(const sw_hier *hier, int rank)
{
    return rank >= 0 && rank < hier->comm.world_size ? hier->map.host_of[rank] : hier->host;
}

/* Whether `rank`, which carries for another host (or is -1), may itself wait for a third rank: of
 * its own host, or of a third. */
static bool waits_for_others(const sw_hier *hier, int rank)
{
    int host = host_of(hier, rank);
    return host != hier->host && (hier->map.host_count > 2 || sw_host_size(&hier->map, host) > 1);
}

/* Of whom the operation waits, as far as this host knows. */
static int list_missing(sw_hier *hier, uint32_t ticket, char *text, size_t capacity)
{
    size_t used = 0;
    int first = -1;
    text[0] = '\0';
    for (int l = 0; l < hier->local_count && used + 1 < capacity; ++l) {
        char peer[SW_COMM_PEER_BYTES];
        char state = sw_process_state(hier->identity[hier->members[l]].pid);
        bool stopped = state == 'T' || state == 't';
        if (sw_ticket_reached(atomic_load(&sw_hier_page(hier, l)->posted), ticket) &&
            !(stopped && l == 0))
            continue;
        first = first < 0 ? hier->members[l] : first;
        sw_hier_peer(&hier->comm, hier->members[l], peer);
        int wrote = snprintf(text + used, capacity - used, "%s%s%s", used ? ", " : "", peer,
                             stopped ? " (stopped)" : "");
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    if (first >= 0)
        return first;
    char peer[SW_COMM_PEER_BYTES];
    first = atomic_load(&sw_hier_page(hier, 0)->awaiting);
    bool asks = waits_for_others(hier, first);
    first = first < 0 ? hier->members[0] : first;
    sw_hier_peer(&hier->comm, first, peer);
    snprintf(text, capacity, "%s%s", peer, asks ? ", or for whom it waits" : "");
    return first;
}

typedef struct wait_state {
    int64_t begun_ns, warn_ns;
    int64_t heard_ns; /* a last word; and what had moved by then */
    uint64_t moved_bytes;
    int64_t still_ns, probe_ns; /* since when nothing has moved; after how much of that is asked */
    uint64_t still_bytes;
} wait_state;

/* The deadline has passed for *reason, whose rank may itself wait for another: it is told, and what
 * it answers is the reason. */
static void ask_whom_it_waits_for(sw_hier *hier, sw_error *reason)
{
    int asked = host_of(hier, reason->detail);
    int64_t end = sw_clock_now_ns() +
                  (answer_ns < hier->comm.timeout_ns / 4 ? answer_ns : hier->comm.timeout_ns / 4);
    sw_error answer;
    if (!hier->carrier || !waits_for_others(hier, reason->detail))
        return;
    sw_carrier_say_last_word(hier->carrier, reason);
    while (sw_clock_now_ns() < end && !atomic_load(&hier->ended)) {
        if (sw_carrier_hears_last_word(hier->carrier, asked, &answer)) {
            if (host_of(hier, answer.detail) != hier->host)
                *reason = answer;
            return;
        }
        sw_thread_sleep_ns(5 * 1000 * 1000);
    }
}

static sw_status give_up(sw_hier *hier, uint32_t ticket, const wait_state *wait, sw_error *err)
{
    char missing[320], what[160];
    sw_error reason;
    int first = list_missing(hier, ticket, missing, sizeof missing);
    describe_ticket(hier, ticket, what, sizeof what);
    sw_error_set(&reason, SW_E_TIMEOUT, first, "waited %.1f s (timeout_s=%.1f) in %s for %s",
                 (double)(sw_clock_now_ns() - wait->begun_ns) * 1e-9,
                 (double)hier->comm.timeout_ns * 1e-9, what, missing);
    ask_whom_it_waits_for(hier, &reason);
    return end_here(hier, &reason, err);
}

/* Another host has ended, and nothing moves any more: its reason is this host's; but if it gave up
 * waiting for this host, or this one waits for a third, that is whom this one gives up. */
static sw_status check_last_words(sw_hier *hier, uint32_t ticket, wait_state *wait, sw_error *err)
{
    const sw_page *page = sw_hier_page(hier, 0);
    uint64_t moved = atomic_load(&page->sent) + atomic_load(&page->received);
    int64_t now = sw_clock_now_ns();
    sw_error reason;
    int from = hier->carrier ? 0 : hier->map.host_count;
    while (from < hier->map.host_count && !sw_carrier_hears_last_word(hier->carrier, from, &reason))
        ++from;
    if (from == hier->map.host_count)
        return SW_OK;
    if (wait->heard_ns == 0 || moved != wait->moved_bytes) {
        wait->heard_ns = now;
        wait->moved_bytes = moved;
    }
    if (now - wait->heard_ns < quiet_ns)
        return SW_OK;
    int awaited = atomic_load(&page->awaiting);
    bool of_this_host = host_of(hier, reason.detail) == hier->host;
    bool of_a_third = awaited >= 0 && host_of(hier, awaited) != from;
    if (reason.status == SW_E_TIMEOUT && (of_this_host || of_a_third))
        return give_up(hier, ticket, wait, err);
    return end_here(hier, &reason, err);
}

/* Whether the host that the carrier waits for is still there, where it says nothing. */
static sw_status check_wire(sw_hier *hier, uint32_t ticket, wait_state *wait, sw_error *err)
{
    const sw_page *page = sw_hier_page(hier, 0);
    uint64_t moved = atomic_load(&page->sent) + atomic_load(&page->received);
    int awaited = atomic_load(&page->awaiting);
    int64_t now = sw_clock_now_ns();
    char what[160];
    sw_error reason;
    if (!hier->carrier || awaited < 0)
        return SW_OK;
    if (wait->still_ns == 0 || moved != wait->still_bytes) {
        wait->still_ns = now;
        wait->still_bytes = moved;
        wait->probe_ns = probe_ns;
    }
    if (now - wait->still_ns < wait->probe_ns)
        return SW_OK;
    wait->probe_ns *= 3;
    describe_ticket(hier, ticket, what, sizeof what);
    if (sw_carrier_probe(hier->carrier, host_of(hier, awaited), what, &reason) == SW_OK)
        return SW_OK;
    return end_here(hier, &reason, err);
}

static sw_status check_clock(sw_hier *hier, uint32_t ticket, wait_state *wait, sw_error *err)
{
    sw_comm *comm = &hier->comm;
    char missing[320], what[160], message[SW_ERROR_MESSAGE_BYTES];
    int64_t waited = sw_clock_now_ns() - wait->begun_ns;
    /* Who carries asks first; the others of its host have its answer. */
    bool is_asked = hier->local_rank > 0 &&
                    waits_for_others(hier, atomic_load(&sw_hier_page(hier, 0)->awaiting));
    int64_t patience = is_asked ? 2 * answer_ns : 0;
    sw_error reason;
    if (comm->hooks.interrupted && comm->hooks.interrupted(comm->hooks.context)) {
        describe_ticket(hier, ticket, what, sizeof what);
        sw_error_set(&reason, SW_E_COMM, comm->rank,
                     "rank %d was interrupted while it waited in %s", comm->rank, what);
        end_here(hier, &reason, NULL);
        SW_FAIL(err, SW_E_INTERRUPTED, "interrupted while waiting for a peer");
    }
    if (waited < wait->warn_ns && waited < comm->timeout_ns)
        return SW_OK;
    if (waited >= comm->timeout_ns + patience)
        return give_up(hier, ticket, wait, err);
    if (waited < wait->warn_ns)
        return SW_OK;
    list_missing(hier, ticket, missing, sizeof missing);
    describe_ticket(hier, ticket, what, sizeof what);
    wait->warn_ns *= 2;
    snprintf(message, sizeof message,
             "rank %d has waited %.1f s in %.120s for %.200s; the deadline is %.1f s", comm->rank,
             (double)waited * 1e-9, what, missing, (double)comm->timeout_ns * 1e-9);
    if (comm->hooks.log)
        comm->hooks.log(comm->hooks.context, message);
    return SW_OK;
}

/* What was folded on this rank's behalf: the caller's plans learn who took part. What was complete
 * before the carrier ended stays so. Not after this thread has learnt of the end: it may have taken
 * a plan away since. */
static void settle(sw_hier *hier, uint32_t wired)
{
    const sw_page *carrier = sw_hier_page(hier, 0);
    double scale;
    for (; !hier->end_is_known && hier->settled != hier->posted &&
           sw_ticket_reached(wired, hier->settled + 1);
         ++hier->settled) {
        const sw_fold_plan *plan = hier->pending[(hier->settled + 1) % SW_HIER_RING].op.plan;
        if (plan)
            plan->resolve(plan->context, hier->contributes, &scale);
    }
    hier->comm.stats.wire_bytes_sent = atomic_load(&carrier->sent);
    hier->comm.stats.wire_bytes_received = atomic_load(&carrier->received);
}

static sw_status wait_wired(sw_hier *hier, uint32_t ticket, sw_error *err)
{
    _Atomic uint32_t *word = &sw_hier_page(hier, 0)->wired;
    wait_state wait = {.begun_ns = 0};
    for (;;) {
        uint32_t wired = atomic_load(word);
        if (sw_ticket_reached(wired, ticket)) {
            settle(hier, wired);
            if (sw_ticket_reached(hier->settled, ticket))
                return SW_OK;
        }
        SW_TRY(check_alive(hier, err));
        int64_t now = sw_clock_now_ns();
        if (wait.begun_ns == 0)
            wait = (wait_state){.begun_ns = now, .warn_ns = hier->comm.warn_after_ns};
        sw_futex_wait(word, wired, slice_ns);
        hier->comm.stats.waits++;
        hier->comm.stats.wait_ns += (uint64_t)(sw_clock_now_ns() - now);
        int missing;
        sw_error reason;
        bool deaths = now - wait.begun_ns > slice_ns;
        sw_status status = sw_hier_check_host(hier, ticket, deaths, &missing, &reason);
        if (sw_ticket_reached(atomic_load(word), ticket))
            continue; /* it was complete before what was seen */
        if (status != SW_OK)
            return end_here(hier, &reason, err);
        SW_TRY(check_last_words(hier, ticket, &wait, err));
        SW_TRY(check_clock(hier, ticket, &wait, err)); /* takes an interrupt before a probe would */
        SW_TRY(check_wire(hier, ticket, &wait, err));
    }
}

static sw_status wait_ticket(sw_comm *comm, uint32_t ticket, sw_error *err)
{
    return wait_wired((sw_hier *)comm, ticket, err);
}

static sw_status poll_ticket(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    uint32_t wired = atomic_load(&sw_hier_page(hier, 0)->wired);
    settle(hier, wired);
    *complete = sw_ticket_reached(hier->settled, ticket);
    return *complete ? SW_OK : check_alive(hier, err);
}

/* Posting
 * ------------------------------------------------------------------------------------------ */

/* The carrier looks at them whenever it comes to a block, also when the caller has given up. */
static void keep_slices(sw_hier *hier, uint32_t entry)
{
    sw_op *op = &hier->pending[entry].op;
    size_t count = (size_t)hier->comm.world_size;
    int *of_rank = hier->slice_numbers + entry * 2 * count;
    if (!op->slices)
        return;
    memcpy(of_rank, op->slices->of_rank, count * sizeof *of_rank);
    memcpy(of_rank + count, op->slices->replica_of_rank, count * sizeof *of_rank);
    hier->slices[entry] = (sw_slices){
        .count = op->slices->count, .of_rank = of_rank, .replica_of_rank = of_rank + count};
    op->slices = &hier->slices[entry];
}

static sw_status issue(sw_hier *hier, const sw_hier_pending *pending,
                       const sw_descriptor *descriptor, uint32_t *ticket, sw_error *err)
{
    sw_page *own = sw_hier_page(hier, hier->local_rank);
    uint32_t next = hier->posted + 1;
    SW_TRY(check_alive(hier, err));
    SW_TRY(wait_wired(hier, next - SW_HIER_RING, err)); /* its entry is free */
    hier->pending[next % SW_HIER_RING] = *pending;
    keep_slices(hier, next % SW_HIER_RING);
    own->ring[next % SW_HIER_RING] = *descriptor;
    hier->posted = next;
    atomic_store(&own->posted, next);
    sw_futex_wake_all(&own->posted);
    *ticket = next;
    return SW_OK;
}

static void count_operation(sw_hier *hier, const sw_op *op)
{
    hier->comm.stats.operations[op->kind]++;
    if (op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER)
        hier->comm.stats.bytes_reduced += op->numel * sw_dtype_size_bytes(op->dtype);
}

static sw_status check_supported(const sw_hier *hier, const sw_op *op, sw_error *err)
{
    SW_TRY(sw_op_check(op, hier->comm.world_size, err));
    if (op->kind == SW_OP_REDUCE_SCATTER && (!op->arena || (op->result && !op->results)))
        SW_FAIL(err, SW_E_UNSUPPORTED, "%s '%s' over hosts needs memory of an arena, results too",
                sw_op_kind_name(op->kind), op->label);
    return SW_OK;
}

static sw_status post(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_descriptor descriptor;
    SW_TRY(check_supported(hier, op, err));
    if (!op->arena)
        SW_FAIL(err, SW_E_STATE, "%s '%s' was posted on private memory, which only run() takes",
                sw_op_kind_name(op->kind), op->label);
    sw_hier_pending pending = {
        .op = *op, .arena = (sw_arena *)(uintptr_t)op->arena, .at_bytes = op->offset_bytes};
    sw_descriptor_fill(&descriptor, op, false);
    count_operation(hier, op);
    return issue(hier, &pending, &descriptor, ticket, err);
}

/* One chunk of private memory, to its end. Half of the bounce memory is this chunk's: the other may
 * still be read by a rank that is late with the chunk before, and no rank is two behind. */
static sw_status run_chunk(sw_hier *hier, const sw_op *op, size_t begin, size_t count,
                           size_t *at_bytes, sw_error *err)
{
    size_t element_bytes = sw_dtype_size_bytes(op->dtype), bytes = count * element_bytes;
    sw_hier_pending pending = {.op = *op, .begin = begin};
    sw_descriptor descriptor;
    uint32_t ticket;
    *at_bytes = (hier->chunks++ & 1) * (size_t)SW_HIER_CHUNK_BYTES;
    bool gives = op->kind != SW_OP_BROADCAST || op->root == hier->comm.rank;
    if (bytes && gives)
        memcpy(hier->bounce->base[hier->comm.rank] + *at_bytes,
               (const uint8_t *)op->data + begin * element_bytes, bytes);
    pending.op.numel = count;
    if (op->kind == SW_OP_ALL_REDUCE) {
        pending.arena = hier->bounce;
        pending.at_bytes = *at_bytes;
    } else if (bytes) {
        pending.op.beside = hier->bounce;
        pending.op.beside_offset_bytes = *at_bytes;
        pending.op.beside_bytes = bytes;
    }
    sw_descriptor_fill(&descriptor, op, true);
    descriptor.chunk = begin * element_bytes / SW_HIER_CHUNK_BYTES;
    hier->comm.stats.bytes_staged += bytes;
    SW_TRY(issue(hier, &pending, &descriptor, &ticket, err));
    return wait_wired(hier, ticket, err);
}

static sw_status run(sw_comm *comm, const sw_op *op, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    uint32_t ticket;
    size_t at;
    if (op->arena) {
        SW_TRY(post(comm, op, &ticket, err));
        return wait_wired(hier, ticket, err);
    }
    SW_TRY(check_supported(hier, op, err));
    count_operation(hier, op);
    size_t element_bytes = sw_dtype_size_bytes(op->dtype), begin = 0;
    if (op->kind == SW_OP_BARRIER || op->numel == 0)
        return run_chunk(hier, op, 0, 0, &at, err);
    for (size_t count; begin < op->numel; begin += count) {
        count = sw_size_min(SW_HIER_CHUNK_BYTES / element_bytes, op->numel - begin);
        SW_TRY(run_chunk(hier, op, begin, count, &at, err));
        int from = op->kind == SW_OP_BROADCAST ? op->root : comm->rank;
        if (op->kind == SW_OP_ALL_REDUCE || from != comm->rank)
            memcpy((uint8_t *)op->data + begin * element_bytes, hier->bounce->base[from] + at,
                   count * element_bytes);
    }
    return SW_OK;
}

static sw_status gather(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                        const char *label, sw_error *err)
{
    sw_hier *hier = (sw_hier *)comm;
    size_t at, begin = 0, count;
    sw_op op = {.kind = SW_OP_ALL_GATHER,
                .dtype = SW_DTYPE_UINT8,
                .numel = size_bytes,
                .data = (void *)(uintptr_t)mine};
    snprintf(op.label, sizeof op.label, "%s", label);
    SW_TRY(sw_op_check(&op, comm->world_size, err));
    count_operation(hier, &op);
    do {
        count = sw_size_min(SW_HIER_CHUNK_BYTES, size_bytes - begin);
        SW_TRY(run_chunk(hier, &op, begin, count, &at, err));
        for (int r = 0; r < comm->world_size; ++r)
            memcpy((uint8_t *)all + (size_t)r * size_bytes + begin, hier->bounce->base[r] + at,
                   count);
        begin += count;
    } while (begin < size_bytes);
    return SW_OK;
}

/* Arenas
 * ------------------------------------------------------------------------------------------ */

static size_t mirrored_bytes(size_t size_bytes)
{
    return (size_bytes + SW_ALIGNMENT_BYTES - 1) / SW_ALIGNMENT_BYTES * SW_ALIGNMENT_BYTES;
}

/* This host's part of an arena. Mirrored: all ranks' parts lie in the carrier's memory. */
static sw_status create_inside(sw_hier *hier, size_t size_bytes, const char *label, bool mirrored,
                               sw_arena **arena, sw_error *err)
{
    size_t world_size = (size_t)hier->comm.world_size, stride = mirrored_bytes(size_bytes);
    sw_arena *inside;
    SW_TRY(hier->inside->ops->arena_create(
        hier->inside, mirrored ? stride * world_size : size_bytes, label, &inside, err));
    sw_hier_arena *made = calloc(1, sizeof *made);
    uint8_t **base = calloc(world_size, sizeof *base);
    if (!made || !base) {
        free(made);
        free(base);
        hier->inside->ops->arena_destroy(hier->inside, inside);
        SW_FAIL(err, SW_E_MEMORY, "no memory for the tables of arena '%s'", label);
    }
    for (int l = 0; !mirrored && l < hier->local_count; ++l)
        base[hier->members[l]] = inside->base[l];
    for (size_t r = 0; mirrored && r < world_size; ++r)
        base[r] = inside->base[0] + r * stride;
    *made = (sw_hier_arena){
        .arena = {.size_bytes = size_bytes, .base = base, .world_size = hier->comm.world_size},
        .inside = inside};
    *arena = &made->arena;
    return SW_OK;
}

static void destroy_inside(sw_hier *hier, sw_arena *arena)
{
    if (!arena)
        return;
    hier->inside->ops->arena_destroy(hier->inside, ((sw_hier_arena *)arena)->inside);
    free(arena->base);
    free(arena);
}

/* An operation that is not complete may still be read by the wire: its memory then stays until the
 * wire is closed. (The carrier touches no memory of a communicator that has ended.) */
static void arena_destroy(sw_comm *comm, sw_arena *arena)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_hier_arena *held = (sw_hier_arena *)arena;
    bool in_use = hier->carrier && !sw_carrier_wire_is_closed(hier->carrier) &&
                  atomic_load(&sw_hier_page(hier, 0)->wired) != hier->posted;
    if (!in_use) {
        destroy_inside(hier, arena);
    } else if (held) {
        held->next = hier->kept;
        hier->kept = held;
    }
}

typedef struct verdict {
    uint64_t size_bytes;
    uint32_t failed;
    char message[244];
} verdict;

/* What one host cannot do, no host does; ranks of one have compared sizes, and hosts do it here. */
static sw_status agree(sw_hier *hier, const char *label, size_t size_bytes, sw_status local,
                       const sw_error *cause, sw_error *err)
{
    sw_comm *comm = &hier->comm;
    verdict mine = {.size_bytes = size_bytes, .failed = local != SW_OK};
    verdict *all = calloc((size_t)comm->world_size, sizeof *all);
    if (!all)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory to agree on arena '%s'", label);
    if (local != SW_OK)
        snprintf(mine.message, sizeof mine.message, "%.240s", cause->message);
    sw_status status = gather(comm, &mine, sizeof mine, all, label, err);
    for (int r = 1; status == SW_OK && r < comm->world_size; ++r)
        if (all[r].size_bytes != all[0].size_bytes)
            status =
                sw_comm_arena_differs(comm, label, all[0].size_bytes, r, all[r].size_bytes, err);
    for (int r = 0; status == SW_OK && r < comm->world_size; ++r)
        if (all[r].failed)
            status = sw_error_set(err, SW_E_MEMORY, r, "%s", all[r].message);
    free(all);
    return status;
}

static sw_status create(sw_hier *hier, size_t size_bytes, const char *label, bool mirrored,
                        sw_arena **arena, sw_error *err)
{
    sw_error cause;
    sw_arena *made = NULL;
    uint32_t serial = ++hier->comm.arenas;
    SW_TRY(check_alive(hier, err));
    hier->inside->timeout_ns = hier->comm.timeout_ns;
    sw_status local = create_inside(hier, size_bytes, label, mirrored, &made, &cause);
    if (local != SW_OK && local != SW_E_MEMORY)
        return end_here(hier, &cause, err);
    sw_status status = agree(hier, label, size_bytes, local, &cause, err);
    if (status != SW_OK) {
        destroy_inside(hier, made);
        return status;
    }
    made->serial = serial;
    *arena = made;
    return SW_OK;
}

static sw_status arena_create(sw_comm *comm, size_t size_bytes, const char *label, sw_arena **arena,
                              sw_error *err)
{
    return create((sw_hier *)comm, size_bytes, label, false, arena, err);
}

static sw_status mirror_create(sw_comm *comm, size_t size_bytes, const char *label,
                               sw_arena **arena, sw_error *err)
{
    return create((sw_hier *)comm, size_bytes, label, true, arena, err);
}

/* Lifecycle
 * ------------------------------------------------------------------------------------------ */

static void abort_all(sw_comm *comm, const sw_error *reason)
{
    end_here((sw_hier *)comm, reason, NULL);
}

static void leave(sw_comm *comm)
{
    sw_hier *hier = (sw_hier *)comm;
    sw_page *own = sw_hier_page(hier, hier->local_rank);
    if (hier->carrier)
        sw_carrier_stop(hier->carrier, !atomic_load(&hier->ended));
    pthread_mutex_lock(&hier->lock);
    if (!atomic_load(&hier->ended)) {
        sw_error_set(&hier->reason, SW_E_STATE, -1, "the communicator of rank %d was closed",
                     comm->rank);
        atomic_store(&hier->ended, true);
        atomic_store(&own->state, SW_MEMBER_LEFT);
    }
    pthread_mutex_unlock(&hier->lock);
    hier->end_is_known = true;
    sw_futex_wake_all(&own->posted);
    sw_futex_wake_all(&own->wired);
    hier->inside->ops->leave(hier->inside);
}

static void free_tables(sw_hier *hier)
{
    if (hier->pages)
        hier->inside->ops->arena_destroy(hier->inside, hier->pages);
    destroy_inside(hier, hier->bounce);
    hier->inside->ops->destroy(hier->inside);
    sw_host_map_fini(&hier->map);
    free(hier->identity);
    free(hier->contributes);
    free(hier->slice_numbers);
    pthread_mutex_destroy(&hier->lock);
    free(hier);
}

static void free_kept(sw_hier *hier)
{
    while (hier->kept) {
        sw_hier_arena *held = hier->kept;
        hier->kept = held->next;
        destroy_inside(hier, &held->arena);
    }
}

/* A carrier that is still inside a call of the wire keeps itself, and what its thread looks at
 * first: they are left to the process's end; with all arenas, where the wire could not be closed.
 * So is everything in a forked child, which has no such thread. */
static void destroy(sw_comm *comm)
{
    sw_hier *hier = (sw_hier *)comm;
    if (!comm || (int)getpid() != hier->owner_pid)
        return;
    leave(comm);
    bool is_left = hier->carrier && !sw_carrier_is_over(hier->carrier);
    if (is_left && !sw_carrier_wire_is_closed(hier->carrier))
        return;
    if (!is_left)
        sw_carrier_destroy(hier->carrier);
    free_kept(hier);
    if (!is_left)
        free_tables(hier);
}

static sw_status forked(sw_comm *comm, sw_error *err)
{
    sw_comm *inside = ((sw_hier *)comm)->inside;
    return inside->ops->forked ? inside->ops->forked(inside, err) : SW_OK;
}

static const sw_comm_ops hier_ops = {
    .arena_create = arena_create,
    .mirror_create = mirror_create,
    .arena_destroy = arena_destroy,
    .post = post,
    .poll = poll_ticket,
    .wait = wait_ticket,
    .run = run,
    .gather = gather,
    .abort = abort_all,
    .request_end = sw_hier_request_end,
    .look = sw_hier_look,
    .peer = sw_hier_peer,
    .is_alive = sw_hier_is_alive,
    .leave = leave,
    .forked = forked,
    .destroy = destroy,
};

static sw_status init(sw_hier *hier, int rank, int world_size, const int *host_of,
                      const sw_identity *identities, sw_error *err)
{
    size_t count = (size_t)world_size;
    SW_TRY(sw_host_map_init(&hier->map, host_of, world_size, err));
    hier->comm = (sw_comm){.ops = &hier_ops,
                           .rank = rank,
                           .world_size = world_size,
                           .is_carried = true,
                           .timeout_ns = hier->inside->timeout_ns,
                           .warn_after_ns = hier->inside->warn_after_ns,
                           .hooks = hier->inside->hooks};
    hier->host = host_of[rank];
    hier->members = sw_host_members(&hier->map, hier->host);
    hier->local_count = sw_host_size(&hier->map, hier->host);
    hier->local_rank = hier->inside->rank;
    hier->identity = calloc(count, sizeof *hier->identity);
    hier->contributes = calloc(count, sizeof *hier->contributes);
    hier->slice_numbers = calloc(SW_HIER_RING * 2 * count, sizeof *hier->slice_numbers);
    if (!hier->identity || !hier->contributes || !hier->slice_numbers)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a group of %d ranks", world_size);
    memcpy(hier->identity, identities, count * sizeof *identities);
    if (hier->local_count != hier->inside->world_size || hier->members[hier->local_rank] != rank)
        SW_FAIL(err, SW_E_INVALID, "rank %d: the map of hosts is not that of the ranks joined",
                rank);
    SW_TRY(hier->inside->ops->arena_create(hier->inside, sizeof(sw_page), "pages of hosts",
                                           &hier->pages, err));
    atomic_store(&sw_hier_page(hier, hier->local_rank)->awaiting, -1);
    return create_inside(hier, 2 * (size_t)SW_HIER_CHUNK_BYTES, "bounce memory of hosts", true,
                         &hier->bounce, err);
}

static void release_wire(const sw_wire *wire)
{
    if (wire)
        wire->release(wire->context);
}

sw_status sw_hier_comm_create(sw_comm *inside, int rank, int world_size, const int *host_of,
                              const sw_identity *identities, const sw_wire *wire, sw_comm **comm,
                              sw_error *err)
{
    sw_hier *made = calloc(1, sizeof *made);
    if (!made) {
        inside->ops->destroy(inside);
        release_wire(wire);
        SW_FAIL(err, SW_E_MEMORY, "no memory for a group of %d ranks", world_size);
    }
    made->inside = inside;
    made->owner_pid = (int)getpid();
    pthread_mutex_init(&made->lock, NULL);
    sw_status status = init(made, rank, world_size, host_of, identities, err);
    if (status == SW_OK && made->local_rank == 0)
        status = sw_carrier_start(made, wire, err);
    else
        release_wire(wire);
    if (status != SW_OK) {
        free_tables(made);
        return status;
    }
    *comm = &made->comm;
    return SW_OK;
}

const sw_host_map *sw_hier_comm_map(const sw_comm *comm)
{
    return &((const sw_hier *)comm)->map;
}

const sw_comm *sw_hier_comm_inside(const sw_comm *comm)
{
    return ((const sw_hier *)comm)->inside;
}
