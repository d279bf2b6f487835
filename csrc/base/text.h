/* text.h - cutting UTF-8 where a buffer ends. Thread rule: any. */
#ifndef SW_BASE_TEXT_H
#define SW_BASE_TEXT_H

#include <string.h>

/* Bytes of `text`, at most `limit`, that end with a whole character: the precision of "%.*s". */
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
