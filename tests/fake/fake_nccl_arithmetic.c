/* fake_nccl_arithmetic.c - element types and reductions of the simulated NCCL. */
#include <stdlib.h>
#include <string.h>

#include "fake_nccl.h"
#include "kernels/kernels.h"

static sw_dtype dtype_of(int dtype)
{
    switch (dtype) {
    case SW_NCCL_INT8:
        return SW_DTYPE_INT8;
    case SW_NCCL_UINT8:
        return SW_DTYPE_UINT8;
    case SW_NCCL_INT32:
        return SW_DTYPE_INT32;
    case SW_NCCL_INT64:
        return SW_DTYPE_INT64;
    case SW_NCCL_FLOAT16:
        return SW_DTYPE_FLOAT16;
    case SW_NCCL_FLOAT32:
        return SW_DTYPE_FLOAT32;
    case SW_NCCL_FLOAT64:
        return SW_DTYPE_FLOAT64;
    case SW_NCCL_BFLOAT16:
        return SW_DTYPE_BFLOAT16;
    default:
        return SW_DTYPE_COUNT;
    }
}

static const size_t element_bytes[SW_DTYPE_COUNT + 1] = {
    [SW_DTYPE_FLOAT32] = 4, [SW_DTYPE_FLOAT64] = 8, [SW_DTYPE_FLOAT16] = 2, [SW_DTYPE_BFLOAT16] = 2,
    [SW_DTYPE_INT8] = 1,    [SW_DTYPE_UINT8] = 1,   [SW_DTYPE_INT32] = 4,   [SW_DTYPE_INT64] = 8,
};

size_t nccl_element_bytes(int dtype)
{
    return element_bytes[dtype_of(dtype)];
}

static void run_reference(const char *name, const void *args)
{
    for (int k = 0; k < sim.reference_count; ++k)
        if (strcmp(sim.references[k].name, name) == 0)
            sim.references[k].reference(args);
}

static void cast(void *to, int to_dtype, const void *from, int from_dtype, size_t numel,
                 float scale)
{
    sw_cast_args args = {.to = to,
                         .from = from,
                         .numel = numel,
                         .scale = scale,
                         .to_dtype = to_dtype,
                         .from_dtype = from_dtype};
    run_reference("sw_cast", &args);
}

/* NCCL's mean multiplies each contribution, before it is added, by 1 / world_size rounded to the
 * dtype (enqueue.cc: ncclAvg is PreMulSum), and rounds the product to the dtype. */
static void multiply_first(void *contributions, size_t numel, int world_size, sw_dtype dtype)
{
    float factor = (float)(1.0 / world_size);
    unsigned char rounded[sizeof factor];
    if (dtype == SW_DTYPE_FLOAT64) {
        for (size_t i = 0; i < numel; ++i)
            ((double *)contributions)[i] *= 1.0 / world_size;
        return;
    }
    cast(rounded, (int)dtype, &factor, SW_ARG_FLOAT32, 1, 1.0f);
    cast(&factor, SW_ARG_FLOAT32, rounded, (int)dtype, 1, 1.0f);
    cast(contributions, (int)dtype, contributions, (int)dtype, numel, factor);
}

void nccl_fold(void *to, const unsigned char *inputs, size_t stride, int world_size,
               const nccl_call *call)
{
    static const sw_redop ops[] = {[SW_NCCL_SUM] = SW_REDOP_SUM,
                                   [SW_NCCL_MAX] = SW_REDOP_MAX,
                                   [SW_NCCL_MIN] = SW_REDOP_MIN,
                                   [SW_NCCL_AVG] = SW_REDOP_SUM};
    unsigned char *turned = malloc(stride * (size_t)world_size + 1);
    for (int k = 0; k < world_size; ++k)
        memcpy(turned + (size_t)k * stride, inputs + (size_t)((k + 1) % world_size) * stride,
               stride);
    if (call->op == SW_NCCL_AVG)
        multiply_first(turned, call->count * (size_t)world_size, world_size, dtype_of(call->dtype));
    sw_fold_args args = {.to = to,
                         .rest = turned,
                         .numel = call->count,
                         .stride_bytes = stride,
                         .dtype = (int)dtype_of(call->dtype),
                         .op = (int)ops[call->op],
                         .own_index = -1,
                         .source_count = world_size};
    run_reference("sw_fold", &args);
    free(turned);
}
