/* test_device_block_hosts.c - blocks of integers over several hosts of GPUs.
 *
 * Laws, for hosts of one size and of several, ranks that follow one another or not, 4 and 8 bits,
 * whole results and slices, over two rounds:
 *   - results and errors are, bit for bit, those of a naive loop: a host's ranks add in rank order,
 *     times hosts over ranks; each host encodes its mean and its error; hosts fold the records, and
 *     the owner's host takes the rounding error of the fold, times the number of hosts;
 *   - every rank of a host has the host's error;
 *   - with H hosts of equal sizes a rank sends H - 1 slices of the records to other hosts, and as
 *     many of a whole result;
 *   - no schedule gives a race or a leak.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compress/device_block_round.h"
#include "gpu_ranks.h"

enum { RANKS_MAX = 8, SPANS = 3, BLOCK = 32, NUMEL = 384, ROUNDS = 2, RECORDS_MAX = 16 };
enum { RECORD_BYTES_MAX = 4 + BLOCK };
static const int64_t TIMEOUT_NS = 8000000000;
/* A gap, and spans that begin and end inside of blocks. */
static const size_t OFFSETS[SPANS] = {0, 77, 215}, NUMELS[SPANS] = {70, 129, 150};

static void (*set_node)(int node);
static double (*sent_across)(void);

typedef struct hosting {
    int world_size, host_of[RANKS_MAX], hosts, bits;
    bool keeps_slice, keeps_error;
    size_t numel; /* of the memory in which the spans lie */
    /* results */
    float values[RANKS_MAX][ROUNDS][NUMEL], error[RANKS_MAX][NUMEL];
    double sent[RANKS_MAX];
    uint64_t counted[RANKS_MAX];
    size_t slice_bytes;
} hosting;

static float value_of(int rank, int round, size_t i)
{
    uint32_t mixed = (uint32_t)(rank * 7919 + round * 104729) + (uint32_t)i * 15485863u + 77u;
    mixed ^= mixed >> 15;
    mixed *= 2246822519u;
    mixed ^= mixed >> 13;
    return (float)(int32_t)mixed * 0x1p-31f;
}

static size_t share_of(const hosting *run)
{
    return run->keeps_slice ? run->numel / (size_t)run->world_size : 0;
}

static sw_status cut_of(const hosting *run, int rank, float *values, float *error,
                        sw_block_span *spans, sw_block_cut *cut, sw_error *err)
{
    const sw_block_codec codec = {.block = BLOCK, .bits = run->bits};
    for (size_t s = 0; s < SPANS; ++s)
        spans[s] = (sw_block_span){.values = values + OFFSETS[s],
                                   .error = run->keeps_error ? error + OFFSETS[s] : NULL,
                                   .offset = OFFSETS[s],
                                   .numel = NUMELS[s]};
    return sw_block_cut_init(cut, &codec, spans, SPANS, share_of(run), run->keeps_slice, rank,
                             run->world_size, err);
}

/* ---- the naive loop ---- */

typedef struct naive {
    float mean[RANKS_MAX][NUMEL], error[RANKS_MAX][NUMEL]; /* by host */
    float result[ROUNDS][NUMEL];
} naive;

/* Return the host whose rank owns record `number`. */
static int owner_of(const hosting *run, size_t number)
{
    float unused[1] = {0};
    sw_block_span spans[SPANS];
    sw_block_cut cut;
    int owner = 0;
    if (cut_of(run, 0, unused, unused, spans, &cut, NULL) != SW_OK)
        abort();
    for (int r = 0; r < run->world_size; ++r)
        if (cut.owners[r].own <= number && number < cut.owners[r].end)
            owner = r;
    sw_block_cut_fini(&cut);
    return run->host_of[owner];
}

static void add_inside(const hosting *run, int round, naive *n)
{
    float share = (float)((double)run->hosts / run->world_size);
    for (int h = 0; h < run->hosts; ++h)
        for (size_t i = 0; i < run->numel; ++i) {
            float sum = 0;
            int count = 0;
            for (int r = 0; r < run->world_size; ++r)
                if (run->host_of[r] == h)
                    sum = count++ ? sum + value_of(r, round, i) : value_of(r, round, i);
            n->mean[h][i] = sum * share;
        }
}

static void fold_span(const hosting *run, int round, size_t s, size_t first, naive *n)
{
    const sw_block_codec codec = {.block = BLOCK, .bits = run->bits};
    unsigned char records[RANKS_MAX][RECORDS_MAX * RECORD_BYTES_MAX];
    unsigned char folded[RECORDS_MAX * RECORD_BYTES_MAX];
    const unsigned char *wires[RANKS_MAX];
    float rest[RECORDS_MAX * BLOCK];
    size_t at = OFFSETS[s], numel = NUMELS[s], count = (numel + BLOCK - 1) / BLOCK;
    for (int h = 0; h < run->hosts; ++h) {
        sw_block_encode(&codec, records[h], n->mean[h] + at,
                        run->keeps_error ? n->error[h] + at : NULL, numel);
        wires[h] = records[h];
    }
    sw_block_fold(&codec, folded, wires, (size_t)run->hosts, count, (float)(1.0 / run->hosts),
                  rest);
    for (int h = 0; h < run->hosts; ++h)
        sw_block_decode(&codec, n->mean[h] + at, folded, run->keeps_error ? n->error[h] + at : NULL,
                        records[h], numel);
    memcpy(n->result[round] + at, n->mean[0] + at, numel * sizeof(float));
    for (size_t i = 0; run->keeps_error && i < numel; ++i)
        n->error[owner_of(run, first + i / BLOCK)][at + i] += rest[i] * (float)run->hosts;
}

