/* crc32c.h - CRC-32C (Castagnoli), alone or in the same pass as a copy.
 *
 * The processor selects the form. The hardware form (SSE4.2, Armv8's CRC32) runs three independent
 * streams, because the instruction takes three cycles but one can start each cycle. The table form
 * is the reference that a test compares with the hardware form.
 *
 * Thread rule: any.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Extend the checksum `crc` by `data` and return it. Start with crc 0; no bytes leave crc as it is.
 */
uint32_t sw_crc32c(uint32_t crc, const void *data, size_t size_bytes);

/* sw_crc32c by the table form alone. */
uint32_t sw_crc32c_portable(uint32_t crc, const void *data, size_t size_bytes);

/* Copy `source` and return the checksum `crc` extended by it. The source is read from memory once.
 * Source and destination must not overlap. */
uint32_t sw_crc32c_copy(uint32_t crc, void *destination, const void *source, size_t size_bytes);

/* Return the checksum of A followed by B, from those of A and B. Cost: O(log b_bytes). */
uint32_t sw_crc32c_join(uint32_t a, uint32_t b, uint64_t b_bytes);
