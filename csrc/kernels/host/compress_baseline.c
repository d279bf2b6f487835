/* compress_baseline.c - the compression bodies for the instructions that every processor of an
 * architecture has. */
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define COMPRESS_VECTOR_BYTES 16
#define COMPRESS_TABLE sw_compress_kernels_baseline
#include "kernels/host/block_body.h"
#include "kernels/host/exact_body.h"
#include "kernels/host/lowrank_body.h"

/* Must follow the bodies: the table of their functions. */
#include "kernels/host/compress_table_body.h"
