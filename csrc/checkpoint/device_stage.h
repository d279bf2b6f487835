/* device_stage.h - copy GPU memory to the host in batches, through slots of pinned memory, on a
 * separate stream.
 *
 * Idea: copies of the next batches run while the host consumes the present one.
 *
 *   user --> down              copies follow the writes of their sources
 *   down --fetched[slot]--> host    a batch has arrived: the only wait of the host, once a batch
 *   down --> host              after an error: nothing reads the caller's memory any more
 *
 * Two orders need no event. A slot's next copies are enqueued after the host has consumed the slot.
 * The call returns after the last batch has arrived, so the caller's next work on `user` may
 * overwrite the memory.
 *
 * Thread rule: one at a time. */
#ifndef SW_CHECKPOINT_DEVICE_STAGE_H
#define SW_CHECKPOINT_DEVICE_STAGE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "device/device.h"

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

#endif
