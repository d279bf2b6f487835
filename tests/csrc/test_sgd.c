/* test_sgd.c - compare every kernel table with a naive SGD, bit for bit: cuts, dtypes, options,
 * errors. */
#include "optim_oracle.h"

#include "optim/optim.h"

enum { P, M, G, COPY, ARRAY_COUNT };

static const sw_sgd_options plain = {.lr = 1e-2, .grad_scale = 1.0};

static void oracle_sgd(const sw_sgd_options *with, int64_t step, array *a, bool copy)
{
    float l2 = (float)with->weight_decay, momentum = (float)with->momentum,
          rest = (float)(1.0 - with->dampening);
    float move = (float)-with->lr, scale = (float)with->grad_scale;
    for (size_t i = 0; i < a[P].numel; ++i) {
        float p = load(a[P].dtype, a[P].data, i), b = load(a[M].dtype, a[M].data, i);
        float g = load(a[G].dtype, a[G].data, i) * scale;
        if (copy)
            p = oracle_master(p, a[COPY].dtype, a[COPY].data, i);
        if (with->maximize)
            g = -g;
        if (with->weight_decay != 0.0)
            g = fmaf(p, l2, g);
        if (with->momentum != 0.0) {
            float kept = b * momentum;
            b = step == 1 ? g : fmaf(g, rest, kept);
            store(a[M].dtype, a[M].data, i, b);
            g = with->nesterov ? fmaf(b, momentum, g) : b;
        }
        p = fmaf(g, move, p);
        store(a[P].dtype, a[P].data, i, p);
        if (copy)
            store(a[COPY].dtype, a[COPY].data, i, p);
    }
}

typedef struct sgd_case {
    sw_sgd_options options;
    sw_dtype dtype[ARRAY_COUNT];
    size_t numel, offset;
    int64_t step;
    bool has_copy, wild;
} sgd_case;

static void copy_arrays(const sgd_case *c, array *to, const array *from, size_t offset)
{
    for (int k = 0; k < ARRAY_COUNT; ++k) {
        array_init(&to[k], c->dtype[k], c->numel, offset ? (offset + (size_t)k) % 8 : 0);
        if (from)
            memcpy(to[k].data, from[k].data, to[k].bytes);
        else
            array_randomize(&to[k], c->wild, false);
    }
}

static sw_optim_run run_of(const sgd_case *c, array *a, size_t start, size_t numel)
{
    void *at[ARRAY_COUNT];
    for (int k = 0; k < ARRAY_COUNT; ++k)
        at[k] = a[k].data + start * sw_dtype_size_bytes(a[k].dtype);
    return (sw_optim_run){.p = at[P],
                          .m = c->options.momentum != 0.0 ? at[M] : NULL,
                          .g = at[G],
                          .copy = c->has_copy ? at[COPY] : NULL,
                          .numel = numel,
                          .step = c->step,
                          .p_dtype = c->dtype[P],
                          .state_dtype = c->dtype[M],
                          .g_dtype = c->dtype[G],
                          .copy_dtype = c->dtype[COPY]};
}

static void check_on_table(const sgd_case *c, const char *table, const array *original,
                           const array *expected)
{
    for (int parts = 1; parts <= 2; ++parts) {
        array work[ARRAY_COUNT];
        copy_arrays(c, work, original, c->offset);
        size_t cut = parts == 1 ? c->numel : c->numel / 3;
        sw_optim_run runs[2] = {run_of(c, work, 0, cut), run_of(c, work, cut, c->numel - cut)};
        bool ok = sw_sgd_step(&c->options, runs, 2, NULL) == SW_OK;
        for (int k = 0; k < ARRAY_COUNT; ++k)
            ok = ok && guards_intact(&work[k]) && same_values(&work[k], &expected[k]);
        if (!ok)
            fprintf(stderr,
                    "table %s p %s state %s g %s copy %d numel %zu offset %zu parts %d step %lld "
                    "mom %g nest %d\n",
                    table, sw_dtype_name(c->dtype[P]), sw_dtype_name(c->dtype[M]),
                    sw_dtype_name(c->dtype[G]), c->has_copy, c->numel, c->offset, parts,
                    (long long)c->step, c->options.momentum, c->options.nesterov);
        expect(ok, "SGD equals the oracle");
        for (int k = 0; k < ARRAY_COUNT; ++k)
            array_fini(&work[k]);
    }
}

