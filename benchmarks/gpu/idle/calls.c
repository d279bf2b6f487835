/* calls.c - a CUDA driver, an NCCL and a compiler whose calls succeed and do nothing.
 *
 * Idea: what a step costs beside such libraries is the host's work alone. Each function is weak:
 * answers.c replaces those whose callers read a result. */
#include "comm/nccl_abi.h"
#include "device/cuda_abi.h"
#include "kernels/nvrtc.h"

#define IDLE(name, parameters)                \
    __attribute__((weak)) int name parameters \
    {                                         \
        return 0;                             \
    }
#pragma GCC diagnostic ignored "-Wunused-parameter"
SW_CUDA_FUNCTIONS(IDLE)
SW_CUDA_NEWER_FUNCTIONS(IDLE)
SW_CUDA_NEWEST_FUNCTIONS(IDLE)
SW_NCCL_FUNCTIONS(IDLE)
SW_NVRTC_FUNCTIONS(IDLE)
