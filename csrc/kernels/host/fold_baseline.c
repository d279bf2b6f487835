/* fold_baseline.c - the fold body for what every processor of this architecture runs.
 *
 * SSE2 on x86-64, NEON on aarch64: the compiler's own choice, no pragma. float16 is converted in
 * integer arithmetic here, with the same bits as the conversion instructions of the other tables.
 */
#define FOLD_TABLE sw_kernels_baseline
#define FOLD_TABLE_NAME "baseline"
#define OPTIM_TABLE sw_optim_kernels_baseline
#define COMPRESS_TABLE sw_compress_kernels_baseline
#include "kernels/host/fold_body.h"