static void check_case(const sgd_case *c)
{
    const sw_kernel_table *tables[TABLES_MAX];
    size_t count = sw_kernels_available(tables, TABLES_MAX);
    array original[ARRAY_COUNT], expected[ARRAY_COUNT];
    copy_arrays(c, original, NULL, 0);
    array_round(&original[COPY], &original[P]);
    copy_arrays(c, expected, original, 0);
    oracle_sgd(&c->options, c->step, expected, c->has_copy);
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

static void test_every_option_size_and_dtype(void)
{
    static const size_t sizes[] = {0, 1, 7, 16, 31, 33, 1000, 1025, 4097};
    static const sw_dtype dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16, SW_DTYPE_FLOAT16};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s)
        for (int k = 0; k < 3 * 64; ++k) {
            int bits = k / 3;
            sgd_case c = {plain,
                          {dtypes[k % 3 * (bits & 1)], dtypes[k % 3 * (bits >> 1 & 1)],
                           dtypes[k % 3], dtypes[k % 2]},
                          sizes[s],
                          (size_t)(k % 4),
                          1 + (bits & 1),
                          bits & 2,
                          k % 5 == 0};
            c.options.momentum = bits & 4 ? 0.9 : 0.0;
            c.options.nesterov = (bits & 12) == 12;
            c.options.dampening = (bits & 12) == 4 ? 0.1 : 0.0;
            c.options.maximize = bits & 16;
            c.options.weight_decay = bits & 32 ? 0.03 : 0.0;
            c.options.grad_scale = k % 7 == 0 ? 0.37 : 1.0;
            check_case(&c);
        }
}

/* The buffer of the first step may hold anything: a NaN in it must not reach the parameter. */
static void test_the_first_buffer_is_not_used(void)
{
    float p = 1, m = NAN, g = 2;
    sw_sgd_options options = plain;
    options.momentum = 0.9;
    sw_optim_run run = {.p = &p, .m = &m, .g = &g, .numel = 1, .step = 1};
    expect(sw_sgd_step(&options, &run, 1, NULL) == SW_OK && m == 2.0f && p < 1.0f,
           "the buffer is set to the gradient");
}

/* Test p + a * b whose double is a midpoint of floats, while the exact value is only near it.
 * Rounding twice is wrong here, and almost nowhere else. */
static void test_no_double_rounding(void)
{
    static const struct {
        float p, a, b, sum;
    } known[] = {
        {1.0f, 0x1.001p-12f, 0x1.ffe002p-13f, 0x1.000002p0f},             /* 2^-24 + 2^-60: up */
        {0x1.000002p0f, 0x1.000002p-12f, 0x1.fffffcp-13f, 0x1.000002p0f}, /* 2^-24 - 2^-70: down */
        {-1.0f, -0x1.001p-12f, 0x1.ffe002p-13f, -0x1.000002p0f},
        {-0x1.000002p0f, -0x1.000002p-12f, 0x1.fffffcp-13f, -0x1.000002p0f},
    };
    const sw_kernel_table *tables[TABLES_MAX];
    size_t count = sw_kernels_available(tables, TABLES_MAX);
    for (size_t t = 0; t < count; ++t)
        for (size_t k = 0; k < sizeof known / sizeof known[0]; ++k) {
            float p[19], g[19];
            sw_sgd_options options = {
                .lr = (double)known[k].b, .grad_scale = 1.0, .maximize = true};
            sw_optim_run run = {.p = p, .g = g, .numel = 19, .step = 1};
            for (int i = 0; i < 19; ++i) {
                p[i] = known[k].p;
                g[i] = known[k].a;
            }
            expect(sw_kernels_force(tables[t]->name, NULL) == SW_OK &&
                       sw_sgd_step(&options, &run, 1, NULL) == SW_OK,
                   "the step succeeds");
            expect(p[0] == known[k].sum && p[18] == known[k].sum, "the sum is rounded once");
        }
    expect(sw_kernels_force(NULL, NULL) == SW_OK, "the best table is restored");
}

static void expect_refused(sw_sgd_options options, sw_optim_run run, const char *a, const char *b)
{
    sw_error err = {0};
    bool refused = sw_sgd_step(&options, &run, 1, &err) == SW_E_INVALID;
    expect(refused && strstr(err.message, a) && strstr(err.message, b),
           "the message names argument and value");
}

static void test_errors(void)
{
    float p = 1, g = 1;
    sw_optim_run run = {.p = &p, .g = &g, .numel = 1, .step = 1};
    sw_sgd_options options = plain;
    options.momentum = -1.0;
    expect_refused(options, run, "momentum", "-1");
    options.momentum = 0.9;
    expect_refused(options, run, "run 0", "momentum buffer");
    options = plain;
    options.nesterov = true;
    expect_refused(options, run, "nesterov", "dampening");
    options = plain;
    options.dampening = (double)NAN;
    expect_refused(options, run, "dampening", "nan");
    run.p_dtype = SW_DTYPE_INT32;
    expect_refused(plain, run, "parameter of run 0", "int32");
    expect(p == 1.0f, "nothing was written");
}

int main(void)
{
    test_every_option_size_and_dtype();
    test_the_first_buffer_is_not_used();
    test_no_double_rounding();
    test_errors();
    return finish();
}
