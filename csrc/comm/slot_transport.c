/* slot_transport.c - operations as rounds of slots: see slot_transport.h. */
#include "comm/slot_transport.h"

#include <stdlib.h>

#include "comm/slot_state.h"

enum { ARRIVALS_MIN = 256, AT_ONCE_BYTES = 32768 };

static sw_slot_transport *slots_of(sw_peers *peers)
{
    return (sw_slot_transport *)(void *)peers;
}

/* ---- begin and end of every operation ---- */

static sw_status begin(sw_slot_transport *t, const sw_stream *stream, sw_error *err)
{
    SW_TRY(sw_slot_check(&t->base, err));
    if (stream != t->stream)
        SW_FAIL(err, SW_E_INVALID, "GPU slots on rank %d of %d: all operations must use one stream",
                t->base.rank, t->base.world_size);
    return SW_OK;
}

/* A failed driver call has left a round half enqueued; peers would wait for it. */
static sw_status finish(sw_slot_transport *t, sw_status status, const char *what,
                        const sw_error *cause, sw_error *err)
{
    if (status == SW_E_INTERRUPTED)
        return sw_error_pass(err, cause);
    return status == SW_OK ? SW_OK : sw_peers_fail_driver(&t->base, what, cause, err);
}

/* An operation outside a group forms its own group. */
static sw_status finish_moves(sw_slot_transport *t, sw_status status, const char *what,
                              sw_error *cause, sw_error *err)
{
    if (status == SW_OK && !t->is_grouped)
        status = sw_slot_close_round(t, cause);
    return finish(t, status, what, cause, err);
}

static sw_status slot_group_begin(sw_peers *base, sw_error *err)
{
    SW_TRY(sw_slot_check(base, err));
    slots_of(base)->is_grouped = true;
    return SW_OK;
}

static sw_status slot_group_end(sw_peers *base, sw_error *err)
{
    sw_error cause;
    sw_slot_transport *t = slots_of(base);
    t->is_grouped = false;
    SW_TRY(sw_slot_check(&t->base, err));
    return finish(t, sw_slot_close_round(t, &cause), "end of a group", &cause, err);
}

/* ---- moving ---- */

/* Send this rank's `piece` to its place in `data` on each other rank of `ranks` (NULL: all), and
 * receive theirs into their places here. */
static sw_status gather(sw_slot_transport *t, const char *piece, char *data, size_t slice_bytes,
                        const int *ranks, int count, sw_error *err)
{
    for (size_t done = 0, size; done < slice_bytes; done += size) {
        size_t at;
        SW_TRY(sw_slot_reserve(t, 1, slice_bytes - done, &size, &at, err));
        SW_TRY(sw_slot_put(t, at, piece + done, size, err));
        for (int k = 0; k < count; ++k) {
            int peer = ranks ? ranks[k] : k;
            if (peer != t->base.rank)
                sw_slot_get(t, peer, at, data + (size_t)k * slice_bytes + done, size);
        }
    }
    return SW_OK;
}

static sw_status gather_slices(sw_slot_transport *t, const void *slice, void *data,
                               size_t slice_bytes, sw_error *err)
{
    char *own = (char *)data + (size_t)t->base.rank * slice_bytes;
    if (own != slice)
        SW_TRY(t->base.device->ops->copy_async(t->base.device, own, slice, slice_bytes, t->stream,
                                               err));
    return t->base.world_size == 1
               ? SW_OK
               : gather(t, slice, data, slice_bytes, NULL, t->base.world_size, err);
}

static sw_status slot_gather_slices(sw_peers *base, const void *slice, void *data,
                                    size_t slice_bytes, sw_stream *stream, sw_error *err)
{
    sw_error cause;
    sw_slot_transport *t = slots_of(base);
    SW_TRY(begin(t, stream, err));
    sw_status status = gather_slices(t, slice, data, slice_bytes, &cause);
    return finish_moves(t, status, "all_gather", &cause, err);
}

