/* store_plan.h - the plan of a store's units: where parameters lie in each, and from which slices
 * they come. Arithmetic only.
 *
 * Neighbours in a bucket stay neighbours in a unit, so that a rank's share of them is one run; by
 * rows each parameter has a run of each rank. A unit with casts has a second form, in the dtypes in
 * which modules compute, behind all units.
 *
 * Thread rule: any, once made.
 */
#pragma once

#include "zero/store_map.h"
#include "zero/unit.h"

typedef struct sw_store_plan {
    size_t unit_count, form_count, run_count, run_capacity;
    sw_unit_spec *specs; /* owned, by form; their runs and names are borrowed */
    sw_unit_run *runs;   /* owned */
    size_t *form, *at;   /* owned: of parameter i, 2 * i in its unit, 2 * i + 1 in the compute form:
                            the form, and the first byte there. SIZE_MAX: none */
    size_t *sizes;       /* owned, by unit: bytes, in the compute form if there is one */
    size_t warm_bytes;   /* of pages that units share */
} sw_store_plan;

/* The names of `options` are borrowed until the units are made. */
SW_MUST_USE sw_status sw_store_plan_init(sw_store_plan *units, const sw_store_map *map,
                                         const sw_store_options *options, sw_error *err);
void sw_store_plan_fini(sw_store_plan *units);
