/* device_units.c - gather units into places; device_units.h has the table of events. */
#include "zero/device_units.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/crc32c.h"

enum { CALLS_PER_GROUP = 32 };

typedef struct device_unit {
    char *name; /* owned */
    size_t place;
    char *data;               /* borrowed */
    sw_device_unit_run *runs; /* owned */
    size_t run_count;
    sw_device_unit_rows *rows; /* owned: of all runs */
    bool uses_home;            /* slices of it, not by rows, are at home */
    sw_shard_state state;
    bool is_apart;        /* UNSHARDED in memory apart */
    sw_device_comm *near; /* borrowed; NULL: it does not stay near */
    char *part;           /* borrowed: this rank's part */
    size_t part_bytes;
    bool is_near, was_near; /* parts are kept; the unit was gathered from them */
    sw_event *whole;        /* owned */
} device_unit;

typedef struct device_place {
    size_t holder;  /* the unit in the place; SW_DEVICE_UNIT_NONE if none */
    sw_event *left; /* owned */
} device_place;

struct sw_device_units {
    sw_device_comm *comm; /* borrowed */
    device_unit *unit;    /* owned */
    size_t count;
    device_place *place; /* owned */
    size_t place_count;
    char *beside;      /* borrowed, or NULL */
    sw_stream *home;   /* owned: of copies of slices at home; NULL: there are none */
    sw_event *idle;    /* owned, with `home` */
    sw_stream *writer; /* the stream of the last gather_anew */
    uint32_t digest;
    sw_device_units_stats stats;
};

/* ---- life ---- */

static sw_status create_unit(sw_device_units *u, device_unit *unit, const sw_device_unit_spec *spec,
                             sw_error *err)
{
    size_t bytes = spec->run_count * sizeof *unit->runs, name_bytes = strlen(spec->name) + 1;
    size_t row_count = 0;
    for (size_t i = 0; i < spec->run_count; ++i)
        row_count += spec->runs[i].row_count;
    if (spec->place >= u->place_count)
        SW_FAIL(err, SW_E_INVALID, "unit '%s': place must be in [0, %zu), not %zu", spec->name,
                u->place_count, spec->place);
    unit->place = spec->place;
    unit->data = spec->data;
    unit->name = malloc(name_bytes);
    unit->runs = malloc(bytes + 1);
    unit->rows = calloc(row_count + 1, sizeof *unit->rows);
    if (!unit->name || !unit->runs || !unit->rows)
        SW_FAIL(err, SW_E_MEMORY, "unit '%s': no memory for %zu runs", spec->name, spec->run_count);
    memcpy(unit->name, spec->name, name_bytes);
    memcpy(unit->runs, spec->runs, bytes);
    for (size_t i = 0; i < spec->run_count; ++i)
        unit->uses_home |= spec->runs[i].is_home && !spec->runs[i].rows;
    unit->run_count = spec->run_count;
    sw_device_unit_rows *rows = unit->rows;
    for (size_t i = 0; i < unit->run_count; rows += unit->runs[i++].row_count)
        if (unit->runs[i].rows) {
            memcpy(rows, unit->runs[i].rows, unit->runs[i].row_count * sizeof *rows);
            unit->runs[i].rows = rows;
        }
    return u->comm->device->ops->event_create(u->comm->device, &unit->whole, err);
}

static sw_status create_all(sw_device_units *u, const sw_device_unit_spec *specs, sw_error *err)
{
    sw_device *device = u->comm->device;
    bool has_home = false;
    u->unit = calloc(u->count + 1, sizeof *u->unit);
    u->place = calloc(u->place_count + 1, sizeof *u->place);
    if (!u->unit || !u->place)
        SW_FAIL(err, SW_E_MEMORY, "device units: no memory for %zu units", u->count);
    for (size_t p = 0; p < u->place_count; ++p) {
        u->place[p].holder = SW_DEVICE_UNIT_NONE;
        SW_TRY(device->ops->event_create(device, &u->place[p].left, err));
    }
    for (size_t i = 0; i < u->count; ++i) {
        SW_TRY(create_unit(u, &u->unit[i], &specs[i], err));
        for (size_t k = 0; k < specs[i].run_count; ++k)
            has_home |= specs[i].runs[k].is_home;
    }
    if (!has_home)
        return SW_OK;
    SW_TRY(device->ops->stream_create(device, false, &u->home, err));
    return device->ops->event_create(device, &u->idle, err);
}

