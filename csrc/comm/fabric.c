/* fabric.c - start and end of a fabric, checks of its peers, tickets (comparing descriptors and
 * ordered progress), waiting and issuing. fabric_execute.c has an operation's memory accesses. */
#include "comm/fabric.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "comm/account.h"
#include "comm/wait.h"
#include "platform/clock.h"
#include "platform/futex.h"
#include "platform/process.h"

enum { SPIN_WITH_SPARE_CORES = 2000, DEATHS_A_LOOK = 64, PAGE_BYTES = 4096 };

static size_t whole_pages(size_t size_bytes)
{
    return (size_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static size_t control_bytes(int world_size)
{
    return whole_pages((size_t)world_size * sizeof(sw_control));
}

static size_t ring_bytes(int world_size)
{
    return whole_pages((size_t)world_size * SW_FABRIC_RING * sizeof(sw_fabric_entry));
}

size_t sw_fabric_pages_bytes(int world_size)
{
    return control_bytes(world_size) + ring_bytes(world_size) +
           (size_t)world_size * SW_FABRIC_SLOTS * SW_FABRIC_SLOT_BYTES;
}

sw_status sw_fabric_init(sw_fabric *fabric, int rank, int world_size, uint8_t *pages, sw_error *err)
{
    size_t count = (size_t)world_size;
    fabric->comm.rank = rank;
    fabric->comm.world_size = world_size;
    fabric->control = (sw_control *)(void *)pages;
    fabric->ring = (sw_fabric_entry *)(void *)(pages + control_bytes(world_size));
    fabric->slots = pages + control_bytes(world_size) + ring_bytes(world_size);
    fabric->asked = (uint32_t)rank;
    atomic_store(&fabric->is_open, true);
    fabric->spin_count = world_size <= sw_process_cores() ? SPIN_WITH_SPARE_CORES : 0;
    fabric->source = calloc(count, sizeof *fabric->source);
    fabric->destination = calloc(count, sizeof *fabric->destination);
    fabric->contributes = calloc(count, sizeof *fabric->contributes);
    if (!fabric->source || !fabric->destination || !fabric->contributes) {
        sw_error reason;
        int name = sw_comm_name(&fabric->comm, rank);
        sw_error_set(&reason, SW_E_MEMORY, name,
                     "rank %d has no memory for the tables of a communicator of %d ranks", name,
                     world_size);
        return sw_fabric_end(fabric, &reason, err);
    }
    return SW_OK;
}

/* ---- ending ---- */

void sw_control_end(sw_control *control, int world_size, int rank, sw_member_state how,
                    const sw_error *reason)
{
    if (!sw_ending_record(&control[rank].ending, how, reason))
        return;
    for (int r = 0; r < world_size; ++r) {
        if (!atomic_load(&control[r].waiters))
            continue;
        sw_futex_wake_all(&control[r].posted);
        sw_futex_wake_all(&control[r].done);
    }
}

/* Record the reason for this rank's own threads first, so that all of them report it, then for the
 * peers. Repeat that in a second call: the first may have come before the pages existed. */
static sw_status end(sw_fabric *fabric, sw_member_state how, const sw_error *reason, sw_error *err)
{
    sw_error first;
    sw_ending_record(&fabric->ending, how, reason);
    (void)!sw_ending_await(&fabric->ending, &first);
    if (atomic_load(&fabric->is_open) && !fabric->is_foreign)
        sw_control_end(fabric->control, fabric->comm.world_size, fabric->comm.rank,
                       sw_ending_state(&fabric->ending), &first);
    return sw_error_pass(err, &first);
}

sw_status sw_fabric_end(sw_fabric *fabric, const sw_error *reason, sw_error *err)
{
    return end(fabric, SW_MEMBER_ENDED, reason, err);
}

void sw_fabric_abort(sw_comm *comm, const sw_error *reason)
{
    sw_fabric_end((sw_fabric *)comm, reason, NULL);
}

void sw_fabric_leave(sw_comm *comm)
{
    sw_error reason;
    sw_error_set(&reason, SW_E_STATE, -1, "the communicator of rank %d was closed",
                 sw_comm_name(comm, comm->rank));
    end((sw_fabric *)comm, SW_MEMBER_LEFT, &reason, NULL);
}

void sw_fabric_fini(sw_fabric *fabric)
{
    sw_fabric_leave(&fabric->comm);
    free(fabric->source);
    free(fabric->destination);
    free(fabric->contributes);
    fabric->source = NULL;
    fabric->destination = NULL;
    fabric->contributes = NULL;
}

void sw_fabric_peer(sw_comm *comm, int rank, char text[SW_COMM_PEER_BYTES])
{
    const sw_control *control = ((sw_fabric *)comm)->control;
    int used = snprintf(text, SW_COMM_PEER_BYTES, "rank %d", sw_comm_name(comm, rank));
    if (control && control[rank].pid) /* otherwise it has not joined yet */
        snprintf(text + used, SW_COMM_PEER_BYTES - (size_t)used, " (pid %d on host %.40s)",
                 control[rank].pid, control[rank].host);
}

sw_wait_note *sw_fabric_note(sw_comm *comm, int local, int *rank)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    *rank = local;
    return atomic_load(&fabric->is_open) && !fabric->is_foreign && local < comm->world_size
               ? &fabric->control[local].note
               : NULL;
}

int sw_fabric_pid(sw_comm *comm, int rank)
{
    const sw_fabric *fabric = (const sw_fabric *)comm;
    if (!atomic_load(&fabric->is_open))
        return 0;
    const sw_control *control = &fabric->control[rank], *own = &fabric->control[comm->rank];
    return own->pid_space && control->pid_space == own->pid_space ? control->pid : 0;
}

void sw_control_introduce(sw_control *own, const char *host)
{
    own->pid = (int32_t)getpid();
    own->pid_space = sw_process_space();
    snprintf(own->host, sizeof own->host, "%s", host);
}

/* ---- checks of the peers ---- */

/* The condition of a wait, for every rank: its post of `ticket`, or its `done`. */
typedef struct awaited {
    bool for_post;
    uint32_t ticket;
} awaited;

static _Atomic uint32_t *word_of(const sw_fabric *fabric, int rank, bool for_post)
{
    sw_control *control = &fabric->control[rank];
    return for_post ? &control->posted : &control->done;
}

static bool is_missing(const sw_fabric *fabric, int rank, const awaited *what)
{
    return !sw_ticket_reached(atomic_load(word_of(fabric, rank, what->for_post)), what->ticket);
}

/* Return a rank whose process has ended; -1: none found. Checks at most `budget` ranks (`what`
 * NULL: all, else only missing ones); the next call continues after them. Any thread. */
static int find_dead(sw_fabric *fabric, int budget, const awaited *what)
{
    int world_size = fabric->comm.world_size;
    for (int turn = 0; turn < world_size && budget > 0; ++turn) {
        int r = (int)(atomic_fetch_add(&fabric->asked, 1) % (uint32_t)world_size);
        if (r == fabric->comm.rank || (what && !is_missing(fabric, r, what)))
            continue;
        budget--;
        if (fabric->peer_ended(fabric, r))
            return r;
    }
    return -1;
}

bool sw_fabric_is_alive(sw_comm *comm)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    for (int r = 0; r < comm->world_size; ++r)
        if (sw_ending_state(&fabric->control[r].ending) != SW_MEMBER_ACTIVE ||
            (r != comm->rank && fabric->peer_ended(fabric, r)))
            return false;
    return sw_ending_state(&fabric->ending) == SW_MEMBER_ACTIVE;
}

