/* check.c - count and print expectations; see check.h. */
#include "check.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { PRINTED_MAX = 40 };

static atomic_long passed, failed;

bool check(bool ok, const char *format, ...)
{
    if (ok) {
        atomic_fetch_add(&passed, 1);
        return true;
    }
    if (atomic_fetch_add(&failed, 1) < PRINTED_MAX) {
        char text[1024];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        fprintf(stderr, "failed: %s\n", text);
    }
    if (getenv("SW_CHECK_FIRST"))
        _exit(1);
    return false;
}

int check_result(void)
{
    printf("%ld passed, %ld failed\n", atomic_load(&passed), atomic_load(&failed));
    if (atomic_load(&passed) == 0)
        fprintf(stderr, "failed: the program made no checks\n");
    return atomic_load(&failed) != 0 || atomic_load(&passed) == 0;
}

const char *sw_status_name(sw_status status)
{
    static const char *const names[] = {
        "SW_OK",        "SW_E_INVALID",     "SW_E_MEMORY",   "SW_E_OS",
        "SW_E_STATE",   "SW_E_UNSUPPORTED", "SW_E_MISMATCH", "SW_E_COMM",
        "SW_E_TIMEOUT", "SW_E_INTERRUPTED", "SW_E_DEVICE",
    };
    return (unsigned)status < sizeof names / sizeof names[0] ? names[status] : "SW_E_?";
}
