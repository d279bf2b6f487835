/* stage.h - warm memory for snapshots: slots of 1 MiB, kept between saves.
 *
 * A save that needs more memory than the stage has adds and touches it; later saves reuse it.
 * Another thread can touch added memory before a save (save_warm.c). Slots of one request are
 * contiguous as far as possible, so that a run of blocks is one write. Slots begin on a page, as
 * O_DIRECT requires.
 *
 * Thread rule: one at a time (the saver's mutex). */
#ifndef SW_CHECKPOINT_STAGE_H
#define SW_CHECKPOINT_STAGE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct sw_stage_region {
    uint8_t *base; /* owned */
    size_t slot_count;
    size_t touched; /* leading slots with allocated pages */
} sw_stage_region;

typedef struct sw_stage {
    sw_stage_region *regions; /* owned */
    size_t region_count;
    uint8_t **free_slots; /* owned stack; room for every slot */
    size_t free_count, slot_count;
} sw_stage;

/* Grow to at least `count` slots in all; touch none. SW_E_MEMORY: none was added. */
SW_MUST_USE sw_status sw_stage_reserve(sw_stage *stage, size_t count, sw_error *err);
/* Take `count` slots of SW_BLOCK_BYTES into `slots`; on SW_E_MEMORY it takes none. */
SW_MUST_USE sw_status sw_stage_take(sw_stage *stage, size_t count, uint8_t **slots, sw_error *err);
void sw_stage_give(sw_stage *stage, uint8_t *slot);
/* Every slot must be free again. */
void sw_stage_fini(sw_stage *stage);

#endif
