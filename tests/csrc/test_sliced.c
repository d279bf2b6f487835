/* test_sliced.c - rounds that keep this rank's slices of the means alone, against a fold that knows
 * no buckets.
 *
 * Laws, for slices cut anywhere and for slices cut by rows: a slice of a mean has the bits of the
 * whole fold's, for ranks that cleared their gradients and for ranks that did not (theirs
 * contribute the accumulated mean plus what is new, rounded once each); a parameter that nobody
 * used keeps its bits; memory is a ring of slots, so a contribution that comes early has no place
 * yet, and none is lost; a rank that is ahead of its peers waits for them rather than pile such
 * contributions up, but never for one that waits for it. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "ranks.h"
#include "reduce/reducer.h"

enum { PARAMS = 9, NUMEL = 700, ROUNDS = 5 };

static sw_layout_param params[PARAMS];
static const char *names[PARAMS] = {"p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8"};
static size_t numel_of[PARAMS];

/* Which rank uses a parameter in a round, and which has not cleared its gradients before it. */
static bool uses(int rank, size_t p, int step)
{
    return p != 3 && (step + rank + (int)p) % 4 != 0;
}

static bool accumulates(int rank, size_t p, int step)
{
    return step > 0 && p != 3 && (rank * 2 + step + (int)p) % 3 == 0;
}

static bool used_by_any(int world_size, size_t p, int step)
{
    for (int r = 0; r < world_size; ++r)
        if (uses(r, p, step))
            return true;
    return false;
}

/* The mean of element i of parameter p after rounds 0 .. step. */
static float expected(int world_size, size_t p, size_t i, int step)
{
    float mean = 0.0f;
    for (int s = 0; s <= step; ++s) {
        float sum = 0.0f;
        if (!used_by_any(world_size, p, s))
            continue;
        for (int r = 0; r < world_size; ++r) {
            float fresh = uses(r, p, s) ? ranks_value(r, i + 1000 * p, s) : 0.0f;
            float contribution = accumulates(r, p, s) ? mean + fresh : fresh;
            sum = r == 0 ? contribution : sum + contribution;
        }
        mean = sum * (1.0f / (float)world_size);
    }
    return mean;
}

static void place(rank_context *self, sw_reducer *reducer, size_t p, int step)
{
    float contribution[NUMEL + PARAMS];
    for (size_t i = 0; i < numel_of[p]; ++i)
        contribution[i] = ranks_value(self->rank, i + 1000 * p, step);
    check((uses(self->rank, p, step) ? sw_reducer_write(reducer, p, contribution, false, &self->err)
                                     : sw_reducer_clear(reducer, p, &self->err)) == SW_OK,
          "%s", self->err.message);
    sw_reducer_place(reducer, p, accumulates(self->rank, p, step));
}

static void place_bucket(rank_context *self, sw_reducer *reducer, size_t bucket, int step)
{
    const sw_layout *layout = sw_reducer_layout(reducer);
    for (size_t k = 0; k < layout->bucket[bucket].count; ++k) {
        size_t p = layout->order[layout->bucket[bucket].first + k];
        if (!sw_reducer_is_placed(reducer, p))
            place(self, reducer, p, step);
    }
}

/* A gradient comes; what has no place yet waits until its bucket's turn. */
static size_t come(rank_context *self, sw_reducer *reducer, size_t p, int step)
{
    bool advance;
    size_t bucket, early = 0;
    if (!check(sw_reducer_mark_ready(reducer, p, step, &advance, &self->err) == SW_OK, "%s",
               self->err.message))
        return 0;
    if (sw_reducer_can_place(reducer, p))
        place(self, reducer, p, step);
    else
        early++;
    while (advance) {
        check(sw_reducer_advance(reducer, &self->err) == SW_OK, "%s", self->err.message);
        if (!sw_reducer_is_waiting(reducer, &bucket))
            break;
        place_bucket(self, reducer, bucket, step);
    }
    return early;
}

static void finish(rank_context *self, sw_reducer *reducer, int step)
{
    size_t bucket;
    while (sw_reducer_next_unsent(reducer, &bucket)) {
        check(sw_reducer_reserve(reducer, bucket, &self->err) == SW_OK, "%s", self->err.message);
        place_bucket(self, reducer, bucket, step);
        if (!check(sw_reducer_send(reducer, bucket, &self->err) == SW_OK, "%s", self->err.message))
            return;
    }
    check(sw_reducer_finish(reducer, &self->err) == SW_OK, "rank %d: %s", self->rank,
          self->err.message);
}

static void check_slices(rank_context *self, const sw_reducer *reducer, int step)
{
    const sw_layout *layout = sw_reducer_layout(reducer);
    for (size_t p = 0; p < PARAMS; ++p) {
        size_t numel, wrong = 0;
        size_t first = sw_layout_run_in(layout, p, (size_t)self->rank, layout->slice_count).begin;
        const float *slice = (const float *)(const void *)sw_reducer_result(reducer, p, &numel);
        for (size_t i = 0; i < numel; ++i) {
            float wanted = expected(self->world_size, p, first + i, step);
            wrong += memcmp(&slice[i], &wanted, sizeof wanted) != 0;
        }
        check(wrong == 0, "W=%d, rank %d, round %d, parameter %zu: %zu of %zu elements are wrong",
              self->world_size, self->rank, step, p, wrong, numel);
        check(sw_reducer_used_by_any(reducer, p) == used_by_any(self->world_size, p, step),
              "use bit of %zu", p);
    }
}

