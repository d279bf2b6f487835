/* fake_nccl_register.c - memory that is registered with a communicator. Registration changes no
 * value here. A use that is undefined on real GPUs is a report. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_entry.h"
#include "fake_nccl.h"

SIM_API int cuMemAlloc_v2(sw_cu_address *address, size_t bytes);
SIM_API int cuMemFree_v2(sw_cu_address address);

/* ---- the memory of operations ---- */

static registration *registration_of(sw_nccl_comm comm, const void *memory, size_t size_bytes)
{
    const unsigned char *begin = memory;
    for (registration *r = comm->registered; r; r = r->next)
        if (begin < r->end && begin + size_bytes > r->begin)
            return r;
    return NULL;
}

static long place_in(sw_nccl_comm comm, const void *memory, size_t size_bytes)
{
    const unsigned char *begin = memory;
    const registration *r = registration_of(comm, memory, size_bytes);
    if (!r)
        return PLAIN;
    return begin >= r->begin && begin + size_bytes <= r->end ? begin - r->begin : HALF;
}

void nccl_registered_note(nccl_call *call, sw_nccl_comm comm)
{
    int world_size = comm->clique->world_size;
    call->from_registered =
        call->from ? place_in(comm, call->from, nccl_read_bytes(call, world_size)) : PLAIN;
    call->to_registered =
        call->to ? place_in(comm, call->to, nccl_written_bytes(call, world_size)) : PLAIN;
}

static void use(sw_nccl_comm comm, const void *memory, size_t size_bytes, sw_cu_stream stream)
{
    registration *r = memory ? registration_of(comm, memory, size_bytes) : NULL;
    if (r) {
        r->actor = stream->actor;
        r->time = stream->clock.at[stream->actor];
    }
}

void nccl_registered_use(const nccl_call *call, sw_nccl_comm comm, sw_cu_stream stream)
{
    int world_size = comm->clique->world_size;
    use(comm, call->from, nccl_read_bytes(call, world_size), stream);
    use(comm, call->to, nccl_written_bytes(call, world_size), stream);
}

static void report(const char *operation, long a, long b, const sim_site *site)
{
    char detail[128];
    snprintf(detail, sizeof detail, "%s, at %ld and %ld (%d: plain memory, %d: partly registered)",
             operation, a, b, PLAIN, HALF);
    sim_report("mixed registration", detail, site, NULL);
}

/* Slices may lie at different offsets: compare only if both are registered. */
static void compare(const char *operation, long a, long b, bool is_slice, const sim_site *site)
{
    if (a == HALF || b == HALF || (a == PLAIN) != (b == PLAIN) || (a != b && !is_slice))
        report(operation, a, b, site);
}

void nccl_registered_compare(const nccl_call *call, const nccl_call *other, const sim_site *site)
{
    if (call->kind == SEND) {
        compare("a send and its receive", call->from_registered, other->to_registered, true, site);
        return;
    }
    if (call->kind == RECEIVE) /* compared with its send */
        return;
    compare("the inputs of two ranks", call->from_registered, other->from_registered,
            call->kind == ALL_GATHER, site);
    compare("the outputs of two ranks", call->to_registered, other->to_registered,
            call->kind == REDUCE_SCATTER, site);
    compare("input and output of a rank", call->from_registered, call->to_registered, true, site);
}

/* ---- calls ---- */

SIM_API int ncclMemAlloc(void **memory, size_t bytes)
{
    sw_cu_address address = 0;
    int result = 0;
    if (!sim_enter("ncclMemAlloc", &result))
        return result;
    sim_leave();
    if (cuMemAlloc_v2(&address, bytes) != SW_CU_SUCCESS)
        return SW_NCCL_UNHANDLED_CUDA_ERROR;
    *memory = (void *)(uintptr_t)address;
    return SW_NCCL_SUCCESS;
}

SIM_API int ncclMemFree(void *memory)
{
    int result = 0;
    if (!sim_enter("ncclMemFree", &result))
        return result;
    sim_site site = sim_here("ncclMemFree");
    for (sw_nccl_comm comm = nccl_comms; comm; comm = comm->next)
        if (registration_of(comm, memory, 1))
            sim_report("registered memory freed", "", &site, NULL);
    sim_leave();
    return cuMemFree_v2((sw_cu_address)(uintptr_t)memory) == SW_CU_SUCCESS
               ? SW_NCCL_SUCCESS
               : SW_NCCL_UNHANDLED_CUDA_ERROR;
}

/* Only whole memory of ncclMemAlloc is accepted: other data in a page would be registered, too.
 * *made is NULL where NCCL declines. */
