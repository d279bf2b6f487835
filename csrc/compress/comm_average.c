/* comm_average.c - see the header. */
#include "compress/comm_average.h"

#include <stdlib.h>
#include <string.h>

#include "comm/hier.h"
#include "compress/shared_exchange.h"

struct sw_comm_average {
    sw_comm *comm;          /* borrowed */
    sw_exchange *exchange;  /* owned; NULL over hosts */
    sw_arena *arena;        /* owned; NULL on one host, and before the first mean */
    size_t capacity;        /* elements; equal on all ranks */
    sw_compressor *pending; /* holds a reference; NULL: no mean is in flight */
    size_t number, numel;
    float *data; /* borrowed */
    uint32_t ticket;
};

sw_status sw_comm_average_create(sw_comm *comm, sw_comm_average **average, sw_error *err)
{
    sw_comm_average *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for a compressed mean");
    made->comm = comm;
    if (!comm->is_carried && sw_shared_exchange_create(comm, &made->exchange, err) != SW_OK) {
        free(made);
        return SW_E_MEMORY;
    }
    *average = made;
    return SW_OK;
}

static void forget(sw_comm_average *average)
{
    sw_compressor_release(average->pending);
    average->pending = NULL;
}

void sw_comm_average_destroy(sw_comm_average *average)
{
    if (!average)
        return;
    forget(average);
    sw_shared_exchange_destroy(average->exchange);
    if (average->arena)
        average->comm->ops->arena_destroy(average->comm, average->arena);
    free(average);
}

static sw_status post(sw_comm_average *average, const char *label, sw_error *err)
{
    sw_comm *comm = average->comm;
    if (average->numel > average->capacity) {
        if (average->arena)
            comm->ops->arena_destroy(comm, average->arena);
        average->arena = NULL;
        average->capacity = 0;
        SW_TRY(comm->ops->arena_create(comm, average->numel * sizeof(float), label, &average->arena,
                                       err));
        average->capacity = average->numel;
    }
    sw_op op = {.kind = SW_OP_ALL_REDUCE,
                .dtype = SW_DTYPE_FLOAT32,
                .redop = SW_REDOP_MEAN,
                .numel = average->numel,
                .arena = average->arena,
                .codec = sw_compressor_codec(average->pending),
                .codec_bucket = average->number};
    sw_op_set_label(&op, label);
    memcpy(average->arena->base[comm->rank], average->data, average->numel * sizeof(float));
    return comm->ops->post(comm, &op, &average->ticket, err);
}

sw_status sw_comm_average_begin(sw_comm_average *average, sw_compressor *compressor, size_t number,
                                float *data, size_t numel, const char *label, sw_error *err)
{
    if (average->pending)
        SW_FAIL(err, SW_E_STATE, "a compressed mean was begun while another is in flight");
    sw_compressor_codec(compressor)->ops->acquire(sw_compressor_codec(compressor));
    average->pending = compressor;
    average->number = number;
    average->data = data;
    average->numel = numel;
    sw_status status = average->exchange || numel == 0 ? SW_OK : post(average, label, err);
    if (status != SW_OK)
        forget(average);
    return status;
}

static sw_status finish(sw_comm_average *average, sw_error *err)
{
    sw_comm *comm = average->comm;
    if (average->numel == 0)
        return SW_OK;
    if (average->exchange)
        return sw_compressor_average_bucket(average->pending, average->number, 0, false,
                                            average->data, average->numel, SW_DTYPE_FLOAT32,
                                            average->exchange, err);
    SW_TRY(comm->ops->wait(comm, average->ticket, err));
    memcpy(average->data, average->arena->base[comm->rank], average->numel * sizeof(float));
    return SW_OK;
}

sw_status sw_comm_average_wait(sw_comm_average *average, sw_error *err)
{
    if (!average->pending)
        return SW_OK;
    sw_status status = finish(average, err);
    forget(average);
    return status;
}

bool sw_comm_average_is_in_flight(const sw_comm_average *average)
{
    return average->pending != NULL;
}

int sw_comm_average_world_size(const sw_comm_average *average)
{
    return average->exchange ? average->comm->world_size
                             : sw_hier_comm_map(average->comm)->host_count;
}
