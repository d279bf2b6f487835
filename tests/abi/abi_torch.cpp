// abi_torch.cpp - plain numbers taken from torch: a stream is the driver's own handle, CUDA is device type 1.
#include <c10/core/DeviceType.h>
#include <c10/cuda/CUDAStream.h>

#include "device/cuda_abi.h"

static_assert(static_cast<int>(c10::DeviceType::CPU) == 0 && static_cast<int>(c10::DeviceType::CUDA) == 1);
// torch.cuda.Stream.cuda_stream is this value as an integer; a cudaStream_t is a CUstream.
static_assert(std::is_same_v<decltype(std::declval<c10::cuda::CUDAStream>().stream()), sw_cu_stream>);
