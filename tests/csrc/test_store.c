/* test_store.c - the laws of zero/store.h, for W = 1 and 3, a mesh of 2 x 2, and ranks on two
 * hosts.
 *
 *   S1  the slices of a parameter are its elements, each once: what is written is read
 *   S2  after publish every rank has what the owners wrote to their slices: in buckets, in casts,
 *       in gathered units and their compute forms, and in what records decode to
 *   S3  outcomes reach every rank, or publish says that they do not
 *   S4  neither two parameters, nor a parameter and a cast, share a byte of a part or of a unit
 *   S5  pieces of the ranks that share a copy cover a parameter once
 *   S6  a wrong member or cast is refused by name
 *   S7  every allocation and mapping may fail: an error, and nothing is kept
 *   S8  the same with parts in a file, also when its pages leave this process; a folder without a
 *       place is one error of the system, and no file stays open or named
 */
#include "zero/store.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "faults.h"
#include "hosts.h"
#include "kernels/compress_kernels.h"

enum { PARAMS = 7, UNITS = 2, LARGEST = 5000 };

/* The second is cast from float64; the fourth is whole numbers, the last frozen. */
static const sw_layout_param params[PARAMS] = {
    {LARGEST, SW_DTYPE_FLOAT32, true, 0, 0}, {333, SW_DTYPE_FLOAT64, true, 0, 0},
    {130, SW_DTYPE_FLOAT32, true, 0, 0},     {40, SW_DTYPE_INT64, true, 0, 0},
    {1, SW_DTYPE_FLOAT32, true, 0, 0},       {0, SW_DTYPE_FLOAT32, true, 0, 0},
    {999, SW_DTYPE_FLOAT32, false, 0, 0},
};
/* Cut by rows: of 10, 9, 13, 8, 1, 4 and 27 elements, where some rank has none or a shorter chunk.
 */
static const size_t row_numel[PARAMS] = {10, 9, 13, 8, 1, 4, 27};
static const sw_dtype casts[PARAMS] = {SW_DTYPE_BFLOAT16, SW_DTYPE_FLOAT16, SW_DTYPE_COUNT,
                                       SW_DTYPE_COUNT,    SW_DTYPE_COUNT,   SW_DTYPE_COUNT,
                                       SW_DTYPE_BFLOAT16};
static const sw_dtype no_casts[PARAMS] = {SW_DTYPE_COUNT, SW_DTYPE_COUNT, SW_DTYPE_COUNT,
                                          SW_DTYPE_COUNT, SW_DTYPE_COUNT, SW_DTYPE_COUNT,
                                          SW_DTYPE_COUNT};
static const size_t outer[] = {1, 2, 4}, inner[] = {0, 6};
static const sw_store_unit units[UNITS] = {{"outer", outer, 3, true}, {"inner", inner, 2, false}};

static double value_of(size_t index, size_t i, int step)
{
    return (double)(int)((i * 2654435761u + index * 977u + (unsigned)step * 131u) % 4001u) / 16.0 -
           100.0;
}

static void put(void *to, sw_dtype dtype, size_t i, double value)
{
    if (dtype == SW_DTYPE_FLOAT32)
        ((float *)to)[i] = (float)value;
    else if (dtype == SW_DTYPE_FLOAT64)
        ((double *)to)[i] = value;
    else
        ((int64_t *)to)[i] = (int64_t)value;
}

/* Write this rank's slices, as an optimizer does. */
static void step_on_slices(const sw_store *store, int step)
{
    const sw_store_map *map = sw_store_get_map(store);
    for (size_t p = 0; p < PARAMS; ++p) {
        sw_store_run run = sw_store_slice(store, p, (size_t)map->slice_of[map->rank], false);
        for (size_t i = run.begin; i < run.end; ++i)
            put(run.address, run.dtype, i - run.begin, value_of(p, i, step));
    }
}

