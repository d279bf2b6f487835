/* device_units.h - units of parameters on a GPU: gathered into places that units share.
 *
 * Idea: a place is device memory of the largest unit that uses it, and a unit always comes to lie
 * in the same one, so a view of a parameter that autograd saved in the forward reads the same
 * values again in the backward, once the unit is gathered again. Places are few, a ring: while one
 * unit is computed with, the next is gathered into another place. Order is said with events alone:
 *
 *   user --left[place]--> comm    a place is written again after what computed with the unit that
 * lay there comm --whole[unit]--> user    a unit is computed with after it was gathered, while
 * others are gathered user --> comm (update)        slices are sent after the optimizer has stepped
 * on them
 *
 * What it leaves out: when to gather, which is the schedule's (Python's hooks); which unit has
 * which place, and that it is free (SW_E_STATE otherwise); the optimizer's own order behind gathers
 * that read the slices, which have all been taken by then.
 *
 * Thread rule: one at a time a communicator; every rank gathers the same units in one order.
 */
#ifndef SW_ZERO_DEVICE_UNITS_H
#define SW_ZERO_DEVICE_UNITS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/device_comm.h"
#include "zero/shard_state.h"

#define SW_DEVICE_UNIT_NONE SIZE_MAX

typedef struct sw_device_unit_run { /* one bucket of a unit */
    const void *slice;              /* device memory, borrowed: what this rank has of it */
    size_t offset_bytes;            /* from the unit's first byte to the bucket's */
    size_t slice_bytes;             /* the bucket has world_size times as many */
} sw_device_unit_run;

typedef struct sw_device_unit_spec {
    const char *name;               /* borrowed: copied */
    size_t place;                   /* its number, below place_count */
    void *data;                     /* device memory, borrowed till destroy: of the place */
    const sw_device_unit_run *runs; /* borrowed: copied */
    size_t run_count;
} sw_device_unit_spec;

typedef struct sw_device_units_stats {
    uint64_t gathers, releases, bytes; /* bytes: received and copied, of whole units */
} sw_device_units_stats;

typedef struct sw_device_units sw_device_units;

/* `comm` is borrowed and outlives the units; connected. SW_E_INVALID names a unit of a place that
 * does not exist; SW_E_MEMORY; SW_E_DEVICE. Every unit is SHARDED. */
SW_MUST_USE sw_status sw_device_units_create(sw_device_comm *comm, size_t place_count,
                                             const sw_device_unit_spec *specs, size_t count,
                                             sw_device_units **units, sw_error *err);

/* Waits under the deadline for what is being gathered. NULL is allowed. */
void sw_device_units_destroy(sw_device_units *units);

size_t sw_device_units_count(const sw_device_units *units);
sw_shard_state sw_device_unit_state(const sw_device_units *units, size_t unit);
/* The unit that lies, or is being gathered, in a place; SW_DEVICE_UNIT_NONE. */
size_t sw_device_units_holder(const sw_device_units *units, size_t place);
sw_device_units_stats sw_device_units_get_stats(const sw_device_units *units);

/* SHARDED to GATHERING: enqueued, and waited for by nobody. SW_E_STATE from elsewhere, or where
 * another unit lies in its place. Cost: one all_gather a bucket, up to 32 in a group. */
SW_MUST_USE sw_status sw_device_unit_gather(sw_device_units *units, size_t unit, sw_error *err);
/* GATHERING to UNSHARDED: what `user` does from now on sees it. Where it fails it is still coming.
 */
SW_MUST_USE sw_status sw_device_unit_take(sw_device_units *units, size_t unit, sw_stream *user,
                                          sw_error *err);
/* UNSHARDED to SHARDED: `user` was given all that reads or writes it. */
SW_MUST_USE sw_status sw_device_unit_release(sw_device_units *units, size_t unit, sw_stream *user,
                                             sw_error *err);

/* A unit in any state, gathered into `data`, memory that is the unit's size, in the order of
 * `user`. */
SW_MUST_USE sw_status sw_device_unit_gather_apart(sw_device_units *units, size_t unit, void *data,
                                                  sw_stream *user, sw_error *err);

/* Slices, or places, were written on `user`: what is gathered from now on comes after it.
 * SW_E_STATE names a unit that is not SHARDED: it would be out of date. */
SW_MUST_USE sw_status sw_device_units_update(sw_device_units *units, sw_stream *user,
                                             sw_error *err);

#endif
