/* test_hier_codec.c - reductions over hosts with a codec (hosts.h). Law: every rank gets the naive
 * compressor's mean of the hosts' sums, bit for bit, for messages of a byte to several blocks, with
 * plain operations between them and all in flight at once; of a scattered one only the owner's
 * slice is stored, and unused elements keep their bits. A wire that breaks is an error of every
 * rank, and the codec outlives its owner's reference. A mean that cannot begin leaves nothing in
 * flight. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "compress/comm_average.h"
#include "compress/compressor.h"
#include "hosts.h"
#include "kernels/compress_kernels.h"

enum { IN_FLIGHT = 8, UNUSED_BEGIN = 64, UNUSED_END = 96 };

static float rounded(float value, sw_dtype dtype)
{
    uint16_t wire;
    sw_kernels()->compress->half_narrow(&wire, &value, 1, 1, dtype);
    sw_kernels()->compress->half_widen(&value, &wire, 1, dtype);
    return value;
}

/* Each host's sum in rank order, times hosts over ranks; rounded, added in host order, rounded. */
static float coded_mean(const scene *s, int world_size, size_t i, int step)
{
    float total = 0;
    for (int h = 0; h < s->host_count; ++h) {
        float sum = 0;
        bool first = true;
        for (int r = 0; r < world_size; ++r) {
            if (s->host_of[r] != h)
                continue;
            sum = first ? ranks_value(r, i, step) : sum + ranks_value(r, i, step);
            first = false;
        }
        float share = (float)((double)s->host_count / world_size);
        sum = share == 1 ? sum : sum * share;
        sum = rounded(sum * (float)(1.0 / s->host_count), SW_DTYPE_BFLOAT16);
        total = h == 0 ? sum : total + sum;
    }
    return rounded(total, SW_DTYPE_BFLOAT16);
}

static sw_compressor *bfloat16(rank_context *self)
{
    const sw_compressor_settings settings = {.kind = SW_COMPRESS_HALF, .wire = SW_DTYPE_BFLOAT16};
    sw_compressor *made = NULL;
    check(sw_compressor_create(&settings, &made, &self->err) == SW_OK, "%s", self->err.message);
    return made;
}

static void sums_travel_coded(rank_context *self)
{
    static const size_t sizes[IN_FLIGHT] = {1, 4096, 700000, 100000, 32, 1000000, 65, 200000};
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_compressor *compressor = bfloat16(self);
    sw_arena *arenas[IN_FLIGHT] = {NULL};
    uint32_t tickets[IN_FLIGHT];
    for (int i = 0; comm && i < IN_FLIGHT; ++i)
        check(comm->ops->arena_create(comm, sizes[i] * sizeof(float), "an arena", &arenas[i],
                                      &self->err) == SW_OK,
              "an arena: %s", self->err.message);
    for (int step = 0; comm && step < 2; ++step) {
        for (int i = 0; i < IN_FLIGHT; ++i) {
            float *data = (float *)(void *)arenas[i]->base[self->rank];
            for (size_t k = 0; k < sizes[i]; ++k)
                data[k] = ranks_value(self->rank, k, step + i);
            sw_op op = {.kind = SW_OP_ALL_REDUCE,
                        .dtype = SW_DTYPE_FLOAT32,
                        .redop = SW_REDOP_MEAN,
                        .numel = sizes[i],
                        .arena = arenas[i],
                        .codec = i % 3 == 2 ? NULL : sw_compressor_codec(compressor),
                        .label = "a bucket"};
            check(comm->ops->post(comm, &op, &tickets[i], &self->err) == SW_OK, "post: %s",
                  self->err.message);
        }
        for (int i = 0; i < IN_FLIGHT; ++i) {
            check(comm->ops->wait(comm, tickets[i], &self->err) == SW_OK, "wait: %s",
                  self->err.message);
            const float *data = (const float *)(void *)arenas[i]->base[self->rank];
            size_t wrong = 0;
            for (size_t k = 0; k < sizes[i]; k += k + 64 < sizes[i] ? 11 : 1)
                wrong += data[k] != (i % 3 == 2 ? hosts_mean(s, self->world_size, k, step + i)
                                                : coded_mean(s, self->world_size, k, step + i));
            check(wrong == 0, "operation %d: %zu of %zu elements are wrong", i, wrong, sizes[i]);
        }
    }
    sw_compressor_release(compressor); /* operations hold it */
    ranks_meet(self);
    for (int i = 0; comm && i < IN_FLIGHT; ++i)
        comm->ops->arena_destroy(comm, arenas[i]);
    ranks_meet(self);
    if (comm)
        comm->ops->destroy(comm);
}

/* ---- slices ---- */

static void all_contribute(void *context, bool *contributes, double *scale)
{
    (void)context;
    (void)contributes;
    *scale = 1;
}

static bool next_used(void *context, size_t cursor, size_t end, size_t *begin, size_t *numel)
{
    (void)context;
    *begin = cursor >= UNUSED_BEGIN && cursor < UNUSED_END ? UNUSED_END : cursor;
    *numel = *begin < UNUSED_BEGIN && end > UNUSED_BEGIN ? UNUSED_BEGIN - *begin : end - *begin;
    return *begin < end;
}

static void store(void *context, size_t begin, size_t numel, const float *mean, void *to)
{
    (void)context;
    (void)begin;
    memcpy(to, mean, numel * sizeof *mean);
}