static void slices_are_those_of_the_fold(rank_context *self)
{
    sw_reducer_options options = {
        .bucket_cap_bytes = 1024, .transport = SW_TRANSPORT_POOL, .sliced = true, .label = "m"};
    sw_reducer *reducer = NULL;
    size_t early = 0;
    if (!check(sw_reducer_create(self->comm, params, names, PARAMS, &options, &reducer,
                                 &self->err) == SW_OK,
               "%s", self->err.message))
        return;
    check(sw_reducer_memory(reducer)->size_bytes < sw_reducer_layout(reducer)->size_bytes / 2,
          "the ring is smaller than the buckets: %zu of %zu bytes",
          sw_reducer_memory(reducer)->size_bytes, sw_reducer_layout(reducer)->size_bytes);
    for (int step = 0; step < ROUNDS; ++step) {
        sw_reducer_count_step(reducer);
        check(sw_reducer_open(reducer, step, true, &self->err) == SW_OK, "%s", self->err.message);
        for (size_t k = 0; k < PARAMS;
             ++k) { /* forward order is the worst: the last bucket's gradients come first */
            size_t p = step % 2 ? k : PARAMS - 1 - k;
            if (uses(self->rank, p, step))
                early += come(self, reducer, p, step);
        }
        finish(self, reducer, step);
        check_slices(self, reducer, step);
    }
    check(early > 0, "some gradients came before their slot was free");
    ranks_meet(self);
    sw_reducer_destroy(reducer);
}

/* As come(), with the rest that a rank takes which is ahead. */
static void come_and_hold(rank_context *self, sw_reducer *reducer, size_t p, int step)
{
    bool advance;
    size_t bucket;
    check(sw_reducer_mark_ready(reducer, p, step, &advance, &self->err) == SW_OK, "%s",
          self->err.message);
    do {
        check(sw_reducer_advance(reducer, &self->err) == SW_OK, "%s", self->err.message);
        while (sw_reducer_is_waiting(reducer, &bucket)) {
            place_bucket(self, reducer, bucket, step);
            check(sw_reducer_advance(reducer, &self->err) == SW_OK, "%s", self->err.message);
        }
        if (sw_reducer_can_place(reducer, p))
            break;
    } while (sw_reducer_hold_back(reducer, p));
    if (!sw_reducer_is_placed(reducer, p) && sw_reducer_can_place(reducer, p))
        place(self, reducer, p, step);
    check(sw_reducer_advance(reducer, &self->err) == SW_OK, "%s", self->err.message);
}

static void who_is_ahead_holds_back(rank_context *self)
{
    sw_reducer_options options = {
        .bucket_cap_bytes = 1024, .transport = SW_TRANSPORT_POOL, .sliced = true, .label = "m"};
    sw_reducer *reducer = NULL;
    const uint64_t most =
        4 * NUMEL * 3; /* of 9: two in the ring's way, and one that has just come */
    if (!check(sw_reducer_create(self->comm, params, names, PARAMS, &options, &reducer,
                                 &self->err) == SW_OK,
               "%s", self->err.message))
        return;
    for (int step = 0; step < 3; ++step) { /* in the first round nothing is sent early */
        bool ahead = self->rank == 0;
        sw_reducer_count_step(reducer);
        check(sw_reducer_open(reducer, step, true, &self->err) == SW_OK, "%s", self->err.message);
        ranks_sleep_ms(step == 0 ? 0 : ahead || step == 2 ? 100 : 110);
        if (step == 2 && !ahead) /* comes only when the other has all its gradients */
            ranks_meet(self);
        for (size_t p = PARAMS; p-- > 0;)
            come_and_hold(self, reducer, p, step);
        if (step == 2 && ahead)
            ranks_meet(self);
        finish(self, reducer, step);
        uint64_t peak = sw_reducer_get_stats(reducer)->unplaced_bytes_peak;
        if (step == 1)
            check(peak <= most, "rank %d: %llu bytes waited", self->rank, (unsigned long long)peak);
        if (step == 2 && ahead)
            check(peak > most, "nobody was waited for: %llu", (unsigned long long)peak);
    }
    ranks_meet(self);
    sw_reducer_destroy(reducer);
}

static void make_params(bool by_rows)
{
    for (size_t p = 0; p < PARAMS; ++p) {
        numel_of[p] = p == 5 ? 3 : NUMEL + p;
        params[p] = (sw_layout_param){numel_of[p], SW_DTYPE_FLOAT32, true, 0, 0};
        params[p].row_numel = !by_rows               ? 0
                              : p == 5               ? 1
                              : numel_of[p] % 7 == 0 ? 7
                              : numel_of[p] % 3 == 0 ? 3
                                                     : 1;
    }
}

int main(void)
{
    make_params(true);
    for (int world_size = 1; world_size <= 5; ++world_size)
        ranks_run_all(slices_are_those_of_the_fold, world_size, NULL);
    make_params(false);
    for (int world_size = 1; world_size <= 5; ++world_size)
        ranks_run_all(slices_are_those_of_the_fold, world_size, NULL);
    ranks_run_all(who_is_ahead_holds_back, 2, NULL);
    return check_result();
}
