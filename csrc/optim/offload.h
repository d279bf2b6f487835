/* offload.h - an optimizer step over state in a file.
 *
 * State in a state_file moves through three buffers. One thread reads the next batch and another
 * writes the previous one while the caller steps on the current one. A batch is as many runs, or as
 * long a cut of one run, as a buffer holds. An element's new value does not depend on where a run
 * is cut, so the bits are those of a step in memory. Arrays outside of the file (parameters,
 * gradients, copies) are used in place.
 *
 * Thread rule: one at a time. The threads live as long as the call.
 */
#pragma once

#include "kernels/optim_kernels.h"
#include "optim/state_file.h"
#include "platform/file_memory.h"

enum {
    SW_OFFLOAD_BUFFERS = 3,
    SW_OFFLOAD_LEAST_BUFFER_BYTES = 64 << 10, /* four arrays of float32, cut at pages */
};

typedef struct sw_offload {
    sw_state_file file;
    size_t buffer_bytes;        /* bytes of one of the three */
    uint8_t *buffers;           /* owned; NULL before the first step */
    const sw_file_memory *home; /* borrowed; NULL: none. A step writes the parameters in it back,
                                 * batch by batch, so that few of their pages are in memory */
} sw_offload;

/* Step on a batch: sw_adam_step or sw_sgd_step behind their options. */
typedef sw_status sw_offload_step_fn(const void *options, const sw_optim_run *runs, size_t count,
                                     sw_error *err);

/* Create the file. `buffer_bytes` is a multiple of SW_OFFLOAD_LEAST_BUFFER_BYTES. */
SW_MUST_USE sw_status sw_offload_init(sw_offload *offload, const char *folder, const char *label,
                                      size_t buffer_bytes, sw_error *err);
void sw_offload_fini(sw_offload *offload);

/* Step on every run in order. The arrays p, m, v and v_max may lie in the file and then begin on a
 * page of it. They are read and written there, and the mapping shows the new bytes. The caller has
 * checked options and runs. Cost: each of these arrays is read once and written once, about a
 * buffer at a time. Errors: SW_E_OS (the first read or write that failed), SW_E_MEMORY,
 * SW_E_INVALID (an array that begins inside a page). If an error comes after state has changed, the
 * state is invalid: every later call fails with SW_E_STATE and the first sentence. */
SW_MUST_USE sw_status sw_offload_step(sw_offload *offload, sw_offload_step_fn *step,
                                      const void *options, const sw_optim_run *runs, size_t count,
                                      sw_error *err);

/* Write [data, +size_bytes) to the file's pages at `address`, of the mapping, and read them back:
 * in requests of one buffer, whole pages each, through an aligned buffer where the file bypasses
 * the page cache. The last page's rest is undefined. One thread may write while another reads other
 * pages; a read follows the end of the first write. SW_E_OS, SW_E_MEMORY; SW_E_INVALID: pages
 * outside of the file. */
SW_MUST_USE sw_status sw_offload_store(sw_offload *offload, const void *address, const void *data,
                                       size_t size_bytes, sw_error *err);
SW_MUST_USE sw_status sw_offload_fetch(sw_offload *offload, const void *address, void *data,
                                       size_t size_bytes, sw_error *err);
