/* device_kernels.h - the kernels that run on a device: what each does, and what it may touch.
 *
 * Idea: a kernel is named by a number and takes one structure (kernel_args.h). Its contract says
 * which ranges of memory it reads and writes and names a host function of the same meaning. The
 * host device calls that function; a GPU runs the .cu kernel of the same name; the simulated driver
 * of the tests calls the function too and holds it to the declared ranges.
 *
 *   CAST        to[i] = round(from[i] * scale) to to_dtype; float32, float16 and bfloat16 each way
 *   PACK        copies up to SW_PACK_SEGMENT_MAX segments: tensors into a bucket, or back; with a
 *               verdict, only if that is 0
 *   FOLD        kernels.h's fold over contributions in rank order: the same bits as on the host;
 *               with an addend, over the sums of that and each contribution, rounded to the dtype
 *   ADAM, SGD   optim_kernels.h's steps on up to SW_RUNS_MAX runs: the same bits as on the host
 *   NORM        *sum += squares, exactly: equal to the host's sum once both are carried. At most
 *               2^31 elements between two carries
 *   QUANTIZE    compress_kernels.h's block records, 8 or 4 bits, of up to SW_BLOCK_PARTS_MAX runs
 * of elements; records on a 4-byte boundary FOLD_RECORDS  records of scale * the sum of decoded
 * contributions in rank order, and what that rounding left out (NaN where it is not a number)
 *   DECODE      of as many runs: first, where there is an error and *verdict is 0, error = (values
 *               + error) - decoded own; then values = decoded records, where there are some
 *   VERDICT     *verdict becomes 1 if one of the records has met something that is not finite;
 *               else it stays
 *   OWE         of as many runs: error += rest * scale, unless *verdict: what a round left out is
 *               kept only if all of the round was finite, and the host does not wait to know
 *   PROJECT, ABSORB, EXPAND   compress_kernels.h's passes over up to SW_MATRICES_MAX matrices.
 * PROJECT: gradient = v, out = basis vᵀ. ABSORB, if *verdict is 0: memory = v, out and copy = left
 *               v (out NULL: memory alone; copy NULL: none). EXPAND: gradient = leftᵀ right if
 * *verdict is 0, else NaN; and if it is SW_REFUSED_LATE, memory and out become zeros ORTHONORMALIZE
 * rows of up to SW_FACTORS_MAX factors, unless *verdict FINITE      *verdict becomes `refusal` if
 * it is 0 and one of the values is not finite
 *   PUT         to[i] = byte[i], up to SW_PUT_BYTES_MAX bytes that travel in the arguments: no host
 *               memory has to outlive the call
 *
 * Memory is the caller's and must live until the stream has passed the launch. Cost: the bytes that
 * the contract declares, once each (QUANTIZE and FOLD_RECORDS read records of more
 * than 512 elements twice).
 *
 * Thread rule: any; a kernel set is read-only once created.
 */
#ifndef SW_KERNELS_DEVICE_KERNELS_H
#define SW_KERNELS_DEVICE_KERNELS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "device/device.h"
#include "kernels/kernel_args.h"
#include "kernels/kernel_image.h"

typedef enum sw_kernel {
    SW_KERNEL_CAST = 0,
    SW_KERNEL_PACK,
    SW_KERNEL_FOLD,
    SW_KERNEL_ADAM,
    SW_KERNEL_SGD,
    SW_KERNEL_NORM,
    SW_KERNEL_QUANTIZE,
    SW_KERNEL_FOLD_RECORDS,
    SW_KERNEL_DECODE,
    SW_KERNEL_VERDICT,
    SW_KERNEL_OWE,
    SW_KERNEL_PROJECT,
    SW_KERNEL_ABSORB,
    SW_KERNEL_EXPAND,
    SW_KERNEL_ORTHONORMALIZE,
    SW_KERNEL_FINITE,
    SW_KERNEL_PUT,
    SW_KERNEL_COUNT,
} sw_kernel;

typedef enum sw_access { SW_ACCESS_READ = 1, SW_ACCESS_WRITE = 2, SW_ACCESS_BOTH = 3 } sw_access;

/* Called for each range; ranges of 0 bytes may come. */
typedef void sw_access_fn(void *context, const void *begin, size_t size_bytes, sw_access access);

typedef struct sw_kernel_contract {
    const char *name; /* of the .cu function */
    size_t args_bytes;
    /* SW_E_INVALID names the argument that has no meaning. */
    sw_status (*check)(const void *args, sw_error *err);
    void (*accesses)(const void *args, sw_access_fn *report, void *context);
    void (*reference)(const void *args);
    sw_grid (*grid)(const void *args, int processor_count);
} sw_kernel_contract;

/* All of them, by number. */
const sw_kernel_contract *sw_kernel_contracts(void);

typedef struct sw_kernel_set {
    sw_device *device; /* borrowed: outlives the set */
    sw_module *module; /* owned; NULL on the host */
    sw_function *function[SW_KERNEL_COUNT];
    sw_image_origin origin; /* where the image came from */
} sw_kernel_set;

/* Makes the kernels of `device` ready: on a GPU finds or compiles their image (kernel_image.h). */
SW_MUST_USE sw_status sw_kernel_set_init(sw_kernel_set *set, sw_device *device,
                                         const sw_image_places *places, sw_error *err);
void sw_kernel_set_fini(sw_kernel_set *set);

/* Enqueues a kernel on `stream`; the host device runs it. `args` is copied. */
SW_MUST_USE sw_status sw_kernel_launch(const sw_kernel_set *set, sw_kernel kernel, const void *args,
                                       sw_stream *stream, sw_error *err);

#endif
