/* device_mean.c - see device_mean.h. */
#include "reduce/device_mean.h"

#include <stdlib.h>
#include <string.h>

/* ---- life ---- */

/* Slice s of a bucket is the pieces from s * replicas on, one for each of its owners. */
static sw_status create_pieces(sw_device_mean *m, const sw_slices *slices, sw_error *err)
{
    int world_size = m->comm->peers->world_size, rank = m->comm->peers->rank;
    m->slice_count = slices ? slices->count : world_size;
    int replicas = world_size / m->slice_count;
    m->piece = calloc((size_t)world_size, sizeof *m->piece);
    m->owners = calloc((size_t)replicas, sizeof *m->owners);
    m->trains = malloc((size_t)world_size);
    if (!m->piece || !m->owners || !m->trains)
        SW_FAIL(err, SW_E_MEMORY, "device reducer: no memory for %d ranks", world_size);
    m->active = world_size;
    memset(m->trains, 1, (size_t)world_size);
    for (int k = 0; k < world_size; ++k)
        m->piece[k] = slices ? slices->of_rank[k] * replicas + slices->replica_of_rank[k] : k;
    for (int k = 0; k < world_size; ++k)
        if (m->piece[k] / replicas == m->piece[rank] / replicas)
            m->owners[m->piece[k] % replicas] = k;
    return SW_OK;
}

/* If means are slices, rows and columns must be those of the slices. */
static sw_status bind_mesh(sw_device_mean *m, const sw_device_mean_config *config, sw_error *err)
{
    const sw_peers *all = config->comm->peers;
    const sw_slices *slices = config->slices;
    if (!config->row && !config->column)
        return SW_OK;
    if (!config->row || !config->column || !config->row->peers || !config->column->peers ||
        config->row->stream != config->comm->stream ||
        config->column->stream != config->comm->stream ||
        config->row->peers->world_size * config->column->peers->world_size != all->world_size ||
        (slices && (config->row->peers->world_size != slices->count ||
                    config->row->peers->rank != slices->of_rank[all->rank])))
        SW_FAIL(
            err, SW_E_INVALID,
            "device reducer: rank %d of %d must be in a row and a column of one mesh, connected "
            "on one stream, with the slice of its place in the row",
            all->rank, all->world_size);
    m->row = config->row;
    m->column = config->column;
    return SW_OK;
}

/* Make the memory of form 2. */
static sw_status begin_to_fold(sw_device_mean *m, sw_error *err)
{
    sw_device *device = m->comm->device;
    if (!sw_device_hosts_pay(m->map))
        return device->ops->memory_alloc(device, m->bytes, &m->contributions, err);
    bool accumulates = m->is_sliced && m->wire == SW_DTYPE_COUNT;
    sw_status status = sw_device_hosts_init(&m->hosts, m->comm, m->map, m->piece, err);
    if (status == SW_OK)
        status = sw_device_hosts_alloc(&m->hosts, m->bytes, m->numel, accumulates, err);
    if (status != SW_OK) { /* a later round may try again */
        sw_device_hosts_fini(&m->hosts);
        m->hosts = (sw_device_hosts){.comm = NULL};
    }
    m->contributions = m->hosts.contributions;
    return status;
}

sw_status sw_device_mean_init(sw_device_mean *m, const sw_device_mean_config *config, sw_error *err)
{
    sw_device *device = config->comm->device;
    const sw_device_ops *ops = device->ops;
    int world_size = config->comm->peers->world_size;
    *m = (sw_device_mean){.comm = config->comm,
                          .op = config->op,
                          .divisor = world_size,
                          .wire = config->wire,
                          .map = config->hosts,
                          .is_sliced = config->is_sliced,
                          .numel = config->numel,
                          .bytes = config->bytes};
    SW_TRY(create_pieces(m, config->slices, err));
    bool is_compressed = m->wire != SW_DTYPE_COUNT;
    bool is_shared = m->slice_count < world_size && !config->row;
    m->folds = is_compressed || (world_size > 1 && (config->folds || is_shared));
    if (!m->folds)
        SW_TRY(bind_mesh(m, config, err));
    if (is_compressed)
        SW_TRY(ops->memory_alloc(device, config->numel * sw_dtype_size_bytes(m->wire),
                                 &m->compressed, err));
    return m->folds ? begin_to_fold(m, err) : SW_OK;
}

