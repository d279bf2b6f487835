/* device_kernels.h - the kernels that run on a device, and their meaning.
 *
 * A kernel is named by a number and takes one structure (kernel_args.h). Its contract checks the
 * arguments and chooses the grid. A function of the host with the same meaning, and the ranges of
 * memory that the kernel accesses, are beside the engine (csrc_check/kernel_references.h).
 *
 *   CAST          to[i] = round(from[i] * scale) to to_dtype; any of float32, float16, bfloat16
 *   PACK          copies up to SW_PACK_SEGMENT_MAX segments: tensors into a bucket, or back, or
 *                 zeros, in one range each or in pieces with a pitch; with a verdict, only if that
 *                 is 0. With `converts` to[i] = round(from[i] * scale) as
 *                 CAST, with *factor in place of scale; a segment that is its own target is left
 *                 alone if that is 1
 *   FOLD          kernels.h's fold over contributions in rank order, with the host's bits; with an
 *                 addend, each contribution is addend + contribution rounded to the dtype
 *   ADAM, SGD     optim_kernels.h's steps on up to SW_RUNS_MAX runs, with the host's bits; with
 *                 `clip`, unless that is 1, first g = round(g * *clip)
 *   NORM          *sum += squares of up to SW_NORM_PARTS_MAX arrays, exactly: equal to the host's
 *                 sum once both are carried. At most 2^31 elements between two carries
 *   CLIP          *sum is carried; *norm = its square root (sw_norm_value), and *factor =
 *                 max_norm / (norm + 1e-6) if that is not at least 1, else 1
 *   QUANTIZE      compress_kernels.h's block records, 8 or 4 bits, of up to SW_BLOCK_PARTS_MAX runs
 *                 of elements; records lie on a 4-byte boundary
 *   FOLD_RECORDS  records of scale * the sum of decoded contributions in rank order, and the
 *                 residual of that rounding (NaN if the sum is not finite)
 *   DECODE        on up to SW_BLOCK_PARTS_MAX runs: with an error, if *verdict is 0, first
 *                 error = (values + error) - decoded own; with records, then values = decoded
 *   VERDICT       *verdict = 1 if a record has the scale NaN; else it is not written
 *   OWE           on up to SW_BLOCK_PARTS_MAX runs: error += rest * scale if *verdict is 0. A round
 *                 keeps its error only if all its values are finite, and the host does not wait to
 *                 see that
 *   PROJECT, ABSORB, EXPAND
 *                 compress_kernels.h's passes over up to SW_MATRICES_MAX matrices.
 *                 PROJECT: gradient = v, out = basis vᵀ.
 *                 ABSORB, if *verdict is 0: memory = v, out = copy = left v (out NULL: memory
 *                 alone; copy NULL: no copy).
 *                 EXPAND: gradient = leftᵀ right if *verdict is 0, else NaN; if *verdict is
 *                 SW_REFUSED_LATE, memory and out become zeros
 *   ORTHONORMALIZE
 *                 the rows of up to SW_FACTORS_MAX factors, if *verdict is 0
 *   FINITE        *verdict = refusal if it is 0 and one of the values is not finite
 *   PUT           to[i] = byte[i], up to SW_PUT_BYTES_MAX bytes that travel in the arguments, so
 *                 that no host memory has to outlive the call
 *
 * Memory is the caller's and must live until the stream has passed the launch. Cost: the accessed
 * bytes, once each; QUANTIZE and FOLD_RECORDS read records of more than 512 elements twice.
 *
 * Thread rule: any; a kernel set is read-only once created.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "device/device.h"
#include "kernels/kernel_args.h"
#include "kernels/kernel_image.h"

/* Every kernel, by its number and its noun. */
/* clang-format off */
#define SW_KERNELS(each)                                                               \
    each(CAST, cast) each(PACK, pack) each(FOLD, fold) each(ADAM, adam) each(SGD, sgd) \
    each(NORM, norm) each(CLIP, clip) each(QUANTIZE, quantize)                         \
    each(FOLD_RECORDS, fold_records) each(DECODE, decode) each(VERDICT, verdict)       \
    each(OWE, owe) each(PROJECT, project) each(ABSORB, absorb) each(EXPAND, expand)    \
    each(ORTHONORMALIZE, orthonormalize) each(FINITE, finite) each(PUT, put)
/* clang-format on */

#define SW_KERNEL_NUMBER(number, noun) SW_KERNEL_##number,
typedef enum sw_kernel { SW_KERNELS(SW_KERNEL_NUMBER) SW_KERNEL_COUNT } sw_kernel;

typedef struct sw_kernel_contract {
    const char *name; /* name of the .cu function */
    size_t args_bytes;
    /* Return SW_E_INVALID with the argument that is out of range. */
    sw_status (*check)(const void *args, sw_error *err);
    sw_grid (*grid)(const void *args, int processor_count);
} sw_kernel_contract;

/* Return the contracts of all kernels, by number. */
const sw_kernel_contract *sw_kernel_contracts(void);

typedef struct sw_kernel_set {
    sw_device *device; /* borrowed: outlives the set */
    sw_module *module; /* owned; NULL on the host */
    sw_function *function[SW_KERNEL_COUNT];
    sw_image_origin origin; /* the place where the image was found */
} sw_kernel_set;

/* Load the kernels of `device`; of a GPU find or compile their image (kernel_image.h). */
SW_MUST_USE sw_status sw_kernel_set_init(sw_kernel_set *set, sw_device *device,
                                         const sw_image_places *places, sw_error *err);
void sw_kernel_set_fini(sw_kernel_set *set);

/* Enqueue a kernel on `stream`. `args` is copied. */
SW_MUST_USE sw_status sw_kernel_launch(const sw_kernel_set *set, sw_kernel kernel, const void *args,
                                       sw_stream *stream, sw_error *err);
