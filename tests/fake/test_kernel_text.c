/* test_kernel_text.c - the .cu text, compiled by the host's compiler, has the bits of the host
 * kernels.
 *
 * Law: for every kernel and dtype, sizes 0, 1, odd tails and several blocks, and grids other than
 * the launch's, the memory after the text ran equals the memory after the contract's reference ran,
 * guard bytes included, and only declared bytes changed. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "kernels/compress_kernels.h"
#include "kernels/device_kernels.h"
#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"

bool run_kernel_text(int kernel, const void *args, unsigned blocks, unsigned threads);

enum { ARENA_BYTES = 1 << 18, REGION_BYTES = 1 << 14, NUMELS = 7, MOST = 1000 };
static const size_t numels[NUMELS] = {0, 1, 31, 33, 256, 777, MOST};

static unsigned char *arena, *by_text, *by_reference;
static uint64_t state = 88172645463325252u;

static uint32_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 16);
}

/* Return region k of the arena: disjoint places, `offset` bytes off a wide boundary. */
static void *region(size_t k, size_t offset)
{
    return arena + k * REGION_BYTES + offset;
}

/* Fill with normal numbers; if `wild`, also infinities, NaN (canonical, since the payload depends
 * on the processor), subnormals and both zeros. */
static void fill(void *at, size_t numel, sw_dtype dtype, bool wild)
{
    static const float odd[] = {0.0f, -0.0f, 1e-41f, -3e-39f, 3e38f, -3e38f, 65504.0f, 1e-8f};
    if (dtype == SW_DTYPE_COMPLEX64 || dtype == SW_DTYPE_COMPLEX128) {
        numel *= 2;
        dtype = dtype == SW_DTYPE_COMPLEX64 ? SW_DTYPE_FLOAT32 : SW_DTYPE_FLOAT64;
    }
    for (size_t i = 0; i < numel; ++i) {
        float value = (float)(int32_t)draw() * 0x1p-30f;
        if (wild && draw() % 8 == 0)
            value = odd[draw() % 8];
        if (wild && draw() % 64 == 0)
            value = draw() % 2 ? __builtin_inff() : -__builtin_inff();
        if (dtype == SW_DTYPE_FLOAT32)
            memcpy((float *)at + i, &value, 4);
        else if (dtype == SW_DTYPE_FLOAT64) {
            double wide = (double)value * (wild ? 0x1p-1000 : 1.0);
            memcpy((double *)at + i, &wide, 8);
        } else if (dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16)
            sw_kernels()->compress->half_narrow((uint16_t *)at + i, &value, 1, 1.0f, dtype);
        else
            for (size_t b = 0; b < sw_dtype_size_bytes(dtype); ++b)
                ((unsigned char *)at)[i * sw_dtype_size_bytes(dtype) + b] = (unsigned char)draw();
    }
}

typedef struct declared {
    unsigned char *writable; /* one flag a byte of the arena */
} declared;

static void mark(void *context, const void *begin, size_t size_bytes, sw_access access)
{
    declared *marks = context;
    size_t at = (size_t)((const unsigned char *)begin - arena);
    if (size_bytes > 0 && access & SW_ACCESS_WRITE)
        memset(marks->writable + at, 1, size_bytes);
}

/* Return the first byte of the text's arena that differs from `expected` and that no flag of
 * `allowed` (NULL: none) allows; ARENA_BYTES if there is none. */
static size_t first_difference(const unsigned char *expected, const unsigned char *allowed)
{
    enum { PIECE_BYTES = 4096 };
    for (size_t at = 0; at < ARENA_BYTES; at += PIECE_BYTES)
        if (memcmp(by_text + at, expected + at, PIECE_BYTES) != 0)
            for (size_t i = at; i < at + PIECE_BYTES; ++i)
                if (by_text[i] != expected[i] && !(allowed && allowed[i]))
                    return i;
    return ARENA_BYTES;
}

