/* kernel_contracts.h - how a contract of device_kernels.h is written.
 *
 * A kernel's arguments are sw_<noun>_args. Its file defines, of these arguments, noun_check,
 * noun_accesses, noun_reference and noun_tiles: the tiles that blocks of threads take in turn. Then
 * SW_CONTRACT(noun, n) defines the untyped functions of the table; n blocks run on a
 * multiprocessor.
 *
 * Thread rule: any. */
#pragma once

#include "kernels/device_kernels.h"

#define SW_CONTRACT_FUNCTIONS(number, noun)                                                    \
    sw_status sw_contract_##noun##_check(const void *args, sw_error *err);                     \
    void sw_contract_##noun##_accesses(const void *args, sw_access_fn *report, void *context); \
    void sw_contract_##noun##_reference(const void *args);                                     \
    sw_grid sw_contract_##noun##_grid(const void *args, int processor_count);
SW_KERNELS(SW_CONTRACT_FUNCTIONS)

#define SW_CONTRACT(noun, blocks)                                                             \
    sw_status sw_contract_##noun##_check(const void *args, sw_error *err)                     \
    {                                                                                         \
        return noun##_check(args, err);                                                       \
    }                                                                                         \
    void sw_contract_##noun##_accesses(const void *args, sw_access_fn *report, void *context) \
    {                                                                                         \
        noun##_accesses(args, report, context);                                               \
    }                                                                                         \
    void sw_contract_##noun##_reference(const void *args)                                     \
    {                                                                                         \
        noun##_reference(args);                                                               \
    }                                                                                         \
    sw_grid sw_contract_##noun##_grid(const void *args, int processor_count)                  \
    {                                                                                         \
        return sw_contract_grid(noun##_tiles(args), processor_count, blocks);                 \
    }

enum { SW_CONTRACT_THREADS = 256 }; /* of a block: the .cu text repeats it */

static inline sw_u64 sw_contract_parts(sw_u64 count, sw_u64 each)
{
    return (count + each - 1) / each;
}

static inline sw_grid sw_contract_grid(sw_u64 tiles, int processor_count, int blocks)
{
    sw_u64 most = (sw_u64)processor_count * (sw_u64)blocks, count = tiles < most ? tiles : most;
    return (sw_grid){.block_count = (unsigned)(count ? count : 1),
                     .thread_count = SW_CONTRACT_THREADS};
}

/* Check a number of items. `what`: "pack: segment_count". */
static inline sw_status sw_contract_count(const char *what, int count, int most, sw_error *err)
{
    if (count < 0 || count > most)
        SW_FAIL(err, SW_E_INVALID, "%s must be in [0, %d], not %d", what, most, count);
    return SW_OK;
}
