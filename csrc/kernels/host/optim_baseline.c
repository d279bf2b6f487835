/* optim_baseline.c - the optimizer and norm bodies for what every processor of this architecture
 * runs.
 *
 * SSE2 on x86-64, where a fused multiply-add is made of double arithmetic; NEON on aarch64, which
 * has one.
 */
#if defined(__aarch64__)
#define KERNEL_FMA 1
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif
#define NORM_VECTOR_BYTES 16
#define OPTIM_TABLE sw_optim_kernels_baseline
#include "kernels/host/norm_body.h"
#include "kernels/host/optim_body.h"
