/* test_layout.c - the laws of layout.h, over random parameter tables, W = 1, 2, 3, 5, 7 and caps
 * from one byte to one bucket for all; by hand, the header's example and sizes that overflow.
 *
 *   L1  every parameter lies in one bucket, and `order` lists it there once
 *   L2  a bucket has one dtype and is all trainable or all frozen
 *   L3  in a bucket, memory order is reverse registration order; buckets are ordered by their first
 *       parameter
 *   L4  a parameter begins on 128 bytes, after less than 128 bytes of padding
 *   L5  a bucket is W slices on 128 bytes, as sw_comm_slice_numel cuts them, and has less than
 *       W * 256 bytes of padding
 *   L6  buckets follow each other without a gap; the sums are the arena's size and its trainable
 *       part
 *   L7  only the last parameter of a bucket reaches the cap; a bucket below it is the last of its
 *       dtype and kind
 *   L8  the runs of the W slices are the parameter's elements, once each and in order; a run of the
 *       bucket lies where that of the slice does
 *   L9  by rows, slice r holds rows [r c, (r + 1) c), c = ceil(rows / W), all at one position
 *   L10 in the bucket a parameter is pieces with a pitch, the runs of the slices that hold any; a
 *       slice is as many equal parts on 128 bytes as are asked for, and no longer than they need
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "check.h"
#include "comm/comm.h"
#include "faults.h"
#include "tensor/layout.h"

enum { PARAMS_MAX = 60, LISTS = 40 };

static uint64_t random_state = 0x9e3779b97f4a7c15u;

static size_t random_below(size_t limit)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (size_t)((random_state * 0x2545f4914f6cdd1du >> 32) % limit);
}

static sw_layout_caps caps(size_t bytes)
{
    return (sw_layout_caps){.bytes = bytes};
}

static size_t draw_params(sw_layout_param *params)
{
    static const size_t sizes[] = {0, 1, 2, 31, 32, 33, 127, 128, 129, 1000, 4097};
    size_t count = random_below(PARAMS_MAX), dtypes = 1 + random_below(SW_DTYPE_COUNT);
    size_t frozen_in = 1 + random_below(4), group_size = 1 + random_below(PARAMS_MAX);
    for (size_t i = 0; i < count; ++i)
        params[i] = (sw_layout_param){.numel = sizes[random_below(sizeof sizes / sizeof sizes[0])],
                                      .dtype = (sw_dtype)random_below(dtypes),
                                      .trainable = random_below(frozen_in) == 0,
                                      .group = i / group_size};
    return count;
}

/* Let some parameters be cut by rows of 1, 31 or 4097 elements, or of all. */
static void draw_rows(sw_layout_param *params, size_t count)
{
    static const size_t rows[] = {1, 31, 4097};
    for (size_t i = 0; i < count; ++i) {
        size_t row = rows[random_below(3)];
        if (random_below(4) > 0)
            params[i].row_numel =
                params[i].numel > 0 && params[i].numel % row != 0 ? params[i].numel : row;
    }
}

/* Check L8 and L9. */
static void check_pieces(const sw_layout *layout, const sw_layout_param *params, size_t p)
{
    const sw_layout_place *place = &layout->place[p];
    const sw_layout_bucket *bucket = &layout->bucket[place->bucket];
    size_t width = sw_layout_slice_numel(layout, place->bucket), next = 0;
    check(bucket->by_rows == (params[p].row_numel > 0), "L2: parameter %zu, by rows or not", p);
    for (size_t s = 0; s < layout->slice_count; ++s) {
        sw_layout_run run = sw_layout_run_in(layout, p, s, layout->slice_count);
        if (params[p].row_numel > 0) {
            size_t rows = params[p].numel / params[p].row_numel, count = layout->slice_count;
            size_t chunk = (rows + count - 1) / count, first = s * chunk < rows ? s * chunk : rows;
            size_t last = first + chunk < rows ? first + chunk : rows;
            check(run.begin == first * params[p].row_numel && run.end == last * params[p].row_numel,
                  "L9: slice %zu of parameter %zu", s, p);
            check(run.first == place->begin, "L9: slice %zu of parameter %zu lies at %zu", s, p,
                  run.first);
        }
        if (run.begin == run.end)
            continue;
        check(run.begin == next && run.end > run.begin, "L8: slice %zu of parameter %zu", s, p);
        check(run.first + (run.end - run.begin) <= width,
              "L8: slice %zu of parameter %zu ends late", s, p);
        for (size_t at = run.begin; at < run.end; at += 1 + (run.end - run.begin) / 3) {
            sw_layout_run there = sw_layout_bucket_run(layout, p, at);
            check(there.begin == at && there.first == s * width + run.first + (at - run.begin) &&
                      there.end == (bucket->by_rows ? run.end : params[p].numel),
                  "L8: element %zu of parameter %zu", at, p);
        }
        next = run.end;
    }
    const sw_layout_pieces lie = sw_layout_pieces_of(layout, p);
    for (size_t at = 0, k = 0; at < params[p].numel; at += lie.chunk, ++k) {
        sw_layout_run there = sw_layout_bucket_run(layout, p, at);
        check(there.end == (at + lie.chunk < lie.numel ? at + lie.chunk : lie.numel) &&
                  there.first == lie.first + k * lie.pitch,
              "L10: piece %zu of parameter %zu", k, p);
    }
    check(lie.numel == params[p].numel && lie.chunk > 0, "L10: parameter %zu", p);
    check(next == params[p].numel, "L8: the slices hold %zu elements of parameter %zu", next, p);
}

