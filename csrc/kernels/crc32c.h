/* crc32c.h - CRC-32C (Castagnoli), alone or in the same pass as a copy.
 *
 * The hardware form (SSE4.2, three independent streams: the instruction takes three cycles but one
 * can start each cycle) is chosen by the processor; the table form is the meaning, and a test holds
 * one against the other.
 *
 * Thread rule: any.
 */
#ifndef SW_KERNELS_CRC32C_H
#define SW_KERNELS_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* The checksum of what `crc` stands for followed by `data`; begin with 0. size_bytes 0 gives crc.
 */
uint32_t sw_crc32c(uint32_t crc, const void *data, size_t size_bytes);

/* The same, by table alone. */
uint32_t sw_crc32c_portable(uint32_t crc, const void *data, size_t size_bytes);

/* Copies, and returns the checksum of what was copied: `source` is read from memory once. No
 * overlap. */
uint32_t sw_crc32c_copy(uint32_t crc, void *destination, const void *source, size_t size_bytes);

/* The checksum of A followed by B, from those of A and B. Cost: the logarithm of `b_bytes`. */
uint32_t sw_crc32c_join(uint32_t a, uint32_t b, uint64_t b_bytes);

#endif
