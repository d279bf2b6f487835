/* optim_tables.h - the tables that optim_<instruction set>.c define, for the kernel tables alone.
 *
 * Thread rule: any; the tables are constant. Call a table only on a processor that runs it.
 */
#ifndef SW_KERNELS_HOST_OPTIM_TABLES_H
#define SW_KERNELS_HOST_OPTIM_TABLES_H

#include "kernels/optim_kernels.h"

extern const sw_optim_kernels sw_optim_kernels_baseline;
#if defined(__x86_64__)
extern const sw_optim_kernels sw_optim_kernels_avx2;
extern const sw_optim_kernels sw_optim_kernels_avx512;
#endif

#endif
