/* test_device_units.c - units on simulated GPUs: computation reads the bytes of the slices, for any
 * schedule.
 *
 * Laws: over 4 steps of forward and backward, with one unit gathered ahead of the one that is read,
 * every read of a unit finds the bytes that all ranks' slices got before the step, in its place and
 * apart. A unit gathered ahead in vain disturbs nothing. No schedule gives a race, a read of
 * unwritten bytes, or a leak; no step waits on the host or allocates; destroying lets pending
 * gathers end first. A gather into a place in use is refused, and so is an update while a unit is
 * unsharded. Units 1 and 4 have float32 slices, which a gather casts to bfloat16. Units 0 and 2
 * also lie in memory of their own, where a step writes this rank's slices in place, and all are
 * gathered anew behind it. The first buckets of units 3 and 4 are cut by rows, unevenly and with
 * empty chunks: their parameters are whole in the unit, for one launch more. Slices of all units but
 * unit 0 are at home in pinned memory, which is freed as soon as the units are destroyed. A unit
 * without a place is refused by name. Each driver call that fails ends in a named error and leaves
 * nothing.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_ranks.h"
#include "zero/device_home.h"
#include "zero/device_units.h"

enum {
    UNITS = 5,
    PLACES = 3,
    RUNS = 2,
    STEPS = 4,
    SEEDS = 5,
    FAILURE = 999,
    SLICE_MAX = 1024,
    KEPT = 2
};
static const int64_t TIMEOUT_NS = 2000000000;

/* Unit 0 has its own place, as the outermost unit has; the others take turns. */
static const size_t place_of[UNITS] = {0, 1, 2, 1, 2};
static const size_t slice_bytes[UNITS][RUNS] = {
    {128, 256}, {512, 128}, {128, 128}, {256, 0}, {384, 128}};

static const size_t kept_unit[KEPT] = {0, 2};

static const bool has_rows[UNITS] = {false, false, false, true, true};
/* By rows: chunks of parameters in a slice, as many as fit. The last of the first one is 30 bytes
 * shorter; of the second one all but the first are empty. */
enum { ROWS = 3 };
static const size_t chunk_begin[ROWS] = {0, 128, 256}, chunk_bytes[ROWS] = {100, 64, 128};

static const bool is_cast[UNITS] = {false, true, false, false, true};
static const bool is_home[UNITS] = {false, true, true, true, true};

enum { LEAVES_AT_ONCE = 1, LEAVES_HOME };

typedef struct training {
    long fail_nth; /* the call of rank 0 that fails; 0: none */
    int leaves; /* 0: not before its work has ended */
    bool failed[GPU_RANKS_MAX];
    char message[GPU_RANKS_MAX][SW_ERROR_MESSAGE_BYTES];
    int wrong; /* bytes */
} training;

typedef struct loop {
    gpu_rank *self;
    training *run;
    sw_device_units *units, *whole; /* `whole`: kept_unit, in memory of their own */
    sw_stream *compute, *optimizer;
    sw_event *read, *stepped;
    void *slice[UNITS][RUNS], *place[PLACES], *apart, *beside, *kept[KEPT];
    sw_device_home home[UNITS][RUNS]; /* the memory of slices at home */
    unsigned char *pinned, *seen; /* of every slice; of every unit twice, and of one apart */
    size_t unit_bytes[UNITS], seen_bytes;
} loop;

static unsigned char value_of(int rank, int step, size_t unit, size_t run, size_t i)
{
    return (unsigned char)(1 + (size_t)rank * 59 + (size_t)step * 31 + unit * 17 + run * 7 + i * 3);
}

/* Byte i of an element that is a float32, or its upper half, a bfloat16. */
static unsigned char byte_of_float(unsigned char value, size_t byte, bool is_half)
{
    float wide = value; /* at most 8 bits: exact in either */
    unsigned char bytes[sizeof wide];
    memcpy(bytes, &wide, sizeof wide);
    return bytes[byte + (is_half ? sizeof wide / 2 : 0)];
}