sw_status sw_device_units_create(sw_device_comm *comm, size_t place_count, void *beside,
                                 const sw_device_unit_spec *specs, size_t count,
                                 sw_device_units **units, sw_error *err)
{
    if (!comm->peers)
        SW_FAIL(err, SW_E_STATE, "device units: the communicator is not connected");
    sw_device_units *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "device units: no memory for %zu bytes", sizeof *made);
    *made = (sw_device_units){
        .comm = comm, .count = count, .place_count = place_count, .beside = beside};
    sw_status status = create_all(made, specs, err);
    if (status != SW_OK) {
        sw_device_units_destroy(made);
        return status;
    }
    *units = made;
    return SW_OK;
}

/* Wait until no slice at home is read any longer. */
static void leave_home(const sw_device_units *u)
{
    sw_device *device = u->comm->device;
    sw_stream *const streams[] = {u->home, u->comm->stream};
    for (size_t i = 0; u->idle && i < sizeof streams / sizeof *streams; ++i)
        if (device->ops->event_record(device, u->idle, streams[i], NULL) == SW_OK)
            sw_device_comm_await(u->comm, u->idle, "the copies of parameters in host memory");
    device->ops->event_destroy(device, u->idle);
    device->ops->stream_destroy(device, u->home);
}

void sw_device_units_destroy(sw_device_units *u)
{
    if (!u)
        return;
    sw_device *device = u->comm->device;
    leave_home(u);
    for (size_t i = 0; u->unit && i < u->count; ++i) {
        device_unit *unit = &u->unit[i];
        if (unit->state == SW_SHARD_GATHERING) /* the caller may reuse its place next */
            sw_device_comm_await(u->comm, unit->whole, "the gathering of a unit");
        device->ops->event_destroy(device, unit->whole);
        free(unit->name);
        free(unit->runs);
        free(unit->rows);
    }
    for (size_t p = 0; u->place && p < u->place_count; ++p)
        device->ops->event_destroy(device, u->place[p].left);
    free(u->unit);
    free(u->place);
    free(u);
}

void sw_device_unit_keep_near(sw_device_units *u, size_t unit, sw_device_comm *near, void *part,
                              size_t part_bytes)
{
    u->unit[unit].near = near;
    u->unit[unit].part = part;
    u->unit[unit].part_bytes = part_bytes;
}

/* ---- seeing ---- */

sw_shard_state sw_device_unit_state(const sw_device_units *u, size_t unit)
{
    return u->unit[unit].state;
}

size_t sw_device_unit_holder(const sw_device_units *u, size_t unit)
{
    return u->place[u->unit[unit].place].holder;
}

bool sw_device_unit_is_apart(const sw_device_units *u, size_t unit)
{
    return u->unit[unit].is_apart;
}

uint32_t sw_device_units_digest(const sw_device_units *u)
{
    return u->digest;
}

sw_unit_way sw_device_unit_way(const sw_device_units *u, size_t index, bool apart)
{
    const device_unit *unit = &u->unit[index];
    size_t holder = sw_device_unit_holder(u, index);
    if (unit->state == SW_SHARD_GATHERING)
        return SW_UNIT_TAKE;
    if (apart || (!unit->data && unit->run_count))
        return SW_UNIT_APART;
    return holder == SW_DEVICE_UNIT_NONE || u->unit[holder].state == SW_SHARD_GATHERING
               ? SW_UNIT_GATHER
               : SW_UNIT_BLOCKED;
}

sw_device_units_stats sw_device_units_get_stats(const sw_device_units *u)
{
    return u->stats;
}

/* ---- gathering ---- */

static bool is_cast(const sw_device_unit_run *run)
{
    return run->slice_dtype != run->dtype;
}

/* Return where the slices of a run are gathered, for a unit at `data`. */
static char *target_of(const sw_device_units *u, const sw_device_unit_run *run, char *data)
{
    return (run->rows ? u->beside : data) + run->offset_bytes;
}

