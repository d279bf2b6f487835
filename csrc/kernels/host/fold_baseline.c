/* fold_baseline.c - the fold body for the instructions that every processor of an architecture has.
 *
 * The compiler's default, without a pragma: SSE2 on x86-64, NEON on aarch64. float16 is converted
 * here in integer arithmetic, with the bits of the conversion instructions of the other tables.
 */
#define FOLD_TABLE sw_kernels_baseline
#define FOLD_TABLE_NAME "baseline"
#define OPTIM_TABLE sw_optim_kernels_baseline
#define COMPRESS_TABLE sw_compress_kernels_baseline
#include "kernels/host/fold_body.h"
