/* test_device_rounds.c - the reducer's state machine over simulated GPUs, against a naive loop that
 * folds with the host kernel.
 *
 * Laws: whatever the schedule, the mean is the fold in rank order, bit for bit, of gradients that
 * come into being on two streams in turn; a gradient's memory may be overwritten on the stream that
 * wrote it as soon as its bucket was sent, and a place as soon as buckets travel elsewhere. In the
 * first round nothing leaves early. Every rank learns what some rank used. Ranks that count their
 * steps differently, or differ in what stands, all hear of it, and no other does. A mistake has the
 * host's sentence. No schedule gives a race or a leak; each driver call that fails ends in a named
 * error and leaves nothing. By rows a slice has the chunks of torch.chunk, also where two ranks own
 * it. A bucket is written by at most one launch.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/local.h"
#include "gpu_ranks.h"
#include "kernels/kernels.h"
#include "reduce/reducer.h"

enum { PARAMS = 6, STEPS = 4, NUMEL_MAX = 300, SEEDS = 5, STREAMS = 2, FAILURE = 999 };
static const size_t NONE = SIZE_MAX;
static const int64_t TIMEOUT_NS = 2000000000;
static const size_t CAP_BYTES = 512;
static sw_layout_param params[PARAMS] = {
    {40, SW_DTYPE_FLOAT32, true, 0, 0},  {100, SW_DTYPE_FLOAT32, true, 0, 0},
    {64, SW_DTYPE_FLOAT32, true, 0, 0},  {NUMEL_MAX, SW_DTYPE_FLOAT32, true, 0, 0},
    {33, SW_DTYPE_FLOAT32, false, 0, 0}, {7, SW_DTYPE_FLOAT32, true, 0, 0}};
/* By rows: 8, 10, 1, 100 and 7 of them. */
static const size_t row_numel[PARAMS] = {5, 10, 64, 3, 11, 1};
static const char *const names[PARAMS] = {"p0", "p1", "p2", "p3", "frozen", "p5"};

typedef struct run_plan {
    bool sliced, moves_place;
    bool is_shared; /* each slice has two owners */
    bool is_divided; /* the transport adds what is divided as it is copied: exact up to W = 2 */
    int extra_steps;   /* that rank 1 counts after the first round */
    bool stands_apart; /* rank 1 alone has not cleared p1 before the second round */
    bool looks_late;   /* the host does not look at the tags of the first round before the third */
    bool adopts_late;  /* the first bucket is adopted after a local round */
    bool twice;        /* p5 gets a second gradient in round 2 */
    long fail_nth;
    uint64_t early; /* buckets of rank 0 that left early, in the first round and in all */
    uint64_t early_first;
    int mismatches; /* ranks that heard of one */
    char message[GPU_RANKS_MAX][SW_ERROR_MESSAGE_BYTES];
    bool failed[GPU_RANKS_MAX];
} run_plan;

static void cut_by_rows(bool by_rows)
{
    for (size_t p = 0; p < PARAMS; ++p)
        params[p].row_numel = by_rows ? row_numel[p] : 0;
}

static float value_of(int rank, int step, size_t p, size_t i)
{
    uint32_t mixed =
        (uint32_t)(rank * 7919 + step * 104729) + (uint32_t)(p * 1299709 + i * 15485863);
    mixed ^= mixed >> 15;
    mixed *= 2246822519u;
    mixed ^= mixed >> 13;
    return (float)(int32_t)mixed * 0x1p-31f;
}

static bool uses(int rank, int step, size_t p)
{
    return params[p].trainable && (step == 0 || (p + (size_t)(rank + step)) % 3 != 0);
}

static bool stands(const run_plan *plan, int rank, int step, size_t p)
{
    bool apart = plan->stands_apart && rank == 1 && step == 1 && p == 1;
    return plan->sliced && !plan->is_divided && (apart || (step == 2 && (p == 1 || p == 2)));
}

/* ---- the naive loop ---- */

static float expected[STEPS][PARAMS][NUMEL_MAX];

