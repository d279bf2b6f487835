/* device_norm.c - see device_norm.h. */
#include "comm/device_norm.h"

static const size_t norm_numel_max = (size_t)1 << 31;
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
    size_t total = 0;
    for (size_t i = 0; i < count; ++i) {
        total += ranges[i].numel;
        if (!has_squares(ranges[i].dtype))
            SW_FAIL(err, SW_E_INVALID,
                    "device norm: dtype of range %zu must be float32, float64, float16 or "
                    "bfloat16, not %s",
                    i, sw_dtype_name(ranges[i].dtype));
    }
    if (total > norm_numel_max)
        SW_FAIL(err, SW_E_INVALID, "device norm: at most %zu elements at once, not %zu",
                norm_numel_max, total);
    return SW_OK;
}

static sw_status add_squares(sw_device_comm *c, const sw_device_range *ranges, size_t count,
                             sw_dtype dtype, sw_error *err)
{
    sw_norm_args norm = {.sum = c->sum, .dtype = (int)dtype};
    for (size_t i = 0; i <= count; ++i) {
        if (i < count && ranges[i].dtype == dtype && ranges[i].numel > 0)
            norm.part[norm.part_count++] =
                (sw_norm_part){.data = ranges[i].data, .numel = ranges[i].numel};
        if (norm.part_count < (i < count ? SW_NORM_PARTS_MAX : 1))
            continue;
        SW_TRY(sw_kernel_launch(&c->kernels, SW_KERNEL_NORM, &norm, c->stream, err));
        norm.part_count = 0;
    }
    return SW_OK;
}

/* Leave the sum of all ranges in c->sum, behind the work of `user`. */
static sw_status sum_squares(sw_device_comm *c, const sw_device_range *ranges, size_t count,
                             sw_stream *user, sw_error *err)
{
    SW_TRY(check_ranges(ranges, count, err));
    SW_TRY(sw_device_refuse_capture(c->device, user, "a norm", err));
    SW_TRY(sw_device_comm_follow(c, c->stream, user, err));
    SW_TRY(c->device->ops->fill_async(c->device, c->sum, 0, sizeof(sw_norm_sum), c->stream, err));
    for (int d = 0; d < NORM_DTYPES; ++d)
        SW_TRY(add_squares(c, ranges, count, norm_dtypes[d], err));
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
    sw_clip_args carry = {.sum = c->sum};
    sw_clip_args args = {
        .sum = c->sum, .norm = clip->norm, .factor = clip->factor, .max_norm = clip->max_norm};
    SW_TRY(sum_squares(c, ranges, count, user, err));
    if (clip->is_sliced && c->peers->world_size > 1) {
        /* Carried digits are below 2^32, so those of 2^31 ranks fit into an int64. */
        SW_TRY(sw_kernel_launch(&c->kernels, SW_KERNEL_CLIP, &carry, c->stream, err));
        SW_TRY(sw_peers_all_reduce(c->peers, c->sum, SW_NORM_WORD_COUNT, SW_DTYPE_INT64,
                                   SW_REDOP_SUM, c->stream, err));
        SW_TRY(sw_device_comm_mark(c, err));
    }
    SW_TRY(sw_kernel_launch(&c->kernels, SW_KERNEL_CLIP, &args, c->stream, err));
    return sw_device_comm_follow(c, user, c->stream, err);
}
