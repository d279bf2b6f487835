/* nccl_register.c - see nccl_register.h. */
#include "comm/nccl_register.h"

#include <stdio.h>

#include "comm/nccl_state.h"
#include "platform/clock.h"

/* ---- memory ---- */

sw_status sw_nccl_memory_alloc(const sw_nccl_library *nccl, sw_device *device, size_t size_bytes,
                               void **memory, sw_error *err)
{
    sw_device_visit visit;
    void *made = NULL;
    int version = nccl->version;
    if (version < SW_NCCL_REGISTERING_VERSION || !nccl->call.ncclMemAlloc ||
        !nccl->call.ncclMemFree || !nccl->call.ncclCommRegister || !nccl->call.ncclCommDeregister)
        return sw_error_set(err, SW_E_UNSUPPORTED, version,
                            "registering memory needs NCCL 2.19 or newer, not %d.%d.%d",
                            version / 10000, version % 10000 / 100, version % 100);
    SW_TRY(device->ops->enter(device, &visit, err));
    sw_nccl_result result = nccl->call.ncclMemAlloc(&made, size_bytes);
    device->ops->leave(device, &visit);
    if (result != SW_NCCL_SUCCESS || !made)
        return sw_error_set(
            err, SW_E_DEVICE, result, "NCCL: ncclMemAlloc failed for %zu bytes on GPU %d: %s (%d)",
            size_bytes, device->ordinal, nccl->call.ncclGetErrorString(result), result);
    device->stats.allocations++;
    *memory = made;
    return SW_OK;
}

void sw_nccl_memory_free(const sw_nccl_library *nccl, sw_device *device, void *memory)
{
    sw_device_visit visit;
    if (device->ops->enter(device, &visit, NULL) != SW_OK)
        return;
    (void)nccl->call.ncclMemFree(memory);
    device->ops->leave(device, &visit);
}

/* ---- registering ---- */

/* Between these two no thread ends the communicator. If it has ended, return false without the
 * lock. */
static bool enter(nccl_comm *comm)
{
    pthread_mutex_lock(&comm->calls);
    if (comm->handle)
        return true;
    pthread_mutex_unlock(&comm->calls);
    return false;
}

static void leave(nccl_comm *comm)
{
    pthread_mutex_unlock(&comm->calls);
}

/* Describe a failed result in a message. Such a failure does not change the transport. */
static sw_status refuse(nccl_comm *comm, sw_nccl_result result, const char *what, sw_error *err)
{
    char last[201] = "";
    if (enter(comm)) {
        const char *text = comm->library->call.ncclGetLastError(comm->handle);
        snprintf(last, sizeof last, "%s", text ? text : "");
        leave(comm);
    }
    return sw_error_set(err, SW_E_DEVICE, result, "NCCL on rank %d of %d: %s failed: %s (%d)%s%s",
                        comm->base.rank, comm->base.world_size, what,
                        comm->library->call.ncclGetErrorString(result), result, *last ? "; " : "",
                        last);
}

/* Wait for the result of a call that may go on in the background. If it is late, end the
 * communicator, since the memory may still be in use. */
static sw_status decide(nccl_comm *comm, sw_nccl_result result, const char *what, sw_error *err)
{
    int64_t start = sw_clock_now_ns();
    while (result == SW_NCCL_IN_PROGRESS) {
        SW_TRY(sw_peers_check_request(&comm->base, err));
        if (!enter(comm))
            return sw_ending_await(&comm->base.ending, err);
        sw_nccl_result asked = comm->library->call.ncclCommGetAsyncError(comm->handle, &result);
        leave(comm);
        result = asked == SW_NCCL_SUCCESS ? result : asked;
        if (result == SW_NCCL_IN_PROGRESS)
            SW_TRY(sw_peers_turn(&comm->base, start, what, err));
    }
    return result == SW_NCCL_SUCCESS ? SW_OK : refuse(comm, result, what, err);
}

bool sw_nccl_has_windows(const sw_nccl_library *nccl)
{
    return nccl->version >= SW_NCCL_WINDOW_VERSION && nccl->call.ncclCommWindowRegister &&
           nccl->call.ncclCommWindowDeregister;
}

typedef struct request {
    void *memory; /* to register; NULL: deregister */
    size_t size_bytes;
    sw_registration *made;
} request;

static sw_nccl_result issue(nccl_comm *comm, const request *r)
{
    const sw_nccl_table *nccl = &comm->library->call;
    sw_registration *made = r->made;
    if (made->is_window)
        return r->memory ? nccl->ncclCommWindowRegister(comm->handle, r->memory, r->size_bytes,
                                                        &made->handle, SW_NCCL_WIN_COLL_SYMMETRIC)
                         : nccl->ncclCommWindowDeregister(comm->handle, made->handle);
    return r->memory ? nccl->ncclCommRegister(comm->handle, r->memory, r->size_bytes, &made->handle)
                     : nccl->ncclCommDeregister(comm->handle, made->handle);
}

static sw_status call(nccl_comm *comm, const request *r, sw_error *err)
{
    const char *what = r->memory ? "registering memory" : "deregistering memory";
    sw_device *device = comm->base.device;
    sw_device_visit visit;
    sw_nccl_result result = SW_NCCL_SUCCESS;
    SW_TRY(sw_peers_check(&comm->base, err));
    SW_TRY(device->ops->enter(device, &visit, err));
    bool is_there = enter(comm);
    if (is_there) {
        result = issue(comm, r);
        leave(comm);
    }
    device->ops->leave(device, &visit);
    return is_there ? decide(comm, result, what, err) : sw_ending_await(&comm->base.ending, err);
}

/* Peers that wait in the collective get the reason why this rank fails. */
static sw_status make_window(sw_peers *peers, const request *r, sw_error *err)
{
    sw_error reason;
    sw_status status = call((nccl_comm *)(void *)peers, r, &reason);
    if (status == SW_OK)
        return SW_OK;
    return sw_peers_fail(peers, &reason, err);
}

sw_status sw_nccl_register(sw_peers *peers, void *memory, size_t size_bytes, bool as_window,
                           sw_registration *made, sw_error *err)
{
    sw_registration found = {.is_window = as_window};
    const request r = {.memory = memory, .size_bytes = size_bytes, .made = &found};
    if (peers->is_borrowed)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "NCCL on rank %d of %d: memory cannot be registered with a borrowed communicator",
                peers->rank, peers->world_size);
    if (as_window)
        SW_TRY(make_window(peers, &r, err));
    if (!found.handle) {
        found.is_window = false;
        SW_TRY(call((nccl_comm *)(void *)peers, &r, err));
    }
    if (!found.handle)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "NCCL on rank %d of %d declined to register %zu bytes (NCCL_LOCAL_REGISTER=0, or "
                "peers that only copies reach)",
                peers->rank, peers->world_size, size_bytes);
    *made = found;
    return SW_OK;
}

sw_status sw_nccl_deregister(sw_peers *peers, const sw_registration *made, sw_error *err)
{
    sw_registration given = *made;
    return call((nccl_comm *)(void *)peers, &(request){.made = &given}, err);
}
