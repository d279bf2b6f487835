/* test_device_mean.c - the transport's own mean of halves has no bias; on a mesh little crosses
 * between nodes.
 *
 * Law: take the mean over three ranks of positive float16 and bfloat16 numbers, and sum it over all
 * elements. The sum is within 5e-4 of that of real numbers, whole and as a slice, through NCCL and
 * through slots. An element is rounded at most four times to nearest, each time by at most 2^-9 of
 * it; errors of either sign cancel over 3072 elements. A factor of 1 / 3 that is itself rounded to
 * bfloat16 would move every element by 2^-9 the same way. NCCL is asked for sums alone, of
 * contributions that came multiplied.
 *
 * On a mesh of two nodes with four ranks each, of whose mean n bytes are made, a rank sends n / 4
 * bytes to the other node, for whole means and for slices, with the same bits; on top of what
 * stands in a slice, too. The fold in rank order sends 5 n / 8.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_ranks.h"
#include "reduce/device_mean.h"

enum { WORLD = 3, NUMEL = 3072 };
static const int64_t TIMEOUT_NS = 2000000000;
static const double BOUND = 5e-4;

typedef struct averaging {
    sw_dtype dtype;
    bool is_slice;
    double total[WORLD]; /* sum of the means that rank r got */
} averaging;

/* Return a value of rank `rank` in [1, 2). */
static float value_of(int rank, int i)
{
    return 1.0f + (float)((rank * 977 + i * 389) % 128) / 128.0f;
}

static void convert(void *to, sw_dtype to_dtype, const void *from, sw_dtype from_dtype, int numel,
                    float scale)
{
    sw_cast_args cast = {.to = to,
                         .from = from,
                         .numel = (sw_u64)numel,
                         .scale = scale,
                         .to_dtype = (int)to_dtype,
                         .from_dtype = (int)from_dtype};
    sw_kernel_references()[SW_KERNEL_CAST].reference(&cast);
}

typedef struct buffers {
    void *bucket, *slice, *pinned;
    sw_event *done;
    sw_device_mean mean;
} buffers;

static sw_status average(gpu_rank *self, buffers *held)
{
    const sw_device_accumulated none = {0};
    averaging *run = self->context;
    const sw_device_ops *ops = self->device->ops;
    sw_error *err = &self->err;
    size_t bytes = NUMEL * sw_dtype_size_bytes(run->dtype);
    int numel = run->is_slice ? NUMEL / WORLD : NUMEL;
    float wide[NUMEL];
    SW_TRY(ops->memory_alloc(self->device, bytes, &held->bucket, err));
    SW_TRY(ops->memory_alloc(self->device, bytes, &held->slice, err));
    SW_TRY(ops->pinned_alloc(self->device, bytes, &held->pinned, err));
    SW_TRY(ops->event_create(self->device, &held->done, err));
    sw_device_mean_config config = {.comm = self->all,
                                    .op = SW_REDOP_MEAN,
                                    .wire = SW_DTYPE_COUNT,
                                    .numel = NUMEL,
                                    .bytes = bytes};
    SW_TRY(sw_device_mean_init(&held->mean, &config, err));
    float scale = sw_device_mean_prescale(&held->mean, run->dtype);
    check(self->comm->rounds_divisor == (scale != 1.0f), "contributions are multiplied by %g",
          (double)scale);
    for (int i = 0; i < NUMEL; ++i)
        wide[i] = value_of(self->rank, i);
    convert(held->pinned, run->dtype, wide, SW_DTYPE_FLOAT32, NUMEL, scale);
    self->sim->host_access(held->pinned, bytes, SW_ACCESS_WRITE, "the test's gradients");
    sw_device_range bucket = {held->bucket, NUMEL, run->dtype};
    sw_stream *stream = self->all->stream;
    SW_TRY(ops->copy_async(self->device, held->bucket, held->pinned, bytes, stream, err));
    if (run->is_slice) {
        SW_TRY(sw_device_mean_collect(&held->mean, &bucket, held->slice, &none, err));
        SW_TRY(sw_device_mean_complete(&held->mean, &bucket, held->slice, &none, err));
    } else {
        SW_TRY(sw_device_mean_whole(&held->mean, &bucket, err));
    }
    SW_TRY(ops->copy_async(self->device, held->pinned, run->is_slice ? held->slice : held->bucket,
                           (size_t)numel * sw_dtype_size_bytes(run->dtype), stream, err));
    SW_TRY(ops->event_record(self->device, held->done, stream, err));
    SW_TRY(sw_peers_wait(self->comm, held->done, "the test's mean", err));
    self->sim->host_access(held->pinned, bytes, SW_ACCESS_READ, "the test's mean");
    convert(wide, SW_DTYPE_FLOAT32, held->pinned, run->dtype, numel, 1.0f);
    for (int i = 0; i < numel; ++i)
        run->total[self->rank] += wide[i];
    return SW_OK;
}

