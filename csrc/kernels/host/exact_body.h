/* exact_body.h - pack float32 into fewer bytes without loss; compiled once per instruction set.
 * kernels/compress_kernels.h has the format of the record.
 *
 * Neighbouring gradients have similar magnitudes, so an exponent is stored as its distance from the
 * greatest of its group: 4 bits instead of 8. Loops over one group have constant length and no
 * branches, so that the compiler vectorises them. Exponents that do not fit 4 bits are rare and are
 * handled one by one. */
#pragma once

#include <stdbool.h>
#include <string.h>

#include "kernels/compress_kernels.h"

enum {
    EXACT_HALF = SW_EXACT_GROUP / 2,
    EXACT_ZERO = 14,  /* code of an exponent whose bits are 0 */
    EXACT_ESCAPE = 15 /* code of an exponent that is stored at the end of the record */
};

/* Write the codes of a group's exponents. Return true if some are escapes. */
static inline bool exact_codes(const uint8_t *restrict exponent, uint8_t greatest,
                               uint8_t *restrict code)
{
    uint8_t most = 0;
    for (int i = 0; i < SW_EXACT_GROUP; ++i) {
        uint8_t below = (uint8_t)(greatest - exponent[i]);
        uint8_t near = below < EXACT_ZERO ? below : EXACT_ESCAPE;
        code[i] = exponent[i] == 0 ? EXACT_ZERO : near;
        most = code[i] > most ? code[i] : most;
    }
    return most == EXACT_ESCAPE;
}

static size_t exact_pack(unsigned char *restrict record, size_t capacity,
                         const float *restrict source, size_t numel)
{
    size_t groups = (numel + SW_EXACT_GROUP - 1) / SW_EXACT_GROUP, escapes = 0;
    if (sw_exact_bytes(numel) > capacity)
        return 0;
    unsigned char *out = record, *far = record + groups * SW_EXACT_GROUP_BYTES;
    size_t room = capacity - sw_exact_bytes(numel);
    for (size_t begin = 0; begin < numel; begin += SW_EXACT_GROUP) {
        uint32_t bits[SW_EXACT_GROUP] = {0};
        uint8_t exponent[SW_EXACT_GROUP], code[SW_EXACT_GROUP], greatest = 0;
        uint8_t high[SW_EXACT_GROUP];
        uint16_t low[SW_EXACT_GROUP];
        size_t count = numel - begin < SW_EXACT_GROUP ? numel - begin : SW_EXACT_GROUP;
        if (count == SW_EXACT_GROUP)
            memcpy(bits, source + begin, sizeof bits);
        else
            memcpy(bits, source + begin, count * sizeof *bits);
        for (int i = 0; i < SW_EXACT_GROUP; ++i) {
            exponent[i] = (uint8_t)(bits[i] >> 23 & 255);
            high[i] = (uint8_t)(bits[i] >> 24 & 0x80) | (uint8_t)(bits[i] >> 16 & 0x7f);
            low[i] = (uint16_t)bits[i];
        }
        for (int i = 0; i < SW_EXACT_GROUP; ++i)
            greatest = exponent[i] > greatest ? exponent[i] : greatest;
        if (exact_codes(exponent, greatest, code)) {
            for (int i = 0; i < SW_EXACT_GROUP; ++i) {
                if (code[i] != EXACT_ESCAPE)
                    continue;
                if (escapes == room)
                    return 0;
                far[escapes++] = exponent[i];
            }
        }
        *out++ = greatest;
        for (int i = 0; i < EXACT_HALF; ++i)
            out[i] = (uint8_t)(code[i] | code[i + EXACT_HALF] << 4);
        memcpy(out + EXACT_HALF, high, sizeof high);
        memcpy(out + EXACT_HALF + sizeof high, low, sizeof low);
        out += SW_EXACT_GROUP_BYTES - 1;
    }
    return sw_exact_bytes(numel) + escapes;
}

static bool exact_unpack(float *restrict out, const unsigned char *restrict record,
                         size_t record_bytes, size_t numel)
{
    size_t least = sw_exact_bytes(numel), escapes = 0;
    if (record_bytes < least)
        return false;
    const unsigned char *far = record + least;
    for (size_t begin = 0; begin < numel; begin += SW_EXACT_GROUP) {
        uint32_t bits[SW_EXACT_GROUP];
        uint8_t exponent[SW_EXACT_GROUP], code[SW_EXACT_GROUP], most = 0;
        uint8_t high[SW_EXACT_GROUP], greatest = *record++;
        uint16_t low[SW_EXACT_GROUP];
        size_t count = numel - begin < SW_EXACT_GROUP ? numel - begin : SW_EXACT_GROUP;
        for (int i = 0; i < EXACT_HALF; ++i) {
            code[i] = record[i] & 15;
            code[i + EXACT_HALF] = record[i] >> 4;
        }
        memcpy(high, record + EXACT_HALF, sizeof high);
        memcpy(low, record + EXACT_HALF + sizeof high, sizeof low);
        for (int i = 0; i < SW_EXACT_GROUP; ++i) {
            exponent[i] = code[i] == EXACT_ZERO ? 0 : (uint8_t)(greatest - code[i]);
            most = code[i] > most ? code[i] : most;
        }
        for (int i = 0; most == EXACT_ESCAPE && i < SW_EXACT_GROUP; ++i) {
            if (code[i] != EXACT_ESCAPE)
                continue;
            if (least + escapes == record_bytes)
                return false;
            exponent[i] = far[escapes++];
        }
        for (int i = 0; i < SW_EXACT_GROUP; ++i)
            bits[i] = (uint32_t)(high[i] & 0x80) << 24 | (uint32_t)exponent[i] << 23 |
                      (uint32_t)(high[i] & 0x7f) << 16 | low[i];
        if (count == SW_EXACT_GROUP)
            memcpy(out + begin, bits, sizeof bits);
        else
            memcpy(out + begin, bits, count * sizeof *bits);
        record += SW_EXACT_GROUP_BYTES - 1;
    }
    return true;
}
