// abi_nvrtc.cpp - compares csrc/kernels/nvrtc.h with NVIDIA's nvrtc.h.
#include <nvrtc.h>

#include "alike.hpp"
#include "kernels/nvrtc.h"

static_assert(alike<sw_nvrtc_result, nvrtcResult>() && NVRTC_SUCCESS == 0);
static_assert(std::is_same_v<sw_nvrtc_program, nvrtcProgram>);

#define SAME_FUNCTION(name, parameters) \
    static_assert(alike_functions(static_cast<decltype(&name)>(nullptr), decltype(sw_nvrtc_table::name){}), #name);
SW_NVRTC_FUNCTIONS(SAME_FUNCTION)
