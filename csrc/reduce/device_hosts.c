/* device_hosts.c - see device_hosts.h. */
#include "reduce/device_hosts.h"

#include <stdlib.h>

#include "base/bytes.h"

/* ---- who folds what ---- */

bool sw_device_hosts_pay(const sw_host_map *map)
{
    return map && map->host_count > 1 && map->host_count < map->world_size;
}

/* Return the rank that folds the piece of `owner` on `host`. On the owner's host that is itself. */
static int folder(const sw_device_hosts *h, int host, int owner)
{
    return sw_host_members(&h->map, host)[h->local_of[owner] % sw_host_size(&h->map, host)];
}

static size_t piece_numel(const sw_device_hosts *h, const sw_device_range *bucket)
{
    return bucket->numel / (size_t)h->map.world_size;
}

static size_t piece_bytes(const sw_device_hosts *h, const sw_device_range *bucket)
{
    return piece_numel(h, bucket) * sw_dtype_size_bytes(bucket->dtype);
}

static char *piece_of(const sw_device_hosts *h, const sw_device_range *bucket, int owner)
{
    return (char *)bucket->data + (size_t)h->piece[owner] * piece_bytes(h, bucket);
}

static sw_dtype sum_dtype(sw_dtype dtype)
{
    bool is_half = dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
    return is_half ? SW_DTYPE_FLOAT32 : dtype;
}

/* ---- life ---- */

static sw_status place_ranks(sw_device_hosts *h, int rank, sw_error *err)
{
    int world_size = h->map.world_size;
    h->local_of = calloc((size_t)world_size, sizeof *h->local_of);
    h->folded = calloc((size_t)world_size, sizeof *h->folded);
    h->takes_part = malloc((size_t)world_size);
    if (!h->local_of || !h->folded || !h->takes_part)
        SW_FAIL(err, SW_E_MEMORY, "device reducer: no memory for %d ranks", world_size);
    for (int host = 0; host < h->map.host_count; ++host)
        for (int l = 0; l < sw_host_size(&h->map, host); ++l)
            h->local_of[sw_host_members(&h->map, host)[l]] = l;
    h->host = h->map.host_of[rank];
    h->local = h->local_of[rank];
    for (int owner = 0; owner < world_size; ++owner)
        if (folder(h, h->host, owner) == rank)
            h->folded[h->folded_count++] = owner;
    return SW_OK;
}

sw_status sw_device_hosts_init(sw_device_hosts *h, sw_device_comm *comm, const sw_host_map *map,
                               const int *piece, size_t bytes, size_t numel, bool accumulates,
                               sw_error *err)
{
    const sw_device_ops *ops = comm->device->ops;
    size_t world_size = (size_t)map->world_size, hosts = (size_t)map->host_count;
    *h = (sw_device_hosts){.comm = comm, .piece = piece};
    if (!comm->peers->ops->send)
        SW_FAIL(err, SW_E_UNSUPPORTED, "device reducer: %s between %zu hosts", comm->peers->title,
                hosts);
    SW_TRY(sw_host_map_init(&h->map, map->host_of, map->world_size, err));
    SW_TRY(place_ranks(h, comm->peers->rank, err));
    size_t own = bytes / world_size, sum = sw_size_max(bytes, numel * sizeof(float)) / world_size;
    size_t members = (size_t)sw_host_size(map, h->host), count = h->folded_count;
    SW_TRY(ops->memory_alloc(comm->device,
                             sw_size_max(members * count * own, (hosts + count) * sum),
                             &h->contributions, err));
    SW_TRY(ops->memory_alloc(comm->device, count * sum, &h->sums, err));
    return accumulates ? ops->memory_alloc(comm->device, count * own, &h->accumulated, err) : SW_OK;
}

void sw_device_hosts_fini(sw_device_hosts *h)
{
    if (!h->comm)
        return;
    sw_device *device = h->comm->device;
    device->ops->memory_free(device, h->contributions);
    device->ops->memory_free(device, h->sums);
    device->ops->memory_free(device, h->accumulated);
    sw_host_map_fini(&h->map);
    free(h->local_of);
    free(h->folded);
    free(h->takes_part);
}

/* ---- messages ---- */

/* Messages of one group. The first failure stops it, and the group is closed all the same: it must
 * not include later operations of the thread. */
typedef struct messages {
    const sw_device_hosts *hosts;
    size_t size_bytes; /* of each */
    sw_status status;
    sw_error *err;
} messages;

static sw_status begin(messages *m, const sw_device_hosts *h, size_t size_bytes, sw_error *err)
{
    *m = (messages){.hosts = h, .size_bytes = size_bytes, .err = err};
    return sw_peers_group_begin(h->comm->peers, err);
}

static void send(messages *m, const void *data, int rank)
{
    if (m->status == SW_OK && m->size_bytes > 0)
        m->status = sw_peers_send(m->hosts->comm->peers, data, m->size_bytes, rank,
                                  m->hosts->comm->stream, m->err);
}

