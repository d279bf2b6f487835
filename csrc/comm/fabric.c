/* fabric.c - tickets: issuing, comparing descriptors, progress in order. Waiting is in
 * fabric_wait.c, what an operation does to memory in fabric_execute.c. */
#include "comm/fabric.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/text.h"
#include "platform/futex.h"
#include "platform/process.h"

enum { SPIN_WITH_SPARE_CORES = 2000 };

sw_status sw_fabric_init(sw_fabric *fabric, int rank, int world_size, sw_control **control,
                         sw_error *err)
{
    size_t count = (size_t)world_size;
    fabric->comm.rank = rank;
    fabric->comm.world_size = world_size;
    fabric->control = control;
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

bool sw_fabric_is_alive(sw_comm *comm)
{
    const sw_fabric *fabric = (const sw_fabric *)comm;
    for (int r = 0; r < comm->world_size; ++r)
        if (atomic_load(&fabric->control[r]->state) != SW_MEMBER_ACTIVE ||
            (r != comm->rank && fabric->peer_ended((sw_fabric *)comm, r)))
            return false;
    return fabric->ended == SW_OK;
}

/* What a peer has said of its end. */
static sw_status read_reason(const sw_control *control, sw_error *err)
{
    sw_error reason = control->reason;
    reason.message[sizeof reason.message - 1] = '\0';
    return sw_error_set(err, reason.status, reason.detail, "%s", reason.message);
}

sw_status sw_fabric_look(sw_comm *comm, bool minds_leaving, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    for (int r = 0; r < comm->world_size; ++r) /* what was said comes before what is seen */
        if (atomic_load(&fabric->control[r]->state) == SW_MEMBER_ENDED)
            return read_reason(fabric->control[r], err);
    for (int r = 0; r < comm->world_size; ++r) {
        const sw_control *control = fabric->control[r];
        bool is_gone = r != comm->rank && fabric->peer_ended(fabric, r);
        uint32_t state = atomic_load(&control->state); /* it may say so, and then go */
        char peer[SW_COMM_PEER_BYTES];
        if (state == SW_MEMBER_ENDED)
            return read_reason(control, err);
        bool has_left = state == SW_MEMBER_LEFT && r != comm->rank;
        if (has_left ? !minds_leaving : !is_gone)
            continue;
        sw_fabric_peer(comm, r, peer);
        return sw_error_set(err, SW_E_COMM, sw_comm_name(comm, r), "%s %s", peer,
                            has_left ? "left the group" : "died or exited");
    }
    return SW_OK;
}

/* The first of a rank's threads says how it ends. */
static bool claim(sw_fabric *fabric)
{
    return !atomic_exchange(&fabric->is_claimed, true);
}

/* Another thread has ended it: the caller's knows from here on. */
static void learn_end(sw_fabric *fabric)
{
    const sw_control *own = fabric->control[fabric->comm.rank];
    while (atomic_load(&own->state) == SW_MEMBER_ACTIVE)
        sw_spin_pause(); /* it is being said */
    fabric->reason = own->reason;
    fabric->ended = own->reason.status;
}

void sw_fabric_request_end(sw_comm *comm, const sw_error *reason)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    if (claim(fabric))
        sw_control_end(fabric->control[comm->rank], reason);
}

void sw_fabric_leave(sw_comm *comm)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_control *own = fabric->control[comm->rank];
    if (fabric->ended != SW_OK)
        return;
    if (!claim(fabric)) {
        learn_end(fabric);
        return;
    }
    fabric->ended =
        sw_error_set(&fabric->reason, SW_E_STATE, -1, "the communicator of rank %d was closed",
                     sw_comm_name(comm, comm->rank));
    atomic_store(&own->state, SW_MEMBER_LEFT);
    sw_futex_wake_all(&own->posted);
    sw_futex_wake_all(&own->done);
}