void sw_device_mean_fini(sw_device_mean *m)
{
    if (!m->comm)
        return;
    if (!m->hosts.comm)
        m->comm->device->ops->memory_free(m->comm->device, m->contributions);
    sw_device_hosts_fini(&m->hosts);
    m->comm->device->ops->memory_free(m->comm->device, m->compressed);
    free(m->trains);
    free(m->piece);
    free(m->owners);
}

sw_status sw_device_mean_leave_out(sw_device_mean *m, const uint8_t *trains, sw_error *err)
{
    int world_size = m->comm->peers->world_size, active = 0;
    for (int k = 0; k < world_size; ++k)
        active += trains[k] != 0;
    if (active == 0)
        SW_FAIL(err, SW_E_INVALID, "device reducer: at least one of %d ranks must train",
                world_size);
    if (active < world_size && !m->contributions)
        SW_TRY(begin_to_fold(m, err));
    memcpy(m->trains, trains, (size_t)world_size);
    m->active = active;
    return SW_OK;
}

/* ---- common to all forms ---- */

bool sw_device_mean_goes_by_rows(const sw_device_mean *m)
{
    return m->row && !m->contributions;
}

/* Elements that a rank reduces: a slice, or its piece of a slice with several owners. */
static size_t piece_numel(const sw_device_mean *m, const sw_device_range *bucket)
{
    const sw_peers *peers = sw_device_mean_goes_by_rows(m) ? m->row->peers : m->comm->peers;
    return bucket->numel / (size_t)peers->world_size;
}

static void *own_piece(const sw_device_mean *m, const sw_device_range *bucket)
{
    size_t piece_bytes = piece_numel(m, bucket) * sw_dtype_size_bytes(bucket->dtype);
    int own = sw_device_mean_goes_by_rows(m) ? m->row->peers->rank : m->piece[m->comm->peers->rank];
    return (char *)bucket->data + (size_t)own * piece_bytes;
}

static sw_status launch(const sw_device_mean *m, sw_kernel kernel, const void *args, sw_error *err)
{
    return sw_kernel_launch(&m->comm->kernels, kernel, args, m->comm->stream, err);
}

static sw_status exchange(const sw_device_mean *m, const sw_device_range *bucket, sw_error *err)
{
    return sw_peers_exchange_slices(m->comm->peers, bucket->data, m->contributions,
                                    piece_numel(m, bucket), bucket->dtype, m->piece,
                                    m->comm->stream, err);
}

/* Set the arguments of the fold of this rank's piece of the bucket into `to`: from the exchanged
 * pieces, or from the piece alone if the transport has reduced it. */
static sw_fold_args fold_of(const sw_device_mean *m, const sw_device_range *bucket, sw_redop op,
                            void *to)
{
    bool is_ours = m->contributions;
    return (sw_fold_args){.to = to,
                          .own = own_piece(m, bucket),
                          .rest = m->contributions,
                          .numel = piece_numel(m, bucket),
                          .stride_bytes =
                              piece_numel(m, bucket) * sw_dtype_size_bytes(bucket->dtype),
                          .scale = 1.0 / m->divisor,
                          .dtype = (int)bucket->dtype,
                          .op = is_ours ? (int)op : (int)SW_REDOP_SUM,
                          .own_index = is_ours ? m->comm->peers->rank : 0,
                          .source_count = is_ours ? m->comm->peers->world_size : 1};
}