static unsigned char slice_byte(int rank, int step, size_t unit, size_t run, size_t i)
{
    return is_cast[unit] ? byte_of_float(value_of(rank, step, unit, run, i / 4), i % 4, false)
                         : value_of(rank, step, unit, run, i);
}

static unsigned char unit_byte(int rank, int step, size_t unit, size_t run, size_t i)
{
    return is_cast[unit] ? byte_of_float(value_of(rank, step, unit, run, i / 2), i % 2, true)
                         : value_of(rank, step, unit, run, i);
}

/* Fill in the parameters of a unit's first bucket, by rows. Return how many there are, and the end
 * of the last one in the unit. */
static size_t rows_of(size_t unit, int world_size, sw_device_unit_rows *rows, size_t *end)
{
    const size_t ranks = (size_t)world_size;
    const size_t sizes[ROWS] = {ranks * chunk_bytes[0] - 30, chunk_bytes[1],
                                ranks * chunk_bytes[2]};
    size_t count = 0;
    *end = 0;
    for (; has_rows[unit] && count < ROWS && chunk_begin[count] < slice_bytes[unit][0]; ++count) {
        rows[count] = (sw_device_unit_rows){.begin_bytes = chunk_begin[count],
                                            .offset_bytes = *end,
                                            .size_bytes = sizes[count],
                                            .chunk_bytes = chunk_bytes[count]};
        *end += (sizes[count] + 127) / 128 * 128;
    }
    return count;
}

static size_t offset_of(size_t unit, size_t run, int world_size)
{
    sw_device_unit_rows rows[ROWS];
    size_t end;
    size_t count = rows_of(unit, world_size, rows, &end);
    return run == 0 ? 0 : count > 0 ? end : slice_bytes[unit][0] * (size_t)world_size;
}

static sw_status allocate(loop *l, size_t bytes, void **memory)
{
    sw_device *device = l->self->device;
    return device->ops->memory_alloc(device, bytes, memory, &l->self->err);
}

static sw_status prepare(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    size_t world_size = (size_t)l->self->world_size, widest = 2 * SLICE_MAX * world_size;
    void *memory;
    SW_TRY(device->ops->stream_create(device, false, &l->compute, err));
    SW_TRY(device->ops->stream_create(device, false, &l->optimizer, err));
    SW_TRY(device->ops->event_create(device, &l->read, err));
    SW_TRY(device->ops->event_create(device, &l->stepped, err));
    for (int p = 0; p < PLACES; ++p)
        SW_TRY(allocate(l, widest, &l->place[p]));
    SW_TRY(allocate(l, widest, &l->apart));
    SW_TRY(allocate(l, widest, &l->beside));
    for (int k = 0; k < KEPT; ++k)
        SW_TRY(allocate(l, widest, &l->kept[k]));
    SW_TRY(device->ops->pinned_alloc(device, (size_t)UNITS * RUNS * SLICE_MAX, &memory, err));
    l->pinned = memory;
    SW_TRY(device->ops->pinned_alloc(device, 3 * UNITS * widest, &memory, err));
    l->seen = memory;
    for (size_t u = 0; u < UNITS; ++u) {
        l->unit_bytes[u] =
            offset_of(u, 1, l->self->world_size) + slice_bytes[u][1] * world_size;
        for (int k = 0; k < RUNS; ++k) {
            if (is_home[u])
                SW_TRY(sw_device_home_init(&l->home[u][k], l->self->all, SLICE_MAX, err));
            else
                SW_TRY(allocate(l, SLICE_MAX, &l->slice[u][k]));
            if (is_home[u]) {
                l->slice[u][k] = l->home[u][k].memory;
                gpu_sim->host_access(l->slice[u][k], SLICE_MAX, SW_ACCESS_WRITE, "zeros");
            }
        }
    }
    return SW_OK;
}

