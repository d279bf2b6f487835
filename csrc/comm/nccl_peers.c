/* nccl_peers.c - NCCL behind peers.h's table: each entry is the call of nccl.h. */
#include <stdlib.h>

#include "comm/nccl_register.h"
#include "comm/peers.h"

typedef struct nccl_peers {
    sw_peers base;
    sw_nccl *nccl; /* owned */
} nccl_peers;

static sw_nccl *nccl_of(const sw_peers *peers)
{
    return ((const nccl_peers *)(const void *)peers)->nccl;
}

static sw_status nccl_group_begin(sw_peers *t, sw_error *err)
{
    return sw_nccl_group_begin(nccl_of(t), err);
}

static sw_status nccl_group_end(sw_peers *t, sw_error *err)
{
    return sw_nccl_group_end(nccl_of(t), err);
}

static sw_status nccl_all_reduce(sw_peers *t, void *data, size_t numel, sw_dtype dtype, sw_redop op,
                                 sw_stream *stream, sw_error *err)
{
    return sw_nccl_all_reduce(nccl_of(t), data, numel, dtype, op, stream, err);
}

static sw_status nccl_reduce_scatter(sw_peers *t, void *data, size_t slice_numel, sw_dtype dtype,
                                     sw_redop op, sw_stream *stream, sw_error *err)
{
    return sw_nccl_reduce_scatter(nccl_of(t), data, slice_numel, dtype, op, stream, err);
}

static sw_status nccl_all_gather(sw_peers *t, void *data, size_t slice_numel, sw_dtype dtype,
                                 sw_stream *stream, sw_error *err)
{
    return sw_nccl_all_gather(nccl_of(t), data, slice_numel, dtype, stream, err);
}

static sw_status nccl_gather_slices(sw_peers *t, const void *slice, void *data, size_t slice_bytes,
                                    sw_stream *stream, sw_error *err)
{
    return sw_nccl_gather_slices(nccl_of(t), slice, data, slice_bytes, stream, err);
}

static sw_status nccl_exchange_slices(sw_peers *t, const void *data, void *contributions,
                                      size_t slice_numel, sw_dtype dtype, const int *slice_of_rank,
                                      sw_stream *stream, sw_error *err)
{
    return sw_nccl_exchange_slices(nccl_of(t), data, contributions, slice_numel, dtype,
                                   slice_of_rank, stream, err);
}

static sw_status nccl_gather_among(sw_peers *t, void *data, size_t slice_bytes, const int *ranks,
                                   int count, sw_stream *stream, sw_error *err)
{
    return sw_nccl_gather_among(nccl_of(t), data, slice_bytes, ranks, count, stream, err);
}

static sw_status nccl_broadcast(sw_peers *t, void *data, size_t numel, sw_dtype dtype, int root,
                                sw_stream *stream, sw_error *err)
{
    return sw_nccl_broadcast(nccl_of(t), data, numel, dtype, root, stream, err);
}

static sw_status nccl_memory_register(sw_peers *t, void *memory, size_t size_bytes,
                                      void **registered, sw_error *err)
{
    if (t->is_borrowed)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "NCCL on rank %d of %d: nothing is registered with a communicator that is borrowed",
                t->rank, t->world_size);
    return sw_nccl_register(nccl_of(t), memory, size_bytes, registered, err);
}

static sw_status nccl_memory_deregister(sw_peers *t, void *registered, sw_error *err)
{
    return sw_nccl_deregister(nccl_of(t), registered, err);
}

static sw_status nccl_wait(sw_peers *t, sw_event *event, const char *what, sw_error *err)
{
    return sw_nccl_wait(nccl_of(t), event, what, err);
}

static sw_status nccl_check(sw_peers *t, sw_error *err)
{
    return sw_nccl_check(nccl_of(t), err);
}

static sw_status nccl_give_up(sw_peers *t, const char *what, sw_error *err)
{
    return sw_nccl_give_up(nccl_of(t), what, err);
}

static bool nccl_has_failed(const sw_peers *t)
{
    return sw_nccl_has_failed(nccl_of(t));
}

static void nccl_abort(sw_peers *t, const sw_error *reason)
{
    sw_nccl_abort(nccl_of(t), reason);
}

static void nccl_request_end(sw_peers *t, const sw_error *reason)
{
    sw_nccl_request_end(nccl_of(t), reason);
}

static sw_status nccl_watch(sw_peers *t, sw_error *err)
{
    return sw_nccl_watch(nccl_of(t), err);
}

static void nccl_explain_late(const sw_peers *t, const char *what, sw_error *reason)
{
    sw_nccl_explain_late(nccl_of(t), what, reason);
}

static void nccl_destroy(sw_peers *t)
{
    sw_nccl_destroy(nccl_of(t));
    free(t);
}

static const sw_peers_ops nccl_ops = {
    .group_begin = nccl_group_begin,
    .group_end = nccl_group_end,
    .all_reduce = nccl_all_reduce,
    .reduce_scatter = nccl_reduce_scatter,
    .all_gather = nccl_all_gather,
    .gather_slices = nccl_gather_slices,
    .exchange_slices = nccl_exchange_slices,
    .gather_among = nccl_gather_among,
    .broadcast = nccl_broadcast,
    .memory_register = nccl_memory_register,
    .memory_deregister = nccl_memory_deregister,
    .wait = nccl_wait,
    .check = nccl_check,
    .give_up = nccl_give_up,
    .has_failed = nccl_has_failed,
    .abort = nccl_abort,
    .request_end = nccl_request_end,
    .watch = nccl_watch,
    .explain_late = nccl_explain_late,
    .destroy = nccl_destroy,
};

/* Takes what has been created or borrowed; it is not lost where there is no memory for more. */
static sw_status wrap(sw_nccl *nccl, sw_peers **peers, sw_error *err)
{
    nccl_peers *made = calloc(1, sizeof *made);
    if (!made) {
        sw_nccl_destroy(nccl);
        SW_FAIL(err, SW_E_MEMORY, "NCCL: no memory for %zu bytes", sizeof *made);
    }
    made->base = (sw_peers){.ops = &nccl_ops,
                            .name = "nccl",
                            .rank = sw_nccl_rank(nccl),
                            .world_size = sw_nccl_world_size(nccl),
                            .is_borrowed = sw_nccl_is_borrowed(nccl),
                            .rounds_divisor = true};
    made->nccl = nccl;
    *peers = &made->base;
    return SW_OK;
}

sw_status sw_nccl_peers_create(const sw_nccl_library *nccl, sw_device *device, const sw_nccl_id *id,
                               int rank, int world_size, int64_t timeout_ns, sw_lookout *lookout,
                               sw_peers **peers, sw_error *err)
{
    sw_nccl *made;
    SW_TRY(sw_nccl_create(nccl, device, id, rank, world_size, timeout_ns, lookout, &made, err));
    return wrap(made, peers, err);
}

sw_status sw_nccl_peers_borrow(const sw_nccl_library *nccl, sw_device *device, sw_nccl_comm handle,
                               int rank, int world_size, int64_t timeout_ns, sw_lookout *lookout,
                               sw_peers **peers, sw_error *err)
{
    sw_nccl *made;
    SW_TRY(sw_nccl_borrow(nccl, device, handle, rank, world_size, timeout_ns, lookout, &made, err));
    return wrap(made, peers, err);
}