/* Exchange pieces and fold this rank's in place. */
static sw_status fold_in_place(const sw_device_mean *m, const sw_device_range *bucket, sw_redop op,
                               sw_error *err)
{
    sw_fold_args fold = fold_of(m, bucket, op, own_piece(m, bucket));
    SW_TRY(exchange(m, bucket, err));
    return launch(m, SW_KERNEL_FOLD, &fold, err);
}

static sw_status cast(const sw_device_mean *m, void *to, sw_dtype to_dtype, const void *from,
                      sw_dtype from_dtype, size_t numel, float scale, sw_error *err)
{
    sw_cast_args args = {.to = to,
                         .from = from,
                         .numel = numel,
                         .scale = scale,
                         .to_dtype = (int)to_dtype,
                         .from_dtype = (int)from_dtype};
    return launch(m, SW_KERNEL_CAST, &args, err);
}

/* Return true if CAST and PACK can multiply this dtype. */
static bool is_small_float(sw_dtype dtype)
{
    return dtype == SW_DTYPE_FLOAT32 || dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16;
}

static bool is_narrowed(const sw_device_mean *m, sw_dtype dtype)
{
    return m->wire != SW_DTYPE_COUNT && is_small_float(dtype);
}

static sw_device_range narrowed_of(const sw_device_mean *m, const sw_device_range *bucket)
{
    return (sw_device_range){.data = m->compressed, .numel = bucket->numel, .dtype = m->wire};
}

/* Turn a mean over all ranks into one over those that contribute, rounded once more. */
static sw_status rescale(const sw_device_mean *m, void *mean, sw_dtype dtype, size_t numel,
                         sw_error *err)
{
    int world_size = m->comm->peers->world_size;
    float factor = (float)((double)world_size / m->divisor);
    return m->divisor == world_size ? SW_OK : cast(m, mean, dtype, mean, dtype, numel, factor, err);
}

/* ---- over hosts ---- */

static bool goes_by_hosts(const sw_device_mean *m)
{
    return m->hosts.comm != NULL;
}

/* Fold what hosts sent into `to`, which has another dtype than the sums if those are wider. */
static sw_status fold_hosts(const sw_device_mean *m, const sw_device_range *bucket, sw_redop op,
                            void *to, sw_error *err)
{
    sw_fold_args fold;
    SW_TRY(sw_device_hosts_meet(&m->hosts, bucket, SW_DTYPE_COUNT, m->trains, &fold, err));
    bool is_wider = fold.dtype != (int)bucket->dtype;
    fold.to = is_wider ? m->hosts.sums : to;
    fold.op = (int)op;
    fold.scale = 1.0 / m->divisor;
    SW_TRY(launch(m, SW_KERNEL_FOLD, &fold, err));
    return is_wider
               ? cast(m, to, bucket->dtype, fold.to, (sw_dtype)fold.dtype, fold.numel, 1.0f, err)
               : SW_OK;
}

/* Round each host's mean to the wire's dtype and fold those into this rank's piece of `wire`. */
static sw_status narrow_hosts(const sw_device_mean *m, const sw_device_range *bucket,
                              const sw_device_range *wire, sw_error *err)
{
    const sw_device_hosts *h = &m->hosts;
    sw_fold_args fold;
    double share = (double)h->map.host_count / h->map.world_size;
    SW_TRY(sw_device_hosts_fold(h, bucket, share, NULL, NULL, 0, err));
    SW_TRY(sw_device_hosts_narrow(h, bucket, wire->dtype, (float)(1.0 / h->map.host_count), err));
    SW_TRY(sw_device_hosts_meet(h, bucket, wire->dtype, NULL, &fold, err));
    fold.to = own_piece(m, wire);
    fold.op = (int)SW_REDOP_SUM;
    return launch(m, SW_KERNEL_FOLD, &fold, err);
}

/* ---- whole ---- */