static void fill_expected(const run_plan *plan, int world_size)
{
    for (int step = 0; step < STEPS; ++step)
        for (size_t p = 0; p < PARAMS; ++p) {
            float given[GPU_RANKS_MAX][NUMEL_MAX];
            const void *source[GPU_RANKS_MAX];
            void *to = expected[step][p];
            for (int r = 0; r < world_size; ++r) {
                source[r] = given[r];
                for (size_t i = 0; i < params[p].numel; ++i) {
                    given[r][i] = uses(r, step, p) ? value_of(r, step, p, i) : 0.0f;
                    if (stands(plan, r, step, p))
                        given[r][i] = expected[step - 1][p][i] + given[r][i];
                }
            }
            sw_kernels()->fold[SW_DTYPE_FLOAT32](&to, 1, source, world_size, params[p].numel,
                                                 1.0 / world_size, SW_REDOP_MEAN);
        }
}

/* ---- one rank ---- */

typedef struct loop {
    gpu_rank *self;
    run_plan *plan;
    sw_reducer *reducer;
    sw_stream *stream[STREAMS];
    sw_event *ended;
    float *gradient[PARAMS], *pinned[PARAMS]; /* autograd's own; what it is made of */
    void *bucket[PARAMS];
    void *place[2];  /* the one at first, and the one later */
    size_t filled;   /* the bucket whose gradients are still the reducer's, or NONE */
} loop;

static sw_stream *stream_of(const loop *l, size_t p)
{
    return l->stream[p % STREAMS];
}

static sw_status prepare(loop *l)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    void *memory;
    sw_reducer_options options = {.bucket_cap_bytes = CAP_BYTES,
                                  .sliced = l->plan->sliced,
                                  .deterministic = !l->plan->is_divided,
                                  .label = "m"};
    int slice_of[GPU_RANKS_MAX], replica_of[GPU_RANKS_MAX], count = l->self->world_size / 2;
    const sw_slices slices = {.count = count, .of_rank = slice_of, .replica_of_rank = replica_of};
    for (int r = 0; r < l->self->world_size; ++r) {
        slice_of[r] = count ? r % count : 0;
        replica_of[r] = count ? r / count : 0;
    }
    options.slices = l->plan->is_shared ? &slices : NULL;
    for (int s = 0; s < STREAMS; ++s)
        SW_TRY(device->ops->stream_create(device, false, &l->stream[s], err));
    SW_TRY(device->ops->event_create(device, &l->ended, err));
    for (size_t p = 0; p < PARAMS; ++p) {
        SW_TRY(device->ops->memory_alloc(device, sizeof(float[NUMEL_MAX]), &memory, err));
        l->gradient[p] = memory;
        SW_TRY(device->ops->pinned_alloc(device, sizeof(float[NUMEL_MAX]), &memory, err));
        l->pinned[p] = memory;
    }
    for (int k = 0; k < 2; ++k) /* padding travels, too */
        SW_TRY(device->ops->memory_alloc(device, sizeof(float[2 * NUMEL_MAX]), &l->place[k], err));
    for (int k = 0; k < 2; ++k)
        SW_TRY(device->ops->fill_async(device, l->place[k], 0, sizeof(float[2 * NUMEL_MAX]),
                                       l->stream[0], err));
    SW_TRY(sw_reducer_create_on_device(l->self->all, params, names, PARAMS, &options, &l->reducer,
                                       err));
    sw_reducer_use_stream(l->reducer, l->stream[0]);
    const sw_layout *layout = sw_reducer_layout(l->reducer);
    for (size_t b = 0; b < layout->bucket_count; ++b) {
        size_t bytes = layout->bucket[b].numel * sizeof(float);
        if (!layout->bucket[b].trainable)
            continue;
        SW_TRY(device->ops->memory_alloc(device, bytes, &l->bucket[b], err));
        SW_TRY(device->ops->fill_async(device, l->bucket[b], 0, bytes, l->stream[0], err));
        if (b > 0 || !l->plan->adopts_late)
            SW_TRY(sw_reducer_adopt(l->reducer, b, l->bucket[b], err));
    }
    SW_TRY(sw_device_comm_follow(l->self->all, l->stream[1], l->stream[0], err));
    return l->plan->sliced ? sw_reducer_set_place(l->reducer, l->place[0], err) : SW_OK;
}

/* Autograd writes a gradient on its stream. */
static sw_status backward(loop *l, size_t p, int step)
{
    sw_device *device = l->self->device;
    size_t bytes = params[p].numel * sizeof(float);
    for (size_t i = 0; i < params[p].numel; ++i)
        l->pinned[p][i] = value_of(l->self->rank, step, p, i);
    gpu_sim->host_access(l->pinned[p], bytes, SW_ACCESS_WRITE, "the test's upload");
    return device->ops->copy_async(device, l->gradient[p], l->pinned[p], bytes, stream_of(l, p),
                                   &l->self->err);
}

