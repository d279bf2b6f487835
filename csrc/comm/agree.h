/* agree.h - what one rank cannot have, no rank has. Thread rule: as comm.h. */
#ifndef SW_COMM_AGREE_H
#define SW_COMM_AGREE_H

#include "comm/comm.h"

/* Collective: tells every rank how `local` ended here, which wants `size_bytes` of memory under the
 * control group's limit for "<noun> '<label>'" ("arena"). SW_OK where it is well on every rank;
 * else the same on all: SW_E_MISMATCH for sizes that differ, SW_E_MEMORY naming the first rank that
 * failed, with the message of its *cause, or the limit that ranks share and exceed together. A
 * noun of NULL: `cause` names all that by itself. */
SW_MUST_USE sw_status sw_agree(sw_comm *comm, const char *noun, const char *label,
                               size_t size_bytes, sw_status local, const sw_error *cause,
                               sw_error *err);

#endif