/* Run both forms from one state and compare. `settle` makes values of equal meaning equal. */
static void compare(sw_kernel kernel, const void *args, const char *variant, void (*settle)(void))
{
    const sw_kernel_contract *contract = &sw_kernel_contracts()[kernel];
    /* kernels whose blocks must be whole warps */
    const bool is_warps =
        (kernel >= SW_KERNEL_QUANTIZE && kernel <= SW_KERNEL_DECODE) || kernel == SW_KERNEL_PROJECT;
    const sw_grid grids[] = {{1, 32}, {3, 64}, {is_warps ? 2 : 5, is_warps ? 96 : 17}};
    static unsigned char before[ARENA_BYTES], writable[ARENA_BYTES];
    declared marks = {.writable = writable};
    sw_error err = {0};
    if (!check(contract->check(args, &err) == SW_OK, "%s: %s", contract->name, err.message))
        return;
    memcpy(before, arena, ARENA_BYTES);
    memset(writable, 0, sizeof writable);
    contract->accesses(args, mark, &marks);
    contract->reference(args);
    if (settle)
        settle();
    memcpy(by_reference, arena, ARENA_BYTES);
    for (size_t g = 0; g < sizeof grids / sizeof *grids; ++g) {
        memcpy(arena, before, ARENA_BYTES);
        check(run_kernel_text((int)kernel, args, grids[g].block_count, grids[g].thread_count),
              "run");
        if (settle)
            settle();
        memcpy(by_text, arena, ARENA_BYTES);
        size_t differ = first_difference(by_reference, NULL);
        size_t stray = first_difference(before, writable);
        check(differ == ARENA_BYTES,
              "%s %s, grid %u x %u: byte %zu of region %zu is %02x, not %02x", contract->name,
              variant, grids[g].block_count, grids[g].thread_count, differ % REGION_BYTES,
              differ / REGION_BYTES, by_text[differ % ARENA_BYTES],
              by_reference[differ % ARENA_BYTES]);
        check(stray == ARENA_BYTES, "%s %s: byte %zu of region %zu was written, but not declared",
              contract->name, variant, stray % REGION_BYTES, stray / REGION_BYTES);
    }
    memcpy(arena, before, ARENA_BYTES);
}

static const sw_dtype small[] = {SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT16, SW_DTYPE_BFLOAT16};

/* Both arrays on a boundary, off it by as many elements, by different numbers, and never on one. */
static void check_casts(size_t numel)
{
    static const size_t off[][2] = {{0, 0}, {3, 3}, {1, 5}, {2, 1}};
    for (int form = 0; form < 9 * 4; ++form) {
        sw_dtype to = small[form % 3], from = small[form / 3 % 3];
        const size_t *at = off[form / 9];
        sw_cast_args args = {.to = region(0, at[0] * sw_dtype_size_bytes(to)),
                             .from = region(1, at[1] * sw_dtype_size_bytes(from)),
                             .numel = numel,
                             .scale = 0.7f,
                             .to_dtype = (int)to,
                             .from_dtype = (int)from};
        fill((void *)(uintptr_t)args.from, numel, from, true);
        compare(SW_KERNEL_CAST, &args, sw_dtype_name(to), NULL);
    }
}

static void check_packs(size_t numel)
{
    static const size_t off[][2] = {{0, 0}, {1, 1}, {7, 3}, {3, 5}, {2, 9}, {0, 0}};
    sw_pack_args args = {.segment_count = 6};
    for (size_t s = 0; s < 6; ++s)
        args.segment[s] = (sw_pack_segment){.to = region(s, off[s][0]),
                                            .from = region(8 + s, off[s][1]),
                                            .size_bytes = s == 5 ? 0 : numel * (s + 1)};
    for (size_t s = 0; s < 8; ++s)
        fill(region(8 + s, 0), REGION_BYTES / 4, SW_DTYPE_FLOAT32, false);
    compare(SW_KERNEL_PACK, &args, "segments", NULL);
    args.verdict = region(15, 0);
    for (int refused = 0; refused < 2; ++refused) {
        *(int *)region(15, 0) = refused;
        compare(SW_KERNEL_PACK, &args, refused ? "refused" : "kept", NULL);
    }
    args.verdict = NULL;
    args.segment_count = 2; /* segments of several tiles */
    args.segment[0].size_bytes = numel ? 2 * REGION_BYTES + numel : 0;
    args.segment[1] = (sw_pack_segment){
        .to = region(4, 1), .from = region(12, 4), .size_bytes = REGION_BYTES + numel};
    compare(SW_KERNEL_PACK, &args, "tiles", NULL);
}

