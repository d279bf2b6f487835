/* stage.c - a stack of free slots over a few large mappings. */
#include "checkpoint/stage.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "base/bytes.h"
#include "checkpoint/plan.h"
#include "platform/memory.h"

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