static bool average_rank(gpu_rank *self)
{
    buffers held = {0};
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = average(self, &held);
    if (self->device) {
        sw_device_mean_fini(&held.mean);
        self->device->ops->memory_free(self->device, held.bucket);
        self->device->ops->memory_free(self->device, held.slice);
        self->device->ops->pinned_free(self->device, held.pinned);
        self->device->ops->event_destroy(self->device, held.done);
    }
    gpu_rank_close(self);
    return check(status == SW_OK, "rank %d: %s", self->rank, self->err.message);
}

static void check_mean(sw_dtype dtype, bool is_slice)
{
    averaging run = {.dtype = dtype, .is_slice = is_slice};
    double expected = 0, got = 0;
    gpu_ranks_run(WORLD, SIM_ON_DEMAND, 1, average_rank, &run);
    for (int r = 0; r < WORLD; ++r) {
        for (int i = 0; i < NUMEL; ++i)
            expected += (double)value_of(r, i) / WORLD;
        got += run.total[r] / (is_slice ? 1 : WORLD);
    }
    check(fabs(got - expected) <= BOUND * expected, "%s, %s: the means add up to %.9g, not %.9g",
          sw_dtype_name(dtype), is_slice ? "a slice" : "whole", got, expected);
    gpu_expect_clean("the mean of halves");
}

/* ---- meshes ---- */

enum {
    ROWS = 2,
    COLUMNS = 4,
    RANKS = ROWS * COLUMNS,
    MESH_NUMEL = 512,
    MESH_BYTES = 4 * MESH_NUMEL
};
enum { SLICE = MESH_NUMEL / COLUMNS, STANDING_BEGIN = 8, STANDING_END = 40 };
static const double STANDS = 0.3;

typedef struct meshing {
    bool is_slice, stands, folds;
    float result[RANKS][MESH_NUMEL];
    double sent[RANKS]; /* to the other node */
} meshing;

static void (*set_node)(int node);
static double (*sent_across)(void);

static float mesh_value(int rank, int i)
{
    return (float)sin(rank * 100.0 + i);
}

/* This rank among `count` others, over a communicator on the same stream. */
static sw_status open_side(gpu_rank *self, const char *name, int number, int rank, int count,
                           sw_device_comm **side)
{
    sw_nccl_id id = {{0}};
    sw_device_comm_config config = {.cuda_library = gpu_cuda_library,
                                    .nccl_library = gpu_nccl_library,
                                    .ordinal = self->rank,
                                    .places = {.packaged_folder = gpu_folder},
                                    .beside = self->all};
    snprintf(id.internal, sizeof id.internal, "%.60s, %s %d", self->id.internal, name, number);
    SW_TRY(sw_device_comm_create(&config, side, &self->err));
    return sw_device_comm_connect(*side, &id, rank, count, TIMEOUT_NS, &self->err);
}

typedef struct mesh_rank {
    sw_device_comm *row, *column;
    buffers held;
} mesh_rank;

static sw_status begin_mean(gpu_rank *self, mesh_rank *m)
{
    const meshing *run = self->context;
    int of_rank[RANKS], replica_of_rank[RANKS], row = self->rank / COLUMNS;
    int column = self->rank % COLUMNS;
    for (int r = 0; r < RANKS; ++r) {
        of_rank[r] = r % COLUMNS;
        replica_of_rank[r] = r / COLUMNS;
    }
    sw_slices slices = {.count = COLUMNS, .of_rank = of_rank, .replica_of_rank = replica_of_rank};
    set_node(row);
    SW_TRY(open_side(self, "row", row, column, COLUMNS, &m->row));
    SW_TRY(open_side(self, "column", column, row, ROWS, &m->column));
    sw_device_mean_config config = {.comm = self->all,
                                    .op = SW_REDOP_MEAN,
                                    .wire = SW_DTYPE_COUNT,
                                    .folds = run->folds,
                                    .slices = run->is_slice ? &slices : NULL,
                                    .row = m->row,
                                    .column = m->column,
                                    .numel = MESH_NUMEL,
                                    .bytes = MESH_BYTES};
    return sw_device_mean_init(&m->held.mean, &config, &self->err);
}

