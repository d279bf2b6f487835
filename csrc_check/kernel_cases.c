/* kernel_cases.c - the tables of all kernels, and the cases of CAST, PACK, FOLD, ADAM, SGD, NORM,
 * CLIP and PUT; see kernel_cases.h. block_cases.c and lowrank_cases.c have the others.
 */
#include "kernel_cases.h"

#include <string.h>

#include "case_parts.h"
#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"

enum { LARGE_REGION_BYTES = SW_CASE_BYTES_MAX / SW_CASE_REGIONS };
static const sw_dtype small[] = {SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT16, SW_DTYPE_BFLOAT16};

/* The arena of this case is the large one. */
static void enlarge(sw_case_maker *maker)
{
    maker->region_bytes = LARGE_REGION_BYTES;
    maker->made->arena_bytes = SW_CASE_BYTES_MAX;
    memset(maker->arena, SW_CASE_GUARD, SW_CASE_BYTES_MAX);
}

/* ---- CAST ---- */

/* Sizes of the cases, and one of several tiles. */
static size_t pick_numel(sw_case_maker *maker, size_t *index)
{
    size_t number = sw_case_pick(index, SW_CASE_NUMELS + 1);
    if (number < SW_CASE_NUMELS)
        return sw_case_numel(number);
    enlarge(maker);
    return 20011;
}

/* Both ends on a boundary, off it by the same number of elements, by different numbers, and never
 * on one at once. */
static void make_cast(sw_case_maker *maker, size_t index)
{
    static const size_t off[][2] = {{0, 0}, {3, 3}, {1, 5}, {2, 1}};
    sw_cast_args *args = &maker->made->args.cast;
    size_t numel = pick_numel(maker, &index);
    sw_dtype to = small[sw_case_pick(&index, 3)], from = small[sw_case_pick(&index, 3)];
    void *source = sw_case_region(maker, 1, off[index][1] * sw_dtype_size_bytes(from));
    *args = (sw_cast_args){.to = sw_case_region(maker, 0, off[index][0] * sw_dtype_size_bytes(to)),
                           .from = source,
                           .numel = numel,
                           .scale = 0.7f,
                           .to_dtype = (int)to,
                           .from_dtype = (int)from};
    sw_case_fill(maker, source, numel, from, true);
    maker->made->label = sw_dtype_name(to);
}

static void settle_cast(const void *args)
{
    const sw_cast_args *a = args;
    sw_case_settle_floats(a->to, (size_t)a->numel, (sw_dtype)a->to_dtype);
}

/* ---- PACK ---- */

enum { PACK_PLAIN, PACK_REFUSED, PACK_KEPT, PACK_TILES, PACK_SCATTER, PACK_GATHER, PACK_FORMS };
/* Conversions: by a scale, by a factor, in place by a factor and by a factor of 1. */
enum { BY_SCALE, BY_FACTOR, IN_PLACE, BY_ONE, CONVERSIONS };

static void make_pack_of_bytes(sw_case_maker *maker, sw_pack_args *args, size_t numel, size_t form)
{
    static const size_t off[][2] = {{0, 0}, {1, 1}, {7, 3}, {3, 5}, {2, 9}, {0, 0}};
    args->segment_count = form == PACK_TILES ? 2 : 6;
    for (size_t s = 0; s < 8; ++s)
        sw_case_fill(maker, sw_case_region(maker, 8 + s, 0), maker->region_bytes / 4,
                     SW_DTYPE_FLOAT32, false);
    for (size_t s = 0; s < 6; ++s)
        args->segment[s] = (sw_pack_segment){.to = sw_case_region(maker, s, off[s][0]),
                                             .from = sw_case_region(maker, 8 + s, off[s][1]),
                                             .size_bytes = s == 5 ? 0 : numel * (s + 1)};
    if (form == PACK_REFUSED || form == PACK_KEPT) {
        int verdict = form == PACK_REFUSED;
        args->verdict = memcpy(sw_case_region(maker, 15, 0), &verdict, sizeof verdict);
    }
    if (form == PACK_TILES) {
        args->segment[0].size_bytes = numel ? 2 * maker->region_bytes + numel : 0;
        args->segment[1] = (sw_pack_segment){.to = sw_case_region(maker, 4, 1),
                                             .from = sw_case_region(maker, 12, 4),
                                             .size_bytes = maker->region_bytes + numel};
    }
    maker->made->label = form == PACK_TILES ? "tiles" : "segments";
}

