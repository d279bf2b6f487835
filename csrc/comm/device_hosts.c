/* device_hosts.c - see device_hosts.h. */
#include "comm/device_hosts.h"

#include <stdlib.h>

#include "base/bytes.h"
#include "comm/hier.h"

enum { ALIGNMENT = 64 }; /* elements */

/* ---- the ranks that fold ---- */

bool sw_device_hosts_pay(const sw_host_map *map)
{
    return map && map->host_count > 1 && map->host_count < map->world_size;
}

const sw_host_map *sw_device_hosts_map(const sw_device_comm *comm)
{
    const sw_comm *host = comm->watchdog.host;
    bool is_same = host && host->is_carried && host->world_size == comm->peers->world_size;
    const sw_host_map *map = is_same ? sw_hier_comm_map(host) : NULL;
    return sw_device_hosts_pay(map) ? map : NULL;
}

/* Return the rank that folds the piece of `owner` on `host`. On the owner's host that is itself. */
static int folder(const sw_device_hosts *h, int host, int owner)
{
    return sw_host_members(&h->map, host)[h->local_of[owner] % sw_host_size(&h->map, host)];
}

/* Return the elements of a piece. If numel is no multiple of world_size, the last ones have fewer.
 */
static size_t share_of(const sw_device_hosts *h, size_t numel)
{
    size_t ranks = (size_t)h->map.world_size, share = numel / ranks;
    return numel % ranks == 0 ? share : (share + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
}

static size_t piece_numel(const sw_device_hosts *h, const sw_device_range *bucket)
{
    return share_of(h, bucket->numel);
}

static size_t piece_bytes(const sw_device_hosts *h, const sw_device_range *bucket)
{
    return piece_numel(h, bucket) * sw_dtype_size_bytes(bucket->dtype);
}

static char *piece_of(const sw_device_hosts *h, const sw_device_range *bucket, int owner)
{
    int piece = h->piece ? h->piece[owner] : owner;
    return (char *)bucket->data + (size_t)piece * piece_bytes(h, bucket);
}

/* Return the bytes of an owner's piece that there are. */
static size_t bytes_of(const sw_device_hosts *h, const sw_device_range *bucket, int owner)
{
    size_t total = bucket->numel * sw_dtype_size_bytes(bucket->dtype);
    size_t begin = (size_t)(piece_of(h, bucket, owner) - (char *)bucket->data);
    return begin < total ? sw_size_min(total - begin, piece_bytes(h, bucket)) : 0;
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
                               const int *piece, sw_error *err)
{
    *h = (sw_device_hosts){.comm = comm, .piece = piece};
    if (!comm->peers->ops->send)
        SW_FAIL(err, SW_E_UNSUPPORTED, "device reducer: %s between %d hosts", comm->peers->title,
                map->host_count);
    SW_TRY(sw_host_map_init(&h->map, map->host_of, map->world_size, err));
    return place_ranks(h, comm->peers->rank, err);
}

/* Bytes of contributions for pieces of `own` bytes, whose sums have `sum`. */
static size_t contribution_bytes(const sw_device_hosts *h, size_t own, size_t sum)
{
    size_t members = (size_t)sw_host_size(&h->map, h->host);
    return sw_size_max(members * h->folded_count * own,
                       ((size_t)h->map.host_count + h->folded_count) * sum);
}

sw_status sw_device_hosts_alloc(sw_device_hosts *h, size_t bytes, size_t numel, bool accumulates,
                                sw_error *err)
{
    sw_device *device = h->comm->device;
    size_t world_size = (size_t)h->map.world_size, own = bytes / world_size;
    size_t sum = sw_size_max(own, numel / world_size * sizeof(float));
    h->owns_memory = true;
    SW_TRY(
        device->ops->memory_alloc(device, contribution_bytes(h, own, sum), &h->contributions, err));
    SW_TRY(device->ops->memory_alloc(device, h->folded_count * sum, &h->sums, err));
    return accumulates
               ? device->ops->memory_alloc(device, h->folded_count * own, &h->accumulated, err)
               : SW_OK;
}

void sw_device_hosts_sizes(const sw_device_hosts *h, size_t numel, size_t *contributions,
                           size_t *sums)
{
    size_t own = share_of(h, numel) * sizeof(float);
    *contributions = contribution_bytes(h, own, own);
    *sums = h->folded_count * own;
}

void sw_device_hosts_fini(sw_device_hosts *h)
{
    if (!h->comm)
        return;
    sw_device *device = h->comm->device;
    if (h->owns_memory) {
        device->ops->memory_free(device, h->contributions);
        device->ops->memory_free(device, h->sums);
        device->ops->memory_free(device, h->accumulated);
    }
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
    sw_status status;
    sw_error *err;
} messages;

static sw_status begin(messages *m, const sw_device_hosts *h, sw_error *err)
{
    *m = (messages){.hosts = h, .err = err};
    return sw_peers_group_begin(h->comm->peers, err);
}

static void send(messages *m, const void *data, size_t bytes, int rank)
{
    if (m->status == SW_OK && bytes > 0)
        m->status =
            sw_peers_send(m->hosts->comm->peers, data, bytes, rank, m->hosts->comm->stream, m->err);
}

static void receive(messages *m, void *data, size_t bytes, int rank)
{
    if (m->status == SW_OK && bytes > 0)
        m->status = sw_peers_receive(m->hosts->comm->peers, data, bytes, rank,
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
    size_t bytes = piece_bytes(h, bucket);
    SW_TRY(begin(&m, h, err));
    for (int host = 0; host < h->map.host_count; ++host)
        if (host != h->host)
            send(&m, piece, bytes, folder(h, host, rank));
    for (size_t i = 0; i < h->folded_count; ++i)
        if (h->folded[i] != rank)
            receive(&m, into ? into + i * bytes : piece_of(h, bucket, h->folded[i]), bytes,
                    h->folded[i]);
    return end(&m);
}

/* Return the place of this rank's piece among those that it folds. */
static size_t own_place(const sw_device_hosts *h)
{
    size_t place = 0;
    while (h->folded[place] != h->comm->peers->rank)
        ++place;
    return place;
}

/* Send what this rank has for other owners to them, and put host g's for this rank at place g of
 * `received`. `data` has one place a piece that this rank folds, or `by_rank` one a rank. */
static sw_status send_home(const sw_device_hosts *h, const char *data, bool by_rank, size_t bytes,
                           char *received, sw_error *err)
{
    messages m;
    int rank = h->comm->peers->rank;
    SW_TRY(begin(&m, h, err));
    for (size_t i = 0; i < h->folded_count; ++i)
        if (h->folded[i] != rank)
            send(&m, data + (by_rank ? (size_t)h->folded[i] : i) * bytes, bytes, h->folded[i]);
    for (int host = 0; host < h->map.host_count; ++host)
        if (host != h->host)
            receive(&m, received + (size_t)host * bytes, bytes, folder(h, host, rank));
    return end(&m);
}

/* Send the ranks of this host, this one included, their pieces of the bucket, and receive theirs of
 * the pieces that this rank folds. */
static sw_status scatter_inside(const sw_device_hosts *h, const sw_device_range *bucket,
                                sw_error *err)
{
    messages m;
    char *to = h->contributions;
    size_t bytes = piece_bytes(h, bucket);
    SW_TRY(begin(&m, h, err));
    for (int owner = 0; owner < h->map.world_size; ++owner)
        send(&m, piece_of(h, bucket, owner), bytes_of(h, bucket, owner), folder(h, h->host, owner));
    for (int l = 0; l < sw_host_size(&h->map, h->host); ++l)
        for (size_t i = 0; i < h->folded_count; ++i, to += bytes)
            receive(&m, to, bytes_of(h, bucket, h->folded[i]),
                    sw_host_members(&h->map, h->host)[l]);
    return end(&m);
}

/* A rank alone on its host sends a piece to itself: every rank takes part in each operation. */
static sw_status gather_inside(const sw_device_hosts *h, const sw_device_range *bucket,
                               sw_error *err)
{
    messages m;
    int rank = h->comm->peers->rank, size = sw_host_size(&h->map, h->host);
    SW_TRY(begin(&m, h, err));
    for (int l = 0; l < size; ++l)
        for (size_t i = 0; l != h->local && i < h->folded_count; ++i)
            send(&m, piece_of(h, bucket, h->folded[i]), bytes_of(h, bucket, h->folded[i]),
                 sw_host_members(&h->map, h->host)[l]);
    for (int owner = 0; owner < h->map.world_size; ++owner)
        if (folder(h, h->host, owner) != rank)
            receive(&m, piece_of(h, bucket, owner), bytes_of(h, bucket, owner),
                    folder(h, h->host, owner));
    if (size == 1) {
        int first = h->folded[0]; /* not empty, unless all are */
        send(&m, piece_of(h, bucket, first), bytes_of(h, bucket, first), rank);
        receive(&m, piece_of(h, bucket, first), bytes_of(h, bucket, first), rank);
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
    size_t bytes = piece_bytes(h, bucket);
    if (!h->accumulated)
        SW_FAIL(err, SW_E_STATE, "device reducer: no memory for an accumulated mean");
    SW_TRY(send_out(h, bucket, piece, h->accumulated, err));
    return h->comm->device->ops->copy_async(h->comm->device,
                                            (char *)h->accumulated + own_place(h) * bytes, piece,
                                            bytes, h->comm->stream, err);
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
                         .widens = sum_dtype(bucket->dtype) != bucket->dtype};
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
    int hosts = h->map.host_count;
    bool is_narrow = wire != SW_DTYPE_COUNT;
    sw_dtype dtype = is_narrow ? wire : sum_dtype(bucket->dtype);
    size_t bytes = piece_numel(h, bucket) * sw_dtype_size_bytes(dtype);
    char *sums = is_narrow ? narrowed(h, bytes) : h->sums, *received = h->contributions;
    *fold = (sw_fold_args){.rest = received,
                           .numel = piece_numel(h, bucket),
                           .stride_bytes = bytes,
                           .dtype = (int)dtype,
                           .own = sums + own_place(h) * bytes,
                           .own_index = h->host,
                           .source_count = hosts};
    SW_TRY(send_home(h, sums, false, bytes, received, err));
    for (int host = 0; host < hosts; ++host) {
        h->takes_part[host] = !trains;
        for (int l = 0; trains && l < sw_host_size(&h->map, host); ++l)
            h->takes_part[host] |= trains[sw_host_members(&h->map, host)[l]];
    }
    return sw_fold_leave_out(h->comm, h->takes_part, hosts, fold, err);
}

/* ---- in the order of a stream ---- */

typedef struct request {
    const sw_device_hosts *hosts;
    const sw_device_range *range;
    void *data;
    size_t bytes;
    double scale;
} request;

static sw_status add_inside(void *context, sw_error *err)
{
    const request *r = context;
    const sw_device_hosts *h = r->hosts;
    sw_device *device = h->comm->device;
    size_t bytes = piece_bytes(h, r->range);
    SW_TRY(sw_device_hosts_fold(h, r->range, r->scale, NULL, NULL, 0, err));
    for (size_t i = 0; i < h->folded_count; ++i)
        if (bytes_of(h, r->range, h->folded[i]) > 0)
            SW_TRY(device->ops->copy_async(
                device, piece_of(h, r->range, h->folded[i]), (char *)h->sums + i * bytes,
                bytes_of(h, r->range, h->folded[i]), h->comm->stream, err));
    return gather_inside(h, r->range, err);
}

static sw_status exchange(void *context, sw_error *err)
{
    const request *r = context;
    return send_home(r->hosts, r->range->data, true, piece_bytes(r->hosts, r->range), r->data, err);
}

static sw_status gather_slices(void *context, sw_error *err)
{
    const request *r = context;
    return sw_device_hosts_gather(r->hosts, r->range, err);
}

static sw_status swap_inside(void *context, sw_error *err)
{
    const request *r = context;
    const sw_device_hosts *h = r->hosts;
    int size = sw_host_size(&h->map, h->host);
    char *data = r->data;
    messages m;
    SW_TRY(begin(&m, h, err));
    for (int l = 0; l < size; ++l) {
        if (l == h->local && size > 1)
            continue; /* alone, it sends to itself, as in gather_inside */
        send(&m, data + (size_t)h->local * r->bytes, r->bytes,
             sw_host_members(&h->map, h->host)[l]);
        receive(&m, data + (size_t)l * r->bytes, r->bytes, sw_host_members(&h->map, h->host)[l]);
    }
    return end(&m);
}

sw_status sw_device_hosts_add_inside(const sw_device_hosts *h, const sw_device_range *bucket,
                                     double scale, sw_stream *user, uint64_t *sent_bytes,
                                     sw_error *err)
{
    size_t own = 0, beside = (size_t)sw_host_size(&h->map, h->host) - 1;
    for (size_t i = 0; i < h->folded_count; ++i)
        own += bytes_of(h, bucket, h->folded[i]);
    *sent_bytes = bucket->numel * sizeof(float) - own + beside * own;
    return sw_device_comm_between(h->comm, user, add_inside,
                                  &(request){.hosts = h, .range = bucket, .scale = scale}, err);
}

sw_status sw_device_hosts_exchange(const sw_device_hosts *h, const sw_device_range *range,
                                   void *received, sw_stream *user, sw_error *err)
{
    return sw_device_comm_between(h->comm, user, exchange,
                                  &(request){.hosts = h, .range = range, .data = received}, err);
}

sw_status sw_device_hosts_gather_slices(const sw_device_hosts *h, const sw_device_range *range,
                                        sw_stream *user, sw_error *err)
{
    return sw_device_comm_between(h->comm, user, gather_slices,
                                  &(request){.hosts = h, .range = range}, err);
}

sw_status sw_device_hosts_swap_inside(const sw_device_hosts *h, void *data, size_t place_bytes,
                                      sw_stream *user, sw_error *err)
{
    return sw_device_comm_between(h->comm, user, swap_inside,
                                  &(request){.hosts = h, .data = data, .bytes = place_bytes}, err);
}