static void run_naive(const hosting *run, naive *n)
{
    memset(n, 0, sizeof *n);
    for (int round = 0; round < ROUNDS; ++round) {
        size_t first = 0;
        add_inside(run, round, n);
        for (size_t s = 0; s < SPANS; first += (NUMELS[s++] + BLOCK - 1) / BLOCK)
            fold_span(run, round, s, first, n);
    }
}

/* ---- ranks ---- */

typedef struct held {
    void *flat, *error, *message, *received, *whole, *rest, *flags, *pinned;
    sw_stream *stream;
    sw_event *done;
    sw_host_map map;
    sw_device_hosts hosts;
} held;

static sw_status make_clear(gpu_rank *self, held *own, size_t bytes, void **memory)
{
    const sw_device_ops *ops = self->device->ops;
    SW_TRY(ops->memory_alloc(self->device, bytes, memory, &self->err));
    return ops->fill_async(self->device, *memory, 0, bytes, own->stream, &self->err);
}

static sw_status make(gpu_rank *self, held *own)
{
    hosting *run = self->context;
    const sw_device_ops *ops = self->device->ops;
    size_t contributions, sums, bytes = NUMEL * sizeof(float);
    sw_block_span spans[SPANS];
    sw_block_cut cut;
    SW_TRY(ops->stream_create(self->device, false, &own->stream, &self->err));
    SW_TRY(ops->event_create(self->device, &own->done, &self->err));
    SW_TRY(ops->pinned_alloc(self->device, bytes, &own->pinned, &self->err));
    SW_TRY(sw_host_map_init(&own->map, run->host_of, run->world_size, &self->err));
    SW_TRY(sw_device_hosts_init(&own->hosts, self->all, &own->map, NULL, &self->err));
    SW_TRY(cut_of(run, self->rank, NULL, NULL, spans, &cut, &self->err));
    size_t slice = cut.each * cut.record_bytes, ranks = (size_t)run->world_size;
    size_t rest = cut.each * BLOCK * sizeof(float);
    sw_block_cut_fini(&cut);
    run->slice_bytes = slice;
    sw_device_hosts_sizes(&own->hosts, run->numel, &contributions, &sums);
    SW_TRY(make_clear(self, own, contributions, &own->hosts.contributions));
    SW_TRY(make_clear(self, own, sums, &own->hosts.sums));
    SW_TRY(make_clear(self, own, bytes, &own->flat));
    SW_TRY(make_clear(self, own, bytes, &own->error));
    SW_TRY(make_clear(self, own, ranks * slice, &own->message));
    SW_TRY(make_clear(self, own, ranks * slice, &own->received));
    SW_TRY(make_clear(self, own, ranks * slice, &own->whole));
    SW_TRY(
        make_clear(self, own, (size_t)sw_host_size(&own->map, own->hosts.host) * rest, &own->rest));
    return make_clear(self, own, (ranks + 1) * sizeof(int32_t), &own->flags);
}

static sw_status move(gpu_rank *self, held *own, void *to, const void *from)
{
    const sw_device_ops *ops = self->device->ops;
    SW_TRY(ops->copy_async(self->device, to, from, NUMEL * sizeof(float), own->stream, &self->err));
    SW_TRY(ops->event_record(self->device, own->done, own->stream, &self->err));
    return sw_peers_wait(self->comm, own->done, "the test's copy", &self->err);
}

static sw_status run_round(gpu_rank *self, held *own, int round)
{
    hosting *run = self->context;
    sw_block_span spans[SPANS];
    sw_block_cut cut;
    const sw_device_block_memory memory = {
        .message = own->message,
        .received = own->received,
        .whole = own->whole,
        .rest = run->keeps_error ? own->rest : NULL,
        .flags = run->keeps_error ? own->flags : NULL,
        .flat = {own->flat, run->numel, SW_DTYPE_FLOAT32},
    };
    for (size_t i = 0; i < NUMEL; ++i)
        ((float *)own->pinned)[i] = value_of(self->rank, round, i);
    self->sim->host_access(own->pinned, NUMEL * sizeof(float), SW_ACCESS_WRITE, "gradients");
    SW_TRY(move(self, own, own->flat, own->pinned));
    SW_TRY(cut_of(run, self->rank, own->flat, own->error, spans, &cut, &self->err));
    double before = sent_across();
    sw_status status =
        sw_device_block_round(self->all, &own->hosts, &cut, &memory, run->keeps_slice, own->stream,
                              &run->counted[self->rank], &self->err);
    sw_block_cut_fini(&cut);
    SW_TRY(status);
    SW_TRY(move(self, own, own->pinned, own->flat));
    run->sent[self->rank] = sent_across() - before;
    self->sim->host_access(own->pinned, NUMEL * sizeof(float), SW_ACCESS_READ, "results");
    memcpy(run->values[self->rank][round], own->pinned, NUMEL * sizeof(float));
    return SW_OK;
}

