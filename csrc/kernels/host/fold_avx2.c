/* fold_avx2.c - the fold body compiled for AVX2 and F16C. FMA stays off: no multiply and add may be
 * contracted.
 *
 * A pragma selects the instructions instead of a compiler flag. The standard headers come before
 * it, so their inline functions run on every processor. Other architectures compile nothing here.
 */
#if defined(__x86_64__)

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/host/fold_tables.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#define KERNEL_F16C 1
#define FOLD_TABLE sw_kernels_avx2
#define FOLD_TABLE_NAME "avx2"
#define OPTIM_TABLE sw_optim_kernels_avx2
#define COMPRESS_TABLE sw_compress_kernels_avx2
#include "kernels/host/fold_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else
typedef int sw_no_avx2; /* ISO C requires a declaration in every file */
#endif
