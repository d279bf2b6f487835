/* optim_baseline.c - the optimizer and norm bodies for the instructions that every processor of an
 * architecture has.
 *
 * SSE2 on x86-64, where double arithmetic emulates a fused multiply-add; NEON on aarch64, which has
 * the instruction.
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
