// cuda_text.hpp - enough of CUDA C++ for the host's compiler to run the device kernels' text, a block after the other.
//
// Idea: each thread of a block is a coroutine on a stack of its own; __syncthreads() goes to the next one, so all reach
// a barrier before any passes it. Arithmetic is the host's IEEE arithmetic, which is what the GPU's compiler is told to
// keep to; what a GPU adds (races inside a block, warps, speed) is not shown by this.
#pragma once
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>

struct cuda_index {
    unsigned x = 0, y = 0, z = 0;
};
static cuda_index threadIdx, blockIdx, blockDim, gridDim;

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) alignas(n)

static inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline unsigned __float_as_uint(float a)
{
    unsigned bits;
    std::memcpy(&bits, &a, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned bits)
{
    float a;
    std::memcpy(&a, &bits, sizeof a);
    return a;
}
static inline long long __double_as_longlong(double a)
{
    long long bits;
    std::memcpy(&bits, &a, sizeof bits);
    return bits;
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
template <class T> static T atomicAdd(T *at, T value)
{
    T old = *at;
    *at = old + value;
    return old;
}
template <class T> static T atomicMax(T *at, T value)
{
    T old = *at;
    *at = value > old ? value : old;
    return old;
}

struct cuda_thread {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
};
static ucontext_t cuda_scheduler;
static std::vector<cuda_thread> cuda_threads;
static void (*cuda_body)(const void *);
static const void *cuda_arguments;

static void cuda_enter()
{
    cuda_body(cuda_arguments);
    cuda_threads[threadIdx.x].done = true;
    swapcontext(&cuda_threads[threadIdx.x].context, &cuda_scheduler);
}

static inline void __syncthreads() { swapcontext(&cuda_threads[threadIdx.x].context, &cuda_scheduler); }

static void cuda_run_block()
{
    for (auto &thread : cuda_threads) {
        thread.done = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, cuda_enter, 0);
    }
    for (bool left = true; left;) {
        left = false;
        for (unsigned t = 0; t < blockDim.x; ++t) {
            if (cuda_threads[t].done)
                continue;
            left = true;
            threadIdx.x = t;
            swapcontext(&cuda_scheduler, &cuda_threads[t].context);
        }
    }
}

static void cuda_run(void (*body)(const void *), const void *arguments, unsigned blocks, unsigned threads)
{
    cuda_body = body;
    cuda_arguments = arguments;
    gridDim.x = blocks;
    blockDim.x = threads;
    cuda_threads.resize(threads);
    for (auto &thread : cuda_threads)
        thread.stack.resize(64 * 1024);
    for (unsigned b = 0; b < blocks; ++b) {
        blockIdx.x = b;
        cuda_run_block();
    }
}
