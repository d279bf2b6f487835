/* device_powersgd_round.h - a bucket through matrices of low rank between GPUs: the rounds of
 * powersgd_round.c, enqueued. A pass handles all matrices in one launch.
 *
 * A verdict in device memory says whether an average was finite; if not, it keeps later passes from
 * changing state and makes the result NaN. Both exchanges of a round therefore always run. In a
 * refused round this rank's Q is undefined.
 *
 * Thread rule: as the communicator's. */
#pragma once

#include "comm/device_comm.h"
#include "compress/powersgd.h"

typedef struct sw_device_matrix {
    sw_powersgd matrix; /* in device memory */
    bool begins;        /* its basis is drawn first */
} sw_device_matrix;

typedef struct sw_device_small { /* a parameter that travels whole; averaged in place */
    float *values;
    size_t numel;
} sw_device_small;

typedef struct sw_device_factors {
    sw_device_matrix *matrices; /* borrowed */
    size_t matrix_count;
    const sw_device_small *small; /* borrowed */
    size_t small_count;
    sw_dtype wire; /* of factors: float32, float16 or bfloat16 */
    bool settles;  /* with a 16-bit wire: factors' rounding errors are fed back */
} sw_device_factors;

/* Device memory of the caller, borrowed until the stream has passed the call. */
typedef struct sw_device_factor_memory {
    uint8_t *message, *received, *whole; /* world_size slices of slice_bytes */
    float *scratch;                      /* scratch_numel; NULL for a float32 wire */
    int32_t *verdict;                    /* two: the verdict, and a zero */
} sw_device_factor_memory;

/* Return the memory that a bucket needs. */
void sw_device_factor_sizes(const sw_device_factors *factors, int world_size, size_t *slice_bytes,
                            size_t *scratch_numel);
/* Enqueue the mean of matrices and small parameters. *sent_bytes: to peers. */
SW_MUST_USE sw_status sw_device_powersgd_round(sw_device_comm *comm,
                                               const sw_device_factors *factors,
                                               const sw_device_factor_memory *memory,
                                               sw_stream *stream, uint64_t *sent_bytes,
                                               sw_error *err);