int sw_fabric_dead(sw_comm *comm)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    return atomic_load(&fabric->is_open) ? find_dead(fabric, comm->world_size, NULL) : -1;
}

sw_status sw_fabric_look(sw_comm *comm, bool minds_leaving, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    if (sw_ending_state(&fabric->ending) == SW_MEMBER_ENDED)
        return sw_ending_read(&fabric->ending, err);
    if (!atomic_load(&fabric->is_open)) /* not joined yet */
        return SW_OK;
    int gone = find_dead(fabric, DEATHS_A_LOOK, NULL);
    for (int r = 0; r < comm->world_size; ++r) /* a recorded reason comes before a detected death */
        if (sw_ending_state(&fabric->control[r].ending) == SW_MEMBER_ENDED)
            return sw_ending_read(&fabric->control[r].ending, err);
    for (int r = 0; r < comm->world_size; ++r) {
        bool has_left = sw_ending_state(&fabric->control[r].ending) == SW_MEMBER_LEFT;
        char peer[SW_COMM_PEER_BYTES];
        if (r == comm->rank || (has_left ? !minds_leaving : r != gone))
            continue;
        sw_fabric_peer(comm, r, peer);
        return sw_error_set(err, SW_E_COMM, sw_comm_name(comm, r), "%s %s", peer,
                            has_left ? "left the group" : "died or exited");
    }
    return SW_OK;
}