void sw_fabric_fini(sw_fabric *fabric)
{
    if (fabric->control && fabric->control[fabric->comm.rank])
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
    const sw_control *control = ((sw_fabric *)comm)->control[rank];
    snprintf(text, SW_COMM_PEER_BYTES, "rank %d (pid %d on host %.40s)", sw_comm_name(comm, rank),
             control->pid, control->host);
}

void sw_control_end(sw_control *control, const sw_error *reason)
{
    control->reason = *reason;
    atomic_store(&control->state, SW_MEMBER_ENDED);
    sw_futex_wake_all(&control->posted);
    sw_futex_wake_all(&control->done);
}

sw_status sw_fabric_end(sw_fabric *fabric, const sw_error *reason, sw_error *err)
{
    if (fabric->ended == SW_OK && claim(fabric)) {
        fabric->ended = reason->status;
        fabric->reason = *reason;
        sw_control_end(fabric->control[fabric->comm.rank], reason);
    } else if (fabric->ended == SW_OK) {
        learn_end(fabric);
        reason = &fabric->reason;
    }
    if (err && err != reason)
        *err = *reason;
    return reason->status;
}

void sw_fabric_abort(sw_comm *comm, const sw_error *reason)
{
    sw_fabric_end((sw_fabric *)comm, reason, NULL);
}

static sw_status check_alive(sw_fabric *fabric, sw_error *err)
{
    const sw_control *own = fabric->control[fabric->comm.rank];
    if (fabric->ended == SW_OK &&
        atomic_load_explicit(&own->state, memory_order_relaxed) == SW_MEMBER_ENDED)
        learn_end(fabric);
    if (fabric->ended != SW_OK && err)
        *err = fabric->reason;
    return fabric->ended;
}

static void publish(_Atomic uint32_t *word, uint32_t value, sw_control *own)
{
    /* Sequentially consistent on both sides: either we see the sleeper, or it sees the new value.
     */
    atomic_store(word, value);
    if (atomic_load(&own->waiters))
        sw_futex_wake_all(word);
}

