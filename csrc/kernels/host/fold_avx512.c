/* fold_avx512.c - the fold body compiled for AVX-512, on x86-64 alone. */
#if defined(__x86_64__)

#include "kernels/host/tables.h"

#include "kernels/host/begin_avx512.h" /* without FMA: no multiply and add may be contracted */

#define FOLD_TABLE sw_kernels_avx512
#define FOLD_TABLE_NAME "avx512"
#define OPTIM_TABLE sw_optim_kernels_avx512
#define COMPRESS_TABLE sw_compress_kernels_avx512
#include "kernels/host/fold_body.h"

#include "kernels/host/end_isa.h"

#else
typedef int sw_no_fold_avx512; /* ISO C requires a declaration in every file */
#endif
