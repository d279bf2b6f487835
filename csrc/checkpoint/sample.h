/* sample.h - a checksum of a few cache lines of memory, to detect a change between two points in
 * time.
 *
 * Idea: reading all memory would cost a pass, and a write to a whole tensor also changes the
 * sampled lines. These are the first and the last 64 bytes, and 64 bytes per stride: at 256 KiB,
 * 4,100 reads a GiB. A write only to other bytes is not detected. Thread rule: any. */
#ifndef SW_CHECKPOINT_SAMPLE_H
#define SW_CHECKPOINT_SAMPLE_H

#include <stddef.h>
#include <stdint.h>

enum { SW_SAMPLE_BYTES = 64 };

/* Compute the checksum. Equal sizes are sampled at equal offsets. `stride_bytes`: above 0. */
uint32_t sw_sample_crc32c(const void *data, size_t size_bytes, size_t stride_bytes);

#endif