static char *own_place(const sw_device_units *u, const sw_device_unit_run *run, char *data)
{
    return target_of(u, run, data) + (size_t)u->comm->peers->rank * run->slice_bytes;
}

/* Return the stream that brings a slice into its place. */
static sw_stream *stream_of(const sw_device_units *u, const sw_device_unit_run *run)
{
    return run->is_home && !run->rows ? u->home : u->comm->stream;
}

static sw_status cast_run(sw_device_units *u, const sw_device_unit_run *run, char *data,
                          sw_error *err)
{
    const sw_cast_args args = {.to = own_place(u, run, data),
                               .from = run->slice,
                               .numel = run->slice_bytes / sw_dtype_size_bytes(run->dtype),
                               .scale = 1.0f,
                               .to_dtype = (int)run->dtype,
                               .from_dtype = (int)run->slice_dtype};
    return sw_kernel_launch(&u->comm->kernels, SW_KERNEL_CAST, &args, stream_of(u, run), err);
}

static sw_status copy_run(sw_device_units *u, const sw_device_unit_run *run, char *data,
                          sw_error *err)
{
    sw_device *device = u->comm->device;
    return device->ops->copy_async(device, own_place(u, run, data), run->slice, run->slice_bytes,
                                   stream_of(u, run), err);
}

/* Return true if a run's slice is sent from its place in the unit, where it is brought first.
 * Memory apart from the unit's place is not registered, so the slices sent to it must not be
 * either: all ranks pass registered memory or none. */
static bool is_brought(const device_unit *unit, const sw_device_unit_run *run, const char *data)
{
    return is_cast(run) || run->is_home || (data != unit->data && !run->rows);
}

/* Bring slices into their places in a unit at `data`, before they are gathered there. */
static sw_status bring_slices(sw_device_units *u, const device_unit *unit, char *data,
                              sw_error *err)
{
    for (size_t i = 0; i < unit->run_count; ++i) {
        const sw_device_unit_run *run = &unit->runs[i];
        if (!is_brought(unit, run, data))
            continue;
        SW_TRY((is_cast(run) ? cast_run : copy_run)(u, run, data, err));
        if (run->is_home)
            u->stats.home_bytes += run->slice_bytes / sw_dtype_size_bytes(run->dtype) *
                                   sw_dtype_size_bytes(run->slice_dtype);
    }
    if (unit->uses_home)
        SW_TRY(sw_device_comm_follow(u->comm, u->comm->stream, u->home, err));
    return SW_OK;
}

static sw_status gather_runs(sw_device_units *u, const device_unit *unit, char *data, size_t begin,
                             size_t end, sw_error *err)
{
    sw_peers *peers = u->comm->peers;
    sw_status status = SW_OK;
    SW_TRY(sw_peers_group_begin(peers, err));
    for (size_t i = begin; i < end && status == SW_OK; ++i) {
        const sw_device_unit_run *run = &unit->runs[i];
        const void *slice = is_brought(unit, run, data) ? own_place(u, run, data) : run->slice;
        status = sw_peers_gather_slices(peers, slice, target_of(u, run, data), run->slice_bytes,
                                        u->comm->stream, err);
        u->stats.bytes += run->slice_bytes * (size_t)peers->world_size;
    }
    /* Close the group even after a failure, or the thread's next group would join it. */
    sw_status ended = sw_peers_group_end(peers, status == SW_OK ? err : NULL);
    return status != SW_OK ? status : ended;
}

static sw_status launch_pack(sw_device_units *u, sw_pack_args *args, sw_error *err)
{
    if (args->segment_count == 0)
        return SW_OK;
    SW_TRY(sw_kernel_launch(&u->comm->kernels, SW_KERNEL_PACK, args, u->comm->stream, err));
    args->segment_count = 0;
    return SW_OK;
}

