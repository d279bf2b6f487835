/* sha256.c - see the header. Names of FIPS 180-4, sections 4.1.2, 4.2.2, 5 and 6.2. */
#include "base/sha256.h"

#include <string.h>

typedef struct sha256 {
    uint32_t hash[8];
    uint8_t block[SW_SHA256_BLOCK_BYTES];
    uint64_t size_bytes; /* taken in so far */
} sha256;

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static void compress(sha256 *s)
{
    uint32_t w[64], v[8];
    for (int t = 0; t < 16; ++t)
        w[t] = (uint32_t)s->block[4 * t] << 24 | (uint32_t)s->block[4 * t + 1] << 16 |
               (uint32_t)s->block[4 * t + 2] << 8 | s->block[4 * t + 3];
    for (int t = 16; t < 64; ++t)
        w[t] = w[t - 16] + w[t - 7] +
               (rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ w[t - 15] >> 3) +
               (rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ w[t - 2] >> 10);
    memcpy(v, s->hash, sizeof v);
    for (int t = 0; t < 64; ++t) {
        uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
        uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        uint32_t first =
            v[7] + (rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25)) + choice + K[t] + w[t];
        uint32_t second = (rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22)) + majority;
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += first;
        v[0] = first + second;
    }
    for (int i = 0; i < 8; ++i)
        s->hash[i] += v[i];
}

static void begin(sha256 *s)
{
    *s = (sha256){.hash = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c,
                           0x1f83d9ab, 0x5be0cd19}};
}

static void add(sha256 *s, const void *data, size_t size_bytes)
{
    const uint8_t *from = data;
    for (size_t i = 0; i < size_bytes; ++i) {
        s->block[s->size_bytes++ % SW_SHA256_BLOCK_BYTES] = from[i];
        if (s->size_bytes % SW_SHA256_BLOCK_BYTES == 0)
            compress(s);
    }
}

static void end(sha256 *s, uint8_t digest[SW_SHA256_BYTES])
{
    static const uint8_t padding[SW_SHA256_BLOCK_BYTES] = {0x80};
    uint64_t bits = s->size_bytes * 8;
    uint8_t length[8];
    for (int i = 0; i < 8; ++i)
        length[i] = (uint8_t)(bits >> (56 - 8 * i));
    /* One to 64 bytes, so that the length ends the block. */
    add(s, padding, 1 + (119 - s->size_bytes % SW_SHA256_BLOCK_BYTES) % SW_SHA256_BLOCK_BYTES);
    add(s, length, sizeof length);
    for (int i = 0; i < SW_SHA256_BYTES; ++i)
        digest[i] = (uint8_t)(s->hash[i / 4] >> (24 - 8 * (i % 4)));
}

void sw_sha256(const void *data, size_t size_bytes, uint8_t digest[SW_SHA256_BYTES])
{
    sha256 s;
    begin(&s);
    add(&s, data, size_bytes);
    end(&s, digest);
}

void sw_hmac_sha256(const void *key, size_t key_bytes, const void *data, size_t size_bytes,
                    uint8_t code[SW_SHA256_BYTES])
{
    uint8_t pad[SW_SHA256_BLOCK_BYTES], inner[SW_SHA256_BYTES];
    sha256 s;
    memset(pad, 0x36, sizeof pad);
    for (size_t i = 0; i < key_bytes; ++i)
        pad[i] ^= ((const uint8_t *)key)[i];
    begin(&s);
    add(&s, pad, sizeof pad);
    add(&s, data, size_bytes);
    end(&s, inner);
    for (size_t i = 0; i < sizeof pad; ++i)
        pad[i] ^= 0x36 ^ 0x5c;
    begin(&s);
    add(&s, pad, sizeof pad);
    add(&s, inner, sizeof inner);
    end(&s, code);
}

bool sw_sha256_equal(const uint8_t a[SW_SHA256_BYTES], const uint8_t b[SW_SHA256_BYTES])
{
    uint8_t difference = 0;
    for (int i = 0; i < SW_SHA256_BYTES; ++i)
        difference |= (uint8_t)(a[i] ^ b[i]);
    return difference == 0;
}