/* Return the end of a parameter in its bucket; by rows, in each slice. */
static size_t end_bytes(const sw_layout *layout, size_t param, size_t element_bytes)
{
    const sw_layout_place *place = &layout->place[param];
    size_t held = place->chunk == 0 ? place->numel : place->numel == 0 ? 0 : place->chunk;
    return (place->begin + held) * element_bytes;
}

/* Check L2, L3, L4 and L7 for the parameters of one bucket. */
static void check_members(const sw_layout *layout, const sw_layout_param *params, size_t b,
                          size_t cap_bytes, size_t *listed)
{
    const sw_layout_bucket *bucket = &layout->bucket[b];
    size_t element_bytes = sw_dtype_size_bytes(bucket->dtype), end = 0;
    size_t group = params[layout->order[bucket->first]].group;
    size_t pieces = bucket->by_rows ? layout->slice_count : 1;
    for (size_t k = 0; k < bucket->count; ++k) {
        size_t p = layout->order[bucket->first + k];
        const sw_layout_place *place = &layout->place[p];
        listed[p]++;
        check(place->bucket == b && place->numel == params[p].numel,
              "L1: parameter %zu is not where order says", p);
        check(params[p].dtype == bucket->dtype && params[p].trainable == bucket->trainable &&
                  params[p].group == group,
              "L2: parameter %zu", p);
        check(k == 0 || p < layout->order[bucket->first + k - 1],
              "L3: parameter %zu is out of order", p);
        check(place->begin * element_bytes % 128 == 0, "L4: parameter %zu is not aligned", p);
        check(place->begin * element_bytes >= end && place->begin * element_bytes - end < 128,
              "L4: parameter %zu overlaps or leaves a gap", p);
        end = end_bytes(layout, p, element_bytes);
        check_pieces(layout, params, p);
        check(k + 1 == bucket->count || end * pieces < cap_bytes,
              "L7: parameter %zu reaches the cap, but others follow", p);
    }
    bool last_of_kind = true, is_apart = false;
    for (size_t i = 0; i < layout->param_count; ++i)
        is_apart =
            is_apart || (layout->bucket[layout->place[i].bucket].by_rows != bucket->by_rows &&
                         params[i].group == group);
    for (size_t other = b + 1; other < layout->bucket_count; ++other)
        last_of_kind =
            last_of_kind && (layout->bucket[other].dtype != bucket->dtype ||
                             layout->bucket[other].trainable != bucket->trainable ||
                             layout->bucket[other].by_rows != bucket->by_rows ||
                             params[layout->order[layout->bucket[other].first]].group != group);
    check(last_of_kind || is_apart || end * pieces >= cap_bytes,
          "L7: bucket %zu was closed below the cap", b);
}