/* ---- tickets ---- */

/* Set a word of this rank's block to `value`; wake the ranks that sleep on it. */
static void publish(_Atomic uint32_t *word, uint32_t value, sw_control *own)
{
    /* Both sides are sequentially consistent: either this thread sees the sleeper, or the sleeper
     * sees the new value. */
    atomic_store(word, value);
    if (atomic_load(&own->waiters))
        sw_futex_wake_all(word);
}

static sw_status check_descriptors(sw_fabric *fabric, uint32_t ticket, sw_error *err)
{
    const sw_descriptor *lowest = sw_fabric_descriptor(fabric, 0, ticket), *counting = NULL;
    int counting_rank = 0; /* the lowest rank that counts rounds */
    for (int r = 0; r < fabric->comm.world_size; ++r) {
        const sw_descriptor *other = sw_fabric_descriptor(fabric, r, ticket);
        if (other->round != 0 && !counting) {
            counting = other;
            counting_rank = r;
        }
        const sw_descriptor *first = sw_descriptor_contradicted(lowest, counting, other);
        if (!first)
            continue;
        sw_error reason;
        sw_descriptor_disagree(ticket,
                               sw_comm_name(&fabric->comm, first == lowest ? 0 : counting_rank),
                               first, sw_comm_name(&fabric->comm, r), other, &reason);
        return sw_fabric_end(fabric, &reason, err);
    }
    return SW_OK;
}

static bool all_have(const sw_fabric *fabric, bool posted, uint32_t ticket)
{
    for (int r = 0; r < fabric->comm.world_size; ++r)
        if (!sw_ticket_reached(
                atomic_load_explicit(word_of(fabric, r, posted), memory_order_acquire), ticket))
            return false;
    return true;
}

/* Return true if operation `ticket` can be executed here; else *what is the missing condition.
 * Collect pieces once every rank has folded its own. */
static bool is_ready(const sw_fabric *fabric, uint32_t ticket, awaited *what)
{
    const sw_pending *pending = &fabric->pending[ticket % SW_FABRIC_RING];
    *what = (awaited){.for_post = true, .ticket = ticket};
    if (!all_have(fabric, true, ticket))
        return false;
    *what = (awaited){.ticket = ticket - 1};
    return pending->descriptor.form != SW_FORM_COLLECT || all_have(fabric, false, ticket - 1);
}

/* Execute every operation that all ranks have posted, in order. */
static sw_status progress(sw_fabric *fabric, sw_error *err)
{
    sw_control *own = &fabric->control[fabric->comm.rank];
    SW_TRY(sw_ending_read(&fabric->ending, err));
    awaited unused;
    while (fabric->done != fabric->posted && is_ready(fabric, fabric->done + 1, &unused)) {
        uint32_t ticket = fabric->done + 1;
        SW_TRY(check_descriptors(fabric, ticket, err));
        sw_fabric_execute(fabric, &fabric->pending[ticket % SW_FABRIC_RING], ticket);
        fabric->done = ticket;
        sw_account_done(fabric->pending[ticket % SW_FABRIC_RING].serial);
        publish(&own->done, ticket, own);
    }
    return SW_OK;
}

/* ---- waiting ---- */

/* Waits for words of peers, which a death, a peer's error or the deadline (wait.h) also ends.
 *
 * A waiter spins briefly if cores are idle, then sleeps on the word it needs, in time slices.
 * Between them it checks for events after which the word never changes. It does not sleep on one
 * rank when another is known to be dead.
 *
 * Of several missing ranks it sleeps on a random one. Usually half of the others have arrived when
 * it wakes, so a rank wakes log2(W) times. If it slept on the lowest and ranks arrived in order, it
 * would wake W times. */