static sw_status average_on_mesh(gpu_rank *self, mesh_rank *m)
{
    meshing *run = self->context;
    buffers *held = &m->held;
    sw_device *device = self->device;
    const sw_device_ops *ops = device->ops;
    sw_stream *stream = self->all->stream;
    sw_error *err = &self->err;
    sw_device_run accumulated = {STANDING_BEGIN, STANDING_END};
    const sw_device_accumulated under = {run->stands, &accumulated, run->stands};
    SW_TRY(begin_mean(self, m));
    SW_TRY(ops->memory_alloc(device, MESH_BYTES, &held->bucket, err));
    SW_TRY(ops->memory_alloc(device, MESH_BYTES, &held->slice, err));
    SW_TRY(ops->pinned_alloc(device, 2 * MESH_BYTES, &held->pinned, err));
    SW_TRY(ops->event_create(device, &held->done, err));
    float *values = held->pinned, *stood = values + MESH_NUMEL;
    float scale = sw_device_mean_prescale(&held->mean, SW_DTYPE_FLOAT32);
    for (int i = 0; i < MESH_NUMEL; ++i) {
        values[i] = mesh_value(self->rank, i) * scale;
        stood[i] = (float)STANDS;
    }
    self->sim->host_access(values, 2 * MESH_BYTES, SW_ACCESS_WRITE, "the test's gradients");
    sw_device_range bucket = {held->bucket, MESH_NUMEL, SW_DTYPE_FLOAT32};
    SW_TRY(ops->copy_async(device, held->bucket, values, MESH_BYTES, stream, err));
    SW_TRY(ops->copy_async(device, held->slice, stood, MESH_BYTES, stream, err));
    double before = sent_across();
    if (run->is_slice) {
        SW_TRY(sw_device_mean_collect(&held->mean, &bucket, held->slice, &under, err));
        SW_TRY(sw_device_mean_complete(&held->mean, &bucket, held->slice, &under, err));
    } else {
        SW_TRY(sw_device_mean_whole(&held->mean, &bucket, err));
    }
    SW_TRY(ops->copy_async(device, values, run->is_slice ? held->slice : held->bucket,
                           run->is_slice ? MESH_BYTES / COLUMNS : MESH_BYTES, stream, err));
    SW_TRY(ops->event_record(device, held->done, stream, err));
    SW_TRY(sw_peers_wait(self->comm, held->done, "the test's mean", err));
    self->sim->host_access(values, MESH_BYTES, SW_ACCESS_READ, "the test's mean");
    run->sent[self->rank] = sent_across() - before;
    memcpy(run->result[self->rank], values, MESH_BYTES);
    return SW_OK;
}

static bool run_on_mesh(gpu_rank *self)
{
    mesh_rank m = {0};
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = average_on_mesh(self, &m);
    if (self->device) {
        sw_device_mean_fini(&m.held.mean);
        self->device->ops->memory_free(self->device, m.held.bucket);
        self->device->ops->memory_free(self->device, m.held.slice);
        self->device->ops->pinned_free(self->device, m.held.pinned);
        self->device->ops->event_destroy(self->device, m.held.done);
    }
    sw_device_comm_destroy(m.column);
    sw_device_comm_destroy(m.row);
    gpu_rank_close(self);
    return check(status == SW_OK, "rank %d of a mesh: %s", self->rank, self->err.message);
}

static void mean_on_mesh(meshing *run, sim_policy policy)
{
    gpu_ranks_run(RANKS, policy, 1, run_on_mesh, run);
    gpu_expect_clean("a mean on a mesh");
    for (int r = 0; r < RANKS; ++r)
        check(run->folds ? run->sent[r] >= MESH_BYTES * 5.0 / 8
                         : run->sent[r] <= MESH_BYTES * 1.0 / COLUMNS,
              "rank %d sends %g bytes of %d to the other node", r, run->sent[r], MESH_BYTES);
}

static void check_meshes(sim_policy policy)
{
    static meshing whole, slices, accumulated, folded;
    whole = (meshing){0};
    slices = (meshing){.is_slice = true};
    accumulated = (meshing){.is_slice = true, .stands = true};
    folded = (meshing){.is_slice = true, .folds = true};
    mean_on_mesh(&whole, policy);
    mean_on_mesh(&slices, policy);
    mean_on_mesh(&accumulated, policy);
    mean_on_mesh(&folded, policy);
    int wrong = 0, far = 0;
    for (int r = 0; r < RANKS; ++r)
        for (int i = 0; i < SLICE; ++i) {
            int at = r % COLUMNS * SLICE + i;
            float mean = slices.result[r][i];
            bool is_on_top = i >= STANDING_BEGIN && i < STANDING_END;
            float sum = is_on_top ? mean + (float)STANDS : mean;
            wrong += mean != whole.result[0][at] || mean != whole.result[r][at];
            wrong += sum != accumulated.result[r][i];
            far += fabsf(mean - folded.result[r][i]) > 1e-6f;
        }
    check(wrong == 0, "a mesh: %d slices' elements differ from the whole mean", wrong);
    check(far == 0, "a mesh: %d elements are far from the fold", far);
}

static void look_up(void *library, const char *name, void *function)
{
    void *symbol = dlsym(library, name);
    check(symbol != NULL, "no %s", name);
    memcpy(function, &symbol, sizeof symbol);
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    void *library = dlopen(gpu_nccl_library, RTLD_NOW);
    look_up(library, "sim_nccl_set_node", &set_node);
    look_up(library, "sim_nccl_sent_across", &sent_across);
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        check_meshes((sim_policy)policy);
    for (int through_slots = 0; through_slots < 2; ++through_slots) {
        for (int is_slice = 0; is_slice < 2; ++is_slice) {
            check_mean(SW_DTYPE_FLOAT32, is_slice);
            check_mean(SW_DTYPE_FLOAT16, is_slice);
            check_mean(SW_DTYPE_BFLOAT16, is_slice);
        }
        gpu_ranks_slots = (gpu_slots){4096, SW_SLOTS_ON_HOST};
    }
    return check_result();
}
