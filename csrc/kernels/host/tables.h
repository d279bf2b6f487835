/* tables.h - the tables that <kernels>_<instruction set>.c define, for kernels.c and each other.
 *
 * Thread rule: any; the tables are constant. Call a table only on a processor that runs it. */
#pragma once

#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"
#include "kernels/optim_kernels.h"

extern const sw_kernel_table sw_kernels_baseline;
extern const sw_optim_kernels sw_optim_kernels_baseline;
extern const sw_compress_kernels sw_compress_kernels_baseline;
#if defined(__x86_64__)
extern const sw_kernel_table sw_kernels_avx2, sw_kernels_avx512;
extern const sw_optim_kernels sw_optim_kernels_avx2, sw_optim_kernels_avx512;
extern const sw_compress_kernels sw_compress_kernels_avx2, sw_compress_kernels_avx512;
#endif