enum { DEATHS_A_SLICE = 16 };

static const int64_t slice_ns = 20 * 1000 * 1000;

typedef struct fabric_wait {
    sw_fabric *fabric;
    awaited awaited;
    sw_wait wait;
    int64_t looked_ns;
    uint32_t turns;
} fabric_wait;

/* Name, for a message, the first operation that is not done here, or the awaited one. */
static void describe_operation(const sw_fabric *fabric, uint32_t ticket, char *text,
                               size_t capacity)
{
    sw_descriptor_name(sw_fabric_descriptor(fabric, fabric->comm.rank, ticket), text, capacity);
}

/* Search from rank `from` on; -1: none. */
static int first_missing(const sw_fabric *fabric, const awaited *what, int from)
{
    int world_size = fabric->comm.world_size;
    for (int turn = 0; turn < world_size; ++turn) {
        int r = from + turn < world_size ? from + turn : from + turn - world_size;
        if (is_missing(fabric, r, what))
            return r;
    }
    return -1;
}

static void describe_wait(void *context, sw_wait_text *text)
{
    const fabric_wait *w = context;
    sw_fabric *fabric = w->fabric;
    describe_operation(fabric, w->awaited.ticket, text->what, sizeof text->what);
    for (int r = 0; r < fabric->comm.world_size; ++r)
        if (is_missing(fabric, r, &w->awaited) && !sw_wait_add_missing(text, &fabric->comm, r))
            return;
}

static sw_status end_without(sw_fabric *fabric, int rank, const char *how, uint32_t ticket,
                             sw_error *err)
{
    char peer[SW_COMM_PEER_BYTES], what[160];
    sw_error reason;
    sw_fabric_peer(&fabric->comm, rank, peer);
    describe_operation(fabric, ticket, what, sizeof what);
    sw_error_set(&reason, SW_E_COMM, sw_comm_name(&fabric->comm, rank),
                 "%s %s before its part of %s", peer, how, what);
    return sw_fabric_end(fabric, &reason, err);
}

/* Find a peer that met an error, left, or is `dead` (-1: none). Called only while a rank is
 * missing. */
static sw_status check_peers(fabric_wait *w, int dead, sw_error *err)
{
    sw_fabric *fabric = w->fabric;
    uint32_t ticket = w->awaited.ticket;
    for (int r = 0; r < fabric->comm.world_size; ++r) { /* it may record an error, then exit */
        const sw_control *control = &fabric->control[r];
        sw_member_state state = sw_ending_state(&control->ending);
        if (r == fabric->comm.rank || (state == SW_MEMBER_ACTIVE && r != dead))
            continue;
        if (state == SW_MEMBER_ENDED) {
            sw_error reason;
            if (sw_ticket_reached(atomic_load(&control->done), ticket))
                continue; /* it ended after it had done its part here: a later call gets that
                           * error */
            if (first_missing(fabric, &w->awaited, 0) < 0)
                return SW_OK; /* the missing ranks have arrived since */
            (void)!sw_ending_read(&control->ending, &reason);
            return sw_fabric_end(fabric, &reason, err);
        }
        if (is_missing(fabric, r, &w->awaited)) /* otherwise it has done its part */
            return end_without(fabric, r,
                               state == SW_MEMBER_LEFT ? "left the group" : "died or exited",
                               ticket, err);
    }
    return SW_OK;
}

static sw_status check_clock(fabric_wait *w, sw_error *err)
{
    sw_error reason;
    sw_status status = sw_wait_check(&w->wait, &reason);
    if (status == SW_OK)
        return SW_OK;
    /* An interrupted caller takes back its memory, which the operation borrowed, so no later call
     * may continue the operation. */
    sw_status ended = sw_fabric_end(w->fabric, &reason, err);
    return status == SW_E_INTERRUPTED ? sw_wait_interrupted(err) : ended;
}

/* Check recorded errors after each sleep; the peers' liveness and the clock once a time slice. */
static sw_status look_around(fabric_wait *w, sw_error *err)
{
    int64_t now_ns = sw_clock_now_ns();
    if (now_ns - w->looked_ns < slice_ns)
        return check_peers(w, -1, err);
    w->looked_ns = now_ns;
    SW_TRY(check_peers(w, find_dead(w->fabric, DEATHS_A_SLICE, &w->awaited), err));
    return check_clock(w, err);
}

