/* nccl_register.c - see nccl_register.h. */
#include "comm/nccl_register.h"

#include "comm/nccl_state.h"
#include "platform/clock.h"
#include "platform/thread.h"

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

/* `handle` is NULL once the communicator has ended. */
typedef struct nccl_view {
    const sw_nccl_library *library;
    sw_nccl_comm handle;
} nccl_view;

static nccl_view view_of(const sw_peers *peers)
{
    const nccl_comm *comm = (const nccl_comm *)(const void *)peers;
    return (nccl_view){.library = comm->library, .handle = comm->handle};
}

/* Wait for the final result of a call that may continue in the background. */
static sw_nccl_result decide(const sw_peers *peers, const nccl_view *v, sw_nccl_result result)
{
    int64_t start = sw_clock_now_ns();
    while (result == SW_NCCL_IN_PROGRESS && sw_clock_now_ns() - start <= peers->timeout_ns) {
        sw_nccl_result asked = v->library->call.ncclCommGetAsyncError(v->handle, &result);
        if (asked != SW_NCCL_SUCCESS)
            return asked;
        if (result == SW_NCCL_IN_PROGRESS)
            sw_thread_rest(sw_clock_now_ns() - start);
    }
    return result;
}

static sw_status refuse(sw_peers *peers, const nccl_view *v, sw_nccl_result result,
                        const char *what, sw_error *err)
{
    if (result == SW_NCCL_IN_PROGRESS) /* its outcome is unknown: the memory may stay in use */
        return sw_peers_give_up(peers, what, err);
    const char *last = v->library->call.ncclGetLastError(v->handle);
    return sw_error_set(err, SW_E_DEVICE, result,
                        "NCCL on rank %d of %d: %s failed: %s (%d)%s%.200s", peers->rank,
                        peers->world_size, what, v->library->call.ncclGetErrorString(result),
                        result, last && *last ? "; " : "", last ? last : "");
}

sw_status sw_nccl_register(sw_peers *peers, void *memory, size_t size_bytes, void **registered,
                           sw_error *err)
{
    sw_device_visit visit;
    void *made = NULL;
    if (peers->is_borrowed)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "NCCL on rank %d of %d: memory cannot be registered with a borrowed communicator",
                peers->rank, peers->world_size);
    SW_TRY(sw_peers_check(peers, err));
    nccl_view v = view_of(peers);
    SW_TRY(peers->device->ops->enter(peers->device, &visit, err));
    sw_nccl_result result =
        decide(peers, &v, v.library->call.ncclCommRegister(v.handle, memory, size_bytes, &made));
    peers->device->ops->leave(peers->device, &visit);
    if (result != SW_NCCL_SUCCESS)
        return refuse(peers, &v, result, "registering memory", err);
    if (!made)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "NCCL on rank %d of %d declined to register %zu bytes (NCCL_LOCAL_REGISTER=0, or "
                "peers that are reached by copies alone)",
                peers->rank, peers->world_size, size_bytes);
    *registered = made;
    return SW_OK;
}

sw_status sw_nccl_deregister(sw_peers *peers, void *registered, sw_error *err)
{
    sw_device_visit visit;
    SW_TRY(sw_peers_check(peers, err));
    nccl_view v = view_of(peers);
    SW_TRY(peers->device->ops->enter(peers->device, &visit, err));
    sw_nccl_result result =
        decide(peers, &v, v.library->call.ncclCommDeregister(v.handle, registered));
    peers->device->ops->leave(peers->device, &visit);
    return result == SW_NCCL_SUCCESS ? SW_OK
                                     : refuse(peers, &v, result, "deregistering memory", err);
}
