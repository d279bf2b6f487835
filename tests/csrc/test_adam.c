/* test_adam.c - compare every kernel table with a naive Adam, bit for bit: cuts, dtypes, options,
 * errors.
 *
 * The oracle updates one element at a time in float, one statement a rounding, with libm's fmaf.
 * Arrays lie between guard bytes at an offset of a few elements. Left out: speed.
 */
#include "optim_oracle.h"

#include "optim/optim.h"

enum { ARRAY_COUNT = 6 }; /* p m v v_max g copy */
enum { P, M, V, V_MAX, G, COPY };

static const sw_adam_options plain = {
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.995, .eps = 1e-8, .grad_scale = 1.0};

static uint64_t mixed(uint64_t bits)
{
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

/* Store as the formula of docs/design/optim.md says; `which` is 1 for v and 2 for p. */
static void store_randomly(array *to, size_t i, float value, uint64_t seed, uint64_t origin,
                           int64_t step, int which)
{
    uint64_t key =
        mixed(mixed(mixed(seed) + 2 * (origin >> 40) + (uint64_t)which) + (uint64_t)step);
    uint32_t place = (uint32_t)key + (uint32_t)(origin + i) * 0x9e3779b9u;
    uint32_t random = (((place ^ (place >> 15)) + (uint32_t)(key >> 32)) * 0x846ca68bu) >> 16;
    if (to->dtype == SW_DTYPE_BFLOAT16 && !isnan(value))
        ((uint16_t *)(void *)to->data)[i] = (uint16_t)((bits_of(value) + random) >> 16);
    else
        store(to->dtype, to->data, i, value);
}

static void oracle_adam(const sw_adam_options *with, int64_t step, array *a, bool copy, bool random,
                        uint64_t origin)
{
    float decay = (float)(1.0 - with->lr * with->weight_decay), l2 = (float)with->weight_decay;
    float lerp = (float)(1.0 - with->beta1), beta2 = (float)with->beta2,
          square = (float)(1.0 - with->beta2);
    float correction = (float)sqrt(1.0 - pow(with->beta2, (double)step));
    float move = (float)(-(with->lr / (1.0 - pow(with->beta1, (double)step)))),
          eps = (float)with->eps;
    float scale = (float)with->grad_scale;
    for (size_t i = 0; i < a[P].numel; ++i) {
        float p = load(a[P].dtype, a[P].data, i), m = load(a[M].dtype, a[M].data, i);
        float v = load(a[V].dtype, a[V].data, i), most = load(a[V_MAX].dtype, a[V_MAX].data, i);
        float g = load(a[G].dtype, a[G].data, i) * scale;
        if (copy)
            p = oracle_master(p, a[COPY].dtype, a[COPY].data, i);
        if (with->maximize)
            g = -g;
        if (with->weight_decay != 0.0 && with->decoupled)
            p = p * decay;
        else if (with->weight_decay != 0.0)
            g = fmaf(p, l2, g);
        float difference = g - m;
        m = lerp < 0.5f ? fmaf(lerp, difference, m) : fmaf(lerp - 1.0f, difference, g);
        float kept = v * beta2, weighted = square * g;
        v = fmaf(weighted, g, kept);
        float used = v;
        if (with->amsgrad)
            used = isnan(most) || isnan(v) ? NAN : (most > v ? most : v);
        float root = sqrtf(used), quotient = root / correction, denominator = quotient + eps;
        float numerator = move * m, change = numerator / denominator;
        p = p + change;
        if (random && !copy)
            store_randomly(&a[P], i, p, with->seed, origin, step, 2);
        else
            store(a[P].dtype, a[P].data, i, p);
        store(a[M].dtype, a[M].data, i, m);
        if (random)
            store_randomly(&a[V], i, v, with->seed, origin, step, 1);
        else
            store(a[V].dtype, a[V].data, i, v);
        if (with->amsgrad)
            store(a[V_MAX].dtype, a[V_MAX].data, i, used);
        if (copy)
            store(a[COPY].dtype, a[COPY].data, i, p);
    }
}

typedef struct adam_case {
    sw_adam_options options;
    sw_dtype p, state, g, copy;
    size_t numel, offset;
    int64_t step;
    bool has_copy, wild, random;
} adam_case;

static const uint64_t origin = ((uint64_t)77 << 40) + 4096;

static sw_dtype dtype_of(const adam_case *c, int which)
{
    if (which == P)
        return c->p;
    if (which == G)
        return c->g;
    return which == COPY ? c->copy : c->state;
}

static void copy_arrays(const adam_case *c, array *to, const array *from, size_t offset)
{
    for (int k = 0; k < ARRAY_COUNT; ++k) {
        array_init(&to[k], dtype_of(c, k), c->numel, offset ? (offset + (size_t)k) % 8 : 0);
        if (from)
            memcpy(to[k].data, from[k].data, to[k].bytes);
        else
            array_randomize(&to[k], c->wild, k == V || k == V_MAX);
    }
}

static sw_optim_run run_of(const adam_case *c, array *a, size_t start, size_t numel)
{
    void *at[ARRAY_COUNT];
    for (int k = 0; k < ARRAY_COUNT; ++k)
        at[k] = a[k].data + start * sw_dtype_size_bytes(a[k].dtype);
    return (sw_optim_run){.p = at[P],
                          .m = at[M],
                          .v = at[V],
                          .v_max = at[V_MAX],
                          .g = at[G],
                          .copy = c->has_copy ? at[COPY] : NULL,
                          .numel = numel,
                          .step = c->step,
                          .p_dtype = c->p,
                          .state_dtype = c->state,
                          .g_dtype = c->g,
                          .copy_dtype = c->copy,
                          .is_random = c->random,
                          .origin = origin + start};
}

/* Run one table on the whole array and on two parts cut at `cut`; both must equal the oracle. */
static void check_on_table(const adam_case *c, const char *table, const array *original,
                           const array *expected)
{
    for (int parts = 1; parts <= 2; ++parts) {
        array work[ARRAY_COUNT];
        copy_arrays(c, work, original, c->offset);
        size_t cut = parts == 1 ? c->numel : c->numel / 3;
        sw_optim_run runs[2] = {run_of(c, work, 0, cut), run_of(c, work, cut, c->numel - cut)};
        bool ok = sw_adam_step(&c->options, runs, 2, NULL) == SW_OK;
        for (int k = 0; k < ARRAY_COUNT; ++k)
            ok = ok && guards_intact(&work[k]) && same_values(&work[k], &expected[k]);
        if (!ok)
            fprintf(stderr,
                    "table %s p %s state %s g %s copy %d numel %zu offset %zu parts %d step %lld "
                    "wd %g dec %d "
                    "ams %d max %d beta1 %g scale %g\n",
                    table, sw_dtype_name(c->p), sw_dtype_name(c->state), sw_dtype_name(c->g),
                    c->has_copy, c->numel, c->offset, parts, (long long)c->step,
                    c->options.weight_decay, c->options.decoupled, c->options.amsgrad,
                    c->options.maximize, c->options.beta1, c->options.grad_scale);
        expect(ok, "Adam equals the oracle");
        for (int k = 0; k < ARRAY_COUNT; ++k)
            array_fini(&work[k]);
    }
}

static void check_case(const adam_case *c)
{
    const sw_kernel_table *tables[TABLES_MAX];
    size_t count = sw_kernels_available(tables, TABLES_MAX);
    array original[ARRAY_COUNT], expected[ARRAY_COUNT];
    copy_arrays(c, original, NULL, 0);
    array_round(&original[COPY], &original[P]);
    copy_arrays(c, expected, original, 0);
    oracle_adam(&c->options, c->step, expected, c->has_copy, c->random, origin);
    for (size_t t = 0; t < count; ++t) {
        expect(sw_kernels_force(tables[t]->name, NULL) == SW_OK, "the table can be forced");
        check_on_table(c, tables[t]->name, original, expected);
    }
    expect(sw_kernels_force(NULL, NULL) == SW_OK, "the best table is restored");
    for (int k = 0; k < ARRAY_COUNT; ++k) {
        array_fini(&original[k]);
        array_fini(&expected[k]);
    }
}

static void test_every_option_and_size(void)
{
    static const size_t sizes[] = {0, 1, 7, 16, 31, 33, 1000, 1025, 4097};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s)
        for (int bits = 0; bits < 64; ++bits) {
            adam_case c = {
                plain,    SW_DTYPE_FLOAT32,   SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16,
                sizes[s], (size_t)(bits % 3), 1 + bits % 5,     bits & 1,         bits & 2,
                false};
            c.options.amsgrad = bits & 4;
            c.options.maximize = bits & 8;
            c.options.decoupled = bits & 16;
            c.options.weight_decay = bits & 32 ? 0.03 : 0.0;
            c.options.beta1 = bits % 7 == 0 ? 0.3 : 0.9;
            c.options.grad_scale = bits % 5 == 0 ? 0.37 : 1.0;
            check_case(&c);
        }
}

