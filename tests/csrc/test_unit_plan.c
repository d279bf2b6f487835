/* test_unit_plan.c - the laws of unit_plan.h, by hand and over random units, W = 1, 2, 3.
 *
 *   L1  a unit has each bucket of its members once, in the order of buckets, 128-byte aligned and
 *       disjoint, in the unit's dtype; its size is their end. By rows a bucket has its whole
 *       parameters, 128-byte aligned and disjoint, and its slices beside, where no other's lie
 *   L2  a unit that stays has a place that no other unit has, except for its form
 *   L3  units of one level that take turns use max(2, turns) places, each as often as any
 *       other; units of different levels share none
 *   L4  a form has the place of its unit, which then has none; a place is as large as its largest
 *       unit, and the memory beside as what lies there of any unit
 *   L5  a row that names no parameter, or a form of no unit, is refused by name
 *   L6  a group has at most 32 buckets, of one stretch; groups follow the order of use
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "zero/unit_plan.h"

enum { UNITS = 12, PARAMS = 2 * UNITS, LISTS = 60, STRETCH = 40 };

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static size_t random_below(size_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (size_t)((random_state * 0x2545f4914f6cdd1du >> 32) % limit);
}

/* Parameters 2 i and 2 i + 1, of sizes of their own, belong to unit i. */
static bool make_layout(sw_layout *layout, int world_size)
{
    sw_layout_param params[PARAMS];
    sw_error err;
    for (size_t i = 0; i < PARAMS; ++i)
        params[i] = (sw_layout_param){.numel = 1 + random_below(300),
                                      .dtype = i % 3 ? SW_DTYPE_FLOAT32 : SW_DTYPE_FLOAT64,
                                      .trainable = true,
                                      .group = 1 + i / 2};
    for (size_t i = 0; i < PARAMS; ++i) /* units 1, 4, ... */
        params[i].row_numel = i / 2 % 3 != 1 ? 0 : params[i].numel % 5 == 0 ? 5 : 1;
    return check(sw_layout_init(layout, params, PARAMS, world_size,
                                (sw_layout_caps){.bytes = 1 << 20}, &err) == SW_OK,
                 "no layout: %s", err.message);
}

typedef struct drawn {
    sw_unit_row rows[UNITS + 1];
    sw_unit_member members[UNITS + 1][2];
    size_t count;
} drawn;

static void draw(drawn *d, const sw_layout *layout)
{
    static const char *const names[] = {"0", "1", "2", "3",  "4",  "5",   "6",
                                        "7", "8", "9", "10", "11", "form"};
    d->count = UNITS;
    for (size_t i = 0; i <= UNITS; ++i) {
        size_t of = i < UNITS ? i : random_below(UNITS);
        for (size_t k = 0; k < 2; ++k) {
            size_t parameter = 2 * of + k, bucket = layout->place[parameter].bucket;
            d->members[i][k] = (sw_unit_member){parameter, i < UNITS ? layout->bucket[bucket].dtype
                                                                     : SW_DTYPE_BFLOAT16};
        }
        d->rows[i] = (sw_unit_row){.name = names[i],
                                   .level = i ? random_below(3) : 0,
                                   .stays = i == 0 || random_below(4) == 0,
                                   .form_of = of,
                                   .members = d->members[i],
                                   .member_count = i && random_below(8) == 0 ? 0 : 2};
    }
    d->count += random_below(2);
    if (d->rows[d->rows[UNITS].form_of].member_count == 0)
        d->count = UNITS;
    d->rows[UNITS].member_count = 2;
}

/* Check L1 for the parameters of a part, and return its end in the unit. */
static size_t check_members(const sw_layout *layout, const sw_unit_part *part)
{
    const sw_layout_bucket *bucket = &layout->bucket[part->bucket];
    size_t element_bytes = sw_dtype_size_bytes(part->dtype), end = part->offset_bytes;
    for (size_t k = 0; k < bucket->count; ++k) {
        size_t p = layout->order[bucket->first + k];
        size_t at = sw_unit_offset_bytes(layout, part, p);
        if (bucket->by_rows)
            check(at % SW_UNIT_ALIGNMENT == 0 && at >= end && at < end + SW_UNIT_ALIGNMENT,
                  "L1: parameter %zu lies at %zu after %zu", p, at, end);
        else
            check(at == part->offset_bytes + layout->place[p].begin * element_bytes,
                  "L1: parameter %zu lies at %zu", p, at);
        end = at + layout->place[p].numel * element_bytes;
    }
    return bucket->by_rows ? end : part->offset_bytes + bucket->numel * element_bytes;
}

static void check_parts(const sw_layout *layout, const drawn *d, const sw_unit_plan *plan)
{
    for (size_t i = 0; i < d->count; ++i) {
        const sw_planned_unit *unit = &plan->unit[i];
        size_t end = 0, beside = 0;
        for (size_t k = 0; k < unit->part_count; ++k) {
            const sw_unit_part *part = &unit->part[k];
            const sw_layout_bucket *bucket = &layout->bucket[part->bucket];
            if (bucket->by_rows) {
                check(part->beside_bytes >= beside && part->beside_bytes % SW_UNIT_ALIGNMENT == 0,
                      "L1: part %zu of unit %zu beside", k, i);
                beside = part->beside_bytes + bucket->numel * sw_dtype_size_bytes(part->dtype);
            }
            check(part->offset_bytes >= end && part->offset_bytes % SW_UNIT_ALIGNMENT == 0 &&
                      (k == 0 || part->bucket > unit->part[k - 1].bucket),
                  "L1: part %zu of unit %zu", k, i);
            end = check_members(layout, part);
        }
        check(unit->beside_bytes >= beside && unit->beside_bytes < beside + SW_UNIT_ALIGNMENT &&
                  plan->beside_bytes >= unit->beside_bytes,
              "L4: beside");
        check(unit->size_bytes >= end && unit->size_bytes < end + SW_UNIT_ALIGNMENT, "L1: size");
        for (size_t k = 0; k < d->rows[i].member_count; ++k) {
            const sw_unit_member *member = &d->members[i][k];
            const sw_unit_part *part =
                sw_planned_unit_part(unit, layout->place[member->parameter].bucket);
            check(part && part->dtype == member->dtype, "L1: member %zu of unit %zu", k, i);
        }
    }
}