/* Once the reducer lets go of a bucket's gradients, they go back to the allocators of their streams.
 */
static sw_status give_to_others(loop *l)
{
    sw_device *device = l->self->device;
    const sw_layout *layout = sw_reducer_layout(l->reducer);
    if (l->filled == NONE || sw_reducer_reads_gradients(l->reducer))
        return SW_OK;
    for (size_t k = 0; k < layout->bucket[l->filled].count; ++k) {
        size_t p = layout->order[layout->bucket[l->filled].first + k];
        SW_TRY(device->ops->fill_async(device, l->gradient[p], 0xff, sizeof(float[NUMEL_MAX]),
                                       stream_of(l, p), &l->self->err));
    }
    l->filled = NONE;
    return SW_OK;
}

static sw_status place_bucket(loop *l, size_t bucket, int step)
{
    const sw_layout *layout = sw_reducer_layout(l->reducer);
    sw_error *err = &l->self->err;
    uint64_t launches = l->self->device->stats.launches;
    SW_TRY(sw_reducer_reserve(l->reducer, bucket, err));
    SW_TRY(give_to_others(l));
    check(l->filled == NONE, "a gradient outlives the next bucket's reserve");
    for (size_t k = 0; k < layout->bucket[bucket].count; ++k) {
        size_t p = layout->order[layout->bucket[bucket].first + k];
        if (uses(l->self->rank, step, p))
            SW_TRY(sw_reducer_write(l->reducer, p, l->gradient[p], false, err));
        else
            SW_TRY(sw_reducer_clear(l->reducer, p, err));
        sw_reducer_place(l->reducer, p, stands(l->plan, l->self->rank, step, p));
    }
    SW_TRY(sw_reducer_seal(l->reducer, bucket, err));
    launches = l->self->device->stats.launches - launches;
    l->filled = bucket;
    check(sw_reducer_reads_gradients(l->reducer) == l->plan->sliced,
          "sliced, PACK runs behind means, else on the gradients' stream");
    check(launches <= 1, "bucket %zu was written by %llu launches", bucket,
          (unsigned long long)launches);
    return SW_OK;
}

/* The gradient of `p` exists. */
static sw_status come(loop *l, size_t p, int step)
{
    sw_error *err = &l->self->err;
    bool due;
    size_t bucket;
    sw_reducer_use_stream(l->reducer, stream_of(l, p));
    SW_TRY(sw_reducer_produce(l->reducer, p, err));
    SW_TRY(sw_reducer_mark_ready(l->reducer, p, step, &due, err));
    while (due) {
        SW_TRY(sw_reducer_advance(l->reducer, err));
        if (!sw_reducer_is_waiting(l->reducer, &bucket))
            break;
        SW_TRY(place_bucket(l, bucket, step));
        SW_TRY(sw_reducer_advance(l->reducer, err));
        SW_TRY(give_to_others(l));
    }
    return SW_OK;
}

static sw_status run_backward(loop *l, int step)
{
    sw_error *err = &l->self->err;
    size_t bucket;
    sw_reducer_use_stream(l->reducer, l->stream[0]);
    if (step != 1 || !l->plan->looks_late)
        SW_TRY(sw_reducer_check(l->reducer, err));
    SW_TRY(sw_reducer_arrive(l->reducer, err));
    if (step == 0 && l->plan->adopts_late) {
        SW_TRY(sw_reducer_open(l->reducer, step, false, err));
        SW_TRY(sw_reducer_finish(l->reducer, err));
        SW_TRY(sw_reducer_adopt(l->reducer, 0, l->bucket[0], err));
        SW_TRY(sw_reducer_arrive(l->reducer, err));
    }
    SW_TRY(sw_reducer_open(l->reducer, step, true, err));
    for (size_t p = PARAMS; p-- > 0;)
        if (uses(l->self->rank, step, p)) {
            SW_TRY(backward(l, p, step));
            SW_TRY(come(l, p, step));
        }
    if (l->plan->twice && step == 2) /* rank 0 uses all of the first bucket */
        SW_TRY(come(l, PARAMS - 1, step));
    sw_reducer_use_stream(l->reducer, l->stream[0]);
    while (sw_reducer_next_unsent(l->reducer, &bucket)) {
        SW_TRY(place_bucket(l, bucket, step));
        SW_TRY(sw_reducer_send(l->reducer, bucket, err));
        SW_TRY(give_to_others(l));
    }
    SW_TRY(sw_reducer_finish(l->reducer, err));
    SW_TRY(give_to_others(l));
    check(l->filled == NONE, "a gradient outlives its round");
    return SW_OK;
}