static sw_status create(loop *l)
{
    static const char *const names[UNITS] = {"", "1", "2", "3", "4"};
    sw_device_unit_run runs[UNITS][RUNS];
    sw_device_unit_spec specs[UNITS];
    sw_device_unit_rows rows[UNITS][ROWS];
    for (size_t u = 0; u < UNITS; ++u) {
        size_t end;
        for (size_t k = 0; k < RUNS; ++k)
            runs[u][k] =
                (sw_device_unit_run){.slice = l->slice[u][k],
                                     .is_home = is_home[u],
                                     .offset_bytes = offset_of(u, k, l->self->world_size),
                                     .slice_bytes = slice_bytes[u][k],
                                     .slice_dtype = SW_DTYPE_FLOAT32,
                                     .dtype = is_cast[u] ? SW_DTYPE_BFLOAT16 : SW_DTYPE_FLOAT32};
        runs[u][0].row_count = rows_of(u, l->self->world_size, rows[u], &end);
        if (runs[u][0].row_count > 0)
            runs[u][0].rows = rows[u];
        specs[u] = (sw_device_unit_spec){.name = names[u],
                                         .place = place_of[u],
                                         .data = l->place[place_of[u]],
                                         .runs = runs[u],
                                         .run_count = slice_bytes[u][1] ? RUNS : 1};
    }
    return sw_device_units_create(l->self->all, PLACES, l->beside, specs, UNITS, &l->units, &l->self->err);
}

static char *kept_slice(const loop *l, size_t kept, size_t run)
{
    size_t unit = kept_unit[kept];
    return (char *)l->kept[kept] + offset_of(unit, run, l->self->world_size) +
           (size_t)l->self->rank * slice_bytes[unit][run];
}

static sw_status create_kept(loop *l)
{
    static const char *const names[KEPT] = {"kept 0", "kept 2"};
    sw_device_unit_run runs[KEPT][RUNS];
    sw_device_unit_spec specs[KEPT];
    for (size_t n = 0; n < KEPT; ++n) {
        for (size_t k = 0; k < RUNS; ++k)
            runs[n][k] = (sw_device_unit_run){
                .slice = kept_slice(l, n, k),
                .offset_bytes = offset_of(kept_unit[n], k, l->self->world_size),
                .slice_bytes = slice_bytes[kept_unit[n]][k],
                .slice_dtype = SW_DTYPE_FLOAT32,
                .dtype = SW_DTYPE_FLOAT32,
            };
        specs[n] = (sw_device_unit_spec){
            .name = names[n], .place = n, .data = l->kept[n], .runs = runs[n], .run_count = RUNS};
    }
    return sw_device_units_create(l->self->all, KEPT, NULL, specs, KEPT, &l->whole, &l->self->err);
}

/* Write this rank's slices in place, and have the others' gathered behind that. */
static sw_status step_in_place(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    for (size_t n = 0; n < KEPT; ++n)
        for (size_t k = 0; k < RUNS; ++k)
            SW_TRY(device->ops->copy_async(device, kept_slice(l, n, k),
                                           l->pinned + (kept_unit[n] * RUNS + k) * SLICE_MAX,
                                           slice_bytes[kept_unit[n]][k], l->optimizer, err));
    SW_TRY(device->ops->event_record(device, l->stepped, l->optimizer, err));
    return sw_device_units_gather_anew(l->whole, l->optimizer, err);
}

static void choose_values(loop *l, int step)
{
    for (size_t u = 0; u < UNITS; ++u)
        for (size_t k = 0; k < RUNS; ++k) {
            unsigned char *values = l->pinned + (u * RUNS + k) * SLICE_MAX;
            for (size_t i = 0; i < slice_bytes[u][k] << is_cast[u]; ++i)
                values[i] = slice_byte(l->self->rank, step, u, k, i);
            gpu_sim->host_access(values, SLICE_MAX, SW_ACCESS_WRITE, "the test's values");
        }
}

