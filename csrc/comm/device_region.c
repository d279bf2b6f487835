/* device_region.c - see device_region.h. */
#include "comm/device_region.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/nccl_register.h"

struct sw_device_region {
    sw_device_comm *comm; /* borrowed */
    void *memory;         /* owned */
    size_t size_bytes;
    sw_registration registered;
    bool is_stuck;   /* deregistering failed: NCCL may still use the memory */
    bool is_lost;    /* destroyed, but the wait failed: the memory stays */
    sw_stream *user; /* borrowed */
    atomic_bool is_dropped;
    sw_device_region *next;
};

void *sw_device_region_memory(const sw_device_region *r)
{
    return r->memory;
}

bool sw_device_region_is_registered(const sw_device_region *r)
{
    return r->registered.handle && r->comm->peers && !sw_peers_has_failed(r->comm->peers);
}

bool sw_device_region_is_window(const sw_device_region *r)
{
    return sw_device_region_is_registered(r) && r->registered.is_window;
}

/* Make the host wait until `stream` has run its work so far. On our stream, a failed peer or a
 * request to end the communicator ends the wait. */
static sw_status pass(sw_device_comm *c, sw_stream *stream, const char *what, sw_error *err)
{
    const sw_device_ops *ops = c->device->ops;
    bool is_joined = c->peers && !sw_peers_has_failed(c->peers);
    SW_TRY(ops->event_record(c->device, c->met, stream, err));
    if (is_joined && stream == c->stream)
        return sw_peers_wait(c->peers, c->met, what, err);
    return ops->event_wait(c->device, c->met, c->timeout_ns, what, err);
}

/* ---- life ---- */

static sw_status require_own_nccl(const sw_device_comm *c, size_t size_bytes, sw_error *err)
{
    sw_registration registered;
    if (!c->peers)
        SW_FAIL(err, SW_E_STATE, "device region: the communicator is not connected");
    if (strcmp(c->peers->name, "nccl") != 0 || c->peers->is_borrowed) /* repeats the reason */
        return sw_peers_memory_register(c->peers, NULL, size_bytes, false, &registered, err);
    return SW_OK;
}

/* NCCL registers whole pages and treats everything in them as registered. A page of cudaMalloc's
 * memory might also hold other memory, on this rank only. */
static sw_status check_page(const void *memory, size_t page_bytes, sw_error *err)
{
    if ((uintptr_t)memory % page_bytes != 0)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "NCCL's memory must begin on a page of %zu bytes to be registered, but is at %p "
                "(NCCL_CUMEM_ENABLE=0?)",
                page_bytes, memory);
    return SW_OK;
}

sw_status sw_device_region_create(sw_device_comm *c, size_t size_bytes, sw_stream *user,
                                  sw_device_region **region, sw_error *err)
{
    sw_status status;
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    SW_TRY(require_own_nccl(c, size_bytes, err));
    sw_device_regions_collect(c);
    sw_device_region *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "device region: no memory for %zu bytes", sizeof *made);
    made->comm = c;
    made->user = user;
    made->size_bytes = size_bytes = (size_bytes + page_bytes - 1) / page_bytes * page_bytes;
    SW_TRY_GOTO(status,
                sw_nccl_memory_alloc(&c->library, c->device, size_bytes, &made->memory, err),
                free_region);
    SW_TRY_GOTO(status, check_page(made->memory, page_bytes, err), free_memory);
    made->next = c->regions;
    c->regions = made;
    *region = made;
    return SW_OK;
free_memory:
    sw_nccl_memory_free(&c->library, c->device, made->memory);
free_region:
    free(made);
    return status;
}

sw_status sw_device_region_register(sw_device_region *r, bool as_window, sw_error *err)
{
    if (r->registered.handle || !r->comm->peers)
        SW_FAIL(err, SW_E_STATE, "device region: %s",
                r->comm->peers ? "it is registered already" : "its communicator was closed");
    return sw_peers_memory_register(r->comm->peers, r->memory, r->size_bytes, as_window,
                                    &r->registered, err);
}

sw_status sw_device_region_deregister(sw_device_region *r, sw_error *err)
{
    const sw_registration registered = r->registered;
    if (!registered.handle)
        return SW_OK;
    if (!sw_device_region_is_registered(r)) { /* the communicator's end deregistered it */
        r->registered = (sw_registration){0};
        return SW_OK;
    }
    SW_TRY(pass(r->comm, r->comm->stream, "the last operation on registered memory", err));
    r->registered = (sw_registration){0};
    sw_status status = sw_peers_memory_deregister(r->comm->peers, &registered, err);
    r->is_stuck = status != SW_OK && !sw_peers_has_failed(r->comm->peers);
    return status;
}

/* True if no stream or peer still uses the memory. */
static bool is_unused(sw_device_region *r)
{
    sw_device_comm *c = r->comm;
    bool is_capturing = true;
    return sw_device_region_deregister(r, NULL) == SW_OK && !r->is_stuck &&
           pass(c, c->stream, "the last operation on a region", NULL) == SW_OK &&
           c->device->ops->stream_is_capturing(c->device, r->user, &is_capturing, NULL) == SW_OK &&
           !is_capturing && pass(c, r->user, "the last use of a region", NULL) == SW_OK;
}

static void forget(sw_device_region *r)
{
    sw_device_region **at = &r->comm->regions;
    while (*at && *at != r)
        at = &(*at)->next;
    if (*at)
        *at = r->next;
    free(r);
}

void sw_device_region_destroy(sw_device_region *r)
{
    if (!r)
        return;
    if (is_unused(r)) {
        sw_nccl_memory_free(&r->comm->library, r->comm->device, r->memory);
    } else if (r->registered.handle) { /* to be deregistered once the stream has run */
        r->is_lost = true;
        sw_device_region_drop(r);
        return;
    }
    forget(r);
}

void sw_device_region_drop(sw_device_region *r)
{
    atomic_store(&r->is_dropped, true);
}

/* ---- all regions of a communicator ---- */

void sw_device_regions_collect(sw_device_comm *c)
{
    sw_device_region *next;
    for (sw_device_region *r = c->regions; r; r = next) {
        next = r->next;
        if (!atomic_load(&r->is_dropped))
            continue;
        if (!r->is_lost)
            sw_device_region_destroy(r);
        else if (sw_device_region_deregister(r, NULL) == SW_OK || !r->registered.handle)
            forget(r);
    }
}

void sw_device_regions_leave(sw_device_comm *c)
{
    for (sw_device_region *r = c->regions; r; r = r->next)
        (void)!sw_device_region_deregister(r, NULL);
}
