/* slot_memory.c - the parts of the slot transport: registered with the driver, with slots in GPU
 * memory if all ranks support it.
 *
 * Idea: ranks agree by data that they write into their parts and read after a round. No other
 * channel is needed, and creation tests the operations that all later work uses. */
#include <time.h>

#include "comm/slot_state.h"
#include "platform/clock.h"

/* The time for which an ending rank waits until peers have closed its memory; then it leaves the
 * memory allocated. After a failure a peer first waits for its own deadline or next check, then up
 * to a second for its stream; a dead peer never closes it. */
static const int64_t CLOSED_NS = 10000000000, FAILED_NS = 3000000000;

size_t sw_slot_part_bytes(size_t slot_bytes)
{
    size_t head =
        (sizeof(sw_slot_head) + SW_SLOT_PAGE_BYTES - 1) / SW_SLOT_PAGE_BYTES * SW_SLOT_PAGE_BYTES;
    return head + SW_SLOT_COUNT * slot_bytes;
}

static uint8_t *in_part(const sw_slot_transport *t, int rank)
{
    return t->mapped[rank] + sw_slot_part_bytes(t->slot_bytes) - SW_SLOT_COUNT * t->slot_bytes;
}

static sw_status register_parts(sw_slot_transport *t, sw_error *err)
{
    size_t bytes = sw_slot_part_bytes(t->slot_bytes);
    for (int p = 0; p < t->base.world_size; ++p) {
        void *mapped;
        SW_TRY(t->base.device->ops->host_register(t->base.device, t->part[p], bytes, &mapped, err));
        t->mapped[p] = mapped;
        t->slots[p] = in_part(t, p);
    }
    return SW_OK;
}

/* ---- slots on the device ---- */

/* A failure here only means that slots cannot be on the device. */
static void export_slots(sw_slot_transport *t, sw_slot_place place)
{
    sw_slot_head *own = sw_slot_head_of(t, t->base.rank);
    const sw_device_ops *ops = t->base.device->ops;
    bool can =
        place != SW_SLOTS_ON_HOST &&
        ops->memory_alloc(t->base.device, SW_SLOT_COUNT * t->slot_bytes, &t->own_slots,
                          &own->refusal) == SW_OK &&
        ops->memory_export(t->base.device, t->own_slots, &own->exported, &own->refusal) == SW_OK;
    own->exports = can ? SW_SLOT_YES : SW_SLOT_NO;
}

static void open_slots(sw_slot_transport *t)
{
    sw_slot_head *own = sw_slot_head_of(t, t->base.rank);
    bool can = true;
    atomic_store(&own->opening, SW_SLOT_OPEN);
    for (int p = 0; p < t->base.world_size && can; ++p) {
        void *memory;
        if (p == t->base.rank)
            continue;
        if (sw_ending_state(&sw_slot_head_of(t, p)->ending)) /* that rank may free its memory */
            break;
        can = t->base.device->ops->memory_open(t->base.device, &sw_slot_head_of(t, p)->exported,
                                               &memory, &own->refusal) == SW_OK;
        if (can)
            t->opened[p] = memory;
    }
    own->opens = can ? SW_SLOT_YES : SW_SLOT_NO;
}

static void close_slots(sw_slot_transport *t)
{
    for (int p = 0; p < t->base.world_size; ++p) {
        t->base.device->ops->memory_close(t->base.device, t->opened[p]);
        t->opened[p] = NULL;
    }
}

/* Return the first rank that could not export or open memory; -1: none. */
static int find_refusal(const sw_slot_transport *t, bool opening)
{
    for (int p = 0; p < t->base.world_size; ++p) {
        const sw_slot_head *head = sw_slot_head_of(t, p);
        if ((opening ? head->opens : head->exports) != SW_SLOT_YES)
            return p;
    }
    return -1;
}

static sw_status agree_on_place(sw_slot_transport *t, sw_slot_place place, sw_error *err)
{
    int refused = find_refusal(t, false);
    if (refused < 0) {
        open_slots(t);
        SW_TRY(sw_slot_meet(t, "opening the GPUs' memory", err));
        refused = find_refusal(t, true);
    }
    if (refused < 0) {
        for (int p = 0; p < t->base.world_size; ++p)
            t->slots[p] = p == t->base.rank ? t->own_slots : t->opened[p];
        return SW_OK;
    }
    close_slots(t);
    SW_TRY(sw_slot_meet(t, "closing the GPUs' memory", err)); /* no peer has our memory open now */
    t->base.device->ops->memory_free(t->base.device, t->own_slots);
    t->own_slots = NULL;
    if (place != SW_SLOTS_ON_DEVICE)
        return SW_OK;
    sw_error reason;
    sw_error_set(&reason, SW_E_UNSUPPORTED, -1,
                 "GPU slots: rank %d of %d cannot place them in its GPU's memory: %.300s", refused,
                 t->base.world_size, sw_slot_head_of(t, refused)->refusal.message);
    return sw_peers_fail(&t->base, &reason, err);
}

sw_status sw_slot_memory_init(sw_slot_transport *t, sw_slot_place place, sw_error *err)
{
    const sw_device_ops *ops = t->base.device->ops;
    SW_TRY(ops->event_create(t->base.device, &t->ended, err));
    SW_TRY(ops->memory_alloc(t->base.device, t->slot_bytes, &t->staging, err));
    SW_TRY(register_parts(t, err));
    export_slots(t, place);
    SW_TRY(sw_slot_meet(t, "creation of the communicator", err));
    return place == SW_SLOTS_ON_HOST ? SW_OK : agree_on_place(t, place, err);
}

/* Return true if every rank closes our memory in time. A rank that has not opened it yet first sees
 * that this rank has failed. */
static bool is_closed_elsewhere(const sw_slot_transport *t)
{
    const struct timespec nap = {.tv_nsec = 50000};
    int64_t start = sw_clock_now_ns();
    for (int p = 0; p < t->base.world_size; ++p)
        while (p != t->base.rank && atomic_load(&sw_slot_head_of(t, p)->opening) == SW_SLOT_OPEN) {
            bool unused; /* a lost context has no memory */
            if (t->base.device->ops->event_query(t->base.device, t->ended, &unused, NULL) !=
                    SW_OK ||
                sw_clock_now_ns() - start > (sw_peers_has_failed(&t->base) ? FAILED_NS : CLOSED_NS))
                return false;
            nanosleep(&nap, NULL);
        }
    return true;
}

void sw_slot_memory_fini(sw_slot_transport *t)
{
    const sw_device_ops *ops = t->base.device->ops;
    close_slots(t);
    atomic_store(&sw_slot_head_of(t, t->base.rank)->opening, SW_SLOT_CLOSED);
    /* Do not use a round: a peer with pending operations would mistake it for one of them. If a
     * peer's GPU accessed freed memory, its context would end. */
    if (t->own_slots && is_closed_elsewhere(t))
        ops->memory_free(t->base.device, t->own_slots);
    for (int p = 0; p < t->base.world_size; ++p)
        if (t->mapped[p])
            ops->host_unregister(t->base.device, t->part[p]);
    ops->memory_free(t->base.device, t->staging);
    ops->event_destroy(t->base.device, t->ended);
}