static void check_places(const drawn *d, const sw_unit_plan *plan, size_t turns)
{
    size_t used[UNITS + 1] = {0}, most = turns < 2 ? 2 : turns;
    for (size_t i = 0; i < d->count; ++i) {
        const sw_planned_unit *unit = &plan->unit[i];
        bool is_form = d->rows[i].form_of != i;
        check(!is_form || (unit->place == plan->unit[d->rows[i].form_of].place &&
                           !plan->unit[d->rows[i].form_of].has_place),
              "L4: the form lies elsewhere");
        check(!unit->has_place || plan->place_bytes[unit->place] >= unit->size_bytes, "L4: room");
        for (size_t k = 0; k < i && !is_form; ++k)
            if (plan->unit[k].place == unit->place)
                check(!d->rows[i].stays && !d->rows[k].stays && d->rows[i].member_count &&
                          d->rows[i].level == d->rows[k].level,
                      "L2, L3: units %zu and %zu share place %zu", k, i, unit->place);
        used[unit->place] += !is_form;
    }
    for (size_t level = 0; level < 3; ++level) {
        size_t places = 0, units = 0, least = SIZE_MAX, greatest = 0;
        bool seen[UNITS + 1] = {false};
        for (size_t i = 0; i < UNITS; ++i) {
            size_t place = plan->unit[i].place;
            if (d->rows[i].stays || !d->rows[i].member_count || d->rows[i].level != level)
                continue;
            units++;
            if (seen[place])
                continue;
            seen[place] = true;
            places++;
            least = used[place] < least ? used[place] : least;
            greatest = used[place] > greatest ? used[place] : greatest;
        }
        check(places == (units < most ? units : most) && (!places || greatest - least <= 1),
              "L3: level %zu has %zu places for %zu units", level, places, units);
    }
}

static void check_refusals(const sw_layout *layout)
{
    const sw_unit_member beyond = {PARAMS, SW_DTYPE_FLOAT32};
    const sw_unit_row wrong[] = {
        {.name = "far", .form_of = 0, .members = &beyond, .member_count = 1},
        {.name = "early", .form_of = 1},
    };
    for (size_t i = 0; i < 2; ++i) {
        sw_unit_plan plan;
        sw_error err;
        check(sw_unit_plan_init(&plan, layout, &wrong[i], 1, 2, &err) == SW_E_INVALID &&
                  strstr(err.message, wrong[i].name),
              "L5: '%s' was not refused", wrong[i].name);
        sw_unit_plan_fini(&plan);
    }
}

/* One bucket for each parameter: STRETCH of them are used first, then 3, then the rest but one. */
static void check_groups(void)
{
    enum { COUNT = 3 * STRETCH };
    sw_layout_param params[COUNT];
    sw_layout layout;
    sw_error err;
    bool wanted[COUNT];
    size_t order[COUNT], group_of[COUNT], sequence[COUNT], ends[2] = {STRETCH, STRETCH + 3};
    for (size_t i = 0; i < COUNT; ++i) {
        params[i] = (sw_layout_param){
            .numel = 8, .dtype = SW_DTYPE_FLOAT32, .trainable = true, .group = i + 1};
        wanted[i] = i != 7;
        order[i] = i < STRETCH ? 3 * i : 3 * (i - STRETCH) + 1;
    }
    if (!check(sw_layout_init(&layout, params, COUNT, 2, (sw_layout_caps){.bytes = 64}, &err) ==
                   SW_OK,
               "no layout: %s", err.message))
        return;
    size_t count = sw_unit_groups(&layout, wanted, order, ends, 2, group_of, sequence);
    size_t in_group[COUNT] = {0};
    check(count == COUNT - 1 && group_of[7] == SIZE_MAX, "L6: %zu buckets", count);
    for (size_t i = 0; i < count; ++i) {
        size_t group = group_of[sequence[i]];
        check(i == 0 ? group == 0 : group - group_of[sequence[i - 1]] <= 1, "L6: sequence");
        check(++in_group[group] <= SW_UNIT_GROUP_MAX, "L6: group %zu is too large", group);
        for (size_t s = 0, begin = 0; s < 2; begin = ends[s++])
            for (size_t k = begin; k < ends[s]; ++k)
                if (layout.place[order[k]].bucket == sequence[i])
                    check(group == (s ? 2 : (size_t)(k >= SW_UNIT_GROUP_MAX)),
                          "L6: bucket %zu of stretch %zu is in group %zu", sequence[i], s, group);
    }
    sw_layout_fini(&layout);
}

int main(void)
{
    for (int list = 0; list < LISTS; ++list) {
        sw_layout layout;
        sw_unit_plan plan;
        sw_error err;
        drawn d;
        size_t turns = random_below(5);
        if (!make_layout(&layout, 1 + list % 3))
            break;
        draw(&d, &layout);
        if (check(sw_unit_plan_init(&plan, &layout, d.rows, d.count, turns, &err) == SW_OK,
                  "no plan: %s", err.message)) {
            check_parts(&layout, &d, &plan);
            check_places(&d, &plan, turns);
        }
        sw_unit_plan_fini(&plan);
        check_refusals(&layout);
        sw_layout_fini(&layout);
    }
    check_groups();
    return check_result();
}
