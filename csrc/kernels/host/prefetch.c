/* prefetch.c - the answer of sw_prefetches(), kept. */
#include "kernels/host/prefetch.h"

#include <stdatomic.h>

#include "platform/cpu.h"

bool sw_prefetches(void)
{
    enum { UNKNOWN, NO, YES };
    static atomic_int kept;
    int answer = atomic_load_explicit(&kept, memory_order_relaxed);
    if (answer == UNKNOWN) {
        answer = sw_cpu_is_amd() ? NO : YES;
        atomic_store_explicit(&kept, answer, memory_order_relaxed);
    }
    return answer == YES;
}
