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

enum { FORM_POOL = 0, FORM_SLOT = 1, SPIN_WITH_SPARE_CORES = 2000 };

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
        sw_error_set(&reason, SW_E_MEMORY, rank,
                     "rank %d has no memory for the tables of a communicator of %d ranks", rank,
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

void sw_fabric_leave(sw_comm *comm)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_control *own = fabric->control[comm->rank];
    if (fabric->ended != SW_OK)
        return;
    fabric->ended = sw_error_set(&fabric->reason, SW_E_STATE, -1,
                                 "the communicator of rank %d was closed", comm->rank);
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
    snprintf(text, SW_COMM_PEER_BYTES, "rank %d (pid %d on host %.40s)", rank, control->pid,
             control->host);
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
    if (fabric->ended == SW_OK) {
        fabric->ended = reason->status;
        fabric->reason = *reason;
        sw_control_end(fabric->control[fabric->comm.rank], reason);
    }
    if (err && err != reason)
        *err = *reason;
    return reason->status;
}

void sw_fabric_abort(sw_comm *comm, const sw_error *reason)
{
    sw_fabric_end((sw_fabric *)comm, reason, NULL);
}

static sw_status check_alive(const sw_fabric *fabric, sw_error *err)
{
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

static void describe_side(const sw_descriptor *d, char *text, size_t capacity)
{
    char detail[96] = "";
    if (d->kind == SW_OP_ALL_REDUCE || d->kind == SW_OP_REDUCE_SCATTER)
        snprintf(detail, sizeof detail, ", %s of %llu %s", sw_redop_name((sw_redop)d->redop),
                 (unsigned long long)d->numel, sw_dtype_name((sw_dtype)d->dtype));
    else if (d->kind == SW_OP_BROADCAST)
        snprintf(detail, sizeof detail, ", %llu bytes from rank %d", (unsigned long long)d->numel,
                 (int)d->root);
    else if (d->kind == SW_OP_ALL_GATHER)
        snprintf(detail, sizeof detail, ", %llu bytes", (unsigned long long)d->numel);
    char place[64] = "", round[64] = "";
    if (d->form == FORM_POOL && d->kind != SW_OP_BARRIER)
        snprintf(place, sizeof place, ", at byte %llu of shared memory %u",
                 (unsigned long long)d->offset_bytes, d->subject);
    else if (d->chunk)
        snprintf(place, sizeof place, ", chunk %llu", (unsigned long long)d->chunk);
    if (d->round)
        snprintf(round, sizeof round, ", backward %u of step %u", d->round, d->step);
    snprintf(text, capacity, "%s '%.*s'%s%s%s", sw_op_kind_name((sw_op_kind)d->kind),
             SW_COMM_LABEL_BYTES - 1, d->label, detail, place, round);
}

static sw_status check_descriptors(sw_fabric *fabric, uint32_t ticket, sw_error *err)
{
    size_t at = ticket % SW_FABRIC_RING;
    int lowest = 0, counting = -1; /* the lowest rank, and the lowest that counts rounds */
    for (int r = 0; r < fabric->comm.world_size; ++r) {
        const sw_descriptor *other = &fabric->control[r]->ring[at];
        bool counts = other->round != 0;
        if (counts && counting < 0)
            counting = r;
        bool alike =
            memcmp(&fabric->control[0]->ring[at], other, offsetof(sw_descriptor, step)) == 0;
        lowest = alike && counts ? counting : 0;
        const sw_descriptor *first = &fabric->control[lowest]->ring[at];
        if (alike && (!counts || (first->step == other->step && first->round == other->round)))
            continue;
        char one[224], two[224];
        sw_error reason;
        describe_side(first, one, sizeof one);
        describe_side(other, two, sizeof two);
        sw_error_set(&reason, SW_E_MISMATCH, r,
                     "ranks disagree on collective %u: rank %d came with %s; rank %d came with %s",
                     ticket, lowest, one, r, two);
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
    uint32_t depth = pending->descriptor.form == FORM_SLOT ? SW_FABRIC_SLOTS : SW_FABRIC_RING;
    SW_TRY(sw_fabric_wait_done(fabric, next - depth, err));
    sw_pending *kept = &fabric->pending[next % SW_FABRIC_RING];
    *kept = *pending;
    if (pending->descriptor.form == FORM_SLOT && pending->count && pending->op.data) {
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

static void fill_descriptor(sw_pending *pending, const sw_op *op, bool slot)
{
    sw_descriptor *d = &pending->descriptor;
    memset(pending, 0, sizeof *pending);
    pending->op = *op;
    d->kind = (uint32_t)op->kind;
    d->dtype = (uint32_t)op->dtype;
    d->redop = (uint32_t)op->redop;
    d->form = slot ? FORM_SLOT : FORM_POOL;
    d->root = op->root;
    d->subject = op->subject == 0 && op->arena ? op->arena->serial : op->subject;
    d->step = op->step;
    d->round = op->round;
    d->numel = op->numel;
    d->offset_bytes = slot ? 0 : op->offset_bytes;
    memcpy(d->label, op->label, (size_t)sw_text_fit(op->label, SW_COMM_LABEL_BYTES - 1));
}

static void count_operation(sw_fabric *fabric, const sw_op *op)
{
    fabric->comm.stats.operations[op->kind]++;
    if (op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER)
        fabric->comm.stats.bytes_reduced += op->numel * sw_dtype_size_bytes(op->dtype);
}

static sw_status check_op(const sw_fabric *fabric, const sw_op *op, sw_error *err)
{
    size_t bytes;
    size_t element_bytes = sw_dtype_size_bytes(op->dtype);
    if ((unsigned)op->kind >= SW_OP_KIND_COUNT || element_bytes == 0)
        SW_FAIL(err, SW_E_INVALID, "collective '%s': kind %d or dtype %d is out of range",
                op->label, (int)op->kind, (int)op->dtype);
    if (!sw_size_multiply(op->numel, element_bytes, &bytes))
        SW_FAIL(err, SW_E_INVALID, "collective '%s': %zu elements overflow the address space",
                op->label, op->numel);
    if (op->kind == SW_OP_BROADCAST && (op->root < 0 || op->root >= fabric->comm.world_size))
        SW_FAIL(err, SW_E_INVALID, "broadcast '%s': root must be in [0, %d), got %d", op->label,
                fabric->comm.world_size, op->root);
    if (op->kind == SW_OP_ALL_REDUCE || op->kind == SW_OP_REDUCE_SCATTER)
        SW_TRY(sw_redop_check(op->redop, op->dtype, err));
    if (op->arena && (op->offset_bytes > op->arena->size_bytes ||
                      bytes > op->arena->size_bytes - op->offset_bytes))
        SW_FAIL(err, SW_E_INVALID, "%s '%s': [%zu, +%zu) bytes leave the arena of %zu",
                sw_op_kind_name(op->kind), op->label, op->offset_bytes, bytes,
                op->arena->size_bytes);
    return SW_OK;
}

sw_status sw_fabric_post(sw_comm *comm, const sw_op *op, uint32_t *ticket, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    sw_pending pending;
    SW_TRY(check_op(fabric, op, err));
    if (!op->arena)
        SW_FAIL(err, SW_E_STATE, "%s '%s' was posted on private memory, which only run() takes",
                sw_op_kind_name(op->kind), op->label);
    fill_descriptor(&pending, op, false);
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
        fill_descriptor(&pending, op, true);
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
    SW_TRY(check_op(fabric, op, err));
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
    SW_TRY(check_op(fabric, &op, err));
    count_operation(fabric, &op);
    do {
        sw_pending pending;
        fill_descriptor(&pending, &op, true);
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
