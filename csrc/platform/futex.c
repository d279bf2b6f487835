/* futex.c - the two calls. Not FUTEX_PRIVATE: the words live in memory that processes share. */
#include "platform/futex.h"

#include <limits.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { WAIT = 0, WAKE = 1 }; /* FUTEX_ of linux/futex.h, which a machine with musl may lack */

void sw_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns)
{
    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / 1000000000),
                               .tv_nsec = (long)(timeout_ns % 1000000000)};
    syscall(SYS_futex, word, WAIT, expected, &timeout, NULL, 0);
}

void sw_futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, WAKE, INT_MAX, NULL, NULL, 0);
}
