/* dtype.c - the table of element types. */
#include "tensor/dtype.h"

#include <string.h>

static const struct {
    const char *name;
    size_t size_bytes;
} dtypes[SW_DTYPE_COUNT] = {
    [SW_DTYPE_FLOAT32] = {"float32", 4},
    [SW_DTYPE_FLOAT64] = {"float64", 8},
    [SW_DTYPE_FLOAT16] = {"float16", 2},
    [SW_DTYPE_BFLOAT16] = {"bfloat16", 2},
    [SW_DTYPE_INT8] = {"int8", 1},
    [SW_DTYPE_UINT8] = {"uint8", 1},
    [SW_DTYPE_INT16] = {"int16", 2},
    [SW_DTYPE_INT32] = {"int32", 4},
    [SW_DTYPE_INT64] = {"int64", 8},
    [SW_DTYPE_COMPLEX64] = {"complex64", 8},
    [SW_DTYPE_COMPLEX128] = {"complex128", 16},
    [SW_DTYPE_BOOL] = {"bool", 1},
    [SW_DTYPE_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1},
    [SW_DTYPE_FLOAT8_E4M3FNUZ] = {"float8_e4m3fnuz", 1},
    [SW_DTYPE_FLOAT8_E5M2] = {"float8_e5m2", 1},
    [SW_DTYPE_FLOAT8_E5M2FNUZ] = {"float8_e5m2fnuz", 1},
    [SW_DTYPE_FLOAT8_E8M0FNU] = {"float8_e8m0fnu", 1},
};

static int in_range(sw_dtype dtype)
{
    return (unsigned)dtype < (unsigned)SW_DTYPE_COUNT;
}

size_t sw_dtype_size_bytes(sw_dtype dtype)
{
    return in_range(dtype) ? dtypes[dtype].size_bytes : 0;
}

const char *sw_dtype_name(sw_dtype dtype)
{
    return in_range(dtype) ? dtypes[dtype].name : "invalid";
}

sw_dtype sw_dtype_from_name(const char *name)
{
    for (int i = 0; i < SW_DTYPE_COUNT; ++i)
        if (strcmp(dtypes[i].name, name) == 0)
            return (sw_dtype)i;
    return SW_DTYPE_COUNT;
}
