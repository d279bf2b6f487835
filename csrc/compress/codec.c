/* codec.c - block and half codecs over the host's kernels; see codec.h. */
#include "compress/codec.h"

#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

sw_status sw_block_codec_check(const sw_block_codec *codec, sw_error *err)
{
    if (codec->bits != 8 && codec->bits != 4)
        SW_FAIL(err, SW_E_INVALID, "block codec: bits must be 8 or 4, not %d", codec->bits);
    if (codec->block < SW_BLOCK_NUMEL_STEP || codec->block > SW_BLOCK_NUMEL_MAX ||
        codec->block % SW_BLOCK_NUMEL_STEP != 0)
        SW_FAIL(err, SW_E_INVALID,
                "block codec: block must be a multiple of %d in [%d, %d], not %zu",
                (int)SW_BLOCK_NUMEL_STEP, (int)SW_BLOCK_NUMEL_STEP, (int)SW_BLOCK_NUMEL_MAX,
                codec->block);
    return SW_OK;
}

size_t sw_block_codec_record_bytes(const sw_block_codec *codec)
{
    return sizeof(float) + codec->block * (size_t)codec->bits / 8;
}

void sw_block_encode(const sw_block_codec *codec, unsigned char *records, const float *source,
                     const float *error, size_t numel)
{
    sw_kernels()->compress->block_quantize(records, source, error, numel, codec->block,
                                           codec->bits);
}

static bool record_is_finite(const unsigned char *record)
{
    float scale;
    memcpy(&scale, record, sizeof scale);
    return scale == scale;
}

void sw_block_fold(const sw_block_codec *codec, unsigned char *out,
                   const unsigned char *const *wires, size_t wire_count, size_t count, float scale,
                   float *residual)
{
    const sw_compress_kernels *kernels = sw_kernels()->compress;
    size_t bytes = sw_block_codec_record_bytes(codec), block = codec->block;
    float sum[SW_BLOCK_NUMEL_MAX], left[SW_BLOCK_NUMEL_MAX];
    for (size_t r = 0; r < count; ++r, out += bytes) {
        for (size_t w = 0; w < wire_count; ++w)
            kernels->block_dequantize(sum, wires[w] + r * bytes, block, block, codec->bits, w > 0);
        for (size_t i = 0; i < block; ++i)
            sum[i] *= scale;
        kernels->block_quantize(out, sum, NULL, block, block, codec->bits);
        if (!residual)
            continue;
        memset(left, 0, block * sizeof *left);
        if (record_is_finite(out))
            kernels->block_residual(left, sum, out, block, block, codec->bits);
        memcpy(residual + r * block, left, block * sizeof *left);
    }
}

bool sw_block_is_finite(const sw_block_codec *codec, const unsigned char *records, size_t count)
{
    size_t bytes = sw_block_codec_record_bytes(codec);
    bool finite = true;
    for (size_t r = 0; r < count; ++r)
        finite = finite && record_is_finite(records + r * bytes);
    return finite;
}

void sw_block_decode(const sw_block_codec *codec, float *out, const unsigned char *records,
                     float *error, const unsigned char *own, size_t numel)
{
    const sw_compress_kernels *kernels = sw_kernels()->compress;
    size_t bytes = sw_block_codec_record_bytes(codec), block = codec->block;
    for (size_t start = 0, at = 0; start < numel; start += block, at += bytes) {
        size_t count = numel - start < block ? numel - start : block;
        if (error)
            kernels->block_residual(error + start, out + start, own + at, count, block,
                                    codec->bits);
        kernels->block_dequantize(out + start, records + at, count, block, codec->bits, false);
    }
}

static sw_status half_check(const char *operation, sw_dtype dtype, sw_error *err)
{
    if (dtype != SW_DTYPE_FLOAT16 && dtype != SW_DTYPE_BFLOAT16)
        SW_FAIL(err, SW_E_INVALID, "%s: dtype must be float16 or bfloat16, not %s", operation,
                sw_dtype_name(dtype));
    return SW_OK;
}

sw_status sw_half_encode(sw_dtype dtype, void *wire, const float *source, size_t numel, float scale,
                         sw_error *err)
{
    SW_TRY(half_check("half_encode", dtype, err));
    sw_kernels()->compress->half_narrow(wire, source, numel, scale, dtype);
    return SW_OK;
}

sw_status sw_half_decode(sw_dtype dtype, float *out, const void *wire, size_t numel, sw_error *err)
{
    SW_TRY(half_check("half_decode", dtype, err));
    sw_kernels()->compress->half_widen(out, wire, numel, dtype);
    return SW_OK;
}
