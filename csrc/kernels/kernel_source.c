/* kernel_source.c - the .cu files as bytes of the engine, so that none is searched at run time.
 *
 * The assembler's .incbin includes them one after the other, in the order of their dependencies.
 * Paths are relative to the root of the tree, where every build runs the compiler.
 */
#include "kernels/kernel_source.h"

#define PART(path) "    .incbin \"csrc/kernels/" path "\"\n"

__asm__("    .pushsection .rodata\n"
        "sw_kernel_source_text:\n" /* a symbol local to this object */
        PART("kernel_args.h") PART("cuda/prelude.cuh") PART("cuda/move.cu") PART("cuda/fold.cu")
            PART("cuda/optim_steps.cu") PART("cuda/square_sum.cu") PART("cuda/block_codec.cu")
                PART("cuda/lowrank.cu") PART("cuda/orthonormal_rows.cu") "    .byte 0\n"
                                                                         "    .popsection\n");

extern const char sw_kernel_source_text[] __attribute__((visibility("hidden")));

const char *const sw_kernel_options[] = {
    "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", (void *)0,
};

const char *sw_kernel_source(void)
{
    return sw_kernel_source_text;
}