/* Write the slices of this step on the optimizer's stream. */
static sw_status step_on_slices(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    for (size_t u = 0; u < UNITS; ++u)
        for (size_t k = 0; k < RUNS; ++k) {
            unsigned char *from = l->pinned + (u * RUNS + k) * SLICE_MAX;
            size_t bytes = slice_bytes[u][k] << is_cast[u];
            if (bytes)
                SW_TRY(device->ops->copy_async(device, l->slice[u][k], from, bytes, l->optimizer,
                                               err));
        }
    SW_TRY(device->ops->event_record(device, l->stepped, l->optimizer, err));
    return sw_device_units_update(l->units, l->optimizer, err);
}

static sw_status read_range(loop *l, const void *data, size_t begin, size_t end)
{
    sw_device *device = l->self->device;
    if (begin == end)
        return SW_OK;
    SW_TRY(device->ops->copy_async(device, l->seen + l->seen_bytes, (const char *)data + begin,
                                   end - begin, l->compute, &l->self->err));
    l->seen_bytes += end - begin;
    return SW_OK;
}

/* Copy a unit to pinned memory, as a computation reads it: not what lies between parameters. */
static sw_status read_unit(loop *l, size_t unit, const void *data)
{
    sw_device_unit_rows rows[ROWS];
    size_t begin;
    size_t count = rows_of(unit, l->self->world_size, rows, &begin);
    for (size_t p = 0; p < count; ++p)
        SW_TRY(read_range(l, data, rows[p].offset_bytes,
                          rows[p].offset_bytes + rows[p].size_bytes));
    return read_range(l, data, begin, l->unit_bytes[unit]);
}

static sw_status begin(loop *l, size_t unit)
{
    uint64_t launches = l->self->device->stats.launches;
    if (sw_device_unit_state(l->units, unit) != SW_SHARD_SHARDED)
        return SW_OK;
    SW_TRY(sw_device_unit_gather(l->units, unit, &l->self->err));
    launches = l->self->device->stats.launches - launches;
    check(launches == (is_cast[unit] ? RUNS : 0u) + has_rows[unit], "unit %zu: %llu launches", unit,
          (unsigned long long)launches);
    return SW_OK;
}

static sw_status use(loop *l, size_t unit)
{
    SW_TRY(sw_device_unit_take(l->units, unit, l->compute, &l->self->err));
    SW_TRY(read_unit(l, unit, l->place[place_of[unit]]));
    return sw_device_unit_release(l->units, unit, l->compute, &l->self->err);
}

/* Run forward and backward: each unit twice, while the next one is gathered. */
static sw_status pass(loop *l)
{
    for (size_t u = 0; u < UNITS; ++u) {
        SW_TRY(begin(l, u));
        if (u + 1 < UNITS)
            SW_TRY(begin(l, u + 1));
        SW_TRY(use(l, u));
    }
    for (size_t u = UNITS; u-- > 0;) {
        SW_TRY(begin(l, u));
        if (u > 0)
            SW_TRY(begin(l, u - 1));
        SW_TRY(use(l, u));
    }
    return SW_OK;
}

/* Gather a unit that is not needed, and another apart while its place is in use. */
static sw_status detours(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err, refused;
    SW_TRY(begin(l, 2));
    check(sw_device_unit_gather(l->units, 4, &refused) == SW_E_STATE &&
              strstr(refused.message, "unit '2' is in its place"),
          "a gather into a place in use was not refused: %s", refused.message);
    check(sw_device_units_update(l->units, l->optimizer, &refused) == SW_E_STATE &&
              strstr(refused.message, "'2' is gathering"),
          "an update beside an unsharded unit was not refused: %s", refused.message);
    check(sw_device_unit_holder(l->units, 2) == 2, "the place has no holder");
    SW_TRY(device->ops->fill_async(device, l->apart, 0, l->unit_bytes[4], l->compute, err));
    SW_TRY(sw_device_unit_gather_apart(l->units, 4, l->apart, l->compute, err));
    SW_TRY(read_unit(l, 4, l->apart));
    check(sw_device_unit_is_apart(l->units, 4), "unit 4 does not lie apart");
    SW_TRY(sw_device_unit_release(l->units, 4, l->compute, err));
    SW_TRY(sw_device_unit_gather_apart(l->units, 3, l->apart, l->compute, err));
    SW_TRY(read_unit(l, 3, l->apart));
    SW_TRY(sw_device_unit_release(l->units, 3, l->compute, err));
    SW_TRY(sw_device_unit_take(l->units, 2, l->compute, err));
    return sw_device_unit_release(l->units, 2, l->compute, err);
}

