/* compress_avx512.c - the compression bodies compiled for AVX-512, on x86-64 alone. */
#if defined(__x86_64__)

#include "kernels/host/tables.h"

#include "kernels/host/begin_avx512.h"

#define COMPRESS_TABLE sw_compress_kernels_avx512
#define COMPRESS_VECTOR_BYTES KERNEL_VECTOR_BYTES
#include "kernels/host/block_body.h"
#include "kernels/host/exact_body.h"
#include "kernels/host/lowrank_body.h"

/* Must follow the bodies: the table of their functions. */
#include "kernels/host/compress_table_body.h"

#include "kernels/host/end_isa.h"

#else
typedef int sw_no_compress_avx512; /* ISO C requires a declaration in every file */
#endif