/* Check L5 and L6. */
static void check_slices(const sw_layout *layout, size_t b, int world_size, size_t offset_bytes)
{
    const sw_layout_bucket *bucket = &layout->bucket[b];
    size_t element_bytes = sw_dtype_size_bytes(bucket->dtype);
    size_t used =
        end_bytes(layout, layout->order[bucket->first + bucket->count - 1], element_bytes);
    size_t bytes = bucket->numel * element_bytes, count = (size_t)world_size;
    used *= bucket->by_rows ? count : 1;
    check(bytes % (count * 128) == 0 && bytes >= used, "L5: bucket %zu has %zu bytes for %zu", b,
          bytes, used);
    check(bytes - used < count * 256, "L5: bucket %zu has %zu bytes for %zu", b, bytes, used);
    check(sw_comm_slice_numel(bucket->numel, element_bytes, world_size) * count == bucket->numel,
          "L5: the collective cuts bucket %zu differently", b);
    check(bucket->offset_bytes == offset_bytes, "L6: bucket %zu begins at %zu", b,
          bucket->offset_bytes);
}

static void check_laws(const sw_layout_param *params, size_t count, int world_size,
                       size_t cap_bytes)
{
    sw_layout layout;
    sw_error err = {.message = ""};
    size_t listed[PARAMS_MAX] = {0}, size_bytes = 0, trainable_bytes = 0;
    if (!check(sw_layout_init(&layout, params, count, world_size, caps(cap_bytes), &err) == SW_OK,
               "%s", err.message))
        return;
    check(layout.param_count == count, "the count of parameters is kept");
    for (size_t b = 0; b < layout.bucket_count; ++b) {
        const sw_layout_bucket *bucket = &layout.bucket[b];
        if (!check(bucket->count > 0 && bucket->first + bucket->count <= count,
                   "L1: bucket %zu is empty", b))
            continue;
        check(b == 0 || layout.order[bucket->first] < layout.order[layout.bucket[b - 1].first],
              "L3: bucket %zu", b);
        check_members(&layout, params, b, cap_bytes, listed);
        check_slices(&layout, b, world_size, size_bytes);
        size_bytes += bucket->numel * sw_dtype_size_bytes(bucket->dtype);
        if (bucket->trainable)
            trainable_bytes += bucket->numel * sw_dtype_size_bytes(bucket->dtype);
    }
    for (size_t p = 0; p < count; ++p) {
        check(listed[p] == 1, "L1: parameter %zu is listed %zu times", p, listed[p]);
    }
    check(layout.size_bytes == size_bytes && layout.trainable_bytes == trainable_bytes,
          "L6: the sums are wrong");
    sw_layout_fini(&layout);
}

/* Check L10 for slices of several pieces: of flat buckets they are those of as many slices. */
static void check_owners(const sw_layout_param *params, size_t count, size_t slices, size_t pieces)
{
    sw_layout layout, cut, alone;
    sw_error err = {.message = ""};
    sw_layout_caps sizes = caps(1024);
    bool made = sw_layout_init(&cut, params, count, (int)(slices * pieces), sizes, &err) == SW_OK &&
                sw_layout_init(&alone, params, count, (int)slices, sizes, &err) == SW_OK;
    sizes.pieces = pieces;
    if (!check(made && sw_layout_init(&layout, params, count, (int)slices, sizes, &err) == SW_OK,
               "%s", err.message))
        return;
    for (size_t b = 0; b < layout.bucket_count; ++b) {
        const sw_layout_bucket *bucket = &layout.bucket[b];
        size_t element_bytes = sw_dtype_size_bytes(bucket->dtype);
        size_t bytes = bucket->numel * element_bytes, whole = alone.bucket[b].numel * element_bytes;
        const sw_layout_bucket *other = &cut.bucket[b];
        bool is_same = b < cut.bucket_count && bucket->first == other->first &&
                       bucket->count == other->count && !other->by_rows;
        check(!is_same || bucket->by_rows || bucket->numel == other->numel, "L10: flat bucket %zu",
              b);
        check(bytes % (slices * pieces * 128) == 0 && bytes >= whole &&
                  bytes < whole + slices * pieces * 128,
              "L10: bucket %zu has %zu bytes, not %zu", b, bytes, whole);
    }
    sw_layout_fini(&layout);
    sw_layout_fini(&cut);
    sw_layout_fini(&alone);
}

static void test_laws(void)
{
    static const int worlds[] = {1, 2, 3, 5, 7};
    static const size_t caps[] = {1, 127, 128, 129, 1024, 20000, SIZE_MAX};
    sw_layout_param params[PARAMS_MAX];
    for (int list = 0; list < LISTS; ++list) {
        size_t count = draw_params(params);
        for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; ++w)
            for (size_t c = 0; c < sizeof caps / sizeof caps[0]; ++c)
                check_laws(params, count, worlds[w], caps[c]);
        draw_rows(params, count);
        for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; ++w)
            for (size_t c = 0; c < sizeof caps / sizeof caps[0]; ++c)
                check_laws(params, count, worlds[w], caps[c]);
        for (size_t slices = 1; slices <= 3; ++slices)
            for (size_t pieces = 1; pieces <= 3; ++pieces)
                check_owners(params, count, slices, pieces);
    }
}