static void receive(messages *m, void *data, int rank)
{
    if (m->status == SW_OK && m->size_bytes > 0)
        m->status = sw_peers_receive(m->hosts->comm->peers, data, m->size_bytes, rank,
                                     m->hosts->comm->stream, m->err);
}

static sw_status end(const messages *m)
{
    sw_status ended = sw_peers_group_end(m->hosts->comm->peers, m->status == SW_OK ? m->err : NULL);
    return m->status != SW_OK ? m->status : ended;
}

/* Owners send `piece` to those that fold it on other hosts, which put it at `into`, `stride` bytes
 * apart or, if it is 0, at the owner's piece of `bucket`. */
static sw_status send_out(const sw_device_hosts *h, const sw_device_range *bucket,
                          const void *piece, char *into, sw_error *err)
{
    messages m;
    int rank = h->comm->peers->rank;
    SW_TRY(begin(&m, h, piece_bytes(h, bucket), err));
    for (int host = 0; host < h->map.host_count; ++host)
        if (host != h->host)
            send(&m, piece, folder(h, host, rank));
    for (size_t i = 0; i < h->folded_count; ++i)
        if (h->folded[i] != rank)
            receive(&m, into ? into + i * m.size_bytes : piece_of(h, bucket, h->folded[i]),
                    h->folded[i]);
    return end(&m);
}

/* Send the ranks of this host, this one included, their pieces of the bucket, and receive theirs of
 * the pieces that this rank folds. */
static sw_status scatter_inside(const sw_device_hosts *h, const sw_device_range *bucket,
                                sw_error *err)
{
    messages m;
    char *to = h->contributions;
    SW_TRY(begin(&m, h, piece_bytes(h, bucket), err));
    for (int owner = 0; owner < h->map.world_size; ++owner)
        send(&m, piece_of(h, bucket, owner), folder(h, h->host, owner));
    for (int l = 0; l < sw_host_size(&h->map, h->host); ++l)
        for (size_t i = 0; i < h->folded_count; ++i, to += m.size_bytes)
            receive(&m, to, sw_host_members(&h->map, h->host)[l]);
    return end(&m);
}

/* A rank alone on its host sends its piece to itself: every rank takes part in each operation. */
static sw_status gather_inside(const sw_device_hosts *h, const sw_device_range *bucket,
                               sw_error *err)
{
    messages m;
    int rank = h->comm->peers->rank, size = sw_host_size(&h->map, h->host);
    SW_TRY(begin(&m, h, piece_bytes(h, bucket), err));
    for (int l = 0; l < size; ++l)
        for (size_t i = 0; l != h->local && i < h->folded_count; ++i)
            send(&m, piece_of(h, bucket, h->folded[i]), sw_host_members(&h->map, h->host)[l]);
    for (int owner = 0; owner < h->map.world_size; ++owner)
        if (folder(h, h->host, owner) != rank)
            receive(&m, piece_of(h, bucket, owner), folder(h, h->host, owner));
    if (size == 1) {
        send(&m, piece_of(h, bucket, rank), rank);
        receive(&m, piece_of(h, bucket, rank), rank);
    }
    return end(&m);
}

sw_status sw_device_hosts_gather(const sw_device_hosts *h, const sw_device_range *bucket,
                                 sw_error *err)
{
    SW_TRY(send_out(h, bucket, piece_of(h, bucket, h->comm->peers->rank), NULL, err));
    return gather_inside(h, bucket, err);
}

sw_status sw_device_hosts_lend(const sw_device_hosts *h, const sw_device_range *bucket,
                               const void *piece, sw_error *err)
{
    size_t own = 0, bytes = piece_bytes(h, bucket);
    while (h->folded[own] != h->comm->peers->rank)
        ++own;
    SW_TRY(send_out(h, bucket, piece, h->accumulated, err));
    return h->comm->device->ops->copy_async(h->comm->device, (char *)h->accumulated + own * bytes,
                                            piece, bytes, h->comm->stream, err);
}

/* ---- folds ---- */

static sw_status launch(const sw_device_hosts *h, sw_kernel kernel, const void *args, sw_error *err)
{
    return sw_kernel_launch(&h->comm->kernels, kernel, args, h->comm->stream, err);
}

sw_status sw_fold_leave_out(const sw_device_comm *comm, const uint8_t *trains, int count,
                            sw_fold_args *fold, sw_error *err)
{
    sw_device *device = comm->device;
    int own = fold->own_index, place = 0;
    size_t stride = (size_t)fold->stride_bytes;
    char *base = (char *)(uintptr_t)fold->rest;
    fold->own_index = -1;
    for (int k = 0; k < count; ++k) {
        if (!trains[k])
            continue;
        if (k == own)
            fold->own_index = place;
        else if (k != place)
            SW_TRY(device->ops->copy_async(device, base + (size_t)place * stride,
                                           base + (size_t)k * stride, stride, comm->stream, err));
        ++place;
    }
    fold->source_count = place;
    return SW_OK;
}