/* Copy the parameters by rows out of the memory beside, chunk after chunk. */
static sw_status copy_out(sw_device_units *u, const device_unit *unit, char *data, sw_error *err)
{
    sw_pack_args args;
    args.verdict = args.factor = NULL;
    args.converts = args.segment_count = 0;
    for (size_t i = 0; i < unit->run_count; ++i)
        for (size_t k = 0; k < unit->runs[i].row_count; ++k) {
            const sw_device_unit_run *run = &unit->runs[i];
            const sw_device_unit_rows *rows = &run->rows[k];
            if (rows->size_bytes == 0)
                continue;
            size_t pieces = (rows->size_bytes + rows->chunk_bytes - 1) / rows->chunk_bytes;
            args.segment[args.segment_count++] =
                (sw_pack_segment){.to = data + rows->offset_bytes,
                                  .from = target_of(u, run, data) + rows->begin_bytes,
                                  .size_bytes = rows->size_bytes,
                                  .piece_count = pieces,
                                  .piece_bytes = rows->chunk_bytes,
                                  .to_pitch = rows->chunk_bytes,
                                  .from_pitch = run->slice_bytes};
            if (args.segment_count == SW_PACK_SEGMENT_MAX)
                SW_TRY(launch_pack(u, &args, err));
        }
    return launch_pack(u, &args, err);
}

/* Gather the slices of a unit at `data`; those by rows beside, from where copy_out takes them. */
static sw_status gather_slices(sw_device_units *u, const device_unit *unit, char *data,
                               sw_error *err)
{
    const uint32_t number = (uint32_t)(unit - u->unit);
    u->digest = sw_crc32c(u->digest, &number, sizeof number);
    SW_TRY(bring_slices(u, unit, data, err));
    for (size_t i = 0; i < unit->run_count; i += CALLS_PER_GROUP) {
        size_t left = unit->run_count - i;
        SW_TRY(gather_runs(u, unit, data, i, i + (left < CALLS_PER_GROUP ? left : CALLS_PER_GROUP),
                           err));
    }
    u->stats.gathers++;
    return SW_OK;
}

/* Return true if all slices of a unit arrive beside: only copy_out writes to its place. */
static bool arrives_beside(const device_unit *unit)
{
    for (size_t i = 0; i < unit->run_count; ++i)
        if (!unit->runs[i].rows)
            return false;
    return true;
}

/* Record the event of the end of a gather, of slices or from ranks nearby. */
static sw_status end_gather(sw_device_units *u, const device_unit *unit, bool near, sw_error *err)
{
    if (!near)
        SW_TRY(copy_out(u, unit, unit->data, err));
    return u->comm->device->ops->event_record(u->comm->device, unit->whole, u->comm->stream, err);
}

/* Gather a unit into its place, whatever was in it before. */
static sw_status gather_in_place(sw_device_units *u, device_unit *unit, sw_error *err)
{
    SW_TRY(gather_slices(u, unit, unit->data, err));
    return end_gather(u, unit, false, err);
}

/* Move a unit to GATHERING, if its place is free or holds this unit. */
static sw_status begin_gather(sw_device_units *u, size_t index, sw_error *err)
{
    device_unit *unit = &u->unit[index];
    size_t *holder = &u->place[unit->place].holder;
    if (!unit->data && unit->run_count)
        SW_FAIL(err, SW_E_STATE, "unit '%s' cannot be gathered but apart: it has no place",
                unit->name);
    if (unit->state == SW_SHARD_SHARDED && *holder != SW_DEVICE_UNIT_NONE)
        SW_FAIL(err, SW_E_STATE, "unit '%s' cannot be gathered: unit '%s' is in its place",
                unit->name, u->unit[*holder].name);
    SW_TRY(sw_shard_move(&unit->state, SW_SHARD_GATHER, unit->name, err));
    *holder = index;
    return SW_OK;
}

/* Gather a unit from the parts that ranks nearby keep, into its place as it lay there. */
static sw_status gather_near(sw_device_units *u, device_unit *unit, sw_error *err)
{
    const uint32_t number = ~(uint32_t)(unit - u->unit);
    if (!unit->near->peers)
        SW_FAIL(err, SW_E_STATE, "unit '%s': the communicator of ranks nearby was closed",
                unit->name);
    u->digest = sw_crc32c(u->digest, &number, sizeof number);
    SW_TRY(sw_peers_gather_slices(unit->near->peers, unit->part, unit->data, unit->part_bytes,
                                  u->comm->stream, err));
    u->stats.gathers++;
    u->stats.near_gathers++;
    u->stats.bytes += unit->part_bytes * (size_t)unit->near->peers->world_size;
    unit->is_near = false;
    unit->was_near = true;
    return SW_OK;
}