/* Three pieces or more that are apart at one end: of a byte; off boundaries, the last one full; the
 * last one shorter; on boundaries, of several tiles where the arena is large. Then zeros, in
 * pieces and in one range. */
static void make_pack_of_pieces(sw_case_maker *maker, sw_pack_args *args, size_t numel,
                                bool is_gathered)
{
    static const size_t off[][2] = {{0, 1}, {1, 3}, {2, 4}, {0, 0}};
    const size_t bytes[] = {1, numel / 3 + 1, numel + 2, (numel / 16 + 1) * 128};
    const size_t count[] = {7, 3, 3, 3}, gap[] = {0, 5, 2, 128};
    args->segment_count = 6;
    for (size_t s = 0; s < 4; ++s) {
        sw_pack_segment *made = &args->segment[s];
        *made = (sw_pack_segment){.to = sw_case_region(maker, 2 * s, off[s][0]),
                                  .from = sw_case_region(maker, 8 + 2 * s, off[s][1]),
                                  .size_bytes = count[s] * bytes[s] - (s == 2 ? numel / 2 : 0),
                                  .piece_count = count[s],
                                  .piece_bytes = bytes[s],
                                  .to_pitch = bytes[s] + (is_gathered ? 0 : gap[s]),
                                  .from_pitch = bytes[s] + (is_gathered ? gap[s] : 0)};
        sw_case_fill(maker, sw_case_region(maker, 8 + 2 * s, 0), maker->region_bytes / 2,
                     SW_DTYPE_FLOAT32, false);
    }
    args->segment[4] = args->segment[2];
    args->segment[4].to = sw_case_region(maker, 1, 0);
    args->segment[4].from = NULL;
    args->segment[5] = args->segment[3];
    args->segment[5].to = sw_case_region(maker, 5, 16);
    args->segment[5].from = NULL;
    args->segment[5].piece_count = 0;
    args->segment[5].size_bytes /= 3;
    maker->made->label = is_gathered ? "pieces gathered" : "pieces scattered";
}

static void make_pack_that_converts(sw_case_maker *maker, sw_pack_args *args, size_t numel,
                                    size_t index)
{
    size_t form = sw_case_pick(&index, CONVERSIONS);
    sw_dtype from = small[sw_case_pick(&index, 3)], to = small[index];
    to = form >= IN_PLACE ? from : to;
    float factor = form == BY_ONE ? 1.0f : 0.37f;
    args->converts = 1;
    args->to_dtype = (int)to;
    args->from_dtype = (int)from;
    args->scale = 1.0f / 3;
    if (form != BY_SCALE)
        args->factor = memcpy(sw_case_region(maker, 15, 4), &factor, sizeof factor);
    for (size_t s = 0; s < 3; ++s) {
        size_t count = s == 1 ? numel / 3 : numel;
        void *source = sw_case_region(maker, 8 + s, s * sw_dtype_size_bytes(from));
        void *target = sw_case_region(maker, s, s * sw_dtype_size_bytes(to));
        sw_case_fill(maker, source, count, from, true);
        args->segment[s] = (sw_pack_segment){.to = form >= IN_PLACE ? source : target,
                                             .from = source,
                                             .size_bytes = count * sw_dtype_size_bytes(from)};
    }
    if (numel > 1) { /* two pieces, the second one shorter */
        sw_pack_segment *last = &args->segment[2];
        last->piece_count = 2;
        last->piece_bytes = (numel / 2 + 1) * sw_dtype_size_bytes(from);
        last->from_pitch = last->piece_bytes;
        last->to_pitch = (numel / 2 + 4) * sw_dtype_size_bytes(to);
        if (form >= IN_PLACE) {
            sw_case_fill(maker, last->to, numel + 3, from, true);
            last->from_pitch = last->to_pitch;
        }
    }
    args->segment[3] = args->segment[2];
    args->segment[3].to = sw_case_region(maker, 4, 8);
    args->segment[3].from = NULL;
    args->segment_count = form == BY_SCALE ? 4 : 3;
    maker->made->label = sw_dtype_name(to);
}

