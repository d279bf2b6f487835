/* shared_exchange.c - see the header. */
#include "compress/shared_exchange.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"

#define LABEL "compressed gradients"

typedef struct shared_exchange {
    sw_exchange base;      /* first */
    sw_comm *comm;         /* borrowed */
    sw_arena *arena;       /* owned; NULL before the first message */
    size_t capacity_bytes; /* of a slice; equal on all ranks */
    uint8_t *whole;        /* owned */
} shared_exchange;

static shared_exchange *shared_of(sw_exchange *exchange)
{
    return (shared_exchange *)(void *)exchange;
}

/* Collective when it grows: all ranks grow it in the same call. */
static sw_status reserve(shared_exchange *shared, size_t slice_bytes, sw_error *err)
{
    size_t ranks = (size_t)shared->base.world_size, bytes = slice_bytes * (ranks + 1);
    if (slice_bytes <= shared->capacity_bytes)
        return SW_OK;
    if (shared->arena)
        shared->comm->ops->arena_destroy(shared->comm, shared->arena);
    free(shared->whole);
    shared->arena = NULL;
    shared->capacity_bytes = 0;
    shared->whole = malloc(slice_bytes * ranks);
    if (!shared->whole)
        return sw_comm_give_up(shared->comm, SW_E_MEMORY, err, "no memory for %s", LABEL);
    SW_TRY(shared->comm->ops->arena_create(shared->comm, bytes, LABEL, &shared->arena, err));
    shared->capacity_bytes = slice_bytes;
    return SW_OK;
}

static sw_status begin(sw_exchange *exchange, uint8_t **message, uint8_t **result, sw_error *err)
{
    shared_exchange *shared = shared_of(exchange);
    SW_TRY(reserve(shared, exchange->slice_bytes, err));
    *result = shared->arena->base[exchange->rank];
    *message = *result + shared->capacity_bytes;
    return SW_OK;
}

static sw_status meet(shared_exchange *shared, sw_error *err)
{
    sw_op barrier = {.kind = SW_OP_BARRIER, .dtype = SW_DTYPE_UINT8, .label = LABEL};
    return shared->comm->ops->run(shared->comm, &barrier, err);
}

static sw_status scatter(sw_exchange *exchange, const void **pieces, sw_error *err)
{
    shared_exchange *shared = shared_of(exchange);
    SW_TRY(meet(shared, err));
    for (int r = 0; r < exchange->world_size; ++r)
        pieces[r] = shared->arena->base[r] + shared->capacity_bytes +
                    (size_t)exchange->rank * exchange->slice_bytes;
    return SW_OK;
}

static sw_status gather(sw_exchange *exchange, uint8_t **whole, sw_error *err)
{
    shared_exchange *shared = shared_of(exchange);
    SW_TRY(meet(shared, err));
    for (int r = 0; r < exchange->world_size; ++r)
        memcpy(shared->whole + (size_t)r * exchange->slice_bytes, shared->arena->base[r],
               exchange->slice_bytes);
    *whole = shared->whole;
    return SW_OK;
}

static sw_status agree(sw_exchange *exchange, bool *ok, sw_error *err)
{
    shared_exchange *shared = shared_of(exchange);
    uint8_t mine = *ok, all[SW_COMM_MAX_WORLD];
    SW_TRY(shared->comm->ops->gather(shared->comm, &mine, 1, all, LABEL, err));
    for (int r = 0; r < exchange->world_size; ++r)
        *ok &= all[r] != 0;
    return SW_OK;
}

static const sw_exchange_ops shared_ops = {
    .begin = begin, .scatter = scatter, .gather = gather, .agree = agree};

sw_status sw_shared_exchange_create(sw_comm *comm, sw_exchange **exchange, sw_error *err)
{
    shared_exchange *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "no memory for an exchange of compressed gradients");
    made->base =
        (sw_exchange){.ops = &shared_ops, .rank = comm->rank, .world_size = comm->world_size};
    made->comm = comm;
    *exchange = &made->base;
    return SW_OK;
}

void sw_shared_exchange_destroy(sw_exchange *exchange)
{
    shared_exchange *shared = exchange ? shared_of(exchange) : NULL;
    if (!shared)
        return;
    if (shared->arena)
        shared->comm->ops->arena_destroy(shared->comm, shared->arena);
    free(shared->whole);
    free(shared);
}
