/* cpu.h - the instructions that this processor and operating system support.
 *
 * Idea: a feature counts only if every instruction of the matching kernel table may be executed:
 * the processor has it and the system saves its registers.
 *
 * Thread rule: any. Each call of sw_cpu queries the processor (about a microsecond in a virtual
 * machine), so callers cache the result.
 */
#pragma once

#include <stdbool.h>

/* The CRC32C instruction: SSE4.2 on x86-64, the optional CRC32 of Armv8.0 on aarch64. */
bool sw_cpu_has_crc32c(void);

/* Return whether loops over large arrays prefetch: false where the processor does enough by itself.
 * AMD's hardware prefetchers keep up with several streams, and software prefetches slow them down.
 * The answer is kept. */
bool sw_prefetches(void);

#if defined(__x86_64__)
/* AVX2, F16C and FMA. */
bool sw_cpu_has_avx2_f16c_fma(void);

/* AVX-512 F, BW, VL and DQ; implies sw_cpu_has_avx2_f16c_fma(). */
bool sw_cpu_has_avx512(void);
#endif
