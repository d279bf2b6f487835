/* norm.c - add squares with the kernel table in force, merge sums and round the result. */
#include "optim/norm.h"

#include <string.h>

#include "kernels/kernels.h"

void sw_norm_init(sw_norm_sum *sum)
{
    memset(sum, 0, sizeof *sum);
}

sw_status sw_norm_add(sw_norm_sum *sum, const sw_norm_array *arrays, size_t count, sw_error *err)
{
    sw_norm_fn *kernel = sw_kernels()->optim->norm;
    for (size_t i = 0; i < count; ++i) {
        sw_dtype dtype = arrays[i].dtype;
        if (dtype != SW_DTYPE_FLOAT32 && dtype != SW_DTYPE_BFLOAT16 && dtype != SW_DTYPE_FLOAT16 &&
            dtype != SW_DTYPE_FLOAT64)
            SW_FAIL(err, SW_E_INVALID,
                    "norm: array %zu must be float32, bfloat16, float16 or float64, not %s", i,
                    sw_dtype_name(dtype));
        if (!arrays[i].data && arrays[i].numel)
            SW_FAIL(err, SW_E_INVALID, "norm: array %zu of %zu elements has no data", i,
                    arrays[i].numel);
    }
    for (size_t i = 0; i < count; ++i)
        kernel(sum, arrays[i].data, arrays[i].numel, arrays[i].dtype);
    return SW_OK;
}

void sw_norm_close(sw_norm_sum *sum)
{
    sw_norm_sum_carry(sum);
}

void sw_norm_merge(sw_norm_sum *into, const sw_norm_sum *from)
{
    for (int i = 0; i < SW_NORM_DIGIT_COUNT; ++i)
        into->digit[i] += from->digit[i];
    into->infinite += from->infinite;
    into->nan += from->nan;
    sw_norm_sum_carry(into);
}
