/* status.c - format errors. A message that is too long is truncated at a character boundary;
 * nothing allocates. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/text.h"

sw_status sw_error_set(sw_error *err, sw_status status, int detail, const char *format, ...)
{
    if (err) {
        va_list arguments;
        err->status = status;
        err->detail = detail;
        va_start(arguments, format);
        vsnprintf(err->message, sizeof err->message, format, arguments);
        va_end(arguments);
        sw_text_mend(err->message);
    }
    return status;
}