static void make_pack(sw_case_maker *maker, size_t index)
{
    sw_pack_args *args = &maker->made->args.pack;
    size_t numel = pick_numel(maker, &index);
    if (index == PACK_SCATTER || index == PACK_GATHER)
        make_pack_of_pieces(maker, args, numel, index == PACK_GATHER);
    else if (index < PACK_FORMS)
        make_pack_of_bytes(maker, args, numel, index);
    else
        make_pack_that_converts(maker, args, numel, index - PACK_FORMS);
}

static void settle_pack(const void *args)
{
    const sw_pack_args *a = args;
    const size_t element_bytes = sw_dtype_size_bytes((sw_dtype)a->from_dtype);
    for (int s = 0; a->converts && s < a->segment_count; ++s) {
        const sw_pack_segment *segment = &a->segment[s];
        size_t left = (size_t)segment->size_bytes / element_bytes;
        size_t most = segment->piece_count ? (size_t)segment->piece_bytes / element_bytes : left;
        for (size_t k = 0; left > 0; ++k) {
            size_t numel = left < most ? left : most;
            sw_case_settle_floats((char *)segment->to + k * segment->to_pitch, numel,
                                  (sw_dtype)a->to_dtype);
            left -= numel;
        }
    }
}

/* ---- FOLD ---- */

enum { FOLD_NUMEL_MOST = 777, FOLD_SOURCES = 3, FOLD_FORMS = 4 };

