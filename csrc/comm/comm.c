/* comm.c - the arithmetic and the names that all transports share. */
#include "comm/comm.h"

#include "base/bytes.h"

size_t sw_comm_slice_numel(size_t numel, size_t element_bytes, int world_size)
{
    size_t unit = SW_ALIGNMENT_BYTES / element_bytes;
    size_t share = numel / (size_t)world_size + (numel % (size_t)world_size != 0);
    return (share + unit - 1) / unit * unit;
}

const char *sw_op_kind_name(sw_op_kind kind)
{
    static const char *const names[SW_OP_KIND_COUNT] = {"barrier", "all_reduce", "reduce_scatter", "all_gather",
                                                        "broadcast"};
    return (unsigned)kind < SW_OP_KIND_COUNT ? names[kind] : "invalid";
}
