/* agree.c - see the header. */
#include "comm/agree.h"

#include <stdio.h>
#include <stdlib.h>

#include "platform/limits.h"

typedef struct verdict {
    uint64_t size_bytes;
    sw_memory_need need;
    uint32_t failed;
    int32_t code; /* errno; 0: another failure */
    char message[208];
} verdict;

_Static_assert(sizeof(verdict) == 256, "one chunk even when hosts gather it from 16,384 ranks");

static sw_status compare(const sw_comm *comm, const char *noun, const char *label,
                         const verdict *all, sw_error *err)
{
    for (int r = 1; r < comm->world_size; ++r)
        if (all[r].size_bytes != all[0].size_bytes)
            return sw_comm_arena_differs(comm, label, all[0].size_bytes, r, all[r].size_bytes, err);
    for (int r = 0; r < comm->world_size; ++r) {
        int name = sw_comm_name(comm, r);
        if (all[r].failed && noun)
            return sw_error_set(err, SW_E_MEMORY, name, "%s '%s' is not possible on rank %d: %s",
                                noun, label, name, all[r].message);
        if (all[r].failed)
            return sw_error_set(err, all[r].code ? SW_E_OS : SW_E_MEMORY,
                                all[r].code ? all[r].code : name, "%s", all[r].message);
    }
    return sw_limits_check_needs(&all[0].need, sizeof *all, comm->world_size, label, err);
}

sw_status sw_agree(sw_comm *comm, const char *noun, const char *label, size_t size_bytes,
                   sw_status local, const sw_error *cause, sw_error *err)
{
    verdict mine = {.size_bytes = size_bytes, .failed = local != SW_OK};
    verdict *all = calloc((size_t)comm->world_size, sizeof *all);
    if (!all)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory to agree on %s '%s'",
                               noun ? noun : "arena", label);
    if (noun)
        sw_limits_read_need(size_bytes, sw_comm_name(comm, comm->rank), &mine.need);
    if (local != SW_OK)
        snprintf(mine.message, sizeof mine.message, "%.207s", cause->message);
    if (local == SW_E_OS && !noun)
        mine.code = (int32_t)cause->detail;
    sw_status status = comm->ops->gather(comm, &mine, sizeof mine, all, label, err);
    if (status == SW_OK)
        status = compare(comm, noun, label, all, err);
    free(all);
    return status;
}
