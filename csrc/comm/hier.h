/* hier.h - a communicator over several hosts: shared memory inside each, a bridge across.
 *
 * Idea: ranks post operations as over shared memory alone. One rank of each host, its carrier, has
 * a thread that executes the operations that all ranks of the host have posted, in order. It folds
 * the host's contributions in rank order into partial sums and sends each host its slice of them.
 * It folds received sums in host order, and stores the result into the memory of its host's ranks.
 * No other rank works on it, and none waits before it must. See docs/design/hosts.md.
 *
 * Left out: memory of one host that another would have to map.
 *
 * Thread rule: one at a time a communicator, as comm.h. */
#ifndef SW_COMM_HIER_H
#define SW_COMM_HIER_H

#include "comm/bridge.h"
#include "comm/comm.h"

typedef struct sw_identity { /* names a rank and its host in messages */
    int32_t pid;
    char host[64]; /* zeros behind its end */
} sw_identity;

/* Collective over all hosts' ranks. `inside`: this host's ranks, joined (shm.h; local.h in tests);
 * owned from here on, also on failure. `host_of`: one host a rank, numbered by their lowest rank.
 * `own`: of this rank. `wire`: owned from here on, also on failure; NULL for one host, and on ranks
 * that are no carrier. Runs the first operation, an all_gather of identities: when it returns on
 * one rank, all ranks have joined. */
SW_MUST_USE sw_status sw_hier_comm_create(sw_comm *inside, int rank, int world_size,
                                          const int *host_of, const sw_identity *own,
                                          const sw_wire *wire, sw_comm **comm, sw_error *err);

/* Return the name of a host. */
const char *sw_hier_comm_host(const sw_comm *comm, int host);

const sw_host_map *sw_hier_comm_map(const sw_comm *comm);

/* Return the communicator of this host's ranks alone. */
const sw_comm *sw_hier_comm_inside(const sw_comm *comm);

#endif