static sw_status check_descriptors(sw_fabric *fabric, uint32_t ticket, sw_error *err)
{
    size_t at = ticket % SW_FABRIC_RING;
    const sw_descriptor *lowest = &fabric->control[0]->ring[at], *counting = NULL;
    int counting_rank = 0; /* the lowest that counts rounds */
    for (int r = 0; r < fabric->comm.world_size; ++r) {
        const sw_descriptor *other = &fabric->control[r]->ring[at];
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

static bool all_posted(const sw_fabric *fabric, uint32_t ticket)
{
    for (int r = 0; r < fabric->comm.world_size; ++r)
        if (!sw_ticket_reached(
                atomic_load_explicit(&fabric->control[r]->posted, memory_order_acquire), ticket))
            return false;
    return true;
}

sw_status sw_fabric_progress(sw_fabric *fabric, sw_error *err)
{
    sw_control *own = fabric->control[fabric->comm.rank];
    SW_TRY(check_alive(fabric, err));
    while (fabric->done != fabric->posted && all_posted(fabric, fabric->done + 1)) {
        uint32_t ticket = fabric->done + 1;
        SW_TRY(check_descriptors(fabric, ticket, err));
        sw_fabric_execute(fabric, &fabric->pending[ticket % SW_FABRIC_RING], ticket);
        fabric->done = ticket;
        publish(&own->done, ticket, own);
    }
    return SW_OK;
}

sw_status sw_fabric_issue(sw_fabric *fabric, const sw_pending *pending, uint32_t *ticket,
                          sw_error *err)
{
    sw_control *own = fabric->control[fabric->comm.rank];
    uint32_t next = fabric->posted + 1;
    SW_TRY(check_alive(fabric, err));
    /* Room: the ring entry and the slot of an older operation may still be read by a peer. */
    uint32_t depth = pending->descriptor.form == SW_FORM_SLOT ? SW_FABRIC_SLOTS : SW_FABRIC_RING;
    SW_TRY(sw_fabric_wait_done(fabric, next - depth, err));
    sw_pending *kept = &fabric->pending[next % SW_FABRIC_RING];
    *kept = *pending;
    if (pending->descriptor.form == SW_FORM_SLOT && pending->count && pending->op.data) {
        size_t bytes = pending->count * sw_dtype_size_bytes(pending->op.dtype);
        if (pending->op.kind != SW_OP_BROADCAST || pending->op.root == fabric->comm.rank)
            memcpy(own->slot[next % SW_FABRIC_SLOTS], pending->op.data, bytes);
        fabric->comm.stats.bytes_staged += bytes;
    }
    own->ring[next % SW_FABRIC_RING] = pending->descriptor;
    fabric->posted = next;
    publish(&own->posted, next, own);
    *ticket = next;
    return SW_OK;
}

static void fill_pending(sw_pending *pending, const sw_op *op, bool slot)
{
    memset(pending, 0, sizeof *pending);
    pending->op = *op;
    sw_descriptor_fill(&pending->descriptor, op, slot);
}

static void count_operation(sw_fabric *fabric, const sw_op *op)
{
    fabric->comm.stats.operations[op->kind]++;
    if (op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER)
        fabric->comm.stats.bytes_reduced += op->numel * sw_dtype_size_bytes(op->dtype);
}

sw_status sw_fabric_post(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_pending pending;
    SW_TRY(sw_op_check(op, fabric->comm.world_size, err));
    if (!op->arena)
        SW_FAIL(err, SW_E_STATE, "%s '%s' was posted on private memory, which only run() takes",
                sw_op_kind_name(op->kind), op->label);
    fill_pending(&pending, op, false);
    count_operation(fabric, op);
    SW_TRY(sw_fabric_issue(fabric, &pending, ticket, err));
    return sw_fabric_progress(fabric, err);
}

/* One chunk after the other through the slots; up to SW_FABRIC_SLOTS of them in flight. */
static sw_status run_through_slots(sw_fabric *fabric, const sw_op *op, sw_error *err)
{
    size_t element_bytes = sw_dtype_size_bytes(op->dtype);
    size_t chunk = SW_FABRIC_SLOT_BYTES / element_bytes;
    size_t begin = 0;
    uint32_t ticket;
    do {
        sw_pending pending;
        fill_pending(&pending, op, true);
        pending.begin = begin;
        pending.count = sw_size_min(chunk, op->numel - begin);
        pending.descriptor.chunk = begin / chunk;
        if (op->data)
            pending.op.data = (uint8_t *)op->data + begin * element_bytes;
        SW_TRY(sw_fabric_issue(fabric, &pending, &ticket, err));
        SW_TRY(sw_fabric_progress(fabric, err));
        begin += pending.count;
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
        SW_FAIL(err, SW_E_UNSUPPORTED, "%s '%s' needs memory of an arena",
                sw_op_kind_name(op->kind), op->label);
    count_operation(fabric, op);
    return run_through_slots(fabric, op, err);
}

sw_status sw_fabric_gather(sw_comm *comm, const void *mine, size_t size_bytes, void *all,
                           const char *label, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    size_t begin = 0;
    uint32_t ticket;
    sw_op op = {.kind = SW_OP_ALL_GATHER, .dtype = SW_DTYPE_UINT8, .numel = size_bytes};
    snprintf(op.label, sizeof op.label, "%s", label);
    SW_TRY(sw_op_check(&op, fabric->comm.world_size, err));
    count_operation(fabric, &op);
    do {
        sw_pending pending;
        fill_pending(&pending, &op, true);
        pending.begin = begin;
        pending.count = sw_size_min(SW_FABRIC_SLOT_BYTES, size_bytes - begin);
        pending.descriptor.chunk = begin / SW_FABRIC_SLOT_BYTES;
        pending.op.data = (void *)((uintptr_t)mine + begin);
        pending.gathered = all;
        SW_TRY(sw_fabric_issue(fabric, &pending, &ticket, err));
        SW_TRY(sw_fabric_progress(fabric, err));
        begin += pending.count;
    } while (begin < size_bytes);
    return sw_fabric_wait(comm, ticket, err);
}
