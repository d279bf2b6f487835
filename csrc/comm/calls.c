/* calls.c - see the header. */
#include "comm/calls.h"

#include "comm/descriptor.h"

sw_status sw_comm_barrier(sw_comm *comm, const char *label, sw_error *err)
{
    sw_op op = {.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8};
    sw_op_set_label(&op, label);
    return comm->ops->run(comm, &op, err);
}

sw_status sw_comm_all_gather(sw_comm *comm, sw_op *op, const sw_span *ranges, size_t count,
                             sw_error *err)
{
    uint32_t ticket = 0;
    op->kind = SW_OP_ALL_GATHER;
    op->dtype = SW_DTYPE_UINT8;
    for (size_t pass = 0; pass < 2; ++pass)
        for (size_t i = 0; i < count; ++i) {
            op->offset_bytes = ranges[i].offset_bytes;
            op->numel = ranges[i].size_bytes;
            SW_TRY(pass == 0 ? sw_op_check(op, comm->world_size, err)
                             : comm->ops->post(comm, op, &ticket, err));
        }
    return count > 0 ? comm->ops->wait(comm, ticket, err) : SW_OK;
}
