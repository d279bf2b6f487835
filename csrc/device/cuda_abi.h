/* cuda_abi.h - the part of the CUDA driver's interface that the engine uses, declared by hand.
 *
 * The build needs no CUDA header. tests/abi compiles this file beside the real cuda.h and asserts
 * that every function and every value agrees. The file is valid C and C++.
 *
 * Thread rule: any; there is no state.
 */
#pragma once

#include <stddef.h>

typedef int sw_cu_result; /* CUresult */
typedef int sw_cu_device; /* CUdevice: an ordinal */
typedef unsigned long long sw_cu_address;
typedef struct CUctx_st *sw_cu_context;
typedef struct CUmod_st *sw_cu_module;
typedef struct CUfunc_st *sw_cu_function;
typedef struct CUstream_st *sw_cu_stream;
typedef struct CUevent_st *sw_cu_event;

enum { SW_CU_IPC_HANDLE_BYTES = 64 };
typedef struct sw_cu_ipc_handle { /* CUipcMemHandle, passed by value */
    char reserved[SW_CU_IPC_HANDLE_BYTES];
} sw_cu_ipc_handle;

enum {
    SW_CU_SUCCESS = 0,
    SW_CU_INVALID_VALUE = 1,
    SW_CU_OUT_OF_MEMORY = 2,
    SW_CU_NOT_INITIALIZED = 3,
    SW_CU_DEINITIALIZED = 4,
    SW_CU_NO_DEVICE = 100,
    SW_CU_INVALID_DEVICE = 101,
    SW_CU_INVALID_CONTEXT = 201,
    SW_CU_NO_BINARY_FOR_GPU = 209,
    SW_CU_INVALID_HANDLE = 400,
    SW_CU_NOT_FOUND = 500,
    SW_CU_NOT_READY = 600,
    SW_CU_ILLEGAL_ADDRESS = 700,
    SW_CU_SYSTEM_DRIVER_MISMATCH = 803,
    SW_CU_CAPTURE_UNSUPPORTED = 900, /* first of the codes that stream capture causes */
    SW_CU_CAPTURED_EVENT = 907,      /* last of them */

    SW_CU_STREAM_NON_BLOCKING = 1,
    SW_CU_EVENT_DISABLE_TIMING = 2,
    SW_CU_MEMHOSTALLOC_PORTABLE = 1,
    SW_CU_CAPTURE_NONE = 0,
    SW_CU_CAPTURE_MODE_GLOBAL = 0,
    SW_CU_CAPTURE_MODE_THREAD_LOCAL = 1,
    SW_CU_CAPTURE_MODE_RELAXED = 2,
    SW_CU_MEMHOSTREGISTER_PORTABLE = 1,
    SW_CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    SW_CU_IPC_LAZY_ENABLE_PEER_ACCESS = 1,
    SW_CU_STREAM_WAIT_VALUE_GEQ = 0,      /* (int32_t)(*address - value) >= 0 */
    SW_CU_STREAM_WRITE_VALUE_DEFAULT = 0, /* the write follows a system-wide memory fence */

    SW_CU_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    SW_CU_ATTRIBUTE_PCI_BUS_ID = 33,
    SW_CU_ATTRIBUTE_PCI_DEVICE_ID = 34,
    SW_CU_ATTRIBUTE_PCI_DOMAIN_ID = 50,
    SW_CU_ATTRIBUTE_CAPABILITY_MAJOR = 75,
    SW_CU_ATTRIBUTE_CAPABILITY_MINOR = 76,

    SW_CU_POINTER_MEMORY_TYPE = 2,
    SW_CU_POINTER_DEVICE_ORDINAL = 9,
    SW_CU_MEMORYTYPE_HOST = 1,
    SW_CU_MEMORYTYPE_DEVICE = 2,
};

