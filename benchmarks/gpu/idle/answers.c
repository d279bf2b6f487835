/* answers.c - the functions of an idle GPU whose callers read a result. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/nccl_abi.h"
#include "device/cuda_abi.h"
#include "kernels/kernel_args.h"

enum { DRIVER_VERSION = 13000, NCCL_VERSION = 22800, ARCH_MAJOR = 9, ARCH = 90, IMAGE_BYTES = 16 };
enum {
    WORDS_BYTES = 1024
}; /* up to here are words that ranks compare: they are moved, as if all ranks had the same */

static int world, own_rank; /* of the one communicator */
static char handle[64];     /* what most handles point at */
static char put[64]; /* the handle of the kernel PUT, which writes words that ranks compare */

int cuDriverGetVersion(int *version)
{
    *version = DRIVER_VERSION;
    return SW_CU_SUCCESS;
}

int cuGetErrorName(sw_cu_result result, const char **name)
{
    *name = result == SW_CU_SUCCESS ? "CUDA_SUCCESS" : "an idle driver's error";
    return SW_CU_SUCCESS;
}

int cuDeviceGetCount(int *count)
{
    *count = 1;
    return SW_CU_SUCCESS;
}

int cuDeviceGet(sw_cu_device *device, int ordinal)
{
    *device = ordinal;
    return SW_CU_SUCCESS;
}

int cuDeviceGetName(char *name, int length, sw_cu_device device)
{
    (void)device;
    strncpy(name, "an idle GPU", (size_t)length);
    return SW_CU_SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, sw_cu_device device)
{
    (void)device;
    *value = attribute == SW_CU_ATTRIBUTE_CAPABILITY_MAJOR       ? ARCH_MAJOR
             : attribute == SW_CU_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132
             : attribute == SW_CU_ATTRIBUTE_PCI_BUS_ID           ? getpid() /* a card a rank */
                                                                 : 0;
    return SW_CU_SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *bytes, sw_cu_device device)
{
    (void)device;
    *bytes = (size_t)80 << 30;
    return SW_CU_SUCCESS;
}

int cuDevicePrimaryCtxRetain(sw_cu_context *context, sw_cu_device device)
{
    (void)device;
    *context = (sw_cu_context)handle;
    return SW_CU_SUCCESS;
}

int cuCtxGetCurrent(sw_cu_context *context)
{
    *context = (sw_cu_context)handle;
    return SW_CU_SUCCESS;
}

int cuCtxPopCurrent_v2(sw_cu_context *context)
{
    *context = (sw_cu_context)handle;
    return SW_CU_SUCCESS;
}

static int allocate(void **memory, size_t bytes)
{
    *memory = calloc(1, bytes + 1);
    return *memory ? SW_CU_SUCCESS : SW_CU_OUT_OF_MEMORY;
}

int cuMemAlloc_v2(sw_cu_address *address, size_t bytes)
{
    void *memory;
    int result = allocate(&memory, bytes);
    *address = (sw_cu_address)(uintptr_t)memory;
    return result;
}

int cuMemFree_v2(sw_cu_address address)
{
    free((void *)(uintptr_t)address);
    return SW_CU_SUCCESS;
}

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    return allocate(memory, bytes);
}

int cuMemFreeHost(void *memory)
{
    free(memory);
    return SW_CU_SUCCESS;
}

int cuMemHostGetDevicePointer_v2(sw_cu_address *address, void *memory, unsigned flags)
{
    (void)flags;
    *address = (sw_cu_address)(uintptr_t)memory;
    return SW_CU_SUCCESS;
}

