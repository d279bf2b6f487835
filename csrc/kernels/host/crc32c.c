/* crc32c.c - the table form (eight bytes a step) and the form of SSE4.2's or Arm's instruction.
 *
 * A CRC is linear, so three streams can be joined: the checksum of A followed by B is that of A
 * carried over |B| zero bytes, xor that of B. For fixed |B| carrying is a linear map of 32 bits,
 * kept as four tables of 256. RFC 3720 B.4; Intel's white paper 323405 (2011) describes the
 * three-stream form.
 */
#include "kernels/crc32c.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "platform/cpu.h"

/* crc_word and crc_byte extend a checksum, which lies in a crc_register, by one instruction. */
#if defined(__x86_64__)
#include <emmintrin.h>
#define CRC_INSTRUCTION __attribute__((target("sse4.2")))
typedef uint64_t crc_register; /* the type of the instruction: no conversion between two of them */
#define crc_word(crc, word) __builtin_ia32_crc32di(crc, word)
#define crc_byte(crc, byte) __builtin_ia32_crc32qi((uint32_t)(crc), byte)
#elif defined(__aarch64__)
#include <arm_acle.h>
#define CRC_INSTRUCTION __attribute__((target("+crc")))
typedef uint32_t crc_register;
#define crc_word(crc, word) __crc32cd(crc, word)
#define crc_byte(crc, byte) __crc32cb(crc, byte)
#endif

enum { STREAM_BYTES = 4096, COPY_BYTES = 3 * STREAM_BYTES, LINE_BYTES = 64 };
static const uint32_t POLYNOMIAL = UINT32_C(0x82f63b78);

/* Written once, under pthread_once; constant afterwards. */
static uint32_t step_table[8][256];
static uint32_t power_table[8][256]; /* [i][n]: the map over n * 256^i bytes of zeros */
static uint32_t carry_one[4][256], carry_two[4][256]; /* over one and two streams of zeros */
static bool has_instruction;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Return the product of two polynomials modulo ours. The highest bit is x^0. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (int bit = 0; bit < 32; ++bit, a <<= 1) {
        product ^= b & (0 - (a >> 31));
        b = (b >> 1) ^ (POLYNOMIAL & (0 - (b & 1)));
    }
    return product;
}

/* To carry a checksum over a byte of zeros is to multiply by x^8. */
static void fill_powers(void)
{
    uint32_t unit = UINT32_C(1) << 23;
    for (int i = 0; i < 8; ++i) {
        power_table[i][0] = UINT32_C(1) << 31;
        for (int n = 1; n < 256; ++n)
            power_table[i][n] = multiply(power_table[i][n - 1], unit);
        unit = multiply(power_table[i][255], unit);
    }
}

/* Return `crc` carried over `zeros` bytes: one product a digit of base 256. */
static uint32_t carry_over(uint32_t crc, uint64_t zeros)
{
    for (int digit = 0; zeros > 0; ++digit, zeros >>= 8)
        if (zeros & 255)
            crc = multiply(power_table[digit][zeros & 255], crc);
    return crc;
}

/* Fill the table of a linear map from its values on single bits. */
static void fill_carry(uint32_t table[4][256], size_t zeros)
{
    for (unsigned byte = 0; byte < 4; ++byte) {
        table[byte][0] = 0;
        for (unsigned bit = 0; bit < 8; ++bit) {
            uint32_t image = carry_over(UINT32_C(1) << (8 * byte + bit), zeros);
            for (unsigned low = 0; low < 1u << bit; ++low)
                table[byte][(1u << bit) | low] = table[byte][low] ^ image;
        }
    }
}

static void prepare(void)
{
    for (uint32_t i = 0; i < 256; ++i) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit)
            crc = (crc >> 1) ^ (crc & 1 ? POLYNOMIAL : 0);
        step_table[0][i] = crc;
    }
    for (unsigned t = 1; t < 8; ++t)
        for (uint32_t i = 0; i < 256; ++i)
            step_table[t][i] =
                (step_table[t - 1][i] >> 8) ^ step_table[0][step_table[t - 1][i] & 255];
    fill_powers();
    fill_carry(carry_one, STREAM_BYTES);
    fill_carry(carry_two, 2 * STREAM_BYTES);
    has_instruction = sw_cpu_has_crc32c();
}

static uint64_t load64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint32_t update_portable(uint32_t crc, const uint8_t *at, size_t size)
{
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t word = load64(at) ^ crc; /* little-endian, as is every supported machine */
        crc = step_table[7][word & 255] ^ step_table[6][word >> 8 & 255] ^
              step_table[5][word >> 16 & 255] ^ step_table[4][word >> 24 & 255] ^
              step_table[3][word >> 32 & 255] ^ step_table[2][word >> 40 & 255] ^
              step_table[1][word >> 48 & 255] ^ step_table[0][word >> 56];
    }
    for (; size > 0; ++at, --size)
        crc = (crc >> 8) ^ step_table[0][(crc ^ *at) & 255];
    return crc;
}