/* Write a unit to its place after all work on the unit that was there. Slices that arrive beside
 * travel meanwhile. */
static sw_status gather_next(sw_device_units *u, device_unit *unit, sw_error *err)
{
    sw_device *device = u->comm->device;
    sw_event *left = u->place[unit->place].left;
    bool is_early = arrives_beside(unit) && !unit->is_near;
    if (unit->uses_home)
        SW_TRY(device->ops->stream_wait(device, u->home, left, err));
    if (is_early)
        SW_TRY(gather_slices(u, unit, unit->data, err));
    SW_TRY(device->ops->stream_wait(device, u->comm->stream, left, err));
    const bool is_near = unit->is_near;
    if (is_near)
        SW_TRY(gather_near(u, unit, err));
    else if (!is_early)
        SW_TRY(gather_slices(u, unit, unit->data, err));
    SW_TRY(end_gather(u, unit, is_near, err));
    return sw_device_comm_mark(u->comm, err);
}

typedef sw_status gather_fn(sw_device_units *u, device_unit *unit, sw_error *err);

static sw_status gather_by(sw_device_units *u, size_t index, gather_fn *gather, sw_error *err)
{
    device_unit *unit = &u->unit[index];
    SW_TRY(begin_gather(u, index, err));
    sw_status status = gather(u, unit, err);
    if (status != SW_OK) { /* enqueued gathers still run, or the communicator has failed */
        (void)!sw_shard_move(&unit->state, SW_SHARD_FAIL, unit->name, NULL);
        u->place[unit->place].holder = SW_DEVICE_UNIT_NONE;
    }
    return status;
}

sw_status sw_device_unit_gather(sw_device_units *u, size_t index, sw_error *err)
{
    return gather_by(u, index, gather_next, err);
}

/* Move a unit to UNSHARDED once a stream or the host has waited for it. If it is UNSHARDED already,
 * its event is still valid. */
static sw_status state_when_whole(const device_unit *unit, sw_shard_state *state, sw_error *err)
{
    *state = unit->state;
    return *state == SW_SHARD_UNSHARDED ? SW_OK
                                        : sw_shard_move(state, SW_SHARD_COMPLETE, unit->name, err);
}

sw_status sw_device_unit_take(sw_device_units *u, size_t index, sw_stream *user, sw_error *err)
{
    sw_device *device = u->comm->device;
    device_unit *unit = &u->unit[index];
    sw_shard_state taken;
    SW_TRY(sw_device_refuse_capture(device, user, "a unit", err));
    SW_TRY(state_when_whole(unit, &taken, err));
    SW_TRY(device->ops->stream_wait(device, user, unit->whole, err));
    unit->state = taken; /* only now: on failure `user` has not waited for the unit */
    return SW_OK;
}

sw_status sw_device_unit_wait(sw_device_units *u, size_t index, sw_error *err)
{
    sw_device *device = u->comm->device;
    device_unit *unit = &u->unit[index];
    sw_shard_state taken;
    SW_TRY(state_when_whole(unit, &taken, err));
    SW_TRY(device->ops->event_wait(device, unit->whole, u->comm->timeout_ns, "a unit", err));
    unit->state = taken;
    return SW_OK;
}

sw_status sw_device_unit_arrive(sw_device_units *u, size_t index, sw_stream *user, sw_error *err)
{
    if (u->unit[index].state != SW_SHARD_GATHERING)
        return SW_OK;
    sw_status status = sw_device_unit_take(u, index, user, err);
    if (status == SW_OK && user != u->writer) /* nothing orders that stream's next reads after */
        status = sw_device_unit_take(u, index, u->writer, err);
    /* A captured stream must not wait for work outside of its graph. */
    return status == SW_E_UNSUPPORTED ? sw_device_unit_wait(u, index, err) : status;
}

