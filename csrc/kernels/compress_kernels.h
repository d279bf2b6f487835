/* compress_kernels.h - the contracts of the kernels that make gradients small.
 *
 * Idea: four families. Exact: the same bits in fewer bytes. Halves: scaled in float32 and rounded
 * in one pass. Blocks: a record is one float32 scale and `block` signed codes of 8 or 4 bits. Low
 * rank: the passes of PowerSGD over one matrix, whose error is never written down: memory M holds
 * gradient plus error, and what was sent of it, leftᵀ right, is subtracted wherever M is read.
 * docs/design/compress.md has the maths.
 *
 * Every table gives the same bits: sums run over 16 lanes that are joined in one fixed order, and
 * no multiply-add is contracted.
 *
 * Thread rule: any. Kernels keep no state.
 */
#ifndef SW_KERNELS_COMPRESS_KERNELS_H
#define SW_KERNELS_COMPRESS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tensor/dtype.h"

enum {
    SW_BLOCK_NUMEL_MAX = 4096, /* of a record: what stays in the L1 cache beside its neighbours */
    SW_BLOCK_NUMEL_STEP = 32,
    SW_EXACT_GROUP = 64,
    SW_EXACT_GROUP_BYTES = 1 + SW_EXACT_GROUP / 2 + 3 * SW_EXACT_GROUP,
    SW_LOWRANK_LANES = 16, /* rows of a factor are padded with zeros to a multiple of it; not to
                              whole pages, which would all lie in the same sets of the L1 cache */
    SW_LOWRANK_RANK_MAX = 256,
};

/* An exact record: of each group of 64 elements (the last is filled up with zeros)
 *
 *   1 byte     the greatest exponent
 *   32 bytes   codes of 4 bits, of element i in the lower half of byte i, of i + 32 in the upper:
 *              how far the exponent lies below the greatest, 0 to 13; 14: it is 0; 15: see the end
 *   64 bytes   sign, then the upper 7 bits of the fraction
 *   128 bytes  the lower 16 bits of it, in the processor's order
 *
 * and then a byte for each exponent of code 15, in order: 28.1 bits an element and what lies more
 * than 2^13 below the greatest of its group. Any bits come back, those of a NaN too.
 *
 * pack: bytes written, 0 if they would be more than `capacity`. unpack: false if the record is too
 * short to be one; reads nothing beyond it. Cost: 4 bytes an element and those of the record. */
typedef size_t sw_exact_pack_fn(unsigned char *restrict record, size_t capacity,
                                const float *restrict source, size_t numel);
typedef bool sw_exact_unpack_fn(float *restrict out, const unsigned char *restrict record,
                                size_t record_bytes, size_t numel);

/* Of a record without codes 15. */
static inline size_t sw_exact_bytes(size_t numel)
{
    return (numel + SW_EXACT_GROUP - 1) / SW_EXACT_GROUP * SW_EXACT_GROUP_BYTES;
}

/* wire[i] = round(source[i] * scale) to dtype, which is float16 or bfloat16. Cost: 6 bytes an
 * element. */
typedef void sw_half_narrow_fn(uint16_t *wire, const float *source, size_t numel, float scale,
                               sw_dtype dtype);
/* out[i] = wire[i], exactly. */
typedef void sw_half_widen_fn(float *out, const uint16_t *wire, size_t numel, sw_dtype dtype);

/* A record of `block` elements and `bits` 8 or 4: float32 scale, then block * bits / 8 bytes of
 * codes in [-127, 127] or [-7, 7], the lower half of a byte first. An element is scale * code; the
 * codes of a last record beyond numel are 0. A scale of NaN: the block met something that is not
 * finite.
 *
 * quantize: v = source + error (error NULL: v = source); scale = max |v| / 127 (or 7), code = v /
 * scale to the nearest, ties to even. A block whose greatest magnitude is below 2^-120 becomes
 * zeros. dequantize: out = decoded, or out += decoded if `add`. residual: error = (source + error)
 * - decoded: to be called after quantize, with the same source. records need no alignment. Cost: 4
 * or 8 bytes an element and those of the record. */
typedef void sw_block_quantize_fn(unsigned char *records, const float *source, const float *error,
                                  size_t numel, size_t block, int bits);
typedef void sw_block_dequantize_fn(float *out, const unsigned char *records, size_t numel,
                                    size_t block, int bits, bool add);
typedef void sw_block_residual_fn(float *error, const float *source, const unsigned char *records,
                                  size_t numel, size_t block, int bits);

/* One matrix, row-major without gaps. v = gradient + (memory - leftᵀ right) is what a step
 * compresses; memory NULL: v = gradient. Factors have `rank` rows of sw_lowrank_stride() elements,
 * padded with zeros. */
typedef struct sw_lowrank {
    float *gradient;    /* rows x cols; v once it was projected */
    void *memory;       /* rows x cols of memory_dtype: M of the last step, or NULL */
    const float *left;  /* rank x rows: the last step's orthonormal P */
    const float *right; /* rank x cols: this rank's own Q of the last step */
    size_t rows, cols, rank;
    sw_dtype memory_dtype; /* float32; or bfloat16: v rounded to nearest even, and at most finite */
} sw_lowrank;

static inline size_t sw_lowrank_stride(size_t count)
{
    size_t padded = (count + SW_LOWRANK_LANES - 1) / SW_LOWRANK_LANES * SW_LOWRANK_LANES;
    return padded % 1024 == 0 ? padded + SW_LOWRANK_LANES : padded;
}

/* out (rank x rows) = basis (rank x cols) vᵀ, and gradient = v. Something not finite in v makes its
 * column of `out` so. Cost: 12 bytes (a bfloat16 memory: 10) and 4 * rank flops an element. */
typedef void sw_lowrank_project_fn(const sw_lowrank *matrix, const float *basis, float *out);
/* After that: memory = v (if there is one), out (rank x cols) = left_now (rank x rows) v. `out` is
 * not matrix->right. Cost: 8 (6) bytes and 2 * rank flops an element. */
typedef void sw_lowrank_absorb_fn(const sw_lowrank *matrix, const float *left_now, float *out);
/* out (rows x cols) = leftᵀ right. Cost: 4 bytes and 2 * rank flops an element. */
typedef void sw_lowrank_expand_fn(float *out, const float *left, const float *right, size_t rows,
                                  size_t cols, size_t rank);
/* error (rows x cols) = memory - leftᵀ right; gradient is not read. */
typedef void sw_lowrank_error_fn(const sw_lowrank *matrix, float *error);
/* Makes the `rank` <= count rows of `factor` orthonormal, in order, by modified Gram-Schmidt in
 * float32, swept until a sweep leaves a row's length alone (twice at least). A row that is zero,
 * not finite or depends on those before it is replaced by a pseudo-random one of `seed`. Cost:
 * rank^2 * count. */
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
    sw_lowrank_error_fn *lowrank_error;
    sw_lowrank_orthonormalize_fn *lowrank_orthonormalize;
} sw_compress_kernels;

#endif
