/* device_codec.c - launch the block kernels in groups of parts; see device_codec.h. */
#include "compress/device_codec.h"

#include <stdint.h>
#include <string.h>

static sw_status launch(const sw_device_blocks *b, sw_kernel kernel, const void *args,
                        sw_error *err)
{
    return sw_kernel_launch(b->kernels, kernel, args, b->stream, err);
}

/* Return the number of parts, from `begin` on, that one launch takes. */
static size_t few(size_t begin, size_t count)
{
    size_t left = count - begin;
    return left < SW_BLOCK_PARTS_MAX ? left : SW_BLOCK_PARTS_MAX;
}

sw_status sw_device_block_encode(const sw_device_blocks *b, const sw_quantize_part *parts,
                                 size_t count, sw_error *err)
{
    for (size_t begin = 0; begin < count; begin += SW_BLOCK_PARTS_MAX) {
        size_t some = few(begin, count);
        sw_quantize_args args = {
            .block = b->codec.block, .bits = b->codec.bits, .part_count = (int)some};
        memcpy(args.part, parts + begin, some * sizeof *parts);
        SW_TRY(launch(b, SW_KERNEL_QUANTIZE, &args, err));
    }
    return SW_OK;
}

sw_status sw_device_block_fold(const sw_device_blocks *b, void *out, const sw_device_wires *wires,
                               size_t count, float scale, float *residual, sw_error *err)
{
    sw_fold_records_args args = {.to = out,
                                 .own = wires->own,
                                 .others = wires->others,
                                 .residual = residual,
                                 .count = count,
                                 .block = b->codec.block,
                                 .stride_bytes = wires->stride_bytes,
                                 .scale = scale,
                                 .bits = b->codec.bits,
                                 .own_index = wires->own_index,
                                 .source_count = wires->count};
    return launch(b, SW_KERNEL_FOLD_RECORDS, &args, err);
}

sw_status sw_device_block_verdict(const sw_device_blocks *b, void *verdict, const void *records,
                                  size_t count, sw_error *err)
{
    sw_device *device = b->kernels->device;
    sw_verdict_args judge = {.verdict = verdict,
                             .records = records,
                             .count = count,
                             .block = b->codec.block,
                             .bits = b->codec.bits};
    SW_TRY(device->ops->fill_async(device, verdict, 0, sizeof(int32_t), b->stream, err));
    return launch(b, SW_KERNEL_VERDICT, &judge, err);
}

sw_status sw_device_block_decode(const sw_device_blocks *b, const sw_decode_part *parts,
                                 size_t count, const void *verdict, sw_error *err)
{
    for (size_t begin = 0; begin < count; begin += SW_BLOCK_PARTS_MAX) {
        size_t some = few(begin, count);
        sw_decode_args args = {.verdict = verdict,
                               .block = b->codec.block,
                               .bits = b->codec.bits,
                               .part_count = (int)some};
        memcpy(args.part, parts + begin, some * sizeof *parts);
        SW_TRY(launch(b, SW_KERNEL_DECODE, &args, err));
    }
    return SW_OK;
}

sw_status sw_device_block_owe(const sw_device_blocks *b, const sw_owe_part *parts, size_t count,
                              const void *verdict, float scale, sw_error *err)
{
    for (size_t begin = 0; begin < count; begin += SW_BLOCK_PARTS_MAX) {
        size_t some = few(begin, count);
        sw_owe_args args = {.verdict = verdict, .scale = scale, .part_count = (int)some};
        memcpy(args.part, parts + begin, some * sizeof *parts);
        SW_TRY(launch(b, SW_KERNEL_OWE, &args, err));
    }
    return SW_OK;
}