static sw_status gather(const sw_device_mean *m, const sw_device_range *bucket, sw_error *err)
{
    return goes_by_hosts(m)
               ? sw_device_hosts_gather(&m->hosts, bucket, err)
               : sw_peers_all_gather(m->comm->peers, bucket->data, piece_numel(m, bucket),
                                     bucket->dtype, m->comm->stream, err);
}

/* Fold the bucket's mean, or sum, into this rank's piece. */
static sw_status fold_piece(const sw_device_mean *m, const sw_device_range *bucket, sw_redop op,
                            sw_error *err)
{
    if (!goes_by_hosts(m))
        return fold_in_place(m, bucket, op, err);
    SW_TRY(sw_device_hosts_fold(&m->hosts, bucket, 1.0, m->trains, NULL, 0, err));
    return fold_hosts(m, bucket, op, own_piece(m, bucket), err);
}

/* Fold the bucket in the wire's dtype into this rank's piece of *wire. */
static sw_status fold_narrowed(const sw_device_mean *m, const sw_device_range *bucket,
                               sw_device_range *wire, sw_error *err)
{
    *wire = narrowed_of(m, bucket);
    if (goes_by_hosts(m))
        return narrow_hosts(m, bucket, wire, err);
    SW_TRY(cast(m, wire->data, wire->dtype, bucket->data, bucket->dtype, bucket->numel,
                (float)(1.0 / m->comm->peers->world_size), err));
    return fold_in_place(m, wire, SW_REDOP_SUM, err);
}

static sw_status reduce_narrowed(const sw_device_mean *m, const sw_device_range *bucket,
                                 sw_error *err)
{
    sw_device_range wire;
    SW_TRY(fold_narrowed(m, bucket, &wire, err));
    SW_TRY(gather(m, &wire, err));
    SW_TRY(cast(m, bucket->data, bucket->dtype, wire.data, wire.dtype, bucket->numel, 1.0f, err));
    return rescale(m, bucket->data, bucket->dtype, bucket->numel, err);
}

/* Return true if the transport adds contributions that were multiplied by 1 / divisor. The factor
 * is a float32, and each product is rounded once. NCCL's own mean would first round the factor to
 * the dtype: in bfloat16 1 / 3 is 0.2 % too large, for every element. */
static bool takes_products(const sw_device_mean *m, sw_dtype dtype)
{
    const sw_peers *peers = m->comm->peers;
    return peers->rounds_divisor && peers->world_size > 1 && m->op == SW_REDOP_MEAN &&
           !m->contributions && !is_narrowed(m, dtype) && is_small_float(dtype);
}

float sw_device_mean_prescale(const sw_device_mean *m, sw_dtype dtype)
{
    return takes_products(m, dtype) ? (float)(1.0 / m->divisor) : 1.0f;
}

static sw_redop transport_op(const sw_device_mean *m, sw_dtype dtype)
{
    return takes_products(m, dtype) ? SW_REDOP_SUM : m->op;
}

/* Return true if the sum is divided after the transport, whose own mean has a fixed divisor. */
static bool divides_sum(const sw_device_mean *m, sw_dtype dtype)
{
    return transport_op(m, dtype) == SW_REDOP_MEAN && m->divisor != m->comm->peers->world_size;
}

bool sw_device_mean_is_one_call(const sw_device_mean *m, sw_dtype dtype)
{
    return m->comm->peers->world_size > 1 && !m->contributions && !is_narrowed(m, dtype) &&
           !divides_sum(m, dtype) && !sw_device_mean_goes_by_rows(m);
}

static sw_status check_row(const sw_device_mean *m, sw_error *err)
{
    if (!m->row->peers || !m->column->peers)
        SW_FAIL(err, SW_E_STATE, "device reducer: the communicators of the mesh were closed");
    return SW_OK;
}

