/* nccl_abi.h - the part of NCCL's interface that the engine uses, declared by hand.
 *
 * Idea: as device/cuda_abi.h: the build needs no header of NCCL, and tests/abi compares this file
 * with the real nccl.h. The configuration structure is versioned by its size: this one ends with
 * NCCL 2.14's first field, and every later NCCL fills in the rest. Valid C and C++.
 *
 * Thread rule: any; there is no state. */
#pragma once

#include <stddef.h>

#include "device/cuda_abi.h"

enum {
    SW_NCCL_OLDEST_VERSION = 21400, /* 10000 * major + 100 * minor + patch */
    SW_NCCL_UNIQUE_ID_BYTES = 128,
    SW_NCCL_CONFIG_VERSION = 21400,

    SW_NCCL_SUCCESS = 0,
    SW_NCCL_UNHANDLED_CUDA_ERROR = 1,
    SW_NCCL_SYSTEM_ERROR = 2,
    SW_NCCL_INTERNAL_ERROR = 3,
    SW_NCCL_INVALID_ARGUMENT = 4,
    SW_NCCL_INVALID_USAGE = 5,
    SW_NCCL_REMOTE_ERROR = 6,
    SW_NCCL_IN_PROGRESS = 7,
    SW_NCCL_TIMEOUT = 8, /* NCCL 2.30 and newer */

    SW_NCCL_INT8 = 0,
    SW_NCCL_UINT8 = 1,
    SW_NCCL_INT32 = 2,
    SW_NCCL_INT64 = 4,
    SW_NCCL_FLOAT16 = 6,
    SW_NCCL_FLOAT32 = 7,
    SW_NCCL_FLOAT64 = 8,
    SW_NCCL_BFLOAT16 = 9,

    SW_NCCL_SUM = 0,
    SW_NCCL_MAX = 2,
    SW_NCCL_MIN = 3,
    SW_NCCL_AVG = 4,
};
#define SW_NCCL_CONFIG_MAGIC 0xcafebeefu

typedef int sw_nccl_result; /* ncclResult_t */
typedef struct ncclComm *sw_nccl_comm;

typedef struct sw_nccl_id {
    char internal[SW_NCCL_UNIQUE_ID_BYTES];
} sw_nccl_id;

typedef struct sw_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
} sw_nccl_config;

/* X(name, parameters): each function returns ncclResult_t. Enumerations are passed as int. */
#define SW_NCCL_FUNCTIONS(X)                                                                  \
    X(ncclGetVersion, (int *version))                                                         \
    X(ncclGetUniqueId, (sw_nccl_id * id))                                                     \
    X(ncclCommInitRankConfig,                                                                 \
      (sw_nccl_comm * comm, int world_size, sw_nccl_id id, int rank, sw_nccl_config *config)) \
    X(ncclCommFinalize, (sw_nccl_comm comm))                                                  \
    X(ncclCommDestroy, (sw_nccl_comm comm))                                                   \
    X(ncclCommAbort, (sw_nccl_comm comm))                                                     \
    X(ncclCommGetAsyncError, (sw_nccl_comm comm, sw_nccl_result * result))                    \
    X(ncclCommCount, (sw_nccl_comm comm, int *count))                                         \
    X(ncclCommUserRank, (sw_nccl_comm comm, int *rank))                                       \
    X(ncclCommCuDevice, (sw_nccl_comm comm, int *ordinal))                                    \
    X(ncclAllReduce, (const void *from, void *to, size_t count, int dtype, int op,            \
                      sw_nccl_comm comm, sw_cu_stream stream))                                \
    X(ncclReduceScatter, (const void *from, void *to, size_t count, int dtype, int op,        \
                          sw_nccl_comm comm, sw_cu_stream stream))                            \
    X(ncclAllGather, (const void *from, void *to, size_t count, int dtype, sw_nccl_comm comm, \
                      sw_cu_stream stream))                                                   \
    X(ncclBroadcast, (const void *from, void *to, size_t count, int dtype, int root,          \
                      sw_nccl_comm comm, sw_cu_stream stream))                                \
    X(ncclSend, (const void *from, size_t count, int dtype, int peer, sw_nccl_comm comm,      \
                 sw_cu_stream stream))                                                        \
    X(ncclRecv,                                                                               \
      (void *to, size_t count, int dtype, int peer, sw_nccl_comm comm, sw_cu_stream stream))  \
    X(ncclGroupStart, (void))                                                                 \
    X(ncclGroupEnd, (void))

typedef struct sw_nccl_table {
#define SW_NCCL_FIELD(name, parameters) sw_nccl_result(*name) parameters;
    SW_NCCL_FUNCTIONS(SW_NCCL_FIELD)
#undef SW_NCCL_FIELD
    const char *(*ncclGetErrorString)(sw_nccl_result result);
    const char *(*ncclGetLastError)(sw_nccl_comm comm);
} sw_nccl_table;
