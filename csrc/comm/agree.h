/* agree.h - all ranks get a resource, or none. Thread rule: as comm.h. */
#ifndef SW_COMM_AGREE_H
#define SW_COMM_AGREE_H

#include "comm/comm.h"

/* Collective: exchange the outcome `local` of this rank, which wants `size_bytes` of memory for
 * "<noun> '<label>'" ("arena") under the limit of its control group. SW_OK if every rank succeeded.
 * Otherwise all ranks return the same error: SW_E_MISMATCH if sizes differ, else SW_E_MEMORY. The
 * latter names the first rank that failed, with the message of its *cause, or the limit that ranks
 * exceed together. With a noun of NULL, `cause` is the whole message. */
SW_MUST_USE sw_status sw_agree(sw_comm *comm, const char *noun, const char *label,
                               size_t size_bytes, sw_status local, const sw_error *cause,
                               sw_error *err);

#endif
