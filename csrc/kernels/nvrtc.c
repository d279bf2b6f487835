/* nvrtc.c - drive NVRTC; see nvrtc.h. The library stays loaded, since torch uses it too. */
#include "kernels/nvrtc.h"

#include <locale.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "platform/library.h"

enum { OPTION_MAX = 16, ARCH_MAX = 128, LOG_SHOWN_BYTES = 300 };

static const sw_library_symbol symbols[] = {
#define SYMBOL(name, parameters) {#name, offsetof(sw_nvrtc_table, name)},
    SW_NVRTC_FUNCTIONS(SYMBOL)
#undef SYMBOL
};

typedef struct target {
    int arch;    /* 10 * major + minor of the GPU, or of the newest known architecture below it */
    bool native; /* NVRTC can make a cubin of the GPU's own architecture */
} target;

static sw_status check(sw_nvrtc_result result, const char *call, sw_error *err)
{
    if (result == 0)
        return SW_OK;
    return sw_error_set(err, SW_E_STATE, result, "%s failed with result %d", call, result);
}

static sw_status choose_target(const sw_nvrtc_table *call, int wanted, target *chosen,
                               sw_error *err)
{
    int count = 0, archs[ARCH_MAX], best = 0;
    SW_TRY(check(call->nvrtcGetNumSupportedArchs(&count), "nvrtcGetNumSupportedArchs", err));
    if (count < 1 || count > ARCH_MAX)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "nvrtc: the number of its architectures must be in [1, %d], not %d", ARCH_MAX,
                count);
    SW_TRY(check(call->nvrtcGetSupportedArchs(archs), "nvrtcGetSupportedArchs", err));
    for (int i = 0; i < count; ++i)
        if (archs[i] <= wanted && archs[i] > best)
            best = archs[i];
    if (best == 0)
        SW_FAIL(err, SW_E_UNSUPPORTED,
                "nvrtc: it has no architecture as old as sm_%d; its oldest is sm_%d", wanted,
                archs[0]);
    *chosen = (target){.arch = best, .native = best == wanted};
    return SW_OK;
}

/* Fail with the start of the compiler's log, as much as fits. */
static sw_status fail_with_log(const sw_nvrtc_table *call, sw_nvrtc_program program,
                               const target *chosen, sw_error *err)
{
    size_t bytes = 0;
    char *log = NULL;
    if (call->nvrtcGetProgramLogSize(program, &bytes) == 0)
        log = calloc(bytes + 1, 1);
    if (log)
        (void)call->nvrtcGetProgramLog(program, log);
    sw_error_set(err, SW_E_STATE, -1, "nvrtc could not compile the kernels for sm_%d: %.*s",
                 chosen->arch, LOG_SHOWN_BYTES, log ? log : "");
    free(log);
    return SW_E_STATE;
}

static sw_status compile(const sw_nvrtc_table *call, sw_nvrtc_program program,
                         const char *const *options, const target *chosen, sw_error *err)
{
    const char *given[OPTION_MAX];
    char arch[64];
    int count = 0;
    snprintf(arch, sizeof arch, "--gpu-architecture=%s_%d", chosen->native ? "sm" : "compute",
             chosen->arch);
    given[count++] = arch;
    for (; options[count - 1] && count < OPTION_MAX; ++count)
        given[count] = options[count - 1];
    locale_t before = uselocale((locale_t)0); /* nvrtc 12.1 leaves the thread in the C locale */
    sw_nvrtc_result result = call->nvrtcCompileProgram(program, count, given);
    uselocale(before);
    if (result != 0)
        return fail_with_log(call, program, chosen, err);
    return SW_OK;
}

static sw_status fetch(const sw_nvrtc_table *call, sw_nvrtc_program program, bool native,
                       void **image, size_t *size_bytes, sw_error *err)
{
    size_t bytes = 0;
    SW_TRY(check(native ? call->nvrtcGetCUBINSize(program, &bytes)
                        : call->nvrtcGetPTXSize(program, &bytes),
                 "nvrtcGetCUBINSize", err));
    char *made = malloc(bytes ? bytes : 1);
    if (!made)
        SW_FAIL(err, SW_E_MEMORY, "nvrtc: no memory for an image of %zu bytes", bytes);
    sw_status status =
        check(native ? call->nvrtcGetCUBIN(program, made) : call->nvrtcGetPTX(program, made),
              "nvrtcGetCUBIN", err);
    if (status != SW_OK) {
        free(made);
        return status;
    }
    *image = made;
    *size_bytes = bytes;
    return SW_OK;
}

static sw_status bind(const char *library, const char *builtins, sw_nvrtc_table *call,
                      sw_error *err)
{
    void *handle, *companion;
    if (builtins)
        SW_TRY(sw_library_open(builtins, SW_LIBRARY_ANY, &companion, err));
    SW_TRY(sw_library_open(library, SW_LIBRARY_ANY, &handle, err));
    return sw_library_bind(handle, library, symbols, sizeof symbols / sizeof *symbols, call, err);
}

sw_status sw_nvrtc_version(const char *library, const char *builtins, int *major, int *minor,
                           sw_error *err)
{
    sw_nvrtc_table call;
    SW_TRY(bind(library, builtins, &call, err));
    return check(call.nvrtcVersion(major, minor), "nvrtcVersion", err);
}

sw_status sw_nvrtc_compile(const char *library, const char *builtins, const char *source,
                           const char *const *options, int major, int minor, void **image,
                           size_t *size_bytes, sw_error *err)
{
    sw_nvrtc_table call;
    sw_nvrtc_program program = NULL;
    target chosen = {0};
    sw_status status;
    SW_TRY(bind(library, builtins, &call, err));
    SW_TRY(choose_target(&call, 10 * major + minor, &chosen, err));
    SW_TRY(check(call.nvrtcCreateProgram(&program, source, "shardwright.cu", 0, NULL, NULL),
                 "nvrtcCreateProgram", err));
    SW_TRY_GOTO(status, compile(&call, program, options, &chosen, err), destroy);
    status = fetch(&call, program, chosen.native, image, size_bytes, err);
destroy:
    (void)call.nvrtcDestroyProgram(&program);
    return status;
}
