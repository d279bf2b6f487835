/* test_device_powersgd.c - the passes over more matrices than a launch takes, on the host device.
 * Steps of one rank have the bits of powersgd.h's, matrix by matrix. A refused step leaves the
 * state; a step refused late resets it; both leave NaN. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "compress/device_powersgd.h"
#include "compress/powersgd.h"
#include "device_host.h"

enum { COUNT = 2 * SW_MATRICES_MAX + SW_FACTORS_MAX / 2, ROOM = 512, STEPS = 3 };

typedef struct memory { /* one matrix; factors have at most ROOM elements */
    float gradient[ROOM], kept[ROOM], left[ROOM], right[ROOM], basis[ROOM], p[ROOM], q[ROOM];
} memory;

static memory one[COUNT], other[COUNT];

static sw_powersgd matrix_of(memory *m, size_t i)
{
    return (sw_powersgd){.gradient = m->gradient,
                         .memory = m->kept,
                         .left = m->left,
                         .right = m->right,
                         .basis = m->basis,
                         .rows = 3 + i % 5,
                         .cols = 4 + i % 7,
                         .rank = 1 + i % 3,
                         .seed = 11 * i,
                         .memory_dtype = i % 2 ? SW_DTYPE_BFLOAT16 : SW_DTYPE_FLOAT32};
}

static void give_gradients(int step)
{
    for (size_t i = 0; i < COUNT; ++i)
        for (size_t k = 0; k < ROOM; ++k)
            one[i].gradient[k] = other[i].gradient[k] =
                sinf((float)(k + 1) * (float)(i + 2) + (float)step);
}

static sw_matrix_args args_of(memory *m, size_t i)
{
    sw_powersgd of = matrix_of(m, i);
    return (sw_matrix_args){.gradient = of.gradient,
                            .memory = of.memory,
                            .left = of.left,
                            .right = of.right,
                            .basis = of.basis,
                            .rows = of.rows,
                            .cols = of.cols,
                            .rank = of.rank,
                            .memory_dtype = (int)of.memory_dtype};
}

/* Step one matrix after the other. */
static void step_by_matrix(void)
{
    for (size_t i = 0; i < COUNT; ++i) {
        sw_powersgd m = matrix_of(&one[i], i);
        sw_powersgd_project(&m, one[i].p);
        sw_powersgd_absorb(&m, one[i].p, one[i].q);
        sw_powersgd_decompress(&m, one[i].q);
    }
}

/* Step all matrices pass by pass. `refusal` makes P not finite after the first pass, or Q after the
 * second. */
static sw_status step_by_pass(const sw_kernel_set *kernels, int refusal, sw_error *err)
{
    static sw_matrix_args matrices[COUNT];
    static sw_factor_args factors[COUNT];
    int32_t verdict = 0;
    sw_device_passes passes = {.kernels = kernels, .verdict = &verdict};
    sw_finite_args finite = {.verdict = &verdict, .refusal = refusal, .numel = 1};
    for (size_t i = 0; i < COUNT; ++i) {
        matrices[i] = args_of(&other[i], i);
        matrices[i].out = other[i].p;
        factors[i] = (sw_factor_args){.to = other[i].left,
                                      .from = other[i].p,
                                      .count = matrices[i].rows,
                                      .rank = matrices[i].rank,
                                      .seed = matrix_of(&other[i], i).seed + 1};
    }
    SW_TRY(sw_device_powersgd_run(&passes, SW_KERNEL_PROJECT, matrices, COUNT, err));
    float spoilt = NAN;
    finite.values = &spoilt;
    if (refusal == SW_REFUSED)
        SW_TRY(sw_kernel_launch(kernels, SW_KERNEL_FINITE, &finite, NULL, err));
    SW_TRY(sw_device_powersgd_orthonormalize(&passes, factors, COUNT, err));
    for (size_t i = 0; i < COUNT; ++i) {
        matrices[i].out = other[i].q;
        matrices[i].copy = other[i].right;
    }
    SW_TRY(sw_device_powersgd_run(&passes, SW_KERNEL_ABSORB, matrices, COUNT, err));
    if (refusal == SW_REFUSED_LATE)
        SW_TRY(sw_kernel_launch(kernels, SW_KERNEL_FINITE, &finite, NULL, err));
    for (size_t i = 0; i < COUNT; ++i) {
        matrices[i].right = other[i].q;
        matrices[i].out = other[i].right;
        factors[i].to = other[i].basis;
        factors[i].from = other[i].q;
        factors[i].count = matrices[i].cols;
        factors[i].seed--;
    }
    SW_TRY(sw_device_powersgd_run(&passes, SW_KERNEL_EXPAND, matrices, COUNT, err));
    return sw_device_powersgd_orthonormalize(&passes, factors, COUNT, err);
}

