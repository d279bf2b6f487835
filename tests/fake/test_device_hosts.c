/* test_device_hosts.c - the fold over several hosts of GPUs.
 *
 * Laws, for float32, float16, bfloat16, float64 and int32, whole means and slices, sums and means,
 * 16-bit wires, meshes, hosts of one size and of several, ranks that follow one another or not:
 *   - each element is, bit for bit, what a naive loop adds: a host's ranks in rank order, hosts in
 *     order, scaled once, rounded once; with a wire a host's mean is rounded to 16 bits first; on
 *     top of what stands in a slice, and with ranks left out, too;
 *   - with H hosts of L ranks a rank sends (H - 1) / H n / L bytes to other hosts for slices, twice
 *     as much for whole means, in the bytes of the wire;
 *   - no schedule gives a race or a leak;
 *   - hosts of one rank each have the bits of one exchange;
 *   - a call that fails on one rank, in an exchange or between two, is a named error, and no rank
 *     hangs or leaves memory.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_ranks.h"
#include "reduce/device_mean.h"

enum { FAILURE = 999, RANKS_MAX = 8, PIECE = 24, NUMEL_MAX = RANKS_MAX * PIECE };
/* elements on an accumulated mean: parts of several pieces */
enum { STANDING_BEGIN = 10, STANDING_END = 130 };
static const int64_t TIMEOUT_NS = 8000000000, SHORT_NS = 1000000000;
static const double STANDS = 0.3;
static const sw_dtype PLAIN = SW_DTYPE_COUNT;

static void (*set_node)(int node);
static double (*sent_across)(void);

typedef struct hosting {
    int world_size, host_of[RANKS_MAX];
    sw_dtype dtype, wire;
    sw_redop op;
    bool is_slice, stands;
    int rows;     /* of a mesh; 0: none */
    int left_out; /* a rank; -1: none */
    long fail_nth;
    /* results */
    unsigned char result[RANKS_MAX][8 * NUMEL_MAX];
    double sent[RANKS_MAX];
    bool failed[RANKS_MAX];
    char message[RANKS_MAX][SW_ERROR_MESSAGE_BYTES];
} hosting;

static int columns_of(const hosting *run)
{
    return run->rows ? run->world_size / run->rows : run->world_size;
}

static size_t numel_of(const hosting *run)
{
    return (size_t)run->world_size * PIECE;
}

/* ---- the naive loop ---- */

