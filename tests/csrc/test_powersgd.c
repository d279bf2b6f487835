/* test_powersgd.c - the passes of PowerSGD: all tables give the same bits; each pass equals a plain
 * one in double within a bound; rows are orthonormal on hard input; guards stay; odd shapes.
 *
 * Bounds: a float32 sum of n products is off by at most n 2^-24 times the sum of their magnitudes
 * (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 3.1); the tests allow n
 * 2^-23. */
#include "optim_oracle.h"

#include "compress/powersgd.h"

typedef struct step { /* one matrix and its factors, between guards */
    array gradient, memory, left, right, basis, p, q;
    sw_powersgd m;
} step;

static float *floats(array *a)
{
    return (float *)(void *)a->data;
}

static void factor_init(array *a, size_t rank, size_t count, bool random)
{
    size_t stride = sw_powersgd_stride(count);
    array_init(a, SW_DTYPE_FLOAT32, rank * stride, 0);
    memset(a->data, 0, a->bytes);
    for (size_t k = 0; k < rank && random; ++k)
        for (size_t i = 0; i < count; ++i)
            floats(a)[k * stride + i] = random_float(false);
}

/* `memory` is the dtype of the memory; SW_DTYPE_COUNT: no error feedback. */
static void step_init(step *s, size_t rows, size_t cols, size_t rank, sw_dtype memory)
{
    bool feedback = memory != SW_DTYPE_COUNT;
    array_init(&s->gradient, SW_DTYPE_FLOAT32, rows * cols, 1);
    array_init(&s->memory, feedback ? memory : SW_DTYPE_FLOAT32, rows * cols, 3);
    array_randomize(&s->gradient, false, false);
    array_randomize(&s->memory, false, false);
    factor_init(&s->left, rank, rows, true);
    factor_init(&s->right, rank, cols, true);
    factor_init(&s->basis, rank, cols, true);
    factor_init(&s->p, rank, rows, false);
    factor_init(&s->q, rank, cols, false);
    s->m = (sw_powersgd){.gradient = floats(&s->gradient),
                         .memory = feedback ? s->memory.data : NULL,
                         .memory_dtype = feedback ? memory : SW_DTYPE_FLOAT32,
                         .left = floats(&s->left),
                         .right = floats(&s->right),
                         .basis = floats(&s->basis),
                         .rows = rows,
                         .cols = cols,
                         .rank = rank,
                         .seed = 7};
    sw_powersgd_orthonormalize(s->m.left, rows, rank, 3);
    sw_powersgd_orthonormalize(s->m.basis, cols, rank, 3);
}

static bool step_guards(const step *s)
{
    return guards_intact(&s->gradient) && guards_intact(&s->memory) && guards_intact(&s->left) &&
           guards_intact(&s->right) && guards_intact(&s->basis) && guards_intact(&s->p) &&
           guards_intact(&s->q);
}

static void step_fini(step *s)
{
    array *all[] = {&s->gradient, &s->memory, &s->left, &s->right, &s->basis, &s->p, &s->q};
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i)
        array_fini(all[i]);
}