/* The last first: gathers end in their own order. */
static sw_status read_kept(loop *l)
{
    for (size_t n = KEPT; n-- > 0;) {
        SW_TRY(sw_device_unit_take(l->whole, n, l->compute, &l->self->err));
        SW_TRY(read_unit(l, kept_unit[n], l->kept[n]));
    }
    return SW_OK;
}

static void compare(loop *l, int step, const size_t *order, size_t count)
{
    const unsigned char *seen = l->seen;
    gpu_sim->host_access(l->seen, l->seen_bytes, SW_ACCESS_READ, "the test's look");
    for (size_t n = 0; n < count; ++n) {
        sw_device_unit_rows rows[ROWS];
        size_t end, row_count = rows_of(order[n], l->self->world_size, rows, &end);
        for (size_t p = 0; p < row_count; ++p)
            for (size_t i = 0; i < rows[p].size_bytes; ++i)
                l->run->wrong +=
                    *seen++ != unit_byte((int)(i / rows[p].chunk_bytes), step, order[n], 0,
                                         rows[p].begin_bytes + i % rows[p].chunk_bytes);
        for (size_t k = row_count > 0; k < RUNS; ++k)
            for (int r = 0; r < l->self->world_size; ++r)
                for (size_t i = 0; i < slice_bytes[order[n]][k]; ++i)
                    l->run->wrong += *seen++ != unit_byte(r, step, order[n], k, i);
    }
    check(seen == l->seen + l->seen_bytes, "the test reads other units than it compares");
    l->seen_bytes = 0;
}

/* Wait for reads as the engine does. A wait until the deadline that ignores a failed peer would
 * keep that peer's memory open for longer than the peer waits at its end, which would leave it
 * behind. */
static sw_status await_reads(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    SW_TRY(device->ops->event_record(device, l->read, l->compute, err));
    SW_TRY(device->ops->stream_wait(device, l->optimizer, l->read, err)); /* as means do */
    return sw_peers_wait(l->self->comm, l->read, "the test's reads", err);
}

/* Return the bytes of the slices that a step's gathers bring: each unit's twice in pass(), and those
 * of units 2, 3 and 4 once more in detours(). */
static uint64_t home_bytes(void)
{
    uint64_t bytes = 0;
    for (size_t u = 0; u < UNITS; ++u)
        for (size_t k = 0; k < RUNS; ++k)
            bytes += is_home[u] ? (u < 2 ? 2u : 3u) * (slice_bytes[u][k] << is_cast[u]) : 0u;
    return bytes;
}

static sw_status train_step(loop *l, int step)
{
    static const size_t order[] = {0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 4, 3, 2, 0};
    sw_device *device = l->self->device;
    uint64_t waits = device->stats.host_waits, allocations = device->stats.allocations;
    choose_values(l, step);
    if (step % 2) /* each of the two orders streams by itself */
        SW_TRY(step_in_place(l));
    SW_TRY(step_on_slices(l));
    if (step % 2 == 0)
        SW_TRY(step_in_place(l));
    SW_TRY(pass(l));
    SW_TRY(detours(l));
    SW_TRY(read_kept(l));
    check(device->stats.host_waits == waits, "a step waits on the host");
    check(device->stats.allocations == allocations, "a step allocates");
    check(sw_device_units_get_stats(l->units).home_bytes == (uint64_t)(step + 1) * home_bytes(),
          "%llu bytes came from home", (unsigned long long)sw_device_units_get_stats(l->units).home_bytes);
    SW_TRY(await_reads(l));
    SW_TRY(sw_peers_wait(l->self->comm, l->stepped, "the test's slices", &l->self->err));
    compare(l, step, order, sizeof order / sizeof *order);
    return SW_OK;
}