/* Sleep until the word of a missing rank changes, one time slice at most. */
static void sleep_on(fabric_wait *w, int rank)
{
    sw_fabric *fabric = w->fabric;
    sw_control *control = &fabric->control[rank];
    _Atomic uint32_t *word = word_of(fabric, rank, w->awaited.for_post);
    atomic_fetch_add(&control->waiters, 1);
    uint32_t value = atomic_load(word);
    if (!sw_ticket_reached(value, w->awaited.ticket) &&
        sw_ending_state(&control->ending) == SW_MEMBER_ACTIVE) {
        int64_t begun = sw_clock_now_ns();
        sw_futex_wait(word, value, slice_ns);
        sw_comm_slept(&fabric->comm, begun, rank);
    }
    atomic_fetch_sub(&control->waiters, 1);
}

static bool spin_for(const fabric_wait *w, int rank)
{
    for (int i = 0; i < w->fabric->spin_count; ++i) {
        if (!is_missing(w->fabric, rank, &w->awaited))
            return true;
        sw_spin_pause();
    }
    return false;
}

static int draw(fabric_wait *w)
{
    uint32_t seed = (uint32_t)w->fabric->comm.rank * 40503u + w->awaited.ticket + 97u * w->turns++;
    return (int)((seed * UINT32_C(2654435761) >> 8) % (uint32_t)w->fabric->comm.world_size);
}

/* Wait until this rank has done `ticket`; with `by_all`, until every rank has. Wait for posts
 * first, then for `done`. */
static sw_status wait_until(sw_fabric *fabric, uint32_t ticket, bool by_all, sw_error *err)
{
    fabric_wait w = {.fabric = fabric};
    for (;;) {
        SW_TRY(progress(fabric, err));
        bool is_done = sw_ticket_reached(fabric->done, ticket);
        if (is_done && !by_all)
            return SW_OK;
        if (is_done)
            w.awaited = (awaited){.ticket = ticket};
        else if (is_ready(fabric, fabric->done + 1, &w.awaited))
            continue; /* the missing ranks have arrived: progress again */
        int rank = first_missing(fabric, &w.awaited, draw(&w));
        if (rank < 0 && is_done)
            return SW_OK;
        if (rank < 0 || spin_for(&w, rank))
            continue;
        if (!w.wait.comm) {
            w.wait = sw_wait_begin(&fabric->comm, &w, describe_wait);
            w.looked_ns = w.wait.begun_ns;
        }
        sleep_on(&w, rank);
        SW_TRY(look_around(&w, err));
    }
}

sw_status sw_fabric_poll(sw_comm *comm, uint32_t ticket, bool *complete, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    awaited dones = {.ticket = ticket};
    SW_TRY(progress(fabric, err));
    *complete = sw_ticket_reached(fabric->done, ticket) && first_missing(fabric, &dones, 0) < 0;
    return SW_OK;
}

/* A slot operation is complete for its caller when this rank's part is done; a pool operation when
 * all parts are. */
sw_status sw_fabric_wait(sw_comm *comm, uint32_t ticket, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    return wait_until(fabric, ticket, fabric->pending[ticket % SW_FABRIC_RING].op.arena != NULL,
                      err);
}

/* ---- issuing: as descriptors, or as chunks of private memory in slots ---- */

/* If ranks fold pieces of a chunk, each reads 2 chunks instead of W. Above this saving that pays
 * for the additional wait. */
static const size_t pieces_save_bytes = 256 * 1024;