static void test_every_dtype(void)
{
    static const sw_dtype dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16, SW_DTYPE_FLOAT16};
    for (int k = 0; k < 81; ++k) {
        adam_case c = {plain,
                       dtypes[k % 3],
                       dtypes[k / 3 % 3],
                       dtypes[k / 9 % 3],
                       dtypes[k / 27],
                       2053,
                       (size_t)(k % 4),
                       3,
                       k % 2,
                       k % 5 == 0,
                       false};
        c.options.weight_decay = 0.1;
        c.options.decoupled = k % 4 < 2;
        c.options.amsgrad = k % 3 == 1;
        c.options.grad_scale = k % 4 == 3 ? 1.0 : 0x1p-7;
        check_case(&c);
    }
}

static void test_random_rounding(void)
{
    static const sw_dtype dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16};
    for (int k = 0; k < 64; ++k) {
        adam_case c = {plain,
                       dtypes[k % 2],
                       dtypes[k / 2 % 2],
                       dtypes[k / 4 % 2],
                       dtypes[1],
                       (size_t)(2053 + k),
                       (size_t)(k % 4),
                       k + 1,
                       k / 8 % 2 == 1,
                       k % 5 == 0,
                       true};
        c.options.weight_decay = 0.1;
        c.options.decoupled = k / 16 % 2;
        c.options.beta1 = k / 32 ? 0.3 : 0.9;
        c.options.seed = (uint64_t)k << 33;
        check_case(&c);
    }
}