/* The elements of parameter `p` of a step, in its dtype or in `cast`. */
static size_t wrong_values(const void *found, size_t p, sw_dtype cast, int step)
{
    double whole[LARGEST];
    float plain[LARGEST];
    uint16_t narrow[LARGEST];
    size_t numel = params[p].numel, item = sw_dtype_size_bytes(cast), wrong = 0;
    const void *expected = whole;
    for (size_t i = 0; i < numel; ++i) {
        plain[i] = (float)value_of(p, i, step);
        put(whole, params[p].dtype, i, value_of(p, i, step));
    }
    if (cast != params[p].dtype) {
        sw_kernels()->compress->half_narrow(narrow, plain, numel, 1.0f, cast);
        expected = narrow;
    }
    for (size_t i = 0; i < numel; ++i)
        wrong +=
            memcmp((const char *)found + i * item, (const char *)expected + i * item, item) != 0;
    return wrong;
}

static sw_store *make_cut(sw_comm *comm, sw_store_options options, size_t slice_count, bool by_rows,
                          sw_error *err)
{
    sw_layout layout;
    sw_store *store = NULL;
    const sw_layout_caps caps = {.bytes = 4096};
    sw_layout_param rows[PARAMS];
    for (size_t p = 0; p < PARAMS; ++p) {
        rows[p] = params[p];
        rows[p].row_numel = by_rows ? row_numel[p] : 0;
    }
    if (!check(sw_layout_init(&layout, rows, PARAMS, (int)slice_count, caps, err) == SW_OK,
               "layout: %s", err->message))
        return NULL;
    sw_status status = sw_store_create(comm, &layout, &options, &store, err);
    sw_layout_fini(&layout);
    check((status == SW_OK) == (store != NULL), "a store or an error");
    return store;
}

static sw_store *make(sw_comm *comm, sw_store_options options, size_t slice_count, sw_error *err)
{
    return make_cut(comm, options, slice_count, false, err);
}

/* S1 by rows: the chunks of torch.chunk. */
static void check_chunks(const sw_store *store, size_t p)
{
    const sw_store_map *map = sw_store_get_map(store);
    size_t rows = params[p].numel / row_numel[p], slices = map->slice_count;
    size_t chunk = (rows + slices - 1) / slices * row_numel[p];
    for (size_t s = 0; s < slices; ++s) {
        sw_store_run run = sw_store_slice(store, p, s, false);
        size_t begin = s * chunk < params[p].numel ? s * chunk : params[p].numel;
        size_t end = begin + chunk < params[p].numel ? begin + chunk : params[p].numel;
        check(run.end - run.begin == end - begin && (begin == end || run.begin == begin),
              "S1: chunk %zu of parameter %zu: [%zu, %zu)", s, p, run.begin, run.end);
    }
}

/* S5 by rows: a rank's pieces are the slices that no other one beside it has. */
static size_t check_pieces(const sw_store *store, size_t p)
{
    const sw_store_map *map = sw_store_get_map(store);
    sw_store_run piece[RANKS_MAX];
    size_t count = sw_store_pieces(store, p, piece), covered = 0;
    for (size_t k = 0; k < count; ++k)
        covered += piece[k].end - piece[k].begin;
    if (!sw_store_has_one_copy(map) || map->beside_count == 1)
        return covered;
    if (!sw_store_is_by_rows(map, p)) {
        check(piece[0].begin == 0 || map->place != 0, "S5: parameter %zu", p);
        check(piece[0].end == params[p].numel || map->place + 1 != map->beside_count,
              "S5: parameter %zu", p);
        return covered;
    }
    for (size_t k = 0; k < count; ++k) {
        sw_store_run run = sw_store_slice(store, p, map->place + k * map->beside_count, false);
        check(run.address == piece[k].address && run.begin == piece[k].begin, "S5: piece %zu", k);
    }
    return covered;
}

