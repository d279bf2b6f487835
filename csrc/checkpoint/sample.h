/* sample.h - a checksum of a few cache lines of some memory, by which two looks at it are compared.
 *
 * Idea: to read all of it would cost a pass; who writes to a whole tensor writes to these lines,
 * too. They are the first and the last 64 bytes and 64 at every stride: of 256 KiB, 4,100 reads a
 * GiB. A write to other bytes alone is not seen. Thread rule: any.
 */
#ifndef SW_CHECKPOINT_SAMPLE_H
#define SW_CHECKPOINT_SAMPLE_H

#include <stddef.h>
#include <stdint.h>

enum { SW_SAMPLE_BYTES = 64 };

/* Of memory of the same size the same places. `stride_bytes`: above 0. */
uint32_t sw_sample_crc32c(const void *data, size_t size_bytes, size_t stride_bytes);

#endif
