/* unit_plan.h - where units of parameters lie on a GPU. Arithmetic only: no memory, no ranks.
 *
 * A unit consists of whole buckets (tensor/layout.h), each at a multiple of 128 bytes. A bucket by
 * rows has its parameters there, each at such a multiple; its slices arrive in memory beside, which
 * all units share. A unit lies in a place. A unit that stays whole has its own place; the others of
 * one level of nesting take a few places in turn. A unit may be the *form* of an earlier one, in
 * other dtypes: the form has the place, and the earlier unit is only gathered into separate memory.
 *
 *     turns = 2, levels 0, 1, 1, 1, 1; unit 0 stays: places 0, 1, 2, 1, 2
 *
 * Thread rule: any, once made.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "tensor/layout.h"

enum {
    SW_UNIT_ALIGNMENT = 128,
    SW_UNIT_GROUP_MAX = 32 /* buckets of one group: one call of NCCL */
};

typedef struct sw_unit_member {
    size_t parameter;
    sw_dtype dtype; /* in the unit; equal for all parameters of a bucket */
} sw_unit_member;

typedef struct sw_unit_row {
    const char *name; /* borrowed */
    size_t level;     /* number of units around it */
    bool stays;       /* it is not released after its forward */
    size_t form_of;   /* number of the unit whose place it takes; its own number if it is no form */
    const sw_unit_member *members; /* borrowed */
    size_t member_count;
} sw_unit_row;

typedef struct sw_unit_part { /* a bucket in a unit */
    size_t bucket, offset_bytes;
    size_t beside_bytes; /* by rows: offset of its slices in the memory beside */
    sw_dtype dtype;
} sw_unit_part;

typedef struct sw_planned_unit {
    size_t place, size_bytes;
    size_t beside_bytes; /* of its slices by rows */
    bool has_place;      /* false: a form has it */
    sw_unit_part *part;  /* owned, by bucket */
    size_t part_count;
} sw_planned_unit;

typedef struct sw_unit_plan {
    sw_planned_unit *unit; /* owned */
    size_t *place_bytes;   /* owned: of the largest unit in each place */
    size_t count, place_count;
    size_t beside_bytes; /* of the unit that needs the most */
} sw_unit_plan;

/* Plan the units. `turns`: places of a level that units take in turn, at least 2 of them. Forms
 * come after all units that are none. SW_E_INVALID names a row that refers to no parameter or unit;
 * SW_E_MEMORY. The caller calls fini in both cases. */
SW_MUST_USE sw_status sw_unit_plan_init(sw_unit_plan *plan, const sw_layout *layout,
                                        const sw_unit_row *rows, size_t count, size_t turns,
                                        sw_error *err);
void sw_unit_plan_fini(sw_unit_plan *plan);

/* Return the part of a unit that is this bucket; NULL if the unit has none of it. */
const sw_unit_part *sw_planned_unit_part(const sw_planned_unit *unit, size_t bucket);

/* Return the offset of a parameter in a unit, of which its bucket is a part. Cost: by rows, one
 * step for each parameter of the bucket. */
size_t sw_unit_offset_bytes(const sw_layout *layout, const sw_unit_part *part, size_t parameter);

/* Cut buckets into groups in the order in which `order` first names a parameter of each, then in
 * their own order. `wanted[b]`: bucket b takes part. A group has buckets of one stretch: of order[0
 * .. ends[0]), then of those up to ends[1], ..., then of the rest. group_of[b] becomes its number,
 * and sequence[] lists the buckets, of which there are as many as the returned count. */
size_t sw_unit_groups(const sw_layout *layout, const bool *wanted, const size_t *order,
                      const size_t *ends, size_t stretch_count, size_t *group_of, size_t *sequence);