/* Arrays on boundaries, off them by as many bytes, by an element's, and never all at once. */
static void check_fold(sw_dtype dtype, int op, int sources, size_t numel)
{
    const size_t width = sw_dtype_size_bytes(dtype), off[][3] = {{16, 16, 16},
                                                                 {16 + width, 16 + width, width},
                                                                 {16, 16, 16 + width},
                                                                 {width, 0, 0}};
    bool wild = dtype != SW_DTYPE_COMPLEX64 && dtype != SW_DTYPE_COMPLEX128;
    for (size_t form = 0; form < 4; form += 1 + (numel + (size_t)dtype + (size_t)sources / 2) % 3) {
        sw_fold_args args = {.to = region(0, off[form][0]),
                             .own = region(form == 3 ? 2 : 0, off[form][1]),
                             .rest = region(4, off[form][2]),
                             .numel = numel > 777 ? 777 : numel,
                             .stride_bytes = REGION_BYTES,
                             .scale = 1.0 / sources,
                             .dtype = (int)dtype,
                             .op = op,
                             .own_index = form == 1 ? -1 : sources / 2,
                             .source_count = sources};
        fill((void *)(uintptr_t)args.own, args.numel, dtype, wild);
        for (size_t k = 0; k < 5; ++k)
            fill(region(4 + k, off[form][2]), args.numel, dtype, wild);
        compare(SW_KERNEL_FOLD, &args, sw_dtype_name(dtype), NULL);
        args.to = region(1, off[form][0]);
        args.addend = region(1, off[form][0]);
        fill(args.to, args.numel, dtype, wild);
        compare(SW_KERNEL_FOLD, &args, "on an addend", NULL);
    }
}

static void check_folds(size_t numel)
{
    for (int dtype = 0; dtype < SW_DTYPE_BOOL; ++dtype)
        for (int op = 0; op < SW_REDOP_COUNT; ++op)
            for (int sources = 1; sources <= 5; sources += 2)
                if (sw_redop_check((sw_redop)op, (sw_dtype)dtype, NULL) == SW_OK)
                    check_fold((sw_dtype)dtype, op, sources, numel);
}

static sw_run_args run_of(size_t numel, int form)
{
    sw_dtype p = small[form % 3], s = small[form / 3 % 3], g = small[form / 9 % 3];
    sw_run_args run = {.p = region(0, 0),
                       .m = region(1, 0),
                       .v = region(2, 0),
                       .v_max = region(3, 0),
                       .g = region(4, 0),
                       .copy = form % 2 ? region(5, 0) : NULL,
                       .numel = numel,
                       .p_dtype = (int)p,
                       .state_dtype = (int)s,
                       .g_dtype = (int)g,
                       .copy_dtype = (int)SW_DTYPE_BFLOAT16};
    fill(run.p, numel, p, false);
    fill(run.m, numel, s, false);
    fill(region(6, 0), numel, SW_DTYPE_FLOAT32, false);
    for (size_t i = 0; i < numel; ++i) { /* second moments are not negative */
        float value = ((float *)region(6, 0))[i] * ((float *)region(6, 0))[i], twice = 2 * value;
        sw_cast_args cast = {.from = &value, .numel = 1, .scale = 1, .to_dtype = (int)s};
        cast.to = (char *)run.v + i * sw_dtype_size_bytes(s);
        sw_kernel_contracts()[SW_KERNEL_CAST].reference(&cast);
        cast.from = &twice;
        cast.to = (char *)run.v_max + i * sw_dtype_size_bytes(s);
        sw_kernel_contracts()[SW_KERNEL_CAST].reference(&cast);
    }
    fill((void *)(uintptr_t)run.g, numel, g, false);
    return run;
}

static void *behind(const void *array, size_t numel, int dtype)
{
    return array ? (char *)(uintptr_t)array + numel * sw_dtype_size_bytes((sw_dtype)dtype) : NULL;
}

/* Cut the run in two, with an empty run between. */
static int cut(sw_run_args whole, sw_run_args *runs)
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

static void check_optimizers(size_t numel)
{
    for (int form = 0; form < 27; ++form) {
        sw_adam_args adam = {.factor = form % 4 ? 1.0f : -0.5f,
                             .decay = 0.999f,
                             .l2 = form % 3 == 1 ? 0.01f : 0.0f,
                             .lerp = form % 5 == 2 ? 0.75f : 0.1f,
                             .beta2 = 0.999f,
                             .square = 0.001f,
                             .correction = 0.17f,
                             .eps = 1e-8f,
                             .negative_step = -0.003f,
                             .amsgrad = form % 7 == 3};
        adam.run_count = cut(run_of(numel, form), adam.run);
        compare(SW_KERNEL_ADAM, &adam, "form", NULL);
        sw_sgd_args sgd = {.factor = 1.0f,
                           .l2 = form % 3 == 1 ? 0.01f : 0.0f,
                           .momentum = form % 4 ? 0.9f : 0.0f,
                           .undampening = 0.8f,
                           .negative_lr = -0.1f,
                           .nesterov = form % 4 == 2,
                           .first = form % 4 == 3};
        sgd.run_count = cut(run_of(numel, form), sgd.run);
        compare(SW_KERNEL_SGD, &sgd, "form", NULL);
    }
}

