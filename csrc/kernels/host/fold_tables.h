/* fold_tables.h - the kernel tables that fold_<instruction set>.c define, for kernels.c alone.
 *
 * Thread rule: any; the tables are constant. Call a table only on a processor that runs it.
 */
#ifndef SW_KERNELS_HOST_FOLD_TABLES_H
#define SW_KERNELS_HOST_FOLD_TABLES_H

#include "kernels/kernels.h"

extern const sw_kernel_table sw_kernels_baseline;
#if defined(__x86_64__)
extern const sw_kernel_table sw_kernels_avx2;
extern const sw_kernel_table sw_kernels_avx512;
#endif

#endif