#if defined(CRC_INSTRUCTION)
static uint32_t carry(uint32_t table[4][256], uint32_t crc)
{
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^
           table[3][crc >> 24];
}

CRC_INSTRUCTION static uint32_t update_hardware(uint32_t crc, const uint8_t *at, size_t size)
{
    for (; size >= COPY_BYTES; at += COPY_BYTES, size -= COPY_BYTES) {
        crc_register a = crc, b = 0, c = 0;
        for (size_t i = 0; i < STREAM_BYTES; i += 8) {
            a = crc_word(a, load64(at + i));
            b = crc_word(b, load64(at + STREAM_BYTES + i));
            c = crc_word(c, load64(at + 2 * STREAM_BYTES + i));
        }
        crc = carry(carry_two, (uint32_t)a) ^ carry(carry_one, (uint32_t)b) ^ (uint32_t)c;
    }
    crc_register rest = crc;
    for (; size >= 8; at += 8, size -= 8)
        rest = crc_word(rest, load64(at));
    for (; size > 0; ++at, --size)
        rest = crc_byte(rest, *at);
    return (uint32_t)rest;
}
#endif

#if defined(__x86_64__)
static inline void stream_line(uint8_t *to, const uint8_t *from)
{
    for (size_t i = 0; i < LINE_BYTES; i += 16)
        _mm_stream_si128((__m128i *)(void *)(to + i),
                         _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
}

/* Copy without reading the destination first: the staged bytes are next read by the disk. `to` is
 * aligned to a line. All three loads of a step precede the stores, since streams lie 4 KiB apart
 * and a load waits for an earlier store to the same offset of another page. */
CRC_INSTRUCTION static uint32_t copy_hardware(uint32_t crc, uint8_t *to, const uint8_t *from,
                                              size_t pieces)
{
    for (; pieces > 0; --pieces, to += COPY_BYTES, from += COPY_BYTES) {
        crc_register a = crc, b = 0, c = 0;
        for (size_t i = 0; i < STREAM_BYTES; i += LINE_BYTES) {
            const uint8_t *one = from + i, *two = one + STREAM_BYTES, *three = two + STREAM_BYTES;
            __builtin_prefetch(one + 2 * COPY_BYTES); /* harmless beyond the end */
            __builtin_prefetch(two + 2 * COPY_BYTES);
            __builtin_prefetch(three + 2 * COPY_BYTES);
            for (size_t j = 0; j < LINE_BYTES; j += 8) {
                a = crc_word(a, load64(one + j));
                b = crc_word(b, load64(two + j));
                c = crc_word(c, load64(three + j));
            }
            stream_line(to + i, one);
            stream_line(to + i + STREAM_BYTES, two);
            stream_line(to + i + 2 * STREAM_BYTES, three);
        }
        crc = carry(carry_two, (uint32_t)a) ^ carry(carry_one, (uint32_t)b) ^ (uint32_t)c;
    }
    _mm_sfence(); /* the lock that hands the block on does not order streamed stores */
    return crc;
}
#endif

static uint32_t update(uint32_t crc, const uint8_t *at, size_t size)
{
#if defined(CRC_INSTRUCTION)
    if (has_instruction)
        return update_hardware(crc, at, size);
#endif
    return update_portable(crc, at, size);
}

uint32_t sw_crc32c(uint32_t crc, const void *data, size_t size_bytes)
{
    pthread_once(&once, prepare);
    return ~update(~crc, data, size_bytes);
}

uint32_t sw_crc32c_portable(uint32_t crc, const void *data, size_t size_bytes)
{
    pthread_once(&once, prepare);
    return ~update_portable(~crc, data, size_bytes);
}

static uint32_t copy_plainly(uint32_t crc, uint8_t *to, const uint8_t *from, size_t size)
{
    while (size > 0) { /* a chunk that fits the L1 cache is read from memory once */
        size_t piece = size < COPY_BYTES ? size : COPY_BYTES;
        crc = update(crc, from, piece);
        memcpy(to, from, piece);
        to += piece;
        from += piece;
        size -= piece;
    }
    return crc;
}

uint32_t sw_crc32c_copy(uint32_t crc, void *destination, const void *source, size_t size_bytes)
{
    pthread_once(&once, prepare);
    uint8_t *to = destination;
    const uint8_t *from = source;
    crc = ~crc;
#if defined(__x86_64__)
    size_t head = (LINE_BYTES - (uintptr_t)to % LINE_BYTES) % LINE_BYTES;
    if (has_instruction && size_bytes >= head + COPY_BYTES) {
        size_t pieces = (size_bytes - head) / COPY_BYTES, done = head + pieces * COPY_BYTES;
        crc = copy_plainly(crc, to, from, head);
        crc = copy_hardware(crc, to + head, from + head, pieces);
        to += done;
        from += done;
        size_bytes -= done;
    }
#endif
    return ~copy_plainly(crc, to, from, size_bytes);
}

uint32_t sw_crc32c_join(uint32_t a, uint32_t b, uint64_t b_bytes)
{
    pthread_once(&once, prepare);
    return carry_over(a, b_bytes) ^ b;
}
