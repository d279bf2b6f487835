/* bucket_ring.c - the places of buckets in a ring: one after the other, in space for the largest
 * bucket and one of the usual size. A bucket waits for earlier ones at its place. */
#include "base/bytes.h"
#include "reduce/host_rounds_state.h"

size_t sw_host_rounds_lay_ring(host_rounds *host, bool with_frozen)
{
    const sw_reducer *base = &host->base;
    size_t largest = 0, total = 0, at = 0;
    for (size_t i = 0; i < base->layout.bucket_count; ++i) {
        const host_bucket *b = &host->buckets[i];
        if (!b->common->takes_part && !with_frozen)
            continue;
        largest = sw_size_max(largest, sw_bucket_bytes(base, i));
        total += sw_bucket_bytes(base, i);
    }
    size_t ring = sw_size_min(total, largest + sw_size_min(host->cap_bytes, largest));
    for (size_t i = 0; i < base->layout.bucket_count; ++i) {
        host_bucket *b = &host->buckets[i];
        size_t bytes = sw_bucket_bytes(base, i);
        b->before = NULL;
        if (!b->common->takes_part && !with_frozen)
            continue;
        at = at + bytes > ring ? 0 : at;
        b->op.offset_bytes = at;
        at += bytes;
        for (size_t k = i; k-- > 0 && !b->before;) {
            host_bucket *other = &host->buckets[k];
            if (other->common->takes_part && /* a frozen one is never posted */
                other->op.offset_bytes < b->op.offset_bytes + bytes &&
                b->op.offset_bytes < other->op.offset_bytes + sw_bucket_bytes(base, k))
                b->before = other;
        }
    }
    return ring;
}
