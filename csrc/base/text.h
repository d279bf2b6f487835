/* text.h - UTF-8 text that is cut to fit ends with a whole character. Thread rule: any. */
#pragma once

#include <string.h>

/* Return the length in bytes of the longest prefix of `text` that fits in `limit` bytes and ends
 * with a whole character. The result is a precision for "%.*s". */
static inline int sw_text_fit(const char *text, size_t limit)
{
    size_t length = strnlen(text, limit + 1);
    if (length <= limit)
        return (int)length;
    while (limit > 0 && ((unsigned char)text[limit] & 0xC0) == 0x80)
        limit--;
    return (int)limit;
}

/* Return how many bytes the character at `text` must have by its first byte, and how many of them
 * follow one another there. */
static inline size_t sw_text_character(const char *text, size_t *present)
{
    unsigned char first = (unsigned char)text[0];
    size_t wanted = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
    for (*present = 1; *present < wanted && ((unsigned char)text[*present] & 0xC0) == 0x80;)
        ++*present;
    return wanted;
}

/* Mend text whose parts were cut by "%.300s" or by the end of a buffer: a character of which bytes
 * are missing becomes '?', and at the end of the text nothing. Shortens the text in place. */
static inline void sw_text_mend(char *text)
{
    char *to = text;
    for (const char *from = text; *from;) {
        size_t present, wanted = sw_text_character(from, &present);
        if (present == wanted)
            for (size_t i = 0; i < present; ++i)
                *to++ = from[i];
        else if (from[present])
            *to++ = '?';
        from += present;
    }
    *to = '\0';
}
