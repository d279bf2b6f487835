/* kernel_source.h - the text of the device kernels inside the engine. Thread rule: any. */
#pragma once

/* Return kernel_args.h and all of cuda/ as one zero-terminated text for a CUDA compiler. */
const char *sw_kernel_source(void);

/* The compiler options of that text, NULL-terminated, without the architecture. */
extern const char *const sw_kernel_options[];