/* Units that the host has waited for may be read on any stream. */
static sw_status wait_on_host(loop *l, int step)
{
    SW_TRY(sw_device_units_gather_anew(l->whole, l->optimizer, &l->self->err));
    for (size_t n = 0; n < KEPT; ++n) {
        SW_TRY(sw_device_unit_wait(l->whole, n, &l->self->err));
        SW_TRY(read_unit(l, kept_unit[n], l->kept[n]));
    }
    SW_TRY(await_reads(l));
    compare(l, step, kept_unit, KEPT);
    return SW_OK;
}

static sw_status refuse_without_place(loop *l)
{
    sw_error refused;
    sw_device_units *units;
    const sw_device_unit_run run = {.slice = l->slice[0][0], .slice_bytes = slice_bytes[0][0]};
    const sw_device_unit_spec spec = {.name = "lone", .runs = &run, .run_count = 1};
    SW_TRY(sw_device_units_create(l->self->all, PLACES, NULL, &spec, 1, &units, &l->self->err));
    check(sw_device_unit_gather(units, 0, &refused) == SW_E_STATE &&
              strstr(refused.message, "'lone' cannot be gathered but apart: it has no place"),
          "a gather without a place was not refused: %s", refused.message);
    sw_device_units_destroy(units);
    return SW_OK;
}

/* Gather slices at home, and write to one as torch does: all are freed next. */
static sw_status leave_home(loop *l)
{
    sw_device *device = l->self->device;
    for (size_t unit = 2; unit < 4; ++unit) {
        SW_TRY(begin(l, unit));
        SW_TRY(sw_device_unit_take(l->units, unit, l->compute, &l->self->err));
        SW_TRY(sw_device_unit_release(l->units, unit, l->compute, &l->self->err));
    }
    return device->ops->fill_async(device, l->slice[1][0], 1, slice_bytes[1][0], l->optimizer,
                                   &l->self->err);
}

static sw_status train(loop *l)
{
    SW_TRY(prepare(l));
    SW_TRY(create(l));
    SW_TRY(create_kept(l));
    for (int step = 0; step < STEPS; ++step)
        SW_TRY(train_step(l, step));
    if (!l->run->leaves)
        return wait_on_host(l, STEPS - 1);
    if (l->run->leaves == LEAVES_HOME)
        return leave_home(l);
    /* The slices stay until the communicator has ended. */
    SW_TRY(sw_device_unit_gather(l->units, 1, &l->self->err));
    return sw_device_units_gather_anew(l->whole, l->optimizer, &l->self->err);
}

/* Free places once the units are destroyed, and slices once all enqueued work has run. */
static void tear_down(loop *l)
{
    sw_device *device = l->self->device;
    sw_device_units_destroy(l->whole);
    for (int k = 0; k < KEPT && l->run->leaves == LEAVES_AT_ONCE && !l->run->failed[l->self->rank]; ++k) {
        device->ops->memory_free(device, l->kept[k]);
        l->kept[k] = NULL;
    }
    sw_device_units_destroy(l->units);
    for (int u = 0; u < UNITS; ++u)
        for (int k = 0; k < RUNS; ++k)
            if (l->home[u][k].comm)
                sw_device_home_fini(&l->home[u][k], l->optimizer);
    if ((l->run->failed[l->self->rank] || l->run->leaves == LEAVES_HOME) && l->read && l->optimizer) {
        (void)!device->ops->event_record(device, l->read, l->self->all->stream, NULL);
        (void)!device->ops->event_wait(device, l->read, TIMEOUT_NS, "the test's end", NULL);
        (void)!device->ops->event_record(device, l->read, l->compute, NULL);
        (void)!device->ops->event_wait(device, l->read, TIMEOUT_NS, "the test's end", NULL);
        (void)!device->ops->event_record(device, l->read, l->optimizer, NULL);
        (void)!device->ops->event_wait(device, l->read, TIMEOUT_NS, "the test's end", NULL);
    }
    for (int p = 0; p < PLACES; ++p)
        device->ops->memory_free(device, l->place[p]);
    device->ops->memory_free(device, l->apart);
    device->ops->memory_free(device, l->beside);
    for (int k = 0; k < KEPT; ++k)
        device->ops->memory_free(device, l->kept[k]);
    for (int u = 0; u < UNITS; ++u)
        for (int k = 0; k < RUNS; ++k)
            device->ops->memory_free(device, is_home[u] ? NULL : l->slice[u][k]);
    device->ops->pinned_free(device, l->pinned);
    device->ops->pinned_free(device, l->seen);
    device->ops->event_destroy(device, l->read);
    device->ops->event_destroy(device, l->stepped);
    device->ops->stream_destroy(device, l->compute);
    device->ops->stream_destroy(device, l->optimizer);
}

