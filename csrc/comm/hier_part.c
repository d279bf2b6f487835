/* hier_part.c - see the header. */
#include "comm/hier_part.h"

#include <string.h>

static bool contradicts(const sw_part_side *first, const sw_part_side *other)
{
    return first->payload_bytes != other->payload_bytes ||
           sw_descriptor_contradicted(&first->descriptor, NULL, &other->descriptor) != NULL;
}

static bool counts_otherwise(const sw_part_side *first, const sw_part_side *other)
{
    return first->descriptor.step != other->descriptor.step ||
           first->descriptor.round != other->descriptor.round;
}

static const sw_part_side *lower(const sw_part_side *a, const sw_part_side *b)
{
    return b->rank < 0 || (a->rank >= 0 && a->rank <= b->rank) ? a : b;
}

/* Sides that agree are equal, so a third side that contradicts the lower one contradicts both. */
static void merge_pair(sw_part_side *first, sw_part_side *odd, const sw_part_side *other_first,
                       const sw_part_side *other_odd,
                       bool (*differ)(const sw_part_side *, const sw_part_side *))
{
    if (other_first->rank < 0)
        return;
    bool is_lower = first->rank >= 0 && first->rank <= other_first->rank;
    const sw_part_side *low = is_lower ? first : other_first,
                       *high = is_lower ? other_first : first;
    const sw_part_side *low_odd = is_lower ? odd : other_odd,
                       *high_odd = is_lower ? other_odd : odd;
    if (high->rank >= 0 && differ(low, high))
        high_odd = high;
    const sw_part_side made_first = *low, made_odd = *lower(low_odd, high_odd);
    *first = made_first;
    *odd = made_odd;
}

void sw_part_begin(sw_part *part, int rank, const sw_descriptor *descriptor, uint32_t payload_bytes)
{
    const sw_part_side none = {.rank = -1};
    *part = (sw_part){.odd = none, .counting = none, .odd_counting = none};
    part->lowest =
        (sw_part_side){.rank = rank, .payload_bytes = payload_bytes, .descriptor = *descriptor};
    if (descriptor->round != 0)
        part->counting = part->lowest;
}

void sw_part_merge(sw_part *into, const sw_part *other)
{
    merge_pair(&into->lowest, &into->odd, &other->lowest, &other->odd, contradicts);
    merge_pair(&into->counting, &into->odd_counting, &other->counting, &other->odd_counting,
               counts_otherwise);
}

sw_status sw_part_check(const sw_part *part, uint32_t ticket, sw_error *err)
{
    const sw_part_side *first = &part->lowest, *odd = lower(&part->odd, &part->odd_counting);
    if (odd->rank < 0)
        return SW_OK;
    if (odd == &part->odd_counting)
        first = &part->counting;
    else if (!sw_descriptor_contradicted(&first->descriptor, NULL, &odd->descriptor))
        return sw_error_set(
            err, SW_E_MISMATCH, odd->rank,
            "rank %d sends %u bytes beside %s '%.*s', but rank %d sends %u", odd->rank,
            odd->payload_bytes, sw_op_kind_name((sw_op_kind)odd->descriptor.kind),
            SW_COMM_LABEL_BYTES - 1, odd->descriptor.label, first->rank, first->payload_bytes);
    return sw_descriptor_disagree(ticket, first->rank, &first->descriptor, odd->rank,
                                  &odd->descriptor, err);
}

/* Encoding: a word with a bit for each side that exists, then these sides. */

enum {
    SIDES = 4,
    COUNTING = 2,
    IS_LOWEST = 1u << SIDES /* the lowest rank that counts rounds is the
                             * lowest of all */
};

static const sw_part_side *side_of(const sw_part *part, int index)
{
    const sw_part_side *side[SIDES] = {&part->lowest, &part->odd, &part->counting,
                                       &part->odd_counting};
    return side[index];
}

size_t sw_part_write(const sw_part *part, uint8_t *bytes)
{
    uint32_t there = 0;
    size_t used = sizeof there;
    if (part->counting.rank >= 0 && part->counting.rank == part->lowest.rank)
        there |= IS_LOWEST;
    for (int i = 0; i < SIDES; ++i) {
        const sw_part_side *side = side_of(part, i);
        if (side->rank < 0 || (i == COUNTING && there & IS_LOWEST))
            continue;
        there |= 1u << i;
        memcpy(bytes + used, side, sizeof *side);
        used += sizeof *side;
    }
    memcpy(bytes, &there, sizeof there);
    return used;
}

bool sw_part_read(sw_part *part, const uint8_t *bytes, size_t size_bytes, size_t *used)
{
    uint32_t there;
    *used = sizeof there;
    if (size_bytes < sizeof there)
        return false;
    memcpy(&there, bytes, sizeof there);
    for (int i = 0; i < SIDES; ++i) {
        sw_part_side *side = (sw_part_side *)(uintptr_t)side_of(part, i);
        side->rank = -1;
        if (!(there & 1u << i))
            continue;
        if (size_bytes - *used < sizeof *side)
            return false;
        memcpy(side, bytes + *used, sizeof *side);
        *used += sizeof *side;
        side->descriptor.label[SW_COMM_LABEL_BYTES - 1] = '\0';
        if (side->rank < 0)
            return false;
    }
    if (there & IS_LOWEST)
        part->counting = part->lowest;
    return part->lowest.rank >= 0;
}
