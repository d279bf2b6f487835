/* lowrank_contracts.h - what kernel_contracts.c's table says of PROJECT, ABSORB, EXPAND,
 * ORTHONORMALIZE and FINITE (device_kernels.h has their meaning).
 *
 * Thread rule: any.
 */
#ifndef SW_KERNELS_LOWRANK_CONTRACTS_H
#define SW_KERNELS_LOWRANK_CONTRACTS_H

#include "kernels/device_kernels.h"

#define SW_CONTRACT_FUNCTIONS(noun)                                                   \
    sw_status sw_##noun##_check(const void *args, sw_error *err);                     \
    void sw_##noun##_accesses(const void *args, sw_access_fn *report, void *context); \
    void sw_##noun##_reference(const void *args);                                     \
    sw_grid sw_##noun##_grid(const void *args, int processor_count)

SW_CONTRACT_FUNCTIONS(project);
SW_CONTRACT_FUNCTIONS(absorb);
SW_CONTRACT_FUNCTIONS(expand);
SW_CONTRACT_FUNCTIONS(orthonormalize);
SW_CONTRACT_FUNCTIONS(finite);

#endif
