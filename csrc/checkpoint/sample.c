/* sample.c - see sample.h. */
#include "checkpoint/sample.h"

#include "kernels/crc32c.h"

uint32_t sw_sample_crc32c(const void *data, size_t size_bytes, size_t stride_bytes)
{
    const uint8_t *bytes = data;
    uint32_t crc = 0;
    if (size_bytes <= 2 * SW_SAMPLE_BYTES)
        return sw_crc32c(0, data, size_bytes);
    size_t last = size_bytes - SW_SAMPLE_BYTES;
    for (size_t at = 0; at < last; at += stride_bytes)
        crc = sw_crc32c(crc, bytes + at, SW_SAMPLE_BYTES);
    return sw_crc32c(crc, bytes + last, SW_SAMPLE_BYTES);
}
