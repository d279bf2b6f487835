/* fold_avx2.c - the fold body compiled for AVX2, on x86-64 alone. */
#if defined(__x86_64__)

#include "kernels/host/tables.h"

#include "kernels/host/begin_avx2.h" /* without FMA: no multiply and add may be contracted */

#define FOLD_TABLE sw_kernels_avx2
#define FOLD_TABLE_NAME "avx2"
#define OPTIM_TABLE sw_optim_kernels_avx2
#define COMPRESS_TABLE sw_compress_kernels_avx2
#include "kernels/host/fold_body.h"

#include "kernels/host/end_isa.h"

#else
typedef int sw_no_fold_avx2; /* ISO C requires a declaration in every file */
#endif
