/* status.h - the status and the error that every fallible function of the engine returns.
 *
 * The first function that knows the meaning of a failure writes one sentence: operation, argument,
 * legal range, value given. Every caller above it passes the error on unchanged. The three macros
 * below do this, and there is no fourth.
 *
 * Thread rule: any; an sw_error belongs to one call chain.
 */
#pragma once

#if defined(__GNUC__)
#define SW_MUST_USE __attribute__((warn_unused_result))
#define SW_PRINTF(format_index, first) __attribute__((format(printf, format_index, first)))
#else
#define SW_MUST_USE
#define SW_PRINTF(format_index, first)
#endif

typedef enum sw_status {
    SW_OK = 0,
    SW_E_INVALID,     /* an argument is out of its legal range: ValueError */
    SW_E_MEMORY,      /* an allocation failed or a limit forbids it: MemoryError */
    SW_E_OS,          /* a system call failed, detail is errno: OSError */
    SW_E_STATE,       /* a call that the current state forbids: sw.Error */
    SW_E_UNSUPPORTED, /* a valid request that this build, host or device lacks: NotImplementedError
                       */
    SW_E_MISMATCH,    /* ranks disagree: sw.Error */
    SW_E_COMM,        /* a peer died or left, detail is its rank: sw.CommError */
    SW_E_TIMEOUT,     /* a deadline passed, detail is the rank waited for: sw.CommTimeoutError */
    SW_E_INTERRUPTED, /* a signal handler raised during a wait: the exception it raised */
    SW_E_DEVICE, /* the CUDA driver or NCCL failed, detail is CUresult or ncclResult_t: sw.Error */
} sw_status;

enum { SW_ERROR_MESSAGE_BYTES = 512 };

typedef struct sw_error { /* caller-owned, may be NULL; one per call chain */
    sw_status status;     /* callers branch on it */
    int detail;           /* errno, rank, CUresult or ncclResult_t, by status; -1: none */
    char message[SW_ERROR_MESSAGE_BYTES];
} sw_error;

/* Write the error (`err` may be NULL) and return `status`. Call it through SW_FAIL. */
sw_status sw_error_set(sw_error *err, sw_status status, int detail, const char *format, ...)
    SW_PRINTF(4, 5);

/* Pass on an error that was met before, and return its status. */
static inline sw_status sw_error_pass(sw_error *err, const sw_error *met)
{
    if (err)
        *err = *met;
    return met->status;
}

#define SW_FAIL(err, status, ...) return sw_error_set((err), (status), -1, __VA_ARGS__)
#define SW_TRY(expr)                       \
    do {                                   \
        sw_status sw_try_status_ = (expr); \
        if (sw_try_status_ != SW_OK)       \
            return sw_try_status_;         \
    } while (0)
#define SW_TRY_GOTO(status, expr, label) \
    do {                                 \
        (status) = (expr);               \
        if ((status) != SW_OK)           \
            goto label;                  \
    } while (0)