static double memory_at(const step *s, size_t i)
{
    uint16_t half;
    uint32_t bits;
    float value;
    if (s->m.memory_dtype == SW_DTYPE_FLOAT32)
        return (double)((const float *)s->m.memory)[i];
    memcpy(&half, (const uint16_t *)s->m.memory + i, sizeof half);
    bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

/* Compute memory - leftᵀ right, the error that the next step adds, in double; 0 without memory. */
static double *naive_error(const step *s)
{
    size_t rows = s->m.rows, cols = s->m.cols;
    size_t ls = sw_powersgd_stride(rows), rs = sw_powersgd_stride(cols);
    double *error = calloc(rows * cols + 1, sizeof *error);
    for (size_t i = 0; i < rows && s->m.memory; ++i)
        for (size_t j = 0; j < cols; ++j) {
            double product = 0.0;
            for (size_t k = 0; k < s->m.rank; ++k)
                product += (double)s->m.left[k * ls + i] * (double)s->m.right[k * rs + j];
            error[i * cols + j] = memory_at(s, i * cols + j) - product;
        }
    return error;
}

/* Compute v = gradient + error in double. */
static double *naive_value(const step *s)
{
    double *v = naive_error(s);
    for (size_t i = 0; i < s->m.rows * s->m.cols; ++i)
        v[i] = (double)s->m.gradient[i] + v[i];
    return v;
}

/* Return max |got[k][at] - naive| over a factor, where naive = sum over the other axis of v times
 * `other`. */
static double factor_distance(const step *s, const double *v, const float *other, const float *got,
                              bool by_rows)
{
    size_t rows = s->m.rows, cols = s->m.cols, outer = by_rows ? rows : cols;
    size_t os = sw_powersgd_stride(by_rows ? cols : rows), gs = sw_powersgd_stride(outer);
    double worst = 0.0;
    for (size_t k = 0; k < s->m.rank; ++k)
        for (size_t at = 0; at < gs; ++at) {
            double sum = 0.0;
            for (size_t x = 0; at < outer && x < (by_rows ? cols : rows); ++x)
                sum += v[by_rows ? at * cols + x : x * cols + at] * (double)other[k * os + x];
            double distance = fabs(sum - (double)got[k * gs + at]);
            worst = distance > worst ? distance : worst;
        }
    return worst;
}

static double most(const double *v, size_t numel)
{
    double found = 0.0;
    for (size_t i = 0; i < numel; ++i)
        found = fabs(v[i]) > found ? fabs(v[i]) : found;
    return found;
}

static double orthonormality(const float *factor, size_t count, size_t rank)
{
    size_t stride = sw_powersgd_stride(count);
    double worst = 0.0;
    for (size_t a = 0; a < rank; ++a)
        for (size_t b = 0; b <= a; ++b) {
            double sum = a == b ? -1.0 : 0.0;
            for (size_t i = 0; i < stride; ++i)
                sum += (double)factor[a * stride + i] * (double)factor[b * stride + i];
            worst = !(fabs(sum) <= worst) ? fabs(sum) : worst;
        }
    return worst;
}

static void check_step(size_t rows, size_t cols, size_t rank, sw_dtype memory)
{
    step s;
    bool feedback = memory != SW_DTYPE_COUNT;
    step_init(&s, rows, cols, rank, memory);
    expect(sw_powersgd_check(&s.m, NULL) == SW_OK, "a valid matrix is accepted");
    double *v = naive_value(&s), scale = most(v, rows * cols);
    double bound = scale * 0x1p-23 * (double)(rows + cols + 8 * rank);
    unsigned char *memory_before = malloc(s.memory.bytes + 1);
    memcpy(memory_before, s.memory.data, s.memory.bytes);
    sw_powersgd_project(&s.m, floats(&s.p));
    expect(factor_distance(&s, v, s.m.basis, floats(&s.p), true) <= bound * sqrt((double)cols),
           "P equals v Q");
    expect(memcmp(memory_before, s.memory.data, s.memory.bytes) == 0, "project writes no memory");
    for (size_t i = 0; i < rows * cols; ++i)
        expect(fabs(v[i] - (double)s.m.gradient[i]) <= bound, "the gradient equals v");
    sw_powersgd_absorb(&s.m, floats(&s.p), floats(&s.q));
    expect(orthonormality(floats(&s.p), rows, rank) < 1e-5, "P is orthonormal");
    expect(factor_distance(&s, v, floats(&s.p), floats(&s.q), false) <= bound * sqrt((double)rows),
           "Q equals vᵀ P");
    expect(!memcmp(s.m.left, floats(&s.p), s.p.bytes) &&
               !memcmp(s.m.right, floats(&s.q), s.q.bytes),
           "the state holds the factors that were sent");
    double unit =
        memory == SW_DTYPE_BFLOAT16 ? 0x1p-8 : 0.0; /* half a unit of the last place kept */
    for (size_t i = 0; i < rows * cols && feedback; ++i)
        expect(fabs(v[i] - memory_at(&s, i)) <= bound + unit * fabs(v[i]), "the memory equals v");
    if (!feedback)
        expect(memcmp(memory_before, s.memory.data, s.memory.bytes) == 0,
               "without feedback the memory is not written");
    free(memory_before);
    if (feedback) { /* the error plus the sent part must equal v */
        double *error = naive_error(&s);
        sw_powersgd_decompress(&s.m, floats(&s.q));
        for (size_t i = 0; i < rows * cols; ++i)
            expect(fabs(error[i] + (double)s.m.gradient[i] - v[i]) <= 2 * bound + unit * fabs(v[i]),
                   "the sent part plus the error equals v");
        expect(orthonormality(s.m.basis, cols, rank) < 1e-5, "the next basis is orthonormal");
        if (rank == (rows < cols ? rows : cols))
            for (size_t i = 0; i < rows * cols; ++i)
                expect(fabs((double)s.m.gradient[i] - v[i]) <= 1e-5 * scale, "full rank is exact");
        free(error);
    }
    expect(step_guards(&s), "guards");
    free(v);
    step_fini(&s);
}

/* All tables must give the bits of the first. */
static void check_same_bits(const sw_kernel_table *const *tables, size_t table_count, size_t rows,
                            size_t cols, size_t rank, sw_dtype memory)
{
    unsigned char *bits[7] = {0};
    uint64_t state = random_state;
    for (size_t t = 0; t < table_count; ++t) {
        step s;
        random_state = state;
        expect(sw_kernels_force(tables[t]->name, NULL) == SW_OK, "force");
        step_init(&s, rows, cols, rank, memory);
        sw_powersgd_project(&s.m, floats(&s.p));
        sw_powersgd_absorb(&s.m, floats(&s.p), floats(&s.q));
        sw_powersgd_decompress(&s.m, floats(&s.q));
        array *all[7] = {&s.gradient, &s.memory, &s.left, &s.right, &s.basis, &s.p, &s.q};
        for (size_t i = 0; i < 7; ++i) {
            if (t == 0) {
                bits[i] = malloc(all[i]->bytes);
                memcpy(bits[i], all[i]->data, all[i]->bytes);
            }
            expect(memcmp(bits[i], all[i]->data, all[i]->bytes) == 0,
                   "all tables give the same bits");
        }
        step_fini(&s);
    }
    for (size_t i = 0; i < 7; ++i)
        free(bits[i]);
}

static void hard_input(float *factor, size_t count, size_t rank, int kind)
{
    size_t stride = sw_powersgd_stride(count);
    memset(factor, 0, rank * stride * sizeof *factor);
    for (size_t k = 0; k < rank; ++k)
        for (size_t i = 0; i < count; ++i) {
            float *at = factor + k * stride + i;
            float first = (float)(i % 7) - 2.5f;
            if (kind == 1) /* rank one */
                *at = first * (float)(k + 1);
            else if (kind == 2) /* repeated rows */
                *at = k % 2 ? factor[(k - 1) * stride + i] : random_float(false);
            else if (kind == 3) /* decaying towards the first row */
                *at = first + random_float(false) * powf(10.0f, -(float)k);
            else if (kind == 4)
                *at = random_float(false) * (k % 2 ? 1e30f : 1e-30f);
            else if (kind == 5)
                *at = random_float(false) * 1e-42f;
            else if (kind == 6) /* one row is not finite */
                *at = k == 1 && i == 0 ? INFINITY : random_float(false);
        }
}

static void check_orthonormalize(size_t count, size_t rank)
{
    for (int kind = 0; kind <= 6; ++kind) {
        array factor;
        factor_init(&factor, rank, count, false);
        hard_input(floats(&factor), count, rank, kind);
        sw_powersgd_orthonormalize(floats(&factor), count, rank, 11);
        double found = orthonormality(floats(&factor), count, rank);
        expect(found < 1e-5, "orthonormal on hard input");
        if (!(found < 1e-5))
            fprintf(stderr, "kind %d count %zu rank %zu: %g\n", kind, count, rank, found);
        size_t stride = sw_powersgd_stride(count);
        for (size_t k = 0; k < rank; ++k)
            for (size_t i = count; i < stride; ++i)
                expect(floats(&factor)[k * stride + i] == 0.0f, "padding stays zero");
        expect(guards_intact(&factor), "guards");
        array_fini(&factor);
    }
}

static void check_not_finite(void)
{
    step s;
    step_init(&s, 21, 37, 3, SW_DTYPE_FLOAT32);
    s.m.gradient[5 * 37 + 6] = INFINITY;
    sw_powersgd_project(&s.m, floats(&s.p));
    expect(!sw_powersgd_is_finite(floats(&s.p), s.p.numel), "infinity reaches P");
    s.m.gradient[5 * 37 + 6] = NAN;
    sw_powersgd_project(&s.m, floats(&s.p));
    expect(!sw_powersgd_is_finite(floats(&s.p), s.p.numel), "NaN reaches P");
    s.m.gradient[5 * 37 + 6] = 1.0f;
    sw_powersgd_project(&s.m, floats(&s.p));
    expect(sw_powersgd_is_finite(floats(&s.p), s.p.numel), "the next P is finite again");
    step_fini(&s);
}

/* A value that bfloat16 cannot hold is clamped to the greatest finite one: an infinite error would
 * stay forever. */
static void check_memory_stays_finite(void)
{
    const size_t shapes[][2] = {{4, 64}, {3, 17}}; /* whole vectors, and a tail */
    for (size_t k = 0; k < 2; ++k) {
        step s;
        step_init(&s, shapes[k][0], shapes[k][1], 1, SW_DTYPE_BFLOAT16);
        memset(s.m.gradient, 0, s.gradient.bytes);
        memset(s.m.memory, 0, s.memory.bytes);
        memset(s.m.right, 0, s.right.bytes);
        s.m.gradient[2] = 3.4e38f;
        s.m.gradient[5] = -3.4e38f;
        sw_powersgd_project(&s.m, floats(&s.p));
        sw_powersgd_absorb(&s.m, floats(&s.p), floats(&s.q));
        expect(memory_at(&s, 2) == (double)0x1.fep127f, "the greatest bfloat16");
        expect(memory_at(&s, 5) == -(double)0x1.fep127f, "the least bfloat16");
        expect(step_guards(&s), "guards");
        step_fini(&s);
    }
}

static void check_errors(void)
{
    sw_error err;
    const size_t ranks[] = {0, 4, 300};
    for (size_t i = 0; i < 3; ++i) {
        sw_powersgd m = {.rows = i == 2 ? 1000 : 3,
                         .cols = 1000,
                         .rank = ranks[i],
                         .memory_dtype = SW_DTYPE_FLOAT32};
        expect(sw_powersgd_check(&m, &err) == SW_E_INVALID, "a rank out of range is refused");
        expect(strstr(err.message, i == 2 ? "[1, 256], not 300" : "[1, 3]") != NULL,
               "the message has the range");
    }
    sw_powersgd m = {.rows = 3, .cols = 3, .rank = 1, .memory_dtype = SW_DTYPE_FLOAT16};
    expect(sw_powersgd_check(&m, &err) == SW_E_INVALID, "an illegal memory dtype is refused");
    expect(strstr(err.message, "float32 or bfloat16, not float16") != NULL,
           "the message has the dtype");
}

int main(void)
{
    const sw_kernel_table *tables[TABLES_MAX];
    size_t table_count = sw_kernels_available(tables, TABLES_MAX);
    const size_t shapes[][3] = {{1, 1, 1},    {4, 16, 1},     {5, 17, 2},
                                {37, 3, 3},   {64, 64, 4},    {19, 600, 5},
                                {130, 70, 8}, {12, 1100, 12}, {50, 40, 40}};
    const sw_dtype memories[] = {SW_DTYPE_FLOAT32, SW_DTYPE_BFLOAT16, SW_DTYPE_COUNT};
    for (size_t t = 0; t < table_count; ++t) {
        expect(sw_kernels_force(tables[t]->name, NULL) == SW_OK, "force");
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i)
            for (size_t k = 0; k < sizeof memories / sizeof *memories; ++k)
                check_step(shapes[i][0], shapes[i][1], shapes[i][2], memories[k]);
        check_orthonormalize(1, 1);
        check_orthonormalize(8, 8);
        check_orthonormalize(1000, 2);
        check_orthonormalize(333, 16);
        check_not_finite();
        check_memory_stays_finite();
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i)
        for (size_t k = 0; k < 2; ++k)
            check_same_bits(tables, table_count, shapes[i][0], shapes[i][1], shapes[i][2],
                            memories[k]);
    check_errors();
    return finish();
}
