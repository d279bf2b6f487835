/* save_ahead.c - a lazy save leaves live memory to be copied when the optimizer is about to step,
 * and the training waits for that copy. Where a core is idle until then, a thread makes it sooner.
 *
 * It copies what the writers will not have reached: from the last block backwards, and as many as
 * the save before had left at its step. So it takes no memory that the step would not have taken
 * (slots come from those at hand, and no more are made), and copies little in vain. Its thread
 * yields to all others. Of a first save nothing is known, and nothing is copied ahead. */
#include <stdlib.h>

#include "checkpoint/save_job.h"

void sw_save_ahead_prepare(sw_saver *saver, bool is_lazy)
{
    size_t met = saver->ahead.met;
    saver->ahead = (sw_save_ahead){.goal = is_lazy ? met : 0, .begin = saver->block_count};
}

/* Slots ascend, so that neighbours in the file are neighbours in memory. */
static void take_slots_locked(sw_saver *saver)
{
    sw_save_ahead *ahead = &saver->ahead;
    sw_error ignored;
    size_t count = ahead->goal < saver->stage.free_count ? ahead->goal : saver->stage.free_count;
    if (ahead->is_over || count == 0)
        return;
    ahead->slots = malloc(count * sizeof *ahead->slots);
    if (ahead->slots && sw_stage_take(&saver->stage, count, ahead->slots, &ignored) == SW_OK)
        ahead->slot_count = count;
}

static void give_slots_locked(sw_saver *saver)
{
    sw_save_ahead *ahead = &saver->ahead;
    while (ahead->slot_count > 0)
        sw_stage_give(&saver->stage, ahead->slots[--ahead->slot_count]);
}

/* One block a time: protect() waits for it, and this thread may be slow to get a core. */
static bool copy_one_locked(sw_saver *saver)
{
    sw_save_ahead *ahead = &saver->ahead;
    if (ahead->slot_count == 0 || saver->failure.status != SW_OK)
        return false;
    while (ahead->begin > saver->next_block &&
           saver->blocks[ahead->begin - 1].state != SW_BLOCK_LIVE) /* copied at begin() */
        --ahead->begin;
    if (ahead->begin <= saver->next_block)
        return false;
    sw_save_block *block = &saver->blocks[--ahead->begin];
    uint8_t *slot = ahead->slots[--ahead->slot_count];
    block->state = SW_BLOCK_COPYING;
    saver->copying_count++;
    pthread_mutex_unlock(&saver->mutex);
    sw_save_fill(saver, block, slot);
    pthread_mutex_lock(&saver->mutex);
    block->slot = slot;
    block->state = SW_BLOCK_STAGED;
    saver->copying_count--;
    ahead->copied++;
    pthread_cond_broadcast(&saver->changed);
    return true;
}

void *sw_save_copy_ahead(void *context)
{
    sw_saver *saver = context;
    sw_thread_lower_priority();
    pthread_mutex_lock(&saver->mutex);
    take_slots_locked(saver);
    while (copy_one_locked(saver))
        ;
    give_slots_locked(saver);
    free(saver->ahead.slots);
    saver->ahead.slots = NULL;
    pthread_mutex_unlock(&saver->mutex);
    return NULL;
}

void sw_save_ahead_end_locked(sw_saver *saver, size_t claimed)
{
    sw_save_ahead *ahead = &saver->ahead;
    size_t unreached = saver->block_count - saver->next_block;
    if (ahead->is_over)
        return;
    ahead->is_over = true;
    ahead->met = claimed + ahead->copied < unreached ? claimed + ahead->copied : unreached;
    give_slots_locked(saver);
}
