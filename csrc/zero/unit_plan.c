/* unit_plan.c - see the header. */
#include "zero/unit_plan.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static size_t aligned(size_t bytes)
{
    return (bytes + SW_UNIT_ALIGNMENT - 1) / SW_UNIT_ALIGNMENT * SW_UNIT_ALIGNMENT;
}

const sw_unit_part *sw_planned_unit_part(const sw_planned_unit *unit, size_t bucket)
{
    for (size_t i = 0; i < unit->part_count; ++i)
        if (unit->part[i].bucket == bucket)
            return &unit->part[i];
    return NULL;
}

/* Return the bytes of a part's parameters up to `parameter`, each rounded up; of all if it is none
 * of them. */
static size_t bytes_before(const sw_layout *layout, const sw_unit_part *part, size_t parameter)
{
    const sw_layout_bucket *bucket = &layout->bucket[part->bucket];
    size_t bytes = 0;
    for (size_t k = 0; k < bucket->count; ++k) {
        size_t each = layout->order[bucket->first + k];
        if (each == parameter)
            break;
        bytes += aligned(layout->place[each].numel * sw_dtype_size_bytes(part->dtype));
    }
    return bytes;
}

size_t sw_unit_offset_bytes(const sw_layout *layout, const sw_unit_part *part, size_t parameter)
{
    size_t within = layout->bucket[part->bucket].by_rows
                        ? bytes_before(layout, part, parameter)
                        : layout->place[parameter].begin * sw_dtype_size_bytes(part->dtype);
    return part->offset_bytes + within;
}

static int by_bucket(const void *a, const void *b)
{
    size_t x = ((const sw_unit_part *)a)->bucket, y = ((const sw_unit_part *)b)->bucket;
    return x < y ? -1 : x > y;
}

static sw_status plan_parts(sw_planned_unit *unit, const sw_layout *layout, const sw_unit_row *row,
                            sw_error *err)
{
    unit->part = calloc(row->member_count + 1, sizeof *unit->part);
    if (!unit->part)
        SW_FAIL(err, SW_E_MEMORY, "unit '%s': no memory for %zu buckets", row->name,
                row->member_count);
    for (size_t i = 0; i < row->member_count; ++i) {
        const sw_unit_member *member = &row->members[i];
        if (member->parameter >= layout->param_count)
            SW_FAIL(err, SW_E_INVALID, "unit '%s': parameter must be in [0, %zu), not %zu",
                    row->name, layout->param_count, member->parameter);
        size_t bucket = layout->place[member->parameter].bucket;
        if (!sw_planned_unit_part(unit, bucket))
            unit->part[unit->part_count++] =
                (sw_unit_part){.bucket = bucket, .dtype = member->dtype};
    }
    qsort(unit->part, unit->part_count, sizeof *unit->part, by_bucket);
    for (size_t i = 0; i < unit->part_count; ++i) {
        sw_unit_part *part = &unit->part[i];
        const sw_layout_bucket *bucket = &layout->bucket[part->bucket];
        size_t bytes = aligned(bucket->numel * sw_dtype_size_bytes(part->dtype));
        part->offset_bytes = unit->size_bytes;
        part->beside_bytes = unit->beside_bytes;
        unit->size_bytes += bucket->by_rows ? bytes_before(layout, part, SIZE_MAX) : bytes;
        unit->beside_bytes += bucket->by_rows ? bytes : 0;
    }
    return SW_OK;
}

/* Return the place of a unit that takes turns: the one that its level used longest ago, or a new
 * one while the level has fewer than `turns`. */
static size_t next_in_turn(const sw_unit_plan *plan, const sw_unit_row *rows, const bool *in_turn,
                           size_t number, size_t turns)
{
    size_t back = 0;
    for (size_t i = number; i-- > 0;)
        if (in_turn[i] && rows[i].level == rows[number].level && ++back == turns)
            return plan->unit[i].place;
    return plan->place_count;
}

static void choose_places(sw_unit_plan *plan, const sw_unit_row *rows, size_t turns, bool *in_turn)
{
    for (size_t i = 0; i < plan->count; ++i) {
        sw_planned_unit *unit = &plan->unit[i], *of = &plan->unit[rows[i].form_of];
        if (of != unit) {
            of->has_place = false;
            unit->place = of->place;
        } else {
            in_turn[i] = !rows[i].stays && unit->size_bytes;
            unit->place =
                in_turn[i] ? next_in_turn(plan, rows, in_turn, i, turns) : plan->place_count;
            plan->place_count += unit->place == plan->place_count;
        }
        unit->has_place = true;
    }
    for (size_t i = 0; i < plan->count; ++i) {
        if (plan->beside_bytes < plan->unit[i].beside_bytes)
            plan->beside_bytes = plan->unit[i].beside_bytes;
        size_t *bytes = &plan->place_bytes[plan->unit[i].place];
        if (plan->unit[i].has_place && *bytes < plan->unit[i].size_bytes)
            *bytes = plan->unit[i].size_bytes;
    }
}

sw_status sw_unit_plan_init(sw_unit_plan *plan, const sw_layout *layout, const sw_unit_row *rows,
                            size_t count, size_t turns, sw_error *err)
{
    *plan = (sw_unit_plan){.unit = calloc(count + 1, sizeof *plan->unit),
                           .place_bytes = calloc(count + 1, sizeof *plan->place_bytes),
                           .count = count};
    bool *in_turn = calloc(count + 1, sizeof *in_turn);
    sw_status status = SW_OK;
    if (!plan->unit || !plan->place_bytes || !in_turn)
        status = sw_error_set(err, SW_E_MEMORY, -1, "no memory for a plan of %zu units", count);
    for (size_t i = 0; i < count && status == SW_OK; ++i) {
        size_t of = rows[i].form_of;
        if (of > i || rows[of].form_of != of)
            status = sw_error_set(err, SW_E_INVALID, -1, "unit '%s' is no form of unit %zu",
                                  rows[i].name, of);
        else
            status = plan_parts(&plan->unit[i], layout, &rows[i], err);
    }
    if (status == SW_OK)
        choose_places(plan, rows, turns < 2 ? 2 : turns, in_turn);
    free(in_turn);
    return status;
}

void sw_unit_plan_fini(sw_unit_plan *plan)
{
    for (size_t i = 0; plan->unit && i < plan->count; ++i)
        free(plan->unit[i].part);
    free(plan->unit);
    free(plan->place_bytes);
    *plan = (sw_unit_plan){.count = 0};
}

size_t sw_unit_groups(const sw_layout *layout, const bool *wanted, const size_t *order,
                      const size_t *ends, size_t stretch_count, size_t *group_of, size_t *sequence)
{
    size_t count = 0, groups = 0, at = 0;
    for (size_t b = 0; b < layout->bucket_count; ++b)
        group_of[b] = SIZE_MAX;
    for (size_t s = 0; s <= stretch_count; ++s) {
        size_t end = s < stretch_count ? ends[s] : at + layout->bucket_count, in_group = 0;
        for (size_t first = at; at < end; ++at) {
            size_t bucket = s < stretch_count ? layout->place[order[at]].bucket : at - first;
            if (!wanted[bucket] || group_of[bucket] != SIZE_MAX)
                continue;
            groups += in_group++ % SW_UNIT_GROUP_MAX == 0;
            group_of[bucket] = groups - 1;
            sequence[count++] = bucket;
        }
    }
    return count;
}
