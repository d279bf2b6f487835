/* lone_rank.c - see lone_rank.h. */
#include "comm/lone_rank.h"

#include <stdlib.h>

static sw_status check(sw_peers *peers, sw_error *err)
{
    return peers->is_failing ? sw_ending_await(&peers->ending, err)
                             : sw_peers_check_request(peers, err);
}

static sw_status copy(sw_peers *peers, const void *from, void *to, size_t size_bytes,
                      sw_stream *stream, sw_error *err)
{
    sw_error cause;
    SW_TRY(check(peers, err));
    if (from == to || size_bytes == 0)
        return SW_OK;
    if (peers->device->ops->copy_async(peers->device, to, from, size_bytes, stream, &cause) !=
        SW_OK)
        return sw_peers_fail_driver(peers, "a copy", &cause, err);
    return SW_OK;
}

static sw_status lone_all_reduce(sw_peers *peers, void *data, size_t numel, sw_dtype dtype,
                                 sw_redop op, sw_stream *stream, sw_error *err)
{
    (void)data, (void)numel, (void)stream;
    SW_TRY(sw_redop_check(op, dtype, err));
    return check(peers, err);
}

static sw_status lone_reduce_scatter(sw_peers *peers, const void *data, void *to,
                                     size_t slice_numel, sw_dtype dtype, sw_redop op,
                                     sw_stream *stream, sw_error *err)
{
    SW_TRY(sw_redop_check(op, dtype, err));
    return copy(peers, data, to, slice_numel * sw_dtype_size_bytes(dtype), stream, err);
}

static sw_status lone_all_gather(sw_peers *peers, void *data, size_t slice_numel, sw_dtype dtype,
                                 sw_stream *stream, sw_error *err)
{
    (void)data, (void)slice_numel, (void)dtype, (void)stream;
    return check(peers, err);
}

static sw_status lone_gather_slices(sw_peers *peers, const void *slice, void *data,
                                    size_t slice_bytes, sw_stream *stream, sw_error *err)
{
    return copy(peers, slice, data, slice_bytes, stream, err);
}

static sw_status lone_exchange_slices(sw_peers *peers, const void *data, void *contributions,
                                      size_t slice_numel, sw_dtype dtype, const int *slice_of_rank,
                                      sw_stream *stream, sw_error *err)
{
    (void)data, (void)contributions, (void)slice_numel, (void)dtype;
    (void)slice_of_rank, (void)stream;
    return check(peers, err);
}

static sw_status lone_gather_among(sw_peers *peers, void *data, size_t slice_bytes,
                                   const int *ranks, int count, sw_stream *stream, sw_error *err)
{
    (void)data, (void)slice_bytes, (void)ranks, (void)count, (void)stream;
    return check(peers, err);
}

static sw_status lone_broadcast(sw_peers *peers, void *data, size_t numel, sw_dtype dtype, int root,
                                sw_stream *stream, sw_error *err)
{
    (void)data, (void)numel, (void)dtype, (void)stream;
    if (root != 0)
        SW_FAIL(err, SW_E_INVALID, "broadcast of one rank: root must be 0, not %d", root);
    return check(peers, err);
}

static void lone_end(sw_peers *peers, const sw_error *reason)
{
    (void)reason;
    atomic_store(&peers->has_failed, true);
}

static sw_status lone_look(sw_peers *peers, sw_error *reason)
{
    (void)peers, (void)reason;
    return SW_OK;
}

static void lone_end_beside(sw_peers *peers, const sw_error *reason)
{
    sw_error first;
    (void)!sw_peers_report(peers, reason, &first);
    lone_end(peers, reason);
}

static void lone_destroy(sw_peers *peers)
{
    free(peers);
}

static const sw_peers_ops lone_ops = {
    .group_begin = check,
    .group_end = check,
    .all_reduce = lone_all_reduce,
    .reduce_scatter = lone_reduce_scatter,
    .all_gather = lone_all_gather,
    .gather_slices = lone_gather_slices,
    .exchange_slices = lone_exchange_slices,
    .gather_among = lone_gather_among,
    .broadcast = lone_broadcast,
    .check = check,
    .end = lone_end,
    .look = lone_look,
    .end_beside = lone_end_beside,
    .destroy = lone_destroy,
};

sw_status sw_lone_rank_create(sw_device *device, int64_t timeout_ns, sw_watchdog *watchdog,
                              sw_peers **peers, sw_error *err)
{
    sw_peers *made = calloc(1, sizeof *made);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "a rank without peers: no memory for %zu bytes", sizeof *made);
    *made = (sw_peers){.ops = &lone_ops,
                       .name = "one rank",
                       .title = "a GPU without peers",
                       .world_size = 1,
                       .device = device,
                       .timeout_ns = timeout_ns,
                       .watchdog = watchdog};
    *peers = made;
    return SW_OK;
}
