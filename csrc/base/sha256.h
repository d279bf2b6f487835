/* sha256.h - SHA-256 (FIPS 180-4) and HMAC over it (RFC 2104), for proofs that a process knows a
 * secret. A few hundred bytes at a time: plain code, not the processor's instructions.
 *
 * Thread rule: any.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SW_SHA256_BYTES = 32, SW_SHA256_BLOCK_BYTES = 64 };

void sw_sha256(const void *data, size_t size_bytes, uint8_t digest[SW_SHA256_BYTES]);

/* `key_bytes` <= SW_SHA256_BLOCK_BYTES. */
void sw_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t size_bytes,
                    uint8_t code[SW_SHA256_BYTES]);

/* Takes the same time wherever they differ. */
bool sw_sha256_equal(const uint8_t a[SW_SHA256_BYTES], const uint8_t b[SW_SHA256_BYTES]);