/* A value that the dtype has stays; others are rounded to either neighbour, so that the mean of
 * many is theirs. */
static void test_random_rounding_has_the_mean_of_what_it_rounds(void)
{
    enum { NUMEL = 1 << 16 };
    uint16_t *v = malloc(NUMEL * sizeof *v), *m = calloc(NUMEL, sizeof *m);
    float *p = calloc(NUMEL, sizeof *p), *g = calloc(NUMEL, sizeof *g);
    expect(v && m && p && g, "memory");
    for (size_t i = 0; i < NUMEL; ++i)
        v[i] = 0x3f80; /* 1 */
    sw_adam_options options = plain;
    options.beta2 = 0.999;
    sw_optim_run run = {.p = p, .m = m, .v = v, .g = g, .numel = NUMEL, .is_random = true};
    run.state_dtype = SW_DTYPE_BFLOAT16;
    for (run.step = 1; run.step <= 1000; ++run.step)
        expect(sw_adam_step(&options, &run, 1, NULL) == SW_OK, "a step without gradients");
    double mean = 0;
    for (size_t i = 0; i < NUMEL; ++i)
        mean += (double)oracle_widen(SW_DTYPE_BFLOAT16, v[i]) / NUMEL;
    /* a step moves an element by 2^-7 of it at most: sd of the mean < 2^-8 sqrt(1000 / 65536) */
    expect(fabs(mean / pow(0.999, 1000) - 1) < 0.003, "v decays as in float32");
    free(v);
    free(m);
    free(p);
    free(g);
}

/* Run many steps on wild values, so that the emulated fused operation meets every kind of operand.
 */
static void test_many_wild_elements(void)
{
    adam_case c = {plain,
                   SW_DTYPE_FLOAT32,
                   SW_DTYPE_FLOAT32,
                   SW_DTYPE_FLOAT32,
                   SW_DTYPE_FLOAT16,
                   65536,
                   1,
                   2,
                   true,
                   true,
                   false};
    c.options.weight_decay = 0.7;
    for (int k = 0; k < 4; ++k) {
        c.options.decoupled = k % 2;
        c.options.beta1 = k < 2 ? 0.9 : 0.1;
        check_case(&c);
    }
}

