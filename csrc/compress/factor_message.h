/* factor_message.h - the message of PowerSGD: factors of a bucket's matrices, in float32 or 16
 * bits, and whole small parameters beside them.
 *
 * Each of the W slices of a 16-bit message has a part of the factors, then a part of the small
 * parameters in float32, which have no error feedback. Factors have it: see settle.
 *
 * Thread rule: one at a time. */
#pragma once

#include "compress/compressor_state.h"

typedef struct sw_small { /* a parameter that travels whole; averaged in place */
    float *values;
    size_t numel;
} sw_small;

typedef struct sw_factor_message {
    sw_exchange *exchange;
    sw_dtype wire;
    size_t head; /* elements of factors */
    const sw_small *small;
    size_t small_count, small_numel;
    size_t share, small_share, slice_bytes; /* of a slice; float32: share has both */
    uint8_t *message, *result;
    float *own, *whole, *sum, *term, *flat; /* 16 bits: parts of the scratch */
} sw_factor_message;

/* Begin a message. *own: memory for this rank's factors, valid until the next begin. */
SW_MUST_USE sw_status sw_factor_message_begin(sw_factor_message *m, sw_compressor *compressor,
                                              size_t head, const sw_small *small,
                                              size_t small_count, sw_exchange *exchange,
                                              float **own, sw_error *err);
/* *mean: the ranks' mean factors, with the same bits on all of them. Averages the small ones. */
SW_MUST_USE sw_status sw_factor_message_average(sw_factor_message *m, float **mean, sw_error *err);
/* 16 bits: return this rank's factors as the wire has counted them: encoded, times W. Their mean is
 * what average gave, as the owner of a slice adds W times the rounding error of the mean. */
const float *sw_factor_message_settle(sw_factor_message *m);