/* S1, S4, S5. */
static void check_places(const sw_store *store)
{
    const sw_store_map *map = sw_store_get_map(store);
    double flat[LARGEST], back[LARGEST];
    for (size_t p = 0; p < PARAMS; ++p) {
        size_t covered = 0, bytes = params[p].numel * sw_dtype_size_bytes(params[p].dtype);
        for (size_t s = 0; s < map->slice_count; ++s) {
            sw_store_run run = sw_store_slice(store, p, s, false);
            check(run.begin == (run.end ? covered : 0), "S1: parameter %zu, slice %zu", p, s);
            covered += run.end - run.begin;
        }
        check(covered == params[p].numel, "S1: parameter %zu: %zu elements", p, covered);
        for (size_t i = 0; i < params[p].numel; ++i)
            put(flat, params[p].dtype, i, value_of(p, i, 99));
        if (map->rank == 0 || map->form == SW_STORE_PRIVATE) {
            sw_store_write(store, p, flat, SW_STORE_ALL);
            sw_error err;
            check(sw_store_read(store, p, back, &err) == SW_OK, "%s", err.message);
            check(memcmp(flat, back, bytes) == 0, "S1: parameter %zu is read as written", p);
        }
        for (size_t q = 0; q < p; ++q)
            for (int narrow = 0; narrow < 2; ++narrow) {
                sw_store_run a = sw_store_whole(store, p, narrow),
                             b = sw_store_whole(store, q, narrow);
                const uint8_t *a_end = a.address + a.end * sw_dtype_size_bytes(a.dtype);
                const uint8_t *b_end = b.address + b.end * sw_dtype_size_bytes(b.dtype);
                check(!a.address || !b.address || a_end <= b.address || b_end <= a.address,
                      "S4: parameters %zu and %zu", p, q);
            }
        if (sw_store_is_by_rows(map, p))
            check_chunks(store, p);
        check(check_pieces(store, p) <= params[p].numel, "S5: parameter %zu", p);
    }
}

/* Frozen parameters are not stepped on, and so have no new values. */
static bool is_checked(const sw_store *store, size_t p)
{
    return params[p].trainable || sw_store_get_map(store)->form == SW_STORE_SHARED;
}

/* S2 in buckets and their casts. */
static void check_whole(const sw_store *store, int step)
{
    const sw_store_map *map = sw_store_get_map(store);
    for (size_t p = 0; p < PARAMS; ++p) {
        if (!is_checked(store, p))
            continue;
        sw_store_run run = sw_store_whole(store, p, false), cast = sw_store_whole(store, p, true);
        if (params[p].trainable)
            check(wrong_values(run.address, p, run.dtype, step) == 0, "S2: parameter %zu", p);
        check((cast.address != NULL) == (sw_store_is_narrowed(map, p) && map->beside_count > 1),
              "S2: cast %zu", p);
        if (cast.address && params[p].trainable)
            check(wrong_values(cast.address, p, cast.dtype, step) == 0, "S2: cast %zu", p);
    }
}

/* S2 in units. */
static void check_units(sw_store *store, int step, bool coded, sw_error *err)
{
    sw_units *made = sw_store_units(store);
    for (size_t form = 0; form < sw_units_count(made); ++form)
        check(sw_unit_gather(made, form, SW_UNIT_SLICES, err) == SW_OK, "%s", err->message);
    for (size_t p = 0; p < PARAMS; ++p)
        for (int narrow = 0; narrow < 2 && params[p].trainable; ++narrow) {
            sw_store_run run = sw_store_whole(store, p, narrow);
            if (run.address)
                check(wrong_values(run.address, p, run.dtype, step) == 0,
                      "S2: parameter %zu of a unit, %d", p, narrow);
        }
    check(!sw_store_whole(store, 3, false).address, "S2: what no unit has lies in none");
    check((sw_store_whole(store, 0, true).address == NULL) == coded, "S2: a compute form");
    for (size_t form = 0; form < sw_units_count(made); ++form)
        check(sw_unit_release(made, form, err) == SW_OK, "%s", err->message);
    if (coded && check(sw_unit_gather(made, 1, SW_UNIT_CODES, err) == SW_OK, "%s", err->message)) {
        const float *found = (const float *)(const void *)sw_store_whole(store, 0, false).address;
        for (size_t i = 0; i < params[0].numel; ++i)
            if (!check(found[i] - (float)value_of(0, i, step) < 1.0f &&
                           found[i] - (float)value_of(0, i, step) > -1.0f,
                       "S2: a decoded element"))
                break;
        check(sw_unit_release(made, 1, err) == SW_OK, "%s", err->message);
    }
}

