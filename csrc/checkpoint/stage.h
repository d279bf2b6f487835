/* stage.h - warm memory for snapshots: slots of 1 MiB, kept between saves.
 *
 * What a save takes beyond what is there it touches for the first time itself, which later saves do
 * not; what was added before it can be touched by another thread (save_warm.c). Slots of one
 * request lie side by side as far as the pool allows, so that a run of blocks is one write. Slots
 * begin on a page, as O_DIRECT wants.
 *
 * Thread rule: one at a time (the saver's mutex).
 */
#ifndef SW_CHECKPOINT_STAGE_H
#define SW_CHECKPOINT_STAGE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct sw_stage_region {
    uint8_t *base; /* owned */
    size_t slot_count;
    size_t touched; /* slots from the first on that have their pages */
} sw_stage_region;

typedef struct sw_stage {
    sw_stage_region *regions; /* owned */
    size_t region_count;
    uint8_t **free_slots; /* owned stack; room for every slot */
    size_t free_count, slot_count;
} sw_stage;

/* At least `count` slots in all; nothing is touched. SW_E_MEMORY: none was added. */
SW_MUST_USE sw_status sw_stage_reserve(sw_stage *stage, size_t count, sw_error *err);
/* `count` slots of SW_BLOCK_BYTES into `slots`; SW_E_MEMORY, and none, when they cannot be had. */
SW_MUST_USE sw_status sw_stage_take(sw_stage *stage, size_t count, uint8_t **slots, sw_error *err);
void sw_stage_give(sw_stage *stage, uint8_t *slot);
/* Every slot must have been given back. */
void sw_stage_fini(sw_stage *stage);

#endif