static void owners_get_their_slices(rank_context *self)
{
    enum { NUMEL = 3000, RESTS = 7 };
    static const sw_fold_plan plan = {
        .resolve = all_contribute, .next_run = next_used, .store = store};
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_compressor *compressor = bfloat16(self);
    sw_arena *arena = NULL, *results = NULL;
    int count = s->slices ? s->slices->count : self->world_size;
    size_t slice = sw_comm_slice_numel(NUMEL, sizeof(float), count), wrong = 0;
    size_t first = (size_t)(s->slices ? s->slices->of_rank[self->rank] : self->rank) * slice;
    check(comm->ops->arena_create(comm, NUMEL * 4, "parts", &arena, &self->err) == SW_OK &&
              comm->ops->arena_create(comm, slice * 4, "results", &results, &self->err) == SW_OK,
          "%s", self->err.message);
    float *own = (float *)(void *)results->base[self->rank];
    for (size_t i = 0; i < NUMEL; ++i)
        ((float *)(void *)arena->base[self->rank])[i] = ranks_value(self->rank, i, 3);
    for (size_t i = 0; i < slice; ++i)
        own[i] = RESTS;
    sw_op op = {.kind = SW_OP_REDUCE_SCATTER,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_MEAN,
                .numel = NUMEL,
                .arena = arena,
                .slices = s->slices,
                .result = own,
                .results = results,
                .plan = &plan,
                .codec = sw_compressor_codec(compressor),
                .label = "a bucket"};
    check(comm->ops->run(comm, &op, &self->err) == SW_OK, "%s", self->err.message);
    for (size_t i = 0; i < slice && first + i < NUMEL; ++i) {
        bool unused = first + i >= UNUSED_BEGIN && first + i < UNUSED_END;
        wrong += own[i] != (unused ? RESTS : coded_mean(s, self->world_size, first + i, 3));
    }
    check(wrong == 0, "%zu elements of rank %d's slice are wrong", wrong, self->rank);
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
    comm->ops->arena_destroy(comm, results);
    sw_compressor_release(compressor);
    ranks_meet(self);
    comm->ops->destroy(comm);
}

static void breaks(rank_context *self)
{
    enum { NUMEL = 500000 };
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_compressor *compressor = bfloat16(self);
    sw_arena *arena = NULL;
    sw_status status = SW_OK;
    check(comm->ops->arena_create(comm, NUMEL * 4, "an arena", &arena, &self->err) == SW_OK, "%s",
          self->err.message);
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_MEAN,
                .numel = NUMEL,
                .arena = arena,
                .codec = sw_compressor_codec(compressor),
                .label = "a bucket"};
    for (int i = 0; i < 30 && status == SW_OK; ++i)
        status = comm->ops->run(comm, &op, &self->err);
    check(status == SW_E_COMM, "a broken wire is an error: %d", (int)status);
    sw_compressor_release(compressor);
    ranks_meet(self);
    comm->ops->arena_destroy(comm, arena);
    comm->ops->destroy(comm);
    ranks_meet(self);
}

/* A mean that could not begin leaves nothing in flight, and the next one is right. */
static void begins_again(rank_context *self)
{
    enum { FEW = 5 };
    scene *s = hosts_scene(self);
    wire_end end;
    sw_wire wire;
    sw_comm *comm = hosts_join(self, s, &end, &wire);
    sw_comm_average *average = NULL;
    sw_compressor *compressor = bfloat16(self);
    float data[FEW];
    check(sw_comm_average_create(comm, &average, &self->err) == SW_OK, "%s", self->err.message);
    check(sw_comm_average_begin(average, compressor, 0, data, (size_t)1 << 45, "too many",
                                &self->err) == SW_E_MEMORY,
          "more than there is: %s", self->err.message);
    check(!sw_comm_average_is_in_flight(average), "nothing is in flight");
    check(sw_comm_average_wait(average, &self->err) == SW_OK, "a wait for nothing");
    for (size_t i = 0; i < FEW; ++i)
        data[i] = (float)(self->rank + 1) * (float)(i + 1);
    check(sw_comm_average_begin(average, compressor, 0, data, FEW, "few", &self->err) == SW_OK &&
              sw_comm_average_wait(average, &self->err) == SW_OK,
          "%s", self->err.message);
    for (size_t i = 0; i < FEW; ++i) /* of two ranks; exact in bfloat16 */
        check(data[i] == 1.5f * (float)(i + 1), "element %zu is %g", i, (double)data[i]);
    sw_comm_average_destroy(average);
    sw_compressor_release(compressor);
    ranks_meet(self);
    comm->ops->destroy(comm);
}

int main(void)
{
    static const int two[] = {0, 0, 0, 1, 1}, three[] = {0, 0, 1, 2, 2}, crossed[] = {0, 1, 0, 2},
                     pair[] = {0, 1};
    static const int of_rank[] = {0, 1, 0, 1}, replica_of_rank[] = {0, 0, 1, 1},
                     hosts[] = {0, 0, 1, 1};
    const sw_slices shared = {.count = 2, .of_rank = of_rank, .replica_of_rank = replica_of_rank};
    hosts_run(sums_travel_coded, two, 5, NULL, (hosts_wire){.breaks_after = 0});
    hosts_run(sums_travel_coded, three, 5, NULL, (hosts_wire){.packs = true});
    hosts_run(sums_travel_coded, crossed, 4, NULL, (hosts_wire){.breaks_after = 0});
    hosts_run(sums_travel_coded, pair, 2, NULL, (hosts_wire){.breaks_after = 0});
    hosts_run(owners_get_their_slices, three, 5, NULL, (hosts_wire){.breaks_after = 0});
    hosts_run(owners_get_their_slices, hosts, 4, &shared, (hosts_wire){.breaks_after = 0});
    hosts_run(begins_again, pair, 2, NULL, (hosts_wire){.breaks_after = 0});
    hosts_run(breaks, three, 5, NULL, (hosts_wire){.breaks_after = 90});
    return check_result();
}