/* Where the mean of a parameter lies, and which of its elements. */
static const float *mean_of(const loop *l, size_t p, size_t *first, size_t *numel)
{
    size_t slices = (size_t)l->self->world_size / (l->plan->is_shared ? 2 : 1);
    size_t slice = (size_t)l->self->rank % slices;
    *first = 0;
    *numel = params[p].numel;
    if (!l->plan->sliced)
        return (const float *)(const void *)sw_reducer_address(l->reducer, p);
    *first = sw_layout_run_in(sw_reducer_layout(l->reducer), p, slice, slices).begin;
    if (params[p].row_numel > 0) { /* as torch.chunk cuts */
        size_t rows = params[p].numel / row_numel[p], chunk = (rows + slices - 1) / slices;
        size_t begin = slice * chunk < rows ? slice * chunk : rows;
        size_t end = begin + chunk < rows ? begin + chunk : rows;
        (void)sw_reducer_result(l->reducer, p, numel);
        check(*numel == (end - begin) * row_numel[p] && (*numel == 0 || *first == begin * row_numel[p]),
              "W=%d, rank %d, %s: %zu elements from %zu", l->self->world_size, l->self->rank,
              names[p], *numel, *first);
    }
    return (const float *)(const void *)sw_reducer_result(l->reducer, p, numel);
}

/* The optimizer reads, on the first stream. */
static sw_status check_means(loop *l, int step)
{
    sw_device *device = l->self->device;
    sw_error *err = &l->self->err;
    for (size_t p = 0; p < PARAMS; ++p) {
        size_t first, numel, wrong = 0;
        bool any = false;
        for (int r = 0; r < l->self->world_size; ++r)
            any |= uses(r, step, p);
        check(sw_reducer_used_by_any(l->reducer, p) == any, "use bit of %s in round %d", names[p],
              step);
        if (!params[p].trainable)
            continue;
        const float *mean = mean_of(l, p, &first, &numel);
        if (numel > 0)
            SW_TRY(device->ops->copy_async(device, l->pinned[p], mean, numel * sizeof(float),
                                           l->stream[0], err));
        SW_TRY(device->ops->event_record(device, l->ended, l->stream[0], err));
        SW_TRY(device->ops->event_wait(device, l->ended, TIMEOUT_NS, "the test's results", err));
        if (numel > 0)
            gpu_sim->host_access(l->pinned[p], numel * sizeof(float), SW_ACCESS_READ, "results");
        for (size_t i = 0; i < numel; ++i)
            wrong += memcmp(&l->pinned[p][i], &expected[step][p][first + i], sizeof(float)) != 0;
        check(wrong == 0, "W=%d, rank %d, round %d, %s: %zu of %zu elements are wrong",
              l->self->world_size, l->self->rank, step, names[p], wrong, numel);
    }
    return SW_OK;
}

/* Buckets travel elsewhere from now on; what they lay in is anything at once, on a stream that has
 * not waited for the means; nor has the host, after a round in which all ranks used all. */
static sw_status move_place(loop *l)
{
    sw_device *device = l->self->device;
    sw_reducer_use_stream(l->reducer, l->stream[1]);
    SW_TRY(sw_reducer_set_place(l->reducer, l->place[1], &l->self->err));
    SW_TRY(device->ops->fill_async(device, l->place[0], 0xff, sizeof(float[2 * NUMEL_MAX]),
                                   l->stream[1], &l->self->err));
    sw_reducer_use_stream(l->reducer, l->stream[0]);
    return SW_OK;
}

static sw_status train(loop *l)
{
    bool is_apart = l->plan->extra_steps || l->plan->stands_apart;
    for (int step = 0; step < STEPS; ++step) {
        SW_TRY(run_backward(l, step));
        if (step == 0 && l->self->rank == 0)
            l->plan->early_first = sw_reducer_get_stats(l->reducer)->buckets_early;
        if (step == 0 && l->plan->moves_place)
            SW_TRY(move_place(l));
        else if (!is_apart)
            SW_TRY(check_means(l, step));
        sw_reducer_count_step(l->reducer);
        for (int k = 0; step == 0 && l->self->rank == 1 && k < l->plan->extra_steps; ++k)
            sw_reducer_count_step(l->reducer);
        SW_TRY(l->self->device->ops->event_record(l->self->device, l->ended, l->stream[0],
                                                  &l->self->err));
        SW_TRY(l->self->device->ops->event_wait(l->self->device, l->ended, TIMEOUT_NS,
                                                "the test's step", &l->self->err));
    }
    if (l->self->rank == 0)
        l->plan->early = sw_reducer_get_stats(l->reducer)->buckets_early;
    return sw_reducer_check(l->reducer, &l->self->err);
}

