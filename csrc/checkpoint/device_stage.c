/* device_stage.c - see device_stage.h. */
#include "checkpoint/device_stage.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/bytes.h"
#include "checkpoint/plan.h"
#include "platform/memory.h"

/* ---- slots for snapshots: a stack of free ones over a few large mappings ---- */

static int compare_down(const void *a, const void *b)
{
    const uint8_t *x = *(uint8_t *const *)a, *y = *(uint8_t *const *)b;
    return x > y ? -1 : x < y;
}

static sw_status grow(sw_stage *stage, size_t count, sw_error *err)
{
    size_t bytes = 0;
    sw_stage_region *regions = realloc(stage->regions, (stage->region_count + 1) * sizeof *regions);
    if (regions)
        stage->regions = regions;
    uint8_t **slots = realloc(stage->free_slots, (stage->slot_count + count) * sizeof *slots);
    if (slots)
        stage->free_slots = slots;
    if (!regions || !slots || !sw_size_multiply(count, SW_BLOCK_BYTES, &bytes))
        SW_FAIL(err, SW_E_MEMORY, "no memory for %zu MiB of staging", count);
    uint8_t *base = NULL;
    SW_TRY(sw_pages_map(bytes, &base, err));
    (void)madvise(base, bytes, MADV_HUGEPAGE); /* fewer faults; a refusal is harmless */
    (void)madvise(base, bytes, MADV_DONTFORK); /* a forked child must not copy it page by page */
    stage->regions[stage->region_count++] = (sw_stage_region){.base = base, .slot_count = count};
    for (size_t i = 0; i < count; ++i)
        stage->free_slots[stage->free_count++] = base + i * SW_BLOCK_BYTES;
    stage->slot_count += count;
    return SW_OK;
}

sw_status sw_stage_reserve(sw_stage *stage, size_t count, sw_error *err)
{
    return count > stage->slot_count ? grow(stage, count - stage->slot_count, err) : SW_OK;
}

sw_status sw_stage_take(sw_stage *stage, size_t count, uint8_t **slots, sw_error *err)
{
    if (count > stage->free_count) {
        SW_TRY(grow(stage, count - stage->free_count, err));
        sw_stage_region *made = &stage->regions[stage->region_count - 1];
        made->touched = made->slot_count;
    }
    /* Slots return in write order. Sort them, so that slots adjacent in memory are consecutive
     * again. */
    if (stage->free_count > 1)
        qsort(stage->free_slots, stage->free_count, sizeof *stage->free_slots, compare_down);
    for (size_t i = 0; i < count; ++i)
        slots[i] = stage->free_slots[--stage->free_count];
    return SW_OK;
}

void sw_stage_give(sw_stage *stage, uint8_t *slot)
{
    stage->free_slots[stage->free_count++] = slot;
}

void sw_stage_fini(sw_stage *stage)
{
    for (size_t i = 0; i < stage->region_count; ++i)
        sw_memory_unmap(stage->regions[i].base, stage->regions[i].slot_count * SW_BLOCK_BYTES);
    free(stage->regions);
    free(stage->free_slots);
    *stage = (sw_stage){0};
}

/* ---- GPU memory ---- */

typedef struct stage_slot {
    void *memory;      /* owned, pinned */
    sw_event *fetched; /* owned */
} stage_slot;

struct sw_device_stage {
    char *library; /* owned; NULL: the driver's own name */
    int ordinal;
    size_t slot_bytes;
    sw_device *device; /* owned, as all below; NULL: not opened */
    sw_stream *down;
    sw_event *met;
    stage_slot slot[SW_DEVICE_STAGE_SLOTS];
    sw_device_stage_stats stats;
};

/* ---- life ---- */

static void shut(sw_device_stage *stage)
{
    sw_device *device = stage->device;
    if (!device)
        return;
    for (int s = 0; s < SW_DEVICE_STAGE_SLOTS; ++s) {
        device->ops->event_destroy(device, stage->slot[s].fetched);
        device->ops->pinned_free(device, stage->slot[s].memory);
        stage->slot[s] = (stage_slot){0};
    }
    device->ops->event_destroy(device, stage->met);
    device->ops->stream_destroy(device, stage->down);
    stage->met = NULL;
    stage->down = NULL;
    stage->device = NULL;
    sw_device_destroy(device);
}

static sw_status open_all(sw_device_stage *stage, sw_error *err)
{
    SW_TRY(sw_device_cuda_create(stage->library, stage->ordinal, &stage->device, err));
    sw_device *device = stage->device;
    SW_TRY(device->ops->stream_create(device, false, &stage->down, err));
    SW_TRY(device->ops->event_create(device, &stage->met, err));
    for (int s = 0; s < SW_DEVICE_STAGE_SLOTS; ++s) {
        SW_TRY(device->ops->pinned_alloc(device, stage->slot_bytes, &stage->slot[s].memory, err));
        SW_TRY(device->ops->event_create(device, &stage->slot[s].fetched, err));
    }
    return SW_OK;
}

