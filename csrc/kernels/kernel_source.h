/* kernel_source.h - the text of the device kernels, as the engine carries it. Thread rule: any. */
#ifndef SW_KERNELS_KERNEL_SOURCE_H
#define SW_KERNELS_KERNEL_SOURCE_H

/* kernel_args.h and all of cuda/, ready for a CUDA compiler, zero-terminated; never NULL. */
const char *sw_kernel_source(void);

/* What that text must be compiled with, NULL-terminated; the architecture comes beside. */
extern const char *const sw_kernel_options[];

#endif
