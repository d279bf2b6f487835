/* comm.c - the arithmetic and the names that all transports share. */
#include "comm/comm.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/bytes.h"

size_t sw_comm_slice_numel(size_t numel, size_t element_bytes, int world_size)
{
    size_t unit = SW_ALIGNMENT_BYTES / element_bytes;
    size_t share = numel / (size_t)world_size + (numel % (size_t)world_size != 0);
    return (share + unit - 1) / unit * unit;
}

sw_status sw_comm_give_up(sw_comm *comm, sw_status status, sw_error *err, const char *format, ...)
{
    char why[384];
    sw_error reason;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why, sizeof why, format, arguments);
    va_end(arguments);
    int name = sw_comm_name(comm, comm->rank);
    sw_error_set(&reason, status, name, "rank %d gave up: %s", name, why);
    comm->ops->abort(comm, &reason);
    if (err)
        *err = reason;
    return status;
}

sw_status sw_comm_arena_differs(const sw_comm *comm, const char *label, uint64_t first_bytes,
                                int rank, uint64_t size_bytes, sw_error *err)
{
    return sw_error_set(err, SW_E_MISMATCH, sw_comm_name(comm, rank),
                        "arena '%s': rank %d asks for %llu bytes, rank %d for %llu", label,
                        sw_comm_name(comm, 0), (unsigned long long)first_bytes,
                        sw_comm_name(comm, rank), (unsigned long long)size_bytes);
}

const char *sw_op_kind_name(sw_op_kind kind)
{
    static const char *const names[SW_OP_KIND_COUNT] = {"barrier", "all_reduce", "reduce_scatter",
                                                        "all_gather", "broadcast"};
    return (unsigned)kind < SW_OP_KIND_COUNT ? names[kind] : "invalid";
}