static void carry(void)
{
    sw_norm_sum_carry(region(0, 0));
}

static void check_norms(size_t numel)
{
    static const sw_dtype dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT16, SW_DTYPE_BFLOAT16,
                                      SW_DTYPE_FLOAT64};
    for (int d = 0; d < 4; ++d)
        for (int wild = 0; wild < 2; ++wild) {
            sw_norm_args args = {
                .sum = region(0, 0), .data = region(1, 0), .numel = numel, .dtype = (int)dtypes[d]};
            memset(args.sum, 0, sizeof(sw_norm_sum));
            fill(region(1, 0), numel, dtypes[d], wild);
            compare(SW_KERNEL_NORM, &args, sw_dtype_name(dtypes[d]), carry);
        }
}

/* Return the float32 bits of element i, for values inside and outside of a window. */
static uint32_t norm_bits(int form, size_t i, sw_dtype dtype)
{
    static const uint32_t scales[] = {100, 140, 96, 1, 135, 128, 254, 110};
    uint32_t fraction = draw() & 0x7fffffu, sign = draw() << 31;
    switch (form) {
    case 0: /* similar magnitudes */
        return sign | (118 - draw() % 4) << 23 | fraction;
    case 1: /* any bits, infinities and NaN too */
        return draw() ^ draw() << 16;
    case 2: /* scales that change: the window moves up and down */
        return sign | (scales[i / 300 % 8] + draw() % 2) << 23 | fraction;
    case 3: /* a tiny or a large element among others, and zeros */
        return sign | (draw() % 50 ? 120u : draw() % 255) << 23 | (draw() % 3 ? fraction : 0);
    case 4: /* the greatest, whose products need the most bits */
        return dtype == SW_DTYPE_FLOAT16 ? 0x477fe000u : sign | (252u << 23) | 0x7fffffu;
    default: /* subnormals of float32 and of float16 */
        return sign | (draw() % 2 ? 0u : (103u + draw() % 12) << 23) | fraction;
    }
}

/* Law: for any window of a warp and any move of it, the sum is the reference's. */
static void check_norm_form(int form, sw_dtype dtype, size_t numel, size_t offset)
{
    static const sw_grid grids[] = {{1, 32}, {2, 64}, {3, 17}, {2, 49}};
    size_t width = sw_dtype_size_bytes(dtype);
    char *memory = malloc(numel * width + 64), *data = memory + 16 - (uintptr_t)memory % 16;
    sw_norm_sum expected, sum;
    data += offset * width;
    for (size_t i = 0; i < numel; ++i) {
        uint32_t bits = norm_bits(form, i, dtype);
        float value;
        memcpy(&value, &bits, sizeof value);
        sw_cast_args cast = {
            .to = data + i * width, .from = &value, .numel = 1, .scale = 1, .to_dtype = (int)dtype};
        if (dtype == SW_DTYPE_BFLOAT16)
            *(uint16_t *)(void *)cast.to = (uint16_t)(bits >> 16);
        else
            sw_kernel_contracts()[SW_KERNEL_CAST].reference(&cast);
    }
    sw_norm_args args = {.data = data, .numel = numel, .dtype = (int)dtype, .sum = &expected};
    memset(&expected, 0, sizeof expected);
    sw_kernel_contracts()[SW_KERNEL_NORM].reference(&args);
    sw_norm_sum_carry(&expected);
    for (size_t g = 0; g < (numel > 10000 ? 1 : sizeof grids / sizeof *grids); ++g) {
        memset(&sum, 0, sizeof sum);
        args.sum = &sum;
        check(run_kernel_text(SW_KERNEL_NORM, &args, grids[g].block_count, grids[g].thread_count),
              "run");
        sw_norm_sum_carry(&sum);
        check(memcmp(&sum, &expected, sizeof sum) == 0,
              "norm of %zu %s, form %d, %zu off, grid %u x %u: the sum differs", numel,
              sw_dtype_name(dtype), form, offset, grids[g].block_count, grids[g].thread_count);
    }
    free(memory);
}