/* X(name, parameters). Every function returns CUresult. Enumerations are passed as int. */
#define SW_CUDA_FUNCTIONS(X)                                                                       \
    X(cuInit, (unsigned flags))                                                                    \
    X(cuDriverGetVersion, (int *version))                                                          \
    X(cuGetErrorName, (sw_cu_result result, const char **name))                                    \
    X(cuDeviceGetCount, (int *count))                                                              \
    X(cuDeviceGet, (sw_cu_device * device, int ordinal))                                           \
    X(cuDeviceGetName, (char *name, int length, sw_cu_device device))                              \
    X(cuDeviceGetAttribute, (int *value, int attribute, sw_cu_device device))                      \
    X(cuDeviceTotalMem_v2, (size_t *bytes, sw_cu_device device))                                   \
    X(cuDevicePrimaryCtxRetain, (sw_cu_context * context, sw_cu_device device))                    \
    X(cuDevicePrimaryCtxRelease_v2, (sw_cu_device device))                                         \
    X(cuCtxGetCurrent, (sw_cu_context * context))                                                  \
    X(cuCtxPushCurrent_v2, (sw_cu_context context))                                                \
    X(cuCtxPopCurrent_v2, (sw_cu_context * context))                                               \
    X(cuMemAlloc_v2, (sw_cu_address * address, size_t bytes))                                      \
    X(cuMemFree_v2, (sw_cu_address address))                                                       \
    X(cuMemHostAlloc, (void **memory, size_t bytes, unsigned flags))                               \
    X(cuMemFreeHost, (void *memory))                                                               \
    X(cuMemHostRegister_v2, (void *memory, size_t bytes, unsigned flags))                          \
    X(cuMemHostUnregister, (void *memory))                                                         \
    X(cuMemHostGetDevicePointer_v2, (sw_cu_address * address, void *memory, unsigned flags))       \
    X(cuIpcGetMemHandle, (sw_cu_ipc_handle * handle, sw_cu_address address))                       \
    X(cuIpcOpenMemHandle_v2, (sw_cu_address * address, sw_cu_ipc_handle handle, unsigned flags))   \
    X(cuIpcCloseMemHandle, (sw_cu_address address))                                                \
    X(cuMemcpyAsync, (sw_cu_address to, sw_cu_address from, size_t bytes, sw_cu_stream stream))    \
    X(cuMemsetD8Async, (sw_cu_address to, unsigned char value, size_t bytes, sw_cu_stream stream)) \
    X(cuPointerGetAttribute, (void *value, int attribute, sw_cu_address address))                  \
    X(cuStreamCreateWithPriority, (sw_cu_stream * stream, unsigned flags, int priority))           \
    X(cuStreamDestroy_v2, (sw_cu_stream stream))                                                   \
    X(cuStreamWaitEvent, (sw_cu_stream stream, sw_cu_event event, unsigned flags))                 \
    X(cuStreamIsCapturing, (sw_cu_stream stream, int *status))                                     \
    X(cuEventCreate, (sw_cu_event * event, unsigned flags))                                        \
    X(cuEventDestroy_v2, (sw_cu_event event))                                                      \
    X(cuEventRecord, (sw_cu_event event, sw_cu_stream stream))                                     \
    X(cuEventQuery, (sw_cu_event event))                                                           \
    X(cuModuleLoadData, (sw_cu_module * module, const void *image))                                \
    X(cuModuleUnload, (sw_cu_module module))                                                       \
    X(cuModuleGetFunction, (sw_cu_function * function, sw_cu_module module, const char *name))     \
    X(cuLaunchKernel,                                                                              \
      (sw_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,                 \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,                \
       sw_cu_stream stream, void **parameters, void **extra))

/* Functions that are NULL in the table if the driver lacks them. CUDA 11.7 added all but the first,
 * which is older. */
#define SW_CUDA_NEWER_FUNCTIONS(X)                                                  \
    X(cuThreadExchangeStreamCaptureMode, (int *mode))                               \
    X(cuStreamWriteValue32_v2,                                                      \
      (sw_cu_stream stream, sw_cu_address address, unsigned value, unsigned flags)) \
    X(cuStreamWaitValue32_v2,                                                       \
      (sw_cu_stream stream, sw_cu_address address, unsigned value, unsigned flags))

/* Functions of drivers for CUDA 12.4 and newer; NULL in the table of an older driver. */
#define SW_CUDA_NEWEST_FUNCTIONS(X) X(cuFuncLoad, (sw_cu_function function))

typedef struct sw_cuda_table {
#define SW_CUDA_FIELD(name, parameters) sw_cu_result(*name) parameters;
    SW_CUDA_FUNCTIONS(SW_CUDA_FIELD)
    SW_CUDA_NEWER_FUNCTIONS(SW_CUDA_FIELD)
    SW_CUDA_NEWEST_FUNCTIONS(SW_CUDA_FIELD)
#undef SW_CUDA_FIELD
} sw_cuda_table;
