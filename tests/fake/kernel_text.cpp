// kernel_text.cpp - the device kernels' own text as host functions: see cuda_text.hpp. The files and their order are
// those of csrc/kernels/kernel_source.c.
#include "cuda_text.hpp"

#include "kernels/kernel_args.h"

#include "kernels/cuda/prelude.cuh"

#include "kernels/cuda/move.cu"

#include "kernels/cuda/fold.cu"

#include "kernels/cuda/optim_steps.cu"

#include "kernels/cuda/square_sum.cu"

#include "kernels/cuda/block_codec.cu"

#include "kernels/cuda/lowrank.cu"

#include "kernels/cuda/orthonormal_rows.cu"

#define RUN(noun) [](const void *args) { sw_##noun(*static_cast<const sw_##noun##_args *>(args)); }

// Runs kernel number `kernel` (sw_kernel) over a grid. Returns false for an unknown number, or if threads waited for
// others that did not come.
extern "C" bool run_kernel_text(int kernel, const void *args, unsigned blocks, unsigned threads)
{
    static void (*const bodies[])(const void *) = {RUN(cast), RUN(pack),     RUN(fold),       RUN(adam),    RUN(sgd),
                                                   RUN(norm), RUN(clip), RUN(quantize), RUN(fold_records), RUN(decode), RUN(verdict), RUN(owe),
                                                   RUN(project), RUN(absorb), RUN(expand), RUN(orthonormalize), RUN(finite), RUN(put)};
    if (kernel < 0 || kernel >= static_cast<int>(sizeof bodies / sizeof *bodies))
        return false;
    cuda_run(bodies[kernel], args, blocks, threads);
    return !cuda_stuck;
}