static int add(sw_nccl_comm comm, void *memory, size_t bytes, const char *call, registration **made)
{
    sim_site site = sim_here(call);
    const char *wanted = getenv("NCCL_LOCAL_REGISTER");
    const sim_block *block = sim_block_of(memory);
    *made = NULL;
    if (nccl_group_depth() != 0)
        sim_report("registration in a group", "", &site, NULL);
    if (!comm || !block || block->freed || block->foreign || block->memory != memory ||
        block->size_bytes != bytes || registration_of(comm, memory, bytes))
        return SW_NCCL_INVALID_ARGUMENT;
    if (wanted && strcmp(wanted, "0") == 0)
        return SW_NCCL_SUCCESS;
    *made = calloc(1, sizeof **made);
    (*made)->begin = memory;
    (*made)->end = (*made)->begin + bytes;
    (*made)->next = comm->registered;
    comm->registered = *made;
    return SW_NCCL_SUCCESS;
}

SIM_API int ncclCommRegister(sw_nccl_comm comm, void *memory, size_t bytes, void **registered)
{
    ENTER("ncclCommRegister");
    registration *made;
    int result = add(comm, memory, bytes, "ncclCommRegister", &made);
    *registered = made;
    LEAVE(result);
}

static int windows;

/* For tests: the windows that this process has made. */
SIM_API int sim_nccl_windows(void)
{
    return windows;
}

/* A collective: the handle is there once all ranks have come. */
SIM_API int ncclCommWindowRegister(sw_nccl_comm comm, void *memory, size_t bytes,
                                   sw_nccl_window *window, int flags)
{
    ENTER("ncclCommWindowRegister");
    *window = NULL;
    int result = flags == SW_NCCL_WIN_COLL_SYMMETRIC
                     ? add(comm, memory, bytes, "ncclCommWindowRegister", &comm->window)
                     : SW_NCCL_INVALID_ARGUMENT;
    if (result != SW_NCCL_SUCCESS || !comm->window)
        LEAVE(result);
    comm->windows++;
    windows++;
    comm->window_out = window;
    if (comm->clique->in_files)
        nccl_files_window(comm->clique, comm->windows);
    LEAVE(SW_NCCL_IN_PROGRESS);
}

bool nccl_window_done(sw_nccl_comm comm)
{
    const clique *c = comm->clique;
    int arrived = c->in_files && comm->window_out ? nccl_files_windows(c, comm->windows) : 0;
    if (!comm->window_out)
        return true;
    for (int r = 0; !c->in_files && r < c->world_size; ++r)
        arrived += c->comm[r] && c->comm[r]->windows >= comm->windows;
    if (arrived < c->world_size)
        return false;
    *comm->window_out = comm->window;
    comm->window_out = NULL;
    return true;
}

static int end_registration(sw_nccl_comm comm, void *registered)
{
    sim_site site = sim_here("ncclCommDeregister");
    const sim_rank *rank = &sim.rank[sim_current_rank()];
    registration **at = &comm->registered;
    while (*at && *at != registered)
        at = &(*at)->next;
    registration *found = *at;
    if (!found)
        return SW_NCCL_INVALID_USAGE;
    if (nccl_group_depth() != 0)
        sim_report("registration in a group", "", &site, NULL);
    if (rank->clock.at[found->actor] < found->time)
        sim_report("deregistered in use", "", &site, NULL);
    *at = found->next;
    free(found);
    return SW_NCCL_SUCCESS;
}

SIM_API int ncclCommDeregister(sw_nccl_comm comm, void *registered)
{
    ENTER("ncclCommDeregister");
    LEAVE(end_registration(comm, registered));
}

SIM_API int ncclCommWindowDeregister(sw_nccl_comm comm, sw_nccl_window window)
{
    ENTER("ncclCommWindowDeregister");
    LEAVE(end_registration(comm, window));
}

void nccl_registered_end(sw_nccl_comm comm, bool orderly)
{
    sim_site site = sim_here("the communicator's end");
    registration *next;
    sw_nccl_comm *at = &nccl_comms;
    if (orderly && comm->registered)
        sim_report("left registered", "", &site, NULL);
    for (registration *r = comm->registered; r; r = next) {
        next = r->next;
        free(r);
    }
    comm->registered = NULL;
    while (*at && *at != comm)
        at = &(*at)->next;
    if (*at)
        *at = comm->next;
}

/* For tests: the registrations of this process. */
SIM_API int sim_nccl_registrations(void)
{
    int count = 0;
    sim_lock();
    for (sw_nccl_comm comm = nccl_comms; comm; comm = comm->next)
        for (registration *r = comm->registered; r; r = r->next)
            ++count;
    sim_leave();
    return count;
}