static void finish(loop *l)
{
    sw_device *device = l->self->device;
    sw_reducer_destroy(l->reducer);
    for (int s = 0; device && s < STREAMS; ++s)
        if (l->stream[s] && l->ended &&
            device->ops->event_record(device, l->ended, l->stream[s], NULL) == SW_OK)
            (void)!device->ops->event_wait(device, l->ended, TIMEOUT_NS, "the test's stream", NULL);
    for (size_t p = 0; device && p < PARAMS; ++p) {
        device->ops->memory_free(device, l->gradient[p]);
        device->ops->memory_free(device, l->bucket[p]);
        device->ops->pinned_free(device, l->pinned[p]);
    }
    for (int k = 0; device && k < 2; ++k)
        device->ops->memory_free(device, l->place[k]);
    for (int s = 0; device && s < STREAMS; ++s)
        device->ops->stream_destroy(device, l->stream[s]);
    if (device)
        device->ops->event_destroy(device, l->ended);
}

static bool train_rank(gpu_rank *self)
{
    run_plan *plan = self->context;
    loop l = {.self = self, .plan = plan, .filled = NONE};
    if (self->rank == 0)
        self->sim->fail_call(0, plan->fail_nth, FAILURE);
    sw_status status = gpu_rank_open(self, TIMEOUT_NS);
    if (status == SW_OK)
        status = prepare(&l);
    if (status == SW_OK)
        status = train(&l);
    self->sim->fail_call(self->rank, 0, 0); /* what ends could not say so */
    if (status != SW_OK && status != SW_E_MISMATCH && self->comm)
        sw_peers_abort(self->comm, &self->err); /* as the caller of a failing call does */
    finish(&l);
    snprintf(plan->message[self->rank], sizeof plan->message[0], "%s", self->err.message);
    plan->failed[self->rank] = status != SW_OK;
    __atomic_add_fetch(&plan->mismatches, status == SW_E_MISMATCH, __ATOMIC_SEQ_CST);
    gpu_rank_close(self);
    return status == SW_OK;
}

/* ---- laws ---- */

static void check_rounds(int world_size, const run_plan *asked, sim_policy policy, uint64_t seed)
{
    static run_plan plan;
    plan = *asked;
    plan.adopts_late = seed % 2;
    fill_expected(&plan, world_size);
    check(gpu_ranks_run(world_size, policy, seed, train_rank, &plan), "W=%d%s: %s", world_size,
          plan.sliced ? ", sliced" : "", plan.message[0]);
    check(plan.early_first == 0, "a bucket left early in the first round");
    check(plan.early > 0, "no bucket left early");
    gpu_expect_clean("rounds");
}

/* Rows are cut as torch.chunk cuts them, uneven and empty chunks included. */
static void check_rows(void)
{
    static const run_plan plans[] = {
        {.sliced = true}, {.sliced = true, .is_divided = true}, {.sliced = true, .is_shared = true}};
    cut_by_rows(true);
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (int world_size = 1; world_size <= 4; ++world_size)
            for (size_t k = 0; k < sizeof plans / sizeof *plans; ++k) {
                bool is_exact = !plans[k].is_divided || world_size <= 2;
                if (is_exact && (!plans[k].is_shared || world_size == 4))
                    check_rounds(world_size, &plans[k], (sim_policy)policy, 1);
            }
    cut_by_rows(false);
}

/* What ranks did apart is named on all of them, and by the sentence for it. */
static void check_mismatch(const run_plan *asked, const char *part)
{
    static run_plan plan;
    plan = *asked;
    fill_expected(&plan, 3);
    check(!gpu_ranks_run(3, SIM_EAGER, 1, train_rank, &plan), "ranks that differ went on");
    check(plan.mismatches == 3, "%d of 3 ranks heard of it", plan.mismatches);
    for (int r = 0; r < 3; ++r)
        check(strstr(plan.message[r], part) != NULL, "rank %d: %s", r, plan.message[r]);
    gpu_expect_clean("ranks that differ");
}