sw_status sw_device_unit_release(sw_device_units *u, size_t index, sw_stream *user, sw_error *err)
{
    sw_device *device = u->comm->device;
    device_unit *unit = &u->unit[index];
    SW_TRY(sw_shard_move(&unit->state, SW_SHARD_RELEASE, unit->name, err));
    if (unit->is_apart) {
        unit->is_apart = false;
        return SW_OK;
    }
    u->place[unit->place].holder = SW_DEVICE_UNIT_NONE;
    u->stats.releases++;
    unit->is_near = unit->near && unit->near->peers && !unit->was_near;
    unit->was_near = false;
    if (unit->is_near)
        SW_TRY(device->ops->copy_async(
            device, unit->part, unit->data + (size_t)unit->near->peers->rank * unit->part_bytes,
            unit->part_bytes, user, err));
    return device->ops->event_record(device, u->place[unit->place].left, user, err);
}

sw_status sw_device_unit_gather_apart(sw_device_units *u, size_t index, void *data, sw_stream *user,
                                      sw_error *err)
{
    device_unit *unit = &u->unit[index];
    sw_shard_state gathered = unit->state;
    SW_TRY(sw_device_refuse_capture(u->comm->device, user, "a unit", err));
    SW_TRY(sw_shard_move(&gathered, SW_SHARD_GATHER, unit->name, err));
    SW_TRY(sw_shard_move(&gathered, SW_SHARD_COMPLETE, unit->name, err));
    SW_TRY(sw_device_comm_follow(u->comm, u->comm->stream, user, err));
    if (unit->uses_home)
        SW_TRY(sw_device_comm_follow(u->comm, u->home, user, err));
    SW_TRY(gather_slices(u, unit, data, err));
    SW_TRY(copy_out(u, unit, data, err));
    SW_TRY(sw_device_comm_mark(u->comm, err));
    SW_TRY(sw_device_comm_follow(u->comm, user, u->comm->stream, err));
    unit->state = gathered;
    unit->is_apart = true;
    return SW_OK;
}

sw_status sw_device_units_drop_ahead(sw_device_units *u, sw_stream *user, sw_error *err)
{
    for (size_t i = 0; i < u->count; ++i)
        if (u->unit[i].state == SW_SHARD_GATHERING) {
            SW_TRY(sw_device_unit_take(u, i, user, err));
            SW_TRY(sw_device_unit_release(u, i, user, err));
        }
    return SW_OK;
}

sw_status sw_device_unit_make_whole(sw_device_units *u, size_t index, sw_stream *user,
                                    sw_error *err)
{
    if (u->unit[index].state != SW_SHARD_GATHERING) {
        if (sw_device_unit_holder(u, index) != SW_DEVICE_UNIT_NONE)
            SW_TRY(sw_device_units_drop_ahead(u, user, err));
        SW_TRY(sw_device_unit_gather(u, index, err));
    }
    return sw_device_unit_take(u, index, user, err);
}

sw_status sw_device_units_follow(sw_device_units *u, sw_stream *user, sw_error *err)
{
    for (size_t i = 0; i < u->count; ++i)
        u->unit[i].is_near = u->unit[i].was_near = false;
    if (u->home)
        SW_TRY(sw_device_comm_follow(u->comm, u->home, user, err));
    return sw_device_comm_follow(u->comm, u->comm->stream, user, err);
}

sw_status sw_device_units_update(sw_device_units *u, sw_stream *user, sw_error *err)
{
    for (size_t i = 0; i < u->count; ++i)
        if (u->unit[i].state != SW_SHARD_SHARDED)
            SW_FAIL(err, SW_E_STATE, "unit '%s' is %s while its slices are written",
                    u->unit[i].name, sw_shard_state_name(u->unit[i].state));
    return sw_device_units_follow(u, user, err);
}

sw_status sw_device_units_gather_anew(sw_device_units *u, sw_stream *user, sw_error *err)
{
    SW_TRY(sw_device_refuse_capture(u->comm->device, user, "a gather of parameters", err));
    u->writer = user;
    SW_TRY(sw_device_comm_follow(u->comm, u->comm->stream, user, err));
    for (size_t i = 0; i < u->count; ++i) {
        device_unit *unit = &u->unit[i];
        if (unit->state == SW_SHARD_UNSHARDED) {
            SW_TRY(sw_shard_move(&unit->state, SW_SHARD_RELEASE, unit->name, err));
            u->place[unit->place].holder = SW_DEVICE_UNIT_NONE;
        }
        SW_TRY(gather_by(u, i, gather_in_place, err));
    }
    return sw_device_comm_mark(u->comm, err);
}
