/* bucket_ring.c - the places of buckets in a ring: one after the other, in space for the largest
 * bucket and one of the usual size. A bucket waits for earlier ones at its place. Where means share
 * memory, results point at places, so a place stays: buckets that are frozen when memory is made go
 * round the ring of the others by themselves, and a larger one begins with it and ends behind it.
 */
#include "base/bytes.h"
#include "reduce/host_rounds_state.h"

size_t sw_host_rounds_lay_ring(host_rounds *host, bool with_frozen)
{
    const sw_reducer *base = &host->base;
    bool takes = base->takes_means, stays = takes && host->memory;
    size_t largest = 0, total = 0, end = 0, at[2] = {0, 0};
    for (size_t i = 0; i < base->layout.bucket_count; ++i) {
        if (!host->buckets[i].common->takes_part && (takes || !with_frozen))
            continue;
        largest = sw_size_max(largest, sw_bucket_bytes(base, i));
        total += sw_bucket_bytes(base, i);
    }
    size_t ring = sw_size_min(total, largest + sw_size_min(host->cap_bytes, largest));
    for (size_t i = 0; i < base->layout.bucket_count; ++i) {
        host_bucket *b = &host->buckets[i];
        size_t bytes = sw_bucket_bytes(base, i);
        size_t *next = &at[takes && !b->common->takes_part];
        b->before = NULL;
        if (!b->common->takes_part && !with_frozen)
            continue;
        if (!stays) {
            b->op.offset_bytes = *next + bytes > ring ? 0 : *next;
            *next = b->op.offset_bytes + bytes;
        }
        end = sw_size_max(end, b->op.offset_bytes + bytes);
        for (size_t k = i; k-- > 0 && !b->before;) {
            host_bucket *other = &host->buckets[k];
            if (other->common->takes_part && /* a frozen one is never posted */
                other->op.offset_bytes < b->op.offset_bytes + bytes &&
                b->op.offset_bytes < other->op.offset_bytes + sw_bucket_bytes(base, k))
                b->before = other;
        }
    }
    return takes ? end : ring;
}
