/* block_body.h - scaled halves and block-scaled integers; compiled once per instruction set.
 *
 * A block plus its error is summed into the L1 cache. Its greatest magnitude is found on the bits,
 * which order as the magnitudes do and put values that are not finite on top. Codes are rounded by
 * adding and subtracting 1.5 * 2^23, which is the processor's rounding to nearest even.
 *
 * Left out: stochastic rounding, since a sum over ranks of nearest roundings has the smaller bound.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/host/half_body.h"
#include "kernels/host/stream_body.h"
#include "platform/cpu.h"

/* Halves past the caches are converted at several places in turn. The processor prefetches up to
 * the end of a 4 KiB page; while one place enters a new page the others continue. A chunk is one or
 * two cache lines of halves, far smaller than a page, so that places take turns inside of it. Where
 * the processor needs it, each place also asks for what it converts 2 KiB later. */
enum { HALF_PLACES = 4, HALF_CHUNK_NUMEL = 64 };

static void narrow_scaled_bfloat16(uint16_t *restrict wire, const float *restrict source,
                                   size_t numel, float scale)
{
    for (size_t i = 0; i < numel; ++i)
        wire[i] = bfloat16_narrow(source[i] * scale);
}

static void narrow_scaled_float16(uint16_t *restrict wire, const float *restrict source,
                                  size_t numel, float scale)
{
    size_t i = 0;
#if defined(KERNEL_F16C)
    const __m256 factor = _mm256_set1_ps(scale);
    for (; i + 8 <= numel; i += 8)
        _mm_storeu_si128((__m128i *)(wire + i),
                         narrow_eight(_mm256_mul_ps(_mm256_loadu_ps(source + i), factor)));
#endif
    for (; i < numel; ++i)
        wire[i] = float16_narrow(source[i] * scale);
}

static void narrow_scaled(uint16_t *wire, const float *source, size_t numel, float scale,
                          sw_dtype dtype)
{
    if (dtype == SW_DTYPE_FLOAT16)
        narrow_scaled_float16(wire, source, numel, scale);
    else
        narrow_scaled_bfloat16(wire, source, numel, scale);
}

/* Convert a chunk past the caches. `wire` is aligned to 64 bytes. */
static inline void stream_narrowed(uint16_t *wire, const float *source, float scale, sw_dtype dtype)
{
    _Alignas(64) uint16_t half[HALF_CHUNK_NUMEL];
#if defined(KERNEL_F16C)
    const __m256 factor = _mm256_set1_ps(scale);
    if (dtype == SW_DTYPE_FLOAT16) {
        for (size_t i = 0; i < HALF_CHUNK_NUMEL; i += 8)
            _mm_stream_si128((__m128i *)(void *)(wire + i),
                             narrow_eight(_mm256_mul_ps(_mm256_loadu_ps(source + i), factor)));
        return;
    }
    narrow_scaled_bfloat16(half, source, HALF_CHUNK_NUMEL, scale);
#else
    narrow_scaled(half, source, HALF_CHUNK_NUMEL, scale, dtype);
#endif
    stream_halves(wire, half, HALF_CHUNK_NUMEL);
}

/* The wire format is read megabytes later, by another rank or by the kernel: bypass the caches. */
static void half_narrow(uint16_t *wire, const float *source, size_t numel, float scale,
                        sw_dtype dtype)
{
    size_t span = numel / (HALF_PLACES * HALF_CHUNK_NUMEL) * HALF_CHUNK_NUMEL;
    size_t done = HALF_PLACES * span;
    if (!stream_pays(wire, numel * sizeof *wire)) {
        narrow_scaled(wire, source, numel, scale, dtype);
        return;
    }
    const bool prefetches = sw_prefetches();
    for (size_t start = 0; start < span; start += HALF_CHUNK_NUMEL)
        for (size_t at = start; at < done; at += span) {
            if (prefetches)
                stream_ask(source + at, HALF_CHUNK_NUMEL * sizeof *source);
            stream_narrowed(wire + at, source + at, scale, dtype);
        }
    stream_end();
    narrow_scaled(wire + done, source + done, numel - done, scale, dtype);
}

static void widen(float *out, const uint16_t *wire, size_t count, sw_dtype dtype)
{
    if (dtype == SW_DTYPE_FLOAT16)
        widen_float16(out, wire, count);
    else
        widen_bfloat16(out, wire, count);
}

/* The inverse of stream_narrowed. */
static inline void stream_widened(float *out, const uint16_t *wire, sw_dtype dtype)
{
    _Alignas(64) float wide[HALF_CHUNK_NUMEL];
#if defined(KERNEL_F16C)
    if (dtype == SW_DTYPE_FLOAT16) {
        for (size_t i = 0; i < HALF_CHUNK_NUMEL; i += 8)
            _mm256_stream_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(
                                          (const __m128i *)(const void *)(wire + i))));
        return;
    }
    widen_bfloat16(wide, wire, HALF_CHUNK_NUMEL);
#else
    widen(wide, wire, HALF_CHUNK_NUMEL, dtype);
#endif
    stream_floats(out, wide, HALF_CHUNK_NUMEL);
}

