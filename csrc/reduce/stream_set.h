/* stream_set.h - streams that are noted once each.
 *
 * Thread rule: owner only. */
#pragma once

#include <stdlib.h>

#include "base/status.h"
#include "device/device.h"

typedef struct sw_stream_set {
    sw_stream **stream; /* owned: free() it. The streams are borrowed for a round */
    size_t count, room;
} sw_stream_set;

static inline sw_status sw_stream_set_add(sw_stream_set *set, sw_stream *stream, bool *is_new,
                                          sw_error *err)
{
    *is_new = false;
    for (size_t i = 0; i < set->count; ++i)
        if (set->stream[i] == stream)
            return SW_OK;
    if (set->count == set->room) {
        sw_stream **grown = realloc(set->stream, (set->room + 4) * sizeof *grown);
        if (!grown)
            SW_FAIL(err, SW_E_MEMORY, "reducer: no memory for %zu streams", set->room + 4);
        set->stream = grown;
        set->room += 4;
    }
    set->stream[set->count++] = stream;
    *is_new = true;
    return SW_OK;
}
