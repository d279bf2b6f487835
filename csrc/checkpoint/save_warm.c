/* save_warm.c - touch staging before the first save needs it.
 *
 * The first touch of new memory costs 0.1 to 0.3 s a GiB here, and seconds on a virtual machine
 * with a host that must provide it. A thread of low priority touches 2 MiB at a time, in the order
 * in which saves take slots. (With the lowest priority it starved while training used all cores.) A
 * save that comes earlier uses the touched memory and touches the rest. */
#include "checkpoint/save_job.h"
#include "platform/memory.h"

enum { TOUCH_SLOTS = 2 };

/* Return the next slots to touch, of region *index; 0: none. */
static size_t next_cold_locked(const sw_saver *saver, size_t *index)
{
    for (size_t i = 0; i < saver->stage.region_count && !saver->warm_is_over; ++i) {
        const sw_stage_region *region = &saver->stage.regions[i];
        size_t left = region->slot_count - region->touched;
        *index = i;
        if (left > 0)
            return left < TOUCH_SLOTS ? left : TOUCH_SLOTS;
    }
    return 0;
}

static void *warm(void *context)
{
    sw_saver *saver = context;
    size_t index, count;
    sw_thread_lower_priority();
    pthread_mutex_lock(&saver->mutex);
    while ((count = next_cold_locked(saver, &index)) > 0) {
        const sw_stage_region *region = &saver->stage.regions[index];
        uint8_t *base = region->base + region->touched * SW_BLOCK_BYTES;
        pthread_mutex_unlock(&saver->mutex);
        sw_memory_touch(base, count * SW_BLOCK_BYTES);
        pthread_mutex_lock(&saver->mutex);
        saver->stage.regions[index].touched += count;
    }
    saver->warm_is_over = true;
    pthread_mutex_unlock(&saver->mutex);
    return NULL;
}

sw_status sw_saver_warm(sw_saver *saver, uint64_t bytes, sw_error *err)
{
    size_t count = (size_t)((bytes + SW_BLOCK_BYTES - 1) / SW_BLOCK_BYTES);
    pthread_mutex_lock(&saver->mutex);
    bool runs = saver->warm_thread.is_started && !saver->warm_is_over;
    sw_status status = sw_stage_reserve(&saver->stage, count, err);
    pthread_mutex_unlock(&saver->mutex);
    if (status != SW_OK || runs)
        return status;
    sw_thread_join(&saver->warm_thread);
    saver->warm_is_over = false;
    return sw_thread_start(&saver->warm_thread, warm, saver, "sw-warm", err);
}

void sw_save_end_warming(sw_saver *saver)
{
    pthread_mutex_lock(&saver->mutex);
    saver->warm_is_over = true;
    pthread_mutex_unlock(&saver->mutex);
    sw_thread_join(&saver->warm_thread);
}