static sw_status slot_gather_among(sw_peers *base, void *data, size_t slice_bytes, const int *ranks,
                                   int count, sw_stream *stream, sw_error *err)
{
    sw_error cause;
    sw_slot_transport *t = slots_of(base);
    const char *own = NULL;
    SW_TRY(begin(t, stream, err));
    for (int k = 0; k < count; ++k)
        if (ranks[k] == base->rank)
            own = (char *)data + (size_t)k * slice_bytes;
    if (count == 1)
        return SW_OK;
    sw_status status = gather(t, own, data, slice_bytes, ranks, count, &cause);
    return finish_moves(t, status, "gather", &cause, err);
}

static sw_status exchange(sw_slot_transport *t, const char *data, char *contributions,
                          size_t slice_bytes, const int *slice_of_rank, sw_error *err)
{
    int world_size = t->base.world_size, rank = t->base.rank;
    for (size_t done = 0, size; done < slice_bytes; done += size) {
        size_t at;
        SW_TRY(sw_slot_reserve(t, world_size, slice_bytes - done, &size, &at, err));
        for (int p = 0; p < world_size; ++p) {
            size_t slice = (size_t)(slice_of_rank ? slice_of_rank[p] : p);
            if (p == rank)
                continue;
            SW_TRY(sw_slot_put(t, at + (size_t)p * sw_slot_stride(size),
                               data + slice * slice_bytes + done, size, err));
            sw_slot_get(t, p, at + (size_t)rank * sw_slot_stride(size),
                        contributions + (size_t)p * slice_bytes + done, size);
        }
    }
    return SW_OK;
}

static sw_status slot_exchange_slices(sw_peers *base, const void *data, void *contributions,
                                      size_t slice_bytes, const int *slice_of_rank,
                                      sw_stream *stream, sw_error *err)
{
    sw_error cause;
    sw_slot_transport *t = slots_of(base);
    SW_TRY(begin(t, stream, err));
    if (base->world_size == 1)
        return SW_OK;
    sw_status status = exchange(t, data, contributions, slice_bytes, slice_of_rank, &cause);
    return finish_moves(t, status, "exchange of slices", &cause, err);
}

static sw_status broadcast(sw_slot_transport *t, char *data, size_t size_bytes, int root,
                           sw_error *err)
{
    for (size_t done = 0, size; done < size_bytes; done += size) {
        size_t at;
        SW_TRY(sw_slot_reserve(t, 1, size_bytes - done, &size, &at, err));
        if (t->base.rank == root)
            SW_TRY(sw_slot_put(t, at, data + done, size, err));
        else
            sw_slot_get(t, root, at, data + done, size);
    }
    return SW_OK;
}

static sw_status slot_broadcast(sw_peers *base, void *data, size_t size_bytes, int root,
                                sw_stream *stream, sw_error *err)
{
    sw_error cause;
    sw_slot_transport *t = slots_of(base);
    SW_TRY(begin(t, stream, err));
    if (root < 0 || root >= base->world_size)
        SW_FAIL(err, SW_E_INVALID, "GPU slots: broadcast: root must be in [0, %d), not %d",
                base->world_size, root);
    if (base->world_size == 1)
        return SW_OK;
    sw_status status = broadcast(t, data, size_bytes, root, &cause);
    return finish_moves(t, status, "broadcast", &cause, err);
}

/* ---- reducing ---- */

typedef struct reduction {
    sw_dtype dtype;
    sw_redop op;
    size_t element_bytes;
} reduction;

/* Fold `own` and the peers' places of the staging memory into `to`. */
static sw_status fold(sw_slot_transport *t, const reduction *how, const void *own, void *to,
                      size_t numel, size_t stride_bytes, sw_error *err)
{
    sw_fold_args args = {.to = to,
                         .own = own,
                         .rest = t->staging,
                         .numel = numel,
                         .stride_bytes = stride_bytes,
                         .scale = 1.0 / t->base.world_size,
                         .dtype = (int)how->dtype,
                         .op = (int)how->op,
                         .own_index = t->base.rank,
                         .source_count = t->base.world_size};
    return numel ? sw_kernel_launch(t->kernels, SW_KERNEL_FOLD, &args, t->stream, err) : SW_OK;
}