/* The cap doubles from bucket to bucket up to the limit; a parameter above the cap is one bucket.
 */
static void test_first_buckets_are_small(void)
{
    enum { COUNT = 32 };
    const size_t expected[] = {1, 2, 4, 8, 8, 8, 1 /* the rest */};
    sw_layout_param params[COUNT];
    sw_layout layout;
    sw_error err = {.message = ""};
    for (size_t i = 0; i < COUNT; ++i)
        params[i] = (sw_layout_param){256, SW_DTYPE_FLOAT32, true, 0, 0};
    sw_layout_caps graded = {.bytes = 8192, .first_bytes = 1024};
    if (!check(sw_layout_init(&layout, params, COUNT, 1, graded, &err) == SW_OK, "%s", err.message))
        return;
    check(layout.bucket_count == 7, "seven buckets, got %zu", layout.bucket_count);
    for (size_t b = 0; b < layout.bucket_count && b < 7; ++b)
        check(layout.bucket[b].count == expected[b], "bucket %zu has %zu parameters, got %zu", b,
              expected[b], layout.bucket[b].count);
    sw_layout_fini(&layout);
    graded.first_bytes = SIZE_MAX; /* above the cap: every bucket has the cap */
    if (check(sw_layout_init(&layout, params, COUNT, 1, graded, &err) == SW_OK, "%s", err.message))
        check(layout.bucket[0].count == 8, "the cap holds, got %zu", layout.bucket[0].count);
    sw_layout_fini(&layout);
}

/* Check the example of layout.h number by number. */
static void test_example(void)
{
    const sw_layout_param params[] = {{200, SW_DTYPE_FLOAT32, true, 0, 0}, /* fc1.weight */
                                      {20, SW_DTYPE_FLOAT32, true, 0, 0},  /* fc1.bias */
                                      {300, SW_DTYPE_FLOAT32, true, 0, 0}, /* fc2.weight */
                                      {10, SW_DTYPE_FLOAT32, true, 0, 0}}; /* fc2.bias */
    sw_layout layout;
    sw_error err = {.message = ""};
    if (!check(sw_layout_init(&layout, params, 4, 3, caps(1024), &err) == SW_OK, "%s", err.message))
        return;
    check(layout.bucket_count == 2, "two buckets, got %zu", layout.bucket_count);
    check(layout.place[3].bucket == 0 && layout.place[3].begin == 0,
          "fc2.bias is at element 0 of bucket 0");
    check(layout.place[2].bucket == 0 && layout.place[2].begin == 32,
          "fc2.weight is at element 32 of bucket 0");
    check(layout.place[1].bucket == 1 && layout.place[1].begin == 0,
          "fc1.bias is at element 0 of bucket 1");
    check(layout.place[0].bucket == 1 && layout.place[0].begin == 32,
          "fc1.weight is at element 32 of bucket 1");
    check(layout.bucket[0].numel == 384 && layout.bucket[1].numel == 288,
          "slices of 128 and of 96");
    check(layout.bucket[1].offset_bytes == 384 * 4 && layout.size_bytes == (384 + 288) * 4,
          "offsets in bytes");
    sw_layout_fini(&layout);
}

static void check_refused(const sw_layout_param *params, size_t count, int world_size,
                          const char *subject)
{
    sw_layout layout;
    sw_error err = {.message = ""};
    bool refused =
        sw_layout_init(&layout, params, count, world_size, caps(SIZE_MAX), &err) == SW_E_INVALID;
    check(refused && strstr(err.message, "overflow"), "%s is refused, got '%s'", subject,
          err.message);
    if (!refused)
        sw_layout_fini(&layout);
    else
        check(!layout.place && !layout.bucket && !layout.order, "%s leaves nothing behind",
              subject);
}

