/* device_mean.c - see device_mean.h. */
#include "reduce/device_mean.h"

/* ---- life ---- */

sw_status sw_device_mean_init(sw_device_mean *m, sw_device_comm *comm, sw_redop op, sw_dtype wire,
                              bool folds, size_t numel, size_t size_bytes, sw_error *err)
{
    const sw_device_ops *ops = comm->device->ops;
    bool is_compressed = wire != SW_DTYPE_COUNT;
    *m = (sw_device_mean){
        .comm = comm, .op = op, .divisor = sw_nccl_world_size(comm->nccl), .wire = wire};
    if (is_compressed)
        SW_TRY(ops->memory_alloc(comm->device, numel * sw_dtype_size_bytes(wire), &m->compressed,
                                 err));
    return folds || is_compressed
               ? ops->memory_alloc(comm->device, size_bytes, &m->contributions, err)
               : SW_OK;
}

void sw_device_mean_fini(sw_device_mean *m)
{
    if (!m->comm)
        return;
    m->comm->device->ops->memory_free(m->comm->device, m->contributions);
    m->comm->device->ops->memory_free(m->comm->device, m->compressed);
}

/* ---- what all ways share ---- */

static size_t slice_numel(const sw_device_mean *m, const sw_device_range *bucket)
{
    return bucket->numel / (size_t)sw_nccl_world_size(m->comm->nccl);
}

static void *own_slice(const sw_device_mean *m, const sw_device_range *bucket)
{
    size_t slice_bytes = slice_numel(m, bucket) * sw_dtype_size_bytes(bucket->dtype);
    return (char *)bucket->data + (size_t)sw_nccl_rank(m->comm->nccl) * slice_bytes;
}

static sw_status launch(const sw_device_mean *m, sw_kernel kernel, const void *args, sw_error *err)
{
    return sw_kernel_launch(&m->comm->kernels, kernel, args, m->comm->stream, err);
}

static sw_status exchange(const sw_device_mean *m, const sw_device_range *bucket, sw_error *err)
{
    return sw_nccl_exchange_slices(m->comm->nccl, bucket->data, m->contributions,
                                   slice_numel(m, bucket), bucket->dtype, m->comm->stream, err);
}

/* What turns this rank's slice of the bucket into its reduction at `to`: out of the slices that
 * were exchanged, or, where NCCL has reduced them, out of that one. */
static sw_fold_args fold_of(const sw_device_mean *m, const sw_device_range *bucket, sw_redop op,
                            void *to)
{
    bool is_ours = m->contributions;
    return (sw_fold_args){.to = to,
                          .own = own_slice(m, bucket),
                          .rest = m->contributions,
                          .numel = slice_numel(m, bucket),
                          .stride_bytes =
                              slice_numel(m, bucket) * sw_dtype_size_bytes(bucket->dtype),
                          .scale = 1.0 / m->divisor,
                          .dtype = (int)bucket->dtype,
                          .op = is_ours ? (int)op : (int)SW_REDOP_SUM,
                          .own_index = is_ours ? sw_nccl_rank(m->comm->nccl) : 0,
                          .source_count = is_ours ? sw_nccl_world_size(m->comm->nccl) : 1};
}

