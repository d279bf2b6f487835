/* optim_avx2.c - the optimizer and norm bodies compiled for AVX2, on x86-64 alone. */
#if defined(__x86_64__)

#include "kernels/host/tables.h"

#define KERNEL_FMA 1
#include "kernels/host/begin_avx2.h"

#define NORM_VECTOR_BYTES KERNEL_VECTOR_BYTES
#define OPTIM_TABLE sw_optim_kernels_avx2
#include "kernels/host/norm_body.h"
#include "kernels/host/optim_body.h"

#include "kernels/host/end_isa.h"

#else
typedef int sw_no_optim_avx2; /* ISO C requires a declaration in every file */
#endif