/* Decoded values are not read again until the whole bucket is decoded: bypass the caches. */
static void half_widen(float *out, const uint16_t *wire, size_t numel, sw_dtype dtype)
{
    size_t span = numel / (HALF_PLACES * HALF_CHUNK_NUMEL) * HALF_CHUNK_NUMEL;
    size_t done = HALF_PLACES * span;
    if (!stream_pays(out, numel * sizeof *out)) {
        widen(out, wire, numel, dtype);
        return;
    }
    const bool prefetches = sw_prefetches();
    for (size_t start = 0; start < span; start += HALF_CHUNK_NUMEL)
        for (size_t at = start; at < done; at += span) {
            if (prefetches)
                stream_ask(wire + at, HALF_CHUNK_NUMEL * sizeof *wire);
            stream_widened(out + at, wire + at, dtype);
        }
    stream_end();
    widen(out + done, wire + done, numel - done, dtype);
}

static size_t record_bytes(size_t block, int bits)
{
    return sizeof(float) + block * (size_t)bits / 8;
}

static void store_codes(unsigned char *codes, const int8_t *values, size_t count, int bits)
{
    if (bits == 8) {
        memcpy(codes, values, count);
        return;
    }
    for (size_t i = 0; i < count / 2; ++i)
        codes[i] = (unsigned char)((values[2 * i] & 15) | (values[2 * i + 1] & 15) << 4);
}

static void quantize_record(unsigned char *record, const float *value, size_t block, int bits)
{
    const float rounder = 12582912.0f, levels = bits == 8 ? 127.0f : 7.0f;
    int8_t codes[SW_BLOCK_NUMEL_MAX];
    uint32_t most = 0;
    for (size_t i = 0; i < block; ++i) {
        uint32_t magnitude = bits_from_float(value[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    float greatest = float_from_bits(most), scale = greatest / levels;
    if (most >= 0x7f800000u || greatest < 0x1p-120f) {
        scale = most >= 0x7f800000u ? float_from_bits(0x7fc00000u) : 0.0f;
        memset(codes, 0, block);
    } else {
        float inverse = levels / greatest;
        for (size_t i = 0; i < block; ++i)
            codes[i] = (int8_t)(int32_t)((value[i] * inverse + rounder) - rounder);
    }
    memcpy(record, &scale, sizeof scale);
    store_codes(record + sizeof scale, codes, block, bits);
}

static void dequantize_record(float *out, const unsigned char *record, size_t block, int bits)
{
    const unsigned char *codes = record + sizeof(float);
    float scale;
    memcpy(&scale, record, sizeof scale);
    if (bits == 8) {
        for (size_t i = 0; i < block; ++i)
            out[i] = scale * (float)(int8_t)codes[i];
        return;
    }
    int8_t values[SW_BLOCK_NUMEL_MAX];
    for (size_t i = 0; i < block / 2; ++i) { /* (x ^ 8) - 8 extends the sign of 4 bits */
        values[2 * i] = (int8_t)(((codes[i] & 15) ^ 8) - 8);
        values[2 * i + 1] = (int8_t)(((codes[i] >> 4) ^ 8) - 8);
    }
    for (size_t i = 0; i < block / 2; ++i) { /* in pairs as well: gcc sees that each value is set */
        out[2 * i] = scale * (float)values[2 * i];
        out[2 * i + 1] = scale * (float)values[2 * i + 1];
    }
}

/* value = source + error, or source. Prefetch memory ahead of each step. */
static void read_block(float *restrict value, const float *source, const float *error, size_t count)
{
    size_t i = 0;
    for (; i + SW_BLOCK_NUMEL_STEP <= count; i += SW_BLOCK_NUMEL_STEP) {
        stream_ask(source + i, SW_BLOCK_NUMEL_STEP * sizeof *source);
        if (error) {
            stream_ask(error + i, SW_BLOCK_NUMEL_STEP * sizeof *error);
            for (size_t j = i; j < i + SW_BLOCK_NUMEL_STEP; ++j)
                value[j] = source[j] + error[j];
        } else {
            memcpy(value + i, source + i, SW_BLOCK_NUMEL_STEP * sizeof *value);
        }
    }
    for (; i < count; ++i)
        value[i] = error ? source[i] + error[i] : source[i];
}

static void block_quantize(unsigned char *records, const float *source, const float *error,
                           size_t numel, size_t block, int bits)
{
    float value[SW_BLOCK_NUMEL_MAX];
    for (size_t start = 0; start < numel; start += block, records += record_bytes(block, bits)) {
        size_t count = numel - start < block ? numel - start : block;
        read_block(value, source + start, error ? error + start : NULL, count);
        memset(value + count, 0, (block - count) * sizeof *value);
        quantize_record(records, value, block, bits);
    }
}

static void block_dequantize(float *out, const unsigned char *records, size_t numel, size_t block,
                             int bits, bool add)
{
    float value[SW_BLOCK_NUMEL_MAX];
    for (size_t start = 0; start < numel; start += block, records += record_bytes(block, bits)) {
        size_t count = numel - start < block ? numel - start : block;
        if (!add && count == block) {
            dequantize_record(out + start, records, block, bits);
            continue;
        }
        dequantize_record(value, records, block, bits);
        if (add)
            for (size_t i = 0; i < count; ++i)
                out[start + i] += value[i];
        else
            memcpy(out + start, value, count * sizeof *value);
    }
}

static void block_residual(float *error, const float *source, const unsigned char *records,
                           size_t numel, size_t block, int bits)
{
    float value[SW_BLOCK_NUMEL_MAX];
    for (size_t start = 0; start < numel; start += block, records += record_bytes(block, bits)) {
        size_t count = numel - start < block ? numel - start : block;
        dequantize_record(value, records, block, bits);
        stream_ask(source + start, count * sizeof *source);
        stream_ask(error + start, count * sizeof *error);
        for (size_t i = 0; i < count; ++i)
            error[start + i] = (source[start + i] + error[start + i]) - value[i];
    }
}
