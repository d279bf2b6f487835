/* device_codec.c - see device_codec.h. */
#include "compress/device_codec.h"

#include <stdbool.h>
#include <stdint.h>

static sw_status launch(const sw_device_blocks *b, sw_kernel kernel, const void *args,
                        sw_error *err)
{
    return sw_kernel_launch(b->kernels, kernel, args, b->stream, err);
}

sw_status sw_device_block_encode(const sw_device_blocks *b, void *records, const float *source,
                                 const float *error, size_t numel, sw_error *err)
{
    sw_quantize_args quantize = {.records = records,
                                 .source = source,
                                 .error = error,
                                 .numel = numel,
                                 .block = b->codec.block,
                                 .bits = b->codec.bits};
    return launch(b, SW_KERNEL_QUANTIZE, &quantize, err);
}

static sw_status residual(const sw_device_blocks *b, float *error, const float *source,
                          const void *records, const void *verdict, size_t numel, sw_error *err)
{
    sw_residual_args left = {.error = error,
                             .source = source,
                             .records = records,
                             .verdict = verdict,
                             .numel = numel,
                             .block = b->codec.block,
                             .bits = b->codec.bits};
    return launch(b, SW_KERNEL_RESIDUAL, &left, err);
}

static sw_status dequantize(const sw_device_blocks *b, float *out, const void *records,
                            size_t numel, bool add, sw_error *err)
{
    sw_dequantize_args decode = {.out = out,
                                 .records = records,
                                 .numel = numel,
                                 .block = b->codec.block,
                                 .bits = b->codec.bits,
                                 .add = add};
    return launch(b, SW_KERNEL_DEQUANTIZE, &decode, err);
}

sw_status sw_device_block_fold(const sw_device_blocks *b, void *out, const void *const *wires,
                               size_t wire_count, size_t count, float scale, float *sum,
                               float *rest, sw_error *err)
{
    size_t numel = count * b->codec.block;
    sw_device *device = b->kernels->device;
    sw_cast_args scaled = {.to = sum,
                           .from = sum,
                           .numel = numel,
                           .scale = scale,
                           .to_dtype = (int)SW_DTYPE_FLOAT32,
                           .from_dtype = (int)SW_DTYPE_FLOAT32};
    for (size_t w = 0; w < wire_count; ++w)
        SW_TRY(dequantize(b, sum, wires[w], numel, w > 0, err));
    SW_TRY(launch(b, SW_KERNEL_CAST, &scaled, err));
    SW_TRY(sw_device_block_encode(b, out, sum, NULL, numel, err));
    if (!rest)
        return SW_OK;
    SW_TRY(device->ops->fill_async(device, rest, 0, numel * sizeof *rest, b->stream, err));
    return residual(b, rest, sum, out, NULL, numel, err);
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

sw_status sw_device_block_decode(const sw_device_blocks *b, float *out, const void *records,
                                 float *error, const void *own, const void *verdict, size_t numel,
                                 sw_error *err)
{
    if (error)
        SW_TRY(residual(b, error, out, own, verdict, numel, err));
    return dequantize(b, out, records, numel, false, err);
}

sw_status sw_device_block_owe(const sw_device_blocks *b, float *error, const float *rest,
                              const void *verdict, size_t numel, float scale, sw_error *err)
{
    sw_owe_args owe = {
        .error = error, .rest = rest, .verdict = verdict, .numel = numel, .scale = scale};
    return launch(b, SW_KERNEL_OWE, &owe, err);
}
