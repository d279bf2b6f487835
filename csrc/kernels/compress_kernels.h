/* compress_kernels.h - the contracts of the kernels that compress gradients.
 *
 * Four families:
 *   exact     the same bits in fewer bytes (the packets of the bridge)
 *   halves    scaled in float32 and rounded to float16 or bfloat16 in one pass
 *   blocks    records: one float32 scale and `block` signed codes of 8 or 4 bits
 *   low rank  the passes of PowerSGD over one matrix. The error is never stored. The memory M holds
 *             gradient plus error, and each reader of M subtracts leftᵀ right, which was sent.
 * docs/design/compress.md has the formulas.
 *
 * Every kernel table gives the same bits: sums run over 16 lanes that are added in one fixed order,
 * and no multiply-add is contracted.
 *
 * Thread rule: any. Kernels keep no state.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/dtype.h"

enum {
    SW_BLOCK_NUMEL_MAX = 4096, /* a record's source, error and codes must stay in the L1 cache */
    SW_BLOCK_NUMEL_STEP = 32,
    SW_EXACT_GROUP = 64,
    SW_EXACT_GROUP_BYTES = 1 + SW_EXACT_GROUP / 2 + 3 * SW_EXACT_GROUP,
    SW_LOWRANK_LANES = 16, /* rows of a factor are padded with zeros to a multiple of this */
    SW_LOWRANK_RANK_MAX = 256,
};

/* An exact record. Each group of 64 elements (the last one is filled up with zeros) has
 *
 *   1 byte     the greatest exponent of the group
 *   32 bytes   a 4-bit code an element. Byte i has element i in its lower half, i + 32 in its
 * upper. 0 to 13: the exponent lies this far below the greatest; 14: the exponent is 0; 15: the
 * exponent is stored at the end of the record 64 bytes   sign and the upper 7 bits of the fraction
 *   128 bytes  the lower 16 bits of the fraction, in the processor's byte order
 *
 * Then follows one byte for each exponent of code 15, in order. A record takes 28.1 bits an
 * element, plus 8 for each element more than 2^13 below the greatest of its group. All bits come
 * back, those of a NaN too.
 *
 * pack returns the bytes written, or 0 if the record would exceed `capacity`. unpack returns false
 * if the record is too short and reads nothing beyond it. Cost: 4 bytes an element plus the record.
 */
typedef size_t sw_exact_pack_fn(unsigned char *restrict record, size_t capacity,
                                const float *restrict source, size_t numel);
typedef bool sw_exact_unpack_fn(float *restrict out, const unsigned char *restrict record,
                                size_t record_bytes, size_t numel);

/* Return the bytes of a record without codes 15. */
static inline size_t sw_exact_bytes(size_t numel)
{
    return (numel + SW_EXACT_GROUP - 1) / SW_EXACT_GROUP * SW_EXACT_GROUP_BYTES;
}

/* wire[i] = round(source[i] * scale) to `dtype`, float16 or bfloat16. Cost: 6 bytes an element. */
typedef void sw_half_narrow_fn(uint16_t *wire, const float *source, size_t numel, float scale,
                               sw_dtype dtype);
/* out[i] = wire[i], exactly. */
typedef void sw_half_widen_fn(float *out, const uint16_t *wire, size_t numel, sw_dtype dtype);

/* A record of `block` elements with codes of `bits` 8 or 4: a float32 scale, then block * bits / 8
 * bytes of codes in [-127, 127] or [-7, 7], the lower half of a byte first. An element is
 * scale * code. The codes beyond numel in the last record are 0. The scale is NaN if the block has
 * an element that is not finite. Records need no alignment.
 *
 *   quantize    v = source + error (error NULL: v = source), scale = max |v| / 127 (or 7),
 *               code = v / scale to the nearest, ties to even. A block with max |v| < 2^-120
 * becomes zeros. dequantize  out = decoded, or out += decoded if `add` residual    error = (source
 * + error) - decoded. Call it after quantize with the same source.
 *
 * Cost: 4 or 8 bytes an element plus the records. */
typedef void sw_block_quantize_fn(unsigned char *records, const float *source, const float *error,
                                  size_t numel, size_t block, int bits);
typedef void sw_block_dequantize_fn(float *out, const unsigned char *records, size_t numel,
                                    size_t block, int bits, bool add);
typedef void sw_block_residual_fn(float *error, const float *source, const unsigned char *records,
                                  size_t numel, size_t block, int bits);

/* One matrix, row-major without gaps. A step compresses v = gradient + (memory - leftᵀ right), or
 * v = gradient if memory is NULL. Factors have `rank` rows of sw_lowrank_stride() elements, padded
 * with zeros. */
typedef struct sw_lowrank {
    float *gradient;    /* rows x cols; project overwrites it with v */
    void *memory;       /* rows x cols of memory_dtype: v of the last step, or NULL */
    const float *left;  /* rank x rows: the last step's orthonormal P */
    const float *right; /* rank x cols: this rank's own Q of the last step */
    size_t rows, cols, rank;
    sw_dtype memory_dtype; /* float32, or bfloat16: v to nearest even, clamped to finite */
} sw_lowrank;

/* Return the elements between two rows of a factor: padded, and never whole pages, since rows a
 * page apart would share the same sets of the L1 cache. */
static inline size_t sw_lowrank_stride(size_t count)
{
    size_t padded = (count + SW_LOWRANK_LANES - 1) / SW_LOWRANK_LANES * SW_LOWRANK_LANES;
    return padded % 1024 == 0 ? padded + SW_LOWRANK_LANES : padded;
}

/* out (rank x rows) = basis (rank x cols) vᵀ, then gradient = v. A row of v with an element that is
 * not finite makes its column of `out` not finite. Cost: 12 bytes (bfloat16 memory: 10) and 4 *
 * rank flops an element. */
typedef void sw_lowrank_project_fn(const sw_lowrank *matrix, const float *basis, float *out);
/* After project: memory = v (unless NULL), out (rank x cols) = left_now (rank x rows) v. `out` must
 * not be matrix->right. Cost: 8 (6) bytes and 2 * rank flops an element. */
typedef void sw_lowrank_absorb_fn(const sw_lowrank *matrix, const float *left_now, float *out);
/* out (rows x cols) = leftᵀ right. Cost: 4 bytes and 2 * rank flops an element. */
typedef void sw_lowrank_expand_fn(float *out, const float *left, const float *right, size_t rows,
                                  size_t cols, size_t rank);
/* Make the `rank` <= count rows of `factor` orthonormal, in order, by modified Gram-Schmidt in
 * float32. Sweeps over a row repeat, at least twice, until one leaves its length unchanged. A row
 * that is zero, not finite or dependent on earlier rows is replaced by a pseudo-random row from
 * `seed`. Cost: rank^2 * count. */
typedef void sw_lowrank_orthonormalize_fn(float *factor, size_t count, size_t rank, uint64_t seed);

typedef struct sw_compress_kernels {
    sw_exact_pack_fn *exact_pack;
    sw_exact_unpack_fn *exact_unpack;
    sw_half_narrow_fn *half_narrow;
    sw_half_widen_fn *half_widen;
    sw_block_quantize_fn *block_quantize;
    sw_block_dequantize_fn *block_dequantize;
    sw_block_residual_fn *block_residual;
    sw_lowrank_project_fn *lowrank_project;
    sw_lowrank_absorb_fn *lowrank_absorb;
    sw_lowrank_expand_fn *lowrank_expand;
    sw_lowrank_orthonormalize_fn *lowrank_orthonormalize;
} sw_compress_kernels;
