/* agree.h - all ranks get a resource, or none. Thread rule: as comm.h. */
#ifndef SW_COMM_AGREE_H
#define SW_COMM_AGREE_H

#include "comm/comm.h"

/* Collective: exchange this rank's outcome `local`. It wants `size_bytes` of memory for "<noun>
 * '<label>'" ("arena") under the limit of its control group. SW_OK if every rank succeeded.
 * Otherwise all ranks return the same error: SW_E_MISMATCH if sizes differ, else SW_E_MEMORY with
 * the first failed rank and its *cause, or with the limit that the ranks together exceed. If `noun`
 * is NULL, it takes no memory, `cause` is the whole message, and its SW_E_OS stays one. */
SW_MUST_USE sw_status sw_agree(sw_comm *comm, const char *noun, const char *label,
                               size_t size_bytes, sw_status local, const sw_error *cause,
                               sw_error *err);

#endif
