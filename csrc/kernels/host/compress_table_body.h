/* compress_table_body.h - the table of the functions that block_body.h, exact_body.h and
 * lowrank_body.h define. The includer sets its name, COMPRESS_TABLE. */
#include "kernels/host/tables.h"

const sw_compress_kernels COMPRESS_TABLE = {
    .exact_pack = exact_pack,
    .exact_unpack = exact_unpack,
    .half_narrow = half_narrow,
    .half_widen = half_widen,
    .block_quantize = block_quantize,
    .block_dequantize = block_dequantize,
    .block_residual = block_residual,
    .lowrank_project = lowrank_project,
    .lowrank_absorb = lowrank_absorb,
    .lowrank_expand = lowrank_expand,
    .lowrank_orthonormalize = lowrank_orthonormalize,
};