/* After a failure the device is unopened, so a later call can try again. */
static sw_status open_once(sw_device_stage *stage, sw_error *err)
{
    if (stage->device)
        return SW_OK;
    sw_status status = open_all(stage, err);
    if (status != SW_OK)
        shut(stage);
    return status;
}

sw_status sw_device_stage_create(const char *library, int ordinal, size_t slot_bytes,
                                 sw_device_stage **stage, sw_error *err)
{
    if (slot_bytes == 0)
        SW_FAIL(err, SW_E_INVALID, "device stage: slot_bytes must be above 0");
    sw_device_stage *made = calloc(1, sizeof *made);
    char *copy = library ? strdup(library) : NULL;
    if (!made || (library && !copy)) {
        free(made);
        free(copy);
        SW_FAIL(err, SW_E_MEMORY, "device stage: no memory for %zu bytes", sizeof *made);
    }
    *made = (sw_device_stage){.library = copy, .ordinal = ordinal, .slot_bytes = slot_bytes};
    *stage = made;
    return SW_OK;
}

void sw_device_stage_destroy(sw_device_stage *stage)
{
    if (!stage)
        return;
    shut(stage);
    free(stage->library);
    free(stage);
}

size_t sw_device_stage_slot_bytes(const sw_device_stage *stage)
{
    return stage->slot_bytes;
}

size_t sw_device_stage_pinned_bytes(const sw_device_stage *stage)
{
    return stage->device ? SW_DEVICE_STAGE_SLOTS * stage->slot_bytes : 0;
}

sw_device_stage_stats sw_device_stage_get_stats(const sw_device_stage *stage)
{
    sw_device_stage_stats stats = stage->stats;
    if (stage->device)
        stats.host_waits = stage->device->stats.host_waits;
    return stats;
}

/* ---- one work ---- */

typedef struct stage_pass {
    sw_device_stage *stage;
    const sw_device_stage_work *work;
    int64_t timeout_ns;
} stage_pass;

static sw_status fetch(const stage_pass *pass, size_t number, sw_error *err)
{
    sw_device_stage *stage = pass->stage;
    sw_device *device = stage->device;
    const sw_device_stage_batch *batch = &pass->work->batches[number];
    stage_slot *slot = &stage->slot[number % SW_DEVICE_STAGE_SLOTS];
    if (batch->count == 0)
        return SW_OK;
    for (size_t i = batch->first; i < batch->first + batch->count; ++i) {
        const sw_device_stage_copy *copy = &pass->work->copies[i];
        SW_TRY(device->ops->copy_async(device, (uint8_t *)slot->memory + copy->at, copy->data,
                                       copy->size_bytes, stage->down, err));
        stage->stats.bytes_down += copy->size_bytes;
    }
    return device->ops->event_record(device, slot->fetched, stage->down, err);
}

static sw_status take(const stage_pass *pass, size_t number, sw_error *err)
{
    sw_device_stage *stage = pass->stage;
    sw_device *device = stage->device;
    stage_slot *slot = &stage->slot[number % SW_DEVICE_STAGE_SLOTS];
    bool comes = pass->work->batches[number].count > 0;
    if (comes) {
        SW_TRY(device->ops->event_wait(device, slot->fetched, pass->timeout_ns,
                                       "state on its way to a checkpoint", err));
        stage->stats.batches++;
    }
    pass->work->consume(pass->work->context, number, comes ? slot->memory : NULL);
    return SW_OK;
}

static sw_status run_pass(const stage_pass *pass, sw_stream *user, sw_error *err)
{
    sw_device_stage *stage = pass->stage;
    sw_device *device = stage->device;
    size_t count = pass->work->batch_count, fetched = 0;
    SW_TRY(sw_device_refuse_capture(device, user, "a save", err));
    SW_TRY(device->ops->event_record(device, stage->met, user, err));
    SW_TRY(device->ops->stream_wait(device, stage->down, stage->met, err));
    for (size_t b = 0; b < count; ++b) {
        for (; fetched < count && fetched < b + SW_DEVICE_STAGE_SLOTS; ++fetched)
            SW_TRY(fetch(pass, fetched, err));
        SW_TRY(take(pass, b, err));
    }
    return SW_OK;
}

/* Wait until no copy of a failed work reads the caller's memory or writes to a slot. */
static void drain(sw_device_stage *stage, int64_t timeout_ns)
{
    sw_device *device = stage->device;
    if (device->ops->event_record(device, stage->met, stage->down, NULL) == SW_OK)
        (void)device->ops->event_wait(device, stage->met, timeout_ns, "a work that failed", NULL);
}

sw_status sw_device_stage_run(sw_device_stage *stage, const sw_device_stage_work *work,
                              sw_stream *user, int64_t timeout_ns, sw_error *err)
{
    SW_TRY(open_once(stage, err));
    stage_pass pass = {.stage = stage, .work = work, .timeout_ns = timeout_ns};
    sw_status status = run_pass(&pass, user, err);
    if (status != SW_OK)
        drain(stage, timeout_ns);
    return status;
}