static sw_status run_rounds(gpu_rank *self, held *own)
{
    hosting *run = self->context;
    set_node(run->host_of[self->rank]);
    SW_TRY(make(self, own));
    for (int round = 0; round < ROUNDS; ++round)
        SW_TRY(run_round(self, own, round));
    SW_TRY(move(self, own, own->pinned, own->error));
    self->sim->host_access(own->pinned, NUMEL * sizeof(float), SW_ACCESS_READ, "errors");
    memcpy(run->error[self->rank], own->pinned, NUMEL * sizeof(float));
    return SW_OK;
}

static bool run_rank(gpu_rank *self)
{
    held own = {0};
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = run_rounds(self, &own);
    if (self->device) {
        sw_device *device = self->device;
        void *memory[] = {own.flat,      own.error, own.message, own.received,
                          own.whole,     own.rest,  own.flags,   own.hosts.contributions,
                          own.hosts.sums};
        for (size_t i = 0; i < sizeof memory / sizeof *memory; ++i)
            device->ops->memory_free(device, memory[i]);
        device->ops->pinned_free(device, own.pinned);
        device->ops->event_destroy(device, own.done);
        device->ops->stream_destroy(device, own.stream);
    }
    sw_device_hosts_fini(&own.hosts);
    sw_host_map_fini(&own.map);
    gpu_rank_close(self);
    return check(status == SW_OK, "rank %d: %s", self->rank, self->err.message);
}

/* ---- laws ---- */

static void check_run(const char *what, hosting *run, sim_policy policy)
{
    static naive expected;
    int wrong = 0, lost = 0;
    size_t share = share_of(run);
    gpu_ranks_run(run->world_size, policy, 5, run_rank, run);
    gpu_expect_clean(what);
    run_naive(run, &expected);
    for (int r = 0; r < run->world_size; ++r)
        for (size_t s = 0; s < SPANS; ++s)
            for (size_t i = OFFSETS[s]; i < OFFSETS[s] + NUMELS[s]; ++i) {
                bool is_own = !run->keeps_slice || i / share == (size_t)r;
                for (int round = 0; is_own && round < ROUNDS; ++round)
                    wrong += memcmp(&run->values[r][round][i], &expected.result[round][i], 4) != 0;
                lost += run->keeps_error &&
                        memcmp(&run->error[r][i], &expected.error[run->host_of[r]][i], 4) != 0;
            }
    check(wrong == 0, "%s, %d bits, %s: %d results differ from the naive loop", what, run->bits,
          run->keeps_slice ? "slices" : "whole", wrong);
    check(lost == 0, "%s, %d bits, %s: %d errors differ from the naive loop", what, run->bits,
          run->keeps_slice ? "slices" : "whole", lost);
}

typedef struct shape {
    const char *what;
    int world_size, host_of[RANKS_MAX], hosts;
    bool is_even;
} shape;

static const shape SHAPES[] = {
    {"2 hosts of 2", 4, {0, 0, 1, 1}, 2, true},
    {"2 hosts of 4", 8, {0, 0, 0, 0, 1, 1, 1, 1}, 2, true},
    {"ranks in turns", 4, {0, 1, 0, 1}, 2, true},
    {"hosts of 3 and 1", 4, {0, 0, 0, 1}, 2, false},
    {"hosts of 2, 1 and 3, in no order", 6, {0, 1, 2, 0, 2, 2}, 3, false},
};

static void check_shape(const shape *hosts, sim_policy policy)
{
    static hosting run;
    for (int form = 0; form < 8; ++form) {
        memset(&run, 0, sizeof run);
        run.world_size = hosts->world_size;
        run.hosts = hosts->hosts;
        memcpy(run.host_of, hosts->host_of, sizeof run.host_of);
        run.bits = form & 1 ? 4 : 8;
        run.keeps_error = form & 2;
        run.keeps_slice = form & 4;
        run.numel = run.keeps_slice ? NUMEL : 367; /* no multiple of the ranks */
        check_run(hosts->what, &run, policy);
        double records = (double)run.slice_bytes * (hosts->hosts - 1);
        if (!run.keeps_slice)
            records *= 2;
        for (int r = 0;
             hosts->is_even && !(run.keeps_slice && run.keeps_error) && r < run.world_size;
             ++r) /* with both, verdicts travel too */
            check(run.sent[r] == records, "%s: rank %d sends %g bytes to other hosts, not %g",
                  hosts->what, r, run.sent[r], records);
        check(run.counted[0] > run.sent[0], "%s: %g bytes, of which %g cross", hosts->what,
              (double)run.counted[0], run.sent[0]);
    }
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
    return check_result();
}
