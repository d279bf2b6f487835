/* test_compressor.c - the rounds of compression over shared memory (compressor.h), by ranks as
 * threads. Laws: all ranks end with the same bits; 16-bit floats and blocks give the naive
 * compressor's mean, of values rounded twice; kept slices have the bits of the whole; the sum of
 * results plus the mean error is the sum of mean gradients; with full rank PowerSGD is the mean; a
 * value that is not finite changes no state; an unused parameter keeps its bits and its error. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "compress/compressor.h"
#include "compress/shared_exchange.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"
#include "ranks.h"

enum { MATRIX_ROWS = 24, MATRIX_COLS = 40, MEMBERS = 3, STEPS = 6 };

static const size_t numels[MEMBERS] = {MATRIX_ROWS * MATRIX_COLS, 33, 700};
static const size_t offsets[MEMBERS] = {0, 960, 1024};
enum { NUMEL = 1024 + 700 };

static const sw_compressor_settings settings[] = {
    {.kind = SW_COMPRESS_PLAIN},
    {.kind = SW_COMPRESS_HALF, .wire = SW_DTYPE_FLOAT16},
    {.kind = SW_COMPRESS_HALF, .wire = SW_DTYPE_BFLOAT16},
    {.kind = SW_COMPRESS_BLOCKS, .blocks = {32, 8}},
    {.kind = SW_COMPRESS_BLOCKS, .blocks = {64, 4}, .error_feedback = true},
    {.kind = SW_COMPRESS_POWERSGD,
     .wire = SW_DTYPE_FLOAT32,
     .error_feedback = true,
     .warm_start = true,
     .rank = 2,
     .least_rate = 1,
     .memory = SW_DTYPE_FLOAT32},
    {.kind = SW_COMPRESS_POWERSGD,
     .wire = SW_DTYPE_BFLOAT16,
     .error_feedback = true,
     .warm_start = true,
     .rank = 2,
     .least_rate = 1,
     .memory = SW_DTYPE_FLOAT32},
    {.kind = SW_COMPRESS_POWERSGD,
     .wire = SW_DTYPE_FLOAT32,
     .error_feedback = true,
     .rank = MATRIX_ROWS,
     .least_rate = 0,
     .memory = SW_DTYPE_FLOAT32},
};

typedef struct under_test {
    sw_compressor *compressor;
    sw_exchange *exchange;
    sw_compressor_member members[MEMBERS];
    sw_compressor_bucket bucket;
} under_test;

static bool start(rank_context *self, const sw_compressor_settings *s, under_test *t)
{
    *t = (under_test){.bucket = {.count = MEMBERS}};
    bool made = check(sw_compressor_create(s, &t->compressor, &self->err) == SW_OK &&
                          sw_shared_exchange_create(self->comm, &t->exchange, &self->err) == SW_OK,
                      "%s", self->err.message);
    for (size_t i = 0; made && i < MEMBERS; ++i) {
        size_t number = 0;
        check(sw_compressor_add(t->compressor, numels[i], i ? 0 : MATRIX_ROWS, i, &number,
                                &self->err) == SW_OK &&
                  number == i,
              "parameter %zu has number %zu", i, number);
        t->members[i] = (sw_compressor_member){i, offsets[i], numels[i], true};
    }
    t->bucket.members = t->members;
    return made;
}

static void stop(rank_context *self, under_test *t)
{
    ranks_meet(self);
    sw_shared_exchange_destroy(t->exchange);
    sw_compressor_release(t->compressor);
}

static float value_of(int rank, size_t i, int step)
{
    return ranks_value(rank, i, step) / 100;
}

static void fill(float *flat, int rank, int step)
{
    memset(flat, 0, NUMEL * sizeof *flat);
    for (size_t m = 0; m < MEMBERS; ++m)
        for (size_t i = 0; i < numels[m]; ++i)
            flat[offsets[m] + i] = value_of(rank, offsets[m] + i, step);
}

static bool average(rank_context *self, under_test *t, float *flat)
{
    bool ok = check(sw_compressor_average(t->compressor, &t->bucket, flat, NUMEL, SW_DTYPE_FLOAT32,
                                          t->exchange, &self->err) == SW_OK,
                    "%s", self->err.message);
    sw_compressor_count_round(t->compressor);
    return ok;
}

static void check_same_on_all(rank_context *self, const float *flat, const char *what)
{
    static float all[RANKS_MAX * NUMEL];
    memcpy(all + (size_t)self->rank * NUMEL, flat, NUMEL * sizeof *flat);
    ranks_meet(self);
    for (size_t m = 0; m < MEMBERS; ++m)
        check(memcmp(all + offsets[m], all + (size_t)self->rank * NUMEL + offsets[m],
                     numels[m] * sizeof *flat) == 0,
              "%s: rank %d has another parameter %zu than rank 0", what, self->rank, m);
    ranks_meet(self);
}

/* ---- the naive compressors ---- */

