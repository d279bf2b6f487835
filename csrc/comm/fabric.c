/* fabric.c - start and end of a fabric, checks of its peers, and tickets: comparing descriptors and
 * ordered progress. Issuing is in fabric_issue.c, waiting in fabric_wait.c, memory access of an
 * operation in fabric_execute.c. */
#include "comm/fabric.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "comm/account.h"
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

/* Ending
 * ------------------------------------------------------------------------------------------ */

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
    sw_status status = sw_ending_await(&fabric->ending, &first);
    if (atomic_load(&fabric->is_open) && !fabric->is_foreign)
        sw_control_end(fabric->control, fabric->comm.world_size, fabric->comm.rank,
                       sw_ending_state(&fabric->ending), &first);
    if (err)
        *err = first;
    return status;
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

/* Checks of the peers
 * ------------------------------------------------------------------------------------------ */

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
    return atomic_load(&fabric->is_open) ? sw_fabric_find_dead(fabric, comm->world_size, NULL) : -1;
}

int sw_fabric_find_dead(sw_fabric *fabric, int budget, const sw_fabric_awaited *awaited)
{
    int world_size = fabric->comm.world_size;
    for (int turn = 0; turn < world_size && budget > 0; ++turn) {
        int r = (int)(atomic_fetch_add(&fabric->asked, 1) % (uint32_t)world_size);
        if (r == fabric->comm.rank || (awaited && !sw_fabric_is_missing(fabric, r, awaited)))
            continue;
        budget--;
        if (fabric->peer_ended(fabric, r))
            return r;
    }
    return -1;
}

sw_status sw_fabric_look(sw_comm *comm, bool minds_leaving, sw_error *err)
{
    sw_fabric *fabric = (sw_fabric *)comm;
    if (sw_ending_state(&fabric->ending) == SW_MEMBER_ENDED)
        return sw_ending_read(&fabric->ending, err);
    if (!atomic_load(&fabric->is_open)) /* not joined yet */
        return SW_OK;
    int gone = sw_fabric_find_dead(fabric, DEATHS_A_LOOK, NULL);
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

/* Tickets
 * ------------------------------------------------------------------------------------------ */

void sw_control_publish(_Atomic uint32_t *word, uint32_t value, sw_control *own)
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
                atomic_load_explicit(sw_fabric_word(fabric, r, posted), memory_order_acquire),
                ticket))
            return false;
    return true;
}

/* Collect pieces once every rank has folded its own. */
bool sw_fabric_is_ready(const sw_fabric *fabric, uint32_t ticket, sw_fabric_awaited *awaited)
{
    const sw_pending *pending = &fabric->pending[ticket % SW_FABRIC_RING];
    *awaited = (sw_fabric_awaited){.for_post = true, .ticket = ticket};
    if (!all_have(fabric, true, ticket))
        return false;
    *awaited = (sw_fabric_awaited){.ticket = ticket - 1};
    return pending->descriptor.form != SW_FORM_COLLECT || all_have(fabric, false, ticket - 1);
}

sw_status sw_fabric_progress(sw_fabric *fabric, sw_error *err)
{
    sw_control *own = &fabric->control[fabric->comm.rank];
    SW_TRY(sw_ending_read(&fabric->ending, err));
    sw_fabric_awaited unused;
    while (fabric->done != fabric->posted &&
           sw_fabric_is_ready(fabric, fabric->done + 1, &unused)) {
        uint32_t ticket = fabric->done + 1;
        SW_TRY(check_descriptors(fabric, ticket, err));
        sw_fabric_execute(fabric, &fabric->pending[ticket % SW_FABRIC_RING], ticket);
        fabric->done = ticket;
        sw_account_done(fabric->pending[ticket % SW_FABRIC_RING].serial);
        sw_control_publish(&own->done, ticket, own);
    }
    return SW_OK;
}