/* Exchange slices, fold the own one where it lies. */
static sw_status fold_in_place(const sw_device_mean *m, const sw_device_range *bucket, sw_redop op,
                               sw_error *err)
{
    sw_fold_args fold = fold_of(m, bucket, op, own_slice(m, bucket));
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

/* The bucket, divided and rounded, in memory of its own. */
static sw_status narrow(const sw_device_mean *m, const sw_device_range *bucket,
                        sw_device_range *wire, sw_error *err)
{
    *wire = (sw_device_range){.data = m->compressed, .numel = bucket->numel, .dtype = m->wire};
    return cast(m, wire->data, wire->dtype, bucket->data, bucket->dtype, bucket->numel,
                (float)(1.0 / sw_nccl_world_size(m->comm->nccl)), err);
}

/* ---- whole ---- */

static sw_status reduce_in_rank_order(const sw_device_mean *m, const sw_device_range *bucket,
                                      sw_redop op, sw_error *err)
{
    SW_TRY(fold_in_place(m, bucket, op, err));
    return sw_nccl_all_gather(m->comm->nccl, bucket->data, slice_numel(m, bucket), bucket->dtype,
                              m->comm->stream, err);
}

static sw_status reduce_narrowed(const sw_device_mean *m, const sw_device_range *bucket,
                                 sw_error *err)
{
    sw_device_range wire;
    SW_TRY(narrow(m, bucket, &wire, err));
    SW_TRY(reduce_in_rank_order(m, &wire, SW_REDOP_SUM, err));
    return cast(m, bucket->data, bucket->dtype, wire.data, wire.dtype, bucket->numel, 1.0f, err);
}

/* NCCL's own order. Its mean knows one divisor; another one scales the sum. */
static sw_status reduce_by_nccl(const sw_device_mean *m, const sw_device_range *bucket,
                                sw_error *err)
{
    bool is_own = m->op != SW_REDOP_MEAN || m->divisor == sw_nccl_world_size(m->comm->nccl);
    sw_fold_args scaled = {.to = bucket->data,
                           .own = bucket->data,
                           .numel = bucket->numel,
                           .scale = 1.0 / m->divisor,
                           .dtype = (int)bucket->dtype,
                           .op = (int)SW_REDOP_MEAN,
                           .source_count = 1};
    SW_TRY(sw_nccl_all_reduce(m->comm->nccl, bucket->data, bucket->numel, bucket->dtype,
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
    return reduce_by_nccl(m, bucket, err);
}

/* ---- a slice ---- */

typedef struct slicing {
    const sw_device_mean *mean; /* borrowed */
    sw_fold_args fold;          /* of the slice, or with `wire` of what was folded there */
    void *slice;
    sw_dtype dtype;       /* of the slice */
    const void *narrowed; /* the slice's sum in the wire's dtype; NULL: `fold` makes it */
} slicing;

static void *behind(const void *at, size_t numel, sw_dtype dtype)
{
    return at ? (char *)at + numel * sw_dtype_size_bytes(dtype) : NULL;
}

/* Elements [begin, end) out of the contributions. */
static sw_status fold_run(const slicing *s, size_t begin, size_t end, bool is_standing,
                          sw_error *err)
{
    sw_fold_args fold = s->fold;
    fold.to = behind(s->slice, begin, s->dtype);
    fold.own = behind(fold.own, begin, s->dtype);
    fold.rest = behind(fold.rest, begin, s->dtype);
    fold.numel = end - begin;
    fold.addend = is_standing ? fold.to : NULL;
    return launch(s->mean, SW_KERNEL_FOLD, &fold, err);
}

/* The same out of the narrowed sum. What stands is added to the mean: it did not travel. */
static sw_status widen_run(const slicing *s, size_t begin, size_t end, bool is_standing,
                           sw_error *err)
{
    const sw_device_mean *m = s->mean;
    void *to = behind(s->slice, begin, s->dtype);
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

/* Contributions come to their owner. */
static sw_status collect(slicing *s, const sw_device_range *bucket, sw_error *err)
{
    const sw_device_mean *m = s->mean;
    if (is_narrowed(m, bucket->dtype)) {
        sw_device_range wire;
        SW_TRY(narrow(m, bucket, &wire, err));
        s->narrowed = own_slice(m, &wire);
        return fold_in_place(m, &wire, SW_REDOP_SUM, err);
    }
    s->fold = fold_of(m, bucket, m->op, s->slice);
    if (m->contributions)
        return exchange(m, bucket, err);
    return sw_nccl_reduce_scatter(m->comm->nccl, bucket->data, slice_numel(m, bucket),
                                  bucket->dtype, m->op, m->comm->stream, err);
}

sw_status sw_device_mean_slice(const sw_device_mean *m, const sw_device_range *bucket, void *slice,
                               const sw_device_run *standing, size_t standing_count, sw_error *err)
{
    slicing s = {.mean = m, .slice = slice, .dtype = bucket->dtype};
    size_t at = 0;
    SW_TRY(collect(&s, bucket, err));
    for (size_t i = 0; i < standing_count; ++i) {
        SW_TRY(make_run(&s, at, standing[i].begin, false, err));
        SW_TRY(make_run(&s, standing[i].begin, standing[i].end, true, err));
        at = standing[i].end;
    }
    return make_run(&s, at, slice_numel(m, bucket), false, err);
}
