/* bucket_ring.c - where the buckets of a ring lie: one after the other, in room for the largest and
 * one more of the usual size, so that a bucket waits for those before it that lie there too. */
#include "base/bytes.h"
#include "reduce/reducer_state.h"

size_t sw_reducer_lay_ring(sw_reducer *reducer, bool with_frozen)
{
    size_t largest = 0, total = 0, at = 0;
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        const bucket *b = &reducer->buckets[i];
        if (!b->takes_part && !with_frozen)
            continue;
        largest = sw_size_max(largest, sw_bucket_bytes(b));
        total += sw_bucket_bytes(b);
    }
    size_t ring = sw_size_min(total, largest + sw_size_min(reducer->cap_bytes, largest));
    for (size_t i = 0; i < reducer->layout.bucket_count; ++i) {
        bucket *b = &reducer->buckets[i];
        size_t bytes = sw_bucket_bytes(b);
        b->before = NULL;
        if (!b->takes_part && !with_frozen)
            continue;
        at = at + bytes > ring ? 0 : at;
        b->op.offset_bytes = at;
        at += bytes;
        for (size_t k = i; k-- > 0 && !b->before;) {
            bucket *other = &reducer->buckets[k];
            if ((other->takes_part || with_frozen) &&
                other->op.offset_bytes < b->op.offset_bytes + bytes &&
                b->op.offset_bytes < other->op.offset_bytes + sw_bucket_bytes(other))
                b->before = other;
        }
    }
    return ring;
}