/* A copy of at least 1 MiB bypasses the caches if it begins a line. */
static void test_large_copies(void)
{
    for (size_t offset = 0; offset < 2; ++offset) {
        adam_case c = {plain,
                       SW_DTYPE_FLOAT32,
                       SW_DTYPE_FLOAT32,
                       offset ? SW_DTYPE_BFLOAT16 : SW_DTYPE_FLOAT32,
                       SW_DTYPE_BFLOAT16,
                       ((size_t)1 << 19) + 45,
                       offset,
                       2,
                       true,
                       false,
                       false};
        check_case(&c);
    }
}

static void test_runs_of_different_steps(void)
{
    float p[3] = {1, 1, 1}, m[3] = {0}, v[3] = {0}, g[3] = {0.5f, 0.5f, 0.5f}, alone = 1,
          m_alone = 0, v_alone = 0;
    sw_optim_run runs[3];
    for (int k = 0; k < 3; ++k)
        runs[k] = (sw_optim_run){
            .p = &p[k], .m = &m[k], .v = &v[k], .g = &g[k], .numel = 1, .step = k == 1 ? 9 : 1};
    sw_optim_run one = {.p = &alone, .m = &m_alone, .v = &v_alone, .g = g, .numel = 1, .step = 9};
    expect(sw_adam_step(&plain, runs, 3, NULL) == SW_OK &&
               sw_adam_step(&plain, &one, 1, NULL) == SW_OK,
           "both steps succeed");
    expect(bits_of(p[1]) == bits_of(alone) && bits_of(p[0]) == bits_of(p[2]) &&
               bits_of(p[0]) != bits_of(p[1]),
           "each run has the bias correction of its own step");
}

static void expect_refused(sw_adam_options options, sw_optim_run run, const char *a, const char *b)
{
    sw_error err = {0};
    float before = run.p ? *(float *)run.p : 0.0f;
    sw_optim_run good = run;
    good.g_dtype = good.p_dtype = good.state_dtype = SW_DTYPE_FLOAT32;
    sw_optim_run runs[2] = {good, run};
    bool refused = sw_adam_step(&options, runs, 2, &err) == SW_E_INVALID;
    if (!refused || !strstr(err.message, a) || !strstr(err.message, b))
        fprintf(stderr, "message: %s\n", err.message);
    expect(refused && strstr(err.message, a) && strstr(err.message, b),
           "the message names argument and value");
    expect(!run.p || *(float *)run.p == before, "nothing is written before an error");
}

static void test_errors(void)
{
    float p = 1, m = 0, v = 0, g = 1;
    sw_optim_run run = {.p = &p, .m = &m, .v = &v, .g = &g, .numel = 1, .step = 1};
    sw_adam_options options = plain;
    options.beta1 = 1.0;
    expect_refused(options, run, "beta1", "[0, 1)");
    options = plain;
    options.lr = -0.5;
    expect_refused(options, run, "lr", "-0.5");
    options.lr = (double)NAN;
    expect_refused(options, run, "lr", "nan");
    options = plain;
    options.grad_scale = (double)INFINITY;
    expect_refused(options, run, "grad_scale", "inf");
    options = plain;
    options.amsgrad = true;
    expect_refused(options, run, "run 0", "maximum of the second moment");
    run.is_random = true;
    expect_refused(options, run, "run 0", "amsgrad has no random rounding");
    sw_optim_run bad = run;
    bad.state_dtype = SW_DTYPE_UINT8;
    bad.origin = ((uint64_t)1 << 40) + 8;
    expect_refused(plain, bad, "run 1 must begin at a multiple of 32 elements", "not at 8");
    bad.is_random = run.is_random = false;
    expect_refused(plain, bad, "state of run 1", "uint8");
    bad = run;
    bad.g_dtype = SW_DTYPE_FLOAT64;
    expect_refused(plain, bad, "gradient of run 1", "float64");
    bad = run;
    bad.step = 0;
    expect_refused(plain, bad, "at least 1", "not 0");
    bad = run;
    bad.v = NULL;
    expect_refused(plain, bad, "second moment", "1 elements");
    expect(sw_adam_step(&plain, NULL, 0, NULL) == SW_OK, "an empty list of runs is legal");
}

int main(void)
{
    test_every_option_and_size();
    test_every_dtype();
    test_random_rounding();
    test_random_rounding_has_the_mean_of_what_it_rounds();
    test_many_wild_elements();
    test_large_copies();
    test_runs_of_different_steps();
    test_errors();
    return finish();
}
