/* bytes.h - overflow-checked arithmetic on sizes, the alignment of every layout, and memory that
 * grows or was reserved too generously.
 *
 * Thread rule: any.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

/* Every parameter and every slice starts on a multiple of this. 128 bytes hold the widest vector
 * and two cache lines, which the adjacent-line prefetcher loads together. */
enum { SW_ALIGNMENT_BYTES = 128 };

static inline bool sw_size_add(size_t a, size_t b, size_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

static inline bool sw_size_multiply(size_t a, size_t b, size_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

/* Round `value` up to a multiple of `alignment` (a power of two). Return false on overflow. */
static inline bool sw_size_round_up(size_t value, size_t alignment, size_t *rounded)
{
    if (!sw_size_add(value, alignment - 1, rounded))
        return false;
    *rounded &= ~(alignment - 1);
    return true;
}

static inline size_t sw_size_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t sw_size_max(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Return malloc'ed `items`, or where they went, with room for more than `count` of them: *room
 * doubles, from `least` on. NULL: no memory, and nothing has changed. */
static inline void *sw_grown(void *items, size_t *room, size_t count, size_t item_bytes,
                             size_t least)
{
    size_t more = *room ? 2 * *room : least, bytes;
    if (count < *room)
        return items;
    void *grown = sw_size_multiply(more, item_bytes, &bytes) ? realloc(items, bytes) : NULL;
    *room = grown ? more : *room;
    return grown;
}

/* Return malloc'ed memory cut down to `size_bytes`, above 0, or as it is. */
static inline void *sw_shrunk(void *memory, size_t size_bytes)
{
    void *shrunk = realloc(memory, size_bytes);
    return shrunk ? shrunk : memory;
}
