/* dlpack_abi.h - the part of DLPack by which tensors go to and from torch, declared by hand.
 *
 * tests/abi compares it with the dlpack.h that torch ships. Valid C and C++. Thread rule: any.
 */
#pragma once

#include <stdint.h>

enum {
    DL_CPU = 1, /* device types */
    DL_CUDA = 2,

    DL_INT = 0, /* type codes */
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_BFLOAT = 4,
    DL_COMPLEX = 5,
    DL_BOOL = 6,
    DL_FLOAT8_E4M3FN = 10,
    DL_FLOAT8_E4M3FNUZ = 11,
    DL_FLOAT8_E5M2 = 12,
    DL_FLOAT8_E5M2FNUZ = 13,
    DL_FLOAT8_E8M0FNU = 14,
};

typedef struct dl_tensor { /* DLTensor */
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed_tensor { /* DLManagedTensor, held by a capsule named "dltensor" */
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed_tensor *self);
} dl_managed_tensor;

typedef struct exchange_table { /* DLPackExchangeAPI, major version 1 */
    uint32_t major, minor;
    const struct exchange_table *previous;
    void *managed_tensor_allocator;
    void *managed_tensor_from_py_object_no_sync;
    void *managed_tensor_to_py_object_no_sync;
    int (*dltensor_from_py_object_no_sync)(void *object, dl_tensor *out);
    void *current_work_stream;
} exchange_table;
