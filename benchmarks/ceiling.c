/* ceiling.c - the fastest way of this machine to read n bytes and write n bytes, by several loops.
 *
 * Each loop works inside one buffer. Copies move its first half to its second and back; rewrites
 * load and store every byte in place. Both read n bytes and write n. Built by bench_allreduce. */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static void copy_memcpy(uint8_t *to, const uint8_t *from, size_t size)
{
    memcpy(to, from, size);
}

__attribute__((target("avx2"))) static void copy_avx2(uint8_t *to, const uint8_t *from, size_t size)
{
    for (size_t i = 0; i + 128 <= size; i += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
        _mm256_storeu_si256((__m256i *)(to + i), a);
        _mm256_storeu_si256((__m256i *)(to + i + 32), b);
        _mm256_storeu_si256((__m256i *)(to + i + 64), c);
        _mm256_storeu_si256((__m256i *)(to + i + 96), d);
    }
}

__attribute__((target("avx2"))) static void copy_nt(uint8_t *to, const uint8_t *from, size_t size)
{
    for (size_t i = 0; i + 128 <= size; i += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
        _mm256_stream_si256((__m256i *)(to + i + 64), c);
        _mm256_stream_si256((__m256i *)(to + i + 96), d);
    }
    _mm_sfence();
}

__attribute__((target("avx2"))) static void rewrite_avx2(uint8_t *data, size_t size)
{
    const __m256i one = _mm256_set1_epi8(1);
    for (size_t i = 0; i + 64 <= size; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(data + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(data + i + 32));
        _mm256_storeu_si256((__m256i *)(data + i), _mm256_xor_si256(a, one));
        _mm256_storeu_si256((__m256i *)(data + i + 32), _mm256_xor_si256(b, one));
    }
}

__attribute__((target("avx2"))) static void rewrite_nt(uint8_t *data, size_t size)
{
    const __m256i one = _mm256_set1_epi8(1);
    for (size_t i = 0; i + 64 <= size; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(data + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(data + i + 32));
        _mm256_stream_si256((__m256i *)(data + i), _mm256_xor_si256(a, one));
        _mm256_stream_si256((__m256i *)(data + i + 32), _mm256_xor_si256(b, one));
    }
    _mm_sfence();
}

void ceiling_run(int loop, uint8_t *data, size_t size)
{
    size_t half = size / 2;
    void (*const copies[])(uint8_t *, const uint8_t *, size_t) = {copy_memcpy, copy_avx2, copy_nt};
    void (*const rewrites[])(uint8_t *, size_t) = {rewrite_avx2, rewrite_nt};
    if (loop < 3) {
        copies[loop](data + half, data, half);
        copies[loop](data, data + half, half);
    } else {
        rewrites[loop - 3](data, size);
    }
}