static void check_norm_windows(void)
{
    static const sw_dtype dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT16, SW_DTYPE_BFLOAT16};
    for (size_t d = 0; d < 3; ++d) {
        for (int form = 0; form < 6; ++form)
            for (size_t offset = 0; offset < 4; ++offset)
                check_norm_form(form, dtypes[d], 5000 + 3 * offset, offset * 3 % 8);
        check_norm_form(4, dtypes[d], 300000, 0); /* lanes flush by themselves */
    }
}

/* Three runs and one of zeros. Their records lie in one region, with gaps. */
static void check_quantize(size_t numel, size_t block, int bits, bool wild)
{
    const size_t counts[] = {numel, numel / 3, 0, numel % 5 * block};
    sw_quantize_args args = {.block = block, .bits = bits, .part_count = 4};
    for (size_t i = 0; i < 4; ++i) {
        args.part[i] = (sw_quantize_part){.records = region(i, 4),
                                          .source = i < 3 ? region(4 + i, 4 * i) : NULL,
                                          .error = i ? region(8 + i, 0) : NULL,
                                          .numel = counts[i]};
        fill(region(4 + i, 4 * i), counts[i], SW_DTYPE_FLOAT32, wild);
        fill(region(8 + i, 0), counts[i], SW_DTYPE_FLOAT32, false);
    }
    compare(SW_KERNEL_QUANTIZE, &args, bits == 8 ? "int8" : "int4", NULL);
    args.part[0].error = args.part[1].error;
    args.part_count = 1;
    compare(SW_KERNEL_QUANTIZE, &args, "one part", NULL);
}

static void quantize_into(void *records, const void *source, size_t numel, size_t block, int bits)
{
    sw_quantize_args args = {.block = block, .bits = bits, .part_count = 1};
    args.part[0] = (sw_quantize_part){.records = records, .source = source, .numel = numel};
    sw_kernel_contracts()[SW_KERNEL_QUANTIZE].reference(&args);
}

static void check_fold_records(size_t numel, size_t block, int bits, bool wild)
{
    for (int sources = 1; sources <= 5; sources += 2) {
        sw_fold_records_args args = {
            .to = region(0, 4),
            .own = region(1, 4),
            .others = region(2, 8),
            /* a NaN scale: the sign of a computed NaN is the processor's */
            .residual = wild ? NULL : region(8, sources == 3 ? 4 : 0),
            .count = (numel + block - 1) / block,
            .block = block,
            .stride_bytes = REGION_BYTES,
            .scale = 1.0f / (float)sources,
            .bits = bits,
            .own_index = sources / 2,
            .source_count = sources};
        for (size_t k = 0; k < 6; ++k) {
            fill(region(9, 0), numel, SW_DTYPE_FLOAT32, wild && k % 2);
            quantize_into(k == 5 ? region(1, 4) : region(2 + k, 8), region(9, 0), numel, block,
                          bits);
        }
        compare(SW_KERNEL_FOLD_RECORDS, &args, bits == 8 ? "int8" : "int4", NULL);
    }
}

/* Four parts: errors and values; values alone; nothing; errors alone. */
static void check_decode(size_t numel, size_t block, int bits)
{
    const size_t counts[] = {numel, numel / 2, 0, numel / 3};
    sw_decode_args args = {.verdict = region(15, 0), .block = block, .bits = bits, .part_count = 4};
    for (size_t i = 0; i < 4; ++i) {
        void *values = region(i, 4 * i), *own = region(4 + i, 4), *records = region(8 + i, 8);
        args.part[i] = (sw_decode_part){.values = values,
                                        .error = i == 1 ? NULL : region(12 + i % 3, 0),
                                        .records = i < 3 ? records : NULL,
                                        .own = i == 1 ? NULL : own,
                                        .numel = counts[i]};
        fill(values, counts[i], SW_DTYPE_FLOAT32, false);
        quantize_into(own, values, counts[i], block, bits);
        fill(region(13, 0), counts[i], SW_DTYPE_FLOAT32, false);
        quantize_into(records, region(13, 0), counts[i], block, bits);
    }
    args.part[3].error = region(13, 0);
    fill(region(12, 0), counts[0], SW_DTYPE_FLOAT32, false);
    fill(region(13, 0), counts[3], SW_DTYPE_FLOAT32, false);
    for (int refused = 0; refused < 2; ++refused) {
        *(int *)region(15, 0) = refused;
        compare(SW_KERNEL_DECODE, &args, refused ? "refused" : "kept", NULL);
    }
    args.verdict = NULL;
    compare(SW_KERNEL_DECODE, &args, "without a verdict", NULL);
}