static char *staged(const sw_slot_transport *t, int peer, size_t stride_bytes)
{
    return (char *)t->staging + (size_t)peer * stride_bytes;
}

static sw_status reduce_scatter(sw_slot_transport *t, const char *data, char *to,
                                size_t slice_bytes, const reduction *how, sw_error *err)
{
    int world_size = t->base.world_size, rank = t->base.rank;
    for (size_t done = 0, size; done < slice_bytes; done += size) {
        size_t at;
        SW_TRY(sw_slot_close_round(t, err)); /* fold staged pieces before the next ones */
        SW_TRY(sw_slot_reserve(t, world_size, slice_bytes - done, &size, &at, err));
        size_t stride = sw_slot_stride(size);
        for (int p = 0; p < world_size; ++p) {
            if (p == rank)
                continue;
            SW_TRY(sw_slot_put(t, at + (size_t)p * stride, data + (size_t)p * slice_bytes + done,
                               size, err));
            sw_slot_get(t, p, at + (size_t)rank * stride, staged(t, p, stride), size);
        }
        SW_TRY(sw_slot_close_round(t, err));
        SW_TRY(fold(t, how, data + (size_t)rank * slice_bytes + done, to + done,
                    size / how->element_bytes, stride, err));
    }
    return SW_OK;
}

/* Few bytes: every rank gets all of them and folds by itself. */
static sw_status reduce_at_once(sw_slot_transport *t, char *data, size_t size_bytes,
                                const reduction *how, sw_error *err)
{
    size_t size, at, stride = sw_slot_stride(size_bytes);
    SW_TRY(sw_slot_reserve(t, 1, size_bytes, &size, &at, err));
    SW_TRY(sw_slot_put(t, at, data, size_bytes, err));
    for (int p = 0; p < t->base.world_size; ++p)
        if (p != t->base.rank)
            sw_slot_get(t, p, at, staged(t, p, stride), size_bytes);
    SW_TRY(sw_slot_close_round(t, err));
    return fold(t, how, data, data, size_bytes / how->element_bytes, stride, err);
}

/* Return the start of piece `p` of `size_bytes` that are cut every `piece_bytes`. */
static size_t cut(size_t size_bytes, size_t piece_bytes, int p)
{
    size_t begins = (size_t)p * piece_bytes;
    return begins < size_bytes ? begins : size_bytes;
}

/* Reduce at most a slot's bytes in two rounds: pieces to their owners, results to all ranks. */
static sw_status reduce_in_two(sw_slot_transport *t, char *data, size_t size_bytes,
                               size_t piece_bytes, const reduction *how, sw_error *err)
{
    int world_size = t->base.world_size, rank = t->base.rank;
    size_t size, at, own = cut(size_bytes, piece_bytes, rank);
    size_t own_bytes = cut(size_bytes, piece_bytes, rank + 1) - own;
    SW_TRY(sw_slot_reserve(t, 1, size_bytes, &size, &at, err));
    SW_TRY(sw_slot_put(t, at, data, size_bytes, err));
    for (int p = 0; p < world_size; ++p)
        if (p != rank)
            sw_slot_get(t, p, at + own, staged(t, p, piece_bytes), own_bytes);
    SW_TRY(sw_slot_close_round(t, err));
    SW_TRY(fold(t, how, data + own, data + own, own_bytes / how->element_bytes, piece_bytes, err));
    SW_TRY(sw_slot_reserve(t, 1, piece_bytes, &size, &at, err));
    SW_TRY(sw_slot_put(t, at, data + own, own_bytes, err));
    for (int p = 0; p < world_size; ++p) {
        size_t begins = cut(size_bytes, piece_bytes, p);
        if (p != rank)
            sw_slot_get(t, p, at, data + begins, cut(size_bytes, piece_bytes, p + 1) - begins);
    }
    return sw_slot_close_round(t, err);
}

