/* nvrtc.h - compile CUDA text to an image for one GPU with NVRTC, opened by name at run time.
 *
 * The used part of NVRTC's interface is declared by hand; tests/abi compares it with the real
 * nvrtc.h. The file is valid C and C++. Thread rule: any.
 */
#pragma once

#include <stddef.h>

#include "base/status.h"

typedef int sw_nvrtc_result; /* nvrtcResult; 0 is success */
typedef struct _nvrtcProgram *sw_nvrtc_program;

#define SW_NVRTC_FUNCTIONS(X)                                                              \
    X(nvrtcVersion, (int *major, int *minor))                                              \
    X(nvrtcGetNumSupportedArchs, (int *count))                                             \
    X(nvrtcGetSupportedArchs, (int *archs))                                                \
    X(nvrtcCreateProgram,                                                                  \
      (sw_nvrtc_program * program, const char *source, const char *name, int header_count, \
       const char *const *headers, const char *const *names))                              \
    X(nvrtcCompileProgram,                                                                 \
      (sw_nvrtc_program program, int option_count, const char *const *options))            \
    X(nvrtcDestroyProgram, (sw_nvrtc_program * program))                                   \
    X(nvrtcGetProgramLogSize, (sw_nvrtc_program program, size_t *bytes))                   \
    X(nvrtcGetProgramLog, (sw_nvrtc_program program, char *log))                           \
    X(nvrtcGetCUBINSize, (sw_nvrtc_program program, size_t *bytes))                        \
    X(nvrtcGetCUBIN, (sw_nvrtc_program program, char *cubin))                              \
    X(nvrtcGetPTXSize, (sw_nvrtc_program program, size_t *bytes))                          \
    X(nvrtcGetPTX, (sw_nvrtc_program program, char *ptx))

typedef struct sw_nvrtc_table {
#define SW_NVRTC_FIELD(name, parameters) sw_nvrtc_result(*name) parameters;
    SW_NVRTC_FUNCTIONS(SW_NVRTC_FIELD)
#undef SW_NVRTC_FIELD
} sw_nvrtc_table;

/* Compile `source` for compute capability major.minor with the compiler in `library`. If the
 * compiler is older than the GPU, the image is PTX of the newest architecture below, which the
 * driver translates. *image is malloc'ed. `builtins` (may be NULL) is the path of a companion
 * library that the compiler opens by its bare name: it is loaded first. SW_E_UNSUPPORTED names a
 * library that cannot be used, or the architecture; SW_E_STATE quotes the start of the compiler's
 * log. */
SW_MUST_USE sw_status sw_nvrtc_compile(const char *library, const char *builtins,
                                       const char *source, const char *const *options, int major,
                                       int minor, void **image, size_t *size_bytes, sw_error *err);

/* Read the compiler's version. SW_E_UNSUPPORTED names a library that cannot be used. */
SW_MUST_USE sw_status sw_nvrtc_version(const char *library, const char *builtins, int *major,
                                       int *minor, sw_error *err);
