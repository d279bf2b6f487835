/* stream_body.h - stores that bypass the caches, for bodies compiled once per instruction set.
 *
 * Data that is written once and read megabytes later should not be fetched before it is
 * overwritten, nor evict data that is needed sooner. Below STREAM_LEAST_BYTES, and on other
 * architectures, these are plain stores. The bits are the same.
 *
 * The includer includes immintrin.h or emmintrin.h if the architecture has it. It calls
 * stream_end() before another thread may read.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { STREAM_LEAST_BYTES = 1024 * 1024, STREAM_AHEAD_BYTES = 2048 };

/* Prefetch the bytes that a loop will read STREAM_AHEAD_BYTES later. A loop of many instructions an
 * element does not hide the latency of memory. */
static inline void stream_ask(const void *from, size_t size_bytes)
{
    for (size_t line = 0; line < size_bytes; line += 64)
        __builtin_prefetch((const char *)from + STREAM_AHEAD_BYTES + line);
}

static inline bool stream_pays(const void *to, size_t size_bytes)
{
    return size_bytes >= STREAM_LEAST_BYTES && (uintptr_t)to % 64 == 0;
}

/* Store floats past the caches. `to` is aligned to 64 bytes. */
static inline void stream_floats(float *to, const float *from, size_t count)
{
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#elif defined(__AVX__)
    for (; i + 8 <= count; i += 8)
        _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
#elif defined(__x86_64__)
    for (; i + 4 <= count; i += 4)
        _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
#endif
    memcpy(to + i, from + i, (count - i) * sizeof *to);
}

/* Store halves past the caches. `to` is aligned to 64 bytes. */
static inline void stream_halves(uint16_t *to, const uint16_t *from, size_t count)
{
    size_t i = 0;
#if defined(__AVX512F__)
    for (; i + 32 <= count; i += 32)
        _mm512_stream_si512((__m512i *)(void *)(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX__)
    for (; i + 16 <= count; i += 16)
        _mm256_stream_si256((__m256i *)(void *)(to + i),
                            _mm256_loadu_si256((const __m256i *)(const void *)(from + i)));
#elif defined(__x86_64__)
    for (; i + 8 <= count; i += 8)
        _mm_stream_si128((__m128i *)(void *)(to + i),
                         _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
#endif
    memcpy(to + i, from + i, (count - i) * sizeof *to);
}

static inline void stream_end(void)
{
#if defined(__x86_64__)
    _mm_sfence(); /* a later release store does not order streamed stores */
#endif
}
