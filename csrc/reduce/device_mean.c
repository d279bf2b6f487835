/* device_mean.c - see device_mean.h. */
#include "reduce/device_mean.h"

#include <stdlib.h>
#include <string.h>

/* ---- life ---- */

/* Slice s of a bucket is pieces s * replicas and those behind it, one for each of its owners. */
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

sw_status sw_device_mean_init(sw_device_mean *m, const sw_device_mean_config *config, sw_error *err)
{
    sw_device *device = config->comm->device;
    const sw_device_ops *ops = device->ops;
    int world_size = config->comm->peers->world_size;
    *m = (sw_device_mean){.comm = config->comm,
                          .op = config->op,
                          .divisor = world_size,
                          .wire = config->wire,
                          .bytes = config->bytes};
    SW_TRY(create_pieces(m, config->slices, err));
    bool is_compressed = m->wire != SW_DTYPE_COUNT;
    m->folds = config->folds || is_compressed || m->slice_count < world_size;
    m->is_lent = config->is_lent;
    if (m->is_lent)
        return SW_OK;
    if (is_compressed)
        SW_TRY(ops->memory_alloc(device, config->numel * sw_dtype_size_bytes(m->wire),
                                 &m->compressed, err));
    return m->folds ? ops->memory_alloc(device, config->bytes, &m->contributions, err) : SW_OK;
}

void sw_device_mean_lend(sw_device_mean *m, void *contributions, void *compressed)
{
    m->lent = contributions;
    m->contributions = m->folds ? contributions : NULL;
    m->compressed = compressed;
}

void sw_device_mean_fini(sw_device_mean *m)
{
    if (!m->comm)
        return;
    if (!m->is_lent) {
        m->comm->device->ops->memory_free(m->comm->device, m->contributions);
        m->comm->device->ops->memory_free(m->comm->device, m->compressed);
    }
    free(m->trains);
    free(m->piece);
    free(m->owners);
}

sw_status sw_device_mean_leave_out(sw_device_mean *m, const uint8_t *trains, sw_error *err)
{
    sw_device *device = m->comm->device;
    int world_size = m->comm->peers->world_size, active = 0;
    for (int k = 0; k < world_size; ++k)
        active += trains[k] != 0;
    if (active == 0)
        SW_FAIL(err, SW_E_INVALID, "device reducer: of %d ranks one at least must train",
                world_size);
    if (active < world_size && !m->contributions)
        m->contributions = m->lent;
    if (active < world_size && !m->contributions)
        SW_TRY(device->ops->memory_alloc(device, m->bytes, &m->contributions, err));
    memcpy(m->trains, trains, (size_t)world_size);
    m->active = active;
    return SW_OK;
}

/* ---- what all ways share ---- */

/* Elements that a rank folds: a slice, or its piece of one that has several owners. */
static size_t piece_numel(const sw_device_mean *m, const sw_device_range *bucket)
{
    return bucket->numel / (size_t)m->comm->peers->world_size;
}