static void check_verdict(size_t numel, size_t block, int bits, bool wild)
{
    sw_verdict_args args = {.verdict = region(4, 0),
                            .records = region(0, 4),
                            .count = (numel + block - 1) / block,
                            .block = block,
                            .bits = bits};
    fill(region(1, 0), numel, SW_DTYPE_FLOAT32, wild);
    quantize_into(region(0, 4), region(1, 0), numel, block, bits);
    memset(args.verdict, 0, sizeof(int));
    compare(SW_KERNEL_VERDICT, &args, wild ? "wild" : "finite", NULL);
}

static void check_owe(size_t numel)
{
    const size_t counts[] = {numel, 0, numel / 3};
    sw_owe_args args = {.verdict = region(15, 0), .scale = 3.0f, .part_count = 3};
    for (size_t i = 0; i < 3; ++i) {
        args.part[i] =
            (sw_owe_part){.error = region(i, 4), .rest = region(4 + i, 4 * i), .numel = counts[i]};
        fill(region(i, 4), counts[i], SW_DTYPE_FLOAT32, false);
        fill(region(4 + i, 4 * i), counts[i], SW_DTYPE_FLOAT32, false);
    }
    for (int refused = 0; refused < 2; ++refused) {
        *(int *)region(15, 0) = refused;
        compare(SW_KERNEL_OWE, &args, refused ? "refused" : "kept", NULL);
    }
}

static void check_blocks(size_t numel)
{
    static const size_t blocks[] = {32, 96, 256, 1056};
    for (int form = 0; form < 16; ++form) {
        size_t block = blocks[form & 3];
        int bits = form & 4 ? 8 : 4;
        bool wild = form & 8;
        check_quantize(numel, block, bits, wild);
        check_fold_records(numel, block, bits, wild);
        check_verdict(numel, block, bits, wild);
        if (!wild)
            check_decode(numel, block, bits);
    }
    check_owe(numel);
}

/* Fill a factor of rank x count, with zeros behind its rows. `form` 1: equal rows; 2: zeros; 3: the
 * first row not finite; 4: tiny; 5: huge. */
static void *factor(size_t k, size_t offset, size_t rank, size_t count, int form)
{
    static const float scales[] = {1.0f, 1.0f, 0.0f, 1.0f, 0x1p-140f, 0x1p120f};
    size_t stride = sw_lowrank_stride(count);
    float *at = region(k, offset);
    memset(at, 0, rank * stride * sizeof *at);
    for (size_t r = 0; r < rank; ++r) {
        fill(at + r * stride, count, SW_DTYPE_FLOAT32, false);
        if (form == 1 && r > 0)
            memcpy(at + r * stride, at, count * sizeof *at);
        for (size_t i = 0; i < count; ++i)
            at[r * stride + i] *= scales[form];
    }
    if (form == 3)
        at[count / 2] = __builtin_inff();
    return at;
}

typedef struct shape {
    size_t rows, cols, rank;
} shape;

/* Return a matrix on boundaries, or `offset` bytes off them. */
static sw_matrix_args matrix_at(size_t first, size_t offset, shape of, bool remembers,
                                sw_dtype memory)
{
    sw_matrix_args m = {.gradient = region(first, offset),
                        .memory = remembers ? region(first + 1, offset) : NULL,
                        .left = factor(first + 2, offset, of.rank, of.rows, 0),
                        .right = factor(first + 3, offset, of.rank, of.cols, 0),
                        .basis = factor(first + 4, offset, of.rank, of.cols, 0),
                        .out = region(first + 5, 4),
                        .copy = remembers ? region(first + 6, 4) : NULL,
                        .rows = of.rows,
                        .cols = of.cols,
                        .rank = of.rank,
                        .memory_dtype = (int)memory};
    fill(m.gradient, of.rows * of.cols, SW_DTYPE_FLOAT32, false);
    fill(region(first + 1, offset), of.rows * of.cols, memory, false);
    return m;
}

