/* device_units.h - units of parameters on a GPU, gathered into places that units share.
 *
 * A place is device memory of the size of the largest unit that uses it. A unit always uses the
 * same place, so a view of a parameter that autograd saved in the forward reads the same values in
 * the backward, once the unit is gathered again. The few places form a ring: while one unit
 * computes, the next one is gathered into another place. Only events order the work:
 *
 *   user --left[place]--> comm   a place is written again after all work on the unit in it; slices
 *                                that arrive beside travel before that
 *   comm --whole[unit]--> user   a unit computes after it is gathered, while others are gathered
 *   user --> comm (update, gather_anew)   slices are sent after the optimizer has stepped on them
 *
 * Parameters that stay whole between two steps (zero=1 and 2) are units too. Such a unit is a group
 * of buckets; its place is their memory, which contains the slices. gather_anew gathers all of them
 * after a step, and each is taken when it is read.
 *
 * A bucket by rows (tensor/layout.h) arrives slice after slice in memory *beside*, which all units
 * share. One launch of PACK then copies the chunks of each parameter to where it lies in one range.
 * Both run on the communicator's stream, so the next gather's slices arrive after that.
 *
 * A slice may be *at home* in pinned host memory (device_home.h). It is copied or cast into the
 * place on a stream of its own, and gathered from there: the copies of units ahead run beside the
 * gathers before them. By rows it is copied on the communicator's stream, since all units share
 * that memory.
 *
 *   user --left[place]--> home    a slice is copied into a place after all work on the unit in it
 *   home --> comm                 a slice is gathered after it has been copied into its place
 *   user --> home (update)        a slice is copied after it has been written
 *   home, comm --> host, in destroy   the owner may free the slices
 *
 * A unit that must be whole while another one is in its place lies *apart*: in memory of its own,
 * until it is released. A unit that is GATHERING is gathered ahead: it leaves its place again if
 * another needs that first.
 *
 * A unit may stay *near*: the ranks of a smaller communicator, `near`, keep its whole between them
 * as it is released, each a part, and the next gather is theirs alone. It is kept once: after that
 * gather, or once slices are written, all ranks gather the unit again.
 *
 * Left out: the schedule of gathers (Python's hooks) and the choice of places (unit_plan.h); a
 * gather into a place in use is SW_E_STATE. The optimizer needs no order after gathers that read
 * its slices, since all gathered units have been taken before it steps.
 *
 * Thread rule: one at a time per communicator; every rank gathers the same units in the same order.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "comm/device_comm.h"
#include "tensor/dtype.h"
#include "zero/shard_state.h"

#define SW_DEVICE_UNIT_NONE SIZE_MAX

typedef struct sw_device_unit_rows { /* by rows: a parameter, in chunks, one a slice */
    size_t begin_bytes;              /* its offset in each slice */
    size_t offset_bytes;             /* its offset in the unit */
    size_t size_bytes, chunk_bytes;  /* in all; in each slice at most */
} sw_device_unit_rows;

typedef struct sw_device_unit_run { /* one bucket of a unit */
    const void *slice;              /* device memory, borrowed: this rank's slice */
    bool is_home;                   /* the slice is at home: pinned host memory */
    size_t offset_bytes; /* from the unit's first byte to the bucket's; by rows, from that
                          * of the memory beside to its first slice */
    const sw_device_unit_rows *rows; /* borrowed: copied. The parameters by rows; NULL: the bucket
                                      * lies in the unit as it is */
    size_t row_count;
    size_t slice_bytes;          /* bytes in the unit; the bucket has world_size times as many */
    sw_dtype slice_dtype, dtype; /* dtypes of the slice and in the unit. If they differ, each
                                  * gather casts the slice into its place: CAST's dtypes */
} sw_device_unit_run;

typedef struct sw_device_unit_spec {
    const char *name;               /* borrowed: copied */
    size_t place;                   /* the number of its place, below place_count */
    void *data;                     /* device memory of the place, borrowed until destroy; NULL: the
                                     * unit is only gathered apart */
    const sw_device_unit_run *runs; /* borrowed: copied */
    size_t run_count;
} sw_device_unit_spec;

typedef struct sw_device_units_stats {
    uint64_t gathers, releases, bytes; /* bytes: of whole units, received and copied */
    uint64_t near_gathers;             /* of those, from parts that ranks nearby kept */
    uint64_t home_bytes;               /* of slices at home, copied from host memory */
} sw_device_units_stats;

typedef struct sw_device_units sw_device_units;

/* Create the units, all SHARDED. `comm` is connected, borrowed and outlives the units. `beside`:
 * device memory of the slices by rows of one unit, the largest, borrowed until destroy; NULL if no
 * unit has rows. SW_E_INVALID names a unit whose place does not exist; SW_E_MEMORY; SW_E_DEVICE. */