static bool is_half(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

/* Arrays on boundaries, off them by the same number of bytes, by an element's, and never at once.
 */
static void make_fold(sw_case_maker *maker, size_t index)
{
    sw_fold_args *args = &maker->made->args.fold;
    size_t numel = sw_case_numel(sw_case_pick(&index, SW_CASE_NUMELS));
    int sources = 1 + 2 * (int)sw_case_pick(&index, FOLD_SOURCES);
    size_t form = sw_case_pick(&index, FOLD_FORMS);
    bool has_addend = (numel + form) % 2;
    sw_redop op = (sw_redop)sw_case_pick(&index, SW_REDOP_COUNT);
    sw_dtype dtype = (sw_dtype)index;
    bool widens = form == 2 && is_half(dtype);
    const size_t width = sw_dtype_size_bytes(dtype), off[][3] = {{16, 16, 16},
                                                                 {16 + width, 16 + width, width},
                                                                 {16, 16, 16 + width},
                                                                 {width, 0, 0}};
    bool wild = dtype != SW_DTYPE_COMPLEX64 && dtype != SW_DTYPE_COMPLEX128;
    if (sw_redop_check(op, dtype, NULL) != SW_OK)
        op = SW_REDOP_SUM;
    void *own = sw_case_region(maker, form == 3 ? 2 : 0, off[form][1]);
    *args = (sw_fold_args){.to = sw_case_region(maker, has_addend || widens, off[form][0]),
                           .own = own,
                           .rest = sw_case_region(maker, 4, off[form][2]),
                           .numel = numel < FOLD_NUMEL_MOST ? numel : FOLD_NUMEL_MOST,
                           .stride_bytes = maker->region_bytes,
                           .scale = 1.0 / sources,
                           .dtype = (int)dtype,
                           .op = (int)op,
                           .own_index = form == 1 ? -1 : sources / 2,
                           .source_count = sources,
                           .widens = widens};
    sw_case_fill(maker, own, (size_t)args->numel, dtype, wild);
    for (size_t k = 0; k < 5; ++k)
        sw_case_fill(maker, sw_case_region(maker, 4 + k, off[form][2]), (size_t)args->numel, dtype,
                     wild);
    if (has_addend) {
        void *addend = widens ? sw_case_region(maker, 3, off[form][0]) : args->to;
        args->addend = addend;
        sw_case_fill(maker, addend, (size_t)args->numel, dtype, wild);
    }
    maker->made->label = sw_dtype_name(dtype);
}

static void settle_fold(const void *args)
{
    const sw_fold_args *a = args;
    sw_case_settle_floats(a->to, (size_t)a->numel,
                          a->widens ? SW_DTYPE_FLOAT32 : (sw_dtype)a->dtype);
}

/* ---- ADAM and SGD ---- */

enum { STEP_DTYPES = 27, STEP_NUMELS = SW_CASE_NUMELS + 1, STEP_NUMEL_LARGE = 3000 };

static void narrow_to(void *array, size_t i, sw_dtype dtype, float value)
{
    if (dtype == SW_DTYPE_FLOAT32)
        memcpy((float *)array + i, &value, sizeof value);
    else
        sw_kernels()->compress->half_narrow((uint16_t *)array + i, &value, 1, 1.0f, dtype);
}

static float read_from(const void *array, size_t i, sw_dtype dtype)
{
    float value;
    if (dtype == SW_DTYPE_FLOAT32)
        return ((const float *)array)[i];
    sw_kernels()->compress->half_widen(&value, (const uint16_t *)array + i, 1, dtype);
    return value;
}

/* Other code has written every third parameter, to -0 among others. */
static void fill_copy(sw_case_maker *maker, const sw_run_args *run)
{
    for (size_t i = 0; i < run->numel; ++i) {
        float value = read_from(run->p, i, (sw_dtype)run->p_dtype);
        if (sw_case_draw(maker) % 3 == 0)
            value = sw_case_draw(maker) % 4 ? sw_case_draw_float(maker, false) : -0.0f;
        narrow_to(run->copy, i, (sw_dtype)run->copy_dtype, value);
    }
}

/* Second moments are not negative, and their maximum is larger. */
static sw_run_args make_run(sw_case_maker *maker, size_t numel, size_t form)
{
    sw_dtype p = small[form % 3], s = small[form / 3 % 3], g = small[form / 9 % 3];
    sw_run_args run = {.p = sw_case_region(maker, 0, 0),
                       .m = sw_case_region(maker, 1, 0),
                       .v = sw_case_region(maker, 2, 0),
                       .v_max = sw_case_region(maker, 3, 0),
                       .g = sw_case_region(maker, 4, 0),
                       .copy = form % 2 ? sw_case_region(maker, 5, 0) : NULL,
                       .numel = numel,
                       .p_dtype = (int)p,
                       .state_dtype = (int)s,
                       .g_dtype = (int)g,
                       .copy_dtype = (int)SW_DTYPE_BFLOAT16};
    sw_case_fill(maker, run.p, numel, p, false);
    sw_case_fill(maker, run.m, numel, s, false);
    for (size_t i = 0; i < numel; ++i) {
        float value = sw_case_draw_float(maker, false);
        narrow_to(run.v, i, s, value * value);
        narrow_to(run.v_max, i, s, 2 * value * value);
    }
    sw_case_fill(maker, sw_case_region(maker, 4, 0), numel, g, false);
    if (run.copy)
        fill_copy(maker, &run);
    return run;
}

static void *behind(const void *array, size_t numel, int dtype)
{
    return array ? (char *)(uintptr_t)array + numel * sw_dtype_size_bytes((sw_dtype)dtype) : NULL;
}

/* Cut a run in two, with an empty run between them. */
static int cut_run(sw_run_args whole, sw_run_args *runs)
{
    size_t first = (size_t)whole.numel / 3;
    runs[0] = runs[1] = runs[2] = whole;
    runs[0].numel = first;
    runs[1].numel = 0;
    runs[2].numel = whole.numel - first;
    runs[2].p = behind(whole.p, first, whole.p_dtype);
    runs[2].m = behind(whole.m, first, whole.state_dtype);
    runs[2].v = behind(whole.v, first, whole.state_dtype);
    runs[2].v_max = behind(whole.v_max, first, whole.state_dtype);
    runs[2].g = behind(whole.g, first, whole.g_dtype);
    runs[2].copy = behind(whole.copy, first, whole.copy_dtype);
    return 3;
}

static size_t pick_step(sw_case_maker *maker, size_t *index, const void **clip)
{
    static const float clips[] = {1.0f, 0.61f};
    size_t number = sw_case_pick(index, STEP_NUMELS), clipped = sw_case_pick(index, 3);
    if (clipped)
        *clip = memcpy(sw_case_region(maker, 15, 8), &clips[clipped - 1], sizeof *clips);
    return number < SW_CASE_NUMELS ? sw_case_numel(number) : STEP_NUMEL_LARGE;
}

static void make_adam(sw_case_maker *maker, size_t index)
{
    sw_adam_args *args = &maker->made->args.adam;
    const void *clip = NULL;
    size_t numel = pick_step(maker, &index, &clip), form = index;
    args->clip = clip;
    args->factor = form % 4 ? 1.0f : -0.5f;
    args->decay = 0.999f;
    args->l2 = form % 3 == 1 ? 0.01f : 0.0f;
    args->lerp = form % 5 == 2 ? 0.75f : 0.1f;
    args->beta2 = 0.999f;
    args->square = 0.001f;
    args->correction = 0.17f;
    args->eps = 1e-8f;
    args->negative_step = -0.003f;
    args->amsgrad = form % 7 == 3;
    args->run_count = cut_run(make_run(maker, numel, form), args->run);
}

static void make_sgd(sw_case_maker *maker, size_t index)
{
    sw_sgd_args *args = &maker->made->args.sgd;
    const void *clip = NULL;
    size_t numel = pick_step(maker, &index, &clip), form = index;
    args->clip = clip;
    args->factor = 1.0f;
    args->l2 = form % 3 == 1 ? 0.01f : 0.0f;
    args->momentum = form % 4 ? 0.9f : 0.0f;
    args->undampening = 0.8f;
    args->negative_lr = -0.1f;
    args->nesterov = form % 4 == 2;
    args->first = form % 4 == 3;
    args->run_count = cut_run(make_run(maker, numel, form), args->run);
}

/* ---- NORM and CLIP ---- */

enum { NORM_WINDOW_FORMS = 6, NORM_WINDOW_OFFSETS = 4, NORM_LARGE = 300000 };
static const sw_dtype norm_dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT16, SW_DTYPE_BFLOAT16,
                                       SW_DTYPE_FLOAT64};