static void check_form(rank_context *self, sw_comm *comm, sw_store_options options, bool by_rows)
{
    uint8_t outcomes[RANKS_MAX];
    size_t slices = options.slices ? (size_t)options.slices->count : (size_t)self->world_size;
    sw_store *store = make_cut(comm, options, slices, by_rows, &self->err);
    if (!check(store != NULL, "a store: %s", self->err.message))
        return;
    const sw_store_map *map = sw_store_get_map(store);
    for (int step = 1; step < 4; ++step) {
        sw_store_update update = {.tells = true,
                                  .failed = step == 2 && self->rank == self->world_size - 1,
                                  .outcomes = outcomes};
        step_on_slices(store, step);
        check(sw_store_settle(store, &self->err) == SW_OK, "S8: %s", self->err.message);
        check(sw_store_publish(store, &update, &self->err) == SW_OK, "%s", self->err.message);
        check(update.told ==
                  (!options.slices && (options.form != SW_STORE_UNITS || map->is_one_host)),
              "S3: told %d", update.told);
        for (int r = 0; update.told && r < self->world_size; ++r)
            check(outcomes[r] == (step == 2 && r == self->world_size - 1), "S3: rank %d", r);
        if (options.form == SW_STORE_UNITS)
            check_units(store, step, options.coded, &self->err);
        else
            check_whole(store, step);
        check(comm->ops->run(comm, &(sw_op){.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8},
                             &self->err) == SW_OK,
              "%s", self->err.message);
    }
    check_places(store);
    ranks_meet(self);
    sw_store_destroy(store);
    ranks_meet(self);
}

static void check_all(rank_context *self, sw_comm *comm, const int *host_of,
                      const sw_slices *slices, bool one_host)
{
    sw_store_options options = {
        .host_of = host_of, .slices = slices, .narrow = casts, .label = "the module"};
    for (int form = SW_STORE_PRIVATE; form <= SW_STORE_UNITS; ++form) {
        options.form = (sw_store_form)form;
        options.units = form == SW_STORE_UNITS ? units : NULL;
        options.unit_count = form == SW_STORE_UNITS ? UNITS : 0;
        check_form(self, comm, options, false);
    }
    check_form(self, comm, options, true);
    for (int coded = 0; coded < 1 + (one_host && !slices); ++coded)
        for (int in_file = coded ? 0 : 1; in_file < 2; ++in_file) {
            options.coded = coded;
            options.folder = in_file ? "/tmp" : NULL;
            check_form(self, comm, options, false);
            check_form(self, comm, options, true);
        }
}

static long descriptors(void)
{
    long count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (folder && readdir(folder))
        ++count;
    if (folder)
        closedir(folder);
    return count;
}

static const int together[RANKS_MAX] = {0};
static const int mesh_of_rank[] = {0, 1, 0, 1}, mesh_replica[] = {0, 0, 1, 1};
static const sw_slices mesh = {2, mesh_of_rank, mesh_replica};

static void on_one_host(rank_context *self)
{
    check_all(self, self->comm, together, self->shared, true);
}

static void over_hosts(rank_context *self)
{
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    if (!comm)
        return;
    check_all(self, comm, s->host_of, s->slices, false);
    comm->ops->leave(comm);
    ranks_meet(self);
    comm->ops->destroy(comm);
}

/* S6. */
static void refuses(rank_context *self)
{
    static const size_t beyond[] = {PARAMS}, whole_numbers[] = {3};
    static const sw_dtype wrong[PARAMS] = {SW_DTYPE_COUNT,    SW_DTYPE_COUNT, SW_DTYPE_COUNT,
                                           SW_DTYPE_BFLOAT16, SW_DTYPE_COUNT, SW_DTYPE_COUNT,
                                           SW_DTYPE_COUNT};
    const sw_store_unit bad[] = {{"bad", beyond, 1, false}, {"cast", whole_numbers, 1, false}};
    sw_store_options options = {.form = SW_STORE_UNITS,
                                .host_of = together,
                                .narrow = no_casts,
                                .units = &bad[0],
                                .unit_count = 1,
                                .label = "the module"};
    check(!make(self->comm, options, 1, &self->err) && self->err.status == SW_E_INVALID &&
              strstr(self->err.message, "unit 'bad': member must be in [0, 7), got 7"),
          "S6: %s", self->err.message);
    options.form = SW_STORE_PRIVATE;
    check(!make(self->comm, options, 1, &self->err) && self->err.status == SW_E_INVALID &&
              strstr(self->err.message, "only the form 'units' has units, got 1"),
          "S6: %s", self->err.message);
    options.unit_count = 0;
    check(!make_cut(self->comm, options, 1, true, &self->err) &&
              strstr(self->err.message, "is cut by rows, which needs the form 'units'"),
          "S6: %s", self->err.message);
    options.folder = "/tmp";
    check(!make(self->comm, options, 1, &self->err) && self->err.status == SW_E_INVALID &&
              strstr(self->err.message, "only the form 'units' has a home in a file"),
          "S8: %s", self->err.message);
    options.folder = NULL;
    options.coded = true;
    check(!make(self->comm, options, 1, &self->err) && self->err.status == SW_E_INVALID &&
              strstr(self->err.message, "records need the form 'units' on one host"),
          "S6: %s", self->err.message);
    options = (sw_store_options){.form = SW_STORE_UNITS,
                                 .host_of = together,
                                 .narrow = no_casts,
                                 .unit_count = 1,
                                 .label = "the module"};
    options.units = &bad[1];
    options.narrow = wrong;
    check(!make(self->comm, options, 1, &self->err) && self->err.status == SW_E_INVALID &&
              strstr(self->err.message, "not of parameter 3 from int64 to bfloat16"),
          "S6: %s", self->err.message);
}

