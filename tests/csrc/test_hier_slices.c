/* test_hier_slices.c - slices over hosts (hosts.h). Law of reduce_scatter: owners of a slice have
 * the same bits of it, and with contributions that stand on the results before, those of sums
 * rounded before the fold. Law of all_gather: every part has every owner's slice. A wire that
 * breaks, or never answers, is an error of every rank. Packed blocks change no bit of this. */
#include <stdlib.h>

#include "check.h"
#include "hosts.h"

typedef struct accumulated_plan { /* every contribution lacks the results of the round before */
    const sw_arena *arena;
    int world_size;
    bool accumulates;
} accumulated_plan;

static void all_contribute(void *context, bool *contributes, double *scale)
{
    const accumulated_plan *plan = context;
    for (int r = 0; r < plan->world_size; ++r)
        contributes[r] = true;
    *scale = 1.0 / plan->world_size;
}

/* All but elements 64 to 95, which nobody uses. */
static bool next_used(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel)
{
    (void)context;
    *begin = cursor >= 64 && cursor < 96 ? 96 : cursor;
    *numel = *begin < 64 && end > 64 ? 64 - *begin : end - *begin;
    return *begin < end;
}

static bool says_accumulates(void *context)
{
    return ((const accumulated_plan *)context)->accumulates;
}

static void add_accumulated(void *context, size_t begin, size_t numel, const void *accumulated)
{
    const accumulated_plan *plan = context;
    for (int r = 0; r < plan->world_size; ++r) {
        float *part = (float *)(void *)plan->arena->base[r];
        for (size_t i = 0; part && i < numel; ++i)
            part[begin + i] = ((const float *)accumulated)[i] + part[begin + i];
    }
}

/* The mean of contributions on top of `before`. */
static float mean_on_top(const scene *s, int world_size, size_t i, int step, float before)
{
    float total = 0;
    for (int h = 0; h < s->host_count; ++h) {
        float sum = 0;
        bool first = true;
        for (int r = 0; r < world_size; ++r) {
            if (s->host_of[r] != h)
                continue;
            float mine = before + ranks_value(r, i, step);
            sum = first ? mine : sum + mine;
            first = false;
        }
        total = h == 0 ? sum : total + sum;
    }
    return total * (float)(1.0 / world_size);
}

static bool reduces_slices(rank_context *self, scene *s, sw_comm *comm, size_t numel)
{
    static const float unused = 7;
    int world_size = self->world_size, count = s->slices ? s->slices->count : world_size;
    size_t slice = sw_comm_slice_numel(numel, sizeof(float), count), wrong = 0;
    size_t first = (size_t)(s->slices ? s->slices->of_rank[self->rank] : self->rank) * slice;
    sw_arena *arena = NULL, *results = NULL;
    accumulated_plan context = {.world_size = world_size};
    sw_fold_plan plan = {.context = &context,
                         .resolve = all_contribute,
                         .next_run = next_used,
                         .accumulates = says_accumulates,
                         .add_accumulated = add_accumulated};
    if (comm->ops->arena_create(comm, numel * sizeof(float), "parts", &arena, &self->err) !=
            SW_OK ||
        comm->ops->arena_create(comm, slice * sizeof(float) + 128, "results", &results,
                                &self->err) != SW_OK)
        return check(false, "arenas: %s", self->err.message);
    context.arena = arena;
    float *expected = malloc(slice * sizeof *expected);
    if (!check(expected != NULL, "memory"))
        return false;
    float *result = (float *)(void *)(results->base[self->rank] + 128);
    for (size_t k = 0; k < slice; ++k)
        result[k] = unused;
    for (int step = 0; step < 3; ++step) {
        float *data = (float *)(void *)arena->base[self->rank];
        for (size_t k = 0; k < numel; ++k)
            data[k] = ranks_value(self->rank, k, step);
        context.accumulates = step > 0;
        sw_op op = {.kind = SW_OP_REDUCE_SCATTER,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_MEAN,
                    .numel = numel,
                    .arena = arena,
                    .slices = s->slices,
                    .result = result,
                    .results = results,
                    .results_offset_bytes = 128,
                    .plan = &plan,
                    .label = "a sliced bucket"};
        check(comm->ops->run(comm, &op, &self->err) == SW_OK, "run: %s", self->err.message);
        for (size_t k = first; k < first + slice && k < numel; ++k) {
            float *mean = &expected[k - first];
            *mean = step == 0 ? hosts_mean(s, world_size, k, 0)
                              : mean_on_top(s, world_size, k, step, *mean);
            wrong += result[k - first] != (k >= 64 && k < 96 ? unused : *mean);
        }
    }
    free(expected);
    check(wrong == 0, "%zu results of %zu are wrong", wrong, numel);
    ranks_meet(self);
    comm->ops->arena_destroy(comm, results);
    comm->ops->arena_destroy(comm, arena);
    return wrong == 0;
}

/* Where the slices of a rank lie. */
static int home_of(const scene *s, int rank, bool one_copy)
{
    for (int r = 0; one_copy && r < rank; ++r)
        if (s->host_of[r] == s->host_of[rank] &&
            (!s->slices || s->slices->replica_of_rank[r] == s->slices->replica_of_rank[rank]))
            return r;
    return rank;
}