static sw_status all_reduce(sw_slot_transport *t, char *data, size_t size_bytes,
                            const reduction *how, sw_error *err)
{
    size_t world_size = (size_t)t->base.world_size, unit = SW_SLOT_PIECE_ALIGNMENT;
    size_t most = t->slot_bytes / world_size / unit * unit; /* longest piece */
    SW_TRY(sw_slot_close_round(t, err));
    if (sw_slot_stride(size_bytes) <= most && size_bytes * (world_size - 1) <= AT_ONCE_BYTES)
        return reduce_at_once(t, data, size_bytes, how, err);
    for (size_t done = 0, size; done < size_bytes; done += size) {
        size_t left = size_bytes - done;
        size_t piece = sw_slot_stride((left + world_size - 1) / world_size);
        piece = piece < most ? piece : most;
        size = left < piece * world_size ? left : piece * world_size;
        SW_TRY(reduce_in_two(t, data + done, size, piece, how, err));
    }
    return SW_OK;
}

static sw_status begin_reduction(sw_slot_transport *t, const reduction *how,
                                 const sw_stream *stream, sw_error *err)
{
    SW_TRY(begin(t, stream, err));
    return sw_redop_check(how->op, how->dtype, err);
}

static sw_status slot_all_reduce(sw_peers *base, void *data, size_t numel, sw_dtype dtype,
                                 sw_redop op, sw_stream *stream, sw_error *err)
{
    sw_error cause;
    sw_slot_transport *t = slots_of(base);
    reduction how = {dtype, op, sw_dtype_size_bytes(dtype)};
    SW_TRY(begin_reduction(t, &how, stream, err));
    if (base->world_size == 1 || numel == 0)
        return SW_OK;
    sw_status status = all_reduce(t, data, numel * how.element_bytes, &how, &cause);
    return finish(t, status, "all_reduce", &cause, err);
}

static sw_status slot_reduce_scatter(sw_peers *base, const void *data, void *to, size_t slice_numel,
                                     sw_dtype dtype, sw_redop op, sw_stream *stream, sw_error *err)
{
    sw_error cause;
    sw_slot_transport *t = slots_of(base);
    reduction how = {dtype, op, sw_dtype_size_bytes(dtype)};
    size_t slice_bytes = slice_numel * how.element_bytes;
    SW_TRY(begin_reduction(t, &how, stream, err));
    if (slice_numel == 0 || (base->world_size == 1 && to == data))
        return SW_OK;
    sw_status status =
        base->world_size == 1
            ? base->device->ops->copy_async(base->device, to, data, slice_bytes, t->stream, &cause)
            : reduce_scatter(t, data, to, slice_bytes, &how, &cause);
    return finish(t, status, "reduce_scatter", &cause, err);
}

/* ---- life ---- */

static void free_all(sw_slot_transport *t)
{
    free(t->part);
    free(t->mapped);
    free(t->slots);
    free(t->opened);
    free(t->arrival);
    free(t);
}

/* Let enqueued operations run. */
static sw_status end_stream(sw_slot_transport *t)
{
    SW_TRY(t->base.device->ops->event_record(t->base.device, t->ended, t->stream, NULL));
    return sw_peers_await(&t->base, t->ended, "the end", NULL);
}

static void slot_destroy(sw_peers *base)
{
    sw_slot_transport *t = slots_of(base);
    if (sw_peers_has_failed(&t->base) || end_stream(t) != SW_OK)
        sw_slot_drain(t, t->base.timeout_ns);
    sw_slot_memory_fini(t);
    free_all(t);
}

