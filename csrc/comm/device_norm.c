/* device_norm.c - see device_norm.h. */
#include "comm/device_norm.h"

static const sw_dtype norm_dtypes[] = {SW_DTYPE_FLOAT32, SW_DTYPE_FLOAT64, SW_DTYPE_FLOAT16,
                                       SW_DTYPE_BFLOAT16};
enum { NORM_DTYPES = sizeof norm_dtypes / sizeof *norm_dtypes };

static bool has_squares(sw_dtype dtype)
{
    for (int d = 0; d < NORM_DTYPES; ++d)
        if (norm_dtypes[d] == dtype)
            return true;
    return false;
}

static sw_status check_ranges(const sw_device_range *ranges, size_t count, sw_error *err)
{
    for (size_t i = 0; i < count; ++i)
        if (!has_squares(ranges[i].dtype))
            SW_FAIL(err, SW_E_INVALID,
                    "device norm: dtype of range %zu must be float32, float64, float16 or "
                    "bfloat16, not %s",
                    i, sw_dtype_name(ranges[i].dtype));
    return SW_OK;
}

typedef struct summing {
    sw_device_comm *comm; /* borrowed */
    sw_norm_args norm;    /* parts for the next launch */
    size_t numel;         /* elements since the last carry, those of `norm` among them */
} summing;

static sw_status launch_norm(summing *s, sw_error *err)
{
    sw_device_comm *c = s->comm;
    if (s->norm.part_count > 0)
        SW_TRY(sw_kernel_launch(&c->kernels, SW_KERNEL_NORM, &s->norm, c->stream, err));
    s->norm.part_count = 0;
    return SW_OK;
}

static sw_status carry(summing *s, sw_error *err)
{
    sw_device_comm *c = s->comm;
    sw_clip_args args = {.sum = c->sum};
    SW_TRY(launch_norm(s, err));
    SW_TRY(sw_kernel_launch(&c->kernels, SW_KERNEL_CLIP, &args, c->stream, err));
    s->numel = 0;
    return SW_OK;
}

/* Add a part. A part that begins at the previous part's end extends it, so adjacent gradients of a
 * bucket are one part. */
static sw_status add_part(summing *s, const void *data, size_t numel, sw_error *err)
{
    sw_norm_part *last = s->norm.part_count > 0 ? &s->norm.part[s->norm.part_count - 1] : NULL;
    size_t element_bytes = sw_dtype_size_bytes((sw_dtype)s->norm.dtype);
    s->numel += numel;
    if (last && (const char *)last->data + last->numel * element_bytes == (const char *)data) {
        last->numel += numel;
        return SW_OK;
    }
    if (s->norm.part_count == SW_NORM_PARTS_MAX)
        SW_TRY(launch_norm(s, err));
    s->norm.part[s->norm.part_count++] = (sw_norm_part){.data = data, .numel = numel};
    return SW_OK;
}

static sw_status add_range(summing *s, const sw_device_range *range, sw_error *err)
{
    size_t element_bytes = sw_dtype_size_bytes(range->dtype);
    for (size_t begin = 0, numel; begin < range->numel; begin += numel) {
        size_t room = s->comm->norm_room - s->numel;
        numel = range->numel - begin < room ? range->numel - begin : room;
        SW_TRY(add_part(s, (const char *)range->data + begin * element_bytes, numel, err));
        if (s->numel == s->comm->norm_room)
            SW_TRY(carry(s, err));
    }
    return SW_OK;
}

static sw_status add_squares(summing *s, const sw_device_range *ranges, size_t count,
                             sw_dtype dtype, sw_error *err)
{
    s->norm.dtype = (int)dtype;
    for (size_t i = 0; i < count; ++i)
        if (ranges[i].dtype == dtype)
            SW_TRY(add_range(s, &ranges[i], err));
    return launch_norm(s, err);
}

/* Compute the sum of all ranges in c->sum, after the work of `user`. */
static sw_status sum_squares(sw_device_comm *c, const sw_device_range *ranges, size_t count,
                             sw_stream *user, sw_error *err)
{
    SW_TRY(check_ranges(ranges, count, err));
    SW_TRY(sw_device_refuse_capture(c->device, user, "a norm", err));
    SW_TRY(sw_device_comm_follow(c, c->stream, user, err));
    SW_TRY(c->device->ops->fill_async(c->device, c->sum, 0, sizeof(sw_norm_sum), c->stream, err));
    summing s = {.comm = c, .norm = {.sum = c->sum}};
    for (int d = 0; d < NORM_DTYPES; ++d)
        SW_TRY(add_squares(&s, ranges, count, norm_dtypes[d], err));
    return SW_OK;
}

sw_status sw_device_comm_norm(sw_device_comm *c, const sw_device_range *ranges, size_t count,
                              sw_stream *user, sw_norm_sum *sum, sw_error *err)
{
    const sw_device_ops *ops = c->device->ops;
    SW_TRY(sum_squares(c, ranges, count, user, err));
    SW_TRY(ops->copy_async(c->device, c->staged, c->sum, sizeof(sw_norm_sum), c->stream, err));
    SW_TRY(ops->event_record(c->device, c->met, c->stream, err));
    SW_TRY(sw_peers_wait(c->peers, c->met, "the sum of squares", err));
    *sum = *c->staged;
    sw_norm_sum_carry(sum);
    return SW_OK;
}

sw_status sw_device_comm_clip(sw_device_comm *c, const sw_device_range *ranges, size_t count,
                              const sw_device_clip *clip, sw_stream *user, sw_error *err)
{
    sw_clip_args carried = {.sum = c->sum};
    sw_clip_args args = {
        .sum = c->sum, .norm = clip->norm, .factor = clip->factor, .max_norm = clip->max_norm};
    SW_TRY(sum_squares(c, ranges, count, user, err));
    if (clip->is_sliced && c->peers->world_size > 1) {
        /* Carried digits are below 2^32, so the sum over 2^31 ranks fits into an int64. */
        SW_TRY(sw_kernel_launch(&c->kernels, SW_KERNEL_CLIP, &carried, c->stream, err));
        SW_TRY(sw_peers_all_reduce(c->peers, c->sum, SW_NORM_WORD_COUNT, SW_DTYPE_INT64,
                                   SW_REDOP_SUM, c->stream, err));
        SW_TRY(sw_device_comm_mark(c, err));
    }
    SW_TRY(sw_kernel_launch(&c->kernels, SW_KERNEL_CLIP, &args, c->stream, err));
    return sw_device_comm_follow(c, user, c->stream, err);
}