static void check_matrices(void)
{
    static const shape shapes[] = {{1, 1, 1},    {3, 5, 2},    {33, 17, 4},  {40, 97, 5},
                                   {17, 200, 9}, {3, 1024, 3}, {1009, 4, 2}, {64, 60, 19}};
    enum { COUNT = sizeof shapes / sizeof *shapes };
    for (int i = 0; i < 4 * COUNT; i += 3) {
        sw_dtype memory = i / COUNT % 2 ? SW_DTYPE_BFLOAT16 : SW_DTYPE_FLOAT32;
        sw_matrices_args args = {.matrix_count = 2, .verdict = region(15, 0)};
        args.matrix[0] = matrix_at(0, i % 2 ? 4 : 16, shapes[i % COUNT], true, memory);
        args.matrix[1] =
            matrix_at(8, i % 2 ? 16 : 4, shapes[(i + 3) % COUNT], i / COUNT > 1, memory);
        compare(SW_KERNEL_PROJECT, &args, "two matrices", NULL);
        for (int verdict = 0; verdict <= (i % 4 ? 0 : SW_REFUSED_LATE); ++verdict) {
            *(int *)region(15, 0) = verdict;
            compare(SW_KERNEL_ABSORB, &args, "two matrices", NULL);
            compare(SW_KERNEL_EXPAND, &args, "two matrices", NULL);
        }
        *(int *)region(15, 0) = 0;
        args.verdict = NULL;
        ((float *)args.matrix[0].gradient)[0] = 0x1.fffffep127f; /* beyond bfloat16 */
        args.matrix[0].out = NULL;
        compare(SW_KERNEL_ABSORB, &args, "memory alone", NULL);
    }
}

static void check_factors(void)
{
    static const shape shapes[] = {{1, 1, 1}, {0, 5, 5}, {0, 97, 4}, {0, 1024, 3}, {0, 40, 17}};
    enum { COUNT = sizeof shapes / sizeof *shapes };
    for (int i = 0; i < 6 * COUNT; i += 2) {
        sw_orthonormalize_args args = {.factor_count = 3, .verdict = region(15, 0)};
        for (size_t f = 0; f < 3; ++f) {
            shape of = shapes[((size_t)i + f) % COUNT];
            void *from = factor(4 * f, 4, of.rank, of.cols, i / COUNT);
            args.factor[f] = (sw_factor_args){.to = f == 1 ? from : region(4 * f + 1, 4),
                                              .from = from,
                                              .count = of.cols,
                                              .rank = of.rank,
                                              .seed = 0x123456789abcdefull * f};
        }
        *(int *)region(15, 0) = i % 7 == 6;
        compare(SW_KERNEL_ORTHONORMALIZE, &args, "three factors", NULL);
    }
}

static void check_finite(size_t numel)
{
    sw_finite_args args = {
        .verdict = region(15, 0), .values = region(0, 4), .numel = numel, .refusal = SW_REFUSED};
    for (int form = 0; form < 6; ++form) {
        fill(region(0, 4), numel, SW_DTYPE_FLOAT32, form % 2 == 1);
        *(int *)region(15, 0) = form / 2;
        compare(SW_KERNEL_FINITE, &args, "values", NULL);
    }
}

static void check_puts(size_t numel)
{
    sw_put_args args = {.to = region(3, numel % 16), .size_bytes = (int)numel};
    for (size_t i = 0; i < numel; ++i)
        args.byte[i] = (unsigned char)draw();
    compare(SW_KERNEL_PUT, &args, "bytes", NULL);
}

int main(void)
{
    arena = aligned_alloc(128, ARENA_BYTES);
    by_text = malloc(ARENA_BYTES);
    by_reference = malloc(ARENA_BYTES);
    memset(arena, 0xab, ARENA_BYTES); /* guard bytes where nothing is filled */
    for (int i = 0; i < NUMELS; ++i) {
        check_casts(numels[i]);
        check_packs(numels[i]);
        check_folds(numels[i]);
        check_optimizers(numels[i]);
        check_norms(numels[i]);
        check_blocks(numels[i]);
        check_finite(numels[i]);
        check_puts(numels[i]);
    }
    check_optimizers(3000); /* several tiles a run */
    check_norm_windows();
    check_matrices();
    check_factors();
    free(arena);
    free(by_text);
    free(by_reference);
    return check_result();
}
