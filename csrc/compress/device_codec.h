/* device_codec.h - codec.h's blocks on a device, over all parts of a message: each function
 * enqueued on a stream, none waited for.
 *
 * Idea: one launch a pass and SW_BLOCK_PARTS_MAX parts. The host decides after a fold whether
 * errors are kept, by looking at the records. Here nobody waits to look: a verdict in device memory
 * says it to the kernels that would keep them.
 *
 * Memory is the device's and must live until the stream has passed the call; tables of parts are
 * read at once. Parts of one call write to memory of their own. The bits are codec.h's. Records are
 * on 4-byte boundaries.
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

/* Contributions of `count` ranks to the same records. */
typedef struct sw_device_wires {
    const void *own;    /* contribution own_index */
    const void *others; /* contribution k at others + k * stride_bytes */
    size_t stride_bytes;
    int own_index, count;
} sw_device_wires;

/* Each part's records = quantized source (+ error, if there is one); zeros without a source. */
SW_MUST_USE sw_status sw_device_block_encode(const sw_device_blocks *blocks,
                                             const sw_quantize_part *parts, size_t count,
                                             sw_error *err);

/* out = quantized (scale * sum in order of the wires) of `count` records. residual (count * block
 * floats, or NULL) receives what that rounding left out, NaN where it is not a number. `out` may be
 * none of the wires. */
SW_MUST_USE sw_status sw_device_block_fold(const sw_device_blocks *blocks, void *out,
                                           const sw_device_wires *wires, size_t count, float scale,
                                           float *residual, sw_error *err);

/* *verdict (4 bytes) = 0 if all of `count` records are of finite values, else 1. */
SW_MUST_USE sw_status sw_device_block_verdict(const sw_device_blocks *blocks, void *verdict,
                                              const void *records, size_t count, sw_error *err);

/* Each part's values = the decoded records, if there are some. With an error: first, unless
 * *verdict (NULL stands for 0), error = (values + error) - decoded own. */
SW_MUST_USE sw_status sw_device_block_decode(const sw_device_blocks *blocks,
                                             const sw_decode_part *parts, size_t count,
                                             const void *verdict, sw_error *err);

/* Each part's error += rest * scale, unless *verdict. */
SW_MUST_USE sw_status sw_device_block_owe(const sw_device_blocks *blocks, const sw_owe_part *parts,
                                          size_t count, const void *verdict, float scale,
                                          sw_error *err);

#endif