/* Fold elements [begin, end) of the folded pieces. */
static sw_status fold_run(const sw_device_hosts *h, const sw_fold_args *whole, size_t begin,
                          size_t end, const void *under, sw_error *err)
{
    size_t bytes = sw_dtype_size_bytes((sw_dtype)whole->dtype);
    sw_fold_args fold = *whole;
    if (begin >= end)
        return SW_OK;
    fold.to = (char *)whole->to + begin * sw_dtype_size_bytes(sum_dtype((sw_dtype)whole->dtype));
    fold.rest = (const char *)whole->rest + begin * bytes;
    fold.addend = under ? (const char *)under + begin * bytes : NULL;
    fold.numel = end - begin;
    return launch(h, SW_KERNEL_FOLD, &fold, err);
}

sw_status sw_device_hosts_fold(const sw_device_hosts *h, const sw_device_range *bucket,
                               double scale, const uint8_t *trains, const sw_device_run *runs,
                               size_t run_count, sw_error *err)
{
    sw_device *device = h->comm->device;
    int size = sw_host_size(&h->map, h->host);
    size_t numel = h->folded_count * piece_numel(h, bucket), at = 0;
    sw_fold_args fold = {.to = h->sums,
                         .rest = h->contributions,
                         .numel = numel,
                         .stride_bytes = h->folded_count * piece_bytes(h, bucket),
                         .scale = scale,
                         .dtype = (int)bucket->dtype,
                         .op = scale == 1.0 ? (int)SW_REDOP_SUM : (int)SW_REDOP_MEAN,
                         .own_index = -1,
                         .source_count = size,
                         .widens = true};
    SW_TRY(scatter_inside(h, bucket, err));
    for (int l = 0; l < size; ++l)
        h->takes_part[l] = !trains || trains[sw_host_members(&h->map, h->host)[l]];
    SW_TRY(sw_fold_leave_out(h->comm, h->takes_part, size, &fold, err));
    if (fold.source_count == 0) /* it is sent, and no one reads it */
        return device->ops->fill_async(device, h->sums, 0,
                                       numel * sw_dtype_size_bytes(sum_dtype(bucket->dtype)),
                                       h->comm->stream, err);
    for (size_t i = 0; i < run_count; ++i) {
        SW_TRY(fold_run(h, &fold, at, runs[i].begin, NULL, err));
        SW_TRY(fold_run(h, &fold, runs[i].begin, runs[i].end, h->accumulated, err));
        at = runs[i].end;
    }
    return fold_run(h, &fold, at, numel, NULL, err);
}

/* Sums in the wire's dtype lie behind the hosts' sums, which arrive in the place of the
 * contributions. */
static char *narrowed(const sw_device_hosts *h, size_t bytes)
{
    return (char *)h->contributions + (size_t)h->map.host_count * bytes;
}

sw_status sw_device_hosts_narrow(const sw_device_hosts *h, const sw_device_range *bucket,
                                 sw_dtype wire, float scale, sw_error *err)
{
    size_t numel = piece_numel(h, bucket);
    sw_cast_args args = {.to = narrowed(h, numel * sw_dtype_size_bytes(wire)),
                         .from = h->sums,
                         .numel = h->folded_count * numel,
                         .scale = scale,
                         .to_dtype = (int)wire,
                         .from_dtype = (int)SW_DTYPE_FLOAT32};
    return launch(h, SW_KERNEL_CAST, &args, err);
}

sw_status sw_device_hosts_meet(const sw_device_hosts *h, const sw_device_range *bucket,
                               sw_dtype wire, const uint8_t *trains, sw_fold_args *fold,
                               sw_error *err)
{
    messages m;
    int rank = h->comm->peers->rank, hosts = h->map.host_count;
    bool is_narrow = wire != SW_DTYPE_COUNT;
    sw_dtype dtype = is_narrow ? wire : sum_dtype(bucket->dtype);
    size_t bytes = piece_numel(h, bucket) * sw_dtype_size_bytes(dtype);
    char *sums = is_narrow ? narrowed(h, bytes) : h->sums, *received = h->contributions;
    *fold = (sw_fold_args){.rest = received,
                           .numel = piece_numel(h, bucket),
                           .stride_bytes = bytes,
                           .dtype = (int)dtype,
                           .own_index = h->host,
                           .source_count = hosts};
    SW_TRY(begin(&m, h, bytes, err));
    for (size_t i = 0; i < h->folded_count; ++i) {
        if (h->folded[i] == rank)
            fold->own = sums + i * bytes;
        else
            send(&m, sums + i * bytes, h->folded[i]);
    }
    for (int host = 0; host < hosts; ++host)
        if (host != h->host)
            receive(&m, received + (size_t)host * bytes, folder(h, host, rank));
    SW_TRY(end(&m));
    for (int host = 0; host < hosts; ++host) {
        h->takes_part[host] = !trains;
        for (int l = 0; trains && l < sw_host_size(&h->map, host); ++l)
            h->takes_part[host] |= trains[sw_host_members(&h->map, host)[l]];
    }
    return sw_fold_leave_out(h->comm, h->takes_part, hosts, fold, err);
}
