/* compress_tables.h - the tables that compress_<instruction set>.c define, for the kernel tables.
 *
 * Thread rule: any; the tables are constant. Call a table only on a processor that runs it.
 */
#ifndef SW_KERNELS_HOST_COMPRESS_TABLES_H
#define SW_KERNELS_HOST_COMPRESS_TABLES_H

#include "kernels/compress_kernels.h"

extern const sw_compress_kernels sw_compress_kernels_baseline;
#if defined(__x86_64__)
extern const sw_compress_kernels sw_compress_kernels_avx2;
extern const sw_compress_kernels sw_compress_kernels_avx512;
#endif

#endif
