// cuda_text.hpp - enough of CUDA C++ for the host's compiler to run the device kernels' text, one block after the other.
//
// Each thread of a block is a coroutine with its own stack. A thread that meets a barrier pauses, and the next one runs.
// When no thread can run, a barrier opens if all its threads (of the block, or of a warp) have come. Votes and shuffles of
// a warp are such barriers around a table of its lanes' values. Arithmetic is the host's IEEE arithmetic, which the GPU's
// compiler is told to keep to. This does not show races inside a block, real warps, or speed.
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
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
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
static inline double __longlong_as_double(long long bits)
{
    double a;
    std::memcpy(&a, &bits, sizeof a);
    return a;
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector)
{
    const unsigned long long bytes = a | static_cast<unsigned long long>(b) << 32;
    unsigned chosen = 0;
    for (int k = 0; k < 4; ++k)
        chosen |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * k & 7u) & 255u) << 8 * k;
    return chosen;
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

enum cuda_place { CUDA_RUNS, CUDA_AT_WARP, CUDA_AT_BLOCK, CUDA_DONE };
struct cuda_thread {
    ucontext_t context;
    std::vector<char> stack;
    cuda_place place = CUDA_RUNS;
    unsigned long long told = 0; // its value for the other lanes of the warp
};
static ucontext_t cuda_scheduler;
static std::vector<cuda_thread> cuda_threads;
static void (*cuda_body)(const void *);
static const void *cuda_arguments;
static bool cuda_stuck; // threads of a warp, or of a block, pause at different barriers

static void cuda_rest(cuda_place place)
{
    cuda_thread &self = cuda_threads[threadIdx.x];
    self.place = place;
    swapcontext(&self.context, &cuda_scheduler);
}

static void cuda_enter()
{
    cuda_body(cuda_arguments);
    cuda_rest(CUDA_DONE);
}

static inline void __syncthreads() { cuda_rest(CUDA_AT_BLOCK); }

// Gives a value to the lanes of the calling thread's warp and waits for all of `mask`. cuda_rest() must follow once.
template <class T> static void cuda_tell(unsigned mask, T value)
{
    const unsigned warp = threadIdx.x & ~31u;
    for (unsigned k = 0; k < 32; ++k) // `mask` names a lane that does not exist, or omits one
        cuda_stuck |= (mask >> k & 1u) != (warp + k < blockDim.x ? 1u : 0u);
    cuda_threads[threadIdx.x].told = 0;
    std::memcpy(&cuda_threads[threadIdx.x].told, &value, sizeof value);
    cuda_rest(CUDA_AT_WARP);
}
template <class T> static T __shfl_sync(unsigned mask, T value, unsigned lane)
{
    T other = value;
    cuda_tell(mask, value);
    if (lane < 32 && mask >> lane & 1u)
        std::memcpy(&other, &cuda_threads[(threadIdx.x & ~31u) + lane].told, sizeof other);
    cuda_rest(CUDA_AT_WARP);
    return other;
}
template <class T> static T __shfl_xor_sync(unsigned mask, T value, unsigned step)
{
    return __shfl_sync(mask, value, (threadIdx.x & 31u) ^ step);
}
template <class T> static T __shfl_down_sync(unsigned mask, T value, unsigned step)
{
    return __shfl_sync(mask, value, (threadIdx.x & 31u) + step);
}
static bool __all_sync(unsigned mask, bool value)
{
    const unsigned warp = threadIdx.x & ~31u;
    bool all = true;
    cuda_tell(mask, value);
    for (unsigned lane = 0; lane < 32 && warp + lane < blockDim.x; ++lane)
        all &= cuda_threads[warp + lane].told != 0;
    cuda_rest(CUDA_AT_WARP);
    return all;
}

// Opens the barriers of [from, to) if all remaining threads there pause at `place`.
static bool cuda_open(unsigned from, unsigned to, cuda_place place)
{
    bool some = false;
    for (unsigned t = from; t < to; ++t)
        if (cuda_threads[t].place != CUDA_DONE) {
            if (cuda_threads[t].place != place)
                return false;
            some = true;
        }
    for (unsigned t = from; t < to; ++t)
        if (cuda_threads[t].place == place)
            cuda_threads[t].place = CUDA_RUNS;
    return some;
}

static void cuda_run_block()
{
    for (auto &thread : cuda_threads) {
        thread.place = CUDA_RUNS;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, cuda_enter, 0);
    }
    for (bool goes_on = true; goes_on;) {
        for (unsigned t = 0; t < blockDim.x; ++t)
            if (cuda_threads[t].place == CUDA_RUNS) {
                threadIdx.x = t;
                swapcontext(&cuda_scheduler, &cuda_threads[t].context);
            }
        goes_on = cuda_open(0, blockDim.x, CUDA_AT_BLOCK);
        for (unsigned w = 0; w < blockDim.x; w += 32)
            goes_on |= cuda_open(w, w + 32 < blockDim.x ? w + 32 : blockDim.x, CUDA_AT_WARP);
    }
    for (const auto &thread : cuda_threads)
        cuda_stuck |= thread.place != CUDA_DONE;
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