/* Reduce this rank's slice of the bucket in the row, then in the column, into `to`. */
static sw_status reduce_by_rows(const sw_device_mean *m, const sw_device_range *bucket, sw_redop op,
                                void *to, sw_error *err)
{
    size_t numel = piece_numel(m, bucket);
    SW_TRY(check_row(m, err));
    SW_TRY(sw_peers_reduce_scatter(m->row->peers, bucket->data, to, numel, bucket->dtype, op,
                                   m->comm->stream, err));
    return sw_peers_all_reduce(m->column->peers, to, numel, bucket->dtype, op, m->comm->stream,
                               err);
}

static sw_status reduce_whole(const sw_device_mean *m, const sw_device_range *bucket, sw_redop op,
                              sw_error *err)
{
    if (!sw_device_mean_goes_by_rows(m))
        return sw_peers_all_reduce(m->comm->peers, bucket->data, bucket->numel, bucket->dtype, op,
                                   m->comm->stream, err);
    SW_TRY(reduce_by_rows(m, bucket, op, own_piece(m, bucket), err));
    return sw_peers_all_gather(m->row->peers, bucket->data, piece_numel(m, bucket), bucket->dtype,
                               m->comm->stream, err);
}

/* Reduce in the transport's own order. */
static sw_status reduce_at_once(const sw_device_mean *m, const sw_device_range *bucket,
                                sw_error *err)
{
    sw_redop op = transport_op(m, bucket->dtype);
    bool is_own = !divides_sum(m, bucket->dtype);
    sw_fold_args scaled = {.to = bucket->data,
                           .own = bucket->data,
                           .numel = bucket->numel,
                           .scale = 1.0 / m->divisor,
                           .dtype = (int)bucket->dtype,
                           .op = (int)SW_REDOP_MEAN,
                           .source_count = 1};
    SW_TRY(reduce_whole(m, bucket, is_own ? op : SW_REDOP_SUM, err));
    return is_own ? SW_OK : launch(m, SW_KERNEL_FOLD, &scaled, err);
}

sw_status sw_device_mean_whole(const sw_device_mean *m, const sw_device_range *bucket,
                               sw_error *err)
{
    if (is_narrowed(m, bucket->dtype))
        return reduce_narrowed(m, bucket, err);
    if (m->comm->peers->world_size == 1)
        return SW_OK;
    if (!m->contributions)
        return reduce_at_once(m, bucket, err);
    SW_TRY(fold_piece(m, bucket, m->op, err));
    return gather(m, bucket, err);
}

/* ---- a slice ---- */

typedef struct slicing {
    const sw_device_mean *mean; /* borrowed */
    sw_fold_args fold;          /* fold of the piece, or with `wire` of the narrowed
                                 * contributions */
    void *piece;                /* the piece in the slice */
    sw_dtype dtype;             /* dtype of the slice */
    const void *narrowed;       /* the piece's sum in the wire's dtype; NULL: `fold` makes it */
    bool is_made;               /* the piece already is its mean */
} slicing;

static void *behind(const void *at, size_t numel, sw_dtype dtype)
{
    return at ? (char *)at + numel * sw_dtype_size_bytes(dtype) : NULL;
}

/* Fold elements [begin, end) from the contributions. */
static sw_status fold_run(const slicing *s, size_t begin, size_t end, bool is_accumulated,
                          sw_error *err)
{
    sw_fold_args fold = s->fold;
    fold.to = behind(s->piece, begin, s->dtype);
    fold.own = behind(fold.own, begin, s->dtype);
    fold.rest = behind(fold.rest, begin, s->dtype);
    fold.numel = end - begin;
    fold.addend = is_accumulated ? fold.to : NULL;
    return launch(s->mean, SW_KERNEL_FOLD, &fold, err);
}

