/* text.h - cut UTF-8 text at a character boundary. Thread rule: any. */
#ifndef SW_BASE_TEXT_H
#define SW_BASE_TEXT_H

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

#endif