static void *own_piece(const sw_device_mean *m, const sw_device_range *bucket)
{
    size_t piece_bytes = piece_numel(m, bucket) * sw_dtype_size_bytes(bucket->dtype);
    return (char *)bucket->data + (size_t)m->piece[m->comm->peers->rank] * piece_bytes;
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

/* Arguments of the fold of this rank's piece of the bucket to `to`: from the exchanged pieces, or
 * from that piece alone if the transport has reduced it. */
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

/* Exchange pieces, fold the own one in place. */
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

static bool is_narrowed(const sw_device_mean *m, sw_dtype dtype)
{
    return m->wire != SW_DTYPE_COUNT &&
           (dtype == SW_DTYPE_FLOAT32 || dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16);
}

/* Divide and round the bucket into separate memory. */
static sw_status narrow(const sw_device_mean *m, const sw_device_range *bucket,
                        sw_device_range *wire, sw_error *err)
{
    *wire = (sw_device_range){.data = m->compressed, .numel = bucket->numel, .dtype = m->wire};
    return cast(m, wire->data, wire->dtype, bucket->data, bucket->dtype, bucket->numel,
                (float)(1.0 / m->comm->peers->world_size), err);
}

/* Turn a mean over all ranks into one over those that contribute, rounded once more. */
static sw_status rescale(const sw_device_mean *m, void *mean, sw_dtype dtype, size_t numel,
                         sw_error *err)
{
    int world_size = m->comm->peers->world_size;
    float factor = (float)((double)world_size / m->divisor);
    return m->divisor == world_size ? SW_OK : cast(m, mean, dtype, mean, dtype, numel, factor, err);
}

/* ---- whole ---- */

static sw_status reduce_in_rank_order(const sw_device_mean *m, const sw_device_range *bucket,
                                      sw_redop op, sw_error *err)
{
    SW_TRY(fold_in_place(m, bucket, op, err));
    return sw_peers_all_gather(m->comm->peers, bucket->data, piece_numel(m, bucket), bucket->dtype,
                               m->comm->stream, err);
}

static sw_status reduce_narrowed(const sw_device_mean *m, const sw_device_range *bucket,
                                 sw_error *err)
{
    sw_device_range wire;
    SW_TRY(narrow(m, bucket, &wire, err));
    SW_TRY(reduce_in_rank_order(m, &wire, SW_REDOP_SUM, err));
    SW_TRY(cast(m, bucket->data, bucket->dtype, wire.data, wire.dtype, bucket->numel, 1.0f, err));
    return rescale(m, bucket->data, bucket->dtype, bucket->numel, err);
}

/* Return true if contributions are divided here and the transport adds: its own mean would multiply
 * every half by a 1 / 3 that is 0.2 % (bfloat16) too large. */
static bool divides_first(const sw_device_mean *m, sw_dtype dtype)
{
    const sw_peers *peers = m->comm->peers;
    bool is_exact = m->divisor == peers->world_size && (m->divisor & (m->divisor - 1)) == 0;
    return peers->rounds_divisor && m->op == SW_REDOP_MEAN && !is_exact &&
           (dtype == SW_DTYPE_FLOAT16 || dtype == SW_DTYPE_BFLOAT16);
}

static sw_status divide(const sw_device_mean *m, const sw_device_range *bucket, sw_error *err)
{
    return cast(m, bucket->data, bucket->dtype, bucket->data, bucket->dtype, bucket->numel,
                (float)(1.0 / m->divisor), err);
}

/* Reduce in the transport's own order. Its mean has one divisor; another one scales the sum. */
static sw_status reduce_at_once(const sw_device_mean *m, const sw_device_range *bucket,
                                sw_error *err)
{
    if (divides_first(m, bucket->dtype)) {
        SW_TRY(divide(m, bucket, err));
        return sw_peers_all_reduce(m->comm->peers, bucket->data, bucket->numel, bucket->dtype,
                                   SW_REDOP_SUM, m->comm->stream, err);
    }
    bool is_own = m->op != SW_REDOP_MEAN || m->divisor == m->comm->peers->world_size;
    sw_fold_args scaled = {.to = bucket->data,
                           .own = bucket->data,
                           .numel = bucket->numel,
                           .scale = 1.0 / m->divisor,
                           .dtype = (int)bucket->dtype,
                           .op = (int)SW_REDOP_MEAN,
                           .source_count = 1};
    SW_TRY(sw_peers_all_reduce(m->comm->peers, bucket->data, bucket->numel, bucket->dtype,
                               is_own ? m->op : SW_REDOP_SUM, m->comm->stream, err));
    return is_own ? SW_OK : launch(m, SW_KERNEL_FOLD, &scaled, err);
}

sw_status sw_device_mean_whole(const sw_device_mean *m, const sw_device_range *bucket,
                               sw_error *err)
{
    if (is_narrowed(m, bucket->dtype))
        return reduce_narrowed(m, bucket, err);
    if (m->contributions)
        return reduce_in_rank_order(m, bucket, m->op, err);
    return reduce_at_once(m, bucket, err);
}

/* ---- a slice ---- */

typedef struct slicing {
    const sw_device_mean *mean; /* borrowed */
    sw_fold_args fold;          /* fold of the piece, or with `wire` of its contributions */
    void *piece;                /* the piece in the slice */
    sw_dtype dtype;             /* dtype of the slice */
    const void *narrowed;       /* the piece's sum in the wire's dtype; NULL: `fold` makes it */
} slicing;

static void *behind(const void *at, size_t numel, sw_dtype dtype)
{
    return at ? (char *)at + numel * sw_dtype_size_bytes(dtype) : NULL;
}

/* Fold elements [begin, end) from the contributions. */
static sw_status fold_run(const slicing *s, size_t begin, size_t end, bool is_standing,
                          sw_error *err)
{
    sw_fold_args fold = s->fold;
    fold.to = behind(s->piece, begin, s->dtype);
    fold.own = behind(fold.own, begin, s->dtype);
    fold.rest = behind(fold.rest, begin, s->dtype);
    fold.numel = end - begin;
    fold.addend = is_standing ? fold.to : NULL;
    return launch(s->mean, SW_KERNEL_FOLD, &fold, err);
}

/* Widen them from the narrowed sum. The standing part is added to the mean: it did not travel. */
static sw_status widen_run(const slicing *s, size_t begin, size_t end, bool is_standing,
                           sw_error *err)
{
    const sw_device_mean *m = s->mean;
    void *to = behind(s->piece, begin, s->dtype);
    void *wide = is_standing ? m->contributions : to; /* they have been folded */
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
    if (is_standing && m->active != m->divisor) /* it stands under some contributions alone */
        SW_TRY(cast(m, to, s->dtype, to, s->dtype, end - begin,
                    (float)((double)m->active / m->divisor), err));
    return is_standing ? launch(m, SW_KERNEL_FOLD, &sum, err) : SW_OK;
}

static sw_status make_run(const slicing *s, size_t begin, size_t end, bool is_standing,
                          sw_error *err)
{
    if (begin >= end)
        return SW_OK;
    return s->narrowed ? widen_run(s, begin, end, is_standing, err)
                       : fold_run(s, begin, end, is_standing, err);
}

/* Move contributions of the ranks that train together, in their order, and fold those alone. To
 * leave one out is not to add -0.0, because the sum may begin with the standing mean. */
static sw_status leave_out(const sw_device_mean *m, sw_fold_args *fold, sw_error *err)
{
    sw_device *device = m->comm->device;
    int world_size = m->comm->peers->world_size, own = fold->own_index, place = 0;
    size_t stride = (size_t)fold->stride_bytes;
    char *base = m->contributions;
    fold->own_index = -1;
    for (int k = 0; k < world_size; ++k) {
        if (!m->trains[k])
            continue;
        if (k == own)
            fold->own_index = place;
        else if (k != place)
            SW_TRY(device->ops->copy_async(device, base + (size_t)place * stride,
                                           base + (size_t)k * stride, stride, m->comm->stream,
                                           err));
        ++place;
    }
    fold->source_count = place;
    return SW_OK;
}

/* Gather contributions at their owner. */
static sw_status collect(slicing *s, const sw_device_range *bucket, sw_error *err)
{
    const sw_device_mean *m = s->mean;
    if (is_narrowed(m, bucket->dtype)) {
        sw_device_range wire;
        SW_TRY(narrow(m, bucket, &wire, err));
        s->narrowed = own_piece(m, &wire);
        return fold_in_place(m, &wire, SW_REDOP_SUM, err);
    }
    s->fold = fold_of(m, bucket, m->op, s->piece);
    if (m->contributions) {
        SW_TRY(exchange(m, bucket, err));
        return m->active < m->comm->peers->world_size ? leave_out(m, &s->fold, err) : SW_OK;
    }
    bool is_divided = divides_first(m, bucket->dtype);
    if (is_divided)
        SW_TRY(divide(m, bucket, err));
    return sw_peers_reduce_scatter(m->comm->peers, bucket->data, piece_numel(m, bucket),
                                   bucket->dtype, is_divided ? SW_REDOP_SUM : m->op,
                                   m->comm->stream, err);
}

/* Clamp `at` to [begin, begin + numel), relative to `begin`. */
static size_t place_within(size_t at, size_t begin, size_t numel)
{
    return at < begin ? 0 : at - begin < numel ? at - begin : numel;
}

sw_status sw_device_mean_slice(const sw_device_mean *m, const sw_device_range *bucket, void *slice,
                               const sw_device_run *standing, size_t standing_count, sw_error *err)
{
    int owner_count = m->comm->peers->world_size / m->slice_count;
    size_t numel = piece_numel(m, bucket), at = 0;
    size_t first = (size_t)(m->piece[m->comm->peers->rank] % owner_count) * numel;
    slicing s = {.mean = m, .piece = behind(slice, first, bucket->dtype), .dtype = bucket->dtype};
    SW_TRY(collect(&s, bucket, err));
    for (size_t i = 0; i < standing_count; ++i) {
        size_t begin = place_within(standing[i].begin, first, numel);
        size_t end = place_within(standing[i].end, first, numel);
        SW_TRY(make_run(&s, at, begin, false, err));
        SW_TRY(make_run(&s, begin, end, true, err));
        at = end;
    }
    SW_TRY(make_run(&s, at, numel, false, err));
    return sw_peers_gather_among(m->comm->peers, slice, numel * sw_dtype_size_bytes(bucket->dtype),
                                 m->owners, owner_count, m->comm->stream, err);
}