enum {
    NORM_PLAIN = (SW_CASE_NUMELS + 1) * 4 * 2,
    NORM_WINDOWS = 3 * NORM_WINDOW_FORMS * NORM_WINDOW_OFFSETS,
    NORM_CASES = NORM_PLAIN + NORM_WINDOWS + 3
};

static sw_norm_args *make_sum(sw_case_maker *maker, sw_dtype dtype)
{
    sw_norm_args *args = &maker->made->args.norm;
    args->sum = memset(sw_case_region(maker, 0, 0), 0, sizeof(sw_norm_sum));
    args->dtype = (int)dtype;
    maker->made->label = sw_dtype_name(dtype);
    return args;
}

/* Three arrays, on and off boundaries, one of them empty. */
static void make_plain_norm(sw_case_maker *maker, size_t index)
{
    size_t numel = pick_numel(maker, &index);
    sw_dtype dtype = norm_dtypes[sw_case_pick(&index, 4)];
    sw_norm_args *args = make_sum(maker, dtype);
    args->part_count = 3;
    for (size_t k = 0; k < 3; ++k) {
        void *data = sw_case_region(maker, 1 + 4 * k, k * sw_dtype_size_bytes(dtype));
        args->part[k] = (sw_norm_part){.data = data, .numel = k == 1 ? 0 : numel / (1 + k)};
        sw_case_fill(maker, data, (size_t)args->part[k].numel, dtype, index == 1);
    }
}

/* Bits of an element as float32: what a window meets, and what it does not. */
static uint32_t window_bits(sw_case_maker *maker, size_t form, size_t i, sw_dtype dtype)
{
    static const uint32_t scales[] = {100, 140, 96, 1, 135, 128, 254, 110};
    uint32_t fraction = sw_case_draw(maker) & 0x7fffffu, sign = sw_case_draw(maker) << 31;
    uint32_t draw = sw_case_draw(maker);
    switch (form) {
    case 0: /* alike */
        return sign | (118 - draw % 4) << 23 | fraction;
    case 1: /* anything, infinities and NaN too */
        return draw ^ fraction << 16;
    case 2: /* scales that change: the window moves up and down */
        return sign | (scales[i / 300 % 8] + draw % 2) << 23 | fraction;
    case 3: /* a tiny or a large one among others, and zeros */
        return sign | (draw % 50 ? 120u : draw / 50 % 255) << 23 | (draw % 3 ? fraction : 0);
    case 4: /* the largest, whose products need the most room */
        return dtype == SW_DTYPE_FLOAT16 ? 0x477fe000u : sign | (252u << 23) | 0x7fffffu;
    default: /* subnormals of float32 and of float16 */
        return sign | (draw % 2 ? 0u : (103u + draw / 2 % 12) << 23) | fraction;
    }
}