static bool gathers_slices(rank_context *self, scene *s, sw_comm *comm, size_t numel, bool one_copy)
{
    int count = s->slices ? s->slices->count : self->world_size;
    int index = s->slices ? s->slices->of_rank[self->rank] : self->rank;
    size_t slice = sw_comm_slice_numel(numel, 1, count), wrong = 0;
    sw_arena *arena = NULL;
    if (comm->ops->arena_create(comm, numel, "updates", &arena, &self->err) != SW_OK)
        return check(false, "an arena: %s", self->err.message);
    uint8_t *part = arena->base[home_of(s, self->rank, one_copy)];
    for (int step = 0; step < 3; ++step) {
        for (size_t k = (size_t)index * slice; k < (size_t)(index + 1) * slice && k < numel; ++k)
            part[k] = (uint8_t)(k * 7 + (size_t)index + (size_t)step);
        sw_op op = {.kind = SW_OP_ALL_GATHER,
                    .dtype = SW_DTYPE_UINT8,
                    .numel = numel,
                    .arena = arena,
                    .slices = s->slices,
                    .one_copy = one_copy,
                    .label = "updated slices"};
        check(comm->ops->run(comm, &op, &self->err) == SW_OK, "run: %s", self->err.message);
        for (size_t owner = 0; owner < (size_t)count; ++owner)
            for (size_t k = owner * slice; k < (owner + 1) * slice && k < numel; ++k)
                wrong += part[k] != (uint8_t)(k * 7 + owner + (size_t)step);
        ranks_meet(self); /* nobody updates what others still look at */
    }
    check(wrong == 0, "%zu bytes of %zu are not their owners'", wrong, numel);
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
    return wrong == 0;
}

static void slices_over_hosts(rank_context *self)
{
    static const size_t sizes[] = {32, 4096, 150016, 700000};
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    for (size_t i = 0; comm && i < sizeof sizes / sizeof *sizes; ++i) {
        reduces_slices(self, s, comm, sizes[i]);
        gathers_slices(self, s, comm, 4 * sizes[i], false);
        gathers_slices(self, s, comm, 4 * sizes[i], true);
    }
    ranks_meet(self);
    if (comm)
        comm->ops->destroy(comm);
}

/* A wire that breaks, or never answers, while slices travel. */
static void slices_meet_a_bad_wire(rank_context *self)
{
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_arena *arena = NULL;
    sw_status status = comm->ops->arena_create(comm, 1 << 22, "updates", &arena, &self->err);
    for (int i = 0; i < 50 && status == SW_OK; ++i) {
        sw_op op = {.kind = i % 2 ? SW_OP_ALL_GATHER : SW_OP_REDUCE_SCATTER,
                    .dtype = SW_DTYPE_FLOAT32,
                    .redop = SW_REDOP_SUM,
                    .numel = 1 << 20,
                    .arena = arena,
                    .one_copy = i % 4 == 1,
                    .label = "slices"};
        status = comm->ops->run(comm, &op, &self->err);
    }
    check(status == SW_E_COMM || status == SW_E_TIMEOUT, "a bad wire is an error: %d", (int)status);
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
    comm->ops->destroy(comm);
    ranks_meet(self);
}

int main(void)
{
    static const int columns[] = {0, 1, 0, 1}, rows[] = {0, 0, 1, 1}, all_one[] = {0, 0, 0, 0};
    const sw_slices mesh = {.count = 2, .of_rank = columns, .replica_of_rank = rows};
    /* rows 0 3 and 2 1: each on two hosts, which have an owner of every slice all the same */
    static const int turned[] = {0, 1, 1, 0}, turned_columns[] = {0, 1, 0, 1};
    const sw_slices crossing = {.count = 2, .of_rank = turned_columns, .replica_of_rank = turned};
    /* rows 0 1 2 and 3 4 5: over hosts that lack slices */
    static const int threes[] = {0, 1, 2, 0, 1, 2}, two_rows[] = {0, 0, 0, 1, 1, 1};
    const sw_slices wide = {.count = 3, .of_rank = threes, .replica_of_rank = two_rows};
    static const int alternating[] = {0, 1, 0, 1}, pairs[] = {0, 0, 1, 1, 2, 2},
                     lopsided[] = {0, 0, 0, 0, 1, 2}, chain[] = {0, 1, 2, 3, 4, 5, 6};
    static const int even[] = {0, 0, 1, 1}, uneven[] = {0, 0, 0, 1, 1}, apart[] = {0, 1, 2},
                     crosswise[] = {0, 1, 0}, one[] = {0, 0, 0};
    const hosts_wire usual = {0}, packing = {.packs = true}, in_rounds = {.radix = 2};
    hosts_run(slices_over_hosts, even, 4, NULL, usual);
    hosts_run(slices_over_hosts, uneven, 5, NULL, usual);
    hosts_run(slices_over_hosts, apart, 3, NULL, usual);
    hosts_run(slices_over_hosts, crosswise, 3, NULL, usual);
    hosts_run(slices_over_hosts, one, 3, NULL, usual);
    hosts_run(slices_over_hosts, even, 4, &mesh, usual);
    hosts_run(slices_over_hosts, all_one, 4, &mesh, usual);
    hosts_run(slices_over_hosts, even, 4, &crossing, usual);
    hosts_run(slices_over_hosts, alternating, 4, &mesh, usual);
    hosts_run(slices_over_hosts, pairs, 6, &wide, usual);
    hosts_run(slices_over_hosts, lopsided, 6, &wide, usual);
    hosts_run(slices_over_hosts, pairs, 6, &wide, packing);
    hosts_run(slices_over_hosts, uneven, 5, NULL, packing);
    hosts_run(slices_over_hosts, apart, 3, NULL, packing);
    hosts_run(slices_over_hosts, even, 4, &mesh, packing);
    hosts_run(slices_over_hosts, chain, 7, NULL, in_rounds);
    for (int after = 8; after < 90; after += 5)
        hosts_run(slices_meet_a_bad_wire, uneven, 5, NULL, (hosts_wire){.breaks_after = after});
    hosts_run(slices_meet_a_bad_wire, crosswise, 3, NULL, (hosts_wire){.silent = true});
    return check_result();
}
