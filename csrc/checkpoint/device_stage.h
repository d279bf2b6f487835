/* device_stage.h - the memory that a snapshot passes through: slots on the host, and pinned memory
 * between a GPU and the host.
 *
 * Thread rule: one at a time (slots: the saver's mutex). */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"

/* ---- slots of 1 MiB, warm memory that is kept between saves ---- */

/* A save that needs more memory than the stage has adds and touches it; later saves reuse it.
 * Another thread can touch added memory before a save (save_policy.c). Slots of one request are
 * contiguous as far as possible, so that a run of blocks is one write. Slots begin on a page, as
 * O_DIRECT requires. */

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

/* ---- GPU memory, copied in batches through slots of pinned memory, on a separate stream ---- */

/* Idea: copies of the next batches run while the host consumes the present one.
 *
 *   user --> down              copies follow the writes of their sources
 *   down --fetched[slot]--> host    a batch has arrived: the only wait of the host, once a batch
 *   down --> host              after an error: nothing reads the caller's memory any more
 *
 * Two orders need no event. A slot's next copies are enqueued after the host has consumed the slot.
 * The call returns after the last batch has arrived, so the caller's next work on `user` may
 * overwrite the memory. */

enum { SW_DEVICE_STAGE_SLOTS = 3 };

typedef struct sw_device_stage sw_device_stage;

typedef struct sw_device_stage_copy {
    const void *data; /* device memory */
    size_t at;        /* its place in the slot */
    size_t size_bytes;
} sw_device_stage_copy;

typedef struct sw_device_stage_batch {
    size_t first, count; /* range of copies; count 0: no copy and no wait */
} sw_device_stage_batch;

typedef struct sw_device_stage_work {
    const sw_device_stage_copy *copies;
    const sw_device_stage_batch *batches;
    size_t batch_count;
    /* Batch `number` is in `memory` until this returns; NULL: the batch has no copies. */
    void (*consume)(void *context, size_t number, const uint8_t *memory);
    void *context;
} sw_device_stage_work;

typedef struct sw_device_stage_stats {
    uint64_t batches, bytes_down, host_waits; /* over all works; batches: those that arrived */
} sw_device_stage_stats;

/* `library`: as for sw_device_cuda_create; copied. `slot_bytes`: of each slot, above 0. The first
 * work opens the GPU. SW_E_INVALID, SW_E_MEMORY. */
SW_MUST_USE sw_status sw_device_stage_create(const char *library, int ordinal, size_t slot_bytes,
                                             sw_device_stage **stage, sw_error *err);

/* NULL is allowed. */
void sw_device_stage_destroy(sw_device_stage *stage);

/* Copy every batch to the host, in order; consume each on this thread, then return. Ordered after
 * the work on `user`; the work is borrowed for the call. Copies of a batch lie inside the slot and
 * do not overlap. Errors: the driver's, or SW_E_TIMEOUT (a batch did not arrive within
 * `timeout_ns`). After an error, batches from some number on have not been consumed. */
SW_MUST_USE sw_status sw_device_stage_run(sw_device_stage *stage, const sw_device_stage_work *work,
                                          sw_stream *user, int64_t timeout_ns, sw_error *err);

size_t sw_device_stage_slot_bytes(const sw_device_stage *stage);
/* Return the pinned bytes; 0 before the first work. */
size_t sw_device_stage_pinned_bytes(const sw_device_stage *stage);
sw_device_stage_stats sw_device_stage_get_stats(const sw_device_stage *stage);