SW_MUST_USE sw_status sw_device_units_create(sw_device_comm *comm, size_t place_count, void *beside,
                                             const sw_device_unit_spec *specs, size_t count,
                                             sw_device_units **units, sw_error *err);

/* Wait under the deadline for pending gathers and destroy. NULL is allowed. */
void sw_device_units_destroy(sw_device_units *units);

/* Let a unit with a place stay near from now on. `near`: connected, borrowed until destroy; its
 * ranks are among those of the units' communicator. `part`: device memory of part_bytes, borrowed
 * as long, for as many as its world_size parts of which the place has room. */
void sw_device_unit_keep_near(sw_device_units *units, size_t unit, sw_device_comm *near, void *part,
                              size_t part_bytes);

sw_shard_state sw_device_unit_state(const sw_device_units *units, size_t unit);
/* Return the unit that is gathered, or being gathered, in the unit's place; SW_DEVICE_UNIT_NONE if
 * none. */
size_t sw_device_unit_holder(const sw_device_units *units, size_t unit);
/* Return true if the unit is whole in memory apart. */
bool sw_device_unit_is_apart(const sw_device_units *units, size_t unit);
/* Return a digest of the units gathered so far, in their order: equal on all ranks. */
uint32_t sw_device_units_digest(const sw_device_units *units);
sw_device_units_stats sw_device_units_get_stats(const sw_device_units *units);

/* How a unit becomes whole now. */
typedef enum sw_unit_way {
    SW_UNIT_TAKE,    /* it is under way */
    SW_UNIT_GATHER,  /* into its place, which is free or has a unit that was gathered ahead */
    SW_UNIT_APART,   /* it has no place, or `apart` is asked for */
    SW_UNIT_BLOCKED, /* the holder of its place is whole and must be released first */
} sw_unit_way;
sw_unit_way sw_device_unit_way(const sw_device_units *units, size_t unit, bool apart);

/* Make a unit whole for later work on `user`, by way of TAKE or GATHER. */
SW_MUST_USE sw_status sw_device_unit_make_whole(sw_device_units *units, size_t unit,
                                                sw_stream *user, sw_error *err);
/* Release the units that are GATHERING. */
SW_MUST_USE sw_status sw_device_units_drop_ahead(sw_device_units *units, sw_stream *user,
                                                 sw_error *err);

/* SHARDED to GATHERING. The call enqueues the gather and does not wait. SW_E_STATE from another
 * state, if the place holds another unit, or without a place. Cost: one all_gather for each bucket,
 * up to 32 in a group, a launch for each bucket that is cast, and one for each 64 parameters by
 * rows. */
SW_MUST_USE sw_status sw_device_unit_gather(sw_device_units *units, size_t unit, sw_error *err);
/* GATHERING to UNSHARDED: later work on `user` sees the unit. On failure it stays GATHERING. */
SW_MUST_USE sw_status sw_device_unit_take(sw_device_units *units, size_t unit, sw_stream *user,
                                          sw_error *err);
/* The same for all streams, even captured ones: the calling thread waits until the unit is
 * whole. */
SW_MUST_USE sw_status sw_device_unit_wait(sw_device_units *units, size_t unit, sw_error *err);
/* Take a unit that is GATHERING on `user` and on the stream of the last gather_anew; where one of
 * them is captured, wait. SW_OK from another state. */
SW_MUST_USE sw_status sw_device_unit_arrive(sw_device_units *units, size_t unit, sw_stream *user,
                                            sw_error *err);
/* UNSHARDED to SHARDED. All work on the unit has been enqueued on `user`. The caller frees memory
 * apart in the order of that stream. */
SW_MUST_USE sw_status sw_device_unit_release(sw_device_units *units, size_t unit, sw_stream *user,
                                             sw_error *err);

/* SHARDED to UNSHARDED in `data`, separate memory of the unit's size, in the order of `user`. */
SW_MUST_USE sw_status sw_device_unit_gather_apart(sw_device_units *units, size_t unit, void *data,
                                                  sw_stream *user, sw_error *err);

/* Order later gathers after the writes to slices or places that `user` has enqueued. */
SW_MUST_USE sw_status sw_device_units_follow(sw_device_units *units, sw_stream *user,
                                             sw_error *err);
/* The same; SW_E_STATE names a unit that is not SHARDED, since it would be out of date. */
SW_MUST_USE sw_status sw_device_units_update(sw_device_units *units, sw_stream *user,
                                             sw_error *err);

/* Gather all units again, in the order of their numbers: UNSHARDED (at first SHARDED) to GATHERING.
 * Each has its own place, which contains its slices. `user` has enqueued their writes and all other
 * work on the units. SW_E_STATE names a unit that is still GATHERING or has no place. */
SW_MUST_USE sw_status sw_device_units_gather_anew(sw_device_units *units, sw_stream *user,
                                                  sw_error *err);
