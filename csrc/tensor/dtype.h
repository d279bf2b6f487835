/* dtype.h - the element types of the engine: size and name of each. Thread rule: any. */
#pragma once

#include <stddef.h>

/* Descriptors carry these values between ranks: append, never renumber. */
typedef enum sw_dtype {
    SW_DTYPE_FLOAT32 = 0,
    SW_DTYPE_FLOAT64,
    SW_DTYPE_FLOAT16,
    SW_DTYPE_BFLOAT16,
    SW_DTYPE_INT8,
    SW_DTYPE_UINT8,
    SW_DTYPE_INT16,
    SW_DTYPE_INT32,
    SW_DTYPE_INT64,
    SW_DTYPE_COMPLEX64,
    SW_DTYPE_COMPLEX128,
    SW_DTYPE_BOOL, /* from here on nothing is reduced: frozen parameters of these are moved */
    SW_DTYPE_FLOAT8_E4M3FN,
    SW_DTYPE_FLOAT8_E4M3FNUZ,
    SW_DTYPE_FLOAT8_E5M2,
    SW_DTYPE_FLOAT8_E5M2FNUZ,
    SW_DTYPE_FLOAT8_E8M0FNU,
    SW_DTYPE_COUNT,
} sw_dtype;

/* Return the bytes of one element; 0 for a value out of range. */
size_t sw_dtype_size_bytes(sw_dtype dtype);

/* Return torch's name without "torch.", such as "float32"; "invalid" for a value out of range. */
const char *sw_dtype_name(sw_dtype dtype);

/* Return the dtype of that name, or SW_DTYPE_COUNT if there is none. */
sw_dtype sw_dtype_from_name(const char *name);
