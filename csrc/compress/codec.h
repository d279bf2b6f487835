/* codec.h - encode gradients to wire bytes and decode them. Transport is not part of this file.
 *
 * All codecs use the same exchange. Each rank encodes its array. The owner of a slice folds its W
 * encodings in rank order in float32, scales once and encodes the result once. Every rank decodes
 * the owners' slices. So each value is rounded twice, for any W.
 *
 * Thread rule: any. Nothing is allocated.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "tensor/dtype.h"

/* Block-scaled integers; a record is one block (kernels/compress_kernels.h has its bytes). */
typedef struct sw_block_codec {
    size_t block; /* elements: a multiple of 32 in [32, 4096] */
    int bits;     /* 8 or 4 */
} sw_block_codec;

/* Return SW_E_INVALID, with a message, if a field is out of range. */
SW_MUST_USE sw_status sw_block_codec_check(const sw_block_codec *codec, sw_error *err);
/* Return the bytes of one record of a valid codec. */
size_t sw_block_codec_record_bytes(const sw_block_codec *codec);

/* records = quantized source (+ error, unless NULL). A record never spans two arrays. Cost: reads 4
 * bytes an element, 8 with an error. */
void sw_block_encode(const sw_block_codec *codec, unsigned char *records, const float *source,
                     const float *error, size_t numel);

/* Fold W encodings of the same `count` records: out = quantized (scale * sum in order of `wires`).
 * residual (count * block floats, or NULL) receives the rounding error, 0 for records that are not
 * finite. `out` must not be one of the wires. Cost: W + 1 records read or written. */
void sw_block_fold(const sw_block_codec *codec, unsigned char *out,
                   const unsigned char *const *wires, size_t wire_count, size_t count, float scale,
                   float *residual);

/* Return false if the scale of one of `count` records is NaN. */
bool sw_block_is_finite(const sw_block_codec *codec, const unsigned char *records, size_t count);

/* out = the decoded records. With an error: first error = (out + error) - decoded own, where `own`
 * has the records that sw_block_encode() wrote for the same out and error. Cost: reads 4 and writes
 * 4 bytes an element; with an error, 12 and 8. */
void sw_block_decode(const sw_block_codec *codec, float *out, const unsigned char *records,
                     float *error, const unsigned char *own, size_t numel);

/* Encode wire = round(source * scale) in `dtype`, float16 or bfloat16, and decode. SW_E_INVALID for
 * another dtype. */
SW_MUST_USE sw_status sw_half_encode(sw_dtype dtype, void *wire, const float *source, size_t numel,
                                     float scale, sw_error *err);
SW_MUST_USE sw_status sw_half_decode(sw_dtype dtype, float *out, const void *wire, size_t numel,
                                     sw_error *err);
