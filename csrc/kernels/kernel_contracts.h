/* kernel_contracts.h - the contracts that block_contracts.c and lowrank_contracts.c define for
 * kernel_contracts.c's table. device_kernels.h has their meaning.
 *
 * Thread rule: any.
 */
#ifndef SW_KERNELS_KERNEL_CONTRACTS_H
#define SW_KERNELS_KERNEL_CONTRACTS_H

#include "kernels/device_kernels.h"

#define SW_CONTRACT_FUNCTIONS(noun)                                                   \
    sw_status sw_##noun##_check(const void *args, sw_error *err);                     \
    void sw_##noun##_accesses(const void *args, sw_access_fn *report, void *context); \
    void sw_##noun##_reference(const void *args);                                     \
    sw_grid sw_##noun##_grid(const void *args, int processor_count)

SW_CONTRACT_FUNCTIONS(quantize);
SW_CONTRACT_FUNCTIONS(fold_records);
SW_CONTRACT_FUNCTIONS(decode);
SW_CONTRACT_FUNCTIONS(verdict);
SW_CONTRACT_FUNCTIONS(owe);

SW_CONTRACT_FUNCTIONS(project);
SW_CONTRACT_FUNCTIONS(absorb);
SW_CONTRACT_FUNCTIONS(expand);
SW_CONTRACT_FUNCTIONS(orthonormalize);
SW_CONTRACT_FUNCTIONS(finite);

#endif