/* Wait for space in the ring and the slots, copy private data in, publish. */
static sw_status issue(sw_fabric *fabric, const sw_pending *pending, uint32_t *ticket,
                       sw_error *err)
{
    sw_control *own = &fabric->control[fabric->comm.rank];
    uint32_t next = fabric->posted + 1;
    SW_TRY(sw_ending_read(&fabric->ending, err));
    uint32_t form = pending->descriptor.form;
    bool fills = form == SW_FORM_SLOT || form == SW_FORM_PIECE;
    /* A peer may still read the ring entry and the slot of an older operation, and a slot of pieces
     * even during the next ticket. */
    uint32_t depth = fills ? SW_FABRIC_SLOTS - 1 : SW_FABRIC_RING;
    SW_TRY(wait_until(fabric, next - depth, true, err));
    sw_pending *kept = &fabric->pending[next % SW_FABRIC_RING];
    *kept = *pending;
    kept->serial = fabric->comm.serial;
    sw_account_post(kept->serial);
    if (fills && pending->count && pending->op.data) {
        size_t bytes = pending->count * sw_dtype_size_bytes(pending->op.dtype);
        if (pending->op.kind != SW_OP_BROADCAST || pending->op.root == fabric->comm.rank)
            memcpy(sw_fabric_slot(fabric, fabric->comm.rank, next), pending->op.data, bytes);
        fabric->comm.stats.bytes_staged += bytes;
    }
    *sw_fabric_descriptor(fabric, fabric->comm.rank, next) = pending->descriptor;
    fabric->posted = next;
    publish(&own->posted, next, own);
    *ticket = next;
    return SW_OK;
}

static void fill_pending(sw_pending *pending, const sw_op *op, uint32_t form)
{
    memset(pending, 0, sizeof *pending);
    pending->op = *op;
    sw_descriptor_fill(&pending->descriptor, op, form);
}

sw_status sw_fabric_post(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_pending pending;
    SW_TRY(sw_op_check_post(op, fabric->comm.world_size, err));
    fill_pending(&pending, op, SW_FORM_POOL);
    sw_comm_count(comm, op);
    SW_TRY(issue(fabric, &pending, ticket, err));
    return progress(fabric, err);
}

/* Run one chunk after the other through the slots, at most SW_FABRIC_SLOTS of them in flight.
 * `gathered`: an all_gather's destination. */
static sw_status run_through_slots(sw_fabric *fabric, const sw_op *op, void *gathered,
                                   sw_error *err)
{
    size_t element_bytes = sw_dtype_size_bytes(op->dtype);
    size_t chunk = SW_FABRIC_SLOT_BYTES / element_bytes;
    size_t begin = 0;
    uint32_t ticket;
    do {
        sw_pending pending;
        size_t count = sw_size_min(chunk, op->numel - begin);
        bool in_pieces =
            op->kind == SW_OP_ALL_REDUCE && fabric->comm.world_size > 2 &&
            (size_t)(fabric->comm.world_size - 2) * count * element_bytes >= pieces_save_bytes;
        fill_pending(&pending, op, in_pieces ? SW_FORM_PIECE : SW_FORM_SLOT);
        pending.begin = begin;
        pending.count = count;
        pending.descriptor.chunk = begin / chunk;
        pending.gathered = gathered;
        if (op->data)
            pending.op.data = (uint8_t *)op->data + begin * element_bytes;
        SW_TRY(issue(fabric, &pending, &ticket, err));
        if (in_pieces) {
            pending.descriptor.form = SW_FORM_COLLECT;
            SW_TRY(issue(fabric, &pending, &ticket, err));
        }
        SW_TRY(progress(fabric, err));
        begin += count;
    } while (begin < op->numel);
    return sw_fabric_wait(&fabric->comm, ticket, err);
}

sw_status sw_fabric_run(sw_comm *comm, const sw_op *op, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    uint32_t ticket;
    if (op->arena) {
        SW_TRY(sw_fabric_post(comm, op, &ticket, err));
        return sw_fabric_wait(comm, ticket, err);
    }
    SW_TRY(sw_op_check(op, fabric->comm.world_size, err));
    if (op->kind == SW_OP_REDUCE_SCATTER || op->kind == SW_OP_ALL_GATHER)
        SW_FAIL(err, SW_E_UNSUPPORTED, "%s '%s' needs a buffer in an arena",
                sw_op_kind_name(op->kind), op->label);
    sw_comm_count(comm, op);
    return run_through_slots(fabric, op, NULL, err);
}

sw_status sw_fabric_gather(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                           const char *label, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_op op = sw_op_gather(mine, size_bytes, label);
    SW_TRY(sw_op_check(&op, fabric->comm.world_size, err));
    sw_comm_count(comm, &op);
    return run_through_slots(fabric, &op, all, err);
}
