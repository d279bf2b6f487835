// abi_nccl.cpp - compares csrc/comm/nccl_abi.h with NCCL's nccl.h. The head of the configuration is unchanged since 2.14.
#include <nccl.h>

#include "alike.hpp"
#include "comm/nccl_abi.h"

#define SAME_FUNCTION(name, parameters) \
    static_assert(alike_functions(static_cast<decltype(&name)>(nullptr), decltype(sw_nccl_table::name){}), #name);
SW_NCCL_FUNCTIONS(SAME_FUNCTION)
SAME_FUNCTION(ncclGetErrorString, )
SAME_FUNCTION(ncclGetLastError, )

static_assert(sizeof(sw_nccl_id) == sizeof(ncclUniqueId) && std::is_same_v<sw_nccl_comm, ncclComm_t>);
static_assert(offsetof(sw_nccl_config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(sw_nccl_config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(sw_nccl_config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(sw_nccl_config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(sw_nccl_config) <= sizeof(ncclConfig_t));
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(theirs.magic == SW_NCCL_CONFIG_MAGIC && theirs.version >= SW_NCCL_CONFIG_VERSION);

#define SAME(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs), #theirs)
SAME(SW_NCCL_UNIQUE_ID_BYTES, NCCL_UNIQUE_ID_BYTES);
SAME(SW_NCCL_SUCCESS, ncclSuccess);
SAME(SW_NCCL_UNHANDLED_CUDA_ERROR, ncclUnhandledCudaError);
SAME(SW_NCCL_SYSTEM_ERROR, ncclSystemError);
SAME(SW_NCCL_INTERNAL_ERROR, ncclInternalError);
SAME(SW_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(SW_NCCL_INVALID_USAGE, ncclInvalidUsage);
SAME(SW_NCCL_REMOTE_ERROR, ncclRemoteError);
SAME(SW_NCCL_IN_PROGRESS, ncclInProgress);
#if NCCL_VERSION_CODE >= 23000
SAME(SW_NCCL_TIMEOUT, ncclTimeout);
#endif
SAME(SW_NCCL_INT8, ncclInt8);
SAME(SW_NCCL_UINT8, ncclUint8);
SAME(SW_NCCL_INT32, ncclInt32);
SAME(SW_NCCL_INT64, ncclInt64);
SAME(SW_NCCL_FLOAT16, ncclFloat16);
SAME(SW_NCCL_FLOAT32, ncclFloat32);
SAME(SW_NCCL_FLOAT64, ncclFloat64);
SAME(SW_NCCL_BFLOAT16, ncclBfloat16);
SAME(SW_NCCL_SUM, ncclSum);
SAME(SW_NCCL_MAX, ncclMax);
SAME(SW_NCCL_MIN, ncclMin);
SAME(SW_NCCL_AVG, ncclAvg);
