/* device_codec.h - the block codecs of codec.h on a device, for all parts of a message. Each
 * function enqueues on a stream and does not wait.
 *
 * Each pass launches one kernel for SW_BLOCK_PARTS_MAX parts. After a fold on the host, the caller
 * reads the records to decide whether to keep errors. On a device the host does not wait for them:
 * a verdict in device memory tells the kernels whether to keep errors.
 *
 * Memory is device memory and must live until the stream has passed the call; tables of parts are
 * read before the call returns. Parts of one call write to disjoint memory. The results are bitwise
 * those of codec.h. Records are aligned to 4 bytes.
 *
 * Thread rule: any.
 */
#pragma once

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

/* Each part's records = quantized source (+ error, unless NULL); zeros without a source. */
SW_MUST_USE sw_status sw_device_block_encode(const sw_device_blocks *blocks,
                                             const sw_quantize_part *parts, size_t count,
                                             sw_error *err);

/* out = quantized (scale * sum in order of the wires) of `count` records. residual (count * block
 * floats, or NULL) receives the rounding error, NaN for records that are not finite. `out` must not
 * be one of the wires. */
SW_MUST_USE sw_status sw_device_block_fold(const sw_device_blocks *blocks, void *out,
                                           const sw_device_wires *wires, size_t count, float scale,
                                           float *residual, sw_error *err);

/* *verdict (4 bytes) = 0 if all of `count` records have finite values, else 1. */
SW_MUST_USE sw_status sw_device_block_verdict(const sw_device_blocks *blocks, void *verdict,
                                              const void *records, size_t count, sw_error *err);

/* Each part's values = the decoded records, if it has any. A part with an error first computes
 * error = (values + error) - decoded own, if *verdict is 0 (NULL means 0). */
SW_MUST_USE sw_status sw_device_block_decode(const sw_device_blocks *blocks,
                                             const sw_decode_part *parts, size_t count,
                                             const void *verdict, sw_error *err);

/* Each part's error += rest * scale, if *verdict is 0. */
SW_MUST_USE sw_status sw_device_block_owe(const sw_device_blocks *blocks, const sw_owe_part *parts,
                                          size_t count, const void *verdict, float scale,
                                          sw_error *err);