static bool train_rank(gpu_rank *self)
{
    training *run = self->context;
    loop l = {.self = self, .run = run};
    bool is_alone = self->world_size == 1;
    if (self->rank == 0 && is_alone)
        self->sim->fail_call(0, run->fail_nth, FAILURE);
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (self->rank == 0 && !is_alone) /* before, hosts exchange errors by themselves */
        self->sim->fail_call(0, run->fail_nth, FAILURE);
    if (status == SW_OK)
        status = train(&l);
    self->sim->fail_call(self->rank, 0, 0);
    if (status == SW_OK)
        status = refuse_without_place(&l);
    if (status != SW_OK && !is_alone && self->comm)
        sw_peers_abort(self->comm, &self->err);
    run->failed[self->rank] = status != SW_OK;
    if (self->device)
        tear_down(&l);
    snprintf(run->message[self->rank], sizeof run->message[0], "%s", self->err.message);
    gpu_rank_close(self);
    return status == SW_OK;
}

static void check_training(int world_size, sim_policy policy, uint64_t seed, int leaves)
{
    static training run;
    char label[96];
    snprintf(label, sizeof label, "W = %d, policy %d, seed %d%s", world_size, (int)policy,
             (int)seed, leaves ? ", left early" : "");
    run = (training){.leaves = leaves};
    check(gpu_ranks_run(world_size, policy, seed, train_rank, &run), "%s: %s", label,
          run.message[0]);
    check(run.wrong == 0, "%s: %d wrong bytes", label, run.wrong);
    gpu_expect_clean(label);
}

static bool fail_at(long nth, void *context)
{
    training *run = context;
    *run = (training){.fail_nth = nth};
    return gpu_ranks_run(1, SIM_EAGER, 1, train_rank, run);
}

static bool fail_first_of_three(long nth, void *context)
{
    training *run = context;
    *run = (training){.fail_nth = nth};
    return gpu_ranks_run(3, SIM_EAGER, 1, train_rank, run);
}

static void check_failing_calls(void)
{
    static training run;
    gpu_check_failing_rank(fail_first_of_three, &run, run.message, run.failed,
                           getenv("SW_TEST_LONG") ? 1 : 61);
    gpu_check_failing_calls(fail_at, &run, run.message[0]);
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int world_size = 1; world_size <= 3; world_size += 2)
        for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
            for (uint64_t seed = 1; seed <= SEEDS; ++seed)
                check_training(world_size, (sim_policy)policy, seed, (int)(seed % 3));
    check_failing_calls();
    for (int where = SW_SLOTS_ON_HOST; where <= SW_SLOTS_ON_DEVICE; ++where) {
        gpu_ranks_slots = (gpu_slots){4096, (sw_slot_place)where};
        for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
            for (uint64_t seed = 1; seed <= 3; ++seed)
                check_training(3, (sim_policy)policy, seed, (int)(seed % 3));
        check_failing_calls();
    }
    return check_result();
}