static void make_window_norm(sw_case_maker *maker, sw_dtype dtype, size_t form, size_t offset,
                             size_t numel)
{
    enlarge(maker);
    sw_norm_args *args = make_sum(maker, dtype);
    char *data = sw_case_region(maker, 1, offset * sw_dtype_size_bytes(dtype));
    args->part_count = 1;
    args->part[0] = (sw_norm_part){.data = data, .numel = numel};
    for (size_t i = 0; i < numel; ++i) {
        uint32_t bits = window_bits(maker, form, i, dtype);
        uint16_t upper = (uint16_t)(bits >> 16);
        float value;
        memcpy(&value, &bits, sizeof value);
        if (dtype == SW_DTYPE_BFLOAT16)
            memcpy(data + 2 * i, &upper, sizeof upper);
        else
            narrow_to(data, i, dtype, value);
    }
}

static void make_norm(sw_case_maker *maker, size_t index)
{
    if (index < NORM_PLAIN) {
        make_plain_norm(maker, index);
    } else if (index < NORM_PLAIN + NORM_WINDOWS) {
        index -= NORM_PLAIN;
        size_t offset = sw_case_pick(&index, NORM_WINDOW_OFFSETS);
        size_t form = sw_case_pick(&index, NORM_WINDOW_FORMS);
        make_window_norm(maker, norm_dtypes[index], form, offset * 3 % 8, 5000 + 3 * offset);
    } else { /* a lane collects so much that it flushes by itself */
        make_window_norm(maker, norm_dtypes[index - NORM_PLAIN - NORM_WINDOWS], 4, 0, NORM_LARGE);
    }
}

/* Carried digits of one rank are as equal as bytes can be. */
static void settle_norm(const void *args)
{
    sw_norm_sum_carry(((const sw_norm_args *)args)->sum);
}

enum { CLIP_SUMS = 9, CLIP_CASES = CLIP_SUMS * 4 };

/* Sums of several ranks: digits beyond 32 bits, zero, subnormal roots, the largest, not finite. */
static void make_clip(sw_case_maker *maker, size_t index)
{
    static const double bounds[] = {1.0, 0.0, 1e30};
    sw_clip_args *args = &maker->made->args.clip;
    sw_norm_sum sum = {.additions = 5};
    size_t form = sw_case_pick(&index, CLIP_SUMS);
    int lowest = form == 2 ? 0 : form == 3 ? 34 : form == 4 ? 100 : 64, digits = form == 5 ? 1 : 5;
    for (int k = 0; form > 0 && k < digits; ++k)
        sum.digit[lowest + k] = (int64_t)sw_case_draw(maker) << (form % 2 ? 8 : 0);
    if (form == 6)
        sum.digit[60] = -(INT64_C(1) << 20); /* as a carry from below leaves it */
    sum.infinite = form == 7;
    sum.nan = form == 8 ? 3 : 0;
    args->sum = memcpy(sw_case_region(maker, 0, 8), &sum, sizeof sum);
    maker->made->label = index < 3 ? "norm and factor" : "carry";
    if (index == 3)
        return;
    args->norm = sw_case_region(maker, 1, 4);
    args->factor = sw_case_region(maker, 2, 12);
    args->max_norm = bounds[index];
}

static void settle_clip(const void *args)
{
    const sw_clip_args *a = args;
    sw_case_settle_floats(a->norm, a->norm ? 1 : 0, SW_DTYPE_FLOAT32);
    sw_case_settle_floats(a->factor, a->norm ? 1 : 0, SW_DTYPE_FLOAT32);
}

/* ---- PUT ---- */

static void make_put(sw_case_maker *maker, size_t index)
{
    sw_put_args *args = &maker->made->args.put;
    size_t numel = index < SW_CASE_NUMELS ? sw_case_numel(index) : SW_PUT_BYTES_MAX;
    args->to = sw_case_region(maker, 3, numel % 16);
    args->size_bytes = (int)numel;
    for (size_t i = 0; i < numel; ++i)
        args->byte[i] = (unsigned char)sw_case_draw(maker);
}

/* ---- the table ---- */