static float half_rounded(float value, sw_dtype dtype)
{
    uint16_t wire;
    sw_kernels()->compress->half_narrow(&wire, &value, 1, 1, dtype);
    sw_kernels()->compress->half_widen(&value, &wire, 1, dtype);
    return value;
}

static float half_mean(int world_size, size_t i, int step, sw_dtype dtype)
{
    float sum = 0;
    for (int r = 0; r < world_size; ++r) {
        float one = half_rounded(value_of(r, i, step) * (float)(1.0 / world_size), dtype);
        sum = r ? sum + one : one;
    }
    return half_rounded(sum, dtype);
}

static void quantize(float *values, size_t numel, size_t block, int levels)
{
    for (size_t begin = 0; begin < numel; begin += block) {
        size_t end = begin + block < numel ? begin + block : numel;
        float most = 0;
        for (size_t i = begin; i < end; ++i)
            most = fmaxf(most, fabsf(values[i]));
        float scale = most / (float)levels;
        for (size_t i = begin; i < end; ++i)
            values[i] = scale > 0 ? rintf(values[i] / scale) * scale : 0;
    }
}

/* The mean of one parameter in blocks of 32 elements and 127 levels. */
static void block_mean(float *mean, int world_size, size_t first, size_t numel, int step)
{
    float one[NUMEL];
    for (int r = 0; r < world_size; ++r) {
        for (size_t i = 0; i < numel; ++i)
            one[i] = value_of(r, first + i, step);
        quantize(one, numel, 32, 127);
        for (size_t i = 0; i < numel; ++i)
            mean[i] = r ? mean[i] + one[i] : one[i];
    }
    for (size_t i = 0; i < numel; ++i)
        mean[i] *= (float)(1.0 / world_size);
    quantize(mean, numel, 32, 127);
}

static void check_naive(rank_context *self, const sw_compressor_settings *s, const float *flat,
                        int step)
{
    for (size_t m = 0; m < MEMBERS; ++m) {
        float mean[NUMEL];
        size_t wrong = 0;
        if (s->kind == SW_COMPRESS_BLOCKS)
            block_mean(mean, self->world_size, offsets[m], numels[m], step);
        for (size_t i = 0; i < numels[m]; ++i) {
            if (s->kind == SW_COMPRESS_HALF)
                mean[i] = half_mean(self->world_size, offsets[m] + i, step, s->wire);
            /* the codec may multiply by a reciprocal: blocks are compared to a millionth */
            float off = fabsf(flat[offsets[m] + i] - mean[i]);
            wrong += s->kind == SW_COMPRESS_HALF ? off != 0 : !(off <= 1e-5f);
        }
        check(wrong == 0, "W=%d, kind %d: %zu elements of parameter %zu are not the naive mean",
              self->world_size, (int)s->kind, wrong, m);
    }
}

static void rounds_are_naive(rank_context *self)
{
    for (size_t k = 1; k < 4; ++k) {
        under_test whole, sliced;
        float flat[NUMEL], part[NUMEL];
        if (!start(self, &settings[k], &whole) || !start(self, &settings[k], &sliced))
            return;
        sliced.bucket.share = sw_compressor_slice_numel(NUMEL, self->world_size);
        sliced.bucket.keeps_slice = true;
        for (int step = 0; step < 2; ++step) {
            fill(flat, self->rank, step);
            float sized[NUMEL * RANKS_MAX] = {0}; /* a kept slice may reach behind the bucket */
            memcpy(sized, flat, sizeof flat);
            average(self, &whole, flat);
            check_same_on_all(self, flat, "whole");
            check_naive(self, &settings[k], flat, step);
            size_t first = (size_t)self->rank * sliced.bucket.share;
            check(sw_compressor_average(sliced.compressor, &sliced.bucket, sized, NUMEL,
                                        SW_DTYPE_FLOAT32, sliced.exchange, &self->err) == SW_OK,
                  "%s", self->err.message);
            memcpy(part, sized, sizeof part);
            size_t wrong = 0;
            for (size_t m = 0; m < MEMBERS; ++m)
                for (size_t i = offsets[m]; i < offsets[m] + numels[m]; ++i)
                    wrong += i >= first && i < first + sliced.bucket.share && part[i] != flat[i];
            check(wrong == 0, "kind %d: %zu elements of a kept slice differ from the whole",
                  (int)settings[k].kind, wrong);
        }
        stop(self, &whole);
        stop(self, &sliced);
    }
}

/* ---- error feedback ---- */

/* Return the error of an element that this rank still owes. */
static double owed(const under_test *t, size_t m, size_t i)
{
    const sw_compressor_entry *e = sw_compressor_entry_of(t->compressor, m);
    if (e->part[SW_PART_ERROR])
        return (double)((const float *)e->part[SW_PART_ERROR])[i];
    if (!e->part[SW_PART_MEMORY])
        return 0;
    size_t row = i / e->cols, col = i % e->cols;
    double sent = 0;
    for (size_t k = 0; k < e->rank; ++k)
        sent +=
            (double)((const float *)e->part[SW_PART_LEFT])[k * sw_powersgd_stride(e->rows) + row] *
            (double)((const float *)e->part[SW_PART_RIGHT])[k * sw_powersgd_stride(e->cols) + col];
    return (double)((const float *)e->part[SW_PART_MEMORY])[i] - sent;
}

