/* begin_avx2.h - what follows is compiled for AVX2 and F16C, with FMA if the includer defines
 * KERNEL_FMA, until end_isa.h.
 *
 * A pragma selects the instructions instead of a compiler flag. The standard headers come before
 * it, so their inline functions run on every processor. */
#include <immintrin.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__) && defined(KERNEL_FMA)
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#if defined(KERNEL_FMA)
#pragma GCC target("avx2,f16c,fma")
#else
#pragma GCC target("avx2,f16c")
#endif
#endif

#define KERNEL_F16C 1
#define KERNEL_VECTOR_BYTES 32
