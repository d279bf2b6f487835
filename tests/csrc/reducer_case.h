/* reducer_case.h - the model of the reducer's tests, what each rank does in a round, and an oracle
 * that knows no buckets, slices or transports.
 *
 * The oracle folds one parameter's contributions in rank order and scales once; a parameter that
 * no rank used, or whose round was abandoned, keeps its bits.
 *
 * Thread rule: each rank its own reducer; make_params() before the ranks start.
 */
#ifndef SW_TEST_REDUCER_CASE_H
#define SW_TEST_REDUCER_CASE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "ranks.h"
#include "reduce/reducer.h"

enum { PARAMS = 45, CAP_BYTES = 8192 };

typedef struct subject {
    const char *name;
    sw_transport transport;
} subject;

static const subject subjects[] = {{"pool", SW_TRANSPORT_POOL}, {"staged", SW_TRANSPORT_STAGED}};

/* 40 parameters share a bucket: more use bits than a word holds, and one of them lies across
 * slices. Then larger ones that fill a bucket each, of two dtypes, a frozen one, an empty one.
 * Bucket 0 is the last one's. */
static sw_layout_param params[PARAMS];
static char name_text[PARAMS][16];
static const char *names[PARAMS];

enum { ACROSS = 20, FROZEN = 40, EMPTY = 41, DOUBLE = 42, MIDDLE = 43, LAST = 44 };

static inline void make_params(void)
{
    static const sw_layout_param large[] = {{33, SW_DTYPE_FLOAT32, false, 0, 0},
                                            {0, SW_DTYPE_FLOAT16, true, 0, 0},
                                            {77, SW_DTYPE_FLOAT64, true, 0, 0},
                                            {2200, SW_DTYPE_FLOAT32, true, 0, 0},
                                            {2100, SW_DTYPE_FLOAT32, true, 0, 0}};
    for (size_t p = 0; p < PARAMS; ++p) {
        params[p] = p < FROZEN ? (sw_layout_param){p == ACROSS ? 700 : 1 + p % 5, SW_DTYPE_FLOAT32,
                                                   true, 0, 0}
                               : large[p - FROZEN];
        snprintf(name_text[p], sizeof name_text[p], "param%zu", p);
        names[p] = name_text[p];
    }
}

/* ---- oracle ---- */

/* What each rank does in a round: bit r of used[p]. */
typedef struct round_plan {
    uint32_t used[PARAMS];
    uint32_t unaveraged[PARAMS]; /* the same of an abandoned round before */
    uint32_t contributors;
    int divisor;
    bool keeps; /* nothing is folded at all */
} round_plan;

static inline double value_at(const sw_layout_param *param, int rank, size_t p, size_t i, int step,
                              bool uses)
{
    if (!uses)
        return 0.0;
    float single = ranks_value(rank, i + 1000 * p, step);
    return param->dtype == SW_DTYPE_FLOAT64 ? (double)single / 3.0 : (double)single;
}

/* What a parameter that is not used holds, to see that it stays: differs by rank. */
static inline double resting_value(int rank, size_t p, size_t i)
{
    return (double)ranks_value(rank, i + 5000 * p, 777);
}

static inline bool is_used(const round_plan *plan, size_t p)
{
    return ((plan->used[p] | plan->unaveraged[p]) & plan->contributors) != 0;
}

static inline double expected_at(const round_plan *plan, int world_size, size_t p, size_t i,
                                 int step)
{
    bool wide = params[p].dtype == SW_DTYPE_FLOAT64;
    double sum = 0.0;
    bool first = true;
    for (int r = 0; r < world_size; ++r) {
        if (!(plan->contributors >> r & 1))
            continue;
        double value = value_at(&params[p], r, p, i, step, plan->used[p] >> r & 1);
        sum = first ? value : wide ? sum + value : (double)((float)sum + (float)value);
        first = false;
    }
    double scale = 1.0 / plan->divisor;
    return wide ? sum * scale : (double)((float)sum * (float)scale);
}

/* ---- one rank ---- */

static inline void put(const sw_reducer *reducer, size_t p, size_t i, double value)
{
    uint8_t *at = sw_reducer_address(reducer, p);
    if (params[p].dtype == SW_DTYPE_FLOAT64)
        ((double *)(void *)at)[i] = value;
    else
        ((float *)(void *)at)[i] = (float)value;
}

static inline double take(const sw_reducer *reducer, size_t p, size_t i)
{
    const uint8_t *at = sw_reducer_address(reducer, p);
    return params[p].dtype == SW_DTYPE_FLOAT64 ? ((const double *)(const void *)at)[i]
                                               : (double)((const float *)(const void *)at)[i];
}

/* The gradients of this rank: what it uses, zeros for what only peers use, and what rests. */
static inline void put_all(const rank_context *self, const sw_reducer *reducer,
                           const round_plan *plan, int step)
{
    for (size_t p = 0; p < PARAMS; ++p)
        for (size_t i = 0; i < params[p].numel; ++i)
            put(reducer, p, i,
                plan->used[p]
                    ? value_at(&params[p], self->rank, p, i, step, plan->used[p] >> self->rank & 1)
                    : resting_value(self->rank, p, i));
}

