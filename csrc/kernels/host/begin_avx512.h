/* begin_avx512.h - as begin_avx2.h, for AVX-512 F, BW, VL and DQ as well: each store is a cache
 * line. */
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__) && defined(KERNEL_FMA)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,fma"))), \
    apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC push_options
#if defined(KERNEL_FMA)
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512,fma")
#else
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
#endif

#define KERNEL_F16C 1
#define KERNEL_VECTOR_BYTES 64