static bool is_zero(const float *values)
{
    for (size_t k = 0; k < ROOM; ++k)
        if (values[k] != 0.0f)
            return false;
    return true;
}

static void check_steps(const sw_kernel_set *kernels, sw_device *device)
{
    sw_error err = {0};
    for (size_t i = 0; i < COUNT; ++i) {
        sw_powersgd m = matrix_of(&one[i], i);
        sw_powersgd_init_basis(&m);
        memcpy(other[i].basis, one[i].basis, sizeof one[i].basis);
    }
    for (int step = 0; step < STEPS; ++step) {
        uint64_t launches = device->stats.launches;
        give_gradients(step);
        step_by_matrix();
        check(step_by_pass(kernels, 0, &err) == SW_OK, "step %d: %s", step, err.message);
        check(device->stats.launches - launches == 3 * 3 + 2 * 2, "%d launches",
              (int)(device->stats.launches - launches));
        for (size_t i = 0; i < COUNT; ++i) /* the host's form orthonormalises P in place */
            memcpy(other[i].p, one[i].p, sizeof one[i].p);
        check(memcmp(one, other, sizeof one) == 0, "step %d: the bits differ", step);
    }
}

static void check_refusals(const sw_kernel_set *kernels)
{
    static memory before[COUNT];
    sw_error err = {0};
    for (int refusal = SW_REFUSED; refusal <= SW_REFUSED_LATE; ++refusal) {
        memcpy(before, other, sizeof other);
        check(step_by_pass(kernels, refusal, &err) == SW_OK, "refused: %s", err.message);
        for (size_t i = 0; i < COUNT; ++i) {
            bool is_late = refusal == SW_REFUSED_LATE;
            check(isnan(other[i].gradient[0]), "matrix %zu: the result must be NaN", i);
            check(memcmp(before[i].basis, other[i].basis, sizeof before[i].basis) == 0,
                  "matrix %zu: basis", i);
            check(is_late
                      ? is_zero(other[i].kept) && is_zero(other[i].right)
                      : memcmp(before[i].kept, other[i].kept, sizeof before[i].kept) == 0 &&
                            memcmp(before[i].left, other[i].left, sizeof before[i].left) == 0 &&
                            memcmp(before[i].right, other[i].right, sizeof before[i].right) == 0,
                  "matrix %zu: the state after refusal %d", i, refusal);
        }
        give_gradients(9);
    }
}

static void check_misuse(const sw_kernel_set *kernels)
{
    sw_error err = {0};
    sw_device_passes passes = {.kernels = kernels};
    sw_matrix_args m = args_of(&other[0], 0);
    m.rank = 4;
    check(sw_device_powersgd_run(&passes, SW_KERNEL_EXPAND, &m, 1, &err) == SW_E_INVALID &&
              strstr(err.message, "expand: rank of a matrix of 3 x 4 must be in [1, 3], not 4"),
          "%s", err.message);
    m = args_of(&other[0], 0);
    m.memory_dtype = (int)SW_DTYPE_FLOAT16;
    check(sw_device_powersgd_run(&passes, SW_KERNEL_PROJECT, &m, 1, &err) == SW_E_INVALID &&
              strstr(err.message, "project: memory must be float32 or bfloat16, not float16"),
          "%s", err.message);
    check(sw_device_powersgd_run(&passes, SW_KERNEL_PROJECT, NULL, 0, &err) == SW_OK, "none");
}

int main(void)
{
    sw_device *device = NULL;
    sw_kernel_set kernels;
    sw_error err = {0};
    if (check(sw_device_host_create(&device, &err) == SW_OK &&
                  sw_kernel_set_init(&kernels, device, NULL, &err) == SW_OK,
              "%s", err.message)) {
        check_steps(&kernels, device);
        check_refusals(&kernels);
        check_misuse(&kernels);
        sw_kernel_set_fini(&kernels);
    }
    sw_device_destroy(device);
    return check_result();
}