static const sw_peers_ops slot_ops = {
    .group_begin = slot_group_begin,
    .group_end = slot_group_end,
    .all_reduce = slot_all_reduce,
    .reduce_scatter = slot_reduce_scatter,
    .gather_slices = slot_gather_slices,
    .exchange_slices = slot_exchange_slices,
    .gather_among = slot_gather_among,
    .broadcast = slot_broadcast,
    .check = sw_slot_check,
    .end = sw_slot_end,
    .look = sw_slot_look,
    .end_beside = sw_slot_end_beside,
    .destroy = slot_destroy,
};

static sw_status check_config(const sw_slot_config *config, sw_error *err)
{
    int world_size = config->world_size;
    if (world_size < 1 || world_size > SW_SLOT_MAX_WORLD || config->rank < 0 ||
        config->rank >= world_size)
        SW_FAIL(err, SW_E_INVALID,
                "GPU slots: rank must be in [0, world_size) and world_size in [1, %d], not %d of "
                "%d",
                SW_SLOT_MAX_WORLD, config->rank, world_size);
    if (config->parts.slot_bytes < 64 * (size_t)world_size ||
        config->parts.slot_bytes % SW_SLOT_PAGE_BYTES != 0)
        SW_FAIL(err, SW_E_INVALID,
                "GPU slots: slot_bytes must be a multiple of %d and at least %d, not %zu",
                SW_SLOT_PAGE_BYTES, 64 * world_size, config->parts.slot_bytes);
    return SW_OK;
}

static sw_slot_transport *make(const sw_slot_config *config)
{
    size_t count = (size_t)config->world_size;
    sw_slot_transport *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    *t = (sw_slot_transport){.base = {.ops = &slot_ops,
                                      .title = "GPU slots",
                                      .rank = config->rank,
                                      .world_size = config->world_size,
                                      .device = config->device,
                                      .timeout_ns = config->timeout_ns,
                                      .watchdog = config->watchdog},
                             .kernels = config->kernels,
                             .stream = config->stream,
                             .slot_bytes = config->parts.slot_bytes,
                             .arrival_max = 4 * count > ARRIVALS_MIN ? 4 * count : ARRIVALS_MIN,
                             .part = calloc(count, sizeof(uint8_t *)),
                             .mapped = calloc(count, sizeof(uint8_t *)),
                             .slots = calloc(count, sizeof(uint8_t *)),
                             .opened = calloc(count, sizeof(uint8_t *))};
    t->arrival = calloc(t->arrival_max, sizeof *t->arrival);
    if (!t->part || !t->mapped || !t->slots || !t->opened || !t->arrival) {
        free_all(t);
        return NULL;
    }
    for (size_t p = 0; p < count; ++p)
        t->part[p] = config->parts.base[p];
    return t;
}

/* The peers wait for this rank in their creation and read its part: report the failure there. */
static void report_failure(const sw_slot_config *config, const sw_error *reason)
{
    sw_slot_head *own = (sw_slot_head *)(void *)config->parts.base[config->rank];
    sw_ending_record(&own->ending, SW_MEMBER_ENDED, reason);
    sw_watchdog_report(config->watchdog, reason);
    sw_watchdog_report_to_hosts(config->watchdog);
}

sw_status sw_slot_transport_create(const sw_slot_config *config, sw_peers **peers, sw_error *err)
{
    sw_error cause = {0};
    SW_TRY(check_config(config, err));
    sw_slot_transport *t = make(config);
    if (!t) {
        sw_error_set(&cause, SW_E_MEMORY, -1, "GPU slots on rank %d of %d: no memory", config->rank,
                     config->world_size);
        report_failure(config, &cause);
        return sw_error_pass(err, &cause);
    }
    sw_status status = sw_slot_memory_init(t, config->parts.place, &cause);
    status = finish(t, status, "creation", &cause, err);
    if (status != SW_OK) {
        slot_destroy(&t->base);
        return status;
    }
    t->base.link = SW_LINK_SHARED_MEMORY;
    t->base.name = t->own_slots ? "ipc" : "shm";
    *peers = &t->base;
    return SW_OK;
}
