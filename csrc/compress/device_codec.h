/* device_codec.h - codec.h's blocks on a device: each function enqueued on a stream, none waited
 * for.
 *
 * Idea: the host decides after a fold whether errors are kept, by looking at the records. Here
 * nobody waits to look: a verdict in device memory says it to the kernels that would keep them.
 *
 * Memory is the device's and must live until the stream has passed the call. The bits are
 * codec.h's. Records are on 4-byte boundaries.
 *
 * Thread rule: any.
 */
#ifndef SW_COMPRESS_DEVICE_CODEC_H
#define SW_COMPRESS_DEVICE_CODEC_H

#include "base/status.h"
#include "compress/codec.h"
#include "kernels/device_kernels.h"

typedef struct sw_device_blocks {
    sw_block_codec codec;         /* checked by every call */
    const sw_kernel_set *kernels; /* borrowed */
    sw_stream *stream;
} sw_device_blocks;

/* records = quantized source (+ error, if there is one). */
SW_MUST_USE sw_status sw_device_block_encode(const sw_device_blocks *blocks, void *records,
                                             const float *source, const float *error, size_t numel,
                                             sw_error *err);

/* out = quantized (scale * sum in order of `wires`) of `count` records. `sum`: count * block floats
 * of scratch. residual (as many, or NULL) receives what that rounding left out, NaN where it is not
 * a number. `out` may be none of the wires. */
SW_MUST_USE sw_status sw_device_block_fold(const sw_device_blocks *blocks, void *out,
                                           const void *const *wires, size_t wire_count,
                                           size_t count, float scale, float *sum, float *residual,
                                           sw_error *err);

/* *verdict (4 bytes) = 0 if all of `count` records are of finite values, else 1. */
SW_MUST_USE sw_status sw_device_block_verdict(const sw_device_blocks *blocks, void *verdict,
                                              const void *records, size_t count, sw_error *err);

/* out = the decoded records. With an error: first, unless *verdict, error = (out + error) - decoded
 * own. */
SW_MUST_USE sw_status sw_device_block_decode(const sw_device_blocks *blocks, float *out,
                                             const void *records, float *error, const void *own,
                                             const void *verdict, size_t numel, sw_error *err);

/* error += rest * scale, unless *verdict. */
SW_MUST_USE sw_status sw_device_block_owe(const sw_device_blocks *blocks, float *error,
                                          const float *rest, const void *verdict, size_t numel,
                                          float scale, sw_error *err);

#endif
