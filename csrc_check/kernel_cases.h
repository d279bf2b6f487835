/* kernel_cases.h - arguments with which every device kernel can be compared with its reference.
 *
 * Idea: a case is a kernel's number and an index. Making it fills an arena of host memory with
 * inputs, outputs and guard bytes and returns arguments that point into it. The same index gives
 * the same bytes every time, so a case can be made once for the reference and once for the kernel,
 * and moved to device memory (sw_kernel_case_move). The cases cover every dtype and option, sizes
 * 0, 1, odd tails and several tiles, and arrays on and off boundaries.
 *
 * Users: kernel_check.h on a device; tests/fake/test_kernel_text.c on the text itself.
 *
 * Thread rule: any; a case belongs to one thread.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/device_kernels.h"

enum {
    SW_CASE_BYTES = 1 << 18,     /* size of the arena for most cases */
    SW_CASE_BYTES_MAX = 1 << 22, /* for the largest; a multiple of SW_CASE_BYTES */
    SW_CASE_ALIGNMENT = 256,     /* alignment of the arena, as by device allocators */
    SW_CASE_GUARD = 0xab,        /* bytes that no array covers */
};

typedef union sw_any_args {
    unsigned char bytes[4096];
    sw_cast_args cast;
    sw_pack_args pack;
    sw_fold_args fold;
    sw_adam_args adam;
    sw_sgd_args sgd;
    sw_norm_args norm;
    sw_clip_args clip;
    sw_quantize_args quantize;
    sw_fold_records_args fold_records;
    sw_decode_args decode;
    sw_verdict_args verdict;
    sw_owe_args owe;
    sw_matrices_args matrices; /* of PROJECT, ABSORB and EXPAND */
    sw_orthonormalize_args orthonormalize;
    sw_finite_args finite;
    sw_put_args put;
} sw_any_args;

typedef struct sw_kernel_case {
    sw_any_args args;
    const char *label;  /* static text */
    size_t arena_bytes; /* SW_CASE_BYTES or more */
} sw_kernel_case;

/* Return the number of cases of a kernel. */
size_t sw_kernel_case_count(sw_kernel kernel);

/* Fill `arena` (SW_CASE_BYTES_MAX, aligned to SW_CASE_ALIGNMENT) and *made with case `index`. */
void sw_kernel_case_make(sw_kernel kernel, size_t index, unsigned char *arena,
                         sw_kernel_case *made);

/* Normalise memory that a kernel or a reference has written, so that equal results have equal
 * bytes. The digits of a sum are carried. Each NaN becomes the same NaN, because the processor
 * chooses the sign and the payload of a computed one. `args` point into host memory. */
void sw_kernel_case_settle(sw_kernel kernel, const void *args);

/* Make arguments that point into the arena at `from` point to the same places of the arena at `to`.
 * A word of the arguments that lies inside the arena is a pointer: no size, number or factor of a
 * case is as large as an address. */
void sw_kernel_case_move(sw_kernel kernel, sw_kernel_case *moved, const unsigned char *from,
                         uintptr_t to);