int cuMemcpyAsync(sw_cu_address to, sw_cu_address from, size_t bytes, sw_cu_stream stream)
{
    (void)stream;
    if (bytes <= WORDS_BYTES)
        memmove((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return SW_CU_SUCCESS;
}

int cuPointerGetAttribute(void *value, int attribute, sw_cu_address address)
{
    (void)address;
    *(int *)value = attribute == SW_CU_POINTER_MEMORY_TYPE ? SW_CU_MEMORYTYPE_DEVICE : 0;
    return SW_CU_SUCCESS;
}

int cuStreamCreateWithPriority(sw_cu_stream *stream, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    *stream = malloc(1);
    return SW_CU_SUCCESS;
}

int cuStreamDestroy_v2(sw_cu_stream stream)
{
    free(stream);
    return SW_CU_SUCCESS;
}

int cuStreamIsCapturing(sw_cu_stream stream, int *status)
{
    (void)stream;
    *status = SW_CU_CAPTURE_NONE;
    return SW_CU_SUCCESS;
}

int cuEventCreate(sw_cu_event *event, unsigned flags)
{
    (void)flags;
    *event = malloc(1);
    return SW_CU_SUCCESS;
}

int cuEventDestroy_v2(sw_cu_event event)
{
    free(event);
    return SW_CU_SUCCESS;
}

int cuModuleLoadData(sw_cu_module *module, const void *image)
{
    (void)image;
    *module = (sw_cu_module)handle;
    return SW_CU_SUCCESS;
}

int cuModuleGetFunction(sw_cu_function *function, sw_cu_module module, const char *name)
{
    (void)module;
    *function = (sw_cu_function)(strcmp(name, "sw_put") == 0 ? put : handle);
    return SW_CU_SUCCESS;
}

int cuLaunchKernel(sw_cu_function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   sw_cu_stream stream, void **parameters, void **extra)
{
    const sw_put_args *words = parameters[0];
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared_bytes, (void)stream, (void)extra;
    if ((char *)function == put)
        memcpy(words->to, words->byte, (size_t)words->size_bytes);
    return SW_CU_SUCCESS;
}

int ncclGetVersion(int *version)
{
    *version = NCCL_VERSION;
    return SW_NCCL_SUCCESS;
}

int ncclCommInitRankConfig(sw_nccl_comm *comm, int world_size, sw_nccl_id id, int rank,
                           sw_nccl_config *config)
{
    (void)id, (void)config;
    world = world_size;
    own_rank = rank;
    *comm = (sw_nccl_comm)handle;
    return SW_NCCL_SUCCESS;
}

int ncclCommGetAsyncError(sw_nccl_comm comm, sw_nccl_result *result)
{
    (void)comm;
    *result = SW_NCCL_SUCCESS;
    return SW_NCCL_SUCCESS;
}

int ncclCommCount(sw_nccl_comm comm, int *count)
{
    (void)comm;
    *count = world;
    return SW_NCCL_SUCCESS;
}

int ncclCommUserRank(sw_nccl_comm comm, int *rank)
{
    (void)comm;
    *rank = own_rank;
    return SW_NCCL_SUCCESS;
}

int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, sw_nccl_comm comm,
                  sw_cu_stream stream)
{
    (void)op, (void)comm, (void)stream;
    if (dtype <= SW_NCCL_UINT8 && count <= WORDS_BYTES)
        memmove(to, from, count);
    return SW_NCCL_SUCCESS;
}

int ncclAllGather(const void *from, void *to, size_t count, int dtype, sw_nccl_comm comm,
                  sw_cu_stream stream)
{
    (void)comm, (void)stream;
    if (dtype <= SW_NCCL_UINT8 && count <= WORDS_BYTES)
        for (int rank = 0; rank < world; ++rank)
            memmove((char *)to + (size_t)rank * count, from, count);
    return SW_NCCL_SUCCESS;
}

const char *ncclGetErrorString(sw_nccl_result result)
{
    (void)result;
    return "an idle NCCL's error";
}

const char *ncclGetLastError(sw_nccl_comm comm)
{
    (void)comm;
    return "";
}

int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return 0;
}

int nvrtcGetNumSupportedArchs(int *count)
{
    *count = 1;
    return 0;
}

int nvrtcGetSupportedArchs(int *archs)
{
    *archs = ARCH;
    return 0;
}

int nvrtcGetCUBINSize(void *program, size_t *bytes)
{
    (void)program;
    *bytes = IMAGE_BYTES;
    return 0;
}

int nvrtcGetCUBIN(void *program, char *cubin)
{
    (void)program;
    memset(cubin, 1, IMAGE_BYTES);
    return 0;
}

int nvrtcGetProgramLogSize(void *program, size_t *bytes)
{
    (void)program;
    *bytes = 0;
    return 0;
}
