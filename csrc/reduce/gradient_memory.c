/* gradient_memory.c - see the header. */
#include "reduce/gradient_memory.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "comm/comm.h"
#include "platform/limits.h"
#include "platform/memory.h"

const char *sw_transport_name(sw_transport transport)
{
    static const char *const names[] = {"auto", "pool", "staged"};
    return (unsigned)transport < 3 ? names[transport] : "invalid";
}

/* Map private pages on every rank, or return the same error on every rank. */
static sw_status make_private(sw_gradient_memory *memory, const char *label, sw_error *err)
{
    sw_error cause = {.message = ""};
    sw_status local = sw_limits_check_memory(memory->size_bytes, label, &cause);
    if (local == SW_OK)
        local = sw_pages_map(memory->size_bytes, &memory->base, &cause);
    return sw_agree(memory->comm, "gradient memory", label, memory->size_bytes, local, &cause, err);
}

/* Report a rank without memory for its slices; the others have already created theirs. */
static sw_status make_results(sw_gradient_memory *memory, const sw_gradient_sizes *sizes,
                              const char *label, sw_error *err)
{
    size_t size_bytes = sizes->results;
    sw_error cause;
    memory->result_bytes = size_bytes;
    if (memory->comm->is_carried || sizes->results_mapped) {
        SW_TRY(memory->comm->ops->arena_create(memory->comm, size_bytes, label,
                                               &memory->result_arena, err));
        memory->results = memory->result_arena->base[memory->comm->rank];
        return SW_OK;
    }
    if (sw_limits_check_memory(size_bytes, label, &cause) != SW_OK ||
        sw_pages_map(size_bytes, &memory->results, &cause) != SW_OK)
        return sw_comm_give_up(memory->comm, SW_E_MEMORY, err, "%s", cause.message);
    return SW_OK;
}

static sw_status make_buckets(sw_gradient_memory *memory, const sw_gradient_sizes *sizes,
                              sw_transport wanted, const char *label, sw_error *err)
{
    sw_comm *comm = memory->comm;
    memory->size_bytes = sw_size_max(sizes->pool, SW_ALIGNMENT_BYTES);
    if (wanted != SW_TRANSPORT_STAGED) {
        sw_error cause;
        sw_status status =
            comm->ops->arena_create(comm, memory->size_bytes, label, &memory->arena, &cause);
        if (status == SW_OK) {
            memory->transport = SW_TRANSPORT_POOL;
            memory->base = memory->arena->base[comm->rank];
            snprintf(memory->why, sizeof memory->why, "every rank maps every rank's buckets");
            return SW_OK;
        }
        if (status != SW_E_MEMORY || wanted == SW_TRANSPORT_POOL) {
            if (err)
                *err = cause;
            return status;
        }
        snprintf(memory->why, sizeof memory->why, "%s", cause.message);
    } else {
        snprintf(memory->why, sizeof memory->why, "asked for");
    }
    memory->transport = SW_TRANSPORT_STAGED;
    memory->size_bytes = sw_size_max(sizes->staged, SW_ALIGNMENT_BYTES);
    return make_private(memory, label, err);
}

sw_status sw_gradient_memory_create(sw_comm *comm, const sw_gradient_sizes *sizes,
                                    sw_transport wanted, const char *label,
                                    sw_gradient_memory **memory, sw_error *err)
{
    sw_status status;
    sw_gradient_memory *made = calloc(1, sizeof *made);
    if (!made)
        return sw_comm_give_up(comm, SW_E_MEMORY, err, "no memory for the gradients of '%s'",
                               label);
    made->comm = comm;
    SW_TRY_GOTO(status,
                comm->ops->mirror_create(comm, sw_size_max(sizes->trailers, SW_ALIGNMENT_BYTES),
                                         label, &made->trailers, err),
                destroy);
    SW_TRY_GOTO(status, make_buckets(made, sizes, wanted, label, err), destroy);
    if (sizes->results > 0 && made->transport == SW_TRANSPORT_POOL)
        SW_TRY_GOTO(status, make_results(made, sizes, label, err), destroy);
    *memory = made;
    return SW_OK;
destroy:
    sw_gradient_memory_destroy(made);
    return status;
}

void sw_gradient_memory_destroy(sw_gradient_memory *memory)
{
    if (!memory)
        return;
    memory->comm->ops->arena_destroy(memory->comm, memory->trailers);
    if (memory->transport == SW_TRANSPORT_STAGED)
        sw_memory_unmap(memory->base, memory->size_bytes);
    else
        memory->comm->ops->arena_destroy(memory->comm, memory->arena);
    if (memory->result_arena)
        memory->comm->ops->arena_destroy(memory->comm, memory->result_arena);
    else
        sw_memory_unmap(memory->results, memory->result_bytes);
    free(memory);
}