static void errors_are_fed_back(rank_context *self)
{
    static double total[RANKS_MAX];
    for (size_t k = 4; k < sizeof settings / sizeof *settings; ++k) {
        under_test t;
        float flat[NUMEL];
        double got[NUMEL] = {0}, wanted[NUMEL] = {0}, worst = 0;
        if (!start(self, &settings[k], &t))
            return;
        for (int step = 0; step < STEPS; ++step) {
            fill(flat, self->rank, step);
            average(self, &t, flat);
            check_same_on_all(self, flat, "with an error");
            for (size_t i = 0; i < NUMEL; ++i)
                got[i] += (double)flat[i];
            for (size_t i = 0; i < NUMEL; ++i)
                for (int r = 0; r < self->world_size; ++r)
                    wanted[i] += (double)value_of(r, i, step) / self->world_size;
        }
        for (size_t m = 0; m < MEMBERS; ++m) {
            for (size_t i = 0; i < numels[m]; i += 7) {
                double sum = 0;
                total[self->rank] = owed(&t, m, i);
                ranks_meet(self);
                for (int r = 0; r < self->world_size; ++r)
                    sum += total[r] / self->world_size;
                ranks_meet(self);
                worst = fmax(worst, fabs(got[offsets[m] + i] + sum - wanted[offsets[m] + i]));
            }
        }
        check(worst < 1e-3, "W=%d, setting %zu: results and errors miss the means by %g",
              self->world_size, k, worst);
        stop(self, &t);
    }
}

static void full_rank_is_the_mean(rank_context *self)
{
    under_test t;
    float flat[NUMEL];
    if (!start(self, &settings[7], &t))
        return;
    fill(flat, self->rank, 0);
    average(self, &t, flat);
    double worst = 0;
    for (size_t i = 0; i < numels[0]; ++i) {
        double mean = 0;
        for (int r = 0; r < self->world_size; ++r)
            mean += (double)value_of(r, i, 0) / self->world_size;
        worst = fmax(worst, fabs((double)flat[i] - mean));
    }
    check(worst < 1e-4, "full rank misses the mean by %g", worst);
    stop(self, &t);
}

/* ---- what takes no part, and what is refused ---- */

static void snapshot(const under_test *t, size_t m, uint8_t *bytes)
{
    const sw_compressor_entry *e = sw_compressor_entry_of(t->compressor, m);
    for (int part = 0; part < SW_PART_COUNT; ++part) {
        size_t size = sw_compressor_part_numel(t->compressor, m, (sw_compressor_part)part) * 4;
        if (e->part[part])
            memcpy(bytes, e->part[part], size);
        bytes += e->part[part] ? size : 0;
    }
}

static void state_stays(rank_context *self)
{
    static uint8_t before[RANKS_MAX][4 * 8192], after[RANKS_MAX][4 * 8192];
    for (size_t k = 4; k < 7; ++k) {
        under_test t;
        float flat[NUMEL];
        if (!start(self, &settings[k], &t))
            return;
        for (int step = 0; step < 2; ++step) {
            fill(flat, self->rank, step);
            average(self, &t, flat);
        }
        snapshot(&t, 0, before[self->rank]);
        fill(flat, self->rank, 2);
        if (self->rank == self->world_size - 1)
            flat[17] = INFINITY;
        average(self, &t, flat);
        snapshot(&t, 0, after[self->rank]);
        check(!isfinite(flat[17]), "an infinity gave %g on rank %d", (double)flat[17], self->rank);
        check(memcmp(before[self->rank], after[self->rank], sizeof *before) == 0,
              "setting %zu: an infinity changed the state of rank %d", k, self->rank);
        t.members[0].used = false;
        fill(flat, self->rank, 3);
        average(self, &t, flat);
        snapshot(&t, 0, after[self->rank]);
        check(flat[5] == value_of(self->rank, 5, 3), "an unused parameter changed");
        check(memcmp(before[self->rank], after[self->rank], sizeof *before) == 0,
              "setting %zu: the state of an unused parameter changed", k);
        check(isfinite(flat[offsets[2]]), "a used one is not finite");
        stop(self, &t);
    }
}

int main(void)
{
    static const int worlds[] = {1, 3, 4};
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; ++i) {
        ranks_run_all(rounds_are_naive, worlds[i], NULL);
        ranks_run_all(errors_are_fed_back, worlds[i], NULL);
        ranks_run_all(full_rank_is_the_mean, worlds[i], NULL);
        ranks_run_all(state_stays, worlds[i], NULL);
    }
    return check_result();
}