static inline bool mark(rank_context *self, sw_reducer *reducer, size_t p, int step)
{
    bool advance;
    return check(sw_reducer_mark(reducer, p, step, &advance, &self->err) == SW_OK,
                 "rank %d, parameter %zu: %s", self->rank, p, self->err.message) &&
           (!advance || check(sw_reducer_advance(reducer, &self->err) == SW_OK,
                              "rank %d, parameter %zu: %s", self->rank, p, self->err.message));
}

static inline bool open_round(rank_context *self, sw_reducer *reducer, int step)
{
    sw_reducer_count_step(reducer);
    return check(sw_reducer_open(reducer, step, true, &self->err) == SW_OK, "rank %d: %s",
                 self->rank, self->err.message);
}

static inline void mark_used(rank_context *self, sw_reducer *reducer, const round_plan *plan,
                             int step)
{
    for (size_t p = PARAMS; p-- > 0;)
        if (plan->used[p] >> self->rank & 1 && !mark(self, reducer, p, step))
            return;
}

static inline void check_gradients(const rank_context *self, const sw_reducer *reducer,
                                   const round_plan *plan, int step, const char *what)
{
    for (size_t p = 0; p < PARAMS; ++p) {
        bool used = is_used(plan, p) && sw_reducer_takes_part(reducer, p);
        size_t wrong = 0;
        for (size_t i = 0; i < params[p].numel; ++i) {
            double own = plan->used[p] ? value_at(&params[p], self->rank, p, i, step,
                                                  plan->used[p] >> self->rank & 1)
                                       : resting_value(self->rank, p, i);
            double expected =
                used && !plan->keeps ? expected_at(plan, self->world_size, p, i, step) : own;
            wrong += take(reducer, p, i) !=
                     (params[p].dtype == SW_DTYPE_FLOAT64 ? expected : (double)(float)expected);
        }
        check(wrong == 0, "%s, W=%d, step %d, rank %d: %zu elements of parameter %zu are wrong",
              what, self->world_size, step, self->rank, wrong, p);
        check(sw_reducer_used_by_any(reducer, p) == used,
              "%s, W=%d, step %d, rank %d: the use bit of parameter %zu", what, self->world_size,
              step, self->rank, p);
    }
}

static inline sw_reducer *make_reducer(rank_context *self)
{
    const subject *given = self->shared;
    sw_reducer *reducer = NULL;
    sw_reducer_options options = {
        .bucket_cap_bytes = CAP_BYTES, .transport = given->transport, .label = "model"};
    if (!check(sw_reducer_create(self->comm, params, names, PARAMS, &options, &reducer,
                                 &self->err) == SW_OK,
               "%s", self->err.message))
        exit(1); /* the others would wait at the meeting */
    return reducer;
}

static inline void end_reducer(rank_context *self, sw_reducer *reducer)
{
    ranks_meet(self); /* peers may read this rank's part until all are here */
    sw_reducer_destroy(reducer);
}

static inline round_plan everyone_uses_all(int world_size)
{
    round_plan plan = {.contributors = (UINT32_C(1) << world_size) - 1, .divisor = world_size};
    for (size_t p = 0; p < PARAMS; ++p)
        plan.used[p] = p == FROZEN ? 0 : plan.contributors;
    return plan;
}

/* Drawn alike on every rank: some parameters by all, some by one, some by nobody. */
static inline round_plan drawn_plan(int world_size, int step)
{
    round_plan plan = everyone_uses_all(world_size);
    uint32_t state = (uint32_t)step * 2654435761u + 12345u;
    for (size_t p = 0; p < PARAMS; ++p) {
        state = state * 1664525u + 1013904223u;
        uint32_t kind = state >> 24 & 3;
        if (p != FROZEN && kind < 3)
            plan.used[p] = kind == 0   ? 0
                           : kind == 1 ? UINT32_C(1) << (state >> 16) % (uint32_t)world_size
                                       : plan.contributors & (state >> 8 | 1);
    }
    return plan;
}

static inline void one_round(rank_context *self, sw_reducer *reducer, const round_plan *plan,
                             int step, const char *what)
{
    put_all(self, reducer, plan, step);
    if (!open_round(self, reducer, step))
        return;
    mark_used(self, reducer, plan, step);
    check(sw_reducer_finish(reducer, &self->err) == SW_OK, "%s, step %d, rank %d: %s", what, step,
          self->rank, self->err.message);
    check_gradients(self, reducer, plan, step, what);
}

static inline void check_named(const rank_context *self, sw_status status, int victim,
                               const char *what)
{
    char text[32];
    snprintf(text, sizeof text, "rank %d (pid", victim);
    check(status == SW_E_MISMATCH && self->err.detail == victim &&
              strstr(self->err.message, text) &&
              strstr(self->err.message, "left a backward unfinished"),
          "%s: rank %d is told that rank %d failed, got %s: %s", what, self->rank, victim,
          sw_status_name(status), self->err.message);
}

/* Run each law on worlds of 2, 3 and 5 ranks, in pool and in staged memory. */
static inline void run_laws(rank_body *const *laws, size_t count)
{
    static const int worlds[] = {2, 3, 5};
    make_params();
    for (size_t s = 0; s < sizeof subjects / sizeof subjects[0]; ++s)
        for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; ++w)
            for (size_t l = 0; l < count; ++l)
                ranks_run_all(laws[l], worlds[w], &subjects[s]);
}

#endif
