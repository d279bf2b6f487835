/* test_copy.c - sw_copy_streaming moves exactly its bytes, at every misalignment and around each
 * threshold, with guard bytes on both sides. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"

enum { GUARD = 0xA5, MARGIN = 128, LARGEST = 1 << 20 };

static int failures;

static void check_copy(uint8_t *to, uint8_t *from, size_t to_offset, size_t from_offset,
                       size_t size)
{
    memset(to, GUARD, LARGEST + 4 * MARGIN);
    for (size_t i = 0; i < size; ++i)
        from[MARGIN + from_offset + i] = (uint8_t)(i * 131 + i / 251 + size);
    sw_copy_streaming(to + MARGIN + to_offset, from + MARGIN + from_offset, size);
    int wrong = memcmp(to + MARGIN + to_offset, from + MARGIN + from_offset, size) != 0;
    for (size_t i = 0; i < MARGIN + to_offset; ++i)
        wrong |= to[i] != GUARD;
    for (size_t i = MARGIN + to_offset + size; i < LARGEST + 4 * MARGIN; ++i)
        wrong |= to[i] != GUARD;
    if (wrong) {
        printf("copy of %zu bytes, offsets %zu and %zu: wrong bytes\n", size, to_offset,
               from_offset);
        failures++;
    }
}

int main(void)
{
    uint8_t *to = malloc(LARGEST + 4 * MARGIN), *from = malloc(LARGEST + 4 * MARGIN);
    const size_t sizes[] = {0,      1,      63,     64,     65,     4095,   262143,
                            262144, 262145, 262207, 262208, 524287, 1048576};
    const size_t offsets[] = {0, 1, 4, 15, 16, 60, 63};
    if (!to || !from)
        return 2;
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; ++s)
        for (size_t a = 0; a < sizeof offsets / sizeof offsets[0]; ++a)
            check_copy(to, from, offsets[a], offsets[(a * 3 + s) % 7], sizes[s]);
    free(to);
    free(from);
    return failures ? 1 : 0;
}
