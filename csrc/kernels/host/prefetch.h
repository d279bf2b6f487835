/* prefetch.h - whether loops over large arrays prefetch.
 *
 * Thread rule: any. The answer is kept, and never changes bits.
 */
#ifndef SW_KERNELS_HOST_PREFETCH_H
#define SW_KERNELS_HOST_PREFETCH_H

#include <stdbool.h>

/* Return false where the processor prefetches enough by itself. */
bool sw_prefetches(void);

#endif
