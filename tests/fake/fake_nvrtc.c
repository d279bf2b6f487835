/* fake_nvrtc.c - NVRTC's part of the fake libcuda.so.1: its image is any text that the fake driver
 * takes. The environment's SIM_NVRTC_VERSION is its version, such as 12.8. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

static const char image[] = "an image of the simulated compiler";

SIM_API int nvrtcVersion(int *major, int *minor)
{
    const char *version = getenv("SIM_NVRTC_VERSION");
    return sscanf(version ? version : "13.0", "%d.%d", major, minor) == 2 ? 0 : 1;
}

SIM_API int nvrtcGetNumSupportedArchs(int *count)
{
    *count = 1;
    return 0;
}

SIM_API int nvrtcGetSupportedArchs(int *archs)
{
    *archs = 90;
    return 0;
}

SIM_API int nvrtcCreateProgram(void **program, const char *source, const char *name, int count,
                               const char *const *headers, const char *const *names)
{
    (void)source, (void)name, (void)count, (void)headers, (void)names;
    *program = NULL;
    return 0;
}

SIM_API int nvrtcCompileProgram(void *program, int count, const char *const *options)
{
    (void)program, (void)count, (void)options;
    return 0;
}

SIM_API int nvrtcDestroyProgram(void **program)
{
    *program = NULL;
    return 0;
}

SIM_API int nvrtcGetProgramLogSize(void *program, size_t *bytes)
{
    (void)program;
    *bytes = 0;
    return 0;
}

SIM_API int nvrtcGetProgramLog(void *program, char *log)
{
    (void)program, (void)log;
    return 0;
}

SIM_API int nvrtcGetCUBINSize(void *program, size_t *bytes)
{
    (void)program;
    *bytes = sizeof image;
    return 0;
}

SIM_API int nvrtcGetCUBIN(void *program, char *cubin)
{
    (void)program;
    memcpy(cubin, image, sizeof image);
    return 0;
}

SIM_API int nvrtcGetPTXSize(void *program, size_t *bytes)
{
    return nvrtcGetCUBINSize(program, bytes);
}

SIM_API int nvrtcGetPTX(void *program, char *ptx)
{
    return nvrtcGetCUBIN(program, ptx);
}