static bool is_half(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

/* Return `value` as the dtype has it. */
static double as(double value, sw_dtype dtype)
{
    float wide = (float)value;
    uint16_t half = 0;
    if (dtype == SW_DTYPE_FLOAT32)
        return wide;
    if (!is_half(dtype))
        return value;
    sw_cast_args cast = {.to = &half,
                         .from = &wide,
                         .numel = 1,
                         .scale = 1.0f,
                         .to_dtype = (int)dtype,
                         .from_dtype = (int)SW_DTYPE_FLOAT32};
    sw_kernel_references()[SW_KERNEL_CAST].reference(&cast);
    cast = (sw_cast_args){.to = &wide,
                          .from = &half,
                          .numel = 1,
                          .scale = 1.0f,
                          .to_dtype = (int)SW_DTYPE_FLOAT32,
                          .from_dtype = (int)dtype};
    sw_kernel_references()[SW_KERNEL_CAST].reference(&cast);
    return wide;
}

static double value_of(const hosting *run, int rank, size_t i)
{
    uint32_t mixed = (uint32_t)rank * 7919u + (uint32_t)i * 15485863u + 12345u;
    mixed ^= mixed >> 15;
    mixed *= 2246822519u;
    mixed ^= mixed >> 13;
    double value = run->dtype == SW_DTYPE_INT32 ? (double)(mixed % 2000) - 1000
                                                : (double)(int32_t)mixed * 0x1p-31;
    return as(value, run->dtype);
}

/* Add as the dtype's sums are added. */
static double add(double a, double b, sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT32 || is_half(dtype) ? (double)((float)a + (float)b) : a + b;
}

static double times(double a, double factor, sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT32 || is_half(dtype) ? (double)((float)a * (float)factor)
                                                       : a * factor;
}

static bool on_top(const hosting *run, size_t i)
{
    return run->stands && i >= STANDING_BEGIN && i < STANDING_END;
}

static double expected_at(const hosting *run, size_t i)
{
    bool is_narrow = run->wire != PLAIN;
    double stood = as(STANDS, run->dtype), total = 0;
    int hosts = 0, active = 0;
    for (int h = 0; h < run->world_size; ++h) {
        double sum = 0;
        int count = 0;
        for (int r = 0; r < run->world_size; ++r) {
            if (run->host_of[r] != h || r == run->left_out)
                continue;
            double own = value_of(run, r, i);
            if (on_top(run, i) && !is_narrow)
                own = as(add(stood, own, run->dtype), run->dtype);
            sum = count++ ? add(sum, own, run->dtype) : own;
        }
        active += count;
        if (count == 0)
            continue;
        if (is_narrow) {
            int all = 1;
            for (int r = 0; r < run->world_size; ++r)
                all = run->host_of[r] + 1 > all ? run->host_of[r] + 1 : all;
            sum = (float)sum * (float)((double)all / run->world_size);
            sum = as((float)sum * (float)(1.0 / all), run->wire);
        }
        total = hosts++ ? add(total, sum, run->dtype) : sum;
    }
    if (is_narrow) {
        total = as(as(total, run->wire), run->dtype);
        return on_top(run, i) ? as(add(stood, total, run->dtype), run->dtype) : total;
    }
    if (run->op == SW_REDOP_MEAN)
        total = times(total, 1.0 / active, run->dtype);
    return as(total, run->dtype);
}

static void store(void *array, size_t i, double value, sw_dtype dtype)
{
    float single = (float)value;
    int32_t whole = (int32_t)value;
    uint16_t half;
    sw_cast_args cast = {.to = &half,
                         .from = &single,
                         .numel = 1,
                         .scale = 1.0f,
                         .to_dtype = (int)dtype,
                         .from_dtype = (int)SW_DTYPE_FLOAT32};
    size_t bytes = sw_dtype_size_bytes(dtype);
    const void *from = dtype == SW_DTYPE_FLOAT64 ? (const void *)&value
                       : dtype == SW_DTYPE_INT32 ? (const void *)&whole
                       : is_half(dtype)          ? (const void *)&half
                                                 : (const void *)&single;
    if (is_half(dtype))
        sw_kernel_references()[SW_KERNEL_CAST].reference(&cast);
    memcpy((char *)array + i * bytes, from, bytes);
}

/* ---- ranks ---- */

typedef struct held {
    void *bucket, *slice, *pinned;
    sw_event *done;
    sw_host_map map;
    sw_device_mean mean;
} held;

static sw_status make_mean(gpu_rank *self, held *own)
{
    const hosting *run = self->context;
    int of_rank[RANKS_MAX], replica_of_rank[RANKS_MAX];
    uint8_t trains[RANKS_MAX];
    size_t bytes = numel_of(run) * sw_dtype_size_bytes(run->dtype);
    for (int r = 0; r < run->world_size; ++r) {
        of_rank[r] = r % columns_of(run);
        replica_of_rank[r] = r / columns_of(run);
        trains[r] = r != run->left_out;
    }
    sw_slices slices = {
        .count = columns_of(run), .of_rank = of_rank, .replica_of_rank = replica_of_rank};
    SW_TRY(sw_host_map_init(&own->map, run->host_of, run->world_size, &self->err));
    sw_device_mean_config config = {.comm = self->all,
                                    .op = run->op,
                                    .wire = run->wire,
                                    .folds = run->left_out < 0,
                                    .slices = run->rows && run->is_slice ? &slices : NULL,
                                    .hosts = &own->map,
                                    .is_sliced = run->is_slice,
                                    .numel = numel_of(run),
                                    .bytes = bytes};
    SW_TRY(sw_device_mean_init(&own->mean, &config, &self->err));
    if (run->left_out < 0)
        return SW_OK;
    own->mean.divisor = run->world_size - 1;
    return sw_device_mean_leave_out(&own->mean, trains, &self->err);
}

/* The runs of elements [STANDING_BEGIN, STANDING_END) in the parts that this rank needs. */
static size_t find_runs(const hosting *run, const sw_device_mean *mean,
                        const sw_device_range *bucket, sw_device_run *runs)
{
    size_t count = 0, first = 0, slice = bucket->numel / (size_t)columns_of(run);
    sw_device_part part;
    for (size_t i = 0; sw_device_mean_part(mean, bucket, i, &part); ++i) {
        size_t from = part.slice * slice + part.begin, to = part.slice * slice + part.end;
        size_t begin = from > STANDING_BEGIN ? from : STANDING_BEGIN;
        size_t end = to < STANDING_END ? to : STANDING_END;
        if (run->stands && begin < end)
            runs[count++] = (sw_device_run){first + begin - from, first + end - from};
        first += to - from;
    }
    return count;
}

static sw_status average(gpu_rank *self, held *own)
{
    hosting *run = self->context;
    sw_device *device = self->device;
    const sw_device_ops *ops = device->ops;
    sw_stream *stream = self->all->stream;
    sw_error *err = &self->err;
    size_t width = sw_dtype_size_bytes(run->dtype), bytes = numel_of(run) * width;
    size_t kept = run->is_slice ? bytes / (size_t)columns_of(run) : bytes;
    sw_device_run runs[RANKS_MAX];
    set_node(run->host_of[self->rank]);
    SW_TRY(make_mean(self, own));
    SW_TRY(ops->memory_alloc(device, bytes, &own->bucket, err));
    SW_TRY(ops->memory_alloc(device, bytes, &own->slice, err));
    SW_TRY(ops->pinned_alloc(device, 2 * bytes, &own->pinned, err));
    SW_TRY(ops->event_create(device, &own->done, err));
    char *values = own->pinned, *stood = values + bytes;
    for (size_t i = 0; i < numel_of(run); ++i) {
        store(values, i, value_of(run, self->rank, i), run->dtype);
        store(stood, i, STANDS, run->dtype);
    }
    self->sim->host_access(values, 2 * bytes, SW_ACCESS_WRITE, "the test's gradients");
    sw_device_range bucket = {own->bucket, numel_of(run), run->dtype};
    sw_device_accumulated under = {run->stands, runs, find_runs(run, &own->mean, &bucket, runs)};
    SW_TRY(ops->copy_async(device, own->bucket, values, bytes, stream, err));
    SW_TRY(ops->copy_async(device, own->slice, stood, bytes, stream, err));
    double before = sent_across();
    if (self->rank == 0)
        self->sim->fail_call(0, run->fail_nth, FAILURE);
    if (run->is_slice) {
        SW_TRY(sw_device_mean_collect(&own->mean, &bucket, own->slice, &under, err));
        SW_TRY(sw_device_mean_complete(&own->mean, &bucket, own->slice, &under, err));
    } else {
        SW_TRY(sw_device_mean_whole(&own->mean, &bucket, err));
    }
    SW_TRY(ops->copy_async(device, values, run->is_slice ? own->slice : own->bucket, kept, stream,
                           err));
    SW_TRY(ops->event_record(device, own->done, stream, err));
    SW_TRY(sw_peers_wait(self->comm, own->done, "the test's mean", err));
    self->sim->host_access(values, kept, SW_ACCESS_READ, "the test's mean");
    if (self->rank == 0)
        self->sim->fail_call(0, 0, 0);
    run->sent[self->rank] = sent_across() - before;
    memcpy(run->result[self->rank], values, kept);
    return SW_OK;
}

static bool run_rank(gpu_rank *self)
{
    hosting *run = self->context;
    held own = {0};
    sw_status status = gpu_rank_open(self, run->fail_nth ? SHORT_NS : TIMEOUT_NS);
    if (status == SW_OK)
        status = average(self, &own);
    if (status != SW_OK && self->comm)
        sw_peers_abort(self->comm, &self->err);
    if (self->device) {
        sw_device_mean_fini(&own.mean);
        self->device->ops->memory_free(self->device, own.bucket);
        self->device->ops->memory_free(self->device, own.slice);
        self->device->ops->pinned_free(self->device, own.pinned);
        self->device->ops->event_destroy(self->device, own.done);
    }
    sw_host_map_fini(&own.map);
    gpu_rank_close(self);
    run->failed[self->rank] = status != SW_OK;
    if (status != SW_OK)
        memcpy(run->message[self->rank], self->err.message, SW_ERROR_MESSAGE_BYTES);
    return run->fail_nth ? status == SW_OK
                         : check(status == SW_OK, "rank %d: %s", self->rank, self->err.message);
}

/* ---- laws ---- */

/* Return the first element of what a rank keeps. */
static size_t first_of(const hosting *run, int rank)
{
    return run->is_slice
               ? (size_t)(rank % columns_of(run)) * numel_of(run) / (size_t)columns_of(run)
               : 0;
}

static void check_bits(const char *what, const hosting *run)
{
    size_t width = sw_dtype_size_bytes(run->dtype), count = numel_of(run);
    size_t kept = run->is_slice ? count / (size_t)columns_of(run) : count;
    int wrong = 0;
    for (int r = 0; r < run->world_size; ++r)
        for (size_t i = 0; i < kept; ++i) {
            unsigned char expected[8] = {0};
            store(expected, 0, expected_at(run, first_of(run, r) + i), run->dtype);
            wrong += memcmp(expected, run->result[r] + i * width, width) != 0;
        }
    check(wrong == 0, "%s, %s%s, wire %s, %s: %d elements differ from the naive loop", what,
          sw_dtype_name(run->dtype), run->op == SW_REDOP_SUM ? " sums" : "",
          run->wire == PLAIN ? "as they are" : sw_dtype_name(run->wire),
          run->is_slice ? run->stands ? "slices on top" : "slices" : "whole", wrong);
}

static void mean_of(const char *what, hosting *run, sim_policy policy)
{
    gpu_ranks_run(run->world_size, policy, 3, run_rank, run);
    gpu_expect_clean(what);
    check_bits(what, run);
}

/* The bytes that a rank of `hosts` hosts sends to others, with `size` ranks each. */
static void check_bytes(const char *what, const hosting *run, int hosts)
{
    size_t width = sw_dtype_size_bytes(run->dtype);
    bool is_narrow = run->wire != PLAIN;
    size_t up = is_narrow ? 2 : is_half(run->dtype) ? 4 : width, down = is_narrow ? 2 : width;
    double piece = PIECE * (double)(hosts - 1);
    double expected = piece * (double)up + (run->is_slice ? 0 : piece * (double)down);
    if (run->is_slice && run->stands && !is_narrow)
        expected += piece * (double)width;
    for (int r = 0; r < run->world_size; ++r)
        check(run->sent[r] == expected, "%s, %s: rank %d sends %g bytes to other hosts, not %g",
              what, run->is_slice ? "slices" : "whole", r, run->sent[r], expected);
}

typedef struct shape {
    const char *what;
    int world_size, host_of[RANKS_MAX], hosts; /* hosts: 0 unless all are of one size */
} shape;

static const shape SHAPES[] = {
    {"2 hosts of 2", 4, {0, 0, 1, 1}, 2},
    {"2 hosts of 4", 8, {0, 0, 0, 0, 1, 1, 1, 1}, 2},
    {"4 hosts of 2", 8, {0, 0, 1, 1, 2, 2, 3, 3}, 4},
    {"ranks in turns", 4, {0, 1, 0, 1}, 2},
    {"hosts of 3 and 1", 4, {0, 0, 0, 1}, 0},
    {"hosts of 2, 1 and 3, in no order", 6, {0, 1, 2, 0, 2, 2}, 0},
};

static hosting made(const shape *hosts, sw_dtype dtype, sw_dtype wire, bool is_slice)
{
    hosting run = {.world_size = hosts->world_size,
                   .dtype = dtype,
                   .wire = wire,
                   .op = SW_REDOP_MEAN,
                   .is_slice = is_slice,
                   .left_out = -1};
    memcpy(run.host_of, hosts->host_of, sizeof run.host_of);
    return run;
}

static void check_shape(const shape *hosts, sim_policy policy)
{
    static const sw_dtype dtypes[][2] = {
        {SW_DTYPE_FLOAT32, SW_DTYPE_COUNT},   {SW_DTYPE_BFLOAT16, SW_DTYPE_COUNT},
        {SW_DTYPE_FLOAT16, SW_DTYPE_COUNT},   {SW_DTYPE_FLOAT64, SW_DTYPE_COUNT},
        {SW_DTYPE_INT32, SW_DTYPE_COUNT},     {SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16},
        {SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT16}, {SW_DTYPE_BFLOAT16, SW_DTYPE_BFLOAT16}};
    static hosting run;
    for (size_t k = 0; k < sizeof dtypes / sizeof *dtypes; ++k)
        for (int form = 0; form < 3; ++form) { /* whole, slices, slices on top of a mean */
            run = made(hosts, dtypes[k][0], dtypes[k][1], form > 0);
            run.stands = form == 2;
            if (run.dtype == SW_DTYPE_INT32 || (form == 1 && run.wire == PLAIN))
                run.op = SW_REDOP_SUM;
            if (run.dtype == SW_DTYPE_INT32 && run.stands)
                continue; /* nothing of an integer stands: 0.3 is 0 */
            mean_of(hosts->what, &run, policy);
            if (hosts->hosts)
                check_bytes(hosts->what, &run, hosts->hosts);
        }
}

/* A slice has two owners, on two hosts or on one. */
static void check_mesh(const shape *hosts, sim_policy policy)
{
    static hosting run;
    for (int stands = 0; stands < 2; ++stands) {
        run = made(hosts, SW_DTYPE_FLOAT32, PLAIN, true);
        run.rows = 2;
        run.stands = stands;
        mean_of(hosts->what, &run, policy);
        run = made(hosts, SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16, true);
        run.rows = 2;
        run.stands = stands;
        mean_of(hosts->what, &run, policy);
    }
}

static void check_left_out(const shape *hosts, int rank, sim_policy policy)
{
    static hosting run;
    for (int stands = 0; stands < 2; ++stands) {
        run = made(hosts, SW_DTYPE_FLOAT32, PLAIN, true);
        run.left_out = rank;
        run.stands = stands;
        mean_of("a rank is left out", &run, policy);
    }
}

/* Hosts of one rank each exchange at once, and have the same bits. */
static void check_lone_hosts(void)
{
    static const shape lone = {"hosts of 1", 4, {0, 1, 2, 3}, 0};
    static hosting run;
    run = made(&lone, SW_DTYPE_BFLOAT16, PLAIN, true);
    mean_of(lone.what, &run, SIM_RANDOM);
    for (int r = 0; r < 4; ++r)
        check(run.sent[r] == 3 * PIECE * 2.0, "a host of one rank sends %g bytes", run.sent[r]);
}

/* Every third call of rank 0 fails in turn. It then ends its communicator, as the caller of a
 * failing call does, and its call or its deadline ends each other rank. */
static void check_failing_calls(void)
{
    static hosting run;
    int failed = 0;
    for (long nth = 1;; nth += 3, ++failed) {
        run = made(&SHAPES[0], SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16, false);
        run.fail_nth = nth;
        bool ok = gpu_ranks_run(run.world_size, SIM_ON_DEMAND, 3, run_rank, &run);
        if (!run.failed[0]) { /* the mean has fewer calls */
            check(ok, "no call of rank 0 failed: %s", run.message[1]);
            break;
        }
        for (int r = 0; r < run.world_size; ++r)
            check(!run.failed[r] || strlen(run.message[r]) > 10, "call %ld: no sentence on rank %d",
                  nth, r);
        check(*gpu_sim->leaks() == '\0', "call %ld (%s) left %s", nth, run.message[0],
              gpu_sim->leaks());
    }
    check(failed > 8, "only %d calls failed", failed);
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
    for (size_t k = 0; k < sizeof SHAPES / sizeof *SHAPES; ++k)
        check_shape(&SHAPES[k], (sim_policy)(k % SIM_POLICY_COUNT));
    check_mesh(&SHAPES[0], SIM_RANDOM);
    check_mesh(&SHAPES[1], SIM_LATE);
    check_mesh(&SHAPES[3], SIM_RANDOM);
    for (int rank = 0; rank < 4; rank += 3) /* the second leaves a host without any */
        check_left_out(&SHAPES[4], rank, SIM_RANDOM);
    check_left_out(&SHAPES[1], 5, SIM_ON_DEMAND);
    check_lone_hosts();
    check_failing_calls();
    return check_result();
}