/* Widen them from the narrowed sum and add the accumulated part, which did not travel. */
static sw_status widen_run(const slicing *s, size_t begin, size_t end, bool is_accumulated,
                           sw_error *err)
{
    const sw_device_mean *m = s->mean;
    void *to = behind(s->piece, begin, s->dtype);
    void *wide = is_accumulated ? m->contributions : to; /* they have been folded */
    sw_fold_args sum = {.to = to,
                        .own = to,
                        .rest = wide,
                        .numel = end - begin,
                        .dtype = (int)s->dtype,
                        .op = (int)SW_REDOP_SUM,
                        .source_count = 2};
    SW_TRY(cast(m, wide, s->dtype, behind(s->narrowed, begin, m->wire), m->wire, end - begin, 1.0f,
                err));
    SW_TRY(rescale(m, wide, s->dtype, end - begin, err));
    if (is_accumulated &&
        m->active != m->divisor) /* only some contributions are on top of the mean */
        SW_TRY(cast(m, to, s->dtype, to, s->dtype, end - begin,
                    (float)((double)m->active / m->divisor), err));
    return is_accumulated ? launch(m, SW_KERNEL_FOLD, &sum, err) : SW_OK;
}

static sw_status make_run(const slicing *s, size_t begin, size_t end, bool is_accumulated,
                          sw_error *err)
{
    if (begin >= end || s->is_made)
        return SW_OK;
    return s->narrowed ? widen_run(s, begin, end, is_accumulated, err)
                       : fold_run(s, begin, end, is_accumulated, err);
}

static int owner_count(const sw_device_mean *m)
{
    return m->comm->peers->world_size / m->slice_count;
}

bool sw_device_mean_part(const sw_device_mean *m, const sw_device_range *bucket, size_t i,
                         sw_device_part *part)
{
    size_t replicas = (size_t)owner_count(m), each = piece_numel(m, bucket);
    bool is_over_hosts = goes_by_hosts(m) && !is_narrowed(m, bucket->dtype);
    if (i >= (is_over_hosts ? m->hosts.folded_count : 1))
        return false;
    size_t piece = (size_t)m->piece[is_over_hosts ? m->hosts.folded[i] : m->comm->peers->rank];
    size_t begin = is_over_hosts ? piece % replicas * each : 0;
    size_t numel = is_over_hosts ? each : bucket->numel / (size_t)m->slice_count;
    *part = (sw_device_part){.slice = piece / replicas, .begin = begin, .end = begin + numel};
    return true;
}

/* Return the first element of this rank's piece of a slice. */
static size_t piece_begin(const sw_device_mean *m, const sw_device_range *bucket)
{
    size_t piece = (size_t)(m->piece[m->comm->peers->rank] % owner_count(m));
    return sw_device_mean_goes_by_rows(m) ? 0 : piece * piece_numel(m, bucket);
}

/* Describe the reduction of this rank's slice. The transport reduces into the slice itself
 * (is_made) if no mean is there. */
static slicing slicing_of(const sw_device_mean *m, const sw_device_range *bucket, void *slice,
                          bool is_accumulated)
{
    slicing s = {.mean = m,
                 .piece = behind(slice, piece_begin(m, bucket), bucket->dtype),
                 .dtype = bucket->dtype};
    if (is_narrowed(m, bucket->dtype)) {
        sw_device_range wire = narrowed_of(m, bucket);
        s.narrowed = own_piece(m, &wire);
        return s;
    }
    s.fold = fold_of(m, bucket, m->op, s.piece);
    s.is_made = !m->contributions && !is_accumulated;
    return s;
}

