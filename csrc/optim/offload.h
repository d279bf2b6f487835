/* offload.h - a step over state that does not fit into memory.
 *
 * Idea: state in a state_file moves through three buffers: while one batch is stepped on, the next
 * is read and the one before is written, by a thread each. A batch is as many runs, or as long a
 * cut of one, as a buffer holds; an element's new value does not depend on where a run is cut, so
 * the bits are those of a step in memory. What is not in the file (parameters, gradients, copies)
 * is used where it lies.
 *
 * Thread rule: one at a time. The threads live as long as the call.
 */
#ifndef SW_OPTIM_OFFLOAD_H
#define SW_OPTIM_OFFLOAD_H

#include "kernels/optim_kernels.h"
#include "optim/state_file.h"

enum {
    SW_OFFLOAD_BUFFERS = 3,
    SW_OFFLOAD_LEAST_BUFFER_BYTES = 64 << 10, /* four arrays of float32, cut at pages */
};

typedef struct sw_offload {
    sw_state_file file;
    size_t buffer_bytes; /* of one of three */
    uint8_t *buffers;    /* owned; NULL before the first step */
} sw_offload;

/* What steps on a batch: sw_adam_step or sw_sgd_step behind their options. */
typedef sw_status sw_offload_step_fn(const void *options, const sw_optim_run *runs, size_t count,
                                     sw_error *err);

/* `buffer_bytes`: a multiple of SW_OFFLOAD_LEAST_BUFFER_BYTES. */
SW_MUST_USE sw_status sw_offload_init(sw_offload *offload, const char *folder, const char *label,
                                      size_t buffer_bytes, sw_error *err);
void sw_offload_fini(sw_offload *offload);

/* Steps on every run in order; arrays p, m, v and v_max that lie in the file, which begin on a page
 * of it, are read and written there, the mapping's view of them with it. The caller has checked
 * options and runs. Cost: each of those arrays read once and written once, in pieces of about a
 * buffer's size. Errors: SW_E_OS (a read or write failed; the first one counts), SW_E_MEMORY,
 * SW_E_INVALID (an array that begins inside a page). If by then a part of the state was stepped on,
 * it is neither old nor new: every later call fails with SW_E_STATE and the first sentence. */
SW_MUST_USE sw_status sw_offload_step(sw_offload *offload, sw_offload_step_fn *step,
                                      const void *options, const sw_optim_run *runs, size_t count,
                                      sw_error *err);

#endif