static void test_overflow(void)
{
    const size_t all =
        SIZE_MAX / 4 - 31; /* float32 elements of the largest multiple of 128 bytes */
    sw_layout_param params[2] = {{all, SW_DTYPE_FLOAT32, true, 0, 0}};
    sw_layout layout;
    sw_error err = {.message = ""};
    if (check(sw_layout_init(&layout, params, 1, 1, caps(1), &err) == SW_OK,
              "the whole address space: %s", err.message)) {
        check(layout.size_bytes == SIZE_MAX - 127, "its size, %zu", layout.size_bytes);
        sw_layout_fini(&layout);
    }
    params[0].numel = all + 1;
    check_refused(params, 1, 1, "a parameter whose slice overflows");
    params[0].numel = SIZE_MAX / 4 + 1;
    check_refused(params, 1, 1, "a parameter whose bytes overflow");
    params[0].numel = SIZE_MAX;
    check_refused(params, 1, 7, "SIZE_MAX elements");
    params[0].numel = all;
    check_refused(params, 1, 5, "W slices that overflow together");
    params[0] = (sw_layout_param){SIZE_MAX / 2 + 1, SW_DTYPE_UINT8, true, 0, 0};
    params[1] = (sw_layout_param){SIZE_MAX / 2 + 1, SW_DTYPE_UINT8, false, 0, 0};
    check_refused(params, 2, 1, "two buckets that overflow together");
    params[0] = (sw_layout_param){SIZE_MAX - 100, SW_DTYPE_UINT8, true, 0, 0};
    params[1] = (sw_layout_param){100, SW_DTYPE_UINT8, true, 0, 0};
    check_refused(params, 2, 1, "a parameter that ends beyond the address space");
    params[0].numel = 100;
    params[1].numel = SIZE_MAX - 100;
    check_refused(params, 2, 1, "a parameter that begins beyond the address space");
}

static void test_dtypes(void)
{
    const sw_dtype illegal[] = {SW_DTYPE_COUNT, (sw_dtype)-1, (sw_dtype)1000};
    for (size_t i = 0; i < sizeof illegal / sizeof illegal[0]; ++i) {
        sw_layout_param params[2] = {{1, SW_DTYPE_INT8, true, 0, 0}, {1, illegal[i], true, 0, 0}};
        sw_layout layout;
        sw_error err = {.message = ""};
        check(sw_layout_init(&layout, params, 2, 3, caps(1), &err) == SW_E_INVALID &&
                  strstr(err.message, "parameter 1 "),
              "dtype %d is refused by the parameter's number, got '%s'", (int)illegal[i],
              err.message);
        check(sw_dtype_size_bytes(illegal[i]) == 0 &&
                  strcmp(sw_dtype_name(illegal[i]), "invalid") == 0,
              "dtype %d has no size and no name", (int)illegal[i]);
    }
    for (int d = 0; d < SW_DTYPE_COUNT; ++d) {
        size_t size_bytes = sw_dtype_size_bytes((sw_dtype)d);
        check(size_bytes > 0 && 128 % size_bytes == 0, "dtype %d divides the alignment", d);
        check(sw_dtype_from_name(sw_dtype_name((sw_dtype)d)) == (sw_dtype)d,
              "dtype %d is found by its name", d);
    }
    check(sw_dtype_from_name("float31") == SW_DTYPE_COUNT &&
              sw_dtype_from_name("") == SW_DTYPE_COUNT,
          "an unknown name has no dtype");
}

static void test_memory(void)
{
    const sw_layout_param params[] = {{7, SW_DTYPE_FLOAT32, true, 0, 0},
                                      {7, SW_DTYPE_FLOAT64, false, 0, 0}};
    sw_layout layout;
    sw_error err;
    for (long nth = 1; nth <= 3; ++nth) {
        faults_arm(nth);
        sw_status status = sw_layout_init(&layout, params, 2, 3, caps(1), &err);
        check(status == SW_E_MEMORY && !layout.place && !layout.bucket && !layout.order,
              "allocation %ld fails", nth);
        if (status == SW_OK)
            sw_layout_fini(&layout);
    }
    faults_arm(0);
    if (check(sw_layout_init(&layout, params, 0, 3, caps(1), &err) == SW_OK,
              "a model without parameters"))
        check(layout.bucket_count == 0 && layout.size_bytes == 0,
              "a model without parameters has no buckets");
    sw_layout_fini(&layout);
    sw_layout_fini(&layout); /* a second time is harmless */
}

int main(void)
{
    test_example();
    test_first_buckets_are_small();
    test_laws();
    test_overflow();
    test_dtypes();
    test_memory();
    return check_result();
}