/* The sentence of a second gradient on a host's memory, at W = 1. */
static void ask_host(char *message, size_t room)
{
    sw_error err;
    sw_local_group *group = NULL;
    sw_comm *comm = NULL;
    sw_reducer *reducer = NULL;
    sw_reducer_options options = {.bucket_cap_bytes = CAP_BYTES, .label = "m"};
    bool due;
    check(sw_local_group_create(1, &group, &err) == SW_OK &&
              sw_local_comm_create(group, 0, &comm, &err) == SW_OK &&
              sw_reducer_create(comm, params, names, PARAMS, &options, &reducer, &err) == SW_OK,
          "%s", err.message);
    for (int step = 0; step < 2; ++step) {
        check(sw_reducer_open(reducer, step, true, &err) == SW_OK, "%s", err.message);
        check(sw_reducer_mark(reducer, PARAMS - 1, step, &due, &err) == SW_OK, "%s", err.message);
        for (size_t p = PARAMS - 1; p-- > 0;)
            if (params[p].trainable)
                check(sw_reducer_mark(reducer, p, step, &due, &err) == SW_OK, "%s", err.message);
        check(sw_reducer_advance(reducer, &err) == SW_OK, "%s", err.message);
        if (step == 0)
            check(sw_reducer_finish(reducer, &err) == SW_OK, "%s", err.message);
    }
    check(sw_reducer_mark(reducer, PARAMS - 1, 1, &due, &err) == SW_E_STATE, "a second gradient");
    snprintf(message, room, "%s", err.message);
    check(sw_reducer_finish(reducer, &err) == SW_OK, "%s", err.message);
    sw_reducer_destroy(reducer);
    comm->ops->destroy(comm);
    sw_local_group_destroy(group);
}

/* The same mistake has the same sentence; what is to be done differs, as what can be. */
static void check_sentence(void)
{
    static run_plan plan;
    char host[SW_ERROR_MESSAGE_BYTES];
    plan = (run_plan){.twice = true};
    fill_expected(&plan, 1);
    check(!gpu_ranks_run(1, SIM_EAGER, 1, train_rank, &plan), "a second gradient went unseen");
    gpu_expect_clean("a second gradient");
    ask_host(host, sizeof host);
    const char *end = strchr(host, ';');
    if (!check(end != NULL, "%s", host))
        return;
    size_t length = (size_t)(end - host) + 1;
    check(strncmp(host, plan.message[0], length) == 0, "%s\nis not\n%s", plan.message[0], host);
    check(strcmp(plan.message[0] + length, " wrap again, on every rank") == 0, "%s",
          plan.message[0]);
}

static bool fail_among(int world_size, long nth, run_plan *plan)
{
    bool sliced = plan->sliced;
    *plan = (run_plan){.sliced = sliced, .moves_place = sliced, .fail_nth = nth};
    return gpu_ranks_run(world_size, SIM_EAGER, 1, train_rank, plan);
}

static bool fail_at(long nth, void *context)
{
    return fail_among(1, nth, context);
}

static bool fail_first_of_three(long nth, void *context)
{
    return fail_among(3, nth, context);
}

static void check_failing_calls(bool sliced)
{
    static run_plan plan;
    plan.sliced = sliced;
    fill_expected(&plan, 1);
    gpu_check_failing_calls(fail_at, &plan, plan.message[0]);
    fill_expected(&plan, 3);
    gpu_check_failing_rank(fail_first_of_three, &plan, plan.message, plan.failed,
                           getenv("SW_TEST_LONG") ? 1 : 61);
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy)
        for (uint64_t seed = 1; seed <= SEEDS; ++seed)
            for (int sliced = 0; sliced < 2; ++sliced) {
                check_rounds(1, &(run_plan){.sliced = sliced}, (sim_policy)policy, seed);
                check_rounds(3,
                             &(run_plan){.sliced = sliced, .moves_place = sliced && seed % 2},
                             (sim_policy)policy, seed);
            }
    check_rows();
    check_mismatch(&(run_plan){.extra_steps = 1},
                   "different numbers of backwards or optimizer steps");
    check_mismatch(&(run_plan){.sliced = true, .stands_apart = true},
                   "cleared different gradients");
    check_mismatch(&(run_plan){.sliced = true, .stands_apart = true, .looks_late = true},
                   "cleared different gradients");
    check_sentence();
    for (int sliced = 0; sliced < 2; ++sliced)
        check_failing_calls(sliced);
    return check_result();
}