/* Send contributions to their owner. */
sw_status sw_device_mean_collect(const sw_device_mean *m, const sw_device_range *bucket,
                                 void *slice, const sw_device_accumulated *under, sw_error *err)
{
    sw_device *device = m->comm->device;
    slicing s = slicing_of(m, bucket, slice, under->count > 0);
    size_t numel = piece_numel(m, bucket);
    if (s.narrowed)
        return fold_narrowed(m, bucket, &(sw_device_range){0}, err);
    if (goes_by_hosts(m)) {
        if (under->is_there)
            SW_TRY(sw_device_hosts_lend(&m->hosts, bucket, s.piece, err));
        return sw_device_hosts_fold(&m->hosts, bucket, 1.0, m->trains, under->runs, under->count,
                                    err);
    }
    if (m->contributions)
        return exchange(m, bucket, err);
    if (sw_device_mean_goes_by_rows(m))
        return reduce_by_rows(m, bucket, transport_op(m, bucket->dtype),
                              s.is_made ? s.piece : own_piece(m, bucket), err);
    if (m->comm->peers->world_size > 1)
        return sw_peers_reduce_scatter(
            m->comm->peers, bucket->data, s.is_made ? s.piece : own_piece(m, bucket), numel,
            bucket->dtype, transport_op(m, bucket->dtype), m->comm->stream, err);
    return s.is_made ? device->ops->copy_async(device, s.piece, bucket->data,
                                               numel * sw_dtype_size_bytes(bucket->dtype),
                                               m->comm->stream, err)
                     : SW_OK;
}

sw_status sw_device_mean_of_row(const sw_device_mean *m, const sw_device_range *bucket, void *slice,
                                sw_error *err)
{
    SW_TRY(check_row(m, err));
    return sw_peers_reduce_scatter(m->row->peers, bucket->data, slice, piece_numel(m, bucket),
                                   bucket->dtype, SW_REDOP_SUM, m->comm->stream, err);
}

sw_status sw_device_mean_add_kept(const sw_device_mean *m, const sw_device_range *bucket,
                                  const void *slice, sw_device_run run, sw_error *err)
{
    void *to = behind(own_piece(m, bucket), run.begin, bucket->dtype);
    sw_fold_args sum = {.to = to,
                        .own = to,
                        .rest = behind((void *)(uintptr_t)slice, run.begin, bucket->dtype),
                        .numel = run.end - run.begin,
                        .dtype = (int)bucket->dtype,
                        .op = (int)SW_REDOP_SUM,
                        .source_count = 2};
    return launch(m, SW_KERNEL_FOLD, &sum, err);
}

/* Clamp `at` to [begin, begin + numel), relative to `begin`. */
static size_t place_within(size_t at, size_t begin, size_t numel)
{
    return at < begin ? 0 : at - begin < numel ? at - begin : numel;
}

sw_status sw_device_mean_complete(const sw_device_mean *m, const sw_device_range *bucket,
                                  void *slice, const sw_device_accumulated *under, sw_error *err)
{
    size_t numel = piece_numel(m, bucket), first = piece_begin(m, bucket), at = 0;
    slicing s = slicing_of(m, bucket, slice, under->count > 0);
    bool is_over_hosts = goes_by_hosts(m) && !s.narrowed;
    if (m->contributions && !s.narrowed && !is_over_hosts && m->active < m->comm->peers->world_size)
        SW_TRY(sw_fold_leave_out(m->comm, m->trains, m->comm->peers->world_size, &s.fold, err));
    for (size_t i = 0; !is_over_hosts && i < under->count; ++i) {
        size_t begin = place_within(under->runs[i].begin, first, numel);
        size_t end = place_within(under->runs[i].end, first, numel);
        SW_TRY(make_run(&s, at, begin, false, err));
        SW_TRY(make_run(&s, begin, end, true, err));
        at = end;
    }
    SW_TRY(is_over_hosts ? fold_hosts(m, bucket, m->op, s.piece, err)
                         : make_run(&s, at, numel, false, err));
    if (sw_device_mean_goes_by_rows(m)) /* the column's all-reduce has reached every owner */
        return SW_OK;
    return sw_peers_gather_among(m->comm->peers, slice, numel * sw_dtype_size_bytes(bucket->dtype),
                                 m->owners, owner_count(m), m->comm->stream, err);
}