/* S8. */
static void has_no_place(rank_context *self)
{
    sw_store_options options = {.form = SW_STORE_UNITS,
                                .host_of = together,
                                .narrow = casts,
                                .units = units,
                                .unit_count = UNITS,
                                .folder = "/nowhere/at/all",
                                .label = "the module"};
    check(!make(self->comm, options, (size_t)self->world_size, &self->err) &&
              self->err.status == SW_E_OS && self->err.detail == ENOENT &&
              strstr(self->err.message, "No such file or directory: no place for ") &&
              strstr(self->err.message, "/nowhere/at/all"),
          "S8: %s", self->err.message);
}

/* S7, in turn: a failed allocation ends the communicator. Returns true if none failed. */
static long failing;
static bool in_file;

static void fails(rank_context *self)
{
    const sw_store_options options = {.form = SW_STORE_UNITS,
                                      .host_of = together,
                                      .narrow = casts,
                                      .units = units,
                                      .unit_count = UNITS,
                                      .coded = in_file,
                                      .folder = in_file ? "/tmp" : NULL,
                                      .label = "the module"};
    sw_layout layout;
    sw_store *store = NULL;
    const sw_layout_caps caps = {.bytes = 4096};
    if (!check(sw_layout_init(&layout, params, PARAMS, 1, caps, &self->err) == SW_OK, "layout"))
        return;
    faults_arm(failing);
    sw_status status = sw_store_create(self->comm, &layout, &options, &store, &self->err);
    bool over = faults_count() < failing;
    faults_arm(0);
    check(status == SW_OK || status == SW_E_MEMORY, "S7: allocation %ld: %s", failing,
          sw_status_name(status));
    check(status == SW_OK || !store, "S7: no store after an error");
    sw_store_destroy(store);
    sw_layout_fini(&layout);
    failing = over ? 0 : failing + 1;
}

int main(void)
{
    static const int hosts[] = {0, 0, 1, 1}, crossed[] = {0, 1, 0, 1};
    ranks_run_all(on_one_host, 1, NULL);
    ranks_run_all(on_one_host, 3, NULL);
    ranks_run_all(on_one_host, 4, &mesh);
    hosts_run(over_hosts, hosts, 4, NULL, (hosts_wire){.radix = 0});
    hosts_run(over_hosts, hosts, 4, &mesh, (hosts_wire){.radix = 0});
    hosts_run(over_hosts, crossed, 4, &mesh, (hosts_wire){.radix = 0});
    ranks_run_all(refuses, 1, NULL);
    ranks_run_all(has_no_place, 1, NULL);
    ranks_run_all(has_no_place, 3, NULL);
    for (int home = 0; home < 2; ++home)
        for (failing = 1, in_file = home; failing > 0;) {
            long mapped = faults_mapped(), open = descriptors();
            ranks_run_all(fails, 1, NULL);
            check(faults_mapped() == mapped && descriptors() == open,
                  "S7: nothing stays mapped or open after failure %ld", failing);
        }
    return check_result();
}