static const sw_case_table cast_cases = {
    .count = (SW_CASE_NUMELS + 1) * 9 * 4, .make = make_cast, .settle = settle_cast};
static const sw_case_table pack_cases = {.count =
                                             (SW_CASE_NUMELS + 1) * (PACK_FORMS + 9 * CONVERSIONS),
                                         .make = make_pack,
                                         .settle = settle_pack};
static const sw_case_table fold_cases = {.count = SW_CASE_NUMELS * FOLD_SOURCES * FOLD_FORMS *
                                                  SW_REDOP_COUNT * SW_DTYPE_BOOL,
                                         .make = make_fold,
                                         .settle = settle_fold};
static const sw_case_table adam_cases = {.count = STEP_NUMELS * 3 * STEP_DTYPES, .make = make_adam};
static const sw_case_table sgd_cases = {.count = STEP_NUMELS * 3 * STEP_DTYPES, .make = make_sgd};
static const sw_case_table norm_cases = {
    .count = NORM_CASES, .make = make_norm, .settle = settle_norm};
static const sw_case_table clip_cases = {
    .count = CLIP_CASES, .make = make_clip, .settle = settle_clip};
static const sw_case_table put_cases = {.count = SW_CASE_NUMELS + 1, .make = make_put};

static const sw_case_table *const tables[SW_KERNEL_COUNT] = {
    [SW_KERNEL_CAST] = &cast_cases,
    [SW_KERNEL_PACK] = &pack_cases,
    [SW_KERNEL_FOLD] = &fold_cases,
    [SW_KERNEL_ADAM] = &adam_cases,
    [SW_KERNEL_SGD] = &sgd_cases,
    [SW_KERNEL_NORM] = &norm_cases,
    [SW_KERNEL_CLIP] = &clip_cases,
    [SW_KERNEL_QUANTIZE] = &sw_quantize_cases,
    [SW_KERNEL_FOLD_RECORDS] = &sw_fold_records_cases,
    [SW_KERNEL_DECODE] = &sw_decode_cases,
    [SW_KERNEL_VERDICT] = &sw_verdict_cases,
    [SW_KERNEL_OWE] = &sw_owe_cases,
    [SW_KERNEL_PROJECT] = &sw_project_cases,
    [SW_KERNEL_ABSORB] = &sw_absorb_cases,
    [SW_KERNEL_EXPAND] = &sw_expand_cases,
    [SW_KERNEL_ORTHONORMALIZE] = &sw_orthonormalize_cases,
    [SW_KERNEL_FINITE] = &sw_finite_cases,
    [SW_KERNEL_PUT] = &put_cases,
};

size_t sw_kernel_case_count(sw_kernel kernel)
{
    return tables[kernel]->count;
}

void sw_kernel_case_make(sw_kernel kernel, size_t index, unsigned char *arena, sw_kernel_case *made)
{
    sw_case_maker maker = {.arena = arena,
                           .region_bytes = SW_CASE_BYTES / SW_CASE_REGIONS,
                           .state = UINT64_C(88172645463325252) +
                                    (index * SW_KERNEL_COUNT + kernel) * UINT64_C(2654435761),
                           .made = made};
    memset(arena, SW_CASE_GUARD, SW_CASE_BYTES);
    *made = (sw_kernel_case){.label = "", .arena_bytes = SW_CASE_BYTES};
    for (int k = 0; k < 8; ++k)
        (void)sw_case_draw(&maker);
    tables[kernel]->make(&maker, index);
}

void sw_kernel_case_settle(sw_kernel kernel, const void *args)
{
    if (tables[kernel]->settle)
        tables[kernel]->settle(args);
}

void sw_kernel_case_move(sw_kernel kernel, sw_kernel_case *moved, const unsigned char *from,
                         uintptr_t to)
{
    size_t bytes = sw_kernel_contracts()[kernel].args_bytes;
    for (size_t at = 0; at + sizeof(uintptr_t) <= bytes; at += sizeof(uintptr_t)) {
        uintptr_t word;
        memcpy(&word, moved->args.bytes + at, sizeof word);
        if (word - (uintptr_t)from >= SW_CASE_BYTES_MAX)
            continue;
        word += to - (uintptr_t)from;
        memcpy(moved->args.bytes + at, &word, sizeof word);
    }
}
