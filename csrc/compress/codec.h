/* codec.h - gradients to wire bytes and back, by themselves: what moves the bytes is somebody
 * else's.
 *
 * Idea: one exchange serves every codec. Each rank encodes its array; the owner of a slice folds
 * the W encodings of it, in rank order and float32, scales once and encodes the result once;
 * everybody decodes the owners' slices. So a value is rounded twice, whatever W is.
 *
 * Thread rule: any. Nothing is allocated.
 */
#ifndef SW_COMPRESS_CODEC_H
#define SW_COMPRESS_CODEC_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "tensor/dtype.h"

/* Block-scaled integers; a record is one block (kernels/compress_kernels.h has its bytes). */
typedef struct sw_block_codec {
    size_t block; /* elements: a multiple of 32 in [32, 4096] */
    int bits;     /* 8 or 4 */
} sw_block_codec;

/* SW_E_INVALID with a sentence if the codec is none. */
SW_MUST_USE sw_status sw_block_codec_check(const sw_block_codec *codec, sw_error *err);
/* Bytes of one record; the codec is valid. */
size_t sw_block_codec_record_bytes(const sw_block_codec *codec);
/* Records that `numel` elements take. */
size_t sw_block_codec_record_count(const sw_block_codec *codec, size_t numel);

/* records = quantized source (+ error, if there is one). An array's own records: a block never
 * spans two. Cost: 4 (with an error 8) bytes read an element. */
void sw_block_encode(const sw_block_codec *codec, unsigned char *records, const float *source,
                     const float *error, size_t numel);

/* The fold of W encodings of the same `count` records: out = quantized (scale * sum in order of
 * `wires`). residual (count * block floats; NULL for none) receives what that rounding left out, 0
 * where it is not a number. `out` is none of the wires. Cost: W + 1 records read or written. */
void sw_block_fold(const sw_block_codec *codec, unsigned char *out,
                   const unsigned char *const *wires, size_t wire_count, size_t count, float scale,
                   float *residual);

/* Whether one of `count` records says that something was not finite. */
bool sw_block_is_finite(const sw_block_codec *codec, const unsigned char *records, size_t count);

/* out = the decoded records. With an error: first error = (out + error) - decoded own, where `own`
 * is what sw_block_encode() made of the same out and error. Cost: 4 (12) bytes read, 4 (8) written
 * an element. */
void sw_block_decode(const sw_block_codec *codec, float *out, const unsigned char *records,
                     float *error, const unsigned char *own, size_t numel);

/* wire (dtype: float16 or bfloat16) = round(source * scale), and back. SW_E_INVALID for another
 * dtype. */
SW_MUST_USE sw_status sw_half_encode(sw_dtype dtype, void *wire, const float *source, size_t numel,
                                     float scale, sw_error *err);
SW_MUST_USE sw_status sw_half_decode(sw_dtype dtype, float *out, const void *wire, size_t numel,
                                     sw_error *err);

#endif
