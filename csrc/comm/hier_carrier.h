/* hier_carrier.h - what a carrier's thread is made of: shared by hier_carrier.c (operations, one
 * after the other), hier_reduce.c and hier_gather.c (the data of one). Not for others.
 *
 * Thread rule: the carrier's thread alone, except where hier_state.h says so.
 */
#ifndef SW_COMM_HIER_CARRIER_H
#define SW_COMM_HIER_CARRIER_H

#include "comm/hier_cut.h"
#include "comm/hier_state.h"

typedef struct sw_carrier_slot { /* one block under way; arrays of host_count */
    uint8_t **partial, **arrived;
    sw_transfer *partial_out, *partial_in, *result_out, *result_in, *standing_out, *standing_in;
} sw_carrier_slot;

struct sw_carrier {
    sw_hier *hier;
    sw_bridge bridge;
    sw_thread thread;
    bool thread_began;
    _Atomic bool stop, finished;
    bool midway;             /* in an operation: what moves then may be under way for ever */
    uint32_t frames;         /* sent so far: one an operation, and one more at the end */
    uint32_t blocks;         /* begun so far, over all operations */
    sw_frame out, last, *in; /* in: owned, host_count */
    sw_transfer *frame_out, *frame_in, *beside_out, *beside_in; /* owned, host_count */
    uint8_t *beside;                                            /* owned: what this host says */
    uint8_t **heard;                                            /* owned: what each host says */
    size_t beside_capacity, *heard_capacity;
    sw_carrier_slot slots[SW_HIER_SLOTS];
    uint8_t *memory; /* owned: of the slots */
    const void **source;
    void **destination;
    bool *contributes, *host_contributes;
};

#define SW_FOR_OTHER_HOSTS(carrier, g)                        \
    for (int g = 0; g < (carrier)->hier->map.host_count; ++g) \
        if (g != (carrier)->hier->host)

/* Memory of operations is touched between these alone; not at all when the first fails. */
SW_MUST_USE sw_status sw_carrier_touch_begin(sw_carrier *carrier, sw_error *err);
void sw_carrier_touch_end(sw_carrier *carrier);
/* What a failure of the wire, in *err, means: in *err again. */
sw_status sw_carrier_blame(const sw_carrier *carrier, const char *what, sw_error *err);
SW_MUST_USE sw_status sw_carrier_wait(sw_carrier *carrier, sw_transfer *transfer, const char *what,
                                      sw_error *err);

/* The data of an all_reduce or reduce_scatter; of an all_gather on an arena. */
SW_MUST_USE sw_status sw_carrier_reduce(sw_carrier *carrier, const sw_hier_pending *pending,
                                        const char *what, sw_error *err);
SW_MUST_USE sw_status sw_carrier_gather(sw_carrier *carrier, const sw_hier_pending *pending,
                                        const char *what, sw_error *err);

#endif
