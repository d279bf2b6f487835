/* optim_avx512.c - the optimizer and norm bodies compiled for AVX-512 F, BW, VL and DQ.
 *
 * A pragma selects the instructions instead of a compiler flag. The standard headers come before
 * it, so their inline functions run on every processor. Other architectures compile nothing here.
 */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/optim_tables.h"

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,f16c,fma,avx512f,avx512bw,avx512vl,avx512dq"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif

#define KERNEL_F16C 1
#define KERNEL_FMA 1
#define NORM_VECTOR_BYTES 64
#define OPTIM_TABLE sw_optim_kernels_avx512
#include "kernels/host/norm_body.h"
#include "kernels/host/optim_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int sw_no_optim_avx512; /* ISO C requires a declaration in every file */
#endif
