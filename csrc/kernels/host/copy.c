/* copy.c - copies that bypass the caches.
 *
 * A gradient that is copied into a bucket is not read again until the whole bucket is folded. A
 * plain store would read each line from memory only to overwrite it, and would evict data that the
 * backward still needs. Non-temporal stores of 16 bytes fill whole lines through the
 * write-combining buffers, as fast as wider ones, and every x86-64 has them. Other architectures
 * use memcpy, and so do copies that fit the second-level cache. */
#include <string.h>

#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <emmintrin.h>

enum { STREAM_LEAST_BYTES = 256 * 1024, LINE_BYTES = 64 };

void sw_copy_streaming(void *destination, const void *source, size_t size_bytes)
{
    uint8_t *to = destination;
    const uint8_t *from = source;
    if (size_bytes < STREAM_LEAST_BYTES) {
        memcpy(to, from, size_bytes);
        return;
    }
    size_t head = (LINE_BYTES - (uintptr_t)to % LINE_BYTES) % LINE_BYTES;
    size_t body = (size_bytes - head) / LINE_BYTES * LINE_BYTES;
    memcpy(to, from, head);
    for (size_t i = head; i < head + body; i += LINE_BYTES) {
        __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(from + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(from + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(const void *)(from + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(const void *)(from + i + 48));
        _mm_stream_si128((__m128i *)(void *)(to + i), a);
        _mm_stream_si128((__m128i *)(void *)(to + i + 16), b);
        _mm_stream_si128((__m128i *)(void *)(to + i + 32), c);
        _mm_stream_si128((__m128i *)(void *)(to + i + 48), d);
    }
    _mm_sfence(); /* the release store that posts the bucket does not order streamed stores */
    memcpy(to + head + body, from + head + body, size_bytes - head - body);
}
#else
void sw_copy_streaming(void *destination, const void *source, size_t size_bytes)
{
    memcpy(destination, source, size_bytes);
}
#endif
